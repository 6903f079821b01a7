"""``examples.png``: images beside their truth and beside what was found in them, the best and the worst."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vispe.cache import CacheReader
from vispe.data.coco import Coco
from vispe.data.images import read_image
from vispe.data.segmentation import SemanticImages
from vispe.detector import decoded, pictured
from vispe.evaluate.scene_records import chosen, classes, entry_of, network_of, unpack
from vispe.evaluate.scene_score import DRAWN, outlined, painted_classes
from vispe.files import write_atomically
from vispe.segmenter import overlay

WIDE, TALL = 480, 360  # pixels into which a picture is fitted
LINE, GAP = 18, 6  # pixels of a line of text, and between pictures
Both = tuple[UInt8[Tensor, "3 h w"], UInt8[Tensor, "3 h w"]]


def draw_examples(predictions: Path, data: Coco | SemanticImages, examples: Mapping[str, Any], path: Path) -> None:
    """A row for each of ``examples["best"]`` and ``["worst"]``: the truth to the left, what was found to the right.

    Boxes with low scores are left out; crowds are drawn. Without an example there is no picture.
    """
    rows = []
    with CacheReader(predictions) as reader:
        for side in ("best", "worst"):
            for place, (i, name, quality) in enumerate(examples[side], 1):
                both = _objects(reader, data, i) if isinstance(data, Coco) else _areas(reader, data, i)
                rows.append(_row(f"{side} {place}: {name}, {quality:.3f}", both))
    if rows:
        write_atomically(path, partial(Image.fromarray(np.concatenate(rows)).save, format="PNG"))


def _objects(reader: CacheReader, data: Coco, i: int) -> Both:
    sample, task = data[i], reader.made["task"]
    image = _pixels(str(sample.path))
    own = classes(network_of(reader.made), data, task, partial=True)
    found = own.translated(unpack(reader.read(str(sample.image_id))))
    if task == "coco-detection":
        found = chosen(found, found.scores >= DRAWN)
    keep = own.asked[sample.labels]
    masks = sample.masks()[keep] if found.masks is not None and outlined(data) else None
    boxes = sample.boxes[keep].astype(np.float64)
    truth = pictured(image, data.categories, sample.labels[keep], boxes, None, masks)
    return truth, pictured(image, data.categories, found.labels, found.boxes, found.scores, decoded(found))


def _areas(reader: CacheReader, images: SemanticImages, i: int) -> Both:
    sample = images.read(i)
    size = (int(sample.mask.shape[0]), int(sample.mask.shape[1]))
    found = torch.from_numpy(painted_classes(unpack(reader.read(entry_of(images, i))), size))
    count = len(images.classes)
    return overlay(sample.image, sample.mask, count), overlay(sample.image, found, count)


def _pixels(path: str) -> UInt8[Tensor, "3 h w"]:
    return read_image(path).mul_(255).round_().to(torch.uint8)


def _row(text: str, both: Both) -> np.ndarray:
    """Two pictures side by side below a line of text."""
    pictures = [Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()) for picture in both]
    scale = min(WIDE / pictures[0].width, TALL / pictures[0].height)
    size = (max(round(pictures[0].width * scale), 1), max(round(pictures[0].height * scale), 1))
    row = Image.new("RGB", (2 * WIDE + GAP, LINE + size[1] + GAP), "white")
    ImageDraw.Draw(row).text((2, 2), f"{text} (truth, found)", fill="black", font=ImageFont.load_default())
    for k, picture in enumerate(pictures):
        row.paste(picture.resize(size, Image.Resampling.BILINEAR), (k * (WIDE + GAP), LINE))
    return np.asarray(row)
