"""MegaDepth for training, in its public undistorted layout: images, a depth map (HDF5) each, and an index a scene.

``ROOT/scene_info/NAME.npz`` holds ``image_paths`` and ``depth_paths`` (below ROOT; None where a depth is missing; else
in ``depth_undistorted/SCENE``), ``intrinsics [n, 3, 3]`` and ``poses [n, 4, 4]`` (world to camera, COLMAP's pixels) and
``overlap_matrix [n, n]`` (Dusmanu et al. 2019, D2-Net, whose files glue-factory uses). A depth of 0 is unknown. Any
data of yours in that form will do.
"""

from __future__ import annotations

import dataclasses
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vispe.data.megadepth1500 import read_scene_info
from vispe.data.pairs import to_fetch
from vispe.geometry.homography import Array
from vispe.spec import Spec

NEEDED = ("image_paths", "depth_paths", "intrinsics", "poses", "overlap_matrix")
MAPS = 64  # depth maps that are kept in memory: pairs of a scene share images
HALF = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1.0]])  # COLMAP's pixels to those with the first centre at 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthSpec(Spec):
    """Images with poses and depths below ``root``. ``scenes`` and ``val_scenes``: names in ``scene_info``; no scenes:
    all but those of validation, which without a name is the last. ``overlap``: of the pairs that are used. ``pairs``:
    of a scene in an epoch, ``val_pairs`` in validation. ``tolerance`` of depths as a part of them, and ``epipolar`` in
    pixels, as ``depth_ground_truth`` has them. ``resize``: the long side at which images are looked at, and in whose
    pixels distances are told."""

    root: str
    scenes: tuple[str, ...] = ()
    val_scenes: tuple[str, ...] = ()
    overlap: tuple[float, float] = (0.1, 0.7)
    pairs: int = 300
    val_pairs: int = 200
    tolerance: float = 0.1
    epipolar: float = 5.0
    resize: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.overlap[0] < self.overlap[1] <= 1:
            raise ValueError(f"overlap goes from low to high within [0, 1], got {self.overlap}")
        if min(self.pairs, self.val_pairs) < 1:
            raise ValueError(f"pairs and val_pairs are at least 1, got {self.pairs} and {self.val_pairs}")
        if not (self.tolerance > 0 and self.epipolar > 0):
            raise ValueError(f"tolerance and epipolar are positive, got {self.tolerance} and {self.epipolar}")
        if both := sorted(set(self.scenes) & set(self.val_scenes)):
            raise ValueError(f"scene {both[0]!r} is for training and for validation")


@dataclasses.dataclass(frozen=True, eq=False)
class Posed:
    """The images of so many ``scenes``. ``K`` and ``poses`` (world to camera) are of pixels with the first centre at
    (0, 0); ``pairs [k, 2]`` are those whose overlap was asked for."""

    root: Path
    names: tuple[str, ...]
    depths: tuple[str, ...]
    K: Array
    poses: Array
    pairs: np.ndarray
    scenes: int

    def depth(self, i: int) -> Array:
        """The map of image ``i``; ``ValueError`` names one that cannot be read."""
        return read_depth(os.fspath(self.root / self.depths[i]))

    def between(self, i: int, j: int) -> Array:
        """``T [4, 4]`` from camera ``i`` to camera ``j``."""
        return self.poses[j] @ np.linalg.inv(self.poses[i])


@lru_cache(MAPS)
def read_depth(path: str) -> Array:
    """The ``depth [h, w]`` of an HDF5 file."""
    try:
        with h5py.File(path, "r") as file:
            found = np.asarray(file["depth"], dtype=np.float32)
    except (OSError, KeyError) as error:
        raise ValueError(f"{path!r} is no depth map: {str(error)[:100]}") from None
    if found.ndim != 2:
        raise ValueError(f"{path!r} is no depth map: it has shape {list(found.shape)}")
    return np.where(np.isfinite(found) & (found > 0), found, 0)


def open_posed(spec: DepthSpec) -> tuple[Posed, Posed]:
    """Training and validation images; ``ValueError`` says what is missing or wrong."""
    root = Path(spec.root).expanduser()
    folder = root / "scene_info"
    there = sorted(path.stem for path in folder.glob("*.npz")) if folder.is_dir() else []
    if not there:
        raise ValueError(to_fetch("megadepth", root, "no scene_info/NAME.npz"))
    for name in (*spec.scenes, *spec.val_scenes):
        if name not in there:
            raise ValueError(f"{str(folder)!r} has no scene {name!r}; it has {', '.join(there[:8])}")
    val = spec.val_scenes or (there[-1],)
    train = spec.scenes or tuple(name for name in there if name not in val)
    if not train:
        raise ValueError(f"{str(folder)!r} has one scene alone: training and validation need one each")
    return _opened(root, train, spec.overlap), _opened(root, val, spec.overlap)


def _opened(root: Path, names: tuple[str, ...], overlap: tuple[float, float]) -> Posed:
    images: list[str] = []
    depths: list[str] = []
    matrices, poses, pairs = [], [], []
    for name in names:
        path = root / "scene_info" / f"{name}.npz"
        scene = read_scene_info(path)
        if lacking := [key for key in NEEDED if key not in scene]:
            raise ValueError(f"{str(path)!r} has no {lacking[0]!r}")
        try:
            keep = _usable(scene)
            at = {old: len(images) + new for new, old in enumerate(keep)}
            shares = np.asarray(scene["overlap_matrix"], dtype=np.float64)
            inside = (shares >= overlap[0]) & (shares <= overlap[1])
            pairs += [(at[i], at[j]) for i in keep for j in keep if i < j and (inside[i, j] or inside[j, i])]
            images += [str(scene["image_paths"][i]) for i in keep]
            depths += [_depth_path(root, name, str(scene["depth_paths"][i])) for i in keep]
            matrices += [HALF @ np.asarray(scene["intrinsics"][i], dtype=np.float64) for i in keep]
            poses += [_pose(scene["poses"][i], i) for i in keep]
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{str(path)!r}: {error}") from None
    if not pairs:
        raise ValueError(f"scenes {', '.join(names)} have no pair with an overlap of {overlap[0]} to {overlap[1]}")
    return Posed(root, tuple(images), tuple(depths), np.stack(matrices), np.stack(poses), np.array(pairs), len(names))


def _usable(scene: dict[str, Any]) -> list[int]:
    """Images with a path and a depth."""
    paths, depths = scene["image_paths"], scene["depth_paths"]
    if len(paths) != len(depths):
        raise ValueError(f"{len(paths)} images and {len(depths)} depths")
    return [i for i in range(len(paths)) if paths[i] is not None and depths[i] is not None]


def _depth_path(root: Path, scene: str, path: str) -> str:
    """As the index says, or where glue-factory's archive has it."""
    other = f"depth_undistorted/{scene}/{Path(path).name}"
    return other if not (root / path).is_file() and (root / other).is_file() else path


def _pose(value: Any, index: int) -> Array:
    found = np.asarray(value, dtype=np.float64)
    if found.shape != (4, 4) or not np.isfinite(found).all():
        raise ValueError(f"the pose of image {index} is no finite [4, 4]")
    return found
