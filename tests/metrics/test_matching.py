"""Shares of right matches against answers worked out by hand, and the ground truth against its definition in loops."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.geometry.epipolar import epipolar_distance_mean, epipolar_distance_squared_sum, essential_from_pose
from vispe.geometry.homography import homography_residual, symmetric_transfer_error, warp_points
from vispe.metrics.matching import accuracy, homography_ground_truth, match_precision, match_recall, precision

INF, NAN = float("inf"), float("nan")
H_TRUE = np.array([[1.1, 0.05, 20.0], [-0.04, 0.9, 15.0], [1e-4, -5e-5, 1.0]])
ERRORS = st.lists(st.one_of(st.floats(0, 20), st.sampled_from([1.0, 3.0, INF, NAN])), max_size=30)
WHOLE = st.tuples(st.integers(0, 12), st.integers(0, 12))  # whole pixels: many ties


@pytest.mark.parametrize(
    ("errors", "below", "at_most"),  # at 1 and 3
    [
        ([], [0, 0], [0, 0]),  # a pair without matches is not perfect but counts as 0
        ([0.0], [1, 1], [1, 1]),
        ([INF], [0, 0], [0, 0]),
        ([NAN, 0.5], [1 / 2, 1 / 2], [1 / 2, 1 / 2]),
        ([1.0], [0, 1], [1, 1]),  # exactly at a threshold: glue-factory's < and D2-Net's <= differ
        ([0.5, 1.0, 3.0, 4.0], [1 / 4, 2 / 4], [2 / 4, 3 / 4]),
    ],
)
def test_shares_by_hand(errors: list[float], below: list[float], at_most: list[float]) -> None:
    np.testing.assert_array_equal(precision(errors, [1, 3]), below)
    np.testing.assert_array_equal(accuracy(errors, [1, 3]), at_most)


@pytest.mark.filterwarnings("error")
@given(ERRORS, st.randoms(use_true_random=False))
def test_shares_in_any_order_and_monotone(errors: list[float], random: object) -> None:
    shuffled = list(errors)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    thresholds = [0.5, 1.0, 2.0, 3.0, 10.0]
    for share in (precision, accuracy):
        found = share(errors, thresholds)
        np.testing.assert_array_equal(share(shuffled, thresholds), found)
        assert (np.diff(found) >= 0).all()
        assert found.shape == (5,)
        assert (found >= 0).all()
        assert (found <= 1).all()
    assert (precision(errors, thresholds) <= accuracy(errors, thresholds)).all()


def test_precision_of_the_named_errors() -> None:
    # H moves by (100, 0). The matches are off by 0, 2 and 4 pixels, the same in both directions.
    H = np.array([[1, 0, 100.0], [0, 1, 0], [0, 0, 1]])  # noqa: N806
    points0 = np.array([[10, 20], [30, 40], [50, 60.0]])
    points1 = points0 + np.array([[100, 0], [100, 2], [104, 0]])
    np.testing.assert_allclose(precision(symmetric_transfer_error(H, points0, points1), [1, 3]), [1 / 3, 2 / 3])
    np.testing.assert_allclose(accuracy(homography_residual(H, points0, points1), [1, 2, 4]), [1 / 3, 2 / 3, 1])
    # A camera that moves sideways has horizontal epipolar lines: a match 1e-3 too low is 1e-3 off in both images. Their
    # mean is 1e-3, the sum of squares 2e-6: wrong by one measure at 5e-4, right by the other.
    E = essential_from_pose(np.eye(3), [1.0, 0, 0])  # noqa: N806
    off = np.array([[0.1, 0.2]]), np.array([[0.3, 0.201]])
    np.testing.assert_array_equal(precision(epipolar_distance_mean(E, *off), [5e-4, 2e-3]), [0, 1])
    np.testing.assert_array_equal(precision(epipolar_distance_squared_sum(E, *off), [5e-4, 2e-3]), [1, 1])


# Ground truth


def by_definition(kp0: np.ndarray, kp1: np.ndarray, H: np.ndarray, positive: float, negative: float) -> list[int]:  # noqa: N803
    """The definition of ``gt_matches_from_homography``, one pair of keypoints at a time."""
    if not len(kp0) or not len(kp1):
        return [-1] * len(kp0)
    there, back = warp_points(H, kp0), warp_points(np.linalg.inv(H), kp1)
    forward = [[float(((there[i] - kp1[j]) ** 2).sum()) for j in range(len(kp1))] for i in range(len(kp0))]
    both = [
        [max(forward[i][j], float(((kp0[i] - back[j]) ** 2).sum())) for j in range(len(kp1))] for i in range(len(kp0))
    ]
    found = []
    for i in range(len(kp0)):
        j = both[i].index(min(both[i]))
        column = [both[k][j] for k in range(len(kp0))]
        mutual = column.index(min(column)) == i
        label = j if mutual and both[i][j] < positive**2 else -2
        found.append(-1 if min(forward[i]) > negative**2 else label)
    return found


def test_ground_truth_by_hand() -> None:
    eye = np.eye(3)
    keypoints0 = [[10, 10], [50, 50], [90, 10], [12, 10]]
    keypoints1 = [[52.5, 50], [10, 11], [90, 14]]
    # (10, 10) and (10, 11): 1 px, nearest to each other. (50, 50) and (52.5, 50): 2.5 px. (90, 10) is 4 px from the
    # nearest: more than 3 but not more than 5. (12, 10) is sqrt(5) px from (10, 11), which is nearer to another.
    assert homography_ground_truth(keypoints0, keypoints1, eye).tolist() == [1, 0, -1, -2]
    assert homography_ground_truth(keypoints0, keypoints1, eye, negative=5).tolist() == [1, 0, -2, -2]
    assert homography_ground_truth(keypoints0, keypoints1, eye, positive=1.5).tolist() == [1, -2, -1, -2]


def test_ground_truth_at_exactly_a_threshold() -> None:
    # 3 px away: not closer than 3, and not farther than 3.
    assert homography_ground_truth([[0, 0]], [[3, 0]], np.eye(3)).tolist() == [-2]
    assert homography_ground_truth([[0, 0]], [[2.999, 0]], np.eye(3)).tolist() == [0]
    assert homography_ground_truth([[0, 0]], [[3.001, 0]], np.eye(3)).tolist() == [-1]


def test_the_larger_distance_makes_partners_and_the_forward_one_the_unmatchable() -> None:
    # Image 1 is half the size: 2 px there are 4 px here, so not partners, but not unmatchable either.
    half, double = np.diag([0.5, 0.5, 1]), np.diag([2.0, 2, 1])
    assert homography_ground_truth([[100, 100]], [[52, 50]], half).tolist() == [-2]
    # Twice the size: 4 px there, and unmatchable, though it is only 2 px here.
    assert homography_ground_truth([[50, 50]], [[104, 100]], double).tolist() == [-1]


def test_no_keypoints_and_points_that_go_nowhere() -> None:
    assert homography_ground_truth([], [[1, 2]], np.eye(3)).tolist() == []
    assert homography_ground_truth([[1, 2], [3, 4]], [], np.eye(3)).tolist() == [-1, -1]
    horizon = np.array([[1, 0, 0], [0, 1, 0], [-0.01, 0, 1]])  # x = 100 goes to infinity
    assert homography_ground_truth([[100, 5], [0, 5]], [[0, 5]], horizon).tolist() == [-1, 0]


def test_between_equals_the_first_wins() -> None:
    # Two keypoints at one place in each image: the first of each are partners, the second see a better one.
    twice = [[5, 5], [5, 5]]
    assert homography_ground_truth(twice, twice, np.eye(3)).tolist() == [0, -2]


@given(st.lists(WHOLE, max_size=12), st.lists(WHOLE, max_size=12), st.sampled_from([(3.0, 3.0), (2.0, 5.0)]))
def test_ground_truth_is_its_definition(first: list, second: list, limits: tuple[float, float]) -> None:
    kp0, kp1 = np.array(first, dtype=float).reshape(-1, 2), np.array(second, dtype=float).reshape(-1, 2)
    for H in (np.eye(3), np.diag([0.5, 0.5, 1]), np.array([[1, 0, 3.0], [0, -1, 8], [0, 0, 1]])):  # noqa: N806
        found = homography_ground_truth(kp0, kp1, H, positive=limits[0], negative=limits[1])
        assert found.dtype == np.int64
        assert found.tolist() == by_definition(kp0, kp1, H, *limits)


@pytest.mark.parametrize("cells", [1, 7, 50, 10_000])
def test_blocks_of_rows_change_nothing(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    kp0 = rng.uniform(0, 60, (40, 2))
    kp1 = np.concatenate([warp_points(H_TRUE, kp0[:30]) + rng.normal(0, 2, (30, 2)), rng.uniform(0, 60, (15, 2))])
    monkeypatch.setattr("vispe.metrics.matching.CELLS", cells)
    found = homography_ground_truth(kp0, kp1, H_TRUE, negative=6)
    assert found.tolist() == by_definition(kp0, kp1, H_TRUE, 3, 6)
    assert {-2, -1} < set(found.tolist())


@given(st.integers(0, 1000))
def test_ground_truth_follows_the_keypoints(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kp0 = rng.uniform(0, 100, (20, 2))
    kp1 = warp_points(H_TRUE, kp0) + rng.normal(0, 1.5, (20, 2))
    order0, order1 = rng.permutation(20), rng.permutation(20)
    plain = homography_ground_truth(kp0, kp1, H_TRUE, negative=5)
    moved = homography_ground_truth(kp0[order0], kp1[order1], H_TRUE, negative=5)
    expected = [int(np.flatnonzero(order1 == j)[0]) if j >= 0 else j for j in plain[order0]]
    assert moved.tolist() == expected


def test_memory_does_not_grow_with_the_product() -> None:
    rng = np.random.default_rng(0)
    kp0 = rng.uniform(0, 2000, (8192, 2))
    kp1 = warp_points(H_TRUE, kp0)[::-1]
    tracemalloc.start()
    found = homography_ground_truth(kp0, kp1, H_TRUE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20  # one table of 8192 x 8192 distances would be 512 MiB
    assert (found == np.arange(8192)[::-1]).mean() > 0.99


# Predicted matches against the ground truth


@pytest.mark.parametrize(
    ("matches", "gt0", "right", "found"),
    [
        ([], [], 0, 0),
        ([], [0, 1], 0, 0),
        ([[0, 0]], [-2], 0, 0),  # ignored: nothing to divide by
        ([[0, 0]], [-1], 0, 0),  # a match of an unmatchable keypoint is wrong
        ([[0, 0], [1, 1]], [-1, -1], 0, 0),
        ([[0, 4]], [4], 1, 1),
        (
            [[0, 4], [1, 2], [2, 7], [3, 3]],
            [4, 1, -1, -2, 5],
            1 / 3,
            1 / 3,
        ),  # one of four is ignored
        ([[0, 4], [4, 5]], [4, 1, -1, -2, 5], 1, 2 / 3),
    ],
)
def test_precision_and_recall_by_hand(matches: list, gt0: list[int], right: float, found: float) -> None:
    gt = np.array(gt0, dtype=np.int64)
    assert match_precision(matches, gt) == right
    assert match_recall(matches, gt) == found


@given(st.lists(st.integers(-2, 9), max_size=15), st.data())
def test_precision_and_recall_are_their_definition(gt0: list[int], data: st.DataObject) -> None:
    """``matches0[i]`` with -1, as glue-factory keeps them, in a loop."""
    matches0 = data.draw(st.lists(st.integers(-1, 9), min_size=len(gt0), max_size=len(gt0)))
    pairs = np.array([(i, j) for i, j in enumerate(matches0) if j >= 0], dtype=np.int64).reshape(-1, 2)
    judged = [m == g for m, g in zip(matches0, gt0, strict=True) if m > -1 and g >= -1]
    wanted = [m == g for m, g in zip(matches0, gt0, strict=True) if g > -1]
    truth = np.array(gt0, dtype=np.int64)
    assert match_precision(pairs[::-1], truth) == pytest.approx(sum(judged) / (1e-8 + len(judged)), abs=1e-7)
    assert match_recall(pairs[::-1], truth) == pytest.approx(sum(wanted) / (1e-8 + len(wanted)), abs=1e-7)


# Mistakes


def test_mistakes_name_what_was_received() -> None:
    with pytest.raises(ValueError, match=r"-0\.5"):
        precision([-0.5], [1])
    with pytest.raises(ValueError, match=r"\[0\]"):
        accuracy([0.5], [0])
    with pytest.raises(ValueError, match=r"\(1, 1\)"):
        precision([[0.5]], [1])
    with pytest.raises(ValueError, match=r"keypoints1 must be finite, got \[nan, 0\.0\]"):
        homography_ground_truth([[0, 0]], [[1, 1], [NAN, 0]], np.eye(3))
    with pytest.raises(ValueError, match=r"positive=4, negative=3"):
        homography_ground_truth([[0, 0]], [[1, 1]], np.eye(3), positive=4, negative=3)
    with pytest.raises(ValueError, match="no inverse"):
        homography_ground_truth([[0, 0]], [[1, 1]], np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"\(1, 3\)"):
        match_recall([[0, 1, 2]], [0])
    with pytest.raises(ValueError, match="1 keypoints of image 0"):
        match_recall([[1, 0]], [0])
    with pytest.raises(ValueError, match="float64"):
        match_precision([[0, 0]], [0.0])
    with pytest.raises(ValueError, match="more than once"):
        match_precision([[0, 0], [0, 1]], [0])
