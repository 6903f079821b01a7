"""The recipe of a classifier: every knob of ``vispe train`` that is not the data's or the model's own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from vispe.data.augment import AugmentSpec
from vispe.data.classification import DataSpec
from vispe.spec import Spec

Size = int | tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """Which model. ``weights``: "published", "fresh" (from scratch), or a file; ``origin`` and ``source_size`` as in
    ``vispe.load``. Every other name, such as ``image_size``, ``drop_path`` or ``position``, is a knob of the model's
    own spec and is gathered in ``spec``.
    """

    REST = "spec"

    name: str
    weights: str = "published"
    origin: str | None = None
    source_size: tuple[int, int] | None = None
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec(Spec):
    """How weights are found. ``batch_size`` is that of an update, over all processes and ``accumulate`` parts.

    ``size``: of training images where it is not the model's ``image_size``: the positions are resampled in each
    forward. ``lr`` is the highest rate, of the head; ``final_lr`` the part of it at the end; ``layer_decay`` the ratio
    between layers. ``clip``: the largest norm of the gradient. ``ema``: the decay of averaged weights, which are then
    those that are validated and kept. ``validate_every`` counts epochs, ``save_every`` and ``log_every`` updates.
    ``report``: which weights the report is about; "best" was chosen by looking at the validation images.
    """

    epochs: int = 30
    batch_size: int = 64
    accumulate: int = 1
    size: Size | None = None
    lr: float = 5e-4
    final_lr: float = 0.0
    warmup_epochs: float = 1.0
    weight_decay: float = 0.05
    layer_decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = 1.0
    ema: float | None = None
    label_smoothing: float = 0.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    validate_every: int = 1
    save_every: int = 200
    log_every: int = 10
    report: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "validate_every", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        for name in ("lr", "final_lr", "warmup_epochs", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is not negative, got {value}")
        self._check_parts()

    def _check_parts(self) -> None:
        if self.epochs % self.validate_every:
            raise ValueError(
                f"validate_every, {self.validate_every}, does not divide {self.epochs} epochs; 1 divides any"
            )
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay lies in (0, 1], got {self.layer_decay}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing lies in [0, 1), got {self.label_smoothing}")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema lies in [0, 1), got {self.ema}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is positive, or null, got {self.clip}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas lie in [0, 1), got {self.betas}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec(Spec):
    """Where it runs: Lightning's ``accelerator`` and ``strategy`` on ``devices`` of each of ``num_nodes``; ``workers``
    processes decode images in each process, by default one for each core it may use."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    devices: int = 1
    num_nodes: int = 1
    workers: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("devices", 1), ("num_nodes", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is at least {least}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyRecipe(Spec):
    """A whole recipe. ``evaluate_at``: image sizes to report besides the training size; one number means a square."""

    task: Literal["classify"] = "classify"
    model: ModelSpec
    data: DataSpec
    augment: AugmentSpec = dataclasses.field(default_factory=AugmentSpec)
    train: TrainSpec = dataclasses.field(default_factory=TrainSpec)
    run: RunSpec = dataclasses.field(default_factory=RunSpec)
    evaluate_at: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        check_together(self.train, self.run)


def check_together(train: TrainSpec, run: RunSpec, only_ddp: str | None = None) -> None:
    """``ValueError`` for what a training and the place it runs at cannot both have. ``only_ddp``: who does what, such
    as ``"matchers train"``, with ddp alone."""
    if only_ddp is not None and run.strategy == "fsdp":
        raise ValueError(f"run.strategy=fsdp shards the blocks of a ViT; {only_ddp} with ddp")
    parts = run.devices * run.num_nodes * train.accumulate
    if train.batch_size % parts:
        raise ValueError(
            f"train.batch_size={train.batch_size} does not divide into {run.devices * run.num_nodes} processes "
            f"(run.devices x run.num_nodes) x train.accumulate={train.accumulate} parts"
        )
    if train.ema is not None and run.strategy == "fsdp":
        raise ValueError("train.ema averages whole weights, which fsdp never has in one place: use ddp, or no ema")


def pair(size: Size) -> tuple[int, int]:
    """A size (h, w); one number means a square."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
