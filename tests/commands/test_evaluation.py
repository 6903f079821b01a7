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
    words = (*classify, place / "run", "--data", place / "photos")
    assert "argument --batch: a whole number of at least 1 is needed, got '0'" in complaint(*words, "--batch", 0)
    assert "--out is a file FILE.json, got 'e.csv'" in complaint(*words, "--out", "e.csv")
    assert "cannot write 'no/e.json': there is no folder" in complaint(*words, "--out", "no/e.json")


def test_semantic_agrees_with_the_report(segmented, tmp_path, capfd):
    words = ("--data", segmented / "scenes", "--out", tmp_path / "e.json")
    assert vispe_("evaluate", "semantic", segmented / "run", *words) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[0] == f"segformer_b0, 5 images of {segmented / 'scenes'}"
    assert out[1].split()[:4] == ["short", "side", "miou", "pixel_accuracy"]
    (told,) = json.loads((tmp_path / "e.json").read_text())["results"]
    report = json.loads((segmented / "run" / "report.json").read_text())
    assert told["numbers"]["semantic"]["miou"] == report["miou"]
    assert told["per_class"]["semantic"] == report["per_class"]
    assert vispe_("evaluate", "semantic", segmented / "run", *words, "--size", "20", "60") == 0
    assert [one["made"]["short"] for one in json.loads((tmp_path / "e.json").read_text())["results"]] == [20, 60]


def test_mistakes_of_semantic(segmented, place, tmp_path, complaint):
    semantic = ("evaluate", "semantic")
    assert "there is no folder" in complaint(*semantic, segmented / "run", "--data", tmp_path / "no")
    said = complaint(*semantic, place / "run", "--data", segmented / "scenes")
    assert "was trained to classify, not to segment" in said
    assert "--size is N" in complaint(*semantic, segmented / "run", "--data", segmented / "scenes", "--size", "3x")
    said = complaint(*semantic, segmented / "run", "--data", segmented / "scenes", "--void", "-1")
    assert "holds the index 255, but 3 classes have 0 to 2" in said
    words = (*semantic, segmented / "run", "--data", segmented / "scenes")
    assert "--out is a folder, for a report and predictions, or FILE.json" in complaint(*words, "--out", "e.csv")
    assert "argument --workers: a whole number of at least 0" in complaint(*words, "--workers", -1)
