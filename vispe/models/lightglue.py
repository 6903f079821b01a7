"""LightGlue: local feature matching at light speed (Lindenberger, Sarlin, Pollefeys, ICCV 2023).

What is different here from other transformers of the zoo:
- position enters by rotation only, in self-attention only: angles are a learned linear mix of the normalised keypoint
  (section 3.1), made once per image and shared by all nine layers; cross-attention knows no position;
- a keypoint that is done leaves: a pair stops after the layer at which enough of its points are confident, and points
  that are confidently unmatchable are dropped (section 3.3). Both decisions are taken per pair, so a pair's matches do
  not depend on the pairs it shares a batch with;
- padding is masked in attention, confidence and assignment, and the score matrix is never larger than a stated budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from vispe.layers.assignment import Assignment, assign, log_assignment
from vispe.layers.attention import attend
from vispe.position.grid import at_least_float32, check_inside, normalize_keypoints
from vispe.position.rotary import LearnedBasis, rotate
from vispe.spec import Spec

POSITIONS = ("rotary", "axial", "absolute", "none")
BUCKETS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class LightGlueSpec(Spec):
    """Knobs of :class:`LightGlue`; confidences of ``None`` switch adaptivity off (fixed depth, all points).

    ``position``: "rotary", the published learned mix of coordinates that turns queries and keys; "axial", turns by
    fixed frequencies, half of a head for x and half for y; "absolute", SuperGlue's: an MLP of the coordinates is added
    at the input; "none". ``coordinates``: "normalised" by the image's size, or raw "pixels", to show what that costs.
    """

    input_dim: int = 128
    width: int = 256
    depth: int = 9
    num_heads: int = 4
    scale_and_orientation: bool = False  # positions are (x, y, scale, orientation): SIFT and DoG-HardNet weights
    threshold: float = 0.1  # a match needs a probability above this
    depth_confidence: float | None = None  # official default 0.95: stop when this share of points is confident
    width_confidence: float | None = None  # official default 0.99: drop points this surely unmatchable
    prune_above: int = 0  # prune only while an image has more points (official: 0 on CPU, 1024 CUDA, 1536 flash)
    score_budget: int = 256 << 20  # bytes of similarities held at a time
    position: Literal["rotary", "axial", "absolute", "none"] = "rotary"
    coordinates: Literal["normalised", "pixels"] = "normalised"

    def __post_init__(self) -> None:
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            raise ValueError(f"width {self.width} must split into {self.num_heads} heads of even size")
        for name in ("input_dim", "width", "depth", "num_heads", "score_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, words in (("position", POSITIONS), ("coordinates", ("normalised", "pixels"))):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, got {getattr(self, name)!r}")
        for name in ("threshold", "depth_confidence", "width_confidence"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {value}")


class Points(NamedTuple):
    """The local features of one image of every pair, as the matcher wants them.

    ``keypoints [b, n, 2]`` are (x, y) pixels of the image whose ``size`` (h, w) is given, once or as ``[b, 2]``;
    ``descriptors [b, n, d]``; ``mask [b, n]`` is true where a keypoint exists (padding may hold anything finite);
    ``scales`` in pixels and ``orientations`` in radians, ``[b, n]``, only for weights trained with them.
    """

    keypoints: Tensor
    descriptors: Tensor
    size: Tensor | tuple[float, float]
    mask: Tensor | None = None
    scales: Tensor | None = None
    orientations: Tensor | None = None


class MatchOutput(NamedTuple):
    """What :meth:`LightGlue.forward` returns for ``b`` pairs of ``m`` and ``n`` keypoints (padding included).

    ``matches0 [b, m]`` holds the index in image 1 or -1, ``matches1 [b, n]`` the reverse; ``scores0``, ``scores1`` the
    probability of each point's mutual best match; ``stop [b]`` the number of layers run; ``layers0``, ``layers1`` how
    many layers each point took part in.
    """

    matches0: Tensor
    matches1: Tensor
    scores0: Tensor
    scores1: Tensor
    stop: Tensor
    layers0: Tensor
    layers1: Tensor

    def pairs(self, row: int = 0) -> tuple[Tensor, Tensor]:
        """The matches of one pair as indices ``[k, 2]`` and scores ``[k]``."""
        return Assignment(*self[:4]).pairs(row)


def feed_forward(width: int) -> nn.Sequential:
    """The MLP that turns a point and its message, side by side, into the point's update."""
    return nn.Sequential(
        nn.Linear(2 * width, 2 * width), nn.LayerNorm(2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )


class SelfAttention(nn.Module):
    """Attention among the points of one image; queries and keys are rotated, values are not."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ffn = feed_forward(width)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # b, n, 3, heads, head_dim
        q, k = rotate(qkv[:, :, :2], turn[:, :, None, None]).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, qkv[:, :, 2]))
        return x + self.ffn(torch.cat((x, self.out(attend(q, k, v, mask))), -1))


class CrossAttention(nn.Module):
    """Each image reads the other; one projection serves as query and key, so the similarity is symmetric (section
    3.1)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qk = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.ffn = feed_forward(width)

    def forward(self, x0: Tensor, x1: Tensor, mask0: Tensor | None, mask1: Tensor | None) -> tuple[Tensor, Tensor]:
        qk0, qk1, v0, v1 = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in (self.qk(x0), self.qk(x1), self.v(x0), self.v(x1))
        )
        message0, message1 = self.out(attend(qk0, qk1, v1, mask1)), self.out(attend(qk1, qk0, v0, mask0))
        return x0 + self.ffn(torch.cat((x0, message0), -1)), x1 + self.ffn(torch.cat((x1, message1), -1))


class Layer(nn.Module):
    """Self-attention in each image, then cross-attention between them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, num_heads)
        self.cross_attn = CrossAttention(width, num_heads)

    def forward(
        self, x0: Tensor, x1: Tensor, turn0: Tensor, turn1: Tensor, mask0: Tensor | None, mask1: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x0, x1 = self.self_attn(x0, turn0, mask0), self.self_attn(x1, turn1, mask1)
        return self.cross_attn(x0, x1, mask0, mask1)


class MatchHead(nn.Module):
    """Matching descriptors and matchability of one layer (section 3.2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matchability = nn.Linear(width, 1)
        self.final = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Descriptors scaled so that their product is the similarity ``[.., n, width]``, and logits ``[.., n]``."""
        return self.final(x) / x.shape[-1] ** 0.25, self.matchability(x)[..., 0]


@dataclass
class Side:
    """The points of one image of every pair still running: ``x [a, n, width]``, their rotations, which exist, which
    they were."""

    x: Tensor
    turn: Tensor
    mask: Tensor | None
    index: Tensor

    def rows(self, which: Tensor) -> Side:
        """Only the pairs ``which [a]`` (boolean)."""
        mask = None if self.mask is None else self.mask[which]
        return Side(self.x[which], self.turn[which], mask, self.index[which])

    def count(self) -> Tensor:
        """How many points exist, ``[a]``."""
        full = torch.full((len(self.x),), self.x.shape[1], device=self.x.device)
        return full if self.mask is None else self.mask.sum(1)

    def padded(self, length: int) -> Side:
        """The point axis made ``length`` long (masked); itself when it already is."""
        more = length - self.x.shape[1]
        if more <= 0:
            return self
        mask = torch.ones_like(self.index, dtype=torch.bool) if self.mask is None else self.mask
        index = torch.arange(length, device=self.x.device).expand(len(self.x), length)
        return Side(
            F.pad(self.x, (0, 0, 0, more)), F.pad(self.turn, (0, 0, 0, 0, 0, more)), F.pad(mask, (0, more)), index
        )

    def keep(self, kept: Tensor, length: int) -> Side:
        """Only the points ``kept [a, n]``, moved to the front in their order, on an axis of ``length``."""
        order = torch.argsort(~kept, dim=1, stable=True)[:, :length]
        mask = torch.arange(length, device=kept.device) < kept.sum(1, keepdim=True)
        row = torch.arange(len(order), device=kept.device)[:, None]
        return Side(
            self.x[row, order], self.turn[row, order], None if bool(mask.all()) else mask, self.index[row, order]
        )


class LightGlue(nn.Module):
    """Matches two sets of local features. ``LightGlue(spec)`` has fresh weights; :func:`vispe.load` brings trained
    ones."""

    def __init__(self, spec: LightGlueSpec) -> None:
        super().__init__()
        self.spec = spec
        width, heads, depth = spec.width, spec.num_heads, spec.depth
        self.input_proj = nn.Identity() if spec.input_dim == width else nn.Linear(spec.input_dim, width)
        dims = 4 if spec.scale_and_orientation else 2
        self.basis = LearnedBasis(dims, width // heads)
        if spec.position != "rotary":
            fixed = _axial(*self.basis.weight.shape) if spec.position == "axial" else 0.0 * self.basis.weight.detach()
            self.basis.weight = nn.Parameter(fixed, requires_grad=False)  # of zeros: turned by nothing
        self.place = _place(dims, width) if spec.position == "absolute" else None
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.heads = nn.ModuleList(MatchHead(width) for _ in range(depth))
        self.confidence = nn.ModuleList(nn.Linear(width, 1) for _ in range(depth - 1))
        self._buckets: tuple[int, ...] = ()
        self._run: Callable[..., tuple[Tensor, Tensor]] = Layer.__call__

    # ------------------------------------------------------------------------------------------------- the public calls

    def forward(
        self,
        keypoints0: Tensor,
        descriptors0: Tensor,
        size0: Tensor | tuple[float, float],
        keypoints1: Tensor,
        descriptors1: Tensor,
        size1: Tensor | tuple[float, float],
        mask0: Tensor | None = None,
        mask1: Tensor | None = None,
        *,
        scales0: Tensor | None = None,
        orientations0: Tensor | None = None,
        scales1: Tensor | None = None,
        orientations1: Tensor | None = None,
    ) -> MatchOutput:
        """Match ``b`` pairs; the arguments are the fields of :class:`Points` for image 0 and image 1.

        A pair with fewer than two keypoints in either image has no matches: its double softmax would have nothing to
        choose from. ``ValueError`` for wrong shapes and for keypoints far outside their image.
        """
        return self.match(
            Points(keypoints0, descriptors0, size0, mask0, scales0, orientations0),
            Points(keypoints1, descriptors1, size1, mask1, scales1, orientations1),
        )

    def match(self, points0: Points, points1: Points) -> MatchOutput:
        """As :meth:`forward`, the two images as :class:`Points`."""
        s0, s1 = self._sides(points0, points1)
        m, n = s0.x.shape[1], s1.x.shape[1]
        if m and n and len(s0.x):
            count0, count1 = s0.count(), s1.count()
            length = self._room(max(m, n)) if self._buckets else 0
            s0, s1 = s0.padded(length), s1.padded(length)
        out = _no_matches(s0, s1, self.spec)
        if m and n and len(s0.x):
            self._match(s0, s1, out, count0 + count1)
            hollow = ((count0 < 2) | (count1 < 2))[:, None]
            out.matches0.masked_fill_(hollow, -1), out.matches1.masked_fill_(hollow, -1)
            out.scores0.masked_fill_(hollow, 0), out.scores1.masked_fill_(hollow, 0)
        a0, a1, p0, p1, stop, l0, l1 = out
        return MatchOutput(a0[:, :m], a1[:, :n], p0[:, :m], p1[:, :n], stop, l0[:, :m], l1[:, :n])

    def log_assignment(self, points0: Points, points1: Points) -> Tensor:
        """The log-assignment ``[b, m + 1, n + 1]`` after all layers, dustbins last; differentiable, whole in memory."""
        s0, s1 = self._sides(points0, points1)
        for layer in self.layers:
            s0.x, s1.x = layer(s0.x, s1.x, s0.turn, s1.turn, s0.mask, s1.mask)
        (m0, z0), (m1, z1) = self.heads[-1](s0.x), self.heads[-1](s1.x)
        return log_assignment(m0, m1, z0, z1, s0.mask, s1.mask)

    def every_layer(
        self, points0: Points, points1: Points, *, checkpoint: bool = False
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """For training: each layer's log-assignment ``[b, m + 1, n + 1]``, and of every layer but the last the logits
        of both images' confidences, ``[b, m]`` and ``[b, n]``, which do not teach the states they are made of.

        ``checkpoint``: keep no activations of the layers, compute them again on the way back.
        """
        s0, s1 = self._sides(points0, points1)
        scores, confidence = [], []
        for i, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            parts = (s0.x, s1.x, s0.turn, s1.turn, s0.mask, s1.mask)
            s0.x, s1.x = recomputed(layer, *parts, use_reentrant=False) if checkpoint else layer(*parts)
            (m0, z0), (m1, z1) = head(s0.x), head(s1.x)
            scores.append(log_assignment(m0, m1, z0, z1, s0.mask, s1.mask))
            if i < self.spec.depth - 1:
                sure0, sure1 = (at_least_float32(self.confidence[i](s.x.detach())[..., 0]) for s in (s0, s1))
                confidence.append((sure0, sure1))
        return scores, confidence

    def compile_layers(self, buckets: tuple[int, ...] = BUCKETS, mode: str = "default") -> LightGlue:
        """Compile the layers, once per bucket: keypoint counts are padded (masked) to the next bucket, so that a new
        image or a new keypoint count compiles nothing. Beyond the last bucket the length is a multiple of it. Returns
        self."""
        if not buckets or sorted(set(buckets)) != list(buckets) or buckets[0] < 1:
            raise ValueError(f"buckets must be increasing positive lengths, got {buckets}")
        self._buckets = tuple(buckets)
        self._run = torch.compile(
            Layer.forward, mode=mode, dynamic=False
        )  # the layer is an argument: nine share a graph
        return self

    # --------------------------------------------------------------------------------------------------- getting ready

    def _sides(self, points0: Points, points1: Points) -> tuple[Side, Side]:
        if points0.keypoints.shape[0] != points1.keypoints.shape[0]:
            raise ValueError(
                f"image 0 has {points0.keypoints.shape[0]} pairs, image 1 has {points1.keypoints.shape[0]}"
            )
        return self._side(points0, "0"), self._side(points1, "1")

    def _side(self, points: Points, which: str) -> Side:
        points = self._checked(points, which)
        keypoints, size = points.keypoints, points.size
        assert isinstance(size, Tensor)
        positions = keypoints if self.spec.coordinates == "pixels" else normalize_keypoints(keypoints, size)
        if points.scales is not None and points.orientations is not None:
            positions = torch.cat((positions, points.scales[..., None], points.orientations[..., None]), -1)
        x = self.input_proj(points.descriptors.to(self.basis.weight.dtype))
        if self.place is not None:
            x = x + self.place(positions.to(self.basis.weight.dtype))
        index = torch.arange(keypoints.shape[1], device=x.device).expand(keypoints.shape[:2])
        turn = self.basis(positions).to(at_least_float32(x).dtype)
        return Side(x, turn, points.mask, index)

    def _checked(self, points: Points, which: str) -> Points:
        """Shapes and ranges, one sentence for each mistake; the size comes back as ``[b, 2]``."""
        keypoints, descriptors, size, mask, scales, orientations = points
        _require(f"keypoints{which}", keypoints, ("b", "n", 2))
        b, n = keypoints.shape[:2]
        _require(f"descriptors{which}", descriptors, (b, n, self.spec.input_dim))
        if mask is not None:
            _require(f"mask{which}", mask, (b, n))
            if mask.dtype != torch.bool:
                raise ValueError(f"mask{which} must be boolean (true where a keypoint exists), got {mask.dtype}")
        for name, extra in ((f"scales{which}", scales), (f"orientations{which}", orientations)):
            if (extra is not None) != self.spec.scale_and_orientation:
                need = "need" if self.spec.scale_and_orientation else "were trained without"
                raise ValueError(f"these weights {need} {name}")
            if extra is not None:
                _require(name, extra, (b, n))
        size = torch.as_tensor(size, dtype=torch.float32, device=keypoints.device)
        if size.shape not in ((2,), (b, 2)):
            raise ValueError(f"size{which} must be (h, w) or [{b}, 2], got shape {list(size.shape)}")
        size = size.expand(b, 2)
        if not torch.compiler.is_compiling() and b:
            if not bool((size > 0).all()):
                raise ValueError(f"size{which} must be a positive (h, w), got {size.tolist()}")
            check_inside(keypoints, size, mask, f"keypoints{which}")
        return points._replace(size=size)

    def _room(self, n: int) -> int:
        """The bucket that ``n`` points fit."""
        top = self._buckets[-1]
        return next((bucket for bucket in self._buckets if n <= bucket), math.ceil(n / top) * top)

    # ------------------------------------------------------------------------------------------------------ the layers

    def _match(self, s0: Side, s1: Side, out: MatchOutput, total: Tensor) -> None:
        """Run the layers and write each pair's matches when it stops; ``total [b]`` counts the points a pair began
        with."""
        spec = self.spec
        adaptive = spec.depth_confidence is not None or spec.width_confidence is not None
        rows = torch.arange(len(s0.x), device=s0.x.device)
        for i, layer in enumerate(self.layers):
            s0.x, s1.x = self._layer(layer, s0, s1, len(total))
            if i == spec.depth - 1:
                self._write(i, s0, s1, rows, out)
            elif adaptive:
                stops = self._stops(i, s0, s1, total[rows])
                self._write(i, s0.rows(stops), s1.rows(stops), rows[stops], out)
                s0, s1, rows = s0.rows(~stops), s1.rows(~stops), rows[~stops]
                if len(rows):
                    s0, s1 = self._prune(i, s0, s1, rows, out)
                    bare = (s0.count() == 0) | (s1.count() == 0)
                    out.stop[rows[bare]] = i + 2  # pruned to nothing: the official loop notices at its next layer
                    s0, s1, rows = s0.rows(~bare), s1.rows(~bare), rows[~bare]
                if not len(rows):
                    break

    def _layer(self, layer: nn.Module, s0: Side, s1: Side, batch: int) -> tuple[Tensor, Tensor]:
        """One layer. Compiled, the batch keeps the size it began with, so that a pair that stops compiles nothing."""
        if not self._buckets:
            return self._run(layer, s0.x, s1.x, s0.turn, s1.turn, s0.mask, s1.mask)
        masks = (torch.ones_like(s.index, dtype=torch.bool) if s.mask is None else s.mask for s in (s0, s1))
        parts = (s0.x, s1.x, s0.turn, s1.turn, *masks)
        x0, x1 = self._run(layer, *(torch.cat((t, t.new_zeros(batch - len(t), *t.shape[1:]))) for t in parts))
        return x0[: len(s0.x)], x1[: len(s1.x)]

    def _stops(self, i: int, s0: Side, s1: Side, total: Tensor) -> Tensor:
        """Which pairs are done after layer i: few of the points they began with are still unsure (section 3.3)."""
        if self.spec.depth_confidence is None:
            return torch.zeros_like(total, dtype=torch.bool)
        bar = _certainty(i, self.spec.depth)
        unsure0, unsure1 = (_existing(self._sure(i, side) < bar, side.mask).sum(1) for side in (s0, s1))
        return 1.0 - (unsure0 + unsure1).float() / total > self.spec.depth_confidence

    def _sure(self, i: int, side: Side) -> Tensor:
        """How confident each point is that its match, or that it has none, will not change: ``[a, n]``, taught
        apart."""
        return torch.sigmoid(self.confidence[i](side.x.detach())[..., 0])

    def _prune(self, i: int, s0: Side, s1: Side, rows: Tensor, out: MatchOutput) -> tuple[Side, Side]:
        """Without the points that are surely unmatchable; those that are unsure stay (section 3.3)."""
        if self.spec.width_confidence is None:
            return s0, s1
        kept0, kept1 = (self._kept(i, side, 1 - self.spec.width_confidence) for side in (s0, s1))
        most0, most1 = int(kept0.sum(1).max()), int(kept1.sum(1).max())
        if self._buckets:
            most0 = most1 = self._room(max(most0, most1))
        for side, kept, layers in ((s0, kept0, out.layers0), (s1, kept1, out.layers1)):
            r, p = kept.nonzero(as_tuple=True)
            layers[rows[r], side.index[r, p]] += 1
        return s0.keep(kept0, most0), s1.keep(kept1, most1)

    def _kept(self, i: int, side: Side, matchable: float) -> Tensor:
        kept = torch.sigmoid(self.heads[i].get_submodule("matchability")(side.x)[..., 0]) > matchable
        if self.spec.depth_confidence is not None:
            kept |= self._sure(i, side) <= _certainty(i, self.spec.depth)
        kept |= side.count()[:, None] <= self.spec.prune_above
        return _existing(kept, side.mask)

    def _write(self, i: int, s0: Side, s1: Side, rows: Tensor, out: MatchOutput) -> None:
        """Assign the pairs ``rows`` from the points they have left, in the numbering they came with."""
        if not len(rows):
            return
        (m0, z0), (m1, z1) = self.heads[i](s0.x), self.heads[i](s1.x)
        a0, a1, p0, p1 = assign(m0, m1, z0, z1, s0.mask, s1.mask, self.spec.threshold, self.spec.score_budget)
        row = rows[:, None]
        out.matches0[row, s0.index] = torch.where(a0 < 0, -1, s1.index.gather(1, a0.clamp(min=0)))
        out.matches1[row, s1.index] = torch.where(a1 < 0, -1, s0.index.gather(1, a1.clamp(min=0)))
        out.scores0[row, s0.index], out.scores1[row, s1.index] = p0, p1
        out.stop[rows] = i + 1


def _axial(pairs: int, dims: int) -> Tensor:
    """Frequencies from pi / 2 up in octaves, half of the pairs for x and half for y; other coordinates turn nothing."""
    weight = torch.zeros(pairs, dims)
    for axis, rows in enumerate(torch.arange(pairs).chunk(2)):
        weight[rows, axis] = math.pi / 2 * 2.0 ** torch.linspace(0, 5, len(rows))
    return weight


def _place(dims: int, width: int) -> nn.Sequential:
    """SuperGlue's encoder of keypoints, an MLP that grows to ``width`` (Sarlin et al. 2020, appendix), with layer norms
    in the place of batch norms, which padding would disturb."""
    sizes, parts = (dims, 32, 64, 128), []
    for small, large in itertools.pairwise(sizes):
        parts += [nn.Linear(small, large), nn.LayerNorm(large), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(sizes[-1], width))


def _certainty(i: int, depth: int) -> float:
    """``tau_i = 0.8 + 0.1 exp(-4 i / depth)``: what counts as confident after layer i (section 3.3)."""
    return min(max(0.8 + 0.1 * math.exp(-4.0 * i / depth), 0.0), 1.0)


def _existing(flags: Tensor, mask: Tensor | None) -> Tensor:
    return flags if mask is None else flags & mask


def _no_matches(s0: Side, s1: Side, spec: LightGlueSpec) -> MatchOutput:
    b, device = len(s0.x), s0.x.device
    lengths = s0.x.shape[1], s1.x.shape[1]
    # With pruning a point's layers are counted as it survives them, as the official `prune` field does.
    start = spec.depth if spec.width_confidence is None else 1
    matches0, matches1 = (torch.full((b, n), -1, device=device) for n in lengths)
    scores0, scores1 = (torch.zeros((b, n), device=device) for n in lengths)
    layers0, layers1 = (torch.full((b, n), start, device=device) for n in lengths)
    return MatchOutput(
        matches0, matches1, scores0, scores1, torch.zeros(b, dtype=torch.long, device=device), layers0, layers1
    )


def _require(name: str, value: Tensor, shape: tuple[int | str, ...]) -> None:
    actual = tuple(value.shape)
    if len(actual) != len(shape) or any(isinstance(s, int) and a != s for a, s in zip(actual, shape, strict=True)):
        raise ValueError(f"{name} must have shape [{', '.join(map(str, shape))}], got {list(actual)}")


MODEL = LightGlue
VARIANTS = {
    "lightglue_aliked": LightGlueSpec(),
    "lightglue_disk": LightGlueSpec(),
    "lightglue_superpoint": LightGlueSpec(input_dim=256),
    "lightglue_sift": LightGlueSpec(scale_and_orientation=True),
    "lightglue_doghardnet": LightGlueSpec(scale_and_orientation=True),
    "lightglue_sift_small": LightGlueSpec(scale_and_orientation=True, width=96, depth=3, num_heads=1),
    "lightglue_aliked_t16_small": LightGlueSpec(input_dim=64, width=96, depth=3, num_heads=1),
    "lightglue": LightGlueSpec(),
}
