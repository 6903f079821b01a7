"""What a run leaves for people: ``report.json``, ``confusion.png`` and ``curves.png``."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vispe.files import write_atomically
from vispe.metrics.classification import Tally

LIBRARIES = ("vispe", "torch", "torchvision", "lightning", "numpy", "pillow")
SCORES = {
    "val_accuracy": "top 1", "val_top5": "top 5", "val_miou": "mIoU", "val_pixel_accuracy": "accuracy", "val_AP": "AP",
    "val_AP50": "AP50", "val_PQ": "PQ", "val_SQ": "SQ", "val_RQ": "RQ",
    "val_precision": "precision", "val_recall": "recall", "val_AUC5": "AUC at 5",
}  # fmt: skip
NAMED = 30  # of more classes than this, the axes of the confusion matrix carry no names


def versions() -> dict[str, str]:
    """Python, the platform and the libraries that numbers depend on."""
    made = {"python": platform.python_version(), "platform": platform.platform()}
    for name in LIBRARIES:
        try:
            made[name] = version(name)
        except PackageNotFoundError:
            made[name] = "unknown"
    return made


def peak_memory(device: torch.device) -> float:
    """The most memory held so far, in MiB: of the GPU, else resident in this process (0 where that is not known)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def at_size(tally: Tally, timing: Mapping[str, float]) -> dict[str, Any]:
    """The entry of one resolution."""
    told = tally.summary()
    return {
        "accuracy": told["accuracy"],
        "top5": told["top5"],
        "loss": told["loss"],
        "images": told["images"],
        "milliseconds_per_image": 1000 * timing["seconds"] / max(told["images"], 1),
        "images_per_second": timing["images_per_second"],
    }


def draw_confusion(path: Path, confusion: torch.Tensor, classes: Sequence[str]) -> None:
    """The confusion matrix, rows (true classes) as parts of 1; numbers in the cells where there is room."""
    part = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).cpu().numpy()
    count = len(classes)
    side = min(max(3.5, 1.8 + 0.42 * count), 14)
    figure = new_figure(side + 0.8, side)
    axes = figure.add_subplot()
    shown = axes.imshow(part, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, ax=axes, fraction=0.046)
    axes.set(xlabel="predicted", ylabel="true")
    if count <= NAMED:
        ticks = range(count)
        axes.set_xticks(ticks, [_short(name) for name in classes], rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks(ticks, [_short(name) for name in classes], fontsize=8, parse_math=False)
    if count <= 15:
        for i in range(count):
            for j in range(count):
                colour = "white" if part[i, j] > 0.5 else "#444444"
                axes.text(j, i, f"{part[i, j]:.2f}", ha="center", va="center", fontsize=6.5, color=colour)
    write_figure(figure, path)


def draw_curves(path: Path, rows: Sequence[Mapping[str, float]], updates_per_epoch: int) -> None:
    """Loss of training and validation, scores of validation (where there are) and learning rate, over epochs."""
    seen = {name for row in rows for name in row}
    blind = "val_loss" in seen and not seen & SCORES.keys()
    figure = new_figure(7 if blind else 10, 3.2)
    loss, *scores, rate = figure.subplots(1, 2 if blind else 3)

    def draw(axes: Any, column: str, label: str, style: str = "-") -> None:
        points = [(row["update"] / updates_per_epoch, row[column]) for row in rows if column in row]
        if points:
            style = f"o{style}" if len(points) < 3 and "o" not in style else style  # a line needs two points to be seen
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=3)

    draw(loss, "loss", "training")
    draw(loss, "val_loss", "validation", "o-")
    for axes in scores:
        for column, label in SCORES.items():
            draw(axes, column, label, "o-")
    draw(rate, "lr", "highest" if blind else "head")
    kinds = {"val_miou": "pixels", "val_AP": "objects", "val_PQ": "objects", "val_AUC5": "matches"}
    what = next((word for column, word in kinds.items() if column in seen), "accuracy")
    titled = [(loss, "loss"), *((axes, f"{what} (validation)") for axes in scores), (rate, "learning rate")]
    for axes, title in titled:
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("epoch", fontsize=9)
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    write_figure(figure, path)


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}…"


def new_figure(width: float, height: float) -> Any:
    """In inches, white, drawn without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Any, path: Path) -> None:
    """As a PNG that is whole or not there."""
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
