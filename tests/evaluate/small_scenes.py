"""Five small scenes of rectangles in COCO's two formats and as index masks, and tiny networks for them."""

from __future__ import annotations

import json

import numpy as np
import torch
from PIL import Image

import vispe
from vispe.data.coco import Category, open_coco
from vispe.data.coco_results import write_png
from vispe.detector import Detector
from vispe.metrics.detection import Found
from vispe.segmenter import Segmenter

SIZES = ((40, 56), (48, 40), (40, 56), (33, 47), (56, 40))
DATA = (Category(3, "car"), Category(18, "dog"), Category(119, "sky", False))
STAGES = {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)}
PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
DETR = {
    "backbone": "resnet18", "backbone_knobs": STAGES, "width": 32, "heads": 2, "hidden": 16, "encoder_depth": 1,
    "decoder_depth": 1, "num_queries": 12, **PIXELS,
}  # fmt: skip
MASK2FORMER = {
    "backbone_knobs": STAGES, "width": 32, "mask_width": 8, "heads": 2, "hidden": 16, "layers": 2, "encoder_layers": 1,
    "encoder_hidden": 16, "queries": 8, **PIXELS,
}  # fmt: skip
SEGFORMER = {"widths": (8,) * 4, "depths": (1,) * 4, "heads": (1,) * 4, "reductions": (2, 1, 1, 1), "head_width": 8}


def rectangles(k):
    """(label, x, y, w, h) of the things of scene k."""
    h, w = SIZES[k]
    return [(0, 4, 6, 12, 10 + k), (1, w // 2, h // 2, w // 3, h // 4)][: 1 + (k != 3)]


def write_scenes(root):
    """images/, instances.json, panoptic.json and panoptic/, and masks of val/ below ``root``."""
    draw = np.random.default_rng(0)
    for folder in ("images", "panoptic", "semantic/val/images", "semantic/val/masks"):
        (root / folder).mkdir(parents=True)
    objects, segments, number = [], [], 0
    for k, (h, w) in enumerate(SIZES):
        pixels = draw.integers(0, 255, (h, w, 3), dtype=np.uint8)
        ids, mask = np.full((h, w), 900, dtype=np.int32), np.full((h, w), 2, dtype=np.uint8)
        infos = []
        for label, x, y, width, height in rectangles(k):
            number += 1
            pixels[y : y + height, x : x + width] = (250, 0, 0) if label == 0 else (0, 0, 250)
            ids[y : y + height, x : x + width], mask[y : y + height, x : x + width] = number, label
            outline = [x, y, x + width, y, x + width, y + height, x, y + height]
            shared = {"category_id": DATA[label].id, "bbox": [x, y, width, height], "area": width * height}
            objects.append({"id": number, "image_id": 70 + k, "segmentation": [outline], "iscrowd": 0, **shared})
            infos.append({"id": number, "iscrowd": 0, **shared})
        infos.append({"id": 900, "category_id": 119, "bbox": [0, 0, w, h], "area": int((ids == 900).sum())})
        mask[:3] = 255
        for name in (f"images/{k}.png", f"semantic/val/images/{k}.png"):
            Image.fromarray(pixels).save(root / name)
        Image.fromarray(mask).save(root / f"semantic/val/masks/{k}.png")
        write_png(root / f"panoptic/{k}.png", ids)
        segments.append({"image_id": 70 + k, "file_name": f"{k}.png", "segments_info": infos})
    images = [{"id": 70 + k, "file_name": f"{k}.png", "height": h, "width": w} for k, (h, w) in enumerate(SIZES)]
    table = [{"id": c.id, "name": c.name, "isthing": int(c.thing)} for c in DATA]
    for name, found, of in (("instances", objects, table[:2]), ("panoptic", segments, table)):
        (root / f"{name}.json").write_text(json.dumps({"images": images, "annotations": found, "categories": of}))
    (root / "semantic/classes.txt").write_text("car\ndog\nsky\n")
    return root


def opened(root, name="instances"):
    return open_coco(root / "images", root / f"{name}.json")


def detector(name, categories=DATA[:2], **knobs):
    """Untrained, with classes that differ from query to query."""
    torch.manual_seed(3)
    knobs = {**(DETR if name.startswith("detr") else MASK2FORMER), "num_classes": len(categories), **knobs}
    model = vispe.build(name, **knobs)
    head = model.class_head if name.startswith("detr") else model.decoder.class_head
    with torch.no_grad():
        head.weight.mul_(12)
        head.bias[-1] -= 3  # something is always found
    return Detector(model, name, tuple(categories), 40, 64, {})


def segmenter():
    torch.manual_seed(0)
    model = vispe.build("segformer_b0", **SEGFORMER, num_classes=3)
    return Segmenter(model, "segformer_b0", ("car", "dog", "sky"), 40, {})


def nearly(data):
    """``Detector.objects`` that finds the truth of ``data``, shifted and with a false object: 0 < AP < 1."""

    def objects(self, output, batch, threshold=0.0):
        found = []
        for index in batch.indices.tolist():
            sample = data[index]
            shift = index % 3
            boxes = np.concatenate([sample.boxes + shift, sample.boxes[:1] / 2]).astype(np.float32)
            labels = np.concatenate([sample.labels, sample.labels[:1]])
            scores = np.linspace(0.9, 0.3, len(labels)).astype(np.float32)
            masks = [*sample.rles(), sample.rles()[0]] if self.draws else None
            found.append(Found(boxes, labels, scores, masks))
        return found

    return objects
