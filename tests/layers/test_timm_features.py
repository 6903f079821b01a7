"""Backbones: four maps, and a frozen norm that nothing moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vispe.layers.timm_features import FrozenBatchNorm, backbone

timm = pytest.importorskip("timm", reason="backbones are timm's")
KNOBS = {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)}


def test_a_frozen_norm_is_an_eval_batch_norm_and_stays():
    norm, frozen = nn.BatchNorm2d(4).eval(), FrozenBatchNorm(4)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    frozen.load_state_dict(norm.state_dict())
    before = {key: value.clone() for key, value in frozen.state_dict().items()}
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    out = frozen.train()(x)
    assert torch.equal(out, norm(x))
    out.sum().backward()
    assert x.grad is not None
    assert not list(frozen.parameters())
    assert all(torch.equal(value, before[key]) for key, value in frozen.state_dict().items())


@pytest.mark.parametrize("size", [(64, 96), (37, 50)])
@torch.inference_mode()
def test_a_resnets_maps(size):
    net = backbone("resnet50", KNOBS)
    assert net.strides == [4, 8, 16, 32]
    for channels, stride, map_ in zip(net.channels, net.strides, net(torch.randn(1, 3, *size)), strict=True):
        assert map_.shape == (1, channels, -(-size[0] // stride), -(-size[1] // stride))


def test_norms_frozen_or_trained():
    assert not any(
        isinstance(m, nn.BatchNorm2d) and m.weight.requires_grad for m in backbone("resnet50", KNOBS).modules()
    )
    trained = [m for m in backbone("resnet50", KNOBS, "batch").modules() if isinstance(m, nn.BatchNorm2d)]
    assert trained
    assert all(m.weight.requires_grad for m in trained)


def test_a_frozen_start_leaves_no_branch_at_zero():
    assert all(
        m.weight.abs().min() > 0 for m in backbone("resnet50", KNOBS).modules() if isinstance(m, FrozenBatchNorm)
    )


def test_an_unknown_name_is_named():
    with pytest.raises(ValueError, match="timm has no backbone 'resnet5000'"):
        backbone("resnet5000", {})


def test_maps_with_channels_last_are_refused():
    net = backbone("swinv2_tiny_window8_256", {"embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)})
    with pytest.raises(ValueError, match="this backbone's maps are not"):
        net(torch.zeros(1, 3, 256, 256))
