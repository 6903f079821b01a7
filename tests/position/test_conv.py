"""Convolutional position: parity with SegFormer and Twins, and that zero padding is what carries position."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter

from vispe.position.conv import PEG, MixFFN, on_grid

GRIDS = [(4, 4), (3, 5), (6, 2), (1, 1)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("grid", GRIDS)
def test_mix_ffn_matches_transformers(grid):
    peer = pytest.importorskip("transformers.models.segformer.modeling_segformer", reason="transformers has SegFormer")
    config, x = peer.SegformerConfig(hidden_act="gelu", hidden_dropout_prob=0.0), torch.randn(2, grid[0] * grid[1], 8)
    ours = MixFFN(8, 16).eval()
    if hasattr(peer, "SegformerMixMLP"):
        theirs, names = peer.SegformerMixMLP(config, 8, 16), ("fc1", "dwconv.dwconv", "fc2")
    else:  # before transformers 5
        theirs, names = peer.SegformerMixFFN(config, 8, 16), ("dense1", "dwconv.dwconv", "dense2")
    state = theirs.state_dict()
    renamed = {f"{our}.{end}": state[f"{their}.{end}"] for our, their in zip(("fc1", "conv", "fc2"), names, strict=True)
               for end in ("weight", "bias")}  # fmt: skip
    ours.load_state_dict(renamed)
    close(ours(x, grid), theirs.eval()(x, *grid))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
def test_peg_matches_timms_twins_and_prefix_tokens_bypass_it(grid, prefix):
    twins = pytest.importorskip("timm.models.twins", reason="timm carries Twins")
    theirs, ours = twins.PosConv(8, 8), PEG(8)
    ours.load_state_dict({"conv.weight": theirs.proj[0].weight, "conv.bias": theirs.proj[0].bias})
    tokens = torch.randn(2, prefix + grid[0] * grid[1], 8)
    got = on_grid(tokens, grid, ours, prefix)
    close(got[:, prefix:], theirs(tokens[:, prefix:], grid))
    assert torch.equal(got[:, :prefix], tokens[:, :prefix])


def test_the_border_by_hand():
    """A kernel of ones without bias on ones counts the neighbours inside the image: 4 in corners, 6 on edges, 9."""
    peg = PEG(1)
    nn.init.ones_(peg.conv.weight)
    counted = peg(torch.ones(1, 1, 3, 4)) - 1
    assert counted[0, 0].tolist() == [[4, 6, 6, 4], [6, 9, 9, 6], [4, 6, 6, 4]]


def rolled(x: torch.Tensor, grid: tuple[int, int], by: tuple[int, int]) -> torch.Tensor:
    return x.unflatten(1, grid).roll(by, (1, 2)).flatten(1, 2)


@given(seed=st.integers(0, 10**6), h=st.integers(3, 6), w=st.integers(3, 6), dy=st.integers(1, 2), dx=st.integers(0, 2))
@settings(max_examples=25)
def test_circular_padding_makes_it_translation_equivariant_and_zero_padding_does_not(seed, h, w, dy, dx):
    torch.manual_seed(seed)
    x, grid = torch.randn(1, h * w, 4), (h, w)
    for make in (lambda padding: PEG(4, padding), lambda padding: MixFFN(4, 8, padding=padding)):
        gaps = {}
        for padding in ("circular", "zeros"):
            module = make(padding).eval()
            for parameter in module.parameters():
                nn.init.normal_(parameter)

            def apply(x: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
                return on_grid(x, grid, module) if isinstance(module, PEG) else module(x, grid)

            out = apply(x)
            gaps[padding] = (
                (apply(rolled(x, grid, (dy, dx))) - rolled(out, grid, (dy, dx))).abs().max() / out.std()
            ).item()
        assert gaps["circular"] < 1e-5
        assert gaps["zeros"] > 1e-2


def test_a_constant_image_shows_the_padding_alone():
    x = torch.ones(1, 2, 5, 6)
    zeros, circular = PEG(2), PEG(2, padding="circular")
    circular.load_state_dict(zeros.state_dict())
    assert circular(x).std(dim=(-2, -1)).max() < 1e-6
    assert zeros(x).std(dim=(-2, -1)).min() > 1e-3
    close(zeros(x)[..., 1:-1, 1:-1], circular(x)[..., 1:-1, 1:-1])


def test_kernels_are_drawn_as_segformer_draws_them():
    torch.manual_seed(0)
    conv = PEG(2000).conv
    assert conv.weight.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.03)
    assert not conv.bias.any()


def test_mix_ffn_drops_only_in_training():
    ffn, x = MixFFN(4, 8, dropout=0.5), torch.randn(1, 6, 4)
    assert not torch.equal(ffn.train()(x, (2, 3)), ffn(x, (2, 3)))
    assert torch.equal(ffn.eval()(x, (2, 3)), ffn(x, (2, 3)))


def test_mix_ffns_prefix_tokens_meet_no_neighbour():
    ffn, x = MixFFN(4, 8).eval(), torch.randn(1, 8, 4)
    other = torch.cat((x[:, :2], torch.randn(1, 6, 4)), 1)
    assert torch.equal(ffn(x, (2, 3), prefix=2)[:, :2], ffn(other, (2, 3), prefix=2)[:, :2])
    close(ffn(x, (2, 3), prefix=2)[:, 2:], ffn(x[:, 2:], (2, 3)))


@pytest.mark.parametrize(("grid", "prefix"), [((2, 3), 0), ((4, 2), 1), ((0, 5), 7), ((2, 4), -1)])
def test_a_wrong_grid_is_refused(grid, prefix):
    x = torch.zeros(1, 7, 4)
    for call in (lambda: on_grid(x, grid, PEG(4), prefix), lambda: MixFFN(4, 8)(x, grid, prefix)):
        with pytest.raises(ValueError, match=f"7 tokens are not a {grid[0]}x{grid[1]} grid behind {prefix} prefix"):
            call()


def test_bad_widths_are_refused():
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        PEG(0)
    with pytest.raises(ValueError, match="hidden must be at least 1, got -2"):
        MixFFN(4, -2)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.peg, self.ffn = PEG(4), MixFFN(4, 8)

    def forward(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        return self.ffn(on_grid(x, grid, self.peg, 1), grid, 1)


def test_copies_meta_device_and_export_keep_the_numbers():
    model, x = Both().eval(), torch.randn(2, 16, 4)
    wanted = model(x, (3, 5))
    with torch.device("meta"):
        empty = Both().eval()
    assert empty(x.to("meta"), (3, 5)).shape == wanted.shape
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    program = torch.export.export(model, (x, (3, 5))).module()
    for other in (empty, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), program):
        close(other(x, (3, 5)), wanted)
    with torch.inference_mode():
        assert torch.equal(model(x, (3, 5)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_and_keeps_its_dtype(dtype):
    model, x = Both().eval(), torch.randn(2, 16, 4)
    half = copy.deepcopy(model).to(dtype)(x.to(dtype), (3, 5))
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), model(x, (3, 5)), atol=0.01, rtol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = model(x, (3, 5))
    torch.testing.assert_close(lowered.float(), model(x, (3, 5)), atol=0.01, rtol=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("compilable")
def test_one_trace_serves_every_grid_and_compiles():
    """One trace; inductor's own lowering of a convolution takes sizes as constants and makes a kernel for each grid."""
    model, traces = Both().eval(), CompileCounter()
    traced = torch.compile(model, backend=traces, fullgraph=True, dynamic=True)
    for h, w in [(3, 5), (6, 4), (4, 4)]:
        x = torch.randn(2, 1 + h * w, 4)
        torch.testing.assert_close(traced(x, (h, w)), model(x, (h, w)), atol=1e-5, rtol=1e-5)
    assert traces.frame_count == 1
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, (h, w)), model(x, (h, w)), atol=1e-5, rtol=1e-5)
