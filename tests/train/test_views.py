"""Features of views are found once and kept."""

import pytest

from vispe.train import views as module
from vispe.train.photos import PhotoSpec, photographs
from vispe.train.views import view_features

from .conftest import SIFT, SMALL

pytest.importorskip("cv2", reason="SIFT is OpenCV's")


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


def test_a_broken_one_can_be_refused(snapshots, tmp_path):
    train, val = photographs(PhotoSpec(roots=(str(snapshots),)))
    broken = [photo for photo in (*train, *val) if "broken" in photo.name]
    with pytest.raises(ValueError, match=r"broken\.png"):
        view_features(tmp_path / "f.h5", broken, SMALL, SIFT, 0, "cpu", True)
