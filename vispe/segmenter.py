"""A trained network for semantic segmentation in one file; images in, a class for every pixel out.

The file is that of ``vispe.classifier``, of another task.
"""

from __future__ import annotations

import colorsys
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor, nn

from vispe.classifier import load_trained, normalised, write_trained
from vispe.data.batches import Shares
from vispe.data.images import ImageError, read_image
from vispe.data.rle import encode
from vispe.data.segmentation import SemanticImages
from vispe.data.segmentation_batches import SemanticEvalSet, brought_to, semantic_loader
from vispe.files import write_atomically, write_json
from vispe.layers.pixels import enlarged
from vispe.metrics.semantic import SemanticTally

TASK = "segment"
WRITTEN = (".png", ".json", "_overlay.png")  # behind an image's name
VOID_COLOUR = (0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Segmenter:
    """``model`` (in eval mode) called ``name`` in the zoo tells the ``classes`` of pixels apart in images brought to a
    short side of ``short`` pixels, or of any size if that is None. ``recipe`` is how it was trained, as plain JSON."""

    model: nn.Module
    name: str
    classes: tuple[str, ...]
    short: int | None
    recipe: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def masks(
        self, images: UInt8[Tensor, "b 3 h w"], sizes: Sequence[tuple[int, int]], real: Tensor | None = None
    ) -> list[Int[Tensor, "y x"]]:
        """The class of every pixel at each of ``sizes``, on the model's device.

        ``real [b, 2]``: the (h, w) of each image of a padded batch; padding does not change what is said of it.
        """
        with torch.inference_mode():
            x = normalised(images.to(self.device), self.model.spec)
            sides = None if real is None else [(int(h), int(w)) for h, w in real.tolist()]
            output = self.model(x, None if sides is None else _real_pixels(x, sides))
            stride: Any = self.model.stride
            return [logits.argmax(0) for logits in enlarged(output, sizes, stride, sides)]


def _real_pixels(images: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    mask = torch.zeros(len(images), *images.shape[-2:], dtype=torch.bool, device=images.device)
    for one, (h, w) in zip(mask, sides, strict=True):
        one[:h, :w] = True
    return mask


def save_segmenter(path: str | os.PathLike[str], segmenter: Segmenter, state: dict[str, Tensor] | None = None) -> None:
    """Write the file in one step. ``state``: weights to write instead of the model's own."""
    write_trained(path, TASK, segmenter, state)


def load_segmenter(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Segmenter:
    """The segmenter of a file, or of a training run's folder; ``ValueError`` as ``load_classifier``."""

    def made(about: dict[str, Any], model: nn.Module) -> Segmenter:
        short = None if about["short"] is None else int(about["short"])
        return Segmenter(model, about["model"], tuple(map(str, about["classes"])), short, dict(about["recipe"]))

    return load_trained(path, TASK, made, device)


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate_semantic(
    segmenter: Segmenter,
    images: SemanticImages,
    short: int | None,
    *,
    batch_size: int = 8,
    workers: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[SemanticTally, dict[str, float]]:
    """The counts of pixels with images brought to ``short``, masks at their own size; and ``seconds`` in the network
    with ``images_per_second``.

    ``ValueError`` for an image that is too small; ``ImageError`` names what cannot be read.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is at least 1, got {batch_size}")
    device = segmenter.device
    tally, spent = SemanticTally(len(segmenter.classes), device=device), 0.0
    brought = semantic_loader(SemanticEvalSet(images, short), Shares(len(images), batch_size), workers)
    for done, batch in enumerate(brought, 1):
        if batch.problem:
            raise ImageError(batch.problem)
        start = time.perf_counter()
        sizes = [(int(h), int(w)) for h, w in batch.sizes.tolist()]
        made = segmenter.masks(batch.images, sizes, batch.real)
        for found, mask, (h, w) in zip(made, batch.masks, sizes, strict=True):
            tally.add(found, mask[:h, :w].to(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent += time.perf_counter() - start
        if progress is not None:
            progress(min(done * batch_size, len(images)), len(images))
    return tally, {"seconds": spent, "images_per_second": len(images) / max(spent, 1e-9)}


# --- prediction -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Segmented:
    """``image`` uint8 ``[3, h, w]`` and ``mask`` int64 ``[h, w]``, both empty when ``problem`` says why."""

    path: str
    image: Tensor
    mask: Tensor
    problem: str = ""


def predict_semantic(segmenter: Segmenter, paths: Sequence[str], short: int | None) -> Iterator[Segmented]:
    """What is seen in each image, in order and at its own size; one that cannot be used says so."""
    for path in paths:
        nothing = torch.empty(0)
        try:
            image = read_image(path).mul_(255).round_().to(torch.uint8)
            x = brought_to(image, short)
            yield Segmented(path, image, segmenter.masks(x[None], [(image.shape[1], image.shape[2])])[0].cpu())
        except ImageError as error:
            yield Segmented(path, nothing, nothing, str(error))
        except ValueError as error:  # the network's own words about a size
            yield Segmented(path, nothing, nothing, f"{path!r}: {error}")


def names_for(paths: Sequence[str], folder: Path) -> list[str]:
    """What each image's files in ``folder`` are called, without their endings; ``ValueError`` where two would be one,
    or a file would take an image's own place."""
    given, used = {Path(path).resolve() for path in paths}, dict[Path, str]()
    names = [Path(path).stem for path in paths]
    for path, name in zip(paths, names, strict=True):
        for ending in WRITTEN:
            place = (folder / f"{name}{ending}").resolve()
            if place in given:
                raise ValueError(f"{str(place)!r} would be written over; give --out another folder")
            if place in used:
                raise ValueError(f"{used[place]!r} and {path!r} would both write {str(place)!r}; predict them apart")
            used[place] = path
    return names


def write_segmented(folder: Path, name: str, segmenter: Segmenter, one: Segmented) -> None:
    """``NAME.png`` (class indices), ``NAME.json`` (a COCO run-length mask for each class that is there) and
    ``NAME_overlay.png``; the JSON comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    mask = one.mask.numpy()
    indices = Image.fromarray(mask.astype(np.uint8 if len(segmenter.classes) <= 256 else np.uint16))
    picture = Image.fromarray(overlay(one.image, one.mask, len(segmenter.classes)).permute(1, 2, 0).numpy())
    for made, ending in ((indices, ".png"), (picture, "_overlay.png")):
        write_atomically(folder / f"{name}{ending}", partial(made.save, format="PNG"))
    there = np.unique(mask).tolist()
    runs = encode(np.stack([mask == k for k in there]))
    segments = [
        {"class": k, "name": segmenter.classes[k], "pixels": int((mask == k).sum()), "segmentation": rle}
        for k, rle in zip(there, runs, strict=True)
    ]
    write_json(folder / f"{name}.json", {"image": one.path, "size": list(mask.shape), "segments": segments})


def overlay(
    image: UInt8[Tensor, "3 h w"], mask: Int[Tensor, "h w"], classes: int, part: float = 0.55
) -> UInt8[Tensor, "3 h w"]:
    """The image with each class in its colour, of which ``part`` is seen."""
    return torch.lerp(image.float(), painted(mask, classes).float(), part).round().to(torch.uint8)


def painted(mask: Int[Tensor, "h w"], classes: int) -> UInt8[Tensor, "3 h w"]:
    """A map of classes in colours; void is black."""
    return torch.cat((colours(classes), torch.tensor([VOID_COLOUR], dtype=torch.uint8)))[mask.long()].permute(2, 0, 1)


def colours(classes: int) -> UInt8[Tensor, "classes 3"]:
    """Hues that are far apart for neighbours (steps of the golden section), in three brightnesses."""
    made = [colorsys.hsv_to_rgb(0.618034 * k % 1, 0.85 - 0.25 * (k % 2), 1 - 0.2 * (k % 3)) for k in range(classes)]
    return torch.tensor(made).mul(255).round().to(torch.uint8)
