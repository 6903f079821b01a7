"""The matching benchmarks as a person meets them: a folder in the published layout, one line, the numbers."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import vispe_
from tests.evaluate.conftest import texture
from vispe.models import EXTRACTORS

SIFT = ("--extractor", "sift", "--matcher", "mutual_nn")
SHIFT = "1 0 4\n0 1 -2\n0 0 1\n"


@pytest.fixture
def hpatches(tmp_path):
    """Two sequences in the layout of the release."""
    root = tmp_path / "hpatches-sequences-release"
    for s, name in enumerate(("v_one", "i_two")):
        (root / name).mkdir(parents=True)
        picture = texture(s)
        Image.fromarray(picture).save(root / name / "1.ppm")
        for k in range(2, 7):
            Image.fromarray(np.roll(picture, (-2, 4), (0, 1))).save(root / name / f"{k}.ppm")
            (root / name / f"H_1_{k}").write_text(SHIFT)
    return root


@pytest.fixture
def poses(tmp_path):
    """A list of pairs: an image and itself, seen by a camera that has moved along a plane far away."""
    root = tmp_path / "scene"
    root.mkdir()
    picture = texture(3, 160, 192)
    Image.fromarray(picture).save(root / "a b.png")
    Image.fromarray(np.roll(picture, 4, 1)).save(root / "b.png")
    camera = "150 0 96 0 150 80 0 0 1"
    pose = "1 0 0 1 0 1 0 0 0 0 1 0 0 0 0 1"
    line = "\t".join(["a b.png", "b.png", "0", "0", *camera.split(), *camera.split(), *pose.split()])
    (tmp_path / "list.txt").write_text(line + "\n")
    return root


def test_one_line_gives_the_table_of_the_published_protocol(hpatches, tmp_path, capfd):
    out = tmp_path / "run"
    assert vispe_("evaluate", "hpatches", "--root", hpatches, *SIFT, "--out", out) == 0
    told, err = capfd.readouterr()
    assert err == ""
    assert "hpatches, 2 of 108 sequences: sift + mutual_nn, 10 pairs" in told
    assert "short side 480" in told
    assert "glue-factory" in told
    assert "seconds to extract" in told
    assert "seconds to match" in told
    for estimator in ("poselib", "opencv", "dlt"):
        assert f"\n{estimator} " in told
    scores = json.loads((out / "scores.json").read_text())
    assert list(scores["groups"]) == ["all", "illumination", "viewpoint"]
    assert scores["protocol"]["name"] == "glue-factory"
    assert scores["groups"]["all"]["mean"]["precision@3"] > 0.5


def test_another_score_of_the_same_predictions(hpatches, tmp_path, capfd):
    out = tmp_path / "run"
    words = ("evaluate", "hpatches", "--root", hpatches, *SIFT, "--resize-long", "0", "--max-keypoints", "100")
    assert vispe_(*words, "--estimators", "opencv", "--threshold", "2", "--out", out) == 0
    first = json.loads((out / "scores.json").read_text())
    assert first["protocol"]["thresholds"] == {"opencv": [2.0]}
    assert first["protocol"]["resize"] == 0
    features = (out / "features.h5").stat().st_mtime_ns
    line = ("evaluate", "score", out, "--estimators", "poselib,opencv", "--threshold", "poselib=1,2", "opencv=2")
    assert vispe_(*line, "--tune", "threshold", "--workers", "2") == 0
    again = json.loads((out / "scores.json").read_text())
    assert again["protocol"]["thresholds"] == {"poselib": [1.0, 2.0], "opencv": [2.0]}
    assert again["groups"]["all"]["auc"][1] == first["groups"]["all"]["auc"][0]
    assert (out / "tune.json").is_file()
    assert (out / "features.h5").stat().st_mtime_ns == features
    assert "(best)" in capfd.readouterr().out


def test_runs_side_by_side(hpatches, tmp_path, capfd):
    for keypoints in (50, 200):
        words = ("evaluate", "hpatches", "--root", hpatches, *SIFT, "--resize-long", "0")
        assert vispe_(*words, "--max-keypoints", keypoints, "--out", tmp_path / str(keypoints)) == 0
    capfd.readouterr()
    assert vispe_("evaluate", "compare", tmp_path / "50", tmp_path / "200", "--out", tmp_path / "both") == 0
    told = capfd.readouterr().out
    assert "50 keypoints" in told
    assert "B - A" in told
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"compare.json", "compare.png", "differences.csv"}


def test_your_own_pairs_with_poses(poses, tmp_path, capfd):
    words = ("evaluate", "pairs", "--list", tmp_path / "list.txt", "--root", poses, *SIFT, "--resize-long", "0")
    assert vispe_(*words, "--out", tmp_path / "run") == 0
    told = capfd.readouterr().out
    assert "AUC@5 deg" in told
    assert "epipolar_precision@0.0005" in told
    assert json.loads((tmp_path / "run/scores.json").read_text())["task"] == "pose"


def test_images_and_their_homography(hpatches, tmp_path, capfd):
    views = [hpatches / "v_one" / f"{k}.ppm" for k in (1, 2)]
    words = ("evaluate", "images", *views, "--homography", hpatches / "v_one/H_1_2", *SIFT, "--resize-long", "0")
    assert vispe_(*words, "--out", tmp_path / "run") == 0
    assert "1 pair\n" in (told := capfd.readouterr().out)
    assert "error in px" in told, "the one number that is wanted"


def test_what_an_index_holds(measured_data, capfd):
    assert vispe_("evaluate", "megadepth1500", "--root", measured_data / "megadepth1500_index", "--statistics") == 0
    told = capfd.readouterr().out
    assert "1500" in told
    assert "0015" in told


@pytest.mark.parametrize("name", ["hpatches", "megadepth1500", "scannet1500"])
def test_a_data_set_that_is_not_there_says_what_to_fetch(name, complaint):
    said = complaint("evaluate", name, "--root", "nowhere")
    assert "nowhere" in said
    assert "https://" in said
    assert "GB" in said
    assert "Licence" in said


def test_mistakes(hpatches, tmp_path, complaint):
    root = ("evaluate", "hpatches", "--root", hpatches)
    both = ("--resize-short", "480", "--resize-long", "640")
    assert "exclude each other" in complaint(*root, *SIFT, *both)
    assert "has no preset 'superglue'; it has" in complaint(*root, *SIFT, "--preset", "superglue")
    assert "an estimator of a homography must be one of" in complaint(*root, *SIFT, "--estimators", "magsac")
    assert "got 'opencv=one'" in complaint(*root, *SIFT, "--threshold", "opencv=one")
    assert "must be positive numbers, got [-1.0]" in complaint(*root, *SIFT, "--threshold", "-1")
    assert "whole number" in complaint(*root, *SIFT, "--max-keypoints", "0")
    assert "argument --devices: a whole number of at least 1" in complaint(*root, *SIFT, "--devices", "0")
    assert "there is no run of a benchmark" in complaint("evaluate", "score", tmp_path / "none")
    assert "no folder" in complaint("evaluate", "compare", tmp_path / "none")
    assert "--homography" in complaint("evaluate", "images", hpatches / "v_one/1.ppm")
    (hpatches / "v_one/3.ppm").unlink()
    assert "3.ppm" in complaint(*root, *SIFT)


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_every_extractor_has_a_matcher(hpatches, tmp_path, monkeypatch, extractor):
    from vispe.evaluate import benchmark as module

    seen = []
    monkeypatch.setattr(module, "benchmark", lambda *words, **how: seen.append(words))
    words = ("evaluate", "hpatches", "--root", hpatches, "--extractor", extractor, "--out", tmp_path / "run")
    assert vispe_(*words, "--detection-threshold", "0.2") == 0
    pairs, out, protocol, pipeline = seen[0]
    assert (pairs.name, out, protocol.name) == ("hpatches", tmp_path / "run", "glue-factory")
    assert (pipeline.extractor, pipeline.matcher) == (extractor, "lightglue")
    assert pipeline.knobs == {"detection_threshold": 0.2}


def test_stress_needs_no_download(hpatches, tmp_path, capfd):
    """Its own photographs: whatever the extractor, a picture against itself is right, and the curves are there."""
    from tests.commands.test_matching import complaint_of

    photos = tmp_path / "photos"
    photos.mkdir()
    Image.fromarray(texture(7, 480, 480)).save(photos / "a.png")
    words = ("evaluate", "stress", *SIFT, "--images", photos, "--kinds", "rotation", "blur", "--max-keypoints", "200")
    assert vispe_(*words, "--out", tmp_path / "run") == 0
    told = capfd.readouterr().out
    first = next(line.split() for line in told.splitlines() if line.startswith("rotation"))
    assert first[:4] == ["rotation", "0", "1", "100.0"]
    assert (tmp_path / "run/curves.png").is_file()
    assert "exact, changed: max_keypoints (vispe's own" in told
    assert "rotation, scale" in complaint_of(capfd, *words[:4], "--kinds", "fog", "--out", tmp_path / "other")


def test_a_score_in_another_folder_leaves_the_first(hpatches, tmp_path, capfd):
    out, other = tmp_path / "run", tmp_path / "other"
    assert vispe_("evaluate", "hpatches", "--root", hpatches, *SIFT, "--resize-long", "0", "--out", out) == 0
    before = (out / "scores.json").read_bytes()
    line = ("evaluate", "score", out, "--estimators", "opencv", "--threshold", "0.5", "opencv=1,0.5", "--out", other)
    assert vispe_(*line) == 0
    told = capfd.readouterr().out
    assert "glue-factory, changed: resize, side, estimators, thresholds" in told
    assert (out / "scores.json").read_bytes() == before
    assert json.loads((other / "scores.json").read_text())["protocol"]["thresholds"] == {"opencv": [0.5, 1.0]}
    assert vispe_(*line) == 2
    assert "is not empty" in capfd.readouterr().err


def test_what_is_told_is_what_was_done(hpatches, tmp_path, capfd):
    out = tmp_path / "run"
    assert vispe_("evaluate", "hpatches", "--root", hpatches, *SIFT, "--max-keypoints", "90", "--out", out) == 0
    assert vispe_("evaluate", "score", out, "--preset", "loftr") == 0
    assert "at most 90" in capfd.readouterr().out.split("loftr")[1]
