"""A survey of all masks: what cannot be used is named once, what can is counted."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vispe.data.segmentation import Meaning, SemanticImages
from vispe.data.segmentation_verify import sound_semantic, survey


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "cache"))
    files = []
    for k, values in enumerate(([0, 1], [1, 255], [0, 7], [0, 0], [1, 1])):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{k}.jpg")
        Image.fromarray(np.resize(values, (4, 4)).astype(np.uint8)).save(tmp_path / f"{k}.png")
        files.append((str(tmp_path / f"{k}.jpg"), str(tmp_path / f"{k}.png")))
    (tmp_path / "3.jpg").write_text("no image")
    Image.new("L", (5, 4)).save(tmp_path / "4.png")
    return SemanticImages(*zip(*files, strict=True), ("a", "b"), Meaning())


def test_pixels_and_images_are_counted_by_hand(images):
    found = survey(images)
    assert list(found.problems) == [2, 3, 4]
    assert found.pixels.tolist() == [8, 16]
    assert found.images.tolist() == [1, 2]
    assert found.void == 8
    assert "holds the index 7, but 2 classes have 0 to 1" in found.problems[2]
    assert "cannot read image" in found.problems[3]
    assert "is 5 x 4 pixels, its image" in found.problems[4]


def test_without_decoding_only_what_a_mask_says(images):
    seen = []
    found = survey(images, lambda done, total: seen.append((done, total)), decode=False)
    assert list(found.problems) == [2]
    assert seen[-1] == (5, 5)


def test_reduced_and_other_ids(images):
    reduced = survey(SemanticImages(images.images, images.masks, ("a",), Meaning(reduced=True)), decode=False)
    assert reduced.pixels.tolist() == [16]
    some = survey(SemanticImages(images.images, images.masks, ("a", "b"), Meaning(ids=(7, 1))), decode=False)
    assert not some.problems
    assert some.pixels.tolist() == [8, 16]


def test_refuse_or_skip(images):
    with pytest.raises(ValueError, match=r"2\.png' holds the index 7.*\(and 2 more\); data.corrupt=skip"):
        sound_semantic(images, "refuse")
    kept, sentences = sound_semantic(images, "skip")
    assert (len(kept), len(sentences)) == (2, 3)
    with pytest.raises(ValueError, match="none of 2 images can be used"):
        sound_semantic(images.subset([2, 3]), "skip")
    assert sound_semantic(images.subset([0, 1]), "refuse")[1] == []
