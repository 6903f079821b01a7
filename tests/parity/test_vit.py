"""ViT against timm, transformers and torchvision: their random weights through the rename tables, the same images."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vispe
from vispe.weights import WeightsError

timm = pytest.importorskip("timm", reason="timm is the parity peer")

SMALL = {"width": 64, "depth": 2, "heads": 4, "hidden": 256}
GATED = {**SMALL, "width": 96, "hidden": 256}  # timm's giant rounds no other small width to whole halves
TIMM = {"embed_dim": 64, "depth": 2, "num_heads": 4}
HF = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIXTEEN = ((224, 224), (384, 384), (224, 448), (384, 224))
FOURTEEN = ((518, 518), (224, 224), (224, 448))


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter drawn, so that tokens, tables, layer scales and norms all matter to the result."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.normal_(std=1.0 if "pos" in name or "token" in name else spread)
    return module.eval()


def images(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def assert_alike(ours: nn.Module, theirs: Any, sizes: Any) -> None:
    """Logits within 1e-5 at every size, of a spread that a mistake would show in."""
    for size in sizes:
        x = images(size)
        expected = theirs(x)
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5, msg=lambda m, s=size: f"{s}: {m}")


def of_timm(name: str, **knobs: Any) -> nn.Module:
    return randomised(timm.create_model(name, dynamic_img_size=True, **{**TIMM, **knobs}))


# --- timm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit_tiny_patch16_224", SIXTEEN),
        ("vit_base_patch32_224", SIXTEEN),
        ("vit_base_patch8_224", ((224, 224), (112, 224))),
        ("vit_tiny_patch16_384", SIXTEEN),
        ("deit_tiny_patch16_224", SIXTEEN),
        ("deit_tiny_distilled_patch16_224", SIXTEEN),
        ("deit_base_distilled_patch16_384", SIXTEEN),
        ("deit3_small_patch16_224", SIXTEEN),
        ("vit_small_patch16_rope_224", SIXTEEN),
        ("vit_small_patch16_rope_mixed_224", SIXTEEN),
        ("vit_small_patch16_rope_ape_224", SIXTEEN),
        ("vit_small_patch16_rope_mixed_ape_224", SIXTEEN),
    ],
)
@torch.inference_mode()
def test_timm_with_random_weights(name, sizes):
    peer = of_timm(name)
    assert_alike(vispe.load(name, peer.state_dict(), origin="timm", **SMALL), peer, sizes)


@torch.inference_mode()
def test_timm_full_size():
    peer = randomised(timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True))
    model = vispe.load("vit_tiny_patch16_224", peer.state_dict(), origin="timm")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())
    assert_alike(model, peer, ((224, 224), (224, 448)))


@pytest.mark.parametrize("registers", [0, 4])
@torch.inference_mode()
def test_timm_dinov2(registers):
    """timm antialiases every table; the 518 table at 224 and at a non-square size too."""
    name = f"vit_small_patch14_{'reg4_' if registers else ''}dinov2"
    peer = of_timm(name)
    assert_alike(vispe.load(name, peer.state_dict(), position={"recipe": "timm"}, **SMALL), peer, FOURTEEN)


@torch.inference_mode()
def test_timm_dinov2_giant_gates_its_mlp():
    peer = of_timm("vit_giant_patch14_reg4_dinov2", embed_dim=96)
    model = vispe.load("vit_giant_patch14_reg4_dinov2", peer.state_dict(), **GATED)
    assert_alike(model, peer, ((224, 224),))


@pytest.mark.parametrize("size", ["small", "small_plus", "huge_plus"])
@pytest.mark.parametrize("biased", ["", "_qkvb"])
@torch.inference_mode()
def test_timm_dinov3(size, biased):
    name = f"vit_{size}_patch16_dinov3{biased}"
    peer = of_timm(name, global_pool="token")
    model = vispe.load(name, peer.state_dict(), origin="timm", **SMALL)
    assert_alike(model, peer, ((256, 256), *SIXTEEN))
    assert model.report == []


@torch.inference_mode()
def test_timm_average_pool_with_registers_and_without_a_class_token():
    for class_token, registers in ((True, 0), (False, 0), (False, 4), (True, 2)):
        peer = of_timm("vit_tiny_patch16_224", global_pool="avg", class_token=class_token, reg_tokens=registers)
        knobs = {"pool": "avg", "class_token": class_token, "registers": registers}
        if registers and class_token:  # timm would give registers rows of their own
            peer = of_timm("vit_tiny_patch16_224", global_pool="avg", reg_tokens=registers, no_embed_class=True)
            knobs["position"] = {"prefix_rows": False}
        elif registers:
            peer = of_timm(
                "vit_tiny_patch16_224", global_pool="avg", class_token=False, reg_tokens=registers, no_embed_class=True
            )
        assert_alike(vispe.load("vit_tiny_patch16_224", peer.state_dict(), **knobs, **SMALL), peer, SIXTEEN[:3])


@pytest.mark.parametrize("to", [(384, 384), (224, 448)])
@torch.inference_mode()
def test_timm_resized_at_loading(to):
    """Loading at another size is timm's ``img_size=`` with a checkpoint of 224, and gives what dynamic sizes give."""
    peer = of_timm("vit_tiny_patch16_224")
    other = timm.create_model("vit_tiny_patch16_224", img_size=to, **TIMM).eval()
    filtered = timm.models.vision_transformer.checkpoint_filter_fn(dict(peer.state_dict()), other)
    other.load_state_dict(filtered)
    model = vispe.load("vit_tiny_patch16_224", peer.state_dict(), image_size=to, **SMALL)
    assert model.position.added.grid == (to[0] // 16, to[1] // 16)
    assert_alike(model, other, (to,))
    assert_alike(model, peer, (to,))


@torch.inference_mode()
def test_a_table_of_518_at_224_and_one_of_224_at_518():
    for trained, used in ((518, 224), (224, 518)):
        peer = of_timm("vit_small_patch14_dinov2", img_size=trained)
        model = vispe.load(
            "vit_small_patch14_dinov2",
            peer.state_dict(),
            image_size=(used, used),
            source_size=(trained, trained),
            position={"recipe": "timm"},
            **SMALL,
        )
        assert_alike(model, peer, ((used, used),))


# --- torchvision ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_torchvision_with_random_weights():
    models = pytest.importorskip("torchvision.models", reason="torchvision is the parity peer")
    made = {"patch_size": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 256}
    peer = randomised(models.VisionTransformer(image_size=224, **made))
    state = peer.state_dict()
    model = vispe.load("vit_base_patch16_224.tv_in1k", state, origin="torchvision", **SMALL)
    assert_alike(model, peer, ((224, 224),))
    resized = models.VisionTransformer(image_size=384, **made).eval()
    resized.load_state_dict(models.vision_transformer.interpolate_embeddings(384, 16, dict(state)))
    at_384 = vispe.load("vit_base_patch16_224.tv_in1k", state, image_size=(384, 384), **SMALL)
    assert_alike(at_384, resized, ((384, 384),))
    assert_alike(model, resized, ((384, 384),))
    old = {k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for k, v in state.items()}
    assert_alike(vispe.load("vit_base_patch16_224", old, **SMALL), peer, ((224, 224),))


# --- transformers -----------------------------------------------------------------------------------------------------


def of_transformers(model: str, config: str, **knobs: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is the parity peer")
    made = getattr(transformers, config)(**HF, layer_norm_eps=1e-6, num_labels=7, attn_implementation="eager", **knobs)
    return randomised(getattr(transformers, model)(made))


def classic(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that published files have had since transformers 4, from those of the installed release."""
    renames = (
        (r"\.layers\.(\d+)\.", r".encoder.layer.\1."),
        (r"attention\.([qkv])_proj", lambda m: f"attention.attention.{dict(q='query', k='key', v='value')[m[1]]}"),
        (r"attention\.o_proj", "attention.output.dense"),
    )
    vit = (*renames, (r"mlp\.fc1", "intermediate.dense"), (r"mlp\.fc2", "output.dense"))
    found = {}
    for key, value in state.items():
        for old, new in renames if "dinov2" in key else vit:
            key = re.sub(old, new, key)
        found[key] = value
    return found


@pytest.mark.parametrize(
    ("name", "model", "config"),
    [
        ("vit_base_patch16_224", "ViTForImageClassification", "ViTConfig"),
        ("deit_base_distilled_patch16_224", "DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    ],
)
@torch.inference_mode()
def test_transformers_vit_and_deit(name, model, config):
    peer = of_transformers(model, config, image_size=224, intermediate_size=256)
    for state in (peer.state_dict(), classic(peer.state_dict())):
        ours = vispe.load(
            name, state, origin="transformers", num_classes=7, position={"recipe": "mae"}, pool="token", **SMALL
        )
        assert_alike(ours, lambda x: peer(x, interpolate_pos_encoding=True).logits, SIXTEEN)
    assert any("attention.attention.query" in key for key in state)


@pytest.mark.parametrize("trained", [518, 224])
@pytest.mark.parametrize("registers", [0, 4])
@torch.inference_mode()
def test_transformers_dinov2_pools_both(trained, registers):
    """Class token and mean of the patches, registers left out; transformers resamples without DINOv2's own offset."""
    word = "WithRegisters" if registers else ""
    name = f"vit_small_patch14_{'reg4_' if registers else ''}dinov2"
    peer = of_transformers(
        f"Dinov2{word}ForImageClassification", f"Dinov2{word}Config", image_size=trained, patch_size=14
    )
    for state in (peer.state_dict(), classic(peer.state_dict())):
        ours = vispe.load(
            name,
            state,
            image_size=(trained, trained),
            source_size=(trained, trained),
            num_classes=7,
            pool="both",
            position={"recipe": "dinov2_reg" if registers else "mae"},
            **SMALL,
        )
        assert_alike(ours, lambda x: peer(x).logits, FOURTEEN)


@torch.inference_mode()
def test_transformers_dinov2_gated():
    peer = of_transformers("Dinov2Model", "Dinov2Config", image_size=224, patch_size=14, use_swiglu_ffn=True)
    hidden = peer.encoder.layer[0].mlp.up_proj.out_features
    ours = vispe.load(
        "vit_giant_patch14_dinov2",
        peer.state_dict(),
        image_size=(224, 224),
        source_size=(224, 224),
        position={"recipe": "mae"},
        **{**SMALL, "hidden": hidden},
    )
    assert_alike(ours, lambda x: peer(x).pooler_output, ((224, 224), (224, 448)))


@pytest.mark.parametrize("gated", [False, True])
@torch.inference_mode()
def test_transformers_dinov3(gated):
    pytest.importorskip("transformers.models.dinov3_vit", reason="this transformers has no DINOv3")
    peer = of_transformers(
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        intermediate_size=256,
        num_register_tokens=4,
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
    )
    name = f"vit_small_{'plus_' if gated else ''}patch16_dinov3_qkvb"
    ours = vispe.load(name, peer.state_dict(), eps=1e-6, **SMALL)
    assert_alike(ours, lambda x: peer(x).pooler_output, ((224, 224), (224, 448)))


# --- the originals ----------------------------------------------------------------------------------------------------


def official_dinov2(registers: bool) -> tuple[dict[str, Tensor], nn.Module]:
    """A state dict in the original's names and timm's own conversion of it, loaded."""
    peer = of_timm(f"vit_giant_patch14_{'reg4_' if registers else ''}dinov2", embed_dim=96)
    state = {}
    for key, value in peer.state_dict().items():
        key = re.sub(r"blocks\.(\d+)\.", r"blocks.0.\1.", key)
        state[key.replace("fc1", "w12").replace("fc2", "w3").replace("reg_token", "register_tokens")] = value.clone()
    if registers:
        row = torch.randn(1, 1, 96, generator=torch.Generator().manual_seed(3))
        state["pos_embed"] = torch.cat((row, state["pos_embed"]), 1)
    state["mask_token"] = torch.zeros(1, 96)
    plain = {re.sub(r"blocks\.0\.(\d+)\.", r"blocks.\1.", key): value for key, value in state.items()}
    peer.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(plain, peer))
    return state, peer


@pytest.mark.parametrize("registers", [False, True])
@torch.inference_mode()
def test_original_dinov2(registers):
    """Chunked blocks, w12 and w3, and a class token's row in front of the table, which registers' models fold."""
    state, peer = official_dinov2(registers)
    name = f"vit_giant_patch14_{'reg4_' if registers else ''}dinov2"
    model = vispe.load(name, state, origin="official", **GATED)
    assert_alike(model, peer, ((518, 518),))
    assert bool(model.report) == registers
    if registers:
        assert model.report == ["position.added.weight: the row of cls_token is added to the token itself"]
        assert_alike(model, peer, ((224, 448),))
    kept = vispe.load(name, state, position={"prefix_rows": True}, **GATED)  # with its row, the same function
    assert_alike(kept, peer, ((518, 518),))


@torch.inference_mode()
def test_original_dinov2_offset():
    """The hub's ``interpolate_pos_encoding``: scale factors from the target plus 0.1."""
    state, _ = official_dinov2(False)
    model = vispe.load("vit_giant_patch14_dinov2", state, image_size=(224, 448), **GATED)
    table = state["pos_embed"][:, 1:].reshape(1, 37, 37, -1).permute(0, 3, 1, 2)
    scale = tuple(float(n + 0.1) / 37 for n in (16, 32))
    expected = F.interpolate(table, scale_factor=scale, mode="bicubic", antialias=False)
    assert expected.shape[-2:] == (16, 32)
    torch.testing.assert_close(
        model.position.added.weight[1:], expected[0].permute(1, 2, 0).flatten(0, 1), atol=1e-5, rtol=0
    )
    assert torch.equal(model.position.added.weight[0], state["pos_embed"][0, 0])
    plain = vispe.load(
        "vit_giant_patch14_dinov2",
        state,
        image_size=(224, 448),
        position={"recipe": "mae"},
        **GATED,
    )
    assert (plain.position.added.weight - model.position.added.weight).abs().max() > 1e-3


@pytest.mark.parametrize("size", ["small", "small_plus"])
@torch.inference_mode()
def test_original_dinov3(size):
    """storage_tokens, periods, masked key biases, w1 w2 w3: as timm's own conversion reads them."""
    peer = of_timm(f"vit_{size}_patch16_dinov3_qkvb", global_pool="token")
    state = {}
    for key, value in peer.state_dict().items():
        key = key.replace("reg_token", "storage_tokens").replace("gamma_1", "ls1.gamma")
        key = key.replace("gamma_2", "ls2.gamma").replace("fc1_g", "w1").replace("fc1_x", "w2")
        state[key.replace("fc2", "w3") if size == "small_plus" else key] = value
    for i in range(2):
        q, v = state.pop(f"blocks.{i}.attn.q_bias"), state.pop(f"blocks.{i}.attn.v_bias")
        state[f"blocks.{i}.attn.qkv.bias"] = torch.cat((q, torch.ones_like(q), v))
        state[f"blocks.{i}.attn.qkv.bias_mask"] = torch.cat((torch.ones(64), torch.zeros(64), torch.ones(64)))
    state |= {"rope_embed.periods": torch.ones(4), "mask_token": torch.zeros(1, 64)}
    peer.load_state_dict(timm.models.eva.checkpoint_filter_fn(dict(state), peer))
    model = vispe.load(f"vit_{size}_patch16_dinov3_qkvb", state, **SMALL)  # found without being told
    assert_alike(model, peer, ((256, 256), (224, 448)))
    with pytest.raises(WeightsError, match=r"unknown 'blocks\.0\.attn\.qkv\.bias'"):
        vispe.load(f"vit_{size}_patch16_dinov3", state, **SMALL)
    without = {k: torch.zeros_like(v) if k.endswith("qkv.bias") else v for k, v in state.items()}
    plain = vispe.load(f"vit_{size}_patch16_dinov3", without, **SMALL)
    assert plain.report == ["blocks.*.attn.qkv.bias: 2 dropped, all zero, this model has none"]


@torch.inference_mode()
def test_original_mae_and_deit():
    """Fine-tuned MAE averages (fc_norm); its encoder and its whole pre-training file serve as a backbone."""
    tuned = of_timm("vit_base_patch16_224", global_pool="avg")
    model = vispe.load("vit_base_patch16_224.mae", tuned.state_dict(), pool="avg", num_classes=1000, **SMALL)
    assert_alike(model, tuned, ((224, 224),))
    encoder = of_timm("vit_base_patch16_224", num_classes=0)
    whole = {**encoder.state_dict(), "mask_token": torch.zeros(1, 1, 32), "decoder_pos_embed": torch.zeros(1, 197, 32)}
    for state, origin in ((encoder.state_dict(), None), (whole, "official"), (whole, None)):
        model = vispe.load("vit_base_patch16_224.mae", {"model": state}, origin=origin, **SMALL)
        assert_alike(model, encoder, ((224, 224),))
    deit = of_timm("deit_tiny_distilled_patch16_224")
    assert_alike(
        vispe.load("deit_tiny_distilled_patch16_224", {"model": deit.state_dict()}, "official", **SMALL),
        deit,
        ((224, 224),),
    )
    third = of_timm("deit3_small_patch16_224")
    state = {re.sub(r"ls([12])\.gamma", r"gamma_\1", key): value for key, value in third.state_dict().items()}
    assert_alike(vispe.load("deit3_small_patch16_224", state, "official", **SMALL), third, ((224, 224),))
