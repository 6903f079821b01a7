"""``fit``: a recipe to a trained classifier and its report. Run again, it goes on where it was, or says it is done.

The folder of a run holds ``run.json`` (recipe, classes, what was loaded), ``metrics.csv``, ``tensorboard/``,
``last.ckpt`` (to go on from; gone when the run is done), ``best.safetensors`` and ``last.safetensors`` (to predict
with), ``report.json``, ``confusion.png`` and ``curves.png``. Only the first process writes.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import nn

from vispe import recipe as recipes
from vispe.classifier import Classifier, evaluate, load_classifier, save
from vispe.data.batches import EvalSet, Plan, TrainSet
from vispe.files import check_writable, write_json
from vispe.position.resample import patch_grid
from vispe.progress import quiet
from vispe.train.callbacks import LAST, AtomicIO, Average, Keep, Progress, Record, Resume
from vispe.train.curves import Curves, read_curves
from vispe.train.folder import begin, earlier_part, finished_report, update_reached
from vispe.train.loaders import Data, Loaders, Say, first_process, open_checked, readers
from vispe.train.module import Classification, Learning
from vispe.train.report import at_size, draw_confusion, draw_curves, peak_memory, versions
from vispe.train.spec import ClassifyRecipe, RunSpec, pair
from vispe.train.start import foreseen, fresh_model, starting_model


def fit(
    recipe: ClassifyRecipe, out: str | os.PathLike[str], data: Data | None = None, say: Say = print
) -> dict[str, Any]:
    """Train by ``recipe`` in the folder ``out``; the report, as in ``report.json`` (empty but in the first process).

    A run of the same recipe that is there goes on; one that is finished gives its report. ``data``: images opened
    before, instead of opening the recipe's. ``ValueError``, before anything is trained: what does not fit together.
    ``NotFiniteError`` (a ``ValueError``) when the loss is no number any more.
    """
    return carried_out(
        Run,
        recipe,
        out,
        data,
        say,
        check=lambda: sizes_of(recipe, foreseen(recipe.model)),
        opened=lambda folder: open_checked(recipe.data, say),
    )


def sizes_of(recipe: Any, spec: Any) -> list[tuple[int, int]]:
    """The (h, w) of training images, then the others that are reported on; ``ValueError`` if patches do not tile one.

    ``spec``: the model's; None, where it is not known yet, gives none.
    """
    if spec is None:
        return []
    size = pair(recipe.train.size) if recipe.train.size is not None else spec.image_size
    sizes = list(dict.fromkeys([size, *map(pair, getattr(recipe, "evaluate_at", ()))]))
    for size in sizes:
        patch_grid(size, (spec.patch_size,) * 2)
    return sizes


def check_place(where: RunSpec) -> None:
    """``ValueError`` names the key that asks for GPUs that are not here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else int(torch.backends.mps.is_available())
    if where.strategy == "fsdp" and not torch.cuda.is_available():
        raise ValueError("run.strategy=fsdp shards over GPUs, and there are none here; ddp runs on CPUs too")
    if where.accelerator == "gpu" and not gpus:
        raise ValueError("run.accelerator=gpu: torch finds no GPU here; run.accelerator=cpu does without")
    if where.accelerator != "cpu" and 0 < gpus < where.devices:
        raise ValueError(f"run.devices={where.devices}: torch finds {gpus} GPU{'s' * (gpus != 1)} here")


# --- a run ------------------------------------------------------------------------------------------------------------


def carried_out(
    kind: type[Run],
    recipe: Any,
    out: str | os.PathLike[str],
    data: Any,
    say: Say,
    check: Callable[[], object],
    opened: Callable[[Path], Any],
) -> dict[str, Any]:
    """The report of a run of any task in the folder ``out``, be it finished, begun or new; torch's and Lightning's
    settings are left as they were.

    ``check`` refuses what is wrong in the model's knobs, which shall not wait for the images; ``opened`` brings these
    where ``data`` is None.
    """
    folder = Path(out)
    if not folder.is_dir():
        check_writable(folder)
    done = finished_report(folder, recipe)
    if done is not None:
        say(f"this run is finished; its report is {folder / 'report.json'}")
        return done
    check_place(recipe.run)
    check_writable(folder)
    check()
    data = opened(folder) if data is None else data
    with torch.random.fork_rng(), _quiet_lightning():
        torch.manual_seed(recipe.train.seed)
        try:
            return kind(recipe, folder, data, say).run()
        except MisconfigurationException as error:  # Lightning's word for devices that are not there
            raise ValueError(str(error).partition("\n")[0]) from None


class Run:
    """The state of one call of ``fit``. Other tasks are classes made of this one."""

    def __init__(self, recipe: Any, folder: Path, data: Any, say: Say) -> None:
        self.recipe, self.folder, self.data, self.say = recipe, folder, data, say
        self.first = first_process()
        self.started = time.time()
        train, where = recipe.train, recipe.run
        self.plan = Plan(
            images=len(data.train),
            batch_size=train.batch_size,
            epochs=train.epochs,
            seed=train.seed,
            accumulate=train.accumulate,
            world=where.devices * where.num_nodes,
        )
        earlier = earlier_part(folder, data.fingerprint())
        self.update = update_reached(folder) if earlier is not None else 0
        self.model, self.loaded = self._model(earlier)
        self.sizes = self._sizes(self.model.spec)
        self.size = self.sizes[0]
        channels: Any = getattr(self.model.spec, "channels", 3)
        if channels != 3:
            raise ValueError(f"photographs have 3 channels, the model takes {channels}")

    def run(self) -> dict[str, Any]:
        if self.first:
            if self.update == 0:
                if (self.folder / "run.json").is_file():
                    self.say(f"the run in {self.folder} had saved nothing yet: it starts again")
                begin(self.folder, self._told())
            self._announce()
        if self.update < self.plan.updates:
            self._train()
        return self._report() if self.first else {}

    def _model(self, earlier: dict[str, Any] | None) -> tuple[nn.Module, list[str]]:
        """A run that goes on has its weights in the checkpoint: the file it started from may be gone."""
        given, classes = self.recipe.model, len(self.data.train.classes)
        if earlier is not None:
            return fresh_model(given, classes), list(earlier["loaded"])
        return starting_model(given, classes)

    def _sizes(self, spec: Any) -> list[tuple[int, int]]:
        return sizes_of(self.recipe, spec)

    def _told(self) -> dict[str, Any]:
        return {
            "recipe": recipes.plain(self.recipe),
            "data": self.data.fingerprint(),
            "loaded": self.loaded,
            "classes": list(self.data.train.classes),
        }

    # --- training ---

    def _train(self) -> None:
        module, loaders, trainer = self._module(), self._loaders(), self._trainer()
        resumed = self.folder / LAST if self.update else None
        try:
            trainer.fit(module, datamodule=loaders, ckpt_path=resumed, weights_only=True)
        except SystemExit:
            if trainer.interrupted:  # Lightning makes an exit of Ctrl-C; that is for the caller to decide
                raise KeyboardInterrupt from None
            raise
        trainer.strategy.barrier()

    @property
    def workers(self) -> int:
        return readers(self.recipe.run)

    @property
    def part(self) -> int:
        """Images of one forward pass of one process."""
        return max(self.plan.batch_size // (self.plan.world * self.plan.accumulate), 1)

    @property
    def device(self) -> str:
        """Where the report is made."""
        return "cuda" if torch.cuda.is_available() and self.recipe.run.accelerator != "cpu" else "cpu"

    def _loaders(self) -> Loaders:
        augment, size = self.recipe.augment, self.size
        train = TrainSet(self.data.train, augment, size, self.plan.seed)
        return Loaders(train, EvalSet(self.data.val, size, augment.eval_crop), self.plan, self.workers)

    def _module(self) -> Learning:
        recipe, classes = self.recipe, len(self.data.train.classes)
        return Classification(self.model, recipe.train, recipe.augment, self.plan, classes, self.folder)

    def _keep(self) -> Callback:
        """What writes the validated weights."""
        return Keep(self._export)

    def _average(self, decay: float) -> Callback:
        """What averages the weights."""
        return Average(decay)

    def _trainer(self) -> pl.Trainer:
        train, where, plan = self.recipe.train, self.recipe.run, self.plan
        validation = plan.updates_per_epoch * train.validate_every
        callbacks: list[Any] = [
            Record(min(train.log_every, plan.updates_per_epoch), train.batch_size),
            Progress(),
            self._keep(),
        ]
        if train.ema is not None:
            callbacks.append(self._average(train.ema))
        callbacks.append(Resume(self.folder, train.save_every, validation))
        return pl.Trainer(
            accelerator=where.accelerator,
            devices=where.devices,
            num_nodes=where.num_nodes,
            strategy=self._strategy(),
            plugins=[AtomicIO()],
            precision="bf16-mixed" if train.precision == "bf16" else "32-true",
            max_steps=plan.updates,
            max_epochs=-1,
            accumulate_grad_batches=train.accumulate,
            check_val_every_n_epoch=None,  # the whole run is one pass over the loader: validation is counted in batches
            val_check_interval=validation * train.accumulate,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder,
            logger=self._loggers(),
            callbacks=callbacks,
        )

    def _strategy(self) -> Any:
        if self.recipe.run.strategy != "fsdp":
            return self.recipe.run.strategy
        from lightning.pytorch.strategies import FSDPStrategy

        from vispe.layers.transformer import Block

        return FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full")

    def _loggers(self) -> list[Any]:
        curves = Curves(self.folder / "metrics.csv")
        if self.first:
            curves.rewind(self.update)
        made: list[Any] = [curves]
        if find_spec("tensorboard") is not None:
            from lightning.pytorch.loggers import TensorBoardLogger

            made.append(TensorBoardLogger(self.folder, name="", version="tensorboard", purge_step=self.update + 1))
        return made

    def _announce(self) -> None:
        (h, w), updates = self.size, self.plan.updates
        self.say(f"{self.recipe.model.name} at {h} x {w}: {self._contents()}, {updates} updates, into {self.folder}")
        for sentence in self.loaded:
            self.say(f"  {sentence}")
        if self.update:
            self.say(f"going on from update {self.update}")

    def _contents(self) -> str:
        return f"{len(self.data.train)} + {len(self.data.val)} images of {len(self.data.train.classes)} classes"

    def _export(self, state: dict[str, torch.Tensor], name: str) -> None:
        made = Classifier(
            model=self.model,
            name=self.recipe.model.name,
            classes=self.data.train.classes,
            size=self.size,
            eval_crop=self.recipe.augment.eval_crop,
            recipe=recipes.plain(self.recipe),
        )
        save(self.folder / f"{name}.safetensors", made, state)

    # --- the report ---

    def _report(self) -> dict[str, Any]:
        recipe, classes = self.recipe, self.data.train.classes
        trained = load_classifier(self.folder / f"{recipe.train.report}.safetensors", self.device)
        results, tallies = [], []
        for size in self.sizes:
            tally, timing = evaluate(trained, self.data.val, size, batch_size=self.part, workers=self.workers)
            tallies.append(tally)
            results.append({"size": list(size), **at_size(tally, timing)})
            self.say(f"accuracy at {size[0]} x {size[1]}: {results[-1]['accuracy']:.4f}")
        rows = read_curves(self.folder / "metrics.csv")
        draw_confusion(self.folder / "confusion.png", tallies[0].confusion, classes)
        draw_curves(self.folder / "curves.png", rows, self.plan.updates_per_epoch)
        report = self._numbers(results, rows, dict(zip(classes, tallies[0].per_class(), strict=True)))
        write_json(self.folder / "report.json", report)
        (self.folder / LAST).unlink(missing_ok=True)
        self.say(f"wrote {self.folder / 'report.json'}, {report['weights']}, curves.png and confusion.png")
        return report

    def _numbers(
        self, results: list[dict[str, Any]], rows: list[dict[str, float]], per_class: dict[str, float | None]
    ) -> dict[str, Any]:
        train = self.recipe.train
        validated = [row for row in rows if "val_accuracy" in row]
        best = max(validated, key=lambda row: row["val_accuracy"], default=None)
        return {
            "weights": f"{train.report}.safetensors",
            "results": results,
            "per_class": per_class,
            "best_validation": best and {"update": int(best["update"]), "accuracy": best["val_accuracy"]},
            "data": {
                "train": len(self.data.train),
                "val": len(self.data.val),
                "classes": len(self.data.train.classes),
                "skipped": list(self.data.skipped),
            },
            **self._about(rows),
        }

    def _about(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        """What a report says whatever the task was."""
        speeds = sorted(row["images_per_second"] for row in rows if "images_per_second" in row)
        return {
            "loaded": self.loaded,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "updates": self.plan.updates,
            "training_images_per_second": speeds[len(speeds) // 2] if speeds else None,
            "training_milliseconds_per_image": 1000 / speeds[len(speeds) // 2] if speeds else None,
            "seconds": round(time.time() - self.started, 1),
            "recipe": recipes.plain(self.recipe),
            "peak_memory_mib": round(peak_memory(torch.device(self.device)), 1),
            "versions": versions(),
        }

    def _say_pace(self, report: dict[str, Any]) -> None:
        """How fast pairs were learnt from; a matcher's report begins so."""
        if report["training_images_per_second"] is not None:
            self.say(f"{report['updates']} updates, {report['training_images_per_second']:.1f} pairs/s")


# --- small parts ------------------------------------------------------------------------------------------------------


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Lightning's remarks about hardware and loaders stay unsaid while it runs."""
    with quiet("lightning.pytorch", "lightning.fabric"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        yield
