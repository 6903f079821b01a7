"""Backbones of dense prediction: four maps of one of timm's networks, at 1/4 to 1/32 of the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vispe.layers.pretrained import library, take_weights
from vispe.layers.swin import SwinFeatures

Norm = Literal["frozen", "batch"]


class FrozenBatchNorm(nn.BatchNorm2d):
    """A batch norm that stays what its file says: statistics, scale and shift are read, never changed, also in
    training."""

    def __init__(self, channels: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(channels, device=device, dtype=dtype)
        for name in ("weight", "bias"):
            value = getattr(self, name).detach()
            delattr(self, name)
            self.register_buffer(name, value)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class TimmFeatures(nn.Module):
    """``images [b, 3, h, w]`` -> the last four maps of a network of timm's that keeps channels first."""

    def __init__(self, name: str, norm: Norm, knobs: Mapping[str, Any]) -> None:
        super().__init__()
        self.name = name
        made = dict(knobs)
        if norm == "frozen" and "resne" in name:  # a last scale that starts at zero would stay there
            made = {"norm_layer": FrozenBatchNorm, "zero_init_last": False, **made}
        self.net: Any = library().create_model(name, pretrained=False, features_only=True, **made)
        info: Any = self.net.feature_info
        self.channels = list(info.channels()[-4:])
        self.strides = list(info.reduction()[-4:])

    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """:func:`~vispe.layers.pretrained.take_weights`."""
        take_weights(self.net, state, self.name)

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> list[Float[Tensor, "b c y x"]]:
        maps = self.net(images)[-4:]
        for found, channels in zip(maps, self.channels, strict=True):
            if found.shape[1] != channels:
                raise ValueError(f"this backbone's maps are not [b, {channels}, h, w] but {list(found.shape)}")
        return maps


def backbone(
    name: str, knobs: Mapping[str, Any], norm: Norm = "frozen", drop_path: float = 0.0
) -> SwinFeatures | TimmFeatures:
    """The network ``name`` of timm's with fresh weights; ``.channels`` and ``.strides`` say what its maps are.

    ``knobs``: what its constructor takes. ``norm``: a ResNet's batch norms, kept as they are or trained.
    ``drop_path``: a Swin's last block's rate. ``ValueError`` without timm, or for a name it does not know.
    """
    try:
        return SwinFeatures(name, drop_path, knobs) if name.startswith("swin_") else TimmFeatures(name, norm, knobs)
    except RuntimeError as error:  # timm's, for a name
        raise ValueError(f"timm has no backbone {name!r}: {error}") from error
