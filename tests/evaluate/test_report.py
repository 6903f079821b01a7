"""The page of a run: well-formed, alone in the world, escaped, small; and drawn by a browser without a complaint."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from vispe.evaluate.report import Claim, extremes, published, write_report
from vispe.evaluate.runs import read_run

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Every tag closed in order, every attribute seen."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def values(self, name):
        return [value for _, attribute, value in self.attributes if attribute == name]


def made(run, root=None, fetch=None):
    out = run.path / "report.html"
    write_report(run, root, fetch, out)
    text = out.read_text(encoding="utf-8")
    return Page(text), text


def with_names(name0, name1, pairs=12):
    from_fixture = {"image0": [name0] * pairs, "image1": [name1] * pairs, "group": ["<i>", "<u>"] * (pairs // 2)}
    errors = np.linspace(0.1, 6, pairs)
    numbers = {"keypoints0": [9] * pairs, "keypoints1": [9] * pairs, "matches": list(range(pairs))}
    numbers |= {f"corner_error {name}": errors for name in ("poselib 2.0", "opencv 0.5", "opencv 1.0", "dlt")}
    return from_fixture | numbers | {f"accuracy@{px}": errors / 10 for px in range(1, 11)}


def fetch(row):
    points = np.array([[1.0, 2.0], [30.0, 20.0], [20.0, 9.0]])
    return points, points, np.array([[0, 0], [1, 2]]), np.array([0.9, 0.2]), np.array([True, False])


@pytest.fixture
def images(tmp_path):
    root = tmp_path / "images"
    (root / "s").mkdir(parents=True)
    for name, size in (("1.png", (64, 48)), ("<script>alert(1)<&>.png", (40, 60))):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)).save(root / "s" / name)
    return root


NAMES = "s/1.png", "s/<script>alert(1)<&>.png"


@pytest.mark.parametrize("task", ["homography", "pose"])
def test_a_page_is_well_formed_and_alone(make_run, task):
    page, text = made(make_run(task=task))
    assert page.tags.count("h1") == page.tags.count("main") == page.tags.count("title") == 1
    assert "http:" not in text
    assert "https:" not in text
    assert "<script" not in text
    assert not page.values("src")
    assert all(value.startswith(("#", "data:")) for value in page.values("href"))
    assert ("html", "lang", "en") in page.attributes
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert all(value[1:] in ids for value in page.values("href") if value.startswith("#"))
    assert "prefers-color-scheme: dark" in text
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert "Pictures were left out because the images are not there." in " ".join(page.text)


def test_the_numbers_are_there(make_run):
    run = make_run()
    page, _ = made(run)
    told = " ".join(page.text)
    for entry in run.lines("viewpoint"):
        assert all(f"{100 * value:.1f}" in told for value in (*entry["auc"], *entry["low"]))
    for word in (
        "viewpoint", "illumination", "best of 2 on these pairs", "0123456789abcdef" * 4, "gt_recall@3",
        "thresholds.opencv", "a file, here & there", "seconds to match",
    ):  # fmt: skip
        assert word in told


def test_pairs_are_drawn_and_names_are_escaped(make_run, images):
    page, text = made(make_run(columns=with_names(*NAMES)), images, fetch)
    assert page.tags.count("img") == 6
    assert all(value.startswith("data:image/jpeg;base64,") for value in page.values("src"))
    assert "<script" not in text
    assert "s/<script>alert(1)<&>.png" in " ".join(page.text)
    assert all("50 % right" in value for value in page.values("alt"))
    assert len(text) < 5_000_000


def test_unknown_truth_and_no_matches_are_drawn_too(make_run, images):
    def without(row):
        points, _, matches, scores, _ = fetch(row)
        return (points, points, matches, scores) if row % 2 else (points, points, matches[:0], scores[:0], [])

    page, _ = made(make_run(columns=with_names(*NAMES)), images, without)
    assert page.tags.count("img") == 6
    assert not any("nan" in value for value in page.values("alt"))


def test_what_is_missing_or_broken_is_said(make_run, images):
    page, _ = made(make_run("a", columns=with_names("s/1.png", "s/gone.png")), images, fetch)
    assert "the images are not there (the first that is missing: s/gone.png)" in " ".join(page.text)
    assert page.tags.count("img") == 0
    page, _ = made(make_run("b", columns=with_names(*NAMES)), images, None)
    assert "left out because the matches are not there" in " ".join(page.text)
    (images / "s/1.png").write_bytes(b"no image")
    page, _ = made(make_run("c", columns=with_names(*NAMES)), images, fetch)
    assert " ".join(page.text).count("Not drawn: cannot read image") == 6


def test_names_that_are_no_utf8_are_shown_all_the_same(make_run):
    columns = with_names(os.fsdecode(b"\xff\n.png"), "x\x07.png")
    columns["group"] = [os.fsdecode(b"\xfe"), "g"] * 6
    page, _ = made(make_run(columns=columns))
    assert "\N{REPLACEMENT CHARACTER}␊.png" in page.text


def test_the_same_run_gives_the_same_page(make_run, images):
    run = make_run(columns=with_names(*NAMES))
    assert made(run, images, fetch)[1] == made(run, images, fetch)[1]


def test_the_choice_of_threshold_is_drawn_where_it_is_known(make_run):
    run = make_run()
    assert "Choice of threshold" not in made(run)[1]
    tune = {"poselib": {"thresholds": [1, 2, 3], "at": [1, 5], "auc": [[0.1, 0.5], [0.2, 0.6], [0.1, 0.5]]}, "odd": 1}
    tune["dlt"] = {"thresholds": [1, 2], "at": [1], "auc": [[0.1]]}
    (run.path / "tune.json").write_text(json.dumps(tune))
    text = made(run)[1]
    assert text.count("<figcaption>Choice of threshold") == 1
    (run.path / "tune.json").write_text("{")
    assert "Choice of threshold" not in made(read_run(run.path))[1]


def test_a_part_of_a_benchmark_is_said_to_be_one(make_run):
    page, _ = made(make_run(change=lambda s: s.update(note="4 of 108 <sequences>")))
    assert any("Of it: 4 of 108 <sequences>." in text for text in page.text)


def test_curves_of_stress_are_on_the_page(make_run):
    run = make_run()
    assert "kind and level of stress" not in " ".join(made(run)[0].text)
    (run.path / "curves.png").write_bytes(b"\x89PNG")
    assert any("AUC by kind and level of stress" in text for text in made(run)[0].text)


def test_best_median_and_worst_by_hand():
    errors = np.array([5.0, 1.0, np.inf, 3.0, 2.0, 4.0, np.nan, 0.5])
    assert extremes(errors, 2) == {"best": [7, 1], "median": [3, 5], "worst": [6, 2]}
    assert extremes(np.array([1.0]), 2) == {"best": [0], "median": [], "worst": []}
    assert extremes(np.array([]), 2) == {"best": [], "median": [], "worst": []}
    assert extremes(np.zeros(3), 1) == {"best": [0], "median": [1], "worst": [2]}


def test_published_numbers_of_the_same_protocol_stand_beside(make_run, monkeypatch, tmp_path):
    good = {"name": '"A & B"', "estimator": '"poselib"', "at": "[1, 5]", "auc": "[37.1, 77.8]", "source": '"a paper"'}
    lines = ["[[published.glue-factory]]", *(f"{key} = {value}" for key, value in good.items())]
    lines += ["[[published.glue-factory]]", 'name = "broken"', "[[published.other]]", 'name = "other"']
    (tmp_path / "hpatches.toml").write_text("\n".join(lines))
    monkeypatch.setattr("vispe.evaluate.report.shared", lambda room: tmp_path)
    assert published("hpatches", "glue-factory") == [
        Claim(name="A & B", estimator="poselib", auc={1.0: 37.1, 5.0: 77.8}, source="a paper")
    ]
    assert published("hpatches", "own") == published("nothing", "own") == []
    _, text = made(make_run())
    row = "".join(f"<td>{cell}</td>" for cell in ("", 37.1, "", 77.8, "", ""))
    assert text.count(f'<tr class="theirs"><th scope="row">A &amp; B</th>{row}</tr>') == 1
    assert "not measured here: a paper." in text


def test_many_pairs_and_groups_stay_small(make_run):
    def split(scores):
        scores["groups"] |= {f"g{i}": scores["groups"]["viewpoint"] for i in range(100)}

    _, text = made(make_run(pairs=2000, change=split))
    assert len(text) < 400_000
    assert "102 groups are in scores.json only." in text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_draws_it_without_a_complaint(make_run, images, tmp_path, width):
    run = make_run(columns=with_names(*NAMES))
    made(run, images, fetch)
    shot = tmp_path / "shot.png"
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000", f"--screenshot={shot}"]
    done = subprocess.run(
        [CHROMIUM, *words, (run.path / "report.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in done.stderr
    with Image.open(shot) as picture:
        seen = np.asarray(picture.convert("L"))
    assert seen.shape == (2000, width)
    assert seen.std() > 10  # something is there
    assert seen[:, -8:].std() < 2  # and nothing runs over the right edge
