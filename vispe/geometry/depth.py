"""What is the same point in two images whose poses and depths are known, in numpy float64.

Points are pixels with the first pixel's centre at (0, 0), and so are principal points. A depth of 0 is unknown.
``T [4, 4]`` takes points of camera 0 to camera 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vispe.geometry.epipolar import epipolar_distances, essential_from_pose, fundamental_from_essential
from vispe.geometry.homography import Array, as_matrix, as_points, homogeneous

UNMATCHABLE, IGNORED = -1, -2
Labels = NDArray[np.int64]


def depth_at(depth: ArrayLike, points: ArrayLike) -> Array:
    """The depth of the pixel that each point lies in, ``[k]``; 0 outside the map ``[h, w]``."""
    table, xy = np.asarray(depth), as_points(points)
    h, w = table.shape
    with np.errstate(invalid="ignore"):
        column, row = np.floor(xy + 0.5).T
        inside = (column >= 0) & (column < w) & (row >= 0) & (row < h)
    found = np.zeros(len(xy))
    found[inside] = table[row[inside].astype(int), column[inside].astype(int)]
    return found


def carried(points: ArrayLike, depths: ArrayLike, K0: ArrayLike, K1: ArrayLike, T: ArrayLike) -> tuple[Array, Array]:  # noqa: N803
    """Where points of image 0 at known ``depths [k]`` are seen in image 1, ``[k, 2]``, and how deep they lie there.

    NaN where the depth is unknown or the point is behind camera 1.
    """
    pose = np.asarray(T, dtype=np.float64)
    known = np.asarray(depths, dtype=np.float64)
    rays = homogeneous(points) @ np.linalg.inv(as_matrix(K0, "K0")).T
    there = (rays * np.where(known > 0, known, np.nan)[:, None]) @ pose[:3, :3].T + pose[:3, 3]
    z = np.where(there[:, 2] > 0, there[:, 2], np.nan)
    seen = there @ as_matrix(K1, "K1").T
    return seen[:, :2] / z[:, None], z


def depth_ground_truth(
    keypoints: tuple[ArrayLike, ArrayLike],
    depths: tuple[ArrayLike, ArrayLike],
    K: tuple[ArrayLike, ArrayLike],  # noqa: N803
    T: ArrayLike,  # noqa: N803
    *,
    positive: float = 3.0,
    negative: float = 5.0,
    epipolar: float = 5.0,
    tolerance: float = 0.1,
) -> tuple[Labels, Labels]:
    """The true partner of each keypoint of either image: an index, -1 (none was found), or -2 (not to be told).

    ``depths`` are whole maps. A keypoint is carried over where its depth is known, and is visible there if the other
    map says the same depth within ``tolerance`` of it. Partners are both visible, nearest to each other by the larger
    of both distances, which is below ``positive`` pixels. A keypoint of known depth has none if it is carried farther
    than ``negative`` from every keypoint, off the image or behind something; one of unknown depth if no keypoint lies
    within ``epipolar`` pixels of its line. As glue-factory's ``gt_matches_from_pose_depth``, whose partners need not
    agree in depth.
    """
    first, second = (as_points(points) for points in keypoints)
    if not len(first) or not len(second):
        return np.full(len(first), UNMATCHABLE), np.full(len(second), UNMATCHABLE)
    pose, back = np.asarray(T, dtype=np.float64), np.linalg.inv(np.asarray(T, dtype=np.float64))
    known = [depth_at(depth, points) for depth, points in zip(depths, (first, second), strict=True)]
    to1, z1 = carried(first, known[0], K[0], K[1], pose)
    to0, z0 = carried(second, known[1], K[1], K[0], back)
    forward, backward = _distances(to1, second), _distances(to0, first).T
    visible0 = _agrees(z1, depth_at(depths[1], to1), tolerance)
    visible1 = _agrees(z0, depth_at(depths[0], to0), tolerance)
    both = np.where(visible0[:, None] & visible1[None], np.maximum(forward, backward), np.inf)
    partner0, partner1 = both.argmin(1), both.argmin(0)
    mutual = (partner1[partner0] == np.arange(len(first))) & (both.min(1) < positive)
    near = _lines(first, second, K, pose) < epipolar
    labels0 = _labels(mutual, partner0, known[0], visible0, forward, near, negative)
    mutual1 = (partner0[partner1] == np.arange(len(second))) & (both.min(0) < positive)
    labels1 = _labels(mutual1, partner1, known[1], visible1, backward.T, near.T, negative)
    return labels0, labels1


def _labels(
    mutual: NDArray[np.bool_], partner: Labels, known: Array, visible: NDArray[np.bool_], distance: Array,
    near: NDArray[np.bool_], negative: float,
) -> Labels:  # fmt: skip
    """One image's labels, from its side."""
    far = np.where(np.isnan(distance), np.inf, distance).min(1) > negative
    none = np.where(known > 0, far | ~visible, ~near.any(1))
    return np.where(mutual, partner, np.where(none, UNMATCHABLE, IGNORED)).astype(np.int64)


def _distances(points: Array, others: Array) -> Array:
    """``[m, n]``; NaN for a point that was not carried."""
    return np.linalg.norm(points[:, None] - others[None], axis=2)


def _agrees(z: Array, depth: Array, tolerance: float) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        return (depth > 0) & (np.abs(z - depth) <= tolerance * depth)


def _lines(first: Array, second: Array, K: tuple[ArrayLike, ArrayLike], pose: Array) -> Array:  # noqa: N803
    """The larger of both distances of every pair to its epipolar lines, ``[m, n]``; 0 without a baseline."""
    if not np.linalg.norm(pose[:3, 3]) > 0:
        return np.zeros((len(first), len(second)))
    F = fundamental_from_essential(essential_from_pose(pose[:3, :3], pose[:3, 3]), *K)  # noqa: N806
    rows, columns = np.divmod(np.arange(len(first) * len(second)), len(second))
    one, other = epipolar_distances(F, first[rows], second[columns])
    return np.maximum(one, other).reshape(len(first), len(second))
