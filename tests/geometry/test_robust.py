"""Robust estimation: three libraries give one answer, and no answer where there is none."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vispe.geometry.epipolar import (
    essential_from_pose,
    fundamental_from_essential,
    normalise_epipolar,
    sampson_distance,
)
from vispe.geometry.homography import homography_residual, normalise_homography, warp_points
from vispe.geometry.pose import Camera, rotation_error, translation_error
from vispe.geometry.robust import BACKENDS, MINIMUM_INLIERS, Geometry, estimate

MODELS = tuple(MINIMUM_INLIERS)
EACH = [(model, backend) for model in MODELS for backend in BACKENDS]
CAMERA0 = Camera(fx=600, fy=610, cx=321.0, cy=236.5, size=(480, 640))
CAMERA1 = Camera(fx=800, fy=790, cx=402.5, cy=297.0, size=(600, 800))
H_TRUE = np.array([[1.1, 0.05, 20.0], [-0.04, 0.9, 15.0], [1e-4, -5e-5, 1.0]])
ANGLE = 0.15
R_TRUE = np.array([[math.cos(ANGLE), 0, math.sin(ANGLE)], [0, 1, 0], [-math.sin(ANGLE), 0, math.cos(ANGLE)]])
T_TRUE = np.array([-0.96, 0.2, 0.2]) / np.linalg.norm([-0.96, 0.2, 0.2])

pytest.importorskip("pycolmap")


def run(
    model: str, points0: Any, points1: Any, backend: str = "poselib", threshold: float = 1.0, **more: Any
) -> Geometry:
    cameras = {"camera0": CAMERA0, "camera1": CAMERA1} if model == "essential" else {}
    return estimate(model, points0, points1, threshold=threshold, backend=backend, **{**cameras, **more})  # type: ignore[arg-type]


def project(world: np.ndarray, camera: Camera) -> np.ndarray:
    pixels = world @ camera.matrix.T
    return pixels[:, :2] / pixels[:, 2:]


def views(k: int, seed: int = 0, R: np.ndarray = R_TRUE, t: np.ndarray = T_TRUE) -> tuple[np.ndarray, np.ndarray]:  # noqa: N803
    """Exact projections of k points in space."""
    world = np.random.default_rng(seed).uniform([-1.5, -1.2, 4], [1.5, 1.2, 8], (k, 3))
    return project(world, CAMERA0), project(world @ R.T + t, CAMERA1)


def matches(model: str, k: int, seed: int = 0, noise: float = 0.0, outliers: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """k matches of a model, exact or with Gaussian noise in image 1, then outliers."""
    rng = np.random.default_rng(seed + 1)
    if model == "homography":
        points0 = rng.uniform([0, 0], [640, 480], (k, 2))
        points1 = warp_points(H_TRUE, points0)
    else:
        points0, points1 = views(k, seed)
    points1 = points1 + rng.normal(0, 1, points1.shape) * noise
    wild = rng.uniform([0, 0], [640, 480], (2, outliers, 2))
    return np.concatenate([points0, wild[0]]), np.concatenate([points1, wild[1]])


def truth(model: str) -> np.ndarray:
    if model == "homography":
        return normalise_homography(H_TRUE)
    E = essential_from_pose(R_TRUE, T_TRUE)  # noqa: N806
    return normalise_epipolar(
        E if model == "essential" else fundamental_from_essential(E, CAMERA0.matrix, CAMERA1.matrix)
    )


def assert_nothing(found: Geometry, k: int) -> None:
    assert not found.ok
    assert found.matrix is None
    assert found.rotation is None
    assert found.translation is None
    assert found.inliers.dtype == bool
    assert found.inliers.shape == (k,)
    assert found.num_inliers == 0
    assert found.reason


# One answer


@pytest.mark.parametrize(("model", "backend"), EACH)
def test_exact_matches_among_outliers(model: str, backend: str) -> None:
    points0, points1 = matches(model, 150, outliers=70)
    found = run(model, points0, points1, backend, threshold=0.1)
    assert found.reason is None
    assert found.ok
    assert found.inliers[:150].all()
    assert found.num_inliers <= 150 + 2  # a line is hit by chance now and then
    assert found.matrix is not None
    error = np.abs(found.matrix - truth(model)).max() / np.abs(truth(model)).max()
    assert error < (1e-3 if backend == "opencv" else 1e-6)  # OpenCV's USAC works in float32
    assert found.matrix.dtype == np.float64
    if model == "homography":
        assert homography_residual(found.matrix, points0[:150], points1[:150]).max() < 1e-2
        assert found.matrix[2, 2] == 1
    elif model == "fundamental":
        assert sampson_distance(found.matrix, points0[:150], points1[:150]).max() < 1e-2
        assert np.linalg.norm(found.matrix) == pytest.approx(1)
    else:
        assert found.rotation is not None
        assert found.translation is not None
        assert rotation_error(found.rotation, R_TRUE) < 0.01
        assert translation_error(found.translation, T_TRUE) < 0.03
        assert found.translation @ T_TRUE > 0.99  # and the sign is right
        again = normalise_epipolar(essential_from_pose(found.rotation, found.translation))
        np.testing.assert_allclose(again, found.matrix, atol=1e-12)


@pytest.mark.parametrize(("model", "backend"), EACH)
def test_noisy_matches(model: str, backend: str) -> None:
    points0, points1 = matches(model, 300, noise=0.5, outliers=200)
    found = run(model, points0, points1, backend, threshold=2.0)
    assert found.ok
    assert found.inliers[:300].mean() > 0.93
    assert found.inliers[300:].mean() < 0.06
    if model == "essential":
        assert found.rotation is not None
        assert found.translation is not None
        assert rotation_error(found.rotation, R_TRUE) < 0.5
        assert translation_error(found.translation, T_TRUE) < 3


@pytest.mark.parametrize(("model", "backend"), EACH)
def test_the_inliers_are_those_of_our_residual(model: str, backend: str) -> None:
    points0, points1 = matches(model, 200, noise=0.7, outliers=100)
    found = run(model, points0, points1, backend, threshold=1.5)
    assert found.matrix is not None
    if model == "homography":
        residual = homography_residual(found.matrix, points0, points1)
    elif model == "fundamental":
        residual = sampson_distance(found.matrix, points0, points1)
    else:
        F = fundamental_from_essential(found.matrix, CAMERA0.matrix, CAMERA1.matrix)  # noqa: N806
        residual = sampson_distance(F, points0, points1)
    np.testing.assert_array_equal(found.inliers, residual <= 1.5)
    assert found.threshold == 1.5


@pytest.mark.parametrize("model", MODELS)
def test_the_half_pixel_of_colmap_leaves_no_trace(model: str) -> None:
    """Half a pixel too much on one side shows in H and F at once, and in E through the principal points."""
    points0, points1 = matches(model, 100)
    a, b = run(model, points0, points1, "poselib"), run(model, points0, points1, "pycolmap")
    assert a.matrix is not None
    assert b.matrix is not None
    np.testing.assert_allclose(a.matrix, b.matrix, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("model", "backend"), EACH)
def test_fewest_matches_that_make_a_model(model: str, backend: str) -> None:
    fewest = MINIMUM_INLIERS[model]
    points0, points1 = matches(model, fewest, seed=4)
    assert run(model, points0, points1, backend).num_inliers == fewest
    assert_nothing(run(model, points0[1:], points1[1:], backend), fewest - 1)


# No answer


def collinear(k: int = 20) -> np.ndarray:
    return np.stack([np.linspace(20, 600, k), np.linspace(50, 400, k)], 1)


def degenerate(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Matches that determine none of the models."""
    rng = np.random.default_rng(1)
    line, area = collinear(), rng.uniform(0, 480, (20, 2))
    if case.isdigit():
        return area[: int(case)], warp_points(H_TRUE, area[: int(case)])
    both = {
        "collinear": (line, line * 0.9 + 7),
        "collinear up to noise": (line + rng.normal(0, 0.2, line.shape), line * 0.9 + 7),
        "collinear in image 0": (line, area),
        "collinear in image 1": (area, line),
        "collinear but one": (np.vstack([line, [[300, 20]]]), np.vstack([line + 5, [[320, 60]]])),
        "identical": (np.full((20, 2), 100.0), np.full((20, 2), 120.0)),
        "identical in image 1": (area, np.full((20, 2), 120.0)),
        "five points, four times": (np.tile(area[:5], (4, 1)), np.tile(warp_points(H_TRUE, area[:5]), (4, 1))),
        "not one finite": (np.full((20, 2), np.nan), area),
        "infinite": (area, np.full((20, 2), np.inf)),
        "enormous": (area * 1e300, area * -1e300),
    }
    return both[case]


CASES = [
    *("0", "1", "3", "4", "5", "collinear", "collinear up to noise", "collinear in image 0", "collinear in image 1"),
    *("collinear but one", "identical", "identical in image 1", "five points, four times"),
    *("not one finite", "infinite", "enormous"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("model", "backend"), EACH)
def test_degenerate_matches_give_no_model(model: str, backend: str, case: str) -> None:
    points0, points1 = degenerate(case)
    assert_nothing(run(model, points0, points1, backend), len(points0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize(("model", "backend"), EACH)
def test_one_bad_point_among_twenty_is_no_model_and_is_named(model: str, backend: str, bad: float) -> None:
    points0, points1 = matches(model, 20)
    assert run(model, points0, points1, backend).ok
    points1[11, 0] = bad
    found = run(model, points0, points1, backend)
    assert_nothing(found, 20)
    assert "match 11" in str(found.reason)


def test_pycolmap_leaves_the_signals_alone() -> None:
    """Its glog installs handlers of its own when imported."""
    pytest.importorskip("pycolmap")
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("the handlers are read from /proc")
    code = """
import re, numpy as np
from vispe.geometry.robust import estimate
caught = lambda: re.search("SigCgt:(.*)", open("/proc/self/status").read())[1]
before = caught()
estimate("homography", np.random.rand(20, 2), np.random.rand(20, 2), threshold=1.0, backend="pycolmap")
print(before.strip(), caught().strip())
"""
    before, after = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(before, 16) | 1 << 6 == int(after, 16) | 1 << 6  # SIGBUS has no portable name


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_matches_support_nothing(backend: str) -> None:
    rng = np.random.default_rng(0)
    points0, points1 = rng.uniform(0, 1e4, (2, 12, 2))
    assert_nothing(run("homography", points0, points1, backend), 12)


@pytest.mark.parametrize(("k", "outliers", "noise"), [(140, 60, 0.0), (140, 60, 0.3), (12, 6, 0.0), (600, 900, 0.5)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pure_rotation_has_no_pose(backend: str, k: int, outliers: int, noise: float) -> None:
    """Whatever translation is handed out fits the inliers, and with it some of the outliers."""
    rng = np.random.default_rng(9)
    points0, points1 = views(k + outliers, t=np.zeros(3))
    points1 = points1 + rng.normal(0, 1, points1.shape) * noise
    points1[k:] = rng.uniform([0, 0], [800, 600], (outliers, 2))
    found = run("essential", points0, points1, backend, threshold=1.0 if noise < 0.5 else 1.5)
    assert_nothing(found, k + outliers)
    assert found.reason is not None
    assert "rotation" in found.reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_with_itself(backend: str) -> None:
    """The identity is a homography; there is no epipolar geometry without motion."""
    points = views(100)[0]
    found = run("homography", points, points, backend)
    np.testing.assert_allclose(found.matrix, np.eye(3), atol=1e-5)  # type: ignore[arg-type]
    assert_nothing(run("fundamental", points, points, backend), 100)
    assert_nothing(run("essential", points, points, backend, camera1=CAMERA0), 100)


@pytest.mark.parametrize(("model", "backend"), EACH)
def test_duplicated_matches_do_not_count_twice_nor_harm(model: str, backend: str) -> None:
    points0, points1 = (np.repeat(points, 3, axis=0) for points in matches(model, 30))
    assert run(model, points0, points1, backend).num_inliers == 90


# What the libraries may hand out


@pytest.mark.parametrize("rubbish", [[], [np.zeros((3, 3))], [np.full((3, 3), np.nan)], [np.full((3, 3), np.inf)]])
@pytest.mark.parametrize("model", MODELS)
def test_rubbish_is_no_model(monkeypatch: pytest.MonkeyPatch, model: str, rubbish: list[np.ndarray]) -> None:
    monkeypatch.setitem(BACKENDS, "poselib", lambda task: rubbish)
    found = run(model, *matches(model, 30))
    assert_nothing(found, 30)
    assert found.reason == f"poselib found no {model}"


@pytest.mark.parametrize("model", MODELS)
def test_of_several_matrices_the_best_supported_is_taken(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    wrong = normalise_epipolar(np.arange(9.0).reshape(3, 3))
    monkeypatch.setitem(BACKENDS, "poselib", lambda task: [wrong, np.full((3, 3), np.nan), -5 * truth(model), wrong.T])
    found = run(model, *matches(model, 30))
    np.testing.assert_allclose(found.matrix, truth(model), rtol=1e-6, atol=1e-12)  # type: ignore[arg-type]


def test_stacked_matrices_of_opencv_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import cv2

    stacked = np.concatenate([np.eye(3), truth("essential"), np.ones((3, 3))])
    monkeypatch.setattr(cv2, "findEssentialMat", lambda *args: (stacked, None))
    assert run("essential", *matches("essential", 30), "opencv").num_inliers == 30


def test_an_error_of_opencv_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import cv2

    def fail(*args: object) -> None:
        raise cv2.error("assertion failed")

    monkeypatch.setattr(cv2, "findHomography", fail)
    assert_nothing(run("homography", *matches("homography", 30), "opencv"), 30)
    monkeypatch.setattr(cv2, "findHomography", lambda *args: (None, None))
    assert_nothing(run("homography", *matches("homography", 30), "opencv"), 30)


def test_a_matrix_of_poselib_without_inliers_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import poselib

    monkeypatch.setattr(poselib, "estimate_homography", lambda *args: (H_TRUE, {"num_inliers": 0}))
    assert_nothing(run("homography", *matches("homography", 30)), 30)


# Repeatable


@pytest.mark.parametrize(("model", "backend"), EACH)
def test_seeded_runs_repeat_from_several_threads_at_once(model: str, backend: str) -> None:
    points0, points1 = matches(model, 60, noise=1.0, outliers=90)
    jobs = [seed % 4 for seed in range(24)]

    def one(seed: int) -> tuple[bytes, bytes]:
        found = run(model, points0, points1, backend, seed=seed, max_iterations=300)
        return (b"" if found.matrix is None else found.matrix.tobytes()), found.inliers.tobytes()

    serial = {seed: one(seed) for seed in range(4)}
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, jobs)) == [serial[seed] for seed in jobs]


@pytest.mark.parametrize(("model", "backend"), EACH)
def test_the_seed_is_used(model: str, backend: str) -> None:
    points0, points1 = matches(model, 60, noise=1.0, outliers=30)
    found = [run(model, points0, points1, backend, seed=seed, max_iterations=5) for seed in range(8)]
    assert len({one.inliers.tobytes() for one in found}) > 1


@pytest.mark.parametrize("model", MODELS)
def test_no_global_random_state_is_read_or_changed(model: str) -> None:
    import cv2

    points0, points1 = matches(model, 60, noise=1.0, outliers=90)

    def draw() -> list[float]:
        return cv2.randu(np.zeros((1, 4)), 0, 1).ravel().tolist()

    cv2.setRNGSeed(5)
    untouched, threads = draw(), cv2.getNumThreads()
    results, state = [], np.random.get_state()[1].tobytes()  # noqa: NPY002
    for backend in BACKENDS:
        for rng_seed in (5, 77):
            cv2.setRNGSeed(rng_seed)
            results.append(run(model, points0, points1, backend).matrix)
            if rng_seed == 5:
                assert draw() == untouched
        np.testing.assert_array_equal(results[-1], results[-2])
    assert np.random.get_state()[1].tobytes() == state  # noqa: NPY002
    assert cv2.getNumThreads() == threads


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(EACH),
    st.integers(0, 25),
    st.integers(0, 2**31 - 1),
    st.floats(0.01, 100),
    st.sampled_from([0.0, 1.0, 40.0, math.nan]),
)
def test_any_matches_give_a_finite_model_or_a_reason(each, k: int, seed: int, threshold: float, grid: float) -> None:
    """Random points, points on a coarse grid (many coincide or are collinear), and points that are not numbers."""
    model, backend = each
    points = np.random.default_rng(seed).uniform(0, 300, (2, k, 2))
    if grid:
        points = np.round(points / grid) * grid
    found = run(model, points[0], points[1], backend, threshold=threshold, seed=seed, max_iterations=100)
    assert found.inliers.shape == (k,)
    if found.matrix is None:
        assert_nothing(found, k)
    else:
        assert np.isfinite(found.matrix).all()
        assert found.num_inliers >= MINIMUM_INLIERS[model]


@settings(max_examples=10, deadline=None)
@given(st.floats(-200, 200), st.floats(-200, 200), st.sampled_from(sorted(BACKENDS)))
def test_shifting_image_1_shifts_the_homography(dx: float, dy: float, backend: str) -> None:
    points0, points1 = matches("homography", 80)
    shift = np.array([[1, 0, dx], [0, 1, dy], [0, 0, 1]])
    found = run("homography", points0, points1 + np.array([dx, dy]), backend)
    assert homography_residual(shift @ H_TRUE, points0, warp_points(found.matrix, points0)).max() < 1e-2  # type: ignore[arg-type]


# Mistakes


@pytest.mark.parametrize(
    ("change", "received"),
    [
        ({"model": "affine"}, "'affine'"),
        ({"backend": "magsac"}, "'magsac'"),
        ({"threshold": 0}, "got 0"),
        ({"threshold": -1.5}, "-1.5"),
        ({"threshold": math.nan}, "nan"),
        ({"threshold": math.inf}, "inf"),
        ({"seed": -1}, "-1"),
        ({"max_iterations": 0}, "got 0"),
        ({"confidence": 1.0}, "1.0"),
        ({"model": "essential"}, "camera0=None"),
        ({"points0": np.zeros((3, 3))}, r"\(3, 3\)"),
        ({"points0": np.zeros((3, 2))}, "3 and 0 rows"),
    ],
)
def test_mistakes_name_what_was_received(change: dict[str, Any], received: str) -> None:
    call = {"model": "homography", "points0": [], "points1": [], "threshold": 1.0, **change}
    with pytest.raises(ValueError, match=received):
        estimate(call.pop("model"), call.pop("points0"), call.pop("points1"), **call)


@pytest.mark.parametrize(
    ("backend", "module", "install"),
    [
        ("poselib", "poselib", "poselib"),
        ("opencv", "cv2", "opencv-python-headless"),
        ("pycolmap", "pycolmap", "pycolmap"),
    ],
)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, backend: str, module: str, install: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"pip install {install}"):
        run("homography", *matches("homography", 20), backend)
