"""Rotary encoding: queries and keys are turned by an angle that grows with position, so a score sees only differences.

Three steps, each once per forward: positions -> angles ``[..., n, d/2]`` (:func:`phases` here, grids in ``axial.py``),
angles -> a turn ``[..., n, d/2, 2]`` of cosine and sine (:func:`rotation`), and inside every layer only :func:`rotate`.
The [d, d] matrix is never formed, values are never turned, and tokens without a place keep angle zero
(:func:`skip_tokens`). Positions, frequencies and angles are float32, multiplied elementwise.

Which two channels form a pair is the *layout*: adjacent (0,1), (2,3), ... is ``interleaved`` (RoFormer section 3.2.2,
LightGlue, timm, SAM 2, GPT-J), (i, i + d/2) is ``half`` (NeoX, transformers, DINOv3). The angles are the same. Weights
of one layout run in the other without an error and give nonsense; :func:`relayout` converts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from vispe.position.grid import at_least_float32, check_finite

Layout = Literal["interleaved", "half"]


def check_layout(layout: str) -> None:
    if layout not in ("interleaved", "half"):
        raise ValueError(f"layout must be 'interleaved' or 'half', got {layout!r}")


def frequencies(dim: int, base: float = 10000.0) -> Float[Tensor, " pairs"]:
    """``theta_i = base^(-2i/dim)`` for the ``dim/2`` pairs of a head, float32 (RoFormer section 3.2.2).

    Divided as timm and transformers divide, so that a checkpoint meets the very bits it was trained with.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary needs a positive even dim, got {dim}")
    if not 0 < base < math.inf:
        raise ValueError(f"base must be positive and finite, got {base}")
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def phases(positions: Shaped[Tensor, "*n"], theta: Float[Tensor, " pairs"]) -> Float[Tensor, "*n pairs"]:
    """Angles ``position * theta_i`` of a sequence: ``[..., n]`` and ``[d/2]`` -> ``[..., n, d/2]``, float32.

    An elementwise product: a matmul would be lowered to bfloat16 by autocast, or to TF32, and positions would collide.
    """
    check_finite(positions)
    if theta.ndim != 1:
        raise ValueError(f"theta must be one row of frequencies, got shape {tuple(theta.shape)}")
    return at_least_float32(positions)[..., None] * at_least_float32(theta)


def skip_tokens(angles: Float[Tensor, "*b n pairs"], prefix: int, suffix: int = 0) -> Float[Tensor, "*b m pairs"]:
    """Angle zero, that is no rotation at all, for ``prefix`` tokens before and ``suffix`` tokens after the positions.

    The count is explicit (class and register tokens before, SAM 2's object pointers after). Multiplying by exactly 1
    and 0 costs less than cutting and joining q and k in every layer. An attention scale given to :func:`rotation`
    reaches these tokens too: the temperature belongs to every score.
    """
    if prefix < 0 or suffix < 0:
        raise ValueError(f"token counts must not be negative, got prefix {prefix}, suffix {suffix}")
    return F.pad(angles, (0, 0, prefix, suffix))


def rotation(
    angles: Float[Tensor, "*n pairs"], scale: float = 1.0, layout: Layout = "interleaved"
) -> Float[Tensor, "*n pairs 2"]:
    """``angles [..., d/2]`` in radians -> ``[..., d/2, 2]`` of (cos, sin), float32 (float64 stays).

    ``scale`` multiplies both: the attention scale of YaRN and LongRoPE. ``layout`` decides only how the numbers lie in
    memory (pairs for the complex form, two tables of d/2 for the half form); any turn works with any layout.
    """
    check_layout(layout)
    angles = at_least_float32(angles)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return torch.stack((cos, sin), -1) if layout == "interleaved" else torch.stack((cos, sin)).movedim(0, -1)


def rotate(
    x: Float[Tensor, "*n d"], turn: Float[Tensor, "*m pairs 2"], layout: Layout = "interleaved"
) -> Float[Tensor, "*n d"]:
    """Turn the pairs of ``x [..., d]`` by ``turn`` (from :func:`rotation`, broadcast over ``x``'s leading axes).

    Eager float32 on the CPU multiplies interleaved pairs as complex numbers (one pass over memory); elsewhere the real
    form, which compilers fuse and exporters know. All give the same numbers to rounding. Half precision is turned in
    float32 and cast once. Fastest compiled and on a GPU: the ``half`` layout.
    """
    if not x.is_floating_point():
        raise ValueError(f"queries and keys are floating point numbers, got {x.dtype}")
    if x.dtype.itemsize < 4:
        return rotate(at_least_float32(x), turn, layout).to(x.dtype)
    compiling = torch.compiler.is_compiling()
    _check_turn(x, turn, layout, compiling)
    if layout == "half":
        return _rotate_half(x, turn.to(x.dtype), compiling)
    pairs = x.unflatten(-1, (-1, 2))
    if not compiling and x.device.type == "cpu" and _viewable(pairs) and _viewable(turn):
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turn)).flatten(-2)
    cos, sin = turn.to(x.dtype).unbind(-1)
    a, b = pairs.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def _rotate_half(x: Float[Tensor, "*n d"], turn: Float[Tensor, "*m pairs 2"], compiling: bool) -> Tensor:
    """The two halves with tables of d/2: no full-width table, no copy of ``rotate_half(x)``."""
    cos, sin = turn.unbind(-1)
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    if compiling:  # a stack fuses into one loop, a cat into two
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -2).flatten(-2)
    # In place on fresh products only, which autograd does not keep.
    return torch.cat(((a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)), -1)


def _viewable(x: Tensor) -> bool:
    """Whether the last axis can be read as complex numbers where it lies."""
    *steps, last = x.stride()
    return x.dtype == torch.float32 and last == 1 and not any(step % 2 for step in (x.storage_offset(), *steps))


def _check_turn(x: Tensor, turn: Tensor, layout: str, compiling: bool) -> None:
    check_layout(layout)
    if turn.ndim < 2 or turn.shape[-1] != 2:
        raise ValueError(f"turn must be [..., d/2, 2] from rotation(), got shape {tuple(turn.shape)}")
    if x.shape[-1] != 2 * turn.shape[-2]:
        raise ValueError(f"x has {x.shape[-1]} channels, turn {turn.shape[-2]} pairs: see rotate_partial")
    if compiling or turn.ndim == 2:  # while compiling shapes may be symbols
        return
    tokens = x.shape[-2] if x.ndim > 1 else 1
    if turn.shape[-3] not in (1, tokens):
        raise ValueError(f"turn holds {turn.shape[-3]} positions for {tokens} tokens: see skip_tokens for prefixes")


def rotate_partial(
    x: Float[Tensor, "*n d"], turn: Float[Tensor, "*m pairs 2"], layout: Layout = "interleaved"
) -> Float[Tensor, "*n d"]:
    """Turn only the first ``2 * pairs`` channels of each head; the rest carry no position (GPT-J, NeoX, Phi)."""
    dim = 2 * turn.shape[-2]
    if dim > x.shape[-1]:
        raise ValueError(f"rotary dim {dim} is more than the {x.shape[-1]} channels of x")
    return torch.cat((rotate(x[..., :dim], turn, layout), x[..., dim:]), -1)


def relayout(
    weight: Shaped[Tensor, " rows *columns"], head_dim: int, *, to: Layout, rotary_dim: int | None = None
) -> Shaped[Tensor, " rows *columns"]:
    """Reorder the rows of a q or k projection from the other layout ``to`` this one: same scores, other pairs.

    Per head, half = interleaved[0::2] ++ interleaved[1::2]. Takes the weight ``[heads * head_dim, in]``, its bias
    ``[heads * head_dim]`` and the per-head norm's ``[head_dim]``. Never values or the output projection.
    ``rotary_dim``: only the first channels of a head, for partial rotary. There and back is the identity.
    """
    check_layout(to)
    dim = head_dim if rotary_dim is None else rotary_dim
    if dim <= 0 or dim % 2 or dim > head_dim:
        raise ValueError(f"rotary dim must be even and within the head_dim {head_dim}, got {dim}")
    if weight.ndim == 0 or weight.shape[0] % head_dim:
        raise ValueError(f"rows must be a multiple of head_dim {head_dim}, got shape {tuple(weight.shape)}")
    heads = weight.unflatten(0, (-1, head_dim))
    turned, rest = heads[:, :dim], heads[:, dim:]
    inner = (dim // 2, 2) if to == "half" else (2, dim // 2)
    turned = turned.unflatten(1, inner).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, rest), 1).flatten(0, 1)


def mrope_chunked(
    positions: Shaped[Tensor, " axes *n"], theta: Float[Tensor, " pairs"], sections: Sequence[int]
) -> Float[Tensor, "*n pairs"]:
    """M-RoPE of Qwen2-VL: pairs [0, s0) see time, [s0, s0+s1) height, the last s2 width; ``positions [3, ..., n]``.

    One row of 1-D frequencies is cut, so width gets only the slowest ones. Text has three equal positions: 1-D rotary.
    """
    _check_sections(positions, sections)
    if sum(sections) != theta.shape[-1]:
        raise ValueError(f"sections {tuple(sections)} must sum to the {theta.shape[-1]} pairs of a head")
    parts = phases(positions, theta).split(list(sections), -1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)], -1)


def mrope_interleaved(
    positions: Shaped[Tensor, " axes *n"], theta: Float[Tensor, " pairs"], sections: Sequence[int]
) -> Float[Tensor, "*n pairs"]:
    """M-RoPE of Qwen3-VL: pairs go time, height, width, time, ... so that each axis sees fast and slow frequencies.

    Height holds pairs 1, 4, 7, ... below ``3 * sections[1]``, width 2, 5, 8, ... below ``3 * sections[2]``, time all
    others; ``sections[0]`` is what is left over. Bounds beyond the head are clamped, as in transformers and timm.
    """
    _check_sections(positions, sections)
    pair = torch.arange(theta.shape[-1], device=positions.device)
    height = (pair % 3 == 1) & (pair < 3 * sections[1])
    width = (pair % 3 == 2) & (pair < 3 * sections[2])
    time_angle, y_angle, x_angle = phases(positions, theta).unbind(0)
    return torch.where(height, y_angle, torch.where(width, x_angle, time_angle))


def _check_sections(positions: Tensor, sections: Sequence[int]) -> None:
    if positions.ndim < 2 or positions.shape[0] != 3:
        raise ValueError(f"positions must be [3, ..., n] (time, height, width), got shape {tuple(positions.shape)}")
    if len(sections) != 3 or min(sections) < 0:
        raise ValueError(f"sections must be three counts of pairs, got {tuple(sections)}")


def decay_bound(
    distance: Shaped[Tensor, "*n"], dim: int, base: float = 10000.0, *, theta: Float[Tensor, " pairs"] | None = None
) -> Float[Tensor, "*n"]:
    """``(1/(d/2)) sum_j |S_j|``, ``S_j = sum_{i<j} exp(1j * distance * theta_i)``: how far a score can fall with
    distance.

    RoFormer section 3.4.3 bounds the score by Abel summation with the sums of rotations; at distance 0 it is
    ``(d/2 + 1)/2``. It falls on the whole, not at every step: a bound, no promise that attention decays. ``theta``
    replaces the frequencies of ``base``: extended ones (``scaling.py``). ValueError if they are not ``dim/2``.
    """
    made = frequencies(dim, base) if theta is None else theta
    if made.shape != (dim // 2,):
        raise ValueError(f"dim {dim} has {dim // 2} frequencies, got theta of shape {tuple(made.shape)}")
    angles = phases(distance, made.to(distance.device))
    return torch.hypot(angles.cos().cumsum(-1), angles.sin().cumsum(-1)).mean(-1)


class LearnedBasis(nn.Module):
    """Angles as a learned linear mix of the coordinates: ``W_r p`` (LightGlue section 3.1; Li et al. 2021, learnable
    Fourier).

    ``forward(positions [..., n, dims])`` -> rotation ``[..., n, head_dim/2, 2]``. Computed elementwise in float32 even
    under autocast: a half-precision or TF32 matmul would blur positions. ValueError for another number of coordinates;
    whether they are finite is asked where they are pixels (``grid.check_inside``), once for all layers.
    """

    positional = ("weight",)

    def __init__(self, dims: int, head_dim: int, gamma: float = 1.0) -> None:
        super().__init__()
        if head_dim <= 0 or head_dim % 2:
            raise ValueError(f"rotary needs a positive even head_dim, got {head_dim}")
        self.weight = nn.Parameter(torch.randn(head_dim // 2, dims) * gamma**-2)

    def forward(self, positions: Float[Tensor, "*n dims"]) -> Float[Tensor, "*n pairs 2"]:
        if positions.ndim == 0 or positions.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"positions must be [..., n, {self.weight.shape[1]}], got shape {tuple(positions.shape)}")
        weight, positions = at_least_float32(self.weight), at_least_float32(positions)
        # A short loop over the 2 or 4 coordinates instead of a [n, head_dim/2, dims] product.
        angles = torch.stack([positions[..., i, None] * weight[:, i] for i in range(weight.shape[1])]).sum(0)
        return rotation(angles)
