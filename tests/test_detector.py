"""A trained detector's file stands alone; what it finds, in pixels of the file's image, and how that is scored."""

import numpy as np
import pytest
import torch

from tests.evaluate.small_scenes import DATA, detector, nearly, opened, write_scenes
from vispe.classifier import load_classifier, task_of
from vispe.data import rle
from vispe.data.images import ImageError
from vispe.data.scenes import EvalScenes
from vispe.detector import Detector, SceneTally, around, kinds, load_detector, measure, pictured, save_detector
from vispe.metrics.detection import average_precision
from vispe.segmenter import colours
from vispe.truth import truth_of

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")
pytest.importorskip("faster_coco_eval", reason="the extra `detect` brings it")
pytest.importorskip("timm", reason="the extra `detect` brings it")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def batch(finder, data, *indices):
    return EvalScenes(data, finder.sizes, masks=False).__getitems__(list(indices))


@pytest.mark.parametrize("name", ["detr_resnet50", "mask2former_resnet50"])
def test_the_file(tmp_path, name):
    finder = detector(name, DATA)
    save_detector(tmp_path / "last.safetensors", finder)
    read = load_detector(tmp_path)
    assert (read.name, read.categories, read.short, read.long) == (name, DATA, 40, 64)
    assert (read.model.spec.num_classes, read.model.spec.width) == (3, 32)
    assert all(torch.equal(v, finder.model.state_dict()[k]) for k, v in read.model.state_dict().items())
    assert read.things == [0, 1]
    assert read.draws == name.startswith("mask")
    assert task_of(tmp_path) == "detect"
    with pytest.raises(ValueError, match="was trained to detect, not to classify"):
        load_classifier(tmp_path)


def test_boxes_are_of_the_file_and_alone_they_are_the_same(root):
    data, finder = opened(root), detector("detr_resnet50")
    both = batch(finder, data, 0, 1)
    assert both.originals.tolist() == [[40, 56], [48, 40]]
    found = finder.objects(finder.output(both), both)
    for k in (0, 1):
        one = batch(finder, data, k)
        (alone,) = finder.objects(finder.output(one), one)
        np.testing.assert_allclose(found[k].boxes, alone.boxes, atol=1e-2)
        assert (np.diff(found[k].scores) <= 0).all()
    above = float(found[0].scores[5])
    assert len(finder.objects(finder.output(both), both, above)[0].boxes) == (found[0].scores > above).sum()


def test_masks_have_pixels_and_boxes_around_them(root):
    data, finder = opened(root), detector("mask2former_resnet50", DATA)
    scene = batch(finder, data, 3)
    (found,) = finder.objects(finder.output(scene), scene)
    masks = np.stack([rle.mask(mask, (33, 47)) for mask in found.masks])
    assert masks.any((1, 2)).all()
    assert np.array_equal(around(masks), found.boxes)
    assert set(found.labels.tolist()) <= {0, 1}, "stuff is no object"
    (shown,) = finder.shown(finder.output(scene), scene, 0.0)
    assert shown.masks.sum(0).max() <= 1, "segments do not overlap"


def test_around_by_hand():
    masks = np.zeros((1, 5, 6), dtype=bool)
    masks[0, 1:3, 2] = masks[0, 4, 5] = True
    assert around(masks).tolist() == [[2, 1, 6, 5]]
    assert around(masks[:0]).shape == (0, 4)


def test_what_is_scored(root):
    whole, things = detector("mask2former_resnet50", DATA), detector("detr_resnet50")
    assert kinds(things, opened(root)) == ("boxes",)
    assert kinds(whole, opened(root)) == ("boxes", "masks")
    assert kinds(whole, opened(root, "panoptic")) == ("panoptic",)


def test_measure_is_average_precision_of_what_is_found(root, monkeypatch):
    data, finder = opened(root), detector("mask2former_resnet50")
    objects, seen = nearly(data), {}

    def remembered(self, output, scene, threshold=0.0):
        found = objects(self, output, scene)
        seen.update(zip(scene.indices.tolist(), found, strict=True))
        return found

    monkeypatch.setattr(Detector, "objects", remembered)
    steps = []
    tally, timing = measure(finder, data, batch_size=2, progress=lambda *step: steps.append(step))
    assert steps == [(2, 5), (4, 5), (5, 5)]
    assert timing["images_per_second"] > 0
    for kind, told in tally.summary().items():
        truth = {i: truth_of(data[i], masks=kind == "masks") for i in range(5)}
        assert told == average_precision(truth, seen, 2, kind)
    assert 0.3 < tally.summary()["boxes"]["AP"] < 1
    with pytest.raises(ValueError, match="batch_size is at least 1, got 0"):
        measure(finder, data, batch_size=0)


def test_what_only_fills_a_batch_is_not_counted(root):
    data, finder = opened(root), detector("detr_resnet50")
    tally, scene = SceneTally(data, ("boxes",)), batch(finder, data, 4, -1)
    tally.add(finder, finder.output(scene), scene)
    tally.gather()  # alone, there is nothing to gather
    assert list(tally.found) == [4]


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    root = write_scenes(tmp_path / "own")
    data = opened(root)
    (root / "images/1.png").write_text("junk")
    with pytest.raises(ImageError, match=r"1\.png"):
        measure(detector("detr_resnet50"), data)


def test_a_picture(root):
    image = torch.full((3, 40, 56), 100, dtype=torch.uint8)
    labels, boxes = np.array([0, 1]), np.array([[2.0, 3, 20, 30], [-4, 5, 70, 39]])
    masks = np.zeros((2, 40, 56), dtype=bool)
    masks[0, 10, 10] = True
    picture = pictured(image, DATA, labels, boxes, np.array([0.5, 0.25]), masks)
    assert picture.shape == image.shape
    assert picture[:, 10, 10].tolist() != [100, 100, 100]
    assert torch.equal(pictured(image, DATA, labels[:0], boxes[:0]), image)


def test_names_stand_on_their_colour():
    image = torch.full((3, 120, 200), 100, dtype=torch.uint8)
    picture = pictured(image, DATA, np.array([0]), np.array([[-9.0, -9, 190, 110]]), np.array([0.5]))
    shade = colours(len(DATA))[0]
    filled = (picture == shade[:, None, None]).all(0)
    assert filled[5:12, 4:30].float().mean() > 0.4, "a box behind the letters"
    assert filled[:20, :60].any(1).nonzero()[0] < 6
    ink = picture[:, 5:13, 3:40].flatten(1).T.int()
    assert ((ink.amax(1) < 40) | (ink.amin(1) > 215)).any(), "letters that are seen on it"
