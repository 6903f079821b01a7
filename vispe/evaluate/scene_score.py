"""Pass 2 of detection, panoptic and semantic segmentation: cached predictions to numbers. It knows no network.

Beside the numbers it writes what COCO's servers take: ``results.json`` of coco-detection, ``panoptic.json`` and its
folder of PNGs of coco-panoptic, with the data's own category ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

import vispe
from vispe.cache import CacheReader
from vispe.data import rle
from vispe.data.coco import Coco, Sample
from vispe.data.coco_results import detection_records, panoptic_record, write_panoptic, write_png, write_records
from vispe.data.segmentation import SemanticImages
from vispe.evaluate.scene_records import Classes, Task, classes, entry_of, fingerprint, network_of, unpack
from vispe.metrics.detection import Found, Truth, average_precision
from vispe.metrics.panoptic import EXTRA, IOU, MATCHED, MISSED, PanopticTally, Segment
from vispe.metrics.semantic import SemanticTally
from vispe.truth import true_segments, truth_of

DERIVED = ("report.json", "results.json", "panoptic.json", "panoptic")  # of an earlier score
DRAWN = 0.5  # boxes below this score are not drawn, and say nothing about how good an image is
EXAMPLES = 3  # images at each end
RULES = {
    "coco-detection": "the sum of the IoU of matches over matches + half of all false and missed ones: boxes with a "
    f"score of {DRAWN} or more, of one class, IoU above 0.5, the surest first; crowds aside",
    "coco-panoptic": "the sum of the IoU of matches over matches + half of all false and missed ones, all classes "
    "together",
    "semantic": "the part of the labelled pixels that is right",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """``numbers`` and ``per_class`` by what was scored; ``quality`` of each image in [0, 1] by the task's rule, None
    where there is nothing to see; ``made`` tells of the network; ``data`` of the images and their truth."""

    made: dict[str, Any]
    numbers: dict[str, dict[str, Any]]
    per_class: dict[str, dict[str, Any]]
    left_out: tuple[str, ...]  # classes of the data that were not asked for
    names: tuple[str, ...]
    quality: tuple[float | None, ...]
    data: dict[str, Any]
    seconds: float

    def report(self) -> dict[str, Any]:
        """As plain JSON."""
        images = len(self.names)
        return {
            "numbers": self.numbers,
            "per_class": self.per_class,
            "left_out": list(self.left_out),
            "made": {key: value for key, value in self.made.items() if key != "categories"},
            "data": self.data,
            "version": vispe.__version__,
            "libraries": libraries(),
            "timing": {"seconds": self.seconds, "images_per_second": images / max(self.seconds, 1e-9)},
        }


def libraries() -> dict[str, str]:
    """The versions of what predicts and counts."""
    found = {}
    for name in ("torch", "torchvision", "numpy", "faster-coco-eval", "pycocotools"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def forget(out: Path) -> None:
    """Remove what an earlier score left in ``out``: a run that is stopped then is one without a score."""
    for name in DERIVED:
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)


def chosen_examples(scored: Scored, each: int = EXAMPLES) -> dict[str, Any]:
    """``best`` and ``worst``: ``[number of the image, its entry, quality]``, the extremes first, of equals the first;
    no image is both."""
    known = [k for k, value in enumerate(scored.quality) if value is not None]
    order = sorted(known, key=lambda k: -(scored.quality[k] or 0.0))
    best = order[: min(each, -(-len(order) // 2))]
    worst = sorted(set(order) - set(best), key=lambda k: (scored.quality[k], k))[:each]
    told = [[[k, scored.names[k], scored.quality[k]] for k in some] for some in (best, worst)]
    return {"rule": RULES[scored.made["task"]], "best": told[0], "worst": told[1]}


@contextmanager
def _opened(predictions: Path, task: Task) -> Iterator[CacheReader]:
    with CacheReader(predictions) as reader:
        if reader.made.get("task") != task:
            raise ValueError(f"{str(predictions)!r} was made for {reader.made.get('task')}, not for {task}")
        yield reader


def read_found(reader: CacheReader, name: str, size: tuple[int, int]) -> Found:
    """What is predicted of an image of ``size`` (h, w); ``ValueError`` unless it is there."""
    if name not in reader:
        raise ValueError(f"{reader.path!r} has no prediction for image {name!r}: predict again")
    entry = reader.read(name)
    if tuple(entry.attributes["size"].tolist()) != tuple(size):
        raise ValueError(f"{reader.path!r} has image {name!r} in another size: predict again")
    return unpack(entry)


def _seconds(reader: CacheReader, names: Sequence[str]) -> float:
    return sum(float(reader.read(name, []).attributes["seconds"]) for name in names)


# --- objects ----------------------------------------------------------------------------------------------------------


def score_objects(predictions: Path, data: Coco, task: Task, out: Path, *, partial: bool = False) -> Scored:
    """Score what was found in the images of ``data`` and write the files for a server into ``out``."""
    with _opened(predictions, task) as reader:
        meaning = classes(network_of(reader.made), data, task, partial=partial)
        names = tuple(str(data[i].image_id) for i in range(len(data)))
        found = [meaning.translated(read_found(reader, n, data[i].size)) for i, n in enumerate(names)]
        score = _detection if task == "coco-detection" else _panoptic
        numbers, per_class, quality = score(data, found, meaning, out)
        seconds, contents = _seconds(reader, names), [reader.sha256(name) for name in names]
        made = reader.made
    truth = [hashlib.sha256(data.annotations.read_bytes()).hexdigest()]
    pngs = [data.png(data[i].number) for i in range(len(data))] if task == "coco-panoptic" else []
    truth += [hashlib.sha256(png.read_bytes()).hexdigest() for png in pngs if png is not None]
    return Scored(
        made=made,
        numbers=numbers,
        per_class={kind: dict(zip(data.classes, rows, strict=True)) for kind, rows in per_class.items()},
        left_out=tuple(data.classes[label] for label in np.flatnonzero(~meaning.asked)),
        names=names,
        quality=tuple(quality),
        data={
            "images": len(data),
            "annotations": str(data.annotations),
            "sha256": fingerprint([*truth, *contents]),
        },
        seconds=seconds,
    )


Told = tuple[dict[str, dict[str, Any]], dict[str, list[Any]], list[float | None]]


def asked_truth(sample: Sample, meaning: Classes, *, masks: bool) -> Truth:
    """The objects of an image whose classes are asked for."""
    truth, keep = truth_of(sample, masks=masks), meaning.asked[sample.labels]
    drawn = None if truth.masks is None else [mask for mask, kept in zip(truth.masks, keep, strict=True) if kept]
    return Truth(truth.boxes[keep], truth.labels[keep], truth.crowd[keep], truth.area[keep], drawn)


def outlined(data: Coco) -> bool:
    """Whether every object of the file has a mask; without, only boxes can be scored."""
    return data.kind == "panoptic" or bool((np.diff(data.cuts) > 0).all())


def _detection(data: Coco, found: Sequence[Found], meaning: Classes, out: Path) -> Told:
    draws = found[0].masks is not None and outlined(data)
    truth = {i: asked_truth(data[i], meaning, masks=draws) for i in range(len(data))}
    numbers: dict[str, dict[str, Any]] = {}
    per_class: dict[str, list[Any]] = {}
    for kind in ("boxes", "masks")[: 1 + draws]:
        numbers[kind] = average_precision(truth, dict(enumerate(found)), len(data.categories), kind)  # type: ignore[arg-type]
        per_class[kind] = numbers[kind].pop("per_class")
    records = []
    for i, one in enumerate(found):
        image = data[i].image_id
        records += detection_records(image, one.boxes, one.labels, one.scores, data.categories, one.masks)
    write_records(out / "results.json", records)
    return numbers, per_class, [box_quality(truth[i], one) for i, one in enumerate(found)]


def box_quality(truth: Truth, found: Found) -> float | None:
    """How good the boxes of an image are, by the rule of coco-detection; None where none is true and none was found."""
    sure = np.flatnonzero(found.scores >= DRAWN)
    sure = sure[np.argsort(-found.scores[sure], kind="stable")]
    true_boxes, true_labels = truth.boxes[~truth.crowd].astype(np.float64), truth.labels[~truth.crowd]
    if not len(sure) and not len(true_boxes):
        return None
    iou = _iou(found.boxes[sure].astype(np.float64), true_boxes)
    iou[found.labels[sure][:, None] != true_labels] = 0
    total, matches = 0.0, 0
    for row in range(len(sure)):
        if len(true_boxes) and iou[row].max() > 0.5:
            column = int(iou[row].argmax())
            total, matches = total + float(iou[row, column]), matches + 1
            iou[:, column] = 0
    return total / (matches + (len(sure) - matches) / 2 + (len(true_boxes) - matches) / 2)


def _iou(one: Float[np.ndarray, "n 4"], other: Float[np.ndarray, "m 4"]) -> Float[np.ndarray, "n m"]:
    low, high = (np.maximum(one[:, None, :2], other[None, :, :2]), np.minimum(one[:, None, 2:], other[None, :, 2:]))
    both = (high - low).clip(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (one, other)]
    return both / np.maximum(areas[0][:, None] + areas[1] - both, 1e-9)


def painted_segments(found: Found, size: tuple[int, int]) -> tuple[Int[np.ndarray, "h w"], list[Segment]]:
    """The panoptic map of what was found, numbered from 1 in its order."""
    ids = np.zeros(size, dtype=np.int32)
    for number, mask in enumerate(found.masks or (), 1):
        ids[rle.mask(mask, size)] = number
    return ids, [Segment(number, label) for number, label in enumerate(found.labels.tolist(), 1)]


def asked_segments(sample: Sample, meaning: Classes) -> tuple[Int[np.ndarray, "h w"], list[Segment]]:
    """The true map; classes that are not asked for are void."""
    segments = true_segments(sample)
    kept = [segment for segment in segments if meaning.asked[segment.label]]
    ids = sample.segments()
    return (ids if len(kept) == len(segments) else np.where(np.isin(ids, [s.id for s in kept]), ids, 0)), kept


def _panoptic(data: Coco, found: Sequence[Found], meaning: Classes, out: Path) -> Told:
    tally, quality, records = PanopticTally(data.things), list[float | None](), []
    (out / "panoptic").mkdir(exist_ok=True)
    for i, one in enumerate(found):
        sample = data[i]
        ids, segments = painted_segments(one, sample.size)
        before = tally.counts.sum(0)
        tally.add(*asked_segments(sample, meaning), ids, segments)
        quality.append(_quality(tally.counts.sum(0) - before))
        name = f"{sample.image_id:012d}.png"
        write_png(out / "panoptic" / name, ids)
        labels = {segment.id: segment.label for segment in segments}
        records.append(panoptic_record(sample.image_id, name, ids, labels, data.categories))
    write_panoptic(out / "panoptic.json", records, data.categories)
    return {"panoptic": tally.summary()}, {"panoptic": tally.per_class()}, quality


def _quality(counts: Float[np.ndarray, " 4"]) -> float | None:
    cases = counts[MATCHED] + (counts[EXTRA] + counts[MISSED]) / 2
    return float(counts[IOU] / cases) if cases else None


# --- classes of pixels ------------------------------------------------------------------------------------------------


def score_classes(predictions: Path, images: SemanticImages) -> Scored:
    """Score a class for every pixel of ``images``."""
    tally, quality, seconds = SemanticTally(len(images.classes)), list[float | None](), 0.0
    names = tuple(entry_of(images, i) for i in range(len(images)))
    with _opened(predictions, "semantic") as reader:
        if [category.name for category in network_of(reader.made)] != list(images.classes):
            raise ValueError(f"{str(predictions)!r} was made with other classes than those of the data")
        for i, name in enumerate(names):
            truth = images.mask(i)
            size = (int(truth.shape[0]), int(truth.shape[1]))
            before = tally.confusion.clone()
            tally.add(torch.from_numpy(painted_classes(read_found(reader, name, size), size)), truth)
            own = tally.confusion - before
            quality.append(float(own.trace() / own.sum()) if own.any() else None)
        seconds, contents = _seconds(reader, names), [reader.sha256(name) for name in names]
        made = reader.made
    truths = [hashlib.sha256(Path(mask).read_bytes()).hexdigest() for mask in images.masks]
    return Scored(
        made=made,
        numbers={"semantic": tally.summary()},
        per_class={"semantic": dict(zip(images.classes, tally.iou(), strict=True))},
        left_out=(),
        names=names,
        quality=tuple(quality),
        data={"images": len(images), "sha256": fingerprint([*truths, *contents])},
        seconds=seconds,
    )


def painted_classes(found: Found, size: tuple[int, int]) -> Int[np.ndarray, "h w"]:
    """The map of classes of what was found."""
    made = np.full(size, -1, dtype=np.int64)
    for label, mask in zip(found.labels.tolist(), found.masks or (), strict=True):
        made[rle.mask(mask, size)] = label
    return made
