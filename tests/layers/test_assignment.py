"""The double softmax: its probabilities by hand, its best entries in any block size, mutual neighbours."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vispe.layers.assignment import assign, dual_softmax, log_assignment, mutual, nearest, optimal_transport


def problem(b: int, m: int, n: int, seed: int, masked: bool) -> tuple[torch.Tensor | None, ...]:
    g = torch.Generator().manual_seed(seed)
    m0, m1 = (2 * torch.randn(b, k, 6, generator=g) for k in (m, n))
    z0, z1 = (2 * torch.randn(b, k, generator=g) for k in (m, n))
    masks = [torch.rand(b, k, generator=g) < 0.7 if masked else None for k in (m, n)]
    return m0, m1, z0, z1, *masks


def test_two_by_two_by_hand():
    """sim = [[ln 3, 0], [0, ln 3]]: softmaxes of 3/4 on the diagonal, matchabilities of 1/2: 9/16 of a quarter."""
    root = math.sqrt(math.log(3))
    m = torch.tensor([[[root, 0.0], [0.0, root]]])
    zero = torch.zeros(1, 2)
    p = log_assignment(m, m, zero, zero, None, None).exp()[0]
    torch.testing.assert_close(p[:2, :2], torch.tensor([[9.0, 1.0], [1.0, 9.0]]) / 64)
    torch.testing.assert_close(p[:2, 2], torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(p[2, :2], torch.tensor([0.5, 0.5]))
    found = assign(m, m, zero, zero, None, None, 0.1, 1 << 20)
    assert found.matches0.tolist() == found.matches1.tolist() == [[0, 1]]
    torch.testing.assert_close(found.scores0, torch.full((1, 2), 9 / 64))
    # The threshold is strict.
    assert (assign(m, m, zero, zero, None, None, 9 / 64 + 1e-6, 1 << 20).matches0 == -1).all()


@given(
    b=st.integers(1, 3), m=st.integers(1, 12), n=st.integers(1, 12), seed=st.integers(0, 999), masked=st.booleans(),
    rows=st.integers(1, 12),
)  # fmt: skip
def test_blocks_find_the_best_entries_of_the_whole_matrix(b, m, n, seed, masked, rows):
    m0, m1, z0, z1, mask0, mask1 = problem(b, m, n, seed, masked)
    scores = log_assignment(m0, m1, z0, z1, mask0, mask1)[:, :-1, :-1]
    wanted = mutual(scores.max(2).indices, scores.max(1).indices, scores.max(2).values.exp(), 0.0)
    found = assign(m0, m1, z0, z1, mask0, mask1, 0.0, 4 * b * n * rows)
    assert torch.equal(found.matches0, wanted.matches0)
    assert torch.equal(found.matches1, wanted.matches1)
    torch.testing.assert_close(found.scores0, wanted.scores0, atol=1e-5, rtol=1e-4)
    if mask0 is not None:
        assert (found.matches0[~mask0] == -1).all()
        assert (found.matches1[~mask1] == -1).all()


@given(m=st.integers(1, 9), n=st.integers(1, 9), seed=st.integers(0, 999))
def test_rows_and_columns_are_probabilities(m, n, seed):
    m0, m1, z0, z1, _, _ = problem(1, m, n, seed, False)
    p = log_assignment(m0, m1, z0, z1, None, None).exp()[0]
    assert (p[:-1].sum(1) <= 1 + 1e-5).all()
    assert (p[:, :-1].sum(0) <= 1 + 1e-5).all()


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0)])
def test_empty_sides(m, n):
    found = assign(*problem(2, m, n, 0, False), 0.1, 100)
    assert found.matches0.shape == (2, m)
    assert found.matches1.shape == (2, n)
    assert nearest(torch.randn(2, m, 4), torch.randn(2, n, 4)).matches0.shape == (2, m)


def test_everything_masked_is_finite_and_unmatched():
    m0, m1, z0, z1, _, _ = problem(1, 4, 5, 0, False)
    no0, no1 = torch.zeros(1, 4, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.bool)
    m0.requires_grad_()
    found = assign(m0, m1, z0, z1, no0, no1, 0.0, 1 << 20)
    assert (found.matches0 == -1).all()
    log_assignment(m0, m1, z0, z1, no0, no1)[:, :-1, -1].sum().backward()
    assert torch.isfinite(m0.grad).all()


def test_mutual_nearest_neighbours_by_hand():
    d0 = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]])
    d1 = torch.tensor([[[0.0, 1.0], [0.8, 0.6]]])
    found = nearest(d0, d1)
    # 0 -> 1 (0.8) but 1 -> 2 (0.96); 1 <-> 0 (1.0); 2 <-> 1 (0.96).
    assert found.matches0.tolist() == [[-1, 0, 1]]
    assert found.matches1.tolist() == [[1, 2]]
    torch.testing.assert_close(found.scores0, torch.tensor([[0.0, 1.0, 0.96]]))
    assert nearest(d0, d1, threshold=0.97).matches0.tolist() == [[-1, 0, -1]]
    assert nearest(d0, d1, budget=1).matches0.tolist() == [[-1, 0, 1]]


def test_the_ratio_test_by_hand():
    """Of the pair 2, 1 either is sqrt(0.08) away and the next sqrt(0.4), a ratio of 0.447; a pair of equals passes
    any; of two equal neighbours neither does, from the image that has one of them."""
    d0 = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]])
    d1 = torch.tensor([[[0.0, 1.0], [0.8, 0.6]]])
    for budget in (1, 1 << 20):
        assert nearest(d0, d1, ratio=0.45, budget=budget).matches0.tolist() == [[-1, 0, 1]]
        few = nearest(d0, d1, ratio=0.44, budget=budget)
        assert (few.matches0.tolist(), few.matches1.tolist()) == ([[-1, 0, -1]], [[1, -1]])
        torch.testing.assert_close(few.scores1, torch.tensor([[1.0, 0.0]]))
    twice = torch.cat((d1, d1[:, :1]), 1)
    assert nearest(d0, twice, ratio=0.9).matches0.tolist() == [[-1, -1, 1]]
    assert nearest(twice, d0, ratio=0.9).matches1.tolist() == [[-1, -1, 1]]
    assert nearest(d0[:, :1], d1[:, :1], ratio=0.1).matches0.tolist() == [[0]]


def test_dual_softmax_is_the_product_of_two():
    torch.manual_seed(0)
    m0, m1 = 2 * torch.randn(2, 9, 4), torch.randn(2, 7, 4)
    sim = m0 @ m1.transpose(1, 2)
    whole = sim.softmax(1) * sim.softmax(2)
    for budget in (1, 1 << 20):
        found = dual_softmax(m0, m1, None, None, 0.2, budget)
        value, best = whole.max(2)
        kept = (whole.argmax(1).gather(1, best) == torch.arange(9)) & (value > 0.2)
        assert 0 < kept.sum() < 18
        assert torch.equal(found.matches0, torch.where(kept, best, -1))
        torch.testing.assert_close(found.scores0[kept], value[kept])


def test_optimal_transport_moves_all_mass():
    torch.manual_seed(0)
    moved = optimal_transport(2 * torch.randn(2, 4, 6), torch.tensor(0.5), 200).exp()
    torch.testing.assert_close(moved.sum(2), torch.tensor([1.0, 1, 1, 1, 6]).expand(2, 5), atol=1e-4, rtol=0)
    torch.testing.assert_close(moved.sum(1), torch.tensor([1.0] * 6 + [4]).expand(2, 7), atol=1e-4, rtol=0)


def test_optimal_transport_of_one_point_each_by_hand():
    """Masses 1 and 1 on either side, all similarities 0: a half goes everywhere."""
    moved = optimal_transport(torch.zeros(1, 1, 1), torch.tensor(0.0), 3).exp()
    torch.testing.assert_close(moved, torch.full((1, 2, 2), 0.5))


def test_optimal_transport_sees_no_padding():
    torch.manual_seed(0)
    sim, dustbin = torch.randn(1, 4, 6), torch.tensor(0.3)
    alone = optimal_transport(sim, dustbin, 5)
    wide = F.pad(sim, (0, 3, 0, 2), value=9.0)
    moved = optimal_transport(wide, dustbin, 5, torch.arange(6)[None] < 4, torch.arange(9)[None] < 6)
    rows, columns = [0, 1, 2, 3, 6], [0, 1, 2, 3, 4, 5, 9]
    torch.testing.assert_close(moved[:, rows][:, :, columns], alone)
    assert bool((moved[:, 4:6] == -torch.inf).all())
    assert bool((moved[:, :, 6:9] == -torch.inf).all())
