"""Homography and pose from matches, exactly as published evaluation code calls the libraries.

:func:`vispe.geometry.robust.estimate` gives three libraries one meaning. Published figures have none: they are bare
calls, with each library's own options, residual and inliers, and are only comparable with the very same calls. Those of
glue-factory are here (``robust_estimators/``, ``eval/utils.py``); its pose by OpenCV is also SuperGlue's and LoFTR's.
Only failure is made one thing: too few matches, an exception, None, no inliers or a matrix that is not finite is
"nothing found", where the published code at times measures uninitialised memory.

Every estimate depends on its arguments alone. OpenCV's RANSAC seeds itself anew in every call, untouched by
``cv2.setRNGSeed``; PoseLib takes a seed, 0 in published code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vispe.geometry.homography import Array, as_matrix, as_pairs, homogeneous, normalise_homography

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimate:
    """``matrix`` is ``H_0to1``, or ``rotation`` and ``translation`` are ``T_0to1``; all are None if nothing was found.

    ``inliers [k]`` are those that the library counted (all matches for the DLT), all False if nothing was found.
    """

    inliers: Mask
    matrix: Array | None = None
    rotation: Array | None = None
    translation: Array | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a model."""
        return self.matrix is not None or self.rotation is not None

    @property
    def num_inliers(self) -> int:
        """How many matches are inliers."""
        return int(self.inliers.sum())


# Homographies


def homography_dlt(points0: ArrayLike, points1: ArrayLike, weights: ArrayLike | None = None) -> Estimate:
    """The weighted DLT of all matches, without RANSAC: ``find_homography_dlt`` of kornia 0.6.8 to 0.8.3.

    ``weights [k]`` (the match scores) multiply the squared algebraic residuals between points that are centred and
    scaled to a mean distance of sqrt(2) *without* the weights (kornia 0.9 weighs here too). The solution is that of
    ``A^T W A h = 1``, kornia's default "lu": one step of inverse iteration towards the singular vector of the
    textbook, close to it only where the matches fit well (and never where h sums to 0, as of a turn by 120 degrees),
    but it is what the published figures are made of. Fewer than 4 matches or coincident ones give nothing; collinear
    ones a matrix without meaning.
    """
    first, second = as_pairs(points0, points1)
    scores = np.ones(len(first)) if weights is None else np.asarray(weights, dtype=np.float64)
    if scores.shape != (len(first),) or not (np.isfinite(scores) & (scores >= 0)).all():
        raise ValueError(f"weights must be {len(first)} numbers, finite and not negative, got {weights!r}")
    if len(first) < 4:
        return _nothing(first)
    with np.errstate(all="ignore"):
        (a, to_a), (b, to_b) = _centred(first), _centred(second)
        rows = np.zeros((len(first), 2, 9))
        rows[:, 0, 3:6], rows[:, 0, 6:] = -a, b[:, 1, None] * a
        rows[:, 1, :3], rows[:, 1, 6:] = a, -b[:, 0, None] * a
        flat = rows.reshape(-1, 9)
        solution = _smallest(flat.T * np.repeat(scores, 2) @ flat)
        if not np.isfinite(solution).all():
            return _nothing(first)
        matrix = np.linalg.inv(to_b) @ solution.reshape(3, 3) @ to_a
    return _homography(first, matrix, np.ones(len(first), dtype=bool))


def homography_opencv(points0: ArrayLike, points1: ArrayLike, threshold: float) -> Estimate:
    """``cv2.findHomography`` by RANSAC: 3000 iterations, confidence 0.995, ``threshold`` pixels of image 1."""
    import cv2

    first, second = as_pairs(points0, points1)
    limit = _positive(threshold)
    try:
        matrix, mask = cv2.findHomography(first, second, cv2.RANSAC, limit, maxIters=3000, confidence=0.995)
    except cv2.error:  # fewer than 4 matches
        return _nothing(first)
    return _nothing(first) if matrix is None else _homography(first, matrix, mask.ravel() > 0)


def homography_poselib(points0: ArrayLike, points1: ArrayLike, threshold: float, *, seed: int = 0) -> Estimate:
    """``poselib.estimate_homography`` (LO-RANSAC) with its own options but the ``threshold`` in pixels."""
    import poselib

    first, second = as_pairs(points0, points1)
    options = {"max_reproj_error": _positive(threshold), "seed": _seed(seed)}
    if len(first) < 4:
        return _nothing(first)
    matrix, info = poselib.estimate_homography(first, second, options)
    if not info["num_inliers"]:
        return _nothing(first)
    return _homography(first, matrix, np.array(info["inliers"], dtype=bool))


# Poses


def pose_opencv(
    points0: ArrayLike,
    points1: ArrayLike,
    K0: ArrayLike,  # noqa: N803
    K1: ArrayLike,  # noqa: N803
    threshold: float,
) -> Estimate:
    """``cv2.findEssentialMat`` by RANSAC on normalised points, then ``cv2.recoverPose``.

    The ``threshold`` in pixels is divided by the mean of the four focal lengths, as in glue-factory (SuperGlue and
    LoFTR take K0's fx and K1's fy twice); confidence 0.99999, OpenCV's 1000 iterations. Of several E's (from exactly
    five matches) the one with most points in front of both cameras is taken, the first of equals; those points are
    the inliers. Fewer than 5 matches give nothing.

    A point farther than 50 baselines is behind the cameras for OpenCV, and a pair with only such points fails. The
    published code does pass a distance of 1e9, but as a positional argument that OpenCV takes for the output R, so that
    the limit stays at its default; so it is here.
    """
    import cv2

    first, second = as_pairs(points0, points1)
    (focal0, centre0), (focal1, centre1) = _pinhole(K0, "K0"), _pinhole(K1, "K1")
    limit = _positive(threshold) / float(np.mean([focal0, focal1]))
    if len(first) < 5:
        return _nothing(first)
    rays0, rays1, eye = (first - centre0) / focal0, (second - centre1) / focal1, np.eye(3)
    found, most = _nothing(first), 0
    try:
        stacked, mask = cv2.findEssentialMat(rays0, rays1, eye, method=cv2.RANSAC, prob=0.99999, threshold=limit)
        for matrix in [] if stacked is None else stacked.reshape(-1, 3, 3):
            # The mask goes in and out: a later E only sees the points that an earlier one left, as in published loops.
            count, rotation, translation, mask = cv2.recoverPose(matrix, rays0, rays1, eye, mask=mask)
            if count > most:
                found, most = _pose(first, rotation, translation, mask.ravel() > 0), count
    except cv2.error:
        return _nothing(first)
    return found


def pose_poselib(
    points0: ArrayLike,
    points1: ArrayLike,
    K0: ArrayLike,  # noqa: N803
    K1: ArrayLike,  # noqa: N803
    threshold: float,
    *,
    seed: int = 0,
) -> Estimate:
    """``poselib.estimate_relative_pose`` (LO-RANSAC) with its own options but the ``threshold`` in pixels.

    The threshold is of the Sampson distance. The zero translation that PoseLib gives to fewer than 5 matches, or
    where it finds no inliers, is nothing found.
    """
    import poselib

    first, second = as_pairs(points0, points1)
    cameras = [_poselib_camera(*_pinhole(K, name)) for K, name in ((K0, "K0"), (K1, "K1"))]
    options = {"max_epipolar_error": _positive(threshold), "seed": _seed(seed)}
    if len(first) < 5:
        return _nothing(first)
    pose, info = poselib.estimate_relative_pose(first, second, *cameras, options)
    if not info["num_inliers"]:
        return _nothing(first)
    return _pose(first, pose.R, pose.t, np.array(info["inliers"], dtype=bool))


HOMOGRAPHY: dict[str, Callable[[ArrayLike, ArrayLike, float | None, ArrayLike | None], Estimate]] = {
    "poselib": lambda points0, points1, threshold, scores: homography_poselib(points0, points1, _given(threshold)),
    "opencv": lambda points0, points1, threshold, scores: homography_opencv(points0, points1, _given(threshold)),
    "dlt": lambda points0, points1, threshold, scores: homography_dlt(points0, points1, scores),
}
"""``(points0, points1, threshold, scores) -> Estimate``: the DLT has no threshold, the others look at no scores."""

POSE: dict[str, Callable[[ArrayLike, ArrayLike, ArrayLike, ArrayLike, float], Estimate]] = {
    "poselib": pose_poselib,
    "opencv": pose_opencv,
}
"""``(points0, points1, K0, K1, threshold) -> Estimate``."""


# What they share


def _nothing(points: Array) -> Estimate:
    return Estimate(inliers=np.zeros(len(points), dtype=bool))


def _homography(points: Array, H: ArrayLike, inliers: Mask) -> Estimate:  # noqa: N803
    matrix = np.array(H, dtype=np.float64)
    if not np.isfinite(matrix).all() or not matrix.any():
        return _nothing(points)
    return Estimate(matrix=normalise_homography(matrix), inliers=inliers)


def _pose(points: Array, rotation: ArrayLike, translation: ArrayLike, inliers: Mask) -> Estimate:
    R, t = np.array(rotation, dtype=np.float64), np.array(translation, dtype=np.float64).ravel()  # noqa: N806
    if not (np.isfinite(R).all() and np.isfinite(t).all() and t.any()):
        return _nothing(points)
    return Estimate(rotation=R, translation=t, inliers=inliers)


def _centred(points: Array) -> tuple[Array, Array]:
    """Points ``[k, 3]`` about their mean, at a mean distance of sqrt(2), and the similarity that moved them there."""
    mean = points.mean(0)
    scale = np.sqrt(2) / (np.hypot(*(points - mean).T).mean() + 1e-8)
    transform = np.array([[scale, 0, -scale * mean[0]], [0, scale, -scale * mean[1]], [0, 0, 1]])
    return homogeneous((points - mean) * scale), transform


def _smallest(normal: Array) -> Array:
    """The solution of ``normal h = 1``; if there is none the null vector, if that is unique."""
    if not np.isfinite(normal).all():
        return np.full(9, np.nan)
    try:
        return np.asarray(np.linalg.solve(normal, np.ones(9)), dtype=np.float64)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(normal)
        return vectors[:, 0] if values[1] > 1e-8 * values[8] else np.full(9, np.nan)


def _pinhole(K: ArrayLike, name: str) -> tuple[Array, Array]:  # noqa: N803
    """``(fx, fy)`` and ``(cx, cy)`` of a K without skew."""
    matrix = as_matrix(K, name)
    focal, centre = matrix[[0, 1], [0, 1]], matrix[:2, 2]
    upright = np.array_equal(matrix, [[focal[0], 0, centre[0]], [0, focal[1], centre[1]], [0, 0, 1]])
    if not (upright and np.isfinite(matrix).all() and (focal > 0).all()):
        raise ValueError(f"{name} must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] and finite, got {matrix.tolist()}")
    return focal, centre


def _poselib_camera(focal: Array, centre: Array) -> dict[str, Any]:
    width, height = (int(2 * c) for c in centre)  # glue-factory's; a pinhole does not look at them
    return {"model": "PINHOLE", "width": width, "height": height, "params": [*focal.tolist(), *centre.tolist()]}


def _positive(threshold: float) -> float:
    if not 0 < threshold < np.inf:
        raise ValueError(f"threshold must be a positive number of pixels, got {threshold}")
    return float(threshold)


def _given(threshold: float | None) -> float:
    if threshold is None:
        raise ValueError("this estimator needs a threshold in pixels, got None")
    return threshold


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be in [0, 2^31), got {seed}")
    return int(seed)
