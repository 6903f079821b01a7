"""How good a matcher of keypoints is on held-out pairs, and its descriptors' mutual neighbours beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from vispe.data.images import ImageError
from vispe.layers.assignment import nearest
from vispe.metrics.auc import error_auc
from vispe.metrics.matching import judged as judged_matches
from vispe.metrics.matching import precision_at_recall
from vispe.models.lightglue import Points
from vispe.train.keypoint_pairs import EvalPairs
from vispe.train.report import new_figure, write_figure

Matched = tuple[np.ndarray, np.ndarray]  # pairs [k, 2] and scores [k]


def lightglue(model: nn.Module) -> Any:
    """``(points0, points1) -> pairs, scores`` of one pair."""
    device = next(model.parameters()).device

    def matched(*sides: Points) -> Matched:
        was = model.training
        model.eval()
        with torch.inference_mode():
            out = model.match(*(move_data_to_device(side, device) for side in sides))  # type: ignore[operator]
        model.train(was)
        pairs, scores = out.pairs()
        return pairs.cpu().numpy(), scores.float().cpu().numpy()

    return matched


def mutual(ratio: float | None = None) -> Any:
    """Mutual nearest neighbours of the descriptors, with Lowe's ratio test of distances both ways if asked for."""

    def matched(points0: Points, points1: Points) -> Matched:
        found = nearest(points0.descriptors, points1.descriptors, ratio=ratio)
        pairs, scores = found.pairs()
        return pairs.numpy(), scores.numpy()

    return matched


def scored(pairs: EvalPairs, matched: Any) -> dict[str, Any]:
    """Of all pairs together: ``precision`` (of matches whose point of image 0 is not ignored), ``recall``, ``matches``
    a pair; ``auc`` of the source's errors at its limits."""
    rows = judged(pairs, matched)
    right, known = sum(int(row.right.sum()) for row in rows), sum(len(row.right) for row in rows)
    return {
        "precision": right / max(known, 1),
        "recall": right / max(sum(row.true for row in rows), 1),
        "matches": sum(row.matches for row in rows) / max(len(rows), 1),
        "auc": [float(value) for value in error_auc([row.error for row in rows], pairs.source.limits)],
    }


def precision_at(rows: Sequence[Judged], recall: float) -> float | None:
    """``precision_at_recall`` of all pairs together."""
    scores, right = (np.concatenate([getattr(row, name) for row in rows]) for name in ("scores", "right"))
    return precision_at_recall(scores, right, sum(row.true for row in rows), recall)


class Judged(NamedTuple):
    """One pair: the scores of the matches that are judged, which of them are right, how many matches there were, how
    many true ones there are, and the error of what follows."""

    scores: np.ndarray
    right: np.ndarray
    matches: int
    true: int
    error: float


def judged(pairs: EvalPairs, matched: Any) -> list[Judged]:
    """What each pair's matches are worth."""
    rows, source = [], pairs.source
    for a, b in pairs.pairs:
        found, scores = matched(source.alone(a), source.alone(b))
        first, second = source.real(a)[found[:, 0]], source.real(b)[found[:, 1]]
        truth, _ = source.labels(a, b)
        known, right = judged_matches(found, truth)
        error = source.error(a, b, first, second)
        rows.append(Judged(scores[known], right[known], len(found), int((truth >= 0).sum()), error))
    return rows


def beats(row: dict[str, Any]) -> bool:
    """Whether LightGlue has the higher precision at the other's recall."""
    return row["lightglue"] is not None and row["lightglue"] > row["precision"]


def draw_pair(path: Path, pairs: EvalPairs, matched: Any) -> None:
    """A held-out pair, its keypoints and their matches: right ones green, wrong ones red."""
    source, (a, b) = pairs.source, pairs.pairs[0]
    found, _ = matched(source.alone(a), source.alone(b))
    truth, _ = source.labels(a, b)
    figure = new_figure(9, 3.6)
    axes = figure.add_subplot()
    (h0, w0), (h1, w1) = (source.sizes[row].tolist() for row in (a, b))
    first, second = source.real(a), source.real(b) + np.array([w0 + 10, 0])
    for row, left in ((a, 0), (b, w0 + 10)):
        try:
            image = source.image(row)
        except ImageError:  # the features outlive the photographs: the matches alone, then
            continue
        h, w = image.shape[-2:]
        axes.imshow(image.permute(1, 2, 0).cpu().numpy(), extent=(left - 0.5, left + w - 0.5, h - 0.5, -0.5))
    for points in (first, second):
        axes.plot(*points.T, ".", color="#999999", markersize=2)
    right = truth[found[:, 0]] == found[:, 1]
    for colour, which in (("#228833", right), ("#cc3311", ~right)):
        lines = np.stack((first[found[which, 0]], second[found[which, 1]]), 1)
        for line in lines:
            axes.plot(*line.T, color=colour, linewidth=0.6)
    axes.set(xlim=(0, w0 + w1 + 10), ylim=(max(h0, h1), 0), aspect="equal")
    axes.set_axis_off()
    axes.set_title(f"{int(right.sum())} of {len(found)} matches are right", fontsize=10)
    write_figure(figure, path)
