"""Parameter groups of a small ViT, by hand."""

import pytest
import torch

import vispe
from vispe.train.groups import Place, groups, places


@pytest.fixture(scope="module")
def model():
    return vispe.build(
        "vit_tiny_patch16_224", image_size=(32, 32), width=24, depth=2, heads=2, hidden=48, num_classes=3, registers=1,
        layer_scale=1e-5, position="table + mixed",
    )  # fmt: skip


def test_every_parameter_has_its_place(model):
    made = places(model)
    assert made.keys() == dict(model.named_parameters()).keys()
    assert made["patch_embed.proj.weight"] == Place(0, True)
    assert made["patch_embed.proj.bias"] == Place(0, False)
    assert made["cls_token"] == made["reg_token"] == Place(0, False)
    tables = [place for name, place in made.items() if name.startswith("position.")]
    assert len(tables) >= 2
    assert set(tables) == {Place(0, False)}
    assert {place.layer for name, place in made.items() if name.startswith("blocks.0.")} == {1}
    assert {place.layer for name, place in made.items() if name.startswith("blocks.1.")} == {2}
    assert made["head.weight"] == Place(3, True)
    assert made["head.bias"] == made["norm.weight"] == made["norm.bias"] == Place(3, False)
    assert all(not place.decayed for name, place in made.items() if name.endswith("bias"))
    decayed = {name for name, place in made.items() if place.decayed}
    assert all(dict(model.named_parameters())[name].ndim >= 2 for name in decayed)


def test_rates_fall_towards_the_input(model):
    made = groups(model.named_parameters(), places(model), lr=1.0, weight_decay=0.05, layer_decay=0.5, last=3)
    rates = {group["layer"]: group["lr"] for group in made}
    assert rates == {0: 0.125, 1: 0.25, 2: 0.5, 3: 1.0}
    assert {group["weight_decay"] for group in made} == {0.0, 0.05}
    assert len(made) == 8
    assert sum(len(group["params"]) for group in made) == len(list(model.parameters()))
    torch.optim.AdamW(made)


def test_a_model_without_layers_has_one_rate():
    mae = vispe.build("mae_vit_base_patch16", width=24, depth=1, heads=2, decoder_depth=1, hidden=8, decoder_hidden=8)
    made = places(mae)
    assert made.keys() == dict(mae.named_parameters()).keys()
    assert {place.layer for place in made.values()} == {0}
    assert made["mask_token"] == made["cls_token"] == made["decoder_pred.bias"] == Place(0, False)
    assert made["decoder_pred.weight"] == Place(0, True)


def test_frozen_parameters_are_in_no_group(model):
    model.patch_embed.requires_grad_(False)
    try:
        made = groups(model.named_parameters(), places(model), lr=1.0, weight_decay=0.1, layer_decay=1.0, last=3)
        held = {id(parameter) for group in made for parameter in group["params"]}
        assert not held & {id(parameter) for parameter in model.patch_embed.parameters()}
    finally:
        model.patch_embed.requires_grad_(True)


def test_names_inside_fsdp_are_found():
    weight = torch.nn.Parameter(torch.zeros(8))  # flattened: the shape says nothing any more
    named = [("blocks.0._fsdp_wrapped_module.attn.qkv.weight", weight)]
    made = groups(named, {"blocks.0.attn.qkv.weight": Place(1, True)}, lr=1, weight_decay=0.1, layer_decay=0.5, last=2)
    assert made[0]["weight_decay"] == 0.1
    assert made[0]["lr"] == 0.5
