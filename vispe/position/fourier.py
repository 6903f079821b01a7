"""Random Fourier features: where a point lies, as phases along a few hundred random directions of the plane (SAM).

Points a person clicks and the cells of the image's feature grid go through one and the same function, so a click and
the cell under it cannot drift apart. The directions are drawn once, never trained, and belong to the checkpoint.
Labels (positive, negative, box corner, padding) are learned and added (segment-anything ``prompt_encoder.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from vispe.position.grid import at_least_float32, check_finite, check_grid
from vispe.position.sine import check_dim

PADDING, NEGATIVE, POSITIVE, TOP_LEFT, BOTTOM_RIGHT = -1, 0, 1, 2, 3  # labels of a prompt's points


def fourier_sam(unit: Shaped[Tensor, "*n 2"], directions: Float[Tensor, "2 f"]) -> Float[Tensor, "*n dim"]:
    """``[sin(2 pi (2u - 1) G) | cos(2 pi (2u - 1) G)]``: ``unit [..., 2]`` is (x, y) over the image's (w, h), in
    [0, 1]; ``directions`` is G in turns per half image (SAM ``_pe_encoding``; Tancik et al. 2020).

    Result ``[..., 2f]`` in float32 (float64 stays). Multiplied elementwise: under autocast or TF32 a matrix product
    would blur phases of some 30 radians. ValueError for positions that are not finite.
    """
    _check_width(unit, 2, "positions are (x, y)")
    x, y = (2 * check_finite(unit, "positions") - 1).unbind(-1)
    gx, gy = at_least_float32(directions).unbind(0)
    angles = 2 * math.pi * torch.addcmul(x[..., None] * gx, y[..., None], gy)  # fused, as the source's product rounds
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class RandomFourier(nn.Module):
    """SAM's ``PositionEmbeddingRandom``: ``dim/2`` directions drawn from N(0, scale^2), a buffer that travels with the
    checkpoint and stays float32 under ``.half()`` and ``.bfloat16()``.

    ``forward(xy [..., 2] in pixels, size (h, w))`` -> ``[..., dim]``; the first pixel's centre is (0, 0).
    ``grid((h, w))`` -> ``[h*w, dim]``, row-major: each cell's centre. ValueError for an odd ``dim``, an empty size,
    positions that are not finite.
    """

    directions: Tensor

    positional = ()

    def __init__(self, dim: int, scale: float = 1.0) -> None:
        super().__init__()
        check_dim(dim, 2, "RandomFourier")
        if not scale > 0:
            raise ValueError(f"random Fourier features need a positive scale, got {scale}")
        self.register_buffer("directions", scale * torch.randn(2, dim // 2))

    def forward(self, xy: Shaped[Tensor, "*n 2"], size: tuple[int, int]) -> Float[Tensor, "*n dim"]:
        h, w = check_grid(size)
        _check_width(xy, 2, "points are (x, y)")
        x, y = (at_least_float32(xy) + 0.5).unbind(-1)
        return fourier_sam(torch.stack((x / w, y / h), dim=-1), self.directions)

    def grid(self, grid: tuple[int, int]) -> Float[Tensor, "n dim"]:
        """Every cell's centre as a point of an image of ``h`` by ``w`` pixels."""
        h, w = check_grid(grid)
        rows, columns = (torch.arange(n, dtype=torch.float32, device=self.directions.device) for n in (h, w))
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        return self(torch.stack((x, y), dim=-1).flatten(0, 1), grid)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RandomFourier:
        """Move with the model, but never to half precision: 30 radians in bfloat16 are off by an eighth."""
        exact = self.directions
        super()._apply(fn, recurse)
        if at_least_float32(self.directions).dtype != self.directions.dtype:
            self.directions = exact.to(self.directions.device)
        return self


class PromptEncoding(nn.Module):
    """Points and boxes as tokens: Fourier features plus a learned embedding of what each point is (SAM's
    ``PromptEncoder``, its sparse half).

    Labels: -1 padding, 0 background, 1 foreground, 2 and 3 the corners of a box. A padding token has no place at all:
    its features are zeroed before ``padding`` is added. ``fourier.grid`` is the encoding of the image's own features.
    """

    positional = ("labels", "padding")

    def __init__(self, dim: int, scale: float = 1.0) -> None:
        super().__init__()
        self.fourier = RandomFourier(dim, scale)
        self.labels = nn.Parameter(torch.randn(4, dim))  # background, foreground, top left, bottom right
        self.padding = nn.Parameter(torch.randn(dim))

    def forward(
        self, points: Shaped[Tensor, "b n 2"], labels: Int[Tensor, "b n"], size: tuple[int, int]
    ) -> Float[Tensor, "b n dim"]:
        """``points [b, n, 2]`` as (x, y) in pixels, ``labels [b, n]``, the image's (h, w) -> ``[b, n, dim]``.

        SAM appends one padding point to prompts without a box, SAM 2 to every prompt: :func:`with_padding`. ValueError
        for points that are not finite, labels outside -1..3 or of another shape.
        """
        _check_labels(labels, points)
        learned = torch.cat((self.padding[None], self.labels))[labels + 1]
        place = self.fourier(points, size)
        return place.masked_fill((labels == PADDING)[..., None], 0.0) + learned

    def boxes(self, boxes: Shaped[Tensor, "b k 4"], size: tuple[int, int]) -> Float[Tensor, "b m dim"]:
        """``boxes [b, k, 4]`` as (x0, y0, x1, y1) in pixels -> ``[b, 2k, dim]``: two labelled points each."""
        _check_width(boxes, 4, "boxes are (x0, y0, x1, y1)")
        corners = boxes.unflatten(-1, (2, 2)).flatten(1, 2)
        labels = torch.tensor([TOP_LEFT, BOTTOM_RIGHT], device=boxes.device).repeat(boxes.shape[0], boxes.shape[1])
        return self(corners, labels, size)


def with_padding(
    points: Shaped[Tensor, "b n 2"], labels: Int[Tensor, "b n"]
) -> tuple[Shaped[Tensor, "b m 2"], Int[Tensor, "b m"]]:
    """The points and labels with SAM's padding point, (0, 0) labelled -1, behind them."""
    return nn.functional.pad(points, (0, 0, 0, 1)), nn.functional.pad(labels, (0, 1), value=PADDING)


def _check_width(x: Shaped[Tensor, "*n"], width: int, what: str) -> None:
    if x.ndim < 1 or x.shape[-1] != width:
        raise ValueError(f"{what}, so the last size is {width}, got {tuple(x.shape)}")


def _check_labels(labels: Shaped[Tensor, "*s"], points: Shaped[Tensor, "*n 2"]) -> None:
    if labels.shape != points.shape[:-1]:
        raise ValueError(f"labels of points {tuple(points.shape)} are one a point, got {tuple(labels.shape)}")
    if torch.compiler.is_compiling() or labels.is_meta:
        return
    wrong = (labels < PADDING) | (labels > BOTTOM_RIGHT)
    if bool(wrong.any()):
        raise ValueError(f"labels are -1 (padding), 0, 1 (point), 2, 3 (box corner), got {labels[wrong][0].item()}")
