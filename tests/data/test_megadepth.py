"""MegaDepth's layout on a scene made here: a photograph on a wall, seen by cameras whose depths are exact."""

import os

import h5py
import numpy as np
import pytest
import torch

from vispe.data.megadepth import DepthSpec, open_posed, read_depth
from vispe.geometry.depth import carried, depth_at

SIZE = (96, 128)
FOCAL = 120.0


def wall(photo, T):  # noqa: N803
    """What a camera ``T`` (world to camera) sees of a photograph on the plane z = 0, 2 wide: image and depth."""
    from vispe.data.homographies import drawn

    h, w = photo.shape[-2:]
    K = np.array([[FOCAL, 0, (SIZE[1] - 1) / 2], [0, FOCAL, (SIZE[0] - 1) / 2], [0, 0, 1]])  # noqa: N806
    to_photo = np.array([[(w - 1) / 2, 0, (w - 1) / 2], [0, (w - 1) / 2, (h - 1) / 2], [0, 0, 1]])
    H = K @ T[:3, [0, 1, 3]]  # noqa: N806 - from the plane to the camera
    image = drawn(photo, to_photo @ np.linalg.inv(H), SIZE)
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    rays = np.stack((x.ravel(), y.ravel(), np.ones(x.size)), 1) @ np.linalg.inv(K).T
    normal, centre = T[:3, 2], T[:3, 3]
    depth = (normal @ centre) / (rays @ normal)
    return image, depth.reshape(SIZE), K


def write_posed(root, scenes=("0001", "0002"), images=4):
    """Scenes in MegaDepth's layout; K is COLMAP's: half a pixel more."""
    from PIL import Image

    draw = np.random.default_rng(0)
    (root / "scene_info").mkdir(parents=True)
    for name in scenes:
        for folder in (f"Undistorted_SfM/{name}/images", f"depths/{name}"):
            (root / folder).mkdir(parents=True)
        coarse = torch.from_numpy(draw.random((3, 24, 32)).astype(np.float32))
        photo = torch.nn.functional.interpolate(coarse[None], (240, 320), mode="bicubic").clamp(0, 1)[0]
        paths, depths, matrices, poses = [], [], [], []
        for k in range(images):
            yaw, roll = draw.uniform(-0.25, 0.25), draw.uniform(-0.2, 0.2)
            about_z = [[np.cos(roll), -np.sin(roll), 0], [np.sin(roll), np.cos(roll), 0], [0, 0, 1]]
            about_y = [[np.cos(yaw), 0, np.sin(yaw)], [0, 1, 0], [-np.sin(yaw), 0, np.cos(yaw)]]
            turn = np.array(about_z) @ np.array(about_y)
            pose = np.eye(4)
            place = np.array([*draw.uniform(-0.3, 0.3, 2), -draw.uniform(1.2, 1.8)])
            pose[:3, :3], pose[:3, 3] = turn, -turn @ place
            image, depth, matrix = wall(photo, pose)
            paths.append(f"Undistorted_SfM/{name}/images/{k}.png")
            depths.append(f"depths/{name}/{k}.h5")
            Image.fromarray((image.permute(1, 2, 0).numpy() * 255).astype(np.uint8)).save(root / paths[-1])
            with h5py.File(root / depths[-1], "w") as file:
                file["depth"] = depth.astype(np.float32)
            matrices.append(matrix + np.array([[0, 0, 0.5], [0, 0, 0.5], [0, 0, 0]]))
            poses.append(pose)
        paths.append(None)  # an image without a file, as MegaDepth's indices have them
        table = np.full((images + 1, images + 1), 0.5)
        np.savez(
            root / "scene_info" / f"{name}.npz", image_paths=np.array(paths, dtype=object),
            depth_paths=np.array([*depths, None], dtype=object), overlap_matrix=table,
            intrinsics=np.array([*matrices, np.eye(3)]), poses=np.array([*poses, np.eye(4)]),
        )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_posed(tmp_path_factory.mktemp("megadepth"))


def test_scenes_are_parted(root):
    train, val = open_posed(DepthSpec(root=str(root)))
    assert (train.scenes, len(train.names), len(train.pairs)) == (1, 4, 6)
    assert train.names[0] == "Undistorted_SfM/0001/images/0.png"
    assert val.names[0].split("/")[1] == "0002"
    train, val = open_posed(DepthSpec(root=str(root), scenes=("0002",), val_scenes=("0001",)))
    assert train.names[0].split("/")[1] == "0002"


def test_depths_and_poses_belong_together(root):
    """A pixel carried to another image lands where that image says the same depth: half a pixel is not lost."""
    train, _ = open_posed(DepthSpec(root=str(root)))
    for i, j in train.pairs.tolist():
        points = np.stack(np.meshgrid(np.arange(10, 118, 9.0), np.arange(10, 86, 9.0)), -1).reshape(-1, 2)
        there, z = carried(points, depth_at(train.depth(i), points), train.K[i], train.K[j], train.between(i, j))
        seen = depth_at(train.depth(j), there)
        assert (seen > 0).sum() > 20
        np.testing.assert_allclose(z[seen > 0], seen[seen > 0], rtol=0.01)


def test_a_depth_in_the_other_place_is_found(tmp_path):
    root = write_posed(tmp_path / "d", images=2)
    (root / "depth_undistorted").mkdir()
    os.rename(root / "depths" / "0001", root / "depth_undistorted" / "0001")
    assert open_posed(DepthSpec(root=str(root)))[0].depth(0).shape == SIZE


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"scenes": ("0009",)}, "has no scene '0009'; it has 0001, 0002"),
        ({"scenes": ("0001",), "val_scenes": ("0001",)}, "scene '0001' is for training and for validation"),
        ({"overlap": (0.6, 0.9)}, "have no pair with an overlap of 0.6 to 0.9"),
        ({"overlap": (0.9, 0.6)}, "overlap goes from low to high within [0, 1], got (0.9, 0.6)"),
        ({"pairs": 0}, "pairs and val_pairs are at least 1, got 0 and 200"),
        ({"tolerance": 0.0}, "tolerance and epipolar are positive, got 0.0 and 5.0"),
        ({"root": "/nowhere"}, "megadepth: no scene_info/NAME.npz in '/nowhere'. Fetch https://"),
    ],
)
def test_mistakes_are_named(root, knobs, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        open_posed(DepthSpec(**{"root": str(root), **knobs}))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damage_is_named(tmp_path):
    root = write_posed(tmp_path / "d", images=2)
    (root / "depths" / "0001" / "0.h5").write_text("junk")
    with pytest.raises(ValueError, match=r"0\.h5' is no depth map"):
        open_posed(DepthSpec(root=str(root)))[0].depth(0)
    with h5py.File(root / "depths" / "0001" / "1.h5", "w") as file:
        file["depth"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"no depth map: it has shape \[3\]"):
        read_depth(str(root / "depths" / "0001" / "1.h5"))
    (root / "scene_info" / "0001.npz").write_text("junk")
    with pytest.raises(ValueError, match=r"0001\.npz"):
        open_posed(DepthSpec(root=str(root)))
    np.savez(root / "scene_info" / "0001.npz", image_paths=np.array(["a"]))
    with pytest.raises(ValueError, match="has no 'depth_paths'"):
        open_posed(DepthSpec(root=str(root)))
