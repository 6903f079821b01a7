"""Sinusoids: the numbers of the sources' own functions, the claims of the papers, and what must never change them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from vispe.position import sine
from vispe.position.rotary import frequencies, rotate, rotation

EXACT = {"atol": 1e-6, "rtol": 0.0}
# Under the shapes' own run (tests/test_shapes.py) every call goes through a checker that no tracer can follow.
traceable = pytest.mark.skipif(
    hasattr(sine.sine_detr, "__wrapped__"), reason="annotations are being enforced: not traceable"
)
GRIDS = [(1, 1), (5, 7), (14, 14), (20, 33), (37, 37), (64, 48)]
ROWS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (sine.sine_vaswani, sine.sine_tensor2tensor, sine.sine_marian)
}
PLANES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        sine.sine_detr,
        sine.sine_deformable,
        sine.sine_mae,
        sine.sine_moco,
        sine.sine_timm,
        sine.sine_loftr,
        sine.sine_loftr_legacy,
    )
}
PLANES["sine_mask2former_video"] = partial(sine.sine_mask2former_video, 3)


def peer(module: str):
    return pytest.importorskip(f"transformers.models.{module}", reason="transformers carries the ported originals")


# The sources, as installed


@pytest.mark.parametrize("dim", [8, 64, 512])
def test_vaswani_is_speecht5s(dim):
    theirs = peer("speecht5.modeling_speecht5").SpeechT5ScaledPositionalEncoding(0.0, dim, max_len=3000).pe[0]
    torch.testing.assert_close(sine.sine_vaswani(torch.arange(3000), dim), theirs, **EXACT)


@pytest.mark.parametrize("dim", [8, 64, 512])
def test_tensor2tensor_is_m2m100s(dim):
    theirs = peer("m2m_100.modeling_m2m_100").M2M100SinusoidalPositionalEmbedding.get_embedding(3000, dim)
    torch.testing.assert_close(sine.sine_tensor2tensor(torch.arange(3000), dim), theirs, **EXACT)


@pytest.mark.parametrize("dim", [2, 8, 64])
def test_marian_is_marians_and_roformers(dim):
    table = peer("marian.modeling_marian").MarianSinusoidalPositionalEmbedding(600, dim)
    torch.testing.assert_close(sine.sine_marian(torch.arange(600), dim), table.create_weight(), **EXACT)
    table = peer("roformer.modeling_roformer").RoFormerSinusoidalPositionalEmbedding(600, dim)
    torch.testing.assert_close(sine.sine_marian(torch.arange(600), dim), table.create_weight(), **EXACT)


DETR_FAMILY = [
    ("detr.modeling_detr", "DetrSinePositionEmbedding", sine.sine_detr),
    ("mask2former.modeling_mask2former", "Mask2FormerSinePositionEmbedding", sine.sine_detr),
    ("sam2_video.modeling_sam2_video", "Sam2VideoPositionEmbeddingSine", sine.sine_detr),
    ("deformable_detr.modeling_deformable_detr", "DeformableDetrSinePositionEmbedding", sine.sine_deformable),
]


@pytest.mark.parametrize(("module", "name", "ours"), DETR_FAMILY, ids=[name for _, name, _ in DETR_FAMILY])
@pytest.mark.parametrize("grid", GRIDS)
def test_detrs_family(module, name, ours, grid):
    theirs = getattr(peer(module), name)(32, normalize=True)
    wanted = theirs((2, 3, *grid), "cpu", torch.float32)[0].flatten(1).T
    torch.testing.assert_close(ours(grid, 64), wanted, **EXACT)
    mask = torch.rand(2, *grid, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[1, 0], mask[1, :, 0] = False, False  # a row and a column of padding alone: 0 / eps
    wanted = theirs((2, 3, *grid), "cpu", torch.float32, mask).flatten(2).mT
    torch.testing.assert_close(ours(grid, 64, mask), wanted, **EXACT)
    assert ours(grid, 64, mask).isfinite().all()


def test_detrs_knobs():
    theirs = peer("detr.modeling_detr").DetrSinePositionEmbedding(16, temperature=20, normalize=True, scale=3.0)
    wanted = theirs((1, 3, 5, 7), "cpu", torch.float32)[0].flatten(1).T
    torch.testing.assert_close(sine.sine_detr((5, 7), 32, temperature=20.0, scale=3.0), wanted, **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dim", [4, 64, 768])
def test_mae_is_vitmaes(grid, dim):
    """transformers builds [y | x] and swaps the halves when it initialises the model (`initialize_weights`)."""
    theirs = peer("vit_mae.modeling_vit_mae").build_2d_sinusoidal_position_embedding(*grid, dim)
    torch.testing.assert_close(sine.sine_mae(grid, dim), theirs.roll(dim // 2, 1), **EXACT)


def test_mae_is_what_a_vitmae_starts_with():
    mae = peer("vit_mae.modeling_vit_mae")
    config = mae.ViTMAEConfig(hidden_size=64, num_attention_heads=4, image_size=96, patch_size=16)
    embeddings = mae.ViTMAEEmbeddings(config)
    embeddings.initialize_weights()
    torch.testing.assert_close(sine.sine_mae((6, 6), 64), embeddings.position_embeddings.detach()[0, 1:], **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dim", [4, 64, 768])
def test_timm_is_timms(grid, dim):
    layers = pytest.importorskip("timm.layers", reason="timm carries build_sincos2d_pos_embed")
    wanted = layers.build_sincos2d_pos_embed(list(grid), dim)
    torch.testing.assert_close(sine.sine_timm(grid, dim), wanted, **EXACT)
    wanted = layers.build_sincos2d_pos_embed(list(grid), dim, temperature=100.0)
    torch.testing.assert_close(sine.sine_timm(grid, dim, temperature=100.0), wanted, **EXACT)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dim", [4, 64, 256])
@pytest.mark.parametrize(("ours", "fixed"), [(sine.sine_loftr, True), (sine.sine_loftr_legacy, False)])
def test_loftr_is_kornias(grid, dim, ours, fixed):
    loftr = pytest.importorskip("kornia.feature.loftr.utils.position_encoding", reason="kornia carries LoFTR")
    wanted = loftr.PositionEncodingSine(dim, grid, temp_bug_fix=fixed).pe[0].flatten(1).T
    torch.testing.assert_close(ours(grid, dim), wanted, **EXACT)


@pytest.mark.parametrize("grid", [(1, 1), (5, 7), (7, 5), (14, 14)])
@pytest.mark.parametrize("dim", [8, 64, 256])
def test_moco_is_two_of_m2m100s_side_by_side(grid, dim):
    """big_vision itself needs jax; its layout is [1-D of x | 1-D of y] of a 1-D form that transformers has."""
    table = peer("m2m_100.modeling_m2m_100").M2M100SinusoidalPositionalEmbedding.get_embedding(max(grid), dim // 2)
    y, x = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    torch.testing.assert_close(
        sine.sine_moco(grid, dim), torch.cat((table[x.flatten()], table[y.flatten()]), 1), **EXACT
    )


@pytest.mark.parametrize("masked", [False, True])
def test_video_is_mask2formers_plane_plus_time(masked):
    """PositionEmbeddingSine3D, put together from transformers' 2-D module: cat(y, x) of dim/2 each, plus z of dim."""
    module = peer("mask2former.modeling_mask2former").Mask2FormerSinePositionEmbedding
    b, t, h, w, dim = 2, 4, 5, 7, 32
    mask = torch.rand(b, t, h, w, generator=torch.Generator().manual_seed(0)) < (0.7 if masked else 2.0)
    plane = module(dim // 2, normalize=True)((b * t, 3, h, w), "cpu", torch.float32, mask.flatten(0, 1))
    column = mask.permute(0, 2, 3, 1).reshape(-1, t, 1)  # time as the rows of a grid one cell wide
    time = module(dim, normalize=True)((b * h * w, 3, t, 1), "cpu", torch.float32, column)[:, :dim, :, 0]
    wanted = plane.view(b, t, dim, h, w) + time.view(b, h, w, dim, t).permute(0, 4, 3, 1, 2)
    wanted = wanted.permute(0, 1, 3, 4, 2).reshape(b, -1, dim)
    ours = sine.sine_mask2former_video(t, (h, w), dim, mask if masked else None)
    torch.testing.assert_close(ours.expand_as(wanted), wanted, **EXACT)


# Worked by hand


def by_hand(name: str, row: int, column: int, grid: tuple[int, int]) -> list[float]:
    """Eight channels of one cell straight from the sources' lines (encodings.md section 1), in Python floats."""
    s, c, (h, w) = math.sin, math.cos, grid
    if name in ("sine_detr", "sine_deformable"):
        shift = 1 if name == "sine_detr" else 0.5
        y, x = 2 * math.pi * (row + shift) / (h + 1e-6), 2 * math.pi * (column + shift) / (w + 1e-6)
        return [s(y), c(y), s(y / 100), c(y / 100), s(x), c(x), s(x / 100), c(x / 100)]
    if name.startswith("sine_loftr"):
        y, x, f = row + 1, column + 1, 0.01 if name == "sine_loftr" else math.exp(-2)
        return [s(x), c(x), s(y), c(y), s(x * f), c(x * f), s(y * f), c(y * f)]
    y, x, f = row, column, 1e-4 if name == "sine_moco" else 0.01
    if name == "sine_timm":
        return [s(y), s(y * f), s(x), s(x * f), c(y), c(y * f), c(x), c(x * f)]
    return [s(x), s(x * f), c(x), c(x * f), s(y), s(y * f), c(y), c(y * f)]


@pytest.mark.parametrize("name", [n for n in PLANES if n != "sine_mask2former_video"])
@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (1, 4), (4, 1)])
def test_eight_channels_by_hand(name, grid):
    wanted = [by_hand(name, k // grid[1], k % grid[1], grid) for k in range(grid[0] * grid[1])]
    torch.testing.assert_close(PLANES[name](grid, 8), torch.tensor(wanted), **EXACT)


def test_four_channels_by_hand():
    s, c = math.sin, math.cos
    torch.testing.assert_close(
        sine.sine_vaswani(torch.tensor(3), 4), torch.tensor([s(3), c(3), s(0.03), c(0.03)]), **EXACT
    )
    torch.testing.assert_close(
        sine.sine_marian(torch.tensor(3), 4), torch.tensor([s(3), s(0.03), c(3), c(0.03)]), **EXACT
    )
    wanted = torch.tensor([s(3), s(3e-4), c(3), c(3e-4)])
    torch.testing.assert_close(sine.sine_tensor2tensor(torch.tensor(3), 4), wanted, **EXACT)


def test_video_by_hand():
    """Two frames of one cell, four channels: y and x are at 2 pi, z at pi and 2 pi, its second wave a hundredth."""
    turn = 2 * math.pi / (1 + 1e-6)
    plane = [math.sin(turn), math.cos(turn)] * 2
    wanted = [
        [p + q for p, q in zip(plane, (math.sin(z), math.cos(z), math.sin(z / 100), math.cos(z / 100)), strict=True)]
        for z in (2 * math.pi / (2 + 1e-6), 4 * math.pi / (2 + 1e-6))
    ]
    torch.testing.assert_close(sine.sine_mask2former_video(2, (1, 1), 4), torch.tensor(wanted), **EXACT)


# Claims


@given(k=st.integers(-500, 500), pairs=st.integers(1, 64))
def test_a_shift_is_one_rotation_for_all_positions(k, pairs):
    """Vaswani et al. section 3.5: PE(p + k) is linear in PE(p); the matrix is rotary's, turning backwards."""
    positions = torch.arange(0, 700, 13, dtype=torch.float64)
    here, there = (sine.sine_vaswani(positions + by, 2 * pairs) for by in (0, k))
    theta = 10000.0 ** (-torch.arange(0, 2 * pairs, 2, dtype=torch.float64) / (2 * pairs))
    torch.testing.assert_close(theta.float(), frequencies(2 * pairs))
    torch.testing.assert_close(rotate(here, rotation(-k * theta)), there, atol=1e-9, rtol=0)
    torch.testing.assert_close(
        (here * there).sum(-1), (k * theta).cos().sum().expand(len(positions)), atol=1e-9, rtol=0
    )


def test_wavelengths_run_from_2pi_to_10000_times_2pi():
    """Counted as zero crossings of each sine over the longest wavelength: two in each."""
    span = 2 * math.pi * 10000
    p = (torch.arange(400_000, dtype=torch.float64) + 0.5) * (span / 400_000)
    for made, last in ((sine.sine_tensor2tensor, 10000.0), (sine.sine_marian, 100.0)):
        sines = made(p, 4)[:, :2]
        crossings = (sines[1:].sign() != sines[:-1].sign()).sum(0) + 1
        torch.testing.assert_close(2 * span / crossings, 2 * math.pi * torch.tensor([1.0, last]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ROWS)
def test_position_0_is_all_sines_0_and_cosines_1(name):
    values = ROWS[name](torch.tensor(0), 16)
    assert sorted(values.tolist()) == [0.0] * 8 + [1.0] * 8
    assert values[0] == 0
    assert values[-1] == 1


@pytest.mark.parametrize("name", ["sine_mae", "sine_moco", "sine_timm"])
def test_grids_counted_from_0_have_a_zero_cell(name):
    assert sorted(PLANES[name]((3, 5), 16)[0].tolist()) == [0.0] * 8 + [1.0] * 8


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


@pytest.mark.parametrize("name", PLANES)
def test_attention_is_blind_to_order_until_one_is_added(name):
    pe = PLANES[name]((3, 5), 16)
    g = torch.Generator().manual_seed(0)
    x, order = torch.randn(len(pe), 16, generator=g), torch.randperm(len(pe), generator=g)
    torch.testing.assert_close(attention(x[order]), attention(x)[order], atol=1e-5, rtol=0)
    assert (attention(x[order] + pe) - attention(x + pe)[order]).abs().max() > 0.1


def test_timm_is_mae_with_its_blocks_in_another_order():
    sx, cx, sy, cy = sine.sine_mae((5, 7), 64).chunk(4, -1)
    torch.testing.assert_close(sine.sine_timm((5, 7), 64), torch.cat((sy, sx, cy, cx), -1), **EXACT)


def test_the_end_point_makes_moco_another_encoding_than_mae():
    """Measured with both originals: up to 0.135 at 64 channels on 5 x 7."""
    apart = (sine.sine_moco((5, 7), 64) - sine.sine_mae((5, 7), 64)).abs().max()
    assert apart.item() == pytest.approx(0.135, abs=5e-4)


def test_the_legacy_loftr_keeps_four_waves_of_sixty_four():
    """LoFTR#41: e^(-2i) instead of 10000^(-i/64): 4 of 64 frequencies exceed 1e-3, where the fix has 48."""
    for made, wanted in ((sine.sine_loftr_legacy, 4), (sine.sine_loftr, 48)):
        frequency = made((1, 1), 256)[0].unflatten(0, (64, 4))[:, 0].asin()  # sin(w) at the first cell, counted 1
        assert int((frequency > 1.01e-3).sum()) == wanted


def test_detrs_last_cell_meets_its_first_phase_and_deformables_is_symmetric():
    """DETR's range ends at 2 pi (1 - eps); half a cell earlier, Deformable DETR's sines are odd about the middle."""
    last = sine.sine_detr((8, 8), 16)[-1]
    torch.testing.assert_close(last[:2], torch.tensor([0.0, 1.0]), atol=1e-5, rtol=0)
    first_sine = sine.sine_deformable((6, 9), 16)[:, 0].view(6, 9)
    torch.testing.assert_close(first_sine, -first_sine.flip(0), atol=1e-5, rtol=0)


# Properties


grids = st.tuples(st.integers(1, 12), st.integers(1, 12))


@given(grid=grids, quarter=st.integers(2, 24), name=st.sampled_from(sorted(PLANES)))
def test_every_plane_is_float32_of_its_own_shape_and_no_two_cells_agree(grid, quarter, name):
    pe = PLANES[name](grid, 4 * quarter)
    frames = 3 if name == "sine_mask2former_video" else 1
    assert pe.shape == (frames * grid[0] * grid[1], 4 * quarter)
    assert pe.dtype == torch.float32
    assert len(pe.unique(dim=0)) == len(pe)
    if frames == 1:  # a sine beside each cosine
        torch.testing.assert_close(pe.square().sum(-1), torch.full((len(pe),), 2.0 * quarter))


@given(grid=grids, quarter=st.integers(2, 16), name=st.sampled_from(sorted(set(PLANES) - {"sine_mask2former_video"})))
def test_the_transposed_grid_swaps_x_and_y(grid, quarter, name):
    """Wrong for column-major tokens and for (w, h) read as (h, w): faults 6, 7 and 8, hidden by square grids."""
    blocks = {"sine_timm": (1, 0, 3, 2), "sine_loftr": (2, 3, 0, 1), "sine_loftr_legacy": (2, 3, 0, 1)}
    h, w = grid
    ours, turned = PLANES[name]((h, w), 4 * quarter), PLANES[name]((w, h), 4 * quarter)
    turned = turned.view(w, h, -1).transpose(0, 1).reshape(h * w, -1)
    if name.startswith("sine_loftr"):
        turned = turned.unflatten(1, (-1, 4))[..., blocks[name]].flatten(1)
    else:
        turned = turned.unflatten(1, (4, -1))[:, blocks.get(name, (2, 3, 0, 1))].flatten(1)
    assert torch.equal(ours, turned)


@given(
    grid=grids,
    more=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    ours=st.sampled_from([sine.sine_detr, sine.sine_deformable]),
)
def test_padding_changes_no_kept_cell(grid, more, ours):
    """An image alone, and the same image in the corner of a larger batch canvas."""
    (h, w), canvas = grid, (grid[0] + more[0], grid[1] + more[1])
    mask = torch.zeros(1, *canvas, dtype=torch.bool)
    mask[:, :h, :w] = True
    padded = ours(canvas, 16, mask)[0].view(*canvas, 16)[:h, :w].flatten(0, 1)
    torch.testing.assert_close(padded, ours(grid, 16), **EXACT)


@given(
    positions=st.lists(st.integers(0, 10**5), min_size=2, max_size=50, unique=True), name=st.sampled_from(sorted(ROWS))
)
def test_rows_follow_the_shape_of_their_positions(positions, name):
    p = torch.tensor(positions)
    pe = ROWS[name](p, 32)
    assert pe.dtype == torch.float32
    assert torch.equal(ROWS[name](p[:, None], 32), pe[:, None])
    torch.testing.assert_close(pe[:1], ROWS[name](p[:1], 32), **EXACT)
    assert len(pe.unique(dim=0)) == len(p)


# Precision and the ways of running


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_two_of_4096_positions_collide(name, dtype):
    """Integers stop being exact at 256 in bfloat16, 2048 in float16; ours meet that dtype only when cast at the end."""
    p = torch.arange(4096)
    with torch.autocast("cpu", dtype=dtype):
        pe = ROWS[name](p, 256)
    assert torch.equal(pe, ROWS[name](p, 256))
    assert len(pe.to(dtype).unique(dim=0)) == 4096
    blurred = ROWS[name](p.to(dtype), 256)
    assert len(blurred.unique(dim=0)) < 4096  # the mistake itself: the positions are cast, not the result


@pytest.mark.parametrize("name", PLANES)
def test_no_two_of_600_rows_collide_under_autocast(name):
    plain = PLANES[name]((600, 1), 128)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            pe = PLANES[name]((600, 1), 128)
        assert torch.equal(pe, plain)
        if name != "sine_loftr_legacy":  # its flat waves leave 4 of 32: even float32 rows come close
            assert len(pe.to(dtype).unique(dim=0)) == len(plain)


def test_detrs_mask_is_counted_in_float32():
    """Counted in bfloat16, as transformers does for a bfloat16 model, 600 rows are no longer 600."""
    mask = torch.ones(1, 600, 1, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pe = sine.sine_detr((600, 1), 64, mask)[0]
    assert len(pe.unique(dim=0)) == 600
    theirs = peer("detr.modeling_detr").DetrSinePositionEmbedding(32, normalize=True)
    blurred = theirs((1, 3, 600, 1), "cpu", torch.bfloat16, mask)[0].flatten(1).T
    assert len(blurred.unique(dim=0)) < 400


@pytest.mark.parametrize("name", PLANES)
def test_defaults_modes_and_devices_change_nothing(name):
    plain = PLANES[name]((5, 7), 32)
    with torch.inference_mode():
        assert torch.equal(PLANES[name]((5, 7), 32), plain)
    assert torch.equal(PLANES[name]((5, 7), 32), plain)
    for dtype in (torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            changed = PLANES[name]((5, 7), 32)
        finally:
            torch.set_default_dtype(torch.float32)
        assert changed.dtype == torch.float32
        assert torch.equal(changed, plain)
    assert PLANES[name]((5, 7), 32, device="meta").shape == plain.shape
    with torch.device("meta"):
        assert PLANES[name]((5, 7), 32).is_meta


@pytest.mark.parametrize("name", ROWS)
def test_rows_on_meta_and_in_float64(name):
    assert ROWS[name](torch.arange(5, device="meta"), 8).shape == (5, 8)
    exact = ROWS[name](torch.arange(300).double(), 64)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(ROWS[name](torch.arange(300), 64), exact.float(), atol=6e-5, rtol=0)  # 300 radians


class AddPlane(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:  # [b, dim, h, w]
        return x.flatten(2).mT.sum() + PLANES[self.name]((x.shape[2], x.shape[3]), x.shape[1], device=x.device)


class AddMasked(torch.nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        return sine.sine_detr((mask.shape[1], mask.shape[2]), 16, mask)


def inputs(h: int, w: int) -> Tensor:
    return torch.zeros(2, 16, h, w)


@traceable
@pytest.mark.parametrize("name", PLANES)
def test_one_graph_for_all_grids(name):
    """Whole-graph tracing with symbolic sizes; the slow test below also generates the code."""
    torch._dynamo.reset()
    module = AddPlane(name)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    for size in ((5, 7), (7, 5), (9, 4)):
        torch.testing.assert_close(compiled(inputs(*size)), module(inputs(*size)), **EXACT)


@traceable
@pytest.mark.parametrize("name", PLANES)
def test_exported_once_for_all_grids(name):
    dims = {2: torch.export.Dim("h", min=2, max=64), 3: torch.export.Dim("w", min=2, max=64)}
    program = torch.export.export(AddPlane(name), (inputs(5, 7),), dynamic_shapes=(dims,))
    for size in ((5, 7), (8, 3)):
        torch.testing.assert_close(program.module()(inputs(*size)), AddPlane(name)(inputs(*size)), **EXACT)


@traceable
def test_masks_and_positions_compile_and_export():
    torch._dynamo.reset()
    masks = [torch.rand(2, *size, generator=torch.Generator().manual_seed(1)) < 0.8 for size in ((5, 7), (8, 3))]
    compiled = torch.compile(AddMasked(), fullgraph=True, dynamic=True, backend="eager")
    dims = {1: torch.export.Dim("h", min=2, max=64), 2: torch.export.Dim("w", min=2, max=64)}
    program = torch.export.export(AddMasked(), (masks[0],), dynamic_shapes=(dims,)).module()
    for mask in masks:
        torch.testing.assert_close(compiled(mask), AddMasked()(mask), **EXACT)
        torch.testing.assert_close(program(mask), AddMasked()(mask), **EXACT)
    for name, made in ROWS.items():
        compiled = torch.compile(partial(made, dim=16), fullgraph=True, dynamic=True, backend="eager")
        for n in (9, 12):
            torch.testing.assert_close(compiled(torch.arange(n)), made(torch.arange(n), 16), **EXACT, msg=name)


@traceable
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANES)
def test_generated_code_gives_the_same_numbers(name):
    torch._dynamo.reset()
    module = AddPlane(name)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for size in ((5, 7), (14, 9)):
        torch.testing.assert_close(compiled(inputs(*size)), module(inputs(*size)), atol=2e-6, rtol=0)


def test_positions_are_differentiable():
    p = torch.rand(3, dtype=torch.float64, requires_grad=True)
    for made in ROWS.values():
        assert torch.autograd.gradcheck(partial(made, dim=8), (p,))


# Mistakes


@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize("dim", [0, -4, 2, 6, 7])
def test_dims_that_4_does_not_divide_are_refused(name, dim):
    with pytest.raises(ValueError, match=rf"{name}.*got {dim}"):
        PLANES[name]((3, 5), dim)


def test_width_4_has_no_end_point():
    with pytest.raises(ValueError, match=r"sine_moco.*got 4"):
        sine.sine_moco((3, 5), 4)
    with pytest.raises(ValueError, match=r"sine_tensor2tensor.*got 2"):
        sine.sine_tensor2tensor(torch.arange(3), 2)


@pytest.mark.parametrize("name", ROWS)
def test_rows_refuse_odd_dims_and_positions_that_are_not_finite(name):
    for dim in (0, -2, 7):
        with pytest.raises(ValueError, match=rf"{name}.*got {dim}"):
            ROWS[name](torch.arange(3), dim)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"positions must be finite, got {bad}"):
            ROWS[name](torch.tensor([0.0, bad]), 8)
    with pytest.raises(ValueError, match="temperature must be positive and finite, got 0"):
        ROWS[name](torch.arange(3), 8, temperature=0.0)


@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize("grid", [(0, 3), (3, 0), (-1, 2)])
def test_empty_grids_are_refused(name, grid):
    with pytest.raises(ValueError, match=r"grid must be \(h, w\).*got \(" + str(grid[0])):
        PLANES[name](grid, 16)


@pytest.mark.parametrize("ours", [sine.sine_detr, sine.sine_deformable])
def test_masks_of_another_grid_are_refused(ours):
    with pytest.raises(ValueError, match=r"got \(1, 5, 3\)"):
        ours((3, 5), 16, torch.ones(1, 5, 3, dtype=torch.bool))
    with pytest.raises((ValueError, TypeCheckError), match=r"float32|f32"):
        ours((3, 5), 16, torch.ones(1, 3, 5))
    with pytest.raises(ValueError, match="temperature must be positive and finite, got -1"):
        ours((3, 5), 16, temperature=-1.0)


def test_videos_refuse_no_frames_and_other_masks():
    with pytest.raises(ValueError, match="got 0"):
        sine.sine_mask2former_video(0, (3, 5), 16)
    with pytest.raises(ValueError, match=r"got \(1, 3, 2, 5\)"):
        sine.sine_mask2former_video(2, (3, 5), 16, torch.ones(1, 3, 2, 5, dtype=torch.bool))
