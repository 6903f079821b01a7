"""Pairs overlap, and their truth is what the homography says."""

import numpy as np
import pytest
import torch

from vispe.geometry.homography import warp_points
from vispe.train.keypoint_pairs import EvalPairs, TrainPairs, pair_batch
from vispe.train.photos import PhotoSpec, photographs
from vispe.train.views import read_views, view_features

from .conftest import SIFT, SMALL

pytest.importorskip("cv2", reason="SIFT is OpenCV's")


def _exact(views, a, b):
    points = views.real(a)
    return points, warp_points(views.between(a, b), points)


def as_read(found):
    path, train, val, names, _ = found
    return read_views(path, [photo for photo in (*train, *val) if photo.name in names], SMALL, 64)


def test_an_image_is_what_the_extractor_saw(found):
    """Drawn again, it has the same keypoints."""
    views = as_read(found)
    for row in (0, 5, 22):
        again = SIFT.load("cpu")(views.image(row))
        assert np.array_equal(again.keypoints.numpy(), views.real(row).astype(np.float32))


def test_truth_is_what_the_homography_says(found):
    views = as_read(found)
    assert len(TrainPairs(views, 0)) == 6 * 2
    a, b = views.pair(0, 0, 1)
    assert a // 4 == b // 4 == 1
    assert a != b
    assert views.pair(0, 0, 1) == (a, b)
    truth0, truth1 = views.truth(a, b)
    assert views.error(a, b, *_exact(views, a, b)) < 0.1
    there = warp_points(views.between(a, b), views.keypoints[a].numpy())
    matched = (truth0 >= 0).nonzero()[:, 0].tolist()
    assert matched
    for i in matched:
        j = int(truth0[i])
        assert int(truth1[j]) == i
        assert np.linalg.norm(there[i] - views.keypoints[b, j].numpy()) < 3
    assert (truth0[int(views.counts[a]) :] == -2).all()


def test_pairs_are_of_one_way(snapshots, tmp_path):
    """Turned, a photograph is another one; its views show the same points."""
    spec = SMALL.but(views=8, ways=4)
    path = tmp_path / "features.h5"
    given = photographs(PhotoSpec(roots=(str(snapshots),)))[0]
    names, _ = view_features(path, given, spec, SIFT, 0, "cpu", False)
    source = read_views(path, [photo for photo in given if photo.name in names], spec, 64)
    ways, counts = set(), []
    for number in range(40):
        a, b = source.pair(0, 0, number)
        assert a != b
        assert a // 8 == b // 8
        assert a % 4 == b % 4
        ways.add(a % 4)
        counts.append((source.labels(a, b)[0] >= 0).sum())
    assert ways == {0, 1, 2, 3}
    assert np.mean(counts) > 6


def test_batches_and_pairs_are_one(found):
    views = as_read(found)
    pairs = EvalPairs(views, 5)
    batch = pairs.__getitems__([0, 1, -1])
    assert batch.indices.tolist() == [0, 1, -1]
    assert batch.descriptors0.shape == (3, 64, 128)
    assert batch.scales0 is not None
    a, b = pairs.pairs[0]
    first = views.alone(a)
    count = first.keypoints.shape[1]
    assert torch.equal(batch.keypoints0[0, :count], first.keypoints[0])
    assert batch.matches0[0, :count].tolist() == views.labels(a, b)[0].tolist()
    same = pair_batch(views, pairs.pairs[:2])
    assert torch.equal(same.matches1, batch.matches1[:2])
