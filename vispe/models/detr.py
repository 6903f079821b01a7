"""DETR: a set of objects is read off an image by queries that are nothing but places (Carion et al. 2020).

What is different here: the encoder is told where each cell is in **every** layer, by adding fixed sines to queries and
keys and never to values; the decoder's keys get them too. A query starts as zero content and a learned vector, its own
place, added to queries (and to the keys of self-attention) in every layer. Which encoding, and whether it is given to
every layer or to the input alone, are ``position`` and ``position_at`` of the spec: the paper's ablation (table 3).

Images of several sizes are padded to a batch, ``mask`` says where they are. The sines are normalised by the image, not
by the batch, and ``padding="zeroed"`` keeps the padding out of the backbone: an image alone gives what it gives in a
batch, which was not so in the original (``vispe/layers/backbone.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vispe.layers.backbone import Backbone, Norm, Padding
from vispe.layers.decoder import DecoderLayer, EncoderLayer, Perceptron, visible, xavier
from vispe.position import sine
from vispe.position.grid import Grid, at_least_float32
from vispe.position.learned import ObjectQueries, RowColumnTable
from vispe.spec import Spec

Sines = dict[str, Callable[..., Tensor]]
MASKED: Sines = {"sine": sine.sine_detr, "sine_deformable": sine.sine_deformable}  # shares of the image, not the batch
COUNTED: Sines = {"sine_mae": sine.sine_mae, "sine_moco": sine.sine_moco, "sine_timm": sine.sine_timm}  # cells from 0
POSITIONS = (*MASKED, *COUNTED, "learned", "none")
INPUT_SCALE = 0.1  # of an encoding that the input alone gets, as in MDETR's code, which kept DETR's option for it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DETRSpec(Spec):
    """Every knob of a DETR.

    ``backbone``: a name of timm's, ``backbone_knobs``: what else its constructor takes; ``stride`` 16 dilates its last
    stage (DC5); ``norm``, ``frozen_stages``, ``padding`` as :class:`~vispe.layers.backbone.Backbone` has them: a
    network that starts untrained wants ``norm="batch"`` and ``frozen_stages`` 0. ``num_classes`` without "no object",
    which is one more logit, the last (COCO: 91, its largest id and one). ``hidden``: the MLPs' width. ``dropout``:
    behind each branch, in the MLPs and on attention's weights, as the original. ``auxiliary``: predictions of every
    decoder layer.

    ``position`` of the cells: "sine" (``sine_detr``), "sine_deformable", "sine_mae", "sine_moco", "sine_timm",
    "learned" (row and column tables of 50), "none". ``position_at``: "every_layer", or "input": a tenth of the cells'
    encoding is added to the encoder's input, the queries' places are the decoder's input, and attention is told
    nothing.
    """

    backbone: str = "resnet50"
    backbone_knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    stride: Literal[32, 16] = 32
    norm: Norm = "frozen"
    frozen_stages: int = 2
    padding: Padding = "zeroed"
    num_classes: int = 91
    num_queries: int = 100
    width: int = 256
    heads: int = 8
    hidden: int = 2048
    encoder_depth: int = 6
    decoder_depth: int = 6
    dropout: float = 0.1
    position: Literal["sine", "sine_deformable", "sine_mae", "sine_moco", "sine_timm", "learned", "none"] = "sine"
    position_at: Literal["every_layer", "input"] = "every_layer"
    auxiliary: bool = True
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, least in (("num_classes", 1), ("num_queries", 1), ("hidden", 1), ("decoder_depth", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if min(self.encoder_depth, self.frozen_stages) < 0:
            raise ValueError(f"counts must not be negative, got {self.encoder_depth=}, {self.frozen_stages=}")
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the width {self.width}")
        if self.width < 8 or self.width % 4:
            raise ValueError(f"the encodings of two axes need a width of at least 8 that 4 divides, got {self.width}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is in [0, 1), got {self.dropout}")
        allowed = {
            "stride": (32, 16),
            "norm": ("frozen", "batch"),
            "padding": ("zeroed", "original"),
            "position": POSITIONS,
            "position_at": ("every_layer", "input"),
        }
        for name, words in allowed.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name} must be one of {', '.join(map(str, words))}, got {getattr(self, name)!r}")


class DETROutput(NamedTuple):
    """``logits [b, q, classes + 1]``, "no object" last; ``boxes [b, q, 4]`` as (cx, cy, w, h), each a share of the
    image without its padding; ``aux``: the same of the earlier decoder layers, first to last."""

    logits: Float[Tensor, "b q classes"]
    boxes: Float[Tensor, "b q 4"]
    aux: tuple[DETROutput, ...] = ()


class Detected(NamedTuple):
    """Objects of one image, the surest first: ``scores [n]``, ``labels [n]``, ``boxes [n, 4]`` as (x0, y0, x1, y1) in
    pixels."""

    scores: Float[Tensor, " n"]
    labels: Int[Tensor, " n"]
    boxes: Float[Tensor, "n 4"]


class DETR(nn.Module):
    """``images [b, 3, h, w]``, normalised by the spec's mean and std -> :class:`DETROutput`. Any size."""

    positional = ()  # tables and queries are modules that say so themselves

    def __init__(self, spec: DETRSpec) -> None:
        super().__init__()
        self.spec, width = spec, spec.width
        self.report: list[str] = []  # what a loader had to change
        self.backbone = Backbone(
            spec.backbone, spec.stride, spec.norm, spec.frozen_stages, spec.padding, spec.backbone_knobs
        )
        self.project = nn.Conv2d(self.backbone.channels, width, 1)
        self.position = RowColumnTable(width) if spec.position == "learned" else None
        self.queries = ObjectQueries(spec.num_queries, width)
        sizes = (width, spec.heads, spec.hidden, spec.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(spec.encoder_depth))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(spec.decoder_depth))
        self.norm = nn.LayerNorm(width)
        self.class_head = nn.Linear(width, spec.num_classes + 1)
        self.box_head = Perceptron(width, width, width, 4)
        for part in (self.encoder, self.decoder):
            xavier(part)

    def forward(self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "b h w"] | None = None) -> DETROutput:
        """``mask`` is True where a batch holds image, None where all of it is. ``ValueError`` for another shape, and
        for a grid larger than a learned table."""
        _check(images, mask)
        features, real = self.backbone(images, mask)
        features = self.project(features)
        grid = (features.shape[-2], features.shape[-1])
        place = self.place(grid, real, images.device)
        return self.predict(self.decode(features.flatten(2).mT, place, real))

    def place(self, grid: Grid, real: Bool[Tensor, "b h w"] | None, device: torch.device) -> Tensor | None:
        """Where the cells are, ``[n, width]`` or, normalised by each image, ``[b, n, width]``; made in float32."""
        name, width = self.spec.position, self.spec.width
        if name == "none":
            return None
        if isinstance(self.position, RowColumnTable):
            self._check_limit(grid)
            made = self.position(grid)
        elif name in MASKED:
            made = MASKED[name](grid, width, real, device=device)
        else:
            made = COUNTED[name](grid, width, device=device)
        return made.to(self.project.weight.dtype)

    def decode(
        self, x: Float[Tensor, "b n width"], place: Tensor | None, real: Bool[Tensor, "b h w"] | None
    ) -> Float[Tensor, "layers b q width"]:
        """Cells, where they are, which of them are real -> the queries after each decoder layer that is asked for."""
        content, query = self.queries(len(x))
        if self.spec.position_at == "input":
            x = x if place is None else x + INPUT_SCALE * place
            content, query, place = query, None, None
        mask = None if real is None else visible(real.flatten(1))
        for encode in self.encoder:
            x = encode(x, place, mask)
        keys = x if place is None else x + place
        states = []
        for decode in self.decoder:
            content = decode(content, x, keys, query, mask)
            states.append(content)
        return self.norm(torch.stack(states if self.spec.auxiliary else states[-1:]))

    def predict(self, states: Float[Tensor, "layers b q width"]) -> DETROutput:
        """Both heads, in the weights' precision also under autocast: bfloat16 knows 256 places along a side."""
        with torch.autocast(states.device.type, enabled=False):
            states = states.to(self.class_head.weight.dtype)
            logits, boxes = self.class_head(states), at_least_float32(self.box_head(states)).sigmoid()
        *aux, last = (DETROutput(*each) for each in zip(logits.unbind(0), boxes.unbind(0), strict=True))
        return last._replace(aux=tuple(aux))

    def adapt(self, state: Mapping[str, Tensor], source: DETRSpec) -> dict[str, Tensor]:
        """A checkpoint for this model: a class head of other classes is left at its fresh start (:attr:`report`)."""
        state, self.report = dict(state), []
        for key, own in self.class_head.state_dict(prefix="class_head.").items():
            if key in state and state[key].shape != own.shape:
                given = list(state[key].shape)
                state[key] = own
                self.report.append(f"{key}: fresh {list(own.shape)}, the checkpoint's {given} is another head")
        return state

    def _check_limit(self, grid: Grid) -> None:
        assert isinstance(self.position, RowColumnTable)
        most, stride = self.position.limit, self.backbone.stride
        if grid[0] > most[0] or grid[1] > most[1]:
            raise ValueError(
                f"the image makes a grid of (h, w) = {tuple(grid)} cells, the learned tables know {most[0]} rows and "
                f"{most[1]} columns: at most {most[0] * stride} x {most[1] * stride} pixels at stride {stride}; the "
                "sines know any size (position='sine')"
            )


def detections(
    output: DETROutput, sizes: Int[Tensor, "b 2"] | Sequence[tuple[int, int]], threshold: float = 0.0
) -> list[Detected]:
    """Objects with a score above ``threshold``, in the pixels of images of ``sizes`` (h, w).

    A query's score is the softmax of its best class, "no object" taking part and never winning, as in the original; no
    box is suppressed or cut. ``ValueError`` for sizes that are not one (h, w) an image.
    """
    wanted = torch.as_tensor(sizes, device=output.boxes.device)
    if wanted.shape != (len(output.boxes), 2):
        raise ValueError(f"sizes is one (h, w) for each of {len(output.boxes)} images, got {list(wanted.shape)}")
    scores, labels = at_least_float32(output.logits).softmax(-1)[..., :-1].max(-1)
    centre, extent = output.boxes.split(2, -1)
    corners = torch.cat((centre - extent / 2, centre + extent / 2), -1)
    corners = corners * wanted.flip(-1).repeat(1, 2)[:, None].to(corners)
    found = []
    for score, label, box in zip(scores, labels, corners, strict=True):
        order = score.argsort(descending=True, stable=True)
        order = order[score[order] > threshold]
        found.append(Detected(score[order], label[order], box[order]))
    return found


def _check(images: Tensor, mask: Tensor | None) -> None:
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"DETR takes images [b, 3, h, w], got {list(images.shape)}")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask is boolean, True where there is image, got {mask.dtype}")
    if mask.shape != (images.shape[0], *images.shape[2:]):
        raise ValueError(f"the mask of images {list(images.shape)} is [b, h, w], got {list(mask.shape)}")


def _variants() -> dict[str, DETRSpec]:
    plain = {f"detr_{backbone}": DETRSpec(backbone=backbone) for backbone in ("resnet50", "resnet101")}
    return plain | {f"{name}_dc5": spec.but(stride=16) for name, spec in plain.items()}


MODEL = DETR
VARIANTS = _variants()
