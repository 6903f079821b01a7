"""``segment``: a recipe to a trained network for semantic segmentation and its report.

The folder of a run is that of a classifier, with ``examples.png`` (image, truth, prediction) in the place of
``confusion.png``. The report holds the numbers against what the most frequent class of each location scores on the same
images (``location_prior``): what a network could know that sees nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from vispe import recipe as recipes
from vispe.classifier import normalised
from vispe.data.batches import Plan
from vispe.data.images import ImageError
from vispe.data.segmentation import SemanticImages, SemanticSpec, open_semantic
from vispe.data.segmentation_batches import (
    SemanticAugmentSpec,
    SemanticBatch,
    SemanticEvalSet,
    SemanticTrainSet,
    semantic_loader,
)
from vispe.data.segmentation_verify import sound_semantic, survey
from vispe.files import write_json
from vispe.layers.pixels import enlarged
from vispe.losses.semantic import pixel_loss
from vispe.metrics.semantic import SemanticTally, location_prior, stretched
from vispe.segmenter import Segmenter, colours, evaluate_semantic, load_segmenter, painted, save_segmenter
from vispe.spec import Spec
from vispe.train.callbacks import LAST, Average, Keep
from vispe.train.classify import Run, carried_out
from vispe.train.curves import read_curves
from vispe.train.loaders import Loaders, Say, looking_through, tell_left_out
from vispe.train.module import Learning
from vispe.train.report import draw_curves, new_figure, write_figure
from vispe.train.schedule import factor, linear
from vispe.train.spec import ModelSpec, RunSpec, TrainSpec, check_together
from vispe.train.start import SEMANTIC, foreseen, fresh_model, starting_model
from vispe.train.synced import synced

SHOWN = 4  # images in examples.png
CELLS = 2**16  # of the location prior at most
NAMED = 30  # of more classes than this, examples.png carries no names


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentTrain(TrainSpec):
    """How weights are found. ``lr`` is the encoder's rate, the head's is ``head_lr`` times that (10 in the original);
    ``schedule``: half a cosine, or "linear", the original's polynomial one of power 1. Images of training have the size
    ``augment.crop``; a batch norm sees the images of all processes, but of one accumulated part alone."""

    lr: float = 6e-5
    head_lr: float = 10.0
    schedule: Literal["cosine", "linear"] = "linear"
    weight_decay: float = 0.01
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head_lr > 0:
            raise ValueError(f"head_lr is positive, got {self.head_lr}")
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f"schedule is cosine or linear, got {self.schedule!r}")
        if self.layer_decay != 1.0:
            raise ValueError(f"layer_decay is a classifier's knob, here it is 1.0, got {self.layer_decay}")
        if self.size is not None:
            raise ValueError(f"the size of training images is augment.crop, not train.size, got {self.size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentRecipe(Spec):
    """A whole recipe; ``task: segment`` tells it from a classifier's."""

    task: Literal["segment"] = "segment"
    model: ModelSpec
    data: SemanticSpec
    augment: SemanticAugmentSpec = dataclasses.field(default_factory=SemanticAugmentSpec)
    train: SegmentTrain = dataclasses.field(default_factory=SegmentTrain)
    run: RunSpec = dataclasses.field(default_factory=RunSpec)

    def __post_init__(self) -> None:
        check_together(self.train, self.run, only_ddp="segmentation trains")


def segment(
    recipe: SegmentRecipe, out: str | os.PathLike[str], data: SemanticData | None = None, say: Say = print
) -> dict[str, Any]:
    """Train by ``recipe`` in the folder ``out``; the report, as in ``report.json`` (empty but in the first process).

    Goes on, refuses and stops as ``vispe.train.classify.fit`` does.
    """
    return carried_out(
        _Segmenting,
        recipe,
        out,
        data,
        say,
        check=lambda: check_crop(recipe, foreseen(recipe.model, SEMANTIC)),
        opened=lambda folder: open_looked_through(recipe.data, say),
    )


def check_crop(recipe: SegmentRecipe, spec: Any) -> None:
    """``ValueError`` for training images that are too small for a model of ``spec``, if that is known yet."""
    crop = recipe.augment.crop
    if spec is not None and min(crop) < spec.smallest:
        raise ValueError(f"augment.crop is at least {spec.smallest} pixels a side for this model, got {crop}")


# --- the images -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SemanticData:
    """Images and masks that were looked through; ``skipped``: a sentence for each that could not be used."""

    train: SemanticImages
    val: SemanticImages
    skipped: tuple[str, ...] = ()

    def fingerprint(self) -> dict[str, Any]:
        """The counts of images, and a hash of their names and the classes: equal when a run may go on with them."""
        made: dict[str, Any] = {}
        for part, images in (("train", self.train), ("val", self.val)):
            names = "\n".join([*map(os.path.basename, images.images), "", *images.classes])
            made[part] = {"images": len(images), "sha256": hashlib.sha256(names.encode(errors="replace")).hexdigest()}
        return made


def open_looked_through(spec: SemanticSpec, say: Say = print) -> SemanticData:
    """The images of ``spec``, each decoded once with its mask; what labels nothing is refused, a class that no training
    image shows is said."""
    parts: list[SemanticImages] = []
    skipped: list[str] = []
    for what, images in zip(("training", "validation"), open_semantic(spec), strict=True):
        if not len(images):
            raise ValueError(f"{spec.root!r} has no {what} images")
        with looking_through(len(images)) as progress:
            images, broken = sound_semantic(images, spec.corrupt, progress)
        found = survey(images, decode=False)
        if not found.pixels.any():
            raise ValueError(f"the masks of the {len(images)} {what} images in {spec.root!r} label no pixel")
        missing = [name for name, count in zip(images.classes, found.images.tolist(), strict=True) if not count]
        if missing and what == "training":
            others = f" (and {len(missing) - 5} more)" if len(missing) > 5 else ""
            say(f"no training image shows {', '.join(missing[:5])}{others}")
        skipped += broken
        parts.append(images)
    tell_left_out(skipped, say)
    return SemanticData(parts[0], parts[1], tuple(skipped))


def prior_tally(train: SemanticImages, val: SemanticImages) -> SemanticTally:
    """What the most frequent class of each location in ``train`` scores on ``val``; of locations there are ``CELLS`` at
    most, in the shape of the first mask."""
    h, w = val.mask(0).shape
    shrink = min((CELLS / (h * w)) ** 0.5, 1.0)
    size = (max(int(h * shrink), 1), max(int(w * shrink), 1))
    prior = location_prior((train.mask(i) for i in range(len(train))), len(train.classes), size)
    tally = SemanticTally(len(train.classes))
    for i in range(len(val)):
        mask = val.mask(i)
        tally.add(stretched(prior, (mask.shape[0], mask.shape[1])), mask)
    return tally


# --- what is learnt ---------------------------------------------------------------------------------------------------


class Segmentation(Learning):
    """The loss of every pixel. ``validated``: its mean as ``loss``, ``miou`` and ``pixel_accuracy``, at the masks' own
    sizes."""

    def __init__(self, model: nn.Module, spec: SegmentTrain, plan: Plan, classes: int, out: Path) -> None:
        super().__init__(model, spec, plan, out)
        self.shape = linear if spec.schedule == "linear" else factor
        self.places = {
            name: dataclasses.replace(place, layer=int(name.startswith("head."))) for name, place in self.places.items()
        }
        self._tally, self._sum = SemanticTally(classes), torch.zeros(1, dtype=torch.float64)

    def loss_of(self, batch: SemanticBatch, batch_idx: int) -> Tensor:
        logits = self.model(normalised(batch.images, self.model.spec))
        return pixel_loss(logits, batch.masks, label_smoothing=self.spec.label_smoothing)

    def on_validation_epoch_start(self) -> None:
        self._tally = SemanticTally(self._tally.classes, device=self.device)
        self._sum = torch.zeros(1, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: SemanticBatch, batch_idx: int) -> None:
        """A repeated image has a mask of void alone, and does not count."""
        if batch.problem:
            raise ImageError(batch.problem)
        output = self.model(normalised(batch.images, self.model.spec), batch.real_pixels())
        sizes, real = ([(h, w) for h, w in sides.tolist()] for sides in (batch.sizes, batch.real))
        stride: Any = self.model.stride
        for logits, mask, (h, w) in zip(enlarged(output, sizes, stride, real), batch.masks, sizes, strict=True):
            mask = mask[:h, :w]
            self._sum += pixel_loss(logits[None], mask[None]).double() * mask.numel()
            self._tally.add(logits.argmax(0), mask)

    def on_validation_epoch_end(self) -> None:
        packed = torch.cat((self._sum, self._tally.packed()))
        total, *_ = packed = self.trainer.strategy.reduce(packed, reduce_op="sum")
        self._tally.unpack(packed[1:])
        told = self._tally.summary()
        self.validated = {"loss": float(total) / max(told["pixels"], 1), **told}

    def _rates(self) -> dict[str, Any]:
        """The encoder is layer 0, the head layer 1."""
        spec: Any = self.spec
        return {"lr": spec.lr * spec.head_lr, "layer_decay": 1 / spec.head_lr, "last": 1}


# --- a run ------------------------------------------------------------------------------------------------------------


class _Segmenting(Run):
    """The state of one call of ``segment``."""

    def _model(self, earlier: dict[str, Any] | None) -> tuple[nn.Module, list[str]]:
        given, classes = self.recipe.model, len(self.data.train.classes)
        if given.spec.get("num_classes", classes) != classes:
            raise ValueError(f"model.num_classes is {given.spec['num_classes']}, the data has {classes} classes")
        if earlier is not None:
            model, loaded = fresh_model(given, classes, SEMANTIC), list(earlier["loaded"])
        else:
            model, loaded = starting_model(given, classes, SEMANTIC, load_segmenter)
        return synced(model) if self.plan.world > 1 else model, loaded

    def _sizes(self, spec: Any) -> list[tuple[int, int]]:
        check_crop(self.recipe, spec)
        return [self.recipe.augment.crop]

    def _loaders(self) -> Loaders:
        augment = self.recipe.augment
        train = SemanticTrainSet(self.data.train, augment, self.plan.seed)
        val = SemanticEvalSet(self.data.val, augment.eval_short)
        return Loaders(train, val, self.plan, self.workers, semantic_loader)

    def _module(self) -> Learning:
        classes = len(self.data.train.classes)
        return Segmentation(self.model, self.recipe.train, self.plan, classes, self.folder)

    def _keep(self) -> Callback:
        return Keep(self._export, "miou")

    def _average(self, decay: float) -> Callback:
        return Average(decay, buffers=True)

    def _export(self, state: dict[str, Tensor], name: str) -> None:
        made = Segmenter(
            model=self.model,
            name=self.recipe.model.name,
            classes=self.data.train.classes,
            short=self.recipe.augment.eval_short,
            recipe=recipes.plain(self.recipe),
        )
        save_segmenter(self.folder / f"{name}.safetensors", made, state)

    def _report(self) -> dict[str, Any]:
        data = self.data
        trained = load_segmenter(self.folder / f"{self.recipe.train.report}.safetensors", self.device)
        tally, timing = evaluate_semantic(trained, data.val, trained.short, batch_size=self.part, workers=self.workers)
        rows = read_curves(self.folder / "metrics.csv")
        draw_curves(self.folder / "curves.png", rows, self.plan.updates_per_epoch)
        shown = torch.linspace(0, len(data.val) - 1, min(SHOWN, len(data.val))).long().tolist()
        draw_examples(self.folder / "examples.png", trained, data.val, shown)
        report = self._semantic_numbers(tally, timing, prior_tally(data.train, data.val), rows)
        write_json(self.folder / "report.json", report)
        (self.folder / LAST).unlink(missing_ok=True)
        prior = report["location_prior"]
        self.say(f"mIoU {report['miou']:.4f}, {prior['ratio']:.2f} times the {prior['miou']:.4f} of locations alone")
        self.say(f"wrote {self.folder / 'report.json'}, {report['weights']}, curves.png and examples.png")
        return report

    def _semantic_numbers(
        self, tally: SemanticTally, timing: dict[str, float], prior: SemanticTally, rows: list[dict[str, float]]
    ) -> dict[str, Any]:
        data, told, blind = self.data, tally.summary(), prior.summary()
        validated = [row for row in rows if "val_miou" in row]
        best = max(validated, key=lambda row: row["val_miou"], default=None)
        return {
            "weights": f"{self.recipe.train.report}.safetensors",
            **told,
            "per_class": dict(zip(data.train.classes, tally.iou(), strict=True)),
            "location_prior": {**blind, "ratio": told["miou"] / max(blind["miou"], 1e-9)},
            "short": self.recipe.augment.eval_short,
            "milliseconds_per_image": 1000 * timing["seconds"] / len(data.val),
            "best_validation": best and {"update": int(best["update"]), "miou": best["val_miou"]},
            "data": {
                "train": len(data.train),
                "val": len(data.val),
                "classes": len(data.train.classes),
                "skipped": list(data.skipped),
            },
            **self._about(rows),
        }


# --- the picture ------------------------------------------------------------------------------------------------------


def draw_examples(path: Path, segmenter: Segmenter, images: SemanticImages, indices: list[int]) -> None:
    """A row an image: as it is, its truth (void is black), the prediction; the colours below."""
    from matplotlib.patches import Patch

    classes = len(images.classes)
    shapes = [images.mask(i).shape for i in indices]
    named = classes <= NAMED
    below = 0.25 * -(-classes // 5) + 0.1 if named else 0.0
    figure = new_figure(9, sum(3 * h / w + 0.05 for h, w in shapes) + 0.3 + below)
    panels = figure.subplots(len(indices), 3, squeeze=False, height_ratios=[h / w for h, w in shapes])
    for row, i in zip(panels, indices, strict=True):
        batch, sample = SemanticEvalSet(images, segmenter.short).__getitems__([i]), images.read(i)
        (found,) = segmenter.masks(batch.images, [(sample.mask.shape[0], sample.mask.shape[1])])
        for panel, picture in zip(
            row, (sample.image, painted(sample.mask, classes), painted(found.cpu(), classes)), strict=True
        ):
            panel.imshow(picture.permute(1, 2, 0).numpy())
            panel.set_axis_off()
    for panel, title in zip(panels[0], ("image", "truth", "prediction"), strict=True):
        panel.set_title(title, fontsize=10)
    if named:
        shades = [(r / 255, g / 255, b / 255) for r, g, b in colours(classes).tolist()]
        patches = [Patch(color=c, label=_plain(name)) for c, name in zip(shades, images.classes, strict=True)]
        figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    write_figure(figure, path)


def _plain(name: str) -> str:
    """A label that matplotlib neither reads as a formula nor hides."""
    return (name if len(name) <= 22 else f"{name[:21]}…").replace("$", r"\$").lstrip("_")
