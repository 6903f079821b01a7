"""A trained network that finds objects, in one file: boxes by a DETR, masks and panoptic maps by a Mask2Former.

The file is that of ``vispe.classifier``, of another task. What is found is told in pixels of the image as it lies on
the disk, in the form in which it is scored.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor, nn

from vispe.classifier import load_trained, write_trained
from vispe.data.batches import Shares
from vispe.data.coco import Category, Coco
from vispe.data.coco_categories import by_id, contiguous
from vispe.data.images import ImageError
from vispe.data.rle import encode, mask
from vispe.data.scenes import EvalScenes, SceneBatch, SceneSpec, normalised, scene_loader
from vispe.metrics.detection import Found, average_precision
from vispe.metrics.panoptic import PanopticTally, Segment
from vispe.models import MODELS
from vispe.models.detr import DETRSpec, detections
from vispe.models.mask2former import Mask2FormerSpec, Panoptic, instances, panoptic, semantic
from vispe.segmenter import colours
from vispe.spec import Spec
from vispe.truth import true_segments, truth_of
from vispe.weights import load, published
from vispe.weights.files import fetched, told

TASK = "detect"
TOP = 100  # objects of an image
LIGHT = (0.299, 0.587, 0.114)  # how bright red, green and blue are
PUBLISHED_SIZES = (800, 1333)  # sides to which published networks bring images
SPECS: tuple[type[Spec], ...] = (DETRSpec, Mask2FormerSpec)  # of the models that find objects
Kind = Literal["boxes", "masks", "panoptic"]


class Shown(NamedTuple):
    """What is drawn of an image: labels, boxes (corners in pixels), scores and, of a Mask2Former, masks."""

    labels: Int[np.ndarray, " n"]
    boxes: Float[np.ndarray, "n 4"]
    scores: Float[np.ndarray, " n"]
    masks: Bool[np.ndarray, "n h w"] | None


@dataclasses.dataclass(frozen=True)
class Detector:
    """``model`` (in eval mode), a DETR or a Mask2Former called ``name`` in the zoo, finds ``categories`` (its labels,
    in order) in images whose short side is ``short`` pixels, or less where the long one would exceed ``long``.
    ``recipe`` is how it was trained, as plain JSON."""

    model: nn.Module
    name: str
    categories: tuple[Category, ...]
    short: int
    long: int
    recipe: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def draws(self) -> bool:
        """Whether it finds masks."""
        return isinstance(self.model.spec, Mask2FormerSpec)

    @property
    def sizes(self) -> SceneSpec:
        """How images are brought to it."""
        return SceneSpec(crop="none", eval_short=self.short, eval_long=self.long)

    @property
    def things(self) -> list[int]:
        """The labels that can be counted."""
        return [label for label, category in enumerate(self.categories) if category.thing]

    @property
    def tells_segments(self) -> bool:
        """Whether it knows stuff: then it has a panoptic map besides the objects."""
        return self.draws and len(self.things) < len(self.categories)

    def output(self, batch: SceneBatch) -> Any:
        """What the network says of a batch, padding kept out of it; for the other functions to read."""
        spec: Any = self.model.spec
        mask = batch.mask.to(self.device)
        with torch.inference_mode():
            return self.model(normalised(batch.images.to(self.device), mask, spec.mean, spec.std), mask)

    def objects(self, output: Any, batch: SceneBatch, threshold: float = 0.0) -> list[Found]:
        """Boxes with a score above ``threshold``, at most ``TOP`` an image, surest first; with masks of a Mask2Former.
        An object without a pixel is none."""
        sizes = _pairs(batch.originals)
        if not self.draws:
            made = detections(output, sizes, threshold)
            return [Found(_array(b[:TOP]), _array(k[:TOP]), _array(s[:TOP])) for s, k, b in made]
        found = []
        for one in instances(output, sizes, TOP, self.things, _pairs(batch.sizes)):
            keep = (one.scores > threshold) & one.masks.flatten(1).any(1)
            masks = _array(one.masks[keep])
            found.append(Found(around(masks), _array(one.labels[keep]), _array(one.scores[keep]), encode(masks)))
        return found

    def panoptic(self, output: Any, batch: SceneBatch, threshold: float = 0.8) -> list[Panoptic]:
        """A segment for every pixel, 0 where none is; see :func:`vispe.models.mask2former.panoptic`."""
        return panoptic(output, _pairs(batch.originals), self.things, threshold, real=_pairs(batch.sizes))

    def shown(self, output: Any, batch: SceneBatch, threshold: float = 0.5) -> list[Shown]:
        """What a picture has of each image: objects above ``threshold``, or, where some classes are no things, the
        segments of the panoptic map."""
        if not self.tells_segments:
            made = self.objects(output, batch, threshold)
            return [Shown(one.labels, one.boxes, one.scores, decoded(one)) for one in made]
        return [segments_of(one) for one in self.panoptic(output, batch, threshold)]

    def semantic(self, output: Any, batch: SceneBatch) -> list[Int[Tensor, "h w"]]:
        """The label of every pixel."""
        return semantic(output, _pairs(batch.originals), _pairs(batch.sizes))


def save_detector(path: str | os.PathLike[str], detector: Detector, state: dict[str, Tensor] | None = None) -> None:
    """Write the file in one step. ``state``: weights to write instead of the model's own."""
    write_trained(path, TASK, detector, state)


def load_detector(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Detector:
    """The detector of a file, or of a training run's folder; ``ValueError`` as ``load_classifier``."""

    def made(about: dict[str, Any], model: nn.Module) -> Detector:
        table = tuple(Category(int(number), str(name), bool(thing)) for number, name, thing in about["categories"])
        return Detector(model, about["model"], table, int(about["short"]), int(about["long"]), dict(about["recipe"]))

    return load_trained(path, TASK, made, device)


def published_detector(
    name: str,
    weights: str | os.PathLike[str] | None = None,
    origin: str | None = None,
    device: torch.device | str = "cpu",
    **knobs: Any,
) -> Detector:
    """A DETR or Mask2Former with published weights of COCO; arguments as :func:`vispe.load`, ``weights`` may be a URL
    too.

    What its labels mean follows from how many there are. ``ValueError`` for a model that finds no objects, or weights
    of another data set.
    """
    variant = name.partition(".")[0]
    finders = [known for known, file in MODELS.items() if file in ("detr", "mask2former")]
    if variant not in finders:
        raise ValueError(f"a model that finds objects is one of {', '.join(finders)}, got {name!r}")
    spec: Any = published(name).but(**knobs)
    tables = {91: by_id()} if isinstance(spec, DETRSpec) else {}
    tables |= {len(table): table for table in (contiguous(stuff=False), contiguous(stuff=True))}
    if spec.num_classes not in tables:
        raise ValueError(f"the {spec.num_classes} classes of {name!r} are not COCO's: nobody says here what they mean")
    if weights is not None and "://" in os.fspath(weights):
        weights = fetched(os.fspath(weights))
    if weights is not None and told(weights).get("task") == TASK:
        raise ValueError(f"{os.fspath(weights)!r} was trained here, on classes of its own: give it as CHECKPOINT")
    model = load(name, weights, origin, **knobs).to(device)
    return Detector(model, name, tables[spec.num_classes], *PUBLISHED_SIZES, {})


def segments_of(found: Panoptic) -> Shown:
    """The segments of a panoptic map, in its order, each with its mask and the box around it."""
    masks = _array(found.ids) == np.array([s.id for s in found.segments], dtype=np.int64).reshape(-1, 1, 1)
    labels = np.array([s.label for s in found.segments], dtype=np.int64)
    return Shown(labels, around(masks), np.array([s.score for s in found.segments], dtype=np.float64), masks)


def around(masks: Bool[np.ndarray, "n h w"]) -> Float[np.ndarray, "n 4"]:
    """The smallest box around each mask, corners in pixels, edges at whole numbers; every mask has a pixel."""
    boxes = np.zeros((len(masks), 4))
    for box, drawn in zip(boxes, masks, strict=True):
        rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
        box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return boxes


# --- scores -----------------------------------------------------------------------------------------------------------


def kinds(detector: Detector, data: Coco) -> tuple[Kind, ...]:
    """What of ``data`` the detector can be scored on."""
    if not detector.draws:
        return ("boxes",)
    return ("panoptic",) if data.kind == "panoptic" else ("boxes", "masks")


class SceneTally:
    """What was found in the images of ``data``, counted as ``kinds`` say; images by their number there."""

    def __init__(self, data: Coco, kinds: Sequence[Kind]) -> None:
        self.data, self.kinds = data, tuple(kinds)
        self.found: dict[int, Found] = {}
        self.quality = PanopticTally(data.things)

    def add(self, detector: Detector, output: Any, batch: SceneBatch) -> None:
        """Count a batch; what only fills it (-1) is left out."""
        real = [k for k, index in enumerate(batch.indices.tolist()) if index >= 0]
        if "panoptic" in self.kinds:
            made = detector.panoptic(output, batch)
            for k in real:
                sample = self.data[int(batch.indices[k])]
                segments = [Segment(one.id, one.label) for one in made[k].segments]
                self.quality.add(sample.segments(), true_segments(sample), _array(made[k].ids), segments)
        if "boxes" in self.kinds or "masks" in self.kinds:
            objects = detector.objects(output, batch)
            self.found |= {int(batch.indices[k]): objects[k] for k in real}

    def gather(self) -> None:
        """In a distributed run, everything that all processes have counted."""
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (self.found, self.quality.packed()))
        self.found = {index: found for other, _ in parts for index, found in other.items()}
        self.quality.unpack(np.sum([packed for _, packed in parts], axis=0))

    def summary(self) -> dict[str, dict[str, Any]]:
        """The numbers of each kind, as :mod:`vispe.metrics.detection` and :mod:`vispe.metrics.panoptic` tell them."""
        told: dict[str, dict[str, Any]] = {}
        for kind in self.kinds:
            if kind == "panoptic":
                told[kind] = self.quality.summary()
                continue
            truth = {index: truth_of(self.data[index], masks=kind == "masks") for index in self.found}
            told[kind] = average_precision(truth, self.found, len(self.data.categories), kind)
        return told


def measure(
    detector: Detector,
    data: Coco,
    *,
    batch_size: int = 4,
    workers: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[SceneTally, dict[str, float]]:
    """What the detector finds in ``data``, counted, and ``seconds`` in the network with ``images_per_second``.

    ``data``'s classes are the detector's. ``ImageError`` names what cannot be read.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is at least 1, got {batch_size}")
    tally, spent = SceneTally(data, kinds(detector, data)), 0.0
    scenes = EvalScenes(data, detector.sizes, masks=False)
    for done, batch in enumerate(scene_loader(scenes, Shares(len(data), batch_size), workers), 1):
        if batch.problem:
            raise ImageError(batch.problem)
        start = time.perf_counter()
        output = detector.output(batch)
        if detector.device.type == "cuda":
            torch.cuda.synchronize(detector.device)
        spent += time.perf_counter() - start
        tally.add(detector, output, batch)
        if progress is not None:
            progress(min(done * batch_size, len(data)), len(data))
    return tally, {"seconds": spent, "images_per_second": len(data) / max(spent, 1e-9)}


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictured(
    image: UInt8[Tensor, "3 h w"],
    categories: Sequence[Category],
    labels: Int[np.ndarray, " n"],
    boxes: Float[np.ndarray, "n 4"],
    scores: Float[np.ndarray, " n"] | None = None,
    masks: Bool[np.ndarray, "n h w"] | None = None,
) -> UInt8[Tensor, "3 h w"]:
    """The image with masks in their classes' colours, and boxes around what can be counted, with names and scores."""
    from torchvision.utils import draw_segmentation_masks

    shades = [tuple(shade) for shade in colours(len(categories)).tolist()]
    own: Any = [shades[label] for label in labels.tolist()]
    if masks is not None and len(masks):
        image = draw_segmentation_masks(image, torch.from_numpy(masks), alpha=0.5, colors=own)
    things = [k for k, label in enumerate(labels.tolist()) if categories[label].thing]
    if not things:
        return image
    names = [categories[labels[k]].name for k in things]
    told = names if scores is None else [f"{name} {scores[k]:.2f}" for name, k in zip(names, things, strict=True)]
    drawn = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    pen = ImageDraw.Draw(drawn)
    for k, text in zip(things, told, strict=True):
        shade, corners = own[k], [int(edge) for edge in boxes[k].tolist()]
        pen.rectangle(corners, outline=shade, width=2)
        at = (max(corners[0], 0) + 3, max(corners[1], 0) + 3)
        left, top, right, bottom = pen.textbbox(at, text)
        pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), fill=shade)
        pen.text(at, text, fill="black" if np.dot(shade, LIGHT) > 128 else "white")
    return torch.from_numpy(np.array(drawn)).permute(2, 0, 1)


def decoded(found: Found) -> Bool[np.ndarray, "n h w"] | None:
    """Masks as pixels; None where there are none."""
    return np.stack([mask(rle, rle["size"]) for rle in found.masks]) if found.masks else None


def _pairs(sizes: Tensor) -> list[tuple[int, int]]:
    return [(int(h), int(w)) for h, w in sizes.tolist()]


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()
