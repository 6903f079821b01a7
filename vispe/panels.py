"""What each encoding tells attention about a grid, as one number a cell: the panels of ``plots.similarity``.

Learned tables are taken as they start, because that is what the encoding itself says; what training makes of it is the
model's. An encoding that is not in the table below is no mistake: it is named at the foot of the figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vispe.position import ENCODINGS, alibi, axial, bias, conv, fourier, learned, none, rotary, scaling, sine
from vispe.position.grid import normalize_keypoints
from vispe.position.resample import RECIPES
from vispe.position.rotary import rotation

Grid = tuple[int, int]  # (h, w) cells, row-major
GRID, QUERY = (16, 24), (5, 8)  # cells, and the (row, column) of the one they are seen from
DIM, HEAD, TRAINED = 128, 64, (14, 14)  # channels of a token and of a head; the grid that tables are born with
LEARNED_BASIS = "rotary, learned basis"


class Panel(NamedTuple):
    """``make(grid)``: ``[n, dim]`` (added), turns ``[n, d/2, 2]`` (rotated), ``[heads, n, n]`` (biased), or the answer
    ``[n, c]`` to a constant input (convolved). ``note`` says which of its forms is drawn."""

    make: Callable[[Grid], Tensor]
    note: str = ""


def _ropevit(grid: Grid, extended: scaling.ExtendedAxes) -> Tensor:
    return rotation(axial.axial_ropevit(grid, HEAD, theta=extended.theta))


def _dinov3(grid: Grid) -> Tensor:
    return rotation(axial.axial_dinov3(axial.dinov3_coordinates(grid), HEAD))


def _mrope(form: Callable[..., Tensor], base: float, sections: tuple[int, int, int]) -> Callable[[Grid], Tensor]:
    def make(grid: Grid) -> Tensor:
        x, y = axial.cells(grid).unbind(-1)
        return rotation(form(torch.stack((x * 0, y, x)), rotary.frequencies(128, base), sections))

    return make


def _lightglue(grid: Grid, weight: Tensor | None = None) -> Tensor:
    basis = rotary.LearnedBasis(2, HEAD)
    if weight is not None:
        basis.weight = torch.nn.Parameter(weight)
    return basis(normalize_keypoints(axial.cells(grid)[None], torch.tensor([grid]))[0])


def _windowed(grid: Grid) -> Tensor:
    table = learned.WindowedTable((7, 7), (8, 8), DIM)
    for weight in table.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return table(grid, RECIPES["mae"])


def _decomposed(grid: Grid) -> Tensor:
    table = bias.DecomposedBias(grid, HEAD)
    for weight in table.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return table(torch.ones(1, 1, grid[0] * grid[1], HEAD), grid)[0]


def _peg(grid: Grid) -> Tensor:
    return conv.PEG(DIM)(torch.ones(1, DIM, *grid)).flatten(2)[0].T


def _mix_ffn(grid: Grid) -> Tensor:
    x = torch.ones(1, grid[0] * grid[1], HEAD)
    for _ in range(4):
        x = x + conv.MixFFN(HEAD, 4 * HEAD)(x, grid)
    return x[0]


NOISE = "at initialisation: noise"
TWICE = "RoPE-ViT, twice as far"
_theta = axial.axis_frequencies(HEAD, 100.0)

PANELS: dict[str, Panel] = {
    "sine 2-D, DETR": Panel(lambda g: sine.sine_detr(g, DIM), "sides stretched to one length"),
    "sine 2-D, Deformable": Panel(lambda g: sine.sine_deformable(g, DIM), "the same at cell centres"),
    "sine 2-D, MAE": Panel(lambda g: sine.sine_mae(g, DIM), "counted in cells"),
    "sine 2-D, MoCo": Panel(lambda g: sine.sine_moco(g, DIM), "the same, end point included"),
    "sine 2-D, timm": Panel(lambda g: sine.sine_timm(g, DIM), "MAE's, other channel order"),
    "sine 2-D, LoFTR": Panel(lambda g: sine.sine_loftr(g, DIM), "counted from 1, interleaved"),
    "sine 2-D, LoFTR as released": Panel(lambda g: sine.sine_loftr_legacy(g, DIM), "almost all waves are flat"),
    "table with grid": Panel(lambda g: learned.GridTable(TRAINED, DIM, 0)(g, RECIPES["timm"]), NOISE),
    "table, windowed": Panel(_windowed, "random; the window tiles"),
    "row + column table": Panel(lambda g: learned.RowColumnTable(DIM)(g), "at initialisation: all positive"),
    "NaViT, absolute": Panel(lambda g: learned.NaViTAbsolute((64, 64), DIM)(g), NOISE),
    "NaViT, fractional": Panel(lambda g: learned.NaViTFractional(TRAINED, DIM)(g), NOISE + " in bins"),
    "factorised table": Panel(lambda g: learned.FactorisedTable(TRAINED, DIM)(g, RECIPES["pe"]), NOISE),
    "random Fourier": Panel(lambda g: fourier.RandomFourier(DIM).grid(g), "never trained"),
    "rotary 2-D axial": Panel(lambda g: rotation(axial.axial_ropevit(g, HEAD)), "base 100, in cells"),
    "rotary 2-D, EVA": Panel(lambda g: rotation(axial.axial_timm(g, HEAD, reference=TRAINED)), "laid over 14x14"),
    "rotary 2-D, Perception Encoder": Panel(lambda g: rotation(axial.axial_pe(g, HEAD)), "laid over 24x24"),
    "rotary 2-D, SAM 2": Panel(lambda g: rotation(axial.axial_sam2(g, HEAD)), "base 10000, in cells"),
    "rotary 2-D, EfficientLoFTR": Panel(
        lambda g: rotation(axial.axial_efficient_loftr(g, HEAD)), "base 10000, in cells"
    ),
    "rotary 2-D, DINOv3": Panel(_dinov3, "in [-1, 1]"),
    "rotary 2-D mixed": Panel(lambda g: rotation(axial.MixedAxial(HEAD, 1)(axial.cells(g))[0, 0]), "at initialisation"),
    LEARNED_BASIS: Panel(_lightglue, "at initialisation"),
    "rotary, M-RoPE": Panel(_mrope(rotary.mrope_chunked, 1e6, (16, 24, 24)), "Qwen2-VL: the slow pairs only"),
    "rotary, interleaved M-RoPE": Panel(_mrope(rotary.mrope_interleaved, 5e6, (24, 20, 20)), "Qwen3-VL"),
    "PI": Panel(lambda g: _ropevit(g, scaling.interpolate_axes(_theta, _half(g), g)), TWICE),
    "NTK-aware": Panel(lambda g: _ropevit(g, scaling.ntk_axes(_theta, _half(g), g)), TWICE),
    "YaRN": Panel(lambda g: _ropevit(g, scaling.yarn_axes(_theta, _half(g), g)), TWICE),
    "ALiBi, 2-D": Panel(lambda g: alibi.alibi_2d(g, 8), "slope 1/2"),
    "Swin table": Panel(lambda g: bias.SwinBias(g, 1)(g), "noise"),
    "Swin V2, continuous": Panel(lambda g: bias.SwinV2Bias(g, 1)(g), "initial"),
    "decomposed": Panel(_decomposed, "random tables"),
    "PEG": Panel(_peg, "one block"),
    "Mix-FFN": Panel(_mix_ffn, "four blocks"),
    "none": Panel(lambda g: none.no_rotation(g[0] * g[1], HEAD), "every place looks the same"),
}  # fmt: skip

NO_GRID = frozenset({
    "sine 1-D, interleaved", "sine 1-D, concatenated", "sine 1-D, concatenated, plain steps", "rotary 1-D",
    "ALiBi, causal", "ALiBi, symmetric", "T5 buckets", "T5 buckets, causal", "Shaw",  # a line
    "sine 3-D, video", "memory frames", "object pointers",  # time
    "object queries", "content queries", "level embedding", "prompts",  # queries, levels and points
    "rotary linear attention", "rotary Performer",  # another attention, not another place
    "dynamic NTK", "LongRoPE",  # on a grid the first is NTK-aware, the second needs searched factors
})  # fmt: skip


def field(name: str, grid: Grid = GRID, query: Grid = QUERY, basis: Tensor | None = None) -> Tensor:
    """What encoding ``name`` of ``PANELS`` says about every cell of ``grid``, seen from cell ``query``: ``[h, w]``.

    Added: cosine similarity. Rotated: the score of a query and keys of ones, turned, over its largest. Biased: the bias
    of the first head. Convolved: how far the answer to a constant input is from that at the centre, over its largest.
    ``basis [d/2, 2]`` replaces LightGlue's fresh one. Random numbers are the same every time. ``ValueError`` for an
    unknown name or a query outside the grid.
    """
    if name not in PANELS:
        raise ValueError(f"no panel for {name!r}; there are {', '.join(PANELS)}")
    if not (0 <= query[0] < grid[0] and 0 <= query[1] < grid[1]):
        raise ValueError(f"the query {query} is no (row, column) of a grid (h, w) = {grid}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = PANELS[name].make(grid) if name != LEARNED_BASIS else _lightglue(grid, basis)
    socket = ENCODINGS[name].socket
    row, column = _half(grid) if socket == "convolved" else query
    return _read(made, socket, row * grid[1] + column).reshape(grid)


def _read(made: Tensor, socket: str, at: int) -> Tensor:
    if socket == "biased":
        return made[0, at]
    if socket == "convolved":
        far = (made - made[at]).norm(dim=-1)
        return far / far.max()
    tokens = made if socket == "added" else rotary.rotate(torch.ones(len(made), 2 * made.shape[1]), made)
    return F.cosine_similarity(tokens[at], tokens, dim=-1)


def _half(grid: Grid) -> Grid:
    return grid[0] // 2, grid[1] // 2
