"""SegFormer against transformers' with the same weights, forward and training step.

``python -m tests.bench.bench_segformer``: in turns in one process, float32, eager. The ratio is our time over
transformers': 1 is equal, above 1.05 too slow. A training step is logits upsampled to the image, cross entropy,
backward and AdamW; both sides with stochastic depth and dropout as published.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import vispe
from tests.bench.timing import in_turns


def peer(name: str) -> nn.Module:
    spec = vispe.build(name).spec
    config = transformers.SegformerConfig(
        hidden_sizes=spec.widths, depths=spec.depths, num_labels=spec.num_classes, decoder_hidden_size=spec.head_width
    )
    return transformers.SegformerForSemanticSegmentation(config).eval()


def forward(model: nn.Module, images: Tensor, logits: Callable[[Any], Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return logits(model(images))

    return run


def step(model: nn.Module, images: Tensor, labels: Tensor, logits: Callable[[Any], Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        made = F.interpolate(logits(model(images)), size=labels.shape[-2:], mode="bilinear", align_corners=False)
        F.cross_entropy(made, labels, ignore_index=255).backward()
        optimizer.step()
        model.eval()

    return run


def main(rounds: int = 7, threads: int = 2, size: int = 512, names: tuple[str, ...] = ("segformer_b0",)) -> None:
    torch.set_num_threads(threads)
    print("model         size  batch  pass           ours / transformers   ours, ms an image")
    for name in names:
        theirs = peer(name)
        ours = vispe.load(name, theirs.state_dict(), origin="transformers")
        for batch, both in ((1, False), (2, True)):
            images = torch.randn(batch, 3, size, size)
            labels = torch.randint(0, 150, (batch, size, size))
            passes = [("forward", forward(ours, images, lambda x: x), forward(theirs, images, lambda x: x.logits))]
            if both:
                steps = (step(ours, images, labels, lambda x: x), step(theirs, images, labels, lambda x: x.logits))
                passes.append(("training step", *steps))
            for what, mine, other in passes:
                ratio, seconds = in_turns(mine, other, rounds)
                print(
                    f"{name:12}  {size:4d}  {batch:5d}  {what:14} {1 / ratio:19.2f} {seconds / batch * 1e3:19.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--names", nargs="+", default=["segformer_b0"])
    words = parser.parse_args()
    main(words.rounds, words.threads, words.size, tuple(words.names))
