"""Pass 1 of scenes: everything once, nothing stale, nothing lost; and the numbers are those of ``measure``."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vispe.cache import CacheReader
from vispe.data.images import ImageError
from vispe.data.segmentation import SemanticSpec, open_semantic_part
from vispe.detector import Detector, measure
from vispe.evaluate.scenes import Areas, Objects, evaluate_scenes, predict_scenes, weights_sha256
from vispe.segmenter import evaluate_semantic

from .small_scenes import DATA, detector, nearly, opened, segmenter, write_scenes

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")
pytest.importorskip("faster_coco_eval", reason="the extra `detect` brings it")
pytest.importorskip("timm", reason="the extra `detect` brings it")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes é"))


@pytest.fixture(scope="module")
def detr():
    return detector("detr_resnet50")


@pytest.fixture(scope="module")
def whole():
    return detector("mask2former_resnet50", DATA)


@pytest.fixture
def calls(monkeypatch):
    """The image numbers of each batch that a network saw."""
    seen, output = [], Detector.output

    def counted(self, batch):
        seen.append(batch.indices.tolist())
        return output(self, batch)

    monkeypatch.setattr(Detector, "output", counted)
    return seen


def run(work, out, **knobs):
    (report,) = evaluate_scenes([work], out, {}, device="cpu", batch_size=2, **knobs)
    return report


def kept(out):
    """Every file of a score; of the report what repeats."""
    files = {
        p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.suffix in (".json", ".png")
    }
    report = json.loads((out / "report.json").read_text())
    del report["timing"]
    return {str(name): data for name, data in files.items() if name.name != "report.json"} | {"report": report}


def numbers(summary):
    return {kind: {k: v for k, v in told.items() if k != "per_class"} for kind, told in summary.items()}


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["detr_resnet50", "mask2former_resnet50"])
@pytest.mark.parametrize("found", ["untrained", "nearly"])
def test_detection_is_what_measure_says(root, tmp_path, monkeypatch, name, found):
    data, finder = opened(root), detector(name)
    if found == "nearly":
        monkeypatch.setattr(Detector, "objects", nearly(data))
    report = run(Objects("coco-detection", finder, data), tmp_path / "out")
    summary = measure(finder, data, batch_size=2)[0].summary()
    assert report["numbers"] == numbers(summary)
    assert set(report["numbers"]) == ({"boxes"} if name.startswith("detr") else {"boxes", "masks"})
    for kind, told in summary.items():
        assert list(report["per_class"][kind].values()) == told["per_class"]
    if found == "nearly":
        assert 0.3 < report["numbers"]["boxes"]["AP"] < 0.95
    assert report["timing"]["images_per_second"] > 0
    assert json.loads((tmp_path / "out/report.json").read_text()) == report


def test_panoptic_is_what_measure_says(root, tmp_path, whole):
    data = opened(root, "panoptic")
    monkey = whole.panoptic
    assert any(len(one.segments) for one in monkey(*_seen(whole, data)))
    report = run(Objects("coco-panoptic", whole, data), tmp_path / "out")
    assert report["numbers"] == measure(whole, data, batch_size=2)[0].summary()
    assert sorted(os.listdir(tmp_path / "out")) == [
        "examples.png", "panoptic", "panoptic.json", "predictions.h5", "report.json",
    ]  # fmt: skip


def _seen(finder, data):
    from vispe.data.scenes import EvalScenes

    batch = EvalScenes(data, finder.sizes, masks=False).__getitems__([0, 1, 2, 3, 4])
    return finder.output(batch), batch


def test_semantic_is_what_evaluate_semantic_says(root, tmp_path):
    network, images = segmenter(), open_semantic_part(SemanticSpec(root=str(root / "semantic")), DATA_NAMES)
    shorts = (40, None)
    reports = evaluate_scenes([Areas(network, images, s) for s in shorts], tmp_path / "out", {}, device="cpu")
    for short, report in zip(shorts, reports, strict=True):
        tally, _ = evaluate_semantic(network, images, short, batch_size=4)
        assert report["numbers"]["semantic"] == tally.summary()
        assert list(report["per_class"]["semantic"].values()) == tally.iou()
    names = {
        f"{what}_{size}.{end}" for size in ("40", "own") for what, end in (("examples", "png"), ("predictions", "h5"))
    }
    assert set(os.listdir(tmp_path / "out")) == names | {"report.json"}
    assert len(json.loads((tmp_path / "out/report.json").read_text())["results"]) == 2


DATA_NAMES = tuple(category.name for category in DATA)

# --- what is there ----------------------------------------------------------------------------------------------------


def test_what_is_done_needs_no_network(root, tmp_path, detr, calls):
    work = Objects("coco-detection", detr, opened(root))
    run(work, tmp_path / "out")
    assert calls == [[0, 1], [2, 3], [4]]
    before, stamp = kept(tmp_path / "out"), (tmp_path / "out/predictions.h5").stat().st_mtime_ns
    run(work, tmp_path / "out")
    assert len(calls) == 3
    assert kept(tmp_path / "out") == before
    assert (tmp_path / "out/predictions.h5").stat().st_mtime_ns == stamp


def test_fewer_images_first_and_then_all(root, tmp_path, detr, calls):
    data = opened(root)
    run(Objects("coco-detection", detr, data.subset(range(3))), tmp_path / "out")
    run(Objects("coco-detection", detr, data), tmp_path / "out")
    assert calls == [[0, 1], [2], [2, 3], [4]]  # a batch is made whole
    run(Objects("coco-detection", detr, data), tmp_path / "once")
    assert kept(tmp_path / "out") == kept(tmp_path / "once")
    run(Objects("coco-detection", detr, data.subset(range(2))), tmp_path / "out")
    with CacheReader(tmp_path / "out/predictions.h5") as reader:
        assert len(reader) == 5, "what is not asked for is not lost"


def test_a_changed_image_is_looked_at_again(tmp_path, detr, calls):
    root = write_scenes(tmp_path / "own")
    work = Objects("coco-detection", detr, opened(root))
    run(work, tmp_path / "out")
    Image.new("RGB", (40, 56), "green").save(root / "images/4.png")
    run(work, tmp_path / "out")
    assert calls[3:] == [[4]]


def test_other_options_are_refused_and_nothing_is_touched(root, tmp_path, detr):
    work, file = Objects("coco-detection", detr, opened(root)), tmp_path / "predictions.h5"
    predict_scenes(work, file, device="cpu")
    before = file.read_bytes()
    other = detector("detr_resnet50", num_queries=9)
    assert weights_sha256(other.model) != weights_sha256(detr.model)
    with pytest.raises(
        ValueError,
        match=r"will not replace .*predictions\.h5': it was made with other weights; give --out another folder",
    ):
        predict_scenes(Objects("coco-detection", other, opened(root)), file, device="cpu")
    assert file.read_bytes() == before


def test_bad_images_are_named_and_the_rest_is_kept(tmp_path, detr, calls):
    root = write_scenes(tmp_path / "own")
    data = opened(root)
    good = (root / "images/3.png").read_bytes()
    (root / "images/3.png").write_bytes(good[:200])
    with pytest.raises(ImageError, match=r"3\.png"):
        run(Objects("coco-detection", detr, data), tmp_path / "out")
    Image.new("RGB", (9, 8)).save(root / "images/3.png")
    with pytest.raises(ImageError, match=r"3\.png"):
        run(Objects("coco-detection", detr, data), tmp_path / "out")
    (root / "images/3.png").write_bytes(good)
    run(Objects("coco-detection", detr, data), tmp_path / "out")
    assert calls == [[0, 1], [2, 3], [4]]


def test_mistakes_are_named(root, tmp_path, detr, whole):
    with pytest.raises(ValueError, match="finds boxes, no segments"):
        Objects("coco-panoptic", detr, opened(root, "panoptic"))
    with pytest.raises(ValueError, match="coco-panoptic needs a panoptic file"):
        Objects("coco-panoptic", whole, opened(root))
    with pytest.raises(ValueError, match="there are no images"):
        Objects("coco-detection", detr, opened(root).subset([]))
    work = Objects("coco-detection", detr, opened(root))
    with pytest.raises(ValueError, match="batch_size is at least 1"):
        predict_scenes(work, tmp_path / "a.h5", batch_size=0)
    with pytest.raises(ValueError, match="device 'cud'"):
        evaluate_scenes([work], tmp_path / "out", {}, device="cud")
    assert not (tmp_path / "out").exists()


# --- killed and shared ------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.evaluate.small_scenes import detector, opened
from vispe.detector import Detector
from vispe.evaluate import scenes
count, real = 0, Detector.output
def output(self, batch):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, batch)
Detector.output = output
scenes.SECONDS = 0.0
root, out = map(Path, sys.argv[1:])
work = scenes.Objects("coco-detection", detector("detr_resnet50"), opened(root))
scenes.predict_scenes(work, out / "predictions.h5", device="cpu", batch_size=2)
"""


def test_a_killed_run_goes_on_at_its_batch_and_scores_the_same_to_the_byte(root, tmp_path, detr, calls):
    run(Objects("coco-detection", detr, opened(root)), tmp_path / "whole")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(root), str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out/predictions.h5").exists()
    calls.clear()
    run(Objects("coco-detection", detr, opened(root)), tmp_path / "out")
    assert calls == [[4]]
    assert kept(tmp_path / "out") == kept(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_score_the_same_to_the_byte(root, tmp_path, whole):
    pytest.importorskip("lightning", reason="several processes are Lightning's")
    work = Objects("coco-panoptic", whole, opened(root, "panoptic"))
    run(work, tmp_path / "one")
    run(work, tmp_path / "two", devices=2)
    assert kept(tmp_path / "one") == kept(tmp_path / "two")
    with CacheReader(tmp_path / "one/predictions.h5") as one, CacheReader(tmp_path / "two/predictions.h5") as two:
        assert one.names() == two.names()
        for name in one.names():
            assert all(np.array_equal(a, two.read(name).arrays[k]) for k, a in one.read(name).arrays.items())


def test_other_files_are_not_written_over(tmp_path):
    """A training's folder and another evaluation's are refused; one's own is gone on with."""
    from vispe.evaluate.scenes import check_folder

    about = {"checkpoint": "a", "annotations": "x.json"}
    check_folder(tmp_path / "nowhere", "coco-detection", about)
    (tmp_path / "report.json").write_text(json.dumps({"task": "coco-detection", **about}))
    check_folder(tmp_path, "coco-detection", about)
    for task, other, said in (
        ("semantic", about, "task 'coco-detection', not 'semantic'"),
        ("coco-detection", {**about, "annotations": "y.json"}, "annotations 'x.json', not 'y.json'"),
    ):
        with pytest.raises(ValueError, match=said):
            check_folder(tmp_path, task, other)
    (tmp_path / "report.json").write_text(json.dumps({"results": [{"task": "semantic", **about}]}))
    check_folder(tmp_path, "semantic", about)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a training run; give --out another folder"):
        check_folder(tmp_path, "semantic", about)
