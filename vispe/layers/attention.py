"""Attention with masks that cannot leak: every model of the zoo goes through this one door to the SDPA kernels."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


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
