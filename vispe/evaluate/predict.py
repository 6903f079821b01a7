"""Pass 1: images to features and matches, on disk, once. ``score.py`` reads them as often as it is asked to.

``features.h5`` and ``matches.h5`` say how they were made (options, sha256 of the weights) and each entry from what
(sha256 of the image contents and of the truth): a run that finds them does only what is missing or has changed, and
refuses files that were made otherwise. Each pair carries its truth, so that scoring needs neither the images nor their
lists.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vispe.cache import CacheReader, CacheWriter, Team
from vispe.data.images import MAX_PIXELS, read_image
from vispe.data.pairs import Pair, PairSet
from vispe.data.resizing import rotate90
from vispe.evaluate.records import fingerprint, image_key, pair_key, stored
from vispe.evaluate.team import together
from vispe.extract import WORKERS, Job, extract_into, features_made
from vispe.features import Features
from vispe.matching import Matcher, lightglue_for
from vispe.models import DETECTOR_FREE
from vispe.progress import track
from vispe.spec import Spec
from vispe.store import as_features
from vispe.weights.files import in_run, locate, sha256

ANOTHER = "give --out another folder"
BATCH, SECONDS = 64, 1.0  # pairs are on the disk once so many wait, or so much time has passed
RECENT_IMAGES = 4  # of a matcher that looks at images
RECENT = 32  # images whose features are kept at hand: a data set's pairs share images with their neighbours


@dataclass(frozen=True, kw_only=True)
class Pipeline(Spec):
    """Who finds and matches, as the arguments of ``Matcher``; None is the default there."""

    extractor: str = "aliked_n16"
    matcher: str = "lightglue"
    max_keypoints: int = 2048
    resize: int | tuple[int, int] | None = None
    side: Literal["long", "short"] = "long"
    adaptive: bool = False
    precision: str = "fp32"
    knobs: Mapping[str, float] = field(default_factory=dict)  # of the extractor's spec
    weights: str | None = None
    extractor_weights: str | None = None
    device: str = "auto"

    def load(self) -> Matcher:
        """The networks; ``ValueError`` or ``WeightsError`` when they cannot be had."""
        given: dict[str, Any] = {name: getattr(self, name) for name in self.names() if name != "knobs"}
        return Matcher(**(given | dict(self.knobs)))

    def made(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """How features and how matches are made: everything that could change them."""
        given: dict[str, Any] = {"max_keypoints": self.max_keypoints, "resize": self.resize, "side": self.side}
        if self.matcher in DETECTOR_FREE:
            features = {"extractor": None, **given, **self.knobs}
            own = {"precision": self.precision, "weights": self._sha256(DETECTOR_FREE[self.matcher])}
            return features, {"matcher": self.matcher, "features": features, **own}
        features = features_made(self.extractor, weights=self.extractor_weights, **given, **self.knobs)
        matches: dict[str, Any] = {"matcher": self.matcher, "features": features}
        if self.matcher == "lightglue":
            matches |= {"adaptive": self.adaptive, "precision": self.precision}
            matches["network"] = lightglue_for(self.extractor, self.weights)
            matches["weights"] = self._sha256(matches["network"])
        return features, matches

    def _sha256(self, network: str) -> str:
        """Of the matcher's weights: those given, else the published ones of ``network``."""
        return sha256(in_run(self.weights) if self.weights else locate(network))


def predict(
    pairs: PairSet,
    out: Path,
    pipeline: Pipeline,
    *,
    devices: int = 1,
    nodes: int = 1,
    workers: int = WORKERS,
    max_pixels: int = MAX_PIXELS,
) -> bool:
    """Write ``features.h5`` and ``matches.h5`` for all ``pairs`` into ``out``, or what of them is not there yet.

    Whether this process is the one that goes on: True, but for all processes except the first of several.

    Several ``devices`` (CPU processes where the pipeline's device is a CPU) and ``nodes`` share the work through
    Lightning Fabric. An image that cannot be read is an ``ImageError``; what was done until then stays.
    """
    share = functools.partial(
        _predict, pairs=pairs, out=out, pipeline=pipeline, work={"workers": workers, "max_pixels": max_pixels}
    )
    return together(share, pipeline.device, devices, nodes)


def _predict(team: Team, device: str, pairs: PairSet, out: Path, pipeline: Pipeline, work: dict[str, Any]) -> None:
    pipeline = pipeline.but(device=device)
    matcher = functools.cache(pipeline.load)  # not before there is something to do
    features_by, matches_by = pipeline.made()
    matches_by["benchmark"] = pairs.name

    def find() -> Callable[[Tensor, str], Features]:
        made = matcher()
        if made.whole is not None:
            return made.whole.no_keypoints
        assert made.extract is not None
        return made.extract

    jobs = [Job(image_key(name, turns), str(pairs.root / name), turns) for name, turns in pairs.images]
    names = [job.name for job in jobs], [pair_key(pair) for pair in pairs.pairs]
    if team.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    team.wait()
    images = CacheWriter(out / "features.h5", features_by, names=names[0], keep=True, team=team, otherwise=ANOTHER)
    matches = CacheWriter(  # both before any work: either may be one that was made otherwise
        out / "matches.h5", matches_by, names=names[1], exact=True, keep=True, batch=BATCH, seconds=SECONDS, team=team,
        otherwise=ANOTHER,
    )  # fmt: skip
    with images:
        extract_into(images, team.share(jobs), find, shown=team.rank == 0, **work)
    with CacheReader(out / "features.h5") as features, matches:
        whole = pipeline.matcher in DETECTOR_FREE
        match = _by_images(pairs, work["max_pixels"], matcher) if whole else _by_features(features, matcher)
        _match_into(matches, team.share(pairs.pairs), pairs, features, match, shown=team.rank == 0)


Match = Callable[[Pair], tuple[dict[str, np.ndarray], float]]  # the arrays of a pair's entry, and the seconds it took


def _match_into(
    writer: CacheWriter, share: Sequence[Pair], pairs: PairSet, features: CacheReader, match: Match, *, shown: bool
) -> None:
    hashes = functools.cache(features.sha256)
    todo = []
    for pair in share:
        attributes = stored(pair, pairs)
        content = fingerprint(attributes, *(hashes(key) for key in _keys(pair)))
        if not writer.has(pair_key(pair), content):
            todo.append((pair, attributes, content))
    for pair, attributes, content in track(todo, "matching", "pairs", shown=shown):
        arrays, seconds = match(pair)
        writer.add(pair_key(pair), arrays, {**attributes, "seconds": seconds}, content)


def _by_features(features: CacheReader, matcher: Callable[[], Matcher]) -> Match:
    @functools.lru_cache(RECENT)
    def load(key: str) -> Features:
        return as_features(features.read(key))

    def match(pair: Pair) -> tuple[dict[str, np.ndarray], float]:
        first, second = (load(key) for key in _keys(pair))
        start = time.perf_counter()
        found, scores = matcher().match_features(first, second)
        seconds = time.perf_counter() - start
        return {"matches": found.astype(np.int32), "scores": scores.astype(np.float32)}, seconds

    return match


def _by_images(pairs: PairSet, max_pixels: int, matcher: Callable[[], Matcher]) -> Match:
    """Without keypoints: a pair's entry has points of its own."""
    load = functools.lru_cache(RECENT_IMAGES)(functools.partial(read_image, max_pixels=max_pixels))

    def match(pair: Pair) -> tuple[dict[str, np.ndarray], float]:
        whole, paths = matcher().whole, [str(pairs.root / name) for name in (pair.image0, pair.image1)]
        assert whole is not None
        images, turns = [load(path) for path in paths], (pair.turns0, pair.turns1)
        turned = [rotate90(image, k) if k else image for image, k in zip(images, turns, strict=True)]
        start = time.perf_counter()
        sides = whole(turned[0], turned[1], (paths[0], paths[1]))
        seconds = time.perf_counter() - start
        back = [
            side.turned_back(k, (image.shape[-2], image.shape[-1]))
            for side, image, k in zip(sides, images, turns, strict=True)
        ]
        points = {f"points{i}": side.keypoints.float().cpu().numpy() for i, side in enumerate(back)}
        rows = np.arange(len(back[0]), dtype=np.int32)
        return {"matches": np.stack((rows, rows), 1), "scores": back[0].scores.float().cpu().numpy(), **points}, seconds

    return match


def _keys(pair: Pair) -> tuple[str, str]:
    return image_key(pair.image0, pair.turns0), image_key(pair.image1, pair.turns1)
