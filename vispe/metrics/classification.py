"""Accuracy, top-5 and the confusion matrix, counted batch by batch and added up over processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class Tally:
    """Counts over labelled images; ``confusion[i, j]``: images of class i that were taken for class j."""

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.confusion = torch.zeros(classes, classes, dtype=torch.float64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # of cross entropy, of hits among the best five

    def add(self, logits: Float[Tensor, "b classes"], labels: Int[Tensor, " b"]) -> None:
        """Count a batch; images with the label -1 are padding and do not count."""
        known = labels >= 0
        logits, labels = logits[known].float(), labels[known]
        if not len(labels):
            return
        count = self.confusion.shape[0]
        pairs = labels * count + logits.argmax(1)
        self.confusion += torch.bincount(pairs, minlength=count * count).view(count, count)
        best = logits.topk(min(5, count), dim=1).indices
        five = (best == labels[:, None]).any(1).sum()
        self.sums += torch.stack((F.cross_entropy(logits, labels, reduction="sum"), five)).double()

    def packed(self) -> Tensor:
        """Everything in one vector, float64: the sum of two tallies' vectors is that of both together."""
        return torch.cat((self.confusion.flatten(), self.sums))

    def unpack(self, packed: Tensor) -> None:
        """Replace the counts by those of ``packed``."""
        self.confusion = packed[:-2].view_as(self.confusion)
        self.sums = packed[-2:]

    def summary(self) -> dict[str, float]:
        """``loss`` (cross entropy), ``accuracy`` and ``top5`` in [0, 1], ``images``."""
        images = float(self.confusion.sum())
        count = max(images, 1.0)
        loss, five = (self.sums / count).tolist()
        return {"loss": loss, "accuracy": float(self.confusion.trace()) / count, "top5": five, "images": int(images)}

    def per_class(self) -> list[float | None]:
        """The part of each class's images that was recognised; None for a class without images."""
        counts, right = self.confusion.sum(1).tolist(), self.confusion.diagonal().tolist()
        return [hit / count if count else None for hit, count in zip(right, counts, strict=True)]
