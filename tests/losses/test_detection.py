"""The detection loss worked out by hand, its gradients, and bad targets named."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from vispe.losses.detection import DetectionLoss, Weights, count_boxes, detection_loss
from vispe.losses.set_matching import corners, giou

pytest.importorskip("scipy", reason="scipy solves the assignment")


class Output(NamedTuple):
    logits: Tensor
    boxes: Tensor
    aux: tuple = ()


def target(labels: list[int], boxes: list[list[float]]) -> dict[str, Tensor]:
    return {"labels": torch.tensor(labels, dtype=torch.int64), "boxes": torch.tensor(boxes).reshape(-1, 4)}


def drawn(b: int = 2, q: int = 6, classes: int = 4, seed: int = 0) -> Output:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(b, q, classes + 1, generator=g).requires_grad_()
    boxes = (torch.rand(b, q, 4, generator=g) * 0.5 + 0.2).requires_grad_()
    return Output(logits, boxes)


TWO = [target([1, 3], [[0.5, 0.5, 0.4, 0.4], [0.3, 0.6, 0.2, 0.3]]), target([0], [[0.6, 0.4, 0.3, 0.2]])]


def test_one_object_two_queries_by_hand():
    """Logits of 0 for two classes and "no object": every query has -log p = log 3; the matched one counts 1, the other
    0.1, over 1.1. Its box is off by 0.1 in cx: L1 0.1; GIoU of shares 0.2 x 0.2 moved by 0.1: 1/3 - 0."""
    boxes = torch.tensor([[[0.6, 0.5, 0.2, 0.2], [0.9, 0.9, 0.1, 0.1]]])
    loss = detection_loss(Output(torch.zeros(1, 2, 3), boxes), [target([1], [[0.5, 0.5, 0.2, 0.2]])])
    assert isinstance(loss, DetectionLoss)
    assert loss.classes.item() == pytest.approx(math.log(3))
    assert loss.boxes.item() == pytest.approx(0.1)
    assert loss.giou.item() == pytest.approx(2 / 3, abs=1e-6)
    assert loss.total.item() == pytest.approx(math.log(3) + 5 * 0.1 + 2 * 2 / 3, abs=1e-6)
    assert loss.cardinality.item() == 1  # equal logits: the first class wins twice, one object is there


def test_no_object_weighs_a_tenth():
    logits = torch.tensor([[[0.0, 0.0, 0.0], [2.0, 0.0, 1.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1]]])
    loss = detection_loss(Output(logits, boxes), [target([1], [[0.5, 0.5, 0.2, 0.2]])])
    free = -torch.tensor([2.0, 0.0, 1.0]).log_softmax(0)[2].item()
    assert loss.classes.item() == pytest.approx((math.log(3) + 0.1 * free) / 1.1)
    assert loss.boxes.item() == 0
    assert loss.giou.item() == pytest.approx(0, abs=1e-6)


def test_a_perfect_answer_costs_nothing():
    boxes = torch.full((2, 6, 4), 0.5)
    logits = torch.full((2, 6, 5), -50.0)
    logits[..., -1] = 50
    for i, each in enumerate(TWO):
        for k, (label, box) in enumerate(zip(each["labels"], each["boxes"], strict=True)):
            logits[i, k + 1, -1], logits[i, k + 1, label], boxes[i, k + 1] = -50, 50, box
    loss = detection_loss(Output(logits, boxes), TWO)
    assert all(part.item() == pytest.approx(0, abs=1e-6) for part in loss)


def test_layers_add_up():
    layers = [drawn(seed=s) for s in range(3)]
    loss = detection_loss(layers[2]._replace(aux=tuple(layers[:2])), TWO)
    alone = [detection_loss(layer, TWO) for layer in layers]
    assert loss.total.item() == pytest.approx(sum(each.total.item() for each in alone), rel=1e-6)
    assert loss.giou.item() == pytest.approx(alone[2].giou.item())


def test_weights_scale_their_parts():
    parts = detection_loss(drawn(), TWO)
    loss = detection_loss(drawn(), TWO, weights=Weights(2.0, 3.0, 7.0))
    assert loss.total.item() == pytest.approx((2 * parts.classes + 3 * parts.boxes + 7 * parts.giou).item(), rel=1e-6)


def test_boxes_are_divided_by_the_number_given():
    own, given = detection_loss(drawn(), TWO), detection_loss(drawn(), TWO, num_boxes=12.0)
    assert count_boxes(TWO).item() == 3
    assert given.boxes.item() == pytest.approx(own.boxes.item() * 3 / 12)
    assert given.giou.item() == pytest.approx(own.giou.item() * 3 / 12)
    assert given.classes.item() == pytest.approx(own.classes.item())
    assert detection_loss(drawn(), TWO, num_boxes=0).boxes.item() == pytest.approx(own.boxes.item() * 3)  # at least 1
    assert detection_loss(drawn(), TWO, num_boxes=torch.tensor(12)).boxes.item() == pytest.approx(given.boxes.item())


@pytest.mark.parametrize("targets", [[target([], []), target([], [])], [target([], []), TWO[0]]])
def test_images_without_objects_train(targets):
    output = drawn()
    loss = detection_loss(output._replace(aux=(drawn(seed=1),)), targets)
    loss.total.backward()
    assert output.logits.grad is not None
    assert bool(output.logits.grad.isfinite().all())
    assert bool(output.logits.grad.any())
    assert output.boxes.grad is not None
    assert not output.boxes.grad[0].any()
    assert count_boxes(targets).item() >= 1


def test_only_matched_boxes_get_a_gradient_and_it_is_the_formulas():
    output = drawn()
    detection_loss(output, TWO).total.backward()
    grad = output.boxes.grad
    assert grad is not None
    touched = grad.abs().sum(-1) > 0
    assert touched.sum(1).tolist() == [2, 1]
    query = int(touched[1].nonzero()[0])
    mine, theirs = output.boxes[1, query].detach().requires_grad_(), TWO[1]["boxes"][0]
    part = 5 * (mine - theirs).abs().sum() + 2 * (1 - giou(corners(mine), corners(theirs)))
    (part / 3).backward()
    torch.testing.assert_close(grad[1, query], mine.grad)


def test_the_order_of_objects_and_queries_does_not_matter():
    output, order = drawn(), torch.randperm(6, generator=torch.Generator().manual_seed(3))
    turned = [{key: value.flip(0) for key, value in each.items()} for each in TWO]
    moved = detection_loss(Output(output.logits[:, order], output.boxes[:, order]), turned)
    torch.testing.assert_close(moved.total, detection_loss(output, TWO).total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    output = drawn()
    half = Output(output.logits.detach().to(dtype), output.boxes.detach().to(dtype))
    wanted = detection_loss(Output(half.logits.float(), half.boxes.float()), TWO)
    with torch.autocast("cpu", torch.bfloat16):
        found = detection_loss(half, TWO)
    assert found.total.dtype == torch.float32
    torch.testing.assert_close(found.total, wanted.total, atol=0, rtol=0)


def test_cardinality_counts_what_is_called_an_object():
    logits = torch.zeros(2, 6, 5)
    logits[..., -1] = 1
    logits[0, :5, 2] = 2  # five found, two are there
    assert detection_loss(Output(logits, drawn().boxes), TWO).cardinality.item() == (3 + 1) / 2


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (TWO[:1], "each of 2 images is needed, got 1"),
        ([TWO[0], target([4], [[0.5, 0.5, 0.1, 0.1]])], "target 1 has the label 4, the output 4 classes"),
        ([TWO[0], target([-1], [[0.5, 0.5, 0.1, 0.1]])], "target 1 has the label -1"),
        ([TWO[0], target([0], [[0.5, 0.5, 0.0, 0.1]])], r"target 1 has the box \[0.5, 0.5, 0.0"),
        ([target([0], [[50.0, 30.0, 20.0, 10.0]]), TWO[1]], r"target 0 has the box \[50.0, 30.0"),
        ([target([0], [[math.nan, 0.5, 0.1, 0.1]]), TWO[1]], r"target 0 has the box \[nan"),
        ([target([0, 1], [[0.5, 0.5, 0.1, 0.1]]), TWO[1]], r"target 0 has labels torch.int64 \[2\]"),
        ([{"labels": torch.tensor([0.0]), "boxes": torch.full((1, 4), 0.5)}, TWO[1]], "labels torch.float32"),
    ],
)
def test_bad_targets_are_named(targets, named):
    with pytest.raises(ValueError, match=named):
        detection_loss(drawn(), targets)
