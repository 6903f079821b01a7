"""A run on disk: equal text and numbers come back, and what is broken is one line that says what to run."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.evaluate.runs import amount, error_column, printable, read_rows, read_run, told_seconds, write_rows

ODD = [
    "a b.png",
    'qu"ote,comma.png',
    "line\nfeed",
    "carriage\rreturn",
    "\r\n",
    " space ",
    "",
    "é",
    os.fsdecode(b"\xff\xfe.png"),
]


def test_the_file_is_what_it_says(tmp_path):
    path = tmp_path / "pairs.csv"
    columns = {
        "image0": ['a,"b"', os.fsdecode(b"\xff")],
        "matches": np.array([3, 4]),
        "error": [0.1, math.inf],
        "share": np.array([math.nan, 2.0]),
    }
    write_rows(path, columns)
    assert path.read_bytes() == b'image0,matches,error,share\n"a,""b""",3,0.1,nan\n\xff,4,inf,2.0\n'
    assert os.listdir(tmp_path) == ["pairs.csv"]
    rows = read_rows(path)
    assert rows["matches"].dtype == np.int64
    assert rows["share"].dtype == np.float64


def test_odd_names_come_back(tmp_path):
    write_rows(tmp_path / "a.csv", {"image0": ODD, "image1": ODD[::-1], "group": ODD, "n": range(len(ODD))})
    rows = read_rows(tmp_path / "a.csv")
    assert rows["image0"] == rows["group"] == ODD
    assert rows["image1"] == ODD[::-1]


@given(
    rows=st.lists(
        st.tuples(
            st.binary(max_size=12),
            st.text(st.characters(codec="utf-8"), max_size=8),
            st.floats(),
            st.integers(-(2**63), 2**63 - 1),
        ),
        min_size=1,
    )
)
def test_any_names_and_numbers_come_back_equal(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    names, groups, floats, ints = (list(column) for column in zip(*rows, strict=True))
    names = [os.fsdecode(name) for name in names]
    write_rows(path, {"image0": names, "group": groups, "x": floats, "n": ints})
    back = read_rows(path)
    assert back["image0"] == names
    assert back["group"] == groups
    np.testing.assert_array_equal(back["x"], np.array(floats))  # nan equals nan
    assert np.array_equal(np.signbit(back["x"]), np.signbit(floats)) or np.isnan(floats).any()
    assert back["n"].tolist() == ints


def test_float32_and_numpy_scalars_keep_their_value(tmp_path):
    write_rows(tmp_path / "a.csv", {"x": np.array([0.1, 1e-30], np.float32), "n": np.array([1, 2], np.int32)})
    back = read_rows(tmp_path / "a.csv")
    assert back["x"].tolist() == np.array([0.1, 1e-30], np.float32).astype(np.float64).tolist()
    assert back["n"].tolist() == [1, 2]


def test_columns_of_unequal_length_are_our_mistake(tmp_path):
    with pytest.raises(ValueError, match="longer"):
        write_rows(tmp_path / "a.csv", {"x": [1.0], "y": [1.0, 2.0]})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "header"),
        (b"a,a\n1,2\n", "header"),
        (b"a,b\n1,2\n3\n", "line 3: 1 cells, not 2"),
        (b'a,b\n1,"2\n', "line 2"),
        (b"a,b\n1,x\n", "column 'b'.*'x'"),
        (b"a\n99999999999999999999\n", "column 'a'"),
    ],
)
def test_broken_tables_are_named(tmp_path, text, told):
    path = tmp_path / "pairs.csv"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=told) as caught:
        read_rows(path, "do this")
    assert str(caught.value).endswith(": do this")
    assert "\n" not in str(caught.value)


def test_a_run_is_read_whole(make_run):
    run = make_run("r", pairs=10)
    assert (run.benchmark, run.task, run.pairs, run.unit) == ("hpatches", "homography", 10, "px")
    assert run.label == "aliked_n16 + lightglue, 1024 keypoints"
    assert make_run("s", adaptive=True).label.endswith(", adaptive")
    assert run.errors("poselib", 2).tolist() == run.rows["corner_error poselib 2.0"].tolist()
    assert run.errors("dlt").shape == (10,)
    assert run.members("all").all()
    assert run.members("viewpoint").tolist() == [True, False] * 5
    assert set(run.rows) - set(run.numbers()) == {"image0", "image1", "group"}
    assert told_seconds(run) == {"extract": 0.25, "match": 0.04}
    with pytest.raises(ValueError, match=r"no column 'corner_error poselib 7.0'; it has 'corner_error poselib 2.0'"):
        run.errors("poselib", 7)


def test_a_run_without_timing_has_none(make_run):
    run = make_run()
    (run.path / "timing.json").unlink()
    assert told_seconds(read_run(run.path)) == {}


def _removed(*path):
    def change(scores):
        at = scores
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_removed("benchmark"), "has no 'benchmark'"),
        (_removed("groups", "all"), "no group 'all'"),
        (_removed("groups", "viewpoint", "auc"), "AUC in group 'viewpoint'"),
        (_removed("groups", "all", "auc", 0, "low"), "AUC in group 'all'"),
        (_removed("groups", "all", "median"), "no means or medians in group 'all'"),
        (lambda s: s.update(task="stereo"), "task 'stereo'"),
        (lambda s: s.update(pairs=7), "scores.json tells of 7 pairs, pairs.csv has 40"),
        (lambda s: s["groups"]["all"]["auc"][0].update(threshold=9.0), "no column 'corner_error poselib 9.0'"),
        (lambda s: s.update(pairs="many"), "'many' as its 'pairs'"),
    ],
)
def test_broken_scores_are_named_with_the_remedy(make_run, change, told):
    with pytest.raises(ValueError, match=told) as caught:
        make_run(change=change)
    assert "run `vispe evaluate" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "nothing", "\udcff"])
@pytest.mark.parametrize("name", ["scores.json", "pairs.csv"])
def test_damaged_and_missing_files_are_named(make_run, name, text):
    run = make_run()
    (run.path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=name):
        read_run(run.path)
    (run.path / name).unlink()
    with pytest.raises(ValueError, match=f"{name}' is not there: run `vispe evaluate"):
        read_run(run.path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*nowhere.*: run `vispe evaluate"):
        read_run(tmp_path / "nowhere")


def test_json_of_a_name_that_is_no_utf8_comes_back(make_run):
    odd = os.fsdecode(b"\xffweights")
    run = make_run(extractor_weights=odd)
    assert run.scores["made"]["extractor_weights"] == odd
    assert json.loads((run.path / "scores.json").read_text())["made"]["extractor_weights"] == odd


def test_words_for_people():
    assert error_column("pose", "opencv", 1) == "pose_error opencv 1.0"
    assert error_column("homography", "dlt", None) == "corner_error dlt"
    assert (amount(5.0, "px"), amount(0.5, "°")) == ("5 px", "0.5°")
    assert printable("a\nb\x7f") == "a␊b␡"
    assert printable(os.fsdecode(b"\xc3\xa9\xff")) == "é\N{REPLACEMENT CHARACTER}"
    assert printable("\ud800") == "?"
