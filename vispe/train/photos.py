"""Photographs of any kind, from folders or scikit-image: those to learn from and those held out."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from vispe.data.homographies import ViewSpec
from vispe.data.images import as_image, read_image
from vispe.data.sources import folder_files
from vispe.data.stress import PHOTOGRAPHS, photograph
from vispe.spec import Spec
from vispe.weights.files import sha256

SKIMAGE = "skimage"  # in the place of a folder: scikit-image's photographs


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhotoSpec(Spec):
    """Photographs of any kind. ``roots``: folders, or ``skimage`` for scikit-image's own; ``val_part`` of them are held
    out, the same ones every time, and give ``val_pairs`` pairs; ``first``: so many photographs at most. ``corrupt``:
    whether one that cannot be used is left out ("skip") or ends the run ("refuse"). ``seed``: of the views."""

    roots: tuple[str, ...] = (SKIMAGE,)
    val_part: float = 0.15
    val_pairs: int = 200
    first: int | None = None
    corrupt: str = "skip"
    seed: int = 0
    views: ViewSpec = dataclasses.field(default_factory=ViewSpec)

    def __post_init__(self) -> None:
        if not self.roots:
            raise ValueError("roots are folders of photographs, got none")
        if not 0 < self.val_part < 1:
            raise ValueError(f"val_part lies between 0 and 1, got {self.val_part}")
        if self.val_pairs < 1 or (self.first is not None and self.first < 2):
            raise ValueError(f"val_pairs is at least 1, first at least 2, got {self.val_pairs} and {self.first}")
        if self.corrupt not in ("skip", "refuse"):
            raise ValueError(f"corrupt is skip or refuse, got {self.corrupt!r}")


class Photo(NamedTuple):
    """A photograph: its ``name``, where it is (a path, or the name of one of scikit-image's)."""

    name: str
    where: str
    root: str

    @property
    def number(self) -> int:
        """Its own, whatever other photographs there are."""
        return int.from_bytes(hashlib.sha256(self.name.encode(errors="replace")).digest()[:6], "big")

    def content(self) -> str:
        """What tells it from another of its name; of a file that is not there that alone."""
        try:
            return self.name if self.root == SKIMAGE else sha256(self.where)
        except OSError as error:
            return str(error.strerror)

    def read(self) -> Float[Tensor, "3 h w"]:
        """In [0, 1]; ``ImageError`` says what is wrong with it."""
        if self.root != SKIMAGE:
            return read_image(self.where)
        return as_image(photograph(self.where)).expand(3, -1, -1)


def photographs(spec: PhotoSpec) -> tuple[list[Photo], list[Photo]]:
    """Those to learn from and those held out, by a hash of their names; ``ValueError`` where there are too few."""
    found = [photo for root in spec.roots for photo in _photos(root)]
    found = found[: spec.first] if spec.first is not None else found
    order = sorted(found, key=lambda photo: hashlib.sha256(photo.name.encode(errors="replace")).hexdigest())
    held = max(round(spec.val_part * len(order)), 1)
    if len(order) - held < 1:
        raise ValueError(f"{', '.join(spec.roots)}: {len(order)} photographs are too few to hold some of them out")
    return sorted(order[held:]), sorted(order[:held])


def _photos(root: str) -> list[Photo]:
    if root == SKIMAGE:
        photograph(PHOTOGRAPHS[0])  # says so where there are none
        return [Photo(f"{SKIMAGE}/{name}", name, root) for name in PHOTOGRAPHS]
    files = folder_files(root)
    if not len(files):
        raise ValueError(f"there are no images in {root!r}")
    top = Path(root).expanduser()
    return [Photo(f"{top.name}/{path}", os.fspath(top / path), root) for path in files.paths]
