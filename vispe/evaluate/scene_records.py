"""What a network said of an image as it lies in ``predictions.h5``, and what its labels mean in the data.

An entry is named by the image's id (of semantic segmentation: its number and file name). It has ``labels [n]`` of the
network, ``scores [n]``, ``boxes [n, 4]`` (corners in pixels of the file's image) and, where masks were drawn, COCO's
compressed run lengths one after the other: mask k is the text ``runs[cuts[k] : cuts[k + 1]]``. Of coco-panoptic the
objects are the segments, in their order; of semantic the classes that are there, with scores of 1. Attributes are
``size`` (h, w) and ``seconds``. The file's ``made`` (JSON) tells the task, the network (its name, its spec, the sha256
of its weights), its labels in order, and how large it sees images.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from vispe.cache import Entry
from vispe.data.coco import Category, Coco
from vispe.data.segmentation import SemanticImages
from vispe.metrics.detection import Found

Task = Literal["coco-detection", "coco-panoptic", "semantic"]


def pack(found: Found) -> dict[str, np.ndarray]:
    """What was found as arrays of an entry."""
    arrays = {"labels": found.labels, "scores": found.scores, "boxes": found.boxes}
    if found.masks is None:
        return arrays
    texts = [rle["counts"].encode("ascii") for rle in found.masks]
    cuts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return arrays | {"runs": np.frombuffer(b"".join(texts), dtype=np.uint8), "cuts": cuts}


def unpack(entry: Entry) -> Found:
    """The reverse of :func:`pack`."""
    arrays, size = entry.arrays, [int(side) for side in entry.attributes["size"]]
    masks = None
    if "cuts" in arrays:
        text, cuts = arrays["runs"].tobytes().decode("ascii"), arrays["cuts"].tolist()
        masks = [{"size": size, "counts": text[a:b]} for a, b in itertools.pairwise(cuts)]
    return Found(arrays["boxes"], arrays["labels"], arrays["scores"], masks)


def chosen(found: Found, keep: Bool[np.ndarray, " n"]) -> Found:
    """Those objects of ``found``."""
    masks = None if found.masks is None else [mask for mask, kept in zip(found.masks, keep, strict=True) if kept]
    return Found(found.boxes[keep], found.labels[keep], found.scores[keep], masks)


# --- classes ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Classes:
    """``own[k]``: the data's label for the network's label k, -1 for one the data does not know. ``asked``: of each of
    the data's labels, whether it is scored."""

    own: Int[np.ndarray, " own"]
    asked: Bool[np.ndarray, " classes"]

    def translated(self, found: Found) -> Found:
        """With the data's labels; what is not asked for is dropped."""
        labels = self.own[found.labels]
        return chosen(found._replace(labels=labels), (labels >= 0) & self.asked[labels])


def classes(network: Sequence[Category], data: Coco, task: Task, *, partial: bool = False) -> Classes:
    """Match labels by their names. Of coco-detection only the data's things are asked for.

    ``ValueError`` for a class that is asked for and that the network cannot say; with ``partial`` it is left out, as
    far as any remains.
    """
    labels = {name: label for label, name in enumerate(data.classes)}
    own = np.array([labels.get(category.name, -1) for category in network], dtype=np.int64)
    asked = data.things.copy() if task == "coco-detection" else np.ones(len(data.categories), dtype=bool)
    if not asked.any():
        raise ValueError(f"{data.annotations} has no things, and coco-detection is of things")
    known = np.isin(np.arange(len(asked)), own)
    lacking = [data.classes[label] for label in np.flatnonzero(asked & ~known)]
    if lacking and (not partial or not (asked & known).any()):
        others = f" and {len(lacking) - 1} more classes" if len(lacking) > 1 else ""
        way = "none of its classes is known" if partial else "--partial leaves them out"
        raise ValueError(f"the network cannot say {lacking[0]!r}{others} of {data.annotations}; {way}")
    return Classes(own, asked & known)


def network_of(made: Mapping[str, Any]) -> tuple[Category, ...]:
    """The labels of the network that a file of predictions was made with."""
    return tuple(Category(int(number), str(name), bool(thing)) for number, name, thing in made["categories"])


def fingerprint(parts: Sequence[str]) -> str:
    """One sha256 of several."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def entry_of(images: SemanticImages, i: int) -> str:
    """The entry of an image of semantic segmentation."""
    return f"{i} {os.path.basename(images.images[i])}"
