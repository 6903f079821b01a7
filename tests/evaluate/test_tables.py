"""A comparison on a terminal: no line is broken at 80 columns, nothing is taken for markup."""

import io

import pytest
from rich.console import Console

from vispe.evaluate.compare import compare
from vispe.evaluate.tables import show


def printed(found, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(found, console)
    return console.file.getvalue()


@pytest.mark.parametrize("task", ["homography", "pose"])
@pytest.mark.parametrize("width", [80, 100])
def test_each_interval_stands_beside_its_number(make_run, task, width):
    runs = [make_run(str(i), task=task, seed=i, skill=0.9 - 0.2 * i, extractor=f"x{i}") for i in range(3)]
    lines = printed(compare(runs), width).splitlines()
    rows = [line for line in lines if line.startswith(("A   ", "B   ", "C   ", "B - A", "C - A"))]
    blocks = 3 * (3 if task == "homography" else 2)
    assert len(rows) == 5 * blocks
    assert all(row.count("[") == row.count("]") == 3 for row in rows)
    assert all(len(line) <= width for line in lines if "[" in line)
    assert any(row.count("*") for row in rows)


def test_many_thresholds_put_intervals_below(make_run):
    def more(scores):
        scores["protocol"] = {**scores["protocol"], "auc": [1, 3, 5, 10, 20]}
        for group in scores["groups"].values():
            for entry in group["auc"]:
                for key, value in (("at", [1, 3, 5, 10, 20]), *((k, [0.5] * 5) for k in ("auc", "low", "high"))):
                    entry[key] = value

    text = printed(compare([make_run("a", change=more), make_run("b", extractor="x", change=more)]))
    assert all(len(line) <= 80 for line in text.splitlines() if "px" in line or "[" in line)
    assert text.count("@20 px") == 9
    assert "[50.0, 50.0]" in text
    assert "50.0 [" not in text


def test_runs_that_do_not_fit_beside_each_other_stand_below(make_run):
    runs = [make_run(str(i), pairs=8, extractor="a rather long name of an extractor " + str(i)) for i in range(5)]
    text = printed(compare(runs))
    assert text.count("Mean (median) over all pairs") == 2
    assert all(run.scores["made"]["extractor"] in text for run in runs)


def test_nothing_is_markup_and_a_path_is_one_line(make_run):
    a = make_run("a [bold]x" + "y" * 90, pairs=8, extractor="[red]")
    b = make_run("b", pairs=8, change=lambda s: s["protocol"].get("x"))
    text = printed(compare([a, b]))
    assert f"({a.path})" in text
    assert "[red]" in text


def test_warnings_and_failures_are_seen(make_run):
    a = make_run("a")
    b = make_run("b", change=lambda s: s.update(protocol={**s["protocol"], "resize": 640}))
    text = printed(compare([a, b]))
    assert "WARNING: errors are pixels of DIFFERENT FRAMES" in text
    assert "best of 2 on these pairs" in text
    assert "seconds to match" in text


def test_many_groups_are_left_to_the_file(make_run):
    def split(scores):
        scores["groups"] |= {f"g{i}": scores["groups"]["viewpoint"] for i in range(9)}

    text = printed(compare([make_run("a", change=split), make_run("b", extractor="x", change=split)]))
    assert "(11 groups more are in compare.json)" in text
    assert "viewpoint" not in text
