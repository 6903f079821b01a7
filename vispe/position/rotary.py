"""Rotary encoding: queries and keys are turned by an angle that grows with position, so a score sees only differences.

A rotation is kept as ``[..., n, head_dim/2, 2]``: cosine and sine side by side, float32, made once and shared by every
layer; the [head_dim, head_dim] matrix is never formed and values are never turned. Adjacent channels (0,1), (2,3), ...
form the pairs (RoFormer section 3.2.2; the official LightGlue, timm, GPT-J), not the two halves (NeoX, transformers).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vispe.position.grid import at_least_float32


def rotation(angles: Float[Tensor, "*n pairs"]) -> Float[Tensor, "*n pairs 2"]:
    """``angles [..., d/2]`` in radians -> ``[..., d/2, 2]`` of (cos, sin), float32 (float64 stays)."""
    angles = at_least_float32(angles)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def frequencies(dim: int, base: float = 10000.0) -> Float[Tensor, " pairs"]:
    """``theta_i = base^(-2i/dim)`` for the ``dim/2`` pairs of a head, float32 (RoFormer section 3.2.2)."""
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary needs a positive even dim, got {dim}")
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def rotate(x: Float[Tensor, "*n d"], turn: Float[Tensor, "*m pairs 2"]) -> Float[Tensor, "*n d"]:
    """Turn the adjacent pairs of ``x [..., d]`` by ``turn`` (from :func:`rotation`, broadcast over ``x``'s leading
    axes).

    Eager float32 on the CPU multiplies as complex numbers (one pass over memory); elsewhere the real form, which
    compilers fuse and exporters know. Both give the same numbers to rounding.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling():
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turn)).flatten(-2)
    cos, sin = turn.to(x.dtype).unbind(-1)
    a, b = pairs.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class LearnedBasis(nn.Module):
    """Angles as a learned linear mix of the coordinates: ``W_r p`` (LightGlue section 3.1; Li et al. 2021, learnable
    Fourier).

    ``forward(positions [..., n, dims])`` -> rotation ``[..., n, head_dim/2, 2]``. Computed elementwise in float32 even
    under autocast: a half-precision or TF32 matmul would blur positions.
    """

    def __init__(self, dims: int, head_dim: int, gamma: float = 1.0) -> None:
        super().__init__()
        if head_dim <= 0 or head_dim % 2:
            raise ValueError(f"rotary needs a positive even head_dim, got {head_dim}")
        self.weight = nn.Parameter(torch.randn(head_dim // 2, dims) * gamma**-2)

    def forward(self, positions: Float[Tensor, "*n dims"]) -> Float[Tensor, "*n pairs 2"]:
        weight, positions = at_least_float32(self.weight), at_least_float32(positions)
        # A short loop over the 2 or 4 coordinates instead of a [n, head_dim/2, dims] product.
        angles = torch.stack([positions[..., i, None] * weight[:, i] for i in range(weight.shape[1])]).sum(0)
        return rotation(angles)
