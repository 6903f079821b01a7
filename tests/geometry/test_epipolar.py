"""Epipolar geometry: a rectified pair worked out by hand, four distances kept apart, invariances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.geometry.epipolar import (
    cross_matrix,
    epipolar_distance_mean,
    epipolar_distance_squared_sum,
    epipolar_distances,
    epipolar_lines,
    essential_from_fundamental,
    essential_from_pose,
    fundamental_from_essential,
    nearest_essential,
    normalise_epipolar,
    point_line_distance,
    sampson_distance,
)

SIDEWAYS = essential_from_pose(np.eye(3), [-1.0, 0, 0])  # a rectified pair: the lines are the rows
K0 = np.array([[500.0, 0, 320], [0, 510, 240], [0, 0, 1]])
K1 = np.array([[800.0, 0, 400], [0, 790, 300], [0, 0, 1]])
NUMBERS = st.floats(-10, 10)
VECTORS = st.tuples(NUMBERS, NUMBERS, NUMBERS)


def turn(angle: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def scene(k: int = 50) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exact matches of two cameras, and their F."""
    world = np.random.default_rng(3).uniform([-2, -1.5, 4], [2, 1.5, 9], (k, 3))
    rotation, translation = turn(0.2), np.array([0.8, 0.1, -0.3])
    p0, p1 = world @ K0.T, (world @ rotation.T + translation) @ K1.T
    F = fundamental_from_essential(essential_from_pose(rotation, translation), K0, K1)  # noqa: N806
    return p0[:, :2] / p0[:, 2:], p1[:, :2] / p1[:, 2:], F


@given(VECTORS, VECTORS)
def test_cross_matrix(v: tuple, w: tuple) -> None:
    np.testing.assert_allclose(cross_matrix(v) @ w, np.cross(v, w), atol=1e-12)


def test_a_rectified_pair_by_hand() -> None:
    np.testing.assert_allclose(SIDEWAYS, [[0, 0, 0], [0, 0, 1], [0, -1, 0]])
    # y = 2 in image 0 against y = 5 in image 1: 3 off in either image, Sampson shares it: 3 / sqrt(2)
    pair = [[7.0, 2.0]], [[1.0, 5.0]]
    d0, d1 = epipolar_distances(SIDEWAYS, *pair)
    assert (d0, d1) == (pytest.approx([3.0]), pytest.approx([3.0]))
    assert epipolar_distance_mean(SIDEWAYS, *pair) == pytest.approx([3.0])
    assert epipolar_distance_squared_sum(SIDEWAYS, *pair) == pytest.approx([18.0])
    assert sampson_distance(SIDEWAYS, *pair) == pytest.approx([3 / np.sqrt(2)])


def test_distances_of_unequal_images_by_hand() -> None:
    # image 1 enlarged twice: the line of y = 2 is y = 4 there, the line of y = 10 is y = 5 here
    F = SIDEWAYS @ np.diag([1.0, 1, 1])  # noqa: N806
    F = np.diag([0.5, 0.5, 1]) @ F  # noqa: N806
    pair = [[7.0, 2.0]], [[1.0, 10.0]]
    d0, d1 = epipolar_distances(F, *pair)
    assert (d0, d1) == (pytest.approx([3.0]), pytest.approx([6.0]))
    assert epipolar_distance_mean(F, *pair) == pytest.approx([4.5])
    assert epipolar_distance_squared_sum(F, *pair) == pytest.approx([45.0])
    assert sampson_distance(F, *pair) == pytest.approx([1 / np.sqrt(1 / 3**2 + 1 / 6**2)])


def test_a_squared_sum_of_1e_4_is_a_distance_of_7e_3() -> None:
    """The two precisions of MegaDepth-1500 are not comparable (.567 and .996 of one run)."""
    pair = [[0.1, 0.2]], [[0.3, 0.2 + np.sqrt(0.5e-4)]]
    assert epipolar_distance_squared_sum(SIDEWAYS, *pair) == pytest.approx([1e-4])
    assert epipolar_distance_mean(SIDEWAYS, *pair) == pytest.approx([7.07e-3], rel=1e-3)


def test_points_and_lines() -> None:
    np.testing.assert_allclose(point_line_distance([[3.0, 4.0], [0.0, 0.0]], [[3, 4, 0], [0, 0, 1]]), [5.0, np.inf])
    np.testing.assert_allclose(epipolar_lines(SIDEWAYS, [[7.0, 2.0]]), [[0, 1, -2]])
    with pytest.raises(ValueError, match=r"lines must be \[2, 3\].*\(1, 3\)"):
        point_line_distance([[3.0, 4.0], [0.0, 0.0]], [[3, 4, 0]])


def test_exact_matches_have_no_distance_and_the_epipole_an_undefined_one(recwarn: pytest.WarningsRecorder) -> None:
    p0, p1, F = scene()  # noqa: N806
    for distance in (sampson_distance, epipolar_distance_mean, epipolar_distance_squared_sum):
        assert distance(F, p0, p1).max() < 1e-9
    assert sampson_distance(np.zeros((3, 3)), p0, p1).min() == np.inf
    assert not recwarn.list


def test_fundamental_and_essential_are_one() -> None:
    E = essential_from_pose(turn(0.3), [0.1, 0.2, 0.3])  # noqa: N806
    np.testing.assert_allclose(essential_from_fundamental(fundamental_from_essential(E, K0, K1), K0, K1), E, atol=1e-12)


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_sampson_is_the_first_order_distance(dx: float, dy: float) -> None:
    """Close to a match, moving it by d costs at most |d|, and swapping the images changes nothing."""
    p0, p1, F = scene()  # noqa: N806
    moved = p1 + np.array([dx, dy]) * 1e-3
    distance = sampson_distance(F, p0, moved)
    assert distance.max() <= np.hypot(dx, dy) * 1e-3 * (1 + 1e-3) + 1e-9
    np.testing.assert_allclose(sampson_distance(F.T, moved, p0), distance, atol=1e-9)


def test_nearest_essential() -> None:
    E = essential_from_pose(turn(0.3), [0.6, 0.0, 0.8])  # noqa: N806
    np.testing.assert_allclose(nearest_essential(5 * E), E, atol=1e-12)
    np.testing.assert_allclose(nearest_essential(np.diag([3.0, 2, 1])), np.diag([1.0, 1, 0]), atol=1e-12)


@given(st.floats(-1e3, 1e3).filter(lambda factor: abs(factor) > 1e-3))
def test_scale_and_sign_do_not_matter(factor: float) -> None:
    p0, p1, F = scene()  # noqa: N806
    wrong = p1 + 1
    np.testing.assert_allclose(sampson_distance(factor * F, p0, wrong), sampson_distance(F, p0, wrong), rtol=1e-9)
    np.testing.assert_allclose(normalise_epipolar(factor * F), normalise_epipolar(F), rtol=1e-9, atol=1e-15)


def test_normalised_matrix() -> None:
    found = normalise_epipolar(-SIDEWAYS)  # entries 1 and -1 tie: the first of them becomes positive
    np.testing.assert_allclose(found, SIDEWAYS / np.sqrt(2))
    np.testing.assert_allclose(normalise_epipolar(SIDEWAYS * 1e-300), SIDEWAYS / np.sqrt(2))
    nearly = SIDEWAYS * [[1], [1], [1 + 1e-12]]  # and still does when the last bits say otherwise
    np.testing.assert_allclose(normalise_epipolar(nearly), SIDEWAYS / np.sqrt(2))
    for nothing in (np.zeros((3, 3)), np.full((3, 3), np.nan)):
        with pytest.raises(ValueError, match="finite and not all zero"):
            normalise_epipolar(nothing)


@pytest.mark.parametrize(
    ("call", "received"),
    [
        (lambda: cross_matrix([1.0, 2.0]), r"\(2,\)"),
        (lambda: essential_from_pose(np.eye(4), [1.0, 2, 3]), r"\(4, 4\)"),
        (lambda: sampson_distance(SIDEWAYS, [[1.0, 2.0]], [[1.0, 2.0]] * 2), "1 and 2 rows"),
        (lambda: epipolar_lines(SIDEWAYS, [1.0, 2.0]), r"\(2,\)"),
    ],
)
def test_mistakes_name_what_was_received(call, received: str) -> None:
    with pytest.raises(ValueError, match=received):
        call()
