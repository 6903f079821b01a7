"""The one door to attention: softmax by hand, masks that do not leak, nothing that turns into NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vispe.layers.attention import attend, attend_linearly


def test_equals_softmax_written_out():
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    wanted = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v), wanted.transpose(1, 2).reshape(2, 5, 24))


def test_masked_keys_do_not_exist_whatever_they_hold():
    q, k, v = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    keys = torch.tensor([[True] * 4 + [False] * 3, [True] * 7])
    k[0, :, 4:], v[0, :, 4:] = 1e4, -1e4
    out = attend(q, k, v, keys)
    torch.testing.assert_close(out[:1], attend(q[:1], k[:1, :, :4], v[:1, :, :4]))
    torch.testing.assert_close(out[1:], attend(q[1:], k[1:], v[1:]))


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_masks_hold_in_every_kernel_of_this_device(kernel):
    q, k, v = (torch.randn(2, 3, 7, 8) for _ in range(3))
    keys = torch.tensor([[True] * 4 + [False] * 3, [False] * 2 + [True] * 5])
    wanted = torch.cat((attend(q[:1], k[:1, :, :4], v[:1, :, :4]), attend(q[1:], k[1:, :, 2:], v[1:, :, 2:])))
    with sdpa_kernel(kernel):
        torch.testing.assert_close(attend(q, k, v, keys), wanted)


@pytest.mark.parametrize("n", [0, 4])
def test_no_key_at_all_is_finite_with_finite_gradients(n):
    q, k, v = (torch.randn(1, 2, m, 8, requires_grad=True) for m in (3, n, n))
    out = attend(q, k, v, torch.zeros(1, n, dtype=torch.bool))
    out.sum().backward()
    assert out.shape == (1, 3, 16)
    assert torch.isfinite(out).all()
    assert all(t.grad is None or torch.isfinite(t.grad).all() for t in (q, k, v))


def test_linear_attention_is_a_weighted_mean():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 3, 4), torch.randn(2, 7, 3, 4), torch.randn(2, 7, 3, 4)
    weights = torch.einsum("bnhd,bmhd->bhnm", F.elu(q) + 1, F.elu(k) + 1)
    wanted = torch.einsum("bhnm,bmhe->bnhe", weights / weights.sum(-1, keepdim=True), v).flatten(2)
    torch.testing.assert_close(attend_linearly(q, k, v), wanted, atol=1e-5, rtol=1e-4)


def test_linear_attention_sees_no_padding():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 5, 2, 4), torch.randn(1, 7, 2, 4), torch.randn(1, 7, 2, 4)
    keys = torch.arange(9)[None] < 7
    padded = (torch.cat((part, torch.full((1, 2, 2, 4), 50.0)), 1) for part in (k, v))
    torch.testing.assert_close(attend_linearly(q, *padded, keys), attend_linearly(q, k, v))
    assert attend_linearly(q, k, v, torch.zeros(1, 7, dtype=torch.bool)).abs().max() == 0


def test_linear_attention_sums_many_halves():
    q, k, v = (torch.ones(1, 70000, 1, 4, dtype=torch.float16) for _ in range(3))
    out = attend_linearly(q, k, v)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.ones(1, 70000, 4, dtype=torch.float16))
