"""Which query is to answer for which object: the assignment of least cost, by the Hungarian method (DETR, 3.1).

A pair costs ``-p(class)`` (a probability, not its logarithm), the L1 distance of the boxes as shares of the image, and
``-GIoU``, in the original's weights 1, 5, 2. Costs are made in float32, for all layers and images at once, and go to
the host together; scipy does the rest. Boxes are (cx, cy, w, h) in [0, 1] where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vispe.position.grid import at_least_float32


class Costs(NamedTuple):
    """What each part of a pair's cost is multiplied with."""

    classes: float = 1.0
    boxes: float = 5.0
    giou: float = 2.0


COSTS = Costs()  # the original's


class Matched(NamedTuple):
    """``k`` pairs: query ``query`` of image ``image`` in layer ``layer`` answers for object ``target``, a row of all
    images' objects in one list."""

    layer: Int[Tensor, " k"]
    image: Int[Tensor, " k"]
    query: Int[Tensor, " k"]
    target: Int[Tensor, " k"]


@torch.no_grad()
def match(
    logits: Float[Tensor, "layers b q c"],
    boxes: Float[Tensor, "layers b q 4"],
    labels: Sequence[Int[Tensor, " n"]],
    wanted: Sequence[Float[Tensor, "n 4"]],
    costs: Costs = COSTS,
) -> Matched:
    """The cheapest pairs of each layer and image: ``min(queries, objects)`` of them, every query and object once.

    ``labels`` and ``wanted``: the classes and boxes of each image's objects, on the device of the logits.
    """
    if not any(len(each) for each in labels):
        none = torch.zeros(0, dtype=torch.int64, device=logits.device)
        return Matched(none, none, none, none)
    pad = torch.nn.utils.rnn.pad_sequence
    objects, classes = pad(list(wanted), batch_first=True), pad(list(labels), batch_first=True)
    found, objects = at_least_float32(boxes), at_least_float32(objects)
    likely = at_least_float32(logits).softmax(-1)
    which = classes[None, :, None].expand(len(logits), -1, logits.shape[2], -1)
    distance = (found[..., None, :] - objects[:, None]).abs().sum(-1)
    overlap = giou(corners(found)[..., None, :], corners(objects)[:, None])
    cost = costs.boxes * distance - costs.classes * likely.gather(-1, which) - costs.giou * overlap
    return assign(cost, [len(each) for each in labels])


@torch.no_grad()
def assign(cost: Float[Tensor, "layers b q most"], counts: Sequence[int]) -> Matched:
    """Pairs of least total cost; image i has ``counts[i]`` objects, columns beyond are padding.

    Costs that are not finite are the largest there are, as in transformers: such a pair comes last.
    """
    from scipy.optimize import linear_sum_assignment

    largest = torch.finfo(cost.dtype).max
    table = cost.nan_to_num(largest, largest, largest).cpu().numpy()
    pairs = []
    for layer in range(len(table)):
        start = 0
        for image, count in enumerate(counts):
            rows, columns = linear_sum_assignment(table[layer, image, :, :count])
            pairs += [(layer, image, int(row), start + int(column)) for row, column in zip(rows, columns, strict=True)]
            start += count
    indices = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 4).to(cost.device)
    return Matched(*indices.unbind(1))


def corners(boxes: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 4"]:
    """(cx, cy, w, h) -> (x0, y0, x1, y1)."""
    centre, extent = boxes[..., :2], boxes[..., 2:]
    return torch.cat((centre - extent / 2, centre + extent / 2), -1)


def giou(a: Float[Tensor, "*n 4"], b: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n"]:
    """``|a & b| / |a | b| - (|hull| - |a | b|) / |hull|`` of boxes (x0, y0, x1, y1), shapes broadcast (Rezatofighi et
    al. 2019): 1 for equal boxes, towards -1 for boxes far apart. Two boxes without area: NaN, as in the original.
    """
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    union = _area(a) + _area(b) - shared
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    return shared / union - (hull - union) / hull


def _area(boxes: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n"]:
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)
