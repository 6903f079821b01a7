"""Relative biases: a number for every pair of tokens that is added to the score, so that attention sees distances.

``i`` is a query's position, ``j`` a key's. T5 and both Swins know only the pair and give ``[heads, n, m]``, made once a
forward and broadcast over the batch; Shaw and the decomposed bias also ask the query and give ``[batch, heads, n, m]``.
Nothing is stored but parameters: no index buffer to go stale, to be saved or to stay empty after ``to_empty``. An index
is made anew and read with ``index_select``, which is faster than the originals' stored index and follows every size in
one compiled program (``unfold`` would compile one for each).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from vispe.position.grid import at_least_float32, check_grid, positive
from vispe.position.resample import RECIPES, resample_bias, resample_line


def by_difference(values: Shaped[Tensor, "*lead t"], n: int) -> Shaped[Tensor, "*lead n m"]:
    """``out[..., i, j] = values[..., j - i + n - 1]``: a value for each difference -> one for each pair."""
    m = values.shape[-1] - n + 1
    i, j = torch.arange(n, device=values.device), torch.arange(m, device=values.device)
    return values.index_select(-1, (j - i[:, None] + n - 1).flatten()).unflatten(-1, (n, m))


def with_prefix(bias: Float[Tensor, "*heads n m"], prefix: int) -> Float[Tensor, "*heads n_all m_all"]:
    """Zero rows and columns in front for ``prefix`` tokens (class, registers), which have no place on the grid."""
    if prefix < 0:
        raise ValueError(f"prefix must not be negative, got {prefix}")
    return F.pad(bias, (prefix, 0, prefix, 0))


def float32_product(rule: str, a: Float[Tensor, "*a"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*c"]:
    """``einsum`` in at least float32: autocast would blur it to half precision."""
    device = a.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        return torch.einsum(rule, at_least_float32(a), at_least_float32(b))


def t5_bounds(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The distances at which buckets 1, 2, ... begin: ``e = num_buckets // 2`` exact ones, then logarithmic ones.

    T5 (Raffel et al. 2020, section 2.1; mesh_tensorflow) takes ``e + floor(ln(r/e) / ln(max_distance/e) * (num_buckets
    - e))``. The float logarithm decides r = 16, 32, 64 by its last bit (in bfloat16 16, 32 and 90 fall wrong); here the
    first r of each bucket is found in whole numbers, equal to the float32 formula, the same for every device and dtype.
    """
    exact = num_buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(f"T5 needs max_distance > num_buckets // 2 >= 1 a side, got {max_distance} and {num_buckets}")
    steps, bounds = num_buckets - exact, list(range(1, exact + 1))
    for k in range(1, steps):  # the first r with (r/e)^steps >= (max_distance/e)^k
        r = max(math.ceil(exact * (max_distance / exact) ** (k / steps)) - 1, exact)
        while r**steps * exact**k < max_distance**k * exact**steps:
            r += 1
        bounds.append(r)
    return tuple(bounds)


def _t5_side(distance: Int[Tensor, "*pairs"], num_buckets: int, max_distance: int) -> Int[Tensor, "*pairs"]:
    bounds = torch.tensor(t5_bounds(num_buckets, max_distance), device=distance.device)
    return (distance[..., None] >= bounds).sum(-1)


def t5_buckets(
    relative: Int[Tensor, "*pairs"], num_buckets: int = 32, max_distance: int = 128
) -> Int[Tensor, "*pairs"]:
    """Bucket of ``relative = j - i`` in an encoder: half of the buckets for each direction, keys ahead in the upper."""
    if num_buckets % 2:
        raise ValueError(f"T5 shares its buckets between two directions: num_buckets must be even, got {num_buckets}")
    return (relative > 0) * (num_buckets // 2) + _t5_side(relative.abs(), num_buckets // 2, max_distance)


def t5_buckets_causal(
    relative: Int[Tensor, "*pairs"], num_buckets: int = 32, max_distance: int = 128
) -> Int[Tensor, "*pairs"]:
    """Bucket of ``relative = j - i`` in a decoder: all buckets look back; keys ahead, which a mask hides, share 0."""
    return _t5_side((-relative).clamp(min=0), num_buckets, max_distance)


class T5Bias(nn.Module):
    """One scalar a head and bucket: ``forward(n, m, start)`` -> ``weight[bucket(j - i)]`` as ``[heads, n, m]``.

    One table serves every layer (T5's first layer owns it), and T5 does not divide its scores by sqrt(d). ``start`` is
    the position of the first query (with a cache: ``m - n``). T5 draws the table with std ``width^-1/2``; here 0.02.
    """

    positional = ("weight",)
    buckets: Callable[[Tensor, int, int], Tensor] = staticmethod(t5_buckets)

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        positive(num_heads=num_heads)
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.buckets(torch.zeros(1, dtype=torch.long), num_buckets, max_distance)  # refuses bad numbers now
        self.weight = nn.Parameter(torch.randn(num_buckets, num_heads) * 0.02)

    def forward(self, n: int, m: int, start: int = 0) -> Float[Tensor, "heads n m"]:
        positive(n=n, m=m)
        relative = torch.arange(1 - n - start, m - start, device=self.weight.device)
        return by_difference(self.weight[self.buckets(relative, self.num_buckets, self.max_distance)].T, n)


class CausalT5Bias(T5Bias):
    """The decoder's: buckets only for keys behind. It hides nothing: the causal mask is added by the attention."""

    buckets: Callable[[Tensor, int, int], Tensor] = staticmethod(t5_buckets_causal)


class ShawBias(nn.Module):
    """Shaw et al. 2018, equations 3 to 5: a vector for each clipped distance, added to keys and to values.

    ``a_ij = w[clip(j - i, -K, K) + K]``; score ``q_i . (k_j + a_ij^K) / sqrt(d)``, output ``sum_j alpha_ij (v_j +
    a_ij^V)``. ``forward(q, m)`` gives the keys' part ``[b, heads, n, m]``, already divided by sqrt(d);
    ``values(alpha)`` gives what is added to attention's output. All heads share both tables. Every query meets only
    2K + 1 vectors, so the products are made with the tables and then spread over (or summed from) the pairs: no
    ``[n, m, d]``.
    """

    positional = ("key_table", "value_table")

    def __init__(self, head_dim: int, max_distance: int) -> None:
        super().__init__()
        positive(head_dim=head_dim, max_distance=max_distance)
        self.max_distance = max_distance
        self.key_table = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        self.value_table = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        nn.init.xavier_uniform_(self.key_table)
        nn.init.xavier_uniform_(self.value_table)

    def forward(self, q: Float[Tensor, "b heads n d"], m: int, start: int = 0) -> Float[Tensor, "b heads n m"]:
        positive(m=m)
        if q.shape[-1] != self.key_table.shape[1]:
            raise ValueError(f"queries have {q.shape[-1]} channels a head, the table has {self.key_table.shape[1]}")
        scores = float32_product("bhnd,rd->bhnr", q, self.key_table) * q.shape[-1] ** -0.5
        return scores.gather(-1, self._index(q.shape[2], m, start).expand(*q.shape[:2], -1, -1)).to(q.dtype)

    def values(self, alpha: Float[Tensor, "b heads n m"], start: int = 0) -> Float[Tensor, "b heads n d"]:
        """``sum_j alpha_ij a_ij^V`` for the attention weights ``alpha``, after softmax (and dropout)."""
        shares = at_least_float32(alpha).new_zeros(*alpha.shape[:3], self.value_table.shape[0])
        index = self._index(alpha.shape[2], alpha.shape[3], start).expand_as(alpha)
        shares = shares.scatter_add(-1, index, at_least_float32(alpha))
        return float32_product("bhnr,rd->bhnd", shares, self.value_table).to(alpha.dtype)

    def _index(self, n: int, m: int, start: int) -> Int[Tensor, "n m"]:
        device, reach = self.key_table.device, self.max_distance
        i, j = torch.arange(start, start + n, device=device), torch.arange(m, device=device)
        return (j - i[:, None]).clamp(-reach, reach) + reach


def swin_index(window: tuple[int, int], device: torch.device | None = None) -> Int[Tensor, "n n"]:
    """Row of the table for each pair of cells: ``(dy + h - 1)(2w - 1) + (dx + w - 1)``, d = query - key.

    The originals' buffer ``relative_position_index`` (Swin, Liu et al. 2021, section 3.2); drop theirs when loading.
    """
    h, w = check_grid(window, "window")
    y = torch.arange(h, device=device)[:, None].expand(h, w).flatten()
    x = torch.arange(w, device=device).expand(h, w).flatten()
    return (y[:, None] - y + h - 1) * (2 * w - 1) + (x[:, None] - x + w - 1)


def _spread(table: Float[Tensor, "t heads"], window: tuple[int, int]) -> Float[Tensor, "heads n n"]:
    """``table[swin_index(window)]`` with heads first."""
    index = swin_index(window, table.device)
    return table.T.contiguous().index_select(-1, index.flatten()).unflatten(-1, index.shape)


class SwinBias(nn.Module):
    """Swin's table (Liu et al. 2021, section 3.2): one scalar a head for each difference (dy, dx) in a window.

    ``forward(grid)`` -> ``[heads, h*w, h*w]``; another grid than the table's ``window`` has the table resampled first.
    The table has the originals' layout ``[(2h-1)(2w-1), heads]``.
    """

    positional = ("table",)

    def __init__(self, window: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        h, w = check_grid(window, "window")
        positive(num_heads=num_heads)
        self.window = (h, w)
        self.table = nn.Parameter(torch.empty((2 * h - 1) * (2 * w - 1), num_heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Float[Tensor, "heads n n"]:
        return _spread(resample_bias(self.table, self.window, grid, RECIPES["swin_bias"]), grid)


class SwinV2Bias(nn.Module):
    """Swin V2's continuous bias (Liu et al. 2022, section 3.3): a small network of the log-spaced difference.

    ``c = 8 (dy, dx) / (window - 1)``, ``c' = sign(c) log2(1 + |c|) / log2 8``, bias ``16 sigmoid(MLP(c'))``, for cosine
    attention. ``window`` is the one trained at (the originals' ``pretrained_window_size``, else their window): it
    scales the differences, and ``forward(grid)`` then serves any grid. Float32 throughout, also under autocast.
    """

    positional = ("inner", "outer")

    def __init__(self, window: tuple[int, int], num_heads: int, hidden: int = 512) -> None:
        super().__init__()
        h, w = check_grid(window, "window")
        positive(num_heads=num_heads, hidden=hidden)
        self.window = (h, w)
        self.inner, self.outer = nn.Linear(2, hidden), nn.Linear(hidden, num_heads, bias=False)
        nn.init.trunc_normal_(self.inner.weight, std=0.02)
        nn.init.zeros_(self.inner.bias)
        nn.init.trunc_normal_(self.outer.weight, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Float[Tensor, "heads n n"]:
        check_grid(grid)
        y, x = (self._log_spaced(*sizes) for sizes in zip(grid, self.window, strict=True))
        weight = at_least_float32(self.inner.weight)  # elementwise: the differences meet no reduced-precision product
        hidden = y[:, None, None] * weight[:, 0] + x[:, None] * weight[:, 1] + at_least_float32(self.inner.bias)
        table = float32_product("yxc,hc->yxh", hidden.relu(), self.outer.weight)
        table = (16 * table.sigmoid()).to(self.outer.weight.dtype)  # before it is spread: fewer, and equal, sigmoids
        return _spread(table.flatten(0, 1), grid)

    def _log_spaced(self, size: int, window: int) -> Float[Tensor, " differences"]:
        c = torch.arange(1 - size, size, dtype=torch.float32, device=self.inner.weight.device)
        c = c * (8.0 / max(window - 1, 1))
        return c.sign() * (c.abs() + 1).log2() / math.log2(8)


class DecomposedBias(nn.Module):
    """ViTDet's and SAM's bias (MViTv2, Li et al. 2022, section 4.1): ``q . R_h[dy] + q . R_w[dx]``, a table an axis.

    ``forward(q, grid, key_grid)`` -> ``[b, heads, n, m]``. ``q`` is taken as it is, before the division by sqrt(d), and
    the bias is added to divided scores. Pooled keys may have a smaller grid: differences are then counted in the finer
    cells. A table of another length than ``2 max(queries, keys) - 1`` is resampled linearly (recipe ``sam_relpos``).
    """

    positional = ("rows", "columns")

    def __init__(self, grid: tuple[int, int], head_dim: int) -> None:
        super().__init__()
        h, w = check_grid(grid)
        positive(head_dim=head_dim)
        self.rows = nn.Parameter(torch.zeros(2 * h - 1, head_dim))
        self.columns = nn.Parameter(torch.zeros(2 * w - 1, head_dim))

    def forward(
        self, q: Float[Tensor, "b heads n d"], grid: tuple[int, int], key_grid: tuple[int, int] | None = None
    ) -> Float[Tensor, "b heads n m"]:
        (h, w), (key_h, key_w) = check_grid(grid), check_grid(key_grid or grid, "key_grid")
        if q.shape[-2:] != (h * w, self.rows.shape[1]):
            raise ValueError(f"queries are {tuple(q.shape[-2:])}, a {h}x{w} grid needs {(h * w, self.rows.shape[1])}")
        cells = q.unflatten(2, (h, w))
        of_rows = float32_product("bnhwd,hkd->bnhwk", cells, axis_differences(self.rows, h, key_h))
        of_columns = float32_product("bnhwd,wkd->bnhwk", cells, axis_differences(self.columns, w, key_w))
        return (of_rows[..., None] + of_columns[..., None, :]).flatten(4).flatten(2, 3).to(q.dtype)


def axis_differences(table: Float[Tensor, "t d"], n: int, m: int) -> Float[Tensor, "n m d"]:
    """Row of ``table`` for each of ``n`` queries and ``m`` keys on one axis: ``i max(m/n, 1) + (m - 1 - j) max(n/m,
    1)``, cut to whole numbers (SAM ``get_rel_pos``), after a linear resize to ``2 max(n, m) - 1`` rows."""
    finer = max(n, m)
    table = resample_line(at_least_float32(table), 2 * finer - 1, RECIPES["sam_relpos"])
    i, j = (torch.arange(size, dtype=torch.float32, device=table.device) for size in (n, m))
    scale_i, scale_j = finer / n, finer / m
    return table[(i[:, None] * scale_i - j * scale_j + (m - 1) * scale_j).long()]
