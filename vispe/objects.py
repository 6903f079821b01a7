"""What a detector finds in image files: one image at a time, as JSON, as a picture, and as a panoptic PNG."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from vispe.data.coco_results import detection_records, panoptic_record, write_png
from vispe.data.images import ImageError, read_image
from vispe.data.scenes import SceneBatch, evaluation_transform, finished, padded, scene
from vispe.detector import Detector, Shown, decoded, pictured, segments_of
from vispe.files import write_atomically, write_json
from vispe.metrics.detection import Found
from vispe.models.mask2former import Panoptic

SURE, CLEAR = 0.5, 0.8  # scores above which objects, and segments of a panoptic map, are told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """``image`` uint8 ``[3, h, w]`` and what was found in it: ``objects``, of a network that knows stuff too its
    ``panoptic`` map, and what is drawn. ``problem`` says why there is nothing."""

    path: str
    image: UInt8[Tensor, "3 h w"] | None = None
    objects: Found | None = None
    panoptic: Panoptic | None = None
    shown: Shown | None = None
    problem: str = ""


def predict_objects(detector: Detector, paths: Sequence[str], threshold: float | None = None) -> Iterator[Seen]:
    """What is found in each image, in order; one that cannot be used says so.

    ``threshold``: of scores, by default ``SURE`` for objects and ``CLEAR`` for panoptic segments. Labels without a name
    (holes of COCO's ids) are left out.
    """
    if threshold is not None and not 0 <= threshold < 1:
        raise ValueError(f"threshold lies in [0, 1), got {threshold}")
    for path in paths:
        try:
            image = read_image(path).mul_(255).round_().to(torch.uint8)
            yield _seen(detector, path, image, threshold)
        except ImageError as error:
            yield Seen(path=path, problem=str(error))
        except ValueError as error:  # the network's own words about a size
            yield Seen(path=path, problem=f"{path!r}: {error}")


def batch_of(detector: Detector, image: UInt8[Tensor, "3 h w"]) -> SceneBatch:
    """A batch of one image as the detector is shown it."""
    it: Any = scene(image, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), None)
    brought = finished(evaluation_transform(detector.sizes)(it))
    images, mask, targets = padded([brought])
    sizes, none = torch.tensor([brought[0].shape[-2:]]), torch.zeros(1, dtype=torch.int64)
    return SceneBatch(images, mask, targets, sizes, torch.tensor([image.shape[-2:]]), none, none)


def _seen(detector: Detector, path: str, image: UInt8[Tensor, "3 h w"], threshold: float | None) -> Seen:
    batch = batch_of(detector, image)
    output = detector.output(batch)
    sure, clear = (least if threshold is None else threshold for least in (SURE, CLEAR))
    (objects,) = detector.objects(output, batch, sure)
    panoptic = detector.panoptic(output, batch, clear)[0] if detector.tells_segments else None
    shown = Shown(objects.labels, objects.boxes, objects.scores, decoded(objects))
    shown = shown if panoptic is None else segments_of(panoptic)
    named = np.array([bool(category.name) for category in detector.categories])
    objects, shown = (_kept(some, named[some.labels]) for some in (objects, shown))
    return Seen(path=path, image=image, objects=objects, panoptic=panoptic, shown=shown)


def _kept(some: Any, keep: Any) -> Any:
    """Those objects of a ``Found`` or ``Shown``."""
    if keep.all():
        return some
    masks = None if some.masks is None else [mask for mask, kept in zip(some.masks, keep, strict=True) if kept]
    parts = {name: getattr(some, name)[keep] for name in ("labels", "boxes", "scores")}
    return some._replace(**parts, masks=np.stack(masks) if isinstance(some.masks, np.ndarray) and masks else masks)


def write_seen(folder: Path, name: str, detector: Detector, one: Seen) -> int:
    """``NAME_overlay.png``, of a panoptic map ``NAME.png`` in COCO's colours, and last ``NAME.json``: objects with
    boxes as x, y, width, height, and run-length masks. How many objects (or segments) there are."""
    assert one.image is not None
    assert one.objects is not None
    assert one.shown is not None
    folder.mkdir(parents=True, exist_ok=True)
    found, size = one.objects, list(one.image.shape[-2:])
    records = detection_records(0, found.boxes, found.labels, found.scores, detector.categories, found.masks)
    objects = [
        {"category_id": record.pop("category_id"), "name": detector.categories[label].name}
        | {key: value for key, value in record.items() if key != "image_id"}
        for record, label in zip(records, found.labels.tolist(), strict=True)
    ]
    told: dict[str, Any] = {"image": one.path, "size": size, "objects": objects}
    shown = one.shown
    picture = pictured(one.image, detector.categories, shown.labels, shown.boxes, shown.scores, shown.masks)
    drawn = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    write_atomically(folder / f"{name}_overlay.png", partial(drawn.save, format="PNG"))
    if one.panoptic is not None:
        ids, segments = one.panoptic.ids.cpu().numpy(), one.panoptic.segments
        write_png(folder / f"{name}.png", ids)
        labels = {segment.id: segment.label for segment in segments}
        infos = panoptic_record(0, f"{name}.png", ids, labels, detector.categories)["segments_info"]
        more = [
            {"name": detector.categories[s.label].name, "isthing": int(s.thing), "score": s.score} for s in segments
        ]
        told["segments"] = [info | own for info, own in zip(infos, more, strict=True)]
    write_json(folder / f"{name}.json", told)
    return len(objects if one.panoptic is None else told["segments"])
