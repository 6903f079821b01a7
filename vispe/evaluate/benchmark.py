"""A benchmark from pairs to a page: predict, score, tune, report. What ``vispe evaluate hpatches`` calls."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vispe.data.pairs import PairSet
from vispe.evaluate.curves import curve_rows, draw_curves
from vispe.evaluate.predict import Pipeline, predict
from vispe.evaluate.protocol import Protocol
from vispe.evaluate.report import Fetch, write_report
from vispe.evaluate.runs import Run, printable, read_run, told_seconds
from vispe.evaluate.score import Cache, framed, right, score
from vispe.evaluate.tune import tune
from vispe.files import write_json

Cells = list[tuple[str, ...]]
FEW = 10  # pairs that are told one by one
SHOWN = 6  # groups on the console; of more, only all together: the page and the file have them


def benchmark(
    pairs: PairSet,
    out: Path,
    protocol: Protocol,
    pipeline: Pipeline,
    *,
    devices: int = 1,
    nodes: int = 1,
    workers: int = 1,
    tuned: bool = False,
) -> dict[str, Any] | None:
    """Run one benchmark into the folder ``out``; what ``scores.json`` holds, or None in a process that only helped.

    ``pipeline`` takes from the protocol how large images are looked at and how many keypoints there are. What is there
    already is not done again. Errors are those of ``predict`` and ``score``.
    """
    pairs.check_truth()
    pairs.check_files()
    seen = {name: getattr(protocol, name) for name in ("resize", "side", "max_keypoints")}
    knobs = {**protocol.knobs.get(pipeline.extractor, {}), **pipeline.knobs}
    if not predict(pairs, out, pipeline.but(**seen, knobs=knobs), devices=devices, nodes=nodes):
        return None
    write_json(
        out / "run.json",
        {
            "benchmark": pairs.name,
            "note": pairs.note,
            "root": os.path.abspath(pairs.root),
            "protocol": protocol.plain(),
        },
    )
    return rescore(out, protocol, workers=workers, tuned=tuned)


def rescore(run: Path, protocol: Protocol, *, workers: int = 1, tuned: bool = False) -> dict[str, Any]:
    """Score what a run has predicted, once more; no image or network is needed, and pictures are drawn if there are
    images."""
    scores = score(run, protocol, workers=workers)
    if tuned:
        tune(run, protocol, workers=workers)
    read = read_run(run)
    if read.benchmark == "stress":
        draw_curves([read], run / "curves.png")
    write_report(read, _root(run), _fetch(run, protocol), run / "report.html")
    return scores


def run_beside(run: Path, other: Path) -> Path:
    """The folder ``other`` with the predictions of ``run``, linked where the disk can, to be scored in another way."""
    if other.exists() and any(other.iterdir()):
        raise ValueError(f"{str(other)!r} is not empty; name another folder")
    other.mkdir(parents=True, exist_ok=True)
    for name in ("features.h5", "matches.h5", "run.json"):
        try:
            os.link(run / name, other / name)  # both are replaced, never written into: a link is as good as a copy
        except OSError:
            shutil.copy2(run / name, other / name)
    return other


def _root(run: Path) -> Path | None:
    root = json.loads((run / "run.json").read_text(encoding="utf-8")).get("root")
    return Path(root) if root and os.path.isdir(root) else None


def _fetch(run: Path, protocol: Protocol) -> Fetch:
    """What the report draws: keypoints in pixels of the images, matches, scores, and which of them are right."""

    def fetch(row: int) -> tuple[Any, ...]:
        with Cache(run) as cache:
            pair = framed(cache, cache.names[row], cache.effective(protocol))
            return *cache.keypoints_of(pair.record), pair.matches, pair.scores, right(pair)

    return fetch


# --- for the console --------------------------------------------------------------------------------------------------


FRAMES = {None: "the images looked at", 0: "the files as they are"}


def protocol_rows(protocol: Protocol) -> Cells:
    """The effective protocol, a line each."""
    p = protocol
    size = "as they are" if p.resize == 0 else f"{p.resize[0]} x {p.resize[1]}" if isinstance(p.resize, tuple) else None
    rows: Cells = [
        ("protocol", f"{p.name} ({p.source})" if p.source else p.name),
        ("images", size or f"{p.side} side {p.resize}"),
        ("keypoints", f"at most {p.max_keypoints}"),
        ("matches", f"the best {p.max_matches}" if p.max_matches else "all"),
        ("errors in", "pixels of " + FRAMES.get(p.frame, f"{p.frame_side} side {p.frame}")),
        ("pixels", f"{p.pixels}, corners at the {p.corners}" if p.task == "homography" else p.pixels),
    ]
    for name in p.estimators:
        values = p.thresholds.get(name, ())
        told = "all matches" if not values else ", ".join(f"{value:g}" for value in values) + " px"
        rows.append((f"estimator {name}", told + (", the best on these pairs" if len(values) > 1 else "")))
    if p.task == "pose":
        rows.append(("epipolar", {"mean": "mean distance", "squared_sum": "sum of squared distances"}[p.epipolar]))
    return rows


def pair_rows(run: Run) -> Cells:
    """A line for each pair with its errors, where there are few enough to read."""
    if run.pairs > FEW:
        return []
    columns = [(line["estimator"], run.errors(line["estimator"], line["threshold"])) for line in run.lines()]
    head = ("image 0", "image 1", "matches", *(f"{name}, error in {run.unit}" for name, _ in columns))
    names = zip(map(printable, run.text("image0")), map(printable, run.text("image1")), strict=True)
    rows = [
        (*both, str(run.numbers()["matches"][i]), *(f"{errors[i]:.3g}" for _, errors in columns))
        for i, both in enumerate(names)
    ]
    return [head, *rows]


def second_rows(run: Run) -> Cells:
    """How long an image and a pair took, on average, when they were predicted."""
    return [(f"seconds to {stage}", f"{value:.3f}") for stage, value in told_seconds(run).items()]


def curve_table(run: Run) -> Cells:
    """Of stress: a line for each kind and level."""
    return [tuple(row) for row in curve_rows(run)] if run.benchmark == "stress" else []


def auc_rows(scores: dict[str, Any]) -> Cells:
    """A line for each estimator and group: AUC in percent with its 95 % interval, pairs without a model, inliers."""
    first = scores["groups"]["all"]["auc"][0]
    unit = "px" if scores["task"] == "homography" else "deg"
    head = ("estimator", "inlier px", "group", "pairs", *(f"AUC@{at:g} {unit}" for at in first["at"]), "no model")
    return [head, *_auc_lines(scores)]


def _auc_lines(scores: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for i, entry in enumerate(scores["groups"]["all"]["auc"]):
        threshold = "-" if entry["threshold"] is None else f"{entry['threshold']:g}"
        swept = "" if entry["choice"] == "fixed" else " (best)"
        for name, group in _shown(scores).items():
            found = group["auc"][i]
            cells = zip(found["auc"], found["low"], found["high"], strict=True)
            auc = (f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for value, low, high in cells)
            yield entry["estimator"], threshold + swept, name, str(group["pairs"]), *auc, str(found["failures"])


def _shown(scores: dict[str, Any]) -> dict[str, Any]:
    groups = scores["groups"]
    return groups if len(groups) <= SHOWN else {"all": groups["all"]}


def mean_rows(scores: dict[str, Any]) -> Cells:
    """A line for each measure of the matches, mean and median over the pairs, by group."""
    groups = _shown(scores)
    head = ("mean, median", *groups)
    return [head, *((name, *(_both(group, name) for group in groups.values())) for name in groups["all"]["mean"])]


def _both(group: dict[str, Any], name: str) -> str:
    mean, median = group["mean"][name], group["median"][name]
    return f"{mean:.3f}, {median:.3f}" if "@" in name else f"{mean:.0f}, {median:.0f}"
