"""EfficientLoFTR: semi-dense matching at the price of sparse (Wang, He, Peng, Tan, Zhou, CVPR 2024).

What is different from LoFTR:
- position is **rotated**, not added: queries and keys of self attention are turned by a 2-D rotary encoding before they
  are parted into heads, so that the first head sees near places and the last far ones; cross attention has no position
  (section 3.2);
- attention is the plain softmax, between few tokens: a strided depthwise convolution makes one query, and a maximum one
  key, of every 4 x 4 cells, and the answers are upsampled back to the cells;
- the network is a RepVGG, whose three branches are one convolution at inference (3.1);
- a match is refined in both images: the most mutual pair of pixels of two 8 x 8 windows, and in image 1 the mean of a
  3 x 3 heat map (3.4);
- images of several sizes in a batch go each without its padding, pairs of one size together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vispe.layers.assignment import dual_softmax
from vispe.layers.attention import attend
from vispe.layers.cells import CellMatches, check_pairs, inner, pixels
from vispe.layers.detection import grey
from vispe.layers.folding import affine, convolve, folded
from vispe.layers.padding import rectangles, together
from vispe.position.axial import axial_efficient_loftr, axis_frequencies
from vispe.position.grid import Grid, at_least_float32
from vispe.position.rotary import rotate, rotation
from vispe.spec import Spec

STRIDE = 8  # pixels a coarse cell spans, and the side of the window in which a match is refined
RIM = STRIDE + 2  # side of a window with its neighbours
AT_ONCE = 1024  # matches refined at a time: 50 MB of windows at the published width


@dataclass(frozen=True, kw_only=True)
class EfficientLoFTRSpec(Spec):
    """Knobs of :class:`EfficientLoFTR`.

    ``widths``, ``blocks``: channels and blocks of the RepVGG's four stages, at 1/2, 1/2, 1/4 and 1/8 of the image.
    ``depth``: pairs of a self and a cross layer. ``pool``: side of the square of cells that becomes a token.
    ``sharp``: so many of the fine channels find the place between pixels, the others the pixel. ``reference_side``:
    positions are stretched as if an image's longer side had so many pixels (the authors' 832, in their evaluations);
    None leaves them, as transformers does.
    """

    widths: tuple[int, ...] = (64, 64, 128, 256)
    blocks: tuple[int, ...] = (1, 2, 4, 14)
    depth: int = 4
    num_heads: int = 8
    pool: int = 4
    sharp: int = 8
    position: Literal["axial_efficient_loftr", "none"] = "axial_efficient_loftr"
    reference_side: int | None = None
    temperature: float = 0.1  # of the dual softmax
    fine_temperature: float = 10.0  # of the heat map
    threshold: float = 0.2  # a match needs a confidence above this
    border: int = 2  # cells at the edge that never match
    score_budget: int = 256 << 20  # bytes of similarities held at a time

    def __post_init__(self) -> None:
        if len(self.widths) != 4 or len(self.blocks) != 4 or min(*self.widths, *self.blocks, self.num_heads) < 1:
            raise ValueError(
                f"EfficientLoFTR needs four widths, four counts of blocks and a head, all positive, got {self.widths}, "
                f"{self.blocks} and {self.num_heads}"
            )
        if self.widths[-1] % math.lcm(4, 2 * self.num_heads):
            raise ValueError(
                f"pairs of {self.num_heads} heads and of two axes must share the width, got {self.widths[-1]}"
            )
        if self.position not in ("axial_efficient_loftr", "none"):
            raise ValueError(f"position must be one of axial_efficient_loftr, none, got {self.position!r}")
        if not 0 < self.sharp < self.widths[1]:
            raise ValueError(f"sharp must be between 1 and {self.widths[1] - 1}, got {self.sharp}")
        least = {"pool": 1, "score_budget": 1, "depth": 0, "border": 0}
        least |= {} if self.reference_side is None else {"reference_side": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name} must be at least {number}, got {getattr(self, name)}")
        if not min(self.temperature, self.fine_temperature) > 0 or not 0 <= self.threshold <= 1:
            raise ValueError(
                "temperatures must be positive and threshold in [0, 1], got "
                f"{self.temperature}, {self.fine_temperature} and {self.threshold}"
            )


class RepBlock(nn.Module):
    """A 3 x 3 and a 1 x 1 convolution of the input and, where shapes allow, the input itself, each with its norm."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv3 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(before, width, 1, stride, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.norm = nn.BatchNorm2d(width) if before == width and stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.norm3.training:
            return F.relu(F.conv2d(x, *self.merged(), self.conv3.stride, 1), inplace=True)
        y = self.norm3(self.conv3(x)) + self.norm1(self.conv1(x))
        return F.relu(y if self.norm is None else y + self.norm(x))

    def merged(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the one 3 x 3 convolution that all branches are in eval mode (RepVGG, section 3.3)."""
        (weight, bias), (point, more) = folded(self.conv3, self.norm3), folded(self.conv1, self.norm1)
        point, bias = point[:, :, 0, 0], bias + more
        if self.norm is not None:
            scale, more = affine(self.norm)
            point, bias = point + scale.diag(), bias + more
        return weight + F.pad(point[:, :, None, None], (1, 1, 1, 1)), bias


class Layer(nn.Module):
    """Aggregated attention from ``x`` to ``source`` and an MLP over a cell and its message, side by side (3.2)."""

    def __init__(self, width: int, num_heads: int, pool: int) -> None:
        super().__init__()
        self.num_heads, self.pool = num_heads, pool
        self.aggregate = nn.Conv2d(width, width, pool, pool, groups=width, bias=False)
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(2 * width, 2 * width, bias=False)
        self.narrow = nn.Linear(2 * width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, turn: Tensor | None = None) -> Tensor:
        """``x [b, h, w, width]``, ``source`` of any grid; ``turn``: the rotation of their common grid of tokens."""
        h, w = x.shape[1:3]
        queries, keys = self._queries(x), self._keys(source)
        q, kv = self.q(self.norm1(queries)).flatten(1, 2), self.kv(self.norm1(keys)).flatten(1, 2)
        k, v = kv.chunk(2, -1)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, v))
        message = self.merge(attend(q, k, v)).unflatten(1, queries.shape[1:3])
        # What mixes channels and what mixes places may change places: the message's half of the product is made of
        # tokens, a sixteenth of the cells, and upsampled after.
        own, far = self.wide.weight.chunk(2, 1)
        hidden = F.linear(x, own) + self._upsampled(F.linear(message, far))[:, :h, :w]
        return x + self.norm2(self.narrow(F.leaky_relu(hidden, inplace=True)))

    def _queries(self, x: Tensor) -> Tensor:
        """One token of every ``pool x pool`` cells; what is missing at the far edges counts as zero."""
        h, w = x.shape[1:3]
        x = F.pad(x.permute(0, 3, 1, 2), (0, -w % self.pool, 0, -h % self.pool))
        return self.aggregate(x).permute(0, 2, 3, 1)

    def _keys(self, x: Tensor) -> Tensor:
        """The same by the largest value, of the cells that exist."""
        return F.max_pool2d(x.permute(0, 3, 1, 2), self.pool, ceil_mode=True).permute(0, 2, 3, 1)

    def _upsampled(self, x: Tensor) -> Tensor:
        x = F.interpolate(x.permute(0, 3, 1, 2), scale_factor=float(self.pool), mode="bilinear", align_corners=False)
        return x.permute(0, 2, 3, 1)


class Pair(nn.Module):
    """A self layer, and a cross layer in which image 1 reads what image 0 has just become, as in LoFTR."""

    def __init__(self, width: int, num_heads: int, pool: int) -> None:
        super().__init__()
        self.within = Layer(width, num_heads, pool)
        self.across = Layer(width, num_heads, pool)

    def forward(self, x0: Tensor, x1: Tensor, turn0: Tensor | None, turn1: Tensor | None) -> tuple[Tensor, Tensor]:
        x0, x1 = self.within(x0, x0, turn0), self.within(x1, x1, turn1)
        x0 = self.across(x0, x1)
        return x0, self.across(x1, x0)


class Step(nn.Module):
    """A coarser map, twice as large, and a finer one of the backbone, added and smoothed."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.lateral = nn.Conv2d(width, before, 1, bias=False)
        self.conv1 = nn.Conv2d(before, before, 3, 1, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(before)
        self.conv2 = nn.Conv2d(before, width, 3, 1, 1, bias=False)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        x = self.lateral(skip) + x[..., : skip.shape[-2], : skip.shape[-1]]
        return self.conv2(F.leaky_relu(convolve(x, self.conv1, self.norm1), inplace=True))


class Pyramid(nn.Module):
    """From the coarse map and two of the backbone to the fine map at half the image. The last step to whole pixels, an
    upsampling, is left to the windows that need it."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.lateral = nn.Conv2d(widths[3], widths[3], 1, bias=False)
        self.steps = nn.ModuleList((Step(widths[3], widths[2]), Step(widths[2], widths[1])))

    def forward(self, coarse: Tensor, half: Tensor, quarter: Tensor) -> Tensor:
        x = self.lateral(coarse)
        for step, skip in zip(self.steps, (quarter, half), strict=True):
            x = step(x, skip)
        return x


@dataclass
class Side:
    """Images of one size: that size, their maps at half and quarter of it, their cells ``x [b, h, w, c]``."""

    size: Grid
    half: Tensor
    quarter: Tensor
    x: Tensor

    @property
    def grid(self) -> Grid:
        return self.x.shape[1], self.x.shape[2]

    def scaled(self) -> Tensor:
        """Cells ``[b, n, c]`` whose products are similarities."""
        return at_least_float32(self.x.flatten(1, 2)) / self.x.shape[-1] ** 0.5

    def inner(self, border: int) -> Tensor:
        """Which cells lie off the image's edge by ``border``, ``[1, n]``."""
        return inner(self.grid, torch.tensor([self.grid], device=self.x.device), border)


class EfficientLoFTR(nn.Module):
    """Matches two images without keypoints. ``EfficientLoFTR(spec)`` has fresh weights; :func:`vispe.load` brings
    trained ones."""

    def __init__(self, spec: EfficientLoFTRSpec = EfficientLoFTRSpec()) -> None:
        super().__init__()
        self.spec = spec
        self.backbone = nn.ModuleList()
        before = 1
        for width, count, stride in zip(spec.widths, spec.blocks, (2, 1, 2, 2), strict=True):
            blocks = [RepBlock(width if i else before, width, 1 if i else stride) for i in range(count)]
            self.backbone.append(nn.Sequential(*blocks))
            before = width
        self.coarse = nn.ModuleList(Pair(spec.widths[3], spec.num_heads, spec.pool) for _ in range(spec.depth))
        self.fine = Pyramid(spec.widths)
        for part in (self.backbone, self.coarse, self.fine):
            part.to(memory_format=torch.channels_last)  # faster on the CPU, and made for tensor cores
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for weight in self.coarse.parameters():
            if weight.ndim > 1:
                nn.init.xavier_uniform_(weight)

    # ------------------------------------------------------------------------------------------------- the public calls

    def forward(
        self, image0: Tensor, image1: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
    ) -> CellMatches:
        """Match ``b`` pairs: ``image0 [b, 1 or 3, h, w]``, ``image1`` the same or of another size, in [0, 1].

        ``mask0 [b, h, w]``, ``mask1``: true where there is image, a rectangle at the upper left; padding may hold
        anything. Any size will do; at multiples of 32 pixels it is what the authors compute. Points are refined in both
        images. ``ValueError`` for wrong shapes, dtypes and masks.
        """
        parts = []
        for rows, a, b in self._groups(image0, image1, mask0, mask1):
            found = self._match(*self._sides(a, b))
            parts.append(found._replace(rows=torch.tensor(rows, device=a.device)[found.rows]))
        if len(parts) == 1:
            return parts[0]
        order = torch.cat([part.rows for part in parts]).argsort(stable=True)
        return CellMatches(*(torch.cat(each)[order] for each in zip(*parts, strict=True)))

    def confidence(
        self, image0: Tensor, image1: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
    ) -> Tensor:
        """Coarse confidences ``[b, m, n]`` of all pairs of cells, row-major, zero where there is no image;
        differentiable, whole in memory."""
        parts = []
        for rows, a, b in self._groups(image0, image1, mask0, mask1):
            s0, s1 = self._sides(a, b)
            with torch.autocast(a.device.type, enabled=False):
                sim = s0.scaled() @ s1.scaled().transpose(1, 2) / self.spec.temperature
            scores = F.softmax(sim, 1) * F.softmax(sim, 2)
            parts.append((rows, scores.unflatten(2, s1.grid).unflatten(1, s0.grid)))
        grids = [-(-side // STRIDE) for image in (image0, image1) for side in image.shape[-2:]]
        out = parts[0][1].new_zeros(len(image0), *grids)
        for rows, scores in parts:
            h0, w0, h1, w1 = scores.shape[1:]
            out[rows, :h0, :w0, :h1, :w1] = scores
        return out.flatten(3).flatten(1, 2)

    def _groups(
        self, image0: Tensor, image1: Tensor, mask0: Tensor | None, mask1: Tensor | None
    ) -> list[tuple[list[int], Tensor, Tensor]]:
        """Pairs of one size, grey and without padding: which they are, and both their images."""
        check_pairs(image0, image1, self.fine.lateral.weight.dtype, "EfficientLoFTR")
        a, b = grey(image0), grey(image1)
        sizes0, sizes1 = (
            [(x.shape[-2], x.shape[-1])] * len(x) if mask is None else rectangles(mask, x)
            for x, mask in ((a, mask0), (b, mask1))
        )
        groups = together(list(zip(sizes0, sizes1, strict=True))).items()
        return [(rows, a[rows, :, :h0, :w0], b[rows, :, :h1, :w1]) for ((h0, w0), (h1, w1)), rows in groups]

    # ----------------------------------------------------------------------------------------------------- coarse level

    def _sides(self, image0: Tensor, image1: Tensor) -> tuple[Side, Side]:
        s0, s1 = self._side(image0), self._side(image1)
        turns = [self._turn(side) for side in (s0, s1)]
        for pair in self.coarse:
            s0.x, s1.x = pair(s0.x, s1.x, *turns)
        return s0, s1

    def _side(self, image: Tensor) -> Side:
        maps, x = [], image
        for stage in self.backbone:
            x = stage(x)
            maps.append(x)
        return Side((image.shape[-2], image.shape[-1]), maps[1], maps[2], x.permute(0, 2, 3, 1).contiguous())

    def _turn(self, side: Side) -> Tensor | None:
        """The rotation of the tokens of an image; None without position."""
        spec, width = self.spec, self.spec.widths[-1]
        if spec.position == "none":
            return None
        stretch = 1.0 if spec.reference_side is None else spec.reference_side / max(side.size)
        theta = stretch * axis_frequencies(width, 10000.0)
        grid = (-(-side.grid[0] // spec.pool), -(-side.grid[1] // spec.pool))
        return rotation(axial_efficient_loftr(grid, width, theta=(theta, theta), device=side.x.device))

    def _match(self, s0: Side, s1: Side) -> CellMatches:
        spec, border = self.spec, self.spec.border
        found = dual_softmax(s0.scaled() / spec.temperature, s1.scaled(), None, None, spec.threshold, spec.score_budget)
        j = found.matches0.clamp(min=0)
        kept = (found.matches0 >= 0) & s0.inner(border) & s1.inner(border).expand(len(j), -1).gather(1, j)
        rows, i = kept.nonzero(as_tuple=True)
        j = j[rows, i]
        dtype = at_least_float32(s0.x).dtype
        points0, points1 = (pixels(cells, side.grid, STRIDE, dtype) for cells, side in ((i, s0), (j, s1)))
        if len(rows):
            moved0, moved1 = self._moves(s0, s1, rows, i, j)
            points0, points1 = points0 + moved0, points1 + moved1
        return CellMatches(points0, points1, found.scores0[rows, i], rows)

    # ------------------------------------------------------------------------------------------------------- fine level

    def _moves(self, s0: Side, s1: Side, rows: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """By how many pixels each match moves from its cells' own, ``[k, 2]`` in image 0 and in image 1 (3.4)."""
        maps = [self._fine(side) for side in (s0, s1)]
        moved: list[tuple[Tensor, Tensor]] = []
        for part in torch.arange(len(rows), device=rows.device).split(AT_ONCE):
            w0, real0 = _windows(maps[0], s0, rows[part], i[part])
            w1, real1 = _windows(maps[1], s1, rows[part], j[part])
            w0, real0 = _without_rim(w0), _without_rim(real0[..., None])[..., 0]
            with torch.autocast(w0.device.type, enabled=False):
                p, q = self._most_mutual(w0, w1, real0, real1)
                moved.append((_within(p), _within(q) + self._between(w0, w1, p, q)))
        return torch.cat([first for first, _ in moved]), torch.cat([second for _, second in moved])

    def _fine(self, side: Side) -> Tensor:
        """The fine map ``[b, h, w, c]`` at half the image."""
        coarse = (side.x / side.x.shape[-1] ** 0.5).permute(0, 3, 1, 2)
        return self.fine(coarse, side.half, side.quarter).permute(0, 2, 3, 1)

    def _most_mutual(self, w0: Tensor, w1: Tensor, real0: Tensor, real1: Tensor) -> tuple[Tensor, Tensor]:
        """The pixels ``[k]`` of two windows whose dual softmax is the largest; rims are only compared against."""
        exact = slice(0, w0.shape[-1] - self.spec.sharp)
        sim = w0[..., exact] @ w1[..., exact].transpose(1, 2) / w0.shape[-1]
        scores = 2 * sim - sim.logsumexp(1, keepdim=True) - sim.logsumexp(2, keepdim=True)
        scores = scores.masked_fill(~(real0[:, :, None] & real1[:, None]), -math.inf)
        scores = _without_rim(scores.transpose(1, 2)).transpose(1, 2)
        best = scores.flatten(1).argmax(1)
        return best // STRIDE**2, best % STRIDE**2

    def _between(self, w0: Tensor, w1: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """How far image 1's point lies from its pixel ``q``, ``[k, 2]``: the mean of a 3 x 3 heat map, below 1."""
        near = torch.arange(-1, 2, device=q.device)
        # The authors take the place of q in the window without rim for one in the window with it: the heat map is that
        # of the pixel up and left, and at 0 it wraps around. Their training does the same, so the weights expect it.
        y, x = ((each[:, None] + near) % RIM for each in (q // STRIDE, q % STRIDE))
        match = torch.arange(len(q), device=q.device)
        one = w0[match, p, -self.spec.sharp :]
        around = w1[match[:, None], (y[:, :, None] * RIM + x[:, None]).flatten(1), -self.spec.sharp :]
        heat = (around * one[:, None]).sum(-1) / self.spec.sharp**0.5 / self.spec.fine_temperature
        heat = heat.softmax(-1).unflatten(1, (3, 3))
        return torch.stack(((heat.sum(1) * near).sum(-1), (heat.sum(2) * near).sum(-1)), -1)


def _windows(fine: Tensor, side: Side, rows: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """The pixels of coarse ``cells [k]`` of images ``rows [k]`` and a rim of one, ``[k, RIM^2, c]``, zero outside the
    image; which of them exist ``[k, RIM^2]``.

    ``fine [b, h, w, c]`` is at half the image: its bilinear upsampling, of these places only.
    """
    near, rim = (torch.arange(-1, count, device=cells.device) for count in (STRIDE // 2 + 1, STRIDE + 1))
    columns = side.grid[1]
    places, real = [], []
    for each, have, size in zip((cells // columns, cells % columns), fine.shape[1:3], side.size, strict=True):
        places.append((STRIDE // 2 * each[:, None] + near).clamp(0, have - 1))
        pixel = STRIDE * each[:, None] + rim
        real.append((pixel >= 0) & (pixel < size))
    half = at_least_float32(fine[rows[:, None, None], places[0][:, :, None], places[1][:, None]])
    whole = F.interpolate(half.permute(0, 3, 1, 2), scale_factor=2.0, mode="bilinear", align_corners=False)
    exists = (real[0][:, :, None] & real[1][:, None]).flatten(1)
    found = whole[..., 1:-1, 1:-1].permute(0, 2, 3, 1).flatten(1, 2)
    return found * exists[..., None], exists


def _without_rim(x: Tensor) -> Tensor:
    """``[k, RIM^2, c]`` -> ``[k, STRIDE^2, c]``."""
    return x.unflatten(1, (RIM, RIM))[:, 1:-1, 1:-1].flatten(1, 2)


def _within(index: Tensor) -> Tensor:
    """(x, y) of a window's pixels from its middle, ``[k, 2]``, -3.5 to 3.5: the middle is where the authors put the
    cell's own pixel, which is the window's first."""
    return torch.stack((index % STRIDE, index // STRIDE), -1) - (STRIDE - 1) / 2


MODEL = EfficientLoFTR
VARIANTS = {"efficient_loftr": EfficientLoFTRSpec()}
