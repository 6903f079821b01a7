"""SuperPoint: keypoints and descriptors from one small convolutional network (DeTone et al. 2018, arXiv 1712.07629).

What is different: the detector is a classifier. Every 8 x 8 cell of the picture chooses among its 64 pixels and "no
keypoint here" (section 3.2), so no score map is ever upsampled, while descriptors are computed once a cell and sampled
between cell centres (section 3.3). Parameters carry the names of the published file. That file's licence allows
non-commercial research only; this network is written from the paper and carries no such restriction.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vispe.layers.detection import PointFeatures, grey, suppress
from vispe.spec import Spec

CELL = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperPointSpec(Spec):
    """Knobs of :class:`SuperPoint`; the detection defaults are those the LightGlue weights were published with.

    Benchmarks of matchers use ``nms_radius=3, detection_threshold=0.0``. Radius and border are in pixels.
    """

    widths: tuple[int, int, int, int] = (64, 64, 128, 128)
    head_width: int = 256
    descriptor_dim: int = 256
    max_keypoints: int = 2048
    detection_threshold: float = 0.0005
    nms_radius: int = 4
    border: int = 4

    def __post_init__(self) -> None:
        if len(self.widths) != 4 or min(*self.widths, self.head_width, self.descriptor_dim) < 1:
            raise ValueError(
                f"SuperPoint needs four positive widths, head_width and descriptor_dim, "
                f"got {self.widths}, {self.head_width}, {self.descriptor_dim}"
            )
        if min(self.max_keypoints, self.detection_threshold, self.nms_radius, self.border) < 0:
            raise ValueError(
                f"max_keypoints, detection_threshold, nms_radius and border are at least 0, got {self.max_keypoints}, "
                f"{self.detection_threshold}, {self.nms_radius}, {self.border}"
            )


class SuperPoint(nn.Module):
    """Detect and describe: ``image [b, 1 or 3, h, w]`` in [0, 1] to one ``PointFeatures`` a picture, strongest first.

    Keypoints are (x, y) pixels of that tensor, whole numbers; scores are probabilities; descriptors have unit norm.
    Any size: keypoints lie within the whole cells, ``8 floor(h / 8)`` rows and ``8 floor(w / 8)`` columns, and what is
    beyond is mere context (the poolings drop it), so positions never shift; under 8 pixels a side there are none.
    """

    def __init__(self, spec: SuperPointSpec = SuperPointSpec()) -> None:
        super().__init__()
        self.spec = spec
        c1, c2, c3, c4 = spec.widths
        self.conv1a, self.conv1b = _conv3(1, c1), _conv3(c1, c1)
        self.conv2a, self.conv2b = _conv3(c1, c2), _conv3(c2, c2)
        self.conv3a, self.conv3b = _conv3(c2, c3), _conv3(c3, c3)
        self.conv4a, self.conv4b = _conv3(c3, c4), _conv3(c4, c4)
        self.convPa = _conv3(c4, spec.head_width)
        self.convPb = nn.Conv2d(spec.head_width, CELL * CELL + 1, 1)
        self.convDa = _conv3(c4, spec.head_width)
        self.convDb = nn.Conv2d(spec.head_width, spec.descriptor_dim, 1)

    def forward(self, image: Tensor) -> list[PointFeatures]:
        """Features of every picture of the batch; ``ValueError`` for a wrong shape or dtype."""
        self._check(image)
        if min(image.shape[-2:]) < CELL:
            return [self._nothing(image) for _ in image]
        cells = self.encode(grey(image))
        scores = suppress(self.score(cells), self.spec.nms_radius)
        found = [self._strongest(one) for one in scores]
        dense = self.describe(cells)
        return [
            PointFeatures(keypoints, values, sample(grid, keypoints))
            for (keypoints, values), grid in zip(found, dense, strict=True)
        ]

    def encode(self, grey: Tensor) -> Tensor:
        """``[b, 1, h, w]`` to features of the cells, ``[b, c, h // 8, w // 8]`` (section 3.1)."""
        x = F.max_pool2d(_relu(self.conv1b, _relu(self.conv1a, grey)), 2)
        x = F.max_pool2d(_relu(self.conv2b, _relu(self.conv2a, x)), 2)
        x = F.max_pool2d(_relu(self.conv3b, _relu(self.conv3a, x)), 2)
        return _relu(self.conv4b, _relu(self.conv4a, x))

    def score(self, cells: Tensor) -> Tensor:
        """Keypoint probability of every pixel, ``[b, 8 (h // 8), 8 (w // 8)]``, before suppression (section 3.2)."""
        logits = _at_least_float32(self.convPb(_relu(self.convPa, cells)))
        pixels = logits.softmax(1)[:, :-1]  # the 65th class is "none of this cell's pixels"
        return F.pixel_shuffle(pixels, CELL)[:, 0]

    def describe(self, cells: Tensor) -> Tensor:
        """Unit descriptor of every cell, ``[b, d, h // 8, w // 8]`` (section 3.3)."""
        return F.normalize(_at_least_float32(self.convDb(_relu(self.convDa, cells))), dim=1)

    def _strongest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Keypoints ``[n, 2]`` and scores ``[n]`` of a suppressed ``[h, w]``; equal scores in order of reading."""
        border, (h, w) = self.spec.border, scores.shape
        inner = scores[border : h - border, border : w - border]
        yx = (inner > self.spec.detection_threshold).nonzero()
        values = inner[yx[:, 0], yx[:, 1]]
        order = values.argsort(descending=True, stable=True)[: self.spec.max_keypoints]
        return (yx[order].flip(1) + border).to(scores.dtype), values[order]

    def _check(self, image: Tensor) -> None:
        if image.ndim != 4 or image.shape[1] not in (1, 3):
            raise ValueError(f"SuperPoint takes images [b, 1 or 3, h, w], got {list(image.shape)}")
        if image.dtype != self.conv1a.weight.dtype:
            raise ValueError(f"SuperPoint's weights are {self.conv1a.weight.dtype}, the image is {image.dtype}")

    def _nothing(self, image: Tensor) -> PointFeatures:
        none = _at_least_float32(image.new_empty(0))
        return PointFeatures(none.reshape(0, 2), none, none.reshape(0, self.spec.descriptor_dim))


def sample(dense: Tensor, keypoints: Tensor) -> Tensor:
    """Unit descriptors ``[n, d]`` at ``keypoints [n, 2]`` (pixels), bilinear between the cells of ``dense [d, h, w]``.

    The original's grid, part of the weights: first cell centre at pixel 3.5, the last one at the picture's far edge
    (not 3.5 pixels before it), so the grid is stretched a little, by 1 + 3 / (8 w - 8) along x.
    """
    size = keypoints.new_tensor([dense.shape[2], dense.shape[1]])
    grid = (keypoints - (CELL / 2 - 0.5)) / (size * CELL - CELL / 2 - 0.5) * 2 - 1
    sampled = F.grid_sample(dense[None], grid[None, None], mode="bilinear", align_corners=True)
    return F.normalize(sampled[0, :, 0].T, dim=-1)


def _conv3(width_in: int, width_out: int) -> nn.Conv2d:
    return nn.Conv2d(width_in, width_out, 3, padding=1)


def _relu(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.relu(conv(x), inplace=True)


def _at_least_float32(x: Tensor) -> Tensor:
    """Half precision cannot hold pixel coordinates above 256 (bfloat16) or 2048 (float16)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


MODEL = SuperPoint
VARIANTS = {"superpoint": SuperPointSpec()}
