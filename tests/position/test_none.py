"""Nothing, in each of the four sockets, and what attention without position does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.none import no_addition, no_bias, no_convolution, no_rotation
from vispe.position.rotary import rotate


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def attention(x: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Self-attention ``[n, d]`` whose four sockets hold nothing."""
    n, d = x.shape
    x = no_convolution(x.T[None, ..., None])[0, ..., 0].T + no_addition(n, d)
    q = k = rotate(x, no_rotation(n, d))
    return torch.nn.functional.scaled_dot_product_attention(q, k, x, attn_mask=no_bias(n, n), is_causal=causal)


@given(seed=st.integers(0, 10**6), n=st.integers(2, 20), pairs=st.integers(1, 8))
def test_attention_without_position_is_permutation_equivariant(seed, n, pairs):
    g = torch.Generator().manual_seed(seed)
    x, order = torch.randn(n, 2 * pairs, generator=g), torch.randperm(n, generator=g)
    torch.testing.assert_close(attention(x[order]), attention(x)[order], atol=1e-5, rtol=1e-5)


def test_it_is_plain_attention():
    x = torch.randn(9, 6)
    torch.testing.assert_close(attention(x), (x @ x.T / math.sqrt(6)).softmax(-1) @ x, atol=1e-6, rtol=1e-5)


def test_a_causal_mask_alone_breaks_the_symmetry():
    """Why decoders can do without encodings (Haviv et al. 2022)."""
    x, order = torch.randn(9, 6), torch.arange(9).flip(0)
    assert (attention(x[order], causal=True) - attention(x, causal=True)[order]).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_identity_in_every_dtype(dtype):
    x = torch.randn(5, 8).to(dtype)
    assert torch.equal(rotate(x, no_rotation(5, 8).to(torch.promote_types(dtype, torch.float32))), x)
    assert torch.equal(x + no_addition(5, 8).to(dtype), x)
    maps = x[None, None]
    assert no_convolution(maps) is maps
    assert no_bias(3, 4) is None


def test_shapes_dtype_and_device():
    assert no_addition(3, 5).shape == (3, 5)
    assert no_rotation(3, 8).shape == (3, 4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert no_rotation(3, 8).dtype == no_addition(3, 5).dtype == torch.float32
    assert no_rotation(3, 8, torch.device("meta")).is_meta
    assert no_addition(3, 5, torch.device("meta")).is_meta


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="even head_dim, got 7"):
        no_rotation(3, 7)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        no_addition(0, 4)
    with pytest.raises(ValueError, match="m must be at least 1, got -1"):
        no_bias(1, -1)
