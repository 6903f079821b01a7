"""ViT against timm's with the same weights, forward and forward + backward. ``python -m tests.bench.bench_vit``

In turns in one process, float32, eager, batch 4. The ratio is timm's time over ours: 1 is equal, below 0.95 too slow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn

import vispe
from tests.bench.timing import in_turns

NAMES = ("vit_tiny_patch16_224", "vit_small_patch16_224")
BATCH = 4


def forward(model: nn.Module, images: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return model(images)

    return run


def both_ways(model: nn.Module, images: Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(images).sum().backward()

    return run


def main(rounds: int = 9, threads: int = 2) -> None:
    torch.set_num_threads(threads)
    print("model                  size  pass                timm / ours   ours, ms an image")
    for name in NAMES:
        for size in (224, 384):
            peer = timm.create_model(name, img_size=size, dynamic_img_size=False).eval()
            square = (size, size)
            model = vispe.load(name, peer.state_dict(), image_size=square, source_size=square)
            images = torch.randn(BATCH, 3, *square)
            for what, run in (("forward", forward), ("forward + backward", both_ways)):
                ratio, seconds = in_turns(run(model, images), run(peer, images), rounds)
                print(f"{name:22} {size:4d}  {what:18} {ratio:12.2f} {seconds / BATCH * 1e3:19.1f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    words = parser.parse_args()
    main(words.rounds, words.threads)
