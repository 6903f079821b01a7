"""What matchers without keypoints share: cells of a coarse map that match, and the pixels they stand on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vispe.position.grid import Grid


class CellMatches(NamedTuple):
    """The ``k`` matches of ``b`` pairs, pair by pair, in the order of image 0's cells.

    ``keypoints0 [k, 2]``, ``keypoints1 [k, 2]``: (x, y) pixels of the tensors given, float32 at least. ``scores [k]``:
    coarse confidences. ``rows [k]``: which pair of the batch.
    """

    keypoints0: Tensor
    keypoints1: Tensor
    scores: Tensor
    rows: Tensor


def check_pairs(image0: Tensor, image1: Tensor, dtype: torch.dtype, who: str) -> None:
    """``ValueError`` unless both are ``[b, 1 or 3, h, w]`` of ``dtype``, as many of one as of the other."""
    for image in (image0, image1):
        if image.ndim != 4 or image.shape[1] not in (1, 3) or 0 in image.shape:
            raise ValueError(f"{who} takes images [b, 1 or 3, h, w], got {list(image.shape)}")
        if image.dtype != dtype:
            raise ValueError(f"{who}'s weights are {dtype}, the image is {image.dtype}")
    if len(image0) != len(image1):
        raise ValueError(f"image0 has {len(image0)} pairs, image1 has {len(image1)}")


def inner(grid: Grid, sizes: Int[Tensor, "b 2"], border: int) -> Bool[Tensor, "b n"]:
    """Which cells of ``grid`` lie off the edge by ``border`` where an image has ``sizes`` (h, w) cells of it."""
    rows, columns = (torch.arange(size, device=sizes.device) for size in grid)
    h, w = sizes[:, :, None].unbind(1)
    high, wide = (rows >= border) & (rows < h - border), (columns >= border) & (columns < w - border)
    return (high[:, :, None] & wide[:, None]).flatten(1)


def pixels(cells: Int[Tensor, " k"], grid: Grid, stride: int, dtype: torch.dtype) -> Float[Tensor, "k 2"]:
    """(x, y) of cells: cell (row, column) sits on pixel ``stride * (column, row)``."""
    return (torch.stack((cells % grid[1], cells // grid[1]), -1) * stride).to(dtype)
