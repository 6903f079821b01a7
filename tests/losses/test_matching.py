"""The likelihood of a matcher against the paper's formula, written out again in float64, pair by pair."""

import math

import numpy as np
import pytest
import torch

import vispe
from vispe.layers.assignment import log_assignment
from vispe.losses.matching import IGNORED, UNMATCHABLE, matching_loss
from vispe.models.lightglue import Points


def layer(b, m, n, seed, mask0=None, mask1=None):
    draw = torch.Generator().manual_seed(seed)
    m0, m1 = (torch.randn(b, k, 8, generator=draw, dtype=torch.float64) for k in (m, n))
    z0, z1 = (torch.randn(b, k, generator=draw, dtype=torch.float64) for k in (m, n))
    return log_assignment(m0, m1, z0, z1, mask0, mask1)


def formula(scores, confidence, matches0, matches1, balance="means"):
    """Lindenberger et al. 2023, equations 10 and 11 (3.4), with loops; or every point alike."""
    layers, sure = [], []
    for scores_of_layer in scores:
        pairs = []
        for s, t0, t1 in zip(scores_of_layer.tolist(), matches0.tolist(), matches1.tolist(), strict=True):
            matched = [s[i][j] for i, j in enumerate(t0) if j >= 0]
            missed0 = [s[i][-1] for i, j in enumerate(t0) if j == UNMATCHABLE]
            missed1 = [s[-1][j] for j, i in enumerate(t1) if i == UNMATCHABLE]
            if balance == "points":
                each = [*matched, *matched, *missed0, *missed1]
                pairs.append(-2 * sum(each) / max(len(each), 1))
                continue
            means = [sum(part) / len(part) if part else 0.0 for part in (matched, missed0, missed1)]
            pairs.append(-means[0] - (means[1] + means[2]) / 2)
        layers.append(sum(pairs) / len(pairs))
    last = np.array(scores[-1].tolist())
    for scores_of_layer, logits in zip(scores[:-1], confidence, strict=True):
        now = np.array(scores_of_layer.tolist())
        for axis, (values, truth) in enumerate(zip(logits, (matches0, matches1), strict=True)):
            here, there = (np.argmax(s[:, :-1] if axis == 0 else s[:, :, :-1], axis=2 - axis) for s in (now, last))
            for row, right, real in zip(values.tolist(), here == there, (truth != IGNORED).tolist(), strict=True):
                each = [
                    -math.log(1 / (1 + math.exp(-v))) if r else -math.log(1 - 1 / (1 + math.exp(-v)))
                    for v, r, k in zip(row, right, real, strict=True)
                    if k
                ]
                sure.append(sum(each) / max(len(each), 1))
    return sum(layers) / len(layers) + (sum(sure) / len(sure) if sure else 0.0)


@pytest.mark.parametrize("balance", ["means", "points"])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_formula(depth, balance):
    scores = [layer(2, 5, 4, seed) for seed in range(depth)]
    draw = torch.Generator().manual_seed(9)
    confidence = [tuple(torch.randn(2, k, generator=draw, dtype=torch.float64) for k in (5, 4)) for _ in scores[:-1]]
    matches0 = torch.tensor([[2, -1, 0, -2, -1], [-1, -1, -1, -1, -1]])
    matches1 = torch.tensor([[2, -1, 0, -2], [-1, -1, -1, -1]])
    made = matching_loss(scores, confidence, matches0, matches1, balance)
    assert float(made.total) == pytest.approx(formula(scores, confidence, matches0, matches1, balance), abs=1e-12)
    if depth == 1 and balance == "means":
        assert float(made.total) == pytest.approx(float(made.matched + made.unmatched), abs=1e-12)


def test_worked_out_by_hand():
    """One match of probability 1/4, one unmatchable point in each image of probability 1/2 and 1/8."""
    scores = torch.full((1, 3, 3), -50.0)
    scores[0, 0, 0], scores[0, 1, 2], scores[0, 2, 1] = math.log(1 / 4), math.log(1 / 2), math.log(1 / 8)
    truth = torch.tensor([[0, -1]])
    made = matching_loss([scores], [], truth, truth)
    assert float(made.matched) == pytest.approx(2 * math.log(2))
    assert float(made.unmatched) == pytest.approx((math.log(2) + 3 * math.log(2)) / 2)
    assert float(made.total) == pytest.approx(4 * math.log(2))


@pytest.mark.parametrize(("balance", "best"), [("means", 0.5), ("points", 2 / 7)])
def test_what_an_ignorant_matcher_learns(balance, best):
    """It gives every point the same chance: half by the paper's loss, of points alike how many have a partner."""
    truth0, truth1 = torch.tensor([[0, -1, -1]]), torch.tensor([[0, -1, -1, -1]])
    chance = torch.tensor(best, dtype=torch.float64, requires_grad=True)
    scores = torch.full((1, 4, 5), -50.0, dtype=torch.float64)
    scores[0, :3, :4] = chance.log()
    scores[0, :3, -1] = scores[0, -1, :4] = (1 - chance).log()
    matching_loss([scores], [], truth0, truth1, balance).total.backward()
    assert chance.grad is not None
    assert float(chance.grad) == pytest.approx(0, abs=1e-12)


def test_padding_is_worth_nothing():
    """Scores of padding are minus infinite: value and gradient are those of the points that exist."""
    model = vispe.build("lightglue_aliked", input_dim=8, width=16, depth=2, num_heads=2)
    draw = torch.Generator().manual_seed(0)
    size = torch.tensor([[100.0, 120.0]])

    def side(n, more):
        keypoints, descriptors = torch.rand(1, n, 2, generator=draw) * 100, torch.randn(1, n, 8, generator=draw)
        mask = torch.arange(n + more)[None] < n
        pad = torch.nn.functional.pad
        return Points(keypoints, descriptors, size), Points(
            pad(keypoints, (0, 0, 0, more)), pad(descriptors, (0, 0, 0, more), value=7.0), size, mask
        )

    (plain0, padded0), (plain1, padded1) = side(6, 3), side(5, 4)
    matches0, matches1 = torch.tensor([[1, -1, -2, -1, 0, 3]]), torch.tensor([[4, 0, -1, 5, -1]])
    results = []
    for points, more in (((plain0, plain1), (0, 0)), ((padded0, padded1), (3, 4))):
        truth = [
            torch.nn.functional.pad(t, (0, k), value=IGNORED) for t, k in zip((matches0, matches1), more, strict=True)
        ]
        model.zero_grad()
        total = matching_loss(*model.every_layer(*points), *truth).total
        total.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert all(bool(torch.isfinite(g).all()) for g in grads)
        results.append((float(total.detach()), grads))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_confidence_teaches_no_states():
    """Without matches to tell, only the confidence heads get a gradient."""
    model = vispe.build("lightglue_aliked", input_dim=8, width=16, depth=3, num_heads=2)
    points = [Points(torch.rand(1, 5, 2) * 50, torch.randn(1, 5, 8), (50.0, 50.0)) for _ in "01"]
    scores, sure = model.every_layer(*points)
    ignored = torch.full((1, 5), IGNORED)
    some = torch.where(torch.arange(5) < 2, -1, ignored)
    made = matching_loss([s.detach() for s in scores], sure, some, some)
    made.total.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith("confidence"), name


def test_other_numbers_of_layers_are_named():
    with pytest.raises(ValueError, match="got 2 layers and 0"):
        matching_loss([layer(1, 2, 2, 0)] * 2, [], torch.zeros(1, 2).long(), torch.zeros(1, 2).long())


def test_the_official_weights_on_real_images(features):
    """With the published matcher on a real pair of views, our loss is the formula's in float64."""
    model = vispe.load("lightglue_aliked")
    points = features("chelsea", 64)
    draw = torch.Generator().manual_seed(0)
    truth = [torch.where(torch.rand(1, p.keypoints.shape[1], generator=draw) < 0.3, -1, -2) for p in points]
    for i in range(0, 20, 2):
        truth[0][0, i], truth[1][0, i + 1] = i + 1, i
    with torch.inference_mode():
        scores, sure = model.every_layer(*points)
        made = matching_loss(scores, sure, *truth)
        double = [s.double() for s in scores], [tuple(c.double() for c in pair) for pair in sure]
    assert float(made.total) == pytest.approx(formula(*double, *truth), rel=1e-5)
