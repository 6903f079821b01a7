"""EfficientLoFTR against transformers' from the same random weights, one thread. ``python -m
tests.bench.bench_efficient_loftr``

Processor time, in turns. Transformers refines every cell; ours has two rows, with matches to refine and without any.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from transformers import EfficientLoFTRConfig, EfficientLoFTRForKeypointMatching

import vispe
from tests.bench.timing import in_turns


def peer(a: torch.Tensor, b: torch.Tensor) -> nn.Module:
    """Transformers' network with norms that have seen the images, so that cells differ and some match."""
    torch.manual_seed(0)
    model = EfficientLoFTRForKeypointMatching(EfficientLoFTRConfig())
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 1.0 if name.endswith("identity") else 0.3)
            module.momentum = 1.0
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    with torch.no_grad():
        model.train()(torch.stack((a, b), 1))
    return model.eval()


@torch.inference_mode()
def main(rounds: int = 5) -> None:
    torch.set_num_threads(1)
    print("size       matches   transformers / ours   ours, seconds")
    for h, w in ((256, 320), (480, 640)):
        torch.manual_seed(0)
        a = torch.rand(1, 1, h, w)
        b = a.roll((16, 32), (-2, -1)) + 0.1 * torch.rand_like(a)
        with torch.inference_mode(False):
            theirs = peer(a.clone(), b.clone())
        pair = torch.stack((a, b), 1)
        for threshold in (0.0, 1.0):
            ours = vispe.load("efficient_loftr", theirs.state_dict(), "transformers", threshold=threshold)
            count = len(ours(a, b).scores)
            ratio, seconds = in_turns(lambda: ours(a, b), lambda: theirs(pair), rounds, time.process_time)  # noqa: B023
            print(f"{h} x {w} {count:9d} {ratio:21.2f} {seconds:15.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
