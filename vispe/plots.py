"""Pictures of encodings: what each tells attention about a grid, what resampling does, how far rotary reaches.

Four figures, each a pure function of numbers: ``similarity``, ``resampling``, ``decay``, ``learned_basis``. Matplotlib
is used as in ``viz``: through its objects, imported on the first call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vispe.files import write_atomically
from vispe.panels import GRID, HEAD, LEARNED_BASIS, NO_GRID, PANELS, QUERY, TRAINED, Grid, field
from vispe.position import ENCODINGS, axial, rotary, scaling
from vispe.position.resample import RECIPES, ResampleRecipe, resample, square_grid
from vispe.viz import DPI, FAINT, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
SIGNED, PLAIN = "RdBu_r", "viridis"
BASES = ("lightglue_aliked", "lightglue_disk")
COLOURS = ("#1a1a1a", "#4477aa", "#228833", "#ee6677", "#aa3377")  # Paul Tol's, told apart by every eye


# --- the four figures -------------------------------------------------------------------------------------------------

HEADINGS: dict[str, tuple[str, int, int, str, tuple[float, float]]] = {
    # socket -> what is drawn, its first column, how many columns it has, colours and their ends
    "added": ("cosine similarity with the encoding at the dot", 0, 7, PLAIN, (-0.3, 1.0)),
    "rotated": ("score of a query of ones at the dot with keys of ones, over its largest", 0, 7, PLAIN, (-0.3, 1.0)),
    "biased": ("one head's bias minus that at the dot, over its largest", 0, 4, SIGNED, (-1.0, 1.0)),
    "convolved": ("what padding tells, log10", 4, 2, PLAIN, (-6.0, 0.0)),
    "none": ("", 6, 1, PLAIN, (-0.3, 1.0)),
}
WAVES, DIFFERENCES = (-0.6, 1.6), (-0.3, 0.3)  # the colours' ends in ``resampling``


def similarity(grid: Grid = GRID, query: Grid = QUERY, basis: Tensor | None = None) -> Figure:
    """Every encoding of ``PANELS`` as one map of ``grid`` (h, w), seen from the marked cell ``query`` (row, column).

    Grouped by socket, one colour scale a socket; see :func:`field`. 8 must divide both sides: the windowed table tiles.
    ``basis [d/2, 2]``: LightGlue's trained one.
    Encodings that are in neither ``PANELS`` nor ``NO_GRID`` are named at the foot.
    """
    groups = {socket: [name for name in PANELS if ENCODINGS[name].socket == socket] for socket in HEADINGS}
    rows = sum(math.ceil(len(groups[socket]) / 7) for socket in ("added", "rotated", "biased"))
    sheet = _Sheet(f"What each encoding says about {grid[0]} x {grid[1]} cells, seen from the dot", 7, rows, 3, grid)
    for socket, heading in HEADINGS.items():
        sheet.heading(socket, *heading)
        for name in groups[socket]:
            values, note = field(name, grid, query, basis), PANELS[name].note
            if name == LEARNED_BASIS and basis is not None:
                note = "LightGlue's trained weights"
            if socket == "biased":
                note = f"{note}: {values.min() + 0.0:.4g} to {values.max() + 0.0:.4g}"
                values = values - values[query]
                values = values / values.abs().max()
            axes = sheet.map(values.clamp(min=1e-6).log10() if socket == "convolved" else values, name, note)
            if socket not in ("convolved", "none"):
                axes.plot(query[1], query[0], "o", color="white", markeredgecolor=INK, markersize=4.5)
    left_out = sorted(ENCODINGS.keys() - PANELS.keys() - NO_GRID)
    sheet.text(0, sheet.height - 0.25, f"not drawn: {'; '.join(left_out)}" if left_out else "", size=8, color=FAINT)
    return sheet.figure


def pattern(grid: Grid) -> Tensor:
    """A table of one channel, ``[h*w, 1]``: a smooth wave, a bar with sharp edges and one single cell."""
    y, x = ((torch.arange(n) + 0.5) / n for n in grid)
    table = 0.6 * torch.outer((math.pi * y).sin(), (2 * math.pi * x).sin())
    table += torch.outer(((y > 0.2) & (y < 0.8)).float(), ((x > 0.6) & (x < 0.75)).float())
    table[grid[0] // 3, grid[1] // 5] += 1
    return table.reshape(-1, 1)


def relative_error(table: Tensor, reference: Tensor) -> float:
    """``|a - b| / |b|`` in the 2-norm over all entries."""
    return float((table - reference).norm() / reference.norm())


def resampling(source: Grid = (14, 20), target: Grid = (21, 26)) -> Figure:
    """:func:`pattern` of grid ``source`` at grid ``target`` by each of ``RECIPES``, and its difference from ``timm``.

    The geometric recipe needs odd sides: an even one is one cell longer there. Beside the table stands the wrong guess
    that a table is square: 144 rows of 8 x 18 cells, read as 12 x 12.
    """
    sheet = _Sheet("One learned table, twelve ways to read it at another grid", 6, 5, 3, target)
    sheet.heading("the table", "", 0, 2, PLAIN, WAVES)
    sheet.map(pattern(source).reshape(source), "as trained", _cells(source))
    sheet.map(pattern(target).reshape(target), "the pattern itself", f"at {_cells(target)}")
    sheet.heading("guessed", "a square root is no grid: these 144 rows are 8 x 18, not 12 x 12", 2, 4, PLAIN, WAVES)
    true, guess, wide = (8, 18), square_grid(144), (12, 27)
    sheet.map(pattern(true).reshape(true), "as trained", _cells(true))
    sheet.map(pattern(true).reshape(guess), "as guessed", _cells(guess))
    right, wrong = (resample(pattern(true), grid, wide, RECIPES["timm"]) for grid in (true, guess))
    sheet.map(right.reshape(wide), "from the true grid", f"at {_cells(wide)}")
    sheet.map(wrong.reshape(wide), "from the guess", f"relative error {relative_error(wrong, right):.0%}")
    made = {name: _resampled(recipe, source, target) for name, recipe in RECIPES.items()}
    sheet.heading("after", f"{_cells(source)} read at {_cells(target)}", 0, 6, PLAIN, WAVES)
    for name, (grid, ours, _) in made.items():
        sheet.map(ours.reshape(grid), name, _how(RECIPES[name]) + (f", {_cells(grid)}" if grid != target else ""))
    sheet.heading("difference", "from what timm reads", 0, 6, SIGNED, DIFFERENCES)
    for name, (grid, ours, timm) in made.items():
        sheet.map((ours - timm).reshape(grid), name, f"relative error {relative_error(ours, timm):.1%}")
    return sheet.figure


def _resampled(recipe: ResampleRecipe, source: Grid, target: Grid) -> tuple[Grid, Tensor, Tensor]:
    """The grid reached, the pattern there by ``recipe``, and by timm's."""
    if recipe.kernel == "geometric":
        source, target = (source[0] | 1, source[1] | 1), (target[0] | 1, target[1] | 1)
    ours, timm = (resample(pattern(source), source, target, r) for r in (recipe, RECIPES["timm"]))
    return target, ours, timm


def _how(recipe: ResampleRecipe) -> str:
    parts = {"antialias": recipe.antialias, "aligned corners": recipe.align_corners, f"+{recipe.offset}": recipe.offset}
    return ", ".join([recipe.kernel, *(part for part, there in parts.items() if there)])


def _cells(grid: Grid) -> str:
    return f"{grid[0]} x {grid[1]}"


def extensions(dim: int = 128, original: int = 64, factor: float = 4.0) -> dict[str, Tensor]:
    """The ``dim/2`` frequencies as trained on ``original`` positions, and extended ``factor`` times in four ways.

    LongRoPE's factors are searched for each model; here all are ``factor``, which is PI.
    """
    theta, longer = rotary.frequencies(dim), int(original * factor)
    same = [factor] * len(theta)
    return {
        "as trained": theta,
        "PI": scaling.interpolate(theta, factor).theta,
        "NTK-aware": scaling.ntk(theta, factor).theta,
        "YaRN": scaling.yarn(theta, factor, original).theta,
        "LongRoPE, all factors alike": scaling.longrope(theta, same, same, longer, original, factor=factor).theta,
    }


def decay(dim: int = 128, original: int = 64, factor: float = 4.0, reach: int = 250) -> Figure:
    """``rotary.decay_bound`` up to distance ``reach`` and the wavelength of each pair, under each of ``extensions``.

    The attention scales of YaRN and LongRoPE are left out: a temperature, the same at every distance.
    """
    figure = _figure(13.0, 5.2)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15)
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    distance, thetas = torch.arange(reach + 1), extensions(dim, original, factor)
    for (name, theta), colour in zip(thetas.items(), COLOURS, strict=True):
        style: dict[str, Any] = {"color": colour, "label": name, "linewidth": 4 if name == "PI" else 1.6}
        style |= {"alpha": 0.4} if name == "PI" else {"linestyle": ":" if "LongRoPE" in name else "-"}
        left.plot(distance.numpy(), rotary.decay_bound(distance, dim, theta=theta).numpy(), **style)
        right.plot(range(dim // 2), (2 * math.pi / theta).numpy(), **style)
    _label(left, f"Bound on a score, {dim} channels a head", "distance in positions", "mean of |S_j|")
    left.set(xlim=(0, reach), ylim=(0, None))
    left.legend(frameon=False, fontsize=9, labelcolor=INK)
    _label(right, f"Wavelengths, {original} positions made {factor:g} times as many", "pair", "positions a turn")
    right.set_yscale("log")
    for length in (original, original * factor):
        right.axhline(length, color=FAINT, linewidth=0.7, zorder=0)
        right.text(dim / 2, length * 1.1, f"{length:g} positions", ha="right", fontsize=8, color=FAINT)
    return figure


def trained_bases() -> dict[str, Tensor]:
    """LightGlue's bases ``W_r [32, 2]``, name -> weights as published. ``WeightsError`` where they cannot be had."""
    from vispe.weights import load

    return {name: load(name).get_parameter("basis.weight").detach() for name in BASES}


def learned_basis(bases: Mapping[str, Tensor], grid: Grid = TRAINED) -> Figure:
    """Frequencies ``[pairs, 2]`` of each of ``bases`` as points of the plane, and their magnitudes in order.

    Radians over half of the image's long side, LightGlue's unit. Beside them RoPE-ViT's axial frequencies of a ``grid``
    (h, w), in the same unit: ``max(h, w)/2`` cells.
    """
    figure = _figure(4.6 * (len(bases) + 1), 4.9)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
    *planes, last = figure.subplots(1, len(bases) + 1)
    theta = axial.axis_frequencies(HEAD, 100.0) * max(grid) / 2
    nothing = torch.zeros_like(theta)
    axes_of_vit = torch.cat((torch.stack((theta, nothing), 1), torch.stack((nothing, theta), 1)))
    vit = f"RoPE-ViT axial, {_cells(grid)} cells"
    end = 1.1 * max(float(points.abs().max()) for points in (*bases.values(), theta))
    for plane, (name, weight), colour in zip(planes, bases.items(), COLOURS[1:], strict=False):
        plane.scatter(*axes_of_vit.numpy().T, s=14, color="#bbbbbb", label=vit, zorder=2)
        plane.scatter(*weight.numpy().T, s=22, color=colour, label=name, zorder=3)
        plane.set(xlim=(-end, end), ylim=(-end, end), aspect="equal")
        _label(plane, f"{name}: where each pair looks", "along x, radians", "along y, radians")
        for line in (plane.axhline, plane.axvline):
            line(0, color="#dddddd", linewidth=0.8, zorder=0)
    for (name, weight), colour in zip({vit: axes_of_vit, **bases}.items(), ("#bbbbbb", *COLOURS[1:]), strict=False):
        last.plot(weight.norm(dim=1).sort().values.numpy(), ".-", color=colour, linewidth=1, label=name)
    _label(last, "How fast each pair turns", "pair, slowest first", "radians over half of the long side")
    last.set_yscale("log")
    last.set_box_aspect(1)
    turn = last.secondary_yaxis("right", functions=(_wavelength, _wavelength))
    turn.set_ylabel("wavelength over the long side", fontsize=9, color=FAINT)
    turn.tick_params(labelsize=8, labelcolor=FAINT, color=FAINT)
    turn.spines[:].set_color(FAINT)
    for axis in (last.yaxis, turn.yaxis):
        axis.set_major_formatter("{x:g}")
    last.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _wavelength(radians: np.ndarray) -> np.ndarray:
    """Radians over half of the long side <-> wavelength over the long side; its own inverse."""
    return math.pi / np.maximum(radians, 1e-9)


def plot_encodings(
    out: str | os.PathLike[str], format: str = "png", bases: Mapping[str, Tensor] | None = None
) -> list[Path]:
    """Write the figures into folder ``out`` as ``format`` (png or svg), each whole or absent; their paths.

    ``bases`` as :func:`trained_bases` gives them; without them ``learned_basis`` is left out, and LightGlue's basis is
    drawn as it starts. ``ValueError`` for another format, ``OSError`` for a folder that is not there.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be png or svg, got {format!r}")
    basis = (bases or {}).get(BASES[0])
    figures = {"similarity": similarity(basis=basis), "resampling": resampling(), "decay": decay()}
    if bases:
        figures["learned_basis"] = learned_basis(bases)
    paths = {Path(out) / f"{name}.{format}": figure for name, figure in figures.items()}
    for path, figure in paths.items():
        write_atomically(path, partial(figure.savefig, format=format))
    return list(paths)


# --- paper and pencil -------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    """A white figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)
    axes.set_xlabel(x, fontsize=9, color=FAINT)
    axes.set_ylabel(y, fontsize=9, color=FAINT)
    axes.tick_params(labelsize=8, labelcolor=FAINT, color=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


class _Sheet:
    """Maps of one size in columns under headings, placed in inches from the upper left corner: nothing overlaps."""

    MARGIN, WIDTH, GAP, TITLE, HEADING, NAME = 0.35, 1.95, 0.16, 0.65, 0.52, 0.5

    def __init__(self, title: str, columns: int, rows: int, headings: int, shape: Grid) -> None:
        self.columns, self.tall = columns, self.WIDTH * shape[0] / shape[1]
        self.width = 2 * self.MARGIN + columns * (self.WIDTH + self.GAP) - self.GAP
        self.height = self.TITLE + headings * self.HEADING + rows * (self.tall + self.NAME) + self.MARGIN
        self.figure = _figure(self.width, self.height)
        self.text(0, 0.38, title, size=15, color=INK)
        self.line, self.next = self.TITLE, 0
        self.bottom = self.TITLE

    def text(self, left: float, top: float, words: str, **style: Any) -> None:
        at = (self.MARGIN + left) / self.width, 1 - top / self.height
        self.figure.text(*at, words, va="center", parse_math=False, **style)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        corner = (self.MARGIN + left) / self.width, 1 - (top + height) / self.height
        axes = self.figure.add_axes((*corner, width / self.width, height / self.height))
        axes.set(xticks=[], yticks=[], anchor="NW")
        axes.spines[:].set(linewidth=0.5, color=FAINT)
        return axes

    def heading(
        self, name: str, what: str, first: int, columns: int, colours: str, limits: tuple[float, float]
    ) -> None:
        """Begin a group of maps at column ``first``, in a new row if that is 0; its colours stand at its right end."""
        self.line = self.bottom if first == 0 else self.line
        self.name, self.first, self.next, self.colours, self.limits = name, first, first, colours, limits
        self.top, left, width = self.line + self.HEADING, self._left(first), self._left(columns) - self.GAP
        self.figure.add_artist(self._rule(left, width, self.line + 0.08))
        self.text(left, self.line + 0.3, name, size=11, color=INK, weight="bold")
        self.text(left + 0.95, self.line + 0.3, what, size=9, color=FAINT)
        if columns > 1:
            bar = self.axes(left + width - 1.0, self.line + 0.25, 0.7, 0.1)
            bar.imshow(np.linspace(0, 1, 64)[None], cmap=colours, aspect="auto")
            for at, value, side in zip((-1.05, -0.25), limits, ("right", "left"), strict=True):
                self.text(left + width + at, self.line + 0.3, f"{value:g}", size=8, color=FAINT, ha=side)

    def map(self, values: Tensor, name: str, note: str) -> Axes:
        """The next map of the group, ``[h, w]``, under its name and a note."""
        if self.next == self.columns:
            self.top, self.next = self.bottom, self.first
        left, low, high = self._left(self.next), *self.limits
        self.text(left, self.top + 0.1, name, size=8.5, color=INK)
        self.text(left, self.top + 0.26, note, size=7.5, color=FAINT)
        axes = self.axes(left, self.top + 0.36, self.WIDTH, self.tall)
        axes.set_label(f"{self.name}: {name}")
        axes.imshow(values.numpy(), cmap=self.colours, vmin=low, vmax=high, interpolation="nearest")
        self.next, self.bottom = self.next + 1, self.top + self.NAME + self.tall
        return axes

    def _left(self, column: int) -> float:
        return column * (self.WIDTH + self.GAP)

    def _rule(self, left: float, width: float, top: float) -> Any:
        from matplotlib.lines import Line2D

        x, y = (self.MARGIN + left) / self.width, 1 - top / self.height
        return Line2D((x, x + width / self.width), (y, y), color="#cccccc", linewidth=0.8)
