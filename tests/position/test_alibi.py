"""ALiBi: slopes for any number of heads, the closed form, and what the official shortcut leaves out."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from vispe.position.alibi import alibi_2d, alibi_causal, alibi_slopes, alibi_symmetric

# Exponents of two; encodings.md section 7.4, fairseq's get_slopes
EXPONENTS = {
    1: [-8],
    3: [-4, -8, -2],
    6: [-2, -4, -6, -8, -1, -3],
    8: [-1, -2, -3, -4, -5, -6, -7, -8],
    12: [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5],
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("heads", EXPONENTS)
def test_slopes_worked(heads):
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor([2.0**e for e in EXPONENTS[heads]]), atol=0, rtol=1e-6)


@pytest.mark.parametrize("heads", range(1, 41))
def test_slopes_match_bloom_falcon_and_mpt(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom", reason="transformers carries BLOOM")
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon", reason="transformers carries Falcon")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt", reason="transformers carries MPT")
    ours, ones = alibi_slopes(heads), torch.ones(1, 2)
    of_bloom = bloom.build_alibi_tensor(ones, heads, torch.float32)[:, 0, 1]  # slope * 1
    torch.testing.assert_close(ours, of_bloom, atol=1e-6, rtol=1e-5)
    of_mpt = -mpt.build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(ours, of_mpt, atol=1e-6, rtol=1e-6)
    of_falcon = falcon.build_alibi_tensor(ones, heads, torch.float32)[:, 0, 1]  # rounded to bfloat16 inside
    torch.testing.assert_close(ours.bfloat16().float(), of_falcon, atol=1e-6, rtol=2**-8)


def test_the_simple_formula_is_wrong_for_other_head_counts():
    """``2^(-8h/H)`` for H = 6 (encodings.md section 0, claim 7), and h counted from 0 (aprender#2143) for H = 8."""
    simple = torch.tensor([2.0 ** (-8 * h / 6) for h in range(1, 7)])
    assert (alibi_slopes(6) - simple).abs().max() > 0.1
    assert alibi_slopes(8)[0] == 0.5
    assert not (alibi_slopes(6).diff() < 0).all()


@given(heads=st.integers(1, 200))
def test_slopes_lie_between_2_to_the_minus_8_and_1_and_differ(heads):
    slopes = alibi_slopes(heads)
    assert len(slopes.unique()) == heads
    assert slopes.min() >= 2**-8
    assert slopes.max() < 1


@given(n=st.integers(1, 9), m=st.integers(1, 9), start=st.integers(0, 9), heads=st.integers(1, 9))
def test_the_closed_form(n, m, start, heads):
    symmetric, causal = alibi_symmetric(n, m, heads, start), alibi_causal(n, m, heads, start)
    for h, slope in enumerate(alibi_slopes(heads)):
        for i in range(n):
            for j in range(m):
                assert symmetric[h, i, j] == -slope * abs(i + start - j)
                assert causal[h, i, j] == (-slope * (i + start - j) if j <= i + start else -math.inf)


@given(n=st.integers(2, 12), heads=st.integers(1, 6), h=st.integers(2, 5), w=st.integers(2, 5))
def test_translation_invariance(n, heads, h, w):
    for bias in (alibi_symmetric(n, n, heads), alibi_causal(n, n, heads)):
        assert torch.equal(bias[:, 1:, 1:], bias[:, :-1, :-1])
    maps = alibi_2d((h, w), heads).unflatten(2, (h, w)).unflatten(1, (h, w))
    assert torch.equal(maps[:, 1:, 1:, 1:, 1:], maps[:, :-1, :-1, :-1, :-1])


def test_the_official_shortcut_is_the_same_attention_only_under_the_causal_mask():
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt", reason="transformers carries MPT")
    n, heads = 9, 6
    scores, shortcut = torch.randn(heads, n, n), mpt.build_mpt_alibi_tensor(heads, n)
    ahead = torch.ones(n, n).triu(1).bool()
    wanted = (scores + shortcut).masked_fill(ahead, -math.inf).softmax(-1)
    torch.testing.assert_close((scores + alibi_causal(n, n, heads)).softmax(-1), wanted, atol=1e-6, rtol=0)
    without = (scores + shortcut).softmax(-1)
    assert ((scores + alibi_symmetric(n, n, heads)).softmax(-1) - without).abs().max() > 0.1


def test_2d_matches_cromas_double_loop():
    """CROMA ``get_2dalibi``: every pair of points, ``-slope * sqrt(dy^2 + dx^2)``; here on an oblong grid too."""
    for h, w in [(3, 3), (2, 5)]:
        points = [(y, x) for y in range(h) for x in range(w)]
        distance = torch.tensor([[math.dist(p, q) for q in points] for p in points])
        wanted = -alibi_slopes(12)[:, None, None] * distance
        torch.testing.assert_close(alibi_2d((h, w), 12), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(alibi_2d((1, 6), 5), alibi_symmetric(6, 6, 5))


def test_shuffled_tokens_no_longer_give_shuffled_outputs():
    x, order = torch.randn(4, 12, 8), torch.randperm(12, generator=torch.Generator().manual_seed(1))

    def attention(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(-2, -1) / math.sqrt(8) + bias).softmax(-1) @ x

    def gap(bias: torch.Tensor) -> float:
        return (attention(x[:, order], bias) - attention(x, bias)[:, order]).abs().max().item()

    assert gap(torch.zeros(4, 12, 12)) < 1e-5
    for bias in (alibi_symmetric(12, 12, 4), alibi_causal(12, 12, 4), alibi_2d((3, 4), 4)):
        assert gap(bias) > 0.05


def test_long_distances_stay_apart_and_autocast_changes_nothing():
    plain = alibi_symmetric(1, 5000, 8)
    assert len(plain[0, 0].unique()) == 5000
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(alibi_symmetric(1, 5000, 8), plain)
        assert torch.equal(alibi_2d((3, 4), 6), alibi_2d((3, 4), 6, device=torch.device("cpu")))
    assert plain.dtype == torch.float32
    assert alibi_2d((3, 4), 6, torch.device("meta")).shape == (6, 12, 12)


class Biases(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n, m = x.shape
        return alibi_symmetric(n, m, 6), alibi_causal(n, m, 6), alibi_2d((n, m), 6)


def test_exported_programs_and_copies_give_the_same_numbers():
    x, module = torch.zeros(3, 5), Biases()
    program = torch.export.export(module, (x,)).module()
    for other in (program, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(other(x), module(x), strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("compilable")
def test_one_compiled_program_serves_every_size():
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(Biases(), backend=graphs, fullgraph=True, dynamic=True)
    for shape in [(3, 5), (7, 2), (6, 6)]:
        for got, wanted in zip(compiled(torch.zeros(shape)), Biases()(torch.zeros(shape)), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    assert graphs.frame_count == 1


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        alibi_slopes(0)
    with pytest.raises(ValueError, match="m must be at least 1, got -3"):
        alibi_symmetric(2, -3, 4)
    with pytest.raises(ValueError, match=r"grid must be .* got \(2, 0\)"):
        alibi_2d((2, 0), 4)
    with pytest.raises(ValueError, match="got -1"):
        alibi_causal(2, 2, 4, start=-1)
