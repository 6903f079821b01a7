"""One convolution gives what a convolution and its norm give, in eval mode only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vispe.layers.folding import convolve


@pytest.fixture
def pair():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 5, 3, 2, 1, bias=False), nn.BatchNorm2d(5)
    for value in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        nn.init.uniform_(value, 0.5, 1.5)
    return conv, norm


def test_a_norm_in_eval_mode_is_folded_into_its_convolution(pair):
    conv, norm = pair[0].double(), pair[1].double().eval()
    x = torch.rand(2, 3, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(convolve(x, conv, norm), norm(conv(x)), atol=1e-12, rtol=0)


def test_a_norm_that_is_trained_keeps_its_statistics(pair):
    conv, norm = pair
    before = norm.running_mean.clone()
    convolve(torch.rand(2, 3, 9, 9), conv, norm.train())
    assert not torch.equal(before, norm.running_mean)


def test_a_strided_pixel_wise_convolution_that_is_trained():
    conv, norm = nn.Conv2d(8, 12, 1, 2, bias=False), nn.BatchNorm2d(12)
    x = torch.rand(2, 8, 9, 9)
    torch.testing.assert_close(convolve(x, conv, norm.train()), norm(conv(x)))
