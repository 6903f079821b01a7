"""ViT: what its spec refuses, what loading changes and says, and what holds for every position line."""

from __future__ import annotations

import copy
import pickle
import re
import tomllib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import vispe
from vispe.layers.sockets import WORDS, PositionSpec
from vispe.models.vit import IMAGENET_MEAN, VARIANTS, ViT, ViTSpec
from vispe.paths import shared
from vispe.position.parameters import positional_parameters
from vispe.position.resample import RECIPES, resample
from vispe.weights import WeightsError
from vispe.weights.convert import accounts_for
from vispe.weights.files import facts

NAME = "vit_tiny_patch16_224"
TINY = {"width": 32, "depth": 2, "heads": 4, "hidden": 48}
SMALL = {**TINY, "image_size": (48, 80), "num_classes": 7}  # a grid of 3 x 5
LINES = [
    "none",
    *(word for words in WORDS.values() for word in words[1:]),
    "table + mixed",
    "table + axial + swin + peg",
]
SIZES = ((48, 80), (64, 48), (16, 96), (80, 80))


def model(line: str = "table", seed: int = 0, **knobs) -> ViT:
    """Every parameter drawn: some tables start at zero."""
    made = vispe.build(NAME, **{**SMALL, "position": line, "registers": 2, **knobs})
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            place = name.startswith(("position.", "cls", "reg", "dist"))
            parameter.normal_(std=0.5 if place or parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    return made


def images(*size: int, n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3, *size, generator=torch.Generator().manual_seed(9))


# --- the spec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"width": 30}, "4 heads do not divide the width 30"),
        ({"heads": 0}, "0 heads do not divide"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"patch_size": 0}, "patch_size must be at least 1, got 0"),
        ({"image_size": (48, 81)}, r"image of \(h, w\) = \(48, 81\) is not a whole number of patches"),
        ({"image_size": (0, 16)}, r"image_size must be \(h, w\) of positive whole numbers, got"),
        ({"image_size": (16, 16, 3)}, r"image_size must be .*got \(16, 16, 3\)"),
        ({"num_classes": -1}, "counts must not be negative, got num_classes -1"),
        ({"registers": -2}, "registers=-2"),
        ({"pool": "mean"}, "pool is token, avg or both, mlp gelu or swiglu; got 'mean'"),
        ({"mlp": "relu"}, "got 'token', 'relu'"),
        ({"class_token": False}, "without a class token pool must be 'avg', got 'token'"),
        ({"distilled": True, "pool": "both"}, "distilled model pools its two tokens.*got 'both'"),
        ({"position": "tabel"}, "'tabel' is no encoding"),
        ({"position": "table + sine_mae"}, "'sine_mae' is a second added encoding"),
        ({"position": {"rotated": "alibi"}}, "position.rotated must be one of .*got 'alibi'"),
        ({"position": {"rotate": "axial"}}, "PositionSpec has no 'rotate'"),
        ({"position": 3}, "position is a line such as 'table \\+ axial' or a mapping of sockets, got 3"),
        ({"drop_path": 1.0}, r"a drop rate is in \[0, 1\), got 1.0"),
        ({"widht": 64}, "ViTSpec has no 'widht'"),
    ],
)
def test_mistakes_are_named(knobs, message):
    with pytest.raises(ValueError, match=message):
        vispe.build(NAME, **{**SMALL, **knobs})


def test_spec_takes_what_a_recipe_writes():
    spec = ViTSpec.of(image_size=[224, 448], mean=[0.1, 0.2, 0.3], position="table + mixed")
    assert (spec.image_size, spec.mean, spec.grid) == ((224, 448), (0.1, 0.2, 0.3), (14, 28))
    assert ViTSpec(image_size=384).grid == (24, 24)
    assert ViTSpec(position={"rotated": "eva", "reference": [14, 16]}).position.reference == (14, 16)
    assert hash(spec) == hash(copy.deepcopy(spec))
    dino = VARIANTS["vit_small_patch14_reg4_dinov2"]
    assert dino.but(position={"rotated": "axial"}).position == dino.position.but(rotated="axial")
    line = dino.but(position="table + axial").position  # how a table is read stays the family's
    assert (line.recipe, line.prefix_rows) == ("dinov2_reg", False)
    assert (dino.rows, dino.prefix) == (0, 5)
    assert VARIANTS["deit_tiny_distilled_patch16_224"].rows == 2


@pytest.mark.parametrize("size", [(50, 80), (48, 79), (8, 16)])
def test_image_mistakes_are_named(size):
    with pytest.raises(ValueError, match=r"is not a whole number of patches of \(h, w\) = \(16, 16\)"):
        model()(images(*size))


# --- every position line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
def test_a_line_serves_every_size_and_trains_whole(line):
    made = model(line)
    for size in SIZES:
        assert made(images(*size)).shape == (2, 7)
    out = made(images(64, 48)).square().sum() + made.tokens(images(64, 48)).square().sum()
    out.backward()  # of every token: the class token alone never sees the last block's bias
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("line", LINES)
@torch.no_grad()
def test_an_image_is_read_alike_alone_and_in_a_batch(line):
    made, x = model(line), images(64, 48, n=3)
    alone = torch.cat([made(image[None]) for image in x])
    torch.testing.assert_close(made(x), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("line", LINES)
@torch.no_grad()
def test_only_a_position_tells_patches_apart(line):
    """Patches in another order: none gives the same answer, every encoding another one."""
    made, x = model(line), images(48, 80)
    patches = x.unfold(2, 16, 16).unfold(3, 16, 16).flatten(2, 3)[:, :, torch.randperm(15)]
    other = patches.unflatten(2, (3, 5)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
    change = (made(x) - made(other)).abs().max()
    assert (change < 1e-5) == (line == "none"), change


@torch.no_grad()
def test_without_positions_patches_are_equivariant():
    made, x = model("none"), images(48, 80)
    shuffle = torch.randperm(15)
    patches = x.unfold(2, 16, 16).unfold(3, 16, 16).flatten(2, 3)[:, :, shuffle]
    other = patches.unflatten(2, (3, 5)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
    tokens, moved = made.tokens(x), made.tokens(other)
    torch.testing.assert_close(moved[:, 3:], tokens[:, 3:][:, shuffle], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved[:, :3], tokens[:, :3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("line", LINES)
def test_positional_parameters_and_layers_are_complete(line):
    made = model(line)
    found = set(positional_parameters(made))
    assert found == {name for name, _ in made.named_parameters() if name.startswith("position.")}
    layers = {name: made.layer_of(name) for name, _ in made.named_parameters()}
    assert layers["patch_embed.proj.weight"] == layers["cls_token"] == layers["reg_token"] == 0
    assert layers["blocks.0.norm1.weight"] == 1
    assert layers["blocks.1.mlp.fc2.bias"] == 2
    assert layers["norm.weight"] == layers["head.bias"] == 3
    for name in found:
        own = re.match(r"position\.biases\.(\d)", name)
        assert layers[name] == (int(own[1]) + 1 if own else 0), name


@pytest.mark.parametrize("line", LINES)
@torch.no_grad()
def test_copies_and_dtypes(line):
    made, x = model(line), images(64, 48)
    expected = made(x)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(x), expected)
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.bfloat16, 0.3), (torch.float16, 0.05)):
        out = copy.deepcopy(made).to(dtype)(x.to(dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made.tokens(x).dtype == torch.float32  # the stream stays as wide as the weights
        torch.testing.assert_close(made(x).float(), expected, atol=0.3, rtol=0.3)


@torch.no_grad()
def test_registers_and_class_token_are_where_timm_has_them():
    """Class, registers, patches; registers have no row in the table."""
    made = model("table")
    made.blocks = nn.ModuleList()
    made.position.biases = nn.ModuleList()
    tokens = made.tokens(images(48, 80))
    table = made.position.added.weight
    assert tokens.shape == (2, 3 + 15, 32)
    assert torch.equal(tokens[0, 0], made.cls_token[0, 0] + table[0])
    assert torch.equal(tokens[0, 1:3], made.reg_token[0])
    assert torch.equal(tokens[:, 3:], made.patch_embed(images(48, 80)) + table[1:])


@torch.no_grad()
def test_pools_and_heads_by_hand():
    x = images(48, 80)
    made = model(pool="both")
    tokens = made.norm(made.tokens(x))
    torch.testing.assert_close(made(x), made.head(torch.cat((tokens[:, 0], tokens[:, 3:].mean(1)), -1)))
    made = model(pool="avg", class_token=False)
    torch.testing.assert_close(made(x), made.head(made.fc_norm(made.tokens(x)[:, 2:].mean(1))))
    made = model(distilled=True)
    tokens = made.norm(made.tokens(x))
    torch.testing.assert_close(made(x), (made.head(tokens[:, 0]) + made.head_dist(tokens[:, 1])) / 2)
    without = model(distilled=True, num_classes=0)
    assert without(x).shape == (2, 32)
    torch.testing.assert_close(without(x), without.norm(without.tokens(x)[:, :2]).mean(1))


def test_drop_path_rises_with_depth_and_acts_in_training_only():
    made = model(depth=3, drop_path=0.4)
    assert [block.drop_path.rate for block in made.blocks] == [0.0, pytest.approx(0.2), pytest.approx(0.4)]
    x = images(48, 80)
    assert torch.equal(made(x), made(x))
    made.train()
    assert not torch.equal(made(x), made(x))


# --- compiled and exported --------------------------------------------------------------------------------------------


COMPILED = ["table", "row_column", "factorised", "axial", "table + mixed", "swin", "decomposed", "shaw", "alibi", "peg"]


@pytest.mark.parametrize("line", COMPILED)
@torch.no_grad()
def test_compiled_twice_at_most_whatever_the_sizes(line):
    """Once for the table's own grid and once for every other."""
    made, programs = model(line, depth=1), []

    def backend(graph, _inputs):
        programs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(made, dynamic=True, fullgraph=True, backend=backend)
    for size in ((48, 80), (64, 48), (80, 80), (112, 48), (32, 160), (48, 80)):
        torch.testing.assert_close(compiled(images(*size)), made(images(*size)), atol=1e-5, rtol=1e-5)
    assert len(programs) <= 2


@pytest.mark.parametrize("line", ["none", "table", "row_column", "sine_mae", "axial", "mixed", "swin", "shaw", "peg"])
@torch.no_grad()
def test_export_with_a_fixed_and_with_a_free_size(line):
    made = model(line, depth=1)
    fixed = torch.export.export(made, (images(48, 80),)).module()
    torch.testing.assert_close(fixed(images(48, 80)), made(images(48, 80)), atol=1e-5, rtol=1e-5)
    h, w = (torch.export.Dim(name, min=2, max=40) for name in "hw")
    free = torch.export.export(made, (images(64, 48),), dynamic_shapes=({2: 16 * h, 3: 16 * w},)).module()
    for size in ((48, 80), (64, 48), (32, 96)):
        torch.testing.assert_close(free(images(*size)), made(images(*size)), atol=1e-5, rtol=1e-5)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
@torch.no_grad()
def test_own_checkpoints_load_at_another_size(line, tmp_path):
    """Built for 48 x 80, loaded for 80 x 64: what the model itself gives at 80 x 64, resampled in every forward."""
    made = model(line)
    save_file(made.state_dict(), tmp_path / "own.safetensors")
    knobs = {**SMALL, "position": line, "registers": 2}
    same = vispe.load(NAME, tmp_path / "own.safetensors", source_size=(48, 80), **knobs)
    assert same.report == []
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), made.parameters(), strict=True))
    other = vispe.load(NAME, made.state_dict(), source_size=(48, 80), **{**knobs, "image_size": (80, 64)})
    assert other.spec.grid == (5, 4)
    torch.testing.assert_close(other(images(80, 64)), made(images(80, 64)), atol=2e-5, rtol=2e-5)
    back = vispe.load(NAME, other.state_dict(), source_size=(80, 64), **{**knobs, "image_size": (80, 64)})
    again = back.spec.position.reference
    assert again is None or line == "swin_v2"


@torch.no_grad()
def test_non_square_source_by_hand():
    """224 x 448 -> 384: the table as ``resample`` moves it, and the sentence that says so."""
    made = vispe.build(NAME, image_size=(224, 448), **TINY)
    loaded = vispe.load(NAME, made.state_dict(), source_size=(224, 448), image_size=(384, 384), **TINY)
    by_hand = resample(made.position.added.weight, (14, 28), (24, 24), RECIPES["timm"], 1)
    assert torch.equal(loaded.position.added.weight, by_hand)
    assert loaded.report == [
        "position.added.weight: resampled, grid (14, 28) -> (24, 24), 1 prefix tokens, recipe of "
        + RECIPES["timm"].source
    ]
    turned = vispe.load(NAME, made.state_dict(), source_size=(448, 224), image_size=(384, 384), **TINY)
    assert not torch.allclose(turned.position.added.weight, by_hand, atol=1e-3)  # equal counts are not equal grids


@pytest.mark.parametrize("line", ["table", "row_column", "factorised", "swin", "decomposed", "shaw"])
@pytest.mark.parametrize("image_size", [(48, 80), (64, 64)])
def test_a_wrong_source_size_is_refused(line, image_size):
    made = model(line)
    knobs = {**SMALL, "position": line, "registers": 2, "image_size": image_size}
    with pytest.raises(WeightsError, match=r"^position\..* rows.*is source_size the image size these weights were"):
        vispe.load(NAME, made.state_dict(), **knobs)  # taken for 224 x 224
    with pytest.raises(WeightsError, match=r"is source_size the image size"):
        vispe.load(NAME, made.state_dict(), source_size=(64, 96), **knobs)


def test_the_table_error_says_what_was_expected():
    made = vispe.build(NAME, image_size=(384, 384), **TINY)
    with pytest.raises(
        WeightsError, match=r"577 rows, not the 14 x 14 = 196 patches .* \(224, 224\) and 1 prefix tokens"
    ):
        vispe.load(NAME, made.state_dict(), **TINY)
    with pytest.raises(ValueError, match="not a whole number of patches"):
        vispe.load(NAME, made.state_dict(), source_size=(384, 380), **TINY)


def test_source_size_is_for_models_that_know_one():
    state = vispe.build("lightglue_aliked", input_dim=8, width=16, depth=1, num_heads=4)
    with pytest.raises(WeightsError, match="knows no image size"):
        vispe.load(
            "lightglue_aliked", state.state_dict(), source_size=(4, 4), input_dim=8, width=16, depth=1, num_heads=4
        )


def test_missing_and_unknown_keys_are_named():
    state = model().state_dict()
    knobs = {**SMALL, "registers": 2, "source_size": (48, 80)}
    with pytest.raises(WeightsError, match=r"missing 'blocks\.1\.attn\.qkv\.bias'"):
        vispe.load(NAME, {k: v for k, v in state.items() if k != "blocks.1.attn.qkv.bias"}, **knobs)
    with pytest.raises(WeightsError, match=r"unknown 'blocks\.9\.ls1\.gamma'"):
        vispe.load(NAME, state | {"blocks.9.ls1.gamma": torch.ones(32)}, **knobs)
    with pytest.raises(WeightsError, match=r"missing 'reg_token'"):
        vispe.load(NAME, {k: v for k, v in state.items() if k != "reg_token"}, **knobs)
    with pytest.raises(WeightsError, match=r"unknown 'reg_token'"):
        vispe.load(NAME, state, **{**knobs, "registers": 0})
    with pytest.raises(WeightsError, match=r"missing 'position\.added\.weight'"):
        vispe.load(NAME, {k: v for k, v in state.items() if not k.startswith("position")}, **knobs)


def test_a_head_is_replaced_on_request_as_a_whole():
    state = model().state_dict()
    knobs = {**SMALL, "registers": 2, "source_size": (48, 80)}
    other = vispe.load(NAME, state, **{**knobs, "num_classes": 3})
    assert other.report == [
        "head.weight: fresh [3, 32], the checkpoint's [7, 32] is another head",
        "head.bias: fresh [3], the checkpoint's [7] is another head",
    ]
    none = vispe.load(NAME, state, **{**knobs, "num_classes": 0})
    assert none.report == [f"head.{key}: dropped, this model has no such head" for key in ("weight", "bias")]
    added = vispe.load(NAME, none.state_dict(), **{**knobs, "num_classes": 3})
    assert added.report[0] == "head.weight: fresh [3, 32], there was none"
    with pytest.raises(WeightsError, match=r"missing 'head\.bias', 'head\.weight'"):  # nobody asked for a fresh one
        vispe.load(NAME, none.state_dict(), **{**knobs, "num_classes": 1000})
    pooled = vispe.load(NAME, state, **{**knobs, "pool": "both"})
    assert pooled.report[1] == "head.bias: fresh [7], the checkpoint's [7] is another head"


def test_a_norm_before_the_mean_is_no_norm_after_it():
    knobs = {**SMALL, "registers": 2, "source_size": (48, 80)}
    averaged = vispe.load(NAME, model().state_dict(), **knobs, pool="avg")
    assert averaged.report == [f"norm.{key}: taken for fc_norm.{key}, pool is 'avg' here" for key in ("weight", "bias")]
    with pytest.raises(WeightsError, match=r"missing 'norm\.bias', 'norm\.weight'; unknown 'fc_norm\.bias'"):
        vispe.load(NAME, averaged.state_dict(), **knobs)


@pytest.mark.parametrize(
    "position", ["axial", "none", "row_column", "table + mixed", {"rotated": "mixed"}, {"added": "none"}]
)
def test_the_position_is_replaced_and_said(position):
    state = model().state_dict()
    knobs = {**SMALL, "registers": 2, "source_size": (48, 80)}
    made = vispe.load(NAME, state, **knobs, position=position)
    keeps = made.spec.position.added == "table"
    said = " ".join(made.report)
    assert ("position.added.weight: dropped" in said) != keeps
    for key in made.state_dict():
        if key.startswith("position.") and not (keeps and key == "position.added.weight"):
            assert f"{key}: fresh, the checkpoint's position is another" in made.report
    cls = state["cls_token"] if keeps else state["cls_token"] + state["position.added.weight"][0]
    assert torch.equal(made.cls_token, cls)  # what was always added to it stays
    assert torch.equal(made.blocks[1].mlp.fc1.weight, state["blocks.1.mlp.fc1.weight"])


@torch.no_grad()
def test_rows_of_prefix_tokens_fold_into_the_tokens():
    for knobs in ({}, {"distilled": True}):
        made = model(**knobs)
        folded = vispe.load(
            NAME,
            made.state_dict(),
            **SMALL,
            **knobs,
            registers=2,
            source_size=(48, 80),
            position={"prefix_rows": False},
        )
        assert len(folded.position.added.weight) == 15
        assert len(folded.report) == 1 + bool(knobs)
        for size in SIZES:
            torch.testing.assert_close(folded(images(*size)), made(images(*size)), atol=1e-5, rtol=1e-5)


def test_half_precision_files_are_resampled_in_float32():
    """CPU kernels for half antialiasing are missing; the file's numbers, not its dtype, matter."""
    state = {key: value.half() for key, value in model().state_dict().items()}
    made = vispe.load(NAME, state, **{**SMALL, "image_size": (64, 64)}, registers=2, source_size=(48, 80))
    table = resample(state["position.added.weight"].float(), (3, 5), (4, 4), RECIPES["timm"], 1)
    torch.testing.assert_close(made.position.added.weight, table, atol=1e-3, rtol=1e-3)


# --- names, tags, origins ---------------------------------------------------------------------------------------------


def tags() -> dict[str, dict]:
    return tomllib.loads((shared("models") / "vit.toml").read_text(encoding="utf-8"))["weights"]


@pytest.mark.parametrize("name", sorted(tags()))
def test_each_tag_is_a_spec_of_its_variant_and_an_origin_that_is_known(name):
    known, variant = tags()[name], name.partition(".")[0]
    assert known["url"].startswith("https://")
    assert known["licence"]
    assert known["origin"] in facts(name)["origin"]
    spec = VARIANTS[variant].but(**known.get("spec", {}))
    assert "." in name or "spec" not in known
    if known["origin"] != "timm" or "dino" in name or "mae" in name or "deit" in name:
        assert spec.mean == IMAGENET_MEAN or "sat493m" in name


def test_a_tag_is_the_spec_of_its_weights():
    with torch.device("meta"):
        mae = vispe.build("vit_base_patch16_224.mae", depth=1).spec
        swag = vispe.build("vit_base_patch16_224.tv_swag", depth=1).spec
        many = vispe.build("vit_tiny_patch16_224.augreg_in21k", depth=1).spec
    assert (mae.num_classes, mae.mean, mae.position.recipe) == (0, IMAGENET_MEAN, "mae")
    assert (swag.image_size, swag.position.recipe, many.num_classes) == ((384, 384), "torchvision", 21843)
    with pytest.raises(
        WeightsError, match=r"no weights are called 'vit_tiny_patch16_224\.mae'; .* has vit_tiny.*augreg"
    ):
        vispe.build("vit_tiny_patch16_224.mae")
    state = vispe.build("vit_tiny_patch16_224.augreg_in21k", **TINY).state_dict()
    fresh = vispe.load("vit_tiny_patch16_224.augreg_in21k", state, num_classes=10, **TINY)
    assert fresh.report[0] == "head.weight: fresh [10, 32], the checkpoint's [21843, 32] is another head"


def test_each_variant_is_what_timm_builds():
    timm = pytest.importorskip("timm", reason="timm is the peer")
    for name, spec in VARIANTS.items():
        with torch.device("meta"):
            peer, ours = timm.create_model(name, depth=1), ViT(spec.but(depth=1))
        cfg = peer.pretrained_cfg
        key_bias = spec.width if name.endswith("_qkvb") else 0  # timm leaves out what is always zero
        count = sum(p.numel() for p in peer.parameters())
        assert sum(p.numel() for p in ours.parameters()) == count + key_bias, name
        block = peer.blocks[0]
        assert block.attn.num_heads == spec.heads, name
        assert block.norm1.eps == spec.eps, name
        assert (cfg["mean"], cfg["std"]) == (spec.mean, spec.std), name
        assert cfg["input_size"][1:] == spec.image_size, name
        assert peer.num_classes == spec.num_classes, name


def test_tables_of_origins_do_not_take_each_others_keys():
    tables = facts(NAME)["origin"]
    ours = vispe.build("vit_tiny_patch16_224", depth=1).state_dict()
    samples = {
        "timm": ["cls_token", "pos_embed", "blocks.0.gamma_1", "blocks.0.attn.q_bias"],
        "torchvision": ["class_token", "encoder.layers.encoder_layer_0.ln_1.weight"],
        "transformers": ["vit.embeddings.cls_token", "vit.encoder.layer.3.attention.attention.query.weight"],
        "official": ["cls_token", "pos_embed", "register_tokens", "blocks.2.31.mlp.w12.bias"],
        "dinov3": ["cls_token", "storage_tokens", "rope_embed.periods"],
    }
    assert samples.keys() == tables.keys()
    for origin, keys in samples.items():
        assert [who for who, rules in tables.items() if accounts_for(rules, keys)] == [origin]
        assert not accounts_for(tables[origin], ours)
    shared_names = ["cls_token", "patch_embed.proj.weight", "blocks.0.norm1.weight"]
    assert [who for who, rules in tables.items() if accounts_for(rules, shared_names)] == ["timm", "official"]
    assert PositionSpec().recipe in RECIPES
