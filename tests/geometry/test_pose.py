"""Cameras, angles of poses, and the pose of an essential matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.geometry.epipolar import essential_from_pose
from vispe.geometry.pose import (
    Camera,
    decompose_essential,
    depths,
    pose_error,
    recover_pose,
    relative_pose,
    rotation_error,
    rotation_residual,
    translation_error,
)

NUMBERS = st.floats(-3, 3)
VECTORS = st.tuples(NUMBERS, NUMBERS, NUMBERS).map(np.array).filter(lambda v: np.linalg.norm(v) > 0.1)


def rotation(axis: np.ndarray, degrees: float) -> np.ndarray:
    """Rodrigues' formula."""
    x, y, z = axis / np.linalg.norm(axis)
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = math.radians(degrees)
    return np.eye(3) + math.sin(angle) * k + (1 - math.cos(angle)) * k @ k


def camera(**changes: object) -> Camera:
    return Camera(**{"fx": 500.0, "fy": 510.0, "cx": 319.5, "cy": 239.5, "size": (480, 640), **changes})  # type: ignore[arg-type]


def test_assumed_camera() -> None:
    found = Camera.assumed((480, 640))
    assert found == Camera(fx=768, fy=768, cx=319.5, cy=239.5, size=(480, 640))
    assert Camera.assumed((1, 1)).cx == 0  # the centre of the only pixel


def test_matrix_there_and_back() -> None:
    found = camera()
    np.testing.assert_array_equal(found.matrix, [[500, 0, 319.5], [0, 510, 239.5], [0, 0, 1]])
    assert Camera.from_matrix(found.matrix, (480, 640)) == found
    assert found.focal == 505


def test_resized_keeps_the_half_pixel() -> None:
    half = camera().resized(0.5)
    assert half == camera(fx=250.0, fy=255.0, cx=159.5, cy=119.5, size=(240, 320))  # the centre stays the centre
    assert half.resized(2) == camera()
    wide = camera().resized((2, 1))
    assert (wide.fx, wide.fy, wide.cx, wide.cy, wide.size) == (1000, 510, 639.5, 239.5, (480, 1280))
    assert camera().resized(1e-6).size == (1, 1)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-1, 1), st.floats(-1, 1))
def test_a_ray_stays_itself_when_the_image_is_resized(sx: float, sy: float, x: float, y: float) -> None:
    pixel = np.array([[500 * x + 319.5, 510 * y + 239.5]])
    resized = (pixel + 0.5) * (sx, sy) - 0.5
    np.testing.assert_allclose(camera().resized((sx, sy)).normalise(resized), [[x, y]], atol=1e-9)


def test_rotation_error_by_hand() -> None:
    z = np.array([0, 0, 1.0])
    assert rotation_error(np.eye(3), np.eye(3)) == 0
    assert rotation_error(rotation(z, 10), rotation(z, -20)) == pytest.approx(30)
    assert rotation_error(np.eye(3), np.diag([-1.0, -1, 1])) == 180


@given(VECTORS, st.floats(0, 180), VECTORS, st.floats(0, 180))
def test_rotation_error_is_the_angle_between(axis: np.ndarray, degrees: float, other: np.ndarray, turn: float) -> None:
    base = rotation(other, turn)
    assert rotation_error(base, base @ rotation(axis, degrees)) == pytest.approx(degrees, abs=1e-9)
    assert rotation_error(base @ rotation(axis, degrees), base) == pytest.approx(degrees, abs=1e-9)


@pytest.mark.parametrize("degrees", [1e-10, 1e-6, 1e-3, 0.02, 179.999999])
def test_small_and_large_angles_keep_their_digits(degrees: float) -> None:
    """The usual acos of the trace is zero below 1e-6 degrees in float64 and below 0.03 in float32."""
    assert rotation_error(np.eye(3), rotation(np.array([1.0, 2, 3]), degrees)) == pytest.approx(degrees, rel=1e-6)
    t = np.array([math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), 0])
    assert translation_error(t, [1.0, 0, 0]) == pytest.approx(min(degrees, 180 - degrees), rel=1e-6)


def test_translation_error_by_hand() -> None:
    assert translation_error([0, 0, 2.0], [0, 3.0, 0]) == pytest.approx(90)
    assert translation_error([1.0, 1, 0], [1.0, 0, 0]) == pytest.approx(45)
    assert translation_error([-1.0, 0, 0], [1.0, 0, 0]) == 0  # the sign is not judged
    assert translation_error([-1.0, 1, 0], [1.0, 0, 0]) == pytest.approx(45)
    assert translation_error([1e-300, 0, 0], [1e300, 0, 0]) == 0


def test_no_translation_is_a_failure_and_no_truth_a_mistake() -> None:
    assert translation_error([0, 0, 0], [1.0, 0, 0]) == math.inf
    assert translation_error([math.nan, 0, 0], [1.0, 0, 0]) == math.inf
    with pytest.raises(ValueError, match="no direction"):
        translation_error([1.0, 0, 0], [0, 0, 0])


def test_pose_error_is_the_larger_angle() -> None:
    z = np.array([0, 0, 1.0])
    assert pose_error(rotation(z, 3), [1.0, 1, 0], np.eye(3), [1.0, 0, 0]) == pytest.approx(45)
    assert pose_error(rotation(z, 60), [1.0, 1, 0], np.eye(3), [1.0, 0, 0]) == pytest.approx(60)
    assert pose_error(None, None, np.eye(3), [1.0, 0, 0]) == math.inf


@given(VECTORS, st.floats(0, 180), VECTORS, VECTORS, st.floats(0, 180), VECTORS, VECTORS)
def test_relative_pose_takes_a_point_along(a0, d0, t0, a1, d1, t1, point) -> None:
    R0, R1 = rotation(a0, d0), rotation(a1, d1)  # noqa: N806
    R, t = relative_pose(R0, t0, R1, t1)  # noqa: N806
    np.testing.assert_allclose(R @ (R0 @ point + t0) + t, R1 @ point + t1, atol=1e-9)


@given(VECTORS, st.floats(0, 180), VECTORS)
def test_the_four_poses_of_an_essential_matrix(axis: np.ndarray, degrees: float, t: np.ndarray) -> None:
    R, unit = rotation(axis, degrees), t / np.linalg.norm(t)  # noqa: N806
    E = essential_from_pose(R, unit)  # noqa: N806
    rotations, translations = decompose_essential(-7 * E)
    for Ri, ti in zip(rotations, translations, strict=True):  # noqa: N806
        np.testing.assert_allclose(Ri @ Ri.T, np.eye(3), atol=1e-9)
        assert np.linalg.det(Ri) == pytest.approx(1)
        found = essential_from_pose(Ri, ti)
        assert min(np.abs(found - E).max(), np.abs(found + E).max()) < 1e-9
    distances = np.abs(rotations - R).max((1, 2)) + np.abs(translations - unit).max(1)
    assert distances.min() < 1e-9


def test_depths_by_hand() -> None:
    # the point (1, 0, 4) seen from the origin and from one unit to the right of it
    z0, z1 = depths(np.eye(3), [-1.0, 0, 0], [[0.25, 0.0]], [[0.0, 0.0]])
    assert (z0, z1) == (pytest.approx([4.0]), pytest.approx([4.0]))
    z0, z1 = depths(np.eye(3), [0, 0, -1.0], [[0.5, 0.0]], [[1.0, 0.0]])  # (1, 0, 2), the camera a step forward
    assert (z0, z1) == (pytest.approx([2.0]), pytest.approx([1.0]))
    assert not np.isfinite(np.array(depths(np.eye(3), [-1.0, 0, 0], [[0.5, 0.0]], [[0.5, 0.0]]))).any()  # parallel


@given(VECTORS, st.floats(0, 25), VECTORS)
def test_the_pose_in_front_is_found(axis: np.ndarray, degrees: float, t: np.ndarray) -> None:
    R, unit = rotation(axis, degrees), t / np.linalg.norm(t)  # noqa: N806
    world = np.random.default_rng(5).uniform([-2, -2, 5], [2, 2, 9], (40, 3))
    seen = world @ R.T + unit
    rays0, rays1 = world[:, :2] / world[:, 2:], seen[:, :2] / seen[:, 2:]
    found_R, found_t, front = recover_pose(-essential_from_pose(R, unit), rays0, rays1)  # noqa: N806
    assert front.all()
    np.testing.assert_allclose(found_R, R, atol=1e-9)
    np.testing.assert_allclose(found_t, unit, atol=1e-9)


def test_what_a_rotation_leaves_unexplained() -> None:
    """Camera 1 is camera 0 turned: nothing; points that left their place by (30, 40) pixels: 50."""
    turn = rotation(np.array([0.2, 1, 0.1]), 8)
    points0 = np.random.default_rng(2).uniform([100, 100], [500, 400], (30, 2))
    rays = (np.column_stack([camera().normalise(points0), np.ones(30)]) @ turn.T) @ camera(fx=700.0).matrix.T
    points1 = rays[:, :2] / rays[:, 2:]
    points1[:10] += (30, 40)
    residual = rotation_residual(points0, points1, camera(), camera(fx=700.0))
    np.testing.assert_allclose(residual, [50.0] * 10 + [0.0] * 20, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "received"),
    [
        (lambda: camera(fx=0.0), "fx=0.0"),
        (lambda: camera(cy=math.nan), "cy=nan"),
        (lambda: camera(size=(480, 0)), r"\(480, 0\)"),
        (lambda: camera().resized(-2), "got -2"),
        (lambda: Camera.from_matrix([[1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]], (4, 4)), "0.5"),
        (lambda: Camera.from_matrix(np.eye(4), (4, 4)), r"\(4, 4\)"),
        (lambda: rotation_error(np.eye(2), np.eye(3)), r"\(2, 2\)"),
        (lambda: translation_error([1.0, 0], [1.0, 0, 0]), r"\(2,\)"),
    ],
)
def test_mistakes_name_what_was_received(call, received: str) -> None:
    with pytest.raises(ValueError, match=received):
        call()
