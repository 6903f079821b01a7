"""LightGlue's own promises: batches, padding, symmetry, few points, memory, precision, threads and clear refusals."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import vispe
from vispe.models.lightglue import LightGlue, LightGlueSpec, MatchOutput, Points
from vispe.position.grid import normalize_keypoints


def points(b: int, n: int, seed: int, d: int = 32) -> Points:
    g = torch.Generator().manual_seed(seed)
    keypoints = torch.rand(b, n, 2, generator=g) * torch.tensor([639.0, 479.0])
    return Points(keypoints, F.normalize(torch.randn(b, n, d, generator=g), dim=-1), (480, 640))


def related(b: int, n: int, seed: int) -> tuple[Points, Points]:
    """Two sets of which the second is the first moved and blurred: something to match."""
    p0 = points(b, n, seed)
    noise = 0.05 * torch.randn(p0.descriptors.shape, generator=torch.Generator().manual_seed(seed + 99))
    return p0, Points(
        (p0.keypoints * 0.9 + 10).flip(1), F.normalize(p0.descriptors + noise, dim=-1).flip(1), (480, 640)
    )


def small(**knobs: object) -> LightGlue:
    """A small network with random weights that matches :func:`related` points: descriptors pass almost unchanged."""
    torch.manual_seed(0)
    network = LightGlue(LightGlueSpec(input_dim=32, width=64, depth=4, num_heads=2, **knobs))
    with torch.no_grad():
        for head in network.heads:
            head.final.weight.copy_(torch.eye(64) * 20)
            head.matchability.bias.fill_(2.0)
    return network.eval()


def padded(p: Points, n: int) -> Points:
    """Padding with values that would ruin everything if they leaked: far pixels, huge descriptors."""
    more = n - p.keypoints.shape[1]
    mask = F.pad(torch.ones(p.keypoints.shape[:2], dtype=torch.bool), (0, more))
    return Points(
        F.pad(p.keypoints, (0, 0, 0, more), value=1e4), F.pad(p.descriptors, (0, 0, 0, more), value=50.0), p.size, mask
    )


def same(a: MatchOutput, b: MatchOutput, rows: slice = slice(None)) -> None:
    """Equal matches and stops, scores to rounding; ``b`` may be longer (padded)."""
    m, n = a.matches0.shape[1], a.matches1.shape[1]
    assert torch.equal(a.matches0, b.matches0[rows, :m])
    assert torch.equal(a.matches1, b.matches1[rows, :n])
    assert torch.equal(a.stop, b.stop[rows])
    torch.testing.assert_close(a.scores0, b.scores0[rows, :m], atol=1e-3, rtol=0)
    assert (b.matches0[rows, m:] == -1).all()


# ------------------------------------------------------------------------------------------------- batches and padding


@pytest.mark.parametrize("adaptive", [False, True])
@torch.inference_mode()
def test_a_batch_of_real_pairs_gives_each_pair_its_single_result(features, adaptive):
    """Ragged: pairs of different counts, padded with junk, easy and hard ones that stop at different layers."""
    knobs = {"depth_confidence": 0.95, "width_confidence": 0.99} if adaptive else {}
    network = vispe.load("lightglue_aliked", **knobs)
    counts = {"motorcycle": (400, 350), "astronaut": (300, 400), "chelsea": (256, 256), "coffee": (64, 400)}
    single = {
        name: tuple(
            p._replace(keypoints=p.keypoints[:, :k], descriptors=p.descriptors[:, :k])
            for p, k in zip(features(name, 400), n, strict=True)
        )
        for name, n in counts.items()
    }
    alone = [network.match(*pair) for pair in single.values()]
    sides = []
    for side in (0, 1):
        each = [padded(pair[side], 400) for pair in single.values()]
        sizes = torch.tensor([pair[side].size for pair in single.values()])
        sides.append(
            Points(
                torch.cat([p.keypoints for p in each]),
                torch.cat([p.descriptors for p in each]),
                sizes,
                torch.cat([p.mask for p in each]),
            )
        )
    together = network.match(*sides)
    for row, out in enumerate(alone):
        same(out, together, slice(row, row + 1))
    assert all((out.matches0 >= 0).sum() > 20 for out in alone)
    assert not adaptive or len(set(together.stop.tolist())) > 1, "the pairs were to stop at different layers"
    # Another order of the batch, other batch mates.
    order = torch.tensor([2, 0])
    part = network.match(
        *(Points(s.keypoints[order], s.descriptors[order], s.size[order], s.mask[order]) for s in sides)
    )
    for row, k in enumerate(order.tolist()):
        same(alone[k], part, slice(row, row + 1))


@given(m=st.integers(2, 40), n=st.integers(2, 40), more=st.integers(1, 30), depth=st.booleans(), width=st.booleans())
@settings(max_examples=25)
def test_masked_padding_changes_nothing(m, n, more, depth, width):
    network = small(depth_confidence=0.6 if depth else None, width_confidence=0.9 if width else None)
    p0, p1 = points(2, m, m), points(2, n, n + 100)
    with torch.inference_mode():
        same(network.match(p0, p1), network.match(padded(p0, m + more), padded(p1, n + more)))


@pytest.mark.parametrize("knobs", [{}, {"depth_confidence": 0.95, "width_confidence": 0.99}])
@torch.inference_mode()
def test_swapping_images_and_permuting_keypoints_change_nothing(features, knobs):
    network = vispe.load("lightglue_aliked", **knobs)
    p0, p1 = features("motorcycle", 512)
    out, swapped = network.match(p0, p1), network.match(p1, p0)
    assert torch.equal(out.matches0, swapped.matches1)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    permuted = network.match(p0._replace(keypoints=p0.keypoints[:, order], descriptors=p0.descriptors[:, order]), p1)
    assert torch.equal(out.matches0[:, order], permuted.matches0)


@torch.inference_mode()
def test_pruning_threshold_is_an_option_and_equal_everywhere(features):
    p0, p1 = features("motorcycle", 512)
    always = vispe.load("lightglue_aliked", width_confidence=0.99).match(p0, p1)
    never = vispe.load("lightglue_aliked", width_confidence=0.99, prune_above=512).match(p0, p1)
    full = vispe.load("lightglue_aliked").match(p0, p1)
    assert (always.layers0 < 9).any()
    assert (never.layers0 == 9).all()
    assert torch.equal(never.matches0, full.matches0)


# ------------------------------------------------------------------------------------------------------ few keypoints


@pytest.mark.parametrize(("m", "n"), [(0, 0), (0, 9), (9, 0), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("knobs", [{}, {"depth_confidence": 0.9, "width_confidence": 0.9}])
def test_zero_or_one_keypoint_gives_no_matches_and_finite_gradients(m, n, knobs):
    network = small(**knobs)
    p0, p1 = points(2, m, 0), points(2, n, 1)
    out = network.match(p0, p1)
    assert out.matches0.shape == (2, m)
    assert out.matches1.shape == (2, n)
    assert (out.matches0 == -1).all()
    assert (out.matches1 == -1).all()
    assert out.matches0.dtype == torch.int64
    indices, scores = out.pairs(1)
    assert indices.shape == (0, 2)
    assert scores.shape == (0,)
    network.log_assignment(p0, p1).sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in network.parameters())


def test_a_pair_without_keypoints_does_not_disturb_its_batch_mates():
    network = small()
    p0, p1 = related(1, 30, 0)
    alone = network.match(p0, p1)
    assert (alone.matches0 >= 0).sum() > 15
    empty = padded(p0, 30)._replace(mask=torch.zeros(1, 30, dtype=torch.bool))
    both = [
        Points(
            *(torch.cat((a, b)) for a, b in zip(x[:2], y[:2], strict=True)),
            (480, 640),
            torch.cat((torch.ones(1, 30, dtype=torch.bool), y.mask)),
        )
        for x, y in ((p0, empty), (p1, padded(p1, 30)))
    ]
    out = network.match(*both)
    same(MatchOutput(*(t[:1] for t in alone)), MatchOutput(*(t[:1] for t in out)))
    assert (out.matches0[1] == -1).all()
    loss = network.log_assignment(*both)[:, :-1, :-1].exp().sum()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


# -------------------------------------------------------------------------------------------------------- positions


@torch.inference_mode()
def test_a_common_shift_of_all_keypoints_of_an_image_changes_no_score():
    """Self-attention sees differences of rotated positions only, and cross-attention sees none."""
    network = small()
    p0, p1 = related(1, 40, 0)
    large = p0._replace(size=(2000, 2000)), p1._replace(size=(2000, 2000))
    moved = large[0]._replace(keypoints=large[0].keypoints + torch.tensor([700.0, 900.0])), large[1]
    a, b = network.log_assignment(*large), network.log_assignment(*moved)
    torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)
    nearer = large[0]._replace(keypoints=large[0].keypoints * 0.5), large[1]
    assert (network.log_assignment(*nearer) - a).abs().max() > 1e-2, "scale does matter"


def test_normalised_corners_by_hand():
    """640 x 480: the long side spans [-1, 1], the short one [-0.75, 0.75]; sizes are (h, w)."""
    corners = torch.tensor([[[0.0, 0.0], [640.0, 480.0], [320.0, 240.0]]])
    wanted = torch.tensor([[[-1.0, -0.75], [1.0, 0.75], [0.0, 0.0]]])
    assert torch.equal(normalize_keypoints(corners, torch.tensor([[480.0, 640.0]])), wanted)


# ------------------------------------------------------------------------------------------------- clear refusals


def refused(p0: Points, p1: Points | None = None) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        small().match(p0, p1 or points(len(p0.keypoints), 5, 1))
    return str(caught.value)


def test_mistakes_are_named():
    p = points(1, 5, 0)
    assert "normalised" not in refused(p._replace(size=(48, 64)))
    assert "(48, 64)" in refused(p._replace(size=(48, 64)))  # pixels of a larger image
    wide = p._replace(keypoints=torch.tensor([[[600.0, 20.0]] * 5]))
    assert "swapped" in refused(wide._replace(size=(640, 480)))  # (w, h) given for (h, w)
    assert "finite" in refused(p._replace(keypoints=p.keypoints * float("nan")))
    assert "positive" in refused(p._replace(size=(0, 640)))
    assert "[1, 5, 32]" in refused(p._replace(descriptors=torch.randn(1, 5, 31)))
    assert "[b, n, 2]" in refused(p._replace(keypoints=p.keypoints[0]))
    assert "boolean" in refused(p._replace(mask=torch.ones(1, 5)))
    assert "mask0" in refused(p._replace(mask=torch.ones(1, 4, dtype=torch.bool)))
    assert "without scales0" in refused(p._replace(scales=torch.ones(1, 5)))
    assert "2 pairs" in refused(points(2, 5, 0), points(1, 5, 0)) or "2" in refused(points(2, 5, 0), points(1, 5, 0))
    with pytest.raises(ValueError, match="need scales0"):
        LightGlue(LightGlueSpec(input_dim=32, width=64, depth=1, num_heads=2, scale_and_orientation=True)).match(p, p)


@pytest.mark.parametrize(
    "knobs",
    [
        {"width": 100, "num_heads": 3},
        {"depth": 0},
        {"threshold": 1.5},
        {"width_confidence": -1.0},
        {"score_budget": 0},
        {"dept": 3},
    ],
)
def test_bad_knobs_are_refused(knobs):
    with pytest.raises(ValueError, match=next(iter(knobs))):
        vispe.build("lightglue_aliked", **knobs)


# ------------------------------------------------------------------------------------- memory, precision, threads,
# copies


@torch.inference_mode()
def test_row_blocks_change_nothing(features):
    p0, p1 = features("astronaut", 512)
    whole = vispe.load("lightglue_aliked").match(p0, p1)
    blocks = vispe.load("lightglue_aliked", score_budget=4 * 512 * 37).match(p0, p1)  # 37 rows at a time
    rows = vispe.load("lightglue_aliked", score_budget=1).match(p0, p1)
    for other in (blocks, rows):
        assert torch.equal(whole.matches0, other.matches0)
        assert torch.equal(whole.matches1, other.matches1)
        torch.testing.assert_close(whole.scores0, other.scores0, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_8192_by_8192_keypoints_stay_under_4_gib():
    code = """
import resource, torch, vispe
from vispe.models.lightglue import Points
network = vispe.build("lightglue_aliked", depth=2)
def make(seed):
    g = torch.Generator().manual_seed(seed)
    return Points(torch.rand(1, 8192, 2, generator=g) * 1000, torch.randn(1, 8192, 128, generator=g), (1000, 1000))
with torch.inference_mode():
    network.match(make(0), make(1))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 4.0  # GiB, the interpreter and torch included


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_autocast_keeps_most_matches_and_everything_finite(features, dtype):
    network = vispe.load("lightglue_aliked")
    p0, p1 = features("motorcycle", 512)
    full = network.match(p0, p1)
    with torch.autocast("cpu", dtype=dtype):
        half = network.match(p0, p1)
        assert torch.isfinite(network.log_assignment(p0, p1)).all()
    shared = ((full.matches0 == half.matches0) & (full.matches0 >= 0)).sum() / (full.matches0 >= 0).sum()
    assert shared > (0.95 if dtype == torch.float16 else 0.85)
    assert half.scores0.dtype == torch.float32


@torch.inference_mode()
def test_one_network_serves_several_threads(features):
    network = vispe.load("lightglue_aliked", depth_confidence=0.95, width_confidence=0.99)
    jobs = [features(name, 256) for name in ("motorcycle", "astronaut", "chelsea", "coffee")]
    serial = [network.match(*job) for job in jobs]

    def run(k: int) -> MatchOutput:
        with torch.inference_mode():
            return network.match(*jobs[k % 4])

    with ThreadPoolExecutor(4) as pool:
        for k, out in enumerate(pool.map(run, range(12))):
            assert torch.equal(out.matches0, serial[k % 4].matches0)


def test_copies_and_half_weights_keep_positions_exact():
    """Coordinates never become half precision, whatever the weights are: angles of far pixels stay apart."""
    network = copy.deepcopy(small()).bfloat16()
    xy = torch.tensor([[[4001.0, 10.0], [4002.0, 10.0]]])
    turn = network.basis(normalize_keypoints(xy, torch.tensor([[4096.0, 4096.0]])))
    assert turn.dtype == torch.float32
    assert not torch.equal(turn[0, 0], turn[0, 1])


def test_training_reaches_every_weight_of_the_path():
    network = LightGlue(LightGlueSpec(input_dim=32, width=64, depth=3, num_heads=2))
    p0, p1 = related(2, 20, 0)
    scores = network.log_assignment(p0, p1)
    (-scores[:, torch.arange(20), torch.arange(20).flip(0)].mean()).backward()
    without = {n for n, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    assert all(n.startswith(("heads.0", "heads.1", "confidence")) for n in without), without


# -------------------------------------------------------------------------------------------------- compiled


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="inductor needs a C++ compiler")
def test_compiled_layers_match_eager_and_compile_once_a_bucket():
    from torch._dynamo.utils import counters

    eager = small(depth_confidence=0.9, width_confidence=0.9)
    compiled = small(depth_confidence=0.9, width_confidence=0.9).compile_layers((64, 128))
    counters.clear()
    with torch.inference_mode():
        for m, n in ((40, 50), (64, 20), (100, 128), (90, 7), (33, 60), (128, 128), (130, 20), (5, 5), (0, 3)):
            p0, p1 = related(2, m, m)[0], related(2, n, n)[1]
            same(eager.match(p0, p1), compiled.match(p0, p1))
    assert counters["stats"]["unique_graphs"] <= 3  # 64, 128, and 256 for what is beyond


# --- training and other positions -------------------------------------------------------------------------------------


def pair_of(spec_dim=16, m=7, n=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        Points(torch.rand(2, k, 2, generator=draw) * 90, torch.randn(2, k, spec_dim, generator=draw), (90.0, 100.0))
        for k in (m, n)
    ]


def small_matcher(**knobs):
    torch.manual_seed(0)
    return LightGlue(LightGlueSpec(input_dim=16, width=32, depth=3, num_heads=2, **knobs))


@pytest.mark.parametrize("position", ["rotary", "axial", "absolute", "none"])
def test_every_layer_ends_with_the_assignment(position):
    """The last of them is what ``log_assignment`` gives; computing twice on the way back gives the same gradients."""
    model, points = small_matcher(position=position), pair_of()
    scores, sure = model.every_layer(*points)
    assert (len(scores), len(sure)) == (3, 2)
    torch.testing.assert_close(scores[-1], model.log_assignment(*points))
    grads = []
    for checkpoint in (False, True):
        model.zero_grad()
        made, _ = model.every_layer(*points, checkpoint=checkpoint)
        sum(s.exp().sum() for s in made).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)
    assert ("basis.weight" in grads[0]) == (position == "rotary")


def test_what_each_position_knows():
    """Without one, keypoints may lie anywhere; rotations know differences alone; an added one knows places."""
    points = pair_of()
    for position, moved_alike, anywhere in (
        ("none", True, True), ("axial", True, False), ("rotary", True, False), ("absolute", False, False),
    ):  # fmt: skip
        model = small_matcher(position=position).eval()
        with torch.inference_mode():
            plain = model.log_assignment(*points)
            shifted = [p._replace(keypoints=p.keypoints + torch.tensor([3.0, -4.0])) for p in points]
            mixed = [p._replace(keypoints=p.keypoints.flip(1)) for p in points]
            same = torch.allclose(model.log_assignment(*shifted), plain, atol=1e-4)
            free = torch.allclose(model.log_assignment(*mixed), plain, atol=1e-4)
        assert (same, free) == (moved_alike, anywhere), position


def test_raw_pixels_are_other_angles():
    points = pair_of()
    one, other = (small_matcher(coordinates=kind).eval() for kind in ("normalised", "pixels"))
    with torch.inference_mode():
        assert not torch.allclose(one.log_assignment(*points), other.log_assignment(*points), atol=1e-2)
    with pytest.raises(ValueError, match="coordinates must be one of normalised, pixels, got 'metres'"):
        LightGlueSpec(coordinates="metres")
    with pytest.raises(ValueError, match="position must be one of rotary, axial, absolute, none, got 'sine'"):
        LightGlueSpec(position="sine")
