"""When a memory was made: SAM 2 tells its memory attention how old each remembered frame and object pointer is.

A memory frame's age picks a row of a small learned table, added to the spatial encoding of its tokens; conditioning
frames (those a person prompted) have no age and share the table's **last** row. Object pointers get sines instead, of
an age scaled by the longest one possible (sam2 ``modeling/sam2_base.py``).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from vispe.position.grid import at_least_float32, check_finite
from vispe.position.sine import check_dim, periods

CONDITIONING = 0  # the age of a frame that a person prompted, however old


class MemoryFrames(nn.Module):
    """SAM 2's ``maskmem_tpos_enc``: one learned row for each age, drawn from N(0, 0.02^2).

    ``forward(ages [n])`` -> ``[n, dim]`` in float32: 1 is the previous frame (row 0), ``frames - 1`` the oldest kept
    (row ``frames - 2``), 0 a conditioning frame (row ``frames - 1``, the last). The source counts ``t_pos`` from the
    oldest and reads row ``frames - t_pos - 1``: the same rows. ValueError for ages outside 0 .. frames - 1.
    """

    positional = ("table",)

    def __init__(self, dim: int = 64, frames: int = 7) -> None:
        super().__init__()
        if dim < 1 or frames < 1:
            raise ValueError(f"memory frames need a positive dim and number of frames, got {dim} and {frames}")
        self.table = nn.Parameter(torch.empty(frames, dim))
        nn.init.trunc_normal_(self.table, std=0.02)  # as the source: cut at +-2, a hundred deviations away

    def forward(self, ages: Int[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        frames = self.table.shape[0]
        _check_ages(ages, frames)
        return at_least_float32(self.table[(ages - 1) % frames])


def sine_sam2(positions: Shaped[Tensor, "*n"], dim: int, temperature: float = 10000.0) -> Float[Tensor, "*n dim"]:
    """``[sin(p w_0), sin(p w_0), sin(p w_1), sin(p w_1), ... | cos ...]``, ``w_i = T^(-4i/dim)``: concatenated, and
    every frequency appears **twice** (sam2 ``get_1d_sine_pe``).

    The source keeps the pairing of an alternating layout and then concatenates, so half the channels repeat; the
    weights expect it. ValueError for a ``dim`` that 4 does not divide or positions that are not finite.
    """
    check_dim(dim, 4, "sine_sam2")
    positions = check_finite(positions, "positions")
    angles = positions[..., None] / periods(dim // 4, dim // 4, temperature, positions).repeat_interleave(2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def sine_object_pointers(
    ages: Shaped[Tensor, " n"], dim: int, num_frames: int, max_pointers: int = 16
) -> Float[Tensor, "n dim"]:
    """:func:`sine_sam2` of ``age / (min(num_frames, max_pointers) - 1)``: when each object pointer was made.

    ``ages`` in frames before the current one: signed in SAM 2.1 (negative: later), absolute in SAM 2.0. The source
    divides by 0 in a video of one frame; there the only age is 0, and so is its position here. ValueError for ages
    that are not finite, or no frame or pointer at all.
    """
    if num_frames < 1 or max_pointers < 1:
        raise ValueError(f"a video and its memory hold at least one frame, got {num_frames} and {max_pointers}")
    longest = max(min(num_frames, max_pointers) - 1, 1)
    return sine_sam2(check_finite(ages, "ages") / longest, dim)


def _check_ages(ages: Shaped[Tensor, "*n"], frames: int) -> None:
    if torch.compiler.is_compiling() or ages.is_meta:
        return
    wrong = (ages < CONDITIONING) | (ages >= frames)
    if bool(wrong.any()):
        raise ValueError(f"a memory of {frames} frames has ages 0 .. {frames - 1}, got {ages[wrong][0].item()}")
