"""SAM 2's ages: the memory table and the object pointers' sines, against the installed port and by hand."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.position.sine import sine_marian
from vispe.position.temporal import CONDITIONING, MemoryFrames, sine_object_pointers, sine_sam2

EXACT = {"atol": 1e-6, "rtol": 0.0}
# Under the shapes' own run (tests/test_shapes.py) every call goes through a checker that no tracer can follow.
traceable = pytest.mark.skipif(
    hasattr(sine_sam2, "__wrapped__"), reason="annotations are being enforced: not traceable"
)


def sam2():
    return pytest.importorskip(
        "transformers.models.sam2_video.modeling_sam2_video", reason="transformers carries SAM 2"
    )


# The source, as installed


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_memory_rows_are_sam2s(frames):
    """The port's own method, on tokens that carry no spatial encoding: what is left is the row of each age."""
    ours = MemoryFrames(8, frames)
    owner = SimpleNamespace(memory_temporal_positional_encoding=ours.table[:, None, None])
    zero = {"maskmem_features": torch.zeros(3, 1, 8), "maskmem_pos_enc": torch.zeros(3, 1, 8)}
    ages = [0, 0, *range(frames - 1, 0, -1)]  # two conditioning frames, then the oldest first
    gather = sam2().Sam2VideoModel._build_memory_attention_inputs
    _, wanted = gather(owner, [(age, zero) for age in ages], torch.device("cpu"))
    assert torch.equal(ours(torch.tensor(ages)), torch.stack(wanted)[:, 0, 0])


@pytest.mark.parametrize("dim", [4, 64, 256])
def test_sines_are_sam2s(dim):
    positions = torch.linspace(-1, 15, 97)
    torch.testing.assert_close(sine_sam2(positions, dim), sam2().get_1d_sine_pe(positions, dim), **EXACT)
    wanted = sam2().get_1d_sine_pe(positions, dim, temperature=100)
    torch.testing.assert_close(sine_sam2(positions, dim, temperature=100.0), wanted, **EXACT)


@pytest.mark.parametrize(("num_frames", "limit"), [(2, 16), (10, 16), (100, 16), (100, 4)])
def test_object_pointers_are_sam2s(num_frames, limit):
    ages = [0, 5, -3, 1, 2, 15]
    owner = SimpleNamespace(
        config=SimpleNamespace(enable_temporal_pos_encoding_for_object_pointers=True),
        temporal_positional_encoding_projection_layer=torch.nn.Identity(),
        mem_dim=64,
    )
    process = sam2().Sam2VideoModel._process_object_pointers
    pointers = [torch.zeros(1, 64)] * len(ages)
    _, wanted = process(owner, ages, pointers, min(num_frames, limit), 1, 64, torch.device("cpu"))
    ours = sine_object_pointers(torch.tensor(ages), 64, num_frames, limit)
    torch.testing.assert_close(ours, wanted[:, 0], **EXACT)


def test_a_video_of_one_frame_has_an_encoding_where_sam2_divides_by_zero():
    theirs = sam2().get_1d_sine_pe(torch.tensor([0.0]) / float(min(1, 16) - 1), 8)
    assert theirs.isnan().any()
    for num_frames, limit in ((1, 16), (9, 1)):
        made = sine_object_pointers(torch.tensor([0]), 8, num_frames, limit)
        assert torch.equal(made, torch.tensor([[0.0] * 4 + [1.0] * 4]))


# Worked by hand, and claims


def test_rows_by_hand():
    """sam2_base.py reads row num_maskmem - t_pos - 1: conditioning t_pos 0 -> 6; the previous frame t_pos 6 -> 0."""
    ours = MemoryFrames(4, 7)
    assert CONDITIONING == 0
    for age, row in ((0, 6), (1, 0), (2, 1), (6, 5)):
        assert torch.equal(ours(torch.tensor([age]))[0], ours.table[row])


def test_eight_channels_by_hand():
    """Every frequency twice, then the cosines: the source pairs channels as if it would alternate, and concatenates."""
    s, c = math.sin, math.cos
    wanted = [s(3), s(3), s(0.03), s(0.03), c(3), c(3), c(0.03), c(0.03)]
    torch.testing.assert_close(sine_sam2(torch.tensor(3), 8), torch.tensor(wanted), **EXACT)


def test_pointers_by_hand():
    """Four frames apart of sixteen: 4/15. A short clip of five frames stretches the same age to 4/4."""
    wanted = [math.sin(4 / 15), math.sin(4 / 15), math.cos(4 / 15), math.cos(4 / 15)]
    torch.testing.assert_close(sine_object_pointers(torch.tensor([4]), 4, 90)[0], torch.tensor(wanted), **EXACT)
    wanted = [math.sin(1), math.sin(1), math.cos(1), math.cos(1)]
    torch.testing.assert_close(sine_object_pointers(torch.tensor([4]), 4, 5)[0], torch.tensor(wanted), **EXACT)


@given(quarter=st.integers(1, 32), positions=st.lists(st.floats(-20, 20), min_size=1, max_size=9))
def test_half_of_the_channels_repeat_the_other_half(quarter, positions):
    made = sine_sam2(torch.tensor(positions), 4 * quarter)
    assert made.dtype == torch.float32
    assert torch.equal(made[:, 0::2], made[:, 1::2])
    torch.testing.assert_close(made[:, 0::2], sine_marian(torch.tensor(positions), 2 * quarter), atol=2e-6, rtol=0)


@given(ages=st.lists(st.integers(-15, 15), min_size=1, max_size=9), num_frames=st.integers(1, 40))
def test_earlier_and_later_differ_in_sign_of_the_sines_alone(ages, num_frames):
    """SAM 2.1 signs its ages, 2.0 takes their size: only the sines can tell."""
    before, after = (sine_object_pointers(torch.tensor(ages) * sign, 16, num_frames) for sign in (1, -1))
    assert before.isfinite().all()
    torch.testing.assert_close(before, torch.cat((-after[:, :8], after[:, 8:]), -1))


def test_the_table_is_drawn_as_the_sources():
    torch.manual_seed(0)
    table = MemoryFrames(4096, 7).table.detach()
    assert table.std().item() == pytest.approx(0.02, rel=0.02)  # 0.0176 if it were cut at two deviations
    assert 0.06 < table.abs().max() < 0.12


# Precision and the ways of running


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing_and_no_two_of_4096_ages_collide(dtype):
    ages = torch.arange(4096)
    plain = sine_sam2(ages, 256)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(sine_sam2(ages, 256), plain)
    assert len(plain.to(dtype).unique(dim=0)) == 4096
    assert len(sine_sam2(ages.to(dtype), 256).unique(dim=0)) < 4096  # the mistake itself


def test_tables_travel():
    ours, ages = MemoryFrames(8), torch.tensor([0, 1, 6])
    plain = ours(ages)
    with torch.device("meta"):
        empty = MemoryFrames(8)
    assert empty(ages.to("meta")).shape == (3, 8)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(ours.state_dict())
    for module in (empty, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(module(ages), plain)
    with torch.inference_mode():
        assert torch.equal(ours(ages), plain)
    half = copy.deepcopy(ours).half()
    assert half(ages).dtype == torch.float32
    assert torch.equal(half(ages), plain.half().float())


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = MemoryFrames(16)

    def forward(self, ages: torch.Tensor) -> torch.Tensor:
        return self.frames(ages) + sine_object_pointers(ages, 16, 90)


@traceable
def test_compiled_and_exported_once_for_any_number():
    torch._dynamo.reset()
    module, calls = Both(), [torch.tensor([0, 3, 6]), torch.arange(7)]
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    dims = ({0: torch.export.Dim("n", min=2, max=64)},)
    program = torch.export.export(module, (calls[0],), dynamic_shapes=dims).module()
    for ages in calls:
        torch.testing.assert_close(compiled(ages), module(ages), **EXACT)
        torch.testing.assert_close(program(ages), module(ages), **EXACT)


def test_gradients_reach_the_rows_that_were_read():
    ours = MemoryFrames(4)
    ours(torch.tensor([0, 1, 1])).sum().backward()
    assert ours.table.grad is not None
    assert ours.table.grad[:, 0].tolist() == [2.0, 0, 0, 0, 0, 0, 1.0]
    p = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(partial(sine_sam2, dim=8), (p,))


# Mistakes


@pytest.mark.parametrize("age", [-1, 7])
def test_ages_outside_the_memory_are_refused(age):
    with pytest.raises(ValueError, match=f"got {age}"):
        MemoryFrames(8, 7)(torch.tensor([0, age]))


def test_bad_dims_and_counts_are_refused():
    for dim in (0, -4, 2, 6, 7):
        with pytest.raises(ValueError, match=rf"sine_sam2.*got {dim}"):
            sine_sam2(torch.arange(3), dim)
    for arguments in ((0, 7), (8, 0)):
        with pytest.raises(ValueError, match=rf"got {arguments[0]} and {arguments[1]}"):
            MemoryFrames(*arguments)
    with pytest.raises(ValueError, match="got 0 and 16"):
        sine_object_pointers(torch.tensor([0]), 8, 0)
    with pytest.raises(ValueError, match="ages must be finite, got nan"):
        sine_object_pointers(torch.tensor([math.nan]), 8, 5)
    with pytest.raises(ValueError, match="temperature must be positive and finite, got 0"):
        sine_sam2(torch.arange(3), 8, temperature=0.0)
