"""Cells off the edge, the pixels they stand on, and what is said of wrong images."""

from __future__ import annotations

import pytest
import torch

from vispe.layers.cells import check_pairs, inner, pixels


def test_inner_cells_by_hand():
    found = inner((3, 4), torch.tensor([[3, 4], [3, 3], [2, 4]]), 1).view(3, 3, 4)
    assert found[0].nonzero().tolist() == [[1, 1], [1, 2]]
    assert found[1].nonzero().tolist() == [[1, 1]]
    assert not found[2].any()
    whole = inner((3, 4), torch.tensor([[2, 3]]), 0).view(3, 4)
    assert whole.sum() == 6
    assert bool(whole[:2, :3].all())


def test_a_cell_stands_on_its_first_pixel():
    assert pixels(torch.tensor([0, 6]), (2, 4), 8, torch.float64).tolist() == [[0.0, 0.0], [16.0, 8.0]]


def test_mistakes_are_named():
    image = torch.zeros(1, 1, 8, 8)
    for wrong, message in (
        ((image[0], image), r"Such a model takes images \[b, 1 or 3, h, w\], got \[1, 8, 8\]"),
        ((image, image.expand(-1, 2, -1, -1)), r"got \[1, 2, 8, 8\]"),
        ((image, image[..., :0]), r"got \[1, 1, 8, 0\]"),
        ((image, image.double()), "Such a model's weights are torch.float32, the image is torch.float64"),
        ((image, image.expand(2, -1, -1, -1)), "image0 has 1 pairs, image1 has 2"),
    ):
        with pytest.raises(ValueError, match=message):
            check_pairs(*wrong, torch.float32, "Such a model")
