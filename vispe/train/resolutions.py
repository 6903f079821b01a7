"""What the right recipe is worth: one table read at larger grids in every way, before and after fine-tuning.

A ViT is trained at one size, then moved to others by each way in turn: the recipes of code bases, and mistakes that
public code makes. Accuracy right after loading says what a reading loses, accuracy after a short fine-tuning what of
it training repairs.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vispe.classifier import Classifier, evaluate, load_classifier
from vispe.files import write_atomically, write_json
from vispe.position.grid import Grid
from vispe.position.resample import RECIPES, patch_grid, resample, resample_line, square_grid
from vispe.recipe import plain
from vispe.spec import Spec
from vispe.train.ablate import reports
from vispe.train.classify import fit
from vispe.train.loaders import Say, open_checked
from vispe.train.spec import ClassifyRecipe, Size, TrainSpec, pair
from vispe.weights import build

TABLE = "position.added.weight"
MISTAKES = ("square root guessed", "prefix resampled too", "fresh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolutionsRecipe(Spec):
    """``base``: the training at one size, best one whose grid is no square but holds a square number of patches, so
    that the guess can go wrong. ``sizes``: those moved to; ``ways``: names of recipes, or mistakes:
    ``"square root guessed"`` (n rows read as sqrt(n) x sqrt(n)), ``"prefix resampled too"`` (all rows, class token
    included, stretched as one line) and ``"fresh"`` (a new table). ``finetune`` is the training that follows.
    """

    base: ClassifyRecipe
    sizes: tuple[Size, ...]
    ways: tuple[str, ...]
    finetune: TrainSpec
    jobs: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        unknown = [way for way in self.ways if way not in RECIPES and way not in MISTAKES]
        if unknown or not self.ways or not self.sizes:
            known = ", ".join((*RECIPES, *MISTAKES))
            raise ValueError(f"resolutions need sizes, and ways of {known}; got {list(self.ways)}")


def resolutions(recipe: ResolutionsRecipe, out: str | os.PathLike[str], say: Say = print) -> dict[str, Any]:
    """Train, move, measure, fine-tune, measure, all below ``out``; the summary, as in ``resolutions.json``.

    Also written: ``resolutions.md``, the table. What is finished is not run again.
    """
    folder = Path(out)
    for size in map(pair, recipe.sizes):  # before the training, not after it
        patch_grid(size, (recipe.base.model.spec.get("patch_size", 16),) * 2)
    start = fit(recipe.base, folder / "start", say=say)["results"][0]["accuracy"]
    trained = load_classifier(folder / "start" / "last.safetensors", "cpu")
    data = open_checked(recipe.base.data, say)
    loaded: dict[tuple[str, tuple[int, int]], float] = {}
    tasks = {}
    for size in map(pair, recipe.sizes):
        for way in recipe.ways:
            model = moved(trained, size, way)
            weights = folder / f"{way.replace(' ', '_')}-{size[0]}x{size[1]}.pt"
            write_atomically(weights, lambda path, m=model: torch.save(m.state_dict(), path))  # type: ignore[misc]
            tally, _ = evaluate(dataclasses.replace(trained, model=model), data.val, size)
            loaded[way, size] = tally.summary()["accuracy"]
            say(f"{way} at {size[0]} x {size[1]}: {loaded[way, size]:.4f} as loaded")
            tasks[way, size] = (_tuning(recipe, size, weights), weights.with_suffix(""))
    rows = []
    for (way, size), report in reports(tasks, recipe.jobs, recipe.threads):
        tuned = report["results"][0]["accuracy"]
        say(f"{way} at {size[0]} x {size[1]}: {tuned:.4f} after fine-tuning")
        rows.append({"way": way, "size": list(size), "loaded": loaded[way, size], "tuned": tuned})
    order = {way: i for i, way in enumerate(recipe.ways)}
    rows.sort(key=lambda row: (row["size"], order[row["way"]]))
    summary = {"start": start, "size": list(trained.size), "rows": rows, "recipe": plain(recipe)}
    write_json(folder / "resolutions.json", summary)
    text = table(summary)
    write_atomically(folder / "resolutions.md", lambda path: path.write_text(text, encoding="utf-8"))
    say(text)
    return summary


def moved(trained: Classifier, size: tuple[int, int], way: str) -> Any:
    """The model for images of ``size``, everything kept but the table, which is read in this ``way``."""
    spec: Any = trained.model.spec
    knobs = {name: getattr(spec, name) for name in spec.names()}
    model: Any = build(trained.name, **{**knobs, "image_size": size})
    state = dict(trained.model.state_dict())
    target = patch_grid(size, (spec.patch_size,) * 2)
    state[TABLE] = _read(state[TABLE], spec.grid, target, way, spec.rows, model.state_dict()[TABLE])
    model.load_state_dict(state)
    return model.eval()


def _read(table: Tensor, source: Grid, target: Grid, way: str, prefix: int, fresh: Tensor) -> Tensor:
    if way == "fresh":
        return fresh
    if way == "prefix resampled too":
        return resample_line(table, len(fresh), RECIPES["pe"])
    if way == "square root guessed":
        return resample(table, square_grid(len(table), prefix), target, RECIPES["timm"], prefix)
    return resample(table, source, target, RECIPES[way], prefix)


def _tuning(recipe: ResolutionsRecipe, size: tuple[int, int], weights: Path) -> ClassifyRecipe:
    knobs = {**recipe.base.model.spec, "image_size": list(size)}
    model = recipe.base.model.but(weights=str(weights), origin="vispe", source_size=size, spec=knobs)
    return recipe.base.but(model=model, train=recipe.finetune, evaluate_at=())


def table(summary: dict[str, Any]) -> str:
    """Markdown: accuracy in percent, as loaded and after fine-tuning, a row a way."""
    rows = summary["rows"]
    sizes = list(dict.fromkeys(tuple(row["size"]) for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    of = {(row["way"], tuple(row["size"])): row for row in rows}
    h, w = summary["size"]
    heads = [f"{a} x {b}, {what}" for a, b in sizes for what in ("as loaded", "fine-tuned")]
    lines = [f"Trained at {h} x {w}: {100 * summary['start']:.1f} percent there.", ""]
    lines += ["| way of reading the table | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for way in ways:
        cells = [f"{100 * of[way, size][what]:.1f}" for size in sizes for what in ("loaded", "tuned")]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])
