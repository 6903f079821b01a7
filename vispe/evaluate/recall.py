"""Precision at equal recall: of two runs on the same keypoints, which is right more often when both find as much.

A matcher that says less is right more often; so the surer matches of one run are held against all of the other's. All
pairs are taken together. What is true is known for homographies alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.evaluate import figures
from vispe.evaluate.runs import Run, printable
from vispe.evaluate.score import POSITIVE, Cache, framed, protocol_of
from vispe.geometry.homography import Array
from vispe.metrics.matching import homography_ground_truth, precision_at_recall
from vispe.metrics.matching import judged as judged_matches
from vispe.progress import track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 400  # of a drawn curve


@dataclass(frozen=True, eq=False, kw_only=True)
class Judged:
    """All matches of a run that can be judged: ``scores [k]``, which are ``right [k]``, how many true ones there
    are."""

    scores: Array
    right: np.ndarray
    true: int

    @property
    def recall(self) -> float:
        return float(self.right.sum()) / max(self.true, 1)

    @property
    def precision(self) -> float:
        return float(self.right.sum()) / max(len(self.right), 1)


@dataclass(frozen=True, kw_only=True)
class EqualRecall:
    """``run`` where it finds as much as ``other`` does in all: the precision of either; None where it never does."""

    run: str
    other: str
    recall: float
    precision: float | None
    other_precision: float


def judged(folder: Path, what: str = "judging") -> Judged:
    """What a run of homographies predicted, in the frame it was scored in: partners within 3 pixels of each other.

    ``ValueError`` for other runs, and where what was predicted is no longer there.
    """
    protocol = protocol_of(folder)
    if protocol.task != "homography":
        raise ValueError(f"{str(folder)!r} holds poses: which keypoints are the same is known for homographies only")
    scores, right, true = [], [], 0
    with Cache(folder) as cache:
        protocol = cache.effective(protocol)
        for name in track(cache.names, what, "pairs"):
            pair = framed(cache, name, protocol)
            if pair.record.points is not None:
                raise ValueError(f"{str(folder)!r} has no keypoints, only matches: there is no recall of them")
            truth = homography_ground_truth(pair.keypoints0, pair.keypoints1, pair.homography, positive=POSITIVE)
            known, found = judged_matches(pair.matches, truth)
            scores.append(pair.scores[known])
            right.append(found[known])
            true += int((truth >= 0).sum())
    return Judged(scores=np.concatenate(scores), right=np.concatenate(right), true=true)


def at_equal_recall(runs: Mapping[str, Run]) -> tuple[dict[str, Judged], tuple[EqualRecall, ...]]:
    """Every run, and every run against every other, by letter."""
    found = {letter: judged(run.path, f"judging {letter}") for letter, run in runs.items()}
    rows = [
        EqualRecall(
            run=a, other=b, recall=found[b].recall, other_precision=found[b].precision,
            precision=precision_at_recall(found[a].scores, found[a].right, found[a].true, found[b].recall),
        )
        for b, a in itertools.permutations(found, 2)
    ]  # fmt: skip
    return found, tuple(rows)


def sentences(rows: tuple[EqualRecall, ...]) -> list[str]:
    """A line for each."""
    lines = []
    for row in rows:
        own = "never finds so many" if row.precision is None else f"has precision {row.precision:.3f}"
        lines.append(
            f"at the recall of {row.other}, {row.recall:.3f}, where its precision is {row.other_precision:.3f}, "
            f"{row.run} {own}"
        )
    return ["All pairs taken together (the means above are of pairs):", *lines] if lines else []


def draw(runs: Mapping[str, Run], found: Mapping[str, Judged], title: str) -> Figure:
    """Precision against recall as fewer and fewer sure matches are left out; a run's end is a dot."""
    figure = figures.sheet(6.4, 4.6)
    curves = {f"{letter}  {printable(run.label)}": curve(found[letter]) for letter, run in runs.items()}
    figures.draw_curve(figure.subplots(), curves, "recall, %", "precision, %")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=figures.INK, parse_math=False)
    return figure


def curve(found: Judged) -> tuple[Any, Any]:
    """Recalls and precisions of the surest matches, more and more of them."""
    counts = np.cumsum(found.right[np.argsort(-found.scores, kind="stable")])
    kept = np.unique(np.linspace(1, max(len(counts), 1), POINTS).astype(int))[: len(counts)]
    return counts[kept - 1] / max(found.true, 1), counts[kept - 1] / kept
