"""Images with a class for every pixel: a folder of images beside a folder of index masks.

Layouts: ADE20K (``images/training``, ``annotations/training``, 0 is void and classes count from 1), Cityscapes
(``leftImg8bit/train/CITY``, ``gtFine/train/CITY``), CamVid's (``train``, ``trainannot``), and plain ones
(``train/images`` and ``train/masks``, ``images/train`` and ``masks/train``, or ``images`` and ``masks`` alone, of which
a part is held back by a seed). ``masks`` may be called ``labels`` or ``annotations``.

A mask holds a class index a pixel, in a PNG of 8 or 16 bits or with a palette, whose colours are not looked at. What it
says is turned into ``0 .. classes - 1``, and ``VOID`` where nothing is known. Nothing is decoded at opening, unless
nobody says how many classes there are. An image without a mask is refused at once; what is inside a mask when it is
read, or by ``vispe.data.segmentation_verify``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from vispe.data.images import ImageError, read_image
from vispe.data.indices import Progress, histogram, histograms, read_indices
from vispe.data.sources import folder_files
from vispe.spec import Spec

VOID = -1  # in the masks that come out: nothing is known of this pixel
Layout = Literal["auto", "ade20k", "cityscapes", "folders"]
TRAIN, VAL = ("train", "training"), ("val", "valid", "validation", "test")
MASKS = ("masks", "labels", "annotations", "mask", "label", "annotation", "gt")
ENDINGS = ("", "_mask", "_label", "_labels", "_L", "_gt", "_seg", "_labelTrainIds")  # behind the image's name
NAMES = ("classes.txt", "class_names.txt", "labels.txt")  # one class a line, in the root of a plain folder
CITYSCAPES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
# Cityscapes' own ids of those 19 (its labels.py); every other id is void
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SemanticSpec(Spec):
    """Which images and what their masks mean. ``root``: the folder; ``layout`` "auto" looks which one it is.

    ``classes``: their names in the order of the indices, or how many there are; None asks the layout, then
    ``classes.txt`` in the root (one name a line), then all masks. ``void``: the index that means "unknown" in the
    files, None for the layout's own (255), -1 for a folder without one. ``reduce_zero_label``: 0 means unknown and
    index k is class k - 1; None for the layout's own, which is yes for ADE20K alone. ``val_fraction`` is held back,
    drawn by ``split_seed``, where there is no val part. ``train_limit`` and ``val_limit``: at most that many images,
    drawn by the same seed. ``corrupt``: what training does with images and masks that cannot be used.
    """

    root: str
    layout: Layout = "auto"
    classes: tuple[str, ...] | int | None = None
    void: int | None = None
    reduce_zero_label: bool | None = None
    val_fraction: float = 0.2
    split_seed: int = 0
    train_limit: int | None = None
    val_limit: int | None = None
    corrupt: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        if self.layout not in ("auto", "ade20k", "cityscapes", "folders"):
            raise ValueError(f"layout is auto, ade20k, cityscapes or folders, got {self.layout!r}")
        if isinstance(self.classes, Sequence):
            object.__setattr__(self, "classes", tuple(self.classes))
        count = self.classes if isinstance(self.classes, int) else 2 if self.classes is None else len(self.classes)
        if count < 2:
            raise ValueError(f"classes are at least two names, or their number, got {self.classes!r}")
        if self.void is not None and self.void < -1:
            raise ValueError(f"void is an index of the masks, or -1 for none, got {self.void}")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction lies between 0 and 1, got {self.val_fraction}")
        for name in ("train_limit", "val_limit"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is at least 1 image, got {limit}")


class SemanticSample(NamedTuple):
    """``image`` uint8 ``[3, h, w]`` RGB, ``mask`` int64 ``[h, w]`` of classes or ``VOID``, ``name`` of the image."""

    image: UInt8[Tensor, "3 h w"]
    mask: Int[Tensor, "h w"]
    name: str


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What an index in a file means: ``void`` (-1: none) and what is not in ``ids``, if given, is unknown; with
    ``reduced``, 0 is unknown too and index k is class k - 1."""

    void: int = 255
    reduced: bool = False
    ids: tuple[int, ...] | None = None

    def table(self, count: int) -> dict[int, int]:
        """Index in a file -> class or ``VOID``, of every index that is allowed; ``ids`` allow all others too."""
        if self.ids is not None:
            return {index: k for k, index in enumerate(self.ids[:count])}
        table = {k + self.reduced: k for k in range(count)}
        if self.reduced:
            table[0] = VOID
        if self.void >= 0:
            table[self.void] = VOID
        return table


@dataclasses.dataclass(frozen=True)
class SemanticImages:
    """Pairs of files, ``images[i]`` and ``masks[i]``, with the names of ``classes`` and what an index means."""

    images: tuple[str, ...]
    masks: tuple[str, ...]
    classes: tuple[str, ...]
    meaning: Meaning = Meaning()

    def __len__(self) -> int:
        return len(self.images)

    def name(self, i: int) -> str:
        return self.images[i]

    def read(self, i: int) -> SemanticSample:
        """``ImageError`` names a damaged file, a mask of another size, an index beyond the classes."""
        image, mask = read_image(self.images[i]).mul_(255).round_().to(torch.uint8), self.mask(i)
        if image.shape[1:] != mask.shape:
            (h, w), (y, x) = mask.shape, image.shape[1:]
            raise ImageError(f"mask {self.masks[i]!r} is {w} x {h} pixels, its image {self.images[i]!r} is {x} x {y}")
        return SemanticSample(image, mask, self.images[i])

    def mask(self, i: int) -> Int[Tensor, "h w"]:
        """The mask alone; ``ImageError`` as in :meth:`read`."""
        indices = read_indices(self.masks[i])
        table = self.meaning.table(len(self.classes))
        values = histogram(indices)
        if self.meaning.ids is None and (wrong := [value for value in values if value not in table]):
            raise ImageError(self.complaint(i, wrong))
        lookup = np.full(max(values, default=0) + 1, VOID, dtype=np.int64)
        for value in values:
            lookup[value] = table.get(value, VOID)
        return torch.from_numpy(lookup[indices])

    def complaint(self, i: int, wrong: Sequence[int]) -> str:
        """The sentence about a mask with values that mean nothing."""
        last = len(self.classes) - 1 + self.meaning.reduced
        also = f", {self.meaning.void} for void" if self.meaning.void >= 0 else ""
        others = f" (and {len(wrong) - 1} other values)" if len(wrong) > 1 else ""
        return (
            f"mask {self.masks[i]!r} holds the index {wrong[0]}{others}, but {len(self.classes)} classes have "
            f"{int(self.meaning.reduced)} to {last}{also}"
        )

    def subset(self, keep: Sequence[int] | Tensor) -> SemanticImages:
        """Those at the indices ``keep``, in that order."""
        chosen = [int(i) for i in keep]
        images, masks = (tuple(files[i] for i in chosen) for files in (self.images, self.masks))
        return dataclasses.replace(self, images=images, masks=masks)


# --- opening ----------------------------------------------------------------------------------------------------------


def open_semantic(spec: SemanticSpec, progress: Progress | None = None) -> tuple[SemanticImages, SemanticImages]:
    """The training and the validation images; ``ValueError`` says what is missing or does not belong together."""
    layout, train, val = _parts(spec)
    if not train:
        raise ValueError(f"{spec.root!r} has no training images in the layout {layout!r}")
    meaning = _meaning(spec, layout, train)
    classes = _classes(spec, layout, train + (val or []), meaning, progress)
    images = _images(train, classes, meaning)
    if val is None:
        draw = torch.Generator().manual_seed(spec.split_seed)
        order = torch.randperm(len(images), generator=draw)
        held = min(max(round(len(images) * spec.val_fraction), 1), len(images) - 1)
        if not held:
            raise ValueError(f"{spec.root!r} has a single image: nothing is left for validation")
        images, others = images.subset(order[held:].sort().values), images.subset(order[:held].sort().values)
    else:
        others = _images(val, classes, meaning)
    return _limited(images, spec.train_limit, spec.split_seed), _limited(others, spec.val_limit, spec.split_seed)


def open_semantic_part(spec: SemanticSpec, classes: Sequence[str]) -> SemanticImages:
    """Images to evaluate a model of ``classes`` on: the val part, or all there are where nothing is called train."""
    layout, train, val = _parts(spec)
    pairs = val if val is not None else train
    if not pairs:
        raise ValueError(f"{spec.root!r} has no images in the layout {layout!r}")
    if isinstance(spec.classes, int) and spec.classes != len(classes):
        raise ValueError(f"{spec.root!r} is said to have {spec.classes} classes, the model has {len(classes)}")
    if isinstance(spec.classes, tuple) and spec.classes != tuple(classes):
        raise ValueError(
            f"the classes of {spec.root!r} are not the model's: {_first_difference(spec.classes, classes)}"
        )
    images = _images(pairs, tuple(classes), _meaning(spec, layout, pairs))
    return _limited(images, spec.val_limit, spec.split_seed)


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)}"
    return next(f"{k} is {a!r} and {b!r}" for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)


Pairs = list[tuple[str, str]]


def _images(pairs: Pairs, classes: tuple[str, ...], meaning: Meaning) -> SemanticImages:
    return SemanticImages(tuple(image for image, _ in pairs), tuple(mask for _, mask in pairs), classes, meaning)


def _parts(spec: SemanticSpec) -> tuple[Layout, Pairs, Pairs | None]:
    """The layout, the pairs of train, and those of val; None where nothing is set apart."""
    root = Path(spec.root).expanduser()
    if not root.is_dir():
        raise ValueError(f"there is no folder {spec.root!r}")
    layout = spec.layout
    if layout == "auto":
        ade = (root / "images" / "training").is_dir() and (root / "annotations" / "training").is_dir()
        layout = "cityscapes" if (root / "leftImg8bit").is_dir() else "ade20k" if ade else "folders"
    if layout == "cityscapes":
        return layout, _cityscapes(root, "train"), _cityscapes(root, "val")
    folders = {part: _folders(root, names) for part, names in (("train", TRAIN), ("val", VAL))}
    if folders["train"] is None:
        if folders["val"] is not None:
            return layout, [], _pairs(*folders["val"])
        images, masks = root / "images", _there(root, MASKS)
        if not images.is_dir() or masks is None:
            raise ValueError(
                f"{spec.root!r} has no images beside masks: train/images and train/masks, images/train and "
                f"masks/train, train and trainannot, or images and masks (or {', '.join(MASKS[1:3])}) are looked for"
            )
        return layout, _pairs(images, masks), None
    return layout, _pairs(*folders["train"]), _pairs(*folders["val"]) if folders["val"] is not None else None


def _folders(root: Path, names: Sequence[str]) -> tuple[Path, Path] | None:
    """The image and the mask folder of the first of these parts that there is."""
    for name in names:
        masks = _there(root, [f"{kind}/{name}" for kind in MASKS])
        if (root / "images" / name).is_dir() and masks is not None:
            return root / "images" / name, masks
        masks = _there(root / name, MASKS)
        if (root / name / "images").is_dir() and masks is not None:
            return root / name / "images", masks
        if (root / name).is_dir() and (root / f"{name}annot").is_dir():
            return root / name, root / f"{name}annot"
    return None


def _there(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _pairs(images: Path, masks: Path) -> Pairs:
    """Images with the masks of the same name; ``ValueError`` names the first that stays alone."""
    known = {path.rsplit(".", 1)[0]: path for path in folder_files(masks).paths}
    found, lonely, used = [], [], set()
    for path in folder_files(images).paths:
        stem = path.rsplit(".", 1)[0]
        mask = next((stem + end for end in ENDINGS if stem + end in known), None)
        if mask is None:
            lonely.append(os.fspath(images / path))
        else:
            used.add(mask)
            found.append((os.fspath(images / path), os.fspath(masks / known[mask])))
    _refuse(lonely, f"has no mask in {str(masks)!r}", "images")
    _refuse([os.fspath(masks / path) for stem, path in known.items() if stem not in used],
            f"is a mask without an image in {str(images)!r}", "masks")  # fmt: skip
    return found


def _cityscapes(root: Path, part: str) -> Pairs:
    images, masks = root / "leftImg8bit" / part, root / "gtFine" / part
    for folder in (images, masks):
        if not folder.is_dir():
            raise ValueError(f"Cityscapes has a folder {str(folder)!r}, which is not there")
    found, lonely = [], []
    for path in folder_files(images).paths:
        stem = path.removesuffix("_leftImg8bit.png")
        each = (masks / f"{stem}_gtFine_{kind}.png" for kind in ("labelTrainIds", "labelIds"))
        mask = next((name for name in each if name.is_file()), None)
        if mask is None:
            lonely.append(os.fspath(images / path))
        else:
            found.append((os.fspath(images / path), os.fspath(mask)))
    _refuse(lonely, f"has neither labelTrainIds nor labelIds in {str(masks)!r}", "images")
    kinds = {mask.rsplit("_", 1)[-1] for _, mask in found}
    if len(kinds) > 1:
        raise ValueError(f"{str(masks)!r} has labelTrainIds for some images and only labelIds for others")
    return found


def _refuse(names: Sequence[str], why: str, what: str) -> None:
    if names:
        others = f" (and {len(names) - 1} more {what})" if len(names) > 1 else ""
        raise ValueError(f"{names[0]!r} {why}{others}")


def _meaning(spec: SemanticSpec, layout: Layout, pairs: Pairs) -> Meaning:
    if layout == "cityscapes" and pairs[0][1].endswith("_labelIds.png"):
        return Meaning(ids=CITYSCAPES_IDS)
    reduced = layout == "ade20k" if spec.reduce_zero_label is None else spec.reduce_zero_label
    return Meaning(255 if spec.void is None else spec.void, reduced)


def _classes(
    spec: SemanticSpec, layout: Layout, pairs: Pairs, meaning: Meaning, progress: Progress | None
) -> tuple[str, ...]:
    if isinstance(spec.classes, tuple):
        return spec.classes
    if layout == "cityscapes":
        if spec.classes not in (None, len(CITYSCAPES)):
            raise ValueError(f"Cityscapes has {len(CITYSCAPES)} classes, got {spec.classes}")
        return CITYSCAPES
    named = _named(Path(spec.root).expanduser(), layout)
    count = len(named) if named else 150 if layout == "ade20k" else None
    if count is not None:
        if spec.classes not in (None, count):
            raise ValueError(f"{spec.root!r} has {count} classes, got {spec.classes}")
        return named or _numbered(count)
    return _numbered(spec.classes if isinstance(spec.classes, int) else _counted(pairs, meaning, spec.root, progress))


def _named(root: Path, layout: Layout) -> tuple[str, ...] | None:
    """Names from the files that data sets bring: ADE20K's table, or one name a line."""
    if layout == "ade20k" and (root / "objectInfo150.txt").is_file():
        rows = (root / "objectInfo150.txt").read_text(encoding="utf-8").splitlines()[1:]
        return tuple(row.split("\t")[-1].split(",")[0].strip() for row in rows if row.strip())
    path = next((root / name for name in NAMES if (root / name).is_file()), None)
    if path is None:
        return None
    names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if len(names) < 2:
        raise ValueError(f"{str(path)!r} names {len(names)} classes; there must be two or more, one a line")
    return names


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"class {k}" for k in range(count))


def _counted(pairs: Pairs, meaning: Meaning, root: str, progress: Progress | None) -> int:
    """How many classes the masks use, counted from 0 to the largest index."""
    largest = -1
    for _, found in histograms([mask for _, mask in pairs], progress):
        if isinstance(found, str):
            raise ValueError(found)
        largest = max([largest, *(index for index in found if index != meaning.void)])
    count = largest + 1 - meaning.reduced
    if count < 2:
        raise ValueError(
            f"the masks of {root!r} hold nothing but class 0 and void ({meaning.void}): if that index is a class, say "
            "which is void (-1 for none), and how many classes there are"
        )
    return count


def _limited(images: SemanticImages, limit: int | None, seed: int) -> SemanticImages:
    if limit is None or limit >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.subset(order[:limit].sort().values)
