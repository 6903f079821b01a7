"""What is done to an image before a network sees it: at random for training, always the same for evaluation.

Chance depends on (seed, epoch, number of the image) alone: not on which worker or process draws it, on the batch around
it, or on what was drawn before. Images come out as uint8 ``[3, h, w]``; the module normalises them where it computes.

Two ways lead there. ``photo`` treats one image of any size with torchvision's transforms. ``small`` treats a batch of
equal small images as one tensor, with shifts and flips only: a hundred times faster at 28 pixels.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vispe.spec import Spec

if TYPE_CHECKING:  # imported where it is used: torchvision changes warnings and the environment of its host
    from torchvision.transforms import v2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentSpec(Spec):
    """How training images vary. ``crop``: "resized" (a box of area ``scale`` and aspect ``ratio``), "padded" (a shift
    by at most ``pad`` pixels) or "none". ``flip``: its probability. ``randaugment``: (operations, strength of 31).
    ``mixup`` and ``cutmix``: the alpha of their Beta, 0 to leave them out. ``eval_crop``: the part of the image's short
    side that evaluation looks at.
    """

    crop: Literal["resized", "padded", "none"] = "resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 4
    flip: float = 0.5
    randaugment: tuple[int, int] | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    eval_crop: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale is a part of the area, from low to high in (0, 1], got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio goes from low to high, got {self.ratio}")
        if not 0 <= self.flip <= 1 or not 0 < self.eval_crop <= 1:
            raise ValueError(f"flip lies in [0, 1], eval_crop in (0, 1]; got {self.flip}, {self.eval_crop}")
        if min(self.pad, self.mixup, self.cutmix) < 0:
            raise ValueError(f"pad, mixup and cutmix are not negative, got {self.pad}, {self.mixup}, {self.cutmix}")
        if self.randaugment and not (self.randaugment[0] >= 1 and 0 <= self.randaugment[1] <= 30):
            raise ValueError(f"randaugment is (operations >= 1, strength 0 to 30), got {self.randaugment}")

    @property
    def by_tensor(self) -> bool:
        """Whether ``small`` can do it."""
        return self.crop != "resized" and self.randaugment is None


def mixed(*numbers: int) -> int:
    """A seed of 63 bits from several numbers; near ones give unrelated seeds."""
    data = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


# --- photographs, one by one ------------------------------------------------------------------------------------------


def photo_transform(spec: AugmentSpec, size: tuple[int, int]) -> v2.Compose:
    """float32 ``[3, h, w]`` in [0, 1] -> uint8 ``[3, *size]``, drawing from torch's CPU generator."""
    from torchvision.transforms import v2

    steps: list[torch.nn.Module] = []
    if spec.crop == "resized":
        steps.append(v2.RandomResizedCrop(size, spec.scale, spec.ratio, v2.InterpolationMode.BICUBIC, antialias=True))
    else:
        steps.append(Fitted(size, 1.0))
    steps.append(Bytes())
    if spec.crop == "padded":
        steps.append(v2.RandomCrop(size, padding=spec.pad))
    steps.append(v2.RandomHorizontalFlip(spec.flip))
    if spec.randaugment:
        steps.append(v2.RandAugment(*spec.randaugment))
    return v2.Compose(steps)


def photo(image: Tensor, transform: v2.Compose, seed: int) -> Tensor:
    """``transform(image)`` with chance from ``seed``; the generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return transform(image)


class Bytes(torch.nn.Module):
    """float in [0, 1] -> uint8, rounded; what bicubic overshoots is cut off."""

    def forward(self, image: Tensor) -> Tensor:
        return image.clamp(0, 1).mul(255).round().to(torch.uint8)


class Fitted(torch.nn.Module):
    """The middle of an image: ``size / part`` is the smallest that covers, of which the centre is taken."""

    def __init__(self, size: tuple[int, int], part: float) -> None:
        super().__init__()
        self.size, self.part = size, part

    def forward(self, image: Tensor) -> Tensor:
        from torchvision.transforms.v2 import InterpolationMode, functional

        (h, w), (height, width) = self.size, image.shape[-2:]
        scale = max(h / height, w / width) / self.part
        new = max(round(height * scale), h), max(round(width * scale), w)
        if new != (height, width):
            image = functional.resize(image, list(new), InterpolationMode.BICUBIC, antialias=True)
        return functional.center_crop(image, list(self.size))


def evaluation_transform(size: tuple[int, int], eval_crop: float) -> v2.Compose:
    """float32 ``[..., 3, h, w]`` in [0, 1] -> uint8 ``[..., 3, *size]``, without chance."""
    from torchvision.transforms import v2

    return v2.Compose([Fitted(size, eval_crop), Bytes()])


# --- small images, by the batch ---------------------------------------------------------------------------------------


def dice(seed: int, epoch: int, count: int) -> Tensor:
    """Three numbers in [0, 1) for every image of an epoch, ``[count, 3]``: shift down, shift right, flip."""
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(mixed(seed, epoch)))


def small(images: Tensor, rolls: Tensor, spec: AugmentSpec) -> Tensor:
    """uint8 ``[b, c, h, w]`` shifted and flipped as ``rolls [b, 3]`` say; what comes in from outside is black."""
    if spec.crop == "padded" and spec.pad:
        h, w = images.shape[-2:]
        padded = torch.nn.functional.pad(images, [spec.pad] * 4)
        shift = (rolls[:, :2] * (2 * spec.pad + 1)).long()
        rows, columns = shift[:, :1] + torch.arange(h), shift[:, 1:] + torch.arange(w)
        which = torch.arange(len(images))[:, None, None]
        images = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    flipped = rolls[:, 2] < spec.flip
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def fitted(images: Tensor, size: tuple[int, int], eval_crop: float) -> Tensor:
    """uint8 ``[b, c, h, w]`` -> uint8 ``[b, 3, *size]``; untouched when it has that size."""
    if images.shape[-2:] != size or eval_crop != 1:
        images = evaluation_transform(size, eval_crop)(images.float() / 255)
    return images.expand(-1, 3, -1, -1)


# --- mixing -----------------------------------------------------------------------------------------------------------


def mixing(spec: AugmentSpec, classes: int) -> torch.nn.Module | None:
    """MixUp, CutMix, or one of both at random: (images, labels ``[b]``) -> (mixed images, targets ``[b, classes]``)."""
    from torchvision.transforms import v2

    chosen: list[torch.nn.Module] = []
    if spec.mixup:
        chosen.append(v2.MixUp(alpha=spec.mixup, num_classes=classes))
    if spec.cutmix:
        chosen.append(v2.CutMix(alpha=spec.cutmix, num_classes=classes))
    if not chosen:
        return None
    return chosen[0] if len(chosen) == 1 else v2.RandomChoice(chosen)
