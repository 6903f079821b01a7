"""What a network for semantic segmentation keeps at test sizes it was not trained for: several networks, one recipe.

Every run is a ``segment`` of its own in a folder of its own, so a stopped ablation goes on where it was. Each trained
network sees the validation images at multiples of the short side that its training was validated at; masks stay as they
are. mIoU is told as it is, and over the same weights' own at scale 1: a network that is worse at every size may still
lose less.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vispe.features import pick_device
from vispe.files import check_writable, write_atomically, write_json
from vispe.recipe import of, plain
from vispe.segmenter import evaluate_semantic, load_segmenter
from vispe.spec import Spec
from vispe.train.ablate import folder_name, reports
from vispe.train.loaders import Say
from vispe.train.report import new_figure, write_figure
from vispe.train.segment import SegmentRecipe, open_looked_through, segment
from vispe.train.start import SEMANTIC, model_overrides
from vispe.weights.files import sha256

BATCH = 4  # images at a time in evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalesRecipe(Spec):
    """``base``: a whole recipe of segmentation with an ``eval_short``, of the first network; ``others``: a label and
    the ``model:`` block of each further one, put in the place of base's. Every network is trained with each of
    ``seeds``, then tested at ``scales``, factors of ``eval_short`` (1 is always among them). ``jobs``: runs at a time,
    each with ``threads`` threads.
    """

    base: SegmentRecipe
    others: dict[str, dict[str, Any]]
    seeds: tuple[int, ...] = (0,)
    scales: tuple[float, ...] = (0.5, 0.75, 1.0, 1.5, 2.0)
    jobs: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be some values, each once, got {list(self.seeds)}")
        if min(self.jobs, self.threads) < 1:
            raise ValueError(f"jobs and threads are at least 1, got {self.jobs}, {self.threads}")
        if not all(scale > 0 for scale in self.scales):
            raise ValueError(f"scales are positive factors of eval_short, got {list(self.scales)}")
        if self.base.augment.eval_short is None:
            raise ValueError("base.augment.eval_short is what scales multiply: it must be given")
        folders = [folder_name(label, 0) for label in self.labels]
        if len(set(folders)) != len(folders):
            raise ValueError(f"the labels of networks must differ in letters or numbers, got {list(self.labels)}")

    @property
    def labels(self) -> tuple[str, ...]:
        """The networks: base's by its own name, then the others."""
        return (self.base.model.name, *self.others)

    def shorts(self) -> dict[float, int]:
        """Scale -> the short side of test images, upwards."""
        short = self.base.augment.eval_short
        assert short is not None
        return {scale: max(round(scale * short), 1) for scale in sorted({1.0, *self.scales})}

    def run(self, label: str, seed: int) -> SegmentRecipe:
        """The recipe of one run."""
        base = self.base.but(train=self.base.train.but(seed=seed))
        return base if label == self.labels[0] else of({**plain(base), "model": self.others[label]}, SegmentRecipe)


def scales(recipe: ScalesRecipe, out: str | os.PathLike[str], say: Say = print) -> dict[str, Any]:
    """Train and test every network with every seed below ``out``; the summary, as in ``scales.json``.

    Also written: ``scales.md`` (the tables) and ``scales.png``. Runs that are finished are not run again.
    """
    folder, found = Path(out), {}
    wanted = [(label, seed) for seed in recipe.seeds for label in recipe.labels]
    runs = {key: recipe.run(*key) for key in wanted}
    for one in runs.values():
        model_overrides(one.model, SEMANTIC)  # a mistake in the last network shall not wait for the first's training
    check_writable(folder)
    tasks = {key: (one, folder / folder_name(*key)) for key, one in runs.items()}
    work = partial(trained_and_tested, list(recipe.shorts().values()))
    for (label, seed), measured in reports(tasks, recipe.jobs, recipe.threads, work):
        found[label, seed] = measured
        told = ", ".join(f"{short}: {at['miou']:.4f}" for short, at in measured["at"].items())
        say(f"{len(found)}/{len(wanted)}  {label}, seed {seed}: mIoU at {told}")
    summary = summarise(recipe, found)
    write_json(folder / "scales.json", summary)
    text = table(summary)
    write_atomically(folder / "scales.md", lambda path: path.write_text(text, encoding="utf-8"))
    write_figure(draw(summary), folder / "scales.png")
    say(text)
    return summary


def trained_and_tested(shorts: list[int], recipe: SegmentRecipe, folder: Path, say: Say) -> dict[str, Any]:
    """One run in its folder: ``parameters``, ``location_prior`` and, short side by short side, what is measured ``at``
    it; kept in the run's own ``scales.json``, for these weights."""
    data = open_looked_through(recipe.data, say)
    report = segment(recipe, folder, data, say)
    weights = folder / f"{recipe.train.report}.safetensors"
    known, kept = sha256(weights), folder / "scales.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    at = dict(before["at"]) if before.get("sha256") == known else {}
    trained = load_segmenter(weights, pick_device("cpu" if recipe.run.accelerator == "cpu" else "auto"))
    for short in map(str, shorts):
        if short not in at:
            tally, _ = evaluate_semantic(trained, data.val, int(short), batch_size=BATCH)
            at[short] = tally.summary()
            write_json(kept, {"sha256": known, "at": at})
    prior = report["location_prior"]["miou"]
    return {"parameters": report["parameters"], "location_prior": prior, "at": {str(s): at[str(s)] for s in shorts}}


# --- what came out ----------------------------------------------------------------------------------------------------


def summarise(recipe: ScalesRecipe, found: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    """For each network and scale, mIoU and its ratio to the same run's at scale 1: every seed, mean and extremes."""
    shorts = recipe.shorts()
    networks: dict[str, Any] = {}
    for label in recipe.labels:
        runs = [found[label, seed] for seed in recipe.seeds]
        rows = []
        for scale, short in shorts.items():
            values = [run["at"][str(short)]["miou"] for run in runs]
            own = [run["at"][str(shorts[1.0])]["miou"] for run in runs]
            ratios = [value / max(at_one, 1e-9) for value, at_one in zip(values, own, strict=True)]
            rows.append({"scale": scale, "short": short, "miou": _spread(values), "relative": _spread(ratios)})
        networks[label] = {"parameters": runs[0]["parameters"], "scales": rows}
    prior = found[recipe.labels[0], recipe.seeds[0]]["location_prior"]
    return {"networks": networks, "location_prior": prior, "recipe": plain(recipe)}


def _spread(values: list[float]) -> dict[str, Any]:
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values), "seeds": values}


def table(summary: Mapping[str, Any]) -> str:
    """Markdown: mIoU in percent and, below, in percent of scale 1; mean (lowest to highest seed)."""
    networks, seeds = summary["networks"], len(summary["recipe"]["seeds"])
    rows = next(iter(networks.values()))["scales"]
    heads = [f"{row['scale']:g}x ({row['short']})" for row in rows]
    lines = []
    for what, title in (("miou", "mIoU, percent"), ("relative", "percent of scale 1")):
        lines += [f"| {title} | parameters | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
        for label, network in networks.items():
            cells = [_cell(row[what]) for row in network["scales"]]
            lines.append(f"| {label} | {network['parameters'] / 1e6:.2f} M | " + " | ".join(cells) + " |")
        lines.append("")
    told = f"Mean of {seeds} seeds (lowest to highest)" if seeds > 1 else "One seed: no spread is known"
    lines.append(f"{told}. The most frequent class of each location scores {100 * summary['location_prior']:.1f}.")
    return "\n".join([*lines, ""])


def _cell(spread: Mapping[str, Any]) -> str:
    mean, low, high = (f"{100 * spread[key]:.1f}" for key in ("mean", "low", "high"))
    return mean if len(spread["seeds"]) == 1 else f"{mean} ({low} to {high})"


def draw(summary: Mapping[str, Any]) -> Any:
    """mIoU over scale, and its part of that at scale 1, a line a network; the band: its seeds."""
    figure = new_figure(8.4, 3.3)
    panels = figure.subplots(1, 2)
    for panel, what, title in zip(
        panels, ("miou", "relative"), ("mIoU, percent", "mIoU, percent of scale 1"), strict=True
    ):
        for label, network in summary["networks"].items():
            x = [row["scale"] for row in network["scales"]]
            low, high, mean = ([100 * row[what][key] for row in network["scales"]] for key in ("low", "high", "mean"))
            (line,) = panel.plot(x, mean, "o-", markersize=3.5, linewidth=1.4, label=label.replace("$", r"\$"))
            panel.fill_between(x, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
        panel.axvline(1.0, color="#666666", linewidth=0.7, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.set_xticks(x, [f"{scale:g}" for scale in x], fontsize=8)
        panel.minorticks_off()
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("test size over training's", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    prior = panels[0].axhline(100 * summary["location_prior"], color="#999999", linewidth=0.9, linestyle="--")
    prior.set_label("locations alone")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize=8, frameon=False)
    return figure
