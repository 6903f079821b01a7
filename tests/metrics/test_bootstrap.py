"""Intervals of the AUC: what must hold of any bootstrap, and what can be counted by hand."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vispe.metrics.auc import error_auc
from vispe.metrics.bootstrap import auc_difference_interval, auc_interval

INF = float("inf")
ERRORS = st.lists(st.one_of(st.floats(0, 30), st.just(INF)), min_size=1, max_size=40)
THRESHOLDS = [1.0, 5.0, 20.0]


def failing(n: int, seed: int = 0) -> np.ndarray:
    """Pose errors as they are: most are small, some huge, a tenth failed."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n) < 0.1, np.inf, rng.exponential(6, n))


@settings(max_examples=30)
@given(ERRORS)
def test_the_interval_contains_the_estimate(errors: list[float]) -> None:
    low, high = auc_interval(errors, THRESHOLDS, samples=400)
    estimate = error_auc(errors, THRESHOLDS)
    assert low.shape == high.shape == (3,)
    assert (low - 1e-12 <= estimate).all()
    assert (estimate <= high + 1e-12).all()
    assert (low >= 0).all()
    assert (high <= 1).all()


def test_one_pair_or_equal_pairs_leave_nothing_to_chance() -> None:
    for errors in ([2.0], [INF], [0.0] * 7, [INF] * 7):
        low, high = auc_interval(errors, THRESHOLDS)
        np.testing.assert_allclose(low, error_auc(errors, THRESHOLDS), atol=1e-15)
        np.testing.assert_array_equal(low, high)


def test_two_pairs_by_hand() -> None:
    # 0 and inf: both zero (1/4), one of each (1/2), both inf (1/4). The outer quarters hold the 2.5 % and 97.5 %
    # points; with level 0.4 the 30 % and 70 % points are in the middle half.
    low, high = auc_interval([0.0, INF], [5], samples=4000)
    assert (low[0], high[0]) == (0, 1)
    low, high = auc_interval([0.0, INF], [5], samples=4000, level=0.4)
    assert (low[0], high[0]) == (0.5, 0.5)


def test_the_interval_of_a_small_list_is_that_of_all_its_resamples() -> None:
    """Four errors have 256 resamples: the interval's ends are the quantiles of all of them, each by ``error_auc``."""
    errors = [0.5, 2.0, 7.0, INF]
    every = np.array([error_auc(drawn, [5]) for drawn in itertools.product(errors, repeat=4)])[:, 0]
    low, high = auc_interval(errors, [5], samples=200_000, level=0.8)
    assert low[0] == pytest.approx(np.quantile(every, 0.1), abs=1e-12)
    assert high[0] == pytest.approx(np.quantile(every, 0.9), abs=1e-12)


def test_the_standard_error_is_that_of_a_mean() -> None:
    # Errors of 0 or inf make the AUC the share of zeros: +-1.96 sqrt(p (1 - p) / n) by the normal approximation.
    errors = np.where(np.arange(400) < 240, 0.0, np.inf)
    low, high = auc_interval(errors, [5], samples=4000)
    half = 1.96 * np.sqrt(0.6 * 0.4 / 400)
    assert low[0] == pytest.approx(0.6 - half, abs=0.006)
    assert high[0] == pytest.approx(0.6 + half, abs=0.006)


def test_more_pairs_make_it_narrower() -> None:
    few, many = (np.subtract(*auc_interval(np.tile(failing(60), times), THRESHOLDS)[::-1]) for times in (1, 16))
    assert (many < few).all()
    np.testing.assert_allclose(many, few / 4, rtol=0.3)


def test_a_lower_level_makes_it_narrower() -> None:
    wide, narrow = (auc_interval(failing(60), THRESHOLDS, level=level) for level in (0.99, 0.5))
    assert (wide[0] < narrow[0]).all()
    assert (narrow[1] < wide[1]).all()


@settings(max_examples=20)
@given(ERRORS, st.randoms(use_true_random=False))
def test_the_order_of_the_pairs_changes_not_a_bit(errors: list[float], random: object) -> None:
    other = [0.5 * error for error in errors][::-1]
    rows = list(zip(errors, other, strict=True))
    random.shuffle(rows)  # type: ignore[attr-defined]
    for before, after in (
        (auc_interval(errors, [5], samples=50), auc_interval([a for a, _ in rows], [5], samples=50)),
        (
            auc_difference_interval(errors, other, [5], samples=50),
            auc_difference_interval([a for a, _ in rows], [b for _, b in rows], [5], samples=50),
        ),
    ):
        np.testing.assert_array_equal(before, after)


def test_the_seed_decides() -> None:
    first, again, other = (auc_interval(failing(50), THRESHOLDS, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (np.array(first) != np.array(other)).any()


# Differences


@settings(max_examples=20)
@given(ERRORS)
def test_a_run_differs_from_itself_by_exactly_nothing(errors: list[float]) -> None:
    low, high = auc_difference_interval(errors, errors, THRESHOLDS, samples=100)
    np.testing.assert_array_equal(low, [0, 0, 0])
    np.testing.assert_array_equal(high, [0, 0, 0])


def test_pairing_shows_what_single_intervals_hide() -> None:
    errors = failing(300)
    better = errors * 0.9  # every pair a little better
    single, other = auc_interval(errors, [10]), auc_interval(better, [10])
    assert other[0][0] < single[1][0]  # the two intervals overlap
    low, high = auc_difference_interval(better, errors, [10])
    assert low[0] > 0
    estimate = error_auc(better, [10]) - error_auc(errors, [10])
    assert low[0] < estimate[0] < high[0]


def test_the_difference_turns_with_its_runs() -> None:
    a, b = failing(80, 1), failing(80, 2)
    low, high = auc_difference_interval(a, b, THRESHOLDS, samples=20_000)
    turned = auc_difference_interval(b, a, THRESHOLDS, samples=20_000)
    np.testing.assert_allclose(turned[0], -high, atol=0.01)
    np.testing.assert_allclose(turned[1], -low, atol=0.01)


# Edges


def test_nothing_measured_is_nan_and_nan_a_failure() -> None:
    for interval in (auc_interval([], THRESHOLDS), auc_difference_interval([], [], THRESHOLDS)):
        assert np.isnan(interval).all()
        assert np.shape(interval) == (2, 3)
    with pytest.warns(RuntimeWarning, match="1 of 2 errors are nan"):
        found = auc_interval([float("nan"), 0.5], [5])
    np.testing.assert_array_equal(found, auc_interval([INF, 0.5], [5]))


def test_mistakes_name_what_was_received() -> None:
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        auc_interval([1.0], [5], samples=0)
    with pytest.raises(ValueError, match=r"level must be in \(0, 1\), got 95"):
        auc_interval([1.0], [5], level=95)
    with pytest.raises(ValueError, match="got 2 and 1"):
        auc_difference_interval([1.0, 2.0], [1.0], [5])
    with pytest.raises(ValueError, match=r"-1\.0"):
        auc_interval([-1.0], [5])


def test_memory_does_not_grow_with_the_samples() -> None:
    errors = failing(1500)
    tracemalloc.start()
    auc_difference_interval(errors, errors[::-1], THRESHOLDS, samples=2000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20  # all resamples at once would be 1500 x 2000 x 8 bytes, several times
