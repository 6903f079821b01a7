"""``pretrain``: a recipe to a masked autoencoder and the encoder in it, from images without labels (He et al. 2022).

Which patches an update hides depends on (seed, number of the update) alone, each process taking its rows of one draw: a
run that goes on, or runs on several processes, hides the same ones. Validation hides, in every image, the same patches
in every epoch of every run, so that its losses compare.

The folder of a run is that of a classifier (``run.json``, ``metrics.csv``, ``tensorboard/``, ``last.ckpt``), with
``mae.safetensors`` (the whole, as last validated) and, in the end, ``encoder.safetensors`` (a ViT's names, without a
head), ``report.json``, ``curves.png`` and ``reconstructions.png``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from jaxtyping import Float, UInt8
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from vispe import recipe as recipes
from vispe.classifier import normalised
from vispe.data.augment import AugmentSpec, mixed
from vispe.data.batches import Batch, EvalSet
from vispe.data.classification import DataSpec, open_unlabelled
from vispe.data.images import ImageError
from vispe.files import write_atomically, write_json
from vispe.models.mae import MAE, MAESpec
from vispe.position.resample import patch_grid
from vispe.spec import Spec
from vispe.train.callbacks import LAST
from vispe.train.classify import Run, carried_out
from vispe.train.curves import read_curves
from vispe.train.loaders import Data, Say, open_checked
from vispe.train.module import Learning
from vispe.train.report import draw_curves
from vispe.train.spec import ModelSpec, RunSpec, TrainSpec, check_together
from vispe.train.start import checked_knobs, variant
from vispe.weights import build, load

WHOLE, ENCODER = "mae.safetensors", "encoder.safetensors"
SHOWN = 8  # pictures in reconstructions.png


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedModel(ModelSpec):
    """Which autoencoder; by default from scratch. Its own knobs are those of ``MAESpec``."""

    weights: str = "fresh"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedAugment(AugmentSpec):
    """The paper's: a crop and a flip, nothing else. ``ValueError`` for what mixes labels."""

    scale: tuple[float, float] = (0.2, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixup or self.cutmix:
            raise ValueError(f"there are no labels to mix: mixup and cutmix are 0, got {self.mixup}, {self.cutmix}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedTrain(TrainSpec):
    """The paper's 800 epochs. ``lr`` is the rate itself, 1.5e-4 for every 256 images of a batch in the paper."""

    epochs: int = 800
    batch_size: int = 256
    lr: float = 1.5e-4
    warmup_epochs: float = 40.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, only in (("layer_decay", 1.0), ("label_smoothing", 0.0), ("report", "last")):
            if getattr(self, name) != only:
                raise ValueError(f"{name} is a classifier's knob, here it is {only}, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRecipe(Spec):
    """A whole recipe; ``task: pretrain`` tells it from a classifier's."""

    task: Literal["pretrain"] = "pretrain"
    model: MaskedModel
    data: DataSpec
    augment: MaskedAugment = dataclasses.field(default_factory=MaskedAugment)
    train: MaskedTrain = dataclasses.field(default_factory=MaskedTrain)
    run: RunSpec = dataclasses.field(default_factory=RunSpec)

    def __post_init__(self) -> None:
        check_together(self.train, self.run)


def pretrain(
    recipe: PretrainRecipe, out: str | os.PathLike[str], data: Data | None = None, say: Say = print
) -> dict[str, Any]:
    """Train by ``recipe`` in the folder ``out``; the report, as in ``report.json`` (empty but in the first process).

    Goes on, refuses and stops as ``vispe.train.classify.fit`` does. Folders of images need no class folders.
    """
    return carried_out(
        _Pretraining,
        recipe,
        out,
        data,
        say,
        check=lambda: _knobs(recipe.model),
        opened=lambda folder: open_checked(recipe.data, say, open_unlabelled),
    )


def load_mae(path: str | os.PathLike[str]) -> MAE:
    """The autoencoder of a ``mae.safetensors``, or of a run's folder, in eval mode; ``ValueError`` when it is none."""
    from safetensors import SafetensorError, safe_open

    file = Path(path) / WHOLE if os.path.isdir(path) else Path(path)
    if not file.is_file():
        raise ValueError(f"there is no autoencoder {str(file)!r}")
    try:
        with safe_open(file, "pt") as opened:
            about = json.loads((opened.metadata() or {})["mae"])
            state = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
        spec = {key: tuple(v) if isinstance(v, list) else v for key, v in about["spec"].items()}
        model = build(about["model"], **spec)
        model.load_state_dict(state)
    except (SafetensorError, KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        what = f"is no autoencoder that vispe trained: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"{str(file)!r} {what}") from None
    assert isinstance(model, MAE)
    return model


# --- what is hidden ---------------------------------------------------------------------------------------------------


def training_noise(seed: int, update: int, batch_size: int, patches: int) -> Float[Tensor, "batch patches"]:
    """The noise of a whole update, over all processes and accumulated parts, in the order of ``Plan.parts``."""
    return torch.rand(batch_size, patches, generator=torch.Generator().manual_seed(mixed(seed, update, -4)))


def fixed_noise(indices: Tensor, patches: int) -> Float[Tensor, "b patches"]:
    """The noise of validation images by their ``indices [b]``: the same in all runs, whatever the batch around them."""
    draws = (torch.Generator().manual_seed(mixed(int(index), -5)) for index in indices)
    return torch.stack([torch.rand(patches, generator=draw) for draw in draws])


class Pretraining(Learning):
    """The mean squared error of hidden patches. ``validated``: its mean as ``loss``, over ``images``."""

    def loss_of(self, batch: Batch, batch_idx: int) -> Tensor:
        plan, count = self.plan, len(batch.images)
        update, piece = divmod(batch_idx, plan.accumulate)
        first = (piece * plan.world + self.global_rank) * count
        noise = training_noise(self.spec.seed, update, plan.batch_size, _patches(self.model, batch.images))
        return self._error(batch.images, noise[first : first + count])

    def on_validation_epoch_start(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Padding is left out; a batch of nothing else is computed all the same (FSDP waits for it) and not counted."""
        if batch.problem:
            raise ImageError(batch.problem)
        real = batch.indices.cpu() >= 0
        kept = real if real.any() else ~real
        noise = fixed_noise(batch.indices.cpu()[kept], _patches(self.model, batch.images))
        loss = self._error(batch.images[kept.to(batch.images.device)], noise)
        count = float(real.sum())  # all images hide equally many patches
        self._sums += torch.stack((loss.double() * count, torch.full_like(loss, count).double()))

    def on_validation_epoch_end(self) -> None:
        total, images = self.trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        self.validated = {"loss": total / images, "images": images}

    def _error(self, images: Tensor, noise: Tensor) -> Tensor:
        x = normalised(images, self.model.spec)
        return self.model(x, noise.to(x.device)).loss


def _patches(model: Any, images: Tensor) -> int:
    """How many patches each of ``images [b, 3, h, w]`` has."""
    h, w = patch_grid((images.shape[-2], images.shape[-1]), (model.spec.patch_size,) * 2)
    return h * w


# --- a run ------------------------------------------------------------------------------------------------------------


class _KeepLast(Callback):
    """Writes the validated weights; goes before ``Average``."""

    def __init__(self, run: _Pretraining) -> None:
        self.run = run

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Every process takes part (the weights may be spread over them), the first one writes."""
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            self.run.write_whole({key.removeprefix("model."): value for key, value in state.items()})


class _Pretraining(Run):
    """The state of one call of ``pretrain``."""

    def __init__(self, recipe: PretrainRecipe, folder: Path, data: Data, say: Say) -> None:
        super().__init__(recipe, folder, data, say)
        spec: Any = self.model.spec
        h, w = patch_grid(self.size, (spec.patch_size,) * 2)
        if int(h * w * (1 - spec.mask_ratio)) < 1:
            raise ValueError(f"mask_ratio {spec.mask_ratio} leaves none of {h * w} patches to see")

    def write_whole(self, state: dict[str, Tensor]) -> None:
        spec = dataclasses.asdict(self.model.spec)  # type: ignore[call-overload]
        about = {"model": self.recipe.model.name, "spec": spec, "recipe": recipes.plain(self.recipe)}
        _write(self.folder / WHOLE, state, about)

    def _model(self, earlier: dict[str, Any] | None) -> tuple[nn.Module, list[str]]:
        given, knobs = self.recipe.model, _knobs(self.recipe.model)
        if earlier is not None:
            return build(given.name, **knobs), list(earlier["loaded"])
        if given.weights == "fresh":
            return build(given.name, **knobs), []
        weights = None if given.weights == "published" else given.weights
        model = load(given.name, weights, given.origin, given.source_size, **knobs)
        return model, list(model.report)  # type: ignore[arg-type]

    def _told(self) -> dict[str, Any]:
        return {key: value for key, value in super()._told().items() if key != "classes"}

    def _module(self) -> Learning:
        return Pretraining(self.model, self.recipe.train, self.plan, self.folder)

    def _keep(self) -> Callback:
        return _KeepLast(self)

    def _contents(self) -> str:
        return f"{len(self.data.train)} + {len(self.data.val)} images"

    def _report(self) -> dict[str, Any]:
        model, rows = load_mae(self.folder), read_curves(self.folder / "metrics.csv")
        _write(self.folder / ENCODER, model.encoder_state(), {"model": self.recipe.model.name})
        draw_curves(self.folder / "curves.png", rows, self.plan.updates_per_epoch)
        images, noise = self._shown()
        draw_reconstructions(self.folder / "reconstructions.png", model, images, noise)
        losses = [{"update": int(row["update"]), "loss": row["val_loss"]} for row in rows if "val_loss" in row]
        report = {
            "weights": [WHOLE, ENCODER],
            "validation_loss": losses[-1]["loss"],
            "validations": losses,
            "size": list(self.size),
            "data": {"train": len(self.data.train), "val": len(self.data.val), "skipped": list(self.data.skipped)},
            "classify": self._classify(model.spec),
            **self._about(rows),
        }
        write_json(self.folder / "report.json", report)
        (self.folder / LAST).unlink(missing_ok=True)
        self.say(f"validation loss {report['validation_loss']:.4f}")
        self.say(f"wrote {self.folder / 'report.json'}, {WHOLE}, {ENCODER}, curves.png and reconstructions.png")
        self.say("a classification recipe starts from it with the model that report.json gives under classify")
        return report

    def _classify(self, spec: MAESpec) -> dict[str, Any]:
        """The ``model`` of a classification recipe that starts from the encoder: equal pixels, places and shapes."""
        same = ("patch_size", "width", "depth", "heads", "hidden", "eps", "mean", "std")
        where = {"weights": str(self.folder / ENCODER), "origin": "vispe", "position": "sine_mae", "pool": "avg"}
        shape = {name: getattr(spec, name) for name in same}
        return json.loads(json.dumps({"name": "vit_base_patch16_224", **where, "image_size": self.size, **shape}))

    def _shown(self) -> tuple[Tensor, Tensor]:
        """Some validation images, evenly spread, and their noise."""
        shown = EvalSet(self.data.val, self.size, self.recipe.augment.eval_crop)
        indices = torch.linspace(0, len(shown) - 1, min(SHOWN, len(shown))).long()
        batch = shown.__getitems__(indices.tolist())
        if batch.problem:
            raise ImageError(batch.problem)
        return batch.images, fixed_noise(indices, _patches(self.model, batch.images))


def _knobs(given: ModelSpec) -> dict[str, Any]:
    """The recipe's knobs, checked; ``ValueError`` names an unknown or wrong one, or a model that is no autoencoder."""
    spec = variant(given)
    if not isinstance(spec, MAESpec):
        raise ValueError(f"{given.name} is no masked autoencoder; one is mae_vit_base_patch16")
    return checked_knobs(given, spec)


def _write(path: Path, state: dict[str, Tensor], about: dict[str, Any]) -> None:
    from safetensors.torch import save

    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    data = save(tensors, {"mae": json.dumps(about)})  # by hand: save_file makes files only their owner can read
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


# --- the pictures -----------------------------------------------------------------------------------------------------


def draw_reconstructions(
    path: Path, model: MAE, images: UInt8[Tensor, "b 3 h w"], noise: Float[Tensor, "b patches"]
) -> None:
    """Three rows: the images, what is seen of them, and the picture with the hidden patches painted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count, _, h, w = images.shape
    size = (1.3 * count + 0.3, 1.3 * 3 * h / w + 0.6)
    figure = Figure(figsize=size, dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, count, squeeze=False)
    for row, (title, made) in zip(panels, _pictures(model, images, noise).items(), strict=True):
        row[0].set_ylabel(title, fontsize=9)
        for panel, picture in zip(row, made, strict=True):
            panel.imshow(picture.permute(1, 2, 0).numpy())
            panel.set(xticks=[], yticks=[])
            panel.spines[:].set_visible(False)
    flattered = "; hidden patches have the mean and contrast of the true ones" if model.spec.norm_pix_loss else ""
    figure.suptitle(f"{100 * model.spec.mask_ratio:g} percent hidden{flattered}", fontsize=9)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))


def _pictures(model: MAE, images: Tensor, noise: Tensor) -> dict[str, Tensor]:
    """Title -> float32 ``[b, 3, h, w]`` in [0, 1], on the CPU."""
    spec = model.spec
    with torch.inference_mode():
        x = normalised(images, spec)
        output = model(x, noise)
        painted = model.paste(x, output)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (spec.mean, spec.std))
    hidden = output.mask.unflatten(1, model.patch_embed.grid(x))[:, None]
    for axis in (2, 3):
        hidden = hidden.repeat_interleave(spec.patch_size, axis)
    true = images.float() / 255
    return {
        "image": true,
        "seen": torch.where(hidden > 0, 0.5, true),
        "reconstruction": (painted * std + mean).clamp(0, 1),
    }
