"""Curves of the stress benchmark, from finished runs."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vispe.data.stress import KINDS, group_name, parse_group
from vispe.evaluate.curves import curve_rows, curves, draw_curves

GROUPS = [group_name(kind, level) for kind in KINDS for level in KINDS[kind].small]
EACH = 4  # pairs a level


def columns(kinds=tuple(KINDS)):
    """The harder the level, the larger the errors; what the means are is known."""
    groups = [group for group in GROUPS if group.split()[0] in kinds]
    rows = [(group, i) for i in range(EACH) for group in groups]
    place = {group: KINDS[group.split()[0]].small.index(parse_group(group)[1]) for group in groups}
    hard = np.array([place[group] for group, _ in rows], float)
    errors = hard * (0.5 + 0.25 * np.array([i for _, i in rows]))
    return {
        "image0": [f"photo {i}/0.png" for _, i in rows],
        "image1": [f"photo {i}/{group}.png" for group, i in rows],
        "group": [group for group, _ in rows],
        "keypoints0": np.full(len(rows), 512),
        "keypoints1": np.full(len(rows), 512),
        "matches": (500 - 50 * hard).astype(int),
        "precision@1": 1 - 0.1 * hard,
        "precision@3": 1 - 0.05 * hard,
        "corner_error poselib 2.0": errors,
        "inliers poselib 2.0": (300 - 30 * hard).astype(int),
        "corner_error opencv 1.0": 2 * errors,
        "inliers opencv 1.0": (300 - 30 * hard).astype(int),
        "corner_error dlt": np.where(hard > 2, np.inf, 3 * errors),
        "inliers dlt": (500 - 50 * hard).astype(int),
    }


@pytest.fixture
def stress_run(make_run):
    def make(name="run", kinds=tuple(KINDS), **made):
        def change(scores):
            scores["benchmark"] = "stress"

        return make_run(name, columns=columns(kinds), change=change, **made)

    return make


def test_a_curve_has_every_level_in_order_with_its_numbers(stress_run):
    run = stress_run()
    found = curves(run)
    assert list(found) == list(KINDS)
    for kind, curve in found.items():
        n = len(KINDS[kind].small)
        assert curve["level"] == list(KINDS[kind].small)  # light from 1 down: from easy to hard
        assert curve["pairs"] == [EACH] * n
        assert curve["matches"] == [500 - 50 * i for i in range(n)]
        np.testing.assert_allclose(curve["precision@3"], 1 - 0.05 * np.arange(n))
        assert curve["auc@1"][0] == curve["auc@5"][0] == 1
        for at in (1, 3, 5):
            assert all(a >= b for a, b in zip(curve[f"auc@{at}"], curve[f"auc@{at}"][1:], strict=False))
            assert len(curve[f"auc@{at} low"]) == len(curve[f"auc@{at} high"]) == n
    assert found["blur"]["auc@3"][1] == run.lines("blur 1.0")[0]["auc"][1]
    assert found["blur"]["auc@3 high"][1] == run.lines("blur 1.0")[0]["high"][1]


def test_another_estimator_gives_its_own(stress_run):
    run = stress_run()
    assert curves(run, "dlt")["blur"]["auc@3"] == [
        run.lines(f"blur {level:.1f}")[2]["auc"][1] for level in (0, 1, 2, 4)
    ]
    with pytest.raises(ValueError, match="has no estimator 'magsac'; it has poselib, opencv, dlt"):
        curves(run, "magsac")


def test_the_table_has_a_row_a_level(stress_run):
    rows = curve_rows(stress_run())
    assert rows[0] == ("kind", "level", "pairs", "AUC@1 px", "AUC@3 px", "AUC@5 px", "precision@3 px", "matches")
    assert len(rows) == 1 + len(GROUPS)
    assert {len(row) for row in rows} == {8}
    assert rows[1] == ("rotation", "0", "4", *["100.0 (93-100)"] * 3, "100.0", "500")
    assert [row[1] for row in rows if row[0] == "light"] == [f"{level:g}" for level in KINDS["light"].small]


@pytest.mark.parametrize("kinds", [tuple(KINDS), ("blur",), ("light", "rotation", "scale")])
def test_the_picture_is_written(stress_run, tmp_path, kinds):
    runs = [stress_run("a", kinds), stress_run("b", kinds), stress_run("c $x_1$", ("blur",), extractor="sift")]
    draw_curves(runs, tmp_path / "curves.png")
    draw_curves(runs[:1], tmp_path / "one.png", at=5, estimator="dlt")
    for name in ("curves", "one"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 300
            assert np.asarray(picture.convert("L")).min() < 100


def test_the_same_runs_give_the_same_picture(stress_run, tmp_path):
    runs = [stress_run("a"), stress_run("b")]
    for name in ("first", "second"):
        draw_curves(runs, tmp_path / f"{name}.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_what_cannot_be_drawn_is_named(make_run, stress_run, tmp_path):
    out = tmp_path / "curves.png"
    with pytest.raises(ValueError, match="is a run of 'hpatches': only stress has levels"):
        curves(make_run("other"))
    with pytest.raises(ValueError, match="there is no run"):
        draw_curves([], out)
    with pytest.raises(ValueError, match="has AUC@1, 3, 5, not @4"):
        draw_curves([stress_run()], out, at=4)

    def one_level(scores):
        scores["benchmark"], scores["groups"] = "stress", {"all": scores["groups"]["all"]}

    with pytest.raises(ValueError, match="has one level only"):
        curves(make_run("single", change=one_level))
    assert not out.exists()
