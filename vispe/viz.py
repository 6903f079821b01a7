"""Pictures of matches: two images side by side, a thin line from each point to its partner, coloured by score.

Matplotlib is imported on the first call and used through its objects (``Figure``, ``FigureCanvasAgg``): neither
pyplot nor any global setting of the host program is touched.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vispe.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 1600  # pixels of the whole figure
DPI = 100
GAP = 8  # pixels between the images
MARGIN = 10  # pixels around everything
TITLE, BAR = 32, 52  # pixels above the images for the title, to their right for the colour bar
TALLEST = 1200  # pixels; tall pictures are drawn narrower instead
COLOURS = "viridis"  # readable without seeing red or green
MUTED = 0.65  # how far the photographs are drawn towards grey, so that the lines have the colours to themselves
INK, FAINT = "#1a1a1a", "#666666"


def draw_matches(
    image0: Tensor,
    image1: Tensor,
    points0: Tensor,
    points1: Tensor,
    scores: Tensor,
    *,
    inliers: Tensor | None = None,
    title: str | None = None,
    path: str | os.PathLike[str] | None = None,
    max_lines: int = 500,
) -> Figure:
    """Draw matches between two images ``[3, h, w]`` of any sizes; the figure, also written to ``path`` if given.

    Row i of ``points0`` and ``points1`` ``[n, 2]`` (x, y; pixels of its image) and of ``scores`` ``[n]`` in [0, 1] is
    one match. Given ``inliers`` ``[n]`` bool, only those are drawn and the title counts them. Of more than
    ``max_lines`` the best are drawn, and the title says so. The suffix of ``path`` chooses the format: png, jpg, pdf,
    svg. ``ValueError`` for shapes that do not agree.
    """
    pictures = [_pixels(image) for image in (image0, image1)]
    xy0, xy1, score = (_array(values) for values in (points0, points1, scores))
    keep = np.ones(len(score), bool) if inliers is None else _array(inliers).astype(bool)
    if not (xy0.shape == xy1.shape == (len(keep), 2) and score.shape == keep.shape == (len(keep),)):
        shapes = ", ".join(str(list(values.shape)) for values in (xy0, xy1, score, keep))
        raise ValueError(f"matches are points [n, 2], points [n, 2], scores [n], inliers [n]; got {shapes}")
    order = np.flatnonzero(keep)
    order = order[np.argsort(-score[order], kind="stable")][:max_lines][::-1]  # the best are drawn last, on top
    count = f"{keep.sum()} of {len(keep)} matches agree" if inliers is not None else f"{len(keep)} matches"
    if len(order) < keep.sum():
        count += f", the best {len(order)} drawn"

    figure, axes, layout = _canvas(pictures)
    if len(order):
        _draw_lines(axes, layout.place(xy0[order], 0), layout.place(xy1[order], 1), score[order])
        _draw_bar(figure, layout)
    else:
        _draw_note(axes, "no matches to draw")
    _draw_title(figure, layout, title, count)
    if path is not None:
        kind = os.path.splitext(os.fspath(path))[1].removeprefix(".") or "png"
        write_atomically(path, lambda temporary: figure.savefig(temporary, format=kind))
    return figure


def _array(values: Tensor) -> np.ndarray:
    return np.asarray(torch.as_tensor(values).detach().cpu().float())


def _pixels(image: Tensor) -> np.ndarray:
    """``[3, h, w]`` in [0, 1] as muted ``[h, w, 3]`` uint8."""
    if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ValueError(f"an image to draw is [3, h, w], got {list(image.shape)}")
    image = image.detach().cpu().float()
    image = image.lerp(image.mean(0, keepdim=True).expand_as(image), MUTED)
    return (image.permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8).numpy()


@dataclass(frozen=True)
class _Layout:
    """Where everything is, in pixels of the figure: the two images stand side by side, equally tall."""

    sizes: tuple[tuple[int, int], ...]  # (h, w) of each image in its own pixels
    height: float  # of the images as drawn

    @classmethod
    def of(cls, sizes: tuple[tuple[int, int], ...]) -> _Layout:
        room = WIDTH - 2 * MARGIN - BAR - GAP
        return cls(sizes, min(room / sum(w / h for h, w in sizes), TALLEST))

    @property
    def widths(self) -> list[float]:
        return [self.height * w / h for h, w in self.sizes]

    @property
    def figure(self) -> tuple[float, float]:
        """Width and height of the whole."""
        return 2 * MARGIN + BAR + GAP + sum(self.widths), 2 * MARGIN + TITLE + self.height

    def left(self, i: int) -> float:
        return i * (self.widths[0] + GAP)

    def box(self, left: float, bottom: float, width: float, height: float) -> tuple[float, float, float, float]:
        """A rectangle in pixels, from the lower left corner, as parts of the figure."""
        across, up = self.figure
        return left / across, bottom / up, width / across, height / up

    def place(self, xy: np.ndarray, i: int) -> np.ndarray:
        """Points ``[n, 2]`` of image i on the axes; the centre of a pixel is half a pixel inside its edge."""
        return (xy + 0.5) * (self.height / self.sizes[i][0]) + (self.left(i), 0.0)


def _canvas(pictures: list[np.ndarray]) -> tuple[Figure, Axes, _Layout]:
    """A figure that shows the two pictures, and axes over both whose unit is a pixel of the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layout = _Layout.of(tuple((picture.shape[0], picture.shape[1]) for picture in pictures))
    width, height = layout.figure
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    across = layout.left(1) + layout.widths[1]
    axes = figure.add_axes(layout.box(MARGIN, MARGIN, across, layout.height))
    axes.set_axis_off()
    for i, picture in enumerate(pictures):
        left = layout.left(i)
        axes.imshow(picture, extent=(left, left + layout.widths[i], layout.height, 0), interpolation="antialiased")
    axes.set(xlim=(0, across), ylim=(layout.height, 0), aspect="auto")
    return figure, axes, layout


def _draw_lines(axes: Axes, xy0: np.ndarray, xy1: np.ndarray, score: np.ndarray) -> None:
    """A line and two dots for each match, ``[n, 2]`` on the axes; the more there are, the thinner."""
    from matplotlib.collections import LineCollection

    many = min(len(score) / 500, 1.0)
    style: dict[str, Any] = {"cmap": COLOURS, "norm": _score_norm()}
    lines = LineCollection(
        list(np.stack([xy0, xy1], 1)), linewidths=1.1 - 0.6 * many, alpha=0.85 - 0.35 * many, **style
    )
    lines.set_array(score)
    axes.add_collection(lines, autolim=False)
    for xy in (xy0, xy1):
        axes.scatter(xy[:, 0], xy[:, 1], s=7 - 3 * many, c=score, linewidths=0, zorder=3, **style)


def _score_norm() -> Any:
    from matplotlib.colors import Normalize

    return Normalize(0.0, 1.0)  # not the range of these scores: colours compare across pictures


def _draw_bar(figure: Figure, layout: _Layout) -> None:
    from matplotlib.cm import ScalarMappable

    height = min(layout.height, 220.0)
    box = layout.box(layout.figure[0] - MARGIN - BAR + 10, MARGIN, 10, height)
    bar = figure.colorbar(ScalarMappable(_score_norm(), COLOURS), cax=figure.add_axes(box), ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9, labelcolor=FAINT, pad=4)
    bar.ax.set_title("score", fontsize=9, color=FAINT, pad=6, loc="left")


def _draw_title(figure: Figure, layout: _Layout, title: str | None, count: str) -> None:
    """The title at the left, the count of matches at the right end of the images; without a title, the count leads."""
    width, height = layout.figure
    at: dict[str, Any] = {"y": 1 - (MARGIN + TITLE / 2 - 2) / height, "va": "center", "parse_math": False}
    left, right = MARGIN / width, 1 - (MARGIN + BAR) / width
    figure.text(left, s=title or count, ha="left", fontsize=13, color=INK, **at)
    if title:
        figure.text(right, s=count, ha="right", fontsize=11, color=FAINT, **at)


def _draw_note(axes: Axes, note: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "boxstyle": "round,pad=0.5"}
    axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", va="center", fontsize=13, color=INK, bbox=box)
