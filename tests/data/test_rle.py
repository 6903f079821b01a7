"""Run lengths and polygons: as pycocotools draws them, and refused where it would read past the end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vispe.data import rle

coco = pytest.importorskip("pycocotools.mask", reason="the extra `detect` brings it")
pictures = st.tuples(st.integers(1, 12), st.integers(1, 12)).flatmap(lambda size: arrays(bool, size))


def lengths(mask):
    """Down the columns, background first, by hand."""
    flat = mask.T.ravel()
    cuts = [0, *(np.flatnonzero(np.diff(flat)) + 1).tolist(), flat.size]
    runs = np.diff(cuts).tolist()
    return [0, *runs] if flat[0] else runs


@given(pictures)
def test_what_is_encoded_is_decoded(mask):
    (text,) = rle.encode(mask[None])
    assert np.array_equal(rle.mask(text, mask.shape), mask)
    assert np.array_equal(coco.decode(text), mask)
    assert rle.run_lengths(text, mask.shape).tolist() == lengths(mask)


@given(pictures)
def test_lists_are_run_lengths_too(mask):
    told = {"size": list(mask.shape), "counts": lengths(mask)}
    assert np.array_equal(rle.mask(told, mask.shape), mask)
    assert rle.compressed(told, mask.shape) == rle.encode(mask[None])[0]


def test_a_large_mask():
    """Numbers of several characters, and differences below zero."""
    mask = np.random.default_rng(0).random((700, 900)) < np.linspace(0, 1, 900) ** 8
    (text,) = rle.encode(mask[None])
    assert np.array_equal(rle.mask(text, mask.shape), mask)
    assert np.array_equal(rle.mask({"size": [700, 900], "counts": text["counts"].encode()}, mask.shape), mask)


def test_columns_first():
    assert rle.mask({"size": [2, 3], "counts": [1, 2, 3]}, (2, 3)).astype(int).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_polygon():
    square = [[1, 1, 5, 1, 5, 3, 1, 3]]
    expected = np.zeros((6, 8), dtype=bool)
    expected[1:3, 1:5] = True
    assert np.array_equal(rle.mask(square, (6, 8)), expected)
    two = [*square, [6, 4, 8, 4, 8, 6, 6, 6]]
    expected[4:6, 6:8] = True
    assert np.array_equal(rle.mask(two, (6, 8)), expected)
    assert np.array_equal(rle.mask(rle.compressed(two, (6, 8)), (6, 8)), expected)


def test_no_masks():
    assert rle.encode(np.zeros((0, 4, 5), dtype=bool)) == []


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        ({"size": [3, 4], "counts": [12]}, r"of size \[3, 4\], its image \[4, 3\]"),
        ({"counts": [12]}, "of size None"),
        ({"size": [4, 3], "counts": []}, "cover 0 pixels, its image has 12"),
        ({"size": [4, 3], "counts": [3, 4]}, "cover 7 pixels"),
        ({"size": [4, 3], "counts": [3, 100]}, "cover 103 pixels"),
        ({"size": [4, 3], "counts": [-1, 13]}, "run lengths are"),
        ({"size": [4, 3], "counts": [1.5]}, "run lengths are"),
        ({"size": [4, 3], "counts": None}, "run lengths are"),
        ({"size": [4, 3], "counts": ""}, "no COCO string"),
        ({"size": [4, 3], "counts": "é"}, "cover|no COCO string"),
        ({"size": [4, 3], "counts": "o"}, "no COCO string"),  # more should follow
        ({"size": [4, 3], "counts": "oooooooooooooooo0"}, "no COCO string"),
        ({"size": [4, 3], "counts": " "}, "no COCO string"),
        ({"size": [4, 3], "counts": "5"}, "cover 5 pixels"),
        ([], "polygons or run lengths"),
        (None, "polygons or run lengths"),
        ([[1, 1, 3, 3]], "three points"),  # pycocotools would take it for a box
        ([[1, 1, 3, 3, 2]], "three points"),
        ([1, 1, 3, 3, 2, 2], "three points"),
        ([[1, 1, 3, "x", 2, 2]], "numbers"),
        ([[1, 1, 3, 1e12, 2, 2]], "far outside"),
        ([[1, 1, 3, float("nan"), 2, 2]], "far outside"),
    ],
)
def test_refusals(segmentation, reason):
    for use in (rle.mask, rle.compressed, rle.check):
        with pytest.raises(ValueError, match=reason) as refused:
            use(segmentation, (4, 3))
        assert len(str(refused.value).splitlines()) == 1


def test_masks_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"masks are \[n, h, w\]"):
        rle.encode(np.zeros((4, 5), dtype=bool))
