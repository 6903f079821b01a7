"""Segmenter with its linear head: a plain ViT, and a class for each patch (Strudel et al. 2021, sections 3.1, 3.2).

What is different here: nothing but the head is made for pixels. The encoder is a ViT of one scale, its learned table
resampled for any image, or any other line of ``position``; the class token takes part and is left out at the end; one
linear map gives each patch its logits, which are upsampled bilinearly to the image. What is told apart is as coarse as
a patch. An image that patches do not tile is padded below and to the right with zeros (the mean colour), as in the
source, and its logits are cut. "Seg-B/16" in the paper's tables; "Seg-B-Mask/16" has another head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vispe.layers.head import replace_head
from vispe.layers.padding import unpadded
from vispe.layers.sockets import Position, PositionSpec
from vispe.layers.transformer import Block, PatchEmbed, init_weights
from vispe.position.grid import Grid, at_least_float32, check_grid
from vispe.spec import Spec

TABLE = PositionSpec(added="table", recipe="pe")  # read at other grids as the source does: plain bilinear


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmenterLinearSpec(Spec):
    """Every knob of a Segmenter with a linear head. Sizes in pixels, (h, w); one number means a square.

    ``image_size``: of training; the table has a row for each patch of it, the last ones may reach beyond it.
    ``position`` as a ViT's: a :class:`~vispe.layers.sockets.PositionSpec`, its knobs as a mapping, or its line.
    ``hidden`` is the MLP's width. ``num_classes`` 0: no head, :meth:`SegmenterLinear.forward` gives the map of the
    patches. ``drop_path``: the last block's rate, the first has 0. ``eps`` of the norms, timm's value; the original has
    1e-5. ``mean`` and ``std`` of RGB in [0, 1], as the weights expect.
    """

    image_size: tuple[int, int] = (384, 384)
    patch_size: int = 16
    channels: int = 3
    width: int = 192
    depth: int = 12
    heads: int = 3
    hidden: int = 768
    position: PositionSpec = TABLE
    num_classes: int = 0
    drop_path: float = 0.1
    eps: float = 1e-6
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        size = (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)
        object.__setattr__(self, "image_size", check_grid(size, "image_size"))  # type: ignore[arg-type]
        object.__setattr__(self, "position", PositionSpec.read(self.position))
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the width {self.width}")
        for name in ("patch_size", "channels", "depth", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_classes < 0:
            raise ValueError(f"num_classes must not be negative, got {self.num_classes}")

    def but(self, **knobs: Any) -> SegmenterLinearSpec:
        """A copy with some knobs changed; a mapping for ``position`` changes only the sockets it names."""
        if "position" in knobs:
            knobs = {**knobs, "position": self.position.changed(knobs["position"])}
        return super().but(**knobs)

    @property
    def grid(self) -> Grid:
        """Patches (h, w) that cover an image of ``image_size``."""
        h, w = (-(-side // self.patch_size) for side in self.image_size)
        return h, w

    @property
    def rows(self) -> int:
        """Rows of the table that are the class token's."""
        return int(self.position.added == "table" and self.position.prefix_rows)

    @property
    def smallest(self) -> int:
        """The shortest side, in pixels, that can be looked at: what is missing of a patch is padded."""
        return 1


class SegmenterLinear(nn.Module):
    """``images [b, c, h, w]`` of any size, normalised by the spec's mean and std -> logits ``[b, num_classes, h, w]``,
    float32 or more."""

    positional = ()  # the tables are the Position's own

    def __init__(self, spec: SegmenterLinearSpec) -> None:
        super().__init__()
        self.spec, width = spec, spec.width
        self.report: list[str] = []  # what a loader had to change
        self.patch_embed = PatchEmbed(spec.patch_size, width, spec.channels)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = Position(spec.position, spec.grid, width, spec.heads, spec.depth, 1, spec.rows)
        rates = [spec.drop_path * i / max(spec.depth - 1, 1) for i in range(spec.depth)]
        self.blocks = nn.ModuleList(
            Block(width, spec.heads, spec.hidden, drop_path=rate, eps=spec.eps) for rate in rates
        )
        self.norm = nn.LayerNorm(width, spec.eps)
        self.head = nn.Linear(width, spec.num_classes) if spec.num_classes else None
        for part in (self.blocks, self.head):
            if part is not None:
                part.apply(init_weights)

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b y x width"]:
        """The patches after the last norm, channels last; sides are the image's over the patch's, rounded up."""
        if images.ndim != 4 or images.shape[1] != self.spec.channels or 0 in images.shape:
            raise ValueError(f"images are [b, {self.spec.channels}, h, w], got {list(images.shape)}")
        (h, w), p = images.shape[2:], self.spec.patch_size
        images = F.pad(images, (0, -(-w // p) * p - w, 0, -(-h // p) * p - h))
        grid = self.patch_embed.grid(images)
        x = self._placed(self.patch_embed(images), grid)
        for i, (block, sockets) in enumerate(zip(self.blocks, self.position.sockets(grid, x.device), strict=True)):
            x = block(x, sockets)
            if i == 0:
                x = self.position.convolve(x, grid)
        return self.norm(x[:, 1:]).unflatten(1, grid)

    def forward(
        self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "b h w"] | None = None
    ) -> Float[Tensor, "b classes y x"]:
        """``mask`` is true on real pixels, which lie in the upper left corner: each image of a padded batch is computed
        without its padding, with those of its own size, and the logits beyond it are zeros. ``ValueError`` for padding
        in training and for a mask that is no such rectangle."""
        return unpadded(self._logits, images, mask, self.stride, self.training)

    def _logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes y x"]:
        cells = self.features(images)
        if self.head is None:
            return cells.permute(0, 3, 1, 2)
        coarse = at_least_float32(self.head(cells)).permute(0, 3, 1, 2)
        whole = [side * self.spec.patch_size for side in coarse.shape[2:]]
        h, w = images.shape[2:]
        return F.interpolate(coarse, size=whole, mode="bilinear", align_corners=False)[..., :h, :w]

    def _placed(self, patches: Float[Tensor, "b n width"], grid: Grid) -> Float[Tensor, "b m width"]:
        """The class token in front and the table added, in the weights' dtype also under autocast."""
        dtype = self.cls_token.dtype
        token: Tensor = self.cls_token
        patches = patches.to(dtype)
        table, rows = self.position.table(grid, patches.device), self.spec.rows
        if table is not None:
            table = table.to(dtype)
            patches = patches + table[rows:]
            token = token + table[:1] if rows else token
        return torch.cat((token.expand(len(patches), -1, -1), patches), 1)

    @property
    def stride(self) -> int:
        """Pixels a side of a cell of the output."""
        return self.spec.patch_size if self.head is None else 1

    def adapt(self, state: Mapping[str, Tensor], source: SegmenterLinearSpec) -> dict[str, Tensor]:
        """A checkpoint of ``source``'s grid, positions and classes for this model; :attr:`report` says what was done,
        key by key.

        The table is resampled by this spec's recipe; a head of other classes, or one that an encoder lacks, starts
        fresh. What still does not fit is for the strict reader to refuse. ``ValueError`` for a table that is not of
        ``source``'s grid.
        """
        made, self.report = self.position.adapt(state, source.grid, source.position)
        if self.position.spec != self.spec.position:  # what a scale was trained on is part of the model
            self.spec = self.spec.but(position=self.position.spec)
        asked = self.spec.num_classes != source.num_classes
        self.report += replace_head(made, self.state_dict(), ("head.",), asked)
        return made


MODEL = SegmenterLinear
VARIANTS = {  # an encoder of ImageNet at 384, as the paper starts from: num_classes adds the head
    "segmenter_linear_tiny_patch16": SegmenterLinearSpec(),
    "segmenter_linear_small_patch16": SegmenterLinearSpec(width=384, heads=6, hidden=1536),
    "segmenter_linear_base_patch16": SegmenterLinearSpec(width=768, heads=12, hidden=3072),
    "segmenter_linear_large_patch16": SegmenterLinearSpec(width=1024, depth=24, heads=16, hidden=4096),
}
