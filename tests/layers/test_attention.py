"""The one door to attention: softmax by hand, masks that do not leak, nothing that turns into NaN."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vispe.layers.attention import attend


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
