"""MegaDepth-1500 (LoFTR's choice of pairs, Sun et al. 2021): 1500 pairs of St Peter's Square and of scene 0022.

K is COLMAP's: the first pixel's centre is at (0.5, 0.5), and the principal point is half the image's size. Poses of the
index are world-to-camera. Two indices are published: LoFTR's five files ``scene_overlap.npz`` and glue-factory's list
``pairs_calibrated.txt``. The former hold Python objects; they are read by an unpickler that knows nothing but arrays
and numbers, as a pickle can run any code.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vispe.data.pairs import Array, Pair, PairSet, read_pair_list, to_fetch

PAIRS = 1500
SCENE_INFO = re.compile(r"(0015|0022)_[\d.]+_[\d.]+\.npz")
PLACES = ("", "megadepth1500", "megadepth_test_1500", "megadepth_test_1500_scene_info", "index")
LARGEST = 1 << 28  # bytes of one member; the published ones have less than 2 MB
NEEDED = ("image_paths", "intrinsics", "poses", "pair_infos")

NUMBERS = re.compile(r"[biufc]\d{1,2}|[SU]\d{1,4}")  # the dtypes that may come out of a pickle, and "O"


def megadepth1500(root: str | os.PathLike[str]) -> PairSet:
    """The pairs below ``root``, from whichever index is there, grouped by scene.

    ``note`` says so when they are not 1500. A ``ValueError`` tells what to fetch, or names the file that is damaged.
    The images need not be there; ``check_files`` asks for them.
    """
    top = Path(root)
    for folder in (top / place for place in PLACES):
        if (folder / "pairs_calibrated.txt").is_file():
            return _from_list(folder)
    for folder in (top / place for place in PLACES):
        if files := sorted(p for p in folder.glob("*.npz") if SCENE_INFO.fullmatch(p.name)):
            return _set(_image_root(top, folder), [pair for path in files for pair in _scene_pairs(path)])
    raise ValueError(to_fetch("megadepth1500", root, "neither pairs_calibrated.txt nor files like 0015_0.1_0.3.npz"))


def read_scene_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arrays of a scene_info file, zipped or one pickle of a dict (LoFTR's files are the latter).

    A ``ValueError`` names the file and what is wrong: damage, or a pickle that asks for anything but arrays.
    """
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"PK"
        found = _members(path) if zipped else _unpickled(Path(path).read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"a dict of arrays is expected, got a {type(found).__name__}")
    except OSError as error:
        raise ValueError(f"cannot read {os.fspath(path)!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r}: {error}") from None
    return found


def statistics(pairs: PairSet) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of a table: for all pairs and each group, how they are spread.

    The rotation between the cameras in degrees; the direction of the baseline as its angle to the first camera's
    optical axis (0: the second camera is straight ahead, 90: beside, 180: behind); the overlap where the index tells.
    """
    head = ("scene", "pairs", "images", "quantity", "min", "25 %", "median", "75 %", "max", "histogram")
    groups = sorted({pair.group for pair in pairs.pairs})
    chosen = {"all": pairs.pairs} | {
        g: tuple(p for p in pairs.pairs if p.group == g) for g in groups if len(groups) > 1
    }
    rows: list[tuple[str, ...]] = []
    for group, members in chosen.items():
        images = {name for pair in members for name in (pair.image0, pair.image1)}
        for quantity, values, edges in _quantities(members):
            spread = [f"{value:.2f}" for value in np.quantile(values, (0, 0.25, 0.5, 0.75, 1))]
            rows.append((group, str(len(members)), str(len(images)), quantity, *spread, _histogram(values, edges)))
    return head, rows


def _quantities(pairs: Iterable[Pair]) -> Iterable[tuple[str, Array, tuple[float, ...]]]:
    found = tuple(pairs)
    poses = np.array([pair.pose for pair in found])
    rotation, translation = poses[:, :3, :3], poses[:, :3, 3]
    skew = rotation - rotation.transpose(0, 2, 1)
    sine = np.linalg.norm(skew[:, (2, 0, 1), (1, 2, 0)], axis=1) / 2
    angle = np.degrees(np.arctan2(sine, (np.trace(rotation, axis1=1, axis2=2) - 1) / 2))
    yield "rotation, degrees", angle, (0, 10, 20, 30, 45, 60, 90, 180)
    centre = -np.einsum("nji,nj->ni", rotation, translation)  # of camera 1, seen from camera 0
    along = np.degrees(np.arctan2(np.linalg.norm(centre[:, :2], axis=1), centre[:, 2]))
    yield "baseline to axis, degrees", along, (0, 30, 60, 90, 120, 150, 180)
    overlap = np.array([pair.overlap for pair in found if pair.overlap is not None])
    if len(overlap):
        yield "overlap", overlap, tuple(round(0.1 * k, 1) for k in range(11))


def _histogram(values: Array, edges: tuple[float, ...]) -> str:
    counts, _ = np.histogram(values, bins=edges)
    bins = zip(edges[:-1], edges[1:], counts, strict=True)
    return "  ".join(f"{low:g}-{high:g}: {count}" for low, high, count in bins if count)


def _from_list(folder: Path) -> PairSet:
    """glue-factory's layout: names of the list are below ``images``."""
    images = folder / "images"
    found = read_pair_list(folder / "pairs_calibrated.txt", images if images.is_dir() else folder, group=_scene)
    return _set(found.root, found.pairs)


def _scene(name: str) -> str:
    """The four digits of a scene in the name's path, or its first folder."""
    match = re.search(r"(?:^|/)(\d{4})(?=[/_])", name)
    return match[1] if match else name.partition("/")[0] if "/" in name else ""


def _set(root: Path, pairs: Iterable[Pair]) -> PairSet:
    found = tuple(pairs)
    note = "" if len(found) == PAIRS else f"{len(found)} of {PAIRS} pairs"
    return PairSet(name="megadepth1500", root=root, pairs=found, pixel=0.5, note=note)


def _image_root(top: Path, folder: Path) -> Path:
    places = (folder, *(top / place for place in PLACES))
    return next((place for place in places if (place / "Undistorted_SfM").is_dir()), folder)


def _scene_pairs(path: Path) -> Iterable[Pair]:
    scene = read_scene_info(path)
    if missing := [name for name in NEEDED if name not in scene]:
        raise ValueError(f"{os.fspath(path)!r} has no {', '.join(missing)}")
    for number, info in enumerate(scene["pair_infos"]):
        try:
            yield _pair(scene, info, group=path.name[:4])
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise ValueError(f"{os.fspath(path)!r}, pair {number}: {error}") from None


def _pair(scene: dict[str, Any], info: Any, group: str) -> Pair:
    """``info``: two indices of images and their overlap (then the mean of the matches, which nothing here needs)."""
    i, j = (int(index) for index in info[0])
    if min(i, j) < 0 or max(i, j) >= len(scene["image_paths"]):
        raise ValueError(f"images {i} and {j} of {len(scene['image_paths'])}")
    T0, T1 = (_pose(scene["poses"][k], k) for k in (i, j))  # noqa: N806
    return Pair(
        image0=str(scene["image_paths"][i]),
        image1=str(scene["image_paths"][j]),
        group=group,
        K0=scene["intrinsics"][i],
        K1=scene["intrinsics"][j],
        pose=T1 @ np.linalg.inv(T0),
        overlap=float(info[1]),
    )


def _pose(value: Any, index: int) -> Array:
    found = np.asarray(value, dtype=np.float64)
    if found.shape != (4, 4) or not np.isfinite(found).all() or not abs(np.linalg.det(found[:3, :3]) - 1) < 1e-2:
        raise ValueError(f"the pose of image {index} is not a finite [4, 4] with a rotation")
    return found


class _Array(np.ndarray):
    """An array that takes its content from a pickle only where the content fits its type."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Kind) or isinstance(content, list) != kind.dtype.hasobject:
            raise ValueError("an array's content does not fit its type")
        numpy_state: Any = (1, shape, kind.dtype, bool(fortran), content)
        super().__setstate__(numpy_state)


class _Kind:
    """A dtype of numbers, text or objects. A real one would let a pickle call bytes objects: its flags can be set."""

    def __init__(self, code: str, align: object = False, copy: object = True) -> None:
        if code not in ("O", "O4", "O8") and not NUMBERS.fullmatch(code):
            raise ValueError(f"a dtype {code!r} has no place in an index")
        self.dtype = np.dtype("O" if code.startswith("O") else code)

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">", "=", "|"):
            self.dtype = self.dtype.newbyteorder(state[1])


NDARRAY = object()  # stands for numpy.ndarray, which only _empty may be asked to make


def _empty(kind: object, shape: object, code: object) -> _Array:
    if kind is not NDARRAY or shape != (0,):
        raise ValueError("an array begins as an empty one in a pickle of numpy")
    return np.ndarray.__new__(_Array, (0,), "b")


def _scalar(kind: _Kind, content: bytes) -> Any:
    if not isinstance(kind, _Kind) or kind.dtype.hasobject or len(content) != kind.dtype.itemsize:
        raise ValueError("a number's bytes do not fit its type")
    return np.frombuffer(content, kind.dtype)[0]


def _of_bytes(content: bytes, kind: _Kind, shape: tuple[int, ...], order: str) -> np.ndarray:
    if not isinstance(kind, _Kind) or kind.dtype.hasobject:
        raise ValueError("bytes are no objects")
    return np.frombuffer(bytes(content), kind.dtype).reshape(shape, order="F" if order == "F" else "C")


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes as old pickles hold them."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


ARRAYS: dict[tuple[str, str], Any] = {  # every global that a pickle of arrays and numbers names, old and new
    ("numpy", "ndarray"): NDARRAY,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _latin1,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _of_bytes for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    """Arrays, numbers, text and their containers. What a pickle names is never imported: it gets a stand-in, or no."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAYS:
            raise ValueError(f"refused to load {module}.{name} from a pickle: only arrays and numbers are read")
        return ARRAYS[module, name]


def _unpickled(data: bytes) -> Any:
    if len(data) > LARGEST:
        raise ValueError(f"{len(data)} bytes are too many for an index")
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except ValueError as error:
        raise ValueError(f"not an index: {error}") from None
    except Exception as error:  # a damaged pickle fails in any way: EOFError, AttributeError, MemoryError, ...
        raise ValueError(f"not an index: {type(error).__name__} {str(error).partition(chr(10))[0]}".rstrip()) from None


def _members(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            if large := [info for info in members if info.file_size > LARGEST]:
                raise ValueError(f"{large[0].filename} has {large[0].file_size} bytes: too many for an index")
            return {info.filename[:-4]: _array(archive.read(info)) for info in members}
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"not a whole npz: {error}") from None
    except Exception as error:
        if isinstance(error, ValueError | OSError):
            raise
        raise ValueError(f"not a whole npz: {type(error).__name__} {error}") from None


def _array(data: bytes) -> np.ndarray:
    """An array of a ``.npy``, whose objects, if it has any, come through the restricted unpickler."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"an array of version {version} is not read here")
    if not dtype.hasobject:
        if dtype.itemsize * int(np.prod(shape, dtype=object)) > len(data):
            raise ValueError(f"an array of shape {shape} needs more than the {len(data)} bytes there are")
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    found = np.asarray(_unpickled(data[file.tell() :]), dtype=object)
    if found.shape != tuple(shape):
        raise ValueError(f"the head says shape {tuple(shape)}, the array has {found.shape}")
    return found
