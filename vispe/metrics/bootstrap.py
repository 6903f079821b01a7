"""How much of an AUC, or of the difference of two, is the luck of which pairs were measured.

A percentile bootstrap over pairs (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13): the pairs are
drawn again with replacement, as many as there are, and the middle of the resampled values is the interval. It says
nothing of pairs that resemble each other (one scene, one sequence): there the true interval is wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from vispe.metrics.auc import Array, as_errors, nan_as_failure, recall_area

CELLS = 1 << 18  # errors drawn at a time: some 10 MiB in flight, however many samples are asked for


def auc_interval(
    errors: ArrayLike, thresholds: Sequence[float], *, samples: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[Array, Array]:
    """``(low, high)`` of :func:`error_auc`, each one a threshold: the middle ``level`` of the resampled values.

    The same errors in any order and the same seed give the same interval. Nothing measured is nan for every
    threshold. Mistakes in the errors and thresholds are those of ``error_auc``.
    """
    found, limits = as_errors(errors, thresholds)
    return _interval([np.sort(nan_as_failure(found))], limits, samples, level, seed)


def auc_difference_interval(
    errors_a: ArrayLike,
    errors_b: ArrayLike,
    thresholds: Sequence[float],
    *,
    samples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[Array, Array]:
    """``(low, high)`` of ``error_auc(a) - error_auc(b)``, of two runs over the *same* pairs, row by row.

    Both runs are resampled by the same pairs, so that what makes a pair hard for both cancels out. Zero outside the
    interval says that the runs differ. Lists of unequal length are a ``ValueError``.
    """
    (first, limits), (second, _) = as_errors(errors_a, thresholds), as_errors(errors_b, thresholds)
    if len(first) != len(second):
        raise ValueError(f"errors_a and errors_b are of the same pairs, got {len(first)} and {len(second)} of them")
    first, second = nan_as_failure(first), nan_as_failure(second)
    order = np.lexsort((second, first))
    return _interval([first[order], second[order]], limits, samples, level, seed)


def _interval(runs: list[Array], limits: Array, samples: int, level: float, seed: int) -> tuple[Array, Array]:
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    if not len(runs[0]):
        return np.full(len(limits), np.nan), np.full(len(limits), np.nan)
    drawn = _resampled(runs, limits, samples, seed)
    values = drawn[0] if len(runs) == 1 else drawn[0] - drawn[1]
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def _resampled(runs: list[Array], limits: Array, samples: int, seed: int) -> Array:
    """The AUC of every resample, ``[run, sample, threshold]``."""
    n, rng = len(runs[0]), np.random.default_rng(seed)
    values = np.empty((len(runs), samples, len(limits)))
    for start in range(0, samples, step := max(1, CELLS // n)):
        rows = slice(start, min(start + step, samples))
        pairs = rng.integers(n, size=(rows.stop - rows.start, n))
        for run, errors in enumerate(runs):
            drawn = errors[pairs]
            for column, limit in enumerate(limits):
                values[run, rows, column] = recall_area(drawn, limit)
    return values
