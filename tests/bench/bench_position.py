"""Rotary and resampling as ratios to the peers, in turns in one process. ``python -m tests.bench.bench_position``

Rotary turns q and k of a ViT-B/16 at 512 pixels (batch 8) and of LightGlue at 2048 keypoints, float32, tables given on
both sides. Compiled, both sides are compiled; ``q * c`` reads and writes what a rotation must and does nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rotary_embedding_torch import apply_rotary_emb
from scm_lightglue.lightglue import apply_cached_rotary_emb
from timm.layers import apply_rot_embed_cat
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.bench.timing import in_turns
from vispe.position.resample import RECIPES, ResampleRecipe, resample
from vispe.position.rotary import Layout, frequencies, phases, rotate, rotation

SHAPES = ((8, 12, 1025, 64), (1, 4, 2048, 64))
Pair = Callable[[Tensor, Tensor], object]


def ours(layout: Layout, angles: Tensor) -> Pair:
    turn = rotation(angles, layout=layout)
    return lambda q, k: (rotate(q, turn, layout), rotate(k, turn, layout))


def peers(angles: Tensor) -> dict[str, tuple[Layout, Pair]]:
    """Each peer's own call with its own tables, and the layout of ours that gives the same numbers."""
    adjacent, halves = angles.repeat_interleave(2, -1), torch.cat((angles, angles), -1)
    light = torch.stack((adjacent.cos(), adjacent.sin()))[:, None, None]
    cat = torch.cat((adjacent.sin(), adjacent.cos()), -1)
    cos, sin = halves.cos()[None], halves.sin()[None]
    return {
        "official LightGlue": (
            "interleaved",
            lambda q, k: (apply_cached_rotary_emb(light, q), apply_cached_rotary_emb(light, k)),
        ),
        "timm": ("interleaved", lambda q, k: (apply_rot_embed_cat(q, cat), apply_rot_embed_cat(k, cat))),
        "rotary-embedding-torch": (
            "interleaved",
            lambda q, k: (apply_rotary_emb(adjacent, q), apply_rotary_emb(adjacent, k)),
        ),
        "transformers": ("half", lambda q, k: apply_rotary_pos_emb(q, k, cos, sin)),
    }


def compiled(function: Pair) -> Pair:
    return torch.compile(function, fullgraph=True, dynamic=False)


def rotary(rounds: int) -> None:
    print("rotary of q and k      shape              layout       eager  compiled   (peer / ours)")
    for shape in SHAPES:
        q, k = torch.randn(shape), torch.randn(shape)
        angles = phases(torch.arange(shape[2]), frequencies(shape[3]))
        own: dict[Layout, Pair] = {layout: ours(layout, angles) for layout in ("interleaved", "half")}
        fast = {layout: compiled(function) for layout, function in own.items()}
        for name, (layout, peer) in peers(angles).items():
            for a, b in zip(own[layout](q, k), peer(q, k), strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
            eager, both = against(own[layout], peer, q, k, rounds), against(fast[layout], compiled(peer), q, k, rounds)
            print(f"{name:22} {shape!s:18} {layout:11} {eager:6.2f} {both:9.2f}", flush=True)
        c = torch.rand(shape[-2:])
        copy = compiled(lambda q, k, c=c: (q * c, k * c))
        for layout, function in fast.items():
            ratio = against(copy, function, q, k, rounds)
            print(f"{'time over q * c':22} {shape!s:18} {layout:11}        {ratio:9.2f}", flush=True)


def against(mine: Pair, theirs: Pair, q: Tensor, k: Tensor, rounds: int) -> float:
    return in_turns(lambda: mine(q, k), lambda: theirs(q, k), rounds)[0]


def reference(table: Tensor, recipe: ResampleRecipe) -> Tensor:
    """F.interpolate from 37x37 to 24x24, with the steps around it that every code base takes."""
    mode = {"linear": "bilinear", "cubic": "bicubic"}[recipe.kernel]
    cells = table.reshape(1, 37, 37, -1).permute(0, 3, 1, 2)
    moved = F.interpolate(
        cells, size=(24, 24), mode=mode, antialias=recipe.antialias, align_corners=recipe.align_corners
    )
    return moved.permute(0, 2, 3, 1).reshape(1, 24 * 24, -1)


def resampling(rounds: int) -> None:
    print("resampling 37x37 -> 24x24, 768 channels      F.interpolate / ours   ours, ms")
    table = torch.randn(1, 37 * 37, 768)
    for name, recipe in RECIPES.items():
        if recipe.kernel == "geometric":  # no such mode there
            continue
        ratio, seconds = in_turns(
            lambda r=recipe: resample(table, (37, 37), (24, 24), r), lambda r=recipe: reference(table, r), rounds
        )
        print(f"{name:42} {ratio:22.2f} {seconds * 1e3:10.2f}", flush=True)


@torch.inference_mode()
def main(rounds: int = 31, threads: int = 2) -> None:
    torch.set_num_threads(threads)
    rotary(rounds)
    resampling(rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    words = parser.parse_args()
    main(words.rounds, words.threads)
