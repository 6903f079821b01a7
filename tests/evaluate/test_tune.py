"""The curve of AUC by inlier threshold: the same numbers as single scores, and an honest word about the best."""

import json

import numpy as np
import pytest

from vispe.data.pairs import Pair, PairSet
from vispe.evaluate.protocol import Protocol
from vispe.evaluate.score import score
from vispe.evaluate.tune import RANGE, tune

from .conftest import SHIFT

OWN = Protocol(resize=0, estimators=("poselib", "dlt"), thresholds={"poselib": 1.0})


@pytest.fixture
def run(handmade):
    """Eight pairs of 40 matches, of which a third are wrong and the others are a pixel off."""
    random = np.random.default_rng(0)
    pairs = tuple(Pair(image0=f"{i}a", image1=f"{i}b", homography=SHIFT) for i in range(8))
    contents = []
    for _ in pairs:
        points = random.uniform(5, 195, (40, 2)) * (1, 0.5)
        there = points + np.array([4, -2]) + random.normal(0, 1.0, (40, 2))
        there[::3] = random.uniform(0, 200, there[::3].shape)
        contents.append((points, (100, 200), there, (100, 200), [(i, i) for i in range(40)], np.ones(40)))
    return handmade(PairSet(name="images", root="/", pairs=pairs), contents)


def test_the_curve_is_made_of_single_scores(run):
    made = tune(run, OWN)
    assert made == json.loads((run / "tune.json").read_text())
    assert list(made) == ["poselib"], "the DLT has no threshold"
    curve = made["poselib"]
    assert curve["thresholds"] == list(RANGE)
    assert curve["at"] == [1, 3, 5]
    for i in (0, 5, len(RANGE) - 1):
        single = score(run, OWN.but(thresholds={"poselib": RANGE[i]}))
        assert single["groups"]["all"]["auc"][0]["auc"] == curve["auc"][i]


def test_the_best_and_how_much_it_matters(run):
    curve = tune(run, OWN, thresholds=(0.1, 1.0, 2.0, 50.0))["poselib"]
    means = [np.mean(auc) for auc in curve["auc"]]
    assert curve["best"] == (0.1, 1.0, 2.0, 50.0)[int(np.argmax(means))]
    near = [auc for auc, t in zip(curve["auc"], curve["thresholds"], strict=True) if 0.5 <= t / curve["best"] <= 2]
    assert curve["spread"] == pytest.approx(np.ptp(near, axis=0).tolist())
    assert max(means) - min(means) > 0.01, "thresholds matter"


def test_scores_are_left_as_they_were(run):
    score(run, OWN)
    before = (run / "scores.json").read_bytes()
    tune(run, OWN)
    assert (run / "scores.json").read_bytes() == before


def test_nothing_to_tune_is_said(run):
    with pytest.raises(ValueError, match="dlt has no threshold to tune"):
        tune(run, OWN.but(estimators=("dlt",)))
