"""Panoptic quality (Kirillov et al. 2019), as panopticapi's ``evaluation.py`` counts it, rule by rule.

A predicted and a true segment of one class match if their IoU exceeds 1/2: then neither can match another. Pixels
without truth (void) leave the union; a predicted segment that lies for more than half in void, or in a crowd of its
class, is no mistake. PQ is the product of SQ, the mean IoU of the matches, and RQ, an F1 of the counts.

torchmetrics' ``PanopticQuality`` agrees while each class of stuff is one segment, nothing is a crowd and predictions
leave no pixel out. It also takes *predicted* void out of the union, and forgives a missed segment that lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike, NDArray

IOU, MATCHED, EXTRA, MISSED = range(4)  # columns: sum of IoU, true positives, false positives, false negatives
NAMES = ("PQ", "SQ", "RQ")


class Segment(NamedTuple):
    """The pixels of value ``id`` (not 0) are one segment of class ``label``."""

    id: int
    label: int
    crowd: bool = False


class PanopticTally:
    """Counts ``[classes, 4]`` over images; ``things`` says of each class whether it can be counted."""

    def __init__(self, things: Sequence[bool] | NDArray[np.bool_]) -> None:
        self.things = np.asarray(things, dtype=bool)
        self.counts: Float[np.ndarray, "classes 4"] = np.zeros((len(self.things), 4))

    def add(
        self,
        truth: Int[np.ndarray, "h w"],
        true_segments: Sequence[Segment],
        found: Int[np.ndarray, "h w"],
        found_segments: Sequence[Segment],
    ) -> None:
        """Count one image: two maps of segments, 0 where there is none, and what their numbers mean.

        ``ValueError`` for a number without meaning, or a predicted segment without pixels. A true one without pixels
        has been missed.
        """
        if truth.shape != found.shape:
            raise ValueError(f"the truth is of size {list(truth.shape)}, the prediction {list(found.shape)}")
        self._check(true_segments, "true")
        self._check(found_segments, "predicted")
        overlap = _overlap(_numbered(truth, true_segments, "true"), _numbered(found, found_segments, "predicted"),
                           (len(true_segments) + 1, len(found_segments) + 1))  # fmt: skip
        for segment, drawn in zip(found_segments, overlap[:, 1:].sum(0).tolist(), strict=True):
            if not drawn:
                raise ValueError(f"the predicted segment {segment.id} has no pixels")
        matched_true, matched_found = self._match(overlap, true_segments, found_segments)
        self._miss(overlap, true_segments, found_segments, matched_true, matched_found)

    def packed(self) -> Float[np.ndarray, " n"]:
        """Everything in one vector: the sum of two tallies' vectors is that of both together."""
        return self.counts.flatten()

    def unpack(self, packed: ArrayLike) -> None:
        """Replace the counts by those of ``packed``."""
        self.counts = np.array(packed, dtype=np.float64).reshape(self.counts.shape)

    def summary(self) -> dict[str, float | int | None]:
        """``PQ``, ``SQ`` and ``RQ`` in [0, 1], the means over classes, the same of things (``PQ_things``) and stuff.

        Classes that neither truth nor prediction has are left out; ``classes`` are those that remain. None where none
        does.
        """
        table = self._qualities()
        seen = self.counts[:, MATCHED:].any(1)
        told: dict[str, float | int | None] = {}
        for suffix, which in (("", seen), ("_things", seen & self.things), ("_stuff", seen & ~self.things)):
            for name, column in zip(NAMES, table.T, strict=True):
                told[name + suffix] = float(column[which].mean()) if which.any() else None
            told["classes" + suffix] = int(which.sum())
        return told

    def per_class(self) -> list[dict[str, float] | None]:
        """``PQ``, ``SQ``, ``RQ`` of each class; None for one that neither truth nor prediction has."""
        seen = self.counts[:, MATCHED:].sum(1).tolist()
        rows = self._qualities().tolist()
        return [dict(zip(NAMES, row, strict=True)) if n else None for row, n in zip(rows, seen, strict=True)]

    def _qualities(self) -> Float[np.ndarray, "classes 3"]:
        iou, matched, extra, missed = self.counts.T
        cases = matched + 0.5 * extra + 0.5 * missed
        share = 1 / np.where(cases, cases, 1)
        return np.stack([iou * share, iou / np.where(matched, matched, 1), matched * share], 1)

    def _match(
        self, overlap: NDArray[np.int64], true_segments: Sequence[Segment], found_segments: Sequence[Segment]
    ) -> tuple[set[int], set[int]]:
        matched_true: set[int] = set()
        matched_found: set[int] = set()
        area_true, area_found = overlap.sum(1), overlap.sum(0)
        for row, column in np.argwhere(overlap[1:, 1:]).tolist():
            one, other = true_segments[row], found_segments[column]
            if one.crowd or one.label != other.label:
                continue
            both = overlap[row + 1, column + 1]
            union = area_true[row + 1] + area_found[column + 1] - both - overlap[0, column + 1]
            if both / union > 0.5:
                self.counts[one.label, [IOU, MATCHED]] += [both / union, 1]
                matched_true.add(row)
                matched_found.add(column)
        return matched_true, matched_found

    def _miss(
        self,
        overlap: NDArray[np.int64],
        true_segments: Sequence[Segment],
        found_segments: Sequence[Segment],
        matched_true: set[int],
        matched_found: set[int],
    ) -> None:
        """Count what is left over on both sides."""
        crowds = {s.label: k for k, s in enumerate(true_segments) if s.crowd}  # panopticapi: the last of a class counts
        for k, segment in enumerate(true_segments):
            if not segment.crowd and k not in matched_true:
                self.counts[segment.label, MISSED] += 1
        for k, segment in enumerate(found_segments):
            ignored = overlap[0, k + 1]
            if segment.label in crowds:
                ignored = ignored + overlap[crowds[segment.label] + 1, k + 1]
            if k not in matched_found and ignored / overlap[:, k + 1].sum() <= 0.5:
                self.counts[segment.label, EXTRA] += 1

    def _check(self, segments: Sequence[Segment], whose: str) -> None:
        if len({segment.id for segment in segments}) < len(segments):
            raise ValueError(f"a {whose} segment is there twice: {sorted(segment.id for segment in segments)}")
        for segment in segments:
            if segment.id <= 0 or not 0 <= segment.label < len(self.things):
                raise ValueError(f"a {whose} segment has an id above 0 and one of {len(self.things)} labels: {segment}")


def _numbered(pixels: NDArray[np.integer], segments: Sequence[Segment], whose: str) -> NDArray[np.int64]:
    """Every pixel's segment as 1 + its index, 0 for none."""
    ids = np.array([0, *(segment.id for segment in segments)])
    order = np.argsort(ids)
    at = order[np.searchsorted(ids, pixels, sorter=order).clip(max=len(ids) - 1)]
    if (odd := ids[at] != pixels).any():
        raise ValueError(f"a {whose} segment {pixels[odd][0]} is drawn that is not in the list")
    return np.asarray(at, dtype=np.int64)


def _overlap(one: NDArray[np.int64], other: NDArray[np.int64], shape: tuple[int, int]) -> NDArray[np.int64]:
    """Pixels of each pair."""
    return np.bincount((one * shape[1] + other).ravel(), minlength=shape[0] * shape[1]).reshape(shape)
