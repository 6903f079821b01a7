"""The losses of cells and of refinements against the paper's formulas, written out again in float64 with loops."""

import math

import pytest
import torch

from vispe.layers.assignment import optimal_transport
from vispe.losses.dense_matching import ALPHA, GAMMA, coarse_loss, fine_loss, training_matches

MATCHES0 = torch.tensor([[2, -1, 0, -2, -1], [-1, -1, -1, -2, -1], [0, 1, 2, 3, -2]])
MATCHES1 = torch.tensor([[2, -1, 0, -2], [-1, -1, -2, -1], [0, 1, 2, 3]])


def sims(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(3, 5, 4, generator=draw, dtype=torch.float64)


def softmaxes(sim):
    return torch.log_softmax(sim, 1) + torch.log_softmax(sim, 2)


def transported(sim):
    return optimal_transport(sim, torch.tensor(0.5, dtype=torch.float64), 10)


def value(p, form):
    return -math.log(p) if form == "likelihood" else -ALPHA * (1 - p) ** GAMMA * math.log(p)


def formula(sim, scores, form):
    """Pair by pair, cell by cell; probabilities of a dual softmax made anew from the similarities."""
    told = []
    for k, (t0, t1) in enumerate(zip(MATCHES0.tolist(), MATCHES1.tolist(), strict=True)):
        s, bins = sim[k].tolist(), scores.shape[1] == 6
        parts = []
        for i, j in enumerate(t0):
            if j >= 0 and bins:
                parts.append(value(math.exp(scores[k, i, j]), form))
            elif j >= 0:
                row = math.exp(s[i][j]) / sum(math.exp(each) for each in s[i])
                column = math.exp(s[i][j]) / sum(math.exp(each[j]) for each in s)
                parts.append(value(row * column, form))
        total = sum(parts) / len(parts) if parts else 0.0
        alone = [value(math.exp(scores[k, i, 4]), form) for i, j in enumerate(t0) if j == -1 and bins]
        alone += [value(math.exp(scores[k, 5, j]), form) for j, i in enumerate(t1) if i == -1 and bins]
        told.append(total + (sum(alone) / len(alone) if alone else 0.0))
    return told


@pytest.mark.parametrize("form", ["focal", "likelihood"])
@pytest.mark.parametrize("made", [softmaxes, transported])
def test_the_formula(made, form):
    scores = made(sims())
    loss = coarse_loss(scores, MATCHES0, MATCHES1, form)
    assert loss.tolist() == pytest.approx(formula(sims(), scores, form), abs=1e-12)
    assert (loss[1] == 0) == (made is softmaxes)  # it has no true match, but dustbins


def test_worked_out_by_hand():
    """Matches of probability 1/4 and 1/2: (2 + 1)/2 log 2, and with (3/4)^2 and (1/2)^2 of it a quarter each."""
    scores = torch.full((1, 2, 2), -torch.inf)
    scores[0, 0, 0], scores[0, 1, 1] = math.log(1 / 4), math.log(1 / 2)
    truth = torch.tensor([[0, 1]])
    assert float(coarse_loss(scores, truth, truth, "likelihood")) == pytest.approx(1.5 * math.log(2))
    wanted = (0.25 * 9 / 16 * 2 + 0.25 / 4) / 2 * math.log(2)
    assert float(coarse_loss(scores, truth, truth)) == pytest.approx(wanted)


@pytest.mark.parametrize("form", ["focal", "likelihood"])
@pytest.mark.parametrize("made", [softmaxes, transported])
def test_gradients_are_finite_and_those_of_the_value(made, form):
    """Also where confidences are as good as none, and for a pair without any match."""
    sim = sims().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: coarse_loss(made(x), MATCHES0, MATCHES1, form), sim)
    far = (100 * sims().float()).requires_grad_()
    coarse_loss(made(far), MATCHES0, MATCHES1, form).sum().backward()
    assert bool(far.grad.isfinite().all())
    assert float(far.grad.abs().sum()) > 0


def test_padding_may_be_infinite():
    """Cells that do not exist are ignored: what their entries hold reaches neither the loss nor the gradient."""
    sim = sims()[:1].float().requires_grad_()
    mask0, mask1 = torch.arange(5)[None] != 3, torch.arange(4)[None] != 3
    padded = optimal_transport(sim, torch.tensor(0.5), 10, mask0, mask1)
    loss = coarse_loss(padded, MATCHES0[:1], MATCHES1[:1])
    loss.sum().backward()
    assert bool(sim.grad.isfinite().all())
    assert bool(loss.isfinite().all())
    assert not sim.grad[0, 3].any()


def test_the_refinement_by_loops():
    draw = torch.Generator().manual_seed(0)
    offsets, truth = (torch.rand(9, 2, generator=draw, dtype=torch.float64) * 2.6 - 1.3 for _ in "01")
    truth[0], truth[1], truth[2] = torch.nan, torch.inf, torch.tensor([0.99, -0.99])
    deviation = torch.rand(9, generator=draw, dtype=torch.float64)
    rows = torch.tensor([0, 0, 0, 0, 2, 2, 2, 2, 2])
    truth[3], truth[5] = torch.tensor([0.1, 0.2]), torch.tensor([-0.5, 0.5])
    wanted = []
    for row in range(3):
        above, weights, counted = 0.0, 0.0, 0
        for k in range(9):
            x, y = truth[k].tolist()
            if rows[k] == row and abs(x) < 1 and abs(y) < 1:
                u, v = offsets[k].tolist()
                above += ((u - x) ** 2 + (v - y) ** 2) / float(deviation[k])
                weights, counted = weights + 1 / float(deviation[k]), counted + 1
        assert counted >= (2, 0, 1)[row]
        wanted.append(above / weights if counted else 0.0)
    assert fine_loss(offsets, deviation, truth, rows, 3).tolist() == pytest.approx(wanted, abs=1e-12)


def test_the_deviation_learns_nothing_and_nothing_is_legal():
    offsets, deviation = torch.zeros(2, 2, requires_grad=True), torch.tensor([0.5, 0.0], requires_grad=True)
    fine_loss(offsets, deviation, torch.tensor([[0.5, 0.0]] * 2), torch.tensor([0, 0]), 1).sum().backward()
    assert deviation.grad is None
    assert bool(offsets.grad.isfinite().all())
    assert float(offsets.grad.abs().sum()) > 0
    offsets.grad = None
    nowhere = torch.tensor([[torch.nan, 0.0], [torch.inf, torch.inf]])
    loss = fine_loss(offsets, deviation, nowhere, torch.tensor([0, 1]), 2)
    loss.sum().backward()
    assert loss.tolist() == [0, 0]
    assert not offsets.grad.any()


def test_matches_to_refine_are_predictions_topped_up_by_true_ones():
    """Cell 0 is predicted rightly, 1 wrongly, 2 unsurely; cells 0, 2 and 3 have true partners."""
    p = torch.full((1, 4, 4), 1e-6)
    p[0, 0, 0], p[0, 1, 3], p[0, 2, 2] = 0.9, 0.8, 0.1
    truth, order = torch.tensor([[0, -1, 2, 1]]), torch.tensor([[0.9, 0.1, 0.5, 0.2]])

    def picked(count, given):
        rows, i, j = training_matches(p.log(), truth, 4, order, 0.2, count, given)
        assert rows.tolist() == [0] * len(i)
        return list(zip(i.tolist(), j.tolist(), strict=True))

    assert picked(1, 0) == [(1, 3)]
    assert picked(2, 0) == [(1, 3), (0, 0)]
    assert picked(2, 1) == [(3, 1), (1, 3)]
    assert picked(9, 0) == [(1, 3), (0, 0), (3, 1), (2, 2), (0, 0)]
    nothing = training_matches(p.log(), torch.full((1, 4), -1), 4, order, 0.95, 3, 1)
    assert [part.tolist() for part in nothing] == [[0], [0], [0]]


def test_a_cell_that_goes_to_a_dustbin_is_no_prediction():
    p = torch.full((1, 3, 3), 1e-6)
    p[0, 0, 0], p[0, 1, 1], p[0, 1, 2] = 0.6, 0.4, 0.5
    rows, i, j = training_matches(p.log(), torch.full((1, 2), -1), 2, torch.rand(1, 2), 0.2, 4, 1)
    assert (rows.tolist(), i.tolist(), j.tolist()) == ([0], [0], [0])
    p[0, 1, 2] = 0.3
    found = training_matches(p.log(), torch.full((1, 2), -1), 2, torch.tensor([[0.1, 0.7]]), 0.2, 4, 1)
    assert found[1].tolist() == found[2].tolist() == [0, 1]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"scores of 5 and 4 cells, with or without dustbins, got \[3, 5, 5\]"):
        coarse_loss(torch.zeros(3, 5, 5), MATCHES0, MATCHES1)
