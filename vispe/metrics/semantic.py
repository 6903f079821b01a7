"""Semantic segmentation scored: the confusion of pixels, IoU of each class and its mean; and what places alone give.

Pixels whose truth is void do not count, whatever was predicted there. The IoU of a class is ``hits / (truth + predicted
- hits)`` over all pixels of all images together (as mmsegmentation, ADE20K and Cityscapes), never a mean over images.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor


class SemanticTally:
    """Counts of pixels; ``confusion[i, j]``: pixels of class i that were taken for class j."""

    def __init__(self, classes: int, void: int = -1, device: torch.device | str = "cpu") -> None:
        self.classes, self.void = classes, void
        self.confusion = torch.zeros(classes, classes, dtype=torch.float64, device=device)

    def add(self, predicted: Int[Tensor, "*shape"], truth: Int[Tensor, "*shape"]) -> None:
        """Count pixels; ``ValueError`` for other shapes, or a class that there is not."""
        if predicted.shape != truth.shape:
            raise ValueError(f"predicted {list(predicted.shape)} is not of the truth's shape {list(truth.shape)}")
        known = truth != self.void
        predicted, truth = predicted[known].long(), truth[known].long()
        for name, found in (("predicted", predicted), ("true", truth)):
            if len(found) and (int(found.min()) < 0 or int(found.max()) >= self.classes):
                raise ValueError(
                    f"{name} classes are 0 to {self.classes - 1}, got {int(found.min())} to {int(found.max())}"
                )
        pairs = torch.bincount(truth * self.classes + predicted, minlength=self.classes**2)
        self.confusion += pairs.view_as(self.confusion).to(self.confusion.device)

    def packed(self) -> Tensor:
        """Everything in one vector, float64: the sum of two tallies' vectors is that of both together."""
        return self.confusion.flatten()

    def unpack(self, packed: Tensor) -> None:
        """Replace the counts by those of ``packed``."""
        self.confusion = packed.view_as(self.confusion)

    def iou(self) -> list[float | None]:
        """IoU of each class in [0, 1]; None for one that is neither there nor predicted."""
        hits = self.confusion.diagonal()
        return _shares(hits, self.confusion.sum(0) + self.confusion.sum(1) - hits)

    def accuracy(self) -> list[float | None]:
        """The part of each class's pixels that was recognised; None for a class without pixels."""
        return _shares(self.confusion.diagonal(), self.confusion.sum(1))

    def summary(self) -> dict[str, float]:
        """``miou`` (mean over the classes that are there or predicted), ``pixel_accuracy``, ``mean_accuracy`` (over the
        classes that are there), all in [0, 1], and the number of ``pixels``; 0 where there is nothing."""
        pixels = float(self.confusion.sum())
        return {
            "miou": _mean(self.iou()),
            "pixel_accuracy": float(self.confusion.trace()) / max(pixels, 1.0),
            "mean_accuracy": _mean(self.accuracy()),
            "pixels": int(pixels),
        }


def location_prior(masks: Iterable[Int[Tensor, "h w"]], classes: int, size: tuple[int, int]) -> Int[Tensor, "h w"]:
    """The most frequent class of each location of a map of ``size``: what a network that sees nothing could know.

    Masks of another size are read at the map's pixel centres. Void (negative) does not vote; a location without a vote
    has the class that is most frequent of all; the smaller of equals wins. ``ValueError`` where nothing is labelled.
    """
    votes = torch.zeros(classes, *size, dtype=torch.int64)
    for mask in masks:
        here = stretched(mask, size)
        if int(here.max()) >= classes:
            raise ValueError(f"a mask holds the class {int(here.max())}, there are {classes}")
        known = here >= 0
        votes.scatter_add_(0, here.clamp(min=0)[None], known[None].long())
    if not votes.any():
        raise ValueError("the masks label no pixel: there is no most frequent class")
    return torch.where(votes.sum(0) > 0, votes.argmax(0), votes.sum((1, 2)).argmax())


def stretched(mask: Int[Tensor, "h w"], size: tuple[int, int]) -> Int[Tensor, "h2 w2"]:
    """A map of classes at another size: the class at each new pixel's centre."""
    if tuple(mask.shape) == tuple(size):
        return mask.long()
    return F.interpolate(mask[None, None].double(), size=size, mode="nearest-exact")[0, 0].long()


def _shares(parts: Tensor, wholes: Tensor) -> list[float | None]:
    return [part / whole if whole else None for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True)]


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
