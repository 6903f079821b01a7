"""Cells that are the same place: against plain loops, and by hand where several fall on one or nothing is known."""

import numpy as np
import pytest

from vispe.geometry.cells import cell_pixels, cells_of, mutual_cells
from vispe.geometry.homography import warp_points


def nearest(point, grid, stride):
    """The index of the cell nearest to a point, None outside."""
    if not np.isfinite(point).all():
        return None
    x, y = (round(float(value) / stride) for value in point)
    return y * grid[1] + x if 0 <= x < grid[1] and 0 <= y < grid[0] else None


def partners(there0, there1, grid0, grid1, stride):
    """The paper's mutual nearest cells, one by one."""
    found = {}
    for i, point in enumerate(there0):
        j = nearest(point, grid1, stride)
        if j is not None and nearest(there1[j], grid0, stride) == i:
            found[i] = j
    return found


def test_a_cell_sits_on_its_pixel_and_sides_are_rounded_up():
    assert cells_of((16, 17), 8) == (2, 3)
    assert cell_pixels((2, 3), 8).tolist() == [[0, 0], [8, 0], [16, 0], [0, 8], [8, 8], [16, 8]]


@pytest.mark.parametrize("seed", range(4))
def test_they_are_the_mutually_nearest(seed):
    """Grids of two sizes and a homography that turns, shrinks and moves: every label is that of the loops."""
    draw = np.random.default_rng(seed)
    turn, zoom = draw.uniform(-0.6, 0.6), draw.uniform(0.6, 1.4)
    H = np.array([  # noqa: N806
        [zoom * np.cos(turn), -zoom * np.sin(turn), draw.uniform(-9, 9)],
        [zoom * np.sin(turn), zoom * np.cos(turn), draw.uniform(-9, 9)],
        [*draw.uniform(-1e-3, 1e-3, 2), 1],
    ])  # fmt: skip
    grid0, grid1 = (7, 9), (8, 6)
    there0, there1 = warp_points(H, cell_pixels(grid0, 8)), warp_points(np.linalg.inv(H), cell_pixels(grid1, 8))
    there0[5], there1[7], there0[11] = np.nan, np.nan, np.inf
    labels0, labels1 = mutual_cells(there0, there1, grid0, grid1, 8)
    wanted = partners(there0, there1, grid0, grid1, 8)
    assert len(wanted) > 8
    assert {i: j for i, j in enumerate(labels0.tolist()) if j >= 0} == wanted
    assert {i: j for j, i in enumerate(labels1.tolist()) if i >= 0} == wanted
    assert (labels0 == -2).nonzero()[0].tolist() == [5]
    assert (labels1 == -2).nonzero()[0].tolist() == [7]
    assert labels0[11] == -1


def test_of_cells_that_fall_on_one_only_one_has_a_partner():
    """Image 1 is image 0 at half the size: four cells become one, which is where the upper left of them lies."""
    there0, there1 = cell_pixels((4, 4), 8) / 2, cell_pixels((2, 2), 8) * 2
    labels0, labels1 = mutual_cells(there0, there1, (4, 4), (2, 2), 8)
    assert labels1.tolist() == [0, 2, 8, 10]
    assert (labels0 >= 0).nonzero()[0].tolist() == [0, 2, 8, 10]
    assert (labels0 == -1).sum() == 12
