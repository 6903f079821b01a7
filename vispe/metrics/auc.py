"""Area under the recall curve of an error, the headline number of matching benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def error_auc(errors: ArrayLike, thresholds: Sequence[float]) -> NDArray[np.float64]:
    """AUC of the recall curve up to each threshold, in [0, 1], one a threshold.

    SuperGlue's ``pose_auc`` (``models/utils.py``), the same as glue-factory's ``cal_error_auc``: the curve runs
    *linearly* through (0, 0) and (e_i, i / n) over the sorted errors below t (strictly), then level to t; its area is
    divided by t. ``errors [n]`` are non-negative; a failed pair is inf. A nan counts as a failure too, with a
    ``RuntimeWarning``, as a failure should have been inf. Nothing measured is nan for every threshold. A negative
    error or a threshold that is not positive is a ``ValueError``.
    """
    found, limits = np.asarray(errors, dtype=np.float64), np.asarray(thresholds, dtype=np.float64)
    if found.ndim != 1 or limits.ndim != 1:
        raise ValueError(f"errors and thresholds are lists of numbers, got shapes {found.shape} and {limits.shape}")
    if (found < 0).any():
        raise ValueError(f"errors must not be negative, got {found.min()}")
    if not ((limits > 0) & (limits < np.inf)).all():
        raise ValueError(f"thresholds must be positive and finite, got {list(thresholds)}")
    if not len(found):
        return np.full(len(limits), np.nan)
    if missing := int(np.isnan(found).sum()):
        warnings.warn(f"{missing} of {len(found)} errors are nan: counted as failures", RuntimeWarning, stacklevel=2)
    ordered = np.sort(np.where(np.isnan(found), np.inf, found))
    return np.array([_area(ordered, limit) for limit in limits])


def _area(ordered: NDArray[np.float64], limit: float) -> float:
    below = int(np.searchsorted(ordered, limit))  # "left": an error equal to the limit is out
    error = np.concatenate([[0.0], ordered[:below], [limit]])
    recall = np.append(np.arange(below + 1), below) / len(ordered)
    return float((np.diff(error) * (recall[1:] + recall[:-1]) / 2).sum() / limit)
