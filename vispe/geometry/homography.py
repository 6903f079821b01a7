"""Homographies between two images, in numpy float64.

A homography is ``H_0to1 [3, 3]``: it takes points (x, y) of image 0 to image 1. Points are pixels with the first
pixel's centre at (0, 0) unless a function says otherwise. Hartley and Zisserman, Multiple View Geometry, chapter 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def as_points(xy: ArrayLike, name: str = "points") -> Array:
    """``[k, 2]`` float64; an empty list is ``[0, 2]``. A ``ValueError`` names any other shape."""
    points = np.asarray(xy, dtype=np.float64)
    if points.shape == (0,):
        return points.reshape(0, 2)
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError(f"{name} must be [k, 2] of (x, y), got shape {points.shape}")
    return points


def as_pairs(points0: ArrayLike, points1: ArrayLike) -> tuple[Array, Array]:
    """Two lists of ``[k, 2]`` points, matched row by row; unequal lengths are a ``ValueError``."""
    first, second = as_points(points0, "points0"), as_points(points1, "points1")
    if len(first) != len(second):
        raise ValueError(f"points0 and points1 are matched row by row, got {len(first)} and {len(second)} rows")
    return first, second


def as_matrix(matrix: ArrayLike, name: str = "matrix") -> Array:
    """``[3, 3]`` float64; a ``ValueError`` names any other shape."""
    found = np.asarray(matrix, dtype=np.float64)
    if found.shape != (3, 3):
        raise ValueError(f"{name} must be [3, 3], got shape {found.shape}")
    return found


def homogeneous(xy: ArrayLike) -> Array:
    """``[k, 2] -> [k, 3]`` with a last coordinate of one."""
    points = as_points(xy)
    return np.concatenate([points, np.ones((len(points), 1))], axis=1)


def warp_points(H: ArrayLike, xy: ArrayLike) -> Array:  # noqa: N803
    """``H x`` in pixels, ``[k, 2]``. A point that goes to infinity comes back as inf or nan, never as a warning."""
    x, y = as_points(xy).T
    with np.errstate(all="ignore"):  # a product of matrices would wake BLAS's threads, which spin for long afterwards
        u, v, w = (row[0] * x + row[1] * y + row[2] for row in as_matrix(H, "H"))
        return np.stack((u / w, v / w), 1)


def homography_residual(H: ArrayLike, points0: ArrayLike, points1: ArrayLike) -> Array:  # noqa: N803
    """Forward transfer error ``|H x0 - x1|`` in pixels of image 1, ``[k]``; inf where it is undefined."""
    first, second = as_pairs(points0, points1)
    with np.errstate(all="ignore"):
        return _undefined_is_inf(np.linalg.norm(warp_points(H, first) - second, axis=1))


def symmetric_transfer_error(H: ArrayLike, points0: ArrayLike, points1: ArrayLike) -> Array:  # noqa: N803
    """Mean of the forward error (pixels of image 1) and the backward error (pixels of image 0), ``[k]``.

    This is the error of glue-factory's precision on HPatches. A singular ``H`` has no way back: inf.
    """
    matrix = as_matrix(H, "H")
    forward = homography_residual(matrix, points0, points1)
    try:
        inverse = np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(forward, np.inf)
    return (forward + homography_residual(inverse, points1, points0)) / 2


def corner_error(H_est: ArrayLike | None, H_gt: ArrayLike, size: tuple[int, int]) -> float:  # noqa: N803
    """Mean distance in pixels between the images of the 4 corners of image 0, ``size = (h, w)``.

    The corners are (0, 0), (w, 0), (w, h), (0, h), as in glue-factory ``geometry/homography.py``. No estimate (None),
    or one that sends a corner to infinity, is inf.
    """
    height, width = as_size(size)
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float64)
    if H_est is None:
        return float("inf")
    return float(homography_residual(H_est, corners, warp_points(H_gt, corners)).mean())


def rescale_homography(H: ArrayLike, scale0: float | Sequence[float], scale1: float | Sequence[float]) -> Array:  # noqa: N803
    """``S1 H S0^-1`` with ``S = diag(sx, sy, 1)``: H between the resized images as glue-factory writes it.

    A scale is one factor or ``(sx, sy) = (w'/w, h'/h)``. Exact where the first pixel's *corner* is (0, 0). Where its
    centre is, this neglects ``|s - 1| / 2`` pixels; use it to compare with published HPatches figures, which neglect
    them too, and :func:`rescale_homography_centres` otherwise.
    """
    S0, S1 = (np.diag([*as_scale(scale), 1.0]) for scale in (scale0, scale1))  # noqa: N806
    return S1 @ as_matrix(H, "H") @ np.linalg.inv(S0)


def rescale_homography_centres(H: ArrayLike, scale0: float | Sequence[float], scale1: float | Sequence[float]) -> Array:  # noqa: N803
    """``S1 H S0^-1`` with the half-pixel term, exact where the first pixel's *centre* is (0, 0), as in all of vispe."""
    return resize_matrix(scale1) @ as_matrix(H, "H") @ np.linalg.inv(resize_matrix(scale0))


def resize_matrix(scale: float | Sequence[float]) -> Array:
    """The affine map ``[3, 3]`` of a resize in the centre convention: ``x' = (x + 0.5) s - 0.5``."""
    sx, sy = as_scale(scale)
    return np.array([[sx, 0, (sx - 1) / 2], [0, sy, (sy - 1) / 2], [0, 0, 1]], dtype=np.float64)


def spread(points: Array) -> float:
    """Standard deviation across the best line, in pixels, once the one point that adds most to it is left out; n >= 3.

    The scatter without point i is ``S - n / (n - 1) d_i d_i^T``, with d_i from the mean of all: every i is tried.
    """
    n = len(points)
    d = points - points.mean(0)
    rest = d.T @ d - n / (n - 1) * d[:, :, None] * d[:, None, :]  # [n, 2, 2]
    across = np.linalg.eigvalsh(rest)[:, 0].min()
    return math.sqrt(max(0.0, float(across)) / (n - 1))


def normalise_homography(H: ArrayLike) -> Array:  # noqa: N803
    """The same homography with ``H[2, 2] = 1``; where that entry is nearly zero, Frobenius norm 1 and det >= 0."""
    matrix = as_matrix(H, "H")
    peak = np.abs(matrix).max()
    if not np.isfinite(peak) or peak == 0:
        raise ValueError(f"H must be finite and not all zero, got {matrix.tolist()}")
    matrix = matrix / peak
    if abs(matrix[2, 2]) > 1e-8:
        return matrix / matrix[2, 2]
    matrix = matrix / np.linalg.norm(matrix)
    return -matrix if np.linalg.det(matrix) < 0 else matrix


def as_scale(scale: float | Sequence[float]) -> tuple[float, float]:
    """``(sx, sy)`` from one factor or two, positive and finite."""
    try:
        sx, sy = np.broadcast_to(np.asarray(scale, dtype=np.float64), (2,)).tolist()
    except ValueError:
        raise ValueError(f"a scale is one factor or (sx, sy), got {scale!r}") from None
    if not (0 < sx < np.inf and 0 < sy < np.inf):
        raise ValueError(f"a scale must be positive and finite, got {scale!r}")
    return sx, sy


def as_size(size: Sequence[int]) -> tuple[int, int]:
    """``(h, w)`` in pixels, both positive."""
    if len(size) != 2 or min(size) <= 0:
        raise ValueError(f"size must be (h, w) with both positive, got {tuple(size)}")
    height, width = size
    return int(height), int(width)


def _undefined_is_inf(errors: Array) -> Array:
    return np.where(np.isnan(errors), np.inf, errors)
