"""COCO's formats for results: boxes and masks in one JSON list, panoptic images as PNGs with their JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from PIL import Image

from vispe.data.coco import Category
from vispe.data.rle import Rle
from vispe.files import write_atomically, write_json

Record = dict[str, Any]


def detection_records(
    image_id: int,
    boxes: Float[np.ndarray, "n 4"],
    labels: Int[np.ndarray, " n"],
    scores: Float[np.ndarray, " n"],
    categories: Sequence[Category],
    masks: Sequence[Rle] | None = None,
) -> list[Record]:
    """One image's objects as COCO's result files have them: the file's category ids, boxes as x, y, width, height.

    ``boxes`` are corners in pixels of the image as the file knows it; ``masks`` are run lengths (``rle.encode``).
    """
    if not len(boxes) == len(labels) == len(scores) == len(boxes if masks is None else masks):
        raise ValueError(f"image {image_id}: {len(boxes)} boxes, {len(labels)} labels and {len(scores)} scores")
    corners = np.asarray(boxes, dtype=np.float64)
    if not (np.isfinite(corners).all() and np.isfinite(scores).all()):
        raise ValueError(f"image {image_id}: boxes and scores must be finite")
    sides = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).round(4).tolist()
    known = [int(category.id) for category in categories]
    rows = zip(sides, np.asarray(labels).tolist(), np.asarray(scores, dtype=np.float64).tolist(), strict=True)
    records = [
        {"image_id": int(image_id), "category_id": known[label], "bbox": box, "score": score}
        for box, label, score in rows
    ]
    for record, mask in zip(records, masks or (), strict=False):
        record["segmentation"] = mask
    return records


def write_records(path: str | os.PathLike[str], records: Sequence[Record]) -> None:
    """All records, a line each, in one step."""
    lines = ",\n".join(json.dumps(record, allow_nan=False, separators=(",", ":")) for record in records)
    write_atomically(path, lambda temporary: temporary.write_text(f"[{lines}]\n", encoding="utf-8"))


def write_png(path: str | os.PathLike[str], segments: Int[np.ndarray, "h w"]) -> None:
    """Numbers below 2^24 as R + 256 G + 256^2 B, in one step; 0 is nothing."""
    numbers = np.asarray(segments)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < 2**24:
        raise ValueError(f"a panoptic PNG holds 0 to 2^24 - 1, got {numbers.min()} to {numbers.max()}")
    colours = np.stack([numbers & 255, numbers >> 8 & 255, numbers >> 16 & 255], -1).astype(np.uint8)
    write_atomically(path, lambda temporary: Image.fromarray(colours).save(temporary, format="PNG"))


def panoptic_record(
    image_id: int,
    name: str,
    segments: Int[np.ndarray, "h w"],
    labels: Mapping[int, int],
    categories: Sequence[Category],
) -> Record:
    """The JSON of one image drawn in the PNG ``name``; ``labels`` says which label each of its numbers has."""
    numbers, areas = np.unique(segments, return_counts=True)
    drawn: NDArray[Any] = numbers[numbers > 0]
    if set(drawn.tolist()) != set(labels):
        odd = min(set(drawn.tolist()) ^ set(labels))
        raise ValueError(f"image {image_id}: segment {odd} is drawn and not labelled, or the reverse")
    infos = []
    for number, area in zip(numbers.tolist(), areas.tolist(), strict=True):
        if number:
            rows, columns = (np.flatnonzero((segments == number).any(axis)) for axis in (1, 0))
            x, y = int(columns[0]), int(rows[0])
            box = [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y]
            category = int(categories[labels[number]].id)
            infos.append({"id": number, "category_id": category, "area": area, "bbox": box, "iscrowd": 0})
    return {"image_id": int(image_id), "file_name": name, "segments_info": infos}


def write_panoptic(path: str | os.PathLike[str], records: Sequence[Record], categories: Sequence[Category]) -> None:
    """The JSON beside the folder of PNGs (``path`` without its suffix), in one step."""
    table = [{"id": int(c.id), "name": c.name, "isthing": int(c.thing)} for c in categories]
    write_json(Path(path), {"annotations": list(records), "categories": table})
