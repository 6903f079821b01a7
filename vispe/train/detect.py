"""``detect``: a recipe to a trained DETR (boxes) or Mask2Former (masks), and its report.

The folder of a run is that of a classifier, with ``examples.png`` (truth, found) in the place of ``confusion.png``. A
set is matched anew in every layer and update; which objects an image has is told as COCO tells it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from vispe import recipe as recipes
from vispe.data.batches import Plan
from vispe.data.coco import Coco
from vispe.data.coco_parts import CocoSpec, open_parts, sound_scenes
from vispe.data.images import ImageError, read_image
from vispe.data.scenes import EvalScenes, SceneBatch, SceneSpec, TrainScenes, normalised, scene_loader
from vispe.detector import (
    SPECS,
    Detector,
    SceneTally,
    kinds,
    load_detector,
    measure,
    pictured,
    save_detector,
)
from vispe.files import write_json
from vispe.layers.pretrained import trained_classifier
from vispe.losses import detection, masks
from vispe.models.mask2former import Mask2FormerSpec
from vispe.spec import Spec
from vispe.train.callbacks import LAST, Average, Keep
from vispe.train.classify import Run, carried_out
from vispe.train.curves import read_curves
from vispe.train.loaders import Loaders, Say, looking_through, tell_left_out
from vispe.train.module import Learning
from vispe.train.report import draw_curves, new_figure, write_figure
from vispe.train.schedule import factor, linear, stepped
from vispe.train.spec import ModelSpec, RunSpec, TrainSpec, check_together
from vispe.train.start import fresh_model, model_overrides, starting_model, variant
from vispe.train.synced import synced
from vispe.weights.files import read

SHOWN, SURE = 4, 0.5  # images in examples.png, and the least score of what is drawn
SCORE = {"boxes": "AP", "masks": "AP", "panoptic": "PQ"}  # by which weights are kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectTrain(TrainSpec):
    """How weights are found.

    ``backbone_weights`` a fresh model starts from: "imagenet", timm's own of the backbone, or a file of them (in timm's
    or, of ResNets, torchvision's names). ``backbone_lr``: the backbone's rate as a part of ``lr``. ``schedule``: "step"
    multiplies the rate by a tenth when each of the parts ``drops`` of the run is over, "cosine" and "linear" fall
    smoothly. ``no_object``: the weight of that class. ``points``: where a mask is compared. ``see_padding``: a
    Mask2Former takes the padding of training batches for a part of the picture, as the published training did: one pass
    for images of all sizes, which a batch norm wants too. ``measure_train``: the report has the numbers on the training
    images too.
    """

    backbone_weights: str | None = None
    lr: float = 1e-4
    backbone_lr: float = 0.1
    schedule: Literal["step", "cosine", "linear"] = "step"
    drops: tuple[float, ...] = (2 / 3,)
    warmup_epochs: float = 0.0
    weight_decay: float = 1e-4
    clip: float | None = 0.1
    no_object: float = 0.1
    points: int = 12544
    see_padding: bool = False
    measure_train: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.backbone_lr <= 1:
            raise ValueError(
                f"backbone_lr lies in (0, 1], got {self.backbone_lr}; frozen_stages keeps stages as they are"
            )
        if self.schedule not in ("step", "cosine", "linear"):
            raise ValueError(f"schedule is step, cosine or linear, got {self.schedule!r}")
        if not all(0 < drop < 1 for drop in self.drops):
            raise ValueError(f"drops are parts of the run between 0 and 1, got {list(self.drops)}")
        if self.backbone_weights is not None and not self.backbone_weights:
            raise ValueError("backbone_weights is imagenet, a file or null, got ''")
        if self.no_object < 0 or self.points < 1:
            raise ValueError(f"no_object is not negative, points at least 1, got {self.no_object} and {self.points}")
        if self.layer_decay != 1.0 or self.label_smoothing:
            raise ValueError("layer_decay and label_smoothing are a classifier's knobs; here there is backbone_lr")
        if self.size is not None:
            raise ValueError(f"the sizes of training images are augment's, not train.size, got {self.size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectRecipe(Spec):
    """A whole recipe; ``task: detect`` tells it from a classifier's. The model is a DETR or a Mask2Former."""

    task: Literal["detect"] = "detect"
    model: ModelSpec
    data: CocoSpec
    augment: SceneSpec = dataclasses.field(default_factory=SceneSpec)
    train: DetectTrain = dataclasses.field(default_factory=DetectTrain)
    run: RunSpec = dataclasses.field(default_factory=RunSpec)

    def __post_init__(self) -> None:
        check_together(self.train, self.run, only_ddp="detection trains")


def detect(
    recipe: DetectRecipe, out: str | os.PathLike[str], data: SceneData | None = None, say: Say = print
) -> dict[str, Any]:
    """Train by ``recipe`` in the folder ``out``; the report, as in ``report.json`` (empty but in the first process).

    Goes on, refuses and stops as ``vispe.train.classify.fit`` does.
    """
    return carried_out(
        _Detecting,
        recipe,
        out,
        data,
        say,
        check=lambda: _check_model(recipe),
        opened=lambda folder: open_looked_through(recipe.data, say),
    )


def _check_model(recipe: DetectRecipe) -> None:
    """``ValueError`` for knobs that are wrong, or do not go with the run."""
    knobs = model_overrides(recipe.model, SPECS)
    spec, world = variant(recipe.model).but(**knobs), recipe.run.devices * recipe.run.num_nodes
    if world > 1 and spec.norm == "batch" and isinstance(spec, Mask2FormerSpec) and not recipe.train.see_padding:
        raise ValueError("batch norms over several processes need train.see_padding=true: one pass for a whole batch")


def _check_outlines(data: Coco) -> None:
    bare = int((np.diff(data.cuts) == 0).sum()) if data.kind == "instances" else 0
    if bare:
        raise ValueError(f"{data.annotations}: {bare} objects have no outline to learn a mask from; a DETR needs none")


# --- the images -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SceneData:
    """Images that were looked through; ``skipped``: a sentence for each image or annotation that is left out."""

    train: Coco
    val: Coco
    skipped: tuple[str, ...] = ()

    def fingerprint(self) -> dict[str, Any]:
        """The counts of images and objects, and a hash of their ids and the classes: equal when a run may go on."""
        made: dict[str, Any] = {}
        for part, data in (("train", self.train), ("val", self.val)):
            rows = [(one.image_id, *one.labels.tolist()) for one in map(data.__getitem__, range(len(data)))]
            told = repr((data.kind, rows, data.categories))
            made[part] = {"images": len(data), "sha256": hashlib.sha256(told.encode(errors="replace")).hexdigest()}
        return made


def open_looked_through(spec: CocoSpec, say: Say = print) -> SceneData:
    """The images of ``spec``, each decoded once; a file without any object to learn from is refused."""
    parts: list[Coco] = []
    skipped: list[str] = []
    notes: dict[str, None] = {}  # parts of one file share them
    for what, data in zip(("training", "validation"), open_parts(spec), strict=True):
        with looking_through(len(data)) as progress:
            data, broken = sound_scenes(data, spec.corrupt, progress)
        objects = sum(int((~data[i].crowd).sum()) for i in range(len(data)))
        if not objects:
            more = " (data.val_part, or data.val, gives others)" * (what == "validation")
            raise ValueError(f"the {len(data)} {what} images of {data.annotations} have no objects{more}")
        told = [problem for problem in data.problems if problem not in skipped]  # parts of one file share these
        if told:
            say(f"{data.annotations}: {len(told)} of its entries are left out, first: {told[0]}")
        tell_left_out(broken, say)
        skipped += [*told, *broken]
        parts.append(data)
        notes |= dict.fromkeys(data.notes)
    for note in notes:
        say(note)
    return SceneData(parts[0], parts[1], tuple(skipped))


# --- what is learnt ---------------------------------------------------------------------------------------------------


class Detection(Learning):
    """The loss of a set. ``validated``: its mean as ``loss``, and AP and AP50, or PQ, SQ and RQ, of what ``data``
    tells. With ``accumulate`` or several processes each part's weights of classes are its own, as in the original."""

    def __init__(
        self, model: nn.Module, spec: DetectTrain, plan: Plan, detector: Detector, data: Coco, out: Path
    ) -> None:
        super().__init__(model, spec, plan, out)
        shapes = {"cosine": factor, "linear": linear, "step": partial(stepped, drops=spec.drops)}
        self.shape: Any = shapes[spec.schedule]
        self.places = {
            name: dataclasses.replace(place, layer=int(not name.startswith("backbone.")))
            for name, place in self.places.items()
        }
        self.total: Callable[..., Tensor] = partial(_mask_loss if detector.draws else _box_loss, spec)
        self.seen = spec.see_padding and detector.draws
        self._detector, self._data = detector, data
        self._tally, self._sum = SceneTally(data, kinds(detector, data)), torch.zeros(2, dtype=torch.float64)

    def output_of(self, batch: SceneBatch, *, seen: bool = False) -> Any:
        """What the network says of a batch; ``seen``: padding is a part of the picture."""
        spec: Any = self.model.spec
        return self.model(normalised(batch.images, batch.mask, spec.mean, spec.std), None if seen else batch.mask)

    def loss_of(self, batch: SceneBatch, batch_idx: int) -> Tensor:
        return self.total(self.output_of(batch, seen=self.seen), batch)

    def on_validation_epoch_start(self) -> None:
        self._tally = SceneTally(self._data, self._tally.kinds)
        self._sum = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: SceneBatch, batch_idx: int) -> None:
        """The loss is that of the last layers of a network in use; an image that fills a batch counts in none."""
        if batch.problem:
            raise ImageError(batch.problem)
        output = self.output_of(batch)
        self._tally.add(self._detector, output, batch)
        drawn = torch.Generator(self.device).manual_seed(batch_idx)  # the same points at every validation
        loss = self.total(output._replace(aux=()), batch, drawn).double()  # counts the objects of all processes
        if bool((batch.indices >= 0).all()):  # else the last batch of a process: an image would count twice
            self._sum += torch.stack((loss, torch.ones_like(loss))) * len(batch.indices)

    def on_validation_epoch_end(self) -> None:
        total = self.trainer.strategy.reduce(self._sum, reduce_op="sum")
        self._tally.gather()
        told = self._tally.summary()
        self.validated = {"loss": float(total[0] / total[1].clamp(min=1))}
        for kind, names in (("boxes", ("AP", "AP50")), ("masks", ("AP", "AP50")), ("panoptic", ("PQ", "SQ", "RQ"))):
            if kind in told:  # of masks, where there are both
                self.validated |= {name: float(told[kind][name] or 0.0) for name in names}

    def _rates(self) -> dict[str, Any]:
        """The backbone is layer 0, everything else layer 1."""
        spec: Any = self.spec
        return {"lr": spec.lr, "layer_decay": spec.backbone_lr, "last": 1}


def _box_loss(spec: DetectTrain, output: Any, batch: SceneBatch, generator: torch.Generator | None = None) -> Tensor:
    weights = detection.WEIGHTS._replace(no_object=spec.no_object)
    return detection.detection_loss(output, batch.targets, weights=weights).total


def _mask_loss(spec: DetectTrain, output: Any, batch: SceneBatch, generator: torch.Generator | None = None) -> Tensor:
    """``generator`` draws the points, None: torch's own."""
    weights, points = masks.WEIGHTS._replace(no_object=spec.no_object), masks.POINTS._replace(number=spec.points)
    return masks.mask_loss(
        output, batch.targets, weights=weights, points=points, generator=generator, mask=batch.mask
    ).total


# --- a run ------------------------------------------------------------------------------------------------------------


class _Detecting(Run):
    """The state of one call of ``detect``."""

    def _model(self, earlier: dict[str, Any] | None) -> tuple[nn.Module, list[str]]:
        given, classes = self.recipe.model, len(self.data.train.categories)
        if isinstance(variant(given), Mask2FormerSpec):
            for part in (self.data.train, self.data.val):
                _check_outlines(part)
        if given.spec.get("num_classes", classes) != classes:
            raise ValueError(f"model.num_classes is {given.spec['num_classes']}, the data has {classes} classes")
        if earlier is not None:
            model, loaded = fresh_model(given, classes, SPECS), list(earlier["loaded"])
        else:
            model, loaded = starting_model(given, classes, SPECS, load_detector)
            loaded = [*loaded, *self._start_backbone(model)]
        return synced(model) if self.plan.world > 1 else model, loaded

    def _start_backbone(self, model: Any) -> list[str]:
        """A sentence about where the backbone's weights are from; none where nothing was asked for."""
        weights, spec = self.recipe.train.backbone_weights, model.spec
        if weights is None:
            return []
        state = trained_classifier(spec.backbone, spec.backbone_knobs) if weights == "imagenet" else read(weights)
        try:
            model.backbone.start_from(state)
        except ValueError as error:
            raise ValueError(f"train.backbone_weights={weights}: {error}") from None
        return [f"backbone {spec.backbone}: the weights of {weights}"]

    def _sizes(self, spec: Any) -> list[tuple[int, int]]:
        augment = self.recipe.augment
        if augment.crop == "jitter":
            return [augment.size]
        return [(augment.eval_short, augment.eval_long)]

    def _loaders(self) -> Loaders:
        augment, draws = self.recipe.augment, self._detector.draws
        train = TrainScenes(self.data.train, augment, self.plan.seed, masks=draws)
        return Loaders(train, EvalScenes(self.data.val, augment, masks=draws), self.plan, self.workers, scene_loader)

    def _module(self) -> Learning:
        return Detection(self.model, self.recipe.train, self.plan, self._detector, self.data.val, self.folder)

    @property
    def _detector(self) -> Detector:
        """The model as it is now; its weights move while it is trained."""
        return Detector(
            model=self.model,
            name=self.recipe.model.name,
            categories=self.data.train.categories,
            short=self.recipe.augment.eval_short,
            long=self.recipe.augment.eval_long,
            recipe=recipes.plain(self.recipe),
        )

    def _keep(self) -> Callback:
        return Keep(self._export, SCORE[kinds(self._detector, self.data.val)[-1]])

    def _average(self, decay: float) -> Callback:
        return Average(decay, buffers=True)

    def _export(self, state: dict[str, Tensor], name: str) -> None:
        save_detector(self.folder / f"{name}.safetensors", self._detector, state)

    def _report(self) -> dict[str, Any]:
        data = self.data
        trained = load_detector(self.folder / f"{self.recipe.train.report}.safetensors", self.device)
        parts = {"val": data.val, **({"train": data.train} if self.recipe.train.measure_train else {})}
        results = {name: self._measured(trained, name, part) for name, part in parts.items()}
        rows = read_curves(self.folder / "metrics.csv")
        draw_curves(self.folder / "curves.png", rows, self.plan.updates_per_epoch)
        shown = parts.get("train", data.val)
        indices = torch.linspace(0, len(shown) - 1, min(SHOWN, len(shown))).long().tolist()
        draw_scenes(self.folder / "examples.png", trained, shown, indices)
        report = {
            "weights": f"{self.recipe.train.report}.safetensors",
            "results": results,
            "eval_short": trained.short,
            "eval_long": trained.long,
            "data": {
                "train": len(data.train),
                "val": len(data.val),
                "classes": len(data.train.categories),
                "skipped": list(data.skipped),
            },
            **self._about(rows),
        }
        write_json(self.folder / "report.json", report)
        (self.folder / LAST).unlink(missing_ok=True)
        self.say(f"wrote {self.folder / 'report.json'}, {report['weights']}, curves.png and examples.png")
        return report

    def _measured(self, trained: Detector, name: str, data: Coco) -> dict[str, Any]:
        tally, timing = measure(trained, data, batch_size=self.part, workers=self.workers)
        told = tally.summary()
        for kind, numbers in told.items():
            names = ("PQ", "SQ", "RQ") if kind == "panoptic" else ("AP", "AP50", "AP75")
            said = ", ".join(f"{each} {numbers[each] or 0.0:.4f}" for each in names)
            self.say(f"{name}: {said} of {kind} in {len(data)} images")
        return {**told, "milliseconds_per_image": 1000 * timing["seconds"] / len(data)}


# --- the picture ------------------------------------------------------------------------------------------------------


def draw_scenes(path: Path, detector: Detector, data: Coco, indices: list[int], sure: float = SURE) -> None:
    """A row an image: its objects, and those that were found with a score of at least ``sure``."""
    sizes = [data[i].size for i in indices]
    figure = new_figure(9, sum(4.4 * h / w + 0.05 for h, w in sizes) + 0.3)
    panels = figure.subplots(len(indices), 2, squeeze=False, height_ratios=[h / w for h, w in sizes])
    for row, i in zip(panels, indices, strict=True):
        sample, batch = data[i], EvalScenes(data, detector.sizes, masks=False).__getitems__([i])
        image = (read_image(os.fspath(sample.path)) * 255).round().to(torch.uint8)
        found = detector.shown(detector.output(batch), batch, sure)[0]
        true = sample.masks() if detector.draws else None
        pictures = (
            pictured(image, data.categories, sample.labels, sample.boxes, masks=true),
            pictured(image, data.categories, *found),
        )
        for panel, picture in zip(row, pictures, strict=True):
            panel.imshow(picture.permute(1, 2, 0).numpy())
            panel.set_axis_off()
    for panel, title in zip(panels[0], ("truth", f"found, scores of {sure} and more"), strict=True):
        panel.set_title(title, fontsize=10)
    write_figure(figure, path)
