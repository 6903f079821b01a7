"""Logits at the size of each image."""

import pytest
import torch

from vispe.layers.pixels import enlarged


def test_by_hand():
    (made,) = enlarged(torch.tensor([[[[0.0, 4.0]]]]), [(1, 4)], stride=2)
    assert made.tolist() == [[[0, 1, 3, 4]]]


@pytest.mark.parametrize("stride", [1, 4, 16])
def test_what_lies_behind_an_image_is_not_looked_at(stride):
    output = torch.full((2, 3, 5, 7), 9.0)
    output[1, :, :2, :3] = torch.arange(6.0).view(2, 3)
    real = [(5 * stride, 7 * stride), (2 * stride - (stride > 1), 3 * stride)]  # a started cell is one
    whole, part = enlarged(output, [(4, 4), (2, 3)], stride, real)
    assert whole.tolist() == [[[9.0] * 4] * 4] * 3
    assert part.tolist() == [[[0, 1, 2], [3, 4, 5]]] * 3


def test_mistakes_are_named():
    output = torch.zeros(2, 3, 4, 4)
    with pytest.raises(ValueError, match="each of 2 images is needed, got 1 sizes"):
        list(enlarged(output, [(2, 4)], 4))
    with pytest.raises(ValueError, match="got 2 sizes and 1 real ones"):
        list(enlarged(output, [(2, 4)] * 2, 4, [(4, 4)]))
    with pytest.raises(ValueError, match="size must be"):
        list(enlarged(output, [(0, 4)] * 2, 4))
