"""Swin's four feature maps for dense prediction, with timm's parts (Liu et al. 2021; its detection code's
``SwinTransformer``).

What is different from timm's own forward: a map that windows do not tile is padded **before** it is shifted, as in the
official detection and segmentation code and in every checkpoint trained with it; timm shifts first, which is another
network wherever the sides are no multiples of the window (800 x 1333 pixels are not). Any size goes in; each of the
four maps has a norm of its own. Relative positions inside a window are a learned bias, one table a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from vispe.layers.pretrained import library, take_weights

Windows = tuple[int, int]
APART = -100.0  # Swin's own: what is added to the score of two cells that only the shift has made neighbours


class SwinFeatures(nn.Module):
    """``images [b, 3, h, w]`` -> maps at 1/4, 1/8, 1/16 and 1/32, sides rounded up, channels first.

    ``name``: a Swin of timm's, such as ``"swin_tiny_patch4_window7_224"``; ``knobs``: what its constructor takes.
    ``drop_path``: the last block's rate. ``ValueError`` without timm.
    """

    def __init__(self, name: str, drop_path: float = 0.0, knobs: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.name = name
        self.net: Any = library().create_model(
            name,
            pretrained=False,
            features_only=True,
            strict_img_size=False,
            always_partition=True,
            drop_path_rate=drop_path,
            **dict(knobs or {}),
        )
        info: Any = self.net.feature_info
        self.channels = list(info.channels())
        self.strides = list(info.reduction())
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in self.channels)

    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """:func:`~vispe.layers.pretrained.take_weights`; the norms of the maps are no part of a classifier."""
        take_weights(self.net, state, self.name)

    def forward(self, images: Float[Tensor, "b c h w"]) -> list[Float[Tensor, "b width y x"]]:
        patch = self.net.patch_embed
        (h, w), (y, x) = images.shape[-2:], patch.patch_size
        tokens = patch(F.pad(images, (0, -w % x, 0, -h % y)))
        maps = []
        for i, norm in enumerate(self.norms):
            stage = self.net[f"layers_{i}"]
            tokens = stage.downsample(tokens)
            apart = None
            for block in stage.blocks:
                if apart is None and any(block.shift_size):
                    apart = _apart(_padded(tokens.shape[1:3], block.window_size), block, tokens)
                tokens = _run(block, tokens, apart)
            maps.append(norm(tokens).permute(0, 3, 1, 2))
        return maps


def _run(block: Any, x: Float[Tensor, "b h w c"], apart: Tensor | None) -> Float[Tensor, "b h w c"]:
    """One of timm's blocks, its windows cut from the padded map."""
    x = x + block.drop_path1(_attention(block, block.norm1(x), apart if any(block.shift_size) else None))
    return x + block.drop_path2(block.mlp(block.norm2(x)))


def _attention(block: Any, x: Float[Tensor, "b h w c"], apart: Tensor | None) -> Float[Tensor, "b h w c"]:
    (b, h, w, _), (y, z), (dy, dx) = x.shape, block.window_size, block.shift_size
    x = F.pad(x, (0, 0, 0, -w % z, 0, -h % y))
    x = x.roll((-dy, -dx), (1, 2)) if apart is not None else x
    attention, size = block.attn, x.shape[1:3]
    tokens = _windows(x, (y, z))
    q, k, v = attention.qkv(tokens).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    bias = attention._get_rel_pos_bias()
    if apart is not None:
        bias = bias + apart[:, None]
        bias = bias.repeat(b, 1, 1, 1) if b > 1 else bias
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    out = attention.proj(out.transpose(1, 2).flatten(2))
    out = (
        out.unflatten(0, (b, size[0] // y, size[1] // z))
        .unflatten(3, (y, z))
        .transpose(2, 3)
        .flatten(3, 4)
        .flatten(1, 2)
    )
    out = out.roll((dy, dx), (1, 2)) if apart is not None else out
    return out[:, :h, :w]


def _windows(x: Shaped[Tensor, "b h w c"], window: Windows) -> Shaped[Tensor, "n area c"]:
    """Windows row by row, image after image."""
    y, z = window
    x = x.unflatten(2, (-1, z)).unflatten(1, (-1, y)).transpose(2, 3)
    return x.flatten(3, 4).flatten(0, 2)


def _padded(size: tuple[int, ...], window: Windows) -> tuple[int, int]:
    return size[0] + -size[0] % window[0], size[1] + -size[1] % window[1]


def _apart(size: tuple[int, int], block: Any, like: Tensor) -> Float[Tensor, "n area area"]:
    """0 for two cells of a window that are neighbours in the picture, -100 for two that the shift has brought together.

    The shifted map has three regions a side: what no window shares with the other end, and the two halves of the last
    window.
    """
    sides = []
    for length, window, shift in zip(size, block.window_size, block.shift_size, strict=True):
        cell = torch.arange(length, device=like.device)
        sides.append((cell >= length - window).long() + (cell >= length - shift).long())
    region = _windows((sides[0][:, None] * 3 + sides[1])[None, ..., None], block.window_size)[..., 0]
    return (region[:, :, None] != region[:, None, :]).to(like.dtype) * APART
