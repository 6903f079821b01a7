"""timm's networks give timm's numbers, with their norms folded and their padding kept out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vispe.layers.backbone import Backbone, convolve

timm = pytest.importorskip("timm", reason="the backbones are timm's")


def stirred(module: nn.Module, seed: int = 0) -> None:
    """Norms that do something."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if name.endswith("running_var") or ("bn" in name and name.endswith("weight")):
                value.copy_(torch.rand(value.shape, generator=g) * 0.5 + 0.5)
            elif name.endswith(("running_mean", "bias")):
                value.copy_(torch.randn(value.shape, generator=g) * 0.2)


def images(h: int, w: int, b: int = 1) -> Tensor:
    return torch.randn(b, 3, h, w, generator=torch.Generator().manual_seed(h * w))


@pytest.mark.parametrize("norm", ["frozen", "batch"])
@pytest.mark.parametrize("stride", [32, 16])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@torch.inference_mode()
def test_a_resnet_gives_what_timms_gives(name, stride, norm):
    network = timm.create_model(name, features_only=True, out_indices=(4,), output_stride=stride).eval()
    stirred(network)
    own = Backbone(name, stride, norm).eval()
    own.start_from(network.state_dict())
    assert own.plain
    assert own.stride == stride
    found, real = own(images(70, 101))
    (wanted,) = network(images(70, 101))
    assert real is None
    assert found.shape == (1, own.channels, -(-70 // stride), -(-101 // stride))
    torch.testing.assert_close(found, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("many", [0, 1 << 30])
def test_the_scale_may_go_into_the_weights_or_onto_the_result(many, monkeypatch):
    monkeypatch.setattr("vispe.layers.backbone.MANY", many)
    block = timm.layers.freeze_batch_norm_2d(nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1, bias=False), nn.BatchNorm2d(5)))
    with torch.no_grad():
        for part in ("weight", "bias", "running_mean", "running_var"):
            getattr(block[1], part).copy_(torch.rand(5) + 0.5)
    x = images(9, 12)
    torch.testing.assert_close(convolve(x, block[0], block[1]), block(x))
    grads = [torch.autograd.grad(y.square().sum(), block[0].weight)[0] for y in (convolve(x, *block), block(x))]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("stride", [32, 16])
@torch.inference_mode()
def test_padding_is_not_seen_whatever_it_holds(stride):
    own = Backbone("resnet18", stride).eval()
    stirred(own)
    for h, w in ((33, 64), (64, 97), (70, 101), (65, 33)):
        batch, mask = torch.full((1, 3, 101, 130), 9.0), torch.zeros(1, 101, 130, dtype=torch.bool)
        batch[..., :h, :w], mask[:, :h, :w] = images(h, w), True
        alone, _ = own(images(h, w))
        found, real = own(batch, mask)
        rows, columns = alone.shape[-2:]
        assert real is not None
        assert real.shape == (1, *found.shape[-2:])
        assert real[0, :rows, :columns].all()
        assert real.sum() == rows * columns
        scale = alone.abs().max().item()
        torch.testing.assert_close(found[..., :rows, :columns], alone, atol=1e-5 * scale, rtol=0)


@torch.inference_mode()
def test_the_original_sees_it():
    """Which is why there is the other way: the norms' biases fill the padding, and it leaks back over the edge."""
    own = Backbone("resnet18", padding="original").eval()
    stirred(own)
    batch, mask = torch.zeros(1, 3, 96, 96), torch.zeros(1, 96, 96, dtype=torch.bool)
    batch[..., :64, :64], mask[:, :64, :64] = images(64, 64), True
    found, real = own(batch, mask)
    alone, _ = own(images(64, 64))
    assert real is not None
    assert real[0].tolist() == [[True, True, False]] * 2 + [[False] * 3]
    assert (found[..., :2, :2] - alone).abs().max() > 1e-2 * alone.abs().max()


@torch.inference_mode()
def test_the_original_takes_the_nearest_pixel():
    own, mask = Backbone("resnet18", padding="original").eval(), torch.zeros(1, 161, 64, dtype=torch.bool)
    mask[:, :128] = True
    _, real = own(images(161, 64), mask)
    wanted = torch.nn.functional.interpolate(mask[None].float(), size=(6, 2))[0].bool()
    assert torch.equal(real, wanted)
    assert wanted.any(2).sum() == 5  # an image of 128 rows has 4: the fifth is the stretch of the nearest pixel
    _, exact = Backbone("resnet18").eval()(images(161, 64), mask)
    assert exact is not None
    assert exact.any(2).sum() == 4


@torch.inference_mode()
def test_a_network_that_is_no_plain_resnet_runs_size_by_size():
    own = Backbone("resnet50d", frozen_stages=0).eval()
    assert not own.plain
    batch, mask = torch.zeros(3, 3, 64, 96), torch.zeros(3, 64, 96, dtype=torch.bool)
    for i, (h, w) in enumerate(((64, 96), (33, 50), (64, 96))):
        batch[i, :, :h, :w], mask[i, :h, :w] = images(h, w)[0], True
    found, real = own(batch, mask)
    alone, _ = own(images(33, 50))
    torch.testing.assert_close(found[1:2, :, :2, :2], alone, atol=1e-5 * alone.abs().max().item(), rtol=0)
    assert real is not None
    assert real.sum((1, 2)).tolist() == [6, 4, 6]


def test_only_the_last_stages_are_trained_and_frozen_norms_are_no_parameters():
    trained = {n.split(".")[0] for n, p in Backbone("resnet18").body.named_parameters() if p.requires_grad}
    assert trained == {"layer2", "layer3", "layer4"}
    assert all(p.requires_grad for p in Backbone("resnet18", frozen_stages=0).parameters())
    assert not [n for n, _ in Backbone("resnet18").named_parameters() if "bn" in n or "downsample.1" in n]
    weights = [b for n, b in Backbone("resnet18").named_buffers() if n.endswith("bn2.weight")]
    assert weights
    assert all(bool(b.all()) for b in weights)  # timm's zeros would stay zeros


def test_weights_of_a_classifier():
    for name in ("resnet18", "convnext_atto"):
        state = timm.create_model(name).state_dict()
        own = Backbone(name, frozen_stages=0)
        own.start_from(state)
        key = "layer1.0.conv1.weight" if name == "resnet18" else "stages.1.blocks.0.mlp.fc1.weight"
        assert torch.equal(own.body.state_dict()[key.replace("stages.1", "stages_1")], state[key])
    before = own.body.state_dict()["stem_0.weight"].clone()
    for wrong in ({k: v for k, v in state.items() if k != "stem.0.bias"}, {**state, "stem.0.weight": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"convnext_atto.*stem"):
            own.start_from(wrong)
    assert torch.equal(own.body.state_dict()["stem_0.weight"], before)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("resnet49",), "no backbone 'resnet49'"),
        (("vit_tiny_patch16_224", 16), "'vit_tiny_patch16_224' gives no feature map of stride 16"),
        (("resnet18", 32, "frozen", 7), "resnet18 has no 7 stages"),
    ],
)
def test_bad_names_are_named(given, named):
    with pytest.raises(ValueError, match=named):
        Backbone(*given)
