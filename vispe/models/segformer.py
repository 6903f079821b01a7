"""SegFormer: no position encoding at all, but a 3x3 depthwise convolution in every feed-forward (Xie et al. 2021).

What is different here: nothing is added to tokens, turned or biased. Patches overlap, the feed-forward mixes neighbours
(``MixFFN``, section 3.1), and what tells a token where it is are the zeros around the image that these convolutions see
(Islam et al. 2020). So any size goes in and no table is ever resized; with ``padding="circular"`` the whole network
only knows differences, and an image moved around a torus gives the map moved around it. Keys and values come from a
grid reduced 8, 4, 2 and 1 times. The head is linear maps, summed at a quarter of the image.

The head is computed in another order than it is written: the maps of each stage, the upsampling and the fusing 1x1
convolution are linear, so the two matrices are multiplied first and applied where the stage is small. The result is the
same within rounding (bilinear weights sum to 1, so that biases pass through); 4 widths are never concatenated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vispe.layers.attention import attend
from vispe.layers.padding import unpadded
from vispe.layers.pixels import enlarged
from vispe.layers.transformer import MLP, DropPath
from vispe.position.conv import MixFFN, Padding
from vispe.position.grid import Grid, check_grid
from vispe.spec import Spec

KERNELS, STRIDES = (7, 3, 3, 3), (4, 2, 2, 2)  # of the overlapping patches: each sees its neighbours' rim
CONV = ".mlp.conv."  # the position encoding, in the names of a state dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegFormerSpec(Spec):
    """Every knob of a SegFormer; the tuples are one number a stage.

    ``position``: ``"mix_ffn"``, the depthwise convolution in every feed-forward, or ``"none"``, a plain MLP. What lies
    beyond the image is ``padding``, for this convolution, for the overlapping patches and for the head's upsampling:
    ``"zeros"`` as published, or ``"circular"``, with which the network cannot tell where anything is. ``reductions``:
    how many cells a side make one key. ``ratio``: hidden / width of the feed-forward. ``num_classes`` 0: no head,
    :meth:`SegFormer.forward` gives the last stage's map. ``drop_path``: the last block's rate, the first has 0;
    ``dropout``: of whole channels before the classifier. ``eps``: of the blocks' norms, transformers' value; the
    original has 1e-6 there and 1e-5 in the others. ``image_size`` (h, w) only says what the weights were trained at.
    ``mean`` and ``std`` of RGB in [0, 1], as the weights expect.
    """

    image_size: tuple[int, int] = (512, 512)
    channels: int = 3
    widths: tuple[int, int, int, int] = (32, 64, 160, 256)
    depths: tuple[int, int, int, int] = (2, 2, 2, 2)
    heads: tuple[int, int, int, int] = (1, 2, 5, 8)
    reductions: tuple[int, int, int, int] = (8, 4, 2, 1)
    ratio: int = 4
    position: Literal["mix_ffn", "none"] = "mix_ffn"
    padding: Padding = "zeros"
    head_width: int = 256
    num_classes: int = 150
    drop_path: float = 0.1
    dropout: float = 0.1
    eps: float = 1e-5
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        size = (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)
        object.__setattr__(self, "image_size", check_grid(size, "image_size"))  # type: ignore[arg-type]
        for name in ("widths", "depths", "heads", "reductions"):
            numbers = tuple(getattr(self, name))
            if len(numbers) != len(STRIDES) or min(numbers) < 1:
                raise ValueError(f"{name} are {len(STRIDES)} numbers of at least 1, got {getattr(self, name)!r}")
            object.__setattr__(self, name, numbers)
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check()

    def _check(self) -> None:
        for heads, width in zip(self.heads, self.widths, strict=True):
            if width % heads:
                raise ValueError(f"{heads} heads do not divide the width {width}")
        for name in ("channels", "ratio", "head_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_classes < 0:
            raise ValueError(f"num_classes must not be negative, got {self.num_classes}")
        if self.position not in ("mix_ffn", "none"):
            raise ValueError(f"position must be 'mix_ffn' or 'none', got {self.position!r}")
        if self.padding not in ("zeros", "circular", "reflect", "replicate"):
            raise ValueError(f"padding must be zeros, circular, reflect or replicate, got {self.padding!r}")

    @property
    def smallest(self) -> int:
        """The shortest side, in pixels, of which every stage still has a key."""
        strides = [math.prod(STRIDES[: i + 1]) for i in range(len(STRIDES))]
        return max((keys - 1) * stride + 1 for keys, stride in zip(self.reductions, strides, strict=True))


class Merging(nn.Module):
    """Overlapping patches: a strided convolution, then a norm. ``[b, c, h, w]`` -> tokens and their grid."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int, padding: Padding) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel, stride, kernel // 2, padding_mode=padding)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.proj.weight, std=math.sqrt(2 / (kernel**2 * width)))
        nn.init.zeros_(self.proj.bias)  # type: ignore[arg-type]

    def forward(self, x: Float[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b n width"], Grid]:
        cells = self.proj(x)
        return self.norm(cells.flatten(2).transpose(1, 2)), (cells.shape[2], cells.shape[3])


class ReducedAttention(nn.Module):
    """Every token asks; keys and values are of a grid ``reduction`` times smaller a side. Cells left over at the lower
    and right border have no part in a key, as in the original. Rows of ``kv`` are ordered (k, v)."""

    def __init__(self, width: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.sr = nn.Conv2d(width, width, reduction, reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(width) if reduction > 1 else None
        for layer in (self.q, self.kv, self.proj):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        if self.sr is not None:
            nn.init.normal_(self.sr.weight, std=math.sqrt(2 / (reduction**2 * width)))
            nn.init.zeros_(self.sr.bias)  # type: ignore[arg-type]

    def forward(self, x: Float[Tensor, "b n width"], grid: Grid) -> Float[Tensor, "b n width"]:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.sr is not None and self.norm is not None:
            x = self.norm(self.sr(as_map(x, grid)).flatten(2).transpose(1, 2))
        k, v = self.kv(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(attend(q, k, v))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; the feed-forward is handed in, for it is the
    position encoding."""

    def __init__(self, width: int, heads: int, reduction: int, mlp: MixFFN | MLP, drop_path: float, eps: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attn = ReducedAttention(width, heads, reduction)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Float[Tensor, "b n width"], grid: Grid) -> Float[Tensor, "b n width"]:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        y = self.norm2(x)
        return x + self.drop_path(self.mlp(y, grid) if isinstance(self.mlp, MixFFN) else self.mlp(y))


class Stage(nn.Module):
    """Merging, blocks, a norm: map -> map."""

    def __init__(self, spec: SegFormerSpec, i: int) -> None:
        super().__init__()
        width, first = spec.widths[i], sum(spec.depths[:i])
        self.merge = Merging(spec.widths[i - 1] if i else spec.channels, width, KERNELS[i], STRIDES[i], spec.padding)
        rates = [spec.drop_path * (first + k) / max(sum(spec.depths) - 1, 1) for k in range(spec.depths[i])]
        self.blocks = nn.ModuleList(
            Block(width, spec.heads[i], spec.reductions[i], feed_forward(spec, width), rate, spec.eps) for rate in rates
        )
        self.norm = nn.LayerNorm(width, spec.eps)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width h2 w2"]:
        tokens, grid = self.merge(x)
        for block in self.blocks:
            tokens = block(tokens, grid)
        return as_map(self.norm(tokens), grid)


class Head(nn.Module):
    """Maps of all stages -> ``[b, classes, h, w]`` at the first one's size (section 3.2).

    As written: a linear map of each stage, upsampled, concatenated (the last stage first, as in the original's
    weights), fused by a 1x1 convolution, normed over the batch, ReLU, classified.
    """

    def __init__(self, spec: SegFormerSpec) -> None:
        super().__init__()
        width, self.padding = spec.head_width, spec.padding
        self.maps = nn.ModuleList(nn.Linear(channels, width) for channels in spec.widths)
        self.fuse = nn.Conv2d(len(spec.widths) * width, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout2d(spec.dropout)
        self.classifier = nn.Conv2d(width, spec.num_classes, 1)
        nn.init.kaiming_normal_(self.fuse.weight, nonlinearity="relu")

    def forward(self, maps: Sequence[Tensor]) -> Float[Tensor, "b classes h w"]:
        size = (maps[0].shape[2], maps[0].shape[3])
        first, *others = self._folded(maps[0].device.type)
        x = F.conv2d(maps[0], *first)
        for stage, folded in zip(maps[1:], others, strict=True):
            x = x + upsample(F.conv2d(stage, *folded), size, self.padding)
        return self.classifier(self.dropout(F.relu(self.norm(x))))

    def _folded(self, device: str) -> list[tuple[Float[Tensor, "width c 1 1"], Float[Tensor, " width"]]]:
        """Each stage's linear map times its part of the fusing convolution."""
        with torch.autocast(device, enabled=False):  # the product of two matrices keeps its digits
            parts = self.fuse.weight[:, :, 0, 0].chunk(len(self.maps), 1)[::-1]
            return [
                ((part @ own.weight)[..., None, None], part @ own.bias)  # type: ignore[operator]
                for part, own in zip(parts, self.maps, strict=True)
            ]


class SegFormer(nn.Module):
    """``images [b, c, h, w]`` of any size, normalised by the spec's mean and std -> logits ``[b, num_classes, h/4,
    w/4]``, sides rounded up."""

    positional = ()  # the convolutions' kernels are the MixFFN's own

    def __init__(self, spec: SegFormerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.report: list[str] = []  # what a loader had to change
        self.stages = nn.ModuleList(Stage(spec, i) for i in range(len(STRIDES)))
        self.head = Head(spec) if spec.num_classes else None

    def features(self, images: Float[Tensor, "b c h w"]) -> list[Tensor]:
        """The maps of the four stages, ``[b, width, h/s, w/s]`` for s = 4, 8, 16, 32, sides rounded up.

        ``ValueError`` for an image too small for the last reduction of keys.
        """
        if images.ndim != 4 or images.shape[1] != self.spec.channels:
            raise ValueError(f"images are [b, {self.spec.channels}, h, w], got {list(images.shape)}")
        h, w, least = images.shape[2], images.shape[3], self.spec.smallest
        if h < least or w < least:
            raise ValueError(f"each side must have at least {least} pixels, got (h, w) = ({h}, {w})")
        x, maps = images, []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def forward(
        self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "b h w"] | None = None
    ) -> Float[Tensor, "b classes h4 w4"]:
        """``mask`` is true on real pixels, which lie in the upper left corner: each image of a padded batch is then
        computed without its padding, with those of its own size, and the logits beyond it are zeros. Zeros around an
        image are what this network takes its places from, so a wider rim would be another answer. ``ValueError`` for
        padding in training (crops have one size) and for a mask that is no such rectangle."""
        return unpadded(self._logits, images, mask, self.stride, self.training)

    def _logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes h4 w4"]:
        maps = self.features(images)
        return maps[-1] if self.head is None else self.head(maps)

    @property
    def stride(self) -> int:
        """Pixels a side of a cell of the output."""
        return STRIDES[0] if self.head is not None else math.prod(STRIDES)

    def adapt(self, state: Mapping[str, Tensor], source: SegFormerSpec) -> dict[str, Tensor]:
        """A checkpoint of ``source`` for this model; :attr:`report` says what was done, key by key.

        A classifier of other classes is left at its fresh start, the rest of the head is kept; a whole head where the
        checkpoint has none and other classes are asked for (an encoder of ImageNet); Mix-FFN's kernels are dropped or
        fresh where ``position`` differs. What still does not fit is for the strict reader to refuse.
        """
        state, self.report = dict(state), []
        own = self.state_dict()
        if self.spec.position != source.position:
            for key in [key for key in state if CONV in key and key not in own]:
                del state[key]
                self.report.append(f"{key}: dropped, position is {self.spec.position!r}")
            self._fresh([key for key in own if CONV in key and key not in state], state, own, "there was none")
        given = [key for key in state if key.startswith("head.")]
        wanted = [key for key in own if key.startswith("head.")]
        if not wanted:
            for key in given:
                del state[key]
                self.report.append(f"{key}: dropped, this model has no head")
        elif not given and self.spec.num_classes != source.num_classes:
            self._fresh(wanted, state, own, "the checkpoint has no head")
        classifier = [key for key in wanted if key.startswith("head.classifier.")]
        if given and any(key in state and state[key].shape[:1] != own[key].shape[:1] for key in classifier):
            self._fresh(classifier, state, own, f"the checkpoint has {len(state[classifier[0]])} classes")
        return state

    def _fresh(self, keys: Sequence[str], state: dict[str, Tensor], own: Mapping[str, Tensor], why: str) -> None:
        for key in keys:
            state[key] = own[key]
            self.report.append(f"{key}: fresh {list(own[key].shape)}, {why}")


def feed_forward(spec: SegFormerSpec, width: int) -> MixFFN | MLP:
    """The position encoding of a block: its feed-forward."""
    if spec.position == "mix_ffn":
        return MixFFN(width, spec.ratio * width, padding=spec.padding)
    return MLP(width, spec.ratio * width)


def as_map(tokens: Float[Tensor, "b n c"], grid: Grid) -> Float[Tensor, "b c h w"]:
    """Row-major tokens as a map, without a copy (channels last in memory)."""
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def upsample(x: Float[Tensor, "b c h w"], size: Grid, padding: Padding = "zeros") -> Float[Tensor, "b c h2 w2"]:
    """Bilinear, corners not aligned. Beyond the border lies the border's own row, or with ``"circular"`` the opposite
    one; then the size must be a whole multiple."""
    if padding != "circular":
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    h, w = x.shape[-2:]
    if size[0] % h or size[1] % w:
        raise ValueError(f"a torus of {(h, w)} cells is not upsampled to {tuple(size)}: sides must be whole multiples")
    y, z = size[0] // h, size[1] // w
    round_ = F.interpolate(
        F.pad(x, (1, 1, 1, 1), mode="circular"), scale_factor=(y, z), mode="bilinear", align_corners=False
    )
    return round_[..., y : y + size[0], z : z + size[1]]


def semantic(
    output: Float[Tensor, "b classes h4 w4"],
    sizes: Sequence[tuple[int, int]],
    real: Sequence[tuple[int, int]] | None = None,
) -> list[Int[Tensor, "h w"]]:
    """The class of every pixel at each of ``sizes`` (h, w): logits upsampled bilinearly, then the largest.

    ``real``: the (h, w) of each image in a padded batch, before the network; the logits beyond are not looked at.
    """
    return [logits.argmax(0) for logits in enlarged(output, sizes, STRIDES[0], real)]


_WIDE = (64, 128, 320, 512)
MODEL = SegFormer
VARIANTS = {
    "segformer_b0": SegFormerSpec(),
    "segformer_b1": SegFormerSpec(widths=_WIDE),
    "segformer_b2": SegFormerSpec(widths=_WIDE, depths=(3, 4, 6, 3), head_width=768),
    "segformer_b3": SegFormerSpec(widths=_WIDE, depths=(3, 4, 18, 3), head_width=768),
    "segformer_b4": SegFormerSpec(widths=_WIDE, depths=(3, 8, 27, 3), head_width=768),
    "segformer_b5": SegFormerSpec(widths=_WIDE, depths=(3, 6, 40, 3), head_width=768, image_size=(640, 640)),
}
