"""The features of views of photographs, or of images with poses, found once and kept in one file.

``features.h5`` says how it was made; a run that was stopped finds only what is missing. Photographs that cannot be
read, or have no room for a view, are left out, with a sentence each.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vispe.cache import CacheReader, CacheWriter
from vispe.data.augment import mixed
from vispe.data.batches import as_it_is
from vispe.data.homographies import ViewSpec, seen_view, view
from vispe.data.images import image_size
from vispe.data.megadepth import DepthSpec, Posed
from vispe.extract import Job, extract_into, features_made
from vispe.features import Extractor, Features, Look, extractor
from vispe.models import EXTRACTORS
from vispe.progress import track
from vispe.spec import Spec
from vispe.store import as_features, as_stored
from vispe.train.keypoint_pairs import PosedImages, Views
from vispe.train.loaders import Say
from vispe.train.photos import Photo

AS_IT_IS = Look(resize=0)
# Views are on the disk once 64 wait, or five seconds have passed.
KEPT: dict[str, Any] = {"keep": True, "batch": 64, "seconds": 5.0, "otherwise": "give another features.file"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSpec(Spec):
    """Who finds the features, frozen: an extractor by name, how many keypoints at most, knobs of its own spec.
    ``file``: where they are kept, for several runs on the same views; None: ``features.h5`` in the run's folder."""

    name: str = "sift"
    max_keypoints: int = 512
    weights: str | None = None
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    file: str | None = None

    def __post_init__(self) -> None:
        if self.name not in EXTRACTORS:
            raise ValueError(f"name is one of {', '.join(EXTRACTORS)}, got {self.name!r}")
        if self.max_keypoints < 2:
            raise ValueError(f"max_keypoints is at least 2, got {self.max_keypoints}")

    def load(self, device: str, look: Look = AS_IT_IS) -> Extractor:
        given: dict[str, Any] = {"max_keypoints": self.max_keypoints, "weights": self.weights, "device": device}
        return extractor(self.name, look=look, **given, **self.knobs)

    def made(self, resize: int) -> dict[str, Any]:
        """How features of images whose long side is ``resize`` are made, as their file says it."""
        given: dict[str, Any] = {"max_keypoints": self.max_keypoints, "resize": resize, "side": "long"}
        return features_made(self.name, weights=self.weights, **given, **self.knobs)


def view_features(
    path: Path,
    photos: Sequence[Photo],
    views: ViewSpec,
    features: FeatureSpec,
    seed: int,
    device: str,
    refuse: bool,
    workers: int = 0,
    say: Say = print,
) -> tuple[list[str], list[str]]:
    """Write ``path`` with the features of every view, or what of it is missing; the names of the photographs that can
    be used, and a sentence for each that cannot (with ``refuse`` an error). ``workers``: processes that find them where
    a network does on the CPU, each with one thread; small images gain nothing from more."""
    made = {"views": dataclasses.asdict(views), "seed": seed, **features.made(resize=0)}
    skipped: dict[str, str] = {}
    with CacheWriter(path, made, **KEPT) as writer:
        left = [
            (photo, content)
            for photo, content in ((photo, photo.content()) for photo in photos)
            if not all(writer.has(f"{photo.name}#{k}", content) for k in range(views.views))
        ]
        if left:
            say(f"finding the keypoints of {len(left)} photographs, {views.views} views of each, into {path}")
            finder = _ViewFeatures([photo for photo, _ in left], views, features.load(device), seed)
            found = track(finder.loader(workers), "finding keypoints", "photographs", total=len(left))
            for (photo, content), made_of in zip(left, found, strict=True):
                if isinstance(made_of, str):
                    if refuse:
                        raise ValueError(made_of)
                    skipped[photo.name] = made_of
                    continue
                for k, (arrays, attributes) in enumerate(made_of):
                    writer.add(f"{photo.name}#{k}", arrays, attributes, content)
    return [photo.name for photo in photos if photo.name not in skipped], list(skipped.values())


class _ViewFeatures(Dataset[Any]):
    """What is stored of each photograph's views, or why that cannot be."""

    def __init__(self, photos: Sequence[Photo], views: ViewSpec, find: Extractor, seed: int) -> None:
        self.photos, self.views, self.find, self.seed = photos, views, find, seed

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, at: int) -> list[Any] | str:
        photo, views = self.photos[at], self.views
        try:
            image, chance = photo.read(), (self.seed, photo.number)
            homographies = [view(image_size(image), views, *chance, k, way=k % views.ways) for k in range(views.views)]
            seen = (seen_view(image, H, views, mixed(*chance, k, 1)) for k, H in enumerate(homographies))
            return [as_stored(self.find(one), H=H) for one, H in zip(seen, homographies, strict=True)]
        except ValueError as error:
            return str(error)

    def loader(self, workers: int) -> DataLoader[Any]:
        """In order. OpenCV brings threads of its own, which do not outlive a fork."""
        forked = sys.platform == "linux" and self.find.device.type == "cpu" and self.find.name != "sift"
        many: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if forked and workers else {}
        own = torch.Generator()  # else it draws from torch's
        return DataLoader(self, batch_size=None, collate_fn=as_it_is, generator=own, **many)


def read_views(
    path: Path,
    photos: Sequence[Photo],
    views: ViewSpec,
    most: int,
    positive: float = 3.0,
    negative: float = 3.0,
    seed: int = 0,
) -> Views:
    """The views of ``photos``, in memory."""
    found: list[Features] = []
    homographies = []
    with CacheReader(path) as file:
        for photo in photos:
            for k in range(views.views):
                entry = file.read(f"{photo.name}#{k}")
                homographies.append(np.asarray(entry.attributes["H"], dtype=np.float64).reshape(3, 3))
                found.append(as_features(entry))
    about: dict[str, Any] = {
        "spec": views,
        "H": np.stack(homographies),
        "positive": positive,
        "negative": negative,
        "seed": seed,
    }
    names = tuple(photo.name for photo in photos)
    return Views(names=names, photos=tuple(photos), **_packed(found, most), **about)


def posed_features(path: Path, posed: Sequence[Posed], spec: DepthSpec, features: FeatureSpec, device: str) -> None:
    """Write ``path`` with the features of every image, or what of it is missing; ``ImageError`` for one that cannot be
    read."""
    jobs = [Job(name, os.fspath(part.root / name)) for part in posed for name in part.names]
    with CacheWriter(path, features.made(spec.resize), **KEPT) as writer:
        extract_into(writer, jobs, lambda: features.load(device, Look(resize=spec.resize)))


def read_posed(
    path: Path, posed: Posed, spec: DepthSpec, most: int, each: int, positive: float = 3.0, negative: float = 5.0
) -> PosedImages:
    """The images of ``posed``, in memory; their depths are read when a pair needs them."""
    with CacheReader(path) as file:
        found = [as_features(file.read(name)) for name in posed.names]
    about: dict[str, Any] = {"positive": positive, "negative": negative, "each": each}
    pixels = np.array([one.pixel for one in found])
    return PosedImages(names=posed.names, **_packed(found, most), posed=posed, spec=spec, pixels=pixels, **about)


def _packed(found: Sequence[Features], most: int) -> dict[str, Any]:
    """The fields of :class:`Packed` but for the names."""

    def padded(field: str) -> Tensor | None:
        parts = [getattr(one, field) for one in found]
        if parts[0] is None:
            return None
        whole = parts[0].new_zeros(len(parts), most, *parts[0].shape[1:])
        for row, part in zip(whole, parts, strict=True):
            row[: len(part)] = part
        return whole

    made: dict[str, Any] = {name: padded(name) for name in ("keypoints", "descriptors", "scales", "orientations")}
    made["counts"] = torch.tensor([len(one) for one in found])
    return made | {"sizes": torch.tensor([one.size for one in found], dtype=torch.float32)}
