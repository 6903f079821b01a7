"""``metrics.csv``: a row for each logged update and validation. A resumed run goes on in the same file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from vispe.files import write_atomically

COLUMNS = (
    "update", "loss", "lr", "grad_norm", "images_per_second", "val_loss", "val_accuracy", "val_top5", "val_miou",
    "val_pixel_accuracy", "val_AP", "val_AP50", "val_PQ", "val_SQ", "val_RQ",
    "val_precision", "val_recall", "val_AUC5",
)  # fmt: skip


class Curves(Logger):
    """Lightning's logger of that file. ``rewind`` it before going on: what a killed run did after its last checkpoint
    is done again."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The recipe is in ``run.json``."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        new = not self.path.exists()
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, COLUMNS)
            if new:
                rows.writeheader()
            rows.writerow({"update": step, **{name: repr(float(value)) for name, value in metrics.items()}})

    def rewind(self, update: int) -> None:
        """Forget the rows behind ``update``."""
        if not self.path.exists():
            return
        kept = [row for row in _rows(self.path) if int(row["update"]) <= update]

        def write(temporary: Path) -> None:
            with open(temporary, "w", newline="", encoding="utf-8") as file:
                rows = csv.DictWriter(file, COLUMNS)
                rows.writeheader()
                rows.writerows(kept)

        write_atomically(self.path, write)


def read_curves(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The rows of ``metrics.csv``, each with the columns it has: training and validation are rows of their own."""
    if not os.path.exists(path):
        return []
    return [{name: float(value) for name, value in row.items() if value} for row in _rows(Path(path))]


def _rows(path: Path) -> list[dict[str, str]]:
    """Whole rows; a kill may have cut the last one."""
    with open(path, newline="", encoding="utf-8") as file:
        lines = [line for line in file if line.endswith("\n")]
    rows = csv.DictReader(lines)
    return [row for row in rows if row.get("update", "").isdigit() and None not in row.values()]
