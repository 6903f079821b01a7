"""What is kept of an image comes back as it was; labels are matched by name."""

import numpy as np
import pytest

from vispe.cache import CacheReader, CacheWriter
from vispe.data import rle
from vispe.data.coco import Category
from vispe.evaluate.scene_records import chosen, classes, network_of, pack, unpack
from vispe.metrics.detection import Found

from .small_scenes import DATA, opened, write_scenes

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("drawn", [True, False])
def test_what_is_kept_comes_back(tmp_path, count, drawn):
    draw = np.random.default_rng(0)
    masks = draw.random((count, 7, 9)) < 0.5
    found = Found(
        draw.random((count, 4)).astype(np.float32),
        draw.integers(0, 5, count),
        draw.random(count).astype(np.float32),
        rle.encode(masks) if drawn else None,
    )
    with CacheWriter(tmp_path / "a.h5", {"task": "coco-detection"}) as writer:
        writer.add("7", pack(found), {"size": np.array([7, 9]), "seconds": 0.5}, "content")
    with CacheReader(tmp_path / "a.h5") as reader:
        back = unpack(reader.read("7"))
    for one, other in zip(found[:3], back[:3], strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert back.masks == found.masks


def test_labels_are_matched_by_name(tmp_path):
    data = opened(write_scenes(tmp_path))
    raw = [Category(0, ""), Category(1, "dog"), Category(2, "zebra"), Category(3, "car")]
    meaning = classes(raw, data, "coco-detection")
    assert meaning.own.tolist() == [-1, 1, -1, 0]
    found = Found(np.arange(20.0).reshape(5, 4), np.array([0, 1, 2, 3, 3]), np.ones(5), None)
    translated = meaning.translated(found)
    assert translated.labels.tolist() == [1, 0, 0]
    assert translated.boxes[0].tolist() == [4, 5, 6, 7]
    assert chosen(found, np.array([True, False, False, False, False])).labels.tolist() == [0]
    made = {"categories": [list(category) for category in raw]}
    assert network_of(made) == tuple(raw)


def test_of_detection_things_are_asked_for(tmp_path):
    data = opened(write_scenes(tmp_path), "panoptic")
    assert classes(DATA[:2], data, "coco-detection").asked.tolist() == [True, True, False]
    assert classes(DATA, data, "coco-panoptic").asked.all()


def test_classes_that_are_lacking_are_named(tmp_path):
    data = opened(write_scenes(tmp_path), "panoptic")
    with pytest.raises(ValueError, match=r"cannot say 'sky' of .*panoptic\.json; --partial leaves them out"):
        classes(DATA[:2], data, "coco-panoptic")
    with pytest.raises(ValueError, match="cannot say 'dog' and 1 more classes"):
        classes(DATA[:1], data, "coco-panoptic")
    assert classes(DATA[:1], data, "coco-panoptic", partial=True).asked.tolist() == [True, False, False]
    with pytest.raises(ValueError, match="none of its classes is known"):
        classes([Category(1, "cup")], data, "coco-panoptic", partial=True)
