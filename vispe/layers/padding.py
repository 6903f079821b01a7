"""Images of several sizes in one batch: which pixels are real, and which rows can be computed together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from vispe.position.grid import Grid

Size = TypeVar("Size", bound=Hashable)


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


def together(sizes: list[Size]) -> dict[Size, list[int]]:
    """Which images, or pairs, share a size: ``{(h, w): [indices]}`` in order of appearance."""
    groups: dict[Size, list[int]] = {}
    for i, size in enumerate(sizes):
        groups.setdefault(size, []).append(i)
    return groups


def unpadded(
    network: Callable[[Tensor], Tensor],
    images: Float[Tensor, "b c h w"],
    mask: Bool[Tensor, "b h w"] | None,
    stride: int,
    training: bool,
) -> Float[Tensor, "b d y x"]:
    """``network`` on the real pixels of each image, with those of its own size; behind them its map is zeros.

    ``network``: images -> a map of their sides over ``stride``, rounded up. ``mask``: true on real pixels, which lie in
    the upper left corner; None where all are real. ``ValueError`` for padding in training (crops have one size) and for
    a mask that is no such rectangle.
    """
    if mask is None:
        return network(images)
    sizes = rectangles(mask, images)
    h, w = images.shape[-2:]
    if all(size == (h, w) for size in sizes):
        return network(images)
    if training:
        raise ValueError(f"training takes images of one size, without padding; got {sizes} in {(h, w)}")
    whole = [-(-side // stride) for side in (h, w)]
    alone: dict[int, Tensor] = {}
    for (y, x), members in together(sizes).items():
        made = network(images[members, :, :y, :x])
        padded = F.pad(made, (0, whole[1] - made.shape[3], 0, whole[0] - made.shape[2]))
        alone.update(zip(members, padded, strict=True))
    return torch.stack([alone[i] for i in range(len(sizes))])
