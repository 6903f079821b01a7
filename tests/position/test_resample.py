"""Resampling: every recipe against the code it is named after, and the facts that make the recipes differ."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.resample import (
    RECIPES,
    ResampleRecipe,
    axis_matrix,
    patch_grid,
    resample,
    resample_bias,
    resample_cells,
    resample_entry,
    resample_line,
    resize_patch_kernel,
    square_grid,
)

SIZES = [((14, 14), (24, 24)), ((37, 37), (16, 16)), ((7, 9), (12, 5)), ((8, 18), (16, 16)), ((5, 11), (11, 5))]
SQUARE = [((14, 14), (24, 24)), ((14, 14), (9, 9)), ((16, 16), (16, 16))]
ODD = [((13, 13), (27, 27)), ((27, 27), (13, 13)), ((7, 9), (9, 7)), ((5, 11), (13, 3)), ((1, 3), (3, 1))]
CALLS = {  # the reference calls, written out a second time: mode, antialias, align_corners
    "timm": ("bicubic", True, False),
    "mae": ("bicubic", False, False),
    "dinov2_reg": ("bicubic", True, False),
    "torchvision": ("bicubic", False, True),
    "jax_vit": ("bilinear", False, True),
    "flexivit": ("bilinear", True, False),
    "pe": ("bilinear", False, False),
    "qwen3vl": ("bilinear", False, True),
    "swin_bias": ("bicubic", False, False),
    "sam_relpos": ("bilinear", False, False),
}


def a_table(source: tuple[int, int], prefix: int = 0, width: int = 16) -> torch.Tensor:
    return torch.randn(prefix + source[0] * source[1], width, generator=torch.Generator().manual_seed(source[0]))


def as_image(table: torch.Tensor, source: tuple[int, int]) -> torch.Tensor:
    return table.T.reshape(1, -1, *source)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Equal to ``tolerance`` of the table's largest value."""
    assert got.shape == wanted.shape
    scale = float(wanted.detach().abs().max())
    torch.testing.assert_close(got, wanted, atol=tolerance * scale, rtol=0)


def test_the_recipes_of_the_issue_are_there():
    wanted = "timm mae dinov2 dinov2_reg torchvision jax_vit flexivit pe qwen3vl swin_bias sam_relpos beit_geo"
    assert list(RECIPES) == wanted.split()
    assert set(CALLS) == set(RECIPES) - {"dinov2", "beit_geo"}


@pytest.mark.parametrize(("source", "target"), SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_the_reference_call(name, source, target):
    mode, antialias, align_corners = CALLS[name]
    table = a_table(source)
    image = F.interpolate(
        as_image(table, source), size=target, mode=mode, antialias=antialias, align_corners=align_corners
    )
    close(resample(table, source, target, RECIPES[name]), image[0].flatten(1).T)


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_the_dinov2_hub_call(source, target):
    table, scale = a_table(source), [(t + 0.1) / s for s, t in zip(source, target, strict=True)]
    image = F.interpolate(as_image(table, source), scale_factor=scale, mode="bicubic", antialias=False)
    assert image.shape[-2:] == target
    close(resample(table, source, target, RECIPES["dinov2"]), image[0].flatten(1).T)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize(("source", "target"), SIZES)
def test_timm_tables(source, target, prefix):
    layers = pytest.importorskip("timm.layers", reason="timm is the peer")
    table = a_table(source, prefix)
    wanted = layers.resample_abs_pos_embed(table[None], list(target), list(source), num_prefix_tokens=prefix)
    got = resample(table[None], source, target, RECIPES["timm"], prefix)
    close(got, wanted)
    assert torch.equal(got[:, :prefix], table[None, :prefix])


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_timm_channels_last(source, target):
    layers = pytest.importorskip("timm.layers", reason="timm is the peer")
    cells = a_table(source).unflatten(0, source)[None]
    close(resample_cells(cells, target, RECIPES["timm"]), layers.resample_abs_pos_embed_nhwc(cells, list(target)))


@pytest.mark.parametrize(
    ("module", "embeddings", "config", "recipe"),
    [
        ("vit", "ViTEmbeddings", "ViTConfig", "mae"),
        ("dinov2", "Dinov2Embeddings", "Dinov2Config", "mae"),  # not the hub's offset: transformers gives the size
        ("dinov2_with_registers", "Dinov2WithRegistersEmbeddings", "Dinov2WithRegistersConfig", "dinov2_reg"),
        ("swin", "SwinEmbeddings", "SwinConfig", "mae"),
        ("beit", "BeitEmbeddings", "BeitConfig", "mae"),
    ],
)
def test_transformers_tables(module, embeddings, config, recipe):
    models = pytest.importorskip("transformers.models", reason="transformers is the peer")
    peer = __import__(f"{models.__name__}.{module}.modeling_{module}", fromlist=["x"])
    options = {"image_size": 56, "patch_size": 4}
    options |= (
        {"embed_dim": 16, "use_absolute_embeddings": True}
        if module == "swin"
        else {"hidden_size": 16, "num_attention_heads": 2, "use_absolute_position_embeddings": True}
    )
    spec = getattr(__import__(f"{models.__name__}.{module}", fromlist=["x"]), config)(**options)
    theirs = getattr(peer, embeddings)(spec)
    prefix = theirs.position_embeddings.shape[1] - 14 * 14
    assert prefix == (0 if module == "swin" else 1)
    torch.nn.init.normal_(theirs.position_embeddings, std=0.02)
    for target in [(14, 14), (24, 24), (9, 20), (20, 9), (28, 7)]:  # the last has the source's count
        tokens = torch.zeros(1, prefix + target[0] * target[1], 16)
        wanted = theirs.interpolate_pos_encoding(tokens, 4 * target[0], 4 * target[1])
        close(resample(theirs.position_embeddings, (14, 14), target, RECIPES[recipe], prefix), wanted)


def test_transformers_siglip2():
    peer = pytest.importorskip("transformers.models.siglip2.modeling_siglip2", reason="transformers is the peer")
    cells, targets = torch.randn(16, 16, 8), [(16, 16), (7, 20), (30, 8), (5, 5)]
    theirs = peer.Siglip2VisionEmbeddings.resize_positional_embeddings(cells, torch.tensor(targets), max_length=256)
    for target, wanted in zip(targets, theirs, strict=True):
        got = resample(cells.flatten(0, 1), (16, 16), target, RECIPES["flexivit"])
        close(got, wanted[: target[0] * target[1]], 2e-6)  # theirs writes the kernel out: at float32's rounding


@pytest.mark.parametrize("target", [(12, 20), (7, 5), (1, 3), (48, 48), (60, 50)])
def test_transformers_qwen3vl(target):
    vision = pytest.importorskip("transformers.vision_utils", reason="transformers is the peer")
    table = torch.randn(48 * 48, 8)
    grid = torch.tensor([[1, *target]])
    taps, weights = vision.get_vision_interpolation_indices_and_weights(grid, 48, "bilinear", align_corners=True)
    wanted = (table[taps] * weights[..., None]).sum(1)
    close(resample(table, (48, 48), target, RECIPES["qwen3vl"]), wanted, 1e-5)  # both round a place up to 47 in float32


@pytest.mark.parametrize(("queries", "keys"), [(14, 14), (20, 20), (7, 7), (10, 5), (5, 10)])
def test_transformers_sam(queries, keys):
    peer = pytest.importorskip("transformers.models.sam.modeling_sam", reason="transformers is the peer")
    table = torch.randn(27, 8)
    far = 2 * max(queries, keys) - 1
    line = resample_line(table, far, RECIPES["sam_relpos"])
    q = torch.arange(queries)[:, None] * max(keys / queries, 1.0)
    k = torch.arange(keys)[None] * max(queries / keys, 1.0)
    index = (q - k + (keys - 1) * max(queries / keys, 1.0)).long()
    close(line[index], peer.SamVisionAttention.get_rel_pos(None, queries, keys, table))


def test_transformers_beit_bias_is_bilinear():
    """The last three rows stay; square windows only, for theirs swaps height and width of the source."""
    peer = pytest.importorskip("transformers.models.beit.modeling_beit", reason="transformers is the peer")
    from transformers import BeitConfig

    theirs = peer.BeitRelativePositionBias(BeitConfig(image_size=56, patch_size=8, num_attention_heads=3))
    torch.nn.init.normal_(theirs.relative_position_bias_table)
    for window in [(7, 7), (9, 5), (5, 9)]:
        table = resample_bias(theirs.relative_position_bias_table, (7, 7), window, RECIPES["pe"], extra=3)
        n = window[0] * window[1] + 1
        index = theirs.generate_relative_position_index(window)
        wanted = theirs(window)[0]
        close(table[index.flatten()].view(n, n, -1).permute(2, 0, 1), wanted)


@pytest.mark.parametrize(("source", "target"), SQUARE)
def test_torchvision(source, target):
    vit = pytest.importorskip("torchvision.models.vision_transformer", reason="torchvision is the peer")
    table = a_table(source, 1)
    state = vit.interpolate_embeddings(16 * target[0], 16, {"encoder.pos_embedding": table[None].clone()})
    close(resample(table[None], source, target, RECIPES["torchvision"], 1), state["encoder.pos_embedding"])


@pytest.mark.parametrize(("source", "target"), [*SIZES, ((1, 3), (4, 7))])
def test_jax_vit_is_scipy_zoom(source, target):
    ndimage = pytest.importorskip("scipy.ndimage", reason="scipy is the peer")
    table = a_table(source)
    zoom = (*(t / s for s, t in zip(source, target, strict=True)), 1)
    wanted = torch.from_numpy(ndimage.zoom(table.double().unflatten(0, source).numpy(), zoom, order=1))
    got = resample(table.double(), source, target, RECIPES["jax_vit"])
    if 1 in source:  # scipy keeps the one row; so do we
        assert torch.equal(got.unflatten(0, target)[0], got.unflatten(0, target)[-1])
    close(got, wanted.flatten(0, 1))


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("windows", [((7, 7), (12, 12)), ((12, 12), (7, 7)), ((7, 7), (6, 9))])
def test_swin_bias_is_timm_simple(windows, extra):
    peer = pytest.importorskip("timm.layers.pos_embed_rel", reason="timm is the peer")
    source, target = windows
    table = torch.randn((2 * source[0] - 1) * (2 * source[1] - 1) + extra, 3)
    rows = (2 * target[0] - 1) * (2 * target[1] - 1) + extra
    wanted = peer.resize_rel_pos_bias_table_simple(table, target, (rows, 3))
    close(resample_bias(table, source, target, RECIPES["swin_bias"], extra), wanted)


@pytest.mark.parametrize("target", [9, 30])
def test_levit_bias_is_timm_levit(target):
    """TinyViT's table has one row per cell, not per difference, and is antialiased."""
    layers = pytest.importorskip("timm.layers", reason="timm is the peer")
    table = torch.randn(14 * 14, 4)
    wanted = layers.resize_rel_pos_bias_table_levit(table, (target * target, 4))
    close(resample(table, (14, 14), (target, target), RECIPES["timm"]), wanted)


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize(
    "windows", [((14, 14), (24, 24)), ((24, 24), (14, 14)), ((7, 9), (9, 7)), ((1, 4), (5, 2)), ((2, 2), (3, 1))]
)
def test_beit_geo_is_timm(windows, extra):
    layers = pytest.importorskip("timm.layers", reason="timm is the peer")
    source, target = windows
    table = torch.randn((2 * source[0] - 1) * (2 * source[1] - 1) + extra, 3)
    rows = (2 * target[0] - 1) * (2 * target[1] - 1) + extra
    wanted = layers.resize_rel_pos_bias_table(table, target, (rows, 3), source)
    close(resample_bias(table, source, target, RECIPES["beit_geo"], extra), wanted, 2e-6)


@pytest.mark.parametrize("name", ["timm", "mae", "pe", "flexivit"])
@pytest.mark.parametrize(("old", "new"), [((16, 16), (8, 8)), ((16, 16), (24, 24)), ((8, 16), (14, 10))])
def test_patch_kernels_are_timms(name, old, new):
    layers = pytest.importorskip("timm.layers", reason="timm is the peer")
    mode, antialias, _ = CALLS[name]
    kernel = torch.randn(6, 3, *old)
    wanted = layers.resample_patch_embed(kernel, list(new), interpolation=mode, antialias=antialias)
    got = resize_patch_kernel(kernel, new, RECIPES[name])
    close(got, wanted, 5e-6)  # theirs inverts a [256, 64] matrix in float32
    both = [axis_matrix(RECIPES[name], o, n, dtype=torch.float64) for o, n in zip(old, new, strict=True)]
    exact = torch.linalg.pinv(torch.kron(*both))  # one [old cells, new cells] inverse, as in the paper
    close(got.double(), (kernel.double().flatten(2) @ exact).unflatten(2, new), 1e-6)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "beit_geo"])  # differences are no patch
def test_a_grown_patch_keeps_its_embedding(name):
    """What PI-resize is for: <x, w> = <B x, w'> for every patch when B grows it."""
    x, w = torch.randn(2, 1, 1, 8, 6).double()
    grown = resample_cells(x[0, 0, ..., None], (16, 18), RECIPES[name])[..., 0]
    kernel = resize_patch_kernel(w, (16, 18), RECIPES[name])[0, 0]
    assert float((grown * kernel).sum()) == pytest.approx(float((x * w).sum()), rel=1e-5)


# --- facts -----------------------------------------------------------------------------------------------------------


def keys_kernel(distance: float, a: float) -> float:
    """Keys' cubic convolution kernel."""
    d = abs(distance)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


@pytest.mark.parametrize(("name", "a"), [("mae", -0.75), ("torchvision", -0.75), ("timm", -0.5), ("dinov2_reg", -0.5)])
def test_bicubic_sharpness_read_off_an_impulse(name, a):
    """9 -> 36, an impulse at row 4: output i lies at (i + 0.5)/4 - 0.5 (or at 8i/35 with the corners aligned)."""
    column = axis_matrix(RECIPES[name], 9, 36)[:, 4]
    for i, value in enumerate(column.tolist()):
        at = i * 8 / 35 if RECIPES[name].align_corners else (i + 0.5) / 4 - 0.5
        if 2 <= at <= 6:  # inside, no edge row repeats
            assert value == pytest.approx(keys_kernel(at - 4, a), abs=2e-6)
    other = {-0.75: -0.5, -0.5: -0.75}[a]
    at = [(i * 8 / 35 if RECIPES[name].align_corners else (i + 0.5) / 4 - 0.5) for i in range(36)]
    assert max(abs(v - keys_kernel(x - 4, other)) for v, x in zip(column.tolist(), at, strict=True)) > 0.02


def test_antialiasing_changes_a_growing_bicubic_but_not_a_growing_bilinear():
    """Random tables differ by about 8 % from 14 to 24 (reference/encodings.md 3.2); bilinear not at all."""
    table = a_table((14, 14), width=64)
    aa, plain, linear_aa, linear = (
        resample(table, (14, 14), (24, 24), RECIPES[name]) for name in ("timm", "mae", "flexivit", "pe")
    )
    assert float((aa - plain).norm() / plain.norm()) == pytest.approx(0.08, abs=0.02)
    close(linear_aa, linear)


def test_the_offset_is_not_the_size():
    """37 -> 16: about 30 % apart on a random table (reference/encodings.md 3.2), and the offset's scale is finer."""
    table = a_table((37, 37), width=64)
    offset, size = (resample(table, (37, 37), (16, 16), RECIPES[name]) for name in ("dinov2", "mae"))
    assert float((offset - size).norm() / size.norm()) == pytest.approx(0.30, abs=0.03)


LOST = {14: [61, 115, 122], 27: [61, 111, 117, 122, 127], 37: [39, 43, 78, 86, 115, 123, 156, 172, 193]}


@pytest.mark.parametrize("side", LOST)
def test_a_scale_without_offset_loses_a_row_at_these_sizes(side):
    """F.interpolate floors side * (n/side); dinov2's 0.1 was added for it (dinov2 PR 378). Ours gives n rows always."""
    line = torch.zeros(1, 1, side)
    lost = [n for n in range(1, 200) if F.interpolate(line, scale_factor=n / side, mode="linear").shape[-1] != n]
    assert lost == LOST[side]
    kept = [
        n for n in range(1, 400) if F.interpolate(line, scale_factor=(n + 0.1) / side, mode="linear").shape[-1] == n
    ]
    assert kept == list(range(1, 400))
    for n in lost:
        assert axis_matrix(RECIPES["dinov2"], side, n).shape == (n, side)


@pytest.mark.parametrize("name", RECIPES)
def test_equal_grids_are_the_identity_and_equal_counts_are_not(name):
    table = a_table((3, 5), 1)
    assert resample(table, (3, 5), (3, 5), RECIPES[name], 1) is table
    turned = resample(table, (3, 5), (5, 3), RECIPES[name], 1)
    assert turned.shape == table.shape
    assert not torch.allclose(turned, table, atol=0.1)


def test_rows_stay_rows():
    """A table of its row number, non-square: every output row is constant and rises downwards."""
    table = torch.arange(4.0).repeat_interleave(6)[:, None]
    moved = resample(table, (4, 6), (7, 3), RECIPES["pe"]).unflatten(0, (7, 3))[..., 0]
    assert torch.equal(moved, moved[:, :1].expand(-1, 3))
    assert torch.all(moved[1:, 0] > moved[:-1, 0])


# --- properties ------------------------------------------------------------------------------------------------------

SIDES = st.integers(1, 24)
NAMES = st.sampled_from(sorted(RECIPES))


@given(name=NAMES, source=SIDES, target=SIDES)
def test_rows_of_every_matrix_sum_to_one(name, source, target):
    """A constant table stays constant, whatever the recipe."""
    if name == "beit_geo":
        source, target = 2 * source - 1, 2 * target - 1
    matrix = axis_matrix(RECIPES[name], source, target)
    assert matrix.shape == (target, source)
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix.sum(1), torch.ones(target), atol=2e-6, rtol=0)


@given(name=NAMES, source=SIDES, target=SIDES)
def test_the_middle_has_no_direction(name, source, target):
    """Turning the table round turns the result round; the offset alone breaks this symmetry."""
    if name == "beit_geo":
        source, target = 2 * source - 1, 2 * target - 1
    matrix = axis_matrix(RECIPES[name], source, target, dtype=torch.float64)
    if name == "dinov2":
        assert source < 3 or not torch.allclose(matrix, matrix.flip(0, 1), atol=1e-4)
        return
    if RECIPES[name].align_corners and target == 1:  # the one cell is the first corner, not the middle
        assert torch.equal(matrix[0], torch.eye(source, dtype=torch.float64)[0])
        return
    torch.testing.assert_close(matrix, matrix.flip(0, 1), atol=1e-5, rtol=0)


@given(
    name=NAMES.filter(lambda name: name != "beit_geo"),
    source=st.tuples(SIDES, SIDES),
    target=st.tuples(SIDES, SIDES),
    prefix=st.sampled_from([0, 1, 2, 5]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_shape_dtype_prefix_and_order_of_axes(name, source, target, prefix, dtype):
    table = a_table(source, prefix, 4).to(dtype)
    got = resample(table, source, target, RECIPES[name], prefix)
    assert got.shape == (prefix + target[0] * target[1], 4)
    assert got.dtype == dtype
    assert torch.equal(got[:prefix], table[:prefix])
    turned = table[prefix:].unflatten(0, source).transpose(0, 1).flatten(0, 1)
    swapped = resample(turned, source[::-1], target[::-1], RECIPES[name]).unflatten(0, target[::-1])
    close(
        swapped.transpose(0, 1).flatten(0, 1).double(),
        got[prefix:].double(),
        1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps + 1e-6,
    )


# --- numbers, devices, compilers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_half_tables_are_the_float32_numbers_cast_once(name, dtype):
    table = a_table((7, 9), 1).to(dtype)
    wanted = resample(table.float(), (7, 9), (13, 5), RECIPES[name], 1)
    got = resample(table, (7, 9), (13, 5), RECIPES[name], 1)
    assert torch.equal(got, wanted.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resample(table, (7, 9), (13, 5), RECIPES[name], 1), got)
        assert torch.equal(resample(table.float(), (7, 9), (13, 5), RECIPES[name], 1), wanted)
        kernel = torch.randn(2, 3, 7, 9)
        inside = resize_patch_kernel(kernel, (9, 7), RECIPES[name])
    assert torch.equal(inside, resize_patch_kernel(kernel, (9, 7), RECIPES[name]))


@pytest.mark.parametrize("name", RECIPES)
def test_meta_inference_and_gradients(name):
    recipe = RECIPES[name]
    assert resample(torch.zeros(64, 4, device="meta"), (7, 9), (5, 11), recipe, 1).shape == (56, 4)
    table = a_table((3, 5), 1, 2).double().requires_grad_()
    with torch.inference_mode():
        inside = resample(table, (3, 5), (5, 7), recipe, 1)
    assert torch.equal(inside, resample(table, (3, 5), (5, 7), recipe, 1))
    assert torch.autograd.gradcheck(lambda t: resample(t, (3, 5), (5, 7), recipe, 1), table)


def test_leading_axes_are_batched():
    tables = torch.randn(2, 3, 1 + 7 * 9, 4)
    got = resample(tables, (7, 9), (5, 4), RECIPES["timm"], 1)
    for i, j in itertools.product(range(2), range(3)):
        close(got[i, j], resample(tables[i, j], (7, 9), (5, 4), RECIPES["timm"], 1))


class Added(torch.nn.Module):
    """A model that adds its table at whatever size the image has; the bias recipes go by windows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, bias = name, name in ("beit_geo", "swin_bias")
        self.table = torch.nn.Parameter(torch.randn(5 * 7 + 3 if bias else 1 + 3 * 4, 4))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        grid = image.shape[-2], image.shape[-1]
        if self.name in ("beit_geo", "swin_bias"):
            return resample_bias(self.table, (3, 4), grid, RECIPES[self.name], extra=3)
        return resample(self.table, (3, 4), grid, RECIPES[self.name], 1)


GRIDS = [(5, 6), (4, 3), (8, 8), (2, 9), (3, 4), (7, 2)]  # the fifth is the table's own


@pytest.mark.slow
@pytest.mark.usefixtures("compilable")
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_once_for_all_sizes_forward_and_backward(name):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs)

    model = Added(name)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=backend)
    for grid in GRIDS:
        image = torch.zeros(*grid)
        weight = torch.randn_like(model(image))
        (wanted,) = torch.autograd.grad((model(image) * weight).sum(), model.table)
        got = compiled(image)
        (gradient,) = torch.autograd.grad((got * weight).sum(), model.table)
        close(got, model(image), 2e-6)  # inductor writes the plain kernels out and fuses: another rounding
        close(gradient, wanted, 2e-6)
    assert 1 <= len(graphs) <= 4, len(graphs)  # general, h = w, equal grid; never one for every size


@pytest.mark.parametrize("name", RECIPES)
def test_exported_once_for_all_sizes(name):
    model, side = Added(name), torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (torch.zeros(5, 6),), dynamic_shapes=({0: side, 1: side},)).module()
    for grid in GRIDS:
        close(program(torch.zeros(*grid)), model(torch.zeros(*grid)))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_onnx_runtime_gives_the_same_table(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the exported file")
    pytest.importorskip("onnxscript", reason="onnxscript writes it")
    model = Added(name).eval()
    program = torch.onnx.export(model, (torch.zeros(5, 6),), dynamic_shapes=({0: "h", 1: "w"},), dynamo=True)
    program.save(tmp_path / "table.onnx")
    session = runtime.InferenceSession(tmp_path / "table.onnx")
    for grid in GRIDS:
        (got,) = session.run(None, {session.get_inputs()[0].name: torch.zeros(*grid).numpy()})
        close(torch.from_numpy(got), model(torch.zeros(*grid)).detach(), 5e-6)


# --- loading and refusals --------------------------------------------------------------------------------------------


def test_a_loaded_table_says_what_was_done():
    state = {"pos_embed": a_table((7, 9), 1)[None], "other": torch.zeros(1)}
    new, said = resample_entry(state, "pos_embed", (7, 9), (5, 4), RECIPES["timm"], 1)
    close(new["pos_embed"], resample(state["pos_embed"], (7, 9), (5, 4), RECIPES["timm"], 1))
    assert new["other"] is state["other"]
    assert state["pos_embed"].shape == (1, 64, 16)
    for part in ("pos_embed", "(7, 9) -> (5, 4)", "(1, 64, 16) -> (1, 21, 16)", "1 prefix", "timm"):
        assert part in said
    same, said = resample_entry(state, "pos_embed", (7, 9), (7, 9), RECIPES["timm"], 1)
    assert same["pos_embed"] is state["pos_embed"]
    assert "kept" in said
    with pytest.raises(ValueError, match=r"pos_embed: .*64 rows.*2 prefix"):
        resample_entry(state, "pos_embed", (7, 9), (5, 4), RECIPES["timm"], 2)
    with pytest.raises(ValueError, match="pos_table"):
        resample_entry(state, "pos_table", (7, 9), (5, 4), RECIPES["timm"], 1)


def test_wrong_grids_are_refused_with_their_values():
    table, recipe = torch.zeros(145, 4), RECIPES["timm"]
    with pytest.raises(ValueError, match=r"145 rows.*1 prefix.*\(8, 17\)"):
        resample(table, (8, 17), (16, 16), recipe, 1)
    with pytest.raises(ValueError, match=r"145 rows.*0 prefix.*\(8, 18\)"):
        resample(table, (8, 18), (16, 16), recipe)
    with pytest.raises(ValueError, match=r"target.*\(0, 4\)"):
        resample(table, (8, 18), (0, 4), recipe, 1)
    with pytest.raises(ValueError, match=r"source.*\(-8, -18\)"):
        resample(table, (-8, -18), (4, 4), recipe, 1)
    with pytest.raises(ValueError, match="-1 prefix"):
        resample(torch.zeros(143, 4), (8, 18), (4, 4), recipe, -1)
    with pytest.raises(ValueError, match=r"bias table of 145 rows.*3 for window.*\(7, 7\)"):
        resample_bias(table, (7, 7), (8, 8), RECIPES["swin_bias"], 3)
    with pytest.raises(ValueError, match=r"odd.*14 -> 13"):
        resample(torch.zeros(14 * 13, 2), (14, 13), (13, 13), RECIPES["beit_geo"])


def test_a_square_is_stated_never_guessed():
    assert square_grid(197, 1) == (14, 14)
    assert square_grid(1 + 4 + 37 * 37, 5) == (37, 37)
    for tokens, prefix in [(198, 1), (197, 0), (1, 1), (0, 0), (5, 7), (3, 0)]:
        with pytest.raises(ValueError, match=f"{tokens} tokens.*{prefix} prefix"):
            square_grid(tokens, prefix)
    assert square_grid(144) == (12, 12)  # what a table of 8 x 18 would become: why tables carry their grid


def test_patches_must_divide_the_image():
    assert patch_grid((224, 448), (16, 14)) == (14, 32)
    with pytest.raises(ValueError, match=r"\(224, 450\).*\(14, 14\)"):
        patch_grid((224, 450), (14, 14))
    with pytest.raises(ValueError, match=r"patch size.*\(0, 14\)"):
        patch_grid((224, 448), (0, 14))


def test_a_recipe_is_data():
    recipe = ResampleRecipe(kernel="linear", source="mine")
    assert dataclasses.asdict(recipe)["antialias"] is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.kernel = "cubic"  # type: ignore[misc]
    with pytest.raises((ValueError, TypeError), match="nearest"):  # a TypeError where annotations are enforced
        ResampleRecipe(kernel="nearest", source="mine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0\.1"):
        ResampleRecipe(kernel="linear", offset=0.1, source="mine")
    with pytest.raises(ValueError, match="antialias"):
        ResampleRecipe(kernel="cubic", antialias=True, align_corners=True, source="mine")
