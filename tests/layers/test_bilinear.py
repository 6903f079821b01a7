"""Interpolation by weighted rows, against grid_sample and interpolate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vispe.layers.bilinear import cross, stretch, taps, weighted_rows


def test_points_are_read_as_grid_sample_reads_them() -> None:
    h, w = 7, 11
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 5, h, w, generator=generator)
    xy = torch.rand(300, 2, generator=generator) * torch.tensor([w + 5.0, h + 5.0]) - 3  # some beyond the border
    grid = (xy / torch.tensor([w - 1.0, h - 1.0]) * 2 - 1).view(1, 1, -1, 2)
    want = F.grid_sample(image, grid, align_corners=True)[0, :, 0].T
    index, weight = cross(taps(xy[:, 1], h), taps(xy[:, 0], w), w)
    got = weighted_rows(image[0].flatten(1).T.contiguous(), index, weight)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("size", "source"), [(64, 2), (64, 1), (96, 12), (5, 5), (1, 1), (1, 4)])
def test_stretch_is_interpolate_with_aligned_corners(size: int, source: int) -> None:
    line = torch.randn(source, 3, generator=torch.Generator().manual_seed(source))
    want = F.interpolate(line.T[None], size, mode="linear", align_corners=True)[0].T
    torch.testing.assert_close(weighted_rows(line, *stretch(size, source)), want, atol=1e-6, rtol=0)


def test_an_integer_position_is_one_cell() -> None:
    index, weight = taps(torch.tensor([0.0, 3.0, -1.0, 4.0]), 4)
    assert (index.min(), index.max()) == (0, 3)
    assert weight.T.tolist() == [[1, 0], [1, 0], [0, 0], [0, 0]]


def test_gradients_reach_position_and_table() -> None:
    table = torch.tensor([[1.0], [4.0], [9.0]], requires_grad=True)
    position = torch.tensor([1.25], requires_grad=True)
    weighted_rows(table, *taps(position, 3)).sum().backward()
    assert position.grad is not None
    assert table.grad is not None
    assert position.grad.item() == 5.0  # the slope between 4 and 9
    assert table.grad[:, 0].tolist() == [0.0, 0.75, 0.25]
