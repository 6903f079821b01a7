"""Mask2Former: a picture is a set of masks, each with a class, and a query looks only where its own mask is (Cheng et
al. 2022, 2112.01527).

What is different here: one network for semantic, instance and panoptic segmentation, told apart only by what is read
from it. Where is this pixel? In DETR's sines of its row and column (``sine_detr``: y first, counted from 1), made
at each of three scales and used twice. The pixel decoder's deformable attention adds them, **with a level
embedding**, where it chooses what to look at; the transformer decoder adds them to the keys of its cross-attention and
its own level embedding **to the features**. Queries have a learned content and a learned position.

Each decoder layer sees one scale, 1/32, 1/16, 1/8 in turn, and attends only where the previous layer's mask is at least
one half; a query whose mask is empty attends everywhere. Backbones are timm's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vispe.layers.deformable import DeformableAttention
from vispe.layers.padding import rectangles, together
from vispe.layers.timm_features import backbone
from vispe.position.grid import Grid, at_least_float32, check_grid
from vispe.position.learned import ContentQueries, LevelEmbedding, RowColumnTable
from vispe.position.none import no_addition
from vispe.position.sine import sine_deformable, sine_detr
from vispe.spec import Spec

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STRIDES = (4, 8, 16, 32)
SCALES = 3  # of the four, those that attention sees
GROUPS = 32  # of every group norm
SINES: dict[str, Callable[..., Tensor]] = {"sine": sine_detr, "sine_deformable": sine_deformable}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask2FormerSpec(Spec):
    """Every knob of a Mask2Former; the defaults are the published Swin-T model of COCO panoptic.

    ``backbone``: a Swin or any network of timm's with maps at 1/4 to 1/32; ``backbone_knobs``: what its constructor
    takes; ``norm``: batch norms of a convolutional backbone kept as they are (``"frozen"``, as published) or trained.
    ``position``: the places of tokens: ``"sine"`` (``sine_detr``); ``"sine_deformable"``, counted to cell centres;
    ``"learned"``, rows and columns, a table a scale of ``table`` (h, w) cells at 1/32, twice that at 1/16, four times
    at 1/8; ``"none"``. Level embeddings and query positions stay. ``layers`` of the transformer decoder, ``hidden`` its
    MLP's width; ``encoder_layers`` and ``encoder_hidden`` the pixel decoder's; ``points`` a head looks at per scale.
    ``drop_path``: a Swin's last block's rate. ``mean`` and ``std`` of RGB in [0, 1], as the weights expect.
    """

    backbone: str = "swin_tiny_patch4_window7_224"
    backbone_knobs: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    norm: Literal["frozen", "batch"] = "frozen"
    drop_path: float = 0.3
    num_classes: int = 133
    queries: int = 100
    width: int = 256
    mask_width: int = 256
    heads: int = 8
    layers: int = 9
    hidden: int = 2048
    encoder_layers: int = 6
    encoder_hidden: int = 1024
    points: int = 4
    position: Literal["sine", "sine_deformable", "learned", "none"] = "sine"
    table: Grid = (50, 50)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        h, w = self.table
        object.__setattr__(self, "table", check_grid((h, w), "table"))
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("num_classes", "queries", "mask_width", "heads", "layers", "hidden", "encoder_hidden", "points"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.encoder_layers < 0:
            raise ValueError(f"encoder_layers must not be negative, got {self.encoder_layers}")
        if self.width < 1 or self.width % GROUPS or self.width % self.heads:
            raise ValueError(f"width must be a multiple of {GROUPS} and of the {self.heads} heads, got {self.width}")
        if self.position not in (*SINES, "learned", "none"):
            raise ValueError(f"position is {', '.join(SINES)}, learned or none, got {self.position!r}")
        if self.norm not in ("frozen", "batch"):
            raise ValueError(f"norm is frozen or batch, got {self.norm!r}")


class Segments(NamedTuple):
    """``logits [b, q, classes + 1]``, the last for no object; ``masks [b, q, h/4, w/4]`` as logits, sides rounded up;
    ``aux``: in training the same from the queries at the start and after every layer but the last."""

    logits: Tensor
    masks: Tensor
    aux: tuple[Segments, ...] = ()


class Places(nn.Module):
    """The position encoding: ``forward(grids)`` -> one ``[h * w, width]`` a scale, float32, row-major."""

    def __init__(self, spec: Mask2FormerSpec) -> None:
        super().__init__()
        self.kind, self.width = spec.position, spec.width
        h, w = spec.table
        limits = [(h * 2**i, w * 2**i) for i in range(SCALES)] if self.kind == "learned" else []
        self.tables = nn.ModuleList(RowColumnTable(spec.width, limit) for limit in limits)

    def forward(self, grids: Sequence[Grid], device: torch.device | None = None) -> list[Float[Tensor, "n width"]]:
        if self.kind == "learned":
            return [at_least_float32(table(grid)) for table, grid in zip(self.tables, grids, strict=True)]
        if self.kind == "none":
            return [no_addition(h * w, self.width, device) for h, w in grids]
        return [SINES[self.kind](grid, self.width, device=device) for grid in grids]


class EncoderLayer(nn.Module):
    """Deformable attention, then an MLP with ReLU; a norm after each, as Deformable DETR."""

    def __init__(self, spec: Mask2FormerSpec) -> None:
        super().__init__()
        width = spec.width
        self.fc1, self.fc2 = nn.Linear(width, spec.encoder_hidden), nn.Linear(spec.encoder_hidden, width)
        self.apply(_xavier)
        self.attention = DeformableAttention(width, spec.heads, SCALES, spec.points)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Float[Tensor, "b n width"], grids: Sequence[Grid], positions: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, grids, positions))
        return self.norm2(x + self.fc2(F.relu(self.fc1(x))))


class PixelDecoder(nn.Module):
    """Four maps of a backbone -> the three coarse ones after looking at one another, coarse to fine, and a map of mask
    features at 1/4."""

    def __init__(self, spec: Mask2FormerSpec, channels: Sequence[int]) -> None:
        super().__init__()
        width = spec.width
        self.input = nn.ModuleList(_conv_norm(c, width) for c in reversed(channels[1:]))
        self.level_embed = LevelEmbedding(SCALES, width)
        self.layers = nn.ModuleList(EncoderLayer(spec) for _ in range(spec.encoder_layers))
        self.lateral = _conv_norm(channels[0], width, bias=False)
        self.output = _conv_norm(width, width, kernel=3, bias=False)
        self.mask_features = nn.Conv2d(width, spec.mask_width, 1)
        nn.init.kaiming_uniform_(self.mask_features.weight, a=1)  # detectron2's c2_xavier_fill
        assert self.mask_features.bias is not None
        nn.init.zeros_(self.mask_features.bias)

    def forward(
        self, maps: Sequence[Tensor], places: Sequence[Tensor]
    ) -> tuple[list[Float[Tensor, "b n width"]], Float[Tensor, "b c y x"]]:
        coarse = list(reversed(maps[1:]))
        grids = [(m.shape[2], m.shape[3]) for m in coarse]
        x = torch.cat([layer(m).flatten(2).mT for layer, m in zip(self.input, coarse, strict=True)], 1)
        positions = torch.cat(self.level_embed(places))  # the level is part of the place here
        for layer in self.layers:
            x = layer(x, grids, positions)
        levels = list(x.split([h * w for h, w in grids], 1))
        fine = levels[-1].mT.unflatten(2, grids[-1])
        fine = F.interpolate(fine, size=maps[0].shape[-2:], mode="bilinear", align_corners=False)
        return levels, self.mask_features(F.relu(self.output(self.lateral(maps[0]) + fine)))


class Attention(nn.Module):
    """Softmax attention of queries over keys; rows of ``qkv`` are ordered (q, k, v), each (heads, head_dim)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.apply(_xavier)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Bool[Tensor, "b 1 q n"] | None = None
    ) -> Float[Tensor, "b q width"]:
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, w, b in zip((q, k, v), weights, biases, strict=True)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Masked cross-attention, self-attention, MLP with ReLU, in this order; a norm after each."""

    def __init__(self, spec: Mask2FormerSpec) -> None:
        super().__init__()
        width = spec.width
        self.cross, self.own = Attention(width, spec.heads), Attention(width, spec.heads)
        self.fc1, self.fc2 = nn.Linear(width, spec.hidden), nn.Linear(spec.hidden, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, place: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        x = self.norm1(x + self.cross(x + place, keys, values, visible))
        placed = x + place
        x = self.norm2(x + self.own(placed, placed, x))
        return self.norm3(x + self.fc2(F.relu(self.fc1(x))))


class MaskedDecoder(nn.Module):
    """Queries that read one scale after the other, each only inside its own mask; a class and a mask after each."""

    def __init__(self, spec: Mask2FormerSpec) -> None:
        super().__init__()
        width = spec.width
        self.queries = ContentQueries(spec.queries, width)
        self.level_embed = LevelEmbedding(SCALES, width)
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(width)
        self.class_head = nn.Linear(width, spec.num_classes + 1)
        self.mask_head = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, spec.mask_width)
        )

    def forward(
        self, levels: Sequence[Tensor], grids: Sequence[Grid], places: Sequence[Tensor], features: Tensor
    ) -> Segments:
        values = self.level_embed(levels)  # here the level is part of the features
        keys = [value + place.to(value.dtype) for value, place in zip(values, places, strict=True)]
        with torch.no_grad():  # a mask at a coarse scale is what coarse features give: interpolation is linear
            coarse = [F.interpolate(features, size=g, mode="bilinear", align_corners=False).flatten(2) for g in grids]
        x, place = self.queries(len(features))
        made: list[Segments] = []
        for i, layer in enumerate(self.layers):
            seen = self.norm(x)
            kernel = self.mask_head(seen)
            if self.training:
                made.append(self._segments(seen, kernel, features))
            x = layer(x, place, keys[i % SCALES], values[i % SCALES], looked_at(kernel, coarse[i % SCALES]))
        seen = self.norm(x)
        return self._segments(seen, self.mask_head(seen), features)._replace(aux=tuple(made))

    def _segments(self, seen: Tensor, kernel: Tensor, features: Tensor) -> Segments:
        return Segments(self.class_head(seen), (kernel @ features.flatten(2)).unflatten(2, features.shape[-2:]))


def looked_at(kernel: Float[Tensor, "b q c"], features: Float[Tensor, "b c n"]) -> Bool[Tensor, "b 1 q n"]:
    """Where a query's mask is at least one half; a query without such a place looks everywhere."""
    with torch.no_grad():
        inside = kernel @ features >= 0
        return (inside | ~inside.any(-1, keepdim=True))[:, None]


class Mask2Former(nn.Module):
    """``images [b, 3, h, w]``, normalised by the spec's mean and std, of any size -> :class:`Segments`.

    ``mask [b, h, w]`` is true on real pixels, which lie in the upper left corner: each image is then computed without
    its padding, those of one size together, and the masks' last row and column are repeated beyond. Without a mask the
    padding is part of the picture, as in the official code, whose forward knows none.
    """

    def __init__(self, spec: Mask2FormerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.report: list[str] = []  # what a loader had to change
        self.backbone = backbone(spec.backbone, spec.backbone_knobs, spec.norm, spec.drop_path)
        if tuple(self.backbone.strides) != STRIDES:
            raise ValueError(f"{spec.backbone} has maps at {self.backbone.strides}, not at 1/4, 1/8, 1/16 and 1/32")
        self.position = Places(spec)
        self.pixel_decoder = PixelDecoder(spec, self.backbone.channels)
        self.decoder = MaskedDecoder(spec)

    def forward(self, images: Float[Tensor, "b 3 h w"], mask: Bool[Tensor, "b h w"] | None = None) -> Segments:
        if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[-2:]) < 1:
            raise ValueError(f"images are [b, 3, h, w], got {list(images.shape)}")
        groups = {} if mask is None else together(rectangles(mask, images))
        if groups.keys() <= {(images.shape[-2], images.shape[-1])}:
            return self._whole(images)
        whole = [-(-side // STRIDES[0]) for side in images.shape[-2:]]
        made = [self._whole(images[rows, :, :h, :w]) for (h, w), rows in groups.items()]
        order = torch.tensor([i for rows in groups.values() for i in rows], device=images.device).argsort()
        return _joined([_widened(each, whole) for each in made], order)

    def _whole(self, images: Float[Tensor, "b 3 h w"]) -> Segments:
        maps = self.backbone(images)
        grids = [(m.shape[2], m.shape[3]) for m in reversed(maps[1:])]
        places = self.position(grids, images.device)
        levels, features = self.pixel_decoder(maps, places)
        return self.decoder(levels, grids, places, features)

    def adapt(self, state: Mapping[str, Tensor], source: Mask2FormerSpec) -> dict[str, Tensor]:
        """A checkpoint for other classes or another position: its class head, or learned tables it lacks or has too
        many, are fresh or dropped, and :attr:`report` says so. What else does not fit is for the strict reader."""
        state, self.report, own = dict(state), [], self.state_dict()
        for key in ("decoder.class_head.weight", "decoder.class_head.bias"):
            if key in state and len(state[key]) != self.spec.num_classes + 1:
                self.report.append(f"{key}: fresh {list(own[key].shape)}, the checkpoint's {list(state[key].shape)}")
                state[key] = own[key]
        if self.spec.position != source.position:
            for key in [key for key in state if key.startswith("position.") and key not in own]:
                del state[key]
                self.report.append(f"{key}: dropped, position is {self.spec.position!r}")
            for key in [key for key in own if key.startswith("position.") and key not in state]:
                state[key] = own[key]
                self.report.append(f"{key}: fresh {list(own[key].shape)}, there was none")
        return state


def _widened(output: Segments, size: Sequence[int]) -> Segments:
    h, w = output.masks.shape[-2:]
    masks = F.pad(output.masks, (0, size[1] - w, 0, size[0] - h), mode="replicate")
    return Segments(output.logits, masks, tuple(_widened(each, size) for each in output.aux))


def _joined(outputs: Sequence[Segments], order: Tensor) -> Segments:
    logits, masks = (torch.cat(parts)[order] for parts in zip(*((o.logits, o.masks) for o in outputs), strict=True))
    return Segments(logits, masks, tuple(_joined(each, order) for each in zip(*(o.aux for o in outputs), strict=True)))


def _conv_norm(channels: int, width: int, kernel: int = 1, bias: bool = True) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=bias)
    nn.init.xavier_uniform_(conv.weight) if bias else nn.init.kaiming_uniform_(conv.weight, a=1)  # as the original
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return nn.Sequential(conv, nn.GroupNorm(GROUPS, width))


def _xavier(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


# What is read from the output: class scores of every pixel, masks of objects, or both without overlap


class Instances(NamedTuple):
    """``labels [k]``, ``scores [k]``, highest first, and ``masks [k, h, w]`` bool, which may overlap."""

    labels: Tensor
    scores: Tensor
    masks: Tensor


class Segment(NamedTuple):
    """One segment of a panoptic map: its number there, its class, whether that is a thing, and the class score."""

    id: int
    label: int
    thing: bool
    score: float


class Panoptic(NamedTuple):
    """``ids [h, w]`` int32, 0 where nothing was found, and its segments, numbered from 1."""

    ids: Tensor
    segments: list[Segment]


def semantic(output: Segments, sizes: Sequence[Grid], real: Sequence[Grid] | None = None) -> list[Int[Tensor, "h w"]]:
    """The class of every pixel at each of ``sizes`` (h, w): ``argmax of sum over queries of class x mask probability``.

    The sum is taken at the network's input size and resized bilinearly. ``real``: the (h, w) of each image in a padded
    batch, before the network; what lies beyond is cut off.
    """
    found = []
    for logits, masks, size in _each(output, sizes, real):
        scores = torch.einsum("qc,qhw->chw", logits.softmax(-1)[:, :-1], masks.sigmoid())
        found.append(_resized(scores, size).argmax(0))
    return found


def instances(
    output: Segments,
    sizes: Sequence[Grid],
    top: int = 100,
    thing_ids: Collection[int] | None = None,
    real: Sequence[Grid] | None = None,
) -> list[Instances]:
    """The ``top`` pairs of query and class; a score is the class's times the mean mask probability inside the mask.

    ``thing_ids``: of a panoptic model, the classes that are things; others are left out after the choice, as in the
    original. ``real`` as in :func:`semantic`.
    """
    found = []
    for logits, masks, size in _each(output, sizes, real):
        scores = logits.softmax(-1)[:, :-1]
        best, index = scores.flatten().topk(min(top, scores.numel()))
        labels = index % scores.shape[1]
        if thing_ids is not None:
            kept = torch.isin(labels, torch.tensor(sorted(thing_ids), device=labels.device))
            best, index, labels = best[kept], index[kept], labels[kept]
        chosen, where = (index // scores.shape[1]).unique(return_inverse=True)
        own = _resized(masks[chosen], size)
        inside = own > 0
        mean = (own.sigmoid() * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
        total, order = (best * mean[where]).sort(descending=True, stable=True)
        found.append(Instances(labels[order], total, inside[where[order]]))
    return found


def panoptic(
    output: Segments,
    sizes: Sequence[Grid],
    thing_ids: Collection[int],
    threshold: float = 0.8,
    overlap: float = 0.8,
    real: Sequence[Grid] | None = None,
) -> list[Panoptic]:
    """Every pixel to the query with the largest ``class score x mask probability``, as the official code.

    Queries whose best class is none, or scores at most ``threshold``, are left out; so are masks of which less than
    ``overlap`` is left to them. A pixel whose winner's mask is below one half belongs to nothing. Classes that are no
    things, ``thing_ids``, are one segment each. ``real`` as in :func:`semantic`.
    """
    found = []
    for logits, masks, size in _each(output, sizes, real):
        scores, labels = logits.softmax(-1).max(-1)
        kept = (labels != logits.shape[-1] - 1) & (scores > threshold)
        found.append(_panoptic(scores[kept], labels[kept], _resized(masks[kept], size).sigmoid(), thing_ids, overlap))
    return found


def _panoptic(
    scores: Tensor, labels: Tensor, masks: Float[Tensor, "k h w"], things: Collection[int], overlap: float
) -> Panoptic:
    ids = torch.zeros(masks.shape[1:], dtype=torch.int32, device=masks.device)
    if not len(masks):
        return Panoptic(ids, [])
    winner, whole = (scores[:, None, None] * masks).argmax(0), masks >= 0.5
    segments: list[Segment] = []
    stuff: dict[int, int] = {}
    for k, (label, score) in enumerate(zip(labels.tolist(), scores.tolist(), strict=True)):
        won = winner == k
        own = won & whole[k]
        if not bool(own.any()) or int(won.sum()) / int(whole[k].sum()) < overlap:
            continue
        if label in stuff:
            ids[own] = stuff[label]
            continue
        segments.append(Segment(len(segments) + 1, label, label in things, score))
        ids[own] = segments[-1].id
        if label not in things:
            stuff[label] = segments[-1].id
    return Panoptic(ids, segments)


def _each(
    output: Segments, sizes: Sequence[Grid], real: Sequence[Grid] | None
) -> list[tuple[Float[Tensor, "q c"], Float[Tensor, "q h w"], Grid]]:
    """Class logits, mask logits at the network's input size, and the size wanted, image by image; float32."""
    if len(sizes) != len(output.logits) or (real is not None and len(real) != len(sizes)):
        given = f"{len(sizes)} sizes" + ("" if real is None else f" and {len(real)} real ones")
        raise ValueError(f"a size for each of {len(output.logits)} images is needed, got {given}")
    h, w = (side * STRIDES[0] for side in output.masks.shape[-2:])
    each = []
    for i, size in enumerate(sizes):
        masks = _resized(output.masks[i].float(), (h, w))
        if real is not None:
            masks = masks[:, : real[i][0], : real[i][1]]
        each.append((output.logits[i].float(), masks, (int(size[0]), int(size[1]))))
    return each


def _resized(maps: Float[Tensor, "k h w"], size: Grid) -> Float[Tensor, "k y x"]:
    if tuple(maps.shape[1:]) == tuple(size):
        return maps
    if not len(maps):
        return maps.new_zeros(0, *size)
    return F.interpolate(maps[None], size=size, mode="bilinear", align_corners=False)[0]


MODEL = Mask2Former
VARIANTS = {
    "mask2former_swin_tiny": Mask2FormerSpec(),
    "mask2former_resnet50": Mask2FormerSpec(backbone="resnet50", drop_path=0.0),
}
