"""How a benchmark is run and scored, every choice written down: what moves a published number is a key here.

Presets are tables in ``data/<benchmark>.toml``, each with its source. A result carries its protocol; an unknown key is
refused, so that a misspelt or misplaced line (two public configurations have one) cannot silently fall back to a
default.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vispe.data.sizes import resized
from vispe.paths import shared
from vispe.spec import Spec

PIXELS = ("exact", "glue-factory", "neglected")
CORNERS = ("edges", "centres")
EPIPOLAR = ("mean", "squared_sum")
ESTIMATORS = {"homography": ("poselib", "opencv", "dlt"), "pose": ("poselib", "opencv")}
UNBOUNDED = ("dlt",)  # all matches count: there is no threshold to choose
Size = int | tuple[int, int]
TABLES = {"pairs": "megadepth1500", "images": "hpatches", "stress": "hpatches"}  # whose presets they borrow


@dataclass(frozen=True, kw_only=True)
class Protocol(Spec):
    """One protocol.

    ``resize``, ``side``: how large images are looked at (0: as they are; ``(h, w)``: exactly so). ``max_keypoints`` of
    any extractor; ``knobs``: what a source sets for one extractor, by its name. ``max_matches``: only so many, the best
    by score (0: all).

    Errors are measured in pixels of the images as looked at, or of images whose ``frame_side`` is ``frame`` long (0:
    of the files as they are).
    ``pixels``: how coordinates and truth get there. ``exact``: with the half pixel of a resize, as everywhere in
    vispe. ``glue-factory``: points ``(x + 0.5) s``, truth scaled by s alone. ``neglected`` (LoFTR, SuperGlue, RoMa):
    points as in ``exact``, truth scaled by s alone. ``corners`` of an image: ``edges`` (0, 0) to (w, h), or ``centres``
    to (w - 1, h - 1).

    ``estimators`` of the model, ``thresholds`` of their inliers in pixels of that frame, one or several each: of
    several the best on these very pairs is reported, as the sources do, and said to be that. ``auc``: pixels or
    degrees. ``epipolar``: the error of epipolar precision, ``mean`` distance (glue-factory) or ``squared_sum``
    (SuperGlue, LoFTR), on the plane at depth one, below ``epipolar_thresholds``.
    """

    name: str = "own"
    task: str = "homography"
    resize: Size = 480
    side: str = "short"
    max_keypoints: int = 1024
    knobs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    max_matches: int = 0
    frame: int | None = None
    frame_side: str = "short"
    pixels: str = "exact"
    corners: str = "edges"
    estimators: tuple[str, ...] = ("poselib", "opencv", "dlt")
    thresholds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    auc: tuple[float, ...] = (1.0, 3.0, 5.0)
    epipolar: str = "mean"
    epipolar_thresholds: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    source: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.resize, list | tuple):
            object.__setattr__(self, "resize", tuple(self.resize))
        for name in ("estimators", "auc", "epipolar_thresholds"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        given = {name: _listed(value) for name, value in self.thresholds.items()}
        self._check_names(given)
        self._check_numbers(given)
        object.__setattr__(self, "thresholds", {name: given[name] for name in self.estimators if name in given})

    def _check_names(self, thresholds: Mapping[str, tuple[float, ...]]) -> None:
        one_of("task", self.task, tuple(ESTIMATORS))
        for what, choices in (("pixels", PIXELS), ("corners", CORNERS), ("epipolar", EPIPOLAR)):
            one_of(what, getattr(self, what), choices)
        one_of("side", self.side, ("long", "short"))
        one_of("frame_side", self.frame_side, ("long", "short"))
        if not self.estimators:
            raise ValueError("estimators are empty: name at least one")
        for name in (*self.estimators, *thresholds):
            one_of(f"an estimator of a {self.task}", name, ESTIMATORS[self.task])
        for name in self.estimators:
            if name in UNBOUNDED and name in thresholds:
                raise ValueError(f"{name} has no threshold: it takes all matches")
            if name not in UNBOUNDED and not thresholds.get(name):
                raise ValueError(f"{name} needs a threshold in pixels")

    def _check_numbers(self, thresholds: Mapping[str, tuple[float, ...]]) -> None:
        for name, value in (("max_keypoints", self.max_keypoints), ("max_matches", self.max_matches)):
            if type(value) is not int or value < (name == "max_keypoints"):
                raise ValueError(f"{name} is a whole number of them, got {value!r}")
        if not all(isinstance(given, Mapping) for given in self.knobs.values()):
            raise ValueError(f"knobs are tables of numbers by extractor, got {self.knobs!r}")
        limits = {**{f"thresholds of {name}": value for name, value in thresholds.items()}, "auc": self.auc}
        for name, values in {**limits, "epipolar_thresholds": self.epipolar_thresholds}.items():
            if not values or not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
                raise ValueError(f"{name} must be positive numbers, got {list(values)}")
        if self.resize != 0:  # asks nothing of an image, checks the number
            resized(100, 100, self.resize, "exact" if isinstance(self.resize, tuple) else self.side)  # type: ignore[arg-type]
        if self.frame not in (None, 0):
            resized(100, 100, self.frame, self.frame_side)  # type: ignore[arg-type]

    def frame_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """``(h', w')`` of the frame that errors of an image of ``size`` (h, w) are measured in."""
        if self.frame:
            return resized(*size, self.frame, self.frame_side)  # type: ignore[arg-type]
        if self.frame == 0 or self.resize == 0:
            return size
        return resized(*size, self.resize, "exact" if isinstance(self.resize, tuple) else self.side)  # type: ignore[arg-type]

    def swept(self) -> list[tuple[str, float | None]]:
        """Every (estimator, threshold) there is to try."""
        return [(name, value) for name in self.estimators for value in self.thresholds.get(name, (None,))]

    def plain(self) -> dict[str, Any]:
        """As JSON and TOML have it; ``Protocol.of(**plain)`` gives it back."""
        made = {name: getattr(self, name) for name in self.names()}
        made["thresholds"] = {name: list(values) for name, values in self.thresholds.items()}
        made["knobs"] = {name: dict(values) for name, values in self.knobs.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in made.items()}


def one_of(what: str, value: object, choices: Sequence[str]) -> None:
    """``ValueError`` unless ``value`` is among the choices."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}, got {value!r}")


def _listed(value: Any) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def column(what: str, estimator: str, threshold: float | None) -> str:
    """The name of a column of ``pairs.csv``, such as ``"corner_error poselib 2.0"``."""
    return f"{what} {estimator}" + ("" if threshold is None else f" {float(threshold)}")


def presets(benchmark: str) -> dict[str, dict[str, Any]]:
    """The tables of presets that a benchmark has, by name."""
    path = shared("data") / f"{TABLES.get(benchmark, benchmark)}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")).get("preset", {})


def renamed(protocol: Protocol, benchmark: str) -> Protocol:
    """The protocol under its preset's name, and where it is not that preset any more, with what was changed."""
    name = protocol.name.partition(",")[0]
    if name not in presets(benchmark):
        return protocol
    base, now = preset(benchmark, name, protocol.task).plain(), protocol.plain()
    changed = [key for key in now if key not in ("name", "source") and now[key] != base[key]]
    return protocol.but(name=f"{name}, changed: {', '.join(changed)}" if changed else name)


def preset(benchmark: str, name: str | None, task: str) -> Protocol:
    """A protocol by name; ``ValueError`` lists what there is.

    None: glue-factory's where there are published figures to stand beside, ``exact`` for pairs of one's own.
    """
    known = presets(benchmark)
    name = name or ("exact" if benchmark in TABLES else "glue-factory")
    if name not in known:
        raise ValueError(f"{benchmark} has no preset {name!r}; it has {', '.join(known)}")
    return Protocol.of(**{"name": name, "task": task, **known[name]})
