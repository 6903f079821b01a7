"""From one line of a recipe to the sockets of a ViT: ``position: table + axial`` is all that an ablation changes.

A word names one encoding, a word's encoding has one socket, and a socket takes one word:

| socket | words |
|---|---|
| added | ``table`` (learned, a row a cell), ``row_column`` (learned 2-D), ``factorised`` (the same, summed), |
|       | ``sine_mae``, ``sine_moco``, ``sine_timm``, ``sine_detr`` |
| rotated | ``axial`` (rope-vit), ``mixed`` (rope-vit, learned), ``eva``, ``dinov3`` |
| biased | ``swin``, ``swin_v2``, ``decomposed``, ``shaw``, ``alibi`` |
| convolved | ``peg`` |

``none`` is the empty line. Everything is made anew from the grid in every forward, once for all layers where layers
share it; prefix tokens (class, registers) are never rotated, biased or convolved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vispe.layers.transformer import Sockets
from vispe.position import alibi, axial, bias, conv, learned, sine
from vispe.position.grid import Grid, check_grid
from vispe.position.resample import RECIPES, resample, resample_bias, resample_line
from vispe.position.rotary import Layout, rotation, skip_tokens
from vispe.spec import Spec

Added = Literal["none", "table", "row_column", "factorised", "sine_mae", "sine_moco", "sine_timm", "sine_detr"]
Rotated = Literal["none", "axial", "mixed", "eva", "dinov3"]
Biased = Literal["none", "swin", "swin_v2", "decomposed", "shaw", "alibi"]
Convolved = Literal["none", "peg"]
WORDS: dict[str, tuple[str, ...]] = {
    "added": Added.__args__,  # type: ignore[attr-defined]
    "rotated": Rotated.__args__,  # type: ignore[attr-defined]
    "biased": Biased.__args__,  # type: ignore[attr-defined]
    "convolved": Convolved.__args__,  # type: ignore[attr-defined]
}
PARTS = {  # where each socket's entries are in a state dict
    "added": "position.added.",
    "rotated": "position.mixed.",
    "biased": "position.biases.",
    "convolved": "position.peg.",
}
BASES = {"axial": 100.0, "mixed": 10.0, "eva": 10000.0, "dinov3": 100.0}  # of each source


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionSpec(Spec):
    """Which encoding fills each socket, and the few knobs they have.

    ``recipe`` (of ``vispe.position.resample.RECIPES``) reads a learned table at another grid. ``prefix_rows``: whether
    class and distillation tokens have rows of their own in the table (ViT) or not (timm's ``no_embed_class``).
    ``base`` of rotary, None for the source's own. ``reference``: the grid (h, w) of pre-training, by which EVA's rotary
    and Swin V2's differences are scaled; None is no scale for EVA, and for Swin V2 the grid the model is built for.
    """

    added: Added = "none"
    rotated: Rotated = "none"
    biased: Biased = "none"
    convolved: Convolved = "none"
    recipe: str = "timm"
    prefix_rows: bool = True
    base: float | None = None
    reference: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for socket, words in WORDS.items():
            if getattr(self, socket) not in words:
                raise ValueError(f"position.{socket} must be one of {', '.join(words)}, got {getattr(self, socket)!r}")
        if self.recipe not in RECIPES:
            raise ValueError(f"position.recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}")
        if self.base is not None and self.base <= 0:
            raise ValueError(f"position.base must be positive, got {self.base}")
        if self.reference is not None:
            h, w = check_grid(self.reference, "position.reference")
            object.__setattr__(self, "reference", (h, w))

    @classmethod
    def parse(cls, line: str, **knobs: object) -> PositionSpec:
        """``"table + axial"`` -> the spec; ``"none"`` is the empty one. ValueError for an unknown or a second word."""
        given = [word.strip() for word in line.split("+")]
        sockets: dict[str, str] = {}
        for word in given if given != ["none"] else []:
            socket = next((s for s, words in WORDS.items() if word in words and word != "none"), None)
            if socket is None or socket in sockets:
                what = f"a second {socket} encoding" if socket else "no encoding"
                every = ", ".join(word for words in WORDS.values() for word in words[1:])
                raise ValueError(f"position {line!r}: {word!r} is {what}; 'none', or words joined by ' + ': {every}")
            sockets[socket] = word
        return cls.of(**sockets, **knobs)

    @classmethod
    def read(cls, given: Any) -> PositionSpec:
        """What a model's spec says as ``position``: a PositionSpec, its knobs as a mapping, or its line."""
        if isinstance(given, PositionSpec):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, Mapping):
            return cls.of(**given)
        raise ValueError(f"position is a line such as 'table + axial' or a mapping of sockets, got {given!r}")

    def changed(self, given: Any) -> Any:
        """A copy with what is said on top: a mapping changes only the knobs it names, a line the sockets, while the
        family still says how a table is read; anything else takes its place."""
        if isinstance(given, Mapping):
            return self.but(**given)
        if isinstance(given, str):
            return PositionSpec.parse(given, recipe=self.recipe, prefix_rows=self.prefix_rows)
        return given

    def __str__(self) -> str:
        return " + ".join(word for s in WORDS if (word := getattr(self, s)) != "none") or "none"


class Position(nn.Module):
    """The sockets of a ViT, filled. ``grid`` is that of the image size the model is built for, ``prefix`` its tokens
    without a place, ``rows`` of them in the table."""

    def __init__(
        self, spec: PositionSpec, grid: Grid, width: int, heads: int, depth: int, prefix: int, rows: int = 0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide the width {width}")
        self.spec, self.grid, self.width, self.head_dim, self.prefix = spec, grid, width, width // heads, prefix
        self.rows = rows
        self.layout: Layout = "half" if spec.rotated == "dinov3" else "interleaved"
        self.added = _added(spec, grid, width, rows)
        self.mixed = axial.MixedAxial(self.head_dim, heads, depth, self._base()) if spec.rotated == "mixed" else None
        self.heads = heads
        self.biases = nn.ModuleList(_bias(spec, grid, heads, self.head_dim) for _ in range(depth))
        self.peg = conv.PEG(width) if spec.convolved == "peg" else None

    def table(self, grid: Grid, device: torch.device) -> Float[Tensor, "n width"] | None:
        """What is added to the tokens: rows of the prefix tokens, where they have any, then of the cells."""
        if self.added is not None:
            return self.added(grid, RECIPES[self.spec.recipe])
        if self.spec.added == "none":
            return None
        return getattr(sine, self.spec.added)(grid, self.width, device=device)

    def sockets(self, grid: Grid, device: torch.device) -> list[Sockets]:
        """What each layer's attention is told, made once a forward."""
        turns = self._turns(grid, device)
        shared = self._alibi(grid, device)
        return [
            Sockets(
                None if turns is None else turns[i % len(turns)],
                self.layout,
                shared or self._bias_of(layer, grid),
                partial(_shaw_values, layer, self.prefix) if isinstance(layer, bias.ShawBias) else None,
            )
            for i, layer in enumerate(self.biases)
        ]

    def convolve(self, tokens: Float[Tensor, "b n width"], grid: Grid) -> Float[Tensor, "b n width"]:
        """Behind the first block (CPVT)."""
        return tokens if self.peg is None else conv.on_grid(tokens, grid, self.peg, self.prefix)

    def adapt(
        self, state: Mapping[str, Tensor], source: Grid, was: PositionSpec
    ) -> tuple[dict[str, Tensor], list[str]]:
        """A checkpoint's ``position.*`` entries, learned on grid ``source``, for this one's; and what was done.

        A socket whose entries are this module's is read, whatever ``was`` says of it. Where ``was``, the checkpoint's
        own spec, has another encoding in a socket, entries of that one are dropped and this one's start fresh; where
        it has the same, what is missing or unknown is left to the strict reader.
        """
        state, said = dict(state), []
        own = {f"position.{key}": value for key, value in self.state_dict().items()}
        for socket, part in PARTS.items():
            ours = {key for key in own if key.startswith(part)}
            theirs = {key for key in state if key.startswith(part)}
            if ours != theirs and getattr(was, socket) != getattr(self.spec, socket):
                for key in sorted(theirs):
                    del state[key]
                    said.append(f"{key}: dropped, position is {self.spec}")
                state.update({key: own[key] for key in ours})
                said += [f"{key}: fresh, the checkpoint's position is another" for key in sorted(ours)]
            else:
                for key in sorted(ours & theirs):
                    state[key], how = self._moved(key, state[key], source)
                    said += [f"{key}: {how}"] if how and source != self.grid else []
        if self.spec.biased == "swin_v2":
            said += self._measured_by(was.reference or source)
        return state, said

    def _measured_by(self, window: Grid) -> list[str]:
        """Swin V2's differences stay scaled by the window that its network was trained with."""
        layers = [layer for layer in self.biases if isinstance(layer, bias.SwinV2Bias)]
        if all(layer.window == window for layer in layers):
            return []
        for layer in layers:
            layer.window = window
        self.spec = self.spec.but(reference=window)
        return [
            f"position.biases: differences scaled by grid {window} of training, not {self.grid}; position.reference"
        ]

    def _moved(self, key: str, old: Tensor, source: Grid) -> tuple[Tensor, str]:
        """One entry of grid ``source`` at this grid, and in words what was done. ValueError if it is of another."""
        name, way = key.rsplit(".", 1)[-1], f"grid {source} -> {self.grid}"
        recipe = RECIPES[self.spec.recipe]
        cells, reach = source[0] * source[1], self.grid[0] * self.grid[1] - 1
        axis = 0 if name in ("row", "rows") else 1
        try:
            if key == "position.added.weight":
                moved = resample(old, source, self.grid, recipe, self.rows)
                return moved, f"resampled, {way}, {self.rows} prefix tokens, recipe of {recipe.source}"
            if name in ("row", "column"):
                _check_rows(old, source[axis], source)
                return resample_line(old, self.grid[axis], recipe), f"resampled, {way}, recipe of {recipe.source}"
            if name in ("rows", "columns"):
                _check_rows(old, 2 * source[axis] - 1, source)
                moved = resample_line(old, 2 * self.grid[axis] - 1, RECIPES["sam_relpos"])
                return moved, f"resampled, {way}, as SAM"
            if name == "table":
                return resample_bias(old, source, self.grid, RECIPES["swin_bias"]), f"resampled, {way}, as Swin"
            if name in ("key_table", "value_table"):
                _check_rows(old, 2 * cells - 1, source)
                at = torch.arange(-reach, reach + 1, device=old.device).clamp(1 - cells, cells - 1) + cells - 1
                return old[at], f"{way}, distances beyond {cells - 1} read the last row"
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        return old, ""

    def _base(self) -> float:
        return self.spec.base or BASES[self.spec.rotated]

    def _turns(self, grid: Grid, device: torch.device) -> Tensor | None:
        """``[layers or 1, (heads,) n, d/2, 2]``."""
        kind, d = self.spec.rotated, self.head_dim
        if kind == "none":
            return None
        if kind == "axial":
            angles = axial.axial_ropevit(grid, d, self._base(), device=device)[None]
        elif kind == "eva":
            angles = axial.axial_timm(grid, d, self._base(), reference=self.spec.reference, device=device)[None]
        elif kind == "dinov3":
            angles = axial.axial_dinov3(axial.dinov3_coordinates(grid, device=device), d, self._base())[None]
        else:
            assert self.mixed is not None
            angles = self.mixed(axial.cells(grid, device))
        return rotation(skip_tokens(angles, self.prefix), layout=self.layout)

    def _alibi(self, grid: Grid, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        if self.spec.biased != "alibi":
            return None
        made = bias.with_prefix(alibi.alibi_2d(grid, self.heads, device), self.prefix)
        return lambda q: made

    def _bias_of(self, layer: nn.Module, grid: Grid) -> Callable[[Tensor], Tensor] | None:
        if isinstance(layer, nn.Identity):
            return None
        if isinstance(layer, (bias.DecomposedBias, bias.ShawBias)):
            return partial(_asked, layer, grid, self.prefix)
        return lambda q: bias.with_prefix(layer(grid), self.prefix)


def _check_rows(table: Tensor, rows: int, source: Grid) -> None:
    if len(table) != rows:
        raise ValueError(f"a table of {len(table)} rows is not of a grid of (h, w) = {source}, which has {rows}")


def _asked(layer: nn.Module, grid: Grid, prefix: int, q: Float[Tensor, "b heads n d"]) -> Float[Tensor, "b heads n n"]:
    """A bias that asks the query."""
    places = q[:, :, prefix:]
    own = layer(places, grid) if isinstance(layer, bias.DecomposedBias) else layer(places, grid[0] * grid[1])
    return bias.with_prefix(own, prefix)


def _shaw_values(layer: bias.ShawBias, prefix: int, weights: Float[Tensor, "b heads n n"]) -> Tensor:
    return F.pad(layer.values(weights[..., prefix:, prefix:]), (0, 0, prefix, 0))


def _added(spec: PositionSpec, grid: Grid, width: int, rows: int) -> nn.Module | None:
    if spec.added == "table":
        return learned.GridTable(grid, width, rows)
    if spec.added == "row_column":
        table = learned.RowColumnTable(width, grid)
        for side in table.parameters():  # a ViT's start: DETR's own, uniform in [0, 1), would drown the patches
            nn.init.normal_(side, std=0.02)
        return table
    if spec.added == "factorised":
        return learned.FactorisedTable(grid, width)
    return None


def _bias(spec: PositionSpec, grid: Grid, heads: int, head_dim: int) -> nn.Module:
    """One layer's own bias; Identity where it has none."""
    kind = spec.biased
    if kind == "swin":
        return bias.SwinBias(grid, heads)
    if kind == "swin_v2":
        return bias.SwinV2Bias(spec.reference or grid, heads)
    if kind == "decomposed":
        return bias.DecomposedBias(grid, head_dim)
    return bias.ShawBias(head_dim, grid[0] * grid[1] - 1) if kind == "shaw" else nn.Identity()
