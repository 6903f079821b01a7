"""Deformable attention is what a loop over points says, and never makes a matrix of tokens by tokens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vispe.layers.deformable import DeformableAttention, centres, sample_levels

GRIDS = [(2, 3), (4, 5), (7, 6)]
CELLS = sum(h * w for h, w in GRIDS)


def bilinear(cells: Tensor, x: float, y: float) -> Tensor:
    """``cells [h, w, d]`` at the place (x, y) in fractions of its sides, zero outside; one corner after the other."""
    h, w, _ = cells.shape
    column, row = x * w - 0.5, y * h - 0.5
    found = torch.zeros_like(cells[0, 0])
    for i, j in itertools.product((0, 1), (0, 1)):
        r, c = math.floor(row) + i, math.floor(column) + j
        if 0 <= r < h and 0 <= c < w:
            found = found + (1 - abs(row - r)) * (1 - abs(column - c)) * cells[r, c]
    return found


def slowly(values: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    b, q, heads, levels, points, _ = places.shape
    maps = values.split([h * w for h, w in GRIDS], 1)
    out = torch.zeros(b, q, heads, values.shape[-1], dtype=values.dtype)
    for i, j, k, level, p in itertools.product(range(b), range(q), range(heads), range(levels), range(points)):
        cells = maps[level][i, :, k].unflatten(0, GRIDS[level])
        x, y = places[i, j, k, level, p].tolist()
        out[i, j, k] += weights[i, j, k, level, p] * bilinear(cells, x, y)
    return out.flatten(2)


def inputs(b: int = 2, q: int = 5, heads: int = 2, points: int = 3, d: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(b, CELLS, heads, d, generator=g, dtype=torch.float64)
    places = torch.rand(b, q, heads, 3, points, 2, generator=g, dtype=torch.float64) * 1.4 - 0.2  # some outside
    weights = torch.rand(b, q, heads, 3, points, generator=g, dtype=torch.float64)
    return values, places, weights


def test_it_is_the_loop_over_points_in_float64():
    values, places, weights = inputs()
    torch.testing.assert_close(
        sample_levels(values, GRIDS, places, weights), slowly(values, places, weights), atol=1e-12, rtol=1e-12
    )


def test_gradients_reach_values_places_and_weights():
    values, places, weights = (x.requires_grad_() for x in inputs(1, 2, 1, 2, 2))
    assert torch.autograd.gradcheck(lambda *x: sample_levels(x[0], GRIDS, x[1], x[2]), (values, places, weights))


def test_centres_by_hand():
    assert centres((2, 4)).tolist() == [[x, y] for y in (0.25, 0.75) for x in (0.125, 0.375, 0.625, 0.875)]


def test_a_token_that_looks_at_its_own_cell_sees_it():
    """Offsets of zero on one level: the value itself comes back, and a whole cell of offset is the next cell's."""
    grid = (3, 4)
    values = torch.randn(1, 12, 1, 2)
    own = centres(grid)[None, :, None, None, None]
    ones = torch.ones(1, 12, 1, 1, 1)
    torch.testing.assert_close(sample_levels(values, [grid], own, ones), values[:, :, 0])
    moved = sample_levels(values, [grid], own + torch.tensor((1 / 4, 0.0)), ones)
    wanted = torch.cat((values.view(1, 3, 4, 2)[:, :, 1:], torch.zeros(1, 3, 1, 2)), 2).flatten(1, 2)
    torch.testing.assert_close(moved, wanted, atol=1e-5, rtol=1e-5)


def test_the_whole_layer_against_the_loop():
    torch.manual_seed(0)
    layer = DeformableAttention(8, 2, 3, 2).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, positions = torch.randn(2, CELLS, 8, dtype=torch.float64), torch.randn(CELLS, 8, dtype=torch.float64)
    asking = x + positions
    offsets = layer.offsets(asking).unflatten(-1, (2, 3, 2, 2))
    own = torch.cat([centres(grid) for grid in GRIDS]).double()
    cells = torch.tensor([(w, h) for h, w in GRIDS], dtype=torch.float64)
    places = own[:, None, None, None] + offsets / cells[:, None]
    weights = layer.weights(asking).unflatten(-1, (2, 6)).softmax(-1).unflatten(-1, (3, 2))
    values = layer.values(x).unflatten(-1, (2, 4))
    wanted = layer.out(slowly(values, places, weights))
    torch.testing.assert_close(layer(x, GRIDS, positions), wanted, atol=1e-6, rtol=1e-6)


def test_the_start_is_deformable_detrs():
    """Head i points at angle i/heads of a turn, point k is k cells away, on a square; all points count the same."""
    layer = DeformableAttention(32, 8, 3, 4)
    start = layer.offsets.bias.view(8, 3, 4, 2)
    assert not layer.offsets.weight.any()
    torch.testing.assert_close(start[0, 1], torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 0]]))
    torch.testing.assert_close(start[1, 2, 3], torch.tensor([4.0, 4.0]))
    assert not layer.weights.weight.any()
    assert not layer.weights.bias.any()


class Elements(TorchDispatchMode):
    """The largest tensor made, and all elements together."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
            self.total += out.numel()
        return out


def made(scale: int) -> Elements:
    grids = [(2 * scale, 2 * scale), (4 * scale, 4 * scale), (8 * scale, 8 * scale)]
    n = sum(h * w for h, w in grids)
    layer, x = DeformableAttention(32, 4, 3, 4), torch.randn(1, n, 32)
    with Elements() as elements:
        layer(x, grids).sum().backward()
    return elements


def test_memory_grows_linearly_with_pixels():
    small, large = made(1), made(4)
    assert large.largest / small.largest == pytest.approx(16, rel=0.01)
    assert large.total / small.total == pytest.approx(16, rel=0.15)
    assert large.largest < (84 * 16) ** 2  # tokens by tokens, of a single head


def test_places_are_float32_in_half_precision_and_under_autocast(monkeypatch):
    from vispe.layers import deformable

    seen = []
    whole = deformable.F.grid_sample
    monkeypatch.setattr(
        deformable.F, "grid_sample", lambda x, grid, **k: seen.append((x.dtype, grid.dtype)) or whole(x, grid, **k)
    )
    grids = [(1, 300), (1, 150), (1, 75)]
    layer, x = DeformableAttention(32, 4, 3, 4), torch.randn(1, 525, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(layer(x, grids)).all()
    assert layer.bfloat16()(x.bfloat16(), grids).dtype == torch.bfloat16
    assert set(seen) == {(torch.float32, torch.float32)}


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="3 heads of width 32"):
        DeformableAttention(32, 3, 3, 4)
    with pytest.raises(ValueError, match="7 tokens are not 3 levels"):
        DeformableAttention(32, 4, 3, 4)(torch.zeros(1, 7, 32), GRIDS)
