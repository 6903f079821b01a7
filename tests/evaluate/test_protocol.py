"""Protocols: every choice has a name, a wrong one is refused, and what was published is what the tables say."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.evaluate.protocol import TABLES, Protocol, column, preset, presets

BENCHMARKS = {"hpatches": "homography", "megadepth1500": "pose", "scannet1500": "pose"}
ALL = [(benchmark, name) for benchmark in BENCHMARKS for name in presets(benchmark)]
OWN = {"thresholds": {"poselib": 2.0, "opencv": 0.5}}


@pytest.mark.parametrize(("benchmark", "name"), ALL, ids="-".join)
def test_every_preset_is_a_protocol_with_a_source(benchmark, name):
    made = preset(benchmark, name, BENCHMARKS[benchmark])
    assert made.name == name
    assert made.source
    assert Protocol.of(**json.loads(json.dumps(made.plain()))) == made


def test_what_the_sources_use():
    """reference: glue-factory eval/hpatches.py, eval/megadepth1500.py; LoFTR, section 4; XFeat, README."""
    hpatches = preset("hpatches", "glue-factory", "homography")
    assert (hpatches.resize, hpatches.side, hpatches.max_keypoints) == (480, "short", 1024)
    assert hpatches.thresholds["opencv"] == (0.5,)
    assert hpatches.auc == (1, 3, 5)
    megadepth = preset("megadepth1500", "glue-factory", "pose")
    assert (megadepth.resize, megadepth.side, megadepth.max_keypoints) == (1600, "long", 2048)
    assert dict(megadepth.thresholds) == {"poselib": (2.0,), "opencv": (0.5,)}
    assert megadepth.epipolar == "mean"
    loftr = preset("megadepth1500", "loftr", "pose")
    assert (loftr.resize, loftr.thresholds["opencv"], loftr.epipolar) == (840, (0.5,), "squared_sum")
    assert preset("hpatches", "loftr", "homography").auc == (3, 5, 10)
    assert preset("megadepth1500", "xfeat", "pose").thresholds["poselib"] == (2.5,)
    assert preset("scannet1500", "glue-factory", "pose").thresholds["opencv"] == (1.0,)


def test_benchmarks_without_a_table_borrow_one():
    for benchmark, lender in TABLES.items():
        assert presets(benchmark) == presets(lender)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"hpatches has no preset 'superglu'; it has .*glue-factory"):
        preset("hpatches", "superglu", "homography")
    with pytest.raises(ValueError, match="Protocol has no 'preprocessing'; it has name, task, resize"):
        Protocol.of(preprocessing={"resize": 1600}, **OWN)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pixels": "half"}, "pixels must be one of exact, glue-factory, neglected, got 'half'"),
        ({"corners": "middle"}, "corners must be one of"),
        ({"task": "depth"}, "task must be one of homography, pose"),
        ({"epipolar": "sum"}, "epipolar must be one of mean, squared_sum"),
        ({"side": "wide"}, "side must be one of long, short"),
        ({"estimators": ("ransac",)}, "an estimator of a homography must be one of poselib, opencv, dlt, got 'ransac'"),
        ({"task": "pose", "estimators": ("dlt",)}, "an estimator of a pose must be one of"),
        ({"estimators": ()}, "estimators are empty"),
        ({"thresholds": {"poselib": 1.0}}, "opencv needs a threshold in pixels"),
        ({"thresholds": {"poselib": 0.0, "opencv": 1}}, r"thresholds of poselib must be positive numbers, got \[0.0\]"),
        ({"thresholds": {"poselib": (1, -2), "opencv": 1}}, r"positive numbers, got \[1, -2\]"),
        ({"thresholds": {"poselib": float("nan"), "opencv": 1}}, "positive numbers"),
        ({"thresholds": {"poselib": 1, "opencv": 1, "dlt": 1}}, "dlt has no threshold"),
        ({"auc": ()}, "auc must be positive numbers"),
        ({"auc": (float("inf"),)}, "auc must be positive numbers"),
        ({"max_keypoints": 0}, "max_keypoints is a whole number of them, got 0"),
        ({"max_keypoints": 1.5}, "max_keypoints is a whole number of them, got 1.5"),
        ({"max_matches": -1}, "max_matches is a whole number"),
        ({"resize": -480}, "size is one positive int"),
        ({"resize": (480,)}, "size is one positive int"),
        ({"frame": -1}, "size is one positive int"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_values_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        Protocol(**{**OWN, **wrong})


@given(st.integers(16, 3000), st.integers(16, 3000))
def test_the_frame_is_what_was_looked_at_unless_it_is_said(h, w):
    looked = Protocol(resize=480, side="short", **OWN)
    assert min(looked.frame_size((h, w))) == 480
    assert max(Protocol(resize=1600, side="long", **OWN).frame_size((h, w))) == 1600
    assert Protocol(resize=0, **OWN).frame_size((h, w)) == (h, w)
    assert Protocol(resize=(480, 640), **OWN).frame_size((h, w)) == (480, 640)
    assert Protocol(resize=480, frame=0, **OWN).frame_size((h, w)) == (h, w)
    assert Protocol(resize=1600, frame=480, **OWN).frame_size((h, w)) == looked.frame_size((h, w))


def test_sweeps_and_columns():
    made = Protocol(thresholds={"poselib": (1, 2), "opencv": 0.5})
    assert made.swept() == [("poselib", 1), ("poselib", 2), ("opencv", 0.5), ("dlt", None)]
    assert [column("e", *both) for both in made.swept()] == ["e poselib 1.0", "e poselib 2.0", "e opencv 0.5", "e dlt"]
    only = made.but(estimators=("dlt",))
    assert dict(only.thresholds) == {}, "thresholds of estimators that are not asked are not kept"


def test_a_protocol_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Protocol(**OWN).resize = 3


def test_the_default_is_published_for_data_sets_and_exact_for_own_pairs():
    assert preset("hpatches", None, "homography").name == "glue-factory"
    assert preset("scannet1500", None, "pose").name == "glue-factory"
    for name, task in (("stress", "homography"), ("images", "homography"), ("pairs", "pose")):
        assert (preset(name, None, task).name, preset(name, None, task).pixels) == ("exact", "exact")
