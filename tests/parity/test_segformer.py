"""SegFormer against transformers' SegformerForSemanticSegmentation: its random weights through the rename table."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vispe
from vispe.models import home
from vispe.models.segformer import SegFormer
from vispe.weights import WeightsError
from vispe.weights.convert import accounts_for, convert
from vispe.weights.files import facts

transformers = pytest.importorskip("transformers", reason="transformers is the parity peer")

NAMES = [f"segformer_b{k}" for k in range(6)]
SHORT = (1, 2, 1, 1)
FEW = {"widths": (16, 32, 48, 64), "heads": (1, 2, 3, 4), "depths": SHORT, "head_width": 32, "num_classes": 7}


def config(name: str, **knobs: object):
    spec = home(name).VARIANTS[name].but(**knobs)
    return transformers.SegformerConfig(
        hidden_sizes=spec.widths,
        depths=spec.depths,
        num_attention_heads=spec.heads,
        decoder_hidden_size=spec.head_width,
        num_labels=spec.num_classes,
    )


def peer(name: str, **knobs: object) -> nn.Module:
    """Random weights large enough to matter, running statistics included."""
    torch.manual_seed(0)
    model = transformers.SegformerForSemanticSegmentation(config(name, **knobs)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        norm = model.decode_head.batch_norm
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return model


def ours(name: str, model: nn.Module, **knobs: object) -> SegFormer:
    return vispe.load(name, model.state_dict(), origin="transformers", **knobs)


def pictures(b: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(b, 3, *size, generator=torch.Generator().manual_seed(b))


@pytest.mark.parametrize("size", [(128, 128), (64, 160), (97, 131), (100, 70)])
@torch.inference_mode()
def test_b0_whole(size):
    model, images = peer("segformer_b0"), pictures(2, size)
    found, theirs = ours("segformer_b0", model)(images), model(images).logits
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)
    assert theirs.std() > 0.5


@pytest.mark.parametrize("name", NAMES[1:])
@torch.inference_mode()
def test_the_others_with_fewer_blocks(name):
    """b2 to b5 differ in depth alone: one network of their widths, in full, stands for them."""
    knobs = {"depths": SHORT, "num_classes": 19}
    model, images = peer(name, **knobs), pictures(1, (70, 96))
    found, theirs = ours(name, model, **knobs)(images), model(images).logits
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_features_are_the_peers_stages():
    model, images = peer("segformer_b0", **FEW), pictures(2, (75, 100))
    theirs = model(images, output_hidden_states=True).hidden_states
    for mine, other in zip(ours("segformer_b0", model, **FEW).features(images), theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_picture_is_the_peers():
    model, images, sizes = peer("segformer_b0", **FEW), pictures(2, (64, 96)), [(128, 200), (50, 77)]
    processor = transformers.SegformerImageProcessor()
    theirs = processor.post_process_semantic_segmentation(model(images), target_sizes=sizes)
    found = home("segformer_b0").semantic(ours("segformer_b0", model, **FEW)(images), sizes)
    for mine, other in zip(found, theirs, strict=True):
        assert (mine == other).float().mean() > 0.9999


def test_gradients_are_the_peers():
    model, images = peer("segformer_b0", **FEW), pictures(2, (64, 96))
    network = ours("segformer_b0", model, **FEW)
    labels = torch.randint(0, 7, (2, 64, 96), generator=torch.Generator().manual_seed(5))
    model(images, labels=labels).loss.backward()
    logits = F.interpolate(network(images), size=(64, 96), mode="bilinear", align_corners=False)
    F.cross_entropy(logits, labels, ignore_index=255).backward()
    theirs = {key: p.grad for key, p in model.named_parameters()}
    converted = convert(theirs, facts("segformer_b0")["origin"]["transformers"], "transformers")
    for key, parameter in network.named_parameters():
        torch.testing.assert_close(
            parameter.grad, converted[key], atol=1e-5, rtol=1e-3, msg=lambda m, k=key: f"{k}: {m}"
        )


# --- names ------------------------------------------------------------------------------------------------------------


def classic(key: str) -> str:
    """transformers 5's name -> the one in the published files."""
    key = re.sub(r"stages\.(\d+)\.patch_embeddings\.", r"encoder.patch_embeddings.\1.", key)
    key = re.sub(r"stages\.(\d+)\.blocks\.", r"encoder.block.\1.", key)
    key = re.sub(r"stages\.(\d+)\.layer_norm\.", r"encoder.layer_norm.\1.", key)
    for new, old in (
        ("attention.q_proj", "attention.self.query"),
        ("attention.k_proj", "attention.self.key"),
        ("attention.v_proj", "attention.self.value"),
        ("attention.sequence_reduction.sequence_reduction", "attention.self.sr"),
        ("attention.sequence_reduction.layer_norm", "attention.self.layer_norm"),
        ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc1", "mlp.dense1"),
        ("mlp.fc2", "mlp.dense2"),
        ("layernorm_before", "layer_norm_1"),
        ("layernorm_after", "layer_norm_2"),
        ("linear_projections", "linear_c"),
    ):
        key = key.replace(new, old)
    return key


def official(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The classic names -> NVlabs', as transformers' own conversion script reads them, the other way round."""
    made = {}
    for key, value in state.items():
        name = key.replace("segformer.encoder.", "backbone.")
        name = re.sub(r"patch_embeddings\.(\d)\.", lambda m: f"patch_embed{int(m[1]) + 1}.", name)
        name = name.replace(".layer_norm.weight", ".norm.weight").replace(".layer_norm.bias", ".norm.bias")
        name = re.sub(r"block\.(\d)\.", lambda m: f"block{int(m[1]) + 1}.", name)
        name = re.sub(r"backbone\.layer_norm\.(\d)\.", lambda m: f"backbone.norm{int(m[1]) + 1}.", name)
        name = re.sub(r"layer_norm_(\d)", r"norm\1", name)
        name = name.replace("attention.self.query", "attn.q").replace("attention.output.dense", "attn.proj")
        name = name.replace("attention.self", "attn").replace("dense1", "fc1").replace("dense2", "fc2")
        name = re.sub(r"linear_c\.(\d)\.", lambda m: f"linear_c{int(m[1]) + 1}.", name)
        name = name.replace("linear_fuse.weight", "linear_fuse.conv.weight").replace("batch_norm", "linear_fuse.bn")
        made[name.replace("decode_head.classifier", "decode_head.linear_pred")] = value
    for name in [name for name in made if ".attn.key." in name]:
        values = made.pop(name.replace(".key.", ".value."))
        made[name.replace(".key.", ".kv.")] = torch.cat((made.pop(name), values))
    return made


def test_classic_and_official_names_load_the_same():
    model = peer("segformer_b0", **FEW)
    old = {classic(key): value for key, value in model.state_dict().items()}
    assert "segformer.encoder.block.1.1.attention.self.sr.weight" in old
    theirs = official(old)
    assert "backbone.block1.0.attn.kv.weight" in theirs
    assert "backbone.patch_embed3.norm.bias" in theirs
    theirs |= {f"decode_head.conv_seg.{end}": torch.zeros(7) for end in ("weight", "bias")}
    new = ours("segformer_b0", model, **FEW).state_dict()
    for state, origin in ((old, "transformers"), (theirs, "nvlabs"), (old, None), (theirs, None)):
        found = vispe.load("segformer_b0", state, origin=origin, **FEW).state_dict()
        assert all(torch.equal(new[key], found[key]) for key in new)


def test_an_encoder_of_imagenet_is_a_start():
    config_ = config("segformer_b0", **FEW)
    encoder = transformers.SegformerForImageClassification(config_).state_dict()
    for state in (encoder, {classic(key): value for key, value in encoder.items()}):
        model = vispe.load("segformer_b0", state, origin="transformers", **FEW)
        assert all("the checkpoint has no head" in line for line in model.report)
        assert len(model.report) == len(model.head.state_dict())
    bare = {key.removeprefix("segformer."): value for key, value in encoder.items() if "classifier" not in key}
    assert vispe.load("segformer_b0", bare, **FEW).report


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_every_variant_is_accounted_for(name):
    with torch.device("meta"):
        theirs = transformers.SegformerForSemanticSegmentation(config(name)).state_dict()
        own = vispe.build(name).state_dict()
    tables = facts(name)["origin"]
    old = {classic(key): value for key, value in theirs.items()}
    for state, origin in ((theirs, "transformers"), (old, "transformers"), (official(old), "nvlabs")):
        assert accounts_for(tables[origin], state)
        converted = convert(state, tables[origin], origin)
        assert {key: value.shape for key, value in converted.items()} == {k: v.shape for k, v in own.items()}
    assert sum(v.numel() for k, v in own.items()) == sum(v.numel() for v in theirs.values())


def test_a_key_that_nobody_knows_is_refused():
    state = peer("segformer_b0", **FEW).state_dict() | {"decode_head.extra.weight": torch.zeros(1)}
    with pytest.raises(WeightsError, match=r"nothing is known of 'decode_head\.extra\.weight'"):
        vispe.load("segformer_b0", state, origin="transformers", **FEW)
