"""Homographies: answers by hand, round trips, and the two ways to resize them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.geometry.homography import (
    corner_error,
    homography_residual,
    normalise_homography,
    rescale_homography,
    rescale_homography_centres,
    resize_matrix,
    spread,
    symmetric_transfer_error,
    warp_points,
)

PERSPECTIVE = np.array([[1.1, 0.02, 5.0], [-0.03, 0.95, -7.0], [2e-4, -1e-4, 1.0]])
POINTS = np.array([[0.0, 0.0], [640.0, 0.0], [640.0, 400.0], [0.0, 400.0], [321.5, 77.25]])


def shift(x: float, y: float) -> np.ndarray:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])


def test_warp_by_hand() -> None:
    H = np.array([[2.0, 0, 1], [0, 3, 2], [0.5, 0, 1]])  # noqa: N806
    np.testing.assert_allclose(warp_points(H, [[2.0, 4.0], [0.0, 0.0]]), [[2.5, 7.0], [1.0, 2.0]])
    assert warp_points(H, []).shape == (0, 2)


def test_infinity_is_no_warning_and_no_finite_residual(recwarn: pytest.WarningsRecorder) -> None:
    H = np.array([[1.0, 0, 0], [0, 1, 0], [1, 0, -1]])  # noqa: N806  x = 1 goes to infinity
    assert np.isinf(warp_points(H, [[1.0, 2.0]])).all()
    assert homography_residual(H, [[1.0, 2.0]], [[0.0, 0.0]]) == [np.inf]
    assert homography_residual(H, [[1.0, 0.0]], [[0.0, 0.0]]) == [np.inf]  # 0 / 0 in y
    assert homography_residual(np.eye(3), [[np.nan, 0.0]], [[0.0, 0.0]]) == [np.inf]
    assert not recwarn.list


def test_residuals_by_hand() -> None:
    double = np.diag([2.0, 2.0, 1.0])
    np.testing.assert_allclose(
        homography_residual(double, [[1.0, 1.0], [0.0, 0.0]], [[5.0, 6.0], [0.0, 0.0]]), [5.0, 0.0]
    )
    np.testing.assert_allclose(symmetric_transfer_error(double, [[1.0, 1.0]], [[5.0, 6.0]]), [(5.0 + 2.5) / 2])
    assert symmetric_transfer_error(np.zeros((3, 3)), [[1.0, 1.0]], [[5.0, 6.0]]) == [np.inf]


def test_corner_error_by_hand() -> None:
    assert corner_error(np.eye(3), np.eye(3), (400, 640)) == 0
    assert corner_error(shift(3, 4), np.eye(3), (400, 640)) == pytest.approx(5)
    # x doubled: the corners at x = 640 are off by 640, those at 0 are right
    assert corner_error(np.diag([2.0, 1, 1]), np.eye(3), (400, 640)) == pytest.approx(320)
    # a perspective tells (h, w) from (w, h): w = 1 + x / 640 halves the two corners at x = 640
    H = np.array([[1, 0, 0], [0, 1, 0], [1 / 640, 0, 1]])  # noqa: N806
    expected = (320 + np.hypot(320, 200)) / 4
    assert corner_error(H, np.eye(3), (400, 640)) == pytest.approx(expected)
    assert corner_error(H, np.eye(3), (640, 400)) != pytest.approx(expected, rel=0.05)


def test_corner_error_of_no_estimate_is_infinite() -> None:
    assert corner_error(None, np.eye(3), (4, 4)) == np.inf
    assert corner_error(np.full((3, 3), np.nan), np.eye(3), (4, 4)) == np.inf
    assert corner_error(np.zeros((3, 3)), np.eye(3), (4, 4)) == np.inf


def test_the_two_rescalings_by_hand() -> None:
    # Both images halved: a shift by 10 pixels becomes one by 5 in either convention.
    np.testing.assert_allclose(rescale_homography(shift(10, 0), 0.5, 0.5), shift(5, 0))
    np.testing.assert_allclose(rescale_homography_centres(shift(10, 0), 0.5, 0.5), shift(5, 0))
    # Only image 1 halved under the identity: centre 0 lies at -0.25 of the small image, corner 0 stays at 0.
    np.testing.assert_allclose(warp_points(rescale_homography(np.eye(3), 1, 0.5), [[0.0, 0.0]]), [[0.0, 0.0]])
    np.testing.assert_allclose(
        warp_points(rescale_homography_centres(np.eye(3), 1, 0.5), [[0.0, 0.0]]), [[-0.25, -0.25]]
    )
    np.testing.assert_allclose(rescale_homography(np.eye(3), (2, 4), 1), np.diag([0.5, 0.25, 1]))


def test_resize_by_hand() -> None:
    np.testing.assert_allclose(warp_points(resize_matrix((2, 0.5)), [[0, 0], [3.5, 1.5]]), [[0.5, -0.25], [7.5, 0.5]])


def test_rescaled_centres_commute_with_resizing_points() -> None:
    scale0, scale1 = (0.469, 0.47), (1.7, 1.69)
    small0, small1 = (
        warp_points(resize_matrix(scale0), POINTS),
        warp_points(resize_matrix(scale1), warp_points(PERSPECTIVE, POINTS)),
    )
    np.testing.assert_allclose(
        warp_points(rescale_homography_centres(PERSPECTIVE, scale0, scale1), small0), small1, atol=1e-9
    )
    assert homography_residual(rescale_homography(PERSPECTIVE, scale0, scale1), small0, small1).max() > 0.3


def test_normalised_scale_and_sign() -> None:
    for factor in (-3.0, 1e-200, 1e200):
        np.testing.assert_allclose(normalise_homography(PERSPECTIVE * factor), PERSPECTIVE, rtol=1e-12)
    flat = np.array([[0.0, 1, 2], [1, 0, 3], [1, 1, 0]])  # H[2, 2] = 0, det = 5
    np.testing.assert_allclose(normalise_homography(-4 * flat), flat / np.linalg.norm(flat))
    for nothing in (np.zeros((3, 3)), np.full((3, 3), np.nan), np.full((3, 3), np.inf)):
        with pytest.raises(ValueError, match="finite and not all zero"):
            normalise_homography(nothing)


def test_spread_by_hand() -> None:
    line = np.stack([np.linspace(20, 600, 20), np.linspace(50, 400, 20)], 1)
    assert spread(line) == pytest.approx(0, abs=1e-4)
    assert spread(np.vstack([line, [[0.0, 1e4]]])) == pytest.approx(0, abs=1e-4)  # but one
    square = np.array([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    # any three of the four: right angle with legs 2, scatter [[8/3, 4/3], [4/3, 8/3]], the smaller eigenvalue is 4/3
    assert spread(square) == pytest.approx(math.sqrt(4 / 9))
    assert spread(np.vstack([square] * 50)) == pytest.approx(1, rel=1e-2)


@given(st.floats(0.05, 20), st.floats(0.05, 20))
def test_rescaling_there_and_back(scale0: float, scale1: float) -> None:
    for rescale in (rescale_homography, rescale_homography_centres):
        back = rescale(rescale(PERSPECTIVE, scale0, scale1), 1 / scale0, 1 / scale1)
        np.testing.assert_allclose(warp_points(back, POINTS), warp_points(PERSPECTIVE, POINTS), atol=1e-6)


@given(st.lists(st.tuples(st.floats(0, 640), st.floats(0, 400)), max_size=8))
def test_warping_there_and_back(points: list[tuple[float, float]]) -> None:
    there = warp_points(PERSPECTIVE, points)
    np.testing.assert_allclose(warp_points(np.linalg.inv(PERSPECTIVE), there), np.reshape(points, (-1, 2)), atol=1e-8)
    assert (homography_residual(PERSPECTIVE, points, there) < 1e-9).all()


@pytest.mark.parametrize(
    ("call", "received"),
    [
        (lambda: warp_points(np.eye(2), POINTS), r"\(2, 2\)"),
        (lambda: warp_points(np.eye(3), np.zeros((4, 3))), r"\(4, 3\)"),
        (lambda: homography_residual(np.eye(3), POINTS, POINTS[:2]), "5 and 2 rows"),
        (lambda: corner_error(np.eye(3), np.eye(3), (0, 4)), r"\(0, 4\)"),
        (lambda: rescale_homography(np.eye(3), 0, 1), "got 0"),
        (lambda: rescale_homography_centres(np.eye(3), 1, (1, 2, 3)), r"\(1, 2, 3\)"),
        (lambda: resize_matrix(float("nan")), "nan"),
    ],
)
def test_mistakes_name_what_was_received(call, received: str) -> None:
    with pytest.raises(ValueError, match=received):
        call()
