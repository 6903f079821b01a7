"""A benchmark from pairs to a page, and what is said of it on the console."""

import json
import os

import pytest

from vispe.evaluate.benchmark import auc_rows, benchmark, mean_rows, protocol_rows, rescore
from vispe.evaluate.predict import Pipeline
from vispe.evaluate.protocol import Protocol, preset, presets
from vispe.evaluate.score import protocol_of

SIFT = Pipeline(extractor="sift", matcher="mutual_nn")
OWN = Protocol(name="mine", resize=0, max_keypoints=150, thresholds={"poselib": 1.0, "opencv": (0.5, 1.0)})


def test_everything_is_there_at_the_end(folder, tmp_path):
    pairs, out = folder(4), tmp_path / "deep/out"
    scores = benchmark(pairs, out, OWN, SIFT, tuned=True)
    assert sorted(os.listdir(out)) == [
        "features.h5", "matches.h5", "pairs.csv", "report.html", "run.json", "scores.json", "timing.json", "tune.json",
    ]  # fmt: skip
    assert scores == json.loads((out / "scores.json").read_text())
    assert scores["protocol"]["max_keypoints"] == scores["made"]["max_keypoints"] == 150
    assert list(scores["groups"]) == ["all", "even", "odd"]
    assert scores["groups"]["all"]["mean"]["precision@3"] > 0.8
    page = (out / "report.html").read_text()
    assert page.count("<img") >= 4, "pairs are drawn"
    assert protocol_of(out) == OWN


def test_a_score_needs_neither_images_nor_networks(folder, tmp_path, monkeypatch):
    pairs, out = folder(2), tmp_path / "out"
    first = benchmark(pairs, out, OWN, SIFT, tuned=True)
    for path in pairs.root.iterdir():
        path.unlink()
    pairs.root.rmdir()
    monkeypatch.setattr(Pipeline, "load", lambda self: pytest.fail("loaded"))
    again = rescore(out, OWN)
    assert again == first
    assert not (out / "tune.json").exists(), "a curve of another score is not left beside this one"
    assert "<img" not in (out / "report.html").read_text()
    other = rescore(out, OWN.but(estimators=("opencv",), thresholds={"opencv": 3.0}))
    assert [entry["estimator"] for entry in other["groups"]["all"]["auc"]] == ["opencv"]


def test_missing_images_are_counted_before_anything_is_done(folder, tmp_path):
    pairs = folder(3)
    (pairs.root / "1-b.png").unlink()
    with pytest.raises(ValueError, match=r"1 of 6 images are missing below .*, the first is '1-b.png'"):
        benchmark(pairs, tmp_path / "out", OWN, SIFT)
    assert not (tmp_path / "out").exists()


def test_knobs_of_a_preset_are_for_their_extractor_only(folder, tmp_path):
    pairs = folder(1)
    for extractor, kept in (("superpoint", {}), ("sift", {"edge_threshold": 7.0})):
        out = tmp_path / extractor
        benchmark(pairs, out, OWN.but(knobs={extractor: {"edge_threshold": 7.0}}), SIFT)
        made = json.loads((out / "scores.json").read_text())["made"]
        assert {key: value for key, value in made.items() if key == "edge_threshold"} == kept


def test_a_folder_without_a_run_is_said(tmp_path):
    with pytest.raises(ValueError, match="there is no run of a benchmark in"):
        protocol_of(tmp_path)


def test_the_console_tells_protocol_and_numbers(folder, tmp_path):
    scores = benchmark(folder(3), tmp_path / "out", OWN, SIFT)
    told = dict(protocol_rows(OWN))
    assert told["protocol"] == "mine"
    assert told["images"] == "as they are"
    assert told["estimator opencv"] == "0.5, 1 px, the best on these pairs"
    assert told["estimator dlt"] == "all matches"
    head, *rows = auc_rows(scores)
    assert head[:4] == ("estimator", "inlier px", "group", "pairs")
    assert head[4:] == ("AUC@1 px", "AUC@3 px", "AUC@5 px", "no model")
    assert [row[0] for row in rows] == ["poselib"] * 3 + ["opencv"] * 3 + ["dlt"] * 3
    assert rows[3][1].endswith("(best)")
    assert all(len(row) == len(head) for row in rows)
    head, *rows = mean_rows(scores)
    assert head == ("mean, median", "all", "even", "odd")
    assert {"matches", "precision@3", "accuracy@10", "gt_recall@3"} <= {row[0] for row in rows}


@pytest.mark.parametrize("name", ["hpatches", "megadepth1500", "scannet1500"])
def test_every_preset_can_be_told(name):
    for which in presets(name):
        made = preset(name, which, "homography" if name == "hpatches" else "pose")
        rows = protocol_rows(made)
        assert rows[0][0] == "protocol"
        assert made.source in rows[0][1]
