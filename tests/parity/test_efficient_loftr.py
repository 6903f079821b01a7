"""EfficientLoFTR against transformers with random weights: coarse level, windows, second stage of the refinement.

Transformers' own way from coarse matches to windows, and its first stage, are not the authors' (see
models/efficient_loftr.md), so that its final points cannot be asked for: the windows of the matches are its, the first
stage is written out below as the authors compute it (section 3.4), the second is its again. Its lists of matches are
asked for pair by pair: of two pairs it mixes them.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import vispe

SMALL = {"widths": (16, 16, 32, 64), "blocks": (1, 2, 2, 3), "depth": 2}
SIZES = [(96, 128), (128, 64), (160, 160)]


def photographs(*size: int, pairs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and the same noise elsewhere with a little of its own; every pair another shift."""
    torch.manual_seed(1)
    a = torch.rand(pairs, 1, *size)
    b = torch.stack([image.roll((8 * i + 3, 21), (-2, -1)) for i, image in enumerate(a)])
    return a, b + 0.1 * torch.rand(pairs, 1, *size)


@pytest.fixture(scope="module")
def peer():
    """A small network of random weights whose batch norms have seen images, so that cells differ and many match."""
    hf = pytest.importorskip("transformers", reason="transformers is the parity peer")
    torch.manual_seed(0)
    config = hf.EfficientLoFTRConfig(
        stage_num_blocks=list(SMALL["blocks"]),
        out_features=list(SMALL["widths"]),
        hidden_size=SMALL["widths"][-1],
        num_attention_layers=SMALL["depth"],
        coarse_matching_threshold=0.0,
        coarse_matching_border_removal=1,
    )
    model = hf.EfficientLoFTRForKeypointMatching(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, 0, 0.1)
            module.momentum = 1.0
        elif isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.2, 0.5)
            nn.init.normal_(module.bias, 0, 0.1)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    with torch.no_grad():
        model.train()(torch.stack(photographs(96, 128, pairs=2), 1))
    return model.eval()


def ours(model: nn.Module, **knobs: object) -> nn.Module:
    knobs = {"threshold": 0.0, "border": 1, **SMALL, **knobs}
    return vispe.load("efficient_loftr", weights=model.state_dict(), origin="transformers", **knobs)


def theirs(model: nn.Module, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of one pair: confidences ``[m, n]``; i, j and scores of the matches; their points ``[k, 2]`` in both images."""
    seen: list[torch.Tensor] = []
    model, given = copy.copy(model), model._get_matches_from_scores
    model._get_matches_from_scores = lambda scores: (seen.append(scores), given(scores))[1]
    maps = model.efficientloftr(torch.stack((a, b), 1)).feature_maps
    _, scores, matches = model._coarse_matching(maps[0], 8)
    i = (scores[0, 1] > 0).nonzero()[:, 0]
    j, columns = matches[0, 1, i], maps[0].shape[-1]
    w0, w1 = model.refinement_layer(maps[0] / maps[0].shape[2] ** 0.5, maps[1:])
    w0, w1, sharp = w0[0, i], w1[0, j], model.config.fine_matching_slice_dim
    # The first stage: the largest entry of the dual softmax over the pixels of both windows.
    sim = w0[..., :-sharp] @ w1[..., :-sharp].mT / w0.shape[-1]
    dual = (sim.softmax(1) * sim.softmax(2)).view(-1, 64, 10, 10)[..., 1:-1, 1:-1].flatten(1)
    p, q = dual.argmax(1) // 64, dual.argmax(1) % 64
    corners = [8 * torch.stack((each % columns, each // columns), -1) for each in (i, j)]
    points = [
        corner + torch.stack((pixel % 8, pixel // 8), -1) - 3.5 for corner, pixel in zip(corners, (p, q), strict=True)
    ]
    heat = w0[..., -sharp:] @ w1[..., -sharp:].mT / sharp**0.5
    indices, stacked = torch.stack((p, q))[None, ..., None], torch.stack(points)[None].to(heat.dtype)
    p0, p1 = model._get_second_stage_fine_matching(indices, stacked, heat[None], 64, 1.0)[0]
    return seen[0].flatten(3).flatten(1, 2)[0], i, j, scores[0, 1, i], p0, p1


@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_confidences_matches_and_points_are_transformers(peer, size):
    a, b = photographs(*size)
    network = ours(peer)
    confidence, i, j, scores, p0, p1 = theirs(peer, a, b)
    found, columns = network(a, b), size[1] // 8
    assert (network.confidence(a, b)[0] - confidence).abs().max() < 1e-5
    assert len(i) > 20
    assert confidence.max() > 0.5
    cell0, cell1 = (torch.stack((cells % columns, cells // columns), -1) for cells in (i, j))
    assert torch.equal(((found.keypoints0 + 3.5) / 8).floor().long(), cell0)
    assert (found.keypoints1 - 8 * cell1).abs().max() <= 4.5
    assert (found.scores - scores).abs().max() < 1e-5
    assert (found.keypoints0 - p0).abs().max() < 1e-3
    assert (found.keypoints1 - p1).abs().max() < 1e-3


@torch.inference_mode()
def test_nothing_but_rounding_is_between_them(peer):
    """In float64, two pairs at once against each alone, without a border: windows reach over the image's edge."""
    model = copy.deepcopy(peer).double()
    model.config.coarse_matching_border_removal = 0
    network = ours(model, border=0).double()
    a, b = (images.double() for images in photographs(64, 96, pairs=2))
    found, confidences = network(a, b), network.confidence(a, b)
    for row in (0, 1):
        confidence, _, _, scores, p0, p1 = theirs(model, a[row : row + 1], b[row : row + 1])
        here = found.rows == row
        assert len(scores) > 20
        # Angles are float32 here; theirs, made of the same frequencies, are as well until they are multiplied.
        assert (confidences[row] - confidence).abs().max() < 1e-6
        assert (found.scores[here] - scores).abs().max() < 1e-6
        assert torch.equal(found.keypoints0[here], p0)
        assert (found.keypoints1[here] - p1).abs().max() < 1e-6


def test_weights_are_read_strictly(peer, tmp_path):
    state = peer.state_dict()
    torch.save(state, tmp_path / "w.pth")
    vispe.load("efficient_loftr", tmp_path / "w.pth", **SMALL)
    with pytest.raises(vispe.WeightsError, match=r"nothing is known of 'refinement_layer\.more'"):
        vispe.load("efficient_loftr", {**state, "refinement_layer.more": torch.ones(1)}, "transformers", **SMALL)
    with pytest.raises(vispe.WeightsError, match=r"missing 'fine\.lateral\.weight'"):
        vispe.load("efficient_loftr", {k: v for k, v in state.items() if ".out_conv.w" not in k}, **SMALL)


def test_the_published_network_has_transformers_keys():
    hf = pytest.importorskip("transformers", reason="transformers is the parity peer")
    with torch.device("meta"):
        state = hf.EfficientLoFTRForKeypointMatching(hf.EfficientLoFTRConfig()).state_dict()
        wanted = vispe.build("efficient_loftr").state_dict()
    found = {key: value.shape for key, value in converted(state).items()}
    assert found == {key: value.shape for key, value in wanted.items()}


def converted(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from vispe.weights.convert import convert
    from vispe.weights.files import facts

    return convert(state, facts("efficient_loftr")["origin"]["transformers"], "transformers")


@torch.inference_mode()
def test_the_rotation_is_theirs():
    """Of a width of 8 heads, which their frequencies presume: cosine and sine of every cell, and queries turned."""
    hf = pytest.importorskip("transformers.models.efficientloftr.modeling_efficientloftr", reason="the parity peer")
    from vispe.position.axial import axial_efficient_loftr
    from vispe.position.rotary import rotate, rotation

    config = hf.EfficientLoFTRConfig()
    cos, sin = hf.EfficientLoFTRRotaryEmbedding(config)(torch.zeros(1, 256, 24, 36))
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 6 * 9, 256)
    first, second = hf.apply_rotary_pos_emb(q[:, :, None], k[:, :, None], cos.view(1, 54, 256), sin.view(1, 54, 256), 2)
    turn = rotation(axial_efficient_loftr((6, 9), 256))
    scores, other = (
        (x.unflatten(-1, (8, 32)).transpose(1, 2) @ y.unflatten(-1, (8, 32)).transpose(1, 2).mT)
        for x, y in ((rotate(q, turn), rotate(k, turn)), (first[:, :, 0], second[:, :, 0]))
    )
    torch.testing.assert_close(scores, other, atol=2e-5, rtol=1e-5)
