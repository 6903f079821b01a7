"""Pinhole cameras and the relative pose of two of them, in numpy float64.

A pose is ``T_0to1``: ``X1 = R X0 + t``, from camera 0's frame to camera 1's. A world-to-camera pose is ``X = R X_world
+ t``. From two images t is known up to its length, and an error of t therefore is an angle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vispe.geometry.epipolar import as_vector
from vispe.geometry.homography import (
    Array,
    as_matrix,
    as_pairs,
    as_points,
    as_scale,
    as_size,
    homogeneous,
    homography_residual,
)


@dataclass(frozen=True, kw_only=True)
class Camera:
    """A pinhole without distortion, in pixels with the first pixel's centre at (0, 0); ``size = (h, w)``.

    COLMAP puts that centre at (0.5, 0.5): its cx and cy are ours + 0.5. The conversion is made at COLMAP's border only.
    """

    fx: float
    fy: float
    cx: float
    cy: float
    size: tuple[int, int]

    def __post_init__(self) -> None:
        as_size(self.size)
        if not (0 < self.fx < math.inf and 0 < self.fy < math.inf):
            raise ValueError(f"focal lengths must be positive and finite, got fx={self.fx}, fy={self.fy}")
        if not (math.isfinite(self.cx) and math.isfinite(self.cy)):
            raise ValueError(f"the principal point must be finite, got cx={self.cx}, cy={self.cy}")

    @classmethod
    def assumed(cls, size: tuple[int, int]) -> Self:
        """COLMAP's first guess of an unknown camera: focal 1.2 max(h, w), principal point in the image's middle."""
        height, width = as_size(size)
        focal = 1.2 * max(height, width)
        return cls(fx=focal, fy=focal, cx=(width - 1) / 2, cy=(height - 1) / 2, size=(height, width))

    @classmethod
    def from_matrix(cls, K: ArrayLike, size: tuple[int, int]) -> Self:  # noqa: N803
        """From ``K [3, 3]``, upper triangular, without skew and with ``K[2, 2] = 1``."""
        matrix = as_matrix(K, "K")
        fx, fy, cx, cy = matrix[[0, 1, 0, 1], [0, 1, 2, 2]].tolist()
        if not np.array_equal(matrix, [[fx, 0, cx], [0, fy, cy], [0, 0, 1]]):
            raise ValueError(f"K must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], got {matrix.tolist()}")
        return cls(fx=fx, fy=fy, cx=cx, cy=cy, size=size)

    @property
    def matrix(self) -> Array:
        """``K [3, 3]``: pixel = K X / X[2]."""
        return np.array([[self.fx, 0, self.cx], [0, self.fy, self.cy], [0, 0, 1]], dtype=np.float64)

    @property
    def focal(self) -> float:
        """The mean of fx and fy, in pixels."""
        return (self.fx + self.fy) / 2

    def resized(self, scale: float | Sequence[float]) -> Self:
        """Of the image resized by one factor or ``(sx, sy) = (w'/w, h'/h)``: ``cx' = (cx + 0.5) sx - 0.5``."""
        sx, sy = as_scale(scale)
        size = (max(1, round(self.size[0] * sy)), max(1, round(self.size[1] * sx)))
        cx, cy = (self.cx + 0.5) * sx - 0.5, (self.cy + 0.5) * sy - 0.5
        return type(self)(fx=self.fx * sx, fy=self.fy * sy, cx=cx, cy=cy, size=size)

    def normalise(self, points: ArrayLike) -> Array:
        """Pixels ``[k, 2]`` to the plane at depth one: ``((x - cx) / fx, (y - cy) / fy)``."""
        return (as_points(points) - (self.cx, self.cy)) / (self.fx, self.fy)


def relative_pose(R0: ArrayLike, t0: ArrayLike, R1: ArrayLike, t1: ArrayLike) -> tuple[Array, Array]:  # noqa: N803
    """``T_0to1`` of two world-to-camera poses: ``R = R1 R0^T``, ``t = t1 - R t0`` (not scaled to length one)."""
    rotation = as_matrix(R1, "R1") @ as_matrix(R0, "R0").T
    return rotation, as_vector(t1, "t1") - rotation @ as_vector(t0, "t0")


def rotation_error(R_est: ArrayLike, R_gt: ArrayLike) -> float:  # noqa: N803
    """Angle of ``R_est^T R_gt`` in degrees, in [0, 180].

    By atan2 of sine and cosine, which keeps its digits near 0 and 180, where the usual acos of the trace loses half.
    """
    between = as_matrix(R_est, "R_est").T @ as_matrix(R_gt, "R_gt")
    axis = (between - between.T)[[2, 0, 1], [1, 2, 0]]  # 2 sin(angle) times the unit axis
    return math.degrees(math.atan2(float(np.linalg.norm(axis)), float(np.trace(between)) - 1))


def translation_error(t_est: ArrayLike, t_gt: ArrayLike) -> float:
    """Angle between two directions in degrees, ``min(e, 180 - e)`` in [0, 90]: the sign of t is not judged (SuperGlue).

    An estimate of length zero, or not finite, is no estimate: inf. A truth without a direction is a ``ValueError``.
    """
    estimate, truth = as_vector(t_est, "t_est"), as_vector(t_gt, "t_gt")
    if not np.isfinite(truth).all() or not truth.any():
        raise ValueError(f"the true translation has no direction: {truth.tolist()}")
    if not np.isfinite(estimate).all() or not estimate.any():
        return math.inf
    estimate, truth = estimate / np.abs(estimate).max(), truth / np.abs(truth).max()  # no product under- or overflows
    angle = math.degrees(math.atan2(float(np.linalg.norm(np.cross(estimate, truth))), float(estimate @ truth)))
    return min(angle, 180 - angle)


def pose_error(
    R_est: ArrayLike | None,  # noqa: N803
    t_est: ArrayLike | None,
    R_gt: ArrayLike,  # noqa: N803
    t_gt: ArrayLike,
) -> float:
    """The larger of the two angles in degrees, as MegaDepth-1500 and ScanNet-1500 take it; no estimate is inf."""
    if R_est is None or t_est is None:
        return math.inf
    return max(rotation_error(R_est, R_gt), translation_error(t_est, t_gt))


def decompose_essential(E: ArrayLike) -> tuple[Array, Array]:  # noqa: N803
    """The four poses of E: rotations ``[4, 3, 3]`` and unit translations ``[4, 3]`` (H&Z, result 9.19)."""
    U, _, Vt = np.linalg.svd(as_matrix(E, "E"))  # noqa: N806
    U, Vt = U * np.sign(np.linalg.det(U)), Vt * np.sign(np.linalg.det(Vt))  # noqa: N806
    turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    Ra, Rb, t = U @ turn @ Vt, U @ turn.T @ Vt, U[:, 2]  # noqa: N806
    return np.stack([Ra, Ra, Rb, Rb]), np.stack([t, -t, t, -t])


def depths(rotation: ArrayLike, translation: ArrayLike, rays0: ArrayLike, rays1: ArrayLike) -> tuple[Array, Array]:
    """Depths ``(z0, z1)``, each ``[k]``, of the points where two rays come closest.

    ``rays`` are points ``[k, 2]`` at depth one. z0 and z1 solve ``z1 r1 = z0 R r0 + t`` by least squares; parallel
    rays meet at infinity and give inf or nan.
    """
    first, second = as_pairs(rays0, rays1)
    t = as_vector(translation, "translation")
    a, b = homogeneous(first) @ as_matrix(rotation, "rotation").T, homogeneous(second)
    aa, bb, ab, at, bt = (a * a).sum(1), (b * b).sum(1), (a * b).sum(1), a @ t, b @ t
    with np.errstate(all="ignore"):
        square = (np.cross(a, b) ** 2).sum(1)  # = aa bb - ab^2 without its cancellation
        return (ab * bt - bb * at) / square, (aa * bt - ab * at) / square


def recover_pose(E: ArrayLike, rays0: ArrayLike, rays1: ArrayLike) -> tuple[Array, Array, NDArray[np.bool_]]:  # noqa: N803
    """Of E's four poses the one with most points in front of both cameras.

    ``rays`` are the inliers, ``[k, 2]`` at depth one. Gives the rotation, the unit translation and which points are in
    front ``[k]``. Between equals the first in the order of :func:`decompose_essential` wins.
    """
    rotations, translations = decompose_essential(E)
    solved = [depths(R, t, rays0, rays1) for R, t in zip(rotations, translations, strict=True)]
    front = np.stack([(z0 > 0) & (z1 > 0) for z0, z1 in solved])
    best = int(front.sum(1).argmax())
    return rotations[best], translations[best], front[best]


def rotation_residual(points0: Array, points1: Array, camera0: Camera, camera1: Camera) -> Array:
    """What the best pure rotation leaves unexplained, ``[k]`` in pixels of image 1.

    The rotation of the viewing rays (Kabsch) is fitted to all matches and then five times to the better half of them.
    """
    rays0, rays1 = homogeneous(camera0.normalise(points0)), homogeneous(camera1.normalise(points1))
    rays0, rays1 = (rays / np.linalg.norm(rays, axis=1, keepdims=True) for rays in (rays0, rays1))
    kept = np.arange(len(points0))
    for _ in range(6):
        U, _, Vt = np.linalg.svd(rays1[kept].T @ rays0[kept])  # noqa: N806
        rotation = U @ np.diag([1, 1, np.linalg.det(U @ Vt)]) @ Vt
        turned = camera1.matrix @ rotation @ np.linalg.inv(camera0.matrix)
        residual = homography_residual(turned, points0, points1)
        kept = np.argsort(residual, kind="stable")[: max(3, len(points0) // 2)]
    return residual
