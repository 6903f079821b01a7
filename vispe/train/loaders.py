"""What Lightning feeds on: images that were looked through, and this process's part of their order."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_only

from vispe.data.batches import Parts, Plan, Shares, in_memory, loader
from vispe.data.classification import DataSpec, Images, open_data
from vispe.data.verify import sound
from vispe.train.spec import RunSpec

Say = Callable[[str], object]
Opened = Callable[[DataSpec], tuple[Images, Images]]  # (training, validation)


@dataclasses.dataclass(frozen=True)
class Data:
    """Images that were looked through; ``skipped``: a sentence for each that could not be read."""

    train: Images
    val: Images
    skipped: tuple[str, ...] = ()

    def fingerprint(self) -> dict[str, Any]:
        """The counts of images, and a hash of their names and labels: equal when a run may go on with them."""
        made: dict[str, Any] = {}
        for part, images in (("train", self.train), ("val", self.val)):
            names = "\n".join(f"{os.path.basename(images.name(i))} {int(images.labels[i])}" for i in range(len(images)))
            made[part] = {"images": len(images), "sha256": hashlib.sha256(names.encode(errors="replace")).hexdigest()}
        return made


def open_checked(spec: DataSpec, say: Say = print, opened: Opened = open_data) -> Data:
    """The images that ``opened`` gives, each decoded once (now or before), small ones of one size held in memory."""
    parts: list[Images] = []
    skipped: list[str] = []
    for images in opened(spec):
        with looking_through(len(images)) as progress:
            images, broken = sound(images, spec.corrupt, progress)
        skipped += broken
        parts.append(in_memory(images) if spec.memory == "auto" else images)
    tell_left_out(skipped, say)
    return Data(parts[0], parts[1], tuple(skipped))


def tell_left_out(skipped: Sequence[str], say: Say) -> None:
    """Say how many images are not used, and why the first is not."""
    if skipped:
        what = "1 image cannot be used and is" if len(skipped) == 1 else f"{len(skipped)} images cannot be used and are"
        say(f"{what} left out, first: {skipped[0]}")


@contextmanager
def looking_through(count: int) -> Iterator[Callable[[int, int], object] | None]:
    """Progress of decoding ``count`` images, on stderr of the first process."""
    if not first_process():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking through the images", total=count)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def first_process() -> bool:
    """Whether this process is the one that writes and speaks."""
    return getattr(rank_zero_only, "rank", None) in (0, None)


class Loaders(pl.LightningDataModule):
    """Training images in ``plan``'s order and validation images; ``bring`` is what makes a loader of a set."""

    def __init__(
        self, train_set: Any, val_set: Any, plan: Plan, workers: int, bring: Callable[..., Any] = loader
    ) -> None:
        super().__init__()
        self.train_set, self.val_set, self.plan, self.workers, self.bring = train_set, val_set, plan, workers, bring

    def train_dataloader(self) -> Any:
        """From ``global_step``: 0, or what a checkpoint has restored."""
        assert self.trainer is not None
        assert self.trainer.world_size == self.plan.world, (self.trainer.world_size, self.plan.world)
        return self.bring(self.train_set, Parts(self._own(), self.trainer.global_step), self.workers, self._pinned)

    def val_dataloader(self) -> Any:
        plan = self._own()
        batch_size = max(plan.batch_size // (plan.world * plan.accumulate), 1)
        shares = Shares(len(self.val_set), batch_size, plan.world, plan.rank)
        return self.bring(self.val_set, shares, self.workers, self._pinned)

    def _own(self) -> Plan:
        assert self.trainer is not None
        return dataclasses.replace(self.plan, rank=self.trainer.global_rank)

    @property
    def _pinned(self) -> bool:
        assert self.trainer is not None
        return self.trainer.strategy.root_device.type == "cuda"


def readers(run: RunSpec) -> int:
    """Processes that bring what a run looks at: ``run.workers``, or one for each core."""
    return cores() if run.workers is None else run.workers


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
