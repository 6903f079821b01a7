"""The one rule of sizes after resizing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.data.sizes import resized


@pytest.mark.parametrize(
    ("h", "w", "size", "side", "wanted"),
    [
        (640, 800, 480, "short", (480, 600)),
        (800, 640, 480, "short", (600, 480)),
        (700, 1000, 480, "short", (480, 685)),  # 685.7 is rounded down
        (700, 1000, 1600, "long", (1120, 1600)),
        (640, 640, 480, "short", (480, 480)),
        (4, 2000, 100, "long", (1, 100)),  # not to nothing
        (123, 456, (480, 640), "exact", (480, 640)),
    ],
)
def test_sizes(h, w, size, side, wanted):
    assert resized(h, w, size, side) == wanted


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(["long", "short"]))
def test_the_named_side_is_as_asked(h, w, size, side):
    new = resized(h, w, size, side)
    assert (max if side == "long" else min)((h, new[0]), (w, new[1]))[1] == size or h == w
    assert min(new) >= 1


@pytest.mark.parametrize(("size", "side"), [(0, "long"), (1.5, "short"), ((3, 4), "long"), (3, "exact"), (5, "wide")])
def test_what_is_no_size_is_refused(size, side):
    with pytest.raises(ValueError, match=r"size is one positive int|side is"):
        resized(10, 10, size, side)
