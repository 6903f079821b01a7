"""Swin's maps: timm's own where windows tile, the official order of padding and shift where they do not."""

from __future__ import annotations

import sys

import pytest
import torch

from vispe.layers.swin import SwinFeatures, _apart

timm = pytest.importorskip("timm", reason="a Swin is made of timm's parts")
KNOBS = {"embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 2, 4), "window_size": 4}


def swin() -> SwinFeatures:
    torch.manual_seed(0)
    return SwinFeatures("swin_tiny_patch4_window7_224", knobs=KNOBS).eval()


@torch.inference_mode()
def test_it_is_timms_where_windows_tile_every_map():
    net, images = swin(), torch.randn(2, 3, 128, 256)
    theirs = net.net(images)
    for own, map_, norm in zip(net(images), theirs, net.norms, strict=True):
        torch.testing.assert_close(own, norm(map_).permute(0, 3, 1, 2), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_elsewhere_timm_is_another_network():
    """Not a bug to be repaired here: the official code pads, then shifts, and so do weights trained with it."""
    net, images = swin(), torch.randn(1, 3, 68, 68)
    first = net.norms[0](net.net(images)[0]).permute(0, 3, 1, 2)
    assert (net(images)[0] - first).abs().max() > 1e-3


@pytest.mark.parametrize("size", [(5, 7), (33, 70), (64, 64), (100, 31)])
@torch.inference_mode()
def test_any_size_gives_sides_rounded_up(size):
    net = swin()
    maps = net(torch.randn(1, 3, *size))
    h, w = size
    for channels, stride, map_ in zip(net.channels, net.strides, maps, strict=True):
        assert map_.shape == (1, channels, -(-h // stride), -(-w // stride))
        assert torch.isfinite(map_).all()


@torch.inference_mode()
def test_a_batch_is_its_images():
    net, images = swin(), torch.randn(3, 3, 44, 60)
    for whole, alone in zip(net(images), net(images[1:2]), strict=True):
        torch.testing.assert_close(whole[1:2], alone, atol=1e-5, rtol=1e-5)


def test_neighbours_by_the_shift_alone_are_kept_apart():
    """A side of 4, windows of 2, shifted by 1: the last window's halves are the two ends of the picture."""

    class Block:
        window_size, shift_size = (2, 2), (1, 1)

    apart = _apart((4, 4), Block(), torch.zeros(1))
    assert apart.shape == (4, 4, 4)
    assert not apart[0].any()  # the first window is whole
    assert apart[1].tolist() == [[0, -100, 0, -100], [-100, 0, -100, 0]] * 2  # left and right
    assert apart[2].tolist() == [[0, 0, -100, -100]] * 2 + [[-100, -100, 0, 0]] * 2  # above and below
    assert apart[3].tolist() == [[0 if i == j else -100 for j in range(4)] for i in range(4)]


def test_without_timm_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"pip install 'vispe\[detect\]'"):
        SwinFeatures("swin_tiny_patch4_window7_224")
