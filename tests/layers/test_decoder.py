"""Attention with places is torch's own with the sums made outside; queries are a set; masks hide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vispe.layers.decoder import DecoderLayer, EncoderLayer, Perceptron, PlacedAttention, placed, visible, xavier


def torchs(own: PlacedAttention, dropout: float = 0.0) -> nn.MultiheadAttention:
    peer = nn.MultiheadAttention(own.proj.in_features, own.heads, dropout, batch_first=True)
    peer.load_state_dict(
        {
            "in_proj_weight": own.qkv.weight,
            "in_proj_bias": own.qkv.bias,
            "out_proj.weight": own.proj.weight,
            "out_proj.bias": own.proj.bias,
        }
    )
    return peer


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_torchs(masked):
    torch.manual_seed(0)
    own, x, memory = PlacedAttention(16, 4), torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    place, far = torch.randn(5, 16), torch.randn(2, 7, 16)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 4:] = not masked
    peer = torchs(own)
    wanted, _ = peer(x + place, memory + far, memory, key_padding_mask=~real)
    found = own(placed(x, place), memory, memory + far, visible(real) if masked else None)
    torch.testing.assert_close(found, wanted)
    wanted, _ = peer(memory + far, memory + far, memory, key_padding_mask=~real)
    torch.testing.assert_close(own(memory + far, memory, mask=visible(real)), wanted)
    torch.testing.assert_close(own(memory + far, memory, memory + far, visible(real)), wanted)  # fused or not


def test_layers_are_torchs_post_norm_layers():
    """Without places an encoder layer is ``nn.TransformerEncoderLayer`` and a decoder layer its sibling."""
    torch.manual_seed(0)
    own, peer = EncoderLayer(16, 4, 24), nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True)
    both, second = DecoderLayer(16, 4, 24), nn.TransformerDecoderLayer(16, 4, 24, 0.0, batch_first=True)
    names = {"self_attn": "attn", "linear1": "mlp.fc1", "linear2": "mlp.fc2"}
    for module, theirs, renamed in ((own, peer, names), (both, second, {**names, "self_attn": "self_attn"})):
        state = {}
        for key, value in module.state_dict().items():
            for ours, other in (("qkv.weight", "in_proj_weight"), ("qkv.bias", "in_proj_bias"), ("proj.", "out_proj.")):
                key = key.replace(ours, other) if "attn" in key else key
            for other, ours in renamed.items():
                key = f"{other}{key[len(ours) :]}" if key.startswith(ours + ".") else key
            state[key.replace("cross_attn", "multihead_attn")] = value
        theirs.load_state_dict(state)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    torch.testing.assert_close(own(x), peer(x))
    torch.testing.assert_close(both(x, memory, memory), second(x, memory))


def test_values_never_get_a_place():
    """With a place as large as the queries' content, uniform attention still returns the mean of plain values."""
    own = PlacedAttention(8, 2)
    with torch.no_grad():
        own.qkv.weight[:16] = 0  # every score is equal
        own.qkv.bias.zero_()
    x, place = torch.randn(1, 5, 8), 100 * torch.randn(5, 8)
    value = x @ own.qkv.weight[16:].T
    wanted = own.proj(value.mean(1, keepdim=True).expand(-1, 5, -1))
    torch.testing.assert_close(own(x + place, x), wanted)


def test_a_row_without_keys_sees_all_and_stays_finite():
    real = torch.tensor([[True, False], [False, False]])
    assert visible(real)[:, 0, 0].tolist() == [[True, False], [True, True]]
    own, x = EncoderLayer(8, 2, 8), torch.randn(2, 2, 8, requires_grad=True)
    own(x, None, visible(real)).square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_hidden_keys_do_not_count():
    own, x, memory = DecoderLayer(8, 2, 8), torch.randn(1, 3, 8), torch.randn(1, 4, 8)
    mask = visible(torch.tensor([[True, True, True, False]]))
    changed = torch.cat((memory[:, :3], memory[:, 3:] + 100), 1)
    torch.testing.assert_close(own(x, memory, memory, None, mask), own(x, changed, changed, None, mask))


def test_dropout_acts_in_training_alone():
    own, x = EncoderLayer(8, 2, 8, 0.5), torch.randn(1, 6, 8)
    assert torch.equal(own.eval()(x), own(x))
    assert not torch.equal(own.train()(x), own(x))


def test_perceptron_and_start():
    own = Perceptron(2, 3, 1)
    with torch.no_grad():
        for layer in own.layers:
            layer.weight.fill_(1)
            layer.bias.fill_(-1)
    assert own(torch.tensor([[2.0, 1.0], [0.0, 0.5]])).tolist() == [[5.0], [-1.0]]  # relu(3 - 1) * 3 - 1; relu(-0.5)
    layer = EncoderLayer(8, 2, 8)
    xavier(layer)
    assert not layer.attn.qkv.bias.any()
    assert not layer.attn.proj.bias.any()
    assert layer.attn.qkv.weight.abs().max() <= (6 / (8 + 24)) ** 0.5
    assert torch.equal(layer.norm1.weight, torch.ones(8))
