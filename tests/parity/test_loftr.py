"""LoFTR against kornia with random weights, and a network of its family that was really trained on real pairs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import vispe
from vispe.data.images import read_image
from vispe.data.resizing import resize, to_original
from vispe.layers.assignment import optimal_transport

SIZES = [((96, 128), (96, 128)), ((100, 130), (75, 122))]  # alike; of sides that 8 does not divide


@pytest.fixture(scope="module")
def peer():
    """kornia's network with random weights, its batch norms as if trained, and a list of its confidences."""
    kornia = pytest.importorskip("kornia.feature", reason="kornia is the parity peer")
    torch.manual_seed(0)
    model, seen = kornia.LoFTR(pretrained=None).eval(), []
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 1.5)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    model.coarse_matching.thr = 0.0
    model.coarse_matching.register_forward_hook(lambda _, given, __: seen.append(given[2]["conf_matrix"]))
    return model, seen


@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_confidences_and_matches_are_kornias(peer, sizes):
    model, seen = peer
    torch.manual_seed(1)
    a, b = (torch.rand(1, 1, *size) for size in sizes)
    network = vispe.load("loftr_outdoor", weights=model.state_dict(), threshold=0.0)
    theirs, ours, scores = model({"image0": a, "image1": b}), network(a, b), network.confidence(a, b)
    assert (scores - seen[-1]).abs().max() < 1e-5
    assert scores.max() > 0.5
    assert len(ours.scores) > 5
    assert torch.equal(ours.keypoints0, theirs["keypoints0"])
    assert (ours.keypoints1 - theirs["keypoints1"]).abs().max() < 1e-3
    assert (ours.scores - theirs["confidence"]).abs().max() < 1e-5


@torch.inference_mode()
def test_nothing_but_rounding_is_between_them(peer):
    """In float64, with the corrected sine, a batch of two and the authors' names of keys."""
    model, seen = copy.deepcopy(peer[0]).double(), peer[1]
    model.pos_encoding.temp_bug_fix = True
    model.pos_encoding.update_position_encoding_size((256, 256))
    state = {f"matcher.{key}": value for key, value in model.state_dict().items()}
    model.coarse_matching.border_rm = 0
    network = vispe.load("loftr_indoor_new", weights=state, threshold=0.0, border=0).double()
    a, b = torch.rand(2, 1, 48, 56, dtype=torch.float64), torch.rand(2, 1, 40, 64, dtype=torch.float64)
    theirs, ours = model({"image0": a, "image1": b}), network(a, b)
    # The sine is float32 on both sides, its frequencies once rounded differently.
    assert (network.confidence(a, b) - seen[-1]).abs().max() < 1e-6
    assert torch.equal(ours.rows, theirs["batch_indexes"])
    assert torch.equal(ours.keypoints0, theirs["keypoints0"])
    assert (ours.keypoints1 - theirs["keypoints1"]).abs().max() < 1e-5


def test_a_file_of_the_authors_is_read_strictly(peer, tmp_path):
    state = {f"matcher.{key}": value for key, value in peer[0].state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "outdoor_ds.ckpt")
    vispe.load("loftr_outdoor", tmp_path / "outdoor_ds.ckpt")
    with pytest.raises(vispe.WeightsError, match=r"nothing is known of 'matcher\.more'"):
        vispe.load("loftr_outdoor", {**state, "matcher.more": torch.ones(1)}, origin="official")
    with pytest.raises(vispe.WeightsError, match=r"missing 'backbone\.conv1\.weight'"):
        vispe.load("loftr_outdoor", {k: v for k, v in state.items() if "backbone.conv1" not in k})
    transport = {**state, "matcher.coarse_matching.bin_score": torch.tensor(2.5)}
    assert vispe.load("loftr_outdoor", transport, matching="optimal_transport").dustbin.item() == 2.5
    with pytest.raises(vispe.WeightsError, match="unknown 'dustbin'"):
        vispe.load("loftr_outdoor", transport)


def test_optimal_transport_is_the_one_of_superglue():
    superglue = pytest.importorskip("transformers.models.superglue.modeling_superglue", reason="the parity peer")
    torch.manual_seed(0)
    sim, dustbin = 3 * torch.randn(2, 7, 9), torch.tensor(0.7)
    for iterations in (1, 3, 50):
        theirs = superglue.log_optimal_transport(sim, dustbin.view(1, 1, 1), iterations)
        torch.testing.assert_close(optimal_transport(sim, dustbin, iterations), theirs, atol=1e-5, rtol=1e-5)


TRAINED = {("v_graf", 2): 93, ("v_wall", 3): 220, ("i_leuven", 2): 550}


@pytest.mark.parametrize("pair", TRAINED, ids=lambda pair: f"{pair[0]} 1-{pair[1]}")
@torch.inference_mode()
def test_a_trained_network_matches_real_pairs(measured_data, pair):
    """Coarse_LoFTR_TRT's weights at 640 x 480: mutual, confidence above 0.2; every match within a cell of the truth."""
    path, folder = measured_data / "weights" / "coarse_loftr_bmvs.pt", measured_data / "oxford_affine" / pair[0]
    for place in (path, folder):
        if not place.exists():
            pytest.skip(f"{place.name} is not among the measured data")
    seen = [resize(read_image(folder / f"{i}.ppm"), (480, 640), side="exact") for i in (1, pair[1])]
    found = vispe.load("loftr_coarse_bmvs", path)(*(image[None] for image, _ in seen))
    p0, p1 = (to_original(points, scale).double() for points, (_, scale) in zip(found[:2], seen, strict=True))
    truth = torch.from_numpy(np.loadtxt(folder / f"H_1_{pair[1]}"))
    there = torch.cat((p0, torch.ones_like(p0[:, :1])), 1) @ truth.T
    scale = torch.tensor(seen[1][1][::-1], dtype=torch.float64)  # of x and y
    errors = ((there[:, :2] / there[:, 2:] - p1) * scale).norm(dim=1)  # in pixels of the image looked at
    assert errors.max() < 16
    assert len(errors) == pytest.approx(TRAINED[pair], abs=2)
