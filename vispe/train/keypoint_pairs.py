"""Pairs of images as a matcher of keypoints sees them, with their truth, and the batches of them.

Features of all images lie in memory. Chance depends on (seed, epoch, number) alone: a run that goes on, or runs in
several processes, sees the same pairs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vispe.data.augment import mixed
from vispe.data.batches import brought
from vispe.data.homographies import ViewSpec, overlap, seen_view
from vispe.data.images import read_image
from vispe.data.megadepth import DepthSpec, Posed
from vispe.geometry.benchmark import homography_poselib, pose_poselib
from vispe.geometry.depth import depth_ground_truth
from vispe.geometry.homography import Array, corner_error
from vispe.geometry.pose import pose_error
from vispe.losses.matching import IGNORED
from vispe.metrics.matching import homography_ground_truth
from vispe.models.lightglue import Points
from vispe.train.photos import Photo

RANSAC = {"homography": 3.0, "pose": 1.0}  # pixels of the images as they are matched, by PoseLib
TRIES = 20  # pairs drawn of a photograph until two views overlap; then whichever came last


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
        return len(self.names) * self.spec.pairs

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
        return seen_view(photo.read(), self.H[row], self.spec, mixed(self.seed, photo.number, k, 1))

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


# --- batches ----------------------------------------------------------------------------------------------------------


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
