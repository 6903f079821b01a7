"""Fashion-MNIST (Xiao et al. 2017): 28 x 28 grey pictures of clothes, from the four idx files of its authors.

Debian's package ``dataset-fashion-mnist`` puts them in a folder that is looked at first; elsewhere torchvision fetches
the same files.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
STEMS = {"train": "train", "val": "t10k"}


def fashion_mnist(folder: str | os.PathLike[str], split: str) -> tuple[Tensor, Tensor]:
    """``split`` "train" (60000) or "val" (10000): pixels uint8 ``[n, 1, 28, 28]`` and labels int64 ``[n]``.

    ``ValueError`` names a file that is missing or damaged.
    """
    stem = Path(folder) / STEMS[split]
    pixels = _idx(Path(f"{stem}-images-idx3-ubyte.gz"), dimensions=3)
    labels = _idx(Path(f"{stem}-labels-idx1-ubyte.gz"), dimensions=1)
    if len(pixels) != len(labels):
        raise ValueError(f"{str(stem)!r}: {len(pixels)} pictures have {len(labels)} labels")
    return torch.from_numpy(pixels)[:, None], torch.from_numpy(labels).long()


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """An idx file of bytes: two zeros, the type 8, the number of dimensions, the sizes (big endian), the values."""
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    head = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:head], ">u4") if len(data) >= head else np.zeros(dimensions)
    if data[:4] != bytes((0, 0, 8, dimensions)) or len(data) != head + int(np.prod(shape.astype(np.int64))):
        raise ValueError(f"{str(path)!r} is not an idx file of bytes in {dimensions} dimensions")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape.astype(int)).copy()
