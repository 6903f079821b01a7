"""Resampling: a learned table of one grid read at another, by the recipe the checkpoint was trained or shipped with.

Every recipe is linear and separable, so a table is resampled as two small matrix products, ``Y = W_h X W_w^T``, and the
matrices come from the reference call on an identity. That trains under ``torch.compile(dynamic=True)`` (the backward of
an antialiased bicubic with symbolic sizes crashes there), exports, and needs no half-precision or MPS kernel. Nothing
is cached. Recipes differ more than their names suggest: PyTorch's bicubic uses a = -0.75 without antialiasing but
a = -0.5 with it, also when the table grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vispe.position.grid import Count, Grid, at_least_float32, check_grid


@dataclass(frozen=True, kw_only=True)
class ResampleRecipe:
    """How one code base resizes a table, as data.

    ``kernel`` is ``linear``, ``cubic`` or ``geometric`` (linear between positions that grow geometrically from the
    centre). ``offset`` cells are added to the target before the scale is formed, and the kernel samples with that scale
    (0: the size alone counts). ``source`` names the code.
    """

    kernel: Literal["linear", "cubic", "geometric"]
    antialias: bool = False
    align_corners: bool = False
    offset: float = 0.0
    source: str

    def __post_init__(self) -> None:
        if self.kernel not in ("linear", "cubic", "geometric"):
            raise ValueError(f"kernel must be linear, cubic or geometric, got {self.kernel!r}")
        if self.offset and (self.kernel != "cubic" or self.antialias or self.align_corners):
            raise ValueError(f"an offset ({self.offset}) is known for the plain cubic kernel only")
        if self.antialias and (self.align_corners or self.kernel == "geometric"):
            raise ValueError("no code base antialiases a geometric grid or with align_corners")


RECIPES: dict[str, ResampleRecipe] = {
    "timm": ResampleRecipe(kernel="cubic", antialias=True, source="timm resample_abs_pos_embed: ViT, DeiT, EVA"),
    "mae": ResampleRecipe(kernel="cubic", source="MAE interpolate_pos_embed; transformers ViT, DeiT, DINOv2, CLIP"),
    "dinov2": ResampleRecipe(kernel="cubic", offset=0.1, source="DINOv2 hub, models without registers"),
    "dinov2_reg": ResampleRecipe(kernel="cubic", antialias=True, source="DINOv2 hub with registers; RF-DETR"),
    "torchvision": ResampleRecipe(kernel="cubic", align_corners=True, source="torchvision interpolate_embeddings"),
    "jax_vit": ResampleRecipe(
        kernel="linear", align_corners=True, source="vision_transformer and big_vision resample_posemb: zoom of order 1"
    ),
    "flexivit": ResampleRecipe(kernel="linear", antialias=True, source="FlexiViT at run time; SigLIP 2, NaFlex"),
    "pe": ResampleRecipe(kernel="linear", source="perception_models (PE); transformers BEiT's bias table"),
    "qwen3vl": ResampleRecipe(kernel="linear", align_corners=True, source="Qwen3-VL"),
    "swin_bias": ResampleRecipe(kernel="cubic", source="Swin load_pretrained, per head on the (2h-1, 2w-1) table"),
    "sam_relpos": ResampleRecipe(kernel="linear", source="SAM and ViTDet get_rel_pos, along one axis"),
    "beit_geo": ResampleRecipe(
        kernel="geometric",
        source="BEiT run_class_finetuning as timm resize_rel_pos_bias_table: linear, where BEiT's scipy form is cubic",
    ),
}


def resample(
    table: Float[Tensor, "*b n d"], source: Grid, target: Grid, recipe: ResampleRecipe, prefix: int = 0
) -> Float[Tensor, "*b m d"]:
    """``table [..., prefix + h*w, d]`` of grid ``source`` -> ``[..., prefix + H*W, d]`` of grid ``target``.

    The first ``prefix`` rows (class, registers) pass through. Equal (h, w) gives the table itself; equal counts do not.
    ValueError if the rows are not ``prefix + h*w``: the source grid is never guessed.
    """
    check_grid(source, "source")
    check_grid(target, "target")
    if prefix < 0 or table.shape[-2] != prefix + source[0] * source[1]:
        raise ValueError(
            f"a table of {table.shape[-2]} rows is not {prefix} prefix tokens and a grid of (h, w) = {source}"
        )
    if same(source, target):
        return table
    cells = (table[..., prefix:, :] if prefix else table).reshape(*table.shape[:-2], *source, table.shape[-1])
    moved = resample_cells(cells, target, recipe).flatten(-3, -2)
    return _joined(table[..., :prefix, :], moved) if prefix else moved


def resample_cells(
    cells: Float[Tensor, "*b h w d"], target: Grid, recipe: ResampleRecipe
) -> Float[Tensor, "*b new_h new_w d"]:
    """``Y = W_h X W_w^T`` on ``cells [..., h, w, d]`` (channels last, as SAM stores its table).

    Computed in float32 (float64 stays) also under autocast, then cast to the table's dtype.
    """
    check_grid(target, "target")
    h, w = cells.shape[-3:-1]
    if not cells.is_floating_point():
        raise ValueError(f"a table holds floating point numbers, got {cells.dtype}")
    return cells if same((h, w), target) else _moved(cells, target, recipe)


def _moved(cells: Float[Tensor, "*b h w d"], target: Grid, recipe: ResampleRecipe) -> Float[Tensor, "*b new_h new_w d"]:
    h, w = cells.shape[-3:-1]
    if _sparse(recipe, cells):
        x = at_least_float32(cells).reshape(math.prod(cells.shape[:-3]), h, w, cells.shape[-1]).permute(0, 3, 1, 2)
        moved = _reference(x, target, recipe).permute(0, 2, 3, 1)
        return moved.reshape(*cells.shape[:-3], *target, cells.shape[-1]).to(cells.dtype)
    rows = _axis(recipe, h, target[0], cells, (h, w), target)
    columns = _axis(recipe, w, target[1], cells, (h, w), target)
    with _full_precision(cells):
        x = _summable(cells)
        x = (rows.to(x.dtype) @ x.flatten(-2)).unflatten(-1, (w, cells.shape[-1]))
        return (columns.to(x.dtype) @ x).to(cells.dtype)


def resample_line(table: Float[Tensor, "*b n d"], target: Count, recipe: ResampleRecipe) -> Float[Tensor, "*b m d"]:
    """A table along one axis, ``[..., n, d]`` -> ``[..., target, d]`` (SAM's rel_pos, NaFlex's factorised tables).

    Compiled, an equal length is no case of its own (its matrix is the identity): two axes would make four programs.
    """
    plain = not recipe.offset and recipe.kernel != "geometric"
    how = _moved if plain and torch.compiler.is_compiling() else resample_cells
    return how(table.unsqueeze(-2), (target, 1), recipe).squeeze(-2)


def resample_bias(
    table: Float[Tensor, "n heads"], source: Grid, target: Grid, recipe: ResampleRecipe, extra: int = 0
) -> Float[Tensor, "m heads"]:
    """A relative bias table ``[(2h-1)(2w-1) + extra, heads]`` of window ``source`` read at window ``target``.

    ``source`` and ``target`` are windows (h, w) in cells. The last ``extra`` rows (BEiT: class to token, token to
    class, class to class) pass through. ValueError if the rows do not fit the window.
    """
    check_grid(source, "source window")
    check_grid(target, "target window")
    (h, w), (new_h, new_w) = ((2 * a - 1, 2 * b - 1) for a, b in (source, target))
    if extra < 0 or len(table) != h * w + extra:
        raise ValueError(
            f"a bias table of {len(table)} rows is not (2h-1)(2w-1) + {extra} for window (h, w) = {source}"
        )
    if same(source, target):
        return table
    moved = resample(table[: h * w], (h, w), (new_h, new_w), recipe)
    return _joined(moved, table[h * w :]) if extra else moved


def resize_patch_kernel(
    kernel: Float[Tensor, "out c h w"], target: Grid, recipe: ResampleRecipe
) -> Float[Tensor, "out c new_h new_w"]:
    """PI-resize: patch weights such that resized patches keep their embedding, ``w' = pinv(B^T) w`` (FlexiViT).

    ``B`` resizes a patch (``x' = B x``) by ``recipe``. ``B`` is a Kronecker product, so its pseudo-inverse is too and
    only a ``[p, p']`` matrix per axis is inverted, in float64. timm uses the recipe ``timm``. Not equal to resizing the
    kernel as an image: that changes the scale of every embedding.
    """
    check_grid(target, "target")
    h, w = kernel.shape[-2:]
    if same((h, w), target):
        return kernel
    with _full_precision(kernel):
        rows, columns = (
            torch.linalg.pinv(axis_matrix(recipe, old, new, device=_matrix_device(kernel), dtype=torch.float64).mT)
            for old, new in zip((h, w), target, strict=True)
        )
        x = _summable(kernel)
        return (rows.to(x) @ x @ columns.to(x).mT).to(kernel.dtype)


def resample_entry(
    state: Mapping[str, Tensor], key: str, source: Grid, target: Grid, recipe: ResampleRecipe, prefix: int = 0
) -> tuple[dict[str, Tensor], str]:
    """A copy of ``state`` whose table ``key`` is resampled to ``target``, and the sentence that says what was done.

    ValueError if ``key`` is missing or the table does not fit ``source``: a loader reports, it does not skip.
    """
    if key not in state:
        raise ValueError(f"no table {key!r} in a state of {len(state)} entries")
    try:
        table = resample(state[key], source, target, recipe, prefix)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    shape = f"{tuple(state[key].shape)} -> {tuple(table.shape)}"
    how = f"kept, grid {source}" if same(source, target) else f"resampled, grid {source} -> {target}, {shape}"
    return {**state, key: table}, f"{key}: {how}, {prefix} prefix tokens, recipe of {recipe.source}"


def square_grid(tokens: int, prefix: int = 0) -> Grid:
    """The grid of a checkpoint known to be square: ``(s, s)`` with ``s*s = tokens - prefix``; ValueError if none
    is."""
    side = round(max(tokens - prefix, 0) ** 0.5)
    if side == 0 or side * side != tokens - prefix:
        raise ValueError(
            f"{tokens} tokens without {prefix} prefix tokens are no square grid: give the source grid as (h, w)"
        )
    return side, side


def patch_grid(size: Grid, patch: Grid) -> Grid:
    """The grid of an image ``(h, w)`` cut into patches ``(h, w)``; ValueError unless both sides divide."""
    check_grid(size, "image size")
    check_grid(patch, "patch size")
    if size[0] % patch[0] or size[1] % patch[1]:
        h, w = (max(round(side / cell), 1) * cell for side, cell in zip(size, patch, strict=True))
        raise ValueError(
            f"an image of (h, w) = {size} is not a whole number of patches of (h, w) = {patch}; the nearest is {(h, w)}"
        )
    return size[0] // patch[0], size[1] // patch[1]


def same(source: Grid, target: Grid) -> bool:
    """Whether there is nothing to do: equal (h, w). Never while exporting, where one example must not fix the graph."""
    return not torch.compiler.is_exporting() and source[0] == target[0] and source[1] == target[1]


def axis_matrix(
    recipe: ResampleRecipe,
    source: Count,
    target: Count,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "target source"]:
    """The matrix ``W [target, source]`` of one axis: what the recipe's own resize call makes of an identity.

    Two kernels are written out instead of called: a scale with an offset would be frozen into compiled and exported
    graphs, and the geometric grid is no kernel of PyTorch. Rows sum to one.
    """
    if recipe.kernel == "geometric":
        return _geometric(source, target, device).to(dtype)
    if recipe.offset:
        return _cubic_with_offset(source, target, recipe.offset, device, dtype)
    # Rows are resized to as many rows: an image one cell wide would say the same, but there torch 2.14 antialiases
    # wrongly on the CPU when only the height changes.
    impulses = torch.eye(source, device=device, dtype=dtype)[None, None]
    return _reference(impulses, (source, target), recipe)[0, 0].mT


def _reference(x: Float[Tensor, "b c h w"], size: Grid, recipe: ResampleRecipe) -> Float[Tensor, "b c new_h new_w"]:
    """The resize call of the recipe's code base."""
    mode = {"linear": "bilinear", "cubic": "bicubic"}[recipe.kernel]
    return F.interpolate(x, size=size, mode=mode, antialias=recipe.antialias, align_corners=recipe.align_corners)


def _sparse(recipe: ResampleRecipe, like: Tensor) -> bool:
    """Whether the reference call itself, eager on the CPU, is the fastest: it reads four cells where the matrices read
    a row and a column. Compilers get the matrices, one program for all sizes; so do GPUs, where its backward adds in
    no fixed order."""
    plain = recipe.kernel == "linear" and not recipe.antialias
    return plain and like.device.type == "cpu" and not torch.compiler.is_compiling()


def _cubic_with_offset(
    source: Count, target: Count, offset: float, device: torch.device | str, dtype: torch.dtype
) -> Float[Tensor, "target source"]:
    """``F.interpolate(scale_factor=(target + offset) / source, mode="bicubic")``: a = -0.75, edge rows repeated."""
    at = (torch.arange(target, device=device, dtype=dtype) + 0.5) * (source / (target + offset)) - 0.5
    taps = at.floor()[:, None] + torch.arange(-1, 3, device=device, dtype=dtype)
    far = (at[:, None] - taps).abs()
    a = -0.75
    near = ((a + 2) * far - (a + 3)) * far * far + 1
    tail = ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
    weights = torch.where(far <= 1, near, tail)
    hit = taps.clamp(0, source - 1)[..., None] == torch.arange(source, device=device, dtype=dtype)
    return (weights[..., None] * hit).sum(1)


def _geometric(source: Count, target: Count, device: torch.device | str) -> Float[Tensor, "target source"]:
    """Linear between source rows at ``0, +-1, +-(1 + q), +-(1 + q + q^2), ...``, ``q`` such that they span the target.

    ``q`` by the 19 halvings of [1.01, 1.5] that BEiT's search takes; beyond the last source row its value is kept.
    """
    arms = torch.arange(source // 2, device=device, dtype=torch.float64)
    left = torch.full((1,), 1.01, device=device, dtype=torch.float64)
    right = torch.full_like(left, 1.5)
    q = left
    for _ in range(19):
        q = (left + right) / 2
        beyond = (q**arms).sum() > target // 2
        left, right = torch.where(beyond, left, q), torch.where(beyond, q, right)
    arm = (q**arms).cumsum(0)
    rows = torch.cat((-arm.flip(0), torch.zeros_like(left), arm)).float()
    at = torch.arange(target, device=device, dtype=torch.float32) - target // 2
    passed = ((at[:, None] - rows[:-1]) / rows.diff()).clamp(0, 1)  # of every gap between two rows
    ends = torch.ones_like(at)[:, None], torch.zeros_like(at)[:, None]
    return torch.cat((ends[0], passed), 1) - torch.cat((passed, ends[1]), 1)


def _axis(
    recipe: ResampleRecipe, source: Count, target: Count, like: Tensor, old: Grid, new: Grid
) -> Float[Tensor, "target source"]:
    """The axis's matrix on ``like``'s device. A graph that is being exported cannot return early on equal grids, so
    there recipes that would move an equal grid (offset, geometric) choose the identity inside the graph."""
    if recipe.kernel == "geometric" and (source % 2 == 0 or target % 2 == 0):
        raise ValueError(f"a geometric grid has a centre row: odd sides 2w - 1, got {source} -> {target}")
    device, dtype = _matrix_device(like), torch.promote_types(like.dtype, torch.float32)
    matrix = axis_matrix(recipe, source, target, device=device, dtype=dtype)
    if torch.compiler.is_exporting() and (recipe.offset or recipe.kernel == "geometric"):
        keep = (torch.full((), new[0], device=device) == old[0]) & (torch.full((), new[1], device=device) == old[1])
        identity = torch.arange(target, device=device)[:, None] == torch.arange(source, device=device)
        matrix = torch.where(keep, identity.to(dtype), matrix)
    return matrix.to(like.device)


def _matrix_device(like: Tensor) -> torch.device:
    """Where the reference call is complete: MPS lacks antialiasing and float64."""
    return like.device if like.device.type in ("cpu", "cuda", "meta") else torch.device("cpu")


def _summable(x: Tensor) -> Tensor:
    """At least float32, and float64 where TF32 products are allowed: they keep 10 bits of a table."""
    if x.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return x.double()
    return at_least_float32(x)


def _joined(first: Float[Tensor, "*b n d"], last: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b both d"]:
    """Rows after rows, in the table's own dtype: autocast would widen them, and on the CPU refuses float16."""
    with _full_precision(first):
        return torch.cat((first, last), dim=-2)


def _full_precision(x: Tensor) -> AbstractContextManager:
    """Autocast off; no region at all where it is off already, so that exported graphs stay plain."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
