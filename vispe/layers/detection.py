"""What keypoint networks share: grey input, their typed result, non-maximum suppression on a dense score map."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # Rec. 601, the weights of the training pictures


class PointFeatures(NamedTuple):
    """Local features of one image, strongest first, in pixels of the tensor the network was given.

    ``keypoints [n, 2]`` are (x, y) with the first pixel's centre at (0, 0); ``scores [n]``; ``descriptors [n, d]`` have
    unit norm.
    """

    keypoints: Tensor
    scores: Tensor
    descriptors: Tensor


def grey(image: Tensor) -> Tensor:
    """``[b, 1 or 3, h, w]`` to ``[b, 1, h, w]``, channels last: the convolutions follow (a third faster on a CPU)."""
    if image.shape[1] == 3:
        red, green, blue = LUMA
        image = red * image[:, 0:1] + green * image[:, 1:2] + blue * image[:, 2:3]
    return image[:, 0, :, :, None].permute(0, 3, 1, 2)


def window_maximum(x: Tensor, radius: int) -> Tensor:
    """Maximum over the (2 radius + 1)^2 window around every cell of ``[b, h, w]``; cells outside never win.

    Equal to ``max_pool2d``, bit for bit, in a thirtieth of its time on a CPU: the square is a row maximum of column
    maxima, and a run of cells grows from the maxima of shorter runs (1, 2, 4, ... cells) by whole-map ``maximum``.
    """
    lowest = float("-inf") if x.is_floating_point() else 0
    for dim, margin in ((1, (0, 0, radius, radius)), (2, (radius, radius))):
        x = F.pad(x, margin, value=lowest)
        run = 1
        while run < 2 * radius + 1:
            step = min(run, 2 * radius + 1 - run)
            rest = x.shape[dim] - step
            x = torch.maximum(x.narrow(dim, 0, rest), x.narrow(dim, step, rest))
            run += step
    return x


def suppress(scores: Tensor, radius: int) -> Tensor:
    """Keep the local maxima of ``scores [b, h, w]`` (finite, non-negative), zero elsewhere: SuperPoint's suppression.

    A cell survives if it is the maximum of its window, or becomes it once the windows of earlier survivors are cleared
    (two rounds). Equal neighbours all survive, as in every published version.
    """
    keep = scores == window_maximum(scores, radius)
    for _ in range(2):
        clear = window_maximum(keep.to(torch.uint8), radius) == 0
        rest = scores * clear
        keep = keep | ((rest == window_maximum(rest, radius)) & clear)
    return scores * keep
