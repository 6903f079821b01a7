"""ALIKED (Zhao et al. 2023, arXiv 2304.03608): keypoints and descriptors from a small network with deformable sampling.

What is different about it (names of parts as in the paper's Fig. 1):

- Feature encoding: four blocks at 1, 1/2, 1/8 and 1/32 of the image, the last two deformable. Feature aggregation:
  their maps are squeezed to dim/4 channels each, enlarged to the image and joined.
- Score map head and differentiable keypoint detection (DKD, from ALIKE, Zhao et al. 2022): a score for every pixel; its
  local maxima move to the soft-argmax of their window, so keypoints have gradients.
- Sparse deformable descriptor head (SDDH): a descriptor is not read at its keypoint but gathered at M positions around
  it, which a look at the K x K patch there chooses.

What is different about this file: the joined map [dim, h, w], by far the widest, never exists. Interpolation and 1x1
convolution are both linear, so they are exchanged: the score head's first layer is applied to each block's map before
that is enlarged, and SDDH computes joined features only at the pixels its keypoints read. The full-size part runs in
strips that fit in a cache. All of it equals the published network up to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vispe.layers.activation import selu_
from vispe.layers.bilinear import Taps, cross, stretch, taps, weighted_rows
from vispe.layers.deform import deform_conv2d
from vispe.layers.detection import PointFeatures, suppress
from vispe.layers.strips import in_strips
from vispe.spec import Spec

TEMPERATURE = 0.1  # of the soft-argmax in DKD
# Full-size pixels at a time, and keypoints described together. Less would fit the cache better, but every operation on
# every strip is a meeting of threads, and on a busy machine meetings cost more than memory.
STRIP_PIXELS = 1 << 17  # full-size cells a strip: few enough for the cache, enough to keep the threads busy
KEYPOINTS_AT_ONCE = 1024  # described together, for the same reason


@dataclass(frozen=True, kw_only=True)
class ALIKEDSpec(Spec):
    """Widths of the four blocks and the descriptor, the patch K and samples M of SDDH, and what counts as a keypoint.

    With ``detection_threshold > 0`` every maximum above it is a keypoint (above the image's mean score, if none is), at
    most ``max_keypoints``; otherwise the best ``max_keypoints`` are. ``max_keypoints = -1`` sets no limit (the official
    code then stops at 20000); without a threshold either, maxima above the mean score count.
    """

    channels: tuple[int, int, int, int]
    dim: int
    kernel_size: int = 3
    num_samples: int
    max_keypoints: int = 2048
    detection_threshold: float = 0.0
    nms_radius: int = 2

    def __post_init__(self) -> None:
        if len(self.channels) != 4 or min(self.channels) < 1:
            raise ValueError(f"channels are four positive numbers, not {self.channels!r}")
        if self.dim < 4 or self.dim % 4:
            raise ValueError(f"dim is a positive multiple of 4, as four blocks share it, not {self.dim!r}")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is a positive odd number, not {self.kernel_size!r}")
        if self.num_samples < 1:
            raise ValueError(f"num_samples is positive, not {self.num_samples!r}")
        if self.max_keypoints < 1 and self.max_keypoints != -1:
            raise ValueError(f"max_keypoints is positive, or -1 for no limit, not {self.max_keypoints!r}")
        if not self.detection_threshold < 1:
            raise ValueError(f"detection_threshold is below 1, the highest score, not {self.detection_threshold!r}")
        if self.nms_radius < 1:
            raise ValueError(f"nms_radius is at least 1 pixel, not {self.nms_radius!r}")


_NORMAL = ALIKEDSpec(channels=(16, 32, 64, 128), dim=128, num_samples=16)
VARIANTS = {
    "aliked_t16": ALIKEDSpec(channels=(8, 16, 32, 64), dim=64, num_samples=16),
    "aliked_n16": _NORMAL,
    "aliked_n16rot": _NORMAL,  # trained with rotated images
    "aliked_n32": _NORMAL.but(num_samples=32),
}


class PlainConv(nn.Conv2d):
    """A 3x3 convolution."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__(c_in, c_out, 3, padding=1, bias=False)

    def convolve(self, x: Tensor, gain: Tensor | float = 1.0, shift: Tensor | None = None) -> Tensor:
        return F.conv2d(x, self.weight * gain, shift, padding=1)


class DeformConv(nn.Module):
    """A 3x3 convolution whose nine taps move by offsets that another convolution predicts at every cell."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.offset_conv = nn.Conv2d(c_in, 2 * 9, 3, padding=1)
        self.regular_conv = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)

    def convolve(self, x: Tensor, gain: Tensor | float = 1.0, shift: Tensor | None = None) -> Tensor:
        limit = max(x.shape[-2:]) / 4.0  # as in the official code: a quarter of the padded map's longer side
        offset = self.offset_conv(x).clamp(-limit, limit)
        return deform_conv2d(x, offset, self.regular_conv.weight * gain, shift)


class Block(nn.Module):
    """Two convolutions with batch norm and SELU, and, in every block but the first, a 1x1 convolution around them."""

    def __init__(self, c_in: int, c_out: int, conv: type[PlainConv] | type[DeformConv], around: bool = True) -> None:
        super().__init__()
        self.conv1 = conv(c_in, c_out)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = conv(c_out, c_out)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.downsample = nn.Conv2d(c_in, c_out, 1) if around else None  # the official name; it keeps the size

    def forward(self, x: Tensor) -> Tensor:
        y = selu_(normed(self.conv1, self.bn1, x))
        y = normed(self.conv2, self.bn2, y)
        return selu_(y if self.downsample is None else y + self.downsample(x))


def normed(conv: PlainConv | DeformConv, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """``norm(conv(x))``. Outside training the norm is a fixed gain and shift and is folded into the convolution, anew
    at every call: that is a few thousand products, and nothing can go stale when weights are loaded or moved."""
    if norm.training:
        return norm(conv.convolve(x))
    mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
    gain = norm.weight * (variance + norm.eps).rsqrt()
    return conv.convolve(x, gain.view(-1, 1, 1, 1), norm.bias - mean * gain)


class DescriptorHead(nn.Module):
    """SDDH: the K x K patch at a keypoint chooses M positions; their features make its descriptor."""

    def __init__(self, dim: int, kernel_size: int, num_samples: int) -> None:
        super().__init__()
        self.offset_conv = nn.Sequential(
            nn.Conv2d(dim, 2 * num_samples, kernel_size),
            nn.SELU(),
            nn.Conv2d(2 * num_samples, 2 * num_samples, 1),
        )
        self.sf_conv = nn.Conv2d(dim, dim, 1, bias=False)
        self.agg_weights = nn.Parameter(torch.rand(num_samples, dim, dim))

    def offsets(self, patches: Tensor) -> Tensor:
        """Patches ``[K, K, n, dim]`` to the positions to sample, ``[n, M, 2]`` (x, y) relative to the keypoint."""
        of = self.offset_conv.get_parameter
        patches = patches.flatten(0, 1).transpose(0, 1).flatten(1)
        x = F.linear(patches, of("0.weight").permute(0, 2, 3, 1).flatten(1), of("0.bias"))
        x = F.linear(selu_(x), of("2.weight").flatten(1), of("2.bias"))
        return x.unflatten(1, (2, -1)).transpose(1, 2)  # all x first, then all y

    def combine(self, samples: Tensor) -> Tensor:
        """Features ``[n, M, dim]`` at the sampled positions to unit descriptors ``[n, dim]``."""
        x = selu_(F.linear(samples, self.sf_conv.weight.flatten(1)))
        return F.normalize(x.flatten(1) @ self.agg_weights.flatten(0, 1), dim=1)


class JoinedMap:
    """The joined map of one image (feature aggregation), of which only the cells that are asked for are computed."""

    def __init__(self, maps: list[Tensor], squeeze: Tensor) -> None:
        """``maps [c, h, w]`` of the four blocks, and the 1x1 convolution ``[dim/4, c1]`` that the first still lacks."""
        full, *coarse = maps
        height, self.width = full.shape[1:]
        self.squeeze = squeeze
        self.full = full.permute(1, 2, 0).flatten(0, 1)  # no copy: they are channels-last
        self.coarse = [
            (x.permute(1, 2, 0).flatten(0, 1), stretch(height, h, x.device), stretch(self.width, w, x.device), w)
            for x, (h, w) in zip(coarse, (x.shape[1:] for x in coarse), strict=True)
        ]

    def read(self, rows: Tensor, columns: Tensor) -> tuple[list[Tensor], Tensor]:
        """Cells at all pairs of ``rows [r, ...]`` and ``columns [s, ...]``: four parts ``[r, s, ..., dim/4]``, one a
        block, not yet of unit length, and the length ``[r, s, ...]`` of the four together."""
        rows, columns = rows[:, None], columns[None]
        parts = [selu_(F.linear(F.embedding(rows * self.width + columns, self.full), self.squeeze))]
        for table, (above, tall), (left, wide), width in self.coarse:
            index, share = cross((above[:, rows], tall[:, rows]), (left[:, columns], wide[:, columns]), width)
            parts.append(weighted_rows(table, index, share))
        squares = sum(torch.linalg.vector_norm(part.float(), dim=-1).square() for part in parts)
        return parts, squares.clamp(min=1e-24).sqrt()


class Frame(NamedTuple):
    """Where an image of ``height`` and ``width`` lies in its padded tensor: from row ``top``, column ``left``."""

    height: int
    width: int
    top: int
    left: int

    def crop(self, x: Tensor) -> Tensor:
        """The image's part of a padded map ``[..., h, w]``."""
        return x[..., self.top : self.top + self.height, self.left : self.left + self.width]


def padded(image: Tensor) -> tuple[Tensor, Frame]:
    """The image with its border repeated, equally on both sides, until 32 divides height and width; channels-last."""
    h, w = image.shape[-2:]
    down, right = -h % 32, -w % 32
    frame = Frame(h, w, down // 2, right // 2)
    image = F.pad(image, (frame.left, right - frame.left, frame.top, down - frame.top), mode="replicate")
    return image.contiguous(memory_format=torch.channels_last), frame


def checked(image: Tensor) -> Tensor:
    """The image with three channels, or a ``ValueError`` that says what is wrong with it."""
    if image.ndim != 4 or image.shape[1] not in (1, 3) or 0 in image.shape:
        raise ValueError(f"an image batch is [b, 3, h, w] or [b, 1, h, w] and not empty, not {tuple(image.shape)}")
    if not image.is_floating_point():
        raise ValueError(f"an image is float in [0, 1], not {image.dtype}; divide a uint8 image by 255")
    if not image.isfinite().all():
        raise ValueError("the image has non-finite values (nan or inf)")
    return image.expand(-1, 3, -1, -1)


class ALIKED(nn.Module):
    """Images to local features. Parameters carry the official names, so the published files load strictly."""

    def __init__(self, spec: ALIKEDSpec) -> None:
        super().__init__()
        self.spec = spec
        c1, c2, c3, c4 = spec.channels
        quarter = spec.dim // 4
        self.block1 = Block(3, c1, PlainConv, around=False)
        self.block2 = Block(c1, c2, PlainConv)
        self.block3 = Block(c2, c3, DeformConv)
        self.block4 = Block(c3, c4, DeformConv)
        self.conv1 = nn.Conv2d(c1, quarter, 1, bias=False)
        self.conv2 = nn.Conv2d(c2, quarter, 1, bias=False)
        self.conv3 = nn.Conv2d(c3, quarter, 1, bias=False)
        self.conv4 = nn.Conv2d(c4, quarter, 1, bias=False)
        self.score_head = nn.Sequential(
            nn.Conv2d(spec.dim, 8, 1, bias=False),
            nn.SELU(),
            nn.Conv2d(8, 4, 3, padding=1, bias=False),
            nn.SELU(),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.SELU(),
            nn.Conv2d(4, 1, 3, padding=1, bias=False),
        )
        self.desc_head = DescriptorHead(spec.dim, spec.kernel_size, spec.num_samples)

    def forward(self, image: Tensor) -> list[PointFeatures]:
        """Features of each image of ``[b, 3 or 1, h, w]`` (float, 0 to 1); see :class:`PointFeatures`.

        They are ordered by the score of the local maximum; the score reported is read at the refined point, as in the
        official code, and may deviate slightly from that order.
        """
        image = checked(image)
        # One by one, so that company in a batch changes nothing; batch norm in training is the exception by design.
        groups = [image] if self.training else image.split(1)
        return [features for group in groups for features in self.extract(group)]

    def extract(self, image: Tensor) -> list[PointFeatures]:
        """The work of :meth:`forward` on images that pass the network together."""
        image, frame = padded(image)
        maps = self.encode(image)
        found = []
        for i, scores in enumerate(self.score(maps, frame)):
            keypoints, strength = self.detect(scores)
            joined = JoinedMap([level[i] for level in maps], self.conv1.weight.flatten(1))
            descriptors = [self.describe(joined, some, frame) for some in keypoints.split(KEYPOINTS_AT_ONCE)]
            found.append(PointFeatures(keypoints, strength, torch.cat(descriptors)))
        return found

    def encode(self, image: Tensor) -> list[Tensor]:
        """The maps of the four blocks: the first as it is, the others already squeezed to dim/4 channels."""
        x1 = self.in_strips(lambda rows: self.block1(image[:, :, rows]), image, halo=2)
        x2 = F.avg_pool2d(x1, 2)
        x2 = self.in_strips(lambda rows: self.block2(x2[:, :, rows]), x2, halo=2)
        x3 = self.block3(F.avg_pool2d(x2, 4))
        x4 = self.block4(F.avg_pool2d(x3, 4))
        b2 = self.in_strips(lambda rows: selu_(self.conv2(x2[:, :, rows])), x2, halo=0)
        return [x1, b2, selu_(self.conv3(x3)), selu_(self.conv4(x4))]

    def in_strips(self, stack: Callable[[slice], Tensor], like: Tensor, halo: int) -> Tensor:
        """Strips of some cached size; in training one strip, as batch norm has to see the whole."""
        height, width = like.shape[2:]
        rows = height if self.training else max(STRIP_PIXELS // width, 16)
        return in_strips(stack, height, rows, halo)

    def score(self, maps: list[Tensor], frame: Frame) -> Tensor:
        """The score of every pixel of the image, ``[b, h, w]``.

        The head's first 1x1 convolution meets each block's map at that map's own size. A full-size row of their sum is
        then the first block's row and six rows of the others, two neighbours from each, which only have to be widened.
        """
        full, *coarse = maps
        to_full, *to_coarse = self.score_head.get_parameter("0.weight").split(self.spec.dim // 4, dim=1)
        (b, _, height, width) = full.shape
        wide = [
            F.interpolate(F.conv2d(x, part), (x.shape[2], width), mode="bilinear", align_corners=True)
            for x, part in zip(coarse, to_coarse, strict=True)
        ]
        table = torch.cat([x.permute(2, 0, 3, 1).flatten(1) for x in wide])  # [rows, b * width * 8]
        index, weight = stacked(height, [x.shape[2] for x in wide], full.device)

        def head(rows: slice) -> Tensor:
            others = weighted_rows(table, index[:, rows], weight[:, rows]).view(-1, b, width, 8).permute(1, 3, 0, 2)
            x = F.conv2d(selu_(self.conv1(full[:, :, rows])), to_full) + others
            for layer in self.score_head[1:]:
                x = selu_(x) if isinstance(layer, nn.SELU) else layer(x)
            return x

        logits = self.in_strips(head, full, halo=3)[:, 0]
        return torch.sigmoid(frame.crop(logits).float())

    def detect(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Keypoints ``[n, 2]`` (x, y) and their scores ``[n]`` on a map ``[h, w]``, best maxima first."""
        (h, w), radius = scores.shape, self.spec.nms_radius
        y, x = self.maxima(scores.detach()).unbind(1)
        reach = torch.arange(-radius, radius + 1, device=scores.device)
        window = scores[y[:, None, None] + reach[:, None], x[:, None, None] + reach]
        share = (window.flatten(1) / TEMPERATURE).softmax(1).view_as(window)
        # Sums of products rather than matmuls, which autocast would round.
        dx, dy = (share * reach).sum((1, 2)), (share * reach[:, None]).sum((1, 2))
        refined = torch.stack((x + dx, y + dy), dim=1)
        # The official code carries points as -1..1. That trip rounds them by up to 1e-4 pixel, and the rounded value
        # decides on which side of an integer a point falls, hence which patch describes it: so it is made here as well.
        span = torch.tensor((w - 1, h - 1), device=scores.device)
        refined = span * ((refined / span * 2 - 1) + 1) / 2
        index, weight = cross(taps(refined[:, 1], h), taps(refined[:, 0], w), w)
        return refined, (scores.flatten()[index] * weight).sum(0)

    @torch.no_grad()
    def maxima(self, scores: Tensor) -> Tensor:
        """Cells ``[n, 2]`` (row, column) of the maxima that count as keypoints, best first; ties in raster order.

        Windows that leave the image do not count. The official code fills up to ``max_keypoints`` with cells of score 0
        where there are fewer maxima, and raises where there are fewer pixels; here there are fewer keypoints.
        """
        radius, limit, floor = self.spec.nms_radius, self.spec.max_keypoints, self.spec.detection_threshold
        h, w = scores.shape
        peaks = suppress(scores[None], radius)[0][radius : max(h - radius, 0), radius : max(w - radius, 0)]
        if floor <= 0:
            floor = 0.0 if limit > 0 else float(scores.mean())
        elif not (peaks > floor).any():
            floor = float(scores.mean())
        cells = (peaks > floor).nonzero()
        order = peaks[cells[:, 0], cells[:, 1]].sort(descending=True, stable=True).indices
        return cells[order[:limit] if limit > 0 else order] + radius

    def describe(self, joined: JoinedMap, keypoints: Tensor, frame: Frame) -> Tensor:
        """Unit descriptors ``[n, dim]`` of keypoints ``[n, 2]`` in pixels of the image (SDDH)."""
        h, w, k = frame.height, frame.width, self.spec.kernel_size
        x, y = keypoints.detach().long().unbind(1)
        parts, length = joined.read(window(y, k, h) + frame.top, window(x, k, w) + frame.left)
        patches = torch.cat(parts, dim=-1) / length[..., None]

        limit = max(h, w) / 4.0  # official: a sample is at most a quarter of the image's longer side away
        samples = keypoints[:, None] + self.desc_head.offsets(patches).float().clamp(-limit, limit)
        (columns, share_x), (rows, share_y) = taps(samples[..., 0], w), taps(samples[..., 1], h)
        parts, length = joined.read(rows + frame.top, columns + frame.left)
        # The four neighbours of a sample: brought to unit length and weighed in one go.
        share = (share_y[:, None] * share_x / length).flatten(0, 1)
        index = torch.arange(share.numel(), device=share.device).view_as(share)
        found = [weighted_rows(part.flatten(0, -2), index, share) for part in parts]
        return self.desc_head.combine(torch.cat(found, dim=-1)).float()


def stacked(size: int, sources: list[int], device: torch.device) -> Taps:
    """Taps that lengthen several axes to ``size`` and sum them, their cells lying one after the other in a table."""
    each = [stretch(size, source, device) for source in sources]
    starts = [sum(sources[:i]) for i in range(len(sources))]
    index = torch.cat([index + start for (index, _), start in zip(each, starts, strict=True)])
    return index, torch.cat([weight for _, weight in each])


def window(centre: Tensor, size: int, limit: int) -> Tensor:
    """The ``size`` cells around each centre, ``[size, n]``, moved inward at the ends of an axis of ``limit`` cells.

    At the far end they stop one cell early: the official code never lets a patch reach the last row or column.
    """
    first = (centre - size // 2).clamp(max=limit - 1 - size).clamp(min=0)
    return (first + torch.arange(size, device=centre.device)[:, None]).clamp(max=limit - 1)


MODEL = ALIKED
