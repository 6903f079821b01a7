"""The fair ablation: one ViT, one budget, one set of seeds; only the line that says where a patch is changes.

Every run is a ``fit`` of its own in a folder of its own, so a stopped ablation goes on where it was. Accuracy is
reported at the training size and, without fine-tuning, at others, as mean and spread over seeds; a difference that is
within the spread is said to be within it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vispe.files import check_writable, write_atomically, write_json
from vispe.layers.sockets import PositionSpec
from vispe.recipe import plain
from vispe.spec import Spec
from vispe.train.classify import fit
from vispe.train.loaders import Say
from vispe.train.report import write_figure
from vispe.train.spec import ClassifyRecipe, pair

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Key = TypeVar("Key")

ANCHORS = (
    "ViT-B/16, ImageNet 5-shot (Dosovitskiy et al. 2021, table 8): none 0.614, 1-D 0.642, 2-D 0.640, relative 0.640",
    "rope-vit S, ImageNet at 224 / 384 (Heo et al. 2024): table 80.4/79.4, axial 80.9/80.0, mixed 80.9/81.8",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateRecipe(Spec):
    """``base``: a whole classification recipe; each of ``positions`` (lines such as ``"table + axial"``) replaces its
    position, each of ``seeds`` its seed. ``scales``: test sizes as factors of the training size. ``jobs``: runs at a
    time, each with ``threads`` threads.
    """

    base: ClassifyRecipe
    positions: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    scales: tuple[float, ...] = (0.75, 1.5, 2.0)
    jobs: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("positions", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must be some values, each once, got {list(values)}")
        for line in self.positions:
            PositionSpec.parse(line)
        if min(self.jobs, self.threads) < 1:
            raise ValueError(f"jobs and threads are at least 1, got {self.jobs}, {self.threads}")
        if not all(scale > 0 for scale in self.scales):
            raise ValueError(f"scales are positive factors of the training size, got {list(self.scales)}")

    def sizes(self) -> list[tuple[int, int]]:
        """The training size, then the test sizes: rounded to whole patches."""
        knobs = self.base.model.spec
        h, w = pair(self.base.train.size or knobs.get("image_size", 224))
        patch = knobs.get("patch_size", 16)
        scaled = [tuple(max(round(side * s / patch), 1) * patch for side in (h, w)) for s in self.scales]
        return [(h, w), *[(a, b) for a, b in dict.fromkeys(scaled) if (a, b) != (h, w)]]

    def run(self, line: str, seed: int) -> ClassifyRecipe:
        """The recipe of one run."""
        model = self.base.model.but(spec={**self.base.model.spec, "position": line})
        sizes = tuple(self.sizes()[1:])
        return self.base.but(model=model, train=self.base.train.but(seed=seed), evaluate_at=sizes)


def ablate(recipe: AblateRecipe, out: str | os.PathLike[str], say: Say = print) -> dict[str, Any]:
    """Train every position with every seed below ``out``; the summary, as in ``ablation.json``.

    Also written: ``ablation.md`` (the table), ``ablation.png`` (accuracy over size) and, where a plain table was
    trained, ``table_similarity.png``. Runs that are finished are not run again.
    """
    folder, found = Path(out), {}
    check_writable(folder)
    wanted = [(line, seed) for seed in recipe.seeds for line in recipe.positions]
    tasks = {key: (recipe.run(*key), folder / folder_name(*key)) for key in wanted}
    for (line, seed), report in reports(tasks, recipe.jobs, recipe.threads):
        found[line, seed] = {tuple(r["size"]): r["accuracy"] for r in report["results"]}
        told = ", ".join(f"{h}: {accuracy:.4f}" for (h, _), accuracy in found[line, seed].items())
        say(f"{len(found)}/{len(wanted)}  {line}, seed {seed}: {told}")
    summary = summarise(recipe, found)
    write_json(folder / "ablation.json", summary)
    text = table(summary)
    write_atomically(folder / "ablation.md", lambda path: path.write_text(text, encoding="utf-8"))
    write_figure(draw(summary), folder / "ablation.png")
    if "table" in recipe.positions:
        trained = folder / folder_name("table", recipe.seeds[0]) / "last.safetensors"
        write_figure(draw_table(trained), folder / "table_similarity.png")
    say(text)
    return summary


def reports(
    tasks: Mapping[Key, tuple[Spec, Path]], jobs: int, threads: int, trained: Callable[..., dict[str, Any]] = fit
) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Each recipe ``trained`` in its folder, ``jobs`` at a time in processes of their own; the reports as they come.

    The first that fails stops the rest.
    """
    with ProcessPoolExecutor(jobs, get_context("spawn"), _quiet, (threads, os.getpid())) as pool:
        running = {pool.submit(_one, trained, *task): key for key, task in tasks.items()}
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BaseException:
            for process in list(pool._processes.values()):  # they would finish the runs they are at first
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _quiet(threads: int, leader: int) -> None:
    """In each worker: its share of the threads, no progress bars of its own, an end when who started it ends."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader is told too, and ends this process
    threading.Thread(target=_end_with, args=(leader,), daemon=True).start()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process


def _end_with(leader: int) -> None:
    while os.getppid() == leader:
        time.sleep(1)
    os._exit(1)


def _one(trained: Callable[..., dict[str, Any]], recipe: Spec, folder: Path) -> dict[str, Any]:
    return trained(recipe, folder, say=lambda sentence: None)


def folder_name(line: str, seed: int) -> str:
    return f"{re.sub('[^a-z0-9_]+', '-', line.lower())}-{seed}"


# --- what came out ----------------------------------------------------------------------------------------------------


def summarise(recipe: AblateRecipe, found: dict[tuple[str, int], dict[tuple[int, int], float]]) -> dict[str, Any]:
    """Mean, lowest and highest accuracy of each position at each size, and whether it is apart from the best there.

    Apart: its highest seed is below the lowest seed of the best. One seed has no spread, and nothing is apart.
    """
    sizes = recipe.sizes()
    rows: dict[str, list[dict[str, Any]]] = {line: [] for line in recipe.positions}
    for size in sizes:
        seen = {line: [found[line, seed][size] for seed in recipe.seeds] for line in recipe.positions}
        best = max(seen, key=lambda line: statistics.mean(seen[line]))
        for line, values in seen.items():
            rows[line].append(
                {
                    "size": list(size),
                    "mean": statistics.mean(values),
                    "low": min(values),
                    "high": max(values),
                    "best": line == best,
                    "apart": len(values) > 1 and max(values) < min(seen[best]),
                    "seeds": values,
                }
            )
    return {"sizes": [list(size) for size in sizes], "positions": rows, "anchors": ANCHORS, "recipe": plain(recipe)}


def table(summary: dict[str, Any]) -> str:
    """Markdown: accuracy in percent, mean (lowest to highest seed); bold: the best and what its spread touches."""
    sizes = summary["sizes"]
    heads = [f"{h} x {w}" + (" (trained)" if i == 0 else "") for i, (h, w) in enumerate(sizes)]
    lines = ["| position | " + " | ".join(heads) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name, cells in summary["positions"].items():
        lines.append("| " + " | ".join([name, *map(_cell, cells)]) + " |")
    seeds = len(summary["recipe"]["seeds"])
    told = (
        f"Accuracy in percent, mean of {seeds} seeds (lowest to highest). Bold: the best at that size, and what is "
        "within its spread: no difference is claimed among those."
    )
    lines += [
        "",
        told if seeds > 1 else "Accuracy in percent of one seed: without a spread no difference is claimed.",
        "",
        "Published, for comparison of the order only:",
        *(f"- {anchor}" for anchor in summary["anchors"]),
        "",
    ]
    return "\n".join(lines)


def _cell(cell: dict[str, Any]) -> str:
    mean, low, high = (f"{100 * cell[key]:.1f}" for key in ("mean", "low", "high"))
    if len(cell["seeds"]) == 1:
        return mean
    return f"{mean} ({low} to {high})" if cell["apart"] else f"**{mean}** ({low} to {high})"


def draw(summary: dict[str, Any]) -> Figure:
    """Accuracy over test size, a panel a position: its seeds as a band, all others behind it in grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = summary["positions"]
    sides = sorted(size[0] for size in summary["sizes"])
    columns = min(5, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.3 * lines + 0.7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    curves = {line: sorted(cells, key=lambda cell: cell["size"][0]) for line, cells in rows.items()}
    for panel, (line, cells) in zip(axes, curves.items(), strict=False):
        for other in curves.values():
            panel.plot(sides, [100 * cell["mean"] for cell in other], color="#cccccc", linewidth=0.8)
        low, high, mean = ([100 * cell[key] for cell in cells] for key in ("low", "high", "mean"))
        panel.fill_between(sides, low, high, color="#4477aa", alpha=0.3, linewidth=0)
        panel.plot(sides, mean, "o-", color="#4477aa", markersize=3.5, linewidth=1.6)
        panel.axvline(summary["sizes"][0][0], color="#666666", linewidth=0.7, linestyle=":")
        panel.set_title(line, fontsize=9, loc="left")
        panel.set_xticks(sides)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes)[len(rows) :]:
        panel.set_visible(False)
    title = "Accuracy in percent at test sizes in pixels. Band: the seeds; grey: the others; dotted: the training size"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def draw_table(checkpoint: Path) -> Figure:
    """ViT's figure 7: for each cell of a learned table, its cosine similarity with every other, as a map of maps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from vispe.classifier import load_classifier

    model: Any = load_classifier(checkpoint, "cpu").model
    h, w = model.position.grid
    cells = torch.nn.functional.normalize(model.position.added.weight.detach()[model.position.rows :], dim=-1)
    near = (cells @ cells.T).unflatten(-1, (h, w))
    figure = Figure(figsize=(1.0 * w + 1.2, 1.0 * h + 0.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(h, w, squeeze=False)
    for i, panel in enumerate(panels.flat):
        image = panel.imshow(near[i], vmin=-1, vmax=1, cmap="RdBu_r")
        panel.set_xticks([])
        panel.set_yticks([])
    figure.colorbar(image, ax=panels, shrink=0.7, label="cosine similarity")
    figure.suptitle("The learned table: each cell with all others", fontsize=10)
    return figure
