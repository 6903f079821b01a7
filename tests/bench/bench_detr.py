"""DETR against transformers' with the same weights: forward, and a training step (forward, loss, backward).
``python -m tests.bench.bench_detr``

In turns in one process, float32, eager, no dropout, the same parameters frozen, auxiliary losses on both sides. The
ratio is our time over transformers': below 1 is faster; at most 1.05 is asked for, below 0.9 aimed at. ``--clock cpu``
counts this process' own seconds, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

import vispe
from tests.bench.timing import in_turns
from vispe.losses.detection import detection_loss

SIZES = {"320x427": (320, 427), "480x640": (480, 640), "800x1066": (800, 1066)}


def pair(backbone: str, **knobs: object) -> tuple[nn.Module, nn.Module]:
    """transformers' model and ours, with its weights and the original's frozen parts."""
    plain = {"dropout": 0.0, "auxiliary_loss": True, "use_pretrained_backbone": False, "num_labels": 91}
    peer = transformers.DetrForObjectDetection(transformers.DetrConfig(backbone=backbone, **plain, **knobs)).eval()
    for name, parameter in peer.model.backbone.model.named_parameters():
        parameter.requires_grad_(name.startswith(("layer2", "layer3", "layer4")))
    stride = 16 if knobs.get("dilation") else 32
    model = vispe.load(f"detr_{backbone}", peer.state_dict(), origin="transformers", dropout=0.0, stride=stride)
    return peer, model


def forward(model: nn.Module, images: Tensor, *mask: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return model(images, *mask)

    return run


def steps(model: nn.Module, peer: nn.Module, images: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    g = torch.Generator().manual_seed(0)
    boxes = [torch.rand(7, 4, generator=g) * 0.5 + 0.2 for _ in images]
    labels = [torch.randint(91, (7,), generator=g) for _ in images]
    wanted = [{"labels": a, "boxes": b} for a, b in zip(labels, boxes, strict=True)]
    theirs = [{"class_labels": a, "boxes": b} for a, b in zip(labels, boxes, strict=True)]

    def own() -> None:
        model.zero_grad(set_to_none=True)
        detection_loss(model(images), wanted).total.backward()

    def other() -> None:
        peer.zero_grad(set_to_none=True)
        peer(images, labels=theirs).loss.backward()

    return own, other


def padded(images: Tensor) -> Tensor:
    mask = torch.ones(len(images), *images.shape[-2:], dtype=torch.bool)
    mask[-1, int(images.shape[-2] * 0.8) :] = False
    return mask


def main(rounds: int = 9, threads: int = 1, sizes: tuple[str, ...] = ("320x427",), batch: int = 1) -> None:
    torch.set_num_threads(threads)
    peer, model = pair("resnet50")
    print("model          size      batch  pass               ours / transformers   ours, s")
    for name in sizes:
        images = torch.randn(batch, 3, *SIZES[name])
        mask = padded(images)
        runs = {
            "forward": (forward(model.eval(), images), forward(peer.eval(), images)),
            "forward, padded": (forward(model, images, mask), forward(peer, images, mask)),
            "training step": steps(model, peer, images),
        }
        for what, (own, other) in runs.items():
            for each in (model, peer):
                each.train(what == "training step")
            ratio, seconds = in_turns(own, other, rounds)
            print(f"detr_resnet50  {name:9} {batch:5d}  {what:18} {1 / ratio:19.2f} {seconds:9.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", choices=list(SIZES), action="append")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    words = parser.parse_args()
    clock = time.process_time if words.clock == "cpu" else time.perf_counter
    with mock.patch("time.perf_counter", clock):
        main(words.rounds, words.threads, tuple(words.size or ["320x427"]), words.batch)
