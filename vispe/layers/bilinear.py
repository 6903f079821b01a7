"""Bilinear interpolation as a weighted sum of table rows, so that only the points that are asked for are ever computed.

A feature map kept channels-last is a table with one row per cell. Reading it between cells takes two taps an axis,
hence four rows a point, and ``embedding_bag`` sums weighted rows in one pass, with gradients for table and weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Taps = tuple[Tensor, Tensor]
"""Indices (int64) and weights (float32) of equal shape ``[k, ...]``: which k entries to sum, and how much of each.

The taps lead, so that the arithmetic runs over long contiguous vectors.
"""


def taps(position: Tensor, size: int) -> Taps:
    """The two neighbours ``[2, ...]`` of positions on an axis of ``size`` cells; a neighbour outside weighs nothing."""
    position = position.float()
    floor = position.detach().floor()
    fraction = position - floor
    index = torch.stack((floor, floor + 1))
    inside = index.clamp(0, size - 1)
    weight = torch.stack((1 - fraction, fraction)) * (inside == index)
    return inside.long(), weight


def stretch(size: int, source: int, device: torch.device | None = None) -> Taps:
    """Taps ``[2, size]`` that lengthen an axis of ``source`` cells, first on first, last on last (align_corners)."""
    ratio = (source - 1) / max(size - 1, 1)
    return taps((torch.arange(size, device=device) * ratio).clamp(max=source - 1), source)


def cross(rows: Taps, columns: Taps, width: int) -> Taps:
    """Join the taps of both axes into taps on the flat, row-major map of that ``width``; their shapes broadcast."""
    index = rows[0][:, None] * width + columns[0][None]
    return index.flatten(0, 1), (rows[1][:, None] * columns[1][None]).flatten(0, 1)


def weighted_rows(table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """``out[i] = sum_k weight[k, i] table[index[k, i]]`` of a table ``[n, c]`` and taps ``[k, ...]``: ``[..., c]``."""
    bags, shares = index.flatten(1).T, weight.to(table.dtype).flatten(1).T
    out = F.embedding_bag(bags, table, per_sample_weights=shares, mode="sum")
    return out.view(*index.shape[1:], table.shape[1])
