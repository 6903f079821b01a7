"""Area under the recall curve of an error, the headline number of matching benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def error_auc(errors: ArrayLike, thresholds: Sequence[float]) -> Array:
    """AUC of the recall curve up to each threshold, in [0, 1], one a threshold.

    SuperGlue's ``pose_auc`` (``models/utils.py``), the same as glue-factory's ``cal_error_auc``: the curve runs
    *linearly* through (0, 0) and (e_i, i / n) over the sorted errors below t (strictly), then level to t; its area is
    divided by t. ``errors [n]`` are non-negative; a failed pair is inf. A nan counts as a failure too, with a
    ``RuntimeWarning``, as a failure should have been inf. Nothing measured is nan for every threshold. A negative
    error or a threshold that is not positive is a ``ValueError``.
    """
    found, limits = as_errors(errors, thresholds)
    if not len(found):
        return np.full(len(limits), np.nan)
    ordered = np.sort(nan_as_failure(found))  # so that the order of the pairs does not even change the last bit
    return np.array([recall_area(ordered, limit) for limit in limits])


def as_errors(errors: ArrayLike, thresholds: Sequence[float]) -> tuple[Array, Array]:
    """``errors [n]`` and thresholds as float64; mistakes are those of :func:`error_auc`."""
    found, limits = np.asarray(errors, dtype=np.float64), np.asarray(thresholds, dtype=np.float64)
    if found.ndim != 1 or limits.ndim != 1:
        raise ValueError(f"errors and thresholds are lists of numbers, got shapes {found.shape} and {limits.shape}")
    if (found < 0).any():
        raise ValueError(f"errors must not be negative, got {found.min()}")
    if not ((limits > 0) & (limits < np.inf)).all():
        raise ValueError(f"thresholds must be positive and finite, got {list(thresholds)}")
    return found, limits


def nan_as_failure(errors: Array) -> Array:
    """inf for nan, with a ``RuntimeWarning`` at the line that called the caller."""
    missing = np.isnan(errors)
    if missing.any():
        message = f"{missing.sum()} of {len(errors)} errors are nan: counted as failures"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return np.where(missing, np.inf, errors)


def recall_area(errors: Array, limit: float) -> Array:
    """The area of :func:`error_auc` over t, of each list in ``errors [..., n]`` in any order, ``[...]``.

    The trapezoids add up to ``(sum of (t - e) + max e / 2) / (n t)`` over the errors below t: the area under the
    steps, and the triangles that linear interpolation adds to it.
    """
    below = errors < limit
    steps = np.where(below, limit - errors, 0.0).sum(-1)
    return (steps + np.where(below, errors, 0.0).max(-1) / 2) / (limit * errors.shape[-1])
