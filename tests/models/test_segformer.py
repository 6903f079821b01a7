"""SegFormer's promises: any size, a place told by zeros alone, an image alone as in a batch, strict loading."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vispe
from vispe.models.segformer import SegFormer, SegFormerSpec, as_map, semantic, upsample
from vispe.position.conv import MixFFN
from vispe.position.parameters import positional_parameters
from vispe.weights import WeightsError

SMALL = {
    "widths": (8, 16, 24, 32),
    "depths": (1, 2, 1, 1),
    "heads": (1, 2, 3, 4),
    "head_width": 24,
    "num_classes": 5,
}


def small(**knobs: object) -> SegFormer:
    """Weights and running statistics large enough to matter."""
    torch.manual_seed(0)
    model = vispe.build("segformer_b0", **{**SMALL, **knobs})
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=g) * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.1)
        if model.head is not None:
            model.head.norm.running_mean.normal_(generator=g)
            model.head.norm.running_var.uniform_(0.5, 2, generator=g)
    return model


def pictures(b: int = 2, size: tuple[int, int] = (64, 96), seed: int = 0) -> Tensor:
    return torch.randn(b, 3, *size, generator=torch.Generator().manual_seed(seed))


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 96), (65, 97), (100, 70), (29, 200), (128, 32)])
@torch.inference_mode()
def test_any_size_gives_a_quarter_of_it(size):
    model = small()
    assert model(pictures(1, size)).shape == (1, 5, -(-size[0] // 4), -(-size[1] // 4))
    maps = model.features(pictures(1, size))
    assert [x.shape[1:] for x in maps] == [
        (w, -(-size[0] // s), -(-size[1] // s)) for w, s in zip(SMALL["widths"], (4, 8, 16, 32), strict=True)
    ]


def test_sizes_of_the_published_networks():
    """Parameters in millions, as transformers' and the paper's (table 1a: encoder, and decoder with 150 classes)."""
    counted = {}
    for name in vispe.list_models():
        if name.startswith("segformer_"):
            with torch.device("meta"):
                model = vispe.build(name)
            counted[name] = round(sum(p.numel() for p in model.parameters()) / 1e6, 1)
    assert list(counted.values()) == [3.8, 13.7, 27.5, 47.3, 64.1, 84.7]


def test_without_classes_the_last_map_comes_out():
    model = small(num_classes=0)
    assert model.head is None
    assert model(pictures()).shape == (2, 32, 2, 3)


# --- the head ---------------------------------------------------------------------------------------------------------


def written(model: SegFormer, images: Tensor) -> Tensor:
    """The head in the order of the paper: map, upsample, concatenate, fuse."""
    head, maps = model.head, model.features(images)
    size = maps[0].shape[-2:]
    each = [own(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for own, x in zip(head.maps, maps, strict=True)]
    up = [F.interpolate(x, size=size, mode="bilinear", align_corners=False) for x in each]
    return head.classifier(head.dropout(F.relu(head.norm(head.fuse(torch.cat(up[::-1], 1))))))


@pytest.mark.parametrize("training", [False, True])
def test_the_head_is_what_is_written(training):
    model, images = small(dropout=0.0, drop_path=0.0), pictures(2, (70, 100))
    model.head.norm.momentum = 0.0
    model.train(training)
    plain, folded = written(model, images), model(images)
    torch.testing.assert_close(folded, plain, atol=1e-5, rtol=1e-5)
    grads = [torch.autograd.grad(y.square().mean(), list(model.head.parameters())) for y in (plain, folded)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


# --- where a pixel is -------------------------------------------------------------------------------------------------


def moved(x: Tensor, down: int, right: int) -> Tensor:
    return x.roll((down, right), (-2, -1))


def apart(model: SegFormer, down: int, right: int, size: tuple[int, int] = (128, 160)) -> float:
    """The largest difference between the map of a moved image and the moved map, over the map's deviation."""
    model, images = copy.deepcopy(model).double(), pictures(1, size).double()
    with torch.inference_mode():
        still, shifted = model(images), model(moved(images, down, right))
    return float((shifted - moved(still, down // 4, right // 4)).abs().max() / still.std())


@pytest.mark.parametrize("position", ["mix_ffn", "none"])
@pytest.mark.parametrize(("down", "right"), [(32, 0), (0, 64), (96, 32)])
def test_on_a_torus_a_moved_image_gives_the_moved_map(position, down, right):
    """The shifts are whole cells of every stage and every key. What is left is rounding, in float64."""
    assert apart(small(padding="circular", position=position), down, right) < 1e-10


def test_it_is_the_zeros_around_the_image_that_tell_the_place():
    """The same weights: with zeros for padding the moved image gives another map, also far from the border."""
    assert apart(small(), 32, 64) > 0.1
    model, flat = small(), torch.zeros(1, 3, 128, 160)
    with torch.inference_mode():  # an image without anything in it: only the padding can make cells unlike each other
        zeros, torus = (with_padding(model, padding)(flat)[0] for padding in ("zeros", "circular"))
    assert zeros.flatten(1).std(1).min() > 1e-2
    assert torus.flatten(1).std(1).max() < 1e-5


def with_padding(model: SegFormer, padding: str) -> SegFormer:
    return vispe.load("segformer_b0", model.state_dict(), origin="vispe", **{**SMALL, "padding": padding})


def test_without_mix_ffn_the_patches_still_see_the_zeros():
    """Overlapping patches are padded too: leaving out the convolution alone does not take all places away."""
    model = small(position="none")
    assert not any(isinstance(part, MixFFN) for part in model.modules())
    assert apart(model, 32, 64) > 0.01


def test_the_kernels_of_the_feed_forwards_are_the_positional_parameters():
    names = positional_parameters(small())
    assert names
    assert all(".mlp.conv." in name for name in names)
    assert len(names) == 2 * sum(SMALL["depths"])
    assert not positional_parameters(small(position="none"))


def test_upsampling_by_hand():
    x = torch.tensor([[[[0.0, 4.0]]]])
    assert upsample(x, (1, 4)).tolist() == [[[[0, 1, 3, 4]]]]
    assert upsample(x, (1, 4), "circular").tolist() == [[[[1, 1, 3, 3]]]]  # 4 is on both sides of 0
    with pytest.raises(ValueError, match=r"\(1, 2\) cells is not upsampled to \(1, 3\)"):
        upsample(x, (1, 3), "circular")


def test_tokens_are_a_map_row_by_row():
    tokens = torch.arange(6.0).view(1, 6, 1)
    assert as_map(tokens, (2, 3))[0, 0].tolist() == [[0, 1, 2], [3, 4, 5]]


# --- batches and padding ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_batch_is_its_images_one_by_one():
    model, images = small(), pictures(3, (70, 90))
    torch.testing.assert_close(model(images), torch.cat([model(one[None]) for one in images]), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_padding_does_not_change_the_result():
    model, sizes = small(), [(70, 90), (64, 128), (100, 33)]
    images, mask = torch.full((3, 3, 100, 128), 7.0), torch.zeros(3, 100, 128, dtype=torch.bool)
    alone = []
    for i, (h, w) in enumerate(sizes):
        one = pictures(1, (h, w), i)
        images[i, :, :h, :w], mask[i, :h, :w] = one[0], True
        alone.append(model(one))
    together = model(images, mask)
    assert together.shape == (3, 5, 25, 32)
    for own, logits, (h, w) in zip(alone, together, sizes, strict=True):
        torch.testing.assert_close(logits[:, : -(-h // 4), : -(-w // 4)], own[0], atol=1e-4, rtol=0)
    predicted = semantic(together, sizes, sizes)
    for own, found, size in zip(alone, predicted, sizes, strict=True):
        assert torch.equal(semantic(own, [size])[0], found)
    everything = torch.ones_like(mask)
    assert torch.equal(model(images, everything), model(images))


def test_masks_that_cannot_be_are_named():
    model, images = small(), pictures()
    mask = torch.ones(2, 64, 96, dtype=torch.bool)
    mask[0, :, 40:] = False
    with pytest.raises(ValueError, match="one size"):
        model.train()(images, mask)
    mask[0, 3, 3] = False
    with pytest.raises(ValueError, match="rectangle at the upper left"):
        model.eval()(images, mask)
    with pytest.raises(ValueError, match=r"got torch.bool \[2, 64, 95\]"):
        model(images, mask[..., 1:])


def test_classes_of_pixels_by_hand():
    logits = torch.zeros(1, 3, 1, 2)
    logits[0, 1, 0, 0], logits[0, 2, 0, 1] = 1.0, 1.0
    assert semantic(logits, [(2, 4)])[0].tolist() == [[1, 1, 2, 2]] * 2
    assert semantic(logits, [(2, 4)], real=[(4, 4)])[0].tolist() == [[1] * 4] * 2
    with pytest.raises(ValueError, match="each of 1 images is needed, got 2 sizes"):
        semantic(logits, [(2, 4)] * 2)
    with pytest.raises(ValueError, match="size must be"):
        semantic(logits, [(0, 4)])


# --- training ---------------------------------------------------------------------------------------------------------


def test_every_parameter_is_trained():
    model = small(drop_path=0.0).train()
    F.cross_entropy(model(pictures()), torch.randint(0, 5, (2, 16, 24))).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without, without


def test_stochastic_depth_rises_to_the_last_block():
    rates = [part.drop_path.rate for stage in small(drop_path=0.4).stages for part in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert small().eval()(pictures()).equal(small().eval()(pictures()))


@torch.inference_mode()
def test_half_precision_is_near():
    model, images = small(), pictures()
    full = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(images)
    halves = copy.deepcopy(model).bfloat16()(images.bfloat16())
    for found in (mixed, halves):
        assert bool(torch.isfinite(found).all())
        assert (found.float() - full).abs().max() < 0.1 * full.std()


@pytest.mark.slow
def test_training_in_bfloat16_is_stable_for_200_steps():
    """Which of two classes a cell is of is written in its brightness; the loss stays finite and falls."""
    model = small(num_classes=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g, losses = torch.Generator().manual_seed(3), []
    for _ in range(200):
        labels = (torch.randn(2, 4, 4, generator=g) > 0).long().repeat_interleave(4, 1).repeat_interleave(4, 2)
        bright = (2.0 * labels - 1).repeat_interleave(4, 1).repeat_interleave(4, 2)
        images = bright[:, None] + torch.randn(2, 3, 64, 64, generator=g)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = torch.stack(losses)
    assert bool(torch.isfinite(found).all())
    assert found[-20:].mean() < 0.3 * found[:20].mean()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


# --- compiled and exported --------------------------------------------------------------------------------------------


@pytest.mark.slow
@torch.inference_mode()
def test_one_compiled_graph_serves_every_size():
    from torch._dynamo.testing import CompileCounterWithBackend

    model, counter = small(depths=(1, 1, 1, 1)), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for size in ((64, 96), (65, 130), (100, 70)):
        torch.testing.assert_close(compiled(pictures(2, size)), model(pictures(2, size)), atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2


def test_a_compiled_network_trains():
    model = small(depths=(1, 1, 1, 1), drop_path=0.0, dropout=0.0).train()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=False, backend="aot_eager")
    images = pictures(2, (32, 32))
    for network in (model, compiled):
        network(images).square().mean().backward()
    for one, other in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-3)


# --- loading ----------------------------------------------------------------------------------------------------------


def test_another_number_of_classes_keeps_the_rest_of_the_head():
    source = small(num_classes=150)
    model = vispe.load("segformer_b0", source.state_dict(), origin="vispe", **SMALL)
    assert [line.split(":")[0] for line in model.report] == ["head.classifier.weight", "head.classifier.bias"]
    assert "the checkpoint has 150 classes" in model.report[0]
    assert torch.equal(model.head.fuse.weight, source.head.fuse.weight)


def test_an_encoder_alone_is_a_start():
    encoder = small(num_classes=0)
    model = vispe.load("segformer_b0", encoder.state_dict(), origin="vispe", **SMALL)
    assert len(model.report) == len(model.head.state_dict())
    assert torch.equal(model.stages[3].norm.weight, encoder.stages[3].norm.weight)
    with pytest.raises(WeightsError, match="missing 'head"):
        vispe.load("segformer_b0", encoder.state_dict(), origin="vispe", **{**SMALL, "num_classes": 150})
    bare = vispe.load("segformer_b0", small().state_dict(), origin="vispe", **{**SMALL, "num_classes": 0})
    assert all(line.endswith("dropped, this model has no head") for line in bare.report)


def test_a_position_that_is_left_out_is_reported():
    model = vispe.load("segformer_b0", small().state_dict(), origin="vispe", **{**SMALL, "position": "none"})
    kernels = [line for line in model.report if "dropped, position is 'none'" in line]
    assert len(kernels) == 2 * sum(SMALL["depths"])


def test_heads_of_another_width_are_refused():
    with pytest.raises(WeightsError, match="of another shape"):
        vispe.load("segformer_b0", small().state_dict(), origin="vispe", **{**SMALL, "head_width": 32})


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"widths": (8, 16, 24)}, r"widths are 4 numbers of at least 1, got \(8, 16, 24\)"),
        ({"depths": (1, 0, 1, 1)}, "depths are 4 numbers"),
        ({"heads": (3, 2, 3, 4)}, "3 heads do not divide the width 8"),
        ({"num_classes": -1}, "got -1"),
        ({"head_width": 0}, "head_width must be at least 1, got 0"),
        ({"position": "sine"}, "'mix_ffn' or 'none', got 'sine'"),
        ({"padding": "mirror"}, "got 'mirror'"),
        ({"image_size": (0, 4)}, "image_size"),
        ({"colour": 1}, "'colour'"),
    ],
)
def test_mistakes_in_the_spec_are_named(knobs, why):
    with pytest.raises(ValueError, match=why):
        SegFormerSpec(**{**SMALL}).but(**knobs)


def test_lists_and_one_number_are_taken():
    spec = SegFormerSpec(widths=[8, 16, 24, 32], heads=[1, 2, 3, 4], image_size=640)
    assert spec.widths == (8, 16, 24, 32)
    assert spec.image_size == (640, 640)


def test_images_that_cannot_be_are_named():
    model: nn.Module = small()
    assert model.spec.smallest == 29
    with pytest.raises(ValueError, match=r"at least 29 pixels, got \(h, w\) = \(28, 64\)"):
        model(pictures(1, (28, 64)))
    with pytest.raises(ValueError, match=r"images are \[b, 3, h, w\], got \[1, 1, 64, 64\]"):
        model(torch.zeros(1, 1, 64, 64))
