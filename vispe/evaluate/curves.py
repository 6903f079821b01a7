"""How accuracy falls with rotation, scale, blur, noise and low light: a run of the stress benchmark as curves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vispe.data.stress import KINDS, parse_group
from vispe.evaluate.figures import FAINT, INK, PANEL, SERIES, draw_lines, sheet
from vispe.evaluate.runs import Run, amount, printable
from vispe.files import write_atomically

Curve = dict[str, list[float]]  # a name such as "level", "auc@3", "matches" -> a number a level

COLUMNS = 3  # panels side by side
FALLING = "light"  # harder to the left, where the other kinds are harder to the right: drawn the other way round


def curves(run: Run, estimator: str | None = None) -> dict[str, Curve]:
    """``{"rotation": {"level": [0.0, ...], "pairs": ..., "auc@1": ..., ...}, ...}``, in the order of levels.

    For each threshold T of the run ``auc@T``, with ``auc@T low`` and ``auc@T high``, the 95 % interval over pairs; then
    the means ``precision@3`` and ``matches``. AUC and precision are in [0, 1]; AUC by ``estimator``, else by the run's
    first. ``ValueError`` for a run of another benchmark or an estimator that it does not have.
    """
    if run.benchmark != "stress":
        raise ValueError(f"{printable(run.path)!r} is a run of {printable(run.benchmark)!r}: only stress has levels")
    found: dict[str, Curve] = {}
    for kind, level, group in _levels(run):
        points: dict[str, float] = {"level": level, "pairs": run.scores["groups"][group]["pairs"]}
        entry = _entry(run, group, estimator)
        for i, at in enumerate(entry["at"]):
            points |= {f"auc@{at:g}": entry["auc"][i], f"auc@{at:g} low": entry["low"][i]}
            points |= {f"auc@{at:g} high": entry["high"][i]}
        mean = run.scores["groups"][group]["mean"]
        points |= {name: mean[name] for name in ("precision@3", "matches")}
        curve = found.setdefault(kind, {})
        for name, value in points.items():
            curve.setdefault(name, []).append(value)
    return found


def curve_rows(run: Run, estimator: str | None = None) -> list[tuple[str, ...]]:
    """The curves as a table of text, its heading first: AUC and precision in percent, AUC with its interval."""
    told = curves(run, estimator)
    entry = _entry(run, _levels(run)[0][2], estimator)
    limits = [f"auc@{at:g}" for at in entry["at"]]
    aucs = [f"AUC@{amount(at, run.unit)}" for at in entry["at"]]
    rows: list[tuple[str, ...]] = [("kind", "level", "pairs", *aucs, "precision@3 px", "matches")]
    for kind, curve in told.items():
        for i, level in enumerate(curve["level"]):
            cells = [_interval(*(curve[f"{name}{end}"][i] for end in ("", " low", " high"))) for name in limits]
            last = f"{100 * curve['precision@3'][i]:.1f}", f"{curve['matches'][i]:.0f}"
            rows.append((kind, f"{level:g}", f"{curve['pairs'][i]:.0f}", *cells, *last))
    return rows


def draw_curves(
    runs: Sequence[Run], out: str | os.PathLike[str], *, at: float | None = None, estimator: str | None = None
) -> None:
    """A PNG: a panel a kind, in it a line a run, the AUC below ``at`` pixels (None: the middle threshold) by level.

    Bands are 95 % intervals over pairs. ``ValueError`` where :func:`curves` has one, or for a threshold that a run does
    not have.
    """
    if not runs:
        raise ValueError("there is no run to draw")
    told = {label: curves(run, estimator) for label, run in zip(_labels(runs), runs, strict=True)}
    at = _threshold(runs, estimator, at)
    kinds = [kind for kind in KINDS if any(kind in curve for curve in told.values())]
    columns = min(COLUMNS, len(kinds) + 1)
    lines = -(-(len(kinds) + 1) // columns)
    figure = sheet(PANEL[0] * columns, PANEL[1] * lines)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, kind in zip(panels, kinds, strict=False):
        _draw_kind(axes, kind, told, f"auc@{at:g}", f"AUC@{amount(at, runs[0].unit)}, %")
    for axes in panels[len(kinds) :]:
        axes.set_axis_off()
    _draw_legend(panels[len(kinds)], panels[0].get_lines()[: len(told)], list(told))
    write_atomically(out, lambda path: figure.savefig(path, format="png"))


def _draw_kind(axes: Any, kind: str, told: dict[str, dict[str, Curve]], name: str, y: str) -> None:
    there = {label: curve[kind] for label, curve in told.items() if kind in curve}
    colours = {label: SERIES[i % len(SERIES)] for i, label in enumerate(told)}
    for label, curve in there.items():
        low, high = ([100 * value for value in curve[f"{name} {end}"]] for end in ("low", "high"))
        axes.fill_between(curve["level"], low, high, color=colours[label], alpha=0.13, linewidth=0)
    everyone = {label: (there[label]["level"], there[label][name]) if label in there else ([], []) for label in told}
    draw_lines(axes, everyone, KINDS[kind].axis, y)
    if legend := axes.get_legend():  # one for all panels stands apart
        legend.remove()
    axes.set_ylim(0, 102)  # a line at 100 is seen whole
    if kind == FALLING:
        axes.invert_xaxis()
    if kind == "rotation":
        axes.set_xticks(range(0, 181, 45))


def _draw_legend(axes: Any, lines: Sequence[Any], labels: list[str]) -> None:
    legend = axes.legend(lines, labels, loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    legend.set_title("bands: 95 % bootstrap intervals over pairs", {"size": 8.5})
    legend.get_title().set_color(FAINT)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _labels(runs: Sequence[Run]) -> list[str]:
    """Each run's own, with its folder where two have the same."""
    plain = [run.label for run in runs]
    named = [f"{a} ({printable(r.path.name)})" if plain.count(a) > 1 else a for a, r in zip(plain, runs, strict=True)]
    return [f"{a} [{i + 1}]" if named.count(a) > 1 else a for i, a in enumerate(named)]


def _levels(run: Run) -> list[tuple[str, float, str]]:
    """(kind, level, group), in the order of kinds and from easy to hard."""
    groups = [group for group in run.scores["groups"] if group != "all"]
    if not groups:  # one level alone is all there is
        raise ValueError(f"{printable(run.path)!r} has one level only: a curve needs two")
    found = [(*parse_group(group), group) for group in groups]
    order = list(KINDS)
    return sorted(found, key=lambda x: (order.index(x[0]), -x[1] if x[0] == FALLING else x[1]))


def _entry(run: Run, group: str, estimator: str | None) -> dict[str, Any]:
    lines = run.lines(group)
    for entry in lines:
        if estimator in (None, entry["estimator"]):
            return entry
    there = ", ".join(entry["estimator"] for entry in lines)
    raise ValueError(f"{printable(run.path)!r} has no estimator {estimator!r}; it has {there}")


def _threshold(runs: Sequence[Run], estimator: str | None, at: float | None) -> float:
    for run in runs:
        there = _entry(run, "all", estimator)["at"]
        at = sorted(there)[len(there) // 2] if at is None else at
        if at not in there:
            raise ValueError(f"{printable(run.path)!r} has AUC@{', '.join(f'{a:g}' for a in there)}, not @{at:g}")
    assert at is not None
    return at


def _interval(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} ({100 * low:.0f}-{100 * high:.0f})"
