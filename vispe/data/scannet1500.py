"""ScanNet-1500 (SuperGlue's choice of pairs, Sarlin et al. 2020): 1500 pairs of 100 indoor test scenes.

Three layouts are published. SuperGlue's list ``scannet_test_pairs_with_gt.txt`` and glue-factory's
``pairs_calibrated.txt`` give K of the colour camera, whose images are 1296 x 968. LoFTR's ``test.npz`` names the scenes
and frames, and ``intrinsics.npz`` gives K of the *depth* camera, for images resized to 640 x 480. Which size a K
belongs to is kept in ``K_size``, so that it is right for images of any size.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vispe.data.pairs import Array, Pair, PairSet, read_pair_list, to_fetch

PAIRS = 1500
SIZES = ((480, 640), (968, 1296))  # (h, w) of the depth images and of the colour images
LISTS = ("scannet_test_pairs_with_gt.txt", "pairs_calibrated.txt")
PLACES = ("", "scannet1500", "scannet_test_1500", "assets", "ScanNet1500")
SCENES = ("", "scannet_test_1500", "scans_test", "test")  # where LoFTR, XFeat, RoMa and ScanNet keep the scenes


def scannet1500(root: str | os.PathLike[str]) -> PairSet:
    """The pairs below ``root``, from whichever index is there, grouped by scene.

    ``note`` says so when they are not 1500. A ``ValueError`` tells what to fetch, or names the file that is missing or
    damaged. The images need not be there; ``check_files`` asks for them.
    """
    for folder in (Path(root) / place for place in PLACES):
        for name in LISTS:
            if (folder / name).is_file():
                return _from_list(folder, folder / name)
        if (folder / "test.npz").is_file():
            return _from_npz(folder)
    raise ValueError(to_fetch("scannet1500", root, f"none of {', '.join(LISTS)}, test.npz"))


def _from_list(folder: Path, path: Path) -> PairSet:
    images = folder / "scannet_test_images"
    found = read_pair_list(path, images if images.is_dir() else folder, group=lambda name: _scene(name))
    sizes = {_size_of(K) for pair in found.pairs for K in (pair.K0, pair.K1)}
    return _set(found.root, found.pairs, sizes.pop() if len(sizes) == 1 else None)


def _scene(name: str) -> str:
    """``scene0707_00`` of any name that has it."""
    start = name.find("scene")
    return name[start : start + 12] if start >= 0 else ""


def _size_of(K: Array | None) -> tuple[int, int] | None:  # noqa: N803
    """The size of ScanNet's whose middle the principal point is nearest to, within a tenth; None if it is none."""
    assert K is not None
    near = [(h, w) for h, w in SIZES if abs(2 * K[0, 2] / w - 1) < 0.1 and abs(2 * K[1, 2] / h - 1) < 0.1]
    return near[0] if near else None


def _set(root: Path, pairs: Iterable[Pair], size: tuple[int, int] | None) -> PairSet:
    found = tuple(pairs)
    note = "" if len(found) == PAIRS else f"{len(found)} of {PAIRS} pairs"
    return PairSet(name="scannet1500", root=root, pairs=found, K_size=size, note=note)


def _from_npz(folder: Path) -> PairSet:
    index = _arrays(folder / "test.npz")
    names = index.get("name")
    if names is None or names.ndim != 2 or names.shape[1] != 4 or names.dtype.kind not in "iu":
        raise ValueError(f"{str(folder / 'test.npz')!r}: 'name' must be whole numbers [n, 4]: scene, scan, two frames")
    poses = index.get("rel_pose")
    if poses is not None and poses.shape != (len(names), 12):
        raise ValueError(f"{str(folder / 'test.npz')!r}: 'rel_pose' must be [{len(names)}, 12], got {poses.shape}")
    place = next((p for p in SCENES if names.size and (folder / p / _scene_name(names[0])).is_dir()), "")
    small = _arrays(folder / "intrinsics.npz") if (folder / "intrinsics.npz").is_file() else None
    cameras: dict[str, Array] = {}
    pairs = []
    for number, row in enumerate(names):
        scene = _scene_name(row)
        base = folder / place / scene
        if scene not in cameras:
            cameras[scene] = _camera(base, scene, small)
        pose = _stored(poses[number]) if poses is not None else _from_frames(base, row)
        images = (f"{place}/{scene}/color/{int(frame)}.jpg".lstrip("/") for frame in row[2:])
        image0, image1 = images
        K = cameras[scene]  # noqa: N806
        pairs.append(Pair(image0=image0, image1=image1, group=scene, K0=K, K1=K, pose=pose))
    return _set(folder, pairs, SIZES[0] if small is not None else None)


def _scene_name(row: Any) -> str:
    return f"scene{int(row[0]):04d}_{int(row[1]):02d}"


def _camera(base: Path, scene: str, small: dict[str, np.ndarray] | None) -> Array:
    """K of ``intrinsics.npz`` for images of 640 x 480 where that is there, else of the scene's colour camera."""
    if small is None:
        return _numbers(base / "intrinsic" / "intrinsic_color.txt", (4, 4))[:3, :3]
    if scene not in small or small[scene].size != 9:
        raise ValueError(f"intrinsics.npz has no [3, 3] for {scene!r}")
    return np.asarray(small[scene], dtype=np.float64).reshape(3, 3)


def _stored(row: np.ndarray) -> Array:
    return np.vstack([np.asarray(row, dtype=np.float64).reshape(3, 4), (0, 0, 0, 1)])


def _from_frames(base: Path, row: Any) -> Array:
    """``T_0to1`` of the two frames' poses, which ScanNet stores camera-to-world."""
    first, second = (_numbers(base / "pose" / f"{int(frame)}.txt", (4, 4)) for frame in row[2:])
    try:
        return np.linalg.inv(second) @ first
    except np.linalg.LinAlgError:
        raise ValueError(f"a pose of {base.name!r}, frames {int(row[2])} and {int(row[3])}, has no inverse") from None


def _numbers(path: Path, shape: tuple[int, int]) -> Array:
    try:
        found = np.array(path.read_text(encoding="utf-8").split(), dtype=np.float64)
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None
    if found.size != shape[0] * shape[1] or not np.isfinite(found).all():
        raise ValueError(f"{str(path)!r} must hold {shape[0]} x {shape[1]} finite numbers, got {found.size}")
    return found.reshape(shape)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz of numbers; no pickle is ever read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array, where several are expected")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, MemoryError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is not an npz of numbers: {str(error).partition(chr(10))[0]}") from None
