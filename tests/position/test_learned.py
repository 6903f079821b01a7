"""Learned tables: against the modules they are named after, at grids of every shape, and what they refuse."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.learned import (
    ContentQueries,
    FactorisedTable,
    GridTable,
    LevelEmbedding,
    NaViTAbsolute,
    NaViTFractional,
    ObjectQueries,
    RowColumnTable,
    WindowedTable,
    fractional_bins,
    split_queries,
)
from vispe.position.parameters import positional_parameters
from vispe.position.resample import RECIPES, resample, resample_entry

TIMM = RECIPES["timm"]


@pytest.mark.parametrize("grid", [(14, 14), (24, 24), (9, 20), (28, 7)])
@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
def test_grid_table_is_timms(grid, prefix):
    layers = pytest.importorskip("timm.layers", reason="timm is the peer")
    table = GridTable((14, 14), 8, prefix)
    wanted = layers.resample_abs_pos_embed(table.weight[None], list(grid), [14, 14], num_prefix_tokens=prefix)[0]
    torch.testing.assert_close(table(grid, TIMM), wanted, atol=1e-6 * float(wanted.detach().abs().max()), rtol=0)
    assert torch.equal(table(grid, TIMM)[:prefix], table.weight[:prefix])


def test_grid_table_gives_its_parameter_at_its_own_grid_only():
    table = GridTable((3, 4), 2)
    assert table((3, 4), TIMM) is table.weight
    assert not torch.allclose(table((4, 3), TIMM), table.weight, atol=1e-4)
    assert table.grid == (3, 4)
    assert "grid=(3, 4), width=2, prefix=1" in repr(table)


def test_vit_adds_the_same_table():
    """transformers' ViT, patches and all: the table is what its embeddings add to zero patches."""
    vit = pytest.importorskip("transformers.models.vit.modeling_vit", reason="transformers is the peer")
    from transformers import ViTConfig

    config = ViTConfig(hidden_size=8, num_attention_heads=2, image_size=32, patch_size=8, hidden_dropout_prob=0.0)
    theirs, ours = vit.ViTEmbeddings(config).eval(), GridTable((4, 4), 8)
    for parameter in theirs.parameters():
        torch.nn.init.zeros_(parameter)
    theirs.position_embeddings.data.copy_(ours.weight)
    for h, w in [(4, 4), (6, 3), (2, 8)]:
        wanted = theirs(torch.zeros(1, 3, 8 * h, 8 * w), interpolate_pos_encoding=True)[0]
        torch.testing.assert_close(ours((h, w), RECIPES["mae"]), wanted, atol=1e-7, rtol=0)


@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (50, 50), (1, 1)])
def test_row_and_column_are_detrs_x_first(grid):
    detr = pytest.importorskip("transformers.models.detr.modeling_detr", reason="transformers is the peer")
    theirs, ours = detr.DetrLearnedPositionEmbedding(4), RowColumnTable(8)
    ours.load_state_dict({"row": theirs.row_embeddings.weight, "column": theirs.column_embeddings.weight})
    wanted = theirs(torch.Size((1, 8, *grid)), torch.device("cpu"), torch.float32)
    assert torch.equal(ours(grid), wanted[0].flatten(1).T)


def test_row_and_column_by_hand():
    table = RowColumnTable(4, (2, 3))
    table.load_state_dict({"row": torch.tensor([[10.0] * 2, [20.0] * 2]), "column": torch.arange(6.0).view(3, 2)})
    assert table((2, 3))[:, 0].tolist() == [0, 2, 4, 0, 2, 4]  # x first, row-major
    assert table((2, 3))[:, 3].tolist() == [10, 10, 10, 20, 20, 20]
    fresh = torch.cat([p.flatten() for p in RowColumnTable(64).parameters()])
    assert 0 <= fresh.min() < 0.01 < 0.99 < fresh.max() < 1  # uniform, as in DETR


@pytest.mark.parametrize("build", [RowColumnTable, lambda n, limit: NaViTAbsolute(limit, n)])
@pytest.mark.parametrize("grid", [(51, 10), (10, 84)])
def test_a_grid_beyond_the_table_is_refused_with_the_limit(build, grid):
    table = build(8, (50, 50))
    with pytest.raises(ValueError, match=rf"\({grid[0]}, {grid[1]}\).*\(50, 50\)"):
        table(grid)


@given(h=st.integers(1, 6), w=st.integers(1, 9))
def test_navit_absolute_sums_the_rows_of_its_index(h, w):
    """vit-pytorch's na_vit: pos_embed_height[h] + pos_embed_width[w]."""
    table = NaViTAbsolute((6, 9), 4)
    wanted = torch.stack([table.row[y] + table.column[x] for y in range(h) for x in range(w)])
    assert torch.equal(table((h, w)), wanted)
    cells = torch.tensor([(y, x) for y in range(h) for x in range(w)])
    assert torch.equal(table.at(cells), wanted)
    assert torch.equal(table.at(cells.flip(0)[None]), wanted.flip(0)[None])


@pytest.mark.parametrize("grid", [(8, 16), (4, 2), (16, 16), (32, 8)])
def test_navit_fractional_bins_are_idefics2s(grid):
    """Powers of two, where Idefics 2's float fractions are exact: row by row its table, read through ids."""
    peer = pytest.importorskip("transformers.models.idefics2.modeling_idefics2", reason="transformers is the peer")
    from transformers import Idefics2VisionConfig

    theirs = peer.Idefics2VisionEmbeddings(
        Idefics2VisionConfig(hidden_size=16, num_attention_heads=2, image_size=64, patch_size=4)
    )
    ours = NaViTFractional((16, 16), 16)
    torch.nn.init.zeros_(theirs.patch_embedding.weight)
    torch.nn.init.zeros_(theirs.patch_embedding.bias)
    summed = (ours.row[:, None] + ours.column).flatten(0, 1)
    theirs.position_embedding.weight.data.copy_(summed)
    wanted = theirs(torch.zeros(1, 3, 4 * grid[0], 4 * grid[1]), torch.ones(1, *grid, dtype=torch.bool))[0]
    assert torch.equal(ours(grid), wanted)


@given(n=st.integers(1, 300), bins=st.integers(1, 80))
def test_fractional_bins_are_exact_and_in_order(n, bins):
    from fractions import Fraction

    got = fractional_bins(n, bins)
    assert got.tolist() == [int(Fraction(i, n) * bins) for i in range(n)]
    assert 0 <= int(got.min()) <= int(got.max()) < bins


def test_float_fractions_miss_a_bins_edge():
    """Why bins are integers: 1/49 * 49 stops below one in float, so a cell would be given its neighbour's row."""
    fractions = torch.arange(49, dtype=torch.float32) * (1.0 / torch.tensor(49.0))
    by_float = (fractions * 49).floor().long()
    assert not torch.equal(by_float, torch.arange(49))
    assert torch.equal(fractional_bins(49, 49), torch.arange(49))


@pytest.mark.parametrize("grid", [(7, 9), (12, 5), (3, 20)])
def test_factorised_is_timms_naflex(grid):
    naflex = pytest.importorskip("timm.models.naflexvit", reason="timm is the peer")
    theirs = naflex.NaFlexEmbeds(4, embed_dim=8, pos_embed="factorized", pos_embed_grid_size=(7, 9), class_token=False)
    ours = FactorisedTable((7, 9), 8)
    ours.load_state_dict({"row": theirs.pos_embed_y[0], "column": theirs.pos_embed_x[0]})
    wanted = torch.zeros(1, grid[0] * grid[1], 8)
    with torch.no_grad():
        theirs._apply_factorized_pos_embed(wanted, list(grid))
    torch.testing.assert_close(ours(grid, RECIPES["pe"]), wanted[0], atol=1e-7, rtol=0)


@pytest.mark.parametrize("grid", [(8, 8), (16, 24), (64, 8)])
def test_windowed_is_sam2s_hiera(grid):
    sam2 = pytest.importorskip("transformers.models.sam2.modeling_sam2", reason="transformers is the peer")
    ours = WindowedTable((7, 5), (8, 8), 4)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    class Theirs:
        pos_embed = ours.background.permute(2, 0, 1)[None]
        pos_embed_window = ours.window.permute(2, 0, 1)[None]

    wanted = sam2.Sam2HieraDetModel._get_pos_embed(Theirs(), grid)[0].flatten(0, 1)
    torch.testing.assert_close(ours(grid, RECIPES["mae"]), wanted, atol=1e-7, rtol=0)
    with pytest.raises(ValueError, match=r"\(118, 120\).*\(8, 8\)"):
        ours((118, 120), RECIPES["mae"])


def test_queries_are_a_position_and_a_zero_content_as_in_detr():
    queries = ObjectQueries(5, 3)
    content, position = queries(2)
    assert torch.equal(content, torch.zeros(2, 5, 3))
    assert torch.equal(position[1], queries.position)
    both = ContentQueries(5, 3)
    content, position = both(2)
    assert torch.equal(content[0], both.content)
    assert torch.equal(position[0], both.position)
    assert not torch.equal(content, position)


def test_queries_start_as_detrs_embedding():
    torch.manual_seed(0)
    ours = ObjectQueries(300, 256).position
    assert float(ours.detach().std()) == pytest.approx(1.0, rel=0.02)  # nn.Embedding's N(0, 1)


def test_one_table_of_queries_splits_position_first_as_deformable_detr():
    """A Deformable DETR with a recording decoder: which half of ``query_position_embeddings`` went where."""
    peer = pytest.importorskip("transformers.models.deformable_detr.modeling_deformable_detr", reason="the peer")
    from transformers import DeformableDetrConfig, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"]
    )
    config = DeformableDetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        num_queries=3,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    model, seen = peer.DeformableDetrModel(config).eval(), {}
    model.decoder.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(torch.zeros(1, 3, 128, 192))
    content, position = split_queries(model.query_position_embeddings.weight)
    assert torch.equal(seen["inputs_embeds"][0], content)
    assert torch.equal(seen["object_queries_position_embeddings"][0], position)


def test_levels_are_added_to_features_as_in_mask2formers_decoder():
    peer = pytest.importorskip("transformers.models.mask2former.modeling_mask2former", reason="the peer")
    from transformers import Mask2FormerConfig

    config = Mask2FormerConfig(
        hidden_dim=16, mask_feature_size=16, num_attention_heads=2, decoder_layers=2, dim_feedforward=16, num_queries=3
    )
    module = peer.Mask2FormerTransformerModule(in_features=16, config=config).eval()
    seen = {}
    module.decoder.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    features = [torch.randn(2, 16, n, n + 1) for n in (2, 3, 4)]
    with torch.no_grad():
        module(features, torch.randn(2, 16, 8, 8))
    ours = LevelEmbedding(3, 16)
    ours.load_state_dict({"weight": module.level_embed.weight})
    got = ours([f.flatten(2).transpose(1, 2) for f in features])
    for mine, theirs in zip(got, seen["encoder_hidden_states"], strict=True):
        assert torch.equal(mine, theirs.transpose(0, 1))
    queries = ContentQueries(3, 16)
    queries.load_state_dict({"position": module.queries_embedder.weight, "content": module.queries_features.weight})
    content, position = queries(2)
    assert torch.equal(content.transpose(0, 1), seen["inputs_embeds"])
    assert torch.equal(position.transpose(0, 1), seen["query_position_embeddings"])


def test_levels_by_hand():
    levels = LevelEmbedding(2, 2)
    torch.nn.init.constant_(levels.weight, 1.0)
    levels.weight.data[1] = 5.0
    first, second = levels([torch.zeros(1, 3, 2), torch.ones(1, 1, 2)])
    assert first.tolist() == [[[1, 1]] * 3]
    assert second.tolist() == [[[6, 6]]]
    with pytest.raises(ValueError, match="2 level embeddings for 3"):
        levels([torch.zeros(1, 1, 2)] * 3)


# --- what holds for all ----------------------------------------------------------------------------------------------

BUILD = {
    "grid": lambda: GridTable((3, 4), 8, 2),
    "row_column": lambda: RowColumnTable(8, (9, 9)),
    "navit_absolute": lambda: NaViTAbsolute((9, 9), 8),
    "navit_fractional": lambda: NaViTFractional((5, 6), 8),
    "factorised": lambda: FactorisedTable((3, 4), 8),
    "windowed": lambda: WindowedTable((3, 4), (1, 1), 8),
}
WITH_RECIPE = ("grid", "factorised", "windowed")


def read(name: str, table: torch.nn.Module, grid: tuple[int, int]) -> torch.Tensor:
    return table(grid, RECIPES["flexivit"]) if name in WITH_RECIPE else table(grid)


def built(name: str) -> torch.nn.Module:
    table = BUILD[name]()
    for parameter in table.parameters():
        torch.nn.init.normal_(parameter)
    return table


@pytest.mark.parametrize("name", BUILD)
@given(grid=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_any_grid_has_its_rows_and_reaches_every_parameter(name, grid):
    table = built(name)
    out = read(name, table, grid)
    assert out.shape == ((2 if name == "grid" else 0) + grid[0] * grid[1], 8)
    out.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in table.parameters())
    assert all(p.grad.abs().sum() > 0 for p in table.parameters())


@pytest.mark.parametrize("name", BUILD)
def test_copies_dtypes_autocast_meta_and_no_stale_values(name):
    table = built(name)
    wanted = read(name, table, (5, 7)).detach()
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert torch.equal(read(name, twin, (5, 7)), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(read(name, table, (5, 7)), wanted)
    with torch.inference_mode():
        assert torch.equal(read(name, table, (5, 7)), wanted)
    read(name, table, (5, 7)).sum().backward()  # after inference: nothing of it was kept

    with torch.device("meta"):
        empty = BUILD[name]()
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(table.state_dict())
    assert torch.equal(read(name, empty, (5, 7)), wanted)

    with torch.no_grad():
        for parameter in table.parameters():
            parameter.add_(1.0)
    assert not torch.allclose(read(name, table, (5, 7)), wanted, atol=0.1)

    half = copy.deepcopy(empty).bfloat16()
    got = read(name, half, (5, 7))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, atol=0.06, rtol=0.02)  # two roundings of bfloat16


@pytest.mark.parametrize("name", BUILD)
def test_exports_for_every_size(name):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = built(name)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return read(name, self.table, (image.shape[0], image.shape[1]))

    model, side = Model(), torch.export.Dim("side", min=2, max=9)
    other = torch.export.Dim("other", min=2, max=9)
    program = torch.export.export(model, (torch.zeros(5, 7),), dynamic_shapes=({0: side, 1: other},)).module()
    for grid in [(5, 7), (3, 4), (4, 3), (9, 9), (2, 8)]:
        torch.testing.assert_close(program(torch.zeros(*grid)), model(torch.zeros(*grid)), atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("compilable")
@pytest.mark.parametrize("name", BUILD)
def test_compiles_once_for_all_sizes(name):
    torch._dynamo.reset()
    table = built(name)
    compiled = torch.compile(lambda h, w: read(name, table, (h, w)), dynamic=True, fullgraph=True)
    for grid in [(5, 7), (6, 2), (9, 9), (3, 4), (4, 3)]:
        wanted, got = read(name, table, grid), compiled(*grid)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
        names, parameters = zip(*table.named_parameters(), strict=True)
        for label, a, b in zip(
            names,
            torch.autograd.grad(got.square().sum(), parameters),
            torch.autograd.grad(wanted.square().sum(), parameters),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=label)


def test_every_parameter_that_is_a_position_is_found():
    parts = torch.nn.ModuleDict({name: build() for name, build in BUILD.items()})
    parts["levels"], parts["queries"] = LevelEmbedding(2, 4), ContentQueries(3, 4)
    assert set(positional_parameters(parts)) == {n for n, _ in parts.named_parameters()} - {"queries.content"}


def test_a_checkpoint_of_another_grid_loads_and_says_so():
    saved, table = GridTable((7, 9), 4, 1), GridTable((5, 4), 4, 1)
    with pytest.raises(RuntimeError, match="size mismatch"):
        table.load_state_dict(saved.state_dict())
    state, said = resample_entry(saved.state_dict(), "weight", saved.grid, table.grid, TIMM, table.prefix)
    table.load_state_dict(state)
    assert "(7, 9) -> (5, 4)" in said
    assert torch.equal(table.weight, resample(saved.weight, (7, 9), (5, 4), TIMM, 1))


@pytest.mark.parametrize(
    ("build", "value"),
    [
        (lambda: RowColumnTable(7), "7"),
        (lambda: RowColumnTable(0), "0"),
        (lambda: GridTable((0, 4), 8), r"\(0, 4\)"),
        (lambda: GridTable((3, 4), 8, -1), "-1"),
        (lambda: GridTable((3, 4), 0), "0"),
        (lambda: NaViTAbsolute((3, 4), -2), "-2"),
        (lambda: NaViTAbsolute((3, 0), 4), r"\(3, 0\)"),
        (lambda: FactorisedTable((3, 4), 4)((0, 5), TIMM), r"\(0, 5\)"),
        (lambda: NaViTFractional((3, 4), 4)((2, -1)), r"\(2, -1\)"),
        (lambda: WindowedTable((7, 7), (0, 8), 4), r"\(0, 8\)"),
        (lambda: ObjectQueries(0, 4), "0 and 4"),
        (lambda: LevelEmbedding(3, 0), "3 and 0"),
        (lambda: split_queries(torch.zeros(3, 5)), "5"),
    ],
)
def test_mistakes_are_refused_with_their_value(build, value):
    with pytest.raises(ValueError, match=value):
        build()
