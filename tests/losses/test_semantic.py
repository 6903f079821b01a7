"""The loss of pixels by hand: void is a zero, parts average to the whole."""

import math

import pytest
import torch

from vispe.losses.semantic import pixel_loss


def test_by_hand():
    """Two classes, logits 0 and log 3: a pixel of class 1 costs log(4/3), one of class 0 log 4; void costs nothing."""
    logits = torch.tensor([0.0, math.log(3)])[None, :, None, None].expand(1, 2, 2, 2)
    masks = torch.tensor([[[1, 0], [-1, -1]]])
    assert float(pixel_loss(logits, masks)) == pytest.approx((math.log(4 / 3) + math.log(4)) / 4)


def test_void_alone_is_no_division_by_zero():
    logits = torch.randn(1, 3, 2, 2, requires_grad=True)
    loss = pixel_loss(logits, torch.full((1, 8, 8), -1))
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


def test_parts_average_to_the_whole():
    torch.manual_seed(0)
    logits, masks = torch.randn(4, 3, 2, 3), torch.randint(-1, 3, (4, 8, 12))
    parts = [pixel_loss(logits[i : i + 2], masks[i : i + 2]) for i in (0, 2)]
    assert torch.allclose(torch.stack(parts).mean(), pixel_loss(logits, masks))


def test_logits_are_brought_to_the_masks_size_in_float32():
    logits = torch.randn(1, 2, 3, 3, dtype=torch.bfloat16)
    assert pixel_loss(logits, torch.zeros(1, 11, 10, dtype=torch.int64)).dtype == torch.float32


def test_another_void():
    logits, masks = torch.randn(1, 2, 2, 2), torch.tensor([[[0, 9], [1, 9]]])
    assert torch.equal(pixel_loss(logits, masks, void=9), pixel_loss(logits, masks.where(masks < 9, -1)))
