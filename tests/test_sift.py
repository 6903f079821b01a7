"""SIFT in COLMAP's convention: against pycolmap on photographs, and by hand on a blob."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vispe.sift import SiftFeatures, root, sift

NOTHING = SiftFeatures((0, 2), (0,), (0, 128), (0,), (0,))


def blob(x: float = 60, y: float = 50, sigma: float = 4.0, h: int = 100, w: int = 120) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.exp(-((columns - x) ** 2 + (rows - y) ** 2) / (2 * sigma**2))[None]


def photograph(name: str) -> torch.Tensor:
    data = pytest.importorskip("skimage.data", reason="scikit-image carries the photographs")
    image = torch.from_numpy(getattr(data, name)())
    return (image if image.ndim == 3 else image[..., None]).permute(2, 0, 1).float() / 255


def shapes(found: SiftFeatures) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(part.shape) for part in found)


def colmap(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """pycolmap's SIFT on the same bytes: points ``[n, 4]`` (x, y from the first pixel's centre, sigma, radians)."""
    pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is the parity peer")
    luma = torch.tensor([0.299, 0.587, 0.114]) if len(image) == 3 else torch.ones(1)
    grey = (torch.tensordot(luma, image, dims=1) * 255).round().to(torch.uint8).numpy()
    with pytest.warns(DeprecationWarning, match="Sift"):
        peer = pycolmap.Sift(pycolmap.FeatureExtractionOptions(), device=pycolmap.Device.cpu)
    points, descriptors = (torch.from_numpy(part) for part in peer.extract(grey))
    points[:, :2] -= 0.5
    return points, torch.nn.functional.normalize(descriptors, dim=-1)


@pytest.mark.parametrize(("x", "y", "sigma"), [(60, 50, 4.0), (31, 77, 2.5), (60.3, 49.6, 4.0)])
def test_a_blob_is_found_where_it_is(x, y, sigma):
    found = sift(blob(x, y, sigma))
    assert shapes(found) == ((1, 2), (1,), (1, 128), (1,), (1,))
    assert (found.keypoints[0] - torch.tensor([x, y])).abs().max() < 0.05
    assert found.scales[0] == pytest.approx(sigma, rel=0.15)  # Lowe's sigma of a blob, before its own blur


def test_a_blob_equals_pycolmaps():
    points, _ = colmap(blob())
    found = sift(blob())
    torch.testing.assert_close(found.keypoints[0], points[0, :2], atol=0.01, rtol=0)
    torch.testing.assert_close(found.scales[0], points[0, 2], atol=0, rtol=0.01)


@pytest.mark.parametrize("name", ["camera", "coffee", "coins"])
def test_photographs_equal_pycolmaps_in_place_scale_orientation_and_descriptor(name):
    image = photograph(name)
    points, wanted = colmap(image)
    found = sift(image, max_keypoints=10**6)
    assert len(found.scores) > 0.8 * len(points[:, :2].round().unique(dim=0))

    gap = torch.cdist(found.keypoints, points[:, :2])
    gap = gap + 4 * (found.scales[:, None].log() - points[None, :, 2].log()).abs()
    turn = (found.orientations[:, None] - points[None, :, 3] + math.pi) % (2 * math.pi) - math.pi
    same = gap < 0.3
    assert same.any(1).float().mean() > 0.95

    turn = turn.abs().masked_fill(~same, 9.0)
    angle, index = turn.min(1)
    pair = angle < 0.35  # COLMAP keeps two orientations of a point, not always the same two
    assert pair.sum() > 0.9 * same.any(1).sum()
    ours, theirs = torch.arange(len(index))[pair], index[pair]
    offset = found.keypoints[ours] - points[theirs, :2]
    assert offset.norm(dim=-1).median() < 0.01
    assert offset.mean(0).abs().max() < 0.02  # no bias of a quarter of a pixel
    assert (found.scales[ours] / points[theirs, 2]).median() == pytest.approx(1.0, abs=0.01)
    assert angle[pair].median() < 0.05
    # The range, too: a difference of a whole turn would be another position to a rotary encoding.
    raw = (found.orientations[ours] - points[theirs, 3]).abs()
    assert (raw < 0.35).float().mean() > 0.97
    assert (found.descriptors[ours] * wanted[theirs]).sum(-1).median() > 0.99


def test_strongest_first_one_to_a_pixel_at_most_so_many():
    image = photograph("coins")
    everything, some = sift(image, max_keypoints=10**6), sift(image, max_keypoints=100)
    assert shapes(some) == ((100, 2), (100,), (100, 128), (100,), (100,))
    for a, b in zip(everything, some, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a[:100], b)
    assert (everything.scores.diff() <= 0).all()
    assert len((everything.keypoints + 0.5).floor().unique(dim=0)) == len(everything.keypoints)
    assert (everything.orientations > -math.pi).all()
    assert (everything.orientations <= math.pi).all()
    torch.testing.assert_close(everything.descriptors.norm(dim=-1), torch.ones(len(everything.scores)))
    assert shapes(sift(image, max_keypoints=0)) == NOTHING


def test_rotating_the_picture_rotates_the_orientations():
    image = photograph("coins")[:, :300, :300]
    upright, turned = sift(image), sift(image.rot90(-1, (1, 2)))  # clockwise on the screen: (x, y) to (299 - y, x)
    moved = torch.stack([299 - upright.keypoints[:, 1], upright.keypoints[:, 0]], dim=-1)
    gap, index = torch.cdist(moved, turned.keypoints).min(1)
    near = (gap < 0.1) & ((upright.scales / turned.scales[index]).log().abs() < 0.05)
    assert near.sum() > 200
    turn = (turned.orientations[index] - upright.orientations)[near] % (2 * math.pi)
    assert ((turn - math.pi / 2).abs() < 0.1).float().mean() > 0.7  # others chose another of their orientations


@pytest.mark.parametrize("image", [torch.zeros(1, 64, 64), torch.full((3, 64, 64), 0.5)])
def test_a_constant_picture_has_no_features(image):
    assert shapes(sift(image)) == NOTHING


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 500), (16, 16)])
def test_tiny_pictures_do_not_fail(size):
    found = sift(torch.rand(1, *size))
    assert found.descriptors.shape == (len(found.scores), 128)


def test_threads_and_repeats_give_the_same():
    images = [photograph("coins"), blob(), photograph("coins").flip(2)]
    one_by_one = [sift(image) for image in images]
    with ThreadPoolExecutor(3) as pool:
        for expected, found in zip(one_by_one * 2, pool.map(sift, images * 2), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_grey_and_colour_and_thresholds():
    grey = photograph("coins")
    assert all(torch.equal(a, b) for a, b in zip(sift(grey), sift(grey.expand(3, -1, -1)), strict=True))
    assert len(sift(grey, detection_threshold=0.03).scores) < len(sift(grey).scores)
    assert len(sift(grey, edge_threshold=3.0).scores) < len(sift(grey).scores)
    assert sift(grey.requires_grad_()).keypoints.requires_grad is False


def test_root_is_the_square_root_of_the_l1_normalised():
    histogram = torch.zeros(2, 128)
    histogram[0, :2] = torch.tensor([1.0, 3.0])
    wanted = torch.zeros(2, 128)
    wanted[0, :2] = torch.tensor([0.5, math.sqrt(0.75)])
    torch.testing.assert_close(root(histogram), wanted)


@pytest.mark.parametrize(
    "image", [torch.rand(1, 3, 32, 32), torch.rand(2, 32, 32), torch.rand(1, 0, 5), torch.zeros(1, 9, 9).byte()]
)
def test_wrong_pictures_are_refused(image):
    with pytest.raises(ValueError, match="sift takes"):
        sift(image)


def test_without_opencv_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ValueError, match="pip install opencv-python-headless"):
        sift(torch.rand(1, 32, 32))
