"""Mask2Former against transformers' with the same weights: forward, and a training step with its loss and backward.
``python -m tests.bench.bench_mask2former``

In turns in one process, float32, eager, one image with eight objects, Swin-T as published. The ratio is transformers'
time over ours: 1 is equal, below 0.95 too slow. In eval mode transformers makes the masks of all layers, vispe the
last layer's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import Tensor, nn

import vispe
from tests.bench.timing import in_turns
from vispe.losses.masks import mask_loss

STAGES = [f"stage{i}" for i in range(1, 5)]


def forward(model: nn.Module, image: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return model(image)

    return run


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return run


def objects(size: int, n: int = 8) -> tuple[Tensor, Tensor]:
    """Labels and masks of rectangles."""
    masks = torch.zeros(n, size, size, dtype=torch.bool)
    for i in range(n):
        masks[i, i * size // n :, : size // 2 + i * size // 32] = True
    return torch.randint(0, 133, (n,)), masks


def main(rounds: int = 5, threads: int = 1, sizes: tuple[int, ...] = (256, 320)) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    swin = transformers.SwinConfig(out_features=STAGES, drop_path_rate=0.0)
    config = transformers.Mask2FormerConfig(backbone_config=swin, num_labels=133)
    peer = transformers.Mask2FormerForUniversalSegmentation(config).eval()
    model = vispe.load("mask2former_swin_tiny", peer.state_dict(), origin="transformers", drop_path=0.0)
    print("size  pass            transformers / ours   ours, ms")
    for size in sizes:
        image, (labels, masks) = torch.randn(1, 3, size, size), objects(size)
        given = {"mask_labels": [masks.float()], "class_labels": [labels]}
        ours = partial(_ours, model, image, {"labels": labels, "masks": masks})
        theirs = partial(_theirs, peer, image, given)
        for name, runs in (
            ("forward", (forward(model, image), forward(peer, image))),
            ("training step", (step(model, ours), step(peer, theirs))),
        ):
            model.train(name != "forward")
            peer.train(name != "forward")
            ratio, seconds = in_turns(*runs, rounds)
            print(f"{size:4d}  {name:14} {ratio:19.2f} {seconds * 1e3:10.0f}", flush=True)


def _ours(model: nn.Module, image: Tensor, target: dict[str, Tensor]) -> Tensor:
    return mask_loss(model(image), [target]).total


def _theirs(model: nn.Module, image: Tensor, given: dict[str, list[Tensor]]) -> Tensor:
    return model(image, **given).loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 320])
    words = parser.parse_args()
    main(words.rounds, words.threads, tuple(words.sizes))
