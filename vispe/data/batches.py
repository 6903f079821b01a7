"""Which images a process sees when, and the datasets and loaders that bring them.

The order follows from (seed, epoch) alone. An update takes the next ``batch_size`` images of the epoch's permutation,
and hands each process its equal part: two processes see, together, what one would see; a run that is resumed goes on
with what it would have seen. What is left of an epoch after the last whole update is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vispe.data.augment import (
    AugmentSpec,
    dice,
    evaluation_transform,
    fitted,
    mixed,
    photo,
    photo_transform,
    small,
)
from vispe.data.classification import Images
from vispe.data.images import ImageError
from vispe.data.sources import Pixels

MEMORY_SIDE, MEMORY_BYTES = 128, 2**30  # images no larger, together no more than this, are held in memory


class Batch(NamedTuple):
    """``images`` uint8 ``[b, 3, h, w]``, ``labels`` int64 ``[b]``, ``indices`` int64 ``[b]`` into the data set, -1 for
    padding; ``problem`` says why it could not be made, else it is empty."""

    images: Tensor
    labels: Tensor
    indices: Tensor
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """``images`` in the data set, ``batch_size`` an update (over all processes), split in ``accumulate`` parts."""

    images: int
    batch_size: int
    epochs: int
    seed: int
    accumulate: int = 1
    world: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.images < self.batch_size:
            raise ValueError(
                f"{self.images} training examples an epoch are fewer than a batch of {self.batch_size}: lower "
                "train.batch_size"
            )
        if self.batch_size % (self.world * self.accumulate):
            parts = f"{self.world} processes x {self.accumulate} accumulated parts"
            raise ValueError(f"a batch of {self.batch_size} does not divide into {parts}")

    @property
    def updates_per_epoch(self) -> int:
        return self.images // self.batch_size

    @property
    def updates(self) -> int:
        return self.updates_per_epoch * self.epochs

    def order(self, epoch: int) -> Tensor:
        """The permutation of an epoch, ``[images]``."""
        return torch.randperm(self.images, generator=torch.Generator().manual_seed(mixed(self.seed, epoch, -1)))

    def parts(self, start: int) -> Iterator[list[tuple[int, int]]]:
        """The (epoch, image) pairs of this process's forward passes, from update ``start`` to the end of the run."""
        part = self.batch_size // (self.world * self.accumulate)
        order, drawn = torch.empty(0), -1
        for update in range(start, self.updates):
            epoch, within = divmod(update, self.updates_per_epoch)
            if epoch != drawn:
                order, drawn = self.order(epoch), epoch
            for piece in range(self.accumulate):
                first = within * self.batch_size + (piece * self.world + self.rank) * part
                yield [(epoch, index) for index in order[first : first + part].tolist()]


class Parts:
    """A batch sampler of ``plan``'s parts from update ``start``; its length is that of the whole run."""

    def __init__(self, plan: Plan, start: int = 0) -> None:
        self.plan, self.start = plan, start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.plan.parts(self.start)

    def __len__(self) -> int:
        return self.plan.updates * self.plan.accumulate


class Shares:
    """A batch sampler of every image once, over ``world`` processes; -1 pads so that all have equally many batches."""

    def __init__(self, images: int, batch_size: int, world: int = 1, rank: int = 0) -> None:
        share = -(-images // world)
        own = list(range(rank * share, min((rank + 1) * share, images)))
        own += [-1] * (share - len(own))
        self.batches = [own[i : i + batch_size] for i in range(0, share, batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


# --- datasets ---------------------------------------------------------------------------------------------------------


class TrainSet(Dataset[Any]):
    """Training images by (epoch, image), augmented."""

    def __init__(self, images: Images, spec: AugmentSpec, size: tuple[int, int], seed: int) -> None:
        self.images, self.spec, self.size, self.seed = images, spec, size, seed
        self.pixels = pixels(images) if spec.by_tensor else None
        self.transform = photo_transform(spec, size)
        self._dice: tuple[int, Tensor] = (-1, torch.empty(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch:
        index = torch.tensor([image for _, image in keys])
        if self.pixels is not None:
            made = small(self.pixels[index], self._rolls(keys[0][0])[index], self.spec)
            return Batch(fitted(made, self.size, 1.0), self.images.labels[index], index)
        try:
            made = torch.stack([self._photo(*key) for key in keys])
        except ImageError as error:
            return Batch(torch.empty(0), torch.empty(0), index, str(error))
        return Batch(made, self.images.labels[index], index)

    def _photo(self, epoch: int, image: int) -> Tensor:
        return photo(self.images.read(image), self.transform, mixed(self.seed, epoch, image))

    def _rolls(self, epoch: int) -> Tensor:
        if self._dice[0] != epoch:
            self._dice = (epoch, dice(self.seed, epoch, len(self.images)))
        return self._dice[1]


class EvalSet(Dataset[Any]):
    """Images as evaluation sees them, at ``size``."""

    def __init__(self, images: Images, size: tuple[int, int], eval_crop: float) -> None:
        self.images, self.size, self.eval_crop = images, size, eval_crop
        self.pixels = pixels(images)
        self.transform = evaluation_transform(size, eval_crop)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: list[int]) -> Batch:
        index = torch.tensor(keys)
        known = index.clamp(min=0)
        labels = self.images.labels[known].masked_fill(index < 0, -1)
        if self.pixels is not None:
            return Batch(fitted(self.pixels[known], self.size, self.eval_crop), labels, index)
        try:
            made = torch.stack([self.transform(self.images.read(int(i))) for i in known])
        except ImageError as error:
            return Batch(torch.empty(0), torch.empty(0), index, str(error))
        return Batch(made, labels, index)


def pixels(images: Images) -> Tensor | None:
    """All images as uint8 ``[n, 1|3, h, w]`` when they are held in memory, else None."""
    return images.source.pixels[images.where] if isinstance(images.source, Pixels) else None


def in_memory(images: Images) -> Images:
    """The same images, held in memory if they are small and of one size; ``ImageError`` for a damaged one."""
    first = images.read(0)
    h, w = first.shape[-2:]
    if isinstance(images.source, Pixels) or max(h, w) > MEMORY_SIDE or len(images) * 3 * h * w > MEMORY_BYTES:
        return images
    held = torch.empty(len(images), 3, h, w, dtype=torch.uint8)
    for i in range(len(images)):
        image = images.read(i)
        if image.shape[-2:] != (h, w):
            return images
        held[i] = image.mul(255).round()
    return dataclasses.replace(
        images, source=Pixels(held, images.name(0).rsplit("/", 2)[0]), where=torch.arange(len(images))
    )


def loader(data: TrainSet | EvalSet, batches: Parts | Shares, workers: int, pinned: bool = False) -> DataLoader[Any]:
    """A loader of ``Batch``; ``workers`` processes, none for images in memory. ``pinned`` for an accelerator."""
    workers = 0 if data.pixels is not None else workers
    return brought(data, batches, workers, pinned, persistent=isinstance(data, TrainSet))


def brought(data: Dataset[Any], batches: Any, workers: int, pinned: bool, *, persistent: bool) -> DataLoader[Any]:
    """A loader of what ``data.__getitems__`` makes of each of ``batches``, as it is; ``persistent`` workers outlive a
    pass."""
    return DataLoader(
        data,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=as_it_is,
        pin_memory=pinned,
        persistent_workers=workers > 0 and persistent,
    )


def as_it_is(batch: Any) -> Any:
    """What a dataset gives, unchanged by its loader."""
    return batch
