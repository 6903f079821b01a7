"""EfficientLoFTR's promises: a pair gets in a padded batch what it gets alone; any size; one convolution for three;
position that only self attention sees, and only by differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vispe
from vispe.models.efficient_loftr import (
    VARIANTS,
    EfficientLoFTR,
    EfficientLoFTRSpec,
    Layer,
    RepBlock,
    _windows,
    _within,
)
from vispe.position.axial import axial_efficient_loftr
from vispe.position.rotary import rotation

SMALL = EfficientLoFTRSpec(
    widths=(8, 12, 16, 32), blocks=(1, 2, 1, 2), depth=1, num_heads=4, sharp=4, threshold=0.0, border=1
)
SIZES = ((64, 96), (50, 75), (41, 100))  # multiples of 32 and others


def made(spec: EfficientLoFTRSpec = SMALL, seed: int = 0) -> EfficientLoFTR:
    """Random weights whose batch norms have seen images, so that cells differ."""
    torch.manual_seed(seed)
    model = EfficientLoFTR(spec)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.0)
        nn.init.normal_(norm.bias, 0, 0.2)
        norm.momentum = 1.0
    with torch.no_grad():
        side = model.train()._side(torch.rand(2, 1, 64, 96))
        model._fine(side)
    return model.eval()


def images(*sizes: tuple[int, int], seed: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.rand(1, 1, *size) for size in sizes]


def padded(parts: list[torch.Tensor], size: tuple[int, int], fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    canvas, mask = torch.full((len(parts), 1, *size), fill), torch.zeros(len(parts), *size, dtype=torch.bool)
    for i, part in enumerate(parts):
        h, w = part.shape[-2:]
        canvas[i, :, :h, :w], mask[i, :h, :w] = part[0], True
    return canvas, mask


@pytest.mark.parametrize("fill", [0.0, float("nan")])
@torch.inference_mode()
def test_a_pair_in_a_padded_batch_gets_what_it_gets_alone(fill):
    model = made()
    firsts = images(*SIZES, SIZES[0])
    seconds = [part[..., 5:, 9:] for part in firsts]
    (image0, mask0), (image1, mask1) = padded(firsts, (72, 100), fill), padded(seconds, (64, 96), fill)
    found, scores = model(image0, image1, mask0, mask1), model.confidence(image0, image1, mask0, mask1)
    scores = scores.view(4, 9, 13, 8, 12)
    assert bool((found.rows[1:] >= found.rows[:-1]).all())
    for row, (a, b) in enumerate(zip(firsts, seconds, strict=True)):
        alone, here = model(a, b), found.rows == row
        assert len(alone.scores) > 5
        torch.testing.assert_close(found.keypoints0[here], alone.keypoints0, atol=1e-3, rtol=0)
        torch.testing.assert_close(found.keypoints1[here], alone.keypoints1, atol=1e-3, rtol=0)
        torch.testing.assert_close(found.scores[here], alone.scores, atol=1e-5, rtol=1e-4)
        h0, w0, h1, w1 = (-(-side // 8) for part in (a, b) for side in part.shape[-2:])
        own = model.confidence(a, b).view(h0, w0, h1, w1)
        torch.testing.assert_close(scores[row, :h0, :w0, :h1, :w1], own, atol=1e-5, rtol=1e-4)
        assert scores[row].sum() == pytest.approx(own.sum().item(), rel=1e-4)


@torch.inference_mode()
def test_two_pairs_of_one_size_get_what_each_gets_alone():
    model = made()
    a, b = (torch.cat(images((64, 96), (64, 96), seed=seed)) for seed in (1, 2))
    found = model(a, b)
    for row in (0, 1):
        alone = model(a[row : row + 1], b[row : row + 1])
        for name in ("keypoints0", "keypoints1", "scores"):
            torch.testing.assert_close(getattr(found, name)[found.rows == row], getattr(alone, name), atol=1e-4, rtol=0)
    assert bool(found.rows.bincount(minlength=2).min() > 2)


@torch.inference_mode()
def test_matches_are_the_mutual_best_of_the_confidences():
    model, (a, b) = made(SMALL.but(border=0)), images((64, 80), (56, 88))
    scores, found = model.confidence(a, b)[0], model(a, b)
    assert scores.shape == (8 * 10, 7 * 11)
    i = ((found.keypoints0 + 3.5) / 8).floor() @ torch.tensor([1.0, 10.0])
    best = scores.argmax(1)
    mutual = scores.argmax(0)[best] == torch.arange(80)
    assert torch.equal(i.long(), mutual.nonzero()[:, 0])
    torch.testing.assert_close(found.scores, scores.max(1).values[mutual])
    model.spec = model.spec.but(score_budget=4 * 77 * 3)  # three rows at a time
    assert torch.equal(model(a, b).keypoints0, found.keypoints0)


@torch.inference_mode()
def test_how_many_are_refined_at_a_time_changes_nothing(monkeypatch):
    model, (a, b) = made(SMALL.but(border=0)), images((64, 80), (56, 88))
    whole = model(a, b)
    monkeypatch.setattr("vispe.models.efficient_loftr.AT_ONCE", 7)
    assert len(whole.scores) > 14
    for one, other in zip(model(a, b), whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [(64, 96), (45, 83)])
@torch.inference_mode()
def test_windows_are_those_of_the_upsampled_map(size):
    """Every window, against the whole map at the size of the image: zeros around the image, and beyond it."""
    model = made()
    side = model._side(torch.rand(2, 1, *size))
    fine = model._fine(side)
    whole = torch.nn.functional.interpolate(fine.permute(0, 3, 1, 2), scale_factor=2.0, mode="bilinear")
    (h, w), (rows, columns) = size, side.grid
    canvas = torch.zeros(2, 12, 8 * rows + 2, 8 * columns + 2)
    canvas[:, :, 1 : h + 1, 1 : w + 1] = whole[..., :h, :w]
    wanted = canvas.unfold(2, 10, 8).unfold(3, 10, 8)[1].permute(1, 2, 3, 4, 0).flatten(2, 3).flatten(0, 1)
    k = torch.arange(rows * columns)
    found, real = _windows(fine, side, torch.ones_like(k), k)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(real, (wanted != 0).any(-1))


@torch.inference_mode()
def test_points_lie_in_their_images_at_any_size_and_off_the_border():
    model, (a, b) = made(SMALL.but(border=0)), images((61, 91), (45, 83))
    found = model(a, b)
    assert len(found.scores) > 5
    for points, (h, w) in ((found.keypoints0, (61, 91)), (found.keypoints1, (45, 83))):
        assert bool((points <= torch.tensor([w - 3.5, h - 3.5])).all())  # -3.5: where the authors put a window
        assert points.min() >= -4.5
    assert bool(((found.keypoints0 * 2) % 2 == 1).all())
    found = made(SMALL.but(border=2))(*images((64, 120), (88, 72)))
    assert len(found.scores) > 0
    assert found.keypoints0.min() >= 16 - 3.5
    assert bool((found.keypoints0 <= torch.tensor([120 - 16 - 4.5, 64 - 16 - 4.5])).all())


def test_the_middle_of_a_window_is_where_the_cell_stands():
    assert _within(torch.tensor([0, 15, 63])).tolist() == [[-3.5, -3.5], [3.5, -2.5], [3.5, 3.5]]


@torch.inference_mode()
def test_planted_pixels_are_found():
    """One pixel of window 0 looks like one of window 1, and its sharp channels like a place to the right."""
    model = made()
    w0, w1 = torch.zeros(1, 64, 12), torch.zeros(1, 100, 12)
    p, q = 8 * 2 + 5, 8 * 6 + 1
    w0[0, p, 0] = w1[0, 10 * 7 + 2, 0] = 30.0  # q in a window with a rim
    w1[0, 9, 1] = w0[0, 0, 1] = 300.0  # a rim's pixel is compared against and not chosen
    every = [torch.ones(1, n, dtype=torch.bool) for n in (64, 100)]
    found = model._most_mutual(w0, w1, *every)
    assert [each.item() for each in found] == [p, q]
    w0[0, p, 8:], w1[0, 10 * 6 + 2, 8:] = 10.0, 40.0  # of the 3 x 3 at rows 5 to 7, columns 0 to 2: its right
    move = model._between(w0, w1, *found)
    torch.testing.assert_close(move, torch.tensor([[1.0, 0.0]]), atol=1e-3, rtol=0)
    hidden = every[1].clone()
    hidden[0, 10 * 7 + 2] = False  # outside the image
    assert model._most_mutual(w0, w1, every[0], hidden)[1].item() != q


@torch.inference_mode()
def test_a_place_at_the_upper_left_wraps_around():
    """As in the authors' training: the 3 x 3 at index 0 has the last row and column of the window with its rim."""
    model = made()
    w0, w1, zero = torch.zeros(1, 64, 12), torch.zeros(1, 100, 12), torch.zeros(1, dtype=torch.long)
    w0[0, 0, 8:], w1[0, 10 * 9 + 9, 8:] = 10.0, 40.0
    torch.testing.assert_close(model._between(w0, w1, zero, zero), torch.tensor([[-1.0, -1.0]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("before", "stride"), [(6, 1), (4, 1), (6, 2)])
def test_three_branches_are_one_convolution(before, stride):
    torch.manual_seed(0)
    block = RepBlock(before, 6, stride).double()
    for norm in (m for m in block.modules() if isinstance(m, nn.BatchNorm2d)):
        for value in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            nn.init.uniform_(value, 0.5, 1.5)
    assert (block.norm is not None) == (before == 6 and stride == 1)
    x = torch.randn(2, before, 9, 12, dtype=torch.float64)
    block.eval()
    branches = block.norm3(block.conv3(x)) + block.norm1(block.conv1(x))
    branches = branches if block.norm is None else branches + block.norm(x)
    torch.testing.assert_close(block(x), branches.relu(), atol=1e-12, rtol=0)
    statistics = block.norm1.running_mean.clone()
    block.train()(x)
    assert not torch.equal(statistics, block.norm1.running_mean)


def queries_and_keys(layer: Layer, x: torch.Tensor, turn: torch.Tensor | None, monkeypatch) -> torch.Tensor:
    """The logits of a layer's attention to itself, ``[b, heads, n, n]``."""
    seen = []
    monkeypatch.setattr(
        "vispe.models.efficient_loftr.attend", lambda q, k, v: (seen.append(q @ k.mT), v.transpose(1, 2).flatten(2))[1]
    )
    layer(x, x, turn)
    return seen[0]


@torch.inference_mode()
def test_shifting_all_positions_leaves_the_logits_of_self_attention(monkeypatch):
    torch.manual_seed(0)
    layer, x = Layer(32, 4, 4), torch.randn(1, 12, 20, 32)
    angles = axial_efficient_loftr((9, 11), 32).view(9, 11, 16)
    here, there, mirrored = (
        queries_and_keys(layer, x, rotation(part.reshape(15, 16)), monkeypatch)
        for part in (angles[:3, :5], angles[4:7, 6:11], angles[:3, :5].flip(1))
    )
    still = queries_and_keys(layer, x, None, monkeypatch)
    torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-4)
    assert (here - mirrored).abs().max() > 0.1
    assert (here - still).abs().max() > 0.1
    torch.testing.assert_close(here.diagonal(dim1=2, dim2=3), still.diagonal(dim1=2, dim2=3), atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_position_is_what_tells_places_apart():
    """Moving a patch within two flat images changes its features, in inner cells, by position alone."""
    image = torch.full((1, 1, 256, 256), 0.5)
    torch.manual_seed(3)
    patch = torch.rand(32, 32)
    moved = image.clone()
    image[..., 64:96, 64:96], moved[..., 64:96, 128:160] = patch, patch
    for position in ("axial_efficient_loftr", "none"):
        model = made(SMALL.but(position=position))
        flat = torch.full((1, 1, 256, 256), 0.5)
        here, there = (model._sides(one, flat)[0].x[0] for one in (image, moved))
        same = torch.allclose(here[8:12, 8:12], there[8:12, 16:20], atol=1e-4)
        assert same == (position == "none")


@torch.inference_mode()
def test_a_reference_side_stretches_positions():
    plain, stretched = made(), made(SMALL.but(reference_side=192))
    side = plain._side(torch.rand(1, 1, 64, 96))
    once, twice = (model._turn(side).view(2, 3, 16, 2) for model in (plain, stretched))
    angles = [torch.atan2(turn[..., 1], turn[..., 0]) for turn in (once, twice)]
    slow = slice(4, 16)  # those that have not gone round
    torch.testing.assert_close(angles[1][..., slow], 2 * angles[0][..., slow], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_no_matches_are_an_empty_answer():
    found = made(SMALL.but(threshold=1.0))(*images((64, 64), (64, 64)))
    assert [list(part.shape) for part in found] == [[0, 2], [0, 2], [0], [0]]
    found = made()(*images((8, 8), (9, 7)))  # two cells, all border
    assert len(found.scores) == 0
    assert len(made(SMALL.but(border=0))(*images((1, 1), (3, 2))).scores) == 1


@torch.inference_mode()
def test_colour_is_grey_by_luma():
    model, (a, b) = made(), images((64, 80), (64, 80))
    for part, other in zip(model(a, b), model(a.expand(-1, 3, -1, -1), b), strict=True):
        torch.testing.assert_close(part, other, atol=1e-3, rtol=1e-4)


def test_confidences_teach_every_part_of_the_coarse_level():
    model = made()
    model.confidence(*images((64, 80), (64, 80))).square().sum().backward()
    coarse = [name for name, _ in model.named_parameters() if name.startswith(("coarse", "backbone"))]
    assert coarse
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in coarse)


def test_half_precision_stays_finite_and_points_stay_float32():
    model, (a, b) = made(), images((128, 160), (128, 160))
    side = model._side(a)
    turn = model._turn(side)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(a, b)
        assert torch.equal(model._turn(side), turn)
    assert turn.dtype == torch.float32
    assert len(found.scores) > 0
    assert found.keypoints1.dtype == found.scores.dtype == torch.float32
    assert bool(found.keypoints1.isfinite().all())
    with torch.inference_mode():
        exact = model.double()(a.double(), b.double())
    assert exact.keypoints1.dtype == torch.float64


def test_the_variant_is_the_published_network():
    assert VARIANTS["efficient_loftr"] == EfficientLoFTRSpec()
    with torch.device("meta"):
        assert sum(p.numel() for p in EfficientLoFTR().parameters()) == 16_025_216


WRONG = [
    ({"widths": (8, 16)}, "four widths, four counts of blocks and a head"),
    ({"blocks": (1, 2, 0, 1)}, "all positive"),
    ({"num_heads": 0}, "all positive"),
    ({"num_heads": 3}, "pairs of 3 heads and of two axes must share the width, got 256"),
    ({"position": "sine"}, "position must be one of axial_efficient_loftr, none, got 'sine'"),
    ({"sharp": 64}, "sharp must be between 1 and 63, got 64"),
    ({"pool": 0}, "pool must be at least 1, got 0"),
    ({"border": -1}, "border must be at least 0, got -1"),
    ({"reference_side": 0}, "reference_side must be at least 1, got 0"),
    ({"fine_temperature": 0.0}, "temperatures must be positive"),
    ({"threshold": 1.5}, r"threshold in \[0, 1\], got 0.1, 10.0 and 1.5"),
    ({"thresh": 0.5}, "EfficientLoFTRSpec has no 'thresh'"),
]


@pytest.mark.parametrize(("knobs", "message"), WRONG)
def test_mistakes_are_named_of_knobs(knobs, message):
    with pytest.raises(ValueError, match=message):
        vispe.build("efficient_loftr", **knobs)


def test_mistakes_are_named_of_images():
    model, (a, b) = made(), images((64, 80), (64, 80))
    mask = torch.ones(1, 64, 80, dtype=torch.bool)
    hole = mask.clone()
    hole[0, 3, 3] = False
    for wrong, message in (
        ((a[0], b), r"EfficientLoFTR takes images \[b, 1 or 3, h, w\], got \[1, 64, 80\]"),
        ((a, b.double()), "EfficientLoFTR's weights are torch.float32, the image is torch.float64"),
        ((a, b.expand(2, -1, -1, -1)), "image0 has 1 pairs, image1 has 2"),
        ((a, b, mask[:, ::8, ::8]), "mask is"),
        ((a, b, mask, hole), "must fill a rectangle at the upper left, image 0's do not"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*wrong)
