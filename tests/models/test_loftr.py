"""LoFTR's promises: a pair gets in a padded batch what it gets alone; any size; points where they are said to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vispe
from vispe.models.loftr import VARIANTS, LoFTR, LoFTRSpec, half_windows

SMALL = LoFTRSpec(stem=8, widths=(8, 12, 16), depth=2, num_heads=4, threshold=0.0, border=1)
OPTIMAL = SMALL.but(matching="optimal_transport", iterations=5, border=0)
SIZES = ((64, 80), (50, 75), (41, 96))  # multiples of 8 and others


def made(spec: LoFTRSpec, seed: int = 0) -> LoFTR:
    torch.manual_seed(seed)
    model = LoFTR(spec).eval()
    if model.dustbin is not None:
        nn.init.constant_(model.dustbin, -20.0)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):  # as if it had been trained
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.2)  # so that zeros are no longer zeros behind it
    return model


def images(*sizes: tuple[int, int], seed: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.rand(1, 1, *size) for size in sizes]


def padded(parts: list[torch.Tensor], size: tuple[int, int], fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    canvas, mask = torch.full((len(parts), 1, *size), fill), torch.zeros(len(parts), *size, dtype=torch.bool)
    for i, part in enumerate(parts):
        h, w = part.shape[-2:]
        canvas[i, :, :h, :w], mask[i, :h, :w] = part[0], True
    return canvas, mask


@pytest.mark.parametrize("spec", [SMALL, OPTIMAL], ids=lambda spec: spec.matching)
@pytest.mark.parametrize("fill", [0.0, float("nan")])
@torch.inference_mode()
def test_a_pair_in_a_padded_batch_gets_what_it_gets_alone(spec, fill):
    model = made(spec)
    firsts = images(*SIZES)
    seconds = [part[..., 5:, 9:] for part in firsts]
    (image0, mask0), (image1, mask1) = padded(firsts, (72, 100), fill), padded(seconds, (64, 96), fill)
    found = model(image0, image1, mask0, mask1)
    count = 0
    for row, (a, b) in enumerate(zip(firsts, seconds, strict=True)):
        alone, here = model(a, b), found.rows == row
        assert len(alone.scores) > 1
        assert torch.equal(found.keypoints0[here], alone.keypoints0)
        torch.testing.assert_close(found.keypoints1[here], alone.keypoints1, atol=1e-3, rtol=0)
        torch.testing.assert_close(found.scores[here], alone.scores, atol=1e-5, rtol=1e-4)
        count += len(alone.scores)
    assert len(found.scores) == count


@torch.inference_mode()
def test_matches_are_the_mutual_best_of_the_confidences():
    model, (a, b) = made(SMALL.but(border=0)), images((64, 80), (56, 88))
    scores = model.confidence(a, b)[0]
    found = model(a, b)
    assert scores.shape == (8 * 10, 7 * 11)
    i = (found.keypoints0 / 8) @ torch.tensor([1.0, 10.0])
    best = scores.argmax(1)
    mutual = scores.argmax(0)[best] == torch.arange(80)
    assert torch.equal(i.long(), mutual.nonzero()[:, 0])
    torch.testing.assert_close(found.scores, scores.max(1).values[mutual])
    assert scores.sum(0).max() <= 1 + 1e-5
    assert scores.sum(1).max() <= 1 + 1e-5
    few = model.spec.but(score_budget=4 * 77 * 3)  # three rows at a time
    model.spec = few
    assert torch.equal(model(a, b).keypoints0, found.keypoints0)


@torch.inference_mode()
def test_points_lie_on_cells_and_near_them_and_off_the_border():
    model, (a, b) = made(SMALL.but(border=2)), images((64, 120), (88, 72))
    found, coarse = model(a, b), made(SMALL.but(border=2, fine_depth=0))(a, b)
    assert torch.equal(found.keypoints0 % 8, torch.zeros_like(found.keypoints0))
    assert found.keypoints0.min() >= 16
    assert bool((found.keypoints0 <= torch.tensor([120 - 24, 64 - 24])).all())
    moved = found.keypoints1 - (found.keypoints1 / 8).round() * 8
    assert 0 < moved.abs().max() <= 4
    assert torch.equal(coarse.keypoints1 % 8, torch.zeros_like(coarse.keypoints1))


@torch.inference_mode()
def test_a_planted_heat_map_is_read_in_pixels():
    """The window's cell that looks like the centre, two to the right and one up, moves the match by (4, -2) pixels."""
    model = made(SMALL.but(fine_depth=2))
    model.fine.forward = lambda w0, w1, *_: (w0, w1)  # type: ignore[method-assign]
    windows = torch.zeros(1, 25, 8)
    windows[0, 12, 0] = windows[0, 1 * 5 + 4, 0] = 100.0
    both = iter((windows, windows.clone().index_fill_(1, torch.tensor([12]), 0.0)))
    model.context.forward = lambda *_: next(both)  # type: ignore[union-attr, method-assign]
    a, b = images((64, 64), (64, 64))
    s0, s1 = model._sides(a, b, None, None)
    zero = torch.zeros(1, dtype=torch.long)
    torch.testing.assert_close(model._offsets(s0, s1, zero, zero + 9, zero + 9), torch.tensor([[4.0, -2.0]]))


@torch.inference_mode()
def test_four_stages_are_a_sixteenth():
    model = made(LoFTRSpec(stem=8, widths=(8, 8, 12, 16), depth=2, num_heads=4, threshold=0.0, border=0))
    a, b = images((96, 128), (80, 100))
    assert model.spec.strides == (16, 4)
    assert model.confidence(a, b).shape == (1, 6 * 8, 5 * 7)
    assert len(model(a, b).scores) > 0


@torch.inference_mode()
def test_no_matches_are_an_empty_answer():
    found = made(SMALL.but(threshold=1.0))(*images((64, 64), (64, 64)))
    assert [list(part.shape) for part in found] == [[0, 2], [0, 2], [0], [0]]
    found = made(SMALL)(*images((8, 8), (9, 7)))  # two cells, all border
    assert len(found.scores) == 0


@torch.inference_mode()
def test_colour_is_grey_by_luma():
    model, (a, b) = made(SMALL), images((64, 80), (64, 80))
    for part, other in zip(model(a, b), model(a.expand(-1, 3, -1, -1), b), strict=True):
        torch.testing.assert_close(part, other, atol=1e-3, rtol=1e-4)


@torch.inference_mode()
def test_the_sine_is_what_tells_places_apart():
    """Of two flat images every inner cell looks the same: without position all confidences agree, with it none do."""
    flat = torch.full((1, 1, 160, 160), 0.5)
    inner = slice(20 * 9 + 9, 20 * 9 + 12)
    for position in ("sine_loftr", "sine_loftr_legacy", "none"):
        scores = made(SMALL.but(position=position)).confidence(flat, flat)[0, inner, inner]
        assert (scores.std() / scores.mean() < 1e-3) == (position == "none")


def test_confidences_teach_every_part_of_the_coarse_level():
    for spec in (SMALL, OPTIMAL):
        model = made(spec)
        model.confidence(*images((64, 80), (64, 80))).square().sum().backward()
        coarse = [name for name, p in model.named_parameters() if name.startswith(("coarse", "dustbin"))]
        assert coarse
        assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in coarse)


def first_cells(scores):
    """The first three cells of image 0 with the first three of image 1, of every pair."""
    rows = torch.arange(len(scores)).repeat_interleave(3)
    return rows, torch.arange(3).repeat(len(scores)) + 11, torch.arange(3).repeat(len(scores)) + 11


@pytest.mark.parametrize("spec", [SMALL, OPTIMAL], ids=lambda spec: spec.matching)
def test_a_lesson_is_what_inference_does(spec):
    """Log-confidences are logarithms of the confidences, offsets those of inference in half windows, and each part of
    the network learns from them."""
    model, (a, b) = made(spec), images((64, 80), (64, 80))
    told = model.lesson(a, b, first_cells)
    torch.testing.assert_close(told.coarse[:, :80, :80].exp(), model.confidence(a, b), atol=1e-6, rtol=1e-4)
    s0, s1 = model._sides(a, b, None, None)
    torch.testing.assert_close(told.offsets * 4, model._offsets(s0, s1, told.rows, told.i, told.j))
    assert bool(((told.deviation > 0) & (told.deviation < 2)).all())
    model.train()
    told = model.lesson(a, b, first_cells)
    (told.coarse[:, :80, :80].square().mean() + told.offsets.square().sum()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.isfinite().all()), name


def test_heat_maps_of_known_moments():
    """A heat map of one cell has no deviation; halves at both ends have mean 0 and deviation 1 along one axis."""
    heat = torch.zeros(2, 5, 5)
    heat[0, 1, 4] = 1.0
    heat[1, 2, 0] = heat[1, 2, 4] = 0.5
    mean, deviation = half_windows(heat)
    torch.testing.assert_close(mean, torch.tensor([[1.0, -0.5], [0.0, 0.0]]))
    torch.testing.assert_close(deviation, torch.tensor([0.0, 1.0]), atol=1e-4, rtol=0)


def test_a_lesson_has_one_pass_and_padding_matches_nothing():
    """The convolutions see padding, as the original's; attention and matching do not."""
    model = made(SMALL).train()
    image0, mask0 = padded(images((64, 80), (48, 64)), (64, 80), 0.0)
    image1, mask1 = padded(images((64, 80), (64, 48)), (64, 80), 0.0)
    calls = []
    model.backbone.register_forward_hook(lambda *_: calls.append(1))
    told = model.lesson(image0, image1, first_cells, mask0, mask1)
    assert len(calls) == 2
    told.coarse[:, :3, :3].sum().backward()
    assert bool(model.backbone.conv1.weight.grad.isfinite().all())
    p = told.coarse.exp().unflatten(1, (8, 10)).unflatten(3, (8, 10))
    assert not p[1, 6:].any()
    assert not p[1, :, 8:].any()
    assert not p[1, :, :, :, 6:].any()
    assert p[1, :6, :8, :, :6].sum() > 0.5 * p[0].sum() / 4


def test_a_lesson_without_a_fine_level_has_no_offsets():
    told = made(SMALL.but(fine_depth=0)).lesson(*images((64, 80), (64, 80)), first_cells)
    assert told.offsets is told.deviation is None


def test_half_precision_stays_finite_and_points_stay_float32():
    model, (a, b) = made(SMALL), images((128, 160), (128, 160))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(a, b)
    assert len(found.scores) > 0
    assert found.keypoints1.dtype == found.scores.dtype == torch.float32
    assert bool(found.keypoints1.isfinite().all())
    with torch.inference_mode():
        exact = model.double()(a.double(), b.double())
    assert exact.keypoints1.dtype == torch.float64


def test_variants_are_the_published_networks():
    assert VARIANTS["loftr_outdoor"].position == VARIANTS["loftr_indoor"].position == "sine_loftr_legacy"
    assert VARIANTS["loftr_indoor_new"].position == "sine_loftr"
    with torch.device("meta"):
        assert sum(p.numel() for p in LoFTR(VARIANTS["loftr_outdoor"]).parameters()) == 11_561_456


WRONG = [
    ({"widths": (8, 16)}, "three widths or more"),
    ({"num_heads": 0}, "a head, all positive"),
    ({"num_heads": 3}, "must divide the coarse width 256"),
    ({"position": "sine"}, "position must be one of sine_loftr_legacy, sine_loftr, none, got 'sine'"),
    ({"matching": "sinkhorn"}, "matching must be one of dual_softmax, optimal_transport, got 'sinkhorn'"),
    ({"window": 4}, "window must be odd, got 4"),
    ({"border": -1}, "border must be at least 0, got -1"),
    ({"iterations": 0}, "iterations must be at least 1, got 0"),
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"threshold": 1.5}, r"threshold in \[0, 1\], got 0.1 and 1.5"),
    ({"thresh": 0.5}, "LoFTRSpec has no 'thresh'"),
]


@pytest.mark.parametrize(("knobs", "message"), WRONG)
def test_a_wrong_knob_is_named(knobs, message):
    with pytest.raises(ValueError, match=message):
        vispe.build("loftr_outdoor", **knobs)


def test_wrong_images_are_named():
    model, (a, b) = made(SMALL), images((64, 80), (64, 80))
    mask = torch.ones(1, 64, 80, dtype=torch.bool)
    hole = mask.clone()
    hole[0, 3, 3] = False
    for wrong, message in (
        ((a[0], b), r"LoFTR takes images \[b, 1 or 3, h, w\], got \[1, 64, 80\]"),
        ((a, b.expand(-1, 2, -1, -1)), r"got \[1, 2, 64, 80\]"),
        ((a, b.double()), "LoFTR's weights are torch.float32, the image is torch.float64"),
        ((a, b.expand(2, -1, -1, -1)), "image0 has 1 pairs, image1 has 2"),
        ((a, b, mask[:, ::8, ::8]), "mask is"),
        ((a, b, mask, hole), "must fill a rectangle at the upper left, image 0's do not"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*wrong)
