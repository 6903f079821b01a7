"""Pass 2 of scenes: numbers worked out by hand, files that COCO's own code reads to the same numbers."""

import contextlib
import io
import json

import numpy as np
import pytest

from vispe.data.coco import open_coco
from vispe.data.coco_results import write_png
from vispe.data.segmentation import SemanticSpec, open_semantic_part
from vispe.detector import Detector, measure
from vispe.evaluate.scene_records import classes
from vispe.evaluate.scene_score import (
    Scored,
    asked_segments,
    box_quality,
    chosen_examples,
    painted_classes,
    painted_segments,
    score_classes,
    score_objects,
)
from vispe.evaluate.scenes import Areas, Objects, predict_scenes
from vispe.metrics.detection import Found, Truth
from vispe.metrics.panoptic import PanopticTally
from vispe.models.mask2former import Panoptic, Segment
from vispe.truth import true_segments

from .small_scenes import DATA, detector, nearly, opened, segmenter, write_scenes

pycocotools = pytest.importorskip("pycocotools", reason="the extra `detect` brings it")
pytest.importorskip("faster_coco_eval", reason="the extra `detect` brings it")
pytest.importorskip("timm", reason="the extra `detect` brings it")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def scored(work, out):
    predict_scenes(work, out / "predictions.h5", device="cpu")
    return work.score(out / "predictions.h5", out)


def coco_eval(annotations, results, kind):
    """COCO's own twelve numbers."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        judge = COCOeval(truth, truth.loadRes(str(results)), kind)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge.stats


NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR1", "AR10", "AR100", "AR_small")


def test_pycocotools_reads_results_to_the_same_numbers(root, tmp_path, monkeypatch):
    data = opened(root)
    monkeypatch.setattr(Detector, "objects", nearly(data))
    told = scored(Objects("coco-detection", detector("mask2former_resnet50"), data), tmp_path)
    for kind, word in (("boxes", "bbox"), ("masks", "segm")):
        stats = coco_eval(root / "instances.json", tmp_path / "results.json", word)
        ours = [-1 if (value := told.numbers[kind][name]) is None else value for name in NAMES]
        np.testing.assert_allclose(ours, stats[:10], atol=1e-9)
    assert 0.3 < told.numbers["boxes"]["AP"] < 0.9
    records = json.loads((tmp_path / "results.json").read_text())
    assert {record["category_id"] for record in records} == {3, 18}
    assert {record["image_id"] for record in records} == {70, 71, 72, 73, 74}


def raw_ids(name):
    """A DETR whose labels are COCO's ids: 18 is a dog, 3 a car, the others nothing that is here."""
    from vispe.data.coco_categories import by_id

    return detector(name, by_id())


def test_raw_ids_are_matched_by_name(root, tmp_path, monkeypatch):
    data, finder = opened(root), raw_ids("detr_resnet50")
    perfect = nearly(data)

    def objects(self, output, batch, threshold=0.0):
        ids = np.array([3, 18])
        odd = Found(np.ones((2, 4), np.float32), np.array([0, 90]), np.full(2, 0.99, np.float32))
        made = [one._replace(labels=ids[one.labels], masks=None) for one in perfect(self, output, batch)]
        return [Found(*(np.concatenate(parts) for parts in zip(odd[:3], one[:3], strict=True))) for one in made]

    monkeypatch.setattr(Detector, "objects", objects)
    told = scored(Objects("coco-detection", finder, data), tmp_path)
    monkeypatch.setattr(Detector, "objects", perfect)
    assert told.numbers == _numbers(measure(detector("detr_resnet50"), data)[0].summary())
    assert set(told.per_class["boxes"]) == {"car", "dog"}


def _numbers(summary):
    return {kind: {k: v for k, v in told.items() if k != "per_class"} for kind, told in summary.items()}


def test_a_panoptic_file_is_of_things_to_detection(root, tmp_path, monkeypatch):
    """The same objects as in the instance file, whose boxes are the same: the same numbers."""
    data, whole = opened(root), opened(root, "panoptic")
    monkeypatch.setattr(Detector, "objects", nearly(data))
    told = scored(Objects("coco-detection", detector("detr_resnet50"), whole), tmp_path)
    assert told.numbers == _numbers(measure(detector("detr_resnet50"), data)[0].summary())
    assert told.left_out == ("sky",)


def test_where_nothing_is_outlined_boxes_are_scored(root, tmp_path, monkeypatch):
    data = opened(root)
    monkeypatch.setattr(Detector, "objects", nearly(data))
    content = json.loads((root / "instances.json").read_text())
    for annotation in content["annotations"]:
        del annotation["segmentation"]
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    bare, finder = open_coco(root / "images", tmp_path / "boxes.json"), detector("mask2former_resnet50")
    told = scored(Objects("coco-detection", finder, bare), tmp_path)
    assert set(told.numbers) == {"boxes"}
    assert told.numbers["boxes"] == _numbers(measure(finder, data)[0].summary())["boxes"]


def test_partial_leaves_classes_out(root, tmp_path, monkeypatch):
    data, finder = opened(root), detector("detr_resnet50", DATA[:1])
    with pytest.raises(ValueError, match="cannot say 'dog'"):
        Objects("coco-detection", finder, data)

    def objects(self, output, batch, threshold=0.0):
        found = []
        for index in batch.indices.tolist():
            sample = data[index]
            found.append(Found(sample.boxes[:1], np.zeros(1, dtype=np.int64), np.ones(1, np.float32)))
        return found

    monkeypatch.setattr(Detector, "objects", objects)
    told = scored(Objects("coco-detection", finder, data, partial=True), tmp_path)
    assert (told.numbers["boxes"]["AP"], told.left_out) == (1.0, ("dog",))
    assert told.per_class["boxes"]["dog"] is None


def true_panoptic(data):
    """``Detector.panoptic`` that finds the truth, but for the first segment of each image."""

    def found(self, output, batch, threshold=0.8):
        import torch

        made = []
        for index in batch.indices.tolist():
            sample = data[index]
            ids = np.searchsorted(np.sort(sample.ids), sample.segments()) + 1
            order = np.argsort(sample.ids)
            segments = [Segment(k + 1, int(sample.labels[i]), True, 0.9) for k, i in enumerate(order)]
            made.append(Panoptic(torch.from_numpy(np.where(ids == 1, 0, ids).astype(np.int32)), segments[1:]))
        return made

    return found


def test_panoptic_files_are_read_back_to_the_same_numbers(root, tmp_path, monkeypatch):
    data = opened(root, "panoptic")
    monkeypatch.setattr(Detector, "panoptic", true_panoptic(data))
    told = scored(Objects("coco-panoptic", detector("mask2former_resnet50", DATA), data), tmp_path)
    assert told.numbers["panoptic"]["SQ_things"] == pytest.approx(0.5), "no car is found, every dog is"
    assert told.per_class["panoptic"]["dog"] == {"PQ": 1.0, "SQ": 1.0, "RQ": 1.0}
    made = json.loads((tmp_path / "panoptic.json").read_text())
    (tmp_path / "read.json").write_text(
        json.dumps(made | {"images": json.loads((root / "panoptic.json").read_text())["images"]})
    )
    read, tally = (
        open_coco(root / "images", tmp_path / "read.json", pngs=tmp_path / "panoptic"),
        PanopticTally(data.things),
    )
    for i in range(len(data)):
        tally.add(data[i].segments(), true_segments(data[i]), read[i].segments(), true_segments(read[i]))
    assert tally.summary() == told.numbers["panoptic"]


def test_what_is_not_asked_for_is_void(root, tmp_path):
    data = opened(root, "panoptic")
    meaning = classes(DATA[:2], data, "coco-panoptic", partial=True)
    ids, segments = asked_segments(data[0], meaning)
    assert {segment.label for segment in segments} == {0, 1}
    assert (ids == 0).sum() == (data[0].segments() == 900).sum()


def test_maps_are_painted():
    from vispe.data.rle import encode

    masks = np.zeros((2, 3, 4), dtype=bool)
    masks[0, :, 0] = masks[1, 0, 1:] = True
    found = Found(np.zeros((2, 4)), np.array([5, 2]), np.ones(2), encode(masks))
    ids, segments = painted_segments(found, (3, 4))
    assert ids.tolist() == [[1, 2, 2, 2], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert [(s.id, s.label) for s in segments] == [(1, 5), (2, 2)]
    assert painted_classes(found, (3, 4))[0].tolist() == [5, 2, 2, 2]
    assert painted_classes(found, (3, 4))[1, 1] == -1


def test_the_quality_of_an_image_by_hand():
    """Of three objects one is met with IoU 0.8, and one box is of the wrong class: 0.8 / (1 + 1/2 + 2/2)."""
    truth = Truth(
        np.array([[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [0, 0, 9, 9]], np.float32),
        np.array([0, 0, 1, 1]), np.array([False, False, False, True]), np.full(4, 100.0, np.float32),
    )  # fmt: skip
    boxes = np.array([[0, 0, 10, 8], [40, 0, 50, 10], [20, 0, 30, 10]], np.float32)
    found = Found(boxes, np.array([0, 0, 0]), np.array([0.9, 0.8, 0.4]))
    assert box_quality(truth, found) == pytest.approx(0.8 / 2.5)
    nothing = Found(boxes[:0], found.labels[:0], found.scores[:0])
    assert box_quality(truth, nothing) == 0
    empty = Truth(truth.boxes[:0], truth.labels[:0], truth.crowd[:0], truth.area[:0])
    assert box_quality(empty, nothing) is None
    assert box_quality(empty, found) == 0


def test_examples_are_the_extremes():
    quality = (0.5, None, 1.0, 0.0, 1.0, 0.2)
    one = Scored(
        made={"task": "semantic"}, numbers={}, per_class={}, left_out=(), names=tuple("abcdef"), quality=quality,
        data={}, seconds=0.0,
    )  # fmt: skip
    told = chosen_examples(one, 2)
    assert told["best"] == [[2, "c", 1.0], [4, "e", 1.0]]
    assert told["worst"] == [[3, "d", 0.0], [5, "f", 0.2]]
    assert told["rule"] == "the part of the labelled pixels that is right"
    told = chosen_examples(one)
    assert (len(told["best"]), len(told["worst"])) == (3, 2)


def test_predictions_that_do_not_fit_are_refused(root, tmp_path):
    data = opened(root)
    work = Objects("coco-detection", detector("detr_resnet50"), data.subset([0, 1]))
    predict_scenes(work, tmp_path / "p.h5", device="cpu")
    with pytest.raises(ValueError, match="has no prediction for image '72': predict again"):
        score_objects(tmp_path / "p.h5", data, "coco-detection", tmp_path)
    with pytest.raises(ValueError, match="was made for coco-detection, not for coco-panoptic"):
        score_objects(tmp_path / "p.h5", opened(root, "panoptic"), "coco-panoptic", tmp_path)
    content = json.loads((root / "instances.json").read_text())
    content["images"][0]["width"] += 1
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has image '70' in another size"):
        score_objects(
            tmp_path / "p.h5", open_coco(root / "images", tmp_path / "other.json"), "coco-detection", tmp_path
        )


def test_a_damaged_png_of_the_truth_is_named(tmp_path):
    root = write_scenes(tmp_path / "own")
    data = opened(root, "panoptic")
    work = Objects("coco-panoptic", detector("mask2former_resnet50", DATA), data)
    write_png(root / "panoptic/2.png", np.full((40, 56), 77))
    with pytest.raises(ValueError, match=r"2\.png: segment 77 is in the PNG and not in"):
        scored(work, tmp_path)


def test_semantic_by_hand(root, tmp_path):
    images = open_semantic_part(SemanticSpec(root=str(root / "semantic")), tuple(c.name for c in DATA))
    work = Areas(segmenter(), images, 40)
    told = scored(work, tmp_path)
    assert told.numbers["semantic"]["pixels"] == sum(int((images.mask(i) >= 0).sum()) for i in range(5))
    mean = np.average(told.quality, weights=[int((images.mask(i) >= 0).sum()) for i in range(5)])
    assert told.numbers["semantic"]["pixel_accuracy"] == pytest.approx(mean)
    other = open_semantic_part(SemanticSpec(root=str(root / "semantic")), tuple(c.name for c in DATA))
    object.__setattr__(other, "classes", ("a", "b", "c"))
    with pytest.raises(ValueError, match="was made with other classes"):
        score_classes(tmp_path / "predictions.h5", other)
