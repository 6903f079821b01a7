"""HPatches (Balntas et al. 2017): sequences of a planar or a far scene, with the homography from the first image.

Every sequence is a folder ``i_NAME`` (the light changes) or ``v_NAME`` (the viewpoint changes) with images 1 to 6 and
``H_1_2`` to ``H_1_6``. Matching is measured on 108 of the 116: the 8 with the largest images are left out, as D2-Net
began and everyone since does. The homographies are kept as they are stored, first pixel's centre at (0, 0).
"""

from __future__ import annotations

import os
from pathlib import Path

from vispe.data.pairs import Pair, PairSet, facts, read_homography, to_fetch

FOLDER = "hpatches-sequences-release"
GROUPS = {"i_": "illumination", "v_": "viewpoint"}
SUFFIXES = ("ppm", "png", "jpg", "jpeg")
SEQUENCES = 116


def hpatches(root: str | os.PathLike[str], *, all_sequences: bool = False) -> PairSet:
    """Five pairs a sequence, image 1 with each other, grouped "illumination" and "viewpoint".

    ``root`` is the folder of the sequences or the one above it. Fewer sequences than the benchmark has are read, and
    ``note`` says so. ``all_sequences`` takes the 8 large ones too. A ``ValueError`` tells what to fetch, or names the
    file that is missing or damaged.
    """
    folder, found = _sequences(Path(root))
    excluded = () if all_sequences else tuple(facts("hpatches")["excluded"])
    taken = [name for name in found if name not in excluded]
    if not taken:
        raise ValueError(to_fetch("hpatches", root, "no folders i_* or v_* of the benchmark"))
    pairs = tuple(_pair(folder, name, k) for name in taken for k in range(2, 7))
    expected = SEQUENCES - len(excluded)
    note = "" if len(taken) == expected else f"{len(taken)} of {expected} sequences"
    return PairSet(name="hpatches", root=folder, pairs=pairs, note=note)


def _sequences(root: Path) -> tuple[Path, list[str]]:
    for folder in (root, root / FOLDER):
        if folder.is_dir() and (found := sorted(p.name for p in folder.iterdir() if _is_sequence(p))):
            return folder, found
    return root, []


def _is_sequence(path: Path) -> bool:
    return path.name[:2] in GROUPS and path.is_dir()


def _pair(folder: Path, sequence: str, k: int) -> Pair:
    truth = read_homography(folder / sequence / f"H_1_{k}")
    first, other = _image(folder, sequence, 1), _image(folder, sequence, k)
    return Pair(image0=first, image1=other, group=GROUPS[sequence[:2]], homography=truth)


def _image(folder: Path, sequence: str, k: int) -> str:
    """The file of image ``k``; releases differ in its kind. The published name where there is none."""
    names = [f"{sequence}/{k}.{suffix}" for suffix in SUFFIXES]
    return next((name for name in names if (folder / name).is_file()), names[0])
