"""Coordinates: the one place where a pixel becomes a number that an encoding may see.

Points are (x, y) with the first pixel's centre at (0, 0); sizes are (h, w).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

if TYPE_CHECKING:
    Count = int
else:  # a SymInt stands for an int where a compiler or exporter follows sizes
    Count = int | torch.SymInt
Grid = tuple[Count, Count]  # (h, w) cells, row-major

OUTSIDE = 0.05  # of the long side: how far beyond the image a keypoint may lie before it is taken for a mistake


def check_grid(grid: Grid, name: str = "grid") -> Grid:
    """``grid`` itself; ValueError unless it is (h, w) of positive whole numbers."""
    if not isinstance(grid, (tuple, list, torch.Size)) or len(grid) != 2 or not all(_is_count(size) for size in grid):
        raise ValueError(f"{name} must be (h, w) of positive whole numbers, got {grid!r}")
    return grid


def _is_count(size: Any) -> bool:
    """A positive whole number: an int, numpy's, a SymInt or a tensor of one; not True, 3.0 or "3"."""
    if isinstance(size, (bool, float, str)) or not hasattr(size, "__index__"):
        return False
    return bool(size >= 1)


def positive(**numbers: int) -> tuple[int, ...]:
    """The numbers as given; a ValueError names the first below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    return tuple(numbers.values())


def normalize_keypoints(xy: Float[Tensor, "b n 2"], size: Shaped[Tensor, "b 2"]) -> Float[Tensor, "b n 2"]:
    """``k' = (k - size/2) / (max(size)/2)``: the long side spans [-1, 1], the short side keeps the aspect.

    ``xy [b, n, 2]`` in pixels, ``size [b, 2]`` as (h, w). Computed in float32 (float64 stays). The LightGlue paper says
    [0, 1]; code and weights use this form (official ``normalize_keypoints``).
    """
    xy = at_least_float32(xy)
    wh = size.to(xy).flip(-1)[:, None]
    return (xy - wh / 2) / (wh.amax(-1, keepdim=True) / 2)


def at_least_float32(x: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Positions and angles are never half precision: bfloat16 cannot tell 256 from 257."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_finite(positions: Shaped[Tensor, "*n"], name: str = "positions") -> Float[Tensor, "*n"]:
    """The positions in float32 (float64 stays); ValueError naming the first that is NaN or infinite.

    Costs one device synchronisation; nothing is looked at while compiling, exporting or capturing a CUDA graph, nor on
    the meta device.
    """
    positions = at_least_float32(positions)
    tracing = torch.compiler.is_compiling() or (positions.is_cuda and torch.cuda.is_current_stream_capturing())
    if tracing or positions.is_meta:
        return positions
    fine = positions.detach().isfinite()
    if not bool(fine.all()):
        raise ValueError(f"{name} must be finite, got {positions.detach()[~fine][0].item()}")
    return positions


def check_inside(
    xy: Float[Tensor, "b n 2"], size: Shaped[Tensor, "b 2"], mask: Bool[Tensor, "b n"] | None, name: str
) -> None:
    """Refuse keypoints that are not finite or lie well outside their image.

    Catches raw pixels paired with the size of another (resized) image, already normalised sizes and (w, h) given for
    (h, w). Only the points that ``mask [b, n]`` keeps are looked at. Costs one device synchronisation.
    """
    if xy.shape[1] == 0:
        return
    if mask is not None:  # padding may hold anything: look at the image's centre instead
        xy = torch.where(mask[..., None], xy, size.flip(-1)[:, None].to(xy) / 2)
    low, high = torch.aminmax(xy.detach().float(), dim=1)
    wh = size.to(low).flip(-1)
    slack = OUTSIDE * wh.amax(-1, keepdim=True) + 1.0
    fine = (low >= -slack) & (high <= wh + slack)  # NaN compares false
    if bool(fine.all()):
        return
    row = int((~fine.all(-1)).nonzero()[0])
    h, w = size[row].tolist()
    (x0, y0), (x1, y1) = low[row].tolist(), high[row].tolist()
    raise ValueError(
        f"{name} of pair {row} reach x {x0:g}..{x1:g}, y {y0:g}..{y1:g}, outside an image of (h, w) = ({h:g}, {w:g}): "
        "keypoints must be finite pixels of the image whose (h, w) is given; is the size of another image, or swapped?"
    )
