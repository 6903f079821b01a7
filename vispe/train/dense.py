"""``match_dense``: a recipe and photographs to a trained LoFTR, a matcher without keypoints.

Pairs are views of photographs through random homographies, or images with poses and depths, made as they are needed
(``vispe/train/image_pairs.py``). The folder is that of a classifier, with ``examples.png`` (a held-out pair, its
matches right and wrong) in the place of ``confusion.png``.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from vispe import recipe as recipes
from vispe.classifier import load_trained, write_trained
from vispe.data.batches import Plan
from vispe.data.images import ImageError
from vispe.data.megadepth import DepthSpec, open_posed
from vispe.files import write_json
from vispe.losses.dense_matching import COARSE, coarse_loss, fine_loss, training_matches
from vispe.models.loftr import LoFTR, LoFTRSpec
from vispe.spec import Spec
from vispe.train.callbacks import LAST, Average, Keep
from vispe.train.classify import Run, carried_out
from vispe.train.curves import read_curves
from vispe.train.dense_scores import (
    DECISIVE,
    RIGHT,
    Judged,
    beats,
    draw_dense,
    judged,
    measure,
    neighbours,
    summed,
)
from vispe.train.image_pairs import (
    EvalImagePairs,
    ImagePairBatch,
    PhotoPairs,
    PosedPairs,
    TrainImagePairs,
    image_pair_loader,
)
from vispe.train.loaders import Loaders, Say, tell_left_out
from vispe.train.module import Learning
from vispe.train.photos import PhotoSpec, photographs
from vispe.train.report import draw_curves
from vispe.train.spec import ModelSpec, RunSpec, TrainSpec, check_together
from vispe.train.start import checked_knobs, variant
from vispe.train.synced import synced
from vispe.weights import build, load

TASK = "match_dense"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseTrain(TrainSpec):
    """How weights are found. ``coarse``: the loss of true cells, "focal" (the official code's) or "likelihood" (the
    paper's). ``fine``: the weight of the refinement's loss. ``refined``: how many matches of a pair are refined in
    training, as a part of image 0's cells: those that are predicted, topped up by true ones, which are at least the
    part ``given`` of them."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    coarse: Literal["focal", "likelihood"] = "focal"
    fine: float = 1.0
    refined: float = 0.2
    given: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coarse not in COARSE:
            raise ValueError(f"coarse is one of {', '.join(COARSE)}, got {self.coarse!r}")
        if not self.fine >= 0:
            raise ValueError(f"fine is not negative, got {self.fine}")
        if not (0 < self.refined <= 1 and 0 <= self.given <= 1):
            raise ValueError(f"refined lies in (0, 1], given in [0, 1], got {self.refined} and {self.given}")
        if self.layer_decay != 1.0 or self.label_smoothing or self.size is not None:
            raise ValueError("layer_decay, label_smoothing and size are a classifier's knobs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseRecipe(Spec):
    """A whole recipe; ``task: match_dense`` tells it from a classifier's. ``poses``: images with poses and depths,
    instead of the photographs of ``data``."""

    task: Literal["match_dense"] = "match_dense"
    model: ModelSpec
    data: PhotoSpec = dataclasses.field(default_factory=PhotoSpec)
    poses: DepthSpec | None = None
    train: DenseTrain = dataclasses.field(default_factory=DenseTrain)
    run: RunSpec = dataclasses.field(default_factory=RunSpec)

    def __post_init__(self) -> None:
        check_together(self.train, self.run, only_ddp="matchers train")


def match_dense(
    recipe: DenseRecipe, out: str | os.PathLike[str], data: DenseData | None = None, say: Say = print
) -> dict[str, Any]:
    """Train by ``recipe`` in the folder ``out``; the report, as in ``report.json`` (empty but in the first process).

    Goes on, refuses and stops as ``vispe.train.classify.fit`` does.
    """
    return carried_out(
        _Dense,
        recipe,
        out,
        data,
        say,
        check=lambda: _knobs(recipe.model),
        opened=lambda folder: opened_pairs(recipe, say),
    )


def _knobs(given: ModelSpec) -> dict[str, Any]:
    spec = variant(given)
    if not isinstance(spec, LoFTRSpec):
        raise ValueError(f"{given.name} is no LoFTR (task: match trains a LightGlue)")
    made = checked_knobs(given, spec)
    whole = spec.but(**made)
    if whole.fine_depth and whole.window < 3:
        raise ValueError(f"model.window is {whole.window}: nothing is refined in it; take 3, or model.fine_depth=0")
    return made


# --- the pairs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DenseData:
    """Where pairs come from; ``skipped``: a sentence for each photograph that is left out."""

    train: TrainImagePairs
    val: EvalImagePairs
    skipped: tuple[str, ...] = ()

    def fingerprint(self) -> dict[str, Any]:
        """Equal when a run may go on with these images."""
        return {"train": self.train.source.fingerprint(), "val": self.val.source.fingerprint()}


def opened_pairs(recipe: DenseRecipe, say: Say = print) -> DenseData:
    """The images to learn from and those held out; photographs are each read once."""
    stride = variant(recipe.model).but(**_knobs(recipe.model)).strides[0]
    parts: list[Any]
    if recipe.poses is not None:
        spec, skipped, count = recipe.poses, [], recipe.poses.val_pairs
        parts = [PosedPairs(posed, spec, stride, spec.pairs * posed.scenes) for posed in open_posed(spec)]
    else:
        data, count = recipe.data, recipe.data.val_pairs
        found, refuse = photographs(data), data.corrupt == "refuse"
        parts = [PhotoPairs(part, data.views, stride, data.seed, refuse) for part in found]
        skipped = [sentence for part in parts for sentence in part.skipped]
        if not all(part.names for part in parts):
            raise ValueError(f"of {len(found[0])} + {len(found[1])} photographs too few can be used: {skipped[0]}")
    tell_left_out(skipped, say)
    train, val = parts
    return DenseData(TrainImagePairs(train, recipe.train.seed), EvalImagePairs(val, count), tuple(skipped))


# --- what is learnt ---------------------------------------------------------------------------------------------------


class DenseMatching(Learning):
    """``coarse_loss`` and ``fine_loss``. ``validated``: their mean as ``loss``, and ``precision``, ``recall`` and
    ``AUC5`` of the pairs of ``held_out``, as :func:`summed` tells them."""

    def __init__(self, model: nn.Module, spec: DenseTrain, plan: Plan, held_out: EvalImagePairs, out: Path) -> None:
        super().__init__(model, spec, plan, out)
        self.held_out = held_out
        self._tally = torch.zeros(len(held_out), len(Judged._fields) + 2, dtype=torch.float64)

    def losses(self, batch: ImagePairBatch) -> Tensor:
        """The loss of each pair, ``[b]``."""
        network, spec = cast(LoFTR, self.model), cast(DenseTrain, self.spec)
        knobs, cells = network.spec, batch.matches0.shape[1]
        stride, step = knobs.strides
        count = max(round(spec.refined * cells), 1)
        pick = partial(
            training_matches, matches0=batch.matches0, cells1=batch.matches1.shape[1], order=batch.order,
            threshold=knobs.threshold, count=count, given=round(spec.given * count),
        )  # fmt: skip
        told = network.lesson(batch.image0, batch.image1, pick, batch.mask0, batch.mask1)
        loss = coarse_loss(told.coarse, batch.matches0, batch.matches1, spec.coarse)
        if told.offsets is None or told.deviation is None:
            return loss
        wide = -(-batch.image1.shape[-1] // stride)
        own = torch.stack((told.j % wide, told.j // wide), 1) * stride
        truth = (batch.there0[told.rows, told.i] - own) / (knobs.window // 2 * step)
        return loss + spec.fine * fine_loss(told.offsets, told.deviation, truth, told.rows, len(loss))

    def loss_of(self, batch: ImagePairBatch, batch_idx: int) -> Tensor:
        return self.losses(batch).mean()

    def on_validation_epoch_start(self) -> None:
        self._tally = torch.zeros_like(self._tally, device=self.device)

    def validation_step(self, batch: ImagePairBatch, batch_idx: int) -> None:
        if batch.problem:
            raise ImageError(batch.problem)
        losses, rows = self.losses(batch).double(), judged(self.model, self.held_out.source, batch)
        for index, loss, row in zip(batch.indices.tolist(), losses.tolist(), rows, strict=True):
            if index >= 0:
                self._tally[index] = torch.tensor([loss, 1.0, *row], dtype=torch.float64)

    def on_validation_epoch_end(self) -> None:
        """Every pair's row is in one process, and zero in the others."""
        total = self.trainer.strategy.reduce(self._tally, reduce_op="sum").cpu()
        told = summed([Judged(*row) for row in total[:, 2:].tolist()], self.held_out.source)
        self.validated = {
            "loss": float(total[:, 0].mean()),
            "precision": told["precision"],
            "recall": told["recall"],
            "AUC5": told["auc"][self.held_out.source.limits.index(5)],
        }

    def _rates(self) -> dict[str, Any]:
        return {"lr": self.spec.lr, "layer_decay": 1.0, "last": 0}


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainedDense:
    """``model`` (in eval mode), a LoFTR called ``name`` in the zoo; ``recipe`` is how it was trained, as plain JSON."""

    model: nn.Module
    name: str
    recipe: dict[str, Any]


def load_dense(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> TrainedDense:
    """The matcher of a file, or of a run's folder; ``ValueError`` as ``load_classifier``."""

    def made(about: dict[str, Any], model: nn.Module) -> TrainedDense:
        return TrainedDense(model, about["model"], dict(about["recipe"]))

    return load_trained(path, TASK, made, device)


# --- a run ------------------------------------------------------------------------------------------------------------


class _Dense(Run):
    """The state of one call of ``match_dense``."""

    def _model(self, earlier: dict[str, Any] | None) -> tuple[nn.Module, list[str]]:
        given = self.recipe.model
        loaded: list[str] = []
        if earlier is not None:  # the file it started from may be gone
            spec = {key: tuple(v) if isinstance(v, list) else v for key, v in earlier["spec"].items()}
            model, loaded = build(given.name, **spec), list(earlier["loaded"])
        elif given.weights == "fresh":
            model = build(given.name, **_knobs(given))
        else:
            weights = None if given.weights == "published" else given.weights
            model = load(given.name, weights, given.origin, **_knobs(given))
            loaded = [f"weights: {given.weights}"]
        stride = cast(LoFTR, model).spec.strides[0]
        if stride != self.data.train.source.stride:
            raise ValueError(f"{given.weights!r} has cells of {stride} pixels: say its model.widths in the recipe")
        return synced(model) if self.plan.world > 1 else model, loaded

    def _sizes(self, spec: Any) -> list[tuple[int, int]]:
        poses = self.recipe.poses
        return [self.recipe.data.views.size if poses is None else (poses.resize, poses.resize)]

    def _loaders(self) -> Loaders:
        return Loaders(self.data.train, self.data.val, self.plan, self.workers, image_pair_loader)

    def _module(self) -> Learning:
        return DenseMatching(self.model, self.recipe.train, self.plan, self.data.val, self.folder)

    def _keep(self) -> Callback:
        return Keep(self._export, "AUC5")

    def _average(self, decay: float) -> Callback:
        return Average(decay, buffers=True)

    def _contents(self) -> str:
        train, val = self.data.train.source, self.data.val.source
        return f"{len(train.names)} + {len(val.names)} photographs, {len(train)} pairs an epoch"

    def _told(self) -> dict[str, Any]:
        return {
            "recipe": recipes.plain(self.recipe),
            "data": self.data.fingerprint(),
            "loaded": self.loaded,
            "spec": dataclasses.asdict(cast(Any, self.model.spec)),
        }

    def _export(self, state: dict[str, Tensor], name: str) -> None:
        made = TrainedDense(self.model, self.recipe.model.name, recipes.plain(self.recipe))
        write_trained(self.folder / f"{name}.safetensors", TASK, made, state)

    def _report(self) -> dict[str, Any]:
        data = self.data
        trained = load_dense(self.folder / f"{self.recipe.train.report}.safetensors", self.device)
        results = {"val": measure(trained.model, data.val, self.part, self.workers)}
        try:
            results["sift_mutual_nn_ratio"] = neighbours(data.val)
        except ValueError as error:
            self.say(f"not compared with SIFT: {error}")
        rows = read_curves(self.folder / "metrics.csv")
        draw_curves(self.folder / "curves.png", rows, self.plan.updates_per_epoch)
        draw_dense(self.folder / "examples.png", trained.model, data.val)
        report = {
            "weights": f"{self.recipe.train.report}.safetensors",
            "results": results,
            "beats": {
                name: beats(results["val"], told, data.val.source) for name, told in results.items() if name != "val"
            },
            "pairs": len(data.val),
            "data": {
                "train": len(data.train.source.names),
                "val": len(data.val.source.names),
                "skipped": list(data.skipped),
            },
            **self._about(rows),
        }
        write_json(self.folder / "report.json", report)
        (self.folder / LAST).unlink(missing_ok=True)
        self._say(report)
        return report

    def _say(self, report: dict[str, Any]) -> None:
        self._say_pace(report)
        source, told = self.data.val.source, report["results"]["val"]
        self.say(f"on {report['pairs']} held-out pairs of {report['data']['val']} photographs:")
        limits = f"AUC at {' / '.join(map(str, source.limits))} {source.unit}"
        self.say(
            f"precision at {RIGHT:g} px {told['precision']:.3f}, recall of cells {told['recall']:.3f}, "
            f"{told['matches']:.0f} matches, {limits} {_percent(told['auc'])}"
        )
        if not told["matches"]:
            threshold = cast(LoFTR, self.model).spec.threshold
            self.say(f"no match is as sure as model.threshold={threshold:g}: train longer, or lower it")
        for name, better in report["beats"].items():
            other = report["results"][name]
            self.say(
                f"{name} of the same images: {other['matches']:.0f} matches, {limits} {_percent(other['auc'])}: "
                f"LoFTR is {'better' if better else 'not better'} at {DECISIVE}"
            )
        self.say(f"wrote {self.folder / 'report.json'}, {report['weights']}, curves.png and examples.png")


def _percent(auc: list[float]) -> str:
    return " / ".join(f"{100 * value:.1f}" for value in auc)
