"""Segmenter with a linear head: the head by hand, any size, any line of position, an image alone as in a batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vispe
from vispe.layers.pixels import enlarged
from vispe.layers.sockets import WORDS, PositionSpec
from vispe.models.segmenter_linear import VARIANTS, SegmenterLinear, SegmenterLinearSpec
from vispe.position.parameters import positional_parameters
from vispe.position.resample import RECIPES, resample
from vispe.train.groups import places
from vispe.weights import WeightsError

NAME = "segmenter_linear_tiny_patch16"
SMALL = {"width": 24, "depth": 2, "heads": 2, "hidden": 48, "patch_size": 8, "image_size": (32, 48), "num_classes": 5}
LINES = ["none", *(word for words in WORDS.values() for word in words[1:]), "table + axial + swin + peg"]


def small(**knobs: object) -> SegmenterLinear:
    """Every parameter drawn: biases and some tables start at zero."""
    made = vispe.build(NAME, **{**SMALL, **knobs})
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            placed = name.startswith(("position.", "cls"))
            parameter.normal_(std=0.5 if placed or parameter.ndim == 1 else parameter[0].numel() ** -0.5)
    return made


def pictures(b: int = 2, size: tuple[int, int] = (32, 48), seed: int = 0) -> Tensor:
    return torch.randn(b, 3, *size, generator=torch.Generator().manual_seed(seed))


# --- the head ---------------------------------------------------------------------------------------------------------


def test_the_head_by_hand():
    """Two patches of 2 pixels a side; their features are 1 and 5, the logits 2x + 1: 3 and 11. Between the centres of
    the patches, columns 0.5 and 2.5, it is a straight line; beyond them it is flat. The third column is cut."""
    knobs = {"width": 2, "heads": 1, "hidden": 2, "depth": 1, "patch_size": 2, "image_size": (2, 4), "num_classes": 1}
    model = small(**knobs)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[2.0, 0.0]]))
        model.head.bias.fill_(1.0)
    model.features = lambda images: torch.tensor([[[[1.0, 7.0], [5.0, 7.0]]]])
    assert model(torch.zeros(1, 3, 2, 4)).tolist() == [[[[3.0, 5.0, 9.0, 11.0]] * 2]]
    assert model(torch.zeros(1, 3, 1, 3)).tolist() == [[[[3.0, 5.0, 9.0]]]]


@torch.inference_mode()
def test_patches_are_told_apart_and_nothing_finer():
    """Without places, one patch that differs makes the largest difference in its own cell."""
    model = small(position="none", num_classes=0)
    images = torch.zeros(1, 3, 32, 48)
    images[..., 8:16, 24:32] = 3.0
    cells = model.features(images)[0]
    change = (cells - cells[0, 0]).norm(dim=-1)
    assert change.argmax() == 1 * 6 + 3
    assert change.flatten().sort().values[:-1].max() < 1e-5


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 48), (33, 41), (8, 8), (3, 70), (1, 1)])
@torch.inference_mode()
def test_any_size_gives_every_pixel(size):
    model = small()
    assert model(pictures(1, size)).shape == (1, 5, *size)
    assert model.features(pictures(1, size)).shape == (1, -(-size[0] // 8), -(-size[1] // 8), 24)


@torch.inference_mode()
def test_what_patches_do_not_tile_is_padded_with_zeros_and_cut():
    model, images = small(), pictures(1, (29, 43))
    whole = model(F.pad(images, (0, 5, 0, 3)))
    assert torch.equal(model(images), whole[..., :29, :43])


@torch.inference_mode()
def test_the_table_is_resampled_by_the_sources_recipe():
    model = small()
    assert model.spec.position.recipe == "pe"
    grown = vispe.load(NAME, model.state_dict(), origin="vispe", source_size=(32, 48), **{**SMALL, "image_size": 64})
    old, new = (m.state_dict()["position.added.weight"] for m in (model, grown))
    torch.testing.assert_close(new, resample(old, (4, 6), (8, 8), RECIPES["pe"], 1))
    torch.testing.assert_close(grown(pictures(1, (64, 64))), model(pictures(1, (64, 64))), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("line", LINES)
def test_position_is_one_line(line):
    model = small(position=line).train()
    model(pictures(2, (40, 33))).square().mean().backward()
    assert model(pictures(1, (24, 65))).shape == (1, 5, 24, 65)
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still, still
    table = line.startswith("table")
    assert model.spec.rows == int(table)
    assert all(name.startswith("position.") for name in positional_parameters(model))


@torch.inference_mode()
def test_only_the_class_token_tells_a_place_from_none():
    """Without a position, patches in another order give the logits in that order."""
    model, images = small(position="none", num_classes=0), pictures(1)
    turned = images.unflatten(2, (4, 8)).flip(2).flatten(2, 3)
    torch.testing.assert_close(model(turned), model(images).flip(2), atol=1e-5, rtol=1e-5)
    placed = small(num_classes=0)
    assert (placed(turned) - placed(images).flip(2)).abs().max() > 0.1


# --- batches and padding ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_padding_does_not_change_the_result():
    model, sizes = small(), [(29, 40), (32, 48), (20, 17), (29, 40)]
    images, mask = torch.full((4, 3, 32, 48), 7.0), torch.zeros(4, 32, 48, dtype=torch.bool)
    alone = []
    for i, (h, w) in enumerate(sizes):
        one = pictures(1, (h, w), i)
        images[i, :, :h, :w], mask[i, :h, :w] = one[0], True
        alone.append(model(one))
    together = model(images, mask)
    assert together.shape == (4, 5, 32, 48)
    twice = [(2 * h, 2 * w) for h, w in sizes]
    for own, logits, size, large in zip(
        alone, enlarged(together, twice, model.stride, sizes), sizes, twice, strict=True
    ):
        (expected,) = enlarged(own, [large], model.stride)
        assert own.shape[2:] == size
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(model(images, torch.ones_like(mask)), model(images))


def test_padding_in_training_is_refused():
    mask = torch.ones(2, 32, 48, dtype=torch.bool)
    mask[0, :, 40:] = False
    with pytest.raises(ValueError, match="one size, without padding"):
        small().train()(pictures(), mask)


def test_without_classes_the_map_of_the_patches_comes_out():
    model = small(num_classes=0)
    assert (model.head, model.stride) == (None, 8)
    assert model(pictures(2, (33, 48))).shape == (2, 24, 5, 6)
    assert small().stride == 1


# --- training ---------------------------------------------------------------------------------------------------------


def test_optimisers_know_table_and_token():
    found = places(small())
    free = {"cls_token", "position.added.weight", "head.bias"}
    assert not any(found[name].decayed for name in free)
    assert all(found[name].decayed for name in ("head.weight", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"))


def test_a_fresh_network_starts_quietly():
    """As the source: linear weights N(0, 0.02), biases zero, so that the first logits are near zero."""
    torch.manual_seed(0)
    model = vispe.build(NAME, num_classes=5, image_size=64)
    assert model(pictures(1, (64, 64))).std() < 0.5
    assert 0.015 < float(model.head.weight.detach().std()) < 0.025
    assert not model.head.bias.any()
    assert [block.drop_path.rate for block in model.blocks][::11] == [0.0, 0.1]


@torch.inference_mode()
def test_half_precision_is_near_and_its_logits_are_not_half():
    model, images = small(), pictures()
    full = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(images)
    halves = copy.deepcopy(model).bfloat16()(images.bfloat16())
    for found in (mixed, halves):
        assert found.dtype == torch.float32
        assert (found - full).abs().max() < 0.15 * full.std()


@torch.no_grad()
def test_compiled_twice_at_most_whatever_the_sizes():
    """Once for the table's own grid and once for every other that patches tile. A padded side is another program."""
    model, programs = small(depth=1), []

    def backend(graph, _inputs):
        programs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=backend)
    for size in ((32, 48), (64, 48), (80, 40)):
        torch.testing.assert_close(compiled(pictures(2, size)), model(pictures(2, size)), atol=1e-5, rtol=1e-5)
    assert len(programs) <= 2


# --- loading ----------------------------------------------------------------------------------------------------------


def test_an_encoder_gets_a_fresh_head_and_a_head_of_other_classes_is_replaced():
    encoder = small(num_classes=0).state_dict()
    model = vispe.load(NAME, encoder, origin="vispe", source_size=(32, 48), **SMALL)
    assert model.report == ["head.weight: fresh [5, 24], there was none", "head.bias: fresh [5], there was none"]
    model = vispe.load(NAME, small(num_classes=9).state_dict(), origin="vispe", source_size=(32, 48), **SMALL)
    assert "the checkpoint's [9, 24] is another head" in model.report[0]
    bare = {**SMALL, "num_classes": 0}
    model = vispe.load(NAME, small().state_dict(), origin="vispe", source_size=(32, 48), **bare)
    assert model.report[0] == "head.weight: dropped, this model has no such head"


def test_another_position_is_reported():
    knobs = {**SMALL, "position": "axial"}
    model = vispe.load(NAME, small().state_dict(), origin="vispe", source_size=(32, 48), **knobs)
    assert model.report == ["position.added.weight: dropped, position is axial"]


def test_a_table_of_another_size_is_refused():
    with pytest.raises(WeightsError, match=r"position\.added\.weight: a table of 25 rows is not 1 prefix tokens"):
        vispe.load(NAME, small().state_dict(), origin="vispe", source_size=(64, 48), **SMALL)


# --- the spec ---------------------------------------------------------------------------------------------------------


def test_the_variants_are_the_papers():
    """Parameters in millions, table 1 of the paper for Seg-*/16: 6, 22, 86, 304 of the encoder."""
    counted = []
    for name in VARIANTS:
        with torch.device("meta"):
            counted.append(round(sum(p.numel() for p in vispe.build(name).parameters()) / 1e6))
    assert counted == [6, 22, 86, 304]


def test_lines_mappings_and_lists_are_taken():
    spec = SegmenterLinearSpec(image_size=[40, 50], position="axial")
    assert spec.grid == (3, 4)  # patches of 16 cover it
    assert spec.but(position={"base": 10.0}).position == PositionSpec(rotated="axial", base=10.0)
    assert SegmenterLinearSpec().but(position="table + axial").position.recipe == "pe"
    assert SegmenterLinearSpec(image_size=64).image_size == (64, 64)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"heads": 5}, "5 heads do not divide the width 24"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"num_classes": -1}, "num_classes must not be negative, got -1"),
        ({"position": "spiral"}, "'spiral' is no encoding"),
        ({"position": 3}, "got 3"),
        ({"image_size": (0, 4)}, "image_size"),
        ({"colour": 1}, "'colour'"),
    ],
)
def test_mistakes_are_named(knobs, why):
    with pytest.raises(ValueError, match=why):
        SegmenterLinearSpec(**SMALL).but(**knobs)


@pytest.mark.parametrize("shape", [(1, 1, 32, 48), (3, 32, 48), (1, 3, 0, 8)])
def test_images_that_cannot_be_are_named(shape):
    with pytest.raises(ValueError, match=r"images are \[b, 3, h, w\], got"):
        small().features(torch.zeros(shape))
