"""The idx reader on files made here; the real ones where they are installed."""

import gzip

import numpy as np
import pytest
import torch

from vispe.data.fashion_mnist import DEBIAN, fashion_mnist


def idx(array):
    head = bytes((0, 0, 8, array.ndim)) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes())


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for stem, count in (("train", 5), ("t10k", 3)):
        (tmp_path / f"{stem}-images-idx3-ubyte.gz").write_bytes(idx(rng.integers(0, 256, (count, 28, 28))))
        (tmp_path / f"{stem}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(count)))
    return tmp_path


def test_pixels_and_labels(folder):
    pixels, labels = fashion_mnist(folder, "train")
    assert pixels.shape == (5, 1, 28, 28)
    assert pixels.dtype == torch.uint8
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert len(fashion_mnist(folder, "val")[0]) == 3


@pytest.mark.parametrize(
    "data",
    [b"junk", gzip.compress(b"junk"), gzip.compress(bytes((0, 0, 8, 3)) + bytes(20)), b""],
    ids=["text", "packed text", "no idx", "empty"],
)
def test_damaged_files_are_named(folder, data):
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte\.gz"):
        fashion_mnist(folder, "val")


def test_missing_and_unequal_files(folder):
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(4)))
    with pytest.raises(ValueError, match="5 pictures have 4 labels"):
        fashion_mnist(folder, "train")
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"No such file"):
        fashion_mnist(folder, "train")


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_files():
    pixels, labels = fashion_mnist(DEBIAN, "val")
    assert pixels.shape == (10000, 1, 28, 28)
    assert labels.bincount().tolist() == [1000] * 10
    assert labels[:5].tolist() == [9, 2, 1, 1, 6]  # ankle boot, pullover, two trousers, shirt
