"""COCO's formats: boxes and masks in ``instances_*.json``, whole images in ``panoptic_*.json`` and its folder of PNGs.

What is read is held in flat arrays, not in Python objects: a million annotations cost their bytes, and loader
processes share them. Masks stay as they are stored until they are asked for. Boxes come out as corners
``(x0, y0, x1, y1)`` in pixels of the image, edges at whole numbers: a box over the whole image is ``(0, 0, w, h)``.
Labels are contiguous, 0 to c - 1 in the order of COCO's sparse category ids. An image without annotations is legal.
Nothing here decodes an image or imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import marshal
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from PIL import Image

from vispe.data import rle

Bad = Literal["refuse", "skip"]
SLACK = 1e-3  # pixels by which a box may leave its image unnoticed: decimals that were rounded
FAR = 1e12  # no coordinate and no area reaches it


class Category(NamedTuple):
    """A class: its ``id`` in the file, and whether it is a thing that can be counted, or stuff such as sky."""

    id: int
    name: str
    thing: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One image and its objects (in panoptic data: its segments), crowds among them."""

    path: Path
    image_id: int
    size: tuple[int, int]  # (h, w)
    boxes: Float[np.ndarray, "n 4"]  # x0, y0, x1, y1 in pixels
    labels: Int[np.ndarray, " n"]
    crowd: Bool[np.ndarray, " n"]  # a group that was outlined as one: no example to learn from, no mistake to find
    area: Float[np.ndarray, " n"]  # of the mask, as the file tells it
    ids: Int[np.ndarray, " n"]  # of the annotations; in panoptic data the numbers in the PNG
    data: Coco
    number: int  # in the file

    def masks(self) -> Bool[np.ndarray, "n h w"]:
        """Decoded now; ``ValueError`` names the file and the annotation of a mask that cannot be."""
        if self.data.kind == "panoptic":
            return self.segments() == self.ids[:, None, None]
        made = [self._named(rle.mask, k) for k in range(len(self.ids))]
        return np.stack(made) if made else np.zeros((0, *self.size), dtype=bool)

    def rles(self) -> list[rle.Rle]:
        """The masks as run lengths in strings, as evaluation takes them."""
        if self.data.kind == "panoptic":
            return rle.encode(self.masks())
        return [self._named(rle.compressed, k) for k in range(len(self.ids))]

    def segments(self) -> Int[np.ndarray, "h w"]:
        """Panoptic data: each pixel's segment, one of ``ids``, or 0 where none was drawn.

        ``ValueError`` names a segment that the PNG has and the JSON has not, or the reverse; where bad data are skipped
        the former counts as not drawn.
        """
        png = self.data.png(self.number)
        if png is None:
            return np.zeros(self.size, dtype=np.int32)
        made = read_png(png, self.size)
        there = set(np.unique(made).tolist()) - {0}
        known = {int(n) for n in self.ids}
        if self.data.bad == "skip":
            return np.where(np.isin(made, self.ids), made, 0)
        if there - known:
            raise ValueError(f"{png}: segment {min(there - known)} is in the PNG and not in {self.data.annotations}")
        if known - there:
            raise ValueError(f"{png}: segment {min(known - there)} is not in the PNG but in {self.data.annotations}")
        return made

    def _named(self, decode: Callable[[object, tuple[int, int]], Any], k: int) -> Any:
        try:
            return decode(self.data.outline(self.number, k), self.size)
        except ValueError as error:
            raise ValueError(f"{self.data.annotations}: annotation {self.ids[k]}: {error}") from None


@dataclass(frozen=True, eq=False, kw_only=True)
class Coco:
    """A data set; ``data[i]`` is a ``Sample``. ``problems``: what was left out and why, a line each."""

    images: Path
    annotations: Path
    kind: Literal["instances", "panoptic"]
    categories: tuple[Category, ...]
    names: Sequence[str]  # of the image files, below ``images``
    image_ids: NDArray[np.int64]
    sizes: NDArray[np.int64]  # [images, 2]: h, w
    starts: NDArray[np.int64]  # the objects of image i are starts[i] to starts[i + 1]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float32]
    ids: NDArray[np.int64]
    packed: bytes  # the outlines, one after the other, as marshal writes numbers and lists: faster than JSON
    cuts: NDArray[np.int64]  # that of object k is packed[cuts[k] : cuts[k + 1]]
    pngs: Sequence[str]
    pngs_at: Path
    where: NDArray[np.int64]  # data[i] is image where[i] of the file
    bad: Bad = "refuse"
    clipped: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was changed without harm, a line each

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, i: int) -> Sample:
        k = int(self.where[i])
        own = slice(int(self.starts[k]), int(self.starts[k + 1]))
        h, w = self.sizes[k].tolist()
        return Sample(
            path=self.images / self.names[k],
            image_id=int(self.image_ids[k]),
            size=(h, w),
            boxes=self.boxes[own],
            labels=self.labels[own],
            crowd=self.crowd[own],
            area=self.area[own],
            ids=self.ids[own],
            data=self,
            number=k,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels."""
        return tuple(category.name for category in self.categories)

    @property
    def things(self) -> NDArray[np.bool_]:
        """Whether each label is a thing, ``[c]``."""
        return np.array([category.thing for category in self.categories], dtype=bool)

    def subset(self, keep: Sequence[int] | NDArray[np.int64]) -> Coco:
        """The images at the indices ``keep``, in that order."""
        return dataclasses.replace(self, where=self.where[np.asarray(keep, dtype=np.int64)])

    def outline(self, number: int, k: int) -> object:
        """The ``segmentation`` of object ``k`` of an image; None where the file has none."""
        at = int(self.starts[number]) + k
        packed = self.packed[self.cuts[at] : self.cuts[at + 1]]
        return marshal.loads(packed) if packed else None

    def png(self, number: int) -> Path | None:
        """Where the segments of an image are drawn; None if it has none."""
        return self.pngs_at / self.pngs[number] if self.pngs[number] else None


def open_coco(
    images: str | os.PathLike[str],
    annotations: str | os.PathLike[str],
    *,
    pngs: str | os.PathLike[str] | None = None,
    bad: Bad = "refuse",
) -> Coco:
    """Read ``instances_*.json`` or ``panoptic_*.json``; which one it is, the file tells.

    ``pngs``: the folder of a panoptic file, by default the one of its name. A ``ValueError`` of one line names the
    file, the annotation and what is wrong, and counts what else is; ``bad="skip"`` leaves those images and
    annotations out and keeps a line for each in ``problems``. Boxes that reach outside are clipped and counted.
    """
    folder, path = Path(images).expanduser(), Path(annotations).expanduser()
    if not folder.is_dir():
        raise ValueError(f"there is no folder of images {str(folder)!r}")
    content, drawn = _content(path), path.with_suffix("") if pngs is None else Path(pngs).expanduser()
    reading = _Reading(folder, path, content, drawn)
    if not content["images"]:
        raise ValueError(f"{path}: the file has no images")
    if bad == "refuse" and reading.problems:
        others = f" (and {len(reading.problems) - 1} more)" if len(reading.problems) > 1 else ""
        raise ValueError(f"{reading.problems[0]}{others}; data.corrupt=skip, or --bad skip, goes on without")
    if len(reading.numbers) == len(reading.undrawn):
        raise ValueError(f"{path}: none of its {len(content['images'])} images can be used")
    return dataclasses.replace(reading.made(), bad=bad)


def check_classes(data: Coco, head: int | Sequence[str]) -> None:
    """``ValueError`` unless a model's head, as a count or as names, has the classes of ``data``."""
    count = head if isinstance(head, int) else len(head)
    if count != len(data.categories):
        raise ValueError(f"{data.annotations} has {len(data.categories)} classes, the model's head {count}")
    for label, (own, other) in enumerate(zip(data.classes, head if not isinstance(head, int) else (), strict=False)):
        if own != other:
            raise ValueError(f"{data.annotations} has {own!r} as class {label}, the model {other!r}")


def read_png(path: Path, size: tuple[int, int]) -> Int[np.ndarray, "h w"]:
    """The numbers R + 256 G + 256^2 B of a panoptic PNG; ``ValueError`` names one that is not of ``size`` (h, w)."""
    try:
        with Image.open(path) as image:
            if image.mode not in ("RGB", "RGBA"):
                raise ValueError(f"{path}: a panoptic PNG has three colours, this one is {image.mode!r}")
            if image.size != size[::-1]:
                raise ValueError(f"{path}: it is of size {list(image.size[::-1])}, its image {list(size)} (h, w)")
            colours = np.asarray(image)
    except (OSError, SyntaxError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else "it is no whole PNG"
        raise ValueError(f"{path}: {reason}") from None
    made = colours[..., 2].astype(np.int32)
    for channel in (1, 0):
        made <<= 8
        made |= colours[..., channel]
    return made


# --- reading the file -------------------------------------------------------------------------------------------------


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: this is not JSON: {error}") from None
    for part in ("images", "annotations", "categories"):
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{path}: this is no COCO file: it has no list of {part!r}")
    return content


class _Reading:
    """The columns of a file while they grow, and what is wrong with it."""

    def __init__(self, images: Path, path: Path, content: dict[str, Any], pngs_at: Path) -> None:
        self.images, self.path, self.pngs_at = images, path, pngs_at
        self.problems: list[str] = []
        self.clipped: list[str] = []
        self.categories = self._categories(content["categories"])
        self.labels = {category.id: label for label, category in enumerate(self.categories)}
        self.entries: dict[int, dict[str, Any]] = {}
        self.unusable: set[int] = set()  # images that are named already: their annotations are no further problem
        self._images(content["images"])
        self.numbers = {image_id: number for number, image_id in enumerate(self.entries)}
        self.objects: list[list[tuple[Any, ...]]] = [[] for _ in self.entries]
        self.pngs = [""] * len(self.entries)
        self.seen: set[int] = set()
        first: dict[str, Any] = next(iter(content["annotations"]), {})
        self.kind: Literal["instances", "panoptic"] = "panoptic" if "segments_info" in first else "instances"
        for entry in content["annotations"]:
            (self._panoptic if self.kind == "panoptic" else self._instance)(entry)
        self.undrawn = self._undrawn()

    def made(self) -> Coco:
        rows = [row for objects in self.objects for row in objects]
        boxes, labels, crowd, area, ids, outlines = zip(*rows, strict=True) if rows else ([], [], [], [], [], [])
        note = f"{self.path}: {len(self.clipped)} boxes were clipped, first that of {next(iter(self.clipped), '')}"
        return Coco(
            images=self.images,
            annotations=self.path,
            kind=self.kind,
            categories=self.categories,
            names=[entry["file_name"] for entry in self.entries.values()],
            image_ids=np.array(list(self.entries), dtype=np.int64),
            sizes=np.array([(e["height"], e["width"]) for e in self.entries.values()], dtype=np.int64).reshape(-1, 2),
            starts=np.cumsum([0, *map(len, self.objects)], dtype=np.int64),
            boxes=np.array(boxes, dtype=np.float32).reshape(-1, 4),
            labels=np.array(labels, dtype=np.int64),
            crowd=np.array(crowd, dtype=bool),
            area=np.array(area, dtype=np.float32),
            ids=np.array(ids, dtype=np.int64),
            packed=b"".join(outlines),
            cuts=np.cumsum([0, *map(len, outlines)], dtype=np.int64),
            pngs=self.pngs,
            pngs_at=self.pngs_at,
            where=np.array([n for n in range(len(self.entries)) if n not in self.undrawn], dtype=np.int64),
            clipped=len(self.clipped),
            problems=tuple(self.problems),
            notes=(note,) if self.clipped else (),
        )

    def _categories(self, entries: list[dict[str, Any]]) -> tuple[Category, ...]:
        """By id; a table that is wrong leaves nothing to go on with."""
        made: dict[int, Category] = {}
        for entry in entries:
            number, name = entry.get("id"), entry.get("name")
            if type(number) is not int or not isinstance(name, str):
                raise ValueError(f"{self.path}: a category has a whole number 'id' and a 'name', got {entry}")
            if number in made:
                raise ValueError(f"{self.path}: category {number} is there twice: {made[number].name!r}, {name!r}")
            if same := [other.id for other in made.values() if other.name == name]:
                told = f"categories {same[0]} and {number} are both called {name!r}"
                raise ValueError(f"{self.path}: {told}: classes are told apart by their names, give each its own")
            made[number] = Category(number, name, bool(entry.get("isthing", 1)))
        if not made:
            raise ValueError(f"{self.path}: it has no categories")
        return tuple(made[number] for number in sorted(made))

    def _images(self, entries: list[dict[str, Any]]) -> None:
        there = set(os.listdir(self.images))
        missing: list[str] = []
        for entry in entries:
            number, name = entry.get("id"), entry.get("file_name")
            sides = [entry.get("height"), entry.get("width")]
            if type(number) is not int or not isinstance(name, str) or not name:
                self.problems.append(f"{self.path}: an image has a whole number 'id' and a 'file_name', got {entry}")
            elif number in self.entries or number in self.unusable:
                self.problems.append(f"{self.path}: image {number} is there twice, the second is {name!r}")
            elif not all(type(side) is int and side > 0 for side in sides):
                self.problems.append(f"{self.path}: image {number} has no 'height' and 'width', got {sides}")
                self.unusable.add(number)
            elif name not in there and not (self.images / name).is_file():
                missing.append(name)
                self.unusable.add(number)
            else:
                self.entries[number] = entry
        if missing:
            first = str(self.images / missing[0])
            self.problems.append(f"{self.path}: {len(missing)} of {len(entries)} images are missing, first {first!r}")

    def _instance(self, entry: dict[str, Any]) -> None:
        name = entry.get("id")
        if type(name) is not int or name in self.seen:
            told = "has no whole number as 'id'" if type(name) is not int else "is there twice"
            self.problems.append(f"{self.path}: annotation {name} {told}")
            return
        self.seen.add(name)
        image = self._image(entry, f"annotation {name}")
        if image is not None:
            self._object(entry, image, f"annotation {name}", entry.get("segmentation") or None)

    def _panoptic(self, entry: dict[str, Any]) -> None:
        image, segments = self._image(entry, "an annotation"), entry.get("segments_info")
        if image is None:
            return
        number = self.numbers[image]
        if self.pngs[number] or not isinstance(segments, list) or not isinstance(entry.get("file_name"), str):
            told = "there twice" if self.pngs[number] else "without a 'file_name' or its list of 'segments_info'"
            self.problems.append(f"{self.path}: the annotation of image {image} is {told}")
            return
        self.pngs[number] = entry["file_name"]
        seen: set[int] = set()
        for segment in segments:
            name = segment.get("id") if isinstance(segment, dict) else segment
            if type(name) is not int or not 0 < name < 2**24 or name in seen:
                told = (
                    "is there twice" if type(name) is int and name in seen else "is no whole number from 1 to 2^24 - 1"
                )
                self.problems.append(f"{self.path}: segment {name!r} of image {image} {told}")
                continue
            seen.add(name)
            self._object(segment, image, f"segment {name} of image {image}", None)

    def _undrawn(self) -> set[int]:
        """The numbers of images whose segments are drawn in a PNG that is not there."""
        if any(self.pngs) and not self.pngs_at.is_dir():
            told = f"there is no folder of its PNGs {str(self.pngs_at)!r}"
            raise ValueError(f"{self.path}: {told}; --pngs, or data.train_pngs and data.val_pngs, name it")
        there = set(os.listdir(self.pngs_at)) if any(self.pngs) else set()
        missing = [
            n for n, png in enumerate(self.pngs) if png and png not in there and not (self.pngs_at / png).is_file()
        ]
        if missing:
            first, count = str(self.pngs_at / self.pngs[missing[0]]), sum(map(bool, self.pngs))
            self.problems.append(f"{self.path}: {len(missing)} of {count} PNGs are missing, first {first!r}")
        return set(missing)

    def _image(self, entry: dict[str, Any], name: str) -> int | None:
        """The image of an annotation; None, and a problem unless that is known, if it cannot be used."""
        image = entry.get("image_id")
        if type(image) is int and image in self.numbers:
            return image
        if type(image) is not int or image not in self.unusable:
            self.problems.append(f"{self.path}: {name} is of image {image!r}, which is not in the file")
        return None

    def _object(self, entry: dict[str, Any], image: int, name: str, outline: Any) -> None:
        size = (self.entries[image]["height"], self.entries[image]["width"])
        try:
            category = entry.get("category_id")
            if type(category) is not int or category not in self.labels:
                raise ValueError(f"there is no category {category!r}")
            box, clipped = _corners(entry.get("bbox"), size)
            area = entry.get("area", (box[2] - box[0]) * (box[3] - box[1]))
            if not isinstance(area, int | float) or not 0 < area < FAR:
                raise ValueError(f"its area is {str(area)[:20]}")
            if outline is not None:
                rle.check(outline, size)
        except ValueError as error:
            self.problems.append(f"{self.path}: {name}: {error}")
            return
        if clipped:
            self.clipped.append(name)
        packed = b"" if outline is None else marshal.dumps(outline)
        row = (box, self.labels[category], bool(entry.get("iscrowd", 0)), area, entry["id"], packed)
        self.objects[self.numbers[image]].append(row)


def _corners(bbox: object, size: tuple[int, int]) -> tuple[tuple[float, float, float, float], bool]:
    """``[x, y, w, h]`` as corners inside the image, and whether something was cut off."""
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(isinstance(n, int | float) for n in bbox):
        raise ValueError(f"its box should be [x, y, width, height], got {bbox!r}")
    if not all(-FAR < n < FAR for n in bbox):
        raise ValueError(f"its box is not of finite numbers: {str(bbox)[:60]}")
    (x, y, width, height), (h, w) = map(float, bbox), map(float, size)
    if width <= 0 or height <= 0:
        raise ValueError(f"its box has zero area: {bbox}")
    box = (min(max(x, 0.0), w), min(max(y, 0.0), h), min(max(x + width, 0.0), w), min(max(y + height, 0.0), h))
    if box[0] >= box[2] or box[1] >= box[3]:
        raise ValueError(f"its box {bbox} lies outside its image of {size[1]} x {size[0]}")
    return box, min(x, y, w - x - width, h - y - height) < -SLACK
