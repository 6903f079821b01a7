"""The blocks of ViT and MAE: attention with sockets by hand, gates, scales, stochastic depth."""

import pytest
import torch
import torch.nn.functional as F

from vispe.layers.transformer import MLP, Attention, Block, DropPath, LayerScale, PatchEmbed, Sockets, SwiGLU
from vispe.position.rotary import frequencies, phases, rotate, rotation


def attention_by_hand(layer, x, *, turn=None, layout="interleaved", bias=None, values=None):
    """Loops over batch and heads, softmax written out."""
    d = x.shape[-1] // layer.heads
    q, k, v = (F.linear(x, w, c) for w, c in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True))
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for head in range(layer.heads):
            part = slice(head * d, head * d + d)
            qi, ki, vi = (t[i, :, part] for t in (q, k, v))
            if turn is not None:
                qi, ki = rotate(qi, turn, layout), rotate(ki, turn, layout)
            scores = qi @ ki.T / d**0.5
            scores = scores if bias is None else scores + bias[head]
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            out[i, :, part] = weights @ vi + (0 if values is None else values(weights))
    return layer.proj(out)


@pytest.mark.parametrize("what", ["nothing", "turn", "bias", "bias of the query", "values"])
@torch.no_grad()
def test_attention_is_the_formula(what):
    torch.manual_seed(0)
    layer, x = Attention(32, 4), torch.randn(2, 6, 32)
    turn, bias = rotation(phases(torch.arange(6), frequencies(8))), torch.randn(4, 6, 6)
    added = torch.randn(6, 8)
    sockets, expected = {
        "nothing": (Sockets(), {}),
        "turn": (Sockets(turn=turn), {"turn": turn}),
        "bias": (Sockets(bias=lambda q: bias), {"bias": bias}),
        "bias of the query": (Sockets(bias=lambda q: bias.expand(2, -1, -1, -1)), {"bias": bias}),
        "values": (
            Sockets(bias=lambda q: bias, values=lambda w: w @ added),
            {"bias": bias, "values": lambda w: w @ added},
        ),
    }[what]
    torch.testing.assert_close(layer(x, sockets), attention_by_hand(layer, x, **expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_values_are_never_turned():
    """Equal scores: whatever the turn, every token gets the mean of the values."""
    torch.manual_seed(0)
    layer, x = Attention(16, 2), torch.randn(1, 5, 16)
    layer.qkv.weight[:32] = 0
    layer.qkv.bias[:32] = 0
    turn = rotation(phases(torch.arange(5), frequencies(8)))
    torch.testing.assert_close(layer(x, Sockets(turn=turn)), layer(x), atol=1e-6, rtol=0)


def test_attention_with_half_precision_weights_keeps_its_dtype():
    layer = Attention(32, 4).to(torch.bfloat16)
    turn = rotation(phases(torch.arange(6), frequencies(8)))
    x = torch.randn(2, 6, 32, dtype=torch.bfloat16)
    for sockets in (Sockets(), Sockets(turn=turn), Sockets(bias=lambda q: torch.zeros(4, 6, 6))):
        assert layer(x, sockets).dtype == torch.bfloat16


@torch.no_grad()
def test_patches_are_row_major_and_equal_unfolded_ones():
    torch.manual_seed(0)
    embed, x = PatchEmbed(4, 8), torch.randn(1, 3, 8, 12)
    assert embed.grid(x) == (2, 3)
    tokens = embed(x)
    assert tokens.shape == (1, 6, 8)
    corner = x[0, :, 4:8, 8:12]  # row 1, column 2: token 5
    by_hand = (embed.proj.weight * corner).sum((1, 2, 3)) + embed.proj.bias
    torch.testing.assert_close(tokens[0, 5], by_hand, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [(8, 13), (7, 12), (0, 4)])
def test_patch_mistakes_are_named(size):
    with pytest.raises(ValueError, match=r"image"):
        PatchEmbed(4, 8).grid(torch.zeros(1, 3, *size))


@torch.no_grad()
def test_mlp_swiglu_and_scale_by_hand():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    plain, gated, scale = MLP(8, 16), SwiGLU(8, 16), LayerScale(8, 0.5)
    torch.testing.assert_close(plain(x), plain.fc2(F.gelu(plain.fc1(x))))
    a, b = gated.fc1.weight.chunk(2)
    c, d = gated.fc1.bias.chunk(2)
    hidden = F.linear(x, a, c)
    torch.testing.assert_close(gated(x), gated.fc2(hidden * hidden.sigmoid() * F.linear(x, b, d)), atol=1e-6, rtol=1e-5)
    assert torch.equal(scale(x), x * 0.5)


def test_drop_path_drops_whole_samples_at_its_rate_and_keeps_the_mean():
    torch.manual_seed(0)
    drop, x = DropPath(0.25), torch.ones(20000, 3, 2)
    assert drop.eval()(x) is x
    y = drop.train()(x)
    assert sorted(set(y.flatten().tolist())) == [0.0, pytest.approx(1 / 0.75)]
    assert torch.equal(y.amin((1, 2)), y.amax((1, 2)))  # a sample is left out as a whole
    assert (y[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert y.mean().item() == pytest.approx(1.0, abs=0.015)
    assert DropPath(0.0).train()(x) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_drop_rate_mistakes_are_named(rate):
    with pytest.raises(ValueError, match=r"a drop rate is in \[0, 1\), got"):
        DropPath(rate)


@torch.no_grad()
def test_block_is_pre_norm_and_a_scale_of_zero_is_the_identity():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    block = Block(16, 2, 32)
    middle = x + block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), middle + block.mlp(block.norm2(middle)))
    assert torch.equal(Block(16, 2, 32, layer_scale=0.0)(x), x)
