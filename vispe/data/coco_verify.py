"""Everything a COCO data set has, read once: which images and masks cannot be used, and what there is of each class."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from vispe.data.coco import Coco, Sample
from vispe.data.images import ImageError, read_image
from vispe.progress import ahead, track

LOOSE = 2.0  # pixels by which a mask may leave its box: COCO's boxes are those of the polygon, not of its pixels


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was read. ``problems``: a line for what is wrong; ``notes``: for what was only changed, or is odd."""

    images: int
    empty: int  # images without objects: legal
    objects: int
    crowds: int
    masks: int
    per_class: dict[str, int]  # objects that are not crowds
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def verify(data: Coco, *, workers: int | None = None, shown: bool = True) -> Verified:
    """Decode every image and every mask; a bar on stderr tells how far it is. ``workers``: threads, by default one a
    core."""
    threads = len(os.sched_getaffinity(0)) if workers is None else workers
    problems, notes = list(data.problems), list(data.notes)
    counts = np.zeros(len(data.categories), dtype=np.int64)
    empty = objects = crowds = masks = 0
    loose: list[str] = []
    samples = (data[i] for i in range(len(data)))
    for sample, (wrong, drawn, outside) in track(
        ahead(lambda s: (s, _read(s)), samples, threads), "verifying", "images", total=len(data), shown=shown
    ):
        problems += wrong
        loose += outside
        masks += drawn
        empty += not len(sample.ids)
        objects += len(sample.ids)
        crowds += int(sample.crowd.sum())
        counts += np.bincount(sample.labels[~sample.crowd], minlength=len(counts))
    if loose:
        notes.append(f"{data.annotations}: {len(loose)} masks leave their box, first that of {loose[0]}")
    return Verified(
        images=len(data),
        empty=empty,
        objects=objects,
        crowds=crowds,
        masks=masks,
        per_class=dict(zip(data.classes, counts.tolist(), strict=True)),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _read(sample: Sample) -> tuple[list[str], int, list[str]]:
    """What is wrong with a sample, how many masks it has, and which of them leave their box."""
    wrong: list[str] = []
    try:
        h, w = read_image(sample.path).shape[1:]
        if (h, w) != sample.size:
            wrong.append(wrong_size(sample, h, w))
    except ImageError as error:
        wrong.append(str(error))
    names = [f"{'segment' if sample.data.kind == 'panoptic' else 'annotation'} {n}" for n in sample.ids]
    try:
        masks = sample.masks() if _outlined(sample) else np.zeros((0, *sample.size), dtype=bool)
    except ValueError as error:
        return [*wrong, str(error)], 0, []
    gone = [names[k] for k, mask in enumerate(masks) if not mask.any()]
    wrong += [f"{sample.data.annotations}: {name} of image {sample.image_id}: its mask is empty" for name in gone]
    outside = [names[k] for k, mask in enumerate(masks) if mask.any() and _leaves(mask, sample.boxes[k])]
    return wrong, len(masks), outside


def wrong_size(sample: Sample, h: int, w: int) -> str:
    """The sentence for an image that is not as large as its annotations say."""
    told = f"{sample.size[1]} x {sample.size[0]}"
    turned = " (turned as its EXIF data ask for)" if (w, h) == sample.size else ""
    return f"{sample.path}: it is {w} x {h} pixels{turned}, {sample.data.annotations} says {told}"


def _outlined(sample: Sample) -> bool:
    """Whether there are masks to decode: those of all objects, or of none."""
    outlines = [sample.data.outline(sample.number, k) is not None for k in range(len(sample.ids))]
    return sample.data.kind == "panoptic" or any(outlines)


def _leaves(mask: np.ndarray, box: np.ndarray) -> bool:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    tight = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    return bool(((tight - box) * [-1, -1, 1, 1] > LOOSE).any())
