"""Learned tables: a vector for every place, looked up and added; what the table was learned on is kept beside it.

One row per cell with prefix tokens in front (ViT), a row and a column table (DETR concatenates, x first; NaViT and
NaFlex sum), a coarse table with a tiled window (SAM 2's Hiera), one row per query (DETR) and one per feature level.
All are of the added socket, row-major: token k is row k // w, column k % w. Nothing is cached: a forward reads the
parameters. Each parameter here is positional: no weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vispe.position.grid import Count, Grid, at_least_float32, check_grid
from vispe.position.resample import ResampleRecipe, resample, resample_cells, resample_line


class GridTable(nn.Module):
    """One vector per cell of a stored source grid, prefix tokens (class, registers) first; N(0, 0.02^2) as in ViT.

    ``forward(grid, recipe)`` -> ``[prefix + h*w, width]`` for any grid: the parameter itself for the source grid, else
    resampled by ``recipe``, so that training at another size still reaches the table. ``prefix`` counts rows of the
    table: 1 for ViT, 2 for DeiT distilled, 0 where class and registers have no position (timm's ``no_embed_class``).
    """

    positional = ("weight",)

    def __init__(self, grid: Grid, width: int, prefix: int = 1, std: float = 0.02) -> None:
        super().__init__()
        check_grid(grid)
        if width < 1 or prefix < 0:
            raise ValueError(f"a table needs width >= 1 and prefix >= 0, got {width} and {prefix}")
        self.grid, self.prefix = grid, prefix
        self.weight = nn.Parameter(torch.randn(prefix + grid[0] * grid[1], width) * std)

    def forward(self, grid: Grid, recipe: ResampleRecipe) -> Float[Tensor, "n width"]:
        return resample(self.weight, self.grid, grid, recipe, self.prefix)

    def extra_repr(self) -> str:
        return f"grid={self.grid}, width={self.weight.shape[1]}, prefix={self.prefix}"


class AxisTables(nn.Module):
    """What row + column encodings share: ``row [rows, width]`` and ``column [columns, width]``."""

    positional = ("row", "column")

    def __init__(self, limit: Grid, width: int, std: float = 0.02) -> None:
        super().__init__()
        check_grid(limit, "limit")
        if width < 1:
            raise ValueError(f"a table needs width >= 1, got {width}")
        self.row = nn.Parameter(torch.randn(limit[0], width) * std)
        self.column = nn.Parameter(torch.randn(limit[1], width) * std)

    @property
    def limit(self) -> Grid:
        """The largest grid (h, w) with a row for every index."""
        return len(self.row), len(self.column)

    def extra_repr(self) -> str:
        return f"limit={self.limit}, width={self.row.shape[1]}"

    def check_limit(self, grid: Grid) -> None:
        """Refuse on the host what a device would answer with an assert: a grid beyond the tables."""
        check_grid(grid)
        if grid[0] > self.limit[0] or grid[1] > self.limit[1]:
            raise ValueError(f"grid (h, w) = {grid} is beyond the tables' limit of {self.limit} rows and columns")


class RowColumnTable(AxisTables):
    """``[column_x | row_y]`` for every cell, x first: DETR ``PositionEmbeddingLearned`` (its sine has y first).

    ``width`` is the output's, half a table each; 50 x 50 and uniform [0, 1) as in DETR. ``forward(grid)`` ->
    ``[h*w, width]``: row i is read for index i, and a grid beyond the limit is a ValueError. ``forward(grid, recipe)``
    takes the tables for one image's sides and resamples each to the grid (ViT, section D.4's 2-D table).
    """

    def __init__(self, width: int, limit: Grid = (50, 50)) -> None:
        if width < 2 or width % 2:
            raise ValueError(f"row and column share the width: it must be even and positive, got {width}")
        super().__init__(limit, width // 2)
        nn.init.uniform_(self.row)
        nn.init.uniform_(self.column)

    def forward(self, grid: Grid, recipe: ResampleRecipe | None = None) -> Float[Tensor, "n width"]:
        h, w = check_grid(grid)
        if recipe is None:
            self.check_limit(grid)
            row, column = self.row[:h], self.column[:w]
        else:
            row, column = resample_line(self.row, h, recipe), resample_line(self.column, w, recipe)
        x, y = column.expand(h, w, -1), row[:, None].expand(h, w, -1)
        return torch.cat((x, y), dim=-1).flatten(0, 1)


class NaViTAbsolute(AxisTables):
    """``row[y] + column[x]`` at the absolute index (NaViT, factorised absolute; vit-pytorch ``NaViT``).

    ``forward(grid)`` -> ``[h*w, width]``; :meth:`at` reads packed patches of several images. A grid beyond the limit is
    refused: the index is never rescaled.
    """

    def forward(self, grid: Grid) -> Float[Tensor, "n width"]:
        self.check_limit(grid)
        return _outer_sum(self.row[: grid[0]], self.column[: grid[1]])

    def at(self, cells: Int[Tensor, "*n 2"]) -> Float[Tensor, "*n width"]:
        """The sum at ``cells [..., 2]`` as (row, column). The caller keeps them below :attr:`limit`."""
        y, x = cells.unbind(-1)
        return self.row[y] + self.column[x]


class NaViTFractional(AxisTables):
    """``row[floor(y/h * rows)] + column[floor(x/w * columns)]``: the place as a fraction of the side (NaViT).

    The paper leaves the learned map of a fraction open; this is the table of equal bins that Idefics 2 and SigLIP
    NaViT use, here per axis. Bins are found in integers: a float fraction that should meet a bin's edge falls beside
    it. Grids finer than the table share rows; none is refused.
    """

    def forward(self, grid: Grid) -> Float[Tensor, "n width"]:
        check_grid(grid)
        rows, columns = (fractional_bins(n, bins, self.row.device) for n, bins in zip(grid, self.limit, strict=True))
        return _outer_sum(self.row[rows], self.column[columns])


def fractional_bins(n: Count, bins: Count, device: torch.device | str = "cpu") -> Int[Tensor, " n"]:
    """``floor(i * bins / n)`` for the ``n`` cells of a side, in integers."""
    return torch.div(torch.arange(n, device=device) * bins, n, rounding_mode="floor")


class FactorisedTable(AxisTables):
    """``row'[y] + column'[x]`` with each table resampled to the grid along its axis (timm NaFlex ``factorized``).

    ``forward(grid, recipe)`` -> ``[h*w, width]``; timm's recipe is ``pe`` (linear, half-pixel centres).
    """

    def forward(self, grid: Grid, recipe: ResampleRecipe) -> Float[Tensor, "n width"]:
        check_grid(grid)
        row, column = at_least_float32(self.row), at_least_float32(self.column)  # the sum is rounded once
        summed = _outer_sum(resample_line(row, grid[0], recipe), resample_line(column, grid[1], recipe))
        return summed.to(self.row.dtype)


class WindowedTable(nn.Module):
    """A coarse background table resampled to the grid plus a window table tiled over it (SAM 2's Hiera).

    ``forward(grid, recipe)`` -> ``[h*w, width]``; SAM 2's recipe is ``mae``. Both tables start at zero, as there.
    ValueError unless the window divides the grid.
    """

    positional = ("background", "window")

    def __init__(self, background: Grid, window: Grid, width: int) -> None:
        super().__init__()
        check_grid(background, "background")
        check_grid(window, "window")
        self.background = nn.Parameter(torch.zeros(*background, width))
        self.window = nn.Parameter(torch.zeros(*window, width))

    def forward(self, grid: Grid, recipe: ResampleRecipe) -> Float[Tensor, "n width"]:
        check_grid(grid)
        h, w = self.window.shape[:2]
        if grid[0] % h or grid[1] % w:
            raise ValueError(f"grid (h, w) = {grid} is not a whole number of windows of (h, w) = {(h, w)}")
        tiled = self.window.repeat(grid[0] // h, grid[1] // w, 1)
        background = resample_cells(at_least_float32(self.background), grid, recipe)  # the sum is rounded once
        return (background + tiled).flatten(0, 1).to(self.window.dtype)


class ObjectQueries(nn.Module):
    """One learned position per query, N(0, 1); the content starts at zero (DETR ``query_embed``).

    ``forward(batch)`` -> ``(content, position)``, each ``[batch, queries, width]``. The position is added to q and k of
    self-attention and to q of cross-attention in every decoder layer, never to values.
    """

    positional = ("position",)

    def __init__(self, queries: int, width: int) -> None:
        super().__init__()
        if queries < 1 or width < 1:
            raise ValueError(f"queries and width must be positive, got {queries} and {width}")
        self.position = nn.Parameter(torch.randn(queries, width))

    def forward(self, batch: int) -> tuple[Float[Tensor, "b q width"], Float[Tensor, "b q width"]]:
        position = self.position.expand(batch, -1, -1)
        return torch.zeros_like(position), position

    def extra_repr(self) -> str:
        return f"queries={len(self.position)}, width={self.position.shape[1]}"


class ContentQueries(ObjectQueries):
    """Queries whose content is learned as well: two tables, not one (Mask2Former ``query_feat`` and ``query_embed``).

    Deformable DETR keeps both in one ``[queries, 2*width]`` table, position first: :func:`split_queries`.
    """

    def __init__(self, queries: int, width: int) -> None:
        super().__init__(queries, width)
        self.content = nn.Parameter(torch.randn(queries, width))

    def forward(self, batch: int) -> tuple[Float[Tensor, "b q width"], Float[Tensor, "b q width"]]:
        return self.content.expand(batch, -1, -1), self.position.expand(batch, -1, -1)


def split_queries(table: Float[Tensor, "q both"]) -> tuple[Float[Tensor, "q width"], Float[Tensor, "q width"]]:
    """Deformable DETR's ``query_embed [queries, 2*width]`` -> ``(content, position)``: the first half is the
    position."""
    if table.shape[1] % 2:
        raise ValueError(f"position and content share the width: it must be even, got {table.shape[1]}")
    position, content = table.chunk(2, dim=1)
    return content, position


class LevelEmbedding(nn.Module):
    """One vector per feature level, N(0, 1), added to every token of that level.

    ``forward(levels)`` adds row i to ``levels[i] [..., n_i, width]``. To what differs: Mask2Former's decoder adds it to
    the features, its pixel decoder and Deformable DETR to the position encoding. ValueError for another number of
    levels.
    """

    positional = ("weight",)

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        if levels < 1 or width < 1:
            raise ValueError(f"levels and width must be positive, got {levels} and {width}")
        self.weight = nn.Parameter(torch.randn(levels, width))

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        if len(levels) != len(self.weight):
            raise ValueError(f"{len(self.weight)} level embeddings for {len(levels)} feature levels")
        return [tokens + level for tokens, level in zip(levels, self.weight, strict=True)]

    def extra_repr(self) -> str:
        return f"levels={len(self.weight)}, width={self.weight.shape[1]}"


def _outer_sum(row: Float[Tensor, "h width"], column: Float[Tensor, "w width"]) -> Float[Tensor, "n width"]:
    return (row[:, None] + column).flatten(0, 1)
