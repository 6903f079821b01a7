"""The loss of a set of masks: each object gets the one query that suits it best, and masks are compared at points
(Cheng et al. 2022, 3.3; the points are PointRend's, Kirillov et al. 2020).

A mask at every pixel would cost more memory than the network. Matching compares all pairs at the same uniformly drawn
points; the loss draws three times as many for each matched pair, keeps the three quarters whose logit is nearest to
zero, and fills up with fresh ones. Points are (x, y) fractions of the mask's sides; masks are read between cells
bilinearly, the truth too. Everything is in float32, also under autocast.

A target is a mapping with ``labels [n]`` int64 and ``masks [n, h, w]`` bool, sides of the network's input, padding
included; n = 0 is legal. An output has ``logits [b, q, classes + 1]``, ``masks [b, q, y, x]`` and ``aux``, a tuple of
the same for earlier layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Target = Mapping[str, Tensor]
Pairs = tuple[Int[Tensor, " k"], Int[Tensor, " k"]]  # which query has which object


class Output(Protocol):
    """What the loss reads: Mask2Former's ``Segments`` is one."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def masks(self) -> Tensor: ...

    @property
    def aux(self) -> Sequence[Output]: ...


class MaskLoss(NamedTuple):
    """``total``, weighted and summed over the layers, is what to minimise; the parts are the last layer's,
    unweighted."""

    total: Tensor
    classes: Tensor
    mask: Tensor
    dice: Tensor


class Weights(NamedTuple):
    """How much each part counts, in matching and in the loss; ``no_object`` is the weight of that class."""

    classes: float = 2.0
    mask: float = 5.0
    dice: float = 5.0
    no_object: float = 0.1


class Points(NamedTuple):
    """How many points a mask is compared at; the loss draws ``oversample`` times as many and takes a share
    ``importance`` from the least certain."""

    number: int = 12544
    oversample: float = 3.0
    importance: float = 0.75


WEIGHTS, POINTS = Weights(), Points()  # as published


def mask_loss(
    output: Output,
    targets: Sequence[Target],
    *,
    weights: Weights = WEIGHTS,
    points: Points = POINTS,
    generator: torch.Generator | None = None,
    mask: Bool[Tensor, "b h w"] | None = None,
) -> MaskLoss:
    """Matching, cross-entropy, binary cross-entropy and dice, for the last layer and each of ``aux``.

    Each layer is matched anew. Masks' parts are sums over pairs divided by the number of objects, in a distributed run
    by its mean over the processes, at least 1. ``generator`` draws the points, on the output's device; None: torch's
    own, in transformers' order. ``mask``: where a padded batch has real pixels; points then lie in each image's
    rectangle. ``ValueError`` for targets that are not the output's, or labels that are no class.
    """
    _check(output, targets)
    count, extents = _count(targets, output.logits.device), _extents(mask, output.logits)
    total, last = None, None
    with torch.autocast(output.logits.device.type, enabled=False):
        truths = [target["masks"].to(output.logits.device, torch.float32) for target in targets]
        for layer in (output, *output.aux):
            logits, masks = layer.logits.float(), layer.masks.float()
            pairs = [
                match(logits[i], masks[i], target["labels"], truths[i], weights, points.number, generator, extents[i])
                for i, target in enumerate(targets)
            ]
            mask_part, dice_part = _masks(masks, truths, pairs, points, generator, extents, count)
            classes = _classes(logits, targets, pairs, weights.no_object)
            part = weights.classes * classes + weights.mask * mask_part + weights.dice * dice_part
            total = part if total is None else total + part
            last = (classes, mask_part, dice_part) if last is None else last
    assert total is not None
    assert last is not None
    return MaskLoss(total, *(part.detach() for part in last))


@torch.no_grad()
def match(
    logits: Float[Tensor, "q c"],
    masks: Float[Tensor, "q y x"],
    labels: Int[Tensor, " n"],
    truth: Float[Tensor, "n h w"],
    weights: Weights = WEIGHTS,
    number: int = POINTS.number,
    generator: torch.Generator | None = None,
    extent: Float[Tensor, " 2"] | None = None,
) -> Pairs:
    """The cheapest assignment of one image's objects to queries, by the Hungarian method: ``min(q, n)`` pairs.

    Costs that are not finite are the largest there are.
    """
    from scipy.optimize import linear_sum_assignment

    at = _draw((1, number, 2), logits.device, generator, extent)
    seen, wanted = (_read(maps[None], at)[0] for maps in (masks, truth))
    cost = (
        weights.mask * pairwise_bce(seen, wanted)
        + weights.classes * -logits.softmax(-1)[:, labels.to(logits.device)]
        + weights.dice * pairwise_dice(seen, wanted)
    )
    largest = torch.finfo(cost.dtype).max
    cost = cost.nan_to_num(largest, largest, largest)
    rows, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(rows, device=logits.device), torch.as_tensor(columns, device=logits.device)


def pairwise_bce(logits: Float[Tensor, "q p"], truth: Float[Tensor, "n p"]) -> Float[Tensor, "q n"]:
    """Mean over points of the binary cross-entropy of every pair."""
    return (F.softplus(logits).sum(-1, keepdim=True) - logits @ truth.T) / logits.shape[1]


def pairwise_dice(logits: Float[Tensor, "q p"], truth: Float[Tensor, "n p"]) -> Float[Tensor, "q n"]:
    """``1 - (2 |pq| + 1) / (|p| + |q| + 1)`` of every pair, p a probability."""
    inside = logits.sigmoid()
    return 1 - (2 * inside @ truth.T + 1) / (inside.sum(-1, keepdim=True) + truth.sum(-1) + 1)


def dice(logits: Float[Tensor, "k p"], truth: Float[Tensor, "k p"]) -> Float[Tensor, " k"]:
    """:func:`pairwise_dice` of each row with its own."""
    inside = logits.sigmoid()
    return 1 - (2 * (inside * truth).sum(-1) + 1) / (inside.sum(-1) + truth.sum(-1) + 1)


@torch.no_grad()
def uncertain_points(
    masks: Float[Tensor, "k y x"],
    points: Points = POINTS,
    generator: torch.Generator | None = None,
    extents: Float[Tensor, "k 2"] | None = None,
) -> Float[Tensor, "k p 2"]:
    """Points for each mask: of ``oversample`` times as many those with the smallest ``|logit|``, then uniform ones."""
    sure = int(points.importance * points.number)
    extent = None if extents is None else extents[:, None]
    drawn = _draw((len(masks), int(points.number * points.oversample), 2), masks.device, generator, extent)
    nearest = _read(masks[:, None], drawn)[:, 0].abs().neg().topk(sure, 1).indices
    kept = drawn.gather(1, nearest[..., None].expand(-1, -1, 2))
    if sure == points.number:
        return kept
    return torch.cat((kept, _draw((len(masks), points.number - sure, 2), masks.device, generator, extent)), 1)


def _masks(
    masks: Float[Tensor, "b q y x"],
    truths: Sequence[Tensor],
    pairs: Sequence[Pairs],
    points: Points,
    generator: torch.Generator | None,
    extents: Sequence[Tensor | None],
    count: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and dice of the matched pairs; nothing matched: zeros that still belong to the graph."""
    seen = torch.cat([masks[i, rows] for i, (rows, _) in enumerate(pairs)])
    if not len(seen):
        return seen.sum(), seen.sum()
    own = [e.expand(len(rows), 2) for e, (rows, _) in zip(extents, pairs, strict=True) if e is not None]
    at = uncertain_points(seen.detach(), points, generator, torch.cat(own) if own else None)
    ends = torch.tensor([len(rows) for rows, _ in pairs]).cumsum(0).tolist()
    with torch.no_grad():
        wanted = [
            _read(truth[columns][:, None], at[end - len(columns) : end])[:, 0]
            for truth, (_, columns), end in zip(truths, pairs, ends, strict=True)
            if len(columns)
        ]
        truth = torch.cat(wanted)
    logits = _read(seen[:, None], at)[:, 0]
    bce = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").mean(1)
    return bce.sum() / count, dice(logits, truth).sum() / count


def _classes(
    logits: Float[Tensor, "b q c"], targets: Sequence[Target], pairs: Sequence[Pairs], no_object: float
) -> Tensor:
    """Cross-entropy over all queries, those without an object counting ``no_object`` each."""
    nothing = logits.shape[-1] - 1
    wanted = torch.full(logits.shape[:2], nothing, dtype=torch.int64, device=logits.device)
    for i, (target, (rows, columns)) in enumerate(zip(targets, pairs, strict=True)):
        wanted[i, rows] = target["labels"].to(logits.device)[columns]
    scale = torch.ones(nothing + 1, dtype=logits.dtype, device=logits.device)
    scale[nothing] = no_object
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), scale)


def _read(maps: Float[Tensor, "k c y x"], at: Float[Tensor, "k p 2"]) -> Float[Tensor, "k c p"]:
    """Maps at points, zero outside."""
    if not maps.shape[1]:
        return maps.new_zeros(len(maps), 0, at.shape[1])
    return F.grid_sample(maps, 2 * at[:, :, None] - 1, align_corners=False)[..., 0]


def _draw(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None, extent: Tensor | None
) -> Tensor:
    drawn = torch.rand(shape, device=device, generator=generator)
    return drawn if extent is None else drawn * extent


def _extents(mask: Bool[Tensor, "b h w"] | None, logits: Tensor) -> list[Tensor | None]:
    """The share (x, y) of the picture that is real, image by image."""
    if mask is None:
        return [None] * len(logits)
    sides = torch.stack((mask.any(1).float().mean(1), mask.any(2).float().mean(1)), 1)
    return list(sides.to(logits.device))


def _count(targets: Sequence[Target], device: torch.device) -> Tensor:
    """Objects of this batch, in a distributed run the mean over the processes; at least 1."""
    count = torch.tensor(float(sum(len(target["labels"]) for target in targets)), device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(count)
        count = count / torch.distributed.get_world_size()
    return count.clamp(min=1)


def _check(output: Output, targets: Sequence[Target]) -> None:
    if len(targets) != len(output.logits):
        raise ValueError(f"a target for each of {len(output.logits)} images is needed, got {len(targets)}")
    classes = output.logits.shape[-1] - 1
    for i, target in enumerate(targets):
        labels, masks = target["labels"], target["masks"]
        if masks.ndim != 3 or len(masks) != len(labels):
            raise ValueError(
                f"target {i} has {len(labels)} labels and masks of shape {list(masks.shape)}, not [n, h, w]"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(f"target {i} has labels {labels.unique().tolist()}, the output {classes} classes from 0")
