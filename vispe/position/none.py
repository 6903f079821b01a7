"""No position at all (NoPE), said aloud: what each of the four sockets holds when nothing is encoded.

Attention without encodings is permutation-equivariant: shuffle the tokens and the outputs are shuffled with them. A
causal mask breaks that symmetry, so that decoders can do without (Haviv et al. 2022; Kazemnejad et al. 2023).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vispe.position.grid import positive


def no_addition(n: int, dim: int, device: torch.device | None = None) -> Float[Tensor, "n dim"]:
    """Added socket: zeros, float32."""
    positive(n=n, dim=dim)
    return torch.zeros(n, dim, dtype=torch.float32, device=device)


def no_rotation(n: int, head_dim: int, device: torch.device | None = None) -> Float[Tensor, "n pairs 2"]:
    """Rotated socket: every pair turned by nothing, (cos, sin) = (1, 0), float32; ``rotate`` returns its input's
    numbers."""
    positive(n=n, head_dim=head_dim)
    if head_dim % 2:
        raise ValueError(f"rotary needs an even head_dim, got {head_dim}")
    return torch.tensor([1.0, 0.0], dtype=torch.float32, device=device).expand(n, head_dim // 2, 2).contiguous()


def no_bias(n: int, m: int) -> None:
    """Biased socket: None and not zeros, so that attention keeps its kernels without a mask."""
    positive(n=n, m=m)


def no_convolution(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Convolved socket: the map itself."""
    return x
