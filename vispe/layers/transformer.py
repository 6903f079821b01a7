"""The pre-norm transformer of images: patches, attention with sockets, MLP, block. ViT and MAE are made of these.

Names are timm's, so that most of the world's checkpoints need few renamings. What an encoding does to attention comes
in from outside, made once a forward: ``turn`` rotates q and k, ``bias`` is added to the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vispe.position.grid import Grid
from vispe.position.resample import patch_grid
from vispe.position.rotary import Layout, rotate


class Sockets(NamedTuple):
    """What one layer's attention is told of position: ``turn [..., n, d/2, 2]`` for q and k, ``bias(q) -> [..., n, n]``
    for the scores, ``values(weights) -> [..., n, d]`` for what comes out (Shaw)."""

    turn: Tensor | None = None
    layout: Layout = "interleaved"
    bias: Callable[[Tensor], Tensor] | None = None
    values: Callable[[Tensor], Tensor] | None = None


NOWHERE = Sockets()  # attention that is told nothing


class PatchEmbed(nn.Module):
    """Images ``[b, c, h, w]`` -> patches ``[b, n, width]``, row-major; ValueError unless patches tile the image."""

    def __init__(self, patch: int, width: int, channels: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(channels, width, patch, stride=patch, bias=bias)

    def grid(self, images: Float[Tensor, "b c h w"]) -> Grid:
        """The grid (h, w) of patches of these images."""
        return patch_grid((images.shape[-2], images.shape[-1]), (self.patch, self.patch))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n width"]:
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention; rows of ``qkv`` are ordered (q, k, v), each (heads, head_dim)."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b n width"], sockets: Sockets = NOWHERE) -> Float[Tensor, "b n width"]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if sockets.turn is not None:
            q, k = rotate(q, sockets.turn, sockets.layout), rotate(k, sockets.turn, sockets.layout)
        mask = None if sockets.bias is None else sockets.bias(q).to(q.dtype)
        if mask is not None and mask.ndim == 3:  # with a batch axis the fused kernels take it: twice as fast on the CPU
            mask = mask[None]
        if sockets.values is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:  # the weights themselves are asked for
            scores = q @ k.mT * q.shape[-1] ** -0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            out = weights @ v + sockets.values(weights)
        return self.proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """``fc2(GELU(fc1(x)))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGLU(nn.Module):
    """``fc2(SiLU(a) * b)`` of ``[a | b] = fc1(x)`` (Shazeer 2020; DINOv2 giant, DINOv3 huge)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(a) * b)


class LayerScale(nn.Module):
    """``gamma * x``, a learned factor per channel (Touvron et al. 2021, CaiT)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training a sample's branch is left out with probability ``rate``, else scaled by 1/(1 -
    rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"a drop rate is in [0, 1), got {rate}")
        self.rate = rate

    def forward(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        if not self.training or self.rate == 0:
            return x
        keep = x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep.div_(1 - self.rate)


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        qkv_bias: bool = True,
        mlp: str = "gelu",
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attn = Attention(width, heads, qkv_bias)
        self.mlp = {"gelu": MLP, "swiglu": SwiGLU}[mlp](width, hidden)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Float[Tensor, "b n width"], sockets: Sockets = NOWHERE) -> Float[Tensor, "b n width"]:
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), sockets)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


def init_weights(module: nn.Module) -> None:
    """ViT's start as timm makes it: linear weights N(0, 0.02^2) cut at two sigma, biases zero."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
