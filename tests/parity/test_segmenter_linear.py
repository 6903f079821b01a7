"""Segmenter with a linear head against timm's ViT and the few lines of the authors' decoder, with random weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vispe
from vispe.models.segmenter_linear import VARIANTS

timm = pytest.importorskip("timm", reason="timm is the parity peer")

SMALL = {"width": 64, "depth": 2, "heads": 4, "hidden": 256}
CLASSES = 7


def peers(name: str) -> tuple[nn.Module, nn.Linear]:
    """timm's ViT at 384 and a linear map, every parameter drawn."""
    torch.manual_seed(0)
    vit = timm.create_model(name, embed_dim=64, depth=2, num_heads=4, dynamic_img_size=True)
    head = nn.Linear(64, CLASSES)
    with torch.no_grad():
        for key, parameter in [*vit.named_parameters(), *head.named_parameters()]:
            spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.normal_(std=1.0 if "pos" in key or "token" in key else spread)
    return vit.eval(), head


def authors(vit: nn.Module, head: nn.Linear, images: Tensor) -> Tensor:
    """What the authors' ``Segmenter.forward`` does: pad, encode, leave out the class token, map, upsample, cut."""
    h, w = images.shape[2:]
    images = F.pad(images, (0, -w % 16, 0, -h % 16))
    size = images.shape[2:]
    masks = head(vit.forward_features(images)[:, 1:]).transpose(1, 2).unflatten(2, (size[0] // 16, size[1] // 16))
    return F.interpolate(masks, size=size, mode="bilinear")[:, :, :h, :w]


@pytest.mark.parametrize("origin", ["timm", "segmenter"])
@torch.inference_mode()
def test_encoder_and_head(origin):
    vit, head = peers("vit_tiny_patch16_384")
    if origin == "timm":  # an encoder alone, the head as a mapping adds it
        state = vit.state_dict()
        model = vispe.load(
            "segmenter_linear_tiny_patch16", state, "timm", num_classes=CLASSES, position="table", **SMALL
        )
        model.head.load_state_dict(head.state_dict())
        assert [line.split(":")[0] for line in model.report] == ["head.weight", "head.bias"]
    else:
        state = {f"encoder.{key}": value for key, value in vit.state_dict().items()}
        state |= {f"decoder.head.{key}": value for key, value in head.state_dict().items()}
        knobs = {**SMALL, "num_classes": CLASSES}
        model = vispe.load("segmenter_linear_tiny_patch16", state, "segmenter", **knobs)
    for size in ((384, 384), (380, 371)):  # of one grid: nothing is resampled
        images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
        expected = authors(vit, head, images)
        assert expected.std() > 0.1
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_at_other_sizes_with_timms_way_of_reading_the_table():
    vit, head = peers("vit_tiny_patch16_384")
    knobs = {**SMALL, "num_classes": CLASSES, "position": {"recipe": "timm"}}
    model = vispe.load("segmenter_linear_tiny_patch16", vit.state_dict(), "timm", **knobs)
    model.head.load_state_dict(head.state_dict())
    for size in ((224, 224), (97, 250)):
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(model(images), authors(vit, head, images), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_authors_way_of_reading_the_table():
    """``resize_pos_embed``: plain bilinear on the grid, the class token's row kept."""
    model = vispe.build("segmenter_linear_tiny_patch16", **SMALL)
    table = model.position.added.weight.detach()
    cells = table[None, 1:].transpose(1, 2).unflatten(2, (24, 24))
    expected = F.interpolate(cells, size=(11, 40), mode="bilinear").flatten(2).transpose(1, 2)[0]
    found = model.position.table((11, 40), table.device)
    torch.testing.assert_close(found, torch.cat((table[:1], expected)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_key_and_shape_of_timms_files(name):
    spec = VARIANTS[name]
    size = name.split("_")[2]
    with torch.device("meta"):
        peer = timm.create_model(f"vit_{size}_patch16_384").state_dict()
        own = vispe.build(name).state_dict()
    from vispe.weights.convert import convert
    from vispe.weights.files import facts

    assert f"vit_{size}_patch16_384" in facts(name)["weights"]["url"]
    rules = [
        {**rule, "change": "first_of_one"} if "pos" in rule["from"] else rule for rule in facts(name)["origin"]["timm"]
    ]
    made = convert(peer, rules, "timm")
    assert {key: tuple(value.shape) for key, value in made.items()} == {k: tuple(v.shape) for k, v in own.items()}
    assert spec.num_classes == 0
