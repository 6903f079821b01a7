"""Spec: the one place where a model's knobs are declared.

Every model has a frozen, keyword-only dataclass beside its class. A Spec is built from names and refuses names it
does not know, so that a typo in a recipe or on the command line is an error and never a silent default.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Base of all specs. Subclasses are ``@dataclass(frozen=True, kw_only=True)`` and validate in ``__post_init__``."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The knobs of this spec, in the order of declaration."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def of(cls, **knobs: Any) -> Self:
        """Build from names; a ``ValueError`` names every unknown knob and lists the known ones."""
        return cls(**cls._known(knobs))

    def but(self, **knobs: Any) -> Self:
        """A copy with some knobs changed; unknown knobs are refused as in :meth:`of`."""
        return dataclasses.replace(self, **self._known(knobs))

    @classmethod
    def _known(cls, knobs: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(knobs) - set(cls.names()))
        if unknown:
            raise ValueError(f"{cls.__name__} has no {', '.join(map(repr, unknown))}; it has {', '.join(cls.names())}")
        return knobs
