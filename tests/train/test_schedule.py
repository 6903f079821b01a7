"""The schedule, worked by hand."""

import math

import pytest

from vispe.train.schedule import factor, linear


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (0, 0.25),
        (1, 0.5),
        (2, 0.75),
        (3, 1.0),
        (4, 1.0),
        (6, 0.55 + 0.45 * math.sqrt(0.5)),
        (8, 0.55),
        (12, 0.1),
        (99, 0.1),
    ],
)
def test_by_hand(update, expected):
    """Four updates of warm-up, then eight of cosine from 1 to 0.1."""
    assert math.isclose(factor(update, warmup=4, total=12, final=0.1), expected)


def test_without_warmup_it_begins_at_the_top():
    assert factor(0, warmup=0, total=10, final=0.0) == 1.0
    assert math.isclose(factor(5, warmup=0, total=10, final=0.0), 0.5)


def test_warmup_may_be_all_there_is():
    assert factor(9, warmup=10, total=10, final=0.0) == 1.0


def test_a_line():
    """Half of two updates, all of it, then from 1 to 0.2 over four."""
    seen = [linear(update, warmup=2, total=6, final=0.2) for update in range(8)]
    assert seen == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
