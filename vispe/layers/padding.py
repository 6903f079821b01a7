"""Images of several sizes in one batch: which pixels are real, and which rows can be computed together."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vispe.position.grid import Grid


def rectangles(mask: Bool[Tensor, "b h w"], images: Float[Tensor, "b c h w"]) -> list[Grid]:
    """The (h, w) of each image's real pixels (true in the mask); ``ValueError`` unless they fill a rectangle at the
    upper left. Waits for the device once."""
    if mask.shape != (images.shape[0], *images.shape[-2:]) or mask.dtype != torch.bool:
        raise ValueError(f"mask is [b, h, w] of bool for {list(images.shape)}, got {mask.dtype} {list(mask.shape)}")
    sides = torch.stack((mask.any(2).sum(1), mask.any(1).sum(1), mask.flatten(1).sum(1)), 1).tolist()
    for i, (h, w, count) in enumerate(sides):
        if not count or h * w != count or not bool(mask[i, :h, :w].all()):
            raise ValueError(f"the real pixels of a mask must fill a rectangle at the upper left, image {i}'s do not")
    return [(h, w) for h, w, _ in sides]


def together(sizes: list[Grid]) -> dict[Grid, list[int]]:
    """Which images share a size: ``{(h, w): [indices]}`` in order of appearance."""
    groups: dict[Grid, list[int]] = {}
    for i, size in enumerate(sizes):
        groups.setdefault(size, []).append(i)
    return groups
