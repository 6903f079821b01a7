"""Rotary encoding: hand-worked scores, and the invariants that make it one."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vispe.position.parameters import positional_parameters
from vispe.position.rotary import (
    LearnedBasis,
    decay_bound,
    frequencies,
    mrope_chunked,
    mrope_interleaved,
    phases,
    relayout,
    rotate,
    rotate_partial,
    rotation,
    skip_tokens,
)

LAYOUTS = ("interleaved", "half")


def close(ours: torch.Tensor, theirs: torch.Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def wide(turn: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two full-width tables (cos, sin) that other libraries keep."""
    cos, sin = turn.unbind(-1)
    if layout == "half":
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)


def score(q: torch.Tensor, k: torch.Tensor, at_q: float, at_k: float) -> float:
    theta = frequencies(len(q)).to(q)
    return float(rotate(q, rotation(at_q * theta)) @ rotate(k, rotation(at_k * theta)))


@pytest.mark.parametrize(
    ("at_q", "at_k", "wanted"), [(2, 5, -0.332089), (10, 13, -0.332089), (50, 53, -0.332089), (2, 4, -0.725309)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_worked_by_hand(at_q, at_k, wanted, dtype):
    """Adjacent pairs, base 10000; a figure of the literature. float32 is the complex form on the CPU, float64 the real
    one."""
    q, k = (torch.tensor(v, dtype=dtype) for v in ((0.9, 0.1, -0.4, 0.7), (0.2, 0.8, 0.5, 0.3)))
    assert score(q, k, at_q, at_k) == pytest.approx(wanted, abs=2e-6)


def test_a_quarter_turn_by_hand():
    turned = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), rotation(torch.tensor([torch.pi / 2, 0.0])))
    torch.testing.assert_close(turned, torch.tensor([-2.0, 1.0, 3.0, 4.0]))


@given(seed=st.integers(0, 10**6), shift=st.floats(-50, 50), pairs=st.integers(1, 32))
def test_scores_see_only_differences_and_norms_stay(seed, shift, pairs):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 7, 2 * pairs, generator=g, dtype=torch.float64)
    positions, theta = torch.rand(7, generator=g, dtype=torch.float64) * 10, frequencies(2 * pairs).double()

    def turned(x: torch.Tensor, by: float) -> torch.Tensor:
        return rotate(x, rotation((positions + by)[:, None] * theta))

    torch.testing.assert_close(
        turned(q, 0) @ turned(k, 0).T, turned(q, shift) @ turned(k, shift).T, atol=1e-10, rtol=1e-10
    )
    torch.testing.assert_close(turned(q, shift).norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(rotate(q, rotation(torch.zeros(7, pairs))), q)


def test_complex_and_real_forms_agree():
    x, turn = torch.randn(2, 5, 3, 16), rotation(torch.randn(2, 5, 1, 8))
    eager = rotate(x, turn)
    real = rotate(x.double(), turn).float()
    torch.testing.assert_close(eager, real, atol=1e-6, rtol=1e-6)


def test_gradients_agree_with_finite_differences():
    x, angles = (
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 2, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(lambda a, b: rotate(a, rotation(b)), (x, angles))


@pytest.mark.parametrize("dim", [0, -2, 3, 7])
def test_odd_dims_are_refused(dim):
    with pytest.raises(ValueError, match=str(dim)):
        frequencies(dim)
    with pytest.raises(ValueError, match=str(dim)):
        LearnedBasis(2, dim)


def test_learned_basis_is_the_matrix_product_and_ignores_autocast():
    basis, xy = LearnedBasis(4, 16), torch.randn(2, 9, 4)
    wanted = torch.stack(((xy @ basis.weight.T).cos(), (xy @ basis.weight.T).sin()), -1)
    torch.testing.assert_close(basis(xy), wanted, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(basis(xy), basis(xy.clone()))
        assert basis(xy).dtype == torch.float32
    assert torch.equal(basis(xy), basis(xy.float()))


def test_basis_is_drawn_from_the_papers_normal():
    torch.manual_seed(0)
    assert LearnedBasis(2, 4096, gamma=2.0).weight.std().item() == pytest.approx(0.25, rel=0.05)


# Parity with implementations that we did not write


@pytest.mark.parametrize(("dim", "base"), [(64, 10000.0), (128, 500000.0), (32, 100.0), (6, 10.0)])
def test_frequencies_are_those_of_the_peers_to_the_bit(dim, base):
    timm = pytest.importorskip("timm.layers.pos_embed_sincos", reason="timm is the peer")
    assert torch.equal(frequencies(dim, base), timm.freq_bands(dim, base, step=2))
    qwen = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl", reason="transformers is the peer")
    config = SimpleNamespace(rope_parameters={"rope_theta": base}, head_dim=dim)
    assert torch.equal(frequencies(dim, base), qwen.Qwen2VLRotaryEmbedding.compute_default_rope_parameters(config)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotate_is_timms(layout):
    timm = pytest.importorskip("timm.layers.pos_embed_sincos", reason="timm is the peer")
    x, angles = torch.randn(2, 3, 11, 16), torch.randn(11, 8) * 20
    cos, sin = wide(rotation(angles), layout)
    theirs = timm.apply_rot_embed(x, sin, cos, half=layout == "half")
    close(rotate(x, rotation(angles, layout=layout), layout), theirs)
    close(timm.apply_rot_embed_list([x], sin, cos, half=layout == "half")[0], theirs, 0)
    close(timm.apply_rot_embed_cat(x, torch.cat((sin, cos), -1), half=layout == "half"), theirs, 0)


def test_half_is_transformers_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is the peer")
    q, k = torch.randn(2, 2, 4, 9, 32)
    turn = rotation(phases(torch.arange(9), frequencies(32)), layout="half")
    cos, sin = wide(turn, "half")
    for ours, theirs in zip(
        (rotate(q, turn, "half"), rotate(k, turn, "half")),
        llama.apply_rotary_pos_emb(q, k, cos[None], sin[None]),
        strict=True,
    ):
        close(ours, theirs)


def test_interleaved_is_rotary_embedding_torch():
    peer = pytest.importorskip("rotary_embedding_torch", reason="rotary-embedding-torch is the peer")
    x = torch.randn(2, 4, 300, 32)
    turn = rotation(phases(torch.arange(300), frequencies(32)))
    close(rotate(x, turn), peer.RotaryEmbedding(32).rotate_queries_or_keys(x))


def test_interleaved_is_the_official_lightglue():
    peer = pytest.importorskip("scm_lightglue.lightglue", reason="scm-lightglue is the peer")
    x, turn = torch.randn(2, 4, 50, 64), rotation(torch.randn(50, 32) * 5)
    close(rotate(x, turn), peer.apply_cached_rotary_emb(torch.stack(wide(turn, "interleaved")), x))


def test_partial_rotary_is_gpt_j_and_neox():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj", reason="transformers is the peer")
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox", reason="transformers is the peer")
    q, k = torch.randn(2, 2, 3, 7, 20)
    turn = rotation(phases(torch.arange(7), frequencies(8)))
    cos, sin = wide(turn, "half")
    theirs, _ = neox.apply_rotary_pos_emb(q, k, cos[None], sin[None])
    close(rotate_partial(q, turn, "half"), theirs)
    cos, sin = (t[None] for t in turn.unbind(-1))
    theirs = gptj.apply_rotary_pos_emb(q[..., :8].transpose(1, 2), sin, cos).transpose(1, 2)  # [b, n, heads, d]
    close(rotate_partial(q, turn), torch.cat((theirs, q[..., 8:]), -1))


def multimodal(sections: tuple[int, ...], dim: int = 128) -> SimpleNamespace:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return SimpleNamespace(
        max_position_embeddings=512, rope_parameters=parameters, hidden_size=dim, num_attention_heads=1, head_dim=dim
    )


@pytest.mark.parametrize("sections", [(16, 24, 24), (10, 30, 24), (0, 32, 32)])
def test_chunked_mrope_is_qwen2_vls(sections):
    qwen = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl", reason="transformers is the peer")
    positions = torch.randint(0, 300, (3, 2, 11))
    cos, sin = qwen.Qwen2VLRotaryEmbedding(multimodal(sections))(torch.zeros(1), positions)
    ours = wide(rotation(mrope_chunked(positions, frequencies(128), sections)), "half")
    close(ours[0], cos)
    close(ours[1], sin)


@pytest.mark.parametrize("sections", [(24, 20, 20), (22, 21, 21), (8, 12, 12)])
def test_interleaved_mrope_is_qwen3_vls(sections):
    qwen = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl", reason="transformers is the peer")
    positions = torch.randint(0, 300, (3, 2, 11))
    cos, sin = qwen.Qwen3VLTextRotaryEmbedding(multimodal(sections))(torch.zeros(1), positions)
    ours = wide(rotation(mrope_interleaved(positions, frequencies(128), sections)), "half")
    close(ours[0], cos)
    close(ours[1], sin)


@pytest.mark.parametrize(("dim", "sections"), [(72, (12, 12, 12)), (64, (8, 12, 12)), (72, (8, 12, 12))])
def test_interleaved_mrope_is_timms_on_images_with_bounds_clamped(dim, sections):
    timm = pytest.importorskip("timm.layers.pos_embed_sincos", reason="timm is the peer")
    y, x = torch.meshgrid(torch.arange(5), torch.arange(7), indexing="ij")
    positions = torch.stack((torch.zeros(35), y.flatten(), x.flatten()))
    sin, cos = timm.RotaryEmbeddingMRope(dim, sections).get_embed([5, 7]).chunk(2, -1)
    ours = wide(rotation(mrope_interleaved(positions, frequencies(dim), sections)), "half")
    close(ours[0], cos)
    close(ours[1], sin)


@pytest.mark.parametrize("mrope", [mrope_chunked, mrope_interleaved])
def test_mrope_of_text_is_one_dimensional_rotary(mrope):
    positions, theta = torch.arange(40), frequencies(24)
    assert torch.equal(mrope(positions.expand(3, -1), theta, (4, 4, 4)), phases(positions, theta))


# Facts


def test_thirty_degrees_a_step_by_hand():
    """Unit vectors one step of 30 degrees apart score cos 30 = 0.866, wherever they stand."""
    q = k = torch.tensor([1.0, 0.0])
    theta = torch.tensor([math.pi / 6])
    for at_q, at_k, wanted in ((2, 3, 0.866025), (7, 8, 0.866025), (3, 3, 1.0), (0, 3, 0.0), (1, 7, -1.0)):
        turned = [rotate(v, rotation(phases(torch.tensor(float(at)), theta))) for v, at in ((q, at_q), (k, at_k))]
        assert float(turned[0] @ turned[1]) == pytest.approx(wanted, abs=1e-6)


def test_half_by_hand():
    """(1, 2, 3, 4): pair (1, 3) turned by a quarter, pair (2, 4) left."""
    turned = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), rotation(torch.tensor([torch.pi / 2, 0.0])), "half")
    torch.testing.assert_close(turned, torch.tensor([-3.0, 2.0, 1.0, 4.0]))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=st.integers(0, 10**6), shift=st.integers(-50, 50), pairs=st.integers(1, 16))
def test_both_layouts_see_only_differences(layout, seed, shift, pairs):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 7, 2 * pairs, generator=g)
    positions, theta = torch.randint(0, 100, (7,), generator=g), frequencies(2 * pairs)
    here, there = (rotation(phases(positions + by, theta), layout=layout) for by in (0, shift))
    scores = rotate(q, here, layout) @ rotate(k, here, layout).T
    moved = rotate(q, there, layout) @ rotate(k, there, layout).T
    torch.testing.assert_close(scores, moved, atol=5e-4, rtol=0)
    torch.testing.assert_close(rotate(q, here, layout).norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(rotate(q, rotation(torch.zeros(7, pairs)), layout), q)


@given(
    heads=st.integers(1, 4),
    pairs=st.integers(1, 8),
    rest=st.integers(0, 5),
    columns=st.sampled_from([(), (3,), (2, 5)]),
    first=st.sampled_from(LAYOUTS),
)
def test_relayout_there_and_back_is_the_identity(heads, pairs, rest, columns, first):
    weight = torch.randn(heads * (2 * pairs + rest), *columns)
    second = LAYOUTS[1 - LAYOUTS.index(first)]
    there = relayout(weight, 2 * pairs + rest, to=second, rotary_dim=2 * pairs)
    assert torch.equal(relayout(there, 2 * pairs + rest, to=first, rotary_dim=2 * pairs), weight)
    assert (there.sort(0).values == weight.sort(0).values).all()


def test_relayout_by_hand():
    rows = torch.arange(12)  # two heads of 6
    assert relayout(rows, 6, to="half").tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert relayout(rows, 6, to="half", rotary_dim=4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert relayout(torch.tensor([0, 3, 1, 4, 2, 5]), 6, to="interleaved").tolist() == [0, 4, 3, 2, 1, 5]


@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_converted_weights_give_the_same_scores_and_unconverted_do_not(rotary_dim):
    """With bias and a per-head norm, as in a block that normalises q and k."""
    heads, dim, n = 2, 12, 9
    x, norm = torch.randn(n, 20), torch.rand(dim) + 0.5
    weights, biases = torch.randn(2, heads * dim, 20), torch.randn(2, heads * dim)
    turn = rotation(phases(torch.arange(n), frequencies(rotary_dim or dim)))

    def scores(weights, biases, norm, layout):
        q, k = (
            nn.functional.rms_norm((x @ w.T + b).unflatten(-1, (heads, dim)).transpose(0, 1), (dim,), norm)
            for w, b in zip(weights, biases, strict=True)
        )
        return rotate_partial(q, turn, layout) @ rotate_partial(k, turn, layout).mT

    def half(row):
        return relayout(row, dim, to="half", rotary_dim=rotary_dim)

    wanted = scores(weights, biases, norm, "interleaved")
    converted = scores([half(w) for w in weights], [half(b) for b in biases], half(norm), "half")
    torch.testing.assert_close(converted, wanted, atol=1e-5, rtol=1e-5)
    assert (scores(weights, biases, norm, "half") - wanted).abs().max() > 0.1


def test_decay_bound_is_the_sum_written_out():
    distance, theta = torch.tensor([0.0, 1.0, 7.0, 100.0, 250.0]), frequencies(64).double()
    for m, ours in zip(distance.tolist(), decay_bound(distance, 64).tolist(), strict=True):
        sums = [sum(complex(math.cos(m * t), math.sin(m * t)) for t in theta[:j].tolist()) for j in range(1, 33)]
        assert ours == pytest.approx(sum(map(abs, sums)) / 32, abs=1e-4)


def test_decay_bound_by_hand_and_its_long_fall():
    """d = 4: (1 + |e^im + e^0.01im|)/2 = (1 + 2|cos 0.495m|)/2. d = 128: 32.5 at 0, falling over the long run."""
    m = torch.tensor([0.0, 1.0, 2.0, 3.0])
    close(decay_bound(m, 4), (1 + 2 * (0.495 * m).cos().abs()) / 2)
    bound = decay_bound(torch.arange(251), 128)
    assert bound[0] == 32.5
    by_fifty = bound[1:].unflatten(0, (5, 50)).mean(-1)
    assert (by_fifty.diff() < 0).all()
    assert (bound.diff() > 0).any()  # not at every step


# Precision, memory, compilers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_float32_result_cast_once(layout, dtype):
    x, turn = torch.randn(2, 3, 600, 32).to(dtype), rotation(phases(torch.arange(600), frequencies(32)), layout=layout)
    wanted = rotate(x.double(), turn.double(), layout)
    ours = rotate(x, turn, layout)
    assert ours.dtype == dtype
    assert (ours == wanted.to(dtype)).float().mean() > 0.999  # the rest: float32 rounding at a tie
    # cosine and sine in half precision, and each product rounded: what many libraries do
    assert (rotate(x.double(), turn.to(dtype).double(), layout).to(dtype) == ours).float().mean() < 0.9


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_positions_do_not_collide(dtype, limit):
    """arange in half precision repeats beyond 256 and 2048 (gpt-neox #1003); autocast does it to matmuls of float32."""
    positions, theta = torch.arange(2 * limit), frequencies(64)
    assert len(positions.to(dtype).unique()) < 2 * limit
    with torch.autocast("cpu", dtype=dtype):
        angles = phases(positions, theta)
        lowered = positions.float()[:, None] @ theta[None]
        turn = rotation(angles)
    assert len(lowered.unique(dim=0)) < 2 * limit
    assert turn.dtype == torch.float32
    assert len(turn.unique(dim=0)) == 2 * limit
    assert torch.equal(angles, phases(positions, theta))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_order_gives_the_same(layout):
    """Transposed, offset by one channel, packed tables and split ones, float64 tables: slower at most, never other."""
    base, angles = torch.randn(3, 5, 2, 17), torch.randn(5, 8)
    x = base[..., 1:].transpose(1, 2)
    wanted = rotate(x.double(), rotation(angles), layout).float()
    for turn in (rotation(angles, layout="half"), rotation(angles), rotation(angles.double()), rotation(angles)[None]):
        for place in (x, x.contiguous()):
            ours = rotate(place, turn, layout)
            assert ours.dtype == torch.float32
            close(ours, wanted)
    assert torch.equal(rotation(angles, layout="half"), rotation(angles))


def test_scale_multiplies_scores_by_its_square():
    q, k = torch.randn(2, 5, 8)
    plain, scaled = (rotation(phases(torch.arange(5), frequencies(8)), by) for by in (1.0, 1.5))
    torch.testing.assert_close(rotate(q, scaled) @ rotate(k, scaled).T, 2.25 * rotate(q, plain) @ rotate(k, plain).T)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_every_form(layout, dtype):
    x, angles = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((2, 3, 8), (3, 4)))
    weight = torch.randn(2, 3, 8, dtype=dtype)
    ours = torch.autograd.grad((rotate(x, rotation(angles), layout) * weight).sum(), (x, angles))
    cos, sin = (t.double() for t in wide(rotation(angles), layout))
    flat = x.double()
    if layout == "half":
        other = torch.cat((-flat[..., 4:], flat[..., :4]), -1)
    else:
        other = torch.stack((-flat[..., 1::2], flat[..., ::2]), -1).flatten(-2)
    theirs = torch.autograd.grad(((flat * cos + other * sin) * weight).sum(), (x, angles))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefix_tokens_pass_through_to_the_bit(layout, prefix):
    x, angles = torch.randn(2, prefix + 6 + 3, 8), torch.randn(6, 4)
    ours = rotate(x, rotation(skip_tokens(angles, prefix, 3), layout=layout), layout)
    assert torch.equal(ours[:, :prefix], x[:, :prefix])
    assert torch.equal(ours[:, prefix + 6 :], x[:, prefix + 6 :])
    close(ours[:, prefix : prefix + 6], rotate(x[:, prefix : prefix + 6], rotation(angles), layout))


class Turned(nn.Module):
    """Positions to scores, as a model would: nothing is kept between calls."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def forward(self, q, k):
        angles = phases(torch.arange(q.shape[-2] - 1), frequencies(q.shape[-1]))
        turn = rotation(skip_tokens(angles, 1), layout=self.layout)
        return rotate(q, turn, self.layout), rotate(k, turn, self.layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_with_a_free_number_of_tokens(layout):
    model = Turned(layout)
    shapes = ({2: torch.export.Dim.DYNAMIC},) * 2
    program = torch.export.export(model, tuple(torch.randn(2, 1, 3, 10, 16)), dynamic_shapes=shapes).module()
    for n in (10, 33):
        q, k = torch.randn(2, 1, 3, n, 16)
        for ours, theirs in zip(program(q, k), model(q, k), strict=True):
            close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_whole_with_dynamic_shapes(layout, dtype):
    torch._dynamo.reset()
    model = Turned(layout)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for n in (10, 33, 300):
        q, k = torch.randn(2, 1, 3, n, 16).to(dtype)
        for ours, theirs in zip(compiled(q, k), model(q, k), strict=True):
            close(ours, theirs, 1e-6 if dtype == torch.float32 else 0.02)
            assert ours.dtype == dtype


def test_meta_device_inference_mode_and_no_memory_of_sizes():
    turn = rotation(phases(torch.arange(9, device="meta"), frequencies(8).to("meta")))
    assert rotate(torch.empty(2, 9, 8, device="meta"), turn).shape == (2, 9, 8)
    model, q, k = Turned("half"), *torch.randn(2, 1, 12, 8)
    with torch.inference_mode():
        inside = model(q, k)[0].clone()
    model(q[:, :4], k[:, :4])
    after = model(q.requires_grad_(), k)[0]
    assert torch.equal(inside, after)
    after.sum().backward()
    assert q.grad is not None


def test_learned_basis_survives_copies_half_precision_and_the_meta_device():
    basis, xy = LearnedBasis(2, 16), torch.rand(50, 2) * 2 - 1
    wanted = basis(xy)
    assert list(positional_parameters(basis)) == ["weight"]
    assert torch.equal(copy.deepcopy(basis)(xy), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(basis))(xy), wanted)
    with torch.device("meta"):
        empty = LearnedBasis(2, 16)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(basis.state_dict())
    assert torch.equal(empty(xy), wanted)
    halved = copy.deepcopy(basis).bfloat16()
    assert halved(xy).dtype == torch.float32
    assert torch.equal(halved(xy), halved.float()(xy))


# Errors


def test_mistakes_are_named():
    x, angles = torch.randn(2, 5, 8), torch.randn(5, 4)
    turn = rotation(angles)
    for call, message in (
        (lambda: rotate(x, angles), r"\[5, 4\]|\(5, 4\)"),
        (lambda: rotate(x[..., :6], turn), "6 channels"),
        (lambda: rotate(x, turn[:4]), "4 positions for 5 tokens"),
        (lambda: rotate(x[:, :1], turn), "5 positions for 1 tokens"),
        (lambda: rotate(x, turn, "neox"), "neox"),
        (lambda: rotation(angles, layout="neox"), "neox"),
        (lambda: rotate_partial(x[..., :6], turn), "rotary dim 8"),
        (lambda: skip_tokens(angles, -1), "prefix -1"),
        (lambda: phases(torch.tensor([0.0, math.nan]), frequencies(8)), "nan"),
        (lambda: phases(torch.tensor([math.inf]), frequencies(8)), "inf"),
        (lambda: phases(torch.arange(3), turn), r"\(5, 4, 2\)"),
        (lambda: frequencies(8, 0.0), "base must be positive and finite, got 0"),
        (lambda: relayout(torch.randn(10, 3), 4, to="half"), r"\(10, 3\)"),
        (lambda: relayout(torch.randn(10, 3), 5, to="half"), "got 5"),
        (lambda: relayout(torch.randn(8, 3), 4, to="half", rotary_dim=6), "got 6"),
        (lambda: relayout(torch.randn(8, 3), 4, to="neox"), "neox"),
        (lambda: mrope_chunked(torch.zeros(2, 5), frequencies(8), (2, 1, 1)), r"\(2, 5\)"),
        (lambda: mrope_chunked(torch.zeros(3, 5), frequencies(8), (2, 1, 2)), r"\(2, 1, 2\)"),
        (lambda: mrope_interleaved(torch.zeros(3, 5), frequencies(8), (2, -1, 2)), r"\(2, -1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
