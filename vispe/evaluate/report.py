"""``report.html`` of a run: what was measured, how, the numbers, the curves, and the best and worst pairs drawn.

One file that asks for nothing outside itself. It says neither when nor where it was made: the same run gives the same
page.
"""

from __future__ import annotations

import base64
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vispe.evaluate import figures, page
from vispe.evaluate.page import words
from vispe.evaluate.runs import Run, amount, printable, told_seconds
from vispe.files import write_atomically
from vispe.paths import shared

PICTURES = 3_500_000  # characters of all pictures together: the page stays below 5 MB
EACH = 2  # pairs drawn of each kind
GROUPS = 24  # of more groups than this, the tables show all pairs only


class Drawn(NamedTuple):
    """What ``fetch`` gives for a pair: keypoints ``[n, 2]`` in pixels of the original images (first centre at 0),
    index pairs ``[k, 2]``, scores ``[k]``, and which matches are right ``[k]`` where that is known."""

    keypoints0: NDArray[Any]
    keypoints1: NDArray[Any]
    matches: NDArray[Any]
    scores: NDArray[Any]
    correct: NDArray[np.bool_] | None = None


Fetch = Callable[[int], tuple[Any, ...]]  # row of pairs.csv -> the fields of Drawn


def write_report(run: Run, root: Path | None, fetch: Fetch | None, out: Path) -> None:
    """Write the page to the file ``out``.

    Pairs are drawn when their images are below ``root`` and ``fetch(row)`` gives their matches (see ``Drawn``);
    otherwise the page says why not.
    """
    sections = [
        ("results", _results(run)),
        ("curves", _curves(run)),
        ("pairs", _pairs(run, root, fetch)),
        ("protocol", _protocol(run)),
        ("run", _made(run)),
    ]
    title = f"{run.benchmark}: {run.label}"
    text = page.document(
        title, _lead(run), sections, f"Made by vispe {run.scores['version']} from scores.json and pairs.csv."
    )
    write_atomically(out, lambda path: path.write_text(text, encoding="utf-8"))


# --- numbers ----------------------------------------------------------------------------------------------------------


def _lead(run: Run) -> str:
    what = {"homography": "homography estimation", "pose": "relative pose estimation"}[run.task]
    note = f" Of it: {words(run.scores['note'])}." if run.scores.get("note") else ""
    lead = f'<p class="lead">{run.pairs} pairs, {what}, protocol {words(_name(run))}.{note}</p>'
    if not run.lines():
        return lead
    entry = run.lines()[0]
    tiles = "".join(
        f"<li><small>AUC @ {amount(at, run.unit)}</small><strong>{100 * auc:.1f}</strong>"
        f"<small>{100 * low:.1f} to {100 * high:.1f}</small></li>"
        for at, auc, low, high in zip(*(entry[key] for key in ("at", "auc", "low", "high")), strict=True)
    )
    told = f"Percent, by {words(_estimator(entry))}; below each number its 95 % interval over pairs (bootstrap)."
    return f'{lead}\n<ul class="tiles">{tiles}</ul>\n<p class="note">{told}</p>'


def _name(run: Run) -> str:
    return str(run.scores["protocol"].get("name", "own"))


def _estimator(entry: Mapping[str, Any]) -> str:
    """``"poselib, 2 px, best of 6 on these pairs"``."""
    parts = [entry["estimator"]]
    if entry["threshold"] is not None:
        parts.append(f"{entry['threshold']:g} px")
    if entry.get("choice", "fixed") != "fixed":
        parts.append(entry["choice"])
    return ", ".join(parts)


def _groups(run: Run) -> list[str]:
    groups = list(run.scores["groups"])
    return groups if len(groups) <= GROUPS + 1 else ["all"]


def _results(run: Run) -> str:
    told = (
        "AUC in percent, beside it its 95 % interval over pairs (bootstrap). No model: pairs without an estimate, "
        "which count as infinitely wrong. Inliers: mean over pairs."
    )
    parts, claims = [f'<p class="note">{told}</p>'], published(run.benchmark, _name(run))
    for i, entry in enumerate(run.lines()):
        at = [float(threshold) for threshold in entry["at"]]
        head = ["", "pairs", *(f"AUC @ {amount(threshold, run.unit)}" for threshold in at), "no model", "inliers"]
        rows = []
        for group in _groups(run):
            own = run.lines(group)[i]
            values = zip(*(own[key] for key in ("auc", "low", "high")), strict=True)
            cells = [_percent(*value) for value in values]
            inliers = f"{own['inliers_mean']:.1f}" if "inliers_mean" in own else ""
            pairs = run.scores["groups"][group].get("pairs", int(run.members(group).sum()))
            rows.append([words(group), str(pairs), *cells, str(own["failures"]), inliers])
        theirs = [claim for claim in claims if claim.estimator == entry["estimator"] and claim.auc.keys() & set(at)]
        told_by = [[words(c.name), "", *(f"{c.auc[a]:.1f}" if a in c.auc else "" for a in at), "", ""] for c in theirs]
        parts.append(page.table(_estimator(entry), head, rows, told_by))
    used = {entry["estimator"] for entry in run.lines()}
    if sources := sorted({claim.source for claim in claims if claim.source and claim.estimator in used}):
        by = "; ".join(map(words, sources))
        parts.append(f'<p class="note">In italics, as published for this protocol, not measured here: {by}.</p>')
    left = len(run.scores["groups"]) - len(_groups(run))
    parts.append(f'<p class="note">{left} groups are in scores.json only.</p>' if left else "")
    return page.section("results", "Results", *parts, _averages(run))


def _percent(value: float, low: float, high: float) -> str:
    return f'{100 * value:.1f}<span class="between">{100 * low:.1f} to {100 * high:.1f}</span>'


def _averages(run: Run) -> str:
    """Mean and median of the other columns, for each group."""
    groups = {group: run.scores["groups"][group] for group in _groups(run)}
    groups = groups if len(groups) <= 4 else {"all": groups["all"]}
    head = ["", *(f"{words(group)}, {how}" for group in groups for how in ("mean", "median"))]
    drawn = [f"accuracy@{px}" for px in (2, 4, 6, 7, 8, 9)]  # as a curve below
    names = [name for name in groups["all"]["mean"] if name not in drawn]
    rows = [
        [words(name), *(_number(known[how].get(name)) for known in groups.values() for how in ("mean", "median"))]
        for name in names
    ]
    told = (
        '<p class="note">Precision and accuracy: the share of matches whose error is below the number behind the @.</p>'
    )
    return page.table("Mean and median over pairs", head, rows) + told if rows else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published line of AUCs in percent, by threshold."""

    name: str
    estimator: str
    auc: dict[float, float]
    source: str


def published(benchmark: str, preset: str) -> list[Claim]:
    """What ``data/<benchmark>.toml`` tells under ``[[published.PRESET]]``; what is not understood is left out."""
    try:
        known = tomllib.loads((shared("data") / f"{benchmark}.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    tables = known.get("published", {})
    entries = tables.get(preset) if isinstance(tables, dict) else None
    claims = []
    for entry in entries if isinstance(entries, list) else ():
        try:
            auc = {float(at): float(value) for at, value in zip(entry["at"], entry["auc"], strict=True)}
            name, estimator, source = (str(entry[key]) for key in ("name", "estimator", "source"))
        except (KeyError, TypeError, ValueError):
            continue
        claims.append(Claim(name=name, estimator=estimator, auc=auc, source=source))
    return claims


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(run: Run) -> str:
    plots = [_recall(run), *_accuracies(run), *_sensitivity(run), _counts(run)]
    inside = "\n".join(page.picture(svg, words(caption), above=True) for svg, caption in plots if svg)
    return page.section("curves", "Curves", *_levels(run), f'<div class="plots">\n{inside}\n</div>')


def _levels(run: Run) -> list[str]:
    """Of stress its subject: what ``curves.png`` in the run's folder draws, by kind and level."""
    path = run.path / "curves.png"
    if not path.is_file():
        return []
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    image = f'<img src="data:image/png;base64,{data}" alt="AUC by kind and level of stress">'
    return [page.picture(image, "AUC by kind and level of stress", above=True)]


def _plot(name: str, caption: str, draw: Callable[[Any], object]) -> tuple[str, str]:
    figure = figures.sheet()
    draw(figure.add_subplot())
    return figures.inline_svg(figure, name, caption), caption


def _recall(run: Run) -> tuple[str, str]:
    lines = run.lines()
    if not lines:
        return "", ""
    curves = {_estimator(entry): run.errors(entry["estimator"], entry["threshold"]) for entry in lines}
    what = "corner error" if run.task == "homography" else "pose error"
    return _plot("recall", f"Pairs by {what}", lambda axes: figures.draw_recall(axes, curves, lines[0]["at"], run.unit))


SHARES = {  # kind of column -> caption and what its threshold is
    "accuracy": ("Mean matching accuracy", "error of a match, px"),
    "precision": ("Precision", "symmetric error of a match, px"),
    "epipolar_precision": ("Epipolar precision", "epipolar error"),
}


def _accuracies(run: Run) -> Iterator[tuple[str, str]]:
    """Share of matches below each threshold, mean over pairs, for all and for up to four groups."""
    numbers = run.numbers()
    groups = list(run.scores["groups"]) if len(run.scores["groups"]) <= 5 else ["all"]
    for kind, (caption, x) in SHARES.items():
        places = sorted(float(found[1]) for name in numbers if (found := re.fullmatch(rf"{kind}@([0-9.e+-]+)", name)))
        names = {float(name.partition("@")[2]): name for name in numbers if name.partition("@")[0] == kind}
        if len(places) < 3:
            continue
        curves = {}
        for group in groups:
            members = run.members(group)
            curves[printable(group)] = (places, [float(np.mean(numbers[names[place]][members])) for place in places])
        yield _plot(kind, caption, lambda axes, c=curves, x=x: figures.draw_lines(axes, c, x, "matches below it, %"))  # type: ignore[misc]


def _sensitivity(run: Run) -> Iterator[tuple[str, str]]:
    """AUC over the estimator's threshold, where ``tune.json`` knows it."""
    try:
        known = json.loads((run.path / "tune.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for estimator, found in known.items() if isinstance(known, dict) else ():
        if not (isinstance(found, dict) and found.keys() >= {"thresholds", "auc", "at"}):
            continue
        values = np.array(found["auc"], dtype=np.float64)
        if values.shape != (len(found["thresholds"]), len(found["at"])):
            continue
        curves = {
            f"AUC @ {amount(at, run.unit)}": (found["thresholds"], line)
            for at, line in zip(found["at"], values.T, strict=True)
        }
        caption = f"Choice of threshold, {estimator}"
        name = "threshold-" + re.sub("[^a-z0-9]", "", str(estimator).lower())
        x = "threshold of inliers, px"
        yield _plot(name, caption, lambda axes, c=curves, x=x: figures.draw_lines(axes, c, x, "AUC, %"))  # type: ignore[misc]


def _counts(run: Run) -> tuple[str, str]:
    if not run.lines() or "matches" not in run.rows:
        return "", ""
    entry = run.lines()[0]
    errors = run.errors(entry["estimator"], entry["threshold"])
    matches = run.numbers()["matches"]
    caption = f"Matches and error, {entry['estimator']}"
    return _plot("counts", caption, lambda axes: figures.draw_counts(axes, matches, errors, entry["at"], run.unit))


# --- pairs ------------------------------------------------------------------------------------------------------------


def extremes(errors: NDArray[np.float64], each: int = EACH) -> dict[str, list[int]]:
    """Rows of the ``each`` best, middle and worst pairs, none of them twice; of equals the first ones."""
    order = [int(row) for row in np.argsort(np.where(np.isnan(errors), np.inf, errors), kind="stable")]
    best = order[:each]
    worst = [row for row in order[::-1] if row not in best][:each]
    start = max((len(order) - each) // 2, 0)
    middle = [row for row in order[start : start + each] if row not in best + worst]
    return {"best": best, "median": middle, "worst": worst}


def _pairs(run: Run, root: Path | None, fetch: Fetch | None) -> str:
    title = "Best, median and worst pairs"
    if not run.lines():
        return page.section("pairs", title, '<p class="note">No errors were measured.</p>')
    entry = run.lines()[0]
    errors = run.errors(entry["estimator"], entry["threshold"])
    kinds = extremes(errors)
    rows = [(kind, row) for kind, members in kinds.items() for row in members]
    parts = [f'<p class="note">By error with {words(_estimator(entry))}.</p>']
    names = {row: [run.text("image0")[row], run.text("image1")[row]] for _, row in rows}
    missing = [] if root is None else [name for pair in names.values() for name in pair if not (root / name).is_file()]
    if root is None or fetch is None or missing:
        why = "the images are not there" if root is None or missing else "the matches are not there"
        why += f" (the first that is missing: {words(missing[0])})" if missing else ""
        parts += [f'<p class="note">Pictures were left out because {why}.</p>', _chosen(run, rows, errors)]
        return page.section("pairs", title, *parts)
    key = "".join(
        f'<span class="key" style="background:{colour}"></span>{what} &ensp;'
        for what, colour in (("right", figures.RIGHT), ("wrong", figures.WRONG), ("not known", figures.UNTOLD))
    )
    parts.append(f'<p class="note">Matches by ground truth: {key}</p>')
    for kind, members in kinds.items():
        drawn = [_picture(run, root, fetch, row, errors[row], PICTURES // len(rows)) for row in members]
        parts.append(f"<h3>{kind.capitalize()}</h3>\n" + "\n".join(drawn) if drawn else "")
    return page.section("pairs", title, *parts)


def _chosen(run: Run, rows: Sequence[tuple[str, int]], errors: NDArray[np.float64]) -> str:
    group, matches = run.text("group"), run.numbers().get("matches")
    cells = []
    for kind, row in rows:
        names = f"{words(run.text('image0')[row])}<br>{words(run.text('image1')[row])}"
        count = "" if matches is None else str(int(matches[row]))
        cells.append([kind, _error(errors[row], run.unit), count, words(group[row]), names])
    return page.table("Which pairs these are", ["", "error", "matches", "group", "images"], cells, kind="pairs")


def _error(value: float, unit: str) -> str:
    return amount(float(f"{value:.3g}"), unit) if np.isfinite(value) else "no model"


def _picture(run: Run, root: Path, fetch: Fetch, row: int, error: float, most: int) -> str:
    """A pair and its matches, right ones and wrong ones, or a sentence that says why it cannot be drawn."""
    import torch

    from vispe.data.images import ImageError, read_image
    from vispe.viz import draw_matches

    names = run.text("image0")[row], run.text("image1")[row]
    try:
        images = read_image(root / names[0]), read_image(root / names[1])
    except ImageError as why:
        return f'<p class="note">Not drawn: {words(why)}.</p>'
    found = Drawn(*fetch(row))
    matches = np.asarray(found.matches, dtype=np.int64).reshape(-1, 2)
    correct = None if found.correct is None else np.asarray(found.correct, dtype=bool)
    wrong = np.zeros(len(matches)) if correct is None else 1.0 - correct  # as scores: the wrong ones are drawn on top
    points0 = torch.from_numpy(np.asarray(found.keypoints0, np.float32)[matches[:, 0]])
    points1 = torch.from_numpy(np.asarray(found.keypoints1, np.float32)[matches[:, 1]])
    figure = draw_matches(*images, points0, points1, torch.from_numpy(wrong), max_lines=len(matches) + 1)
    figures.colour_by_truth(figure, correct)
    uri = figures.data_uri(figure, most)
    told = f"{len(matches)} matches" + (
        f", {100 * correct.mean():.0f} % right" if correct is not None and len(correct) else ""
    )
    name0, name1 = map(words, names)
    image = f'<img src="{uri}" alt="{told} between {name0} and {name1}" loading="lazy">'
    return page.picture(image, f"{name0} and {name1}: error {_error(error, run.unit)}, {told}")


# --- how it was made --------------------------------------------------------------------------------------------------


def _protocol(run: Run) -> str:
    known = dict(run.scores["protocol"])
    source = known.pop("source", "")
    told = f'<p class="note">{words(source)}</p>' if source else ""
    return page.section("protocol", "Protocol", told, page.facts("What was asked for, every choice", known))


def _made(run: Run) -> str:
    known = {
        **run.scores["made"],
        "vispe": run.scores["version"],
        **run.scores.get("libraries", {}),
        "pairs": run.pairs,
    }
    seconds = {f"seconds to {stage}": value for stage, value in told_seconds(run).items()}
    times = page.facts("Mean time for an image or a pair, on the machine it ran on", seconds) if seconds else ""
    return page.section("run", "Run", page.facts("What was run", known), times)
