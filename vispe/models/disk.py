"""DISK: features of every pixel, trained by reinforcement (Tyszkiewicz et al. 2020, 2006.13566).

What is different: there is no cell and no coarse grid. The U-Net ends in one logit and one descriptor for every pixel,
so a keypoint is a whole pixel and its descriptor is read, not interpolated. This is the one model of the zoo whose
network is a library's: kornia's U-Net, imported when a model is built (``pip install 'vispe[disk]'``).

Its last convolution is 80 % of the work, most of it for descriptors of pixels that are no keypoints. It is taken out
here and applied twice: to every pixel for the logit alone, then to the chosen keypoints for their descriptors.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vispe.layers.detection import PointFeatures, window_maximum
from vispe.spec import Spec

STRIDE = 16  # of the U-Net's smallest map


@dataclasses.dataclass(frozen=True, kw_only=True)
class DISKSpec(Spec):
    """Knobs of :class:`DISK`: a keypoint's logit is strictly above the threshold and the largest within the radius."""

    descriptor_dim: int = 128
    max_keypoints: int = 2048
    detection_threshold: float = 0.0
    nms_radius: int = 2  # the official window of 5 pixels

    def __post_init__(self) -> None:
        if self.descriptor_dim < 1 or min(self.max_keypoints, self.nms_radius) < 0:
            raise ValueError(
                f"DISK needs descriptor_dim >= 1, max_keypoints >= 0 and nms_radius >= 0, got {self.descriptor_dim}, "
                f"{self.max_keypoints} and {self.nms_radius}"
            )


class DISK(nn.Module):
    """Detect and describe: ``image [b, 1 or 3, h, w]`` in [0, 1] to one ``PointFeatures`` a picture, strongest first.

    Keypoints are (x, y) pixels of that tensor, whole numbers; scores are logits; descriptors have unit norm. Any size:
    the picture is padded with zeros at the right and bottom to multiples of 16, and nothing is found in the padding.
    Instance norms see that padding, so it is part of the result, as in kornia. No larger than 16 x 16: no keypoints.
    """

    def __init__(self, spec: DISKSpec = DISKSpec()) -> None:
        super().__init__()
        self.spec = spec
        self.unet, self.head = _kornia_unet_and_head(spec.descriptor_dim)

    def forward(self, image: Tensor) -> list[PointFeatures]:
        """Features of every picture of the batch; ``ValueError`` for a wrong shape or dtype."""
        self._check(image)
        h, w = image.shape[-2:]
        if image.numel() == 0 or max(h, w) <= STRIDE:  # one cell in the smallest map: no instance norm of it exists
            return [self._nothing(image) for _ in image]
        features = self.unet(F.pad(image.expand(-1, 3, -1, -1), (0, -w % STRIDE, 0, -h % STRIDE)))
        logits = self.logits(features)[:, :h, :w]
        peaks = strict_maxima(logits, self.spec.nms_radius) & (logits > self.spec.detection_threshold)
        return [self._one(*each) for each in zip(features, logits, peaks, strict=True)]

    def logits(self, features: Tensor) -> Tensor:
        """Keypoint logit of every pixel: ``[b, c, h, w]`` to ``[b, h, w]``."""
        weight, bias = self._last()
        return F.conv2d(features, weight[-1:], bias[-1:], padding="same")[:, 0]

    def describe(self, features: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Unit descriptors ``[n, d]`` at pixels ``x, y [n]`` of ``features [c, h, w]``: the last convolution."""
        rows, columns = (_window(at, self.head.kernel_size[0] // 2) for at in (y, x))
        h, w = features.shape[1:]
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
        patches = features[:, rows.clamp(0, h - 1)[:, :, None], columns.clamp(0, w - 1)[:, None, :]]
        patches = (patches * inside).transpose(0, 1).flatten(1)
        weight, bias = self._last()
        return F.normalize(F.linear(patches, weight[:-1].flatten(1), bias[:-1]), dim=-1)

    def _last(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the last convolution: descriptor channels first, the logit's last."""
        assert self.head.bias is not None
        return self.head.weight, self.head.bias

    def _one(self, features: Tensor, logits: Tensor, peaks: Tensor) -> PointFeatures:
        y, x = peaks.nonzero(as_tuple=True)
        # A stable sort breaks ties in order of reading, also at the cut.
        order = logits[y, x].argsort(descending=True, stable=True)[: self.spec.max_keypoints]
        y, x = y[order], x[order]
        keypoints = torch.stack([x, y], dim=-1).to(torch.promote_types(logits.dtype, torch.float32))
        return PointFeatures(keypoints, logits[y, x], self.describe(features, x, y))

    def _check(self, image: Tensor) -> None:
        if image.ndim != 4 or image.shape[1] not in (1, 3):
            raise ValueError(f"DISK takes images [b, 1 or 3, h, w], got {list(image.shape)}")
        if image.dtype != self.head.weight.dtype:
            raise ValueError(f"DISK's weights are {self.head.weight.dtype}, the image is {image.dtype}")

    def _nothing(self, image: Tensor) -> PointFeatures:
        none = image.new_empty(0)
        return PointFeatures(none.reshape(0, 2), none, none.reshape(0, self.spec.descriptor_dim))


def strict_maxima(x: Tensor, radius: int) -> Tensor:
    """Cells of ``x [b, h, w]`` greater than every other cell of their (2 radius + 1)^2 window, as a mask.

    As kornia 0.9 has it: the window must lie inside the map, and of two equal neighbours neither is a maximum.
    """
    inside = torch.zeros_like(x, dtype=torch.bool)
    inside[:, radius : x.shape[1] - radius, radius : x.shape[2] - radius] = True
    b, row, column = (inside & (x == window_maximum(x, radius))).nonzero(as_tuple=True)
    windows = x[b[:, None, None], _window(row, radius)[:, :, None], _window(column, radius)[:, None, :]]
    alone = (windows == x[b, row, column][:, None, None]).sum((1, 2)) == 1
    return torch.zeros_like(inside).index_put((b, row, column), alone)


def _window(centre: Tensor, radius: int) -> Tensor:
    """Whole numbers within the radius of each centre, ``[n]`` to ``[n, 2 radius + 1]``."""
    return centre[:, None] + torch.arange(-radius, radius + 1, device=centre.device)


def _kornia_unet_and_head(descriptor_dim: int) -> tuple[nn.Module, nn.Conv2d]:
    """kornia's U-Net with fresh weights, cut before its last convolution, and that convolution."""
    try:
        from kornia.feature import DISK as KorniaDISK  # noqa: N811 (an acronym)
    except ImportError as error:
        raise ValueError(f"DISK needs kornia's network: pip install 'vispe[disk]' ({error})") from error
    unet = KorniaDISK(desc_dim=descriptor_dim).unet
    last = unet.get_submodule("path_up.3.conv")
    assert isinstance(last, nn.Sequential), "kornia's U-Net has another layout"
    head = last[3]
    assert isinstance(head, nn.Conv2d), "kornia's U-Net has another layout"
    last[3] = nn.Identity()
    return unet, head


MODEL = DISK
VARIANTS = {"disk": DISKSpec()}
