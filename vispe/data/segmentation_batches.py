"""What is done to an image and its mask before a network sees them, and the sets that bring batches of them.

Training: the size jittered, a crop, a flip, colours distorted (torchvision v2 on ``tv_tensors``, mask and image alike).
Evaluation: the whole image, its mask untouched. As in classification, chance depends on (seed, epoch, number of the
image) alone, and the order of images is ``vispe.data.batches.Plan``'s. A mask is never interpolated: a pixel takes the
class at its own centre (``NEAREST_EXACT``; torchvision's own resizing of masks is half a pixel off).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vispe.data.augment import mixed
from vispe.data.batches import Parts, Shares, brought
from vispe.data.images import ImageError
from vispe.data.segmentation import VOID, SemanticImages, SemanticSample
from vispe.data.sizes import resized
from vispe.spec import Spec

if TYPE_CHECKING:  # imported where it is used: torchvision changes warnings and the environment of its host
    from torchvision.transforms import v2

GREY = (124, 116, 104)  # ImageNet's mean colour: what lies beyond an image is nothing, once normalised
TRIES = 10  # crops drawn for one that is not of a single class


@dataclasses.dataclass(frozen=True, kw_only=True)
class SemanticAugmentSpec(Spec):
    """How training images vary, in mmsegmentation's order. ``crop``: (h, w) of what the network sees; a smaller image
    is padded below and to the right, its mask with void. ``short``: the short side that images are brought to first,
    None for their own size. ``scale``: the size is then multiplied by a number drawn evenly from low to high.
    ``dominance``: a crop in which one class has more than this part of the labelled pixels is drawn again, up to ten
    times. ``flip`` and ``photometric``: probabilities, of a mirror image and of each distortion of colour.
    ``eval_short``: the short side that evaluation resizes images to (their masks stay as they are), None to leave them.
    """

    crop: tuple[int, int] = (512, 512)
    short: int | None = None
    scale: tuple[float, float] = (0.5, 2.0)
    dominance: float = 0.75
    flip: float = 0.5
    photometric: float = 0.5
    eval_short: int | None = None

    def __post_init__(self) -> None:
        crop = (self.crop,) * 2 if isinstance(self.crop, int) else tuple(self.crop)
        if len(crop) != 2 or min(crop) < 1:
            raise ValueError(f"crop is (h, w) of at least 1 pixel, got {self.crop!r}")
        object.__setattr__(self, "crop", crop)
        object.__setattr__(self, "scale", tuple(self.scale))
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale goes from low to high, above 0, got {self.scale}")
        for name in ("dominance", "flip", "photometric"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} lies in [0, 1], got {getattr(self, name)}")
        for name in ("short", "eval_short"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1 pixel, got {getattr(self, name)}")


class SemanticBatch(NamedTuple):
    """``images`` uint8 ``[b, 3, h, w]``, padded below and to the right to the largest; ``masks`` int64 ``[b, y, x]``,
    padded with void; ``indices`` int64 ``[b]`` into the data set, -1 for a repeated image that does not count (its mask
    is all void). ``real`` and ``sizes`` int64 ``[b, 2]``: the (h, w) of each image and of each mask without padding.
    ``problem`` says why the batch could not be made, else it is empty."""

    images: Tensor
    masks: Tensor
    indices: Tensor
    real: Tensor
    sizes: Tensor
    problem: str = ""

    def real_pixels(self) -> Tensor:
        """bool ``[b, h, w]``, true on real pixels of ``images``."""
        h, w = self.images.shape[-2:]
        down, right = torch.arange(h, device=self.real.device), torch.arange(w, device=self.real.device)
        return (down < self.real[:, :1])[:, :, None] & (right < self.real[:, 1:])[:, None]


# --- one image --------------------------------------------------------------------------------------------------------


def train_transform(spec: SemanticAugmentSpec) -> v2.Compose:
    """(``tv_tensors.Image`` uint8 ``[3, h, w]``, ``tv_tensors.Mask`` ``[h, w]``) -> the same at ``spec.crop``, drawing
    from torch's CPU generator."""
    from torchvision.transforms import v2

    steps: list[torch.nn.Module] = [Jitter(spec), Crop(spec), v2.RandomHorizontalFlip(spec.flip)]
    if spec.photometric:
        steps.append(v2.RandomPhotometricDistort(p=spec.photometric))
    return v2.Compose(steps)


def drawn(sample: SemanticSample, transform: v2.Compose, seed: int) -> tuple[Tensor, Tensor]:
    """Image and mask through ``transform`` with chance from ``seed``; the generator is left as it was."""
    from torchvision import tv_tensors

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        image, mask = transform(tv_tensors.Image(sample.image), tv_tensors.Mask(sample.mask))
    return image.as_subclass(Tensor), mask.as_subclass(Tensor)


def resize_both(image: Tensor, mask: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Bilinear with antialiasing for the image; for the mask the class at each new pixel's centre."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    if tuple(image.shape[-2:]) == size:
        return image, mask
    plain = functional.resize(mask.as_subclass(Tensor)[None], list(size), InterpolationMode.NEAREST_EXACT)[0]
    return functional.resize(image, list(size), InterpolationMode.BILINEAR, antialias=True), _like(plain, mask)


class Jitter(torch.nn.Module):
    """Brought to the short side, then larger or smaller by a number drawn from the range."""

    def __init__(self, spec: SemanticAugmentSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        (h, w), (low, high) = image.shape[-2:], self.spec.scale
        factor = float(torch.empty(()).uniform_(low, high)) if high > low else low
        if self.spec.short is not None:
            factor *= self.spec.short / min(h, w)
        return resize_both(image, mask, (max(round(h * factor), 1), max(round(w * factor), 1)))


class Crop(torch.nn.Module):
    """A window of the crop's size, drawn again while one class fills it; what is missing is padded."""

    def __init__(self, spec: SemanticAugmentSpec) -> None:
        super().__init__()
        self.size, self.dominance = spec.crop, spec.dominance

    def forward(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        (h, w), (height, width) = self.size, image.shape[-2:]
        for _ in range(TRIES):
            top, left = (int(torch.randint(max(room, 0) + 1, ())) for room in (height - h, width - w))
            window = mask[top : top + h, left : left + w]
            if self.dominance >= 1 or not self._filled(window):
                break
        part = image[:, top : top + h, left : left + w]
        return _like(_padded(part, self.size, GREY), image), _like(_padded(window[None], self.size, (VOID,))[0], mask)

    def _filled(self, mask: Tensor) -> bool:
        counts = torch.bincount(mask.as_subclass(Tensor)[mask.as_subclass(Tensor) != VOID])
        return bool(counts.numel() and counts.max() > self.dominance * counts.sum())


def _padded(part: Tensor, size: tuple[int, int], colour: tuple[int, ...]) -> Tensor:
    """``[c, h, w]`` in the upper left of ``[c, *size]``."""
    part = part.as_subclass(Tensor)
    if tuple(part.shape[-2:]) == size:
        return part
    whole = torch.tensor(colour, dtype=part.dtype)[:, None, None].repeat(1, *size)
    whole[:, : part.shape[1], : part.shape[2]] = part
    return whole


def _like(plain: Tensor, kind: Tensor) -> Tensor:
    from torchvision import tv_tensors

    return tv_tensors.wrap(plain, like=kind) if isinstance(kind, tv_tensors.TVTensor) else plain


# --- sets -------------------------------------------------------------------------------------------------------------


class SemanticTrainSet(Dataset[Any]):
    """Training crops by (epoch, image)."""

    def __init__(self, images: SemanticImages, spec: SemanticAugmentSpec, seed: int) -> None:
        self.images, self.spec, self.seed = images, spec, seed
        self.transform = train_transform(spec)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: list[tuple[int, int]]) -> SemanticBatch:
        index = torch.tensor([image for _, image in keys])
        try:
            made = [drawn(self.images.read(i), self.transform, mixed(self.seed, e, i)) for e, i in keys]
        except ImageError as error:
            return _failed(index, error)
        return _batch([image for image, _ in made], [mask for _, mask in made], index)


class SemanticEvalSet(Dataset[Any]):
    """Whole images, at their own size or at ``short``; masks as they are."""

    def __init__(self, images: SemanticImages, short: int | None = None) -> None:
        self.images, self.short = images, short

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: list[int]) -> SemanticBatch:
        index = torch.tensor(keys)
        try:
            samples = [self.images.read(max(i, 0)) for i in keys]
        except ImageError as error:
            return _failed(index, error)
        masks = [s.mask if i >= 0 else torch.full_like(s.mask, VOID) for i, s in zip(keys, samples, strict=True)]
        return _batch([brought_to(sample.image, self.short) for sample in samples], masks, index)


def brought_to(image: Tensor, short: int | None) -> Tensor:
    """An image ``[3, h, w]`` as evaluation sees it: of a short side of ``short`` pixels, None to leave it."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    if short is None:
        return image
    size = resized(image.shape[1], image.shape[2], short, "short")
    return functional.resize(image, list(size), InterpolationMode.BILINEAR, antialias=True)


def semantic_loader(
    data: SemanticTrainSet | SemanticEvalSet, batches: Parts | Shares, workers: int, pinned: bool = False
) -> DataLoader[Any]:
    """A loader of :class:`SemanticBatch` by ``workers`` processes; ``pinned`` for an accelerator."""
    return brought(data, batches, workers, pinned, persistent=isinstance(data, SemanticTrainSet))


def _failed(index: Tensor, error: ImageError) -> SemanticBatch:
    return SemanticBatch(torch.empty(0), torch.empty(0), index, torch.empty(0), torch.empty(0), str(error))


def _batch(images: list[Tensor], masks: list[Tensor], index: Tensor) -> SemanticBatch:
    real, sizes = (torch.tensor([part.shape[-2:] for part in parts]) for parts in (images, masks))
    (h, w), (y, x) = real.amax(0).tolist(), sizes.amax(0).tolist()
    return SemanticBatch(
        torch.stack([_padded(image, (h, w), GREY) for image in images]),
        torch.stack([_padded(mask[None], (y, x), (VOID,))[0] for mask in masks]),
        index,
        real,
        sizes,
    )
