"""ALiBi: a score falls linearly with distance, at a slope of its head; no parameters (Press et al. 2022).

The official code adds ``m j`` instead of ``-m (i - j)``: softmax drops the constant of a row, so under a causal mask
both are one. Without that mask (encoders, images) they are not: a key ahead would be *favoured*, hence the symmetric
forms. Fused kernels take :func:`alibi_slopes` alone.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from vispe.position.grid import check_grid, positive


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Float[Tensor, " heads"]:
    """A slope a head: ``2^(-8h/H)``, h = 1..H, **only** when H is a power of two (fairseq ``get_slopes``).

    Else, with c the power of two below H: the slopes of c heads, then every other slope of 2c heads, the first H - c of
    them. So H = 6 gives 2^-2, -4, -6, -8, -1, -3: not monotone, an order that old weights need. MPT's ``cat(s[1::2],
    s[::2])[:H]`` is the same list.
    """
    positive(num_heads=num_heads)
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = _geometric(below) + _geometric(2 * below)[0::2][: num_heads - below]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]


def alibi_symmetric(
    n: int, m: int, num_heads: int, start: int = 0, device: torch.device | None = None
) -> Float[Tensor, "heads n m"]:
    """``-slope |i - j|`` for encoders, float32. ``start``: position of the first query (flash-attn takes ``m - n``)."""
    return -alibi_slopes(num_heads, device)[:, None, None] * _differences(n, m, start, device).abs()


def alibi_causal(
    n: int, m: int, num_heads: int, start: int = 0, device: torch.device | None = None
) -> Float[Tensor, "heads n m"]:
    """``-slope (i - j)`` for keys behind, minus infinity for keys ahead: the causal mask is in it, float32.

    ``start`` is the position of the first query; with a cache of ``m - n`` earlier tokens that is ``m - n``.
    """
    if start < 0:
        raise ValueError(f"start must not be negative, or a query would see no key, got {start}")
    back = _differences(n, m, start, device)
    return (-alibi_slopes(num_heads, device)[:, None, None] * back).masked_fill(back < 0, -math.inf)


def alibi_2d(grid: tuple[int, int], num_heads: int, device: torch.device | None = None) -> Float[Tensor, "heads n n"]:
    """``-slope`` times the Euclidean distance of two cells (CROMA ``get_2dalibi``), tokens row-major, float32."""
    h, w = check_grid(grid)
    y = torch.arange(h, device=device)[:, None].expand(h, w).flatten()
    x = torch.arange(w, device=device).expand(h, w).flatten()
    squared = (y[:, None] - y) ** 2 + (x[:, None] - x) ** 2
    return -alibi_slopes(num_heads, device)[:, None, None] * squared.float().sqrt()


def _differences(n: int, m: int, start: int, device: torch.device | None) -> Float[Tensor, "n m"]:
    """``i - j`` in float32, exact below 2^24."""
    positive(n=n, m=m)
    i, j = torch.arange(start, start + n, device=device), torch.arange(m, device=device)
    return (i[:, None] - j).float()
