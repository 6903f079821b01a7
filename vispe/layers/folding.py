"""A batch norm whose statistics are constant, taken into the convolution before it: a pass over the weights instead of
one over the map. Done in every forward, so that weights may change and nothing is kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of one convolution that gives ``norm(conv(x))`` in eval mode; ``conv`` has no bias."""
    scale, bias = affine(norm)
    return conv.weight * scale[:, None, None, None], bias


def affine(norm: nn.BatchNorm2d) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """Scale and bias by channel, which is what ``norm`` is in eval mode."""
    assert norm.running_var is not None
    assert norm.running_mean is not None
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return scale, norm.bias - norm.running_mean * scale


def convolve(x: Float[Tensor, "b c h w"], conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Float[Tensor, "b d hh ww"]:
    """``norm(conv(x))``; in eval mode as one convolution."""
    if norm.training and conv.kernel_size == (1, 1):
        # oneDNN's gradient of a strided 1 x 1 convolution, channels last, writes past its memory where channels are no
        # multiple of 16 (torch 2.14 on AVX-512): the pixels are taken first
        step, _ = conv.stride
        return norm(F.conv2d(x[..., ::step, ::step].contiguous(memory_format=torch.channels_last), conv.weight))
    if norm.training:
        return norm(conv(x))
    weight, bias = folded(conv, norm)
    return F.conv2d(x, weight, bias, conv.stride, conv.padding)
