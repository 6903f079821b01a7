"""Images made larger, smaller or turned, and points that follow them there and back.

Points are (x, y) with the first pixel's centre at (0, 0); scales and sizes are (h, w).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vispe.data.images import ImageError
from vispe.data.sizes import Side, resized

SHARP = 1.3  # shrinking by less needs no blur: kornia's sigma is below 0.15 pixel, the neighbours weigh under 1e-9


def resize(image: Tensor, size: int | tuple[int, int], *, side: Side = "long") -> tuple[Tensor, tuple[float, float]]:
    """``[c, h, w]`` resized as the official LightGlue does, with the scale ``(h'/h, w'/w)`` measured after rounding.

    ``size`` is the length of the long or short side in pixels, or with ``side="exact"`` the whole ``(h', w')``. The
    rule is that of ``kornia.geometry.transform.resize(antialias=True)``, to float32 rounding: bilinear, pixel edges
    aligned; an axis that shrinks by f > 1 is first blurred by a Gaussian of sigma (f - 1) / 2 and about 4 sigma taps.
    """
    if image.ndim != 3 or 0 in image.shape or not image.is_floating_point():
        raise ImageError(f"resize takes a float image [c, h, w], got {image.dtype} {list(image.shape)}")
    h, w = image.shape[1:]
    new = new_h, new_w = resized(h, w, size, side)
    scale = (new_h / h, new_w / w)
    if max(h / new_h, w / new_w) < SHARP:
        return F.interpolate(image[None], size=new, mode="bilinear")[0], scale
    rows = F.interpolate(_combs(h, image).view(1, 2, h, 1), size=new, mode="bilinear")[0, :, :, 0]
    columns = F.interpolate(_combs(w, image).view(1, 2, 1, w), size=new, mode="bilinear")[0, :, 0]
    image = _resample_rows(image, rows)
    return _resample_rows(image.transpose(1, 2).contiguous(), columns).transpose(1, 2).contiguous(), scale


def _resample_rows(image: Tensor, combs: Tensor) -> Tensor:
    """``[c, n, w]`` to ``[c, new, w]``: blur and interpolation in one weighted sum, made for the new rows only."""
    n, new = image.shape[1], combs.shape[1]
    low, fraction = _neighbours(n, combs)
    gaussian = _gaussian(n / new, image)
    weights = F.pad((1 - fraction)[:, None] * gaussian, (0, 1)) + F.pad(fraction[:, None] * gaussian, (1, 0))
    out = image.new_zeros(image.shape[0], new, image.shape[2])
    for tap in range(len(gaussian) + 1):
        row = (low + tap - len(gaussian) // 2).abs()
        row = torch.where(row > n - 1, 2 * (n - 1) - row, row).clamp(min=0)  # the border reflects
        out.addcmul_(image.index_select(1, row), weights[:, tap, None])
    return out


def _combs(n: int, like: Tensor) -> Tensor:
    """``[2, n]``: 0, 1, 0, 1, ... and 0, 0, 1, 1, ...; what becomes of them when they are interpolated tells how."""
    i = torch.arange(n, device=like.device)
    return torch.stack([i % 2, i // 2 % 2]).to(like.dtype)


def _neighbours(n: int, combs: Tensor) -> tuple[Tensor, Tensor]:
    """The old row at or before each new one ``[new]``, and the weight ``[new]`` of the row after it, as torch has them.

    Computed here they would differ in the float32 rounding of the position, which is as coarse as 2e-4 of a pixel at
    row 4000. The first interpolated comb gives the weight, the second tells a row from its neighbours.
    """
    new = combs.shape[1]
    centres = (torch.arange(new, dtype=torch.float64, device=combs.device) + 0.5) * (n / new) - 0.5
    low = centres.floor().long() + torch.tensor([[0], [-1], [1]], device=combs.device)  # [3, new]: rounding may cross
    low = low.clamp(0, n - 1)
    fraction = torch.where(low % 2 == 0, combs[0], 1 - combs[0]) * (low < n - 1)
    second = _combs(n + 1, combs)[1]
    best = (second[low].lerp(second[low + 1], fraction) - combs[1]).abs().argmin(0, keepdim=True)
    return low.gather(0, best)[0], fraction.gather(0, best)[0]


def _gaussian(factor: float, like: Tensor) -> Tensor:
    """The taps of kornia's blur before shrinking by ``factor``."""
    if factor < SHARP:
        return like.new_ones(1)
    sigma = max((factor - 1) / 2, 0.001)
    taps = int(max(4 * sigma, 3)) | 1
    x = torch.arange(taps, dtype=like.dtype, device=like.device) - taps // 2
    weights = torch.exp(-(x**2) / (2 * sigma**2))
    return weights / weights.sum()


def to_original(xy: Tensor, scale: tuple[float, float]) -> Tensor:
    """Points ``[n, 2]`` of the resized image in pixels of the original: ``(k + 0.5) / s - 0.5``, float32 or finer.

    The half pixel matters: ``resize`` aligns the outer edges of the images, not the centres of their first pixels.
    """
    return (_points(xy) + 0.5) / _xy_scale(xy, scale) - 0.5


def to_resized(xy: Tensor, scale: tuple[float, float]) -> Tensor:
    """Points ``[n, 2]`` of the original image in pixels of the resized one; undoes ``to_original``."""
    return (_points(xy) + 0.5) * _xy_scale(xy, scale) - 0.5


def _points(xy: Tensor) -> Tensor:
    if xy.ndim < 1 or xy.shape[-1] != 2:
        raise ValueError(f"points are [n, 2], got {list(xy.shape)}")
    return xy if xy.dtype == torch.float64 else xy.to(torch.float32)  # half precision has no half pixels beyond 1024


def _xy_scale(xy: Tensor, scale: tuple[float, float]) -> Tensor:
    return torch.tensor([scale[1], scale[0]], dtype=_points(xy).dtype, device=xy.device)  # (h, w) to (x, y)


def rotate90(image: Tensor, quarter_turns: int) -> Tensor:
    """``[c, h, w]`` turned counter-clockwise, as it is seen, by that many quarter turns (``torch.rot90``); a copy."""
    return torch.rot90(image, quarter_turns, (-2, -1)).clone(memory_format=torch.contiguous_format)


def unrotate_points(xy: Tensor, quarter_turns: int, size: tuple[int, int]) -> Tensor:
    """Points ``[n, 2]`` of ``rotate90(image, quarter_turns)`` in pixels of ``image`` of ``size`` ``(h, w)``; exact."""
    x, y = xy[..., 0], xy[..., 1]
    right, bottom = size[1] - 1, size[0] - 1
    turned = [(x, y), (right - y, x), (right - x, bottom - y), (y, bottom - x)][quarter_turns % 4]
    return torch.stack(turned, -1)
