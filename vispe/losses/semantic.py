"""The loss of semantic segmentation: cross entropy of every pixel of the mask, logits brought to its size."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def pixel_loss(
    logits: Float[Tensor, "b classes h4 w4"],
    masks: Int[Tensor, "b h w"],
    *,
    void: int = -1,
    label_smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """The sum over pixels that are not ``void``, over the number of all pixels.

    So does mmsegmentation, by which SegFormer was trained: void is a loss of 0. A batch of nothing but void is no
    division by 0, and equal parts of a batch average to the whole, on however many devices.
    """
    whole = F.interpolate(logits.float(), size=masks.shape[-2:], mode="bilinear", align_corners=False)
    total = F.cross_entropy(whole, masks, ignore_index=void, label_smoothing=label_smoothing, reduction="sum")
    return total / masks.numel()
