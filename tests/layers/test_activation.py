"""SELU by exp against torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vispe.layers.activation import selu_


def test_values() -> None:
    x = torch.cat([torch.linspace(-20, 20, 20_001), torch.tensor([0.0, -1e-8, 1e-8, -1e4, 1e4])])
    torch.testing.assert_close(selu_(x.clone()), F.selu(x), atol=5e-7, rtol=1e-6)


def test_gradient_is_selus_and_the_leaf_stays() -> None:
    x = torch.linspace(-3, 3, 50, dtype=torch.float64).requires_grad_()
    before = x.detach().clone()
    assert torch.autograd.gradcheck(selu_, x)
    assert torch.equal(x, before)
