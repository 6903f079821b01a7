"""Deformable convolution against torchvision's, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torchvision

from vispe.layers.deform import deform_conv2d


def inputs(b: int, k: int, spread: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(b * 10 + k)
    sizes = [(b, 6, 9, 13), (b, 2 * k * k, 9, 13), (8, 6, k, k), (8,)]
    x, offset, weight, bias = (torch.randn(size, generator=generator) for size in sizes)
    return [tensor.requires_grad_() for tensor in (x, offset * spread, weight, bias)]


@pytest.mark.parametrize(("b", "k", "spread"), [(1, 3, 0.5), (2, 3, 6.0), (2, 1, 2.0), (1, 5, 1.0)])
def test_values_and_gradients_are_torchvisions(b: int, k: int, spread: float) -> None:
    ours, theirs = inputs(b, k, spread), inputs(b, k, spread)
    got = deform_conv2d(*ours)
    want = torchvision.ops.deform_conv2d(*theirs, padding=k // 2)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    lever = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for a, b_ in zip(torch.autograd.grad(got, ours, lever), torch.autograd.grad(want, theirs, lever), strict=True):
        torch.testing.assert_close(a, b_, atol=2e-4, rtol=1e-4)


def test_no_offset_is_a_plain_convolution() -> None:
    x, offset, weight, bias = inputs(2, 3, 1.0)
    want = torch.nn.functional.conv2d(x, weight, bias, padding=1)
    torch.testing.assert_close(deform_conv2d(x, offset * 0, weight, bias), want, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(deform_conv2d(x, offset, weight, bias), want, atol=1e-2)
