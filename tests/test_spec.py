"""Knobs are declared once, and a name that was not declared is an error."""

import dataclasses

import pytest

from vispe.spec import Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(Spec):
    width: int
    depth: int = 2

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")


def test_a_spec_is_built_from_names():
    assert Small.names() == ("width", "depth")
    assert Small.of(width=3) == Small(width=3, depth=2)
    assert Small(width=3).but(depth=5) == Small(width=3, depth=5)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"Small has no 'dept', 'widht'; it has width, depth"):
        Small.of(widht=3, dept=1)
    with pytest.raises(ValueError, match=r"Small has no 'dept'; it has width, depth"):
        Small(width=3).but(dept=1)


def test_changed_specs_are_checked_again():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Small(width=3).but(depth=0)


def test_specs_do_not_change():
    spec = Small(width=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.width = 4
    with pytest.raises(TypeError):
        Small(3)
    assert hash(spec) == hash(Small(width=3))
