"""Rotary encoding: hand-worked scores, and the invariants that make it one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.rotary import LearnedBasis, frequencies, rotate, rotation


def score(q: torch.Tensor, k: torch.Tensor, at_q: float, at_k: float) -> float:
    theta = frequencies(len(q)).to(q)
    return float(rotate(q, rotation(at_q * theta)) @ rotate(k, rotation(at_k * theta)))


@pytest.mark.parametrize(
    ("at_q", "at_k", "wanted"), [(2, 5, -0.332089), (10, 13, -0.332089), (50, 53, -0.332089), (2, 4, -0.725309)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_worked_by_hand(at_q, at_k, wanted, dtype):
    """Adjacent pairs, base 10000; a figure of the literature. float32 is the complex form on the CPU, float64 the real
    one."""
    q, k = (torch.tensor(v, dtype=dtype) for v in ((0.9, 0.1, -0.4, 0.7), (0.2, 0.8, 0.5, 0.3)))
    assert score(q, k, at_q, at_k) == pytest.approx(wanted, abs=2e-6)


def test_a_quarter_turn_by_hand():
    turned = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), rotation(torch.tensor([torch.pi / 2, 0.0])))
    torch.testing.assert_close(turned, torch.tensor([-2.0, 1.0, 3.0, 4.0]))


@given(seed=st.integers(0, 10**6), shift=st.floats(-50, 50), pairs=st.integers(1, 32))
def test_scores_see_only_differences_and_norms_stay(seed, shift, pairs):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 7, 2 * pairs, generator=g, dtype=torch.float64)
    positions, theta = torch.rand(7, generator=g, dtype=torch.float64) * 10, frequencies(2 * pairs).double()

    def turned(x: torch.Tensor, by: float) -> torch.Tensor:
        return rotate(x, rotation((positions + by)[:, None] * theta))

    torch.testing.assert_close(
        turned(q, 0) @ turned(k, 0).T, turned(q, shift) @ turned(k, shift).T, atol=1e-10, rtol=1e-10
    )
    torch.testing.assert_close(turned(q, shift).norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(rotate(q, rotation(torch.zeros(7, pairs))), q)


def test_complex_and_real_forms_agree():
    x, turn = torch.randn(2, 5, 3, 16), rotation(torch.randn(2, 5, 1, 8))
    eager = rotate(x, turn)
    real = rotate(x.double(), turn).float()
    torch.testing.assert_close(eager, real, atol=1e-6, rtol=1e-6)


def test_gradients_agree_with_finite_differences():
    x, angles = (
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 2, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(lambda a, b: rotate(a, rotation(b)), (x, angles))


@pytest.mark.parametrize("dim", [0, -2, 3, 7])
def test_odd_dims_are_refused(dim):
    with pytest.raises(ValueError, match=str(dim)):
        frequencies(dim)
    with pytest.raises(ValueError, match=str(dim)):
        LearnedBasis(2, dim)


def test_learned_basis_is_the_matrix_product_and_ignores_autocast():
    basis, xy = LearnedBasis(4, 16), torch.randn(2, 9, 4)
    wanted = torch.stack(((xy @ basis.weight.T).cos(), (xy @ basis.weight.T).sin()), -1)
    torch.testing.assert_close(basis(xy), wanted, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(basis(xy), basis(xy.clone()))
        assert basis(xy).dtype == torch.float32
    assert torch.equal(basis(xy), basis(xy.float()))


def test_basis_is_drawn_from_the_papers_normal():
    torch.manual_seed(0)
    assert LearnedBasis(2, 4096, gamma=2.0).weight.std().item() == pytest.approx(0.25, rel=0.05)
