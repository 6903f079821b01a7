"""The picture of examples: a row each, truth and finding beside each other."""

import pytest
from PIL import Image

from vispe.data.segmentation import SemanticSpec, open_semantic_part
from vispe.detector import Detector
from vispe.evaluate.scene_examples import GAP, LINE, WIDE, draw_examples
from vispe.evaluate.scenes import Areas, Objects, predict_scenes

from .small_scenes import DATA, detector, nearly, opened, segmenter, write_scenes

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")
pytest.importorskip("timm", reason="the extra `detect` brings it")


def drawn(work, out, examples):
    predict_scenes(work, out / "p.h5", device="cpu")
    draw_examples(out / "p.h5", work.data, examples, out / "e.png")
    with Image.open(out / "e.png") as image:
        return image.convert("RGB")


def test_objects(tmp_path, monkeypatch):
    data = opened(write_scenes(tmp_path / "own"))
    monkeypatch.setattr(Detector, "objects", nearly(data))
    examples = {"best": [[0, "70", 1.0]], "worst": [[2, "72", 0.25]]}
    made = drawn(Objects("coco-detection", detector("mask2former_resnet50"), data), tmp_path, examples)
    row = 343  # 40 x 56 in 480 x 360
    assert made.size == (2 * WIDE + GAP, 2 * (LINE + row + GAP))
    left, right = (made.crop((x, LINE, x + WIDE, LINE + row)).tobytes() for x in (0, WIDE + GAP))
    assert left != right
    draw_examples(tmp_path / "p.h5", data, {"best": [], "worst": []}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_segments_and_classes(tmp_path):
    root = write_scenes(tmp_path / "own")
    examples = {"best": [[4, "74", 1.0]], "worst": []}
    work = Objects("coco-panoptic", detector("mask2former_resnet50", DATA), opened(root, "panoptic"))
    assert drawn(work, tmp_path, examples).height == LINE + 360 + GAP
    images = open_semantic_part(SemanticSpec(root=str(root / "semantic")), tuple(c.name for c in DATA))
    (tmp_path / "s").mkdir()
    assert drawn(Areas(segmenter(), images, None), tmp_path / "s", examples).width == 2 * WIDE + GAP
