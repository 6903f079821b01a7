"""One point in two posed images: planes whose depth is known by hand, occlusion, unknown depths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vispe.geometry.depth import carried, depth_at, depth_ground_truth

K = np.array([[100.0, 0, 40], [0, 100.0, 30], [0, 0, 1]])


def moved(x=0.0, y=0.0, z=0.0, turn=0.0):
    T = np.eye(4)  # noqa: N806
    T[:3, 3] = x, y, z
    T[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    return T


def test_the_depth_of_the_pixel_a_point_lies_in():
    table = np.arange(12.0).reshape(3, 4)
    points = [[0, 0], [0.49, 0], [0.51, 0], [3.4, 2.4], [3.6, 0], [-0.6, 1], [np.nan, 0]]
    assert depth_at(table, points).tolist() == [0, 0, 1, 11, 0, 0, 0]


def test_a_plane_moves_as_worked_out_by_hand():
    """At depth 2, a camera moved right by 0.1 sees every point 100 * 0.1 / 2 = 5 pixels further left."""
    points, z = carried([[10, 10], [50, 20], [7, 7]], [2, 2, 0], K, K, moved(x=-0.1))
    np.testing.assert_allclose(points[:2], [[5, 10], [45, 20]], atol=1e-9)
    np.testing.assert_allclose(z[:2], 2)
    assert np.isnan(points[2]).all()
    behind, z = carried([[10, 10]], [2], K, K, moved(z=-3))
    assert np.isnan(behind).all()
    assert np.isnan(z).all()


@settings(max_examples=50, deadline=None)
@given(st.floats(0.5, 20), st.floats(-0.3, 0.3), st.floats(-0.3, 0.3), st.floats(-0.3, 0.3), st.floats(-1, 1))
def test_there_and_back(depth, x, y, z, turn):
    T = moved(x, y, z, turn)  # noqa: N806
    points = np.array([[10.0, 20], [60, 5], [40, 30]])
    there, depths = carried(points, [depth] * 3, K, K, T)
    known = ~np.isnan(depths)
    back, again = carried(there[known], depths[known], K, K, np.linalg.inv(T))
    np.testing.assert_allclose(back, points[known], atol=1e-6)
    np.testing.assert_allclose(again, depth, rtol=1e-9)


def test_labels_by_hand():
    """A wall at depth 2 and, in front of its right half, a board at depth 1. The camera moves right by 0.1: the wall
    moves 5 pixels to the left, the board 10, and hides some of the wall."""
    depth0, depth1 = np.full((60, 80), 2.0), np.full((60, 80), 2.0)
    depth0[:, 40:], depth1[:, 30:] = 1.0, 1.0
    depth0[50:] = 0  # unknown
    first = [[10, 10], [60, 10], [20, 20], [2, 30], [38, 40], [12, 55], [70, 55]]
    second = [[5, 10], [50.5, 10], [19, 20], [15.5, 24], [7, 55]]
    labels0, labels1 = depth_ground_truth((first, second), (depth0, depth1), (K, K), moved(x=-0.1), epipolar=3.0)
    assert labels0.tolist() == [
        0,  # wall
        1,  # board, half a pixel off
        -2,  # 4 pixels from 2, 4 and more from 3: between positive and negative
        -1,  # carried off the image
        -1,  # carried behind the board
        -2,  # unknown depth, a keypoint lies on its line
        -2,
    ]
    assert labels1.tolist() == [0, 1, -2, -2, -1]


def test_an_unknown_depth_has_no_partner_where_none_lies_on_its_line():
    unknown = np.zeros((60, 80))
    labels0, labels1 = depth_ground_truth(
        ([[10, 10]], [[40, 40]]), (unknown, unknown), (K, K), moved(x=-0.1), epipolar=3.0
    )
    assert (labels0.tolist(), labels1.tolist()) == ([-1], [-1])
    none = depth_ground_truth(([], [[4, 4]]), (unknown, unknown), (K, K), moved())
    assert (none[0].tolist(), none[1].tolist()) == ([], [-1])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_both_sides_agree(seed):
    draw = np.random.default_rng(seed)
    depth0, depth1 = (np.where(draw.random((60, 80)) < 0.3, 0, 2.0) for _ in "01")
    first, second = (draw.uniform(0, 59, (k, 2)) for k in (30, 25))
    labels0, labels1 = depth_ground_truth((first, second), (depth0, depth1), (K, K), moved(x=-0.1))
    for i, j in enumerate(labels0.tolist()):
        assert j < 0 or labels1[j] == i
    assert (labels0 >= 0).sum() == (labels1 >= 0).sum()
    one, other = depth_ground_truth((second, first), (depth1, depth0), (K, K), moved(x=0.1))
    assert one.tolist() == labels1.tolist()
    assert other.tolist() == labels0.tolist()


def test_a_wrong_matrix_is_named():
    with pytest.raises(ValueError, match="K0"):
        carried([[1, 1]], [1], np.eye(4), K, moved())
