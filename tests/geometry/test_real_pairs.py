"""Photographs with ground truth, SIFT and a ratio test: every backend finds the geometry. Skipped without the data.

The data lie in ``$VISPE_TEST_DATA``, else in ``shared/data`` beside the checkout. The bounds are measured errors with
room.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from vispe.geometry.homography import corner_error
from vispe.geometry.pose import Camera, pose_error
from vispe.geometry.robust import BACKENDS, estimate

DATA = Path(os.environ.get("VISPE_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
OXFORD, STRECHA = DATA / "oxford_affine", DATA / "strecha_1024"
needs_oxford = pytest.mark.skipif(not OXFORD.is_dir(), reason=f"needs the Oxford affine set in {OXFORD}")
needs_strecha = pytest.mark.skipif(not STRECHA.is_dir(), reason=f"needs Strecha's images in {STRECHA}")
pytest.importorskip("pycolmap")


@cache
def features(path: Path) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """RootSIFT of an image: keypoints [n, 2], descriptors [n, 128], size (h, w)."""
    import cv2

    image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    keypoints, descriptors = cv2.SIFT_create(2048, enable_precise_upscale=True).detectAndCompute(image, None)
    roots = np.sqrt(descriptors / descriptors.sum(1, keepdims=True)).astype(np.float32)
    return np.array([keypoint.pt for keypoint in keypoints]), roots, image.shape


def ratio_matches(path0: Path, path1: Path) -> tuple[np.ndarray, np.ndarray]:
    (xy0, d0, _), (xy1, d1, _) = features(path0), features(path1)
    similarity = d0 @ d1.T
    order = np.argsort(-similarity, axis=1)[:, :2]
    distance = np.sqrt(np.maximum(0, 2 - 2 * np.take_along_axis(similarity, order, axis=1)))
    good = distance[:, 0] < 0.8 * distance[:, 1]
    return xy0[good], xy1[order[good, 0]]


@needs_oxford
@pytest.mark.parametrize(("pair", "corner"), [("v_graf/2", 3.0), ("v_bark/2", 4.0), ("i_leuven/3", 3.0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_oxford_homography(backend: str, pair: str, corner: float) -> None:
    scene, other = pair.split("/")
    points = ratio_matches(OXFORD / scene / "1.ppm", OXFORD / scene / f"{other}.ppm")
    found = estimate("homography", *points, threshold=3.0, backend=backend)  # type: ignore[arg-type]
    truth = np.loadtxt(OXFORD / scene / f"H_1_{other}")
    assert found.num_inliers > 100
    assert corner_error(found.matrix, truth, features(OXFORD / scene / "1.ppm")[2]) < corner


@needs_strecha
@pytest.mark.parametrize("row", [0, 3, 40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strecha_pose(backend: str, row: int) -> None:
    name0, name1, *numbers = (STRECHA / "pairs_with_gt.txt").read_text().splitlines()[row].split()
    values = np.array([float(number) for number in numbers])
    K0, K1, truth = values[2:11].reshape(3, 3), values[11:20].reshape(3, 3), values[20:].reshape(4, 4)  # noqa: N806
    camera0, camera1 = (
        Camera.from_matrix(K, features(STRECHA / name)[2]) for K, name in ((K0, name0), (K1, name1))
    )  # fmt: skip
    points = ratio_matches(STRECHA / name0, STRECHA / name1)
    found = estimate("essential", *points, threshold=1.0, backend=backend, camera0=camera0, camera1=camera1)  # type: ignore[arg-type]
    assert found.num_inliers > 100
    assert pose_error(found.rotation, found.translation, truth[:3, :3], truth[:3, 3]) < 1.0
