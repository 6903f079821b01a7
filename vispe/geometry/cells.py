"""Which cells of two coarse maps are the same place, from where each cell lies in the other image; numpy float64.

Cell (row, column) sits on pixel ``stride * (column, row)``; cells are row-major. Where a cell lies in the other image
is a point, NaN where nobody knows, infinite where it is known not to be seen there. LoFTR, section 3.5 "Supervision".
"""

from __future__ import annotations

import numpy as np

from vispe.geometry.depth import IGNORED, UNMATCHABLE, Labels
from vispe.geometry.homography import Array

Cells = tuple[int, int]  # (h, w) in cells


def cells_of(size: tuple[int, int], stride: int) -> Cells:
    """The grid of an image of ``size`` (h, w) in pixels, whose sides are rounded up."""
    return -(-size[0] // stride), -(-size[1] // stride)


def cell_pixels(grid: Cells, stride: int) -> Array:
    """The pixel (x, y) of every cell, ``[h * w, 2]``."""
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    return np.stack((column, row), 1).astype(np.float64) * stride


def mutual_cells(there0: Array, there1: Array, grid0: Cells, grid1: Cells, stride: int) -> tuple[Labels, Labels]:
    """The true partner of each cell of either image: an index, -1 (it has none), or -2 (not to be told).

    ``there0 [m, 2]``: where image 0's cells lie in image 1, ``there1 [n, 2]`` the other way. Partners are each the
    cell nearest to where the other lies: several cells that fall on one leave one of them at most.
    """
    near0, near1 = _nearest(there0, grid1, stride), _nearest(there1, grid0, stride)
    return _labels(near0, near1, there0), _labels(near1, near0, there1)


def _nearest(there: Array, grid: Cells, stride: int) -> Labels:
    """The cell nearest to each point, -1 outside the grid."""
    with np.errstate(invalid="ignore"):
        column, row = np.rint(there / stride).T
        inside = (column >= 0) & (column < grid[1]) & (row >= 0) & (row < grid[0])
    found = np.full(len(there), UNMATCHABLE, dtype=np.int64)
    found[inside] = row[inside].astype(np.int64) * grid[1] + column[inside].astype(np.int64)
    return found


def _labels(near: Labels, back: Labels, there: Array) -> Labels:
    own = (near >= 0) & (back[near.clip(min=0)] == np.arange(len(near)))
    return np.where(own, near, np.where(np.isnan(there).any(1), IGNORED, UNMATCHABLE)).astype(np.int64)
