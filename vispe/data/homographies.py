"""Views of a photograph through random homographies: any two of them are a pair whose every point is known.

A view is a quadrilateral inside its photograph, so that no view has an edge that gives its angle away: a rectangle of
the view's shape, its corners moved (perspective), turned, of a share of the largest that fits (scale), anywhere. It is
drawn from the photograph at the nearest finer half (anti-aliased), and looks different each time: colours, blur and
noise are drawn for every view on its own. Chance depends on (seed, photograph, view) alone.

Coordinates are pixels with the first pixel's centre at (0, 0). DeTone et al. 2016; LightGlue, section 4.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vispe.data.augment import mixed
from vispe.data.resizing import unrotate_points
from vispe.geometry.homography import Array, warp_points
from vispe.spec import Spec

Size = tuple[int, int]  # h, w
GRID = 16  # points a side that tell how far two views overlap
SMALLEST = 0.25  # pixels of a photograph for one of the largest view: a smaller one would be enlarged to nothing
TRIES = 20  # quadrilaterals drawn before a photograph is given up as too narrow


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewSpec(Spec):
    """How views vary. ``size`` (h, w) of each in pixels, ``views`` of a photograph; ``angle``: degrees to either side;
    ``scale``: sides as shares of the largest view that fits; ``perspective``: how far a corner moves inwards, as a
    share of the sides; ``overlap``: the least share of either view of a pair that the other shows. ``look``: 0 leaves
    colours as they are, 1 changes them as published trainings do. ``ways``: of the eight in which a photograph can be
    turned by quarters and mirrored, each like another photograph: few are learnt by heart later."""

    size: Size = (360, 480)
    views: int = 8
    angle: float = 45.0
    scale: tuple[float, float] = (0.5, 1.0)
    perspective: float = 0.2
    overlap: float = 0.3
    look: float = 1.0
    ways: int = 1

    @property
    def pairs(self) -> int:
        """That an epoch has of each photograph."""
        return max(self.views // 2, 1)

    def __post_init__(self) -> None:
        if min(self.size) < 32:
            raise ValueError(f"size has sides of at least 32 pixels, got {self.size}")
        if self.views < 2:
            raise ValueError(f"views are at least two of a photograph, for a pair, got {self.views}")
        if not 1 <= self.ways <= 8:
            raise ValueError(f"ways are 1 to 8, got {self.ways}")
        if self.views % self.ways or self.views < 2 * self.ways:
            raise ValueError(
                f"views are at least two for each of the {self.ways} ways, as many for each, got {self.views}"
            )
        if not (0 <= self.angle <= 180 and 0 <= self.perspective < 0.5):
            raise ValueError(f"angle is 0 to 180, perspective 0 to below 0.5, got {self.angle} and {self.perspective}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale goes from low to high within (0, 1], got {self.scale}")
        if not (0 <= self.overlap < 1 and self.look >= 0):
            raise ValueError(f"overlap lies in [0, 1), look is not negative, got {self.overlap} and {self.look}")


def view(size: Size, spec: ViewSpec, *chance: int, way: int = 0) -> Array:
    """``H [3, 3]`` that takes points of a view to a photograph of ``size``, by the numbers of ``chance``.

    ``way``: how the photograph is turned and mirrored before it is looked at. ``ValueError`` for one that is too small
    or too narrow for any view.
    """
    draw = np.random.default_rng(mixed(*chance))
    for _ in range(TRIES):
        corners = _quadrilateral(size[::-1] if way % 2 else size, spec, draw)
        if corners is not None:
            return to_photograph(size, way) @ _from_corners(_corners(spec.size), corners)
    raise ValueError(f"a photograph of {size[1]} x {size[0]} pixels has no room for a view")


def to_photograph(size: Size, way: int) -> Array:
    """``[3, 3]`` that takes points of a photograph of ``size``, turned counter-clockwise by ``way % 4`` quarters and
    then, from way 4 on, mirrored left to right, to the photograph."""
    points = torch.tensor([[0, 0], [1, 0], [0, 1]], dtype=torch.float64)  # an affine map is known by these
    if way >= 4:
        points[:, 0] = size[1 - way % 2] - 1 - points[:, 0]
    origin, right, down = unrotate_points(points, way % 4, size).numpy()
    return np.vstack((np.stack((right - origin, down - origin, origin), 1), (0, 0, 1)))


def drawn(photo: Float[Tensor, "c h w"], H: Array, size: Size) -> Float[Tensor, "c y x"]:  # noqa: N803
    """The view of ``photo`` that ``H`` takes there, bilinearly; what lies outside repeats the edge."""
    level, shrink = _finer_half(photo, H, size)
    y, x = np.mgrid[: size[0], : size[1]]
    points = warp_points(H, np.stack((x.ravel(), y.ravel()), 1).astype(np.float64))
    h, w = level.shape[-2:]
    grid = ((points + 0.5) / shrink * 2 / np.array([w, h]) - 1).reshape(1, *size, 2)  # pixel edges, not centres
    where = torch.from_numpy(np.clip(grid, -1e4, 1e4)).to(photo)
    return F.grid_sample(level[None], where, mode="bilinear", padding_mode="border", align_corners=False)[0]


def looks(spec: ViewSpec) -> Any:
    """What changes a view's colours, ``[3, h, w]`` in [0, 1] -> the same, drawing from torch's generators; kornia's."""
    try:
        from kornia import augmentation as kornia
    except ImportError as error:
        raise ValueError("views that look different need kornia: pip install kornia, or data.views.look=0") from error
    s = spec.look
    return kornia.AugmentationSequential(
        kornia.ColorJiggle(0.3 * s, 0.3 * s, 0.2 * s, min(0.05 * s, 0.5), p=0.8),
        kornia.RandomGamma((1 / (1 + 0.5 * s), 1 + 0.5 * s), p=0.3),
        kornia.RandomGaussianBlur((5, 5), (0.3, 0.3 + 1.2 * s), p=0.2),
        kornia.RandomMotionBlur((3, 5), 45.0, 0.5, p=0.1),
        kornia.RandomGaussianNoise(0.0, 0.03 * s, p=0.3),
        kornia.RandomGrayscale(p=0.1),
        data_keys=["input"],
    )


def seen_view(image: Tensor, H: Array, spec: ViewSpec, chance: int) -> Float[Tensor, "3 h w"]:  # noqa: N803
    """The view as a camera gives it: it looks different by ``chance``, and is rounded to bytes."""
    seen = drawn(image, H, spec.size)
    if spec.look:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(chance)
            seen = looks(spec)(seen[None])[0]
    return (seen.clamp(0, 1) * 255).round() / 255


def overlap(H0: Array, H1: Array, spec: ViewSpec) -> float:  # noqa: N803
    """The smaller of the shares of two views (of homographies to one photograph) that the other shows."""
    y, x = np.meshgrid(*(np.linspace(0, side - 1, GRID) for side in spec.size), indexing="ij")
    points = np.stack((x.ravel(), y.ravel()), 1)
    shares = []
    for to in (np.linalg.inv(H1) @ H0, np.linalg.inv(H0) @ H1):
        seen = warp_points(to, points)
        inside = (seen >= -0.5) & (seen < np.array(spec.size[::-1]) - 0.5)
        shares.append(float(inside.all(1).mean()))
    return min(shares)


def _quadrilateral(size: Size, spec: ViewSpec, draw: np.random.Generator) -> Array | None:
    """Four corners in a photograph; None where a draw leaves it."""
    (h, w), (height, width) = spec.size, size
    corners = np.array([[-w, -h], [w, -h], [w, h], [-w, h]], dtype=np.float64) / 2
    corners -= np.sign(corners) * draw.uniform(0, spec.perspective, (4, 2)) * np.array([w, h])
    turn = math.radians(draw.uniform(-spec.angle, spec.angle))
    corners @= np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
    extent = corners.max(0) - corners.min(0)
    largest = float(((np.array([width, height]) - 1) / extent).min())
    low, high = np.log(spec.scale)
    corners *= largest * math.exp(draw.uniform(low, high))
    room = np.array([width, height]) - 1 - (corners.max(0) - corners.min(0))
    if largest < SMALLEST or room.min() < 0:
        return None
    return corners - corners.min(0) + draw.uniform(0, 1, 2) * room


def _corners(size: Size) -> Array:
    h, w = size
    return np.array([[0, 0], [w - 1, 0], [w - 1, h - 1], [0, h - 1]], dtype=np.float64)


def _from_corners(source: Array, target: Array) -> Array:
    """The homography of four pairs of corners."""
    rows, right = [], []
    for (x, y), (u, v) in zip(source, target, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        right += [u, v]
    return np.append(np.linalg.solve(np.array(rows), np.array(right)), 1.0).reshape(3, 3)


def _finer_half(photo: Tensor, H: Array, size: Size) -> tuple[Tensor, float]:  # noqa: N803
    """The photograph halved as often as a view's pixel is at least two of its pixels wide, and how much smaller it
    is."""
    corners = warp_points(H, _corners(size))
    sides = np.linalg.norm(corners - np.roll(corners, -1, 0), axis=1) / np.array([size[1], size[0]] * 2)
    shrink = 2 ** max(math.floor(math.log2(max(float(sides.min()), 1.0)) + 0.25), 0)
    if shrink == 1:
        return photo, 1.0
    h, w = (max(round(side / shrink), 1) for side in photo.shape[-2:])
    made = F.interpolate(photo[None], size=(h, w), mode="bilinear", antialias=True, align_corners=False)[0]
    return made, shrink
