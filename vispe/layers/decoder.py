"""The post-norm transformer of DETR: places are added to queries and keys in every layer, and to values never.

``place`` is whatever says where a token is: sines of a feature map's cells, or the learned vector of an object query.
Names of :class:`PlacedAttention` follow torch's ``MultiheadAttention``: rows of ``qkv`` are (q, k, v).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn


class PlacedAttention(nn.Module):
    """Multi-head attention whose queries and keys come with their places added, and whose values come without."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(
        self,
        queries: Float[Tensor, "b n width"],
        values: Float[Tensor, "b m width"],
        keys: Float[Tensor, "b m width"] | None = None,
        mask: Tensor | None = None,
    ) -> Float[Tensor, "b n width"]:
        """``keys`` None: the queries are the keys. ``mask``: as SDPA takes it, over ``[b, heads, n, m]``."""
        width = queries.shape[-1]
        rows = (2 * width, width) if keys is None else (width, width, width)
        weights, biases = self.qkv.weight.split(rows), self.qkv.bias.split(rows)
        given = (queries, values) if keys is None else (queries, keys, values)
        made = [F.linear(*each) for each in zip(given, weights, biases, strict=True)]
        q, k, v = (*made[0].chunk(2, -1), made[1]) if keys is None else made
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        drop = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
        return self.proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """``fc2(drop(relu(fc1(x))))``."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        return self.fc2(self.drop(F.relu(self.fc1(x))))


class EncoderLayer(nn.Module):
    """``norm(x + attention)``, then ``norm(x + mlp)``; every layer is told the places anew."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = PlacedAttention(width, heads, dropout)
        self.mlp = FeedForward(width, hidden, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b n width"], place: Tensor | None = None, mask: Tensor | None = None
    ) -> Float[Tensor, "b n width"]:
        x = self.norm1(x + self.drop(self.attn(placed(x, place), x, mask=mask)))
        return self.norm2(x + self.drop(self.mlp(x)))


class DecoderLayer(nn.Module):
    """Queries look at one another, then at the memory; ``keys`` is the memory with its places, made once for all
    layers."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.self_attn = PlacedAttention(width, heads, dropout)
        self.cross_attn = PlacedAttention(width, heads, dropout)
        self.mlp = FeedForward(width, hidden, dropout)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.drop = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b q width"],
        memory: Float[Tensor, "b n width"],
        keys: Float[Tensor, "b n width"],
        place: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Float[Tensor, "b q width"]:
        x = self.norm1(x + self.drop(self.self_attn(placed(x, place), x)))
        x = self.norm2(x + self.drop(self.cross_attn(placed(x, place), memory, keys, mask)))
        return self.norm3(x + self.drop(self.mlp(x)))


class Perceptron(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in itertools.pairwise(widths))

    def forward(self, x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b m"]:
        for i, layer in enumerate(self.layers):
            x = F.relu(x) if i else x
            x = layer(x)
        return x


def placed(x: Float[Tensor, "b n width"], place: Tensor | None) -> Float[Tensor, "b n width"]:
    """``x`` with its places added, where there are any."""
    return x if place is None else x + place


def visible(real: Bool[Tensor, "b n"]) -> Bool[Tensor, "b 1 1 n"]:
    """The attention mask of keys that exist; where a row has none it sees all, so that nothing becomes NaN."""
    return (real | ~real.any(-1, keepdim=True))[:, None, None]


def xavier(module: nn.Module) -> None:
    """DETR's start: every matrix of the transformer Xavier uniform, attention's biases zero."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
        elif name.endswith(("qkv.bias", "proj.bias")):
            torch.nn.init.zeros_(parameter)
