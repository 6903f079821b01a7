"""Rotary linear attention: two orders, each against the sum written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.linear import elu_plus_one, performer_rotary_attention, rotary_linear_attention
from vispe.position.rotary import frequencies, phases, relayout, rotate, rotation


def turns(n: int, dim: int, start: int = 0) -> torch.Tensor:
    return rotation(phases(torch.arange(start, start + n), frequencies(dim).double()))


def matrix(angle: float) -> torch.Tensor:
    c, s = torch.tensor(angle).cos(), torch.tensor(angle).sin()
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def test_both_orders_by_their_formulas_written_out():
    """One pair, so R_m is a 2 x 2 matrix; RoFormer eq. 19 and the Performer's, as double loops."""
    q, k, v = torch.randn(3, 4, 2, dtype=torch.float64)
    f, turn = elu_plus_one, turns(4, 2)
    roformer, performer = torch.zeros(2, 4, 2, dtype=torch.float64)
    for m in range(4):
        weights = torch.stack([(matrix(m) @ f(q[m])) @ (matrix(n) @ f(k[n])) for n in range(4)])
        roformer[m] = weights @ v / sum(f(q[m]) @ f(k[n]) for n in range(4))
        weights = torch.stack([f(matrix(m) @ q[m]) @ f(matrix(n) @ k[n]) for n in range(4)])
        performer[m] = weights @ v / weights.sum()
    torch.testing.assert_close(rotary_linear_attention(q, k, v, turn, turn), roformer, atol=1e-6, rtol=0)
    torch.testing.assert_close(performer_rotary_attention(q, k, v, turn, turn), performer, atol=1e-6, rtol=0)
    assert (roformer - performer).abs().max() > 1e-3


def test_roformers_form_by_hand():
    """Two tokens a quarter turn apart, map = identity on non-negative vectors: q = (1, 0), keys (1, 0) and (0, 1).

    From position 0: R_0 q = (1, 0); keys become (1, 0) and R_90 (0, 1) = (-1, 0): weights 1 and -1 over the unturned
    sum 1 + 0 = 1. A negative weight beside a positive denominator: that is the formula.
    """
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    v = torch.tensor([[10.0], [3.0]])
    turn = rotation(torch.tensor([[0.0], [torch.pi / 2]]))
    out = rotary_linear_attention(q, k, v, turn[:1], turn, feature_map=torch.relu)
    torch.testing.assert_close(out, torch.tensor([[7.0]]))


def test_the_performer_order_is_performer_pytorchs():
    peer = pytest.importorskip("performer_pytorch.performer_pytorch", reason="performer-pytorch is the peer")
    q, k, v = torch.randn(3, 2, 3, 9, 16)
    angles = phases(torch.arange(9), frequencies(16))
    turned = peer.apply_rotary_pos_emb(q, k, torch.cat((angles.sin(), angles.cos()), -1)[None])
    theirs = peer.linear_attention(*map(elu_plus_one, turned), v)
    ours = performer_rotary_attention(q, k, v, rotation(angles), rotation(angles))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("attention", [rotary_linear_attention, performer_rotary_attention])
def test_without_positions_both_are_plain_linear_attention(attention):
    q, k, v = torch.randn(3, 2, 7, 8)
    still = rotation(torch.zeros(7, 4))
    weights = elu_plus_one(q) @ elu_plus_one(k).mT
    wanted = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(attention(q, k, v, still, still), wanted, atol=1e-5, rtol=1e-5)


@given(seed=st.integers(0, 10**6), shift=st.integers(1, 100))
def test_only_roformers_order_sees_nothing_but_differences(seed, shift):
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 6, 8, generator=g, dtype=torch.float64)
    here, there = turns(6, 8), turns(6, 8, shift)
    moved = rotary_linear_attention(q, k, v, there, there)
    torch.testing.assert_close(rotary_linear_attention(q, k, v, here, here), moved, atol=1e-4, rtol=1e-4)
    moved = performer_rotary_attention(q, k, v, there, there)
    assert (performer_rotary_attention(q, k, v, here, here) - moved).abs().max() > 1e-4


def test_only_the_performers_weights_are_an_average():
    q, k = torch.randn(2, 40, 8)
    ones, turn = torch.ones(40, 1), turns(40, 8).float()
    assert (performer_rotary_attention(q, k, ones, turn, turn) - 1).abs().max() < 1e-5
    assert (rotary_linear_attention(q, k, ones, turn, turn) - 1).abs().max() > 1e-2


@pytest.mark.parametrize("attention", [rotary_linear_attention, performer_rotary_attention])
def test_both_layouts(attention):
    q, k, v = torch.randn(3, 7, 8)
    turn = turns(7, 8).float()
    qh, kh = (relayout(t.T, 8, to="half").T for t in (q, k))
    torch.testing.assert_close(attention(qh, kh, v, turn, turn, layout="half"), attention(q, k, v, turn, turn))


def test_cost_is_linear_and_batches_are_independent():
    """20 000 keys: a score matrix would take 1.6 GB."""
    q, k, v = torch.randn(3, 20000, 4)
    turn = turns(20000, 4).float()
    out = rotary_linear_attention(q, k, v, turn, turn)
    pick = torch.tensor([0, 777, 19999])
    weights = rotate(elu_plus_one(q), turn)[pick] @ rotate(elu_plus_one(k), turn).T
    wanted = weights @ v / (elu_plus_one(q)[pick] @ elu_plus_one(k).sum(0))[:, None]
    torch.testing.assert_close(out[pick], wanted, atol=1e-4, rtol=1e-3)


def test_mistakes_are_named():
    q, k, v = torch.randn(3, 7, 8)
    turn = turns(7, 8).float()
    for attention in (rotary_linear_attention, performer_rotary_attention):
        with pytest.raises(ValueError, match="7 keys, 5 values"):
            attention(q, k, v[:5], turn, turn)
        with pytest.raises(ValueError, match="5 positions for 7 tokens"):
            attention(q, k, v, turn[:5], turn)


@pytest.mark.parametrize("attention", [rotary_linear_attention, performer_rotary_attention])
def test_very_negative_queries_are_no_zero_over_zero(attention):
    x, turn = torch.full((1, 3, 4), -20.0), rotation(torch.zeros(3, 2))
    assert attention(x, x, torch.ones(1, 3, 2), turn, turn).isfinite().all()
