"""Multi-scale deformable attention: a token looks at a few points of every scale that it chooses itself (Zhu et al.
2021, Deformable DETR, section 4.1).

No scores between tokens are made: of ``heads x levels x points`` places a token predicts where they are, relative to
its own, and how much each counts. Memory grows linearly with the number of tokens. Pure torch, exact, with gradients
for values, places and weights: each level is read by ``grid_sample``, and no level waits for another's samples.

A place is a fraction (x, y) of the picture; the cell in column k of w has its centre at (k + 1/2)/w, and what lies
outside counts as zero. Places are never in half precision: in bfloat16 a grid of 300 cells has lost two of three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vispe.position.grid import Grid, at_least_float32


def centres(grid: Grid, device: torch.device | str | None = None) -> Float[Tensor, "n 2"]:
    """The cells' centres (x, y) as fractions of the grid's sides, row by row, float32."""
    h, w = grid
    y, x = ((torch.arange(n, dtype=torch.float32, device=device) + 0.5) / n for n in (h, w))
    return torch.stack((x.expand(h, w), y[:, None].expand(h, w)), -1).flatten(0, 1)


def sample_levels(
    values: Float[Tensor, "b n heads d"],
    grids: Sequence[Grid],
    places: Float[Tensor, "b q heads levels points 2"],
    weights: Float[Tensor, "b q heads levels points"],
) -> Float[Tensor, "b q width"]:
    """``sum over levels and points of weight * value at place``, heads side by side: ``[b, q, heads * d]``.

    ``values`` holds the levels one after the other, ``grids`` says their (h, w), row-major. Interpolation is bilinear;
    a half-precision value is read in float32 and the sum is rounded once.
    """
    b, _, heads = places.shape[:3]
    dtype = values.dtype
    values, places, weights = (at_least_float32(x) for x in (values, places, weights))
    coordinates = (2 * places - 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 1).contiguous()  # grid_sample counts from -1
    maps = values.permute(0, 2, 3, 1).flatten(0, 1).split([h * w for h, w in grids], -1)
    shares = weights.permute(0, 2, 3, 1, 4).flatten(0, 1)[:, :, None]
    total = None
    for level, grid in enumerate(grids):
        seen = F.grid_sample(maps[level].unflatten(-1, grid), coordinates[:, level], align_corners=False)
        part = (seen * shares[:, level]).sum(-1)
        total = part if total is None else total + part
    assert total is not None, "at least one level"
    return total.unflatten(0, (b, heads)).flatten(1, 2).mT.to(dtype)


class DeformableAttention(nn.Module):
    """Tokens ``[b, n, width]`` of all levels, one level after the other, looking at one another.

    ``forward(tokens, grids, positions)``: positions are added where places and weights are predicted, never to the
    values. At the start every head looks in a direction of its own, point k at a distance of k cells, all alike.
    ValueError unless ``heads`` divides ``width``.
    """

    def __init__(self, width: int, heads: int, levels: int, points: int) -> None:
        super().__init__()
        if min(width, heads, levels, points) < 1 or width % heads:
            raise ValueError(
                f"{heads} heads of width {width}, {levels} levels and {points} points do not make attention"
            )
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = nn.Linear(width, heads * levels * points * 2)
        self.weights = nn.Linear(width, heads * levels * points)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self._start()

    def _start(self) -> None:
        for layer in (self.offsets, self.weights):
            nn.init.zeros_(layer.weight)
        for layer in (self.weights, self.values, self.out):
            nn.init.zeros_(layer.bias)
        for layer in (self.values, self.out):
            nn.init.xavier_uniform_(layer.weight)
        turns = torch.arange(self.heads, dtype=torch.float32) * (2 * math.pi / self.heads)
        compass = torch.stack((turns.cos(), turns.sin()), -1)
        compass = compass / compass.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.points + 1, dtype=torch.float32)
        start = (compass[:, None] * steps[:, None])[:, None].expand(-1, self.levels, -1, -1)
        with torch.no_grad():
            self.offsets.bias.copy_(start.flatten())

    def forward(
        self,
        tokens: Float[Tensor, "b n width"],
        grids: Sequence[Grid],
        positions: Float[Tensor, "n width"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        if len(grids) != self.levels or tokens.shape[1] != sum(h * w for h, w in grids):
            raise ValueError(f"{tokens.shape[1]} tokens are not {self.levels} levels of (h, w) = {list(grids)}")
        asking = tokens if positions is None else tokens + positions.to(tokens.dtype)
        shape = (self.heads, self.levels, self.points)
        weights = at_least_float32(self.weights(asking)).unflatten(-1, (self.heads, -1)).softmax(-1)
        values = self.values(tokens).unflatten(-1, (self.heads, -1))
        seen = sample_levels(
            values,
            grids,
            self.places(self.offsets(asking).unflatten(-1, (*shape, 2)), grids),
            weights.unflatten(-1, shape[1:]),
        )
        return self.out(seen)

    def places(
        self, offsets: Float[Tensor, "b n heads levels points 2"], grids: Sequence[Grid]
    ) -> Float[Tensor, "b n heads levels points 2"]:
        """A token's own centre, moved by offsets that count cells of the level looked at; float32 or better."""
        own = torch.cat([centres(grid, offsets.device) for grid in grids])
        cells = torch.stack([torch.tensor((w, h), dtype=torch.float32) for h, w in grids]).to(offsets.device)
        return own[:, None, None, None] + at_least_float32(offsets) / cells[:, None]
