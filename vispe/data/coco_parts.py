"""The images to learn from and those to be judged by: two COCO files, or one that is parted."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from vispe.data.coco import Bad, Coco, check_classes, open_coco
from vispe.data.coco_verify import wrong_size
from vispe.data.images import ImageError, read_image
from vispe.data.indices import threaded
from vispe.data.verify import check_enough
from vispe.spec import Spec

Progress = Callable[[int, int], object]  # (images done, images in all)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CocoSpec(Spec):
    """Where the data are; what is no absolute path lies below ``root``.

    ``train`` and ``val`` are ``instances_*.json`` or ``panoptic_*.json``, with the folders of their images, and of
    their PNGs where these are not called as the file. ``val: null`` holds out the part ``val_part`` of the training
    images, the same ones in every run. ``first``: learn from the first so many images alone. ``corrupt``: whether an
    image or annotation that cannot be used ends the run ("refuse") or is left out ("skip").
    """

    root: str = "."
    train: str = "annotations/instances_train2017.json"
    train_images: str = "train2017"
    train_pngs: str | None = None
    val: str | None = "annotations/instances_val2017.json"
    val_images: str = "val2017"
    val_pngs: str | None = None
    val_part: float = 0.1
    first: int | None = None
    corrupt: Bad = "refuse"

    def __post_init__(self) -> None:
        if not 0 < self.val_part < 1:
            raise ValueError(f"val_part lies between 0 and 1, got {self.val_part}")
        if self.first is not None and self.first < 1:
            raise ValueError(f"first is a number of images of at least 1, got {self.first}")
        if self.corrupt not in ("refuse", "skip"):
            raise ValueError(f"corrupt is refuse or skip, got {self.corrupt!r}")


def open_parts(spec: CocoSpec) -> tuple[Coco, Coco]:
    """Training and validation images; ``ValueError`` where one is missing, wrong, or of other classes or kind."""
    train = _opened(spec, spec.train_images, spec.train, spec.train_pngs)
    if spec.val is None:
        train, val = _parted(train, spec.val_part)
    else:
        val = _opened(spec, spec.val_images, spec.val, spec.val_pngs)
        check_classes(val, train.classes)
        if val.kind != train.kind:
            raise ValueError(f"{train.annotations} is of {train.kind}, {val.annotations} of {val.kind}")
    return train.subset(range(min(spec.first or len(train), len(train)))), val


def sound_scenes(data: Coco, corrupt: Bad, progress: Progress | None = None) -> tuple[Coco, list[str]]:
    """The images that can be decoded and are as large as the file says, as are the PNGs of their segments, and a
    sentence for each of the others.

    ``corrupt="refuse"``: a ``ValueError`` names the first of those instead and counts the rest.
    """
    problems: dict[int, str] = {}
    for i, reason in enumerate(threaded(lambda i: _fault(data, i), range(len(data)))):
        if reason:
            problems[i] = reason
        if progress is not None:
            progress(i + 1, len(data))
    check_enough(list(problems.values()), len(data), corrupt, "used")
    return data.subset([i for i in range(len(data)) if i not in problems]), list(problems.values())


def _opened(spec: CocoSpec, images: str, annotations: str, pngs: str | None) -> Coco:
    root = Path(spec.root).expanduser()
    return open_coco(root / images, root / annotations, pngs=None if pngs is None else root / pngs, bad=spec.corrupt)


def _parted(data: Coco, part: float) -> tuple[Coco, Coco]:
    held = max(round(part * len(data)), 1)
    if held >= len(data):
        raise ValueError(f"{data.annotations}: {len(data)} images are too few to hold out {part} of; give data.val")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return data.subset(sorted(order[held:])), data.subset(sorted(order[:held]))


def _fault(data: Coco, i: int) -> str:
    sample = data[i]
    try:
        h, w = read_image(os.fspath(sample.path)).shape[1:]
    except ImageError as error:
        return str(error)
    if (h, w) != sample.size:
        return wrong_size(sample, h, w)
    try:
        if data.kind == "panoptic":
            sample.segments()
    except ValueError as error:
        return str(error)
    return ""
