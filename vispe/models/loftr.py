"""LoFTR: detector-free local feature matching with transformers (Sun, Shen, Wang, Bao, Zhou, CVPR 2021).

What is different from other matchers of the zoo:
- there are no keypoints: every cell of a coarse map is a token, and what matches are cells, refined afterwards;
- position is added **once**, a fixed 2-D sine of the cell's row and column on top of the coarse map (section 3.1); the
  layers know nothing of it. Two sines were published and the weights tell them apart: :func:`sine_loftr_legacy`, the
  first code's with its slip of an operator, and :func:`sine_loftr`;
- attention is linear in the number of cells, so that whole images can attend to each other;
- the fine map is finished only when there is something to refine; images of several sizes in a batch go through the
  convolutions each without its padding, so that a pair gets in a batch what it gets alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vispe.layers.assignment import Assignment, dual_softmax, mutual, optimal_transport
from vispe.layers.attention import attend_linearly
from vispe.layers.cells import CellMatches, check_pairs, inner, pixels
from vispe.layers.detection import grey
from vispe.layers.folding import convolve
from vispe.layers.padding import rectangles, together
from vispe.position.grid import Grid, at_least_float32
from vispe.position.sine import sine_loftr, sine_loftr_legacy
from vispe.spec import Spec

POSITIONS = {"sine_loftr_legacy": sine_loftr_legacy, "sine_loftr": sine_loftr}
MATCHINGS = ("dual_softmax", "optimal_transport")
FINEST = 2  # pixels a cell of the first stage spans: the stem strides once


@dataclass(frozen=True, kw_only=True)
class LoFTRSpec(Spec):
    """Knobs of :class:`LoFTR`.

    ``widths``: channels of the ResNet's stages, each half as fine as the one before, the first at half the image. The
    last is the coarse map; three of them make it an eighth of the image, four a sixteenth; the fine map is two stages
    up. ``position``: which sine is added to the coarse map, or "none". ``depth``, ``fine_depth``: layers, self and
    cross by turns; ``fine_depth`` 0: no refinement, matches are centres of cells.
    """

    stem: int = 128
    widths: tuple[int, ...] = (128, 196, 256)
    depth: int = 8
    num_heads: int = 8
    fine_depth: int = 2
    window: int = 5  # side of the square of fine cells in which a match is refined
    position: Literal["sine_loftr_legacy", "sine_loftr", "none"] = "sine_loftr_legacy"
    matching: Literal["dual_softmax", "optimal_transport"] = "dual_softmax"
    temperature: float = 0.1  # of the dual softmax
    iterations: int = 3  # of the optimal transport
    threshold: float = 0.2  # a match needs a confidence above this
    border: int = 2  # cells at the edge that never match
    score_budget: int = 256 << 20  # bytes of similarities held at a time, by the dual softmax

    def __post_init__(self) -> None:
        if len(self.widths) < 3 or min(*self.widths, self.num_heads) < 1:
            raise ValueError(
                f"LoFTR needs three widths or more and a head, all positive, got {self.widths} and {self.num_heads}"
            )
        if self.widths[-1] % math.lcm(4, self.num_heads) or self.widths[-3] % self.num_heads:
            raise ValueError(
                f"{self.num_heads} heads, and the 4 parts of a sine, must divide the coarse width {self.widths[-1]}, "
                f"and the heads the fine width {self.widths[-3]}"
            )
        for name, words in (("position", (*POSITIONS, "none")), ("matching", MATCHINGS)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, got {getattr(self, name)!r}")
        least = {"stem": 1, "iterations": 1, "score_budget": 1, "depth": 0, "fine_depth": 0, "border": 0}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name} must be at least {number}, got {getattr(self, name)}")
        if self.window < 1 or self.window % 2 == 0:
            raise ValueError(f"window must be odd, got {self.window}")
        if not self.temperature > 0 or not 0 <= self.threshold <= 1:
            raise ValueError(
                f"temperature must be positive and threshold in [0, 1], got {self.temperature} and {self.threshold}"
            )

    @property
    def strides(self) -> tuple[int, int]:
        """Pixels that a coarse and a fine cell span: (8, 2), or (16, 4) with four stages."""
        return FINEST << len(self.widths) - 1, FINEST << len(self.widths) - 3


class LoFTRLesson(NamedTuple):
    """What losses are made of, in the training of ``b`` pairs.

    ``coarse [b, m, n]``: log-confidences of all pairs of cells; of a transport ``[b, m + 1, n + 1]``, dustbins last.
    ``rows``, ``i``, ``j [k]``: the matches that were refined. ``offsets [k, 2]``: by how many half windows each moves
    in image 1, ``deviation [k]`` of its heat map, both axes added up; both are None without a fine level.
    """

    coarse: Tensor
    rows: Tensor
    i: Tensor
    j: Tensor
    offsets: Tensor | None
    deviation: Tensor | None


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the block strides."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.short = nn.Conv2d(before, width, 1, stride, bias=False) if stride > 1 else None
        self.short_norm = nn.BatchNorm2d(width) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = convolve(F.relu(convolve(x, self.conv1, self.norm1), inplace=True), self.conv2, self.norm2)
        if self.short is not None and self.short_norm is not None:
            x = convolve(x, self.short, self.short_norm)
        return F.relu(y + x, inplace=True)


class Backbone(nn.Module):
    """A ResNet whose last stage is the coarse map, and two steps back up to the fine map (a feature pyramid)."""

    def __init__(self, spec: LoFTRSpec) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, spec.stem, 7, 2, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(spec.stem)
        self.stages = nn.ModuleList()
        before = spec.stem
        for i, width in enumerate(spec.widths):
            stride = 2 if i else 1
            self.stages.append(nn.Sequential(ResidualBlock(before, width, stride), ResidualBlock(width, width, 1)))
            before = width
        self.coarse = nn.Conv2d(before, before, 1, bias=False)
        self.laterals, self.smooth = nn.ModuleList(), nn.ModuleList()
        for above, width in zip(spec.widths[:-3:-1], spec.widths[-2:-4:-1], strict=True) if spec.fine_depth else ():
            self.laterals.append(nn.Conv2d(width, above, 1, bias=False))
            self.smooth.append(Smooth(above, width))

    def forward(self, x: Tensor) -> list[Tensor]:
        """``[b, 1, h, w]`` to the maps of the two stages before the last, and the coarse map; sides rounded up."""
        x = F.relu(convolve(x, self.conv1, self.norm1), inplace=True)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return [*maps[-3:-1], self.coarse(x)]

    def refine(self, maps: Sequence[Tensor]) -> Tensor:
        """The fine map ``[b, c, h, w]`` from what :meth:`forward` gave."""
        x = maps[-1]
        for lateral, smooth, skip in zip(self.laterals, self.smooth, reversed(maps[:-1]), strict=True):
            # Cell i of the finer map reads the coarser one at i (n - 1)/(2n - 1): what the weights were trained with.
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True)
            x = smooth(lateral(skip) + x[..., : skip.shape[-2], : skip.shape[-1]])
        return x


class Smooth(nn.Module):
    """Two 3 x 3 convolutions over a sum of maps."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, before, 3, 1, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(before)
        self.conv2 = nn.Conv2d(before, width, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(F.leaky_relu(convolve(x, self.conv1, self.norm1), inplace=True))


class Layer(nn.Module):
    """Linear attention from ``x`` to ``source`` and an MLP over ``x`` and its message, side by side (section 3.2)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(2 * width, 2 * width, bias=False), nn.ReLU(inplace=True), nn.Linear(2 * width, width, bias=False)
        )
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x [b, n, width]``, ``source [b, m, width]``; ``mask [b, m]`` is true where the source exists."""
        q = self.q(x).unflatten(-1, (self.num_heads, -1))
        k, v = self.kv(source).unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        message = self.norm1(self.merge(attend_linearly(q, k, v, mask)))
        return x + self.norm2(self.mlp(torch.cat((x, message), -1)))


class Layers(nn.ModuleList):
    """Layers, self and cross by turns. In a cross layer image 1 reads what image 0 has just become."""

    def __init__(self, depth: int, width: int, num_heads: int) -> None:
        super().__init__(Layer(width, num_heads) for _ in range(depth))
        for weight in self.parameters():
            if weight.ndim > 1:
                for part in weight.split(width) if weight.shape == (2 * width, width) else (weight,):
                    nn.init.xavier_uniform_(part.detach())

    def forward(
        self, x0: Tensor, x1: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        for i, layer in enumerate(self):
            if i % 2 == 0:
                x0, x1 = layer(x0, x0, mask0), layer(x1, x1, mask1)
            else:
                x0 = layer(x0, x1, mask1)
                x1 = layer(x1, x0, mask0)
        return x0, x1


class Context(nn.Module):
    """Fine windows ``[k, cells, c]`` that know their coarse cell: both side by side, mixed by one matrix."""

    def __init__(self, coarse: int, fine: int) -> None:
        super().__init__()
        self.down = nn.Linear(coarse, fine)
        self.merge = nn.Linear(2 * fine, fine)

    def forward(self, windows: Tensor, cells: Tensor) -> Tensor:
        own, coarse = self.merge.weight.chunk(2, 1)  # a window's cells share the coarse half of the product
        return F.linear(windows, own) + F.linear(self.down(cells), coarse, self.merge.bias)[:, None]


@dataclass
class Side:
    """One image of every pair: its maps in groups of one size ``(rows, maps)``, its tokens, which of them exist."""

    groups: list[tuple[list[int], list[Tensor]]]
    x: Tensor
    grid: Grid
    sizes: Tensor  # [b, 2], (h, w) in cells that exist
    mask: Tensor | None

    def inner(self, border: int) -> Tensor:
        """Which cells lie off the image's edge by ``border``, ``[b, n]``."""
        return inner(self.grid, self.sizes, border)


class LoFTR(nn.Module):
    """Matches two images without keypoints. ``LoFTR(spec)`` has fresh weights; :func:`vispe.load` brings trained
    ones."""

    def __init__(self, spec: LoFTRSpec = LoFTRSpec()) -> None:
        super().__init__()
        self.spec = spec
        coarse, fine = spec.widths[-1], spec.widths[-3]
        self.backbone = Backbone(spec)
        self.backbone.to(memory_format=torch.channels_last)  # faster on the CPU, and made for tensor cores
        self.coarse = Layers(spec.depth, coarse, spec.num_heads)
        self.context = Context(coarse, fine) if spec.fine_depth else None
        self.fine = Layers(spec.fine_depth, fine, spec.num_heads)
        self.dustbin = nn.Parameter(torch.tensor(1.0)) if spec.matching == "optimal_transport" else None
        for module in self.backbone.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    # ------------------------------------------------------------------------------------------------- the public calls

    def forward(
        self, image0: Tensor, image1: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
    ) -> CellMatches:
        """Match ``b`` pairs: ``image0 [b, 1 or 3, h, w]``, ``image1`` the same or of another size, in [0, 1].

        ``mask0 [b, h, w]``, ``mask1``: true where there is image, a rectangle at the upper left; padding may hold
        anything. Any size will do. A point of image 0 is its cell's own pixel (a multiple of the stride), of image 1
        refined. ``ValueError`` for wrong shapes, dtypes and masks.
        """
        s0, s1 = self._sides(image0, image1, mask0, mask1)
        found = self._assign(s0, s1)
        j = found.matches0.clamp(min=0)
        kept = (found.matches0 >= 0) & s0.inner(self.spec.border) & s1.inner(self.spec.border).gather(1, j)
        rows, i = kept.nonzero(as_tuple=True)
        j = j[rows, i]
        stride, dtype = self.spec.strides[0], at_least_float32(s0.x).dtype
        points0, points1 = (pixels(index, side.grid, stride, dtype) for index, side in ((i, s0), (j, s1)))
        if self.context is not None and len(rows):
            points1 = points1 + self._offsets(s0, s1, rows, i, j)
        return CellMatches(points0, points1, found.scores0[rows, i], rows)

    def confidence(
        self, image0: Tensor, image1: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
    ) -> Tensor:
        """Coarse confidences ``[b, m, n]`` of all pairs of cells, row-major; differentiable, whole in memory."""
        s0, s1 = self._sides(image0, image1, mask0, mask1)
        return self._confidence(s0, s1)

    def lesson(
        self,
        image0: Tensor,
        image1: Tensor,
        pick: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
        mask0: Tensor | None = None,
        mask1: Tensor | None = None,
    ) -> LoFTRLesson:
        """For training (3.5): all log-confidences, and the refinement of the matches (rows, i, j) that ``pick`` takes
        from them; differentiable.

        Images as in :meth:`forward`, but the convolutions take padding for a part of the picture, as the original's do:
        a batch norm wants one pass.
        """
        s0, s1 = self._sides(image0, image1, mask0, mask1, seen=True)
        if self.dustbin is not None:
            coarse = self._transport(s0, s1)
        else:
            sim, real = self._masked_similarity(s0, s1), _together(s0.mask, s1.mask)
            coarse = F.log_softmax(sim, 1) + F.log_softmax(sim, 2)
            coarse = coarse if real is None else coarse.masked_fill(~real, -torch.inf)
        rows, i, j = pick(coarse.detach())
        moments = (None, None) if self.context is None else half_windows(self._heat(s0, s1, rows, i, j))
        return LoFTRLesson(coarse, rows, i, j, *moments)

    # ----------------------------------------------------------------------------------------------------- coarse level

    def _sides(
        self, image0: Tensor, image1: Tensor, mask0: Tensor | None, mask1: Tensor | None, *, seen: bool = False
    ) -> tuple[Side, Side]:
        check_pairs(image0, image1, self.backbone.conv1.weight.dtype, "LoFTR")
        s0, s1 = self._side(image0, mask0, seen), self._side(image1, mask1, seen)
        s0.x, s1.x = self.coarse(s0.x, s1.x, s0.mask, s1.mask)
        return s0, s1

    def _side(self, image: Tensor, mask: Tensor | None, seen: bool = False) -> Side:
        """The coarse map of every image, position added, as tokens; ``seen``: the convolutions see padding."""
        x, stride = grey(image), self.spec.strides[0]
        whole = [(x.shape[-2], x.shape[-1])] * len(x)
        sizes = whole if mask is None else rectangles(mask, x)
        parts = together(whole if seen else sizes)
        groups = [(rows, self.backbone(x[rows, :, :h, :w])) for (h, w), rows in parts.items()]
        coarse = _gathered([(rows, maps[-1]) for rows, maps in groups])
        grid = coarse.shape[-2], coarse.shape[-1]
        x = coarse.flatten(2).transpose(1, 2).contiguous()
        if self.spec.position != "none":
            x = x + POSITIONS[self.spec.position](grid, x.shape[-1], x.device).to(x.dtype)
        cells = torch.tensor([[-(-h // stride), -(-w // stride)] for h, w in sizes], device=x.device)
        side = Side(groups, x, grid, cells, None)
        side.mask = side.inner(0) if len(groups) > 1 or (seen and sizes != whole) else None
        return side

    def _scaled(self, side: Side) -> Tensor:
        return at_least_float32(side.x) / side.x.shape[-1] ** 0.5

    def _assign(self, s0: Side, s1: Side) -> Assignment:
        spec, m0, m1 = self.spec, self._scaled(s0), self._scaled(s1)
        if self.dustbin is None:
            m0 = m0 / spec.temperature
            return dual_softmax(m0, m1, s0.mask, s1.mask, spec.threshold, spec.score_budget)
        scores = self._transport(s0, s1).exp()
        m, n = s0.x.shape[1], s1.x.shape[1]
        to_bin = (scores.argmax(2) == n)[:, :-1, None] | (scores.argmax(1) == m)[:, None, :-1]
        scores = scores[:, :-1, :-1].masked_fill(to_bin, 0)  # a cell that goes to a dustbin matches nothing
        value, best0 = scores.max(2)
        return mutual(best0, scores.argmax(1), value, spec.threshold)

    def _confidence(self, s0: Side, s1: Side) -> Tensor:
        if self.dustbin is not None:
            return self._transport(s0, s1)[:, :-1, :-1].exp()
        sim, real = self._masked_similarity(s0, s1), _together(s0.mask, s1.mask)
        scores = F.softmax(sim, 1) * F.softmax(sim, 2)
        return scores if real is None else scores.masked_fill(~real, 0)

    def _masked_similarity(self, s0: Side, s1: Side) -> Tensor:
        """Over the temperature; next to nothing where padding takes part."""
        sim, real = self._similarity(s0, s1) / self.spec.temperature, _together(s0.mask, s1.mask)
        return sim if real is None else sim.masked_fill(~real, torch.finfo(sim.dtype).min)

    def _transport(self, s0: Side, s1: Side) -> Tensor:
        """Logarithms ``[b, m + 1, n + 1]``, dustbins last."""
        assert self.dustbin is not None
        sim = self._similarity(s0, s1)
        return optimal_transport(sim, self.dustbin.to(sim.dtype), self.spec.iterations, s0.mask, s1.mask)

    def _similarity(self, s0: Side, s1: Side) -> Tensor:
        with torch.autocast(s0.x.device.type, enabled=False):
            return self._scaled(s0) @ self._scaled(s1).transpose(1, 2)

    # ------------------------------------------------------------------------------------------------------- fine level

    def _offsets(self, s0: Side, s1: Side, rows: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """By how many pixels each match moves in image 1, ``[k, 2]``: the mean of a heat map over its window (3.4)."""
        heat = self._heat(s0, s1, rows, i, j)
        reach = torch.arange(self.spec.window, dtype=heat.dtype, device=heat.device) - self.spec.window // 2
        x, y = (heat.sum(1) * reach).sum(-1), (heat.sum(2) * reach).sum(-1)
        return torch.stack((x, y), -1) * self.spec.strides[1]

    def _heat(self, s0: Side, s1: Side, rows: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """How much each cell of a window in image 1 is like the middle of image 0's, ``[k, window, window]``."""
        assert self.context is not None
        w0, w1 = (
            self.context(self._windows(side, rows, cells), side.x[rows, cells]) for side, cells in ((s0, i), (s1, j))
        )
        w0, w1 = (at_least_float32(w) for w in self.fine(w0, w1))
        centre = w0[:, w0.shape[1] // 2]
        heat = ((w1 * centre[:, None]).sum(-1) / centre.shape[-1] ** 0.5).softmax(-1)
        return heat.unflatten(1, (self.spec.window, self.spec.window))

    def _windows(self, side: Side, rows: Tensor, cells: Tensor) -> Tensor:
        """The fine cells around coarse ``cells [k]`` of images ``rows [k]``, ``[k, window^2, c]``; zero outside."""
        fine = _gathered([(group, self.backbone.refine(maps)) for group, maps in side.groups])
        reach = self.spec.window // 2
        fine = F.pad(fine, (reach, reach, reach, reach)).permute(0, 2, 3, 1).contiguous()
        step, near = self.spec.strides[0] // self.spec.strides[1], torch.arange(self.spec.window, device=cells.device)
        y, x = (step * each[:, None] + near for each in (cells // side.grid[1], cells % side.grid[1]))
        return fine[rows[:, None, None], y[:, :, None], x[:, None]].flatten(1, 2)


def half_windows(heat: Tensor) -> tuple[Tensor, Tensor]:
    """The mean (x, y) ``[k, 2]`` of heat maps ``[k, window, window]`` in half windows, and the sum ``[k]`` of the
    deviations along both axes, as the official code tells them apart."""
    side = torch.linspace(-1, 1, heat.shape[1], dtype=heat.dtype, device=heat.device)
    axes = torch.stack((heat.sum(1), heat.sum(2)), 1)
    mean = (axes * side).sum(-1)
    variance = (axes * side.square()).sum(-1) - mean.square()
    return mean, variance.clamp(min=1e-10).sqrt().sum(1)


def _gathered(groups: list[tuple[list[int], Tensor]]) -> Tensor:
    """Maps of several sizes in one ``[b, c, h, w]``, each at the upper left, zero around it."""
    if len(groups) == 1:
        return groups[0][1]
    first = groups[0][1]
    h, w = (max(each.shape[side] for _, each in groups) for side in (-2, -1))
    out = first.new_zeros(sum(len(rows) for rows, _ in groups), first.shape[1], h, w)
    for rows, each in groups:
        out[rows, :, : each.shape[-2], : each.shape[-1]] = each
    return out


def _together(mask0: Tensor | None, mask1: Tensor | None) -> Tensor | None:
    if mask0 is None or mask1 is None:
        one = mask1 if mask0 is None else mask0
        return None if one is None else (one[:, None] if mask0 is None else one[:, :, None])
    return mask0[:, :, None] & mask1[:, None]


MODEL = LoFTR
VARIANTS = {
    "loftr_outdoor": LoFTRSpec(),
    "loftr_indoor": LoFTRSpec(),
    "loftr_indoor_new": LoFTRSpec(position="sine_loftr"),
    "loftr_coarse_bmvs": LoFTRSpec(stem=8, widths=(8, 16, 32, 32), depth=4, num_heads=1, fine_depth=0, border=0),
}
