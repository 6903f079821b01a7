"""The mask loss, worked out by hand: costs, matching, points, empty targets, padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vispe.losses.masks import (
    Points,
    Weights,
    dice,
    mask_loss,
    match,
    pairwise_bce,
    pairwise_dice,
    uncertain_points,
)
from vispe.models.mask2former import Segments

pytest.importorskip("scipy", reason="the Hungarian method is scipy's")
FEW = Points(64)


def predicted(b: int = 2, q: int = 5, classes: int = 3, size: tuple[int, int] = (8, 8), layers: int = 0) -> Segments:
    g = torch.Generator().manual_seed(layers)
    logits, masks = torch.randn(b, q, classes + 1, generator=g), torch.randn(b, q, *size, generator=g) * 2
    aux = tuple(predicted(b, q, classes, size)._replace(logits=logits + i) for i in range(layers))
    return Segments(logits.requires_grad_(), masks.requires_grad_(), aux)


def halves(size: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    """Object 0 (class 1) is the left half, object 1 (class 2) the right one."""
    masks = torch.zeros(2, *size, dtype=torch.bool)
    masks[0, :, : size[1] // 2] = True
    masks[1] = ~masks[0]
    return {"labels": torch.tensor([1, 2]), "masks": masks}


def nothing(size: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    return {"labels": torch.zeros(0, dtype=torch.int64), "masks": torch.zeros(0, *size, dtype=torch.bool)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_costs_by_hand():
    logits, truth = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    # probabilities 1/2 and 3/4
    first = -(math.log(0.5) + math.log(0.25)) / 2
    second = -(math.log(0.5) + math.log(0.75)) / 2
    torch.testing.assert_close(pairwise_bce(logits, truth), torch.tensor([[first, second]]))
    wanted = torch.tensor([[1 - (2 * 0.5 + 1) / (1.25 + 1 + 1), 1 - (2 * 1.25 + 1) / (1.25 + 2 + 1)]])
    torch.testing.assert_close(pairwise_dice(logits, truth), wanted)
    torch.testing.assert_close(dice(logits.expand(2, -1), truth), wanted[0])


def test_each_object_gets_the_query_that_suits_it():
    target = halves()
    masks = torch.full((3, 8, 8), -8.0)
    masks[2, :, :4], masks[0, :, 4:] = 8.0, 8.0
    rows, columns = match(torch.zeros(3, 4), masks, target["labels"], target["masks"].float(), number=64)
    assert dict(zip(columns.tolist(), rows.tolist(), strict=True)) == {0: 2, 1: 0}
    logits = torch.full((3, 4), -4.0)  # equal masks: then the class decides
    logits[0, 2], logits[1, 1], logits[2, 3] = 4.0, 4.0, 4.0
    rows, columns = match(logits, torch.zeros(3, 8, 8), target["labels"], target["masks"].float(), number=64)
    assert dict(zip(columns.tolist(), rows.tolist(), strict=True)) == {0: 1, 1: 0}


def test_more_objects_than_queries():
    masks = torch.rand(4, 8, 8) > 0.5
    rows, columns = match(torch.zeros(2, 4), torch.randn(2, 8, 8), torch.zeros(4, dtype=torch.int64), masks.float())
    assert len(rows) == len(columns) == 2
    out = predicted(1, q=2)
    target = {"labels": torch.zeros(4, dtype=torch.int64), "masks": masks}
    assert torch.isfinite(mask_loss(out, [target], points=FEW).total)


def test_costs_that_are_not_finite_still_match():
    masks = torch.randn(3, 8, 8)
    masks[0] = math.nan
    target = halves((8, 8))
    rows, _ = match(torch.zeros(3, 4), masks, target["labels"], target["masks"].float(), number=16)
    assert sorted(rows.tolist()) == [1, 2]


def test_points_are_the_least_certain_and_some_others():
    """A mask that is sure left of the middle and undecided right of it: three quarters of the points lie right."""
    masks = torch.zeros(1, 16, 16)
    masks[..., :8] = 20.0
    at = uncertain_points(masks, Points(100), generator())
    assert at.shape == (1, 100, 2)
    assert bool(((at >= 0) & (at < 1)).all())
    assert (at[0, :75, 0] > 0.5).all()
    assert 0.2 < (at[0, 75:, 0] < 0.5).float().mean() < 0.8  # the rest is uniform
    assert uncertain_points(masks, Points(100, importance=1.0), generator()).shape == (1, 100, 2)
    assert uncertain_points(masks, Points(100, importance=0.0), generator()).shape == (1, 100, 2)


def test_a_perfect_prediction_costs_nearly_nothing_and_a_wrong_one_much():
    target = halves()
    masks, logits = torch.full((1, 5, 32, 32), -30.0), torch.full((1, 5, 4), -30.0)
    masks[0, 3, :, :16], masks[0, 1, :, 16:] = 30.0, 30.0
    logits[0, :, 3] = 30.0
    for query, label in ((3, 1), (1, 2)):
        logits[0, query, 3], logits[0, query, label] = -30.0, 30.0
    anywhere = Points(512, importance=0.0)
    right = mask_loss(Segments(logits, masks), [target], points=anywhere, generator=generator())
    wrong = mask_loss(Segments(-logits, torch.full_like(masks, 30.0)), [target], points=anywhere, generator=generator())
    assert right.total < 1.5  # at the edge, between two cells, both truth and prediction are undecided
    assert right.classes < 1e-6
    assert wrong.total > 50 * right.total


def test_the_class_part_by_hand():
    """Two of five queries have an object: (2 x 1 + 3 x 0.1) of weight, all logits equal, so log 4 each."""
    out = Segments(torch.zeros(1, 5, 4), torch.zeros(1, 5, 8, 8))
    loss = mask_loss(out, [halves()], points=FEW)
    torch.testing.assert_close(loss.classes, torch.tensor(math.log(4)))
    tilted = torch.zeros(1, 5, 4)
    tilted[..., 3] = math.log(3)  # no object has probability 1/2, a class 1/6
    loss = mask_loss(Segments(tilted, out.masks), [halves()], points=FEW)
    torch.testing.assert_close(loss.classes, torch.tensor((2 * math.log(6) + 0.3 * math.log(2)) / 2.3))
    assert loss.mask == pytest.approx(math.log(2), abs=1e-6)


def test_total_is_the_weighted_sum_over_layers():
    out, weights = predicted(layers=2), Weights(1.0, 2.0, 3.0)
    whole = mask_loss(out, [halves(), nothing()], weights=weights, points=FEW, generator=generator())
    g, parts = generator(), []
    for layer in (out, *out.aux):
        parts.append(mask_loss(layer._replace(aux=()), [halves(), nothing()], weights=weights, points=FEW, generator=g))
    torch.testing.assert_close(whole.total, sum(p.classes + 2 * p.mask + 3 * p.dice for p in parts))
    torch.testing.assert_close(whole.classes, parts[0].classes)


def test_a_generator_decides_everything():
    out, targets = predicted(), [halves(), halves()]
    one, other, third = (mask_loss(out, targets, points=FEW, generator=generator(s)).total for s in (1, 1, 2))
    assert one == other
    assert one != third


@pytest.mark.parametrize("which", [(0, 0), (1, 0), (0, 1)])
def test_images_without_objects_train(which):
    out = predicted()
    loss = mask_loss(out, [halves() if n else nothing() for n in which], points=FEW)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert torch.isfinite(out.logits.grad).all()
    assert torch.isfinite(out.masks.grad).all()
    assert bool(out.masks.grad.any()) == any(which)
    assert out.logits.grad.any()


def test_masks_of_several_sizes():
    """Coordinates are fractions: one image's masks may be finer than another's."""
    loss = mask_loss(predicted(), [halves((32, 32)), halves((40, 64))], points=FEW)
    assert torch.isfinite(loss.total)


def test_points_stay_out_of_the_padding():
    """What is predicted beyond the real pixels does not count."""
    mask = torch.zeros(1, 32, 32, dtype=torch.bool)
    mask[:, :16, :24] = True
    target = halves()
    target["masks"] &= mask
    out = predicted(1)
    other = out.masks.detach().clone()
    other[:, :, 5:], other[..., 7:] = 50.0, -50.0  # one cell beyond the border is read from
    one, two = (
        mask_loss(out._replace(masks=m), [target], points=FEW, generator=generator(), mask=mask).total
        for m in (out.masks, other)
    )
    assert one == two
    assert mask_loss(out._replace(masks=other), [target], points=FEW, generator=generator()).total != one


def test_it_is_computed_in_float32_under_autocast():
    out, targets = predicted(), [halves(), halves()]
    plain = mask_loss(out, targets, points=FEW, generator=generator())
    with torch.autocast("cpu", torch.bfloat16):
        cast = mask_loss(out, targets, points=FEW, generator=generator())
    assert torch.equal(plain.total, cast.total)
    half = mask_loss(Segments(out.logits.bfloat16(), out.masks.bfloat16()), targets, points=FEW)
    assert half.total.dtype == torch.float32


def test_targets_that_are_not_the_outputs_are_refused():
    out = predicted(1)
    with pytest.raises(ValueError, match="a target for each of 1 images"):
        mask_loss(out, [])
    with pytest.raises(ValueError, match=r"target 0 has labels \[1, 3\], the output 3 classes"):
        mask_loss(out, [{**halves(), "labels": torch.tensor([1, 3])}])
    with pytest.raises(ValueError, match="target 0 has 1 labels and masks"):
        mask_loss(out, [{**halves(), "labels": torch.tensor([1])}])
