"""Epipolar geometry of two images, in numpy float64.

Everything is "0 to 1": ``x1^T F x0 = 0``, ``E = [t]x R`` with ``X1 = R X0 + t``, ``F = K1^-T E K0^-1``. Distances are
in the units of the points: pixels for F, units of the normalised image plane for E. Papers call four different things
"epipolar error", so each is a function of its own here. Hartley and Zisserman, Multiple View Geometry, chapters 9 and
11.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from vispe.geometry.homography import Array, as_matrix, as_pairs, homogeneous


def cross_matrix(v: ArrayLike) -> Array:
    """``[v]x [3, 3]``, the matrix of ``w -> v x w``."""
    x, y, z = as_vector(v, "v")
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])


def essential_from_pose(rotation: ArrayLike, translation: ArrayLike) -> Array:
    """``E = [t]x R`` of the pose ``X1 = R X0 + t``."""
    return cross_matrix(translation) @ as_matrix(rotation, "rotation")


def fundamental_from_essential(E: ArrayLike, K0: ArrayLike, K1: ArrayLike) -> Array:  # noqa: N803
    """``F = K1^-T E K0^-1``."""
    return np.linalg.inv(as_matrix(K1, "K1")).T @ as_matrix(E, "E") @ np.linalg.inv(as_matrix(K0, "K0"))


def essential_from_fundamental(F: ArrayLike, K0: ArrayLike, K1: ArrayLike) -> Array:  # noqa: N803
    """``E = K1^T F K0``."""
    return as_matrix(K1, "K1").T @ as_matrix(F, "F") @ as_matrix(K0, "K0")


def nearest_essential(E: ArrayLike) -> Array:  # noqa: N803
    """``U diag(1, 1, 0) V^T`` of E's singular vectors: the closest matrix that is ``[t]x R`` exactly, with unit t."""
    U, _, Vt = np.linalg.svd(as_matrix(E, "E"))  # noqa: N806
    return U @ np.diag([1.0, 1.0, 0.0]) @ Vt


def normalise_epipolar(F: ArrayLike) -> Array:  # noqa: N803
    """F or E, known up to a factor, with Frobenius norm 1 and its largest entry (the first of equals) positive."""
    matrix = as_matrix(F, "F")
    peak = np.abs(matrix).max()
    if not np.isfinite(peak) or peak == 0:
        raise ValueError(f"F must be finite and not all zero, got {matrix.tolist()}")
    matrix = matrix / peak  # first, so that the norm neither overflows nor vanishes
    matrix = matrix / np.linalg.norm(matrix)
    size = np.abs(matrix).ravel()
    leader = np.flatnonzero(size >= size.max() * (1 - 1e-6))[0]  # a near tie must not flip the sign with the last bit
    return matrix * np.sign(matrix.ravel()[leader])


def epipolar_lines(F: ArrayLike, points0: ArrayLike) -> Array:  # noqa: N803
    """The lines ``F x0`` of image 1, ``[k, 3]`` as ``a x + b y + c = 0``, not normalised."""
    return homogeneous(points0) @ as_matrix(F, "F").T


def point_line_distance(points: ArrayLike, lines: ArrayLike) -> Array:
    """Distance of ``points [k, 2]`` to ``lines [k, 3]``, ``[k]``; inf where a line is undefined (``a = b = 0``)."""
    xyw = homogeneous(points)
    abc = np.asarray(lines, dtype=np.float64)
    if abc.shape != xyw.shape:
        raise ValueError(f"lines must be [{len(xyw)}, 3], one a point, got shape {abc.shape}")
    return _ratio(np.abs((xyw * abc).sum(1)), np.hypot(abc[:, 0], abc[:, 1]))


def epipolar_distances(F: ArrayLike, points0: ArrayLike, points1: ArrayLike) -> tuple[Array, Array]:  # noqa: N803
    """Point-line distances ``(d0, d1)``, each ``[k]``: x0 to ``F^T x1`` in image 0, x1 to ``F x0`` in image 1."""
    first, second = as_pairs(points0, points1)
    matrix = as_matrix(F, "F")
    return (
        point_line_distance(first, epipolar_lines(matrix.T, second)),
        point_line_distance(second, epipolar_lines(matrix, first)),
    )


def epipolar_distance_mean(F: ArrayLike, points0: ArrayLike, points1: ArrayLike) -> Array:  # noqa: N803
    """``(d0 + d1) / 2``, a distance: glue-factory's epipolar error (``geometry/epipolar.py``)."""
    d0, d1 = epipolar_distances(F, points0, points1)
    return (d0 + d1) / 2


def epipolar_distance_squared_sum(F: ArrayLike, points0: ArrayLike, points1: ArrayLike) -> Array:  # noqa: N803
    """``d0^2 + d1^2``, a squared distance: the epipolar error of SuperGlue and LoFTR (``utils/metrics.py``).

    Not comparable with :func:`epipolar_distance_mean`: 1e-4 here is about 7e-3 there.
    """
    d0, d1 = epipolar_distances(F, points0, points1)
    return d0**2 + d1**2


def sampson_distance(F: ArrayLike, points0: ArrayLike, points1: ArrayLike) -> Array:  # noqa: N803
    """``|x1^T F x0| / sqrt(a0^2 + b0^2 + a1^2 + b1^2)``, ``[k]``, in the units of the points; inf if undefined.

    The first-order distance of a match to the nearest exact one, over both images together (H&Z 11.4.3, not squared).
    """
    first, second = as_pairs(points0, points1)
    with np.errstate(all="ignore"):
        lines1, lines0 = epipolar_lines(F, first), epipolar_lines(as_matrix(F, "F").T, second)
        algebraic = np.abs((homogeneous(second) * lines1).sum(1))
        return _ratio(algebraic, np.sqrt((lines1[:, :2] ** 2).sum(1) + (lines0[:, :2] ** 2).sum(1)))


def as_vector(v: ArrayLike, name: str) -> Array:
    """``[3]`` float64; a ``ValueError`` names any other shape."""
    vector = np.asarray(v, dtype=np.float64)
    if vector.shape != (3,):
        raise ValueError(f"{name} must be [3], got shape {vector.shape}")
    return vector


def _ratio(top: Array, bottom: Array) -> Array:
    with np.errstate(all="ignore"):
        ratio = top / bottom
    return np.where(np.isnan(ratio), np.inf, ratio)
