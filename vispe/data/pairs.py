"""Image pairs whose truth is known: what every matching benchmark is read into.

A pair has either a homography, or two camera matrices and a relative pose, or nothing: then it can only be matched.
Names are paths below a root, "/" between folders, with any characters a file name may have. Nothing here reads an image
or imports a network.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vispe.paths import shared

Array = NDArray[np.float64]

SINGULAR = 1e13  # condition number from which on a homography has no inverse to speak of
COLUMNS = {38: 2, 36: 0, 32: 0, 4: 2, 2: 0}  # columns of a line of a pair list -> columns of turns
LARGEST_FILE = 1 << 20  # bytes; nine numbers need less


@dataclass(frozen=True, eq=False, kw_only=True)
class Pair:
    """Two images and their truth; a ``ValueError`` names the pair and what is wrong with it."""

    image0: str
    image1: str
    group: str = ""  # "viewpoint", "illumination", a scene, a kind of stress
    homography: Array | None = None  # H_0to1 [3, 3], pixels of the original images, first centre at (0, 0)
    K0: Array | None = None  # [3, 3]
    K1: Array | None = None
    pose: Array | None = None  # T_0to1 [4, 4]: X1 = R X0 + t
    turns0: int = 0  # quarter turns, counter-clockwise (np.rot90), made before the image is looked at
    turns1: int = 0
    overlap: float | None = None  # where the index tells it

    def __post_init__(self) -> None:
        try:
            for name in ("image0", "image1"):
                object.__setattr__(self, name, _relative(getattr(self, name)))
            for name, shape in (("homography", (3, 3)), ("K0", (3, 3)), ("K1", (3, 3)), ("pose", (4, 4))):
                if getattr(self, name) is not None:
                    object.__setattr__(self, name, _matrix(getattr(self, name), shape, name))
            self._check()
        except ValueError as error:
            raise ValueError(f"pair {self.image0!r} and {self.image1!r}: {error}") from None

    @property
    def task(self) -> str:
        """ "homography", "pose", or "none" where nothing is known."""
        return "homography" if self.homography is not None else "pose" if self.pose is not None else "none"

    def _check(self) -> None:
        for turns in (self.turns0, self.turns1):
            if turns not in (0, 1, 2, 3):
                raise ValueError(f"quarter turns are 0, 1, 2 or 3, got {turns!r}")
        if self.overlap is not None and not math.isfinite(self.overlap):
            raise ValueError(f"the overlap must be a finite number, got {self.overlap!r}")
        posed = [name for name in ("K0", "K1", "pose") if getattr(self, name) is not None]
        if len(posed) not in (0, 3) or (self.homography is not None and posed):
            found = ", ".join([*(["homography"] if self.homography is not None else []), *posed])
            raise ValueError(f"the truth is either a homography or K0, K1 and pose, got {found}")
        if self.homography is not None:
            _check_homography(self.homography)
        if self.K0 is not None and self.K1 is not None and self.pose is not None:
            _check_camera(self.K0, "K0")
            _check_camera(self.K1, "K1")
            _check_pose(self.pose)


@dataclass(frozen=True, eq=False, kw_only=True)
class PairSet:
    """Pairs below one root, all with the same kind of truth."""

    name: str  # "hpatches", "megadepth1500", "scannet1500", "pairs", "images", "stress"
    root: Path
    pairs: tuple[Pair, ...]
    pixel: float = 0.0  # where K puts the first pixel's centre: 0.0 (OpenCV) or 0.5 (COLMAP, MegaDepth)
    K_size: tuple[int, int] | None = None  # (h, w) of the images K0 and K1 belong to; None: the files as they are
    note: str = ""  # what a reader of the numbers must know: "4 of 108 sequences"

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ValueError(f"{self.name}: no pairs")
        if len({pair.task for pair in self.pairs}) > 1:
            raise ValueError(f"{self.name}: some pairs have another truth than others, or none; a set has one kind")
        if self.pixel not in (0.0, 0.5):
            raise ValueError(f"{self.name}: the first pixel's centre is at 0.0 or 0.5, got {self.pixel!r}")
        if self.K_size is not None and min(self.K_size) < 1:
            raise ValueError(f"{self.name}: K_size is (h, w) in pixels, got {self.K_size!r}")

    @property
    def task(self) -> str:
        """ "homography", "pose", or "none"."""
        return self.pairs[0].task

    @property
    def images(self) -> list[tuple[str, int]]:
        """Every image once for each turn it is looked at with, ``(name, turns)``, in order of first use."""
        both = (((p.image0, p.turns0), (p.image1, p.turns1)) for p in self.pairs)
        return list(dict.fromkeys(image for pair in both for image in pair))

    def check_truth(self) -> None:
        """A ``ValueError`` when nothing is known of the pairs that a score could go by."""
        if self.task == "none":
            raise ValueError(f"{self.name}: nothing is known of the pairs to score by; vispe match-pairs matches them")

    def check_files(self) -> None:
        """A ``ValueError`` tells how many image files are missing and the first of them."""
        names = list(dict.fromkeys(name for name, _ in self.images))
        if missing := [name for name in names if not (self.root / name).is_file()]:
            layout = facts(self.name).get("layout")
            raise ValueError(
                f"{self.name}: {len(missing)} of {len(names)} images are missing below {str(self.root)!r}, "
                f"the first is {missing[0]!r}" + (f"; expected: {layout}" if layout else "")
            )


def read_pair_list(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    name: str = "pairs",
    pixel: float = 0.0,
    K_size: tuple[int, int] | None = None,  # noqa: N803
    group: Callable[[str], str] | None = None,
) -> PairSet:
    """A list of pairs, one a line: ``name0 name1 turns0 turns1 K0(9) K1(9) T_0to1(16)``, matrices row by row.

    SuperGlue's format (38 columns), and glue-factory's, which has no turns and may write the pose as R(9) t(3) (36 or
    32 columns); or the names alone, with or without turns (2 or 4 columns), where nothing is known. A name with spaces
    is separated by tabs or stands in double quotes (a quote inside is doubled). A BOM, CRLF, empty lines and lines that
    start with # are fine; a pair that comes again is kept once. A ``ValueError`` names the line and the value.
    ``group`` makes a pair's group of its first name.

    The turns are those of SuperGlue's ``match_pairs.py``: ``np.rot90(image, k)``, counter-clockwise. K and the pose in
    the list belong to the image *before* it is turned: that script turns K and the pose by the same k before it scores
    points of the turned image. Here points are turned back to the file's own frame, where K and the pose hold as they
    stand. Angles between poses are the same in both, for turning the cameras multiplies both rotations alike.
    """
    text = _text(path)
    found: dict[tuple[object, ...], Pair] = {}
    for number, line in enumerate(text.split("\n"), 1):
        try:
            pair = _pair_of_line(line.rstrip("\r"), group)
            if pair is None:
                continue
            key = (pair.image0, pair.image1, pair.turns0, pair.turns1)
            if key in found and not _same_truth(found[key], pair):
                raise ValueError(f"the pair {pair.image0!r} and {pair.image1!r} came before with another truth")
            found.setdefault(key, pair)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{os.fspath(path)!r} lists no pairs")
    return PairSet(name=name, root=Path(root), pairs=tuple(found.values()), pixel=pixel, K_size=K_size)


def image_pairs(
    images: Sequence[str | os.PathLike[str]],
    homographies: Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str] | None = None,
) -> PairSet:
    """The first image against each other one, with a file of the homography from the first to it.

    With ``root`` the images are names below it; without, paths, and the root is the folder they have in common.
    A ``ValueError`` tells what does not fit; :func:`read_homography` says which files are read.
    """
    if len(images) < 2:
        raise ValueError(f"give at least two images, got {len(images)}")
    if len(homographies) != len(images) - 1:
        raise ValueError(f"{len(images)} images need {len(images) - 1} homographies, got {len(homographies)}")
    if root is None:
        paths = [os.path.abspath(image) for image in images]
        try:
            root = os.path.commonpath([os.path.dirname(path) for path in paths])
        except ValueError as error:
            raise ValueError(f"the images have no folder in common: {error}") from None
        images = [Path(os.path.relpath(path, root)).as_posix() for path in paths]
    first, *others = (Path(image).as_posix() for image in images)
    if again := [image for image in others if others.count(image) > 1]:
        raise ValueError(f"{again[0]!r} is given twice")
    truths = [read_homography(path) for path in homographies]
    pairs = tuple(Pair(image0=first, image1=other, homography=H) for other, H in zip(others, truths, strict=True))
    return PairSet(name="images", root=Path(root), pairs=pairs)


def read_homography(path: str | os.PathLike[str]) -> Array:
    """``H [3, 3]`` from a file: nine numbers as text, a ``.npy``, or OpenCV's ``.xml``, ``.yml``, ``.yaml``.

    A ``ValueError`` names the file and what is wrong with it.
    """
    try:
        suffix = Path(path).suffix.lower()
        found: ArrayLike
        if suffix == ".npy":
            found = _read_npy(path)
        elif suffix == ".xml":
            found = _opencv_xml(_text(path, limit=LARGEST_FILE))
        elif suffix in (".yml", ".yaml"):
            found = _opencv_yaml(_text(path, limit=LARGEST_FILE))
        else:
            found = _plain_text(_text(path, limit=LARGEST_FILE))
        matrix = _matrix(found, (3, 3), "a homography")
        _check_homography(matrix)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r}: {error}") from None
    return matrix


def facts(name: str) -> dict[str, str]:
    """The table ``[dataset]`` of ``data/NAME.toml``; empty when there is no such data set."""
    path = shared("data") / f"{name}.toml"
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["dataset"]) if path.is_file() else {}


def to_fetch(name: str, root: str | os.PathLike[str], problem: str) -> str:
    """One line for a root without the data set: the problem, what to fetch, how large, where it goes, the licence."""
    fact = facts(name)
    mirror = f" (or {fact['mirror']})" if fact.get("mirror") else ""
    return (
        f"{name}: {problem} in {os.fspath(root)!r}. Fetch {fact['url']}{mirror}, {fact['size']}, and unpack it there: "
        f"{fact['layout']}. Licence: {fact['licence']}"
    )


def _relative(name: str) -> str:
    """The name without "." and doubled "/"; it must stay below the root."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"an image's name is a path below the root, got {name!r}")
    return str(path)


def _matrix(value: ArrayLike, shape: tuple[int, int], name: str) -> Array:
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is not made of numbers") from None
    if found.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got shape {list(found.shape)}")
    if not np.isfinite(found).all():
        raise ValueError(f"{name} has a value that is not finite")
    found.flags.writeable = False
    return found


def _check_homography(matrix: Array) -> None:
    with np.errstate(all="ignore"):
        if not np.linalg.cond(matrix) < SINGULAR:
            raise ValueError("the homography is singular")


def _check_camera(matrix: Array, name: str) -> None:
    """Upper triangular, positive focal lengths, ``K[2, 2] = 1``, no skew: all that a pinhole of two focals can be."""
    if matrix[1, 0] or matrix[2, 0] or matrix[2, 1]:
        raise ValueError(f"{name} must be upper triangular, got {matrix.tolist()}")
    if matrix[0, 0] <= 0 or matrix[1, 1] <= 0:
        raise ValueError(f"the focal lengths of {name} must be positive, got {matrix[0, 0]!r} and {matrix[1, 1]!r}")
    if matrix[2, 2] != 1 or abs(matrix[0, 1]) > 1e-6 * matrix[0, 0]:
        raise ValueError(f"{name} must have 1 in its corner and no skew, got {matrix.tolist()}")


def _check_pose(matrix: Array) -> None:
    rotation, translation = matrix[:3, :3], matrix[:3, 3]
    if np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-3 or np.linalg.det(rotation) < 0:
        raise ValueError(f"the pose's rotation must be orthonormal with determinant 1, got {rotation.tolist()}")
    if np.abs(matrix[3] - (0, 0, 0, 1)).max() > 1e-6:
        raise ValueError(f"the pose's last row must be 0 0 0 1, got {matrix[3].tolist()}")
    if not translation.any():
        raise ValueError("the pose's translation is zero: it has no direction to compare with")


def _same_truth(a: Pair, b: Pair) -> bool:
    values = ((getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Pair))
    return all(x is y or np.array_equal(x, y) for x, y in values)


def _text(path: str | os.PathLike[str], limit: int | None = None) -> str:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {os.fspath(path)!r}: {error.strerror}") from None
    if limit is not None and len(data) > limit:
        raise ValueError(f"{len(data)} bytes are too many for nine numbers")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)!r} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _pair_of_line(line: str, group: Callable[[str], str] | None) -> Pair | None:
    if not line.strip() or line.lstrip().startswith("#"):
        return None
    name0, name1, *numbers = _fields(line)
    if len(numbers) + 2 not in COLUMNS:
        raise ValueError(
            "2 names and 36 numbers are needed (30 or 34 without turns, 0 or 2 without a truth), "
            f"got {len(numbers) + 2} columns; a name with spaces is separated by tabs or stands in double quotes"
        )
    skip = COLUMNS[len(numbers) + 2]
    turns = [_turns(word) for word in numbers[:skip]] or [0, 0]
    values = np.array([_number(word) for word in numbers[skip:]])
    pose = np.eye(4)
    if not len(values):
        return Pair(image0=name0, image1=name1, group=group(name0) if group else "", turns0=turns[0], turns1=turns[1])
    if len(values) == 30:
        pose[:3, :3], pose[:3, 3] = values[18:27].reshape(3, 3), values[27:]
    else:
        pose = values[18:].reshape(4, 4)
    return Pair(
        image0=name0,
        image1=name1,
        group=group(name0) if group else "",
        K0=values[:9].reshape(3, 3),
        K1=values[9:18].reshape(3, 3),
        pose=pose,
        turns0=turns[0],
        turns1=turns[1],
    )


QUOTED = re.compile(r'"((?:[^"]|"")*)"(?=\s|$)')


def _fields(line: str) -> Iterator[str]:
    """Two names, then words. A line with a tab outside of quotes ends its names at tabs, any other at blanks."""
    blank = r"\t" if "\t" in QUOTED.sub("", line) else r"[ \t]"
    rest = line if blank == r"\t" else line.lstrip(" \t")
    for _ in range(2):
        if quoted := QUOTED.match(rest):
            name, rest = quoted[1].replace('""', '"'), rest[quoted.end() :]
        else:
            name, *after = re.split(blank, rest, maxsplit=1)
            rest = after[0] if after else ""
        yield name
        rest = rest.lstrip(" \t")
    yield from rest.split()


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number") from None


def _turns(word: str) -> int:
    if word not in ("0", "1", "2", "3"):
        raise ValueError(f"quarter turns are 0, 1, 2 or 3, got {word!r}")
    return int(word)


def _plain_text(text: str) -> list[list[float]]:
    lines = [line.partition("#")[0].replace(",", " ").split() for line in text.splitlines()]
    rows = [[_number(word) for word in line] for line in lines if line]
    if [len(row) for row in rows] == [9]:
        rows = [rows[0][i : i + 3] for i in (0, 3, 6)]
    if [len(row) for row in rows] != [3, 3, 3]:
        raise ValueError(f"a homography is 3 lines of 3 numbers, got lines of {[len(row) for row in rows]}")
    return rows


def _read_npy(path: str | os.PathLike[str]) -> Array:
    try:
        if os.path.getsize(path) > LARGEST_FILE:
            raise ValueError("too many bytes for nine numbers")
        return np.load(path, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"cannot read it: {error.strerror or error}") from None
    except (ValueError, EOFError, MemoryError) as error:
        raise ValueError(
            f"not an array of numbers: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None


def _opencv_xml(text: str) -> Array:
    """The one matrix of a file of ``cv::FileStorage``, such as ``H1to3p.xml`` of OpenCV's samples."""
    from xml.etree import ElementTree

    if "<!" in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL):
        raise ValueError("a declaration of entities has no place in a matrix")
    try:
        tree = ElementTree.fromstring(text.strip())
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}") from None
    found = [element for element in tree.iter() if element.get("type_id") == "opencv-matrix"]
    return _opencv_matrix([tuple(element.findtext(part, "") for part in ("rows", "cols", "data")) for element in found])


def _opencv_yaml(text: str) -> Array:
    pattern = r"!!opencv-matrix\s+rows:\s*(\d+)\s+cols:\s*(\d+)\s+dt:\s*\S+\s+data:\s*\[([^\]]*)\]"
    return _opencv_matrix([match.groups() for match in re.finditer(pattern, text)])


def _opencv_matrix(found: Sequence[tuple[str, ...]]) -> Array:
    if len(found) != 1:
        raise ValueError(f"one matrix of OpenCV is expected, found {len(found)}")
    rows, cols, data = (part.strip() for part in found[0])
    values = [_number(word) for word in data.replace(",", " ").split()]
    if (rows, cols, len(values)) != ("3", "3", 9):
        raise ValueError(f"a matrix of 3 x 3 is expected, got {rows} x {cols} with {len(values)} numbers")
    return np.array(values).reshape(3, 3)
