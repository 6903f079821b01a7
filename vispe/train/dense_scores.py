"""How good a matcher without keypoints is on held-out pairs, and SIFT's mutual neighbours beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from vispe.data.batches import Shares
from vispe.data.images import ImageError
from vispe.features import extractor
from vispe.layers.assignment import nearest
from vispe.layers.cells import CellMatches
from vispe.metrics.auc import error_auc
from vispe.models import RATIO
from vispe.train.image_pairs import EvalImagePairs, ImagePairBatch, ImagePairs, image_pair_loader
from vispe.train.report import new_figure, write_figure
from vispe.train.views import AS_IT_IS

RIGHT = 3.0  # pixels by which a match that is right may be off
DECISIVE = 5  # of a source's limits: at which one matcher is better than another


class Judged(NamedTuple):
    """One pair: how many matches there are, of how many of them the truth is known, how many are right, how many cells
    have a true partner, how many of those a right match, and the error of what follows."""

    matches: float
    known: float
    right: float
    true: float
    found: float
    error: float


def judged(model: nn.Module, source: ImagePairs, batch: ImagePairBatch) -> list[Judged]:
    """What each pair's matches are worth."""
    with torch.no_grad():
        out: CellMatches = model(batch.image0, batch.image1, batch.mask0, batch.mask1)
    wide = -(-batch.image0.shape[-1] // source.stride)
    rows = []
    for row in range(len(batch.indices)):
        points0, points1 = _points(out, row)
        right, known, cells = rightness(batch, row, points0, points1, source.stride, wide)
        true = batch.matches0[row].cpu().numpy() >= 0
        error = source.error(batch.truth[row], points0, points1)
        found = right & true[cells]
        rows.append(Judged(len(cells), int(known.sum()), int(right.sum()), int(true.sum()), int(found.sum()), error))
    return rows


def _points(out: CellMatches, row: int) -> tuple[np.ndarray, np.ndarray]:
    here = out.rows == row
    return out.keypoints0[here].double().cpu().numpy(), out.keypoints1[here].double().cpu().numpy()


def rightness(
    batch: ImagePairBatch, row: int, points0: np.ndarray, points1: np.ndarray, stride: int, wide: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which matches of a pair are right (``RIGHT`` pixels off at most), of which the truth is known, and their cells of
    image 0."""
    cells = (points0 / stride).round().astype(int) @ np.array([1, wide])
    there = batch.there0[row].double().cpu().numpy()[cells]
    return np.linalg.norm(points1 - there, axis=1) <= RIGHT, ~np.isnan(there).any(1), cells


def summed(rows: list[Judged], source: ImagePairs) -> dict[str, Any]:
    """Of all pairs together: ``precision`` of matches whose truth is known, ``recall`` of cells that have a true
    partner, ``matches`` a pair; ``auc`` of the source's errors at its limits."""
    matches, known, right, true, found, _ = (sum(column) for column in zip(*rows, strict=True))
    return {
        "precision": right / max(known, 1),
        "recall": found / max(true, 1),
        "matches": matches / max(len(rows), 1),
        "auc": [float(value) for value in error_auc([row.error for row in rows], source.limits)],
    }


def measure(model: nn.Module, pairs: EvalImagePairs, batch_size: int, workers: int) -> dict[str, Any]:
    """:func:`summed` of a model in eval mode."""
    device = next(model.parameters()).device
    rows: list[Judged] = []
    for batch in image_pair_loader(pairs, Shares(len(pairs), batch_size), workers):
        if batch.problem:
            raise ImageError(batch.problem)
        rows += judged(model, pairs.source, move_data_to_device(batch, device))
    return summed(rows, pairs.source)


def neighbours(pairs: EvalImagePairs) -> dict[str, Any]:
    """What mutual nearest neighbours of SIFT with a ratio test give of the same images: ``matches`` a pair and ``auc``
    as :func:`summed`; ``ValueError`` without OpenCV."""
    find, source, errors, matches = extractor("sift", look=AS_IT_IS), pairs.source, [], 0
    for row in range(len(pairs)):
        pair = source.make(*pairs.chance(row))
        sides = [
            find(image[:, :h, :w]).points()
            for image, (h, w) in ((pair.image0, pair.size0), (pair.image1, pair.size1))
        ]  # fmt: skip
        found, _ = nearest(sides[0].descriptors, sides[1].descriptors, ratio=RATIO).pairs()
        points = [side.keypoints[0, found[:, k]].double().numpy() for k, side in enumerate(sides)]
        errors.append(source.error(pair.truth, *points))
        matches += len(found)
    return {"matches": matches / len(pairs), "auc": [float(value) for value in error_auc(errors, source.limits)]}


def beats(told: dict[str, Any], other: dict[str, Any], source: ImagePairs) -> bool:
    """Whether the AUC at ``DECISIVE`` is the higher one."""
    at = source.limits.index(DECISIVE)
    return bool(told["auc"][at] > other["auc"][at])


def draw_dense(path: Path, model: nn.Module, pairs: EvalImagePairs) -> None:
    """A held-out pair and its matches: right ones green, wrong ones red."""
    batch = move_data_to_device(pairs.__getitems__([0]), next(model.parameters()).device)
    with torch.no_grad():
        points0, points1 = _points(model(batch.image0, batch.image1, batch.mask0, batch.mask1), 0)
    h, w = batch.image0.shape[-2:]
    stride = pairs.source.stride
    right, known, _ = rightness(batch, 0, points0, points1, stride, -(-w // stride))
    figure = new_figure(9, 9 * h / (2 * w) + 0.4)
    axes = figure.add_subplot()
    both = torch.cat((batch.image0[0, 0], batch.image1[0, 0]), 1).cpu().numpy()
    axes.imshow(both, cmap="gray", vmin=0, vmax=1)
    for colour, which in (("#228833", right), ("#cc3311", known & ~right)):
        for line in np.stack((points0[which], points1[which] + np.array([w, 0])), 1):
            axes.plot(*line.T, color=colour, linewidth=0.5)
    axes.set_axis_off()
    axes.set_title(f"{int(right.sum())} of {int(known.sum())} matches are right", fontsize=10)
    write_figure(figure, path)
