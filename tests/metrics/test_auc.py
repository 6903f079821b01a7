"""The AUC against values worked out by hand and those measured on SuperGlue's and glue-factory's functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.metrics.auc import error_auc, recall_area

ERRORS = st.lists(st.one_of(st.floats(0, 100), st.just(float("inf"))), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("errors", "thresholds", "expected"),
    [
        ([0.0], [1, 3, 5], [1, 1, 1]),
        ([float("inf")], [1, 3, 5], [0, 0, 0]),
        ([0.5], [1, 3, 5], [0.75, 11 / 12, 0.95]),  # a triangle of 0.25 and a rectangle of t - 0.5, over t
        ([1, 2, 3, 4, 5], [1, 3, 5], [0, 0.8 / 3, 0.48]),  # an error equal to the threshold is out
        ([5, 3, 1, 4, 2], [1, 3, 5], [0, 0.8 / 3, 0.48]),
        ([0.0, float("inf")], [2], [0.5]),
    ],
)
def test_values_by_hand(errors: list[float], thresholds: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(error_auc(errors, thresholds), expected, atol=1e-12)


def test_nothing_measured_is_nan_for_every_threshold() -> None:
    assert error_auc([], [1, 3, 5]).shape == (3,)
    assert np.isnan(error_auc([], [1, 3, 5])).all()
    assert error_auc([1.0], []).shape == (0,)


def test_nan_is_a_failure_and_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="1 of 2 errors are nan"):
        found = error_auc([float("nan"), 0.5], [1, 5])
    np.testing.assert_array_equal(found, error_auc([float("inf"), 0.5], [1, 5]))


@pytest.mark.parametrize(
    ("errors", "thresholds", "received"),
    [
        ([1.0, -0.25], [1], "-0.25"),
        ([1.0], [0], r"\[0\]"),
        ([1.0], [5, -1], r"-1"),
        ([1.0], [float("nan")], "nan"),
        ([1.0], [float("inf")], "inf"),
        ([[1.0]], [1], r"\(1, 1\)"),
    ],
)
def test_mistakes_name_what_was_received(errors: list, thresholds: list[float], received: str) -> None:
    with pytest.raises(ValueError, match=received):
        error_auc(errors, thresholds)


@given(ERRORS, st.floats(0.1, 50))
def test_between_zero_and_one_whatever_the_order(errors: list[float], threshold: float) -> None:
    value = error_auc(errors, [threshold])
    assert 0 <= value[0] <= 1
    np.testing.assert_allclose(error_auc(errors[::-1], [threshold]), value, atol=1e-12)


@given(ERRORS, st.floats(0.1, 50), st.floats(0.01, 100))
def test_the_unit_does_not_matter(errors: list[float], threshold: float, unit: float) -> None:
    if any(abs(error - threshold) < 1e-9 for error in errors):
        return
    scaled = error_auc([error * unit for error in errors], [threshold * unit])
    np.testing.assert_allclose(scaled, error_auc(errors, [threshold]), atol=1e-9)


@given(ERRORS, st.floats(0.1, 50))
def test_one_failure_more_scales_by_the_count(errors: list[float], threshold: float) -> None:
    n = len(errors)
    expected = error_auc(errors, [threshold]) * n / (n + 1)
    np.testing.assert_allclose(error_auc([*errors, float("inf")], [threshold]), expected, atol=1e-12)


@given(st.lists(ERRORS.filter(lambda errors: len(errors) >= 5).map(lambda errors: errors[:5]), min_size=1, max_size=4))
def test_the_area_is_that_of_the_trapezoids(lists: list[list[float]]) -> None:
    """The curve through (0, 0) and (e_i, i / n), then level to the limit, for several lists at once."""
    expected = []
    for errors in lists:
        below = sorted(error for error in errors if error < 10)
        x, y = [0.0, *below, 10.0], [*(i / 5 for i in range(len(below) + 1)), len(below) / 5]
        expected.append(sum((x[i + 1] - x[i]) * (y[i + 1] + y[i]) / 2 for i in range(len(x) - 1)) / 10)
    np.testing.assert_allclose(recall_area(np.array(lists), 10.0), expected, atol=1e-12)
