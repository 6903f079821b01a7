"""Runs side by side: numbers worked out by hand, refusals that name the first difference, warnings that are loud."""

import csv
import json
import math

import numpy as np
import pytest

from vispe.evaluate.compare import LETTERS, compare, differences

ERRORS = {  # at 1 px, of 4 pairs: A has 0.5 * 0.25 / 2 + 0.5 * 0.25 = 0.1875, B 0.5 * 0.25 / 2 + 0.5 * 0.5 = 0.3125
    "A": [0.5, math.inf, math.inf, math.inf],
    "B": [0.5, 0.5, math.inf, math.inf],
}


def by_hand(errors, matches):
    return {
        "image0": ["a", "b", "c", "d"], "image1": ["e", "f", "g", "h"], "group": [""] * 4,
        "keypoints0": [9] * 4, "keypoints1": [9] * 4, "matches": matches,
        **{f"{kind} {name}": values for name in ("poselib 2.0", "opencv 0.5", "opencv 1.0", "dlt")
           for kind, values in (("corner_error", errors), ("inliers", [4] * 4))},
    }  # fmt: skip


@pytest.fixture
def two(make_run):
    return [make_run(k, columns=by_hand(v, [i, 2, 3, 4]), extractor=k) for i, (k, v) in enumerate(ERRORS.items())]


def test_numbers_by_hand(two):
    found = compare(two)
    a, b = (next(line for line in found.lines if line.run == k and line.estimator == "poselib") for k in "AB")
    assert a.auc[0] == pytest.approx(0.1875)
    assert b.auc[0] == pytest.approx(0.3125)
    assert b.difference[0] == pytest.approx(0.125)
    assert a.difference == ()
    assert b.difference_low[0] == 0.0  # a resample without pair b has no difference
    assert not b.apart[0]
    assert found.settings == {"extractor": ("A", "B")}
    assert found.warnings == ()


def test_differences_by_hand(two):
    rows = differences(compare(two))
    assert rows["error poselib A"].tolist() == ERRORS["A"]
    np.testing.assert_array_equal(rows["error poselib B-A"], [0.0, -math.inf, math.nan, math.nan])
    assert rows["matches B-A"].tolist() == [1, 0, 0, 0]
    assert not any("corner_error" in name for name in rows)


def test_files(two, tmp_path):
    compare(two, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(p.name for p in folder.iterdir()) == ["compare.json", "compare.png", "differences.csv"]
    told = json.loads((folder / "compare.json").read_text())
    assert told["runs"]["B"]["label"] == "B + lightglue, 1024 keypoints"
    assert len(told["auc"]) == 6
    with open(folder / "differences.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["error dlt B-A"] for row in rows] == ["0.0", "-inf", "nan", "nan"]


def test_a_clear_difference_is_marked_and_the_same_run_is_not(make_run):
    bad = make_run("b", pairs=80, seed=1, skill=0.4, extractor="bad")
    found = compare([make_run("a", pairs=80), bad, make_run("c", pairs=80)])
    for line in found.lines:
        if line.run == "B":
            assert all(line.apart)
            assert all(high < 0 for high in line.difference_high)
        if line.run == "C":
            assert line.difference == line.difference_low == line.difference_high == (0.0, 0.0, 0.0)
            assert not any(line.apart)
    assert found.warnings == ("C was made exactly like A",)


def _protocol(**changed):
    return lambda scores: scores.update(protocol={**scores["protocol"], **changed})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.update(benchmark="other"), "benchmarks are 'hpatches' and 'other'"),
        (_protocol(corners="centres"), "corners in the protocol is 'edges' and 'centres'"),
        (_protocol(pixels="neglected"), "pixels in the protocol is 'exact' and 'neglected'"),
        (_protocol(thresholds={"poselib": [1.0]}), "thresholds in the protocol is"),
        (_protocol(new_key=1), "new_key in the protocol is None and 1"),
        (lambda s: s["groups"].pop("viewpoint"), "groups are"),
    ],
)
def test_other_scoring_is_refused(make_run, change, told):
    with pytest.raises(ValueError, match=told) as caught:
        compare([make_run("a"), make_run("b", change=change)])
    assert "\n" not in str(caught.value)
    assert "vispe evaluate" in str(caught.value)


def test_other_pairs_are_refused(make_run):
    with pytest.raises(ValueError, match="pairs are 40 and 30"):
        compare([make_run("a"), make_run("b", pairs=30)])
    columns = by_hand(ERRORS["A"], [1] * 4)
    other = {**columns, "image1": ["e", "f", "G\n", "h"]}
    with pytest.raises(ValueError, match=r"image1 of pair 3 is 'g' and 'G\\n'"):
        compare([make_run("c", columns=columns), make_run("d", columns=other)])


def test_a_run_is_like_itself(make_run):
    run = make_run()
    found = compare([run, run])
    assert all(line.difference == (0.0, 0.0, 0.0) for line in found.lines if line.run == "B")


def test_the_number_of_runs_has_bounds(make_run):
    run = make_run()
    for runs in ([], [run], [run] * (len(LETTERS) + 1)):
        with pytest.raises(ValueError, match=f"2 to 26 runs, got {len(runs)}"):
            compare(runs)


def test_other_frames_are_said_loudly(make_run):
    a, b = make_run("a"), make_run("b", change=_protocol(resize=1024, side="long"))
    [warning] = [w for w in compare([a, b]).warnings if "exactly like" not in w]
    assert "DIFFERENT FRAMES (A: short side 480; B: long side 1024)" in warning
    assert "nor AUCs are comparable" in warning
    files = make_run("d", change=_protocol(frame=0))
    assert "B: original size" in compare([a, files]).warnings[0]
    exact = make_run("c", change=_protocol(resize=[480, 640]))
    assert "B: 480 x 640" in compare([a, exact]).warnings[0]


def test_one_frame_for_several_sizes_is_no_warning(make_run):
    a = make_run("a", extractor="x", change=_protocol(frame=480))
    b = make_run("b", change=_protocol(frame=480, resize=1024, side="long"))
    found = compare([a, b])
    assert found.warnings == ()
    assert found.settings["resize"] == ("480", "1024")


def test_pose_errors_are_degrees_in_any_frame(make_run):
    a, b = make_run("a", task="pose"), make_run("b", task="pose", extractor="x", change=_protocol(resize=840))
    [warning] = compare([a, b]).warnings
    assert "degrees all the same" in warning


def test_other_versions_are_said(make_run):
    found = compare([make_run("a"), make_run("b", extractor="x", change=lambda s: s.update(version="9"))])
    assert found.warnings == ("scored by different versions of vispe (A: 0.1.0, B: 9)",)
