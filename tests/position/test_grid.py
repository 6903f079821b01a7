"""Coordinates of keypoints and the guard against wrong ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.grid import check_inside, normalize_keypoints


@given(h=st.integers(1, 5000), w=st.integers(1, 5000))
def test_the_long_side_spans_minus_one_to_one(h, w):
    corners = torch.tensor([[[0.0, 0.0], [w, h], [w / 2, h / 2]]])
    low, high, centre = normalize_keypoints(corners, torch.tensor([[h, w]]))[0]
    assert low.abs().max() == high.abs().max() == 1
    torch.testing.assert_close(low, -high)
    assert torch.equal(centre, torch.zeros(2))
    assert high[0] / high[1] == pytest.approx(w / h, rel=1e-5)  # the aspect is kept


def test_half_precision_keypoints_are_widened_first():
    xy = torch.tensor([[[1000.0, 0.0]]], dtype=torch.bfloat16)
    assert normalize_keypoints(xy, torch.tensor([[2000, 2000]])).dtype == torch.float32


def test_border_points_pass_and_far_ones_do_not():
    size = torch.tensor([[480.0, 640.0]])
    check_inside(torch.tensor([[[-0.5, -0.5], [640.0, 480.0]]]), size, None, "keypoints")
    check_inside(torch.zeros(1, 0, 2), size, None, "keypoints")
    for bad in ((800.0, 10.0), (10.0, 600.0), (-100.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)):
        with pytest.raises(ValueError, match=r"\(480, 640\)"):
            check_inside(torch.tensor([[[5.0, 5.0], bad]]), size, None, "keypoints")
        check_inside(torch.tensor([[[5.0, 5.0], bad]]), size, torch.tensor([[True, False]]), "keypoints")


def test_the_message_names_the_pair():
    xy = torch.tensor([[[5.0, 5.0]], [[5.0, 5000.0]]])
    with pytest.raises(ValueError, match="pair 1"):
        check_inside(xy, torch.tensor([[480.0, 640.0]] * 2), None, "keypoints1")
