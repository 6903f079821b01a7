"""Rotary encodings of grids, each against the implementation that made it known."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.axial import (
    MixedAxial,
    augment_dinov3,
    axial_dinov3,
    axial_efficient_loftr,
    axial_pe,
    axial_ropevit,
    axial_sam2,
    axial_timm,
    axis_frequencies,
    cells,
    dinov3_coordinates,
    sam2_keys,
)
from vispe.position.parameters import positional_parameters
from vispe.position.rotary import rotate, rotation, skip_tokens

GRIDS = [(14, 14), (7, 12), (16, 5), (1, 9), (37, 24)]
PREFIXES = [0, 1, 2, 5]
grids = st.tuples(st.integers(1, 12), st.integers(1, 12))


@pytest.fixture
def timm():
    return pytest.importorskip("timm.layers.pos_embed_sincos", reason="timm is the peer")


def close(ours: torch.Tensor, theirs: torch.Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def same_turn(angles: torch.Tensor, embedding: torch.Tensor, layout: str = "interleaved") -> None:
    """``embedding [..., n, 2d]``: timm's full-width sines, then cosines."""
    sin, cos = embedding.chunk(2, -1)
    pick = (lambda t: t[..., ::2]) if layout == "interleaved" else (lambda t: t.chunk(2, -1)[0])
    close(rotation(angles), torch.stack((pick(cos), pick(sin)), -1))


# timm: EVA, PE, rope-vit


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("reference", [None, (14, 14), (16, 24)])
def test_axial_timm(timm, grid, reference):
    peer = timm.RotaryEmbeddingCat(64, in_pixels=False, ref_feat_shape=reference)
    same_turn(axial_timm(grid, 64, reference=reference), peer.get_embed(grid))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("reference", [None, (24, 24), (16, 24)])
def test_axial_pe(timm, grid, reference):
    peer = timm.RotaryEmbeddingCat(64, in_pixels=False, ref_feat_shape=reference, grid_offset=1.0, grid_indexing="xy")
    same_turn(axial_pe(grid, 64, reference=reference), peer.get_embed(grid))


@pytest.mark.parametrize("grid", GRIDS)
def test_axial_ropevit(timm, grid):
    peer = timm.RotaryEmbeddingCat(64, temperature=100.0, in_pixels=False, grid_indexing="xy")
    same_turn(axial_ropevit(grid, 64), peer.get_embed(grid))


def test_axial_ropevit_by_hand():
    """``compute_axial_cis(dim=8, end_x=3, end_y=2)``: frequencies 1, 0.1; token 5 of 2 x 3 is x = 2, y = 1."""
    angles = axial_ropevit((2, 3), 8)
    close(angles[5], torch.tensor([2.0, 0.2, 1.0, 0.1]))
    close(angles[2], torch.tensor([2.0, 0.2, 0.0, 0.0]))


@pytest.mark.parametrize("grid", GRIDS)
def test_axial_timm_is_rotary_embedding_torch(grid):
    """A second witness for y before x and base 10000."""
    peer = pytest.importorskip("rotary_embedding_torch", reason="rotary-embedding-torch is the peer")
    freqs = peer.RotaryEmbedding(dim=32, cache_if_possible=False).get_axial_freqs(*grid).flatten(0, 1)
    x = torch.randn(2, math.prod(grid), 64)
    close(rotate(x, rotation(axial_timm(grid, 64))), peer.apply_rotary_emb(freqs, x), 2e-6)
    close(axial_timm(grid, 64), freqs[:, ::2])


@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_axial_timm_is_qwen3_vls_vision_tower(grid):
    qwen = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl", reason="transformers is the peer")
    config = SimpleNamespace(rope_parameters={"rope_type": "axial", "rope_theta": 1e4}, head_dim=32)
    cos, sin = qwen.Qwen3VLVisionRotaryEmbedding(config)(torch.zeros(1), cells(grid).flip(-1))
    angles = axial_timm(grid, 32)
    close(angles.cos().tile(2), cos)
    close(angles.sin().tile(2), sin)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_prefix_as_in_timms_attention(timm, grid, prefix):
    q = torch.randn(2, 3, prefix + math.prod(grid), 32)
    embedding = timm.RotaryEmbeddingCat(32, in_pixels=False).get_embed(grid)
    theirs = torch.cat((q[:, :, :prefix], timm.apply_rot_embed_cat(q[:, :, prefix:], embedding)), 2)  # EvaAttention
    close(rotate(q, rotation(skip_tokens(axial_timm(grid, 32), prefix))), theirs)


@pytest.mark.parametrize("grid", GRIDS)
def test_mixed(timm, grid):
    peer = timm.RotaryEmbeddingMixed(3 * 32, depth=2, num_heads=3)
    ours = MixedAxial(32, 3, 2)
    ours.load_state_dict({"weight": peer.freqs})
    same_turn(ours(cells(grid)), peer.get_embed(list(grid)))


def test_mixed_starts_as_rope_vits(timm):
    torch.manual_seed(3)
    theirs = timm.init_random_2d_freqs(32, 2, 3, temperature=10.0)
    torch.manual_seed(3)
    close(MixedAxial(32, 3, 2).weight.detach(), theirs)


def test_mixed_starts_with_two_perpendicular_directions_in_each_head():
    fx, fy = MixedAxial(16, 5, 2).weight.detach()
    first, second = torch.stack((fx, fy), -1).split(4, -2)
    torch.testing.assert_close((first * second).sum(-1), torch.zeros(2, 5, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(first.norm(dim=-1), axis_frequencies(16, 10.0).expand(2, 5, 4))


# DINOv3


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("normalize", ["separate", "max", "min"])
def test_dinov3_is_timms(timm, grid, normalize):
    peer = timm.RotaryEmbeddingDinoV3(64, normalize_coords=normalize).eval()
    same_turn(axial_dinov3(dinov3_coordinates(grid, normalize), 64), peer.get_embed(grid), "half")


@pytest.mark.parametrize("grid", [(14, 14), (7, 12)])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_dinov3_is_transformers(grid, prefix):
    peer = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit", reason="transformers is the peer")
    config = peer.DINOv3ViTConfig(hidden_size=128, num_attention_heads=2, patch_size=4)
    h, w = grid
    cos, sin = peer.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 4 * h, 4 * w))
    angles = axial_dinov3(dinov3_coordinates(grid), 64)
    close(angles.cos().tile(2), cos)
    close(angles.sin().tile(2), sin)
    q, k = torch.randn(2, 2, 2, prefix + h * w, 64)
    turn = rotation(skip_tokens(angles, prefix), layout="half")
    for x, theirs in zip((q, k), peer.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        close(rotate(x, turn, "half"), theirs, 2e-6)


CHANGES = [
    {"shift": 0.3},
    {"jitter": 1.5},
    {"rescale": 2.0},
    {"shift": 0.1, "jitter": 1.2, "rescale": 2.0},
]


@pytest.mark.parametrize("change", CHANGES)
def test_dinov3s_training_changes_are_timms_draw_for_draw(timm, change):
    peer = timm.RotaryEmbeddingDinoV3(64, **{f"{name}_coords": value for name, value in change.items()}).train()
    torch.manual_seed(7)
    theirs = peer.get_embed((6, 9))
    xy = augment_dinov3(dinov3_coordinates((6, 9)), **change, generator=torch.Generator().manual_seed(7))
    same_turn(axial_dinov3(xy, 64), theirs, "half")


@pytest.mark.parametrize("change", CHANGES)
def test_dinov3s_training_changes_are_transformers(change):
    peer = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit", reason="transformers is the peer")
    yx = peer.get_patches_center_coordinates(6, 9, torch.float32, torch.device("cpu"))
    torch.manual_seed(11)
    theirs = peer.augment_patches_center_coordinates(yx, **change)
    torch.manual_seed(11)
    ours = augment_dinov3(dinov3_coordinates((6, 9)), **change)
    close(ours.flip(-1), theirs)
    assert (ours - dinov3_coordinates((6, 9))).abs().max() > 1e-3


@given(seed=st.integers(0, 10**6))
def test_dinov3s_changes_stay_in_their_ranges(seed):
    g = torch.Generator().manual_seed(seed)
    xy = dinov3_coordinates((3, 4))
    assert (augment_dinov3(xy, shift=0.2, generator=g) - xy).abs().max() <= 0.2 + 1e-6
    for factor in (augment_dinov3(xy, jitter=1.5, generator=g) / xy, augment_dinov3(xy, rescale=1.5, generator=g) / xy):
        assert (factor.nan_to_num(1.0) <= 1.5 + 1e-5).all()
        assert (factor.nan_to_num(1.0) >= 1 / 1.5 - 1e-5).all()
    rescaled = augment_dinov3(xy, rescale=1.5, generator=g) / xy
    assert rescaled.nan_to_num(float(rescaled[0, 0])).std() < 1e-6  # one factor for all


def test_dinov3s_normalisations_by_hand():
    """A grid of 2 rows and 4 columns; cells are square with max and min, and only min leaves [-1, 1]."""
    wanted = {
        "separate": ([-0.75, -0.25, 0.25, 0.75], [-0.5, 0.5]),
        "max": ([-0.75, -0.25, 0.25, 0.75], [-0.75, -0.25]),
        "min": ([-0.5, 0.5, 1.5, 2.5], [-0.5, 0.5]),
    }
    for normalize, (xs, ys) in wanted.items():
        xy = dinov3_coordinates((2, 4), normalize).view(2, 4, 2)
        close(xy[0, :, 0], torch.tensor(xs))
        close(xy[:, 0, 1], torch.tensor(ys))


# SAM 2


@pytest.mark.parametrize("grid", [(8, 8), (4, 6)])
@pytest.mark.parametrize("frames", [1, 3, 7])
@pytest.mark.parametrize("excluded", [0, 1, 16])
def test_sam2_memory_attention(grid, frames, excluded):
    peer = pytest.importorskip("transformers.models.sam2_video.modeling_sam2_video", reason="transformers is the peer")
    config = peer.Sam2VideoConfig(memory_attention_rope_feat_sizes=[grid[1], grid[0]])
    positions = peer.Sam2VideoMemoryAttention.precompute_positions(config)
    cos, sin = peer.Sam2VideoVisionRotaryEmbedding(config)(torch.zeros(1), positions)
    dim, n = cos.shape[-1], math.prod(grid)
    q, k = torch.randn(1, 1, n, dim), torch.randn(1, 1, frames * n + excluded, dim)
    theirs = peer.apply_rotary_pos_emb_2d(q, k, cos, sin, num_k_exclude_rope=excluded, repeat_freqs_k=True)
    angles = axial_sam2(grid, dim)
    close(rotate(q, rotation(angles)), theirs[0])
    close(rotate(k, rotation(sam2_keys(angles, k.shape[-2], excluded))), theirs[1])


def test_sam2_refuses_partial_frames():
    angles = axial_sam2((4, 8), 16)
    for keys, excluded, message in ((33, 0, "33 keys"), (64, 1, "1 excluded"), (5, 6, "5 keys"), (30, -2, "-2")):
        with pytest.raises(ValueError, match=message):
            sam2_keys(angles, keys, excluded)


# EfficientLoFTR


def test_axial_efficient_loftr_by_hand():
    """``width`` 8: frequencies 1, 0.01; pairs y, x, y, x; token 5 of 2 x 3 is x = 2, y = 1."""
    angles = axial_efficient_loftr((2, 3), 8)
    close(angles[5], torch.tensor([1.0, 2.0, 0.01, 0.02]))
    close(axial_efficient_loftr((2, 3), 8, theta=(torch.ones(2), torch.zeros(2)))[5], torch.tensor([1.0, 0, 1.0, 0]))
    with pytest.raises(ValueError, match="got 6"):
        axial_efficient_loftr((2, 3), 6)


def test_heads_share_the_frequencies_out_in_efficient_loftr():
    """The first of 4 heads turns fastest, in both axes; each alone is rotary with frequencies of its own."""
    heads = axial_efficient_loftr((3, 4), 32).unflatten(-1, (4, 4))
    theta = axis_frequencies(32, 10000.0).view(4, 2)
    for head in range(4):
        own = axial_efficient_loftr((3, 4), 8, theta=(theta[head], theta[head]))
        close(heads[:, head], own)
    assert (heads[-1, :-1] > heads[-1, 1:]).all()


# Of every family

FAMILIES = {
    "ropevit": lambda grid, dim, theta=None: axial_ropevit(grid, dim, theta=theta),
    "timm": lambda grid, dim, theta=None: axial_timm(grid, dim, theta=theta),
    "eva": lambda grid, dim, theta=None: axial_timm(grid, dim, reference=(8, 8), theta=theta),
    "pe": lambda grid, dim, theta=None: axial_pe(grid, dim, theta=theta),
    "sam2": lambda grid, dim, theta=None: axial_sam2(grid, dim, theta=theta),
    "dinov3": lambda grid, dim, theta=None: axial_dinov3(dinov3_coordinates(grid), dim, theta=theta),
}


@given(grid=grids)
def test_token_k_stands_at_row_k_over_w(grid):
    h, w = grid
    xy = cells(grid)
    assert xy.dtype == torch.float32
    assert xy.tolist() == [[k % w, k // w] for k in range(h * w)]


@pytest.mark.parametrize("family", FAMILIES)
@given(grid=grids, quarter=st.integers(1, 6))
def test_each_axis_turns_its_own_half_of_the_pairs(family, grid, quarter):
    (h, w), p = grid, quarter
    angles = FAMILIES[family](grid, 4 * p)
    assert angles.shape == (h * w, 2 * p)
    assert angles.dtype == torch.float32
    table = angles.view(h, w, 2 * p)
    by_y, by_x = (
        (table[..., :p], table[..., p:]) if family in ("timm", "eva", "dinov3") else (table[..., p:], table[..., :p])
    )
    assert (by_y == by_y[:, :1]).all()
    assert (by_x == by_x[:1]).all()
    assert h == 1 or (by_y[1:, 0, 0] > by_y[:-1, 0, 0]).all()
    assert w == 1 or (by_x[0, 1:, 0] > by_x[0, :-1, 0]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_see_only_the_offset_between_cells(family):
    q, k = torch.randn(2, 32)
    turn = rotation(FAMILIES[family]((6, 9), 32)).view(6, 9, 16, 2)

    def score(at_q: tuple[int, int], at_k: tuple[int, int]) -> float:
        return float(rotate(q, turn[at_q]) @ rotate(k, turn[at_k]))

    assert score((1, 2), (3, 7)) == pytest.approx(score((2, 3), (4, 8)), abs=1e-4)
    assert score((1, 2), (3, 7)) != pytest.approx(score((1, 2), (4, 7)), abs=1e-4)
    assert score((1, 2), (3, 7)) != pytest.approx(score((1, 2), (3, 8)), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_given_frequencies_replace_the_bases(family):
    base = {"ropevit": 100.0, "dinov3": 100.0}.get(family, 10000.0)
    theta = axis_frequencies(16, base)
    plain = FAMILIES[family]((3, 5), 16)
    close(FAMILIES[family]((3, 5), 16, (theta, theta)), plain)
    slow_y = FAMILIES[family]((3, 5), 16, (theta / 2, theta))
    y_first = family in ("timm", "eva", "dinov3")
    close(slow_y[:, :4], plain[:, :4] / (2 if y_first else 1))
    close(slow_y[:, 4:], plain[:, 4:] / (1 if y_first else 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_changes_nothing(family):
    plain = FAMILIES[family]((20, 30), 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(FAMILIES[family]((20, 30), 32), plain)
        mixed = MixedAxial(16, 2)
        lowered = mixed(cells((20, 30)))
    assert torch.equal(lowered, mixed(cells((20, 30))))


def test_mixed_survives_copies_half_precision_inference_mode_and_the_meta_device():
    mixed, xy = MixedAxial(16, 2, 3), cells((5, 7))
    with torch.inference_mode():
        wanted = mixed(xy).clone()
    assert list(positional_parameters(mixed)) == ["weight"]
    assert torch.equal(copy.deepcopy(mixed)(xy), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(mixed))(xy), wanted)
    with torch.device("meta"):
        empty = MixedAxial(16, 2, 3)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(mixed.state_dict())
    assert torch.equal(empty(xy), wanted)
    halved = copy.deepcopy(mixed).bfloat16()
    assert halved(xy).dtype == torch.float32
    assert torch.equal(halved(xy), halved.float()(xy))
    mixed(xy).square().sum().backward()
    assert mixed.weight.grad.abs().min() > 0


class Grid(torch.nn.Module):
    def forward(self, features):
        """``[b, d, h, w]`` -> tokens turned by the grid they came from."""
        tokens = features.flatten(2).transpose(1, 2)
        return rotate(tokens, rotation(axial_timm(tuple(features.shape[2:]), features.shape[1], reference=(8, 8))))


def test_export_with_a_free_grid():
    free = ({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Grid(), (torch.randn(1, 16, 5, 7),), dynamic_shapes=free).module()
    for grid in ((5, 7), (12, 4)):
        features = torch.randn(1, 16, *grid)
        close(program(features), Grid()(features))


@pytest.mark.slow
def test_compiled_whole_with_dynamic_grids():
    torch._dynamo.reset()
    compiled = torch.compile(Grid(), fullgraph=True, dynamic=True)
    mixed = MixedAxial(16, 2)
    compiled_mixed = torch.compile(lambda g: rotation(mixed(cells(g))), fullgraph=True, dynamic=True)
    compiled_dino = torch.compile(
        lambda g: axial_dinov3(dinov3_coordinates(g, "max"), 16), fullgraph=True, dynamic=True
    )
    for grid in ((5, 7), (12, 4), (9, 9)):
        features = torch.randn(1, 16, *grid)
        close(compiled(features), Grid()(features))
        close(compiled_mixed(grid), rotation(mixed(cells(grid))))
        close(compiled_dino(grid), axial_dinov3(dinov3_coordinates(grid, "max"), 16))


def test_mistakes_are_named():
    theta = axis_frequencies(16, 100.0)
    for call, message in (
        (lambda: axis_frequencies(10, 100.0), "got 10"),
        (lambda: axial_timm((3, 4), 0), "got 0"),
        (lambda: axial_ropevit((0, 4), 16), r"\(0, 4\)"),
        (lambda: cells((3, 4, 5)), r"\(3, 4, 5\)"),
        (lambda: axial_timm((3, 4), 16, reference=(8, -1)), r"\(8, -1\)"),
        (lambda: axial_timm((3, 4), 16, theta=(theta, theta[:3])), r"each \[4\], got \(3,\)"),
        (lambda: dinov3_coordinates((3, 4), "both"), "both"),
        (lambda: axial_dinov3(torch.zeros(5, 3), 16), r"\(5, 3\)"),
        (lambda: axial_dinov3(torch.full((5, 2), math.nan), 16), "nan"),
        (lambda: augment_dinov3(torch.zeros(5, 2), shift=-0.1), "-0.1"),
        (lambda: augment_dinov3(torch.zeros(5, 2), jitter=0.5), "jitter .* 0.5"),
        (lambda: augment_dinov3(torch.zeros(5, 2), rescale=math.inf), "rescale .* inf"),
        (lambda: MixedAxial(6, 2), "got 6"),
        (lambda: MixedAxial(8, 0), "num_heads 0"),
        (lambda: MixedAxial(8, 1)(torch.zeros(5, 3)), r"\(5, 3\)"),
        (lambda: MixedAxial(8, 1)(torch.full((5, 2), math.inf)), "inf"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
