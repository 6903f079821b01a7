"""Assignments and overlaps worked out by hand, and their properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import generalized_box_iou

from vispe.losses.set_matching import Costs, assign, corners, giou, match

scipy = pytest.importorskip("scipy", reason="scipy solves the assignment")


def box(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0),
        ((0, 0, 2, 2), (1, 1, 3, 3), 1 / 7 - 2 / 9),  # shared 1, union 7, hull 9
        ((0, 0, 1, 1), (2, 0, 3, 1), 0 - 1 / 3),  # apart: union 2, hull 3
        ((0, 0, 1, 1), (9, 9, 10, 10), 0 - 98 / 100),
        ((0, 0, 4, 4), (1, 1, 2, 2), 1 / 16),  # inside: the hull is the union
        ((0, 0, 1, 1), (1, 0, 2, 1), 0.0),  # side by side
    ],
)
def test_giou_worked_out_by_hand(a, b, wanted):
    assert giou(box(*a), box(*b)).item() == pytest.approx(wanted, abs=1e-6)
    assert giou(box(*b), box(*a)).item() == pytest.approx(wanted, abs=1e-6)


def test_corners_worked_out_by_hand():
    assert corners(box(0.5, 0.25, 0.5, 0.5)).tolist() == [0.25, 0.0, 0.75, 0.5]


def boxes(n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, 4, generator=g) * 0.6 + 0.2


@given(st.integers(0, 1000))
def test_giou_is_torchvisions(seed):
    a, b = corners(boxes(5, seed)), corners(boxes(7, seed + 1))
    torch.testing.assert_close(giou(a[:, None], b), generalized_box_iou(a, b), atol=1e-6, rtol=1e-5)


@given(st.integers(0, 1000), st.floats(0.1, 10))
def test_giou_knows_no_scale_and_no_place(seed, scale):
    a, b = corners(boxes(4, seed)), corners(boxes(4, seed + 1))
    torch.testing.assert_close(giou(a * scale + 1, b * scale + 1), giou(a, b), atol=1e-4, rtol=1e-4)
    assert bool((giou(a, b).abs() <= 1 + 1e-6).all())


def test_an_assignment_worked_out_by_hand():
    """Greedy would take (0, 0) for 1 and then pay 10; the cheapest pairs are (0, 1) and (1, 0) for 4."""
    cost = torch.tensor([[[[1.0, 2.0], [2.0, 10.0], [9.0, 9.0]]]])
    pairs = assign(cost, [2])
    assert pairs.query.tolist() == [0, 1]
    assert pairs.target.tolist() == [1, 0]
    assert pairs.layer.tolist() == pairs.image.tolist() == [0, 0]


@given(st.integers(0, 300), st.integers(1, 4), st.integers(1, 4))
def test_no_assignment_is_cheaper(seed, queries, objects):
    cost = torch.rand(1, 1, queries, objects, generator=torch.Generator().manual_seed(seed))
    pairs = assign(cost, [objects])
    found = cost[0, 0][pairs.query, pairs.target].sum().item()
    table, short = cost[0, 0], min(queries, objects)
    ways = itertools.product(
        itertools.permutations(range(queries), short), itertools.combinations(range(objects), short)
    )
    least = min(sum(table[q, t].item() for q, t in zip(rows, columns, strict=True)) for rows, columns in ways)
    assert found == pytest.approx(least, abs=1e-5)
    assert len(pairs.query) == len(set(pairs.query.tolist())) == len(set(pairs.target.tolist())) == short


def test_targets_are_rows_of_one_list_and_layers_are_apart():
    cost = torch.zeros(2, 3, 4, 2)
    cost[0, 0, 1, 0] = cost[0, 2, 3, 0] = cost[0, 2, 0, 1] = -1
    cost[1, 0, 2, 0] = cost[1, 2, 1, 0] = cost[1, 2, 2, 1] = -1
    pairs = assign(cost, [1, 0, 2])  # the second column of image 0 is padding
    rows = sorted(zip(*(each.tolist() for each in pairs), strict=True))
    assert rows == [(0, 0, 1, 0), (0, 2, 0, 2), (0, 2, 3, 1), (1, 0, 2, 0), (1, 2, 1, 1), (1, 2, 2, 2)]


def test_the_cost_worked_out_by_hand():
    """Query 0 has the class, query 1 the box: with weights 1, 5, 2 the box wins, with the class alone the class."""
    logits = torch.full((1, 1, 2, 3), 0.0)
    logits[0, 0, 0, 1] = 8.0
    place = box(0.5, 0.5, 0.2, 0.2)
    found = torch.stack((box(0.2, 0.2, 0.2, 0.2), place))[None, None]
    labels, wanted = [torch.tensor([1])], [place[None]]
    assert match(logits, found, labels, wanted).query.tolist() == [1]
    assert match(logits, found, labels, wanted, Costs(1, 0, 0)).query.tolist() == [0]


def test_what_is_not_finite_comes_last():
    cost = torch.tensor([[[[math.nan, 1.0], [math.inf, 0.5], [3.0, 9.0]]]])
    pairs = assign(cost, [2])
    assert dict(zip(pairs.target.tolist(), pairs.query.tolist(), strict=True)) == {0: 2, 1: 1}


def test_no_objects_no_pairs():
    nothing = [torch.zeros(0, dtype=torch.int64)] * 2
    pairs = match(torch.randn(2, 2, 5, 4), torch.rand(2, 2, 5, 4), nothing, [torch.zeros(0, 4)] * 2)
    assert all(each.numel() == 0 and each.dtype == torch.int64 for each in pairs)


def test_more_objects_than_queries():
    labels, wanted = [torch.arange(5)], [boxes(5, 0)]
    pairs = match(torch.randn(1, 1, 3, 6), torch.rand(1, 1, 3, 4), labels, wanted)
    assert sorted(pairs.query.tolist()) == [0, 1, 2]
    assert len(set(pairs.target.tolist())) == 3
