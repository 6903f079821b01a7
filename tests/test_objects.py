"""What a detector finds in files: the numbers of a batch, the files that tell them, and images that are none."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.evaluate.small_scenes import DATA, detector, nearly, opened, write_scenes
from vispe.data import rle
from vispe.data.coco import Category, read_png
from vispe.data.scenes import EvalScenes
from vispe.detector import Detector
from vispe.objects import batch_of, predict_objects, write_seen

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")
pytest.importorskip("timm", reason="the extra `detect` brings it")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def test_an_image_is_brought_as_in_evaluation(root):
    data, finder = opened(root), detector("detr_resnet50")
    batch = EvalScenes(data, finder.sizes, masks=False).__getitems__([3])
    (one,) = predict_objects(finder, [str(data[3].path)], 0.0)
    own = batch_of(finder, one.image)
    assert all(
        torch.equal(getattr(own, name), getattr(batch, name)) for name in ("images", "mask", "sizes", "originals")
    )
    (there,) = finder.objects(finder.output(batch), batch, 0.0)
    assert np.array_equal(one.objects.boxes, there.boxes)
    assert len(one.objects.boxes) == 12


def test_boxes(root, tmp_path, monkeypatch):
    data, finder = opened(root), detector("detr_resnet50")
    found = nearly(data)(finder, None, EvalScenes(data, finder.sizes, masks=False).__getitems__([0]))
    monkeypatch.setattr(Detector, "objects", lambda *_: found)
    (one,) = predict_objects(finder, [str(root / "images/0.png")])
    assert write_seen(tmp_path, "0", finder, one) == 3
    told = json.loads((tmp_path / "0.json").read_text())
    assert told["size"] == [40, 56]
    first = {"category_id": 3, "name": "car", "bbox": [4.0, 6.0, 12.0, 10.0], "score": pytest.approx(0.9)}
    assert told["objects"][0] == first
    assert "segments" not in told
    with Image.open(tmp_path / "0_overlay.png") as image:
        assert image.size == (56, 40)
    assert not (tmp_path / "0.png").exists()


def test_masks(root, tmp_path):
    finder = detector("mask2former_resnet50")
    (one,) = predict_objects(finder, [str(root / "images/1.png")], 0.0)
    count = write_seen(tmp_path, "1", finder, one)
    told = json.loads((tmp_path / "1.json").read_text())
    assert count == len(told["objects"]) > 0
    for found in told["objects"]:
        rows, columns = np.nonzero(rle.mask(found["segmentation"], (48, 40)))
        x, y, width, height = found["bbox"]
        assert (columns.min(), rows.min()) == (x, y)
        assert (columns.max() + 1, rows.max() + 1) == (x + width, y + height)


def test_a_panoptic_map(root, tmp_path):
    finder = detector("mask2former_resnet50", DATA)
    (one,) = predict_objects(finder, [str(root / "images/1.png")], 0.0)
    assert write_seen(tmp_path, "1", finder, one) == len(one.panoptic.segments) > 0
    told = json.loads((tmp_path / "1.json").read_text())
    ids = read_png(tmp_path / "1.png", (48, 40))
    assert {segment["id"] for segment in told["segments"]} == set(np.unique(ids).tolist()) - {0}
    for segment in told["segments"]:
        assert segment["area"] == (ids == segment["id"]).sum()
        assert (segment["name"], segment["isthing"]) in {(c.name, int(c.thing)) for c in DATA}
    assert all(found["category_id"] != 119 for found in told["objects"]), "stuff is no object"


def test_labels_without_a_name_are_left_out(root):
    finder = detector("detr_resnet50", (Category(0, "", False), Category(1, "", False)))
    (one,) = predict_objects(finder, [str(root / "images/0.png")], 0.0)
    assert len(one.objects.labels) == len(one.shown.labels) == 0


def test_what_cannot_be_used_says_so(tmp_path):
    (tmp_path / "junk.png").write_text("junk")
    junk, none = predict_objects(detector("detr_resnet50"), [str(tmp_path / "junk.png"), str(tmp_path / "none.png")])
    assert "junk.png" in junk.problem
    assert "none.png" in none.problem
    with pytest.raises(ValueError, match=r"threshold lies in \[0, 1\), got 1.5"):
        next(predict_objects(detector("detr_resnet50"), ["a"], 1.5))
