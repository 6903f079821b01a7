"""Context extension: rotary frequencies changed so that positions beyond those of training make sense.

Each function is pure, frequencies -> (frequencies, attention scale), and is always given the *original* frequencies:
nothing remembers an earlier length (transformers #25104, #25306). The scale multiplies cosine and sine, hence q and k
both, hence scores by its square: ``rotation(phases(positions, theta), attention)``.

Corrections to what circulates: NTK-aware scaling slows the *slow* pairs most and the fastest not at all; YaRN leaves
wavelengths much shorter than the trained length alone and divides the long ones, not the reverse, and changes no base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vispe.position.axial import AxisFrequencies
from vispe.position.grid import Grid, check_grid


class Extended(NamedTuple):
    """New frequencies and what cosine and sine are multiplied by."""

    theta: Float[Tensor, " pairs"]
    attention: float = 1.0


class ExtendedAxes(NamedTuple):
    """New frequencies of both axes of a grid, (theta_y, theta_x), and what cosine and sine are multiplied by."""

    theta: AxisFrequencies
    attention: float = 1.0


def interpolate(theta: Float[Tensor, " pairs"], factor: float) -> Extended:
    """PI, position interpolation: ``theta / s``, that is positions squeezed into the trained range (Chen et al. 2023).

    All pairs alike, so neighbours become s times harder to tell apart. ``s = new length / trained length``; a factor
    below 1 stretches, as EVA-02 does for grids smaller than its reference.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"factor must be positive and finite, got {factor}")
    return Extended(theta / factor)


def ntk(theta: Float[Tensor, " pairs"], factor: float) -> Extended:
    """NTK-aware: ``b' = b s^(d/(d-2))``, that is ``theta_i s^(-i/(d/2 - 1))`` (YaRN paper section 3.1).

    Pair 0 keeps its frequency and the last is divided by exactly s: high frequencies are scaled *less*. Tutorials that
    say they are "scaled more aggressively" have the right formula and the wrong explanation.
    """
    _check_factor(factor)
    pairs = _pairs(theta)
    power = torch.arange(pairs, device=theta.device, dtype=torch.float64) / (pairs - 1)
    return Extended((theta.double() * factor**-power).to(theta.dtype))


def dynamic_ntk(theta: Float[Tensor, " pairs"], factor: float, length: int, original: int) -> Extended:
    """NTK-aware with ``s' = s L'/L - (s - 1)`` for the present ``length`` L' beyond the ``original`` L, else nothing.

    Pure in the length: a short text after a long one meets the original frequencies again. Keys cached under another
    length were turned with other frequencies.
    """
    _check_factor(factor)
    _check_lengths(length, original)
    return ntk(theta, factor * length / original - (factor - 1) if length > original else 1.0)


def yarn(
    theta: Float[Tensor, " pairs"],
    factor: float,
    original: float,
    *,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
    attention: float | None = None,
) -> Extended:
    """YaRN's NTK-by-parts: a pair that turns more than ``fast`` times within the ``original`` length stays, one that
    turns less than ``slow`` times is divided by s, a linear ramp over the pair index between (Peng et al. 2023, 3.2).

    The paper's ramp is linear in turns; this is the code's (jquesnelle/yarn, transformers), which checkpoints have.
    Often told in reverse (short wavelengths scaled, long ones kept), or with an NTK base change: both wrong. The upper
    end is clamped to d - 1, not d/2 - 1, as in the code. ``truncate=False`` keeps the ramp's ends fractional (gpt-oss).
    ``attention`` *replaces* the default :func:`yarn_attention` of ``factor``. ``theta`` must be geometric, unscaled.
    """
    _check_factor(factor)
    if not 0 < slow < fast or not 0 < original < math.inf:
        raise ValueError(f"need 0 < slow < fast and a positive original length, got {slow}, {fast}, {original}")
    pairs = _pairs(theta)
    exact = theta.double()
    step = (exact[0] / exact[-1]).log() / (pairs - 1)  # ln of the ratio of neighbours: 2 ln(base) / d

    def pair_that_turns(times: float) -> Tensor:
        return (exact[0] * original / (2 * math.pi * times)).log() / step

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if truncate:
        low, high = low.floor(), high.ceil()
    low, high = low.clamp(min=0), high.clamp(max=2 * pairs - 1)
    high = torch.where(high == low, high + 0.001, high)
    ramp = ((torch.arange(pairs, device=theta.device) - low) / (high - low)).clamp(0, 1)
    return Extended(
        (exact / factor * ramp + exact * (1 - ramp)).to(theta.dtype),
        yarn_attention(factor) if attention is None else attention,
    )


def yarn_attention(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """``sqrt(1/t) = 0.1 ln(s) + 1``: what q and k are each multiplied by, logits by its square (YaRN eq. 21-22).

    t itself is ``(0.1 ln s + 1)^-2``, below 1; tutorials give t = 0.1 ln s + 1 and multiply logits by its root, wrong
    twice. With both ``mscale`` and ``mscale_all_dim`` (DeepSeek) the ratio of the two; only one of them is ignored,
    as transformers does.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"factor must be positive and finite, got {factor}")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def longrope(
    theta: Float[Tensor, " pairs"],
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    length: int,
    original: int,
    *,
    factor: float,
    attention: float | None = None,
) -> Extended:
    """LongRoPE: ``theta_i / lambda_i`` with searched lambda, the long list iff ``length`` > ``original`` (Ding et al.
    2024).

    At exactly the original length the short list still holds. Keep the choice for the life of one key cache.
    ``factor`` is the longest length over the original; the attention scale is ``sqrt(1 + ln s / ln original)``.
    """
    _check_lengths(length, original)
    chosen = long_factor if length > original else short_factor
    if len(short_factor) != len(theta) or len(long_factor) != len(theta):
        raise ValueError(f"need {len(theta)} factors a list, got {len(short_factor)} short, {len(long_factor)} long")
    if not all(0 < value < math.inf for value in chosen):
        raise ValueError(f"LongRoPE's factors must be positive and finite, got {list(chosen)}")
    if attention is None:
        attention = _longrope_attention(factor, original)
    return Extended(theta / torch.tensor(chosen, dtype=theta.dtype, device=theta.device), attention)


# Per axis: a grid (h, w) grows differently along y and x, and each axis has its own d/4 frequencies.


def interpolate_axes(theta: Float[Tensor, " quarter"], source: Grid, target: Grid) -> ExtendedAxes:
    """PI per axis: exactly EVA-02's reference grid, also when an axis shrinks."""
    return _per_axis(lambda t, old, new: interpolate(t, new / old), theta, source, target)


def ntk_axes(theta: Float[Tensor, " quarter"], source: Grid, target: Grid) -> ExtendedAxes:
    """NTK-aware per axis, by its own growth ``max(1, target / source)``. Dynamic by nature: the grid is the length."""
    return _per_axis(lambda t, old, new: ntk(t, max(1.0, new / old)), theta, source, target)


def yarn_axes(
    theta: Float[Tensor, " quarter"],
    source: Grid,
    target: Grid,
    *,
    fast: float = 2.0,
    slow: float = 0.25,
    truncate: bool = False,
    attention: float | None = None,
) -> ExtendedAxes:
    """YaRN per axis with thresholds for short axes: the text's 32 turns never fit into 14 to 37 cells, so that with
    them YaRN is nearly plain PI (d = 64, 14 cells, s = 2: divided by 1, 1.2, 1.5, 2, 2, ...).

    An axis that does not grow keeps its frequencies. There is one attention scale for a head: the geometric mean of the
    two axes' (ours; no paper gives one), unless ``attention`` is given.
    """

    def extend(t: Tensor, old: int, new: int) -> Extended:
        return yarn(t, max(1.0, new / old), old, fast=fast, slow=slow, truncate=truncate, attention=attention)

    return _per_axis(extend, theta, source, target)


def longrope_axes(
    theta: Float[Tensor, " quarter"],
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    source: Grid,
    target: Grid,
) -> ExtendedAxes:
    """LongRoPE per axis: the long list on an axis of more cells than the source, scale from its own growth."""

    def extend(t: Tensor, old: int, new: int) -> Extended:
        return longrope(t, short_factor, long_factor, new, old, factor=new / old)

    return _per_axis(extend, theta, source, target)


def _per_axis(
    extend: Callable[[Tensor, int, int], Extended], theta: Tensor, source: Grid, target: Grid
) -> ExtendedAxes:
    check_grid(source, "source"), check_grid(target, "target")
    y, x = (extend(theta, old, new) for old, new in zip(source, target, strict=True))
    return ExtendedAxes((y.theta, x.theta), math.sqrt(y.attention * x.attention))


def _longrope_attention(factor: float, original: int) -> float:
    if not 0 < factor < math.inf:
        raise ValueError(f"factor must be positive and finite, got {factor}")
    if factor <= 1:
        return 1.0
    if original < 2:
        raise ValueError(
            f"the attention scale divides by ln(original): it needs an original of at least 2, got {original}"
        )
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _pairs(theta: Tensor) -> int:
    if theta.ndim != 1 or len(theta) < 2:
        raise ValueError(f"theta must be one row of at least two frequencies, got shape {tuple(theta.shape)}")
    return len(theta)


def _check_factor(factor: float) -> None:
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor must be finite and at least 1, got {factor}")


def _check_lengths(length: int, original: int) -> None:
    if length <= 0 or original <= 0:
        raise ValueError(f"lengths must be positive, got length {length}, original {original}")
