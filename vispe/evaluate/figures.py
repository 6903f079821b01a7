"""The plots of reports and comparisons, each drawn on axes handed in, and their way into a page or a file.

Matplotlib is used as in ``viz``: through its objects, imported on the first call.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vispe.evaluate.runs import amount

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, LINE = "#1a1a1a", "#666666", "#dddddd"
SERIES = ("#2f6db5", "#d1603d", "#2a8a57", "#8a52a8", "#b8860b", "#3f9aa8")  # told apart by every eye, on black as well
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # for a seventh series on
NEAR, FAR, LOST = ("#2a66ab", "#79a6d8", "#b5cfec", "#d9e7f6"), "#f0b49f", "#c9512c"  # kinds of error, best first
RIGHT, WRONG, UNTOLD = "#00a5ff", "#ff4d1a", "#f5d90a"  # on grey photographs
VARIABLES = {
    INK: "ink", FAINT: "faint", LINE: "line", FAR: "f0", LOST: "f1",
    **{colour: f"s{i}" for i, colour in enumerate(SERIES)},
    **{colour: f"n{i}" for i, colour in enumerate(NEAR)},
}  # fmt: skip
FAMILY = "system-ui, sans-serif"
PANEL = (4.4, 3.1)  # inches of one plot; about as wide as a phone


# --- plots ------------------------------------------------------------------------------------------------------------


def draw_recall(axes: Axes, curves: Mapping[str, ArrayLike], at: Sequence[float], unit: str) -> None:
    """The share of pairs below each error, one curve a label, up to the largest of the thresholds ``at``.

    Straight from point to point, as ``metrics.auc`` has it: the area left of a threshold, over it, is the AUC.
    """
    end = max(at)
    for i, (label, errors) in enumerate(curves.items()):
        values = np.asarray(errors, dtype=np.float64)
        below = np.sort(values[values < end])
        recall = 100 * np.arange(len(below) + 1) / max(len(values), 1)
        axes.plot([0, *below, end], [*recall, recall[-1]], label=label, **_series(i))
    for threshold in at[:-1]:
        axes.axvline(threshold, color=LINE, linewidth=0.8, zorder=0)
    axes.set(xlim=(0, end), ylim=(0, 100), xticks=_ticks(at))
    _dress(axes, f"error, {unit}", "pairs below it, %")


def draw_lines(axes: Axes, curves: Mapping[str, tuple[ArrayLike, ArrayLike]], x: str, y: str) -> None:
    """Points (x, and y as parts of 1) joined by lines, one line a label; tiny x are told apart by a logarithm."""
    places = np.concatenate([np.asarray(xs, dtype=np.float64) for xs, _ in curves.values()])
    for i, (label, (xs, ys)) in enumerate(curves.items()):
        axes.plot(np.asarray(xs), 100 * np.asarray(ys, dtype=np.float64), label=label, marker="o", **_series(i))
    axes.set_ylim(0, 100)
    if 0 < places.min() < 0.01:
        axes.set_xscale("log")
        axes.set_xticks(np.unique(places), [f"{place:g}" for place in np.unique(places)])
        axes.set_xticks([], minor=True)
    _dress(axes, x, y)


def draw_curve(axes: Axes, curves: Mapping[str, tuple[ArrayLike, ArrayLike]], x: str, y: str) -> None:
    """Two parts of 1 against each other, one line a label, a dot at its end."""
    for i, (label, (xs, ys)) in enumerate(curves.items()):
        along, up = 100 * np.asarray(xs, dtype=np.float64), 100 * np.asarray(ys, dtype=np.float64)
        axes.plot(along, up, label=label, **_series(i))
        axes.plot(along[-1:], up[-1:], marker="o", **_series(i))
    axes.set(xlim=(0, 100), ylim=(0, 101))
    _dress(axes, x, y)


def draw_counts(axes: Axes, matches: ArrayLike, errors: ArrayLike, at: Sequence[float], unit: str) -> None:
    """How many pairs have so many matches, split by how large their error is."""
    counts, found = np.asarray(matches, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    limits = [*at, np.inf]
    classes, low = [], 0.0
    for limit in limits:
        classes.append(counts[(found >= low) & (found < limit)])
        low = limit
    classes.append(counts[~(found < np.inf)])
    named = [f"below {amount(at[0], unit)}", *(f"{a:g} to {b:g}" for a, b in pairwise(at))]
    named += [f"{at[-1]:g} and more", "no model"]
    shades = [*(NEAR * len(at))[: len(at)], FAR, LOST]
    bins = np.histogram_bin_edges(counts, bins=min(24, max(6, round(len(counts) ** 0.5))))
    axes.hist(classes, bins=list(bins), stacked=True, color=shades, label=named, edgecolor="none", rwidth=0.92)
    axes.set_xlim(bins[0], bins[-1])
    _dress(axes, "matches of a pair", "pairs", above=True)


def draw_duel(axes: Axes, first: ArrayLike, others: Mapping[str, ArrayLike], names: tuple[str, str], at: float) -> None:
    """Each pair as a point: its error in the first run across, in the others up; both logarithmic.

    Below the diagonal the other run is better. What is larger than 10 ``at``, or failed, lies on the border ("lost").
    ``names`` are those of the axes.
    """
    low, high = at / 1000, 10 * at
    x = np.clip(np.asarray(first, dtype=np.float64), low, high)
    axes.plot([low, high], [low, high], color=FAINT, linewidth=0.8, zorder=1)
    for line in (axes.axvline, axes.axhline):
        line(at, color=LINE, linewidth=0.8, zorder=0)
    size = 14 if len(x) < 300 else 6
    for i, (label, errors) in enumerate(others.items(), start=1):
        y = np.clip(np.asarray(errors, dtype=np.float64), low, high)
        better, worse = int((y < x).sum()), int((y > x).sum())
        label = f"{label}: better in {better}, worse in {worse}"
        axes.scatter(x, y, s=size, alpha=0.55, linewidths=0, color=SERIES[i % len(SERIES)], label=label, zorder=2)
    room = low / 1.35, high * 1.35
    axes.set(xscale="log", yscale="log", xlim=room, ylim=room, aspect="equal")
    places = [at / 100, at / 10, at, high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(places, [*(f"{place:g}" for place in places[:-1]), "lost"])
        axis.set_ticks([], minor=True)
    _dress(axes, *names)


def _series(i: int) -> dict[str, Any]:
    dashes = DASHES[i // len(SERIES) % len(DASHES)]
    return {"color": SERIES[i % len(SERIES)], "linestyle": dashes, "linewidth": 1.6, "markersize": 3.5}


def _ticks(at: Sequence[float]) -> list[float]:
    """The thresholds, without those that would be written over each other."""
    kept = [max(at)]
    for threshold in sorted(at, reverse=True)[1:]:
        if kept[-1] - threshold >= 0.06 * max(at):
            kept.append(threshold)
    return [0, *reversed(kept)] if kept[-1] >= 0.06 * max(at) else [0, *reversed(kept[:-1])]


def _dress(axes: Axes, x: str, y: str, *, above: bool = False) -> None:
    """Names of the axes, quiet lines, and a legend where there is room, or ``above`` the plot."""
    axes.set_xlabel(x, fontsize=9, color=FAINT, parse_math=False)
    axes.set_ylabel(y, fontsize=9, color=FAINT, parse_math=False)
    axes.tick_params(labelsize=8.5, labelcolor=FAINT, color=LINE, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    if axes.get_legend_handles_labels()[0]:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.02), "ncols": 3} if above else {}
        style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 1.6}
        for text in axes.legend(borderaxespad=0.2, **style, **place).get_texts():
            text.set_parse_math(False)


# --- paper ------------------------------------------------------------------------------------------------------------


def sheet(width: float = PANEL[0], height: float = PANEL[1], dpi: int = 120) -> Figure:
    """An empty white figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def inline_svg(figure: Figure, name: str, what: str) -> str:
    """A figure as an ``<svg>`` to stand in a page: ``what`` is read out, ids begin with ``name``, words stay words.

    Colours of ``VARIABLES`` become CSS variables (``--ink`` ...), so that the page's dark mode reaches them. The same
    figure gives the same text.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # savefig has no argument for these
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"(font: [^;\"]*?px|font-family:) [^;\"]*", rf"\1 {FAMILY}", text)  # either way to say it
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    start = re.sub(r' (width|height)="[^"]*"', "", text[: text.index(">")])
    label = f' role="img" aria-label="{escape(what)}"'
    return re.sub(r"\n\s*", "\n", start + label + text[text.index(">") :]).strip()


def data_uri(figure: Figure, most: int) -> str:
    """The first axes of a figure as a JPEG in a ``data:`` URI of at most ``most`` characters, coarser where it must be.

    The coarsest there is may still be longer.
    """
    inside = figure.axes[0].get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    for dpi, quality in ((100, 85), (100, 70), (80, 60), (60, 50), (40, 40)):
        buffer = io.BytesIO()
        how = {"quality": quality, "optimize": True}
        figure.savefig(buffer, format="jpg", dpi=dpi, bbox_inches=inside, pil_kwargs=how)
        uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
        if len(uri) <= most:
            break
    return uri


def colour_by_truth(figure: Figure, correct: NDArray[np.bool_] | None) -> None:
    """Recolour a figure of ``viz.draw_matches`` whose scores are 1 for wrong matches and 0 for right ones.

    Without ground truth (None) all matches have one colour.
    """
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([UNTOLD, UNTOLD] if correct is None else [RIGHT, WRONG])
    for collection in figure.axes[0].collections:
        collection.set_cmap(colours)
