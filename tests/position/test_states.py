"""One promise for every encoding: whatever is done to a module or around a call, the numbers stay those of the plain
float32 run, cast once; nothing is remembered, and every positional parameter is found.

``CASES`` has a row for each name of ``ENCODINGS``: how it is built, what it makes of a feature map ``x [b, 16, h, w]``
(whose grid is the input's shape), and which of its parameters are positions. What each meets is its socket: added to
tokens, turning them, added to a score.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from vispe.position import ENCODINGS, alibi, axial, bias, conv, fourier, learned, linear, none, rotary, scaling, sine
from vispe.position.parameters import positional_parameters
from vispe.position.resample import RECIPES
from vispe.position.temporal import MemoryFrames, sine_object_pointers

WIDTH, HEADS, DIM = 16, 2, 8  # channels, heads, channels a head
LONG = 2100  # beyond what float16 counts (2048); bfloat16 stops at 256
LIMIT = {torch.bfloat16: 300, torch.float16: LONG}
HALVES = list(LIMIT)


# What a case sees of a feature map


def grid_of(x: Tensor) -> tuple[int, int]:
    return x.shape[2], x.shape[3]


def tokens(x: Tensor) -> Tensor:
    """``[b, n, 16]``"""
    return x.flatten(2).mT


def queries(x: Tensor) -> Tensor:
    """``[b, heads, n, 8]``"""
    return tokens(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def line(x: Tensor) -> Tensor:
    """The number of each token, whole."""
    return torch.arange(x.shape[2] * x.shape[3], device=x.device)


def places(x: Tensor) -> Tensor:
    """``[n, 2]`` of (x, y), float32."""
    return axial.cells(grid_of(x), x.device)


def text(x: Tensor) -> Tensor:
    """``[3, n]`` of (time, row, column), whole."""
    return torch.stack((line(x), line(x) // x.shape[3], line(x) % x.shape[3]))


def basis(x: Tensor, dim: int = WIDTH) -> Tensor:
    return rotary.frequencies(dim).to(x.device)


def sequence(x: Tensor) -> Tensor:
    """The turn of a sequence."""
    return rotary.rotation(rotary.phases(line(x), basis(x)))


def turned(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    return rotary.rotate(tokens(x), rotary.rotation(angles, scale))


def extended(x: Tensor, new: scaling.Extended) -> Tensor:
    return turned(x, rotary.phases(line(x), new.theta), new.attention)


def prompted(part: nn.Module, x: Tensor) -> Tensor:
    labels = (line(x) % 5 - 1).expand(len(x), -1)
    return part(places(x).expand(len(x), -1, -1), labels, grid_of(x))


# The table


class Case(NamedTuple):
    """``encode(part, x)``; ``positions`` as ``positional_parameters`` names them; ``alone``: its socket is inside."""

    encode: Callable[[nn.Module, Tensor], Tensor]
    build: Callable[[], nn.Module] = nn.Identity  # a function of positions owns nothing
    positions: tuple[str, ...] = ()
    alone: bool = False
    apart: bool = True  # every token of a line has a code of its own
    layer: bool = False  # rounds in half precision as every layer of a network does


def plane(make: Callable[..., Tensor]) -> Case:
    return Case(lambda _, x: make(grid_of(x), WIDTH, device=x.device))


def row(make: Callable[..., Tensor]) -> Case:
    return Case(lambda _, x: make(line(x), WIDTH))


def wheel(make: Callable[..., Tensor], **known: object) -> Case:
    return Case(lambda _, x: turned(x, make(grid_of(x), WIDTH, device=x.device, **known)))


def mixed(part: nn.Module, x: Tensor) -> Tensor:
    return rotary.rotate(queries(x), rotary.rotation(part(places(x))[0])).transpose(1, 2).flatten(2)


def video(_: nn.Module, x: Tensor) -> Tensor:
    return sine.sine_mask2former_video(2, grid_of(x), WIDTH, device=x.device).unflatten(0, (2, -1))[1]


def level(part: nn.Module, x: Tensor) -> Tensor:
    return torch.cat(part([tokens(x), tokens(x)[:, :2]]), 1)


def shaw(part: nn.Module, x: Tensor) -> Tensor:
    """Both halves side by side: what is added to the scores, and to the output for some attention weights."""
    return torch.cat((part(queries(x), x.shape[2] * x.shape[3]), part.values(queries(x))), -1)


def chunked(make: Callable[..., Tensor], *sections: int) -> Case:
    return Case(lambda _, x: turned(x, make(text(x), basis(x), sections)))


def linearly(make: Callable[..., Tensor]) -> Case:
    return Case(lambda _, x: make(tokens(x), tokens(x), tokens(x), sequence(x), sequence(x)), apart=False)


def further(make: Callable[[Tensor, int], scaling.Extended]) -> Case:
    return Case(lambda _, x: extended(x, make(basis(x), x.shape[2] * x.shape[3])))


def sized(part: nn.Module, x: Tensor) -> Tensor:
    return part(grid_of(x))


def counted(part: nn.Module, x: Tensor) -> Tensor:
    n = x.shape[2] * x.shape[3]
    return part(n, n)


def resized(recipe: str) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda part, x: part(grid_of(x), RECIPES[recipe])


def nothing(_: nn.Module, x: Tensor) -> Tensor:
    n = x.shape[2] * x.shape[3]
    assert none.no_bias(n, n) is None
    still = rotary.rotate(tokens(none.no_convolution(x)), none.no_rotation(n, WIDTH, x.device))
    return still + none.no_addition(n, WIDTH, x.device)


CASES: dict[str, Case] = {
    "sine 1-D, interleaved": row(sine.sine_vaswani),
    "sine 1-D, concatenated": row(sine.sine_tensor2tensor),
    "sine 1-D, concatenated, plain steps": row(sine.sine_marian),
    "sine 2-D, DETR": plane(sine.sine_detr),
    "sine 2-D, Deformable": plane(sine.sine_deformable),
    "sine 2-D, MAE": plane(sine.sine_mae),
    "sine 2-D, MoCo": plane(sine.sine_moco),
    "sine 2-D, timm": plane(sine.sine_timm),
    "sine 2-D, LoFTR": plane(sine.sine_loftr),
    "sine 2-D, LoFTR as released": plane(sine.sine_loftr_legacy),
    "sine 3-D, video": Case(video),
    "table with grid": Case(resized("timm"), lambda: learned.GridTable((3, 4), WIDTH, 0), ("weight",), apart=False),
    "table, windowed": Case(
        resized("mae"), lambda: learned.WindowedTable((3, 4), (1, 1), WIDTH), ("background", "window"), apart=False
    ),
    "row + column table": Case(sized, lambda: learned.RowColumnTable(WIDTH, (LONG, LONG)), ("row", "column")),
    "NaViT, absolute": Case(sized, lambda: learned.NaViTAbsolute((LONG, LONG), WIDTH), ("row", "column")),
    "NaViT, fractional": Case(sized, lambda: learned.NaViTFractional((LONG, LONG), WIDTH), ("row", "column")),
    "factorised table": Case(
        resized("pe"), lambda: learned.FactorisedTable((3, 4), WIDTH), ("row", "column"), apart=False
    ),
    "object queries": Case(
        lambda part, x: torch.cat(part(len(x)), 1),
        lambda: learned.ObjectQueries(3, WIDTH),
        ("position",),
        alone=True,
        apart=False,
    ),
    "content queries": Case(
        lambda part, x: torch.cat(part(len(x)), 1),
        lambda: learned.ContentQueries(3, WIDTH),
        ("position",),
        alone=True,
        apart=False,
    ),
    "level embedding": Case(level, lambda: learned.LevelEmbedding(2, WIDTH), ("weight",), alone=True, apart=False),
    "random Fourier": Case(lambda part, x: part.grid(grid_of(x)), lambda: fourier.RandomFourier(WIDTH)),
    "prompts": Case(prompted, lambda: fourier.PromptEncoding(WIDTH), ("labels", "padding"), apart=False),
    "memory frames": Case(lambda part, x: part(line(x) % 7), lambda: MemoryFrames(WIDTH), ("table",), apart=False),
    "object pointers": Case(lambda _, x: sine_object_pointers(line(x), WIDTH, 16)),
    "rotary 1-D": Case(lambda _, x: rotary.rotate(tokens(x), sequence(x))),
    "rotary, learned basis": Case(
        lambda part, x: rotary.rotate(tokens(x), part(places(x) / 8)),
        lambda: rotary.LearnedBasis(2, WIDTH),
        ("weight",),
    ),
    "rotary, M-RoPE": chunked(rotary.mrope_chunked, 2, 3, 3),
    "rotary, interleaved M-RoPE": chunked(rotary.mrope_interleaved, 4, 2, 2),
    "rotary 2-D axial": wheel(axial.axial_ropevit),
    "rotary 2-D, EVA": wheel(axial.axial_timm, reference=(16, 16)),
    "rotary 2-D, Perception Encoder": wheel(axial.axial_pe),
    "rotary 2-D, SAM 2": wheel(axial.axial_sam2),
    "rotary 2-D, EfficientLoFTR": wheel(axial.axial_efficient_loftr),
    "rotary 2-D, DINOv3": Case(
        lambda _, x: turned(x, axial.axial_dinov3(axial.dinov3_coordinates(grid_of(x), device=x.device), WIDTH))
    ),
    "rotary 2-D mixed": Case(mixed, lambda: axial.MixedAxial(DIM, HEADS), ("weight",)),
    "rotary linear attention": linearly(linear.rotary_linear_attention),
    "rotary Performer": linearly(linear.performer_rotary_attention),
    "PI": further(lambda theta, _: scaling.interpolate(theta, 4.0)),
    "NTK-aware": further(lambda theta, _: scaling.ntk(theta, 4.0)),
    "dynamic NTK": further(lambda theta, n: scaling.dynamic_ntk(theta, 2.0, n, 8)),
    "YaRN": further(lambda theta, _: scaling.yarn(theta, 4.0, 64.0)),
    "LongRoPE": further(lambda theta, n: scaling.longrope(theta, [1.0] * 8, [2.0] * 8, n, 8, factor=4.0)),
    "ALiBi, causal": Case(
        lambda _, x: alibi.alibi_causal(*[x.shape[2] * x.shape[3]] * 2, HEADS, device=x.device), apart=False
    ),
    "ALiBi, symmetric": Case(
        lambda _, x: alibi.alibi_symmetric(*[x.shape[2] * x.shape[3]] * 2, HEADS, device=x.device), apart=False
    ),
    "ALiBi, 2-D": Case(lambda _, x: alibi.alibi_2d(grid_of(x), HEADS, x.device), apart=False),
    "T5 buckets": Case(counted, lambda: bias.T5Bias(HEADS), ("weight",), apart=False),
    "T5 buckets, causal": Case(counted, lambda: bias.CausalT5Bias(HEADS), ("weight",), apart=False),
    "Shaw": Case(shaw, lambda: bias.ShawBias(DIM, 3), ("key_table", "value_table"), alone=True, apart=False),
    "Swin table": Case(sized, lambda: bias.SwinBias((3, 4), HEADS), ("table",), apart=False),
    "Swin V2, continuous": Case(
        sized,
        lambda: bias.SwinV2Bias((3, 4), HEADS, 16),
        ("inner.weight", "inner.bias", "outer.weight"),
        apart=False,
    ),
    "decomposed": Case(
        lambda part, x: part(queries(x), grid_of(x)),
        lambda: bias.DecomposedBias((3, 4), DIM),
        ("rows", "columns"),
        apart=False,
    ),
    "Mix-FFN": Case(
        lambda part, x: part(tokens(x), grid_of(x)),
        lambda: conv.MixFFN(WIDTH, 8),
        ("conv.weight", "conv.bias"),
        apart=False,
        layer=True,
    ),
    "PEG": Case(
        lambda part, x: part(x).flatten(2).mT,
        lambda: conv.PEG(WIDTH),
        ("conv.weight", "conv.bias"),
        apart=False,
        layer=True,
    ),
    "none": Case(nothing, apart=False),
}


class Member(nn.Module):
    """An encoding where a model has it: ``x`` -> tokens, turned tokens or scores that carry position."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.part = name, CASES[name].build()

    def encode(self, x: Tensor) -> Tensor:
        return CASES[self.name].encode(self.part, x)

    def socket(self, x: Tensor, encoded: Tensor) -> Tensor:
        kind = "" if CASES[self.name].alone else ENCODINGS[self.name].socket
        if kind == "added":
            return tokens(x) + encoded.to(x.dtype)
        if kind == "biased":
            score = tokens(x)[:, None, :, :1] * tokens(x)[:, None, :, 1:2].mT
            return score + encoded.to(x.dtype)
        return encoded.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.socket(x, self.encode(x))


def built(name: str) -> Member:
    """Every parameter from N(0, 1): a table that is zero or tiny at birth would agree with anything."""
    member, g = Member(name), torch.Generator().manual_seed(0)
    for parameter in member.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g)
    return member.eval()


def features(h: int, w: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, WIDTH, h, w, generator=torch.Generator().manual_seed(h * w))


def same(got: Tensor, wanted: Tensor, name: str, dtype: torch.dtype) -> None:
    """To the bit; a layer of a network to a few roundings of ``dtype``, which is its own business."""
    assert got.shape == wanted.shape
    if not CASES[name].layer:
        assert torch.equal(got, wanted)
        return
    limit = 4 * torch.finfo(dtype).eps * wanted.abs().max().item()
    torch.testing.assert_close(got.float(), wanted.float(), atol=limit, rtol=0)


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


every = pytest.mark.parametrize("name", CASES)
TRAINED = [name for name, case in CASES.items() if case.build is not nn.Identity and name != "random Fourier"]


# What every one of them is for


def attended(member: Member, x: Tensor) -> Tensor:
    """Self-attention of the tokens with the encoding in its socket, ``[b, n, c]``: the projections are identities."""
    made, kind = member(x), "" if CASES[member.name].alone else ENCODINGS[member.name].socket
    if kind == "biased":
        return made[..., : made.shape[-2]].mean(1).softmax(-1) @ tokens(x)
    if kind in ("added", "rotated", "none"):
        return (made @ made.mT).softmax(-1) @ (made if kind == "added" else tokens(x))
    return made


ONE_FOR_ALL = {"none", "level embedding"}  # the same for every token: nothing says which is where


@every
def test_attention_sees_order_with_it_and_not_without(name):
    """Shuffled tokens give the shuffled result without an encoding, and another result with each."""
    x, n = features(3, 5), 15
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    shuffled = x.flatten(2)[..., order].unflatten(2, (3, 5))
    got, wanted = attended(built(name), shuffled), attended(built(name), x)
    if got.shape[1] != n:
        pytest.skip("queries, frames and pointers are not the tokens of the image")
    change = (got[:, :n] - wanted[:, order]).abs().max().item()
    assert (change < 1e-5) if name in ONE_FOR_ALL else (change > 1e-3), change


def test_every_row_is_an_encoding():
    assert set(CASES) <= set(ENCODINGS)


# Precision


def rounded_once(member: Member, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The rule for half precision: parameters and inputs are rounded, all else is float32, the result is cast once."""
    exact, x = copy.deepcopy(member), x.to(dtype)
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return member.socket(x, exact.encode(x.float()).to(dtype))


@every
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_modules_give_the_float32_numbers_cast_once(name, dtype):
    member, long = built(name), LIMIT[dtype]
    half = copy.deepcopy(member).to(dtype)
    for grid in [(5, 7), (1, long), (long, 1)]:
        x = features(*grid, batch=1)
        wanted = rounded_once(member, x, dtype)
        assert wanted.isfinite().all() or "causal" in name
        same(half(x.to(dtype)), wanted, name, dtype)
        with torch.autocast("cpu", dtype=dtype):
            same(half(x.to(dtype)), wanted, name, dtype)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.apart])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_positions_do_not_collide(name, dtype):
    """Counted in half precision the last tokens of these lines would be one."""
    half, long = built(name).to(dtype), LIMIT[dtype]
    assert len(torch.arange(long).to(dtype).unique()) < long
    for grid in [(1, long), (long, 1)]:
        codes = half.encode(torch.ones(1, WIDTH, *grid, dtype=dtype)).flatten(0, -2)
        assert len(codes.unique(dim=0)) == long


@every
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_changes_nothing(name, dtype):
    member = built(name)
    for grid in [(5, 7), (1, LIMIT[dtype])]:
        x = features(*grid, batch=1)
        plain = member(x)
        with torch.autocast("cpu", dtype=dtype):
            got = member(x)
        assert got.dtype == torch.float32 or CASES[name].layer
        same(got, plain, name, dtype)


@every
def test_the_default_dtype_changes_nothing(name):
    member, x = built(name), features(3, 300, batch=1)
    plain = member.encode(x)
    for dtype in (torch.bfloat16, torch.float64):
        with default_dtype(dtype):
            got = member.encode(x)
        assert got.dtype == torch.float32
        assert torch.equal(got, plain)


# Memory and places


@every
def test_nothing_is_remembered(name):
    member, a, b = built(name), features(5, 7), features(9, 4)
    before = pickle.dumps(member)
    first, other = member(a), member(b)
    assert torch.equal(member(a), first)
    assert torch.equal(member(b), other)
    assert pickle.dumps(member) == before  # no buffer, no attribute, nothing


@every
def test_inference_mode_inside_and_after(name):
    member, x = built(name), features(5, 7)
    with torch.inference_mode():
        inside = member(x)
    plain = member(x.requires_grad_())
    assert torch.equal(inside, plain)
    plain.square().sum().backward() if plain.isfinite().all() else plain[plain.isfinite()].sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in member.parameters())


@every
def test_copies_and_pickles(name):
    member, x = built(name), features(5, 7)
    plain = member(x)
    for twin in (copy.deepcopy(member), pickle.loads(pickle.dumps(member))):
        assert torch.equal(twin(x), plain)


@every
def test_meta_then_empty_then_loaded(name):
    member, x = built(name), features(5, 7)
    with torch.device("meta"):
        empty = Member(name)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert empty(x.to("meta")).shape == member(x).shape
    for loaded in (copy.deepcopy(empty).to_empty(device="cpu"), empty):
        loaded.load_state_dict(member.state_dict(), assign=loaded is empty)
        assert torch.equal(loaded(x), member(x))


@every
def test_moved_all_is_made_there(name, monkeypatch):
    """On a device that need not be there: its tensors have no numbers, but refuse to meet those of another device."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # no look at the numbers
    member, x = built(name), features(5, 7)
    shape, state = member(x).shape, member.state_dict()
    with FakeTensorMode():
        state = {key: torch.empty(tensor.shape, device="cuda") for key, tensor in state.items()}
        made = torch.func.functional_call(member, state, torch.empty(x.shape, device="cuda"))
    assert made.device.type == "cuda"
    assert made.shape == shape


@every
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_moved_there_and_back(name):
    member, x = built(name), features(5, 7)
    plain = member(x)
    moved = copy.deepcopy(member).cuda()
    torch.testing.assert_close(moved(x.cuda()).cpu(), plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(moved.cpu()(x), plain)


# Compilers

GRIDS = [(5, 7), (6, 8), (9, 5)]  # no side as a table has it, (3, 4): that would be read as it is, unresampled
CLOSE = {"atol": 5e-6, "rtol": 5e-6}


def one_graph(name: str, backend: str) -> tuple[Member, Callable[[Tensor], Tensor]]:
    member, graphs = built(name), CompileCounterWithBackend(backend)
    compiled = torch.compile(member, backend=graphs, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(features(*GRIDS[0])), member(features(*GRIDS[0])), **CLOSE)
    made = graphs.frame_count  # more than one where tracing starts again
    for grid in GRIDS[1:]:
        torch.testing.assert_close(compiled(features(*grid)), member(features(*grid)), **CLOSE)
    assert graphs.frame_count == made
    return member, compiled


@every
@pytest.mark.usefixtures("compilable")
def test_one_compiled_graph_serves_every_size(name):
    one_graph(name, "eager")


@pytest.mark.slow
@pytest.mark.usefixtures("compilable")
@pytest.mark.parametrize("name", TRAINED)
def test_one_compiled_graph_trains_every_size(name):
    member, compiled = one_graph(name, "aot_eager")
    parameters = list(member.parameters())
    for grid in GRIDS:
        losses = [run(features(*grid)).square().mean() for run in (compiled, member)]
        for got, wanted in zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True):
            torch.testing.assert_close(got, wanted, **CLOSE)


@every
@pytest.mark.usefixtures("compilable")
def test_exported_once_for_every_size(name):
    member = built(name)
    free = {2: torch.export.Dim("h", min=3, max=64), 3: torch.export.Dim("w", min=3, max=64)}
    program = torch.export.export(member, (features(5, 7),), dynamic_shapes=(free,)).module()
    for grid in GRIDS:
        torch.testing.assert_close(program(features(*grid)), member(features(*grid)), **CLOSE)


@pytest.mark.slow
@pytest.mark.usefixtures("compilable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["sine 2-D, DETR", "table with grid", "prompts", "rotary 2-D axial", "Swin V2, continuous"]
)
def test_generated_code_gives_the_same_numbers(name, dtype):
    member = built(name).to(dtype)
    compiled = torch.compile(member, fullgraph=True, dynamic=True)
    for grid in GRIDS:
        got, wanted = compiled(features(*grid).to(dtype)), member(features(*grid).to(dtype))
        limit = 4 * torch.finfo(dtype).eps * wanted.abs().max().item()
        torch.testing.assert_close(got, wanted, atol=max(limit, 5e-6), rtol=0)


# Several processes


class Zoo(nn.Module):
    """Every encoding that has a state, with one loss: the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(built(name) for name in [*TRAINED, "random Fourier"])

    def forward(self, x: Tensor) -> Tensor:
        return sum(member(x).square().mean() for member in self.members)


def replica(rank: int, folder: Path) -> None:
    """One of two processes: its half of the batch, and what DDP made of its gradients and buffers."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.manual_seed(rank)  # the directions of random Fourier features differ until rank 0 tells its own
    zoo, half = (nn.parallel.DistributedDataParallel(z) for z in (Zoo(), Zoo().bfloat16()))
    zoo(features(5, 7, batch=4).chunk(2)[rank]).backward()
    half(features(5, 7, batch=4).chunk(2)[rank].bfloat16()).backward()
    found = {name: parameter.grad for name, parameter in zoo.module.named_parameters()}
    torch.save((found, dict(zoo.module.named_buffers()), dict(half.module.named_buffers())), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")
def test_two_processes_are_one_with_twice_the_batch(tmp_path):
    commands = [[sys.executable, __file__, str(rank), str(tmp_path)] for rank in (0, 1)]
    started = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for command in commands]
    try:
        assert [process.wait(timeout=120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    torch.manual_seed(0)
    zoo = Zoo()
    zoo(features(5, 7, batch=4)).backward()
    wanted = {name: parameter.grad for name, parameter in zoo.named_parameters()}
    for rank in (0, 1):
        found, buffers, halves = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            limit = 1e-6 * max(gradient.abs().max().item(), 1.0)
            assert (found[name] - gradient).abs().max() <= limit, name
        assert buffers.keys() == halves.keys() == dict(zoo.named_buffers()).keys()
        for name, buffer in zoo.named_buffers():
            assert torch.equal(buffers[name], buffer)
            assert halves[name].dtype == torch.float32


# Optimisers


@every
def test_positional_parameters_are_these(name):
    assert tuple(positional_parameters(Member(name))) == tuple(f"part.{p}" for p in CASES[name].positions)


def groups(model: nn.Module, layers: int, decay: float = 0.05, lr: float = 1e-3) -> list[dict]:
    """Positions undecayed at layer 0; matrices decayed, all else not, at the last: layer-wise learning rates."""
    positions = positional_parameters(model)
    rest = [parameter for name, parameter in model.named_parameters() if name not in positions]
    return [
        {"params": list(positions.values()), "weight_decay": 0.0, "layer": 0, "lr": lr * 0.75**layers},
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": decay, "layer": layers, "lr": lr},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0, "layer": layers, "lr": lr},
    ]


def test_they_make_the_groups_of_an_optimiser():
    """A step without gradients moves what decays and no position, of any encoding and at any depth."""
    zoo = Zoo()
    before = {name: parameter.detach().clone() for name, parameter in zoo.named_parameters()}
    optimiser = torch.optim.AdamW(groups(zoo, layers=12), weight_decay=0.5)
    for parameter in zoo.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    moved = {name for name, parameter in zoo.named_parameters() if not torch.equal(parameter, before[name])}
    order = {name: i for i, name in enumerate([*TRAINED, "random Fourier"])}
    ffn, content = (f"members.{order[name]}.part." for name in ("Mix-FFN", "content queries"))
    assert moved == {f"{ffn}fc1.weight", f"{ffn}fc2.weight", f"{content}content"}
    wanted = {f"members.{i}.part.{p}" for name, i in order.items() for p in CASES[name].positions}
    names = {parameter: name for name, parameter in zoo.named_parameters()}
    assert {names[p] for p in optimiser.param_groups[0]["params"]} == wanted
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(before)


if __name__ == "__main__":
    replica(int(sys.argv[1]), Path(sys.argv[2]))
