"""Images with boxes and masks, varied for training and fitted for evaluation, and the batches they come in.

Boxes, masks and pixels move together: torchvision's functions for its tensors that know what they are, but for masks
made smaller or larger, which take the pixel under each new centre (torchvision takes the corner's: half a pixel off).
An object that is cut away altogether is gone from boxes, masks and labels alike. Chance depends on (seed, epoch,
number of the image) alone, as in ``augment``.

An image is never padded here by itself: boxes are parts of what is seen of it, and a batch tells by ``mask`` where
real pixels are. Padding lies to the right and below, and is zero once ``normalised``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vispe.data.augment import mixed, photo
from vispe.data.batches import brought
from vispe.data.coco import Coco, Sample
from vispe.data.coco_verify import wrong_size
from vispe.data.images import ImageError, read_image
from vispe.spec import Spec

LEAST = 1.0  # pixels of a side below which nothing is left of an object to learn from
Target = dict[str, Tensor]  # labels [n] int64, boxes [n, 4] (cx, cy, w, h in parts of the image), masks [n, h, w] bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneSpec(Spec):
    """How scenes vary. ``crop="detr"``: the short side is one of ``short``, the long at most ``long``; every second
    image is first resized to one of ``crop_short`` and cropped to sides within ``crop_sides``. ``"jitter"`` (that of
    large scale, Ghiasi et al. 2021): fitted into ``size`` times a number within ``scale``, then cropped to ``size``, to
    which batches are padded. ``"none"``: as in evaluation, which fits by ``eval_short`` and ``eval_long``. ``flip`` and
    ``distort`` (brightness, contrast, colours) are probabilities. Batches are padded to multiples of ``multiple``.
    """

    crop: Literal["detr", "jitter", "none"] = "detr"
    short: tuple[int, ...] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    long: int = 1333
    crop_short: tuple[int, ...] = (400, 500, 600)
    crop_sides: tuple[int, int] = (384, 600)
    size: tuple[int, int] = (1024, 1024)
    scale: tuple[float, float] = (0.1, 2.0)
    flip: float = 0.5
    distort: float = 0.0
    eval_short: int = 800
    eval_long: int = 1333
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("short", "long", "crop_short", "crop_sides", "size", "eval_short", "eval_long", "multiple"):
            value = getattr(self, name)
            sides = value if isinstance(value, tuple) else (value,)
            if not sides or min(sides) < 1:
                raise ValueError(f"{name} is at least 1 pixel, got {value}")
        if self.crop_sides[0] > self.crop_sides[1] or not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"crop_sides and scale go from low to high, got {self.crop_sides} and {self.scale}")
        if not (0 <= self.flip <= 1 and 0 <= self.distort <= 1):
            raise ValueError(f"flip and distort are probabilities, got {self.flip} and {self.distort}")


class Scene(NamedTuple):
    """An image and its objects while they are worked on: torchvision's ``Image``, ``BoundingBoxes`` and ``Mask``."""

    image: Tensor  # uint8 [3, h, w]
    boxes: Tensor  # [n, 4] corners in pixels
    labels: Tensor  # [n]
    masks: Tensor | None  # uint8 [n, h, w]

    @property
    def size(self) -> tuple[int, int]:
        return self.image.shape[-2], self.image.shape[-1]


# --- one scene --------------------------------------------------------------------------------------------------------


def scene(image: Tensor, boxes: Tensor, labels: Tensor, masks: Tensor | None) -> Scene:
    """From plain tensors: ``image`` uint8, ``boxes`` corners in pixels, ``masks`` bool, or None to do without."""
    from torchvision import tv_tensors

    size = (image.shape[-2], image.shape[-1])
    if len(boxes) != len(labels) or (masks is not None and tuple(masks.shape) != (len(labels), *size)):
        shapes = [tuple(part.shape) for part in (boxes, labels, masks) if part is not None]
        raise ValueError(f"boxes, labels and masks {shapes} are not of the same objects in an image of {size}")
    return Scene(
        tv_tensors.Image(image),
        tv_tensors.BoundingBoxes(boxes.float().reshape(-1, 4), format="XYXY", canvas_size=size),
        labels,
        None if masks is None else tv_tensors.Mask(masks.to(torch.uint8)),
    )


def read_scene(sample: Sample, *, masks: bool) -> Scene:
    """A sample's image and its objects but for crowds; ``ValueError`` names what cannot be read."""
    image = read_image(sample.path).mul(255).round().to(torch.uint8)
    if tuple(image.shape[1:]) != sample.size:
        raise ImageError(wrong_size(sample, *image.shape[1:]))
    keep = ~sample.crowd
    drawn = torch.from_numpy(sample.masks()[keep]) if masks else None
    return scene(image, torch.from_numpy(sample.boxes[keep]), torch.from_numpy(sample.labels[keep]), drawn)


def resized(it: Scene, size: tuple[int, int]) -> Scene:
    """Everything to ``(h, w)``; edges stay edges."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import InterpolationMode, functional

    if size == it.size:
        return it
    masks = it.masks
    if masks is not None:
        plain = masks.as_subclass(Tensor)
        exact = InterpolationMode.NEAREST_EXACT
        made = functional.resize(plain, list(size), exact) if len(plain) else plain.new_zeros(0, *size)
        masks = tv_tensors.Mask(made)
    image = functional.resize(it.image, list(size), InterpolationMode.BILINEAR, antialias=True)
    return it._replace(image=image, boxes=functional.resize(it.boxes, list(size)), masks=masks)


def cropped(it: Scene, top: int, left: int, size: tuple[int, int]) -> Scene:
    """The window of ``size`` at ``(top, left)``, which lies inside; boxes are cut to it."""
    from torchvision.transforms.v2 import functional

    assert 0 <= top <= it.size[0] - size[0]
    assert 0 <= left <= it.size[1] - size[1]
    boxes = functional.crop(it.boxes, top, left, *size)
    masks = None if it.masks is None else it.masks[:, top : top + size[0], left : left + size[1]]
    return it._replace(image=functional.crop(it.image, top, left, *size), boxes=boxes, masks=_as_mask(masks))


def flipped(it: Scene) -> Scene:
    """Left for right."""
    from torchvision.transforms.v2 import functional

    masks = None if it.masks is None else it.masks.flip(-1)
    return it._replace(
        image=functional.horizontal_flip(it.image),
        boxes=functional.horizontal_flip(it.boxes),
        masks=_as_mask(masks),
    )


def finished(it: Scene) -> tuple[UInt8[Tensor, "3 h w"], Target]:
    """Plain tensors; objects of which under a pixel's side, or no pixel of the mask, is left are dropped."""
    h, w = it.size
    corners = it.boxes.as_subclass(Tensor).clamp(min=0).minimum(torch.tensor([w, h, w, h], dtype=torch.float32))
    sides = corners[:, 2:] - corners[:, :2]
    keep = (sides >= LEAST).all(1)
    masks = None if it.masks is None else it.masks.as_subclass(Tensor).bool()
    if masks is not None:
        keep &= masks.any(-1).any(-1)
    boxes = torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, sides], 1) / torch.tensor([w, h, w, h])
    target = {"labels": it.labels[keep], "boxes": boxes[keep]}
    if masks is not None:
        target["masks"] = masks[keep]
    return it.image.as_subclass(Tensor).contiguous(), target


def fitted(h: int, w: int, short: int, long: int) -> tuple[int, int]:
    """The size with the short side ``short``, or less where the long one would exceed ``long``.

    The rounding is that of transformers' DETR, to the pixel. DETR's own made 417 x 1334 of 200 x 640 at 1333, as it
    rounded the short side before it took the long one from it.
    """
    small, large = min(h, w), max(h, w)
    exact: float = short
    if large / small * short > long:
        exact = long * small / large
    side = max(round(exact), 1)
    if small == side:
        return h, w
    return (side, int(exact * w / h)) if h <= w else (int(exact * h / w), side)


def _as_mask(masks: Tensor | None) -> Tensor | None:
    from torchvision import tv_tensors

    return None if masks is None else tv_tensors.Mask(masks)


# --- recipes ----------------------------------------------------------------------------------------------------------


def evaluation_transform(spec: SceneSpec) -> Callable[[Scene], Scene]:
    """Fitted, without chance."""
    return lambda it: resized(it, fitted(*it.size, spec.eval_short, spec.eval_long))


def train_transform(spec: SceneSpec) -> Callable[[Scene], Scene]:
    """As ``spec`` says, drawing from torch's CPU generator."""
    from torchvision.transforms import v2

    window = {"detr": _detr, "jitter": _jitter, "none": lambda it, known: evaluation_transform(known)(it)}[spec.crop]
    distort = v2.RandomPhotometricDistort(p=spec.distort)

    def transform(it: Scene) -> Scene:
        it = flipped(it) if _chance(spec.flip) else it
        it = window(it, spec)
        return it._replace(image=distort(it.image)) if spec.distort else it

    return transform


def _detr(it: Scene, spec: SceneSpec) -> Scene:
    if _chance(0.5):
        short = _one_of(spec.crop_short)
        it = resized(it, fitted(*it.size, short, 2**31))
        low, high = spec.crop_sides
        h, w = (_between(min(low, side), min(high, side)) for side in it.size)
        it = cropped(it, _between(0, it.size[0] - h), _between(0, it.size[1] - w), (h, w))
    return resized(it, fitted(*it.size, _one_of(spec.short), spec.long))


def _jitter(it: Scene, spec: SceneSpec) -> Scene:
    low, high = spec.scale
    scale = low + (high - low) * float(torch.rand(()))
    (h, w), (height, width) = it.size, spec.size
    factor = min(height * scale / h, width * scale / w)
    it = resized(it, (max(round(h * factor), 1), max(round(w * factor), 1)))
    seen = min(height, it.size[0]), min(width, it.size[1])
    return cropped(it, _between(0, it.size[0] - seen[0]), _between(0, it.size[1] - seen[1]), seen)


def _chance(probability: float) -> bool:
    return bool(torch.rand(()) < probability)


def _between(low: int, high: int) -> int:
    """A whole number, both ends among them."""
    return int(torch.randint(low, high + 1, ()))


def _one_of(numbers: Sequence[int]) -> int:
    return numbers[_between(0, len(numbers) - 1)]


# --- batches ----------------------------------------------------------------------------------------------------------


class SceneBatch(NamedTuple):
    """``images`` uint8, padded; ``mask``: True where a pixel is real; ``targets``: a dict for each image, masks padded
    as images are. ``sizes``: (h, w) of the real part; ``originals``: of the file, in which results are told.
    ``indices`` into the data set, -1 for an image that only fills a batch; ``problem`` says why a batch could not be
    made, else it is empty."""

    images: UInt8[Tensor, "b 3 h w"]
    mask: Bool[Tensor, "b h w"]
    targets: list[Target]
    sizes: Int[Tensor, "b 2"]
    originals: Int[Tensor, "b 2"]
    image_ids: Int[Tensor, " b"]
    indices: Int[Tensor, " b"]
    problem: str = ""


def padded(
    items: Sequence[tuple[Tensor, Target]], *, size: tuple[int, int] | None = None, multiple: int = 1
) -> tuple[UInt8[Tensor, "b 3 h w"], Bool[Tensor, "b h w"], list[Target]]:
    """Images and targets on one canvas: the largest height and width, or ``size``, made a ``multiple``."""
    heights, widths = zip(*(image.shape[-2:] for image, _ in items), strict=True)
    h, w = (-(-side // multiple) * multiple for side in (size or (max(heights), max(widths))))
    if h < max(heights) or w < max(widths):
        raise ValueError(f"an image of {max(heights)} x {max(widths)} does not go into a canvas of {h} x {w}")
    images = torch.zeros(len(items), 3, h, w, dtype=torch.uint8)
    mask = torch.zeros(len(items), h, w, dtype=torch.bool)
    targets = []
    for k, (image, target) in enumerate(items):
        height, width = image.shape[-2:]
        images[k, :, :height, :width] = image
        mask[k, :height, :width] = True
        if "masks" in target:
            target = {**target, "masks": F.pad(target["masks"], (0, w - width, 0, h - height))}
        targets.append(target)
    return images, mask, targets


def normalised(
    images: UInt8[Tensor, "b 3 h w"], mask: Bool[Tensor, "b h w"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "b 3 h w"]:
    """float32 with channels of this mean and deviation taken out; padding is 0, as if it were of the mean's colour."""
    shift, scale = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (mean, std))
    return ((images.float() / 255 - shift) / scale) * mask[:, None]


class TrainScenes(Dataset[Any]):
    """Scenes by (epoch, image), varied as ``spec`` says; ``masks``: whether the targets have them."""

    def __init__(self, data: Coco, spec: SceneSpec, seed: int, *, masks: bool) -> None:
        self.data, self.spec, self.seed, self.masks = data, spec, seed, masks

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, keys: list[tuple[int, int]]) -> SceneBatch:
        transform: Any = train_transform(self.spec)  # made here: a function in a function does not go to a worker

        def made(key: tuple[int, int]) -> tuple[Tensor, Target]:
            it: Any = read_scene(self.data[key[1]], masks=self.masks)
            return finished(photo(it, transform, mixed(self.seed, *key)))  # type: ignore[arg-type]

        size = self.spec.size if self.spec.crop == "jitter" else None
        return _batch(self.data, [image for _, image in keys], lambda: [made(key) for key in keys], size, self.spec)


class EvalScenes(Dataset[Any]):
    """Scenes as evaluation sees them, by number; -1 fills a batch."""

    def __init__(self, data: Coco, spec: SceneSpec, *, masks: bool) -> None:
        self.data, self.spec, self.masks = data, spec, masks

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, keys: list[int]) -> SceneBatch:
        transform = evaluation_transform(self.spec)

        def made() -> list[tuple[Tensor, Target]]:
            return [finished(transform(read_scene(self.data[max(key, 0)], masks=self.masks))) for key in keys]

        return _batch(self.data, keys, made, None, self.spec)


def _batch(
    data: Coco,
    indices: list[int],
    make: Callable[[], list[tuple[Tensor, Target]]],
    size: tuple[int, int] | None,
    spec: SceneSpec,
) -> SceneBatch:
    samples = [data[max(index, 0)] for index in indices]
    originals, image_ids = torch.tensor([s.size for s in samples]), torch.tensor([s.image_id for s in samples])
    try:
        items = make()
    except ValueError as error:  # ImageError is one
        empty = torch.empty(0)
        return SceneBatch(empty, empty, [], empty, originals, image_ids, torch.tensor(indices), str(error))
    sizes = torch.tensor([image.shape[-2:] for image, _ in items])
    images, mask, targets = padded(items, size=size, multiple=spec.multiple)
    return SceneBatch(images, mask, targets, sizes, originals, image_ids, torch.tensor(indices))


def scene_loader(data: TrainScenes | EvalScenes, batches: Any, workers: int, pinned: bool = False) -> DataLoader[Any]:
    """A loader of ``SceneBatch``; ``batches``: ``Parts`` for training, ``Shares`` for evaluation."""
    return brought(data, batches, workers, pinned, persistent=isinstance(data, TrainScenes))
