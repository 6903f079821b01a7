"""Relative biases against the implementations of transformers, timm and torchvision, and against worked answers."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vispe.position.bias import (
    CausalT5Bias,
    DecomposedBias,
    ShawBias,
    SwinBias,
    SwinV2Bias,
    T5Bias,
    axis_differences,
    by_difference,
    swin_index,
    t5_bounds,
    t5_buckets,
    t5_buckets_causal,
    with_prefix,
)
from vispe.position.resample import RECIPES, resample_bias

swin_table = partial(resample_bias, recipe=RECIPES["swin_bias"])
WINDOWS = [(7, 7), (3, 5), (8, 2), (2, 2), (1, 4)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter from N(0, 1): a bias that is zero or tiny at birth would agree with anything."""
    g = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g)
    return module.eval()


class TwoGrids(nn.Module):
    """A member of each kind called at once, for the tests of compilers, copies and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.t5, self.causal, self.shaw = T5Bias(2), CausalT5Bias(2), ShawBias(8, 3)
        self.swin, self.swin_v2 = SwinBias((4, 4), 2), SwinV2Bias((4, 4), 2, hidden=16)
        self.decomposed = DecomposedBias((4, 4), 8)

    def forward(self, q: torch.Tensor, grid: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        n = q.shape[2]
        keys = self.shaw(q, n)
        grids = self.swin(grid), self.swin_v2(grid), self.decomposed(q, grid)
        return self.t5(n, n), self.causal(n, n), keys, self.shaw.values(keys.softmax(-1)), *grids


def queries(h: int, w: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 2, h * w, 8, generator=torch.Generator().manual_seed(seed))


@given(n=st.integers(1, 12), m=st.integers(1, 12))
def test_by_difference_is_the_double_loop(n, m):
    values = torch.randn(3, n + m - 1)
    wanted = torch.stack([torch.stack([values[:, j - i + n - 1] for j in range(m)], -1) for i in range(n)], 1)
    assert torch.equal(by_difference(values, n), wanted)


# T5


# encodings.md section 7.2, computed with the formula of mesh_tensorflow in float64
WORKED = {0: 0, 1: 17, -1: 1, 7: 23, 8: 24, 11: 24, 12: 25, 16: 26, 23: 27, 32: 28, 46: 29, 64: 30, 91: 31, 128: 31}
WORKED |= {-8: 8, -16: 10, -64: 14, -91: 15}


def test_t5_buckets_worked():
    got = t5_buckets(torch.tensor(list(WORKED)))
    assert dict(zip(WORKED, got.tolist(), strict=True)) == WORKED


@pytest.mark.parametrize(
    ("buckets", "distance"), [(32, 128), (32, 256), (64, 128), (16, 20), (8, 5000), (128, 1024), (20, 77)]
)
def test_t5_buckets_match_transformers(buckets, distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="transformers carries T5")
    theirs = t5.T5Attention._relative_position_bucket
    r = torch.arange(-6000, 6001)
    assert torch.equal(t5_buckets(r, buckets, distance), theirs(r, True, buckets, distance))
    assert torch.equal(t5_buckets_causal(r, buckets, distance), theirs(r, False, buckets, distance))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m", "start"), [(7, 7, 0), (5, 40, 0), (40, 5, 0), (1, 200, 199), (3, 10, 7)])
def test_t5_bias_matches_transformers(causal, n, m, start):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="transformers carries T5")
    config = t5.T5Config(d_model=24, d_kv=8, num_heads=3, is_decoder=causal)
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = (CausalT5Bias if causal else T5Bias)(3)
    ours.load_state_dict({"weight": theirs.relative_attention_bias.weight})
    close(ours(n, m, start), theirs.compute_bias(n, m, past_seen_tokens=start)[0])


def test_a_bfloat16_logarithm_gives_wrong_buckets_and_ours_does_not():
    r = torch.arange(1001)

    def formula(dtype: torch.dtype) -> torch.Tensor:
        large = 8 + (torch.log(r.to(dtype) / 8) / math.log(128 / 8) * 8).long()
        return torch.where(r < 8, r, large.clamp(max=15))

    ours = t5_buckets(-r)
    assert torch.equal(ours, formula(torch.float32))
    assert torch.equal(ours, formula(torch.float64))
    assert r[ours != formula(torch.bfloat16)].tolist() == [16, 32, 90]
    half, whole = T5Bias(2).bfloat16(), T5Bias(2)
    half.load_state_dict(whole.state_dict())
    assert torch.equal(half(100, 100), whole(100, 100).bfloat16())


@given(buckets=st.integers(2, 40), distance=st.integers(2, 400))
def test_t5_buckets_never_fall_with_distance_and_use_the_first_and_last(buckets, distance):
    if distance <= buckets // 2:
        with pytest.raises(ValueError, match=f"{distance} and {buckets}"):
            t5_bounds(buckets, distance)
        return
    got = t5_buckets_causal(-torch.arange(distance + 50), buckets, distance)
    assert (got.diff() >= 0).all()
    assert got[0] == 0
    assert (got[distance:] == buckets - 1).all()


@pytest.mark.parametrize(("buckets", "distance"), [(33, 128), (2, 128), (0, 128), (32, 8)])
def test_t5_refuses_bad_numbers_when_built(buckets, distance):
    with pytest.raises(ValueError, match=str(buckets // 2 if buckets == 2 else buckets if buckets != 32 else 8)):
        T5Bias(4, buckets, distance)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        T5Bias(0)
    with pytest.raises(ValueError, match="m must be at least 1, got 0"):
        T5Bias(2)(3, 0)


# Shaw


def shaw_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: ShawBias) -> torch.Tensor:
    """Shaw et al. 2018, equations 1 to 5, pair by pair for one head."""
    n, m, d = len(q), len(k), q.shape[-1]
    clip = [
        [max(-bias.max_distance, min(bias.max_distance, j - i)) + bias.max_distance for j in range(m)] for i in range(n)
    ]
    out = []
    for i in range(n):
        e = torch.stack([q[i] @ (k[j] + bias.key_table[clip[i][j]]) / math.sqrt(d) for j in range(m)])
        alpha = e.softmax(0)
        out.append(sum(alpha[j] * (v[j] + bias.value_table[clip[i][j]]) for j in range(m)))
    return torch.stack(out)


def shaw_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: ShawBias) -> torch.Tensor:
    alpha = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias(q, k.shape[2])).softmax(-1)
    return alpha @ v + bias.values(alpha)


@pytest.mark.parametrize(("n", "m", "reach"), [(6, 6, 2), (4, 9, 3), (9, 4, 3), (5, 5, 20), (1, 7, 1)])
def test_shaw_is_the_papers_equations(n, m, reach):
    bias = drawn(ShawBias(8, reach)).double()
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (n, m, m))
    got = shaw_attention(q, k, v, bias)
    for head in range(2):
        wanted = shaw_by_hand(q[0, head], k[0, head], v[0, head], bias)
        torch.testing.assert_close(got[0, head], wanted, atol=1e-12, rtol=1e-12)


def test_shaw_by_hand():
    """d = 1, K = 1, a^K = (-1, 0, 1), a^V = (10, 20, 30), two tokens with q = (1, 2): scores 1*(0, 1) and 2*(-1, 0)."""
    bias = ShawBias(1, 1)
    bias.load_state_dict(
        {"key_table": torch.tensor([[-1.0], [0], [1]]), "value_table": torch.tensor([[10.0], [20], [30]])}
    )
    close(bias(torch.tensor([[[[1.0], [2.0]]]]), 2), torch.tensor([[[[0.0, 1.0], [-2.0, 0.0]]]]))
    alpha = torch.tensor([[[[0.25, 0.75], [0.5, 0.5]]]])
    close(bias.values(alpha), torch.tensor([[[[27.5], [15.0]]]]))  # .25*20 + .75*30, .5*10 + .5*20


def test_shaws_keys_match_transformers():
    peer = pytest.importorskip(
        "transformers.models.wav2vec2_bert.modeling_wav2vec2_bert", reason="transformers carries it"
    )
    if not hasattr(peer, "_apply_relative_key_position_encoding"):
        pytest.skip("this transformers has no separate relative-key function")
    config = peer.Wav2Vec2BertConfig(
        hidden_size=16, num_attention_heads=2, position_embeddings_type="relative_key",
        left_max_position_embeddings=3, right_max_position_embeddings=3,
    )  # fmt: skip
    theirs, ours, q = peer.Wav2Vec2BertSelfAttention(config), ShawBias(8, 3), torch.randn(2, 2, 11, 8)
    ours.key_table.data = theirs.distance_embedding.weight.data
    close(ours(q, 11), peer._apply_relative_key_position_encoding(theirs, q, q)[1])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_shaws_keys_and_values_match_vits_inside_its_window(n):
    """Transformers' VITS attends with both tables (no clipping: zero outside, hence n <= window + 1)."""
    vits = pytest.importorskip("transformers.models.vits.modeling_vits", reason="transformers carries VITS")
    config = vits.VitsConfig(hidden_size=16, num_attention_heads=2, window_size=4, attention_dropout=0.0)
    theirs, ours, x = vits.VitsAttention(config).eval(), ShawBias(8, 4), torch.randn(3, n, 16)
    ours.load_state_dict({"key_table": theirs.emb_rel_k[0], "value_table": theirs.emb_rel_v[0]})
    q, k, v = (theirs._shape(p(x), n, 3) for p in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    out = theirs.out_proj(shaw_attention(q, k, v, ours).transpose(1, 2).flatten(2))
    close(out, theirs(x)[0])


@given(seed=st.integers(0, 10**6), n=st.integers(1, 8), extra=st.integers(0, 5))
def test_shaws_start_is_a_later_query(seed, n, extra):
    bias, q = drawn(ShawBias(4, 3), seed), torch.randn(1, 1, n + extra, 4)
    whole = bias(q, n + extra)
    close(bias(q[:, :, extra:], n + extra, start=extra), whole[:, :, extra:])
    close(bias.values(whole[:, :, extra:], start=extra), bias.values(whole)[:, :, extra:])


def test_shaw_gradients_agree_with_finite_differences():
    bias = ShawBias(2, 2).double()
    q = torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True)
    alpha = torch.rand(1, 1, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: bias(x, 5), (q, bias.key_table))
    assert torch.autograd.gradcheck(lambda x, *_: bias.values(x), (alpha, bias.value_table))


def test_shaw_refuses_other_sizes():
    with pytest.raises(ValueError, match="6 channels a head, the table has 8"):
        ShawBias(8, 2)(torch.zeros(1, 1, 3, 6), 3)
    with pytest.raises(ValueError, match="max_distance must be at least 1, got 0"):
        ShawBias(8, 0)


# Swin


def test_swin_index_worked():
    """Encodings.md section 7.1: a 2 x 2 window."""
    assert swin_index((2, 2)).tolist() == [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]


@pytest.mark.parametrize("window", WINDOWS)
def test_swin_matches_timm_and_torchvision(window):
    layers = pytest.importorskip("timm.layers.pos_embed_rel", reason="timm carries Swin")
    timm_swin = pytest.importorskip("timm.models.swin_transformer", reason="timm carries Swin")
    tv = pytest.importorskip("torchvision.models.swin_transformer", reason="torchvision carries Swin")
    assert torch.equal(swin_index(window), layers.gen_relative_position_index(window))
    ours = drawn(SwinBias(window, 3))
    theirs = timm_swin.WindowAttention(12, 3, window_size=window)
    theirs.relative_position_bias_table.data = ours.table.data
    assert torch.equal(ours(window), theirs._get_rel_pos_bias()[0])
    theirs = tv.ShiftedWindowAttention(12, list(window), [0, 0], 3)
    theirs.relative_position_bias_table.data = ours.table.data
    assert torch.equal(ours(window), theirs.get_relative_position_bias()[0])


@pytest.mark.parametrize(
    ("source", "target"), [((7, 7), (12, 12)), ((3, 5), (6, 4)), ((12, 12), (7, 7)), ((4, 2), (2, 9))]
)
def test_resized_tables_match_timm(source, target):
    layers = pytest.importorskip("timm.layers.pos_embed_rel", reason="timm carries Swin's resize")
    table = torch.randn((2 * source[0] - 1) * (2 * source[1] - 1), 3)
    maps = table.T.reshape(3, 2 * source[0] - 1, 2 * source[1] - 1)
    shape = (3, 2 * target[0] - 1, 2 * target[1] - 1)
    wanted = layers.resize_rel_pos_bias_table_simple(maps, target, shape).flatten(1).T
    got = swin_table(table, source, target)
    close(got, wanted)
    if source[0] == source[1] and target[0] == target[1]:  # timm guesses the source of a flat table by its root
        close(got, layers.resize_rel_pos_bias_table_simple(table, target, wanted.shape))
    resized = SwinBias(target, 3)
    resized.table.data = got
    ours = SwinBias(source, 3)
    ours.table.data = table
    assert torch.equal(ours(target), resized(target))


def test_equal_windows_are_the_identity_and_equal_counts_are_not():
    table = torch.randn(7 * 3, 2)  # a 4 x 2 window: 7 x 3 differences
    assert swin_table(table, (4, 2), (4, 2)) is table
    turned = swin_table(table, (4, 2), (2, 4))
    assert turned.shape == table.shape
    assert not torch.allclose(turned, table)


@given(h=st.integers(1, 9), w=st.integers(1, 9), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float64]))
@settings(max_examples=40)
def test_a_resized_table_keeps_dtype_and_constants(h, w, dtype):
    got = swin_table(torch.full((5 * 3, 2), 0.75, dtype=dtype), (3, 2), (h, w))
    assert got.dtype == dtype
    assert got.shape == ((2 * h - 1) * (2 * w - 1), 2)
    torch.testing.assert_close(got, torch.full_like(got, 0.75))


def test_swin_refuses_a_table_of_another_window():
    with pytest.raises(ValueError, match=r"24 rows is not .* for window \(h, w\) = \(3, 3\)"):
        swin_table(torch.zeros(24, 2), (3, 3), (4, 4))
    with pytest.raises(ValueError, match=r"positive whole numbers, got \(4, 0\)"):
        SwinBias((3, 3), 2)((4, 0))
    with pytest.raises(ValueError, match=r"positive whole numbers, got \(-1, 2\)"):
        swin_index((-1, 2))


def test_an_old_checkpoint_brings_no_index_and_a_changed_table_is_seen_at_once():
    bias = SwinBias((3, 3), 2).eval()
    assert list(bias.state_dict()) == ["table"]
    assert not list(bias.buffers())
    before = bias((3, 3))
    bias.load_state_dict({"table": torch.randn(25, 2)})
    assert not torch.equal(bias((3, 3)), before)
    assert torch.equal(bias((3, 3)), bias.table[swin_index((3, 3))].permute(2, 0, 1))


# Swin V2


def swin_v2_peers(window: tuple[int, int], trained: tuple[int, int]) -> list[nn.Module]:
    timm_swin = pytest.importorskip("timm.models.swin_transformer_v2", reason="timm carries Swin V2")
    hf = pytest.importorskip("transformers.models.swinv2.modeling_swinv2", reason="transformers carries Swin V2")
    attention = timm_swin.WindowAttention(24, window, 3, pretrained_window_size=trained)
    config = hf.Swinv2Config()
    return [attention, hf.Swinv2SelfAttention(config, 24, 3, list(window), pretrained_window_size=list(trained))]


def swin_v2_bias(peer: nn.Module, window: tuple[int, int]) -> torch.Tensor:
    """The last lines of each peer's attention, where the bias has no function of its own."""
    n = window[0] * window[1]
    mlp = peer.cpb_mlp if hasattr(peer, "cpb_mlp") else peer.continuous_position_bias_mlp
    table = mlp(peer.relative_coords_table).view(-1, 3)
    return 16 * torch.sigmoid(table[peer.relative_position_index.view(-1)].view(n, n, 3).permute(2, 0, 1))


def copy_mlp(ours: SwinV2Bias, mlp: nn.Sequential) -> None:
    """Enlarged, so that the sigmoid's whole range is met."""
    ours.load_state_dict({"inner.weight": mlp[0].weight, "inner.bias": mlp[0].bias, "outer.weight": mlp[-1].weight})


@pytest.mark.parametrize(
    ("window", "trained"),
    [((8, 8), (0, 0)), ((3, 5), (0, 0)), ((16, 16), (8, 8)), ((6, 4), (3, 5)), ((2, 2), (12, 12))],
)
def test_swin_v2_matches_timm_and_transformers(window, trained):
    for peer in swin_v2_peers(window, trained):
        mlp = peer.cpb_mlp if hasattr(peer, "cpb_mlp") else peer.continuous_position_bias_mlp
        nn.init.normal_(mlp[0].weight)
        nn.init.normal_(mlp[-1].weight, std=0.1)
        ours = SwinV2Bias(trained if trained[0] else window, 3)
        copy_mlp(ours, mlp)
        wanted = swin_v2_bias(peer, window)
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours(window) / 16, wanted / 16, atol=1e-6, rtol=0)  # of the sigmoid


@pytest.mark.parametrize("window", [(8, 8), (3, 5)])
def test_swin_v2_matches_torchvision(window):
    tv = pytest.importorskip("torchvision.models.swin_transformer", reason="torchvision carries Swin V2")
    theirs, ours = tv.ShiftedWindowAttentionV2(12, list(window), [0, 0], 3), SwinV2Bias(window, 3)
    copy_mlp(ours, theirs.cpb_mlp)
    torch.testing.assert_close(ours(window) / 16, theirs.get_relative_position_bias()[0] / 16, atol=1e-6, rtol=0)


def test_swin_v2_worked():
    """One hidden unit that passes dx, window 3: c = 8 * (-1, -1/2, 0, 1/2, 1), c' = sign log2(1 + |c|) / 3."""
    bias = SwinV2Bias((3, 3), 1, hidden=1)
    bias.load_state_dict(
        {"inner.weight": torch.tensor([[0.0, 1]]), "inner.bias": torch.tensor([2.0]), "outer.weight": torch.ones(1, 1)}
    )
    first = bias((1, 3))[0, 0]  # the first query sees dx = 0, -1, -2
    wanted = torch.tensor([2.0, 2 - math.log2(5) / 3, 2 - math.log2(9) / 3])
    close(first / 16, wanted.sigmoid())


def test_swin_v2_of_one_cell_is_finite():
    assert SwinV2Bias((1, 1), 2)((1, 3)).isfinite().all()


# Decomposed

AXES = [(4, 4, 4), (4, 4, 9), (8, 4, 8), (4, 8, 3), (6, 9, 9), (3, 7, 5), (1, 1, 4)]


@pytest.mark.parametrize(("n", "m", "trained"), AXES)
def test_axis_differences_match_sam_and_vitdet(n, m, trained):
    sam = pytest.importorskip("transformers.models.sam.modeling_sam", reason="transformers carries SAM")
    vitdet = pytest.importorskip("transformers.models.vitdet.modeling_vitdet", reason="transformers carries ViTDet")
    table = torch.randn(2 * trained - 1, 5)
    close(axis_differences(table, n, m), sam.SamVisionAttention.get_rel_pos(None, n, m, table))
    close(axis_differences(table, n, m), vitdet.get_rel_pos(n, m, table))


@pytest.mark.parametrize(
    ("grid", "key_grid", "trained"),
    [((4, 4), (4, 4), (4, 4)), ((3, 5), (3, 5), (4, 4)), ((4, 6), (2, 3), (4, 6)), ((2, 3), (4, 6), (7, 2))],
)
def test_decomposed_matches_sam(grid, key_grid, trained):
    sam = pytest.importorskip("transformers.models.sam.modeling_sam", reason="transformers carries SAM")
    config = sam.SamVisionConfig(hidden_size=16, num_attention_heads=2, image_size=64, patch_size=16)
    theirs = sam.SamVisionAttention(config, window_size=0)
    ours, q = drawn(DecomposedBias(trained, 8)), queries(*grid)
    wanted = theirs.get_decomposed_rel_pos(q.flatten(0, 1), ours.rows, ours.columns, grid, key_grid)
    got = ours(q, grid, key_grid)
    close(got.flatten(0, 1), wanted.reshape(4, grid[0] * grid[1], key_grid[0] * key_grid[1]))
    if grid == key_grid:
        assert torch.equal(ours(q, grid), got)


def test_decomposed_worked():
    """Encodings.md section 2: bias(q, k) = q . R_h[dy] + q . R_w[dx], a cell at a time."""
    bias, q = drawn(DecomposedBias((2, 3), 8)), queries(2, 3)
    got = bias(q, (2, 3))
    for a in range(6):
        for b in range(6):
            dy, dx = a // 3 - b // 3, a % 3 - b % 3
            close(got[:, :, a, b], q[:, :, a] @ bias.rows[dy + 1] + q[:, :, a] @ bias.columns[dx + 2])


def test_decomposed_refuses_another_grid():
    with pytest.raises(ValueError, match=r"\(9, 8\), a 3x4 grid needs \(12, 8\)"):
        DecomposedBias((3, 4), 8)(queries(3, 3), (3, 4))
    with pytest.raises(ValueError, match=r"key_grid must be .* got \(3, 0\)"):
        DecomposedBias((3, 4), 8)(queries(3, 4), (3, 4), (3, 0))


# What holds for all


def test_prefix_tokens_have_no_place():
    bias = with_prefix(torch.ones(2, 4, 4), 5)
    assert bias.shape == (2, 9, 9)
    assert bias.sum() == 32
    assert torch.equal(bias[:, 5:, 5:], torch.ones(2, 4, 4))
    assert torch.equal(with_prefix(torch.ones(2, 4, 4), 0), torch.ones(2, 4, 4))
    with pytest.raises(ValueError, match="-1"):
        with_prefix(torch.ones(2, 4, 4), -1)


@pytest.mark.parametrize("grid", [(3, 5), (4, 4)])
def test_each_bias_breaks_permutation_equivariance(grid):
    """Without a bias (the first line) shuffled tokens give shuffled outputs; with any of them no longer."""
    n, q = grid[0] * grid[1], queries(*grid)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    model = drawn(TwoGrids())
    biases = {
        "t5": lambda q: model.t5(n, n),
        "t5 causal": lambda q: model.causal(n, n),
        "shaw": lambda q: model.shaw(q, n),
        "swin": lambda q: model.swin(grid),
        "swin v2": lambda q: model.swin_v2(grid),
        "decomposed": lambda q: model.decomposed(q, grid),
    }

    def attention(q: torch.Tensor, bias) -> torch.Tensor:
        return (q @ q.transpose(-2, -1) / math.sqrt(8) + bias(q)).softmax(-1) @ q

    def gap(bias) -> float:
        return (attention(q[:, :, order], bias) - attention(q, bias)[:, :, order]).abs().max().item()

    assert gap(lambda q: 0.0) < 1e-5
    for name, bias in biases.items():
        assert gap(bias) > 0.05, name


@given(seed=st.integers(0, 10**6), h=st.integers(1, 5), w=st.integers(1, 5))
@settings(max_examples=30)
def test_windows_see_only_differences(seed, h, w):
    """Cells (y, x) -> (y', x') and the same pair one row and column further have one bias."""
    model = drawn(TwoGrids(), seed)
    for bias in (model.swin, model.swin_v2):
        maps = bias((h + 1, w + 1)).unflatten(2, (h + 1, w + 1)).unflatten(1, (h + 1, w + 1))
        assert torch.equal(maps[:, 1:, 1:, 1:, 1:], maps[:, :-1, :-1, :-1, :-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_float32_result_cast_once(dtype):
    model, q = drawn(TwoGrids()).to(dtype), queries(3, 5).to(dtype)
    exact = copy.deepcopy(model).float()
    n = 15
    pairs = [
        (model.t5(n, n), exact.t5(n, n)),
        (model.shaw(q, n), exact.shaw(q.float(), n)),
        (model.shaw.values(q[..., :5]), exact.shaw.values(q[..., :5].float())),
        (model.swin((3, 5)), exact.swin((3, 5))),
        (model.swin_v2((3, 5)), exact.swin_v2((3, 5))),
        (model.decomposed(q, (3, 5)), exact.decomposed(q.float(), (3, 5))),
    ]
    for got, wanted in pairs[:3] + pairs[4:]:
        assert torch.equal(got, wanted.to(dtype))
    torch.testing.assert_close(*pairs[3], check_dtype=False, atol=0.02, rtol=0.01)  # the table is cast when resampled
    assert pairs[3][0].dtype == dtype


def test_autocast_changes_nothing():
    model, q = drawn(TwoGrids()), queries(3, 5)
    plain = model(q, (3, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, wanted in zip(model(q, (3, 5)), plain, strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got, wanted)


def test_copies_pickles_and_inference_mode_keep_the_numbers():
    model, q = drawn(TwoGrids()), queries(3, 5)
    plain = model(q, (3, 5))
    with torch.inference_mode():
        inside = model(q, (3, 5))
    sum(x.sum() for x in model.train()(q, (3, 5))).backward()  # nothing made in inference mode is left over
    assert all(parameter.grad is not None for parameter in model.parameters())
    copies = [inside, copy.deepcopy(model)(q, (3, 5)), pickle.loads(pickle.dumps(model))(q, (3, 5)), model(q, (3, 5))]
    for outputs in copies:
        assert all(torch.equal(a, b) for a, b in zip(outputs, plain, strict=True))


def test_meta_device_then_empty_then_load():
    model, q = drawn(TwoGrids()), queries(3, 5)
    with torch.device("meta"):
        empty = TwoGrids()
    assert [x.shape for x in empty(q.to("meta"), (3, 5))] == [x.shape for x in model(q, (3, 5))]
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(empty(q, (3, 5)), model(q, (3, 5)), strict=True))


def test_exported_programs_give_the_same_numbers():
    model, q = drawn(TwoGrids()), queries(3, 5)
    program = torch.export.export(model, (q, (3, 5))).module()
    for got, wanted in zip(program(q, (3, 5)), model(q, (3, 5)), strict=True):
        close(got, wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("compilable")
def test_one_compiled_program_serves_every_size():
    """A grid with a side of the trained window would be a second program: that table is taken unresized."""
    model = drawn(TwoGrids())
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    compiled(queries(3, 5), (3, 5))
    with torch.compiler.set_stance("fail_on_recompile"):
        for grid in [(3, 5), (7, 6), (5, 5), (2, 9)]:
            q = queries(*grid)
            for got, wanted in zip(compiled(q, grid), model(q, grid), strict=True):
                torch.testing.assert_close(got, wanted, atol=5e-6, rtol=1e-6)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        sum(x.square().sum() for x in run(q, grid)).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
