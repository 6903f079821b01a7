"""A pair as it lies in ``matches.h5``: its name, its truth, and the fingerprint of what its matches came from.

A pair is a group named ``IMAGE0 NUL NUL IMAGE1``, percent-encoded (an image that was turned is ``NAME NUL TURNS``),
with ``matches [k, 2]`` int32, indices into the two images' ``keypoints`` in ``features.h5``, ``scores [k]`` float32
(a matcher without a detector finds none there, and a pair then has its own ``points0 [k, 2]``, ``points1 [k, 2]``),
and as attributes its ``group``, the ``seconds`` it took, and the truth: ``homography [3, 3]``, or ``K0``, ``K1``,
``pose [4, 4]``, ``pixel`` (where K puts the first pixel's centre) and ``K_size`` (h, w) if K is of resized images. The
file's ``made`` (JSON) tells the matcher, its weights' sha256 and how the features were made.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from vispe.cache import Entry, as_key, as_name
from vispe.data.pairs import Pair, PairSet
from vispe.geometry.homography import Array


def image_key(name: str, turns: int = 0) -> str:
    """The entry of an image as it is looked at; no file name has a NUL in it."""
    return f"{name}\0{turns}" if turns else name


def pair_key(pair: Pair) -> str:
    """The entry of a pair."""
    return f"{image_key(pair.image0, pair.turns0)}\0\0{image_key(pair.image1, pair.turns1)}"


def stored(pair: Pair, pairs: PairSet) -> dict[str, Any]:
    """Its truth as attributes of its entry."""
    truth: dict[str, Any] = {"group": as_key(pair.group)}  # any folder's name
    if pair.homography is not None:
        return {**truth, "homography": np.asarray(pair.homography, np.float64)}
    if pair.pose is None:
        return truth
    for name in ("K0", "K1", "pose"):
        truth[name] = np.asarray(getattr(pair, name), np.float64)
    truth["pixel"] = float(pairs.pixel)
    return truth if pairs.K_size is None else {**truth, "K_size": np.asarray(pairs.K_size, np.int64)}


def fingerprint(truth: dict[str, Any], content0: str, content1: str) -> str:
    """The sha256 of what a pair's matches and their score come from: the images' contents and the truth."""
    whole = hashlib.sha256(f"{content0} {content1}".encode())
    for name, value in sorted(truth.items()):
        whole.update(f" {name} ".encode())
        whole.update(value.tobytes() if isinstance(value, np.ndarray) else str(value).encode())
    return whole.hexdigest()


@dataclass(frozen=True, eq=False, kw_only=True)
class Record:
    """What ``matches.h5`` knows of a pair."""

    key0: str
    key1: str
    group: str
    matches: Array
    scores: Array
    truth: dict[str, Any]
    seconds: float
    points: tuple[Array, Array] | None = None  # the pair's own, of a matcher without a detector

    @classmethod
    def of(cls, key: str, entry: Entry) -> Record:
        """The pair stored under ``key``."""
        key0, key1 = key.split("\0\0")
        truth = dict(entry.attributes)
        seconds = float(truth.pop("seconds"))
        arrays, points = entry.arrays, None
        if "points0" in arrays:
            points = arrays["points0"].astype(np.float64), arrays["points1"].astype(np.float64)
        return cls(
            key0=key0, key1=key1, group=as_name(truth["group"]), matches=arrays["matches"].astype(np.int64),
            scores=arrays["scores"].astype(np.float64), points=points, truth=truth, seconds=seconds,
        )  # fmt: skip

    @property
    def names(self) -> tuple[str, str]:
        """The images' names."""
        return self.key0.partition("\0")[0], self.key1.partition("\0")[0]

    def made_from(self, content0: str, content1: str) -> str:
        """The fingerprint that its entry should have."""
        return fingerprint(self.truth, content0, content1)
