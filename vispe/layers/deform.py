"""Deformable convolution (Dai et al. 2017) as a gather and a matrix product.

torchvision's CPU kernel interpolates channel by channel; here all channels of a cell are one row, and four rows make a
tap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.layers.bilinear import cross, taps, weighted_rows


def deform_conv2d(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve ``x [b, c, h, w]`` by ``weight [d, c, k, k]`` with tap t moved by (dy, dx) = ``offset[:, 2t : 2t + 2]``.

    Stride 1, padding k // 2, cells outside count as zero: ``torchvision.ops.deform_conv2d`` with those settings. The
    result is ``[b, d, h, w]``, channels-last in memory.
    """
    b, c, h, w = x.shape
    d, _, k, _ = weight.shape
    offset = offset.permute(0, 2, 3, 1).float()  # [b, h, w, 2 * k * k]
    reach = torch.arange(k, device=x.device) - k // 2
    rows = torch.arange(h, device=x.device)[:, None, None] + reach.repeat_interleave(k)
    columns = torch.arange(w, device=x.device)[:, None] + reach.repeat(k)
    index, share = cross(taps(offset[..., 0::2] + rows, h), taps(offset[..., 1::2] + columns, w), w)
    index = index + torch.arange(b, device=x.device).view(b, 1, 1, 1) * (h * w)
    table = x.permute(0, 2, 3, 1).reshape(b * h * w, c)
    patches = weighted_rows(table, index, share).view(b * h * w, k * k * c)
    kernel = weight.permute(2, 3, 1, 0).reshape(k * k * c, d)
    out = patches @ kernel if bias is None else torch.addmm(bias, patches, kernel)
    return out.view(b, h, w, d).permute(0, 3, 1, 2)
