"""Images are looked through before training; what is left out is counted."""

import pytest
from PIL import Image

from tests.train.conftest import write_images
from vispe.data.classification import DataSpec
from vispe.data.sources import Pixels
from vispe.train.loaders import cores, open_checked


def test_small_images_are_held(photos):
    data = open_checked(DataSpec(root=str(photos)))
    assert isinstance(data.train.source, Pixels)
    assert not isinstance(open_checked(DataSpec(root=str(photos), memory="never")).train.source, Pixels)


def test_skipped_images_are_said(tmp_path):
    root = write_images(tmp_path / "d")
    (root / "train" / "cold" / "3.png").write_text("junk")
    said = []
    data = open_checked(DataSpec(root=str(root), corrupt="skip"), said.append)
    assert len(data.train) == 39
    assert said == [f"1 image cannot be used and is left out, first: {data.skipped[0]}"]
    assert "train/cold/3.png" in data.skipped[0]
    with pytest.raises(ValueError, match=r"train/cold/3\.png"):
        open_checked(DataSpec(root=str(root)))


def test_the_fingerprint_follows_the_images(tmp_path):
    root = write_images(tmp_path / "d")
    before = open_checked(DataSpec(root=str(root))).fingerprint()
    assert open_checked(DataSpec(root=str(root))).fingerprint() == before
    Image.new("RGB", (16, 16)).save(root / "val" / "warm" / "more.png")
    after = open_checked(DataSpec(root=str(root))).fingerprint()
    assert after["train"] == before["train"]
    assert after["val"] != before["val"]


def test_cores():
    assert cores() >= 1
