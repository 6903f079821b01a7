"""Rotary encoding of a 2-D grid: half of a head's pairs turn with one axis, half with the other (or all with both).

Every function returns angles ``[n, d/2]`` for the row-major cells of a grid (h, w): token k sits at row k // w, column
k % w. They differ in origin, unit, base and in which axis comes first, and each is named by its source, because weights
of one are nonsense under another. ``theta=(theta_y, theta_x)`` replaces the frequencies of both axes: that is where
context extension (``scaling.py``) enters. EVA's reference grid and DINOv3's normalised coordinates are position
interpolation already; do not extend them a second time.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vispe.position.grid import Grid, at_least_float32, check_finite, check_grid
from vispe.position.rotary import frequencies, skip_tokens

AxisFrequencies = tuple[Tensor, Tensor]  # (theta_y, theta_x), each [d/4]
Normalize = Literal["separate", "max", "min"]


def axis_frequencies(head_dim: int, base: float) -> Float[Tensor, " quarter"]:
    """``base^(-4i/head_dim)``: the d/4 frequencies of one of two axes."""
    if head_dim <= 0 or head_dim % 4:
        raise ValueError(f"axial rotary needs a head_dim that 4 divides, got {head_dim}")
    return frequencies(head_dim // 2, base)


def cells(grid: Grid, device: torch.device | None = None) -> Float[Tensor, "n 2"]:
    """``(x, y)`` of each cell of a grid (h, w), row-major, counted from 0 in float32: ``[h * w, 2]``."""
    h, w = check_grid(grid)
    y = torch.arange(h, device=device, dtype=torch.float32)[:, None].expand(h, w)
    x = torch.arange(w, device=device, dtype=torch.float32).expand(h, w)
    return torch.stack((x, y), -1).flatten(0, 1)


def axial_ropevit(
    grid: Grid,
    head_dim: int,
    base: float = 100.0,
    *,
    theta: AxisFrequencies | None = None,
    device: torch.device | None = None,
) -> Float[Tensor, "n pairs"]:
    """rope-vit ``compute_axial_cis`` (Heo et al. 2024, section 3.2): cell indices, x pairs then y pairs, base 100."""
    theta_y, theta_x = _axes(head_dim, base, theta, device)
    x, y = cells(grid, device).unbind(-1)
    return _angles(x, theta_x, y, theta_y)


def axial_timm(
    grid: Grid,
    head_dim: int,
    base: float = 10000.0,
    *,
    reference: Grid | None = None,
    theta: AxisFrequencies | None = None,
    device: torch.device | None = None,
) -> Float[Tensor, "n pairs"]:
    """timm ``RotaryEmbeddingCat`` and EVA-02: y pairs then x pairs, base 10000.

    ``reference`` is the grid of pre-training: cell i of n stands at ``i / n * reference``, per axis.
    """
    theta_y, theta_x = _axes(head_dim, base, theta, device)
    x, y = _stretched(cells(grid, device), grid, reference).unbind(-1)
    return _angles(y, theta_y, x, theta_x)


def axial_pe(
    grid: Grid,
    head_dim: int,
    base: float = 10000.0,
    *,
    reference: Grid | None = (24, 24),
    theta: AxisFrequencies | None = None,
    device: torch.device | None = None,
) -> Float[Tensor, "n pairs"]:
    """Perception Encoder: cells counted from 1 (0 is the class token's), x pairs then y pairs, base 10000.

    ``reference`` as timm's weights use it, (24, 24) for a 336-pixel model. Put the class token in *front* with
    ``skip_tokens(angles, 1)``: the released code appended its row at the end (timm #2478), the weights were not trained
    so.
    """
    theta_y, theta_x = _axes(head_dim, base, theta, device)
    x, y = _stretched(cells(grid, device) + 1, grid, reference).unbind(-1)
    return _angles(x, theta_x, y, theta_y)


def axial_sam2(
    grid: Grid,
    head_dim: int,
    base: float = 10000.0,
    *,
    theta: AxisFrequencies | None = None,
    device: torch.device | None = None,
) -> Float[Tensor, "n pairs"]:
    """SAM 2 memory attention: rope-vit's axial form with base 10000, for one frame of queries.

    The original guesses a square from the token count (a 32 x 128 grid becomes 64 x 64); here the grid is given.
    """
    return axial_ropevit(grid, head_dim, base, theta=theta, device=device)


def axial_efficient_loftr(
    grid: Grid,
    width: int,
    base: float = 10000.0,
    *,
    theta: AxisFrequencies | None = None,
    device: torch.device | None = None,
) -> Float[Tensor, "n pairs"]:
    """EfficientLoFTR (Wang et al. 2024, section 3.2): ``width`` is the *model's*, pairs go y, x, y, x, ..., base 10000.

    Turn queries and keys before they are parted into heads: the first head gets the fastest frequencies of both axes,
    the last the slowest. The original counts cells from 1, which no score sees.
    """
    theta_y, theta_x = _axes(width, base, theta, device)
    x, y = cells(grid, device).unbind(-1)
    return torch.stack((y[:, None] * theta_y, x[:, None] * theta_x), -1).flatten(1)


def sam2_keys(angles: Float[Tensor, "n pairs"], num_keys: int, num_excluded: int = 0) -> Float[Tensor, "m pairs"]:
    """Angles of SAM 2's memory keys: those of one frame repeated, then ``num_excluded`` object pointers unturned.

    ``num_k_exclude_rope`` and ``rope_k_repeat`` of the original; every frame must be whole.
    """
    frames, rest = divmod(num_keys - num_excluded, angles.shape[-2])
    if num_excluded < 0 or frames < 0 or rest:
        raise ValueError(
            f"{num_keys} keys without {num_excluded} excluded are not whole frames of {angles.shape[-2]} tokens"
        )
    return skip_tokens(angles.repeat(frames, 1), 0, num_excluded)


def dinov3_coordinates(
    grid: Grid, normalize: Normalize = "separate", device: torch.device | None = None
) -> Float[Tensor, "n 2"]:
    """``(x, y)`` of cell centres, ``2 (i + 0.5) / N - 1``: N is each axis' own size, or the larger or smaller of both.

    ``separate`` fills [-1, 1] on both axes; ``max`` stays inside it, ``min`` leaves it, and both keep cells square.
    """
    h, w = check_grid(grid)
    if normalize not in ("separate", "max", "min"):
        raise ValueError(f"normalize must be 'separate', 'max' or 'min', got {normalize!r}")
    ny, nx = {"separate": (h, w), "max": (max(h, w),) * 2, "min": (min(h, w),) * 2}[normalize]
    x, y = (cells(grid, device) + 0.5).unbind(-1)
    return 2.0 * torch.stack((x / nx, y / ny), -1) - 1.0


def augment_dinov3(
    xy: Float[Tensor, "n 2"],
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "n 2"]:
    """DINOv3's training-time change of all coordinates at once: add U(-shift, shift) per axis, multiply each axis by a
    log-uniform factor in [1/jitter, jitter], then both by one in [1/rescale, rescale].

    Draws y before x, as the original, so that one seed gives its numbers. Call it in training only.
    """
    if shift is not None and not 0 <= shift < math.inf:
        raise ValueError(f"shift must be finite and not negative, got {shift}")
    for name, value in (("jitter", jitter), ("rescale", rescale)):
        if value is not None and not 1 <= value < math.inf:
            raise ValueError(f"{name} is a factor of at least 1, got {value}")

    def draw(count: int, limit: float) -> Tensor:
        return xy.new_empty(count).uniform_(-limit, limit, generator=generator)

    if shift is not None:
        xy = xy + draw(2, shift).flip(0)
    if jitter is not None:
        xy = xy * draw(2, math.log(jitter)).exp().flip(0)
    if rescale is not None:
        xy = xy * draw(1, math.log(rescale)).exp()
    return xy


def axial_dinov3(
    xy: Float[Tensor, "n 2"], head_dim: int, base: float = 100.0, *, theta: AxisFrequencies | None = None
) -> Float[Tensor, "n pairs"]:
    """DINOv3: ``2 pi c / period_j`` with ``period_j = base^(2j/(d/2))``, y pairs then x pairs, for the ``half`` layout.

    ``xy`` from :func:`dinov3_coordinates`, in training through :func:`augment_dinov3`. Periods are float32: kept in
    bfloat16 they train worse (dinov3 #181).
    """
    check_finite(xy, "xy")
    if xy.ndim < 2 or xy.shape[-1] != 2:
        raise ValueError(f"xy must be [n, 2], got shape {tuple(xy.shape)}")
    theta_y, theta_x = _axes(head_dim, base, theta, xy.device)
    x, y = (2 * math.pi * at_least_float32(xy)).unbind(-1)
    if theta is not None:
        return _angles(y, theta_y, x, theta_x)
    # Divided by periods, as the original: with `min` angles pass 100 and a rounded 1 / period would show.
    period = base ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=xy.device) / (head_dim // 2))
    return torch.cat((y[..., None] / period, x[..., None] / period), -1)


class MixedAxial(nn.Module):
    """rope-vit's mixed rotary: ``angle = x fx + y fy`` with learned frequencies per layer and head, base 10.

    Starts as two perpendicular directions, turned at random in each head: magnitudes ``base^(-4i/d)``. ``forward(xy
    [n, 2]) -> angles [depth, heads, n, d/2]``, all layers at once, from cell indices (:func:`cells`). ``weight [2,
    depth, heads, d/2]`` holds fx and fy as timm's ``freqs`` (Heo et al. 2024, section 3.2); no weight decay.
    """

    positional = ("weight",)

    def __init__(self, head_dim: int, num_heads: int, depth: int = 1, base: float = 10.0) -> None:
        super().__init__()
        if num_heads <= 0 or depth <= 0:
            raise ValueError(f"need at least one head and layer, got num_heads {num_heads}, depth {depth}")
        magnitude = axis_frequencies(head_dim, base)
        start = torch.rand(depth, num_heads, 1) * 2 * math.pi
        across = start + math.pi / 2
        fx = torch.cat((magnitude * start.cos(), magnitude * across.cos()), -1)
        fy = torch.cat((magnitude * start.sin(), magnitude * across.sin()), -1)
        self.weight = nn.Parameter(torch.stack((fx, fy)))

    def forward(self, xy: Float[Tensor, "n 2"]) -> Float[Tensor, "depth heads n pairs"]:
        check_finite(xy, "xy")
        if xy.ndim != 2 or xy.shape[-1] != 2:
            raise ValueError(f"xy must be [n, 2], got shape {tuple(xy.shape)}")
        fx, fy = at_least_float32(self.weight)[..., None, :].unbind(0)
        x, y = at_least_float32(xy)[..., None].unbind(-2)
        return x * fx + y * fy


def _axes(
    head_dim: int, base: float, theta: AxisFrequencies | None, device: torch.device | None
) -> tuple[Tensor, Tensor]:
    """The frequencies of y and x: both from the base, or those given."""
    made = axis_frequencies(head_dim, base).to(device)
    if theta is None:
        return made, made
    for given in theta:
        if given.shape != made.shape:
            raise ValueError(f"theta must be (theta_y, theta_x), each [{len(made)}], got {tuple(given.shape)}")
    return at_least_float32(theta[0]).to(device), at_least_float32(theta[1]).to(device)


def _angles(first: Tensor, theta_first: Tensor, second: Tensor, theta_second: Tensor) -> Tensor:
    """Two axes side by side, elementwise in float32. No look at the numbers: a grid is finite by construction."""
    return torch.cat((first[..., None] * theta_first, second[..., None] * theta_second), -1)


def _stretched(xy: Float[Tensor, "n 2"], grid: Grid, reference: Grid | None) -> Float[Tensor, "n 2"]:
    """Cells of ``grid`` laid over the ``reference`` grid (EVA-02): per axis ``i / n * reference``."""
    if reference is None:
        return xy
    (h, w), (source_h, source_w) = grid, check_grid(reference)
    x, y = xy.unbind(-1)
    return torch.stack((x / w * source_w, y / h * source_h), -1)
