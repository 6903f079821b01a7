"""Estimators as published code calls them: the same calls give the same bytes, and every failure is one thing."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.geometry.benchmark import (
    HOMOGRAPHY,
    POSE,
    Estimate,
    homography_dlt,
    homography_opencv,
    homography_poselib,
    pose_opencv,
    pose_poselib,
)
from vispe.geometry.homography import corner_error, homography_residual, normalise_homography, warp_points
from vispe.geometry.pose import pose_error, translation_error
from vispe.metrics.auc import error_auc

K0 = np.array([[600, 0, 321.0], [0, 610, 236.5], [0, 0, 1]])
K1 = np.array([[800, 0, 402.5], [0, 790, 297.0], [0, 0, 1]])
H_TRUE = np.array([[1.1, 0.05, 20.0], [-0.04, 0.9, 15.0], [1e-4, -5e-5, 1.0]])
T_TRUE = np.array([-0.96, 0.2, 0.2]) / np.linalg.norm([-0.96, 0.2, 0.2])
THRESHOLD = {"poselib": 2.0, "opencv": 0.5}


def turn(degrees: float, axis: int = 1) -> np.ndarray:
    """A rotation about one axis."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    a, b = [i for i in range(3) if i != axis]
    R = np.eye(3)  # noqa: N806
    R[a, a], R[b, b], R[a, b], R[b, a] = c, c, -s, s
    return R


def planar(k: int, noise: float = 0.0, outliers: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Matches of H_TRUE with Gaussian noise in image 1; the last ones are wrong."""
    rng = np.random.default_rng(seed)
    points0 = rng.uniform([0, 0], [640, 480], (k, 2))
    points1 = warp_points(H_TRUE, points0) + rng.normal(0, 1, (k, 2)) * noise
    points1[k - outliers :] = rng.uniform([0, 0], [640, 480], (outliers, 2))
    return points0, points1


R_TRUE = turn(9)


def views(
    k: int,
    noise: float = 0.0,
    outliers: int = 0,
    R: np.ndarray = R_TRUE,  # noqa: N803
    t: np.ndarray = T_TRUE,
) -> tuple[np.ndarray, np.ndarray]:
    """Projections of k points in space 4 to 8 away, with Gaussian noise in image 1; the last ones are wrong."""
    rng = np.random.default_rng(0)
    world = rng.uniform([-1.5, -1.2, 4], [1.5, 1.2, 8], (k, 3))
    rays0, rays1 = world, world @ R.T + t
    points0, points1 = ((rays @ K.T)[:, :2] / rays[:, 2:] for rays, K in ((rays0, K0), (rays1, K1)))
    points1 = points1 + rng.normal(0, 1, (k, 2)) * noise
    points1[k - outliers :] = rng.uniform([0, 0], [800, 600], (outliers, 2))
    return points0, points1


def homography(name: str, points0: Any, points1: Any) -> Estimate:
    return HOMOGRAPHY[name](points0, points1, THRESHOLD.get(name), None)


def pose(name: str, points0: Any, points1: Any, threshold: float = 1.0) -> Estimate:
    return POSE[name](points0, points1, K0, K1, threshold)


def error(found: Estimate, R: np.ndarray = R_TRUE, t: np.ndarray = T_TRUE) -> float:  # noqa: N803
    return pose_error(found.rotation, found.translation, R, t)


def assert_nothing(found: Estimate, k: int) -> None:
    assert not found.ok
    assert (found.matrix, found.rotation, found.translation) == (None, None, None)
    assert found.inliers.dtype == bool
    assert found.inliers.shape == (k,)
    assert found.num_inliers == 0


# A model where there is one


@pytest.mark.parametrize("name", HOMOGRAPHY)
def test_homographies_of_exact_matches(name: str) -> None:
    points0, points1 = planar(100)
    before = points0.copy(), points1.copy()
    found = homography(name, points0, points1)
    assert found.ok
    assert found.matrix is not None
    assert found.matrix.dtype == np.float64
    assert found.matrix[2, 2] == 1
    assert found.num_inliers == 100
    assert corner_error(found.matrix, H_TRUE, (480, 640)) < (1e-3 if name == "opencv" else 1e-6)  # OpenCV: float32
    np.testing.assert_array_equal(before, (points0, points1))


@pytest.mark.parametrize("name", THRESHOLD)
def test_homographies_among_outliers(name: str) -> None:
    points0, points1 = planar(300, noise=0.3, outliers=120)
    found = HOMOGRAPHY[name](points0, points1, 2.0, None)
    assert corner_error(found.matrix, H_TRUE, (480, 640)) < 0.5
    assert found.inliers[:180].mean() > 0.99
    assert found.inliers[180:].mean() < 0.05
    assert found.matrix is not None
    if name == "opencv":  # its inliers are those of the RANSAC model, the matrix is refined afterwards
        assert (homography_residual(found.matrix, points0, points1) < 2.5)[found.inliers].all()


@pytest.mark.parametrize("name", POSE)
def test_poses_of_exact_and_of_noisy_matches(name: str) -> None:
    exact = pose(name, *views(150))
    assert exact.num_inliers == 150
    assert error(exact) < 1e-3
    noisy = pose(name, *views(400, noise=0.4, outliers=150))
    assert error(noisy) < 1.5
    assert noisy.inliers[:250].mean() > 0.9
    assert noisy.inliers[250:].mean() < 0.1
    assert noisy.rotation is not None
    assert noisy.translation is not None
    assert noisy.rotation.shape == (3, 3)
    assert noisy.translation.shape == (3,)
    np.testing.assert_allclose(noisy.rotation @ noisy.rotation.T, np.eye(3), atol=1e-6)


@pytest.mark.parametrize("name", POSE)
def test_a_camera_on_its_head_and_the_sign_of_the_translation(name: str) -> None:
    # Turned by 180 degrees about the viewing axis, where the acos of a trace is at its worst.
    upside = turn(180, axis=2)
    found = pose(name, *views(150, R=upside), threshold=0.1)
    assert error(found, R=upside) < 0.01
    assert error(found, R=np.eye(3)) == pytest.approx(180, abs=0.01)
    assert found.translation is not None
    assert found.translation @ T_TRUE > 0.99  # points in front of the cameras decide the sign ...
    assert translation_error(-found.translation, T_TRUE) < 0.01  # ... which the published error does not judge


@pytest.mark.parametrize("name", POSE)
def test_the_unit_of_the_pixel_does_not_matter(name: str) -> None:
    points0, points1 = views(200, noise=0.3, outliers=60)
    twice = np.diag([2.0, 2, 1])
    plain = POSE[name](points0, points1, K0, K1, 0.5)
    scaled = POSE[name](2 * points0, 2 * points1, twice @ K0, twice @ K1, 1.0)
    np.testing.assert_array_equal(plain.inliers, scaled.inliers)
    assert pose_error(plain.rotation, plain.translation, scaled.rotation, scaled.translation) < 1e-6


def test_the_threshold_is_divided_by_the_mean_of_four_focal_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    # (600 + 610 + 800 + 790) / 4 = 700. SuperGlue's (K0's fx and K1's fy, twice) would be 695.
    given_to: dict[str, Any] = {}

    def spy(*args: Any, **options: Any) -> tuple[None, None]:
        given_to.update(options)
        return None, None

    monkeypatch.setattr(cv2, "findEssentialMat", spy)
    assert_nothing(pose_opencv(*views(20), K0, K1, 0.7), 20)
    assert given_to == {"method": cv2.RANSAC, "prob": 0.99999, "threshold": pytest.approx(0.001)}


# The published calls


def published_pose(points0: np.ndarray, points1: np.ndarray, threshold: float) -> tuple[Any, ...] | None:
    """What SuperGlue, LoFTR and glue-factory ask of OpenCV, with the 1e9 at the place where they put it."""
    rays0, rays1 = (points0 - K0[:2, 2]) / np.diag(K0)[:2], (points1 - K1[:2, 2]) / np.diag(K1)[:2]
    options = {"threshold": threshold / 700, "prob": 0.99999, "method": cv2.RANSAC}
    stacked, mask = cv2.findEssentialMat(rays0, rays1, np.eye(3), **options)
    answers = []
    for E in np.split(stacked, len(stacked) // 3):  # noqa: N806
        count, R, t, _ = cv2.recoverPose(E, rays0, rays1, np.eye(3), 1e9, mask=mask)  # noqa: N806
        answers.append((count, R, t[:, 0], mask.ravel() > 0))
    best = max(answers, key=lambda answer: answer[0])  # the first of equals
    return best[1:] if best[0] > 0 else None


@pytest.mark.parametrize(("k", "noise", "outliers"), [(5, 0, 0), (5, 1, 0), (5, 3, 0), (6, 1, 0), (300, 0.5, 120)])
def test_pose_by_opencv_is_the_published_call(k: int, noise: float, outliers: int) -> None:
    points = views(k, noise, outliers)
    found, expected = pose_opencv(*points, K0, K1, 0.5), published_pose(*points, 0.5)
    assert expected is not None
    for ours, theirs in zip((found.rotation, found.translation, found.inliers), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_points_beyond_fifty_baselines_do_not_count() -> None:
    """The published 1e9 does not reach OpenCV: with a baseline of 0.02 all points are 200 baselines away or more."""
    far = views(200, t=0.02 * T_TRUE)
    assert published_pose(*far, 0.5) is None
    assert_nothing(pose_opencv(*far, K0, K1, 0.5), 200)
    assert error(pose_poselib(*far, K0, K1, 0.5)) < 0.1
    # At 0.1 those nearer than 5 are within 50 baselines, and they alone are the inliers.
    near = views(200, t=0.1 * T_TRUE)
    found = pose_opencv(*near, K0, K1, 0.5)
    assert error(found) < 0.1
    assert 20 < found.num_inliers < 90


def test_homography_by_opencv_is_the_published_call() -> None:
    for points in (planar(300, 0.5, 150), planar(4), planar(40, 1.0, 30)):
        matrix, mask = cv2.findHomography(
            *(p.astype(np.float32) for p in points), cv2.RANSAC, 0.5, maxIters=3000, confidence=0.995
        )
        found = homography_opencv(*points, 0.5)  # OpenCV makes float32 of our float64
        np.testing.assert_array_equal(found.matrix, normalise_homography(matrix))
        np.testing.assert_array_equal(found.inliers, mask.ravel() > 0)


def test_poselib_has_its_own_defaults() -> None:
    poselib = pytest.importorskip("poselib")
    points = planar(300, 0.5, 150)
    matrix, info = poselib.estimate_homography(*points, {"max_reproj_error": 2.0})
    found = homography_poselib(*points, 2.0)
    np.testing.assert_array_equal(found.matrix, normalise_homography(matrix))
    np.testing.assert_array_equal(found.inliers, info["inliers"])
    cameras = [
        {"model": "PINHOLE", "width": 640, "height": 480, "params": [K[0, 0], K[1, 1], K[0, 2], K[1, 2]]}
        for K in (K0, K1)
    ]  # the size is not ours: a pinhole does not look at it
    points = views(300, 0.5, 120)
    theirs, info = poselib.estimate_relative_pose(*points, *cameras, {"max_epipolar_error": 2.0})
    ours = pose_poselib(*points, K0, K1, 2.0)
    np.testing.assert_array_equal(ours.rotation, theirs.R)
    np.testing.assert_array_equal(ours.translation, theirs.t)
    np.testing.assert_array_equal(ours.inliers, info["inliers"])


# The DLT

EIGHT0 = np.array([[10, 20], [300, 40], [280, 220], [30, 200], [150, 120], [90, 60], [220, 180], [60, 150.0]])
EIGHT1 = np.array([[22, 31], [310, 28], [305, 230], [36, 215], [164, 130], [105, 66], [240, 188], [70, 167.0]])
SCORES = np.array([0.9, 0.8, 0.7, 0.95, 0.2, 0.5, 0.99, 0.3])


def test_dlt_values_of_kornia() -> None:
    """Measured with kornia 0.6.12 and 0.8.1 in float64, equal in both; kornia 0.9 gives the second only."""
    weighted = [
        [9.4600986728925651e-01, -3.8192362800300805e-02, 1.4131916047074837e01],
        [-6.9716945716386758e-02, 9.5761161780144666e-01, 1.1771000665443168e01],
        [-1.1552121019460417e-04, -3.8347730944605929e-04, 1],
    ]
    alike = [
        [9.6456724717818887e-01, -3.4473277653035053e-02, 1.3898782463451724e01],
        [-6.8671565085758016e-02, 9.7943280123039478e-01, 1.1737801028010416e01],
        [-6.9642802582462344e-05, -3.4119466357888847e-04, 1],
    ]
    np.testing.assert_allclose(homography_dlt(EIGHT0, EIGHT1, SCORES).matrix, weighted, rtol=1e-6)
    np.testing.assert_allclose(homography_dlt(EIGHT0, EIGHT1).matrix, alike, rtol=1e-6)


@pytest.mark.parametrize(("noise", "outliers"), [(0.0, 0), (0.5, 0), (1.0, 60)])
def test_dlt_is_kornias(noise: float, outliers: int) -> None:
    kornia, torch = pytest.importorskip("kornia"), pytest.importorskip("torch")
    points = planar(200, noise, outliers)
    tensors = [torch.tensor(p)[None] for p in points]
    weights = [None, np.full(200, 0.3)]
    if tuple(map(int, kornia.__version__.split(".")[:2])) < (0, 9):  # later ones weigh the normalisation too
        weights.append(np.random.default_rng(0).uniform(0, 1, 200))
    for weight in weights:
        scores = None if weight is None else torch.tensor(weight)[None]
        theirs = kornia.geometry.homography.find_homography_dlt(*tensors, scores)[0].numpy()
        ours = homography_dlt(*points, weight).matrix
        np.testing.assert_allclose(ours, normalise_homography(theirs), rtol=1e-6, atol=1e-9)


def test_dlt_by_definition_in_loops() -> None:
    """Hartley's normalisation without the weights, two weighted rows a match, and ``A^T W A h = 1``."""

    def similarity(points: np.ndarray) -> np.ndarray:
        mean = points.mean(0)
        scale = math.sqrt(2) / np.mean([math.dist(p, mean) for p in points])
        return np.array([[scale, 0, -scale * mean[0]], [0, scale, -scale * mean[1]], [0, 0, 1]])

    to0, to1 = similarity(EIGHT0), similarity(EIGHT1)
    normal = np.zeros((9, 9))
    for (x, y), (u, v), w in zip(warp_points(to0, EIGHT0), warp_points(to1, EIGHT1), SCORES, strict=True):
        for row in ([0, 0, 0, -x, -y, -1, v * x, v * y, v], [x, y, 1, 0, 0, 0, -u * x, -u * y, -u]):
            normal += w * np.outer(row, row)
    h = np.linalg.solve(normal, np.ones(9)).reshape(3, 3)
    expected = normalise_homography(np.linalg.inv(to1) @ h @ to0)
    np.testing.assert_allclose(homography_dlt(EIGHT0, EIGHT1, SCORES).matrix, expected, rtol=1e-6)


@given(st.integers(0, 1000), st.floats(0.01, 100))
def test_dlt_only_sees_relative_weights_and_no_order(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    points0, points1 = planar(30, noise=1.0, seed=seed)
    weights, order = rng.uniform(0.1, 1, 30), rng.permutation(30)
    plain = homography_dlt(points0, points1, weights).matrix
    for other in (
        homography_dlt(points0, points1, weights * factor),
        homography_dlt(points0[order], points1[order], weights[order]),
    ):
        np.testing.assert_allclose(warp_points(other.matrix, points0), warp_points(plain, points0), atol=1e-6)


def test_dlt_of_square_corners_and_of_identical_images() -> None:
    """Their normal matrix is singular to the last bit or nearly so: its null vector is the answer."""
    square = np.array([[0, 0], [100, 0], [100, 80], [0, 80.0]])
    np.testing.assert_allclose(homography_dlt(square, square + 5).matrix, [[1, 0, 5], [0, 1, 5], [0, 0, 1]], atol=1e-9)
    np.testing.assert_allclose(homography_dlt(EIGHT0, EIGHT0).matrix, np.eye(3), atol=1e-9)


def test_dlt_is_blind_to_a_turn_by_120_degrees() -> None:
    """One step from (1, ..., 1) cannot find a vector at right angles to it: cos + cos + 1 = 0. kornia's neither."""
    points0, _ = planar(200)
    noise = np.random.default_rng(1).normal(0, 0.5, (200, 2))
    errors = []
    for degrees in (90, 120):
        H = turn(degrees, axis=2) + np.array([[0, 0, 400], [0, 0, 100], [0, 0, 0]])  # noqa: N806
        found = homography_dlt(points0, warp_points(H, points0) + noise)
        errors.append(corner_error(found.matrix, H, (480, 640)))
    assert errors[0] < 0.5
    assert errors[1] > 5


# No model


def degenerate(case: str) -> tuple[np.ndarray, np.ndarray]:
    points0, points1 = views(20)
    if case.isdigit():
        return points0[: int(case)], points1[: int(case)]
    same, hole = np.full((20, 2), 100.0), points0.copy()
    hole[7] = np.nan
    return {
        "identical": (same, same + 20),
        "not one finite": (np.full((20, 2), np.nan), points1),
        "one not finite": (hole, points1),
        "infinite": (points0, np.full((20, 2), np.inf)),
        "overflowing": (points0, points1 * 3e305),
        "enormous": (points0 * 1e300, points1 * -1e300),
    }[case]


NO_HOMOGRAPHY = [
    *((name, case) for name in HOMOGRAPHY for case in ("0", "1", "3", "identical", "not one finite", "infinite")),
    *((name, "one not finite") for name in ("poselib", "dlt")),
    ("dlt", "overflowing"),
    *((name, "enormous") for name in ("poselib", "opencv")),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "case"), NO_HOMOGRAPHY)
def test_no_homography(name: str, case: str) -> None:
    points0, points1 = degenerate(case)
    found = homography(name, points0, points1)
    assert_nothing(found, len(points0))
    assert corner_error(found.matrix, H_TRUE, (480, 640)) == math.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", POSE)
@pytest.mark.parametrize("case", ["0", "1", "4", "not one finite", "infinite"])
def test_no_pose(name: str, case: str) -> None:
    points0, points1 = degenerate(case)
    found = pose(name, points0, points1)
    assert_nothing(found, len(points0))
    assert error(found) == math.inf


@pytest.mark.parametrize("name", POSE)
@pytest.mark.parametrize("case", ["5", "6", "identical", "one not finite", "enormous"])
def test_poor_matches_raise_nothing(name: str, case: str) -> None:
    """Published code judges whatever pose comes of them, and so do we; it is a proper one, or nothing."""
    points0, points1 = degenerate(case)
    found = pose(name, points0, points1)
    assert found.inliers.shape == (len(points0),)
    if found.ok:
        assert found.rotation is not None
        assert found.translation is not None
        np.testing.assert_allclose(found.rotation @ found.rotation.T, np.eye(3), atol=1e-6)
        assert np.linalg.det(found.rotation) > 0
        assert found.translation.any()


def test_no_model_counts_as_a_failure() -> None:
    # One perfect pair and one that failed: half the recall from the first pixel on.
    exact, nothing = homography("poselib", *planar(100)), homography("poselib", *planar(3))
    errors = [corner_error(found.matrix, H_TRUE, (480, 640)) for found in (exact, nothing)]
    np.testing.assert_allclose(error_auc(errors, [1, 3, 5]), [0.5, 0.5, 0.5], atol=1e-6)
    poses = [error(pose("poselib", *views(k))) for k in (100, 4)]
    np.testing.assert_allclose(error_auc(poses, [5, 10, 20]), [0.5, 0.5, 0.5], atol=1e-6)


# The same answer, always


def everything() -> str:
    """A digest of what every estimator makes of the same matches."""
    digest = hashlib.sha256()
    for name in HOMOGRAPHY:
        found = homography(name, *planar(200, 0.5, 80))
        digest.update(np.ascontiguousarray(found.matrix).tobytes() + found.inliers.tobytes())
    for name in POSE:
        for points in (views(200, 0.5, 80), views(5, 1.0)):
            found = pose(name, *points)
            for array in (found.rotation, found.translation, found.inliers):
                digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def test_the_same_bytes_twice_and_in_another_process() -> None:
    first = everything()
    cv2.setRNGSeed(12345)  # OpenCV's global generator has no part in it
    assert everything() == first
    program = f"import runpy; print(runpy.run_path({__file__!r})['everything']())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.split()[-1] == first


def test_poselib_follows_its_seed() -> None:
    points = views(200, 0.5, 80)
    first, again, other = (pose_poselib(*points, K0, K1, 2.0, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.translation, again.translation)
    np.testing.assert_array_equal(first.translation, pose("poselib", *points, threshold=2.0).translation)
    assert (np.asarray(first.translation) != np.asarray(other.translation)).any()
    matrices = [homography_poselib(*planar(200, 0.5, 80), 2.0, seed=seed).matrix for seed in (0, 0, 1)]
    np.testing.assert_array_equal(matrices[0], matrices[1])


# Mistakes


def test_mistakes_name_what_was_received() -> None:
    points = planar(20)
    for name in THRESHOLD:
        with pytest.raises(ValueError, match="got -1"):
            HOMOGRAPHY[name](*points, -1, None)
        with pytest.raises(ValueError, match="needs a threshold in pixels, got None"):
            HOMOGRAPHY[name](*points, None, None)
        with pytest.raises(ValueError, match="got nan"):
            POSE[name](*points, K0, K1, math.nan)
        with pytest.raises(ValueError, match=r"K1 must be .* got \[\[800.0, 1.0"):
            POSE[name](*points, K0, K1 + np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]]), 1.0)
    with pytest.raises(ValueError, match="weights must be 20 numbers"):
        homography_dlt(*points, np.ones(19))
    with pytest.raises(ValueError, match="not negative"):
        homography_dlt(*points, -np.ones(20))
    with pytest.raises(ValueError, match="got 20 and 19 rows"):
        homography_dlt(points[0], points[1][1:])
    with pytest.raises(ValueError, match="seed must be"):
        homography_poselib(*points, 1.0, seed=-1)
