"""A timm network as a feature map, and padding kept out of it.

A batch of images of several sizes is padded. A convolution near an image's edge then sees what the padding has become,
a bias behind every layer, where an image alone sees zeros: DETR's published numbers depend on the batch for that
reason. Here the padded part is put back to zero before everything that looks around (``padding="zeroed"``), so that
an image gives the same features alone and in a batch; ``"original"`` leaves it, as DETR and transformers do.

Frozen batch norms (statistics and affine both constant) are folded into the convolution before them, in every forward:
a pass over the weights instead of two over the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vispe.layers.padding import rectangles, together
from vispe.layers.pretrained import library, take_weights

Norm = Literal["frozen", "batch"]
Padding = Literal["zeroed", "original"]
MANY = 1 << 20  # weights of a convolution: a ResNet-50's last stage, whose maps are small


class Backbone(nn.Module):
    """The last feature map of timm's network ``name``, and which of its cells hold image.

    ``stride`` 16 dilates the last stage of a network of stride 32 instead of striding (DC5). ``norm``: "frozen" takes
    batch norms as constants, "batch" leaves the network's norms as they are. ``frozen_stages``: so many feature levels
    of the network are not trained (2 of a ResNet: its stem and ``layer1``). ``knobs``: what else the network's
    constructor takes. ``ValueError`` for a name timm does not know, a network without dilation or stages.

    With ``padding="zeroed"`` a plain ResNet (no squeeze, no deep stem) computes a padded batch as one; any other
    network is run on the images of one size together, cut out of their padding, which no compiler can follow.
    """

    def __init__(
        self,
        name: str,
        stride: int = 32,
        norm: Norm = "frozen",
        frozen_stages: int = 2,
        padding: Padding = "zeroed",
        knobs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.padding = name, padding
        body = _network(name, stride, dict(knobs or {}))
        self.channels, self.stride = body.feature_info.channels()[-1], body.feature_info.reduction()[-1]
        if norm == "frozen":
            body = _frozen(body)
        self.body = body.to(memory_format=torch.channels_last)  # faster on the CPU, and made for tensor cores
        self.plain = _is_plain(self.body)
        for part in _first_stages(self.body, frozen_stages, name):
            part.requires_grad_(False)

    def forward(
        self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "b h w"] | None = None
    ) -> tuple[Float[Tensor, "b channels rows columns"], Bool[Tensor, "b rows columns"] | None]:
        """``images [b, 3, h, w]`` -> ``[b, channels, h / stride, w / stride]``, of a ResNet rounded up.

        A cell is real where the first of its pixels is, as if its image were alone; with ``padding="original"`` where
        the nearest pixel is. ``mask`` None: all is image, and so are the cells.
        """
        x = images.contiguous(memory_format=torch.channels_last)
        if mask is None or self.padding == "original":
            features = self._plain(x, None)[0] if self.plain else self._library(x)
            return features, None if mask is None else _nearest(mask, (features.shape[-2], features.shape[-1]))
        if not self.plain:
            return self._each_size(x, mask)
        features, real = self._plain(x, mask[:, None])
        assert real is not None
        return features, real[:, 0]

    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """:func:`~vispe.layers.pretrained.take_weights`."""
        take_weights(self.body, state, self.name)

    def _plain(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A ResNet on timm's parts: norms folded, padding zeroed."""
        body: Any = self.body
        x = F.relu(convolve(_zeroed(x, real), body.conv1, body.bn1), inplace=True)
        real = _strided(real, 2)
        x, real = body.maxpool(_zeroed(x, real)), _strided(real, 2)
        for layer in (body.layer1, body.layer2, body.layer3, body.layer4):
            for block in layer:
                x, real = _residual(block, x, real)
        return x, real

    def _library(self, x: Tensor) -> Tensor:
        x = self.body(x)[-1]
        return x if x.shape[1] == self.channels else x.permute(0, 3, 1, 2)  # Swin's are channels last

    def _each_size(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        groups = together(rectangles(mask, x)).items()
        maps = [(rows, self._library(x[rows, :, :h, :w])) for (h, w), rows in groups]
        grid = [max(each.shape[side] for _, each in maps) for side in (-2, -1)]
        features = maps[0][1].new_zeros(len(x), self.channels, *grid)
        real = mask.new_zeros(len(x), *grid)
        for rows, each in maps:
            features[rows, :, : each.shape[-2], : each.shape[-1]] = each
            real[rows, : each.shape[-2], : each.shape[-1]] = True
        return features, real


def convolve(x: Float[Tensor, "b c h w"], conv: nn.Conv2d, norm: nn.Module) -> Float[Tensor, "b d hh ww"]:
    """``norm(conv(x))``; of a frozen norm the scale goes into the weights, or where those are many, onto the result."""
    if not _is_frozen(norm):
        return norm(conv(x))
    known: Any = norm
    scale = known.weight * (known.running_var + known.eps).rsqrt()
    bias = known.bias - known.running_mean * scale
    how: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
    if conv.weight.numel() < MANY:
        return F.conv2d(x, conv.weight * scale[:, None, None, None], bias, *how)
    return F.conv2d(x, conv.weight, None, *how).mul_(scale[:, None, None]).add_(bias[:, None, None])


def _residual(block: Any, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One block of a ResNet, and which cells of its output are real."""
    pairs = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    pairs += [(block.conv3, block.bn3)] if hasattr(block, "conv3") else []
    shortcut = x if block.downsample is None else convolve(x, *block.downsample)
    for i, (conv, norm) in enumerate(pairs):
        x = convolve(_zeroed(x, real) if conv.kernel_size[0] > 1 else x, conv, norm)
        real = _strided(real, conv.stride[0])
        x = F.relu(x, inplace=True) if i < len(pairs) - 1 else x
    return F.relu(x.add_(shortcut), inplace=True), real


def _nearest(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    return F.interpolate(mask[None].float(), size=grid)[0].to(torch.bool)


def _zeroed(x: Tensor, real: Tensor | None) -> Tensor:
    return x if real is None else x * real.to(x.dtype)


def _strided(real: Tensor | None, stride: int) -> Tensor | None:
    """A cell is real if the first of its pixels is: what a padded stride leaves of an image alone."""
    return real if real is None or stride == 1 else real[..., ::stride, ::stride]


def _is_frozen(norm: nn.Module) -> bool:
    return type(norm).__name__ == "FrozenBatchNorm2d"  # timm's


def _network(name: str, stride: int, knobs: dict[str, Any]) -> Any:
    timm = library()
    if not timm.is_model(name):
        raise ValueError(f"timm knows no backbone {name!r}; timm.list_models() lists those it has")
    knobs |= {} if stride == 32 else {"output_stride": stride}
    try:
        return timm.create_model(name, pretrained=False, features_only=True, out_indices=(-1,), **knobs)
    except (TypeError, AssertionError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"timm's {name!r} gives no feature map of stride {stride} ({knobs}): {error}") from error


def _frozen(body: Any) -> Any:
    """The network with constant norms that change nothing yet: timm starts some at zero, and zero they would stay."""
    from timm.layers import freeze_batch_norm_2d

    for part in body.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.ones_(part.weight)
    return freeze_batch_norm_2d(body)


def _is_plain(body: Any) -> bool:
    """Whether :meth:`Backbone._plain` says all that timm's own forward does."""
    from timm.models.resnet import BasicBlock, Bottleneck

    layers = [getattr(body, f"layer{i}", None) for i in (1, 2, 3, 4)]
    stem = (getattr(body, "conv1", None), getattr(body, "maxpool", None))
    if not isinstance(stem[0], nn.Conv2d) or not isinstance(stem[1], nn.MaxPool2d) or None in layers:
        return False
    blocks = [block for layer in layers for block in layer]  # type: ignore[union-attr]
    if any(type(block) not in (BasicBlock, Bottleneck) for block in blocks):
        return False
    extras = [getattr(block, part, None) for block in blocks for part in ("aa", "se", "drop_block", "drop_path")]
    acts = [body.act1] + [getattr(block, f"act{i}") for block in blocks for i in (1, 2)]
    paths = [block.downsample for block in blocks if block.downsample is not None]
    norms = [body.bn1] + [
        getattr(block, part) for block in blocks for part in ("bn1", "bn2", "bn3") if hasattr(block, part)
    ]
    return (
        all(_is_frozen(norm) or type(norm) is nn.BatchNorm2d for norm in norms)
        and all(extra is None or isinstance(extra, nn.Identity) for extra in extras)
        and all(isinstance(act, nn.ReLU) for act in acts)
        and all(len(path) == 2 and isinstance(path[0], nn.Conv2d) for path in paths)
    )


def _first_stages(body: Any, count: int, name: str) -> list[nn.Module]:
    """The parts of a network up to its ``count``-th feature level."""
    if not count:
        return []
    stages = [entry["module"].replace(".", "_") for entry in body.feature_info.info]
    parts = dict(body.named_children())
    ends = [i for i, part in enumerate(parts) if count <= len(stages) and stages[count - 1] == part]
    if not ends:
        raise ValueError(
            f"{name} has no {count} stages that could be frozen, got frozen_stages {count}; 0 freezes none"
        )
    return list(parts.values())[: ends[0] + 1]
