"""The stereo pair and what its disparity says of a match."""

import sys

import numpy as np
import pytest

from vispe.data.motorcycle import disparity_errors, motorcycle

NAN = float("nan")


def test_errors_by_hand():
    disparity = np.array([[1.0, 2.0, np.inf], [3.0, NAN, 0.5]])
    points0 = np.array([[0.0, 0.0], [1.4, -0.4], [2.0, 0.0], [1.0, 1.0], [2.0, 1.0], [0.2, 0.9]])
    points1 = np.array([[-1.0, 0.0], [-0.6, 0.6], [0.0, 0.0], [0.0, 1.0], [1.5, 1.0], [0.2, 4.9]])
    expected = [0.0, 1.0, NAN, NAN, 0.0, 5.0]  # the last: 3 px to the right and 4 px down
    np.testing.assert_allclose(disparity_errors(points0, points1, disparity), expected, atol=1e-12)


def test_points_at_or_beyond_the_border_read_the_border():
    errors = disparity_errors(np.array([[-0.5, 7.0], [9.0, -9.0]]), np.zeros((2, 2)), np.array([[1.0, 2.0]]))
    assert np.isfinite(errors).all()


def test_no_matches_give_no_errors():
    assert disparity_errors(np.zeros((0, 2)), np.zeros((0, 2)), np.ones((3, 3))).shape == (0,)


def test_the_pair():
    pytest.importorskip("skimage", reason="scikit-image carries the pair")
    pair = motorcycle()
    assert pair.left.shape == pair.right.shape == (3, *pair.disparity.shape)
    assert 0 <= pair.left.min() < 0.1
    assert 0.9 < pair.left.max() <= 1
    known = np.isfinite(pair.disparity)
    assert known.mean() > 0.8
    assert 0 < np.median(pair.disparity[known]) < 100


def test_without_scikit_image_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.data", None)
    with pytest.raises(ValueError, match=r"pip install 'vispe\[demo\]'"):
        motorcycle()
