"""What a run's folder says about the run: which recipe and images it is of, and how far it has come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vispe import recipe as recipes
from vispe.files import write_json
from vispe.spec import Spec
from vispe.train.callbacks import LAST, AtomicIO

STALE = ("metrics.csv", "best.safetensors", "last.safetensors", "mae.safetensors", "encoder.safetensors")


def finished_report(folder: Path, recipe: Spec) -> dict[str, Any] | None:
    """The report of a finished run; ``ValueError`` when ``folder`` holds a run of another recipe, or other files."""
    earlier = _read_json(folder / "run.json")
    if earlier is None:
        foreign = [name for name in (*STALE, "report.json") if (folder / name).exists()]
        if foreign:  # it would be removed or written over
            raise ValueError(f"{str(folder)!r} holds a {foreign[0]} of no run of ours; give --out another folder")
        return None
    other = recipes.difference(_decisive(earlier["recipe"]), _decisive(recipes.plain(recipe)))
    if other is not None:
        raise ValueError(f"{str(folder)!r} holds a run of another recipe ({other}); give --out another folder")
    return _read_json(folder / "report.json")


def earlier_part(folder: Path, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
    """``run.json`` of the run that goes on here, None when there is nothing to go on from.

    ``ValueError`` when its images were others: ``fingerprint`` differs.
    """
    earlier = _read_json(folder / "run.json") if (folder / LAST).is_file() else None
    if earlier is not None and earlier["data"] != fingerprint:
        other = "holds an unfinished run on other images; give --out another folder, or remove it"
        raise ValueError(f"{str(folder)!r} {other}")
    return earlier


def begin(folder: Path, told: dict[str, Any]) -> None:
    """Make the folder and its ``run.json``; what an earlier run left before its first checkpoint is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in STALE:
        (folder / stale).unlink(missing_ok=True)
    write_json(folder / "run.json", told)


def update_reached(folder: Path) -> int:
    """How many updates are behind the checkpoint to go on from; 0 when there is none."""
    path = folder / LAST
    return int(AtomicIO().load_checkpoint(path)["global_step"]) if path.is_file() else 0


def _decisive(plain: dict[str, Any]) -> dict[str, Any]:
    """A plain recipe without what may change between two parts of a run: where it runs, how often it saves."""
    train = {name: value for name, value in plain["train"].items() if name not in ("save_every", "log_every")}
    return {"task": "classify", **{name: value for name, value in plain.items() if name != "run"}, "train": train}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
