"""Features of views are found once and kept; pairs overlap, truth is what the homography says."""

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.data.homographies import ViewSpec
from vispe.geometry.homography import warp_points
from vispe.train import views as module
from vispe.train.views import (
    EvalPairs,
    FeatureSpec,
    PhotoSpec,
    TrainPairs,
    pair_batch,
    photographs,
    read_views,
    view_features,
)

pytest.importorskip("cv2", reason="SIFT is OpenCV's")
SMALL = ViewSpec(size=(96, 128), views=4, look=0.0, scale=(0.7, 1.0), overlap=0.3)
SIFT = FeatureSpec(name="sift", max_keypoints=64)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for k in range(6):
        coarse = draw.integers(0, 255, (15, 20, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((200, 150), Image.Resampling.BICUBIC).save(root / f"{k}.png")
    (root / "broken.png").write_text("junk")
    return root


@pytest.fixture(scope="module")
def found(photos, tmp_path_factory):
    path = tmp_path_factory.mktemp("features") / "features.h5"
    train, val = photographs(PhotoSpec(roots=(str(photos),), val_part=0.3))
    names, skipped = view_features(path, [*train, *val], SMALL, SIFT, 0, "cpu", False)
    return path, train, val, names, skipped


def test_photographs_are_parted_by_their_names(photos):
    spec = PhotoSpec(roots=(str(photos),), val_part=0.3)
    train, val = photographs(spec)
    assert (len(train), len(val)) == (5, 2)
    assert not {p.name for p in train} & {p.name for p in val}
    assert photographs(spec) == (train, val)
    assert len(photographs(PhotoSpec(roots=("skimage",)))[0]) == 13


def test_what_cannot_be_read_is_left_out_and_said(found):
    _, train, val, names, skipped = found
    assert len(names) == 6 == len(train) + len(val) - 1
    assert len(skipped) == 1
    assert "broken.png" in skipped[0]


def test_a_second_run_finds_nothing_to_do(found, monkeypatch):
    path, train, val, names, _ = found
    monkeypatch.setattr(module.FeatureSpec, "load", lambda *_: pytest.fail("nothing is left to find"))
    assert view_features(path, [*train, *val], SMALL, SIFT, 0, "cpu", False)[0] == names
    with pytest.raises(ValueError, match="max_keypoints"):
        view_features(path, train, SMALL, SIFT.but(max_keypoints=32), 0, "cpu", False)


def test_a_broken_one_can_be_refused(photos, tmp_path):
    train, val = photographs(PhotoSpec(roots=(str(photos),)))
    broken = [photo for photo in (*train, *val) if "broken" in photo.name]
    with pytest.raises(ValueError, match=r"broken\.png"):
        view_features(tmp_path / "f.h5", broken, SMALL, SIFT, 0, "cpu", True)


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


def test_pairs_are_of_one_way(photos, tmp_path):
    """Turned, a photograph is another one; its views show the same points."""
    spec = SMALL.but(views=8, ways=4)
    path = tmp_path / "features.h5"
    given = photographs(PhotoSpec(roots=(str(photos),)))[0]
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


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"roots": ()}, "roots are folders of photographs, got none"),
        ({"val_part": 0.0}, "val_part lies between 0 and 1, got 0.0"),
        ({"val_pairs": 0}, "val_pairs is at least 1, first at least 2, got 0 and None"),
        ({"first": 1}, "got 200 and 1"),
        ({"corrupt": "maybe"}, "corrupt is skip or refuse, got 'maybe'"),
    ],
)
def test_mistakes_are_named(knobs, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        PhotoSpec(**knobs)
    assert said in str(caught.value)


def test_folders_without_photographs_are_named(tmp_path):
    with pytest.raises(ValueError, match="there are no images in"):
        photographs(PhotoSpec(roots=(str(tmp_path),)))
    with pytest.raises(ValueError, match="there is no folder"):
        photographs(PhotoSpec(roots=(str(tmp_path / "nowhere"),)))
