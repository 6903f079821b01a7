"""How many matches are right, and how many of the right ones are found: pure functions of one pair, in numpy float64.

Every figure is a share of *one* pair; a benchmark then takes the mean or the median over its pairs. The share of
nothing is 0, as in glue-factory (``eval/utils.py``), so that a pair without matches counts against the matcher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vispe.geometry.depth import IGNORED, UNMATCHABLE
from vispe.geometry.homography import Array, as_matrix, as_points, warp_points
from vispe.metrics.auc import as_errors

CELLS = 1 << 20  # of the table of distances, looked at together: a few times 8 MiB, however many keypoints there are


def precision(errors: ArrayLike, thresholds: Sequence[float]) -> Array:
    """Share of the matches with an error *below* each threshold, in [0, 1], one a threshold; no matches are 0.

    ``errors [k]`` are non-negative, in the unit of the thresholds. With ``symmetric_transfer_error`` this is the
    precision of glue-factory's HPatches, with ``epipolar_distance_mean`` on normalised coordinates that of its
    MegaDepth, with ``epipolar_distance_squared_sum`` that of SuperGlue and LoFTR. An error of inf or nan is a wrong
    match. A negative error or a threshold that is not positive is a ``ValueError``.
    """
    found, limits = as_errors(errors, thresholds)
    return _share(found[None] < limits[:, None])


def accuracy(errors: ArrayLike, thresholds: Sequence[float]) -> Array:
    """Share of the matches with an error of *at most* each threshold: one pair's part of mean matching accuracy.

    D2-Net's ``hpatches_sequences`` notebook, with ``homography_residual`` (one way) in pixels of the original images.
    Everything else is as in :func:`precision`.
    """
    found, limits = as_errors(errors, thresholds)
    return _share(found[None] <= limits[:, None])


def homography_ground_truth(
    keypoints0: ArrayLike,
    keypoints1: ArrayLike,
    H: ArrayLike,  # noqa: N803
    *,
    positive: float = 3.0,
    negative: float = 3.0,
) -> NDArray[np.int64]:
    """The true partner of each keypoint of image 0 under ``H_0to1``: ``[m]`` indices of image 1, or -1, or -2.

    glue-factory's ``gt_matches_from_homography`` (``geometry/gt_generation.py``) with the thresholds of its
    ``homography_matcher``, in pixels. The distance of two keypoints is the *larger* of the forward one in image 1 and
    the backward one in image 0. Partners are nearest to each other, and closer than ``positive``. A keypoint is
    unmatchable (-1) if even the nearest keypoint of image 1 is farther than ``negative`` from where H takes it, by the
    forward distance alone; what is neither is ignored (-2). Between equally near ones the first wins. A point that goes
    to infinity is unmatchable. Where glue-factory adds 1e-5 to every denominator (0.006 pixels at x = 640), this does
    not.

    Memory does not grow with ``m n``. A keypoint that is not finite, an H without an inverse, or ``negative <
    positive`` is a ``ValueError``.
    """
    first, second = _finite(keypoints0, "keypoints0"), _finite(keypoints1, "keypoints1")
    if not 0 < positive <= negative < np.inf:
        raise ValueError(f"0 < positive <= negative is needed, got positive={positive}, negative={negative}")
    if not len(first) or not len(second):
        return np.full(len(first), UNMATCHABLE)
    matrix = as_matrix(H, "H")
    there, back = _warped(matrix, first), _warped(_inverse(matrix), second)
    partner, distance, forward = np.empty(len(first), dtype=np.int64), np.empty(len(first)), np.empty(len(first))
    chosen, closest = np.zeros(len(second), dtype=np.int64), np.full(len(second), np.inf)  # seen from image 1
    for start in range(0, len(first), step := max(1, CELLS // len(second))):
        rows = slice(start, start + step)
        table = _squared(there[rows], second)
        forward[rows] = table.min(1)
        np.maximum(table, _squared(first[rows], back), out=table)
        partner[rows], distance[rows] = table.argmin(1), table.min(1)
        nearest, near = table.argmin(0), table.min(0)
        better = near < closest  # strictly: the first of equals stays
        chosen[better], closest[better] = nearest[better] + start, near[better]
    mutual = chosen[partner] == np.arange(len(first))
    truth = np.where(mutual & (distance < positive**2), partner, IGNORED)
    return np.where(forward > negative**2, UNMATCHABLE, truth)


def judged(matches: ArrayLike, gt0: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which ``matches [k, 2]`` can be judged by ``gt0 [m]``, their keypoint of image 0 not being ignored, and which of
    those are right, both ``[k]``."""
    index0, index1, truth = _matches(matches, gt0)
    return truth[index0] != IGNORED, truth[index0] == index1


def match_precision(matches: ArrayLike, gt0: ArrayLike) -> float:
    """Share of the matches that are true, among those whose keypoint of image 0 is not ignored; of none it is 0.

    ``matches [k, 2]`` are index pairs and ``gt0 [m]`` is that of :func:`homography_ground_truth`; a match of an
    unmatchable keypoint is wrong. ``precision`` in glue-factory's ``eval/utils.py``, but for the 1e-8 it adds to the
    denominator.
    """
    known, right = judged(matches, gt0)
    return _ratio(int(right.sum()), int(known.sum()))


def match_recall(matches: ArrayLike, gt0: ArrayLike) -> float:
    """Share of the true matches of ``gt0 [m]`` that are among ``matches [k, 2]``; where there are none it is 0.

    ``recall`` in glue-factory's ``eval/utils.py``, but for the 1e-8 it adds to the denominator.
    """
    _, right = judged(matches, gt0)
    return _ratio(int(right.sum()), int((np.asarray(gt0) >= 0).sum()))


def precision_at_recall(scores: ArrayLike, right: ArrayLike, true: int, recall: float) -> float | None:
    """The precision where only as many of the surest matches are kept as ``recall`` takes; None if all are too few.

    ``scores [k]`` of matches, which of them are ``right [k]``, and how many ``true`` ones there are to find.
    """
    found = np.cumsum(np.asarray(right, dtype=bool)[np.argsort(-np.asarray(scores), kind="stable")])
    k = int(np.searchsorted(found, max(math.ceil(recall * true), 1)))
    return None if k == len(found) else float(found[k] / (k + 1))


def _share(right: NDArray[np.bool_]) -> Array:
    return np.asarray(right.sum(1) / max(right.shape[1], 1), dtype=np.float64)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _finite(keypoints: ArrayLike, name: str) -> Array:
    points = as_points(keypoints, name)
    if not np.isfinite(points).all():
        raise ValueError(f"{name} must be finite, got {points[~np.isfinite(points).all(1)][0].tolist()}")
    return points


def _inverse(H: Array) -> Array:  # noqa: N803
    try:
        return np.asarray(np.linalg.inv(H), dtype=np.float64)
    except np.linalg.LinAlgError:
        raise ValueError(f"H has no inverse: {H.tolist()}") from None


def _warped(H: Array, points: Array) -> Array:  # noqa: N803
    """Where H takes points; one that it takes nowhere is infinitely far from everything."""
    warped = warp_points(H, points)
    return np.where(np.isfinite(warped).all(1, keepdims=True), warped, np.inf)


def _squared(points: Array, others: Array) -> Array:
    """Squared distances ``[m, n]``, by differences: the product form would lose the digits that ties depend on."""
    with np.errstate(over="ignore"):
        table = (points[:, 0, None] - others[None, :, 0]) ** 2
        across = points[:, 1, None] - others[None, :, 1]
        across *= across
        table += across
    return table


def _matches(matches: ArrayLike, gt0: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    pairs, truth = np.asarray(matches), np.asarray(gt0)
    if truth.ndim != 1 or (truth.size and (not np.issubdtype(truth.dtype, np.integer) or truth.min() < IGNORED)):
        raise ValueError(f"gt0 must be [m] indices, -1 or -2, got {truth.dtype} of shape {truth.shape}")
    if not pairs.size:
        pairs = np.zeros((0, 2), dtype=np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not np.issubdtype(pairs.dtype, np.integer):
        raise ValueError(f"matches must be [k, 2] index pairs, got {pairs.dtype} of shape {pairs.shape}")
    index0, index1 = pairs.astype(np.int64).T
    if len(pairs) and not (index0.min() >= 0 and index0.max() < len(truth) and index1.min() >= 0):
        raise ValueError(f"matches point outside {len(truth)} keypoints of image 0, or below 0: {pairs.min(0)}")
    if len(np.unique(index0)) < len(index0):
        raise ValueError("a keypoint of image 0 is matched more than once")
    return index0, index1, truth.astype(np.int64)
