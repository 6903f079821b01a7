"""Context extension against transformers, and where circulating descriptions are wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.axial import axial_ropevit, axial_timm, axis_frequencies
from vispe.position.rotary import frequencies, phases, rotate, rotation
from vispe.position.scaling import (
    dynamic_ntk,
    interpolate,
    interpolate_axes,
    longrope,
    longrope_axes,
    ntk,
    ntk_axes,
    yarn,
    yarn_attention,
    yarn_axes,
)


def close(ours: torch.Tensor, theirs: torch.Tensor, rtol: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, atol=0, rtol=rtol)


def peer(kind: str, length: int | None = None, *, dim: int = 128, base: float = 1e4, maximum: int = 4096, **parameters):
    """transformers' own (inverse frequencies, attention scale)."""
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="transformers is the peer")
    llama = pytest.importorskip("transformers.models.llama.configuration_llama", reason="transformers is the peer")
    config = llama.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
        max_position_embeddings=maximum,
        rope_parameters={"rope_type": kind, "rope_theta": base, **parameters},
    )
    return utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)


# Parity


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_interpolation_is_transformers_linear(factor):
    theirs, attention = peer("linear", factor=factor)
    ours = interpolate(frequencies(128), factor)
    close(ours.theta, theirs)
    assert ours.attention == attention == 1.0


@pytest.mark.parametrize("length", [100, 2048, 2049, 4096, 8192])
@pytest.mark.parametrize(("dim", "base", "factor"), [(128, 1e4, 2.0), (64, 5e5, 4.0)])
def test_dynamic_ntk_is_transformers(length, dim, base, factor):
    theirs, attention = peer("dynamic", length, dim=dim, base=base, maximum=2048, factor=factor)
    ours = dynamic_ntk(frequencies(dim, base), factor, length, 2048)
    close(ours.theta, theirs, 2e-6)
    assert ours.attention == attention == 1.0


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("dim", "base", "original", "factor"),
    [
        (128, 1e4, 4096, 16.0),
        (64, 150000.0, 4096, 32.0),
        (96, 5e5, 8192, 2.0),
        (64, 1e4, 14, 2.0),
        (32, 100.0, 37, 1.5),
    ],
)
def test_yarn_is_transformers(dim, base, original, factor, truncate):
    theirs, attention = peer(
        "yarn", dim=dim, base=base, factor=factor, original_max_position_embeddings=original, truncate=truncate
    )
    ours = yarn(frequencies(dim, base), factor, original, truncate=truncate)
    close(ours.theta, theirs, 2e-6)
    assert ours.attention == pytest.approx(attention, abs=1e-12)


@given(
    pairs=st.integers(2, 80),
    base=st.sampled_from([10.0, 100.0, 1e4, 5e5]),
    original=st.integers(7, 10000),
    factor=st.floats(1.0, 64.0),
    slow=st.sampled_from([0.25, 1.0, 2.0]),
    fast=st.sampled_from([4.0, 32.0]),
)
def test_yarn_is_transformers_anywhere(pairs, base, original, factor, slow, fast):
    theirs, _ = peer(
        "yarn",
        dim=2 * pairs,
        base=base,
        factor=factor,
        original_max_position_embeddings=original,
        truncate=False,
        beta_fast=fast,
        beta_slow=slow,
    )
    ours = yarn(frequencies(2 * pairs, base), factor, original, fast=fast, slow=slow, truncate=False).theta
    close(ours, theirs, 2e-5)  # relative: the ramp's difference of two close numbers rounds in another order there


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"mscale_all_dim": 1.0},
    ],
)
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_yarn_attention_is_transformers(given, factor):
    _, theirs = peer("yarn", factor=factor, original_max_position_embeddings=4096, **given)
    assert yarn_attention(factor, **given) == pytest.approx(theirs, abs=1e-12)


def test_an_explicit_attention_factor_replaces_yarns():
    _, theirs = peer("yarn", factor=4.0, original_max_position_embeddings=4096, attention_factor=0.9)
    assert yarn(frequencies(128), 4.0, 4096, attention=0.9).attention == theirs == 0.9


@pytest.mark.parametrize("length", [100, 4096, 4097, 131072])
def test_longrope_is_transformers_also_at_the_very_boundary(length):
    """The long list only *beyond* the original length: 4096 itself is still short."""
    short, long = (torch.linspace(1, top, 48).tolist() for top in (1.5, 40.0))
    theirs, attention = peer(
        "longrope",
        length,
        dim=96,
        maximum=131072,
        short_factor=short,
        long_factor=long,
        factor=32.0,
        original_max_position_embeddings=4096,
    )
    ours = longrope(frequencies(96), short, long, length, 4096, factor=131072 / 4096)
    close(ours.theta, theirs)
    assert ours.attention == pytest.approx(attention, abs=1e-12)
    close(frequencies(96) / ours.theta, torch.tensor(long if length > 4096 else short), 1e-5)


def test_ntk_is_rotary_embedding_torchs():
    package = pytest.importorskip("rotary_embedding_torch", reason="rotary-embedding-torch is the peer")
    close(ntk(frequencies(64), 4.0).theta, package.RotaryEmbedding(64, theta_rescale_factor=4.0).freqs.detach(), 2e-6)


# Values worked by hand, and claims that circulate


def test_ntk_scales_the_slow_pairs_and_leaves_the_fastest():
    """Often told in reverse. d = 128, s = 8: 8^(i/63), that is 1 for pair 0, 2 for pair 21, 8 for the last."""
    ratio = frequencies(128) / ntk(frequencies(128), 8.0).theta
    assert ratio[[0, 21, 63]].tolist() == pytest.approx([1, 2, 8], rel=1e-5)
    assert (ratio.diff() > 0).all()
    close(ntk(frequencies(128), 8.0).theta, frequencies(128, 10000 * 8 ** (128 / 126)), 2e-6)


@pytest.mark.parametrize(("length", "base"), [(1000, 10000), (2048, 10000), (4096, 30527.7), (8192, 72195.9)])
def test_dynamic_ntk_by_hand(length, base):
    """d = 128, L = 2048, s = 2: the bases of the published formula; nothing up to L, and no memory of longer calls."""
    theta = frequencies(128)
    close(dynamic_ntk(theta, 2.0, length, 2048).theta, frequencies(128, base), 1e-5)
    dynamic_ntk(theta, 2.0, 8192, 2048)
    assert torch.equal(dynamic_ntk(theta, 2.0, 100, 2048).theta, theta)


def test_yarn_keeps_short_wavelengths_and_interpolates_long_ones():
    """Often told in reverse. d = 128, L = 4096: correction pairs 20.9 and 45.0; 21 pairs stay, 18 are divided by s."""
    theta, s = frequencies(128), 16.0
    ratio = theta / yarn(theta, s, 4096).theta
    turns = 4096 * theta / (2 * math.pi)
    assert (ratio[turns > 32] - 1).abs().max() < 1e-6
    assert (ratio[turns < 1] - s).abs().max() < 1e-4
    assert int(((ratio - 1).abs() < 1e-6).sum()) == 21
    assert int(((ratio - s).abs() < 1e-4).sum()) == 18


def test_yarns_temperature_sharpens():
    """Often told as t = 0.1 ln s + 1 with logits times sqrt(1/t). It is sqrt(1/t) = 0.1 ln s + 1, logits over t."""
    assert yarn_attention(16.0) == pytest.approx(1.27726, abs=1e-5)
    assert yarn_attention(16.0) ** 2 == pytest.approx(1.6314, abs=1e-4)
    extended = yarn(frequencies(8), 16.0, 64)
    q, k = torch.randn(2, 5, 8)
    plain, hot = (rotation(phases(torch.arange(5), extended.theta), by) for by in (1.0, extended.attention))
    torch.testing.assert_close(
        rotate(q, hot) @ rotate(k, hot).T, 1.6314 * (rotate(q, plain) @ rotate(k, plain).T), atol=1e-3, rtol=1e-3
    )


def test_mscale_by_hand():
    """Both 1: no scale at all (transformers; exllamav3 #259 disputes it for some models). One alone is ignored."""
    assert yarn_attention(40.0, 1.0, 1.0) == 1.0
    assert yarn_attention(40.0, 0.707, 1.0) == pytest.approx((0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1))
    assert yarn_attention(40.0, 0.707) == yarn_attention(40.0)
    assert yarn_attention(0.5) == 1.0


def test_longropes_scale_by_hand():
    """sqrt(1 + ln 32 / ln 4096) for 4096 -> 131072."""
    ones = [1.0] * 4
    assert longrope(frequencies(8), ones, ones, 9000, 4096, factor=32.0).attention == pytest.approx(1.1902, abs=1e-4)
    assert longrope(frequencies(8), ones, ones, 9000, 4096, factor=1.0).attention == 1.0
    assert longrope(frequencies(8), ones, ones, 9000, 4096, factor=32.0, attention=1.5).attention == 1.5


def test_texts_thresholds_are_nearly_interpolation_on_an_image_axis():
    """d = 64, 14 cells, s = 2: divided by 1, 1.2, 1.5, 2, 2, ... (range 0 to 3)."""
    theta = frequencies(64)
    ratio = theta / yarn(theta, 2.0, 14).theta
    assert ratio[:5].tolist() == pytest.approx([1, 1.2, 1.5, 2, 2], rel=1e-5)
    axis = axis_frequencies(64, 100.0)
    kept = [(axis / yarn(axis, 2.0, 14, fast=fast, slow=slow).theta < 1.5).sum() for fast, slow in ((32, 1), (2, 0.25))]
    assert kept[1] > kept[0]


@given(pairs=st.integers(2, 64), factor=st.floats(1.0, 100.0), original=st.integers(2, 5000), base=st.floats(2, 1e6))
def test_every_method_divides_by_something_between_one_and_s_and_keeps_the_order(pairs, factor, original, base):
    theta = frequencies(2 * pairs, base)
    for extended in (interpolate(theta, factor), ntk(theta, factor), yarn(theta, factor, original)):
        ratio = theta.double() / extended.theta.double()
        assert ratio.min() >= 1 - 1e-5
        assert ratio.max() <= factor * (1 + 1e-5)
        assert (extended.theta.diff() <= 0).all()
        assert extended.theta.dtype == torch.float32


def test_nothing_changes_in_place_and_factor_one_is_the_identity():
    theta = frequencies(32)
    before = theta.clone()
    for extended in (interpolate(theta, 1.0), ntk(theta, 1.0), yarn(theta, 1.0, 64), dynamic_ntk(theta, 3.0, 64, 64)):
        close(extended.theta, before)
        assert extended.attention == 1.0
    yarn(theta, 4.0, 64)
    assert torch.equal(theta, before)


# Per axis


@pytest.mark.parametrize(("source", "target"), [((14, 14), (14, 14)), ((14, 14), (28, 21)), ((16, 24), (8, 30))])
def test_interpolation_per_axis_is_evas_reference_grid(source, target):
    timm = pytest.importorskip("timm.layers.pos_embed_sincos", reason="timm is the peer")
    extended = interpolate_axes(axis_frequencies(64, 10000.0), source, target)
    ours = axial_timm(target, 64, theta=extended.theta)
    torch.testing.assert_close(ours, axial_timm(target, 64, reference=source), atol=5e-6, rtol=0)
    sin, cos = timm.RotaryEmbeddingCat(64, in_pixels=False, ref_feat_shape=source).get_embed(target).chunk(2, -1)
    torch.testing.assert_close(ours.sin(), sin[:, ::2], atol=4e-6, rtol=0)
    torch.testing.assert_close(ours.cos(), cos[:, ::2], atol=4e-6, rtol=0)


@pytest.mark.parametrize("method", [ntk_axes, yarn_axes])
def test_an_axis_that_does_not_grow_keeps_its_frequencies(method):
    theta = axis_frequencies(64, 100.0)
    (y, x), attention = method(theta, (14, 14), (10, 28))
    close(y, theta)
    assert float(theta[-1] / x[-1]) == pytest.approx(2.0, rel=1e-5)
    (again_y, again_x), same = method(theta, (14, 14), (28, 10))
    assert torch.equal(again_y, x)
    assert torch.equal(again_x, y)
    assert attention == same


def test_yarn_per_axis_by_hand():
    """Base 100, 8 frequencies 100^(-i/8), 14 cells: 2.2, 1.25, 0.7, 0.4, 0.22, ... turns. Fast 2, slow 0.25: pair 0
    stays, pairs from 4 on are halved, a ramp between."""
    theta = axis_frequencies(32, 100.0)
    turns = 14 * theta / (2 * math.pi)
    assert turns[:5].tolist() == pytest.approx([2.2282, 1.2530, 0.7046, 0.3962, 0.2228], abs=1e-4)
    (y, _), attention = yarn_axes(theta, (14, 14), (28, 28))
    ratio = theta / y
    assert ratio[0] == pytest.approx(1.0)
    assert (ratio[1:4].diff() > 0).all()
    assert ratio[4:].tolist() == pytest.approx([2.0] * 4, rel=1e-6)
    assert attention == pytest.approx(0.1 * math.log(2) + 1)
    assert yarn_axes(theta, (14, 14), (28, 28), attention=1.0).attention == pytest.approx(1.0)


def test_one_attention_scale_for_two_axes():
    theta = axis_frequencies(32, 100.0)
    assert yarn_axes(theta, (14, 14), (14, 56)).attention == pytest.approx(math.sqrt(0.1 * math.log(4) + 1))


def test_longrope_per_axis_chooses_by_axis():
    theta, short, long = axis_frequencies(16, 100.0), [1.0] * 4, [1.0, 2.0, 3.0, 4.0]
    extended = longrope_axes(theta, short, long, (14, 14), (14, 28))
    assert torch.equal(extended.theta[0], theta)
    close(theta / extended.theta[1], torch.tensor(long))
    assert extended.attention == pytest.approx((1 + math.log(2) / math.log(14)) ** 0.25)


@given(h=st.integers(1, 20), w=st.integers(1, 20))
def test_extended_grids_keep_the_trained_range_of_slow_angles(h, w):
    """The slowest pair of an axis never turns further than it did in training."""
    trained = axial_ropevit((10, 10), 16)
    for method in (interpolate_axes, ntk_axes, yarn_axes):
        extended = method(axis_frequencies(16, 100.0), (10, 10), (h, w))
        angles = axial_ropevit((h, w), 16, theta=extended.theta)
        cell = float(extended.theta[0][-1] + extended.theta[1][-1])  # the last cell ends one further on
        assert angles[:, [3, 7]].max() <= trained[:, [3, 7]].max() + cell


@pytest.mark.slow
def test_compiled_whole():
    torch._dynamo.reset()

    def everything(theta):
        return [
            rotation(phases(torch.arange(20), e.theta), e.attention)
            for e in (interpolate(theta, 2.0), ntk(theta, 2.0), dynamic_ntk(theta, 2.0, 90, 64), yarn(theta, 2.0, 64))
        ]

    theta = frequencies(16)
    for ours, theirs in zip(
        torch.compile(everything, fullgraph=True, dynamic=True)(theta), everything(theta), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_mistakes_are_named():
    theta = frequencies(8)
    for call, message in (
        (lambda: interpolate(theta, 0.0), "got 0"),
        (lambda: interpolate(theta, math.nan), "nan"),
        (lambda: ntk(theta, 0.5), "got 0.5"),
        (lambda: ntk(theta[:1], 2.0), r"\(1,\)"),
        (lambda: ntk(theta[None], 2.0), r"\(1, 4\)"),
        (lambda: dynamic_ntk(theta, 2.0, 0, 10), "length 0"),
        (lambda: dynamic_ntk(theta, 0.5, 5, 10), "got 0.5"),
        (lambda: yarn(theta, math.inf, 10), "inf"),
        (lambda: yarn(theta, 2.0, 10, fast=1.0, slow=2.0), "2.0, 1.0"),
        (lambda: yarn(theta, 2.0, 0), "0"),
        (lambda: yarn_attention(0.0), "got 0"),
        (lambda: longrope(theta, [1.0] * 3, [1.0] * 4, 5, 10, factor=2.0), "got 3 short, 4 long"),
        (lambda: longrope(theta, [1.0] * 4, [1.0] * 4, -5, 10, factor=2.0), "length -5"),
        (lambda: ntk_axes(theta, (0, 3), (3, 3)), r"\(0, 3\)"),
        (lambda: yarn_axes(theta, (3, 3), (3, 3, 3)), r"\(3, 3, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
