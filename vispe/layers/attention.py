"""Attention with masks that cannot leak: every model of the zoo goes through this one door to the SDPA kernels."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from vispe.position.bias import float32_product
from vispe.position.grid import at_least_float32
from vispe.position.linear import elu_plus_one

EPS = 1e-6  # of linear attention's divisor, as in LoFTR: where no key exists the answer is 0, not 0/0


def attend(
    q: Float[Tensor, "b heads n d"],
    k: Float[Tensor, "b heads m d"],
    v: Float[Tensor, "b heads m d"],
    keys: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b n width"]:
    """Softmax attention ``[b, heads, n, d]`` x ``[b, heads, m, d]`` -> ``[b, n, heads * d]``, scale ``1/sqrt(d)``.

    ``keys [b, m]`` is true where a key exists. Rows of the batch without any key, and an empty key axis, give finite
    values (the mean over padding, or zero) instead of NaN, so that gradients stay finite; callers ignore them.
    """
    if k.shape[-2] == 0:
        out = q * 0.0
    elif keys is None:
        out = F.scaled_dot_product_attention(q, k, v)
    else:
        visible = keys | ~keys.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None])
    return out.transpose(1, 2).flatten(2)


def attend_linearly(
    q: Float[Tensor, "b n heads d"],
    k: Float[Tensor, "b m heads d"],
    v: Float[Tensor, "b m heads e"],
    keys: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b n width"]:
    """``f(q) (f(k)^T v) / (f(q) sum f(k) + eps)`` with ``f = elu + 1``: linear in n and m (Katharopoulos et al. 2020).

    ``[b, n, heads, d]`` x ``[b, m, heads, d]`` -> ``[b, n, heads * e]``; ``keys [b, m]`` is true where a key exists;
    where none does, the answer is zero. Sums run in at least float32: they pass float16's largest number.
    """
    dtype = v.dtype
    q, k = elu_plus_one(at_least_float32(q)), elu_plus_one(at_least_float32(k))
    if keys is not None:
        k = k * keys[:, :, None, None]
    context = float32_product("bmhd,bmhe->bhde", k, v)
    total = float32_product("bnhd,bhd->bnh", q, k.sum(1)) + EPS
    return (float32_product("bnhd,bhde->bnhe", q, context) / total[..., None]).flatten(2).to(dtype)
