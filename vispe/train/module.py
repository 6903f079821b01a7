"""What Lightning trains: the loss of a batch, the optimiser, and the stop at the first number that is none."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vispe.classifier import normalised
from vispe.data.augment import AugmentSpec, mixed, mixing
from vispe.data.batches import Batch, Plan
from vispe.data.images import ImageError
from vispe.metrics.classification import Tally
from vispe.train.groups import groups, places
from vispe.train.schedule import factor
from vispe.train.spec import TrainSpec


class NotFiniteError(ValueError):
    """The loss or its gradient became infinite or no number."""


class Learning(pl.LightningModule):
    """``model`` learns by ``spec``; ``plan`` says how many updates there are, ``out`` gets a bad batch.

    ``told`` holds the numbers of the last update, ``validated`` of the last validation, the same in all processes.
    What is learnt, ``loss_of`` a batch, and how it is validated is up to the classes made of this one; ``shape`` is
    that of the learning rate over the updates.
    """

    shape = staticmethod(factor)

    def __init__(self, model: nn.Module, spec: TrainSpec, plan: Plan, out: Path) -> None:
        super().__init__()
        self.model, self.spec, self.plan, self.out = model.train(), spec, plan, out
        self.places = places(model)
        self.told: dict[str, float] = {}
        self.validated: dict[str, float] = {}
        self._losses: list[Tensor] = []
        self._batches: list[Any] = []

    def loss_of(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss of a batch; ``batch_idx`` counts the forward passes of the whole run."""
        raise NotImplementedError

    # --- training ---

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Chance in the network and in mixing follows from the number of the batch: a resumed run has the same."""
        torch.manual_seed(mixed(self.spec.seed, batch_idx, self.global_rank, -2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch.problem:
            raise ImageError(batch.problem)
        loss = self.loss_of(batch, batch_idx)
        self._losses.append(loss.detach())
        self._batches.append(batch)
        return loss

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Once an update, when all its gradients are there: clip them, and stop if anything is not finite."""
        norm = self._clipped(self.spec.clip if self.spec.clip is not None else math.inf)
        own = torch.stack(self._losses).mean()
        loss = self.trainer.strategy.reduce(own.clone(), reduce_op="mean")
        if not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
            raise NotFiniteError(self._stopped(float(own), float(loss), float(norm)))
        rate = max(group["lr"] for group in optimizer.param_groups)
        self.told = {"loss": float(loss), "lr": rate, "grad_norm": float(norm)}
        self._losses, self._batches = [], []

    def _clipped(self, limit: float) -> Tensor:
        """The norm of the gradient before it was clipped to ``limit``."""
        wrapped: Any = self.trainer.model
        if wrapped is not self and hasattr(wrapped, "clip_grad_norm_"):  # FSDP: each process has a part of it
            return wrapped.clip_grad_norm_(limit)
        return nn.utils.clip_grad_norm_(self.parameters(), limit)

    def _stopped(self, own: float, loss: float, norm: float) -> str:
        """The sentence for a person; the batch is saved by the processes whose own loss is bad (all, if none is)."""
        from safetensors.torch import save_file

        from vispe.files import write_atomically

        update = self.trainer.global_step
        where = self.out / (
            "bad_batch.safetensors" if self.global_rank == 0 else f"bad_batch_{self.global_rank}.safetensors"
        )
        if not math.isfinite(own) or math.isfinite(loss):
            names = [name for name, value in self._batches[0]._asdict().items() if isinstance(value, Tensor)]
            held = {name: torch.cat([getattr(b, name) for b in self._batches]).cpu().contiguous() for name in names}
            about = {"update": str(update), "loss": str(own), "grad_norm": str(norm)}
            write_atomically(where, lambda temporary: save_file(held, temporary, about))
        what = f"the loss became {loss}" if not math.isfinite(loss) else f"the gradient's norm became {norm}"
        epoch = update // self.plan.updates_per_epoch
        advice = "a lower train.lr, a longer warm-up or precision fp32 may help, in another --out"
        return f"{what} at update {update} (epoch {epoch}); the batch is in {os.fspath(where)!r}; {advice}"

    # --- the optimiser ---

    def configure_optimizers(self) -> Any:
        spec = self.spec
        made = groups(
            ((name.removeprefix("model."), p) for name, p in self._named()),
            self.places,
            weight_decay=spec.weight_decay,
            **self._rates(),
        )
        optimizer = torch.optim.AdamW(made, lr=spec.lr, betas=spec.betas)
        warmup = round(spec.warmup_epochs * self.plan.updates_per_epoch)
        total = self.plan.updates

        def of(update: int) -> float:
            return self.shape(update, warmup=min(warmup, total), total=total, final=spec.final_lr)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, of)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rates(self) -> dict[str, Any]:
        """The learning rates of ``groups``, layer by layer."""
        depth = int(self.model.spec.depth)  # type: ignore[union-attr, arg-type]
        return {"lr": self.spec.lr, "layer_decay": self.spec.layer_decay, "last": depth + 1}

    def _named(self) -> Any:
        """Parameters of the model; with FSDP those of the wrapped one, whose names have more parts."""
        for name, parameter in self.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", "").replace("_forward_module.", ""), parameter


class Classification(Learning):
    """Cross entropy over ``classes``, with the mixing that ``augment`` asks for."""

    def __init__(
        self, model: nn.Module, spec: TrainSpec, augment: AugmentSpec, plan: Plan, classes: int, out: Path
    ) -> None:
        super().__init__(model, spec, plan, out)
        self.classes, self.mix = classes, mixing(augment, classes)
        self._tally = Tally(classes)

    def loss_of(self, batch: Batch, batch_idx: int) -> Tensor:
        images, targets = normalised(batch.images, self.model.spec), batch.labels
        if self.mix is not None:
            images, targets = self.mix(images, targets)
        return F.cross_entropy(self.model(images).float(), targets, label_smoothing=self.spec.label_smoothing)

    def on_validation_epoch_start(self) -> None:
        self._tally = Tally(self.classes, self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if batch.problem:
            raise ImageError(batch.problem)
        self._tally.add(self.model(normalised(batch.images, self.model.spec)), batch.labels)

    def on_validation_epoch_end(self) -> None:
        self._tally.unpack(self.trainer.strategy.reduce(self._tally.packed(), reduce_op="sum"))
        self.validated = self._tally.summary()
