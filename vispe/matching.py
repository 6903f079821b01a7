"""Two images to matches: the one pipeline behind the command, the evaluation and the reconstruction.

read -> extract -> match -> verify. Everything a caller sees is in pixels of the images as a person sees them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import vispe
from vispe.data.images import MAX_PIXELS, as_image
from vispe.data.resizing import rotate90
from vispe.detector_free import DetectorFree
from vispe.features import Extractor, Features, Look, pick_device
from vispe.features import extractor as load_extractor
from vispe.geometry.pose import Camera
from vispe.geometry.robust import BACKENDS, MINIMUM_INLIERS, Backend, Geometry, Model, estimate
from vispe.layers.assignment import Assignment, nearest
from vispe.models import DETECTOR_FREE, EXTRACTORS, MATCHERS, NEIGHBOURS, RATIO, SHIPPED
from vispe.models.lightglue import LightGlue, MatchOutput
from vispe.weights import load
from vispe.weights.files import at_hand, told

GEOMETRIES = (*MINIMUM_INLIERS, "none")
UPRIGHT = ("auto", "0", "90", "180", "270")
PRECISIONS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
INLIER_PIXELS = 2.0  # default threshold, in pixels of the image the extractor looked at
# `auto` tries the other rotations if fewer of the keypoints match, or the mean score is lower. On real pairs it is 0.60
# to 0.99 at the right rotation, up to 0.65 at a wrong one: a good match is rarely tried again, a wrong one always.
FEW, UNSURE = 0.1, 0.7
ADAPTIVE: dict[str, Any] = {"depth_confidence": 0.95, "width_confidence": 0.99}  # the official defaults
Intrinsics = tuple[float, float, float, float]  # fx, fy, cx, cy
Sizes = tuple[tuple[int, int], tuple[int, int]]  # (h, w) of both images
Image = str | os.PathLike[str] | Tensor | np.ndarray | Any


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Matches:
    """What two images have in common; arrays are numpy, points are (x, y) pixels of the original images.

    ``keypoints0 [m, 2]``, ``keypoints1 [n, 2]``; ``matches [k, 2]`` their index pairs, best score first; ``scores
    [k]``; ``inliers [k]`` agree with ``geometry`` (all False without a model; all True when no geometry was asked for).
    ``network``: whose weights matched, a model's name. ``rotation``: by how many degrees image 1 was turned
    counter-clockwise to match. ``seconds`` by stage. A matcher without a detector has no ``extractor`` (None), and its
    keypoints are the matched points alone.
    """

    keypoints0: np.ndarray
    keypoints1: np.ndarray
    matches: np.ndarray
    scores: np.ndarray
    inliers: np.ndarray
    geometry: Geometry | None
    size0: tuple[int, int]
    size1: tuple[int, int]
    extractor: str | None
    matcher: str
    network: str | None = None
    rotation: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.matches)

    def __repr__(self) -> str:
        return (
            f"Matches({len(self)} of {len(self.keypoints0)} and {len(self.keypoints1)}, {self.inliers.sum()} inliers)"
        )

    @property
    def points0(self) -> np.ndarray:
        """Matched points in image 0, ``[k, 2]``."""
        return self.keypoints0[self.matches[:, 0]]

    @property
    def points1(self) -> np.ndarray:
        """Their partners in image 1, ``[k, 2]``."""
        return self.keypoints1[self.matches[:, 1]]

    def summary(self, image0: str, image1: str) -> dict[str, Any]:
        """What ``matches.json`` holds: plain numbers and strings."""
        found = self.geometry
        geometry = None if found is None else {
            "model": found.model,
            "matrix": _plain(found.matrix),
            "num_inliers": found.num_inliers,
            "threshold": found.threshold,
            "rotation": _plain(found.rotation),
            "translation": _plain(found.translation),
            "reason": found.reason,
        }  # fmt: skip
        return {
            "image0": image0,
            "image1": image1,
            "size0": list(self.size0),
            "size1": list(self.size1),
            "extractor": self.extractor,
            "matcher": self.matcher,
            "network": self.network,
            "num_keypoints0": len(self.keypoints0),
            "num_keypoints1": len(self.keypoints1),
            "num_matches": len(self),
            "rotation": self.rotation,
            "geometry": geometry,
            "seconds": {stage: round(seconds, 4) for stage, seconds in self.seconds.items()},
            "version": vispe.__version__,
        }


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How matches are held against a geometric model; a wrong value is a ``ValueError`` here, before any work is done.

    ``geometry``: the model that inliers agree with, or ``"none"``; ``threshold`` in pixels of the originals (None: 2
    pixels of the images as looked at); ``backend``: the library that estimates; ``cameras``: (fx, fy, cx, cy) of each
    image in pixels, for ``"essential"`` (None: assumed, with a focal length of 1.2 times the long side).
    """

    geometry: Model | Literal["none"] = "fundamental"
    threshold: float | None = None
    backend: Backend = "poselib"
    cameras: tuple[Intrinsics | None, Intrinsics | None] = (None, None)
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("geometry", self.geometry, GEOMETRIES)
        _one_of("backend", self.backend, tuple(BACKENDS))
        module = {"opencv": "cv2"}.get(self.backend, self.backend)
        if find_spec(module) is None:
            raise ValueError(f"backend {self.backend!r} needs the package {module}, which is not installed")
        if not isinstance(self.cameras, tuple | list) or len(self.cameras) != 2:
            raise ValueError(f"cameras are two, each (fx, fy, cx, cy) or None, got {self.cameras!r}")
        cameras = tuple(map(_intrinsics, self.cameras))
        object.__setattr__(self, "cameras", cameras)
        if any(cameras) and self.geometry != "essential":
            raise ValueError("cameras are for geometry 'essential' only")
        nothing = np.zeros((0, 2))  # estimating from it checks every other value
        self._estimate(
            "fundamental" if self.geometry == "none" else self.geometry, nothing, nothing, ((1, 1), (1, 1)), 1.0
        )

    def __call__(self, points0: np.ndarray, points1: np.ndarray, sizes: Sizes, pixel: float) -> Geometry | None:
        """The model of the matches ``[k, 2]`` in images of ``sizes``; a pixel looked at spans ``pixel`` of theirs."""
        return None if self.geometry == "none" else self._estimate(self.geometry, points0, points1, sizes, pixel)

    def _estimate(self, model: Model, points0: np.ndarray, points1: np.ndarray, sizes: Sizes, pixel: float) -> Geometry:
        threshold = INLIER_PIXELS * pixel if self.threshold is None else self.threshold
        camera0, camera1 = map(_camera, self.cameras, sizes)
        return estimate(
            model, points0, points1, threshold=threshold, backend=self.backend, camera0=camera0, camera1=camera1,
            seed=self.seed,
        )  # fmt: skip


class Matcher:
    """A loaded pipeline, ``matcher(image0, image1) -> Matches``; calls change nothing in it, so threads may share one.

    ``extractor``: one of ``EXTRACTORS``; ``matcher``: ``"lightglue"``, ``"mutual_nn"``, ``"mutual_nn_ratio"`` (with
    Lowe's test at 0.8, both ways), or one of ``DETECTOR_FREE``, which matches whole images, takes no extractor and
    gives at most ``max_keypoints`` matches; ``resize``, ``side``: the size images are looked at, see ``Look``;
    ``adaptive``: LightGlue's early stopping and pruning, faster for a few other matches; ``device``: a torch device or
    ``"auto"`` (CUDA when there is one); ``precision`` of the matcher; ``weights`` (the matcher's) and
    ``extractor_weights``: a path or state dict in place of the published ones; ``knobs``: of the extractor's spec, or
    of the detector-free matcher's.
    """

    def __init__(
        self,
        extractor: str = "aliked_n16",
        matcher: str = "lightglue",
        *,
        max_keypoints: int = 2048,
        resize: int | None = None,
        side: Literal["long", "short"] = "long",
        adaptive: bool = False,
        device: str | torch.device = "auto",
        precision: str = "fp32",
        weights: Any = None,
        extractor_weights: Any = None,
        **knobs: Any,
    ) -> None:
        _one_of("extractor", extractor, tuple(EXTRACTORS))
        _one_of("matcher", matcher, MATCHERS)
        _one_of("precision", precision, tuple(PRECISIONS))
        _check_pairing(extractor, matcher, adaptive, weights, extractor_weights)
        network = lightglue_for(extractor, weights) if matcher == "lightglue" else None
        self.matcher_name = matcher
        self.device = pick_device(device)
        self.precision = PRECISIONS[precision]
        look = Look(resize=resize, side=side)
        self.extract: Extractor | None = None
        self.whole: DetectorFree | None = None
        self.network: LightGlue | None = None
        self.network_name = network
        if matcher in DETECTOR_FREE:
            self.whole = DetectorFree(
                matcher, max_matches=max_keypoints, look=look, device=self.device, precision=self.precision,
                weights=weights, **knobs,
            )  # fmt: skip
            return
        self.extract = load_extractor(
            extractor, max_keypoints=max_keypoints, look=look, device=self.device, weights=extractor_weights, **knobs
        )
        if network is not None:
            loaded = load(network, weights, **(ADAPTIVE if adaptive else {}))
            assert isinstance(loaded, LightGlue)
            self.network = loaded.to(self.device)

    def __call__(
        self,
        image0: Image,
        image1: Image,
        *,
        geometry: Model | Literal["none"] = "fundamental",
        threshold: float | None = None,
        backend: Backend = "poselib",
        cameras: tuple[Intrinsics | None, Intrinsics | None] = (None, None),
        upright: str | int = 0,
        seed: int = 0,
        names: tuple[str, str] | None = None,
        max_pixels: int = MAX_PIXELS,
    ) -> Matches:
        """Match two images: paths, PIL images, arrays or tensors (see ``as_image``).

        ``geometry``, ``threshold``, ``backend``, ``cameras``, ``seed``: see ``Verification``. ``upright``: degrees by
        which image 1 is turned counter-clockwise, or ``"auto"``: the best of all four where the upright match is weak.
        ``names`` are for messages; without them the paths.
        """
        _one_of("upright", str(upright), UPRIGHT)
        verify = Verification(geometry=geometry, threshold=threshold, backend=backend, cameras=cameras, seed=seed)
        names = names or (_name(image0, "image0"), _name(image1, "image1"))
        clock = Clock()
        with clock("read"):
            a, b = (as_image(image, max_pixels=max_pixels) for image in (image0, image1))
        f0, f1, pairs, scores, turns = self._match_turned(a, b, names, str(upright), clock)
        with clock("verify"):
            order = np.argsort(-scores, kind="stable")
            pairs, scores = pairs[order], scores[order]
            k0, k1 = (f.keypoints.float().cpu().numpy() for f in (f0, f1))
            model = verify(k0[pairs[:, 0]], k1[pairs[:, 1]], (f0.size, f1.size), max(f0.pixel, f1.pixel))
        return Matches(
            keypoints0=k0, keypoints1=k1, matches=pairs, scores=scores, geometry=model,
            inliers=np.ones(len(pairs), bool) if model is None else model.inliers, size0=f0.size, size1=f1.size,
            extractor=self.extract.name if self.extract else None, matcher=self.matcher_name,
            network=self.network_name, rotation=90 * turns, seconds=clock.seconds,
        )  # fmt: skip

    def match_features(self, f0: Features, f1: Features) -> tuple[np.ndarray, np.ndarray]:
        """Index pairs ``[k, 2]`` int64 and scores ``[k]`` float32 of two feature sets."""
        if self.whole is not None:
            raise ValueError(f"{self.matcher_name} matches images, not features")
        found: Assignment | MatchOutput
        with torch.inference_mode():
            if self.network is None:
                ratio = RATIO if self.matcher_name == "mutual_nn_ratio" else None
                found = nearest(f0.descriptors[None], f1.descriptors[None], ratio=ratio)
            else:
                with torch.autocast(self.device.type, dtype=self.precision, enabled=self.precision is not None):
                    found = self.network.match(f0.points(), f1.points())
            pairs, scores = found.pairs()
            return pairs.cpu().numpy(), scores.float().cpu().numpy()

    def _match_turned(
        self, image0: Tensor, image1: Tensor, names: tuple[str, str], upright: str, clock: Clock
    ) -> tuple[Features, Features, np.ndarray, np.ndarray, int]:
        """Features of both images in their own pixels and their matches, image 1 turned as wanted or best; quarter
        turns."""
        size = (image1.shape[-2], image1.shape[-1])
        if self.extract is not None:
            with clock("extract"):
                known = self.extract(image0, names[0])

        def attempt(turns: int) -> tuple[Features, Features, np.ndarray, np.ndarray, int]:
            turned = rotate90(image1, turns) if turns else image1
            if self.whole is not None:
                with clock("match"):
                    f0, f1 = self.whole(image0, turned, names)
                    scores = f0.scores.float().cpu().numpy()
                pairs = np.arange(len(scores)).repeat(2).reshape(-1, 2)
                return f0, f1.turned_back(turns, size), pairs, scores, turns
            assert self.extract is not None
            with clock("extract"):
                f1 = self.extract(turned, names[1])
            with clock("match"):
                pairs, scores = self.match_features(known, f1)
            return known, f1.turned_back(turns, size), pairs, scores, turns

        if upright != "auto":
            return attempt(int(upright) // 90)
        best = attempt(0)
        f0, f1, _, scores, _ = best
        if self.whole is not None or len(scores) <= FEW * min(len(f0), len(f1)) or scores.mean() < UNSURE:
            best = max((best, *(attempt(turns) for turns in (1, 2, 3))), key=lambda tried: float(tried[3].sum()))
        return best


def lightglue_for(extractor: str, weights: Any = None) -> str:
    """The name of the LightGlue for an ``extractor``'s features: that of a file trained here for them, else the
    published one; without ``weights``, where its file is not on this machine, the small one that ships with vispe."""
    about = told(weights) if isinstance(weights, str | os.PathLike) else {}
    if "extractor" in about and about["extractor"] != extractor:
        raise ValueError(
            f"{os.fspath(weights)!r} was trained for the features of {about['extractor']}, not of {extractor}"
        )
    if "extractor" in about:
        return str(about["model"])
    name = EXTRACTORS[extractor]
    return SHIPPED[extractor] if weights is None and extractor in SHIPPED and not at_hand(name) else name


def match(
    image0: Image,
    image1: Image,
    extractor: str = "aliked_n16",
    matcher: str = "lightglue",
    *,
    max_keypoints: int = 2048,
    resize: int | None = None,
    side: Literal["long", "short"] = "long",
    geometry: Model | Literal["none"] = "fundamental",
    threshold: float | None = None,
    backend: Backend = "poselib",
    cameras: tuple[Intrinsics | None, Intrinsics | None] = (None, None),
    upright: str | int = 0,
    adaptive: bool = False,
    device: str | torch.device = "auto",
    precision: str = "fp32",
    weights: Any = None,
    extractor_weights: Any = None,
    seed: int = 0,
) -> Matches:
    """Match two images in one call; arguments as of :class:`Matcher` and its call.

    It loads the models each time: keep a :class:`Matcher` to match many pairs.
    """
    Verification(geometry=geometry, threshold=threshold, backend=backend, cameras=cameras, seed=seed)  # before loading
    _one_of("upright", str(upright), UPRIGHT)
    loaded = Matcher(
        extractor, matcher, max_keypoints=max_keypoints, resize=resize, side=side, adaptive=adaptive, device=device,
        precision=precision, weights=weights, extractor_weights=extractor_weights,
    )  # fmt: skip
    return loaded(
        image0,
        image1,
        geometry=geometry,
        threshold=threshold,
        backend=backend,
        cameras=cameras,
        upright=upright,
        seed=seed,
    )


class Clock:
    """Seconds by stage, added up: ``with clock("extract"): ...``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def _check_pairing(extractor: str, matcher: str, adaptive: bool, weights: Any, extractor_weights: Any) -> None:
    if matcher in NEIGHBOURS and (adaptive or weights is not None):
        raise ValueError(f"{matcher} has neither weights nor adaptivity")
    if matcher in DETECTOR_FREE and adaptive:
        raise ValueError(f"{matcher} has no adaptivity")
    if matcher in DETECTOR_FREE and (extractor != "aliked_n16" or extractor_weights is not None):
        raise ValueError(f"{matcher} matches whole images: it takes no extractor and no weights of one")


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}, got {value!r}")


def _plain(array: np.ndarray | None) -> list[Any] | None:
    return None if array is None else array.tolist()


def _name(image: Image, otherwise: str) -> str:
    return os.fspath(image) if isinstance(image, str | os.PathLike) else otherwise


def _intrinsics(given: Any) -> Intrinsics | None:
    if given is None:
        return None
    numbers = np.asarray(given, dtype=np.float64)
    if numbers.shape != (4,):
        raise ValueError(f"a camera is four numbers (fx, fy, cx, cy) in pixels, got {given!r}")
    fx, fy, cx, cy = numbers.tolist()
    return fx, fy, cx, cy


def _camera(given: Intrinsics | None, size: tuple[int, int]) -> Camera:
    if given is None:
        return Camera.assumed(size)
    fx, fy, cx, cy = given
    return Camera(fx=fx, fy=fy, cx=cx, cy=cy, size=size)
