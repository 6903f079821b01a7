"""Runs side by side: AUCs with intervals, what differs pair by pair, and whether a difference is more than chance.

Only runs of the same pairs under the same scoring are compared. What pass 1 did may differ, and is said; where that
moves the frame that errors are measured in, it is said loudly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vispe.evaluate import figures
from vispe.evaluate.page import flat
from vispe.evaluate.recall import EqualRecall, at_equal_recall
from vispe.evaluate.recall import draw as draw_by_recall
from vispe.evaluate.runs import TEXT, Run, printable, told_seconds, write_rows
from vispe.files import write_atomically, write_json
from vispe.metrics.bootstrap import auc_difference_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FREE = (  # keys of a protocol that say what pass 1 does, or in which frame errors are told; all others are scoring
    "name", "source", "resize", "side", "max_keypoints", "knobs", "max_matches", "frame", "frame_side",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Line:
    """One estimator's AUCs of one run and group, in [0, 1]; ``difference`` to the first run, with its interval."""

    run: str
    group: str
    estimator: str
    threshold: float | None
    choice: str
    failures: int
    at: tuple[float, ...]
    auc: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    difference: tuple[float, ...] = ()
    difference_low: tuple[float, ...] = ()
    difference_high: tuple[float, ...] = ()

    @property
    def apart(self) -> tuple[bool, ...]:
        """Whether each difference is more than chance: its 95 % interval excludes 0."""
        return tuple(low > 0 or high < 0 for low, high in zip(self.difference_low, self.difference_high, strict=True))


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """``runs`` by letter, others are compared with the first; ``warnings`` are to be read before the numbers."""

    runs: dict[str, Run]
    warnings: tuple[str, ...]
    settings: dict[str, tuple[str, ...]]  # what differs in how the runs were made: name -> a value for each run
    lines: tuple[Line, ...]
    recalls: tuple[EqualRecall, ...] = ()

    @property
    def first(self) -> Run:
        return next(iter(self.runs.values()))


def compare(runs: Sequence[Run], out: Path | None = None, recall: bool = False) -> Comparison:
    """Hold runs against the first of them; into the folder ``out`` go compare.json, compare.png and differences.csv,
    with ``recall`` (see ``vispe.evaluate.recall``) also recall.png.

    ``ValueError`` names the first thing in which benchmark, pairs or scoring are not the same.
    """
    if not 2 <= len(runs) <= len(LETTERS):
        raise ValueError(f"a comparison takes 2 to {len(LETTERS)} runs, got {len(runs)}")
    for run in runs[1:]:
        _check_same(runs[0], run)
    named = dict(zip(LETTERS, runs, strict=False))
    settings = _settings(runs)
    lines = tuple(line for group in runs[0].scores["groups"] for line in _lines(named, group))
    matches, recalls = at_equal_recall(named) if recall else ({}, ())
    found = Comparison(runs=named, warnings=tuple(_warnings(named)), settings=settings, lines=lines, recalls=recalls)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "compare.json", summary(found))
        write_rows(out / "differences.csv", differences(found))
        figure = draw(found)
        write_atomically(out / "compare.png", lambda path: figure.savefig(path, format="png"))
        if recall:
            curves = draw_by_recall(named, matches, _title(found))
            write_atomically(out / "recall.png", lambda path: curves.savefig(path, format="png"))
    return found


def _title(found: Comparison) -> str:
    return f"{found.first.benchmark}, {found.first.pairs} pairs"


# --- whether they can be compared -------------------------------------------------------------------------------------


PAIRS = "run `vispe evaluate` on the same pairs"
SCORING = "score one of them again as the other was (`vispe evaluate`; its matches are kept)"


def _check_same(first: Run, other: Run) -> None:
    for what, a, b, remedy in chain(_facts(first, other), _scoring(first, other)):
        if a != b:
            runs = f"{printable(first.path)!r} and {printable(other.path)!r}"
            raise ValueError(
                f"{runs} cannot be compared: {what} {printable(repr(a))} and {printable(repr(b))}; {remedy}"
            )


Held = Iterator[tuple[str, object, object, str]]  # what is compared, in the first run, in the other; what to do


def _facts(first: Run, other: Run) -> Held:
    """Whether they are of the same pairs."""
    for key, what in (("benchmark", "their benchmarks are"), ("task", "their tasks are"), ("pairs", "pairs are")):
        yield what, first.scores[key], other.scores[key], PAIRS
    for name in TEXT:
        for i, (a, b) in enumerate(zip(first.text(name), other.text(name), strict=True)):
            yield f"{name} of pair {i + 1} is", a, b, PAIRS


def _scoring(first: Run, other: Run) -> Held:
    """Whether they were scored alike."""
    ours, theirs = first.scores["protocol"], other.scores["protocol"]
    for key in {**ours, **theirs}:
        if key not in FREE:
            yield f"{key} in the protocol is", ours.get(key), theirs.get(key), SCORING
    yield "groups are", list(first.scores["groups"]), list(other.scores["groups"]), SCORING
    for group in first.scores["groups"]:
        a, b = ([(line["estimator"], line["at"]) for line in run.lines(group)] for run in (first, other))
        yield f"AUCs of {group} are", a, b, SCORING


def _warnings(runs: Mapping[str, Run]) -> Iterator[str]:
    """What must be known before the numbers are read."""
    frames = {letter: _frame(run) for letter, run in runs.items()}
    if len(set(frames.values())) > 1:
        told = "; ".join(f"{letter}: {frame}" for letter, frame in frames.items())
        if next(iter(runs.values())).task == "homography":
            yield f"errors are pixels of DIFFERENT FRAMES ({told}): neither corner errors nor AUCs are comparable"
        else:
            yield f"thresholds of estimators are pixels of different frames ({told}); errors are degrees all the same"
    versions = {letter: run.scores["version"] for letter, run in runs.items()}
    if len(set(versions.values())) > 1:
        yield f"scored by different versions of vispe ({', '.join(f'{k}: {v}' for k, v in versions.items())})"
    (a, first), *others = runs.items()
    for letter, run in others:
        if all(run.scores[key] == first.scores[key] for key in ("made", "protocol")):
            yield f"{letter} was made exactly like {a}"


def _frame(run: Run) -> str:
    """In words, the size of the image that a pixel of error belongs to."""
    protocol = run.scores["protocol"]
    size, side = protocol.get("resize"), protocol.get("side", "short")
    if protocol.get("frame") is not None:  # 0: as the files are
        size, side = protocol["frame"], protocol.get("frame_side", "short")
    if isinstance(size, list | tuple):
        return f"{size[0]} x {size[1]}"
    return f"{side} side {size}" if size else "original size"


def _settings(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Everything in ``made`` and in the free part of the protocol that is not the same in all runs."""
    tables = []
    for run in runs:
        free = {key: run.scores["protocol"].get(key) for key in FREE if key not in ("source", "frame_side")}
        tables.append(dict(flat({**free, **run.scores["made"]})))
    names = dict.fromkeys(name for known in tables for name in known)
    rows = {name: tuple(_told(known.get(name)) for known in tables) for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _told(value: object) -> str:
    text = "-" if value is None else printable(value)
    return text[:12] + "…" if len(text) == 64 else text  # a sha256


# --- numbers ----------------------------------------------------------------------------------------------------------


def _lines(runs: Mapping[str, Run], group: str) -> Iterator[Line]:
    """By estimator, then by run."""
    a, first = next(iter(runs.items()))
    members = first.members(group)
    for i, ours in enumerate(first.lines(group)):
        base = first.errors(ours["estimator"], ours["threshold"])[members]
        for letter, run in runs.items():
            entry = run.lines(group)[i]
            known = {key: tuple(entry[key]) for key in ("at", "auc", "low", "high")}
            if letter != a:
                errors = run.errors(entry["estimator"], entry["threshold"])[members]
                low, high = auc_difference_interval(errors, base, entry["at"])
                known["difference"] = tuple(np.subtract(entry["auc"], ours["auc"]).tolist())
                known |= {"difference_low": tuple(map(float, low)), "difference_high": tuple(map(float, high))}
            yield Line(
                run=letter,
                group=group,
                estimator=entry["estimator"],
                threshold=entry["threshold"],
                choice=entry.get("choice", "fixed"),
                failures=entry["failures"],
                **known,
            )


def chosen(run: Run) -> dict[str, NDArray[np.float64]]:
    """The errors of all pairs by each estimator, at the threshold that its AUC is told of."""
    return {entry["estimator"]: run.errors(entry["estimator"], entry["threshold"]) for entry in run.lines()}


def differences(found: Comparison) -> dict[str, Any]:
    """Columns, a row a pair: the errors of every run, then every other number of a run minus that of the first.

    The difference of two failures (inf - inf) is nan.
    """
    columns: dict[str, Any] = {name: found.first.text(name) for name in TEXT}
    errors = {letter: chosen(run) for letter, run in found.runs.items()}
    a, *others = found.runs
    for estimator in errors[a]:
        columns |= {f"error {estimator} {letter}": errors[letter][estimator] for letter in found.runs}
        for b in others:
            columns[f"error {estimator} {b}-{a}"] = _minus(errors[b][estimator], errors[a][estimator])
    numbers = {letter: run.numbers() for letter, run in found.runs.items()}
    for name, base in numbers[a].items():
        for b in others:
            if name in numbers[b] and "error" not in name:
                columns[f"{name} {b}-{a}"] = _minus(numbers[b][name], base)
    return columns


def _minus(b: NDArray[Any], a: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(invalid="ignore"):
        return b - a


def summary(found: Comparison) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "benchmark": found.first.benchmark,
        "pairs": found.first.pairs,
        "runs": {letter: {"path": str(run.path), "label": run.label} for letter, run in found.runs.items()},
        "warnings": list(found.warnings),
        "settings": {name: list(values) for name, values in found.settings.items()},
        "auc": [{**vars(line), "apart": list(line.apart)} for line in found.lines],
        "equal_recall": [vars(row) for row in found.recalls],
        "mean": {letter: run.scores["groups"]["all"]["mean"] for letter, run in found.runs.items()},
        "median": {letter: run.scores["groups"]["all"]["median"] for letter, run in found.runs.items()},
        "seconds": {letter: told_seconds(run) for letter, run in found.runs.items()},
    }


def draw(found: Comparison) -> Figure:
    """For each estimator the curve of every run, and every pair's errors against those in the first run."""
    first, at = found.first, found.lines[0].at
    errors = {letter: chosen(run) for letter, run in found.runs.items()}
    a, *others = found.runs
    labels = {letter: f"{letter}  {printable(run.label)}" for letter, run in found.runs.items()}
    estimators = list(errors[a])
    figure = figures.sheet(4.6 * len(estimators), 8.6)
    axes = figure.subplots(2, len(estimators), squeeze=False)
    for i, estimator in enumerate(estimators):
        curves = {
            (labels if i == 0 else dict(zip(labels, labels, strict=True)))[k]: errors[k][estimator] for k in labels
        }
        figures.draw_recall(axes[0][i], curves, at, first.unit)
        axes[0][i].set_title(estimator, loc="left", fontsize=11, color=figures.INK)
        rivals = {letter: errors[letter][estimator] for letter in others}
        names = f"error of {a}, {first.unit}", f"error of {', '.join(others)}, {first.unit}"
        figures.draw_duel(axes[1][i], errors[a][estimator], rivals, names, max(at))
    figure.suptitle(_title(found), x=0.01, ha="left", fontsize=12, color=figures.INK, parse_math=False)
    for warning in found.warnings[:1]:
        figure.supxlabel(warning, x=0.01, ha="left", fontsize=9, color=figures.WRONG, parse_math=False)
    return figure
