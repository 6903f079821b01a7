"""The fair comparison of anything that a model's knobs can say: one recipe, one budget, one set of seeds, and a row for
each of the knobs' settings.

Every run is one of ``vispe train`` in a folder of its own, so that a stopped comparison goes on where it was.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vispe import recipe as recipes
from vispe.files import check_writable, write_atomically, write_json
from vispe.spec import Spec
from vispe.train.ablate import folder_name, reports
from vispe.train.loaders import Say
from vispe.train.report import new_figure, write_figure
from vispe.train.tasks import task_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantsRecipe(Spec):
    """``base``: a whole recipe of any task. ``variants``: a name for each row and the knobs of ``base.model`` that make
    it. ``scores``: a name for each column and where in ``report.json`` its number is, such as
    ``results.val.boxes.AP``. ``published``: numbers to stand beside the rows, called ``published_as``.
    ``jobs``: runs at a time, each with ``threads`` threads.
    """

    base: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    scores: dict[str, str]
    seeds: tuple[int, ...] = (0,)
    published: dict[str, float] = dataclasses.field(default_factory=dict)
    published_as: str = "published"
    jobs: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.variants or not self.scores:
            raise ValueError("a comparison needs variants (rows) and scores (columns)")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be some values, each once, got {list(self.seeds)}")
        if unknown := [name for name in self.published if name not in self.variants]:
            raise ValueError(f"published has {unknown[0]!r}, the variants are {', '.join(self.variants)}")
        if min(self.jobs, self.threads) < 1:
            raise ValueError(f"jobs and threads are at least 1, got {self.jobs}, {self.threads}")
        for name in self.variants:
            self.run(name, self.seeds[0])

    def run(self, name: str, seed: int) -> Spec:
        """The recipe of one run."""
        base = {**self.base, "model": {**self.base.get("model", {}), **self.variants[name]}}
        base["train"] = {**self.base.get("train", {}), "seed": seed}
        return recipes.of(base, task_of(base)[0])


def compare_variants(recipe: VariantsRecipe, out: str | os.PathLike[str], say: Say = print) -> dict[str, Any]:
    """Train every variant with every seed below ``out``; the summary, as in ``variants.json``.

    Also written: ``variants.md``, the table, and ``variants.png``. Runs that are finished are not run again.
    """
    folder = Path(out)
    check_writable(folder)
    wanted = [(name, seed) for seed in recipe.seeds for name in recipe.variants]
    runs = {key: recipe.run(*key) for key in wanted}
    if recipe.jobs == 1:  # several would write the one file at a time
        runs = {key: _sharing(run, folder) for key, run in runs.items()}
    tasks = {key: (run, folder / folder_name(*key)) for key, run in runs.items()}
    found: dict[tuple[str, int], dict[str, float | None]] = {}
    for (name, seed), report in reports(tasks, recipe.jobs, recipe.threads, task_of(recipe.base)[1]):
        found[name, seed] = {score: _number(report, where) for score, where in recipe.scores.items()}
        told = ", ".join(f"{score} {_shown(value)}" for score, value in found[name, seed].items())
        say(f"{len(found)}/{len(wanted)}  {name}, seed {seed}: {told}")
    rows = {
        name: {score: [found[name, seed][score] for seed in recipe.seeds] for score in recipe.scores}
        for name in recipe.variants
    }
    summary = {"rows": rows, "recipe": recipes.plain(recipe)}
    write_json(folder / "variants.json", summary)
    text = table(summary)
    write_atomically(folder / "variants.md", lambda path: path.write_text(text, encoding="utf-8"))
    draw(folder / "variants.png", summary)
    say(text)
    return summary


def _sharing(run: Any, folder: Path) -> Spec:
    """A run that learns from features has them in one file with the others."""
    features = getattr(run, "features", None)
    if features is None or features.file is not None:
        return run
    return run.but(features=features.but(file=os.fspath(folder / "features.h5")))


def table(summary: Mapping[str, Any]) -> str:
    """Markdown, a row a variant: the mean over seeds (lowest to highest)."""
    recipe = summary["recipe"]
    published, seeds = recipe["published"], len(recipe["seeds"])
    heads = [*recipe["scores"], *([recipe["published_as"]] if published else [])]
    lines = ["| variant | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, scores in summary["rows"].items():
        cells = [_cell(values) for values in scores.values()]
        cells += [f"{published[name]:g}" if name in published else ""] if published else []
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    told = f"Mean of {seeds} seeds (lowest to highest)." if seeds > 1 else "One seed: differences may be chance."
    return "\n".join([*lines, "", told, ""])


def draw(path: Path, summary: Mapping[str, Any]) -> None:
    """A panel a score, a bar a variant, a point a seed."""
    scores, rows = list(summary["recipe"]["scores"]), summary["rows"]
    figure = new_figure(2.2 + 2.8 * len(scores), 0.9 + 0.34 * len(rows))
    panels = figure.subplots(1, len(scores), squeeze=False, sharey=True)[0]
    for panel, score in zip(panels, scores, strict=True):
        for place, values in enumerate(scores_of[score] for scores_of in rows.values()):
            known = [value for value in values if value is not None]
            if known:
                panel.barh(place, statistics.mean(known), color="#4477aa", height=0.6)
                panel.plot(known, [place] * len(known), ".", color="#222222", markersize=4)
        panel.set_title(score, fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), list(rows))
    panels[0].invert_yaxis()
    write_figure(figure, path)


def _number(report: Mapping[str, Any], where: str) -> float | None:
    found: Any = report
    for key in where.split("."):
        if not isinstance(found, Mapping) or key not in found:
            raise ValueError(f"there is no {where!r} in a report: {key!r} is missing")
        found = found[key]
    if found is not None and not isinstance(found, int | float):
        raise ValueError(f"{where!r} in a report is no number but {str(found)[:40]!r}")
    return found


def _cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    mean = _shown(statistics.mean(known))
    return mean if len(known) == 1 else f"{mean} ({_shown(min(known))} to {_shown(max(known))})"


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
