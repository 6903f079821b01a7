"""MAE against transformers' ViTMAEForPreTraining: its random weights through the rename table, the same noise."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import vispe
from vispe.models.mae import MAE
from vispe.position.sine import sine_mae

transformers = pytest.importorskip("transformers", reason="transformers is the parity peer")

KNOBS = {
    "width": 64,
    "depth": 3,
    "heads": 4,
    "hidden": 128,
    "decoder_width": 48,
    "decoder_depth": 2,
    "decoder_heads": 3,
    "decoder_hidden": 96,
    "patch_size": 8,
    "eps": 1e-12,  # the peer's own; the original has 1e-6
}


def peer(size: tuple[int, int], **knobs: object) -> nn.Module:
    """Random weights large enough to matter, and the sines of its grid: made here, for transformers 5 leaves its tables
    at zero where a model is built from its configuration, and knows square grids only."""
    config = transformers.ViTMAEConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        decoder_hidden_size=48,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=3,
        decoder_intermediate_size=96,
        patch_size=8,
        image_size=size if size[0] != size[1] else size[0],
        **knobs,
    )
    torch.manual_seed(0)
    model = transformers.ViTMAEForPreTraining(config).eval()
    grid = (size[0] // 8, size[1] // 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1)
        for table in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
            table.copy_(torch.cat((torch.zeros(1, table.shape[-1]), sine_mae(grid, table.shape[-1])))[None])
    return model


def ours(model: nn.Module, size: tuple[int, int], **knobs: object) -> MAE:
    return vispe.load(
        "mae_vit_base_patch16",
        weights=model.state_dict(),
        origin="transformers",
        source_size=size,
        image_size=size,
        **KNOBS,
        **knobs,
    )


def inputs(b: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(b)
    return torch.randn(b, 3, *size, generator=g), torch.rand(b, size[0] * size[1] // 64, generator=g)


def compare(network: MAE, model: nn.Module, images: Tensor, noise: Tensor) -> None:
    found, theirs = network(images, noise), model(images, noise=noise)
    assert torch.equal(found.mask, theirs.mask)
    assert torch.equal(found.ids_restore, theirs.ids_restore)
    torch.testing.assert_close(found.prediction, theirs.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.loss, theirs.loss, atol=1e-5, rtol=1e-5)
    assert theirs.logits.std() > 0.1


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("ratio", [0.75, 0.5])
@pytest.mark.parametrize("normalised", [False, True])
@torch.inference_mode()
def test_square_images(b, ratio, normalised):
    size = (48, 48)
    model = peer(size, mask_ratio=ratio, norm_pix_loss=normalised)
    compare(ours(model, size, mask_ratio=ratio, norm_pix_loss=normalised), model, *inputs(b, size))


@pytest.mark.parametrize("normalised", [False, True])
@torch.inference_mode()
def test_images_that_are_not_square(normalised):
    """The peer's own check of squareness is passed by, nothing else: its network takes the grid of its configuration.

    36 patches, for its constructor makes a square table before ours is put in its place.
    """
    size = (32, 72)
    model = peer(size, norm_pix_loss=normalised)
    patches = model.patchify
    model.patchify = lambda images, **_: patches(images, interpolate_pos_encoding=True)
    compare(ours(model, size, norm_pix_loss=normalised), model, *inputs(2, size))


@torch.inference_mode()
def test_at_another_size_the_peer_resamples_its_table_and_we_make_the_sines():
    """By design the two part where the image is not the configuration's: the peer's decoder interpolates the rows of
    its table as one line, so a grid's rows run into one another. The masks agree, and with the sines of the new grid in
    the peer's tables (``test_images_that_are_not_square``) so does the rest."""
    model = peer((48, 48))
    network, (images, noise) = ours(model, (48, 48)), inputs(2, (48, 48 + 24))
    theirs, found = model(images, noise=noise, interpolate_pos_encoding=True), network(images, noise)
    assert torch.equal(found.mask, theirs.mask)
    assert (found.prediction - theirs.logits).abs().max() > 1e-2


def test_gradients_are_the_peers():
    size = (48, 48)
    model = peer(size, norm_pix_loss=True)
    network, (images, noise) = ours(model, size, norm_pix_loss=True).train(), inputs(2, size)
    model.train()(images, noise=noise).loss.backward()
    network(images, noise).loss.backward()
    pairs = (
        (network.cls_token.grad, model.vit.embeddings.cls_token.grad),
        (network.mask_token.grad, model.decoder.mask_token.grad),
        (network.patch_embed.proj.weight.grad, model.vit.embeddings.patch_embeddings.projection.weight.grad),
        (network.decoder_pred.bias.grad, model.decoder.decoder_pred.bias.grad),
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def classic(key: str) -> str:
    """transformers 5's name -> the one in its published files."""
    key = re.sub(r"^vit\.layers\.", "vit.encoder.layer.", key)
    key = re.sub(r"attention\.([qkv])_proj", lambda m: f"attention.attention.{_LONG[m[1]]}", key)
    key = key.replace("attention.o_proj", "attention.output.dense")
    return key.replace("mlp.fc1", "intermediate.dense").replace("mlp.fc2", "output.dense")


_LONG = {"q": "query", "k": "key", "v": "value"}


def test_the_classic_names_load_the_same():
    size = (48, 48)
    model = peer(size)
    state = {classic(key): value for key, value in model.state_dict().items()}
    assert "vit.encoder.layer.0.attention.attention.query.weight" in state
    assert "decoder.decoder_layers.1.output.dense.bias" in state
    old = vispe.load(
        "mae_vit_base_patch16", weights=state, origin="transformers", source_size=size, image_size=size, **KNOBS
    )
    new = ours(model, size)
    assert all(torch.equal(a, b) for a, b in zip(old.state_dict().values(), new.state_dict().values(), strict=True))
    assert len(new.report) == 2
    found = vispe.load("mae_vit_base_patch16", weights=state, source_size=size, image_size=size, **KNOBS)
    assert torch.equal(found.cls_token, old.cls_token)  # the origin is found by the names
