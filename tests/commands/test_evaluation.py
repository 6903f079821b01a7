"""evaluate as a person meets it: the numbers, what it prints, and one line for every mistake."""

import json

from tests.conftest import vispe_


def test_evaluate_agrees_with_the_report(place, tmp_path, capfd):
    words = ("--data", place / "photos", "--size", "16", "24", "--out", tmp_path / "e.json")
    assert vispe_("evaluate", "classify", place / "run", *words) == 0
    assert "16x16" in capfd.readouterr().out
    told = json.loads((tmp_path / "e.json").read_text())["results"]
    report = json.loads((place / "run" / "report.json").read_text())["results"]
    assert [entry["accuracy"] for entry in told] == [entry["accuracy"] for entry in report]
    assert [entry["size"] for entry in told] == [[16, 16], [24, 24]]
    assert set(told[0]["per_class"]) == {"cold", "warm"}


def test_the_table_is_of_the_trained_size_and_stderr_is_quiet(place, capfd):
    assert vispe_("evaluate", "classify", place / "run", "--data", place / "photos") == 0
    out, err = capfd.readouterr()
    header, row = out.splitlines()
    assert header.split() == ["size", "images", "accuracy", "top", "5", "images/s"]
    assert row.split()[:2] == ["16x16", "10"]
    assert err == ""


def test_mistakes_of_classify(place, tmp_path, complaint):
    classify = ("evaluate", "classify")
    assert "there is no folder or zip" in complaint(*classify, place / "run", "--data", tmp_path / "no")
    assert "there is no checkpoint" in complaint(*classify, "none", "--data", place / "photos")
    assert "--size is N or HxW" in complaint(*classify, place / "run", "--data", place / "photos", "--size", "3x")
    assert "CHECKPOINT, --data" in complaint(*classify)


def test_semantic_agrees_with_the_report(segmented, tmp_path, capfd):
    words = ("--data", segmented / "scenes", "--out", tmp_path / "e.json")
    assert vispe_("evaluate", "semantic", segmented / "run", *words) == 0
    assert capfd.readouterr().out.split()[:4] == ["short", "side", "images", "mIoU"]
    (told,) = json.loads((tmp_path / "e.json").read_text())["results"]
    report = json.loads((segmented / "run" / "report.json").read_text())
    assert told["miou"] == report["miou"]
    assert told["per_class"] == report["per_class"]
    assert vispe_("evaluate", "semantic", segmented / "run", *words, "--size", "20", "60") == 0
    assert [one["short"] for one in json.loads((tmp_path / "e.json").read_text())["results"]] == [20, 60]


def test_mistakes_of_semantic(segmented, place, tmp_path, complaint):
    semantic = ("evaluate", "semantic")
    assert "there is no folder" in complaint(*semantic, segmented / "run", "--data", tmp_path / "no")
    said = complaint(*semantic, place / "run", "--data", segmented / "scenes")
    assert "was trained to classify, not to segment" in said
    assert "--size is N" in complaint(*semantic, segmented / "run", "--data", segmented / "scenes", "--size", "3x")
    said = complaint(*semantic, segmented / "run", "--data", segmented / "scenes", "--void", "-1")
    assert "holds the index 255, but 3 classes have 0 to 2" in said
