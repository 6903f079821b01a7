"""Pairs of grey images, made when they are asked for, and where every cell of one lies in the other.

Views of photographs through random homographies, drawn anew in every epoch, or images with poses and depths. Chance
depends on (seed, epoch, number) alone: a run that goes on, or runs in several processes, sees the same pairs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vispe.data.augment import mixed
from vispe.data.batches import brought
from vispe.data.homographies import ViewSpec, overlap, seen_view, view
from vispe.data.images import ImageError, image_size, read_image, to_grey
from vispe.data.megadepth import DepthSpec, Posed
from vispe.features import Look
from vispe.geometry.benchmark import homography_poselib, pose_poselib
from vispe.geometry.cells import Cells, cell_pixels, cells_of, mutual_cells
from vispe.geometry.depth import carried, depth_at
from vispe.geometry.homography import Array, corner_error, resize_matrix, warp_points
from vispe.geometry.pose import pose_error
from vispe.train.keypoint_pairs import RANSAC, TRIES
from vispe.train.photos import Photo

HELD = 512 << 20  # bytes of decoded photographs that are kept in memory


class Pair(NamedTuple):
    """``image0 [1, h, w]``, ``image1`` in [0, 1], with zeros behind their ``size0``, ``size1`` (h, w). ``there0 [m,
    2]`` and ``there1 [n, 2]``: where cells lie in the other image, NaN unknown, infinite not seen there. ``truth [3,
    c]``: what :meth:`ImagePairs.error` needs."""

    image0: Tensor
    image1: Tensor
    size0: tuple[int, int]
    size1: tuple[int, int]
    there0: Array
    there1: Array
    truth: Array


class ImagePairs:
    """Images of which pairs are made; whoever has them says which, and how far off what follows from matches is."""

    unit = "px"  # of an error
    limits: tuple[int, ...] = (3, 5, 10)  # of errors, whose AUC is told
    names: tuple[str, ...]
    stride: int  # pixels of a cell

    def __len__(self) -> int:
        """Pairs of an epoch."""
        raise NotImplementedError

    def make(self, *chance: int) -> Pair:
        """The pair by the numbers of ``chance``, the last of which counts the pairs."""
        raise NotImplementedError

    def error(self, truth: Array, points0: Array, points1: Array) -> float:
        """Of what follows from matched points, in ``unit``; infinite where nothing does."""
        raise NotImplementedError

    def told(self) -> bytes:
        """What tells these images from others."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """The images' count and a hash: equal when a run may go on with them."""
        return {"images": len(self.names), "sha256": hashlib.sha256(self.told()).hexdigest()}


class PhotoPairs(ImagePairs):
    """Two views, that overlap, of photograph ``number % photographs``; an epoch has ``views // 2`` pairs of each.

    Every photograph is read once now. ``skipped``: a sentence for each that cannot be read or has no room for a view;
    with ``refuse`` an ``ImageError`` or ``ValueError``.
    """

    def __init__(self, photos: Sequence[Photo], views: ViewSpec, stride: int, seed: int, refuse: bool = False) -> None:
        self.views, self.stride, self.seed = views, stride, seed
        self.photos: list[Photo] = []
        self.skipped: list[str] = []
        self._held: dict[int, Tensor] = {}
        room = HELD
        for photo in photos:
            try:
                pixels = _bytes(photo.read())
                for way in range(views.ways):
                    view(image_size(pixels), views, seed, way=way)
            except (ImageError, ValueError) as error:
                if refuse:
                    raise
                self.skipped.append(str(error))
                continue
            if pixels.numel() <= room:
                self._held[len(self.photos)] = pixels
                room -= pixels.numel()
            self.photos.append(photo)
        self.names = tuple(photo.name for photo in self.photos)

    def __len__(self) -> int:
        return len(self.photos) * max(self.views.views // 2, 1)

    def make(self, *chance: int) -> Pair:
        row, views = chance[-1] % len(self.photos), self.views
        held = self._held.get(row)
        photo = (_bytes(self.photos[row].read()) if held is None else held).float() / 255
        way = mixed(self.seed, *chance, 5) % views.ways
        for k in range(TRIES):
            first, second = (view(image_size(photo), views, self.seed, *chance, k, side, way=way) for side in (0, 1))
            if overlap(first, second, views) >= views.overlap:
                break
        image0, image1 = (
            to_grey(seen_view(photo, H, views, mixed(self.seed, *chance, side, 2)))
            for side, H in enumerate((first, second))
        )
        H = np.linalg.inv(second) @ first  # noqa: N806
        cells = cell_pixels(cells_of(views.size, self.stride), self.stride)
        there = [np.nan_to_num(warp_points(M, cells), nan=np.inf) for M in (H, np.linalg.inv(H))]
        return Pair(image0, image1, views.size, views.size, there[0], there[1], H)

    def error(self, truth: Array, points0: Array, points1: Array) -> float:
        """Of the corners, by PoseLib's homography."""
        estimate = homography_poselib(points0, points1, RANSAC["homography"])
        return corner_error(estimate.matrix, truth, self.views.size)

    def told(self) -> bytes:
        return repr([(photo.name, photo.content()) for photo in self.photos]).encode(errors="replace")


class PosedPairs(ImagePairs):
    """Images with poses and depths whose overlap is right; their long side is ``spec.resize`` pixels, padded to a
    square. A cell is seen in the other image where that says the same depth within ``spec.tolerance``."""

    unit = "degrees"
    limits = (5, 10, 20)

    def __init__(self, posed: Posed, spec: DepthSpec, stride: int, each: int) -> None:
        self.posed, self.spec, self.stride, self.each = posed, spec, stride, each
        self.names = posed.names

    def __len__(self) -> int:
        return self.each

    def make(self, *chance: int) -> Pair:
        draw, posed = np.random.default_rng(mixed(*chance, 3)), self.posed
        a, b = posed.pairs[int(draw.integers(len(posed.pairs)))].tolist()
        a, b = (a, b) if draw.random() < 0.5 else (b, a)
        (image0, size0, scale0), (image1, size1, scale1) = (self._looked_at(row) for row in (a, b))
        there0, there1 = self._there(a, b, size0, scale0, scale1), self._there(b, a, size1, scale1, scale0)
        K0, K1 = (resize_matrix(s) @ posed.K[row] for s, row in ((scale0, a), (scale1, b)))  # noqa: N806
        return Pair(image0, image1, size0, size1, there0, there1, np.hstack((K0, K1, posed.between(a, b)[:3])))

    def error(self, truth: Array, points0: Array, points1: Array) -> float:
        """The larger of the angles by which rotation and translation are off, with PoseLib."""
        K0, K1, rotation, translation = np.split(truth, (3, 6, 9), 1)  # noqa: N806
        found = pose_poselib(points0, points1, K0, K1, RANSAC["pose"])
        return pose_error(found.rotation, found.translation, rotation, translation[:, 0])

    def told(self) -> bytes:
        return repr(self.names).encode(errors="replace") + self.posed.K.tobytes() + self.posed.poses.tobytes()

    def _looked_at(self, row: int) -> tuple[Tensor, tuple[int, int], tuple[float, float]]:
        """The image in its square, its size (h, w), and its scale (x, y)."""
        name, side = self.posed.names[row], self.spec.resize
        seen, (tall, wide) = Look(resize=side).at(read_image(os.fspath(self.posed.root / name)), name)
        h, w = image_size(seen)
        return F.pad(to_grey(seen), (0, side - w, 0, side - h)), (h, w), (wide, tall)

    def _there(
        self, a: int, b: int, size: tuple[int, int], scale: tuple[float, float], other: tuple[float, float]
    ) -> Array:
        """Where the cells of image ``a`` lie in image ``b``."""
        posed, whole = self.posed, (self.spec.resize,) * 2
        pixels = cell_pixels(cells_of(whole, self.stride), self.stride)
        points = (pixels + 0.5) / scale - 0.5
        depth = np.where((pixels < np.array(size[::-1])).all(1), depth_at(posed.depth(a), points), 0)
        seen, z = carried(points, depth, posed.K[a], posed.K[b], posed.between(a, b))
        table = posed.depth(b)
        says = depth_at(table, seen)
        with np.errstate(invalid="ignore"):
            outside = ~((seen > -0.5) & (seen < np.array(table.shape[::-1]) - 0.5)).all(1)
            hidden = (says > 0) & ~(np.abs(z - says) <= self.spec.tolerance * says)
        there = (seen + 0.5) * other - 0.5
        there[outside | hidden] = np.inf
        there[(depth == 0) | (~outside & (says == 0))] = np.nan
        return there


def _bytes(image: Tensor) -> Tensor:
    return (image * 255).round().to(torch.uint8)


# --- batches ----------------------------------------------------------------------------------------------------------


class ImagePairBatch(NamedTuple):
    """``image0 [b, 1, h, w]``, ``image1``, ``mask0 [b, h, w]`` and ``mask1`` where there is padding; ``there0 [b, m,
    2]``; the labels of cells ``matches0 [b, m]``, ``matches1 [b, n]``; ``order [b, m]`` random numbers; ``truth [b, 3,
    c]`` of numpy; ``indices [b]``, -1 for what fills a batch."""

    image0: Tensor
    image1: Tensor
    mask0: Tensor | None
    mask1: Tensor | None
    there0: Tensor
    matches0: Tensor
    matches1: Tensor
    order: Tensor
    truth: Array
    indices: Tensor
    problem: str = ""


class TrainImagePairs(Dataset[Any]):
    """Pairs by (epoch, number), other ones in every epoch."""

    def __init__(self, source: ImagePairs, seed: int) -> None:
        self.source, self.seed = source, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: list[tuple[int, int]]) -> ImagePairBatch:
        return image_pair_batch(self.source, [(self.seed, *key) for key in keys], [number for _, number in keys])


class EvalImagePairs(Dataset[Any]):
    """``count`` pairs that stay the same; -1 fills a batch."""

    def __init__(self, source: ImagePairs, count: int) -> None:
        self.source, self.count = source, count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, keys: list[int]) -> ImagePairBatch:
        return image_pair_batch(self.source, [self.chance(max(key, 0)) for key in keys], keys)

    @staticmethod
    def chance(key: int) -> tuple[int, ...]:
        """The numbers that make pair ``key``."""
        return -1, 0, key


def image_pair_batch(source: ImagePairs, chances: Sequence[tuple[int, ...]], indices: Sequence[int]) -> ImagePairBatch:
    """The pairs of ``chances``; one that cannot be made is the batch's ``problem``."""
    index = torch.tensor(indices)
    try:
        pairs = [source.make(*chance) for chance in chances]
    except (ImageError, ValueError) as error:
        nothing = torch.empty(0)
        return ImagePairBatch(
            nothing, nothing, None, None, nothing, nothing, nothing, nothing, np.empty(0), index, str(error)
        )
    image0, image1 = torch.stack([p.image0 for p in pairs]), torch.stack([p.image1 for p in pairs])
    labels = [mutual_cells(p.there0, p.there1, *_grids(p, source.stride), source.stride) for p in pairs]
    draws = [torch.Generator().manual_seed(mixed(*chance, 4)) for chance in chances]
    return ImagePairBatch(
        image0=image0,
        image1=image1,
        mask0=_mask(image0, [p.size0 for p in pairs]),
        mask1=_mask(image1, [p.size1 for p in pairs]),
        there0=torch.from_numpy(np.stack([p.there0 for p in pairs])).float(),
        matches0=torch.from_numpy(np.stack([label[0] for label in labels])),
        matches1=torch.from_numpy(np.stack([label[1] for label in labels])),
        order=torch.stack([torch.rand(len(p.there0), generator=draw) for p, draw in zip(pairs, draws, strict=True)]),
        truth=np.stack([p.truth for p in pairs]),
        indices=index,
    )


def _grids(pair: Pair, stride: int) -> tuple[Cells, Cells]:
    return cells_of(image_size(pair.image0), stride), cells_of(image_size(pair.image1), stride)


def _mask(images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor | None:
    """True where there is image; None where there is nothing else."""
    if all(size == image_size(images) for size in sizes):
        return None
    made = torch.zeros(len(images), *image_size(images), dtype=torch.bool)
    for row, (h, w) in zip(made, sizes, strict=True):
        row[:h, :w] = True
    return made


def image_pair_loader(
    data: TrainImagePairs | EvalImagePairs, batches: Any, workers: int, pinned: bool = False
) -> DataLoader[Any]:
    """A loader of ``ImagePairBatch``."""
    return brought(data, batches, workers, pinned, persistent=isinstance(data, TrainImagePairs))
