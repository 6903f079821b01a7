"""Sinusoids: a position becomes the phases of many waves, of wavelengths 2 pi to about 10000 * 2 pi, added to a token.

Published codes share the idea and differ in everything else: whether counting starts at 0 or 1, whether x or y comes
first, whether sines and cosines alternate or stand in blocks, whether the last frequency is 1/T or just before it. A
checkpoint knows one of them only, so each is a function of its own, named by its source, never a flag.

``sine_<source>(grid or positions, dim)`` -> float32 ``[n, dim]``; token ``k`` of a grid (h, w) sits at row ``k // w``,
column ``k % w``. Waves are made on h + w rows, in the source's order of operations, and spread; nothing is cached.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from vispe.position.grid import check_finite, check_grid

EPS = 1e-6  # DETR's: keeps a fully padded row at 0 instead of 0/0


# 1-D: positions [...] -> [..., dim]


def sine_vaswani(positions: Shaped[Tensor, "*n"], dim: int, temperature: float = 10000.0) -> Float[Tensor, "*n dim"]:
    """``[sin(p w_0), cos(p w_0), sin(p w_1), ...]``, ``w_i = T^(-2i/dim)`` (Vaswani et al. 2017, section 3.5).

    ``positions`` in tokens, of any shape. ``PE(p + k)`` is a rotation of ``PE(p)`` that does not depend on ``p``.
    Computed in float32 (float64 stays); a half-precision tensor has merged 257 with 256 before it gets here: give
    integers. ValueError for an odd ``dim`` or positions that are not finite.
    """
    check_dim(dim, 2, "sine_vaswani")
    _check_temperature(temperature)
    positions = check_finite(positions, "positions")
    return _alternating(positions[..., None] * _waves(dim // 2, -math.log(temperature) / (dim // 2), positions))


def sine_tensor2tensor(
    positions: Shaped[Tensor, "*n"], dim: int, temperature: float = 10000.0
) -> Float[Tensor, "*n dim"]:
    """``[sin(p w_0), sin(p w_1), ... | cos(p w_0), ...]``, ``w_i = T^(-i/(dim/2 - 1))``: concatenated, and the longest
    wavelength is exactly ``2 pi T`` (tensor2tensor ``get_timing_signal_1d``; fairseq, M2M-100, Whisper).

    ``positions`` in tokens. ValueError for an odd ``dim``, for ``dim`` 2 (0/0 in the source) and for positions that
    are not finite.
    """
    check_dim(dim, 2, "sine_tensor2tensor", least=4)
    _check_temperature(temperature)
    positions = check_finite(positions, "positions")
    return _blocks(positions[..., None] * _waves(dim // 2, -math.log(temperature) / (dim // 2 - 1), positions))


def sine_marian(positions: Shaped[Tensor, "*n"], dim: int, temperature: float = 10000.0) -> Float[Tensor, "*n dim"]:
    """``[sin(p w_0), sin(p w_1), ... | cos(p w_0), ...]``, ``w_i = T^(-2i/dim)``: Vaswani's waves, concatenated
    (Marian; RoFormer's absolute baseline; MAE's 1-D form).

    ``positions`` in tokens. In float64 inside where the device has it, as the source, and cast once. ValueError for an
    odd ``dim`` or positions that are not finite.
    """
    check_dim(dim, 2, "sine_marian")
    positions = check_finite(positions, "positions")
    exact = positions.to(_widest(positions.device))
    angles = exact[..., None] / periods(dim // 2, dim // 2, temperature, exact)
    return _blocks(angles).to(positions.dtype)


# 2-D: a grid (h, w) -> [h * w, dim]


def sine_detr(
    grid: tuple[int, int],
    dim: int,
    mask: Bool[Tensor, "b h w"] | None = None,
    temperature: float = 10000.0,
    scale: float = 2 * math.pi,
    device: torch.device | str | None = None,
) -> Float[Tensor, "*b n dim"]:
    """``y = (row + 1)/(rows + eps) * scale`` and the same for x, each as alternating sines and cosines of
    ``dim/4`` waves ``T^(-4i/dim)``; **y before x** (DETR ``PositionEmbeddingSine``, normalised; Mask2Former, SAM 2).

    ``mask [b, h, w]`` is True where a cell holds image (DETR's own mask says the opposite): counting then runs over the
    kept cells of each row and column, padding repeats the last kept value, a fully padded row is 0; result
    ``[b, h*w, dim]``. Counts are float32 always: in bfloat16 600 rows become 344. ``scale`` in radians;
    ``device`` is the mask's where there is one. ValueError for a ``dim`` that 4 does not divide, an empty grid, a mask
    of another shape.
    """
    check_dim(dim, 4, "sine_detr")
    return _normalised(grid, dim, mask, 0.0, temperature, scale, device)


def sine_deformable(
    grid: tuple[int, int],
    dim: int,
    mask: Bool[Tensor, "b h w"] | None = None,
    temperature: float = 10000.0,
    scale: float = 2 * math.pi,
    device: torch.device | str | None = None,
) -> Float[Tensor, "*b n dim"]:
    """:func:`sine_detr` at the cells' centres: ``y = (row + 1/2)/(rows + eps) * scale`` (Deformable DETR and its
    descendants).

    Arguments, result and errors as there. A fully padded row divides -1/2 by eps, as in the source: finite, and
    meaningless.
    """
    check_dim(dim, 4, "sine_deformable")
    return _normalised(grid, dim, mask, -0.5, temperature, scale, device)


def sine_mae(grid: tuple[int, int], dim: int, device: torch.device | str | None = None) -> Float[Tensor, "n dim"]:
    """``[sin x, cos x, sin y, cos y]`` in blocks of ``dim/4`` waves ``10000^(-4i/dim)``, cells counted from 0 (MAE
    ``get_2d_sincos_pos_embed``).

    The source calls its x half ``emb_h`` (mae#18): x does come first. The class token's row of zeros is the model's. In
    float64 inside where the device has it, as the source, and cast once. ValueError for a ``dim`` that 4 does not
    divide or an empty grid.
    """
    check_dim(dim, 4, "sine_mae")
    rows, columns = _indices(grid, device)
    rows, columns = rows.to(_widest(rows.device)), columns.to(_widest(rows.device))
    waves = 1 / periods(dim // 4, dim // 4, 10000.0, rows)
    return _columns_then_rows(grid, rows[:, None] * waves, columns[:, None] * waves)


def sine_moco(
    grid: tuple[int, int], dim: int, temperature: float = 10000.0, device: torch.device | str | None = None
) -> Float[Tensor, "n dim"]:
    """:func:`sine_mae` with the end point included: ``w_i = T^(-i/(dim/4 - 1))``, so the longest wavelength is exactly
    ``2 pi T`` (big_vision ``posemb_sincos_2d``, "follows the MoCo v3 logic"; vit-pytorch).

    The end point is big_vision's own: facebookresearch/moco-v3 divides by ``dim/4``. ValueError for a ``dim`` that 4
    does not divide, for ``dim`` 4 (0/0 = NaN in the source) or an empty grid.
    """
    check_dim(dim, 4, "sine_moco", least=8)
    rows, columns = _indices(grid, device)
    waves = 1 / periods(dim // 4, dim // 4 - 1, temperature, rows)
    return _columns_then_rows(grid, rows[:, None] * waves, columns[:, None] * waves)


def sine_timm(
    grid: tuple[int, int], dim: int, temperature: float = 10000.0, device: torch.device | str | None = None
) -> Float[Tensor, "n dim"]:
    """``[sin y, sin x, cos y, cos x]`` in blocks of ``dim/4`` waves ``T^(-4i/dim)``, cells counted from 0 (timm
    ``build_sincos2d_pos_embed``, its defaults): :func:`sine_mae` with the blocks in another order.

    timm's ``reverse_coord=True`` also turns the token order to column-major and is not offered. ValueError for a
    ``dim`` that 4 does not divide or an empty grid.
    """
    check_dim(dim, 4, "sine_timm")
    rows, columns = _indices(grid, device)
    waves = 1 / periods(dim // 4, dim // 4, temperature, rows)
    y, x = (rows[:, None] * waves)[:, None], (columns[:, None] * waves)[None]
    return _spread(grid, y.sin(), x.sin(), y.cos(), x.cos())


def sine_loftr(grid: tuple[int, int], dim: int, device: torch.device | str | None = None) -> Float[Tensor, "n dim"]:
    """``[sin x, cos x, sin y, cos y]`` of one wave after the other, ``w_i = 10000^(-4i/dim)``, cells counted from 1
    (LoFTR ``PositionEncodingSine`` with ``temp_bug_fix``).

    For weights trained since the fix; the released outdoor weights need :func:`sine_loftr_legacy`. ValueError for a
    ``dim`` that 4 does not divide or an empty grid.
    """
    check_dim(dim, 4, "sine_loftr")
    return _loftr(grid, dim, -math.log(10000.0) / (dim // 2) * 2, device)


def sine_loftr_legacy(
    grid: tuple[int, int], dim: int, device: torch.device | str | None = None
) -> Float[Tensor, "n dim"]:
    """:func:`sine_loftr` as it was first published: ``-log(10000) / dim // 2`` is floored to -1 (for ``dim`` above 4),
    so ``w_i = e^(-2i)`` and all but the first few waves are flat (LoFTR#41).

    The released ``outdoor_ds`` and ``indoor_ds`` weights were trained with it (LoFTR#64). Errors as there.
    """
    check_dim(dim, 4, "sine_loftr_legacy")
    return _loftr(grid, dim, -math.log(10000.0) / dim // 2 * 2, device)


# 3-D: a video (t, h, w) -> [t * h * w, dim]


def sine_mask2former_video(
    frames: int,
    grid: tuple[int, int],
    dim: int,
    mask: Bool[Tensor, "b t h w"] | None = None,
    temperature: float = 10000.0,
    scale: float = 2 * math.pi,
    device: torch.device | str | None = None,
) -> Float[Tensor, "*b n dim"]:
    """:func:`sine_detr` of each frame **plus** the same of time over all ``dim`` channels, with ``dim/2`` waves
    ``T^(-2i/dim)`` (Mask2Former for video, ``PositionEmbeddingSine3D``).

    Tokens run frame by frame, each row-major. ``mask [b, t, h, w]`` is True where a cell holds image. ``scale`` in
    radians. ValueError for a ``dim`` that 4 does not divide, no frames, an empty grid, a mask of another shape.
    """
    check_dim(dim, 4, "sine_mask2former_video")
    if frames < 1:
        raise ValueError(f"a video needs at least one frame, got {frames}")
    if mask is None:
        plane = sine_detr(grid, dim, None, temperature, scale, device)
        count = torch.arange(1, frames + 1, dtype=torch.float32, device=device)
        z = count / (count[-1:] + EPS) * scale
        time = _alternating(z[:, None] / periods(dim // 2, dim // 2, temperature, z))
        return (plane + time[:, None]).flatten(0, 1)
    _check_mask(mask, (frames, *grid))
    plane = sine_detr(grid, dim, mask.flatten(0, 1), temperature, scale)
    count = mask.cumsum(1, dtype=torch.float32)
    z = count / (count[:, -1:] + EPS) * scale
    time = _alternating(z[..., None] / periods(dim // 2, dim // 2, temperature, z))
    return plane.unflatten(0, mask.shape[:2]).flatten(1, 2) + time.flatten(1, 3)


# What they share


def check_dim(dim: int, multiple: int, name: str, least: int = 1) -> None:
    """ValueError unless ``dim`` is a positive multiple of ``multiple``, at least ``least``."""
    if dim < least or dim % multiple:
        at_least = f" of at least {least}" if least > 1 else ""
        raise ValueError(f"{name} needs a positive multiple of {multiple}{at_least} as dim, got {dim}")


def periods(n: int, last: int, temperature: float, like: Float[Tensor, "*s"]) -> Float[Tensor, " n"]:
    """``T^(i/last)``: ``n`` wavelengths over 2 pi, where and as precise as ``like``."""
    _check_temperature(temperature)
    return temperature ** (torch.arange(n, dtype=like.dtype, device=like.device) / last)


def _check_mask(mask: Shaped[Tensor, "*s"], shape: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask is boolean, True where a cell holds image, got {mask.dtype}")
    if mask.ndim != len(shape) + 1 or tuple(mask.shape[1:]) != tuple(shape):
        raise ValueError(f"a mask of the grid {tuple(shape)} is [batch, *grid], got {tuple(mask.shape)}")


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")


def _waves(n: int, log_step: float, like: Float[Tensor, "*s"]) -> Float[Tensor, " n"]:
    """``e^(i log_step)``: frequencies as tensor2tensor and LoFTR make them, where and as precise as ``like``."""
    return torch.exp(torch.arange(n, dtype=like.dtype, device=like.device) * log_step)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _alternating(angles: Float[Tensor, "*n c"]) -> Float[Tensor, "*n d"]:
    """``[sin, cos, sin, cos, ...]``."""
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def _blocks(angles: Float[Tensor, "*n c"]) -> Float[Tensor, "*n d"]:
    """``[sin, sin, ... | cos, cos, ...]``."""
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def _columns_then_rows(
    grid: tuple[int, int], y: Float[Tensor, "h c"], x: Float[Tensor, "w c"]
) -> Float[Tensor, "n dim"]:
    return _spread(grid, _blocks(x).float()[None], _blocks(y).float()[:, None])


def _spread(grid: tuple[int, int], *parts: Float[Tensor, "_ _ _"]) -> Float[Tensor, "n dim"]:
    """Channels side by side: parts ``[h, 1, c]`` of rows and ``[1, w, c]`` of columns -> ``[h*w, dim]``."""
    h, w = grid
    return torch.cat([p.expand(h, w, -1) for p in parts], dim=-1).flatten(0, 1)


def _indices(
    grid: tuple[int, int], device: torch.device | str | None, start: int = 0
) -> tuple[Float[Tensor, " h"], Float[Tensor, " w"]]:
    """Rows and columns of a grid, counted from ``start``."""
    h, w = check_grid(grid)
    rows, columns = (torch.arange(start, size + start, dtype=torch.float32, device=device) for size in (h, w))
    return rows, columns


def _normalised(
    grid: tuple[int, int],
    dim: int,
    mask: Bool[Tensor, "b h w"] | None,
    shift: float,
    temperature: float,
    scale: float,
    device: torch.device | str | None,
) -> Float[Tensor, "*b n dim"]:
    """DETR's family: ``(count + shift)/(last count + eps) * scale``, alternating waves of y, then of x."""
    if mask is None:  # plain counting: compilers rewrite a cumulative sum of ones wrongly (pytorch#189518)
        y, x = ((c + shift) / (c[-1:] + EPS) * scale for c in _indices(grid, device, start=1))
        lengths = periods(dim // 4, dim // 4, temperature, y)
        y, x = _alternating(y[:, None] / lengths), _alternating(x[:, None] / lengths)
        return _spread(grid, y[:, None], x[None])
    _check_mask(mask, check_grid(grid))
    y, x = mask.cumsum(1, dtype=torch.float32), mask.cumsum(2, dtype=torch.float32)
    y, x = (y + shift) / (y[:, -1:] + EPS) * scale, (x + shift) / (x[..., -1:] + EPS) * scale
    lengths = periods(dim // 4, dim // 4, temperature, y)
    return torch.cat([_alternating(p[..., None] / lengths) for p in (y, x)], dim=-1).flatten(1, 2)


def _loftr(
    grid: tuple[int, int], dim: int, log_step: float, device: torch.device | str | None
) -> Float[Tensor, "n dim"]:
    rows, columns = _indices(grid, device, start=1)
    waves = _waves(dim // 4, log_step, rows)
    y, x = (rows[:, None] * waves)[:, None], (columns[:, None] * waves)[None]
    h, w = grid
    parts = [p.expand(h, w, -1) for p in (x.sin(), x.cos(), y.sin(), y.cos())]
    return torch.stack(parts, dim=-1).flatten(2).flatten(0, 1)
