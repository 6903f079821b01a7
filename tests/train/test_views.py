"""Features of views are found once and kept."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vispe.train import views as module
from vispe.train.photos import PhotoSpec, photographs
from vispe.train.views import read_views, view_features
from vispe.weights import build

from .conftest import SIFT, SMALL

pytest.importorskip("cv2", reason="SIFT is OpenCV's")


def test_what_cannot_be_read_is_left_out_and_said(found):
    _, train, val, names, skipped = found
    assert len(names) == 6 == len(train) + len(val) - 1
    assert len(skipped) == 1
    assert "broken.png" in skipped[0]


def test_a_second_run_finds_nothing_to_do(found, monkeypatch):
    path, train, val, names, _ = found
    monkeypatch.setattr(module, "seen_view", lambda *_: pytest.fail("nothing is left to find"))
    assert view_features(path, [*train, *val], SMALL, SIFT, 0, "cpu", False)[0] == names
    monkeypatch.setattr(module.FeatureSpec, "load", lambda *_: pytest.fail("nothing is left to find"))
    usable = [photo for photo in (*train, *val) if photo.name in names]
    assert view_features(path, usable, SMALL, SIFT, 0, "cpu", False)[0] == names
    with pytest.raises(ValueError, match="max_keypoints"):
        view_features(path, train, SMALL, SIFT.but(max_keypoints=32), 0, "cpu", False)


def test_a_broken_one_can_be_refused(snapshots, tmp_path):
    train, val = photographs(PhotoSpec(roots=(str(snapshots),)))
    broken = [photo for photo in (*train, *val) if "broken" in photo.name]
    with pytest.raises(ValueError, match=r"broken\.png"):
        view_features(tmp_path / "f.h5", broken, SMALL, SIFT, 0, "cpu", True)


def test_processes_find_what_one_does(snapshots, tmp_path):
    torch.manual_seed(0)
    weights = tmp_path / "aliked.safetensors"
    save_file(build("aliked_t16").state_dict(), weights)
    features = SIFT.but(name="aliked_t16", weights=str(weights))
    given = [photo for part in photographs(PhotoSpec(roots=(str(snapshots),))) for photo in part]
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for workers in (0, 2):
            path = tmp_path / f"{workers}.h5"
            state = torch.get_rng_state()
            names, skipped = view_features(path, given, SMALL, features, 0, "cpu", False, workers)
            assert torch.equal(torch.get_rng_state(), state)
            assert len(names) == 6
            assert "broken.png" in skipped[0]
            found.append(read_views(path, [photo for photo in given if photo.name in names], SMALL, 64))
    finally:
        torch.set_num_threads(threads)
    one, two = found
    assert one.names == two.names
    assert np.array_equal(one.H, two.H)
    assert int(one.counts.sum()) > 0
    assert torch.allclose(one.keypoints, two.keypoints, atol=1e-4)
    assert torch.allclose(one.descriptors, two.descriptors, atol=1e-5)
