"""Convolutions that carry position: a 3x3 depthwise kernel sees the zeros around the image and so knows the border.

There is no table and no coordinate. It is the *padding* that leaks where a token is (Islam et al. 2020): with
``padding="circular"`` the same module is translation-equivariant and position is gone, which is the ablation to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vispe.position.grid import positive

Padding = Literal["zeros", "circular", "reflect", "replicate"]


def on_grid(
    tokens: Float[Tensor, "b n c"],
    grid: tuple[int, int],
    convolve: Callable[[Tensor], Tensor],
    prefix: int = 0,
) -> Float[Tensor, "b n c"]:
    """Apply ``convolve``, maps ``[b, c, h, w]`` to maps, to row-major tokens; ``prefix`` tokens in front bypass it."""
    h, w = grid
    if min(h, w) < 1 or prefix < 0 or tokens.shape[1] != prefix + h * w:
        raise ValueError(f"{tokens.shape[1]} tokens are not a {h}x{w} grid behind {prefix} prefix tokens")
    cells = tokens[:, prefix:].unflatten(1, (h, w)).permute(0, 3, 1, 2)  # channels last, also in a batch of one
    cells = convolve(cells).flatten(2).transpose(1, 2)
    return torch.cat((tokens[:, :prefix], cells), 1) if prefix else cells


def _depthwise(width: int, padding: Padding) -> nn.Conv2d:
    """3x3, one kernel a channel, drawn as SegFormer and Twins do: N(0, 2 / fan out) with fan out 9."""
    positive(width=width)
    conv = nn.Conv2d(width, width, 3, padding=1, groups=width, padding_mode=padding)
    nn.init.normal_(conv.weight, std=math.sqrt(2 / 9))
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv


class PEG(nn.Module):
    """Position encoding generator (CPVT, Chu et al. 2021, section 3.2; Twins): ``x + DWConv3x3(x)``.

    ``[b, c, h, w]`` -> the same; with tokens ``on_grid(tokens, grid, peg, prefix)``. It stands once a stage, behind the
    first block; class tokens bypass it.
    """

    positional = ("conv",)

    def __init__(self, width: int, padding: Padding = "zeros") -> None:
        super().__init__()
        self.conv = _depthwise(width, padding)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return x + self.conv(x)


class MixFFN(nn.Module):
    """SegFormer's feed-forward (Xie et al. 2021, section 3.1): ``fc2(GELU(DWConv3x3(fc1(x))))``, no residual inside.

    ``forward(tokens [b, n, c], grid (h, w))`` -> ``[b, n, c]``. It takes the place of a block's MLP, so position enters
    at every layer and no table must be resized with the image. SegFormer's own recipe decays this kernel.
    """

    positional = ("conv",)

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, padding: Padding = "zeros") -> None:
        super().__init__()
        positive(width=width, hidden=hidden)
        self.fc1 = nn.Linear(width, hidden)
        self.conv = _depthwise(hidden, padding)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.fc1, self.fc2):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Float[Tensor, "b n c"], grid: tuple[int, int], prefix: int = 0) -> Float[Tensor, "b n c"]:
        hidden = on_grid(self.fc1(tokens), grid, self.conv, prefix)
        return self.dropout(self.fc2(self.dropout(F.gelu(hidden))))
