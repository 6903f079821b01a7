"""Index masks in files: read as they are, whatever their colours; what is no mask is named."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vispe.data import indices
from vispe.data.images import ImageError
from vispe.data.indices import histogram, histograms, read_indices

VALUES = np.array([[0, 1, 2], [10, 3, 255]])


def palette(path):
    mask = Image.fromarray(VALUES.astype(np.uint8), "P")
    mask.putpalette([(7 * k) % 256 for k in range(768)])
    mask.save(path)


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_values_are_read_as_they_are(tmp_path, mode):
    path = tmp_path / "m.png"
    if mode == "P":
        palette(path)
    else:
        Image.fromarray(VALUES.astype(np.uint8 if mode == "L" else np.uint16)).save(path)
    assert np.array_equal(read_indices(path), VALUES)


def test_sixteen_bits_and_one_bit(tmp_path):
    Image.fromarray(np.array([[0, 300], [65535, 2]], np.uint16)).save(tmp_path / "deep.png")
    assert read_indices(tmp_path / "deep.png").tolist() == [[0, 300], [65535, 2]]
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bit.png")
    assert read_indices(tmp_path / "bit.png").tolist() == [[1, 0]]
    assert Image.open(tmp_path / "bit.png").mode == "1"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: Image.new("RGB", (4, 4)).save(p), r"mode RGB; a mask has one channel of class indices"),
        (lambda p: Image.new("L", (4, 4)).save(p, "JPEG"), "JPEG changes indices"),
        (lambda p: p.write_bytes(b"no image"), "damaged or no image"),
        (lambda p: None, "No such file"),
        (lambda p: Image.fromarray(np.array([[70000]], np.int32)).save(p, "TIFF"), "it holds 70000; .* 65535"),
        (lambda p: Image.fromarray(np.array([[-3]], np.int32)).save(p, "TIFF"), "it holds -3"),
        (lambda p: Image.fromarray(np.ones((2, 2), np.float32)).save(p, "TIFF"), "mode F"),
    ],
)
def test_what_is_no_mask_is_named(tmp_path, make, why):
    path = tmp_path / "m.png"
    make(path)
    with pytest.raises(ImageError, match=rf"cannot read mask '.*m\.png': .*{why}"):
        read_indices(path)


def test_values_are_counted():
    assert histogram(np.array([[0, 2], [2, 700]], np.uint16)) == {0: 1, 2: 2, 700: 1}


def test_the_second_time_nothing_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "cache"))
    masks = [str(tmp_path / f"{k}.png") for k in range(3)]
    for k, mask in enumerate(masks[:2]):
        Image.new("L", (3, 2), k).save(mask)
    (tmp_path / "2.png").write_text("junk")
    seen = []
    first = list(histograms(masks, lambda done, total: seen.append((done, total))))
    assert first[:2] == [(0, {0: 6}), (1, {1: 6})]
    assert "2.png" in first[2][1]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with monkeypatch.context() as patch:
        patch.setattr(indices, "read_indices", lambda path: pytest.fail("decoded again"))
        assert list(histograms(masks)) == first
    Image.new("L", (4, 4), 9).save(masks[2])
    assert list(histograms(masks))[2] == (2, {9: 16})
    for path in (tmp_path / "cache" / "verified").iterdir():
        path.write_text("junk")
    assert next(iter(histograms(masks))) == (0, {0: 6})
