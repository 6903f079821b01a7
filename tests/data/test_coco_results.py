"""Results as COCO has them: read back by pycocotools and by this library."""

import contextlib
import io
import json

import numpy as np
import pytest

from tests.data.conftest import instances, opened, opened_panoptic, panoptic
from vispe.data import rle
from vispe.data.coco import open_coco, read_png
from vispe.data.coco_results import detection_records, panoptic_record, write_panoptic, write_png, write_records

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")


def test_boxes_and_masks_are_read_by_pycocotools(tmp_path):
    from pycocotools.coco import COCO

    data = opened(tmp_path, instances())
    sample, scores = data[1], np.array([0.5, 0.25], dtype=np.float32)
    records = detection_records(7, sample.boxes, sample.labels, scores, data.categories, sample.rles())
    write_records(tmp_path / "found.json", records)
    with contextlib.redirect_stdout(io.StringIO()):
        found = COCO(tmp_path / "instances.json").loadRes(str(tmp_path / "found.json"))
    read = [found.anns[k] for k in sorted(found.anns)]
    assert [a["category_id"] for a in read] == [18, 3]
    assert [a["score"] for a in read] == [0.5, 0.25]
    assert [a["bbox"] for a in records] == [[2, 2, 4, 3], [0.5, 1, 2.25, 7]]
    assert np.array_equal([rle.mask(a["segmentation"], (8, 9)) for a in records], sample.masks())


def test_nothing_found(tmp_path):
    data = opened(tmp_path, instances())
    assert detection_records(9, data[2].boxes, data[2].labels, np.zeros(0), data.categories) == []
    write_records(tmp_path / "found.json", [])
    assert json.loads((tmp_path / "found.json").read_text()) == []


def test_what_is_no_result(tmp_path):
    table = opened(tmp_path, instances()).categories
    box, label = np.ones((1, 4)), np.zeros(1, dtype=int)
    with pytest.raises(ValueError, match="image 3: 1 boxes, 1 labels and 2 scores"):
        detection_records(3, box, label, np.ones(2), table)
    with pytest.raises(ValueError, match="image 3: boxes and scores must be finite"):
        detection_records(3, box, label, np.full(1, np.nan), table)


def test_panoptic_results_are_a_data_set(tmp_path):
    data = opened_panoptic(tmp_path, panoptic())
    (tmp_path / "found").mkdir()
    segments, labels = data[1].segments(), {300: 1, 70000: 0}
    write_png(tmp_path / "found/a.png", segments)
    record = panoptic_record(7, "a.png", segments, labels, data.categories)
    assert record["segments_info"] == [
        {"id": 300, "category_id": 119, "area": 36, "bbox": [0, 0, 9, 4], "iscrowd": 0},
        {"id": 70000, "category_id": 3, "area": 6, "bbox": [0, 4, 3, 2], "iscrowd": 0},
    ]
    write_panoptic(tmp_path / "found.json", [record], data.categories)
    written = json.loads((tmp_path / "found.json").read_text())
    (tmp_path / "again.json").write_text(json.dumps(written | {"images": panoptic()["images"]}))
    again = open_coco(tmp_path / "images", tmp_path / "again.json", pngs=tmp_path / "found")
    assert again.categories == data.categories
    assert np.array_equal(again[1].segments(), segments)


def test_numbers_come_back(tmp_path):
    numbers = np.array([[0, 1, 255, 256], [65535, 65536, 2**24 - 1, 7]])
    write_png(tmp_path / "x.png", numbers)
    assert np.array_equal(read_png(tmp_path / "x.png", (2, 4)), numbers)
    for odd in (-1, 2**24):
        with pytest.raises(ValueError, match="holds 0 to"):
            write_png(tmp_path / "y.png", np.array([[odd]]))
    assert not (tmp_path / "y.png").exists()


def test_segments_without_labels(tmp_path):
    table = opened(tmp_path, instances()).categories
    for labels in ({}, {1: 0, 2: 0}):
        with pytest.raises(ValueError, match=r"image 3: segment \d is drawn and not labelled, or the reverse"):
            panoptic_record(3, "x.png", np.ones((2, 2), dtype=int), labels, table)
