"""ScanNet-1500 in its three layouts."""

import tomllib

import numpy as np
import pytest
from PIL import Image

from vispe.data.scannet1500 import scannet1500
from vispe.evaluate.protocol import preset
from vispe.paths import shared

FACTS = tomllib.loads((shared("data") / "scannet1500.toml").read_text(encoding="utf-8"))
# The first line of SuperGlue's assets/scannet_test_pairs_with_gt.txt.
LINE = (
    "scene0707_00_frame-000015.jpg scene0707_00_frame-000585.jpg 0 0 "
    "1165.72 0. 649.095 0. 1165.74 484.765 0. 0. 1. 1165.72 0. 649.095 0. 1165.74 484.765 0. 0. 1. "
    "0.97598 0.05925 0.20966 -0.03968 -0.08203 0.99143 0.10171 0.00746 -0.20184 -0.11647 0.97247 0.54255 0. 0. 0. 1."
)
POSE = np.array(LINE.split()[22:], float).reshape(4, 4)
COLOUR = np.array([[1165.72, 0, 649.095], [0, 1165.74, 484.765], [0, 0, 1]])
DEPTH = np.array([[577.9, 0, 319.5], [0, 577.9, 239.5], [0, 0, 1]])


def write_loftr(root, *, rel_pose=True, intrinsics=True, place=""):
    arrays = {"name": np.array([[707, 0, 15, 585], [708, 1, 0, 45]], dtype=np.uint16)}
    if rel_pose:
        arrays["rel_pose"] = np.array([POSE[:3].ravel()] * 2)
    np.savez(root / "test.npz", **arrays)
    if intrinsics:
        np.savez(root / "intrinsics.npz", scene0707_00=DEPTH, scene0708_01=DEPTH.astype(np.float32))
    for scene, frames in (("scene0707_00", (15, 585)), ("scene0708_01", (0, 45))):
        folder = root / place / scene
        for part in ("color", "pose", "intrinsic"):
            (folder / part).mkdir(parents=True)
        for frame, pose in zip(frames, (np.eye(4), np.linalg.inv(POSE)), strict=True):
            Image.new("RGB", (8, 6)).save(folder / "color" / f"{frame}.jpg")
            np.savetxt(folder / "pose" / f"{frame}.txt", pose)
        big = np.eye(4)
        big[:3, :3] = COLOUR
        np.savetxt(folder / "intrinsic" / "intrinsic_color.txt", big)


@pytest.mark.parametrize("place", ["", "scans_test", "scannet_test_1500"])
@pytest.mark.parametrize("rel_pose", [True, False])
@pytest.mark.parametrize("intrinsics", [True, False])
def test_the_layouts_of_loftr_roma_and_xfeat(tmp_path, place, rel_pose, intrinsics):
    write_loftr(tmp_path, rel_pose=rel_pose, intrinsics=intrinsics, place=place)
    found = scannet1500(tmp_path)
    assert found.K_size == ((480, 640) if intrinsics else None)
    assert [p.group for p in found.pairs] == ["scene0707_00", "scene0708_01"]
    first = found.pairs[0]
    assert first.image1 == f"{place}/scene0707_00/color/585.jpg".lstrip("/")
    np.testing.assert_allclose(first.pose, POSE, atol=1e-6)  # poses of frames are camera-to-world
    np.testing.assert_allclose(first.K0, DEPTH if intrinsics else COLOUR)
    assert (found.name, found.pixel, found.note) == ("scannet1500", 0.0, "2 of 1500 pairs")
    found.check_files()


@pytest.mark.parametrize(("scale", "size"), [(1, (968, 1296)), (640 / 1296, (480, 640)), (0.3, None)])
def test_superglues_list_says_which_size_its_cameras_belong_to(tmp_path, scale, size):
    words = LINE.split()
    for start in (4, 13):
        for i in (0, 2, 4, 5):
            words[start + i] = str(float(words[start + i]) * scale)
    (tmp_path / "scannet_test_images").mkdir()
    (tmp_path / "scannet_test_pairs_with_gt.txt").write_text(" ".join(words) + "\n")
    found = scannet1500(tmp_path)
    assert found.K_size == size
    assert found.root == tmp_path / "scannet_test_images"
    assert found.pairs[0].group == "scene0707_00"
    np.testing.assert_array_equal(found.pairs[0].pose, POSE)
    with pytest.raises(ValueError, match=r"2 of 2 images are missing.*the first is 'scene0707_00_frame-000015\.jpg'"):
        found.check_files()


def test_glue_factorys_list(tmp_path):
    words = LINE.split()
    (tmp_path / "scannet1500").mkdir()
    (tmp_path / "scannet1500" / "pairs_calibrated.txt").write_text(" ".join(words[:2] + words[4:]) + "\n")
    found = scannet1500(tmp_path)
    assert (found.root, found.K_size) == (tmp_path / "scannet1500", (968, 1296))


def test_1500_pairs_need_no_note(tmp_path):
    rows = [LINE.replace("000015", f"{k:06d}") for k in range(1500)]
    (tmp_path / "pairs_calibrated.txt").write_text("\n".join(rows))
    assert scannet1500(tmp_path).note == ""


def test_what_to_fetch(tmp_path):
    with pytest.raises(ValueError, match=r"scannet1500\.zip.*about 1 GB.*Licence: ScanNet Terms of Use"):
        scannet1500(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "'name' must be whole numbers"),
        ({"name": np.zeros((2, 3), int)}, "'name' must be whole numbers"),
        ({"name": np.zeros((2, 4))}, "'name' must be whole numbers"),
        ({"name": np.zeros((0, 4), int)}, "no pairs"),
        ({"name": np.zeros((2, 4), int), "rel_pose": np.zeros((2, 16))}, r"'rel_pose' must be \[2, 12\]"),
        ({"name": np.zeros((1, 4), int), "rel_pose": np.ones((1, 12))}, "orthonormal"),
        ({"name": np.ones((1, 4), int), "rel_pose": POSE[:3].reshape(1, 12)}, r"no \[3, 3\] for 'scene0001_01'"),
        ({"name": np.array([[0, 0, 1, 2]])}, r"cannot read '.*scene0000_00.*pose.*1\.txt'"),
        ({"name": np.array([[object()] * 4])}, "not an npz of numbers"),
    ],
)
def test_wrong_contents_are_named(tmp_path, arrays, message):
    np.savez(tmp_path / "test.npz", **arrays)
    np.savez(tmp_path / "intrinsics.npz", scene0000_00=DEPTH)
    with pytest.raises(ValueError, match=message) as error:
        scannet1500(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("left", [0, 1, 5, 60, -30])
def test_truncated_files_are_named(tmp_path, left):
    write_loftr(tmp_path)
    for name in ("intrinsics.npz", "test.npz"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:left])
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            scannet1500(tmp_path)


def test_damaged_poses_and_cameras_are_named(tmp_path):
    write_loftr(tmp_path, rel_pose=False, intrinsics=False)
    folder = tmp_path / "scene0708_01"
    (folder / "pose" / "45.txt").write_text("-inf " * 16)  # as ScanNet marks a frame it lost
    with pytest.raises(ValueError, match=r"45\.txt.*4 x 4 finite numbers"):
        scannet1500(tmp_path)
    np.savetxt(folder / "pose" / "45.txt", np.zeros((4, 4)))
    with pytest.raises(ValueError, match=r"'scene0708_01', frames 0 and 45, has no inverse"):
        scannet1500(tmp_path)
    (folder / "intrinsic" / "intrinsic_color.txt").write_text("a b")
    with pytest.raises(ValueError, match=r"intrinsic_color\.txt"):
        scannet1500(tmp_path)


@pytest.mark.parametrize("name", FACTS["preset"])
def test_presets_are_protocols(name):
    assert preset("scannet1500", name, "pose").source


def test_published_numbers_are_percent_and_belong_to_a_preset():
    for name, claims in FACTS["published"].items():
        assert name in FACTS["preset"]
        for claim in claims:
            assert len(claim["at"]) == len(claim["auc"]) == 3
            assert 1 < claim["auc"][0] < claim["auc"][1] < claim["auc"][2] < 100
