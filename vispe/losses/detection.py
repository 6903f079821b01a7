"""The loss of a set of boxes: each object has one query that answers for it, all other queries answer "no object"
(Carion et al. 2020, 3.1).

A target is a mapping with ``labels [n]`` int64 and ``boxes [n, 4]`` as (cx, cy, w, h) in [0, 1], shares of the image
without padding; n = 0 is legal. An output has ``logits [b, q, classes + 1]`` ("no object" last), ``boxes [b, q, 4]``
and ``aux``, a tuple of the same for earlier layers: each is matched and weighed like the last. All in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vispe.losses.set_matching import COSTS, Costs, Matched, corners, giou, match
from vispe.position.grid import at_least_float32

Target = Mapping[str, Tensor]
SLACK = 1e-3  # of the image: how far beyond [0, 1] a number may be, for crops round


class Output(Protocol):
    """What the loss reads: DETR's ``DETROutput`` is one."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def boxes(self) -> Tensor: ...

    @property
    def aux(self) -> Sequence[Output]: ...


class Weights(NamedTuple):
    """How much each part counts; ``no_object`` is the weight of that class in the cross-entropy."""

    classes: float = 1.0
    boxes: float = 5.0
    giou: float = 2.0
    no_object: float = 0.1


WEIGHTS = Weights()  # the original's


class DetectionLoss(NamedTuple):
    """``total``, weighted and summed over the layers, is what to minimise; the parts are the last layer's, unweighted.

    ``cardinality`` is no loss: by how many the count of objects found is off, on average.
    """

    total: Tensor
    classes: Tensor
    boxes: Tensor
    giou: Tensor
    cardinality: Tensor


def detection_loss(
    output: Output,
    targets: Sequence[Target],
    *,
    weights: Weights = WEIGHTS,
    costs: Costs = COSTS,
    num_boxes: float | Tensor | None = None,
) -> DetectionLoss:
    """Matching, cross-entropy, L1 and ``1 - GIoU``, for the last layer and each of ``aux``.

    The parts of boxes are sums over pairs divided by ``num_boxes``: objects a process, at least 1; None:
    :func:`count_boxes` of these targets. Waits for the device twice: to look at the targets, and where the costs go to
    scipy. ``ValueError`` names a target that is not the output's, a label that is no class, a box without area or with
    numbers outside [0, 1].
    """
    layers = (*output.aux, output)
    logits = torch.stack([at_least_float32(each.logits) for each in layers])
    found = torch.stack([at_least_float32(each.boxes) for each in layers])
    labels, wanted = _checked(targets, logits)
    number = count_boxes(targets, logits.device) if num_boxes is None else num_boxes
    number = torch.as_tensor(number, dtype=logits.dtype, device=logits.device).clamp(min=1)
    pairs = match(logits, found, labels, wanted, costs)
    classes = _classes(logits, torch.cat(labels), pairs, weights.no_object)
    boxes, overlap = (each / number for each in _boxes(found, torch.cat(wanted).to(found), pairs))
    total = (weights.classes * classes + weights.boxes * boxes + weights.giou * overlap).sum()
    off = _cardinality(logits[-1], [len(each) for each in labels])
    return DetectionLoss(total, classes[-1].detach(), boxes[-1].detach(), overlap[-1].detach(), off)


def count_boxes(targets: Sequence[Target], device: torch.device | str = "cpu") -> Float[Tensor, ""]:
    """Objects of this batch, in a distributed run the mean over the processes; at least 1."""
    count = torch.tensor(float(sum(len(target["labels"]) for target in targets)), device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(count)
        count = count / torch.distributed.get_world_size()
    return count.clamp(min=1)


def _classes(
    logits: Float[Tensor, "layers b q c"], labels: Int[Tensor, " n"], pairs: Matched, no_object: float
) -> Float[Tensor, " layers"]:
    """Cross-entropy over all queries of a layer, a weighted mean: those without an object count ``no_object`` each."""
    nothing = logits.shape[-1] - 1
    wanted = torch.full(logits.shape[:-1], nothing, dtype=torch.int64, device=logits.device)
    wanted[pairs.layer, pairs.image, pairs.query] = labels[pairs.target]
    count = torch.where(wanted == nothing, no_object, 1.0).to(logits.dtype)
    each = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view_as(count)
    return (each * count).sum((1, 2)) / count.sum((1, 2))


def _boxes(found: Float[Tensor, "layers b q 4"], wanted: Float[Tensor, "n 4"], pairs: Matched) -> tuple[Tensor, Tensor]:
    """Sums over a layer's pairs of the L1 distance and of ``1 - GIoU``; nothing matched: zeros that still belong to
    the graph."""
    mine, theirs = found[pairs.layer, pairs.image, pairs.query], wanted[pairs.target]
    zeros = found.new_zeros(len(found))
    distance = (mine - theirs).abs().sum(-1)
    apart = 1 - giou(corners(mine), corners(theirs))
    return zeros.index_add(0, pairs.layer, distance), zeros.index_add(0, pairs.layer, apart)


@torch.no_grad()
def _cardinality(logits: Float[Tensor, "b q c"], counts: Sequence[int]) -> Float[Tensor, ""]:
    seen = (logits.argmax(-1) != logits.shape[-1] - 1).sum(1)
    return (seen - torch.tensor(counts, device=seen.device)).abs().float().mean()


def _checked(targets: Sequence[Target], logits: Float[Tensor, "layers b q c"]) -> tuple[list[Tensor], list[Tensor]]:
    """Labels and boxes of each image, on the output's device; looked at all together, for that waits for the device."""
    _, b, _, classes = logits.shape
    if len(targets) != b:
        raise ValueError(f"a target for each of {b} images is needed, got {len(targets)}")
    for i, target in enumerate(targets):
        labels, boxes = target["labels"], target["boxes"]
        if labels.ndim != 1 or labels.dtype != torch.int64 or boxes.shape != (len(labels), 4):
            raise ValueError(
                f"target {i} has labels {labels.dtype} {list(labels.shape)} and boxes {list(boxes.shape)}, not int64 "
                "[n] and [n, 4]"
            )
    labels, boxes = torch.cat([t["labels"] for t in targets]), torch.cat([t["boxes"] for t in targets])
    known = (labels >= 0) & (labels < classes - 1)
    fine = (boxes[:, 2:] > 0).all(-1) & (boxes >= -SLACK).all(-1) & (boxes <= 1 + SLACK).all(-1)  # NaN: false
    if not bool((known & fine).all()):
        image = torch.repeat_interleave(torch.tensor([len(t["labels"]) for t in targets]))
        k = int((~(known & fine)).nonzero()[0])
        if not known[k]:
            raise ValueError(f"target {image[k]} has the label {labels[k]}, the output {classes - 1} classes from 0")
        raise ValueError(
            f"target {image[k]} has the box {boxes[k].tolist()}: (cx, cy, w, h) in [0, 1], shares of the image, with "
            "an area, was asked for"
        )
    device = logits.device
    return [t["labels"].to(device) for t in targets], [t["boxes"].to(device) for t in targets]
