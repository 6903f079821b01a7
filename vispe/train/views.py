"""The features of views of photographs, or of images with poses, found once, kept in one file, and pairs of them.

``features.h5`` says how it was made; a run that was stopped finds only what is missing. Photographs that cannot be
read, or have no room for a view, are left out, with a sentence each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vispe.cache import CacheReader, CacheWriter
from vispe.data.augment import mixed
from vispe.data.batches import brought
from vispe.data.homographies import Size, ViewSpec, drawn, looks, overlap, view
from vispe.data.images import ImageError, as_image, read_image
from vispe.data.megadepth import DepthSpec, Posed
from vispe.data.sources import folder_files
from vispe.data.stress import PHOTOGRAPHS, photograph
from vispe.extract import Job, extract_into, features_made
from vispe.features import Extractor, Features, Look, extractor
from vispe.geometry.benchmark import homography_poselib, pose_poselib
from vispe.geometry.depth import depth_ground_truth
from vispe.geometry.homography import Array, corner_error
from vispe.geometry.pose import pose_error
from vispe.losses.matching import IGNORED
from vispe.metrics.matching import homography_ground_truth
from vispe.models import EXTRACTORS
from vispe.models.lightglue import Points
from vispe.progress import track
from vispe.spec import Spec
from vispe.store import add_features, as_features
from vispe.weights.files import sha256

SKIMAGE = "skimage"  # in the place of a folder: scikit-image's photographs
AS_IT_IS = Look(resize=0)
# Views are on the disk once 64 wait, or five seconds have passed.
KEPT: dict[str, Any] = {"keep": True, "batch": 64, "seconds": 5.0, "otherwise": "give another features.file"}
RANSAC = {"homography": 3.0, "pose": 1.0}  # pixels of the images as they are matched, by PoseLib
TRIES = 20  # pairs drawn of a photograph until two views overlap; then whichever came last


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhotoSpec(Spec):
    """Photographs of any kind. ``roots``: folders, or ``skimage`` for scikit-image's own; ``val_part`` of them are held
    out, the same ones every time, and give ``val_pairs`` pairs; ``first``: so many photographs at most. ``corrupt``:
    whether one that cannot be used is left out ("skip") or ends the run ("refuse"). ``seed``: of the views."""

    roots: tuple[str, ...] = (SKIMAGE,)
    val_part: float = 0.15
    val_pairs: int = 200
    first: int | None = None
    corrupt: str = "skip"
    seed: int = 0
    views: ViewSpec = dataclasses.field(default_factory=ViewSpec)

    def __post_init__(self) -> None:
        if not self.roots:
            raise ValueError("roots are folders of photographs, got none")
        if not 0 < self.val_part < 1:
            raise ValueError(f"val_part lies between 0 and 1, got {self.val_part}")
        if self.val_pairs < 1 or (self.first is not None and self.first < 2):
            raise ValueError(f"val_pairs is at least 1, first at least 2, got {self.val_pairs} and {self.first}")
        if self.corrupt not in ("skip", "refuse"):
            raise ValueError(f"corrupt is skip or refuse, got {self.corrupt!r}")


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


class Photo(NamedTuple):
    """A photograph: its ``name``, where it is (a path, or the name of one of scikit-image's)."""

    name: str
    where: str
    root: str

    def content(self) -> str:
        """What tells it from another of its name; of a file that is not there that alone."""
        try:
            return self.name if self.root == SKIMAGE else sha256(self.where)
        except OSError as error:
            return str(error.strerror)

    def read(self) -> Float[Tensor, "3 h w"]:
        """In [0, 1]; ``ImageError`` says what is wrong with it."""
        if self.root != SKIMAGE:
            return read_image(self.where)
        return as_image(photograph(self.where)).expand(3, -1, -1)


def photographs(spec: PhotoSpec) -> tuple[list[Photo], list[Photo]]:
    """Those to learn from and those held out, by a hash of their names; ``ValueError`` where there are too few."""
    found = [photo for root in spec.roots for photo in _photos(root)]
    found = found[: spec.first] if spec.first is not None else found
    order = sorted(found, key=lambda photo: hashlib.sha256(photo.name.encode(errors="replace")).hexdigest())
    held = max(round(spec.val_part * len(order)), 1)
    if len(order) - held < 1:
        raise ValueError(f"{', '.join(spec.roots)}: {len(order)} photographs are too few to hold some of them out")
    return sorted(order[held:]), sorted(order[:held])


def _photos(root: str) -> list[Photo]:
    if root == SKIMAGE:
        photograph(PHOTOGRAPHS[0])  # says so where there are none
        return [Photo(f"{SKIMAGE}/{name}", name, root) for name in PHOTOGRAPHS]
    files = folder_files(root)
    if not len(files):
        raise ValueError(f"there are no images in {root!r}")
    top = Path(root).expanduser()
    return [Photo(f"{top.name}/{path}", os.fspath(top / path), root) for path in files.paths]


# --- features ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Packed:
    """The features of many images, padded to one length: ``keypoints [n, k, 2]``, ``descriptors [n, k, d]``, ``scales``
    and ``orientations [n, k]`` where there are any, ``counts [n]``, and the images' ``sizes [n, 2]`` (h, w)."""

    names: tuple[str, ...]
    keypoints: Float[Tensor, "n k 2"]
    descriptors: Float[Tensor, "n k d"]
    scales: Float[Tensor, "n k"] | None
    orientations: Float[Tensor, "n k"] | None
    counts: Int[Tensor, " n"]
    sizes: Float[Tensor, "n 2"]

    def points(self, rows: Sequence[int]) -> Points:
        """A batch for the matcher."""
        at = torch.as_tensor(rows)
        scales, orientations = (None if t is None else t[at] for t in (self.scales, self.orientations))
        return Points(self.keypoints[at], self.descriptors[at], self.sizes[at], self.mask(at), scales, orientations)

    def alone(self, row: int) -> Points:
        """One image without padding."""
        count, points = int(self.counts[row]), self.points([row])
        scales, orientations = (None if t is None else t[:, :count] for t in (points.scales, points.orientations))
        return Points(
            points.keypoints[:, :count], points.descriptors[:, :count], points.size, None, scales, orientations
        )

    def sample(self, most: int = 20000) -> Float[Tensor, "n d"]:
        """Descriptors of some images, spread over all of them."""
        found = self.descriptors[self.mask(torch.arange(len(self.counts)))]
        return found[:: max(len(found) // most, 1)]

    def mask(self, at: Tensor) -> Bool[Tensor, "b k"]:
        return torch.arange(self.keypoints.shape[1]) < self.counts[at][:, None]

    def real(self, row: int) -> Array:
        """The keypoints of an image, ``[count, 2]``."""
        return self.keypoints[row, : int(self.counts[row])].double().numpy()


class Source(Packed):
    """Images of which pairs are made; whoever has them says which, what is true of them, and how far off one is."""

    unit = "px"  # of an error
    limits: tuple[int, ...] = (1, 3, 5)  # of errors, whose AUC is told

    def __len__(self) -> int:
        """Pairs of an epoch."""
        raise NotImplementedError

    def pair(self, *chance: int) -> tuple[int, int]:
        """The rows of two images, by the numbers of ``chance``, the last of which counts the pairs."""
        raise NotImplementedError

    def labels(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        """The true partner of each real keypoint of either image, as the loss has it."""
        raise NotImplementedError

    def error(self, a: int, b: int, points0: Array, points1: Array) -> float:
        """Of what follows from matched points, in ``unit``; infinite where nothing does."""
        raise NotImplementedError

    def image(self, row: int) -> Float[Tensor, "3 h w"]:
        """The image that keypoints lie in; ``ImageError`` where it cannot be had any more."""
        raise NotImplementedError

    def truth(self, a: int, b: int) -> tuple[Tensor, Tensor]:
        """``labels`` padded; padding is ignored."""
        made = torch.full((2, self.keypoints.shape[1]), IGNORED)
        for row, partners in zip(made, self.labels(a, b), strict=True):
            row[: len(partners)] = torch.from_numpy(partners)
        return made[0], made[1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Views(Source):
    """All views of some photographs: view ``k`` of photograph ``p`` is row ``p * views + k``; ``H [n, 3, 3]`` takes a
    view to its photograph. ``seed``: of how they look."""

    photos: tuple[Photo, ...]
    spec: ViewSpec
    H: Array
    seed: int = 0
    positive: float = 3.0
    negative: float = 3.0

    def __len__(self) -> int:
        return len(self.names) * max(self.spec.views // 2, 1)

    def pair(self, *chance: int) -> tuple[int, int]:
        """Two views, that overlap, of photograph ``number % photographs`` in one way."""
        views, ways = self.spec.views, self.spec.ways
        first = chance[-1] % len(self.names) * views
        draw = np.random.default_rng(mixed(*chance, 3))
        first += int(draw.integers(ways)) if ways > 1 else 0
        a, b = 0, 1
        for _ in range(TRIES):
            a, b = (first + ways * int(k) for k in draw.choice(views // ways, 2, replace=False))
            if overlap(self.H[a], self.H[b], self.spec) >= self.spec.overlap:
                break
        return a, b

    def between(self, a: int, b: int) -> Array:
        """The homography from view ``a`` to view ``b`` of one photograph."""
        return np.linalg.inv(self.H[b]) @ self.H[a]

    def labels(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        given: dict[str, Any] = {"positive": self.positive, "negative": self.negative}
        first, second = self.real(a), self.real(b)
        return (
            homography_ground_truth(first, second, self.between(a, b), **given),
            homography_ground_truth(second, first, self.between(b, a), **given),
        )

    def image(self, row: int) -> Float[Tensor, "3 h w"]:
        photo, k = self.photos[row // self.spec.views], row % self.spec.views
        return seen_view(photo.read(), self.H[row], self.spec, mixed(self.seed, _number(photo.name), k, 1))

    def error(self, a: int, b: int, points0: Array, points1: Array) -> float:
        """Of the corners, with PoseLib."""
        estimate = homography_poselib(points0, points1, RANSAC["homography"])
        return corner_error(estimate.matrix, self.between(a, b), self.spec.size)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PosedImages(Source):
    """Images with poses and depths; distances are in pixels of the images as looked at, ``pixels [n]`` says how many of
    the image's own one of those spans."""

    unit = "degrees"
    limits = (5, 10, 20)

    posed: Posed
    spec: DepthSpec
    pixels: Array
    each: int  # pairs of an epoch
    positive: float = 3.0
    negative: float = 5.0

    def __len__(self) -> int:
        return self.each

    def pair(self, *chance: int) -> tuple[int, int]:
        draw = np.random.default_rng(mixed(*chance, 3))
        a, b = self.posed.pairs[int(draw.integers(len(self.posed.pairs)))].tolist()
        return (a, b) if draw.random() < 0.5 else (b, a)

    def labels(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        span, posed = max(self.pixels[a], self.pixels[b]), self.posed
        return depth_ground_truth(
            (self.real(a), self.real(b)), (posed.depth(a), posed.depth(b)), (posed.K[a], posed.K[b]),
            posed.between(a, b), positive=self.positive * span, negative=self.negative * span,
            epipolar=self.spec.epipolar * span, tolerance=self.spec.tolerance,
        )  # fmt: skip

    def image(self, row: int) -> Float[Tensor, "3 h w"]:
        return read_image(os.fspath(self.posed.root / self.names[row]))

    def error(self, a: int, b: int, points0: Array, points1: Array) -> float:
        """The larger of the angles by which rotation and translation are off, with PoseLib."""
        T, posed = self.posed.between(a, b), self.posed  # noqa: N806
        found = pose_poselib(
            points0, points1, posed.K[a], posed.K[b], RANSAC["pose"] * float(max(self.pixels[a], self.pixels[b]))
        )
        return pose_error(found.rotation, found.translation, T[:3, :3], T[:3, 3])


def view_features(
    path: Path, photos: Sequence[Photo], views: ViewSpec, features: FeatureSpec, seed: int, device: str, refuse: bool
) -> tuple[list[str], list[str]]:
    """Write ``path`` with the features of every view, or what of it is missing; the names of the photographs that can
    be used, and a sentence for each that cannot (with ``refuse`` an error)."""
    made = {"views": dataclasses.asdict(views), "seed": seed}
    made |= features_made(
        features.name, max_keypoints=features.max_keypoints, resize=0, side="long", weights=features.weights,
        **features.knobs,
    )  # fmt: skip
    skipped: dict[str, str] = {}
    loaded: list[Extractor] = []
    with CacheWriter(path, made, **KEPT) as writer:
        for photo in track(photos, "finding keypoints", "photographs"):
            keys, content = [f"{photo.name}#{k}" for k in range(views.views)], photo.content()
            if all(writer.has(key, content) for key in keys):
                continue
            try:
                image = photo.read()
                chance = seed, _number(photo.name)
                homographies = [view(_size(image), views, *chance, k, way=k % views.ways) for k in range(views.views)]
            except (ImageError, ValueError) as error:
                if refuse:
                    raise
                skipped[photo.name] = str(error)
                continue
            if not loaded:
                loaded.append(features.load(device))
            for k, (key, H) in enumerate(zip(keys, homographies, strict=True)):  # noqa: N806
                found = loaded[0](seen_view(image, H, views, mixed(seed, _number(photo.name), k, 1)))
                add_features(writer, key, found, content, H=H)
    return [photo.name for photo in photos if photo.name not in skipped], list(skipped.values())


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
    made = features_made(
        features.name, max_keypoints=features.max_keypoints, resize=spec.resize, side="long", weights=features.weights,
        **features.knobs,
    )  # fmt: skip
    jobs = [Job(name, os.fspath(part.root / name)) for part in posed for name in part.names]
    with CacheWriter(path, made, **KEPT) as writer:
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


def seen_view(image: Tensor, H: Array, views: ViewSpec, chance: int) -> Float[Tensor, "3 h w"]:  # noqa: N803
    """The view as a camera gives it: it looks different by ``chance``, and is rounded to bytes."""
    seen = drawn(image, H, views.size)
    if views.look:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(chance)
            seen = looks(views)(seen[None])[0]
    return (seen.clamp(0, 1) * 255).round() / 255


def _size(image: Tensor) -> Size:
    return image.shape[-2], image.shape[-1]


def _number(name: str) -> int:
    """A photograph's own number, whatever others there are."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:6], "big")


# --- pairs ------------------------------------------------------------------------------------------------------------


class PairBatch(NamedTuple):
    """Fields of the two images' :class:`Points`, the images' sizes, and the truth ``matches0``, ``matches1``."""

    keypoints0: Tensor
    keypoints1: Tensor
    descriptors0: Tensor
    descriptors1: Tensor
    mask0: Tensor
    mask1: Tensor
    size0: Tensor
    size1: Tensor
    matches0: Tensor
    matches1: Tensor
    indices: Tensor
    scales0: Tensor | None = None
    scales1: Tensor | None = None
    orientations0: Tensor | None = None
    orientations1: Tensor | None = None
    problem: str = ""

    def sides(self) -> tuple[Points, Points]:
        return (
            Points(self.keypoints0, self.descriptors0, self.size0, self.mask0, self.scales0, self.orientations0),
            Points(self.keypoints1, self.descriptors1, self.size1, self.mask1, self.scales1, self.orientations1),
        )


class TrainPairs(Dataset[Any]):
    """Pairs by (epoch, number), drawn anew in every epoch."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed = source, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: list[tuple[int, int]]) -> PairBatch:
        return pair_batch(self.source, [self.source.pair(self.seed, *key) for key in keys])


class EvalPairs(Dataset[Any]):
    """``count`` pairs that stay the same; -1 fills a batch."""

    def __init__(self, source: Source, count: int) -> None:
        self.source = source
        self.pairs = [source.pair(-1, 0, k) for k in range(count)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitems__(self, keys: list[int]) -> PairBatch:
        made = pair_batch(self.source, [self.pairs[max(key, 0)] for key in keys])
        return made._replace(indices=torch.tensor(keys))


def pair_batch(source: Source, pairs: Sequence[tuple[int, int]]) -> PairBatch:
    """The pairs of rows with their truth; a pair that cannot be made is the batch's ``problem``."""
    first, second = (source.points([pair[side] for pair in pairs]) for side in (0, 1))
    problem = ""
    try:
        truth = [source.truth(a, b) for a, b in pairs]
    except ValueError as error:  # a depth map that cannot be read
        nothing = torch.full((source.keypoints.shape[1],), IGNORED)
        truth, problem = [(nothing, nothing)] * len(pairs), str(error)
    assert first.mask is not None
    assert second.mask is not None
    return PairBatch(
        first.keypoints, second.keypoints, first.descriptors, second.descriptors, first.mask, second.mask,
        torch.as_tensor(first.size), torch.as_tensor(second.size), torch.stack([t[0] for t in truth]),
        torch.stack([t[1] for t in truth]), torch.arange(len(pairs)), first.scales, second.scales,
        first.orientations, second.orientations, problem,
    )  # fmt: skip


def pair_loader(data: TrainPairs | EvalPairs, batches: Any, workers: int, pinned: bool = False) -> DataLoader[Any]:
    """A loader of ``PairBatch``."""
    return brought(data, batches, workers, pinned, persistent=isinstance(data, TrainPairs))
