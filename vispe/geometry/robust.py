"""Homography, fundamental matrix and relative pose from matches with outliers: three libraries, one call.

What :func:`estimate` adds to PoseLib, OpenCV's USAC and pycolmap is one meaning. Matches are pixels with the first
pixel's centre at (0, 0) (COLMAP's half pixel is added and taken away here); an inlier is a match whose residual *as
defined here* is at most the threshold, whatever the library counted; matrices have one scale and sign; and "there is
no model" is an answer, with a reason, where the libraries raise, return None, stack several matrices or hand out
uninitialised memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vispe.geometry.epipolar import (
    essential_from_pose,
    fundamental_from_essential,
    nearest_essential,
    normalise_epipolar,
    sampson_distance,
)
from vispe.geometry.homography import Array, as_pairs, homography_residual, normalise_homography, spread
from vispe.geometry.pose import Camera, recover_pose, rotation_residual

Model = Literal["homography", "fundamental", "essential"]
Backend = Literal["poselib", "opencv", "pycolmap"]
Mask = NDArray[np.bool_]

MINIMUM_INLIERS: dict[str, int] = {"homography": 6, "fundamental": 8, "essential": 6}
"""Fewest inliers that make a model. A minimal sample (4, 7, 5) fits itself; the matches beyond are the evidence."""

FARTHEST = 1e8
"""A coordinate beyond this many pixels is as unusable as nan: float32 libraries lose it, and no image is that large."""

PARALLAX, PARALLAX_SHARE = 2.0, 0.05
"""A translation shows if 5 % of the inliers, at least 6 or half, lie 2 thresholds off the best rotation.

Outliers force the numbers: a pure rotation leaves E's translation free to please two of them, and more by chance.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Geometry:
    """What was found between two images. ``matrix`` is None exactly when there is no model; ``reason`` then says why.

    ``matrix [3, 3]`` is ``H_0to1`` (``H[2, 2] = 1`` unless nearly zero), or F or E with Frobenius norm 1 and the
    largest entry positive. ``inliers [k]`` belongs to the rows handed in. An essential matrix comes with its pose
    ``T_0to1``: ``rotation [3, 3]`` and unit ``translation [3]``, ``X1 = R X0 + t``.
    """

    model: Model
    matrix: Array | None
    inliers: Mask
    threshold: float
    rotation: Array | None = None
    translation: Array | None = None
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a model."""
        return self.matrix is not None

    @property
    def num_inliers(self) -> int:
        """How many of the matches agree with the model; zero without one."""
        return int(self.inliers.sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class _Task:
    """One estimation, checked: every match is usable, every number is in range, E has its cameras."""

    model: Model
    points0: Array
    points1: Array
    threshold: float
    camera0: Camera | None
    camera1: Camera | None
    seed: int
    max_iterations: int
    confidence: float

    @property
    def cameras(self) -> tuple[Camera, Camera]:
        assert self.camera0 is not None
        assert self.camera1 is not None
        return self.camera0, self.camera1


def estimate(
    model: Model,
    points0: ArrayLike,
    points1: ArrayLike,
    *,
    threshold: float,
    backend: Backend = "poselib",
    camera0: Camera | None = None,
    camera1: Camera | None = None,
    seed: int = 0,
    max_iterations: int = 10_000,
    confidence: float = 0.99999,
) -> Geometry:
    """The geometry that most of the matches ``points0[i]``, ``points1[i]`` (``[k, 2]`` pixels) agree with.

    ``threshold`` in pixels bounds the residual of an inlier: for a homography the forward transfer error ``|H x0 -
    x1|`` in image 1, for F and E the Sampson distance over both images, E's through ``F = K1^-T E K0^-1``.
    ``essential`` needs both cameras; the other models do not look at them.

    There is no model, with the reason in the result, if a coordinate is not finite; if fewer than ``MINIMUM_INLIERS``
    inliers are distinct in both images; if they lie on a line, but for one at most, in either; for F, if they do not
    move; for E, if a rotation alone explains them. A planar scene is not refused: it leaves F ambiguous and E two-fold
    so, as ever.

    The result depends on the arguments alone, in any thread; no global state is read or changed. A ``ValueError``
    names an argument out of range, or the package to install for the backend.
    """
    first, second = as_pairs(points0, points1)
    _check(model, backend, threshold, seed, max_iterations, confidence)
    if model == "essential" and (camera0 is None or camera1 is None):
        raise ValueError(f"an essential matrix needs both cameras, got camera0={camera0}, camera1={camera1}")
    task = _Task(
        model=model, points0=first, points1=second, threshold=float(threshold), camera0=camera0, camera1=camera1,
        seed=int(seed), max_iterations=int(max_iterations), confidence=float(confidence),
    )  # fmt: skip
    unusable = np.flatnonzero(~(np.abs(np.concatenate([first, second], axis=1)) < FARTHEST).all(1))
    if len(unusable):
        return _nothing(task, f"match {unusable[0]} has a coordinate that is not finite, or beyond {FARTHEST:g} pixels")
    return _solve(task, backend)


def _check(model: str, backend: str, threshold: float, seed: int, max_iterations: int, confidence: float) -> None:
    if model not in MINIMUM_INLIERS:
        raise ValueError(f"model must be one of {', '.join(MINIMUM_INLIERS)}, got {model!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if not 0 < threshold < math.inf:
        raise ValueError(f"threshold must be a positive number of pixels, got {threshold}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be in [0, 2^31), got {seed}")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")


def _solve(task: _Task, backend: str) -> Geometry:
    everything = np.ones(len(task.points0), dtype=bool)
    if reason := _too_little(task, everything, "usable matches"):
        return _nothing(task, reason)
    candidates = [matrix for matrix in BACKENDS[backend](task) if np.isfinite(matrix).all() and matrix.any()]
    if not candidates:
        return _nothing(task, f"{backend} found no {task.model}")
    matrices = [NORMALISED[task.model](matrix) for matrix in candidates]
    supports = [_residual(task, matrix) <= task.threshold for matrix in matrices]
    best = int(np.argmax([support.sum() for support in supports]))
    matrix, inliers = matrices[best], supports[best]
    if reason := _too_little(task, inliers, "inliers") or _no_motion(task, inliers):
        return _nothing(task, reason)
    if task.model == "essential":
        return _with_pose(task, matrix, inliers)
    return Geometry(model=task.model, matrix=matrix, inliers=inliers, threshold=task.threshold)


def _with_pose(task: _Task, matrix: Array, inliers: Mask) -> Geometry:
    camera0, camera1 = task.cameras
    rays = camera0.normalise(task.points0[inliers]), camera1.normalise(task.points1[inliers])
    rotation, translation, front = recover_pose(matrix, *rays)
    if front.sum() < MINIMUM_INLIERS["essential"]:
        return _nothing(task, f"only {front.sum()} of {len(front)} inliers are in front of both cameras")
    found = Geometry(model=task.model, matrix=matrix, inliers=inliers, threshold=task.threshold)
    return dataclasses.replace(found, rotation=rotation, translation=translation)


NORMALISED: dict[str, Callable[[Array], Array]] = {
    "homography": normalise_homography,
    "fundamental": normalise_epipolar,
    "essential": lambda E: normalise_epipolar(nearest_essential(E)),  # noqa: N803
}


def _nothing(task: _Task, reason: str) -> Geometry:
    inliers = np.zeros(len(task.points0), dtype=bool)
    return Geometry(model=task.model, matrix=None, inliers=inliers, threshold=task.threshold, reason=reason)


def _residual(task: _Task, matrix: Array) -> Array:
    if task.model == "homography":
        return homography_residual(matrix, task.points0, task.points1)
    if task.model == "essential":
        camera0, camera1 = task.cameras
        matrix = fundamental_from_essential(matrix, camera0.matrix, camera1.matrix)
    return sampson_distance(matrix, task.points0, task.points1)


# Degenerate matches


def _too_little(task: _Task, chosen: Mask, what: str) -> str | None:
    """Why the chosen matches determine no model: too few, too few distinct, or on a line in either image."""
    minimum = MINIMUM_INLIERS[task.model]
    images = task.points0[chosen], task.points1[chosen]
    distinct = min(len(np.unique(np.round(points / (task.threshold / 100)), axis=0)) for points in images)
    if distinct < minimum:
        return f"{distinct} distinct of {len(images[0])} {what}: a {task.model} model needs {minimum}"
    if min(spread(points) for points in images) < task.threshold / 2:
        return f"the {what} lie on a line"
    return None


def _no_motion(task: _Task, inliers: Mask) -> str | None:
    """Why the inliers say nothing about a translation; a homography does not need one."""
    points0, points1 = task.points0[inliers], task.points1[inliers]
    if task.model == "homography":
        return None
    if task.model == "fundamental":
        moving = int((np.linalg.norm(points1 - points0, axis=1) > task.threshold).sum())
        return "the inliers do not move" if moving < MINIMUM_INLIERS[task.model] else None
    parallax = rotation_residual(points0, points1, *task.cameras)
    moving = int((parallax > PARALLAX * task.threshold).sum())
    if moving < max(min(MINIMUM_INLIERS[task.model], len(points0) // 2), PARALLAX_SHARE * len(points0)):
        return "a rotation alone explains the inliers: the translation is too small to see"
    return None


# The three libraries: a checked task -> candidate matrices, none where the library found none


def _poselib(task: _Task) -> list[Array]:
    poselib = _package("poselib", "poselib")
    options = {
        "max_iterations": task.max_iterations,
        "min_iterations": min(1000, task.max_iterations),
        "success_prob": task.confidence,
        "max_reproj_error": task.threshold,
        "max_epipolar_error": task.threshold,
        "seed": task.seed,
    }
    points = task.points0, task.points1
    if task.model == "homography":
        matrix, info = poselib.estimate_homography(*points, options)
    elif task.model == "fundamental":
        matrix, info = poselib.estimate_fundamental(*points, options)
    else:
        pose, info = poselib.estimate_relative_pose(*points, *map(_poselib_camera, task.cameras), options)
        matrix = essential_from_pose(pose.R, pose.t)
    return [np.array(matrix)] if info["num_inliers"] else []  # without inliers the matrix is uninitialised memory


def _poselib_camera(camera: Camera) -> dict[str, Any]:
    (height, width), params = camera.size, [camera.fx, camera.fy, camera.cx, camera.cy]
    return {"model": "PINHOLE", "width": width, "height": height, "params": params}


def _opencv(task: _Task) -> list[Array]:
    cv2 = _package("cv2", "opencv-python-headless")
    options = cv2.UsacParams()  # MSAC, which beat MAGSAC on Oxford and Strecha; carries the seed: setRNGSeed is global
    options.threshold, options.confidence = task.threshold, task.confidence
    options.maxIterations, options.randomGeneratorState = task.max_iterations, task.seed
    points = task.points0, task.points1
    try:
        if task.model == "homography":
            matrix, _ = cv2.findHomography(*points, options)
        elif task.model == "fundamental":
            matrix, _ = cv2.findFundamentalMat(*points, options)
        else:
            matrices = [camera.matrix for camera in task.cameras]
            matrix, _ = cv2.findEssentialMat(*points, *matrices, None, None, options)
    except cv2.error:
        return []
    return [] if matrix is None else list(np.asarray(matrix, dtype=np.float64).reshape(-1, 3, 3))  # at times stacked


def _pycolmap(task: _Task) -> list[Array]:
    pycolmap = _package("pycolmap", "pycolmap")
    options = pycolmap.RANSACOptions()
    options.max_error, options.confidence, options.random_seed = task.threshold, task.confidence, task.seed
    options.max_num_trials, options.min_num_trials = task.max_iterations, min(1000, task.max_iterations)
    points = task.points0 + 0.5, task.points1 + 0.5
    to_colmap = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    if task.model == "homography":
        found = pycolmap.estimate_homography_matrix(*points, options)
        return [] if found is None else [np.linalg.inv(to_colmap) @ found["H"] @ to_colmap]
    if task.model == "fundamental":
        found = pycolmap.estimate_fundamental_matrix(*points, options)
        return [] if found is None else [to_colmap.T @ found["F"] @ to_colmap]
    cameras = [
        pycolmap.Camera(model="PINHOLE", width=c.size[1], height=c.size[0], params=[c.fx, c.fy, c.cx + 0.5, c.cy + 0.5])
        for c in task.cameras
    ]
    found = pycolmap.estimate_essential_matrix(*points, *cameras, options)
    return [] if found is None else [np.array(found["E"])]


def _package(module: str, install: str) -> Any:
    first = module not in sys.modules
    try:
        library = importlib.import_module(module)
    except ImportError:
        raise ValueError(f"this backend needs the package {module}: pip install {install}") from None
    if first and threading.current_thread() is threading.main_thread():
        for caught in (signal.SIGTERM, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV):
            if (
                signal.getsignal(caught) is signal.SIG_DFL
            ):  # pycolmap's glog has put its own there, behind Python's back
                signal.signal(caught, signal.SIG_DFL)
    return library


BACKENDS: dict[str, Callable[[_Task], list[Array]]] = {"poselib": _poselib, "opencv": _opencv, "pycolmap": _pycolmap}
