"""Rotary encoding in linear attention, where scores are never formed and softmax is a feature map.

Two orders are in use and are different models. RoFormer turns *after* the non-negative map and only in the numerator,
so that the denominator stays a sum of positive numbers; the Performer code of lucidrains turns *before* the map, so
that numerator and denominator see the same features. The first sees only differences of positions (its denominator sees
none); the second sees absolute ones, because the map does not commute with a rotation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from vispe.position.bias import float32_product
from vispe.position.grid import at_least_float32
from vispe.position.rotary import Layout, rotate

FeatureMap = Callable[[Tensor], Tensor]


def elu_plus_one(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """``elu(x) + 1 > 0``: the map of Katharopoulos et al. 2020, which RoFormer's section 3.3 takes.

    Below 0 it is ``exp(x)``, written so: ``elu(x) + 1`` rounds to 0 at -18, and a query of such channels is 0/0.
    """
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def rotary_linear_attention(
    q: Float[Tensor, "*b n d"],
    k: Float[Tensor, "*b m d"],
    v: Float[Tensor, "*b m e"],
    turn_q: Float[Tensor, "*t n pairs 2"],
    turn_k: Float[Tensor, "*t m pairs 2"],
    feature_map: FeatureMap = elu_plus_one,
    layout: Layout = "interleaved",
) -> Float[Tensor, "*b n e"]:
    """``sum_n (R_m f(q_m))^T (R_n f(k_n)) v_n / sum_n f(q_m)^T f(k_n)`` (RoFormer eq. 19), in O(n), in at
    least float32 and cast once.

    ``feature_map`` must be non-negative. The weights may be negative and do not sum to 1: that is the formula.
    """
    _check_tokens(k, v)
    q, k = feature_map(at_least_float32(q)), feature_map(at_least_float32(k))
    weighted = _weighted(rotate(q, turn_q, layout), rotate(k, turn_k, layout), v)
    return (weighted / _total(q, k)).to(v.dtype)


def performer_rotary_attention(
    q: Float[Tensor, "*b n d"],
    k: Float[Tensor, "*b m d"],
    v: Float[Tensor, "*b m e"],
    turn_q: Float[Tensor, "*t n pairs 2"],
    turn_k: Float[Tensor, "*t m pairs 2"],
    feature_map: FeatureMap = elu_plus_one,
    layout: Layout = "interleaved",
) -> Float[Tensor, "*b n e"]:
    """``f(R_m q_m)^T sum_n f(R_n k_n) v_n^T / f(R_m q_m)^T sum_n f(R_n k_n)``: turned before the map (lucidrains
    performer-pytorch).

    Weights are non-negative and sum to 1, but scores are no longer functions of q, k and n - m.
    """
    _check_tokens(k, v)
    q, k = (rotate(at_least_float32(x), turn, layout) for x, turn in ((q, turn_q), (k, turn_k)))
    q, k = feature_map(q), feature_map(k)
    return (_weighted(q, k, v) / _total(q, k)).to(v.dtype)


def _weighted(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b m d"], v: Float[Tensor, "*b m e"]) -> Tensor:
    """``q (k^T v)`` in at least float32, also under autocast: sums over all tokens pass float16's largest number."""
    return float32_product("...nd,...de->...ne", q, float32_product("...md,...me->...de", k, v))


def _total(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b n 1"]:
    return (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)


def _check_tokens(k: Tensor, v: Tensor) -> None:
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"one value for each key: got {k.shape[-2]} keys, {v.shape[-2]} values")
