"""Rows, counts and complaints as they stand on the screen."""

from types import SimpleNamespace

import pytest

from vispe.commands.printing import busy, complain, counts, print_rows, timing


def test_columns_are_equally_wide_and_the_last_ends_where_it_ends(capsys):
    print_rows([("size", "n"), ("16x16", ""), ("é", "100")])
    assert capsys.readouterr().out == "size   n\n16x16\né      100\n"


def test_rows_are_of_one_length():
    with pytest.raises(ValueError, match="zip"):
        print_rows([("a", "b"), ("c",)])


def found(**more):
    class Found(SimpleNamespace):
        def __len__(self):
            return 7

    who = {"matcher": "lightglue", "network": "lightglue_disk"}
    return Found(**{**who, "keypoints0": [0] * 9, "keypoints1": [0] * 8, "rotation": 0, "geometry": None, **more})


def test_counts_say_what_there_is():
    assert counts(found()) == [("matcher", "lightglue_disk"), ("keypoints", "9, 8"), ("matches", "7")]
    assert counts(found(network=None))[0] == ("matcher", "lightglue")
    assert "vispe's own: the published" in counts(found(network="lightglue_sift_small"))[0][1]
    assert "vispe's own: none were" in counts(found(network="lightglue_aliked_t16_small"))[0][1]
    good = SimpleNamespace(num_inliers=5, model="homography", threshold=1.5, reason=None)
    rows = [("rotation of image 1", "90 degrees"), ("inliers", "5 (homography, 1.50 px)")]
    assert counts(found(rotation=90, geometry=good))[3:] == rows
    none = SimpleNamespace(num_inliers=0, model="homography", threshold=1.5, reason="all on a line")
    assert counts(found(geometry=none))[4:] == [("no model", "all on a line")]


def test_timing_in_the_order_of_the_stages():
    seconds = {"read": 0.004, "extract": 1.236}
    assert timing(found(seconds=seconds)) == [("seconds to read", "0.00"), ("seconds to extract", "1.24")]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a\nb", "a b"),
        (ValueError("a\r\nb\u2028c"), "a b c"),
        (MemoryError(), "MemoryError"),
        (OSError(28, "No space left on device", "out/a.png"), "out/a.png: no space left on device"),
        (OSError("no number, no name"), "no number, no name"),
    ],
)
def test_a_complaint_is_one_line_and_exit_code_2(capsys, what, line):
    assert complain("vispe match", what) == 2
    assert capsys.readouterr() == ("", f"vispe match: {line}\n")


def test_busy_says_nothing_where_nobody_looks(capfd):
    with busy("matching"):
        pass
    assert capfd.readouterr() == ("", "")
