"""What happens around the updates: averaged weights, files that survive a kill, the progress on the screen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, WeightAveraging
from lightning.pytorch.plugins.io import TorchCheckpointIO

from vispe.files import write_atomically

LAST = "last.ckpt"
# What metrics.csv has of a validation, and what the screen has of it besides the loss.
VALIDATED = (
    "loss", "accuracy", "top5", "miou", "pixel_accuracy", "AP", "AP50", "PQ", "SQ", "RQ", "precision", "recall", "AUC5",
)  # fmt: skip
SAID = {
    "accuracy": "accuracy", "miou": "mIoU", "AP": "AP", "AP50": "AP50", "PQ": "PQ", "precision": "precision",
    "recall": "recall", "AUC5": "AUC at 5",
}  # fmt: skip


class AtomicIO(TorchCheckpointIO):
    """Lightning's checkpoint files, whole or absent, and read without unpickling."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_atomically(path, lambda temporary: torch.save(checkpoint, temporary))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        try:
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:  # a damaged file leads the reader into any exception at all
            raise ValueError(f"cannot resume from {os.fspath(path)!r}: {str(error).partition(chr(10))[0]}") from None


def decay_at(count: int, decay: float) -> float:
    """The decay when ``count`` updates have been averaged: ``min(decay, (1 + count) / (10 + count))``.

    As TensorFlow's ``ExponentialMovingAverage``: a short run is not held back by the weights it began with.
    """
    return min(decay, (1 + count) / (10 + count))


class Average(WeightAveraging):
    """``average = d * average + (1 - d) * weights`` after each update, ``d`` from ``decay_at``; at first the weights.

    The averaged weights take the place of the others until a validation is over: what is validated is what is kept.
    ``buffers``: running means of batch norms are averaged alike, else they are the last ones.
    """

    def __init__(self, decay: float, buffers: bool = False) -> None:
        def average(averages: Any, weights: Any, count: Any) -> None:
            if averages[0].is_floating_point():
                torch._foreach_lerp_(averages, weights, 1 - decay_at(int(count), decay))
            else:  # counts of batches
                torch._foreach_copy_(averages, weights)

        super().__init__(use_buffers=buffers, multi_avg_fn=average)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Not yet: ``Keep`` is still to see them."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_epoch_end(trainer, pl_module)


class Keep(Callback):
    """Exports the validated weights as ``last``, and as ``best`` when they are, by the number ``by``; goes before
    ``Average``.

    ``export(state, name)`` writes the file; it is called in the first process only, with the model's own names.
    """

    def __init__(self, export: Callable[[dict[str, Any], str], None], by: str = "accuracy") -> None:
        self.export, self.by, self.best = export, by, -1.0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Every process takes part (the weights may be spread over them), the first one writes."""
        state = trainer.strategy.lightning_module_state_dict()
        better = pl_module.validated[self.by] > self.best
        self.best = max(self.best, pl_module.validated[self.by])
        if trainer.is_global_zero:
            own = {key.removeprefix("model."): value for key, value in state.items()}
            for name in ("best", "last") if better else ("last",):
                self.export(own, name)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]


class Resume(Checkpoint):
    """Saves everything a run needs to go on: every ``every`` updates, and when a validation is over.

    Where a validation is due it waits for it: a run that goes on must not miss one. Lightning keeps checkpoint
    callbacks behind all others, so the averaged weights are up to date.
    """

    def __init__(self, out: Path, every: int, validation: int) -> None:
        self.path, self.every, self.validation = out / LAST, every, validation
        self.saved = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        update = trainer.global_step
        complete = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if complete and update % self.every == 0 and update % self.validation and update != self.saved:
            self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        self.saved = trainer.global_step
        trainer.save_checkpoint(self.path)


class Record(Callback):
    """Hands the numbers of updates and validations to the loggers; the first process only. Goes first."""

    def __init__(self, every: int, batch_size: int) -> None:
        self.every, self.batch_size = every, batch_size
        self.since, self.at = time.perf_counter(), 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.since, self.at = time.perf_counter(), trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        update = trainer.global_step
        if (batch_idx + 1) % trainer.accumulate_grad_batches or (
            update % self.every and update != pl_module.plan.updates
        ):
            return
        now = time.perf_counter()
        speed = (update - self.at) * self.batch_size / max(now - self.since, 1e-9)
        self.since, self.at = now, update
        self._log(trainer, {**pl_module.told, "images_per_second": speed})

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.since += time.perf_counter() - self._paused  # validation does not slow the training down
        told = pl_module.validated
        self._log(trainer, {f"val_{name}": told[name] for name in VALIDATED if name in told})

    def _log(self, trainer: pl.Trainer, numbers: dict[str, float]) -> None:
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(numbers, trainer.global_step)


class Progress(Callback):
    """A bar over all updates on stderr, and a line for each validation; the first process only."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        console = Console(stderr=True)
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=pl_module.plan.updates, completed=trainer.global_step)
        self.bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and pl_module.told:
            said = f"loss {pl_module.told['loss']:.4f}, lr {pl_module.told['lr']:.2e}"
            self.bar.update(self.task, completed=trainer.global_step, description=said)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            told, plan = pl_module.validated, pl_module.plan
            epoch = -(-trainer.global_step // plan.updates_per_epoch)
            scores = [f", {name} {told[key]:.4f}" for key, name in SAID.items() if key in told]
            said = f"val loss {told['loss']:.4f}{''.join(scores)}"
            self.bar.console.print(f"epoch {epoch}/{plan.epochs}: {said}", highlight=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if getattr(self, "bar", None) is not None:
            self.bar.stop()
