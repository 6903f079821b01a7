"""COCO files made by hand: three images, three objects, two segments."""

from __future__ import annotations

import copy
import json

import numpy as np
from PIL import Image

from vispe.data.coco import open_coco
from vispe.data.coco_results import write_png

CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 3, "name": "car", "supercategory": "vehicle"}]
SQUARE = [[2, 2, 6, 2, 6, 5, 2, 5]]


def instances():
    return {
        "images": [
            {"id": 50, "file_name": "b.jpg", "height": 10, "width": 12},
            {"id": 7, "file_name": "a.jpg", "height": 8, "width": 9},
            {"id": 9, "file_name": "empty.jpg", "height": 5, "width": 5},
        ],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 18, "bbox": [2, 2, 4, 3], "area": 12, "iscrowd": 0,
             "segmentation": SQUARE},
            {"id": 2, "image_id": 50, "category_id": 3, "bbox": [0, 0, 12, 5], "area": 60, "iscrowd": 1,
             "segmentation": {"size": [10, 12], "counts": [0] + [5] * 24}},
            {"id": 3, "image_id": 7, "category_id": 3, "bbox": [0.5, 1, 2.25, 7], "area": 3,
             "segmentation": {"size": [8, 9], "counts": [0, 3, 69]}},
        ],
        "categories": copy.deepcopy(CATEGORIES),
    }  # fmt: skip


def panoptic():
    content = instances()
    content["categories"] = [{"id": 3, "name": "car", "isthing": 1}, {"id": 119, "name": "sky", "isthing": 0}]
    content["annotations"] = [
        {"image_id": 7, "file_name": "a.png", "segments_info": [
            {"id": 300, "category_id": 119, "bbox": [0, 0, 9, 4], "area": 36, "iscrowd": 0},
            {"id": 70000, "category_id": 3, "bbox": [0, 4, 3, 2], "area": 6, "iscrowd": 0}]},
        {"image_id": 50, "file_name": "b.png", "segments_info": []},
    ]  # fmt: skip
    return content


def drawn():
    segments = np.zeros((8, 9), dtype=np.int32)
    segments[:4], segments[4:6, :3] = 300, 70000
    return segments


def write(tmp_path, content, name="instances.json"):
    (tmp_path / "images").mkdir(exist_ok=True)
    for entry in content["images"]:
        if isinstance(entry.get("file_name"), str) and entry["height"]:
            Image.new("RGB", (entry["width"], entry["height"])).save(tmp_path / "images" / entry["file_name"])
    (tmp_path / name).write_text(json.dumps(content))
    return tmp_path / "images", tmp_path / name


def opened(tmp_path, content, **knobs):
    return open_coco(*write(tmp_path, content), **knobs)


def opened_panoptic(tmp_path, content, segments=None, **knobs):
    where = write(tmp_path, content, "panoptic.json")
    (tmp_path / "panoptic").mkdir(exist_ok=True)
    write_png(tmp_path / "panoptic/a.png", drawn() if segments is None else segments)
    write_png(tmp_path / "panoptic/b.png", np.zeros((10, 12), dtype=np.int32))
    return open_coco(*where, **knobs)
