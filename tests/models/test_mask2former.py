"""Mask2Former's promises: where it looks, what padding does, and what is read from its masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import vispe
from vispe.losses.masks import Points, mask_loss
from vispe.models import mask2former
from vispe.models.mask2former import Mask2Former, Mask2FormerSpec, Segments, instances, looked_at, panoptic, semantic
from vispe.position.sine import sine_detr
from vispe.weights.convert import accounts_for
from vispe.weights.files import facts

pytest.importorskip("timm", reason="backbones are timm's")

SMALL = {
    "backbone_knobs": {"embed_dim": 16, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 4), "window_size": 4},
    "num_classes": 4,
    "queries": 6,
    "width": 32,
    "mask_width": 16,
    "heads": 2,
    "layers": 4,
    "hidden": 48,
    "encoder_layers": 2,
    "encoder_hidden": 48,
    "points": 2,
    "drop_path": 0.0,
}
RESNET = {**SMALL, "backbone_knobs": {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)}}
FEW = Points(64)


def small(name: str = "mask2former_swin_tiny", **knobs: object) -> Mask2Former:
    torch.manual_seed(0)
    return vispe.build(name, **{**(RESNET if name.endswith("50") else SMALL), **knobs})


def pictures(b: int = 2, size: tuple[int, int] = (64, 96), seed: int = 0) -> Tensor:
    return torch.randn(b, 3, *size, generator=torch.Generator().manual_seed(seed))


def target(n: int = 2, size: tuple[int, int] = (64, 96)) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)
    return {"labels": torch.randint(0, 4, (n,), generator=g), "masks": torch.rand(n, *size, generator=g) > 0.5}


def equal(one: Segments, other: Segments, atol: float = 1e-5) -> None:
    for a, b in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("name", ["mask2former_swin_tiny", "mask2former_resnet50"])
@pytest.mark.parametrize("size", [(64, 96), (37, 50), (33, 101)])
@torch.inference_mode()
def test_any_size_gives_masks_at_a_quarter(name, size):
    out = small(name)(pictures(1, size))
    assert out.logits.shape == (1, 6, 5)
    assert out.masks.shape == (1, 6, -(-size[0] // 4), -(-size[1] // 4))
    assert out.aux == ()
    assert torch.isfinite(out.masks).all()


def test_training_predicts_after_every_layer():
    out = small().train()(pictures())
    assert len(out.aux) == 4
    assert all(each.masks.shape == out.masks.shape and each.aux == () for each in out.aux)
    assert out.aux[0].masks.requires_grad
    assert not torch.equal(out.aux[0].logits, out.logits)


@torch.inference_mode()
def test_a_batch_is_its_images():
    model, images = small(), pictures(3)
    whole = model(images)
    for i in range(3):
        equal(Segments(whole.logits[i : i + 1], whole.masks[i : i + 1]), model(images[i : i + 1]))


@pytest.mark.parametrize("name", ["mask2former_swin_tiny", "mask2former_resnet50"])
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_padding_changes_nothing(name, training):
    """An image alone and the same image in a padded batch, with rubbish in the padding."""
    model, images = small(name).train(training), pictures(3, (64, 96)) * 3
    sizes = [(50, 61), (64, 96), (50, 61)]
    mask = torch.zeros(3, 64, 96, dtype=torch.bool)
    for own, (h, w) in zip(mask, sizes, strict=True):
        own[:h, :w] = True
    whole = model(images, mask)
    assert len(whole.aux) == (4 if training else 0)
    for i, (h, w) in enumerate(sizes):
        alone = model(images[i : i + 1, :, :h, :w])
        y, x = alone.masks.shape[-2:]
        for own, other in zip((whole, *whole.aux), (alone, *alone.aux), strict=True):
            equal(Segments(own.logits[i : i + 1], own.masks[i : i + 1, :, :y, :x]), other)
        rest = whole.masks[i, :, y:, :x]
        assert torch.equal(rest, whole.masks[i, :, y - 1 : y, :x].expand_as(rest))
        (label,), (label_alone,) = (
            semantic(Segments(o.logits[j : j + 1], o.masks[j : j + 1]), [(h, w)], real=[(h, w)])
            for o, j in ((whole, i), (alone, 0))
        )
        assert (label == label_alone).float().mean() > 0.999


@torch.inference_mode()
def test_a_full_mask_is_no_mask():
    model, images = small(), pictures()
    one, other = model(images), model(images, torch.ones(2, 64, 96, dtype=torch.bool))
    assert torch.equal(one.masks, other.masks)


def test_where_a_query_looks():
    """Inside its mask, half included; everywhere when that is empty."""
    features = torch.tensor([[[-2.0, -1.0, 0.0, 1.0]]])
    seen = looked_at(torch.tensor([[[1.0], [-1.0], [0.0]]]), features)
    assert seen[0, 0].tolist() == [[False, False, True, True], [True, True, True, False], [True] * 4]
    assert looked_at(torch.ones(1, 1, 1), -torch.ones(1, 1, 3)).all()


def test_masked_attention_sees_nothing_outside():
    torch.manual_seed(0)
    attention = mask2former.Attention(32, 2)
    q, keys = torch.randn(1, 3, 32), torch.randn(1, 10, 32)
    visible = torch.zeros(1, 1, 3, 10, dtype=torch.bool)
    visible[..., :4] = True
    other = keys.clone()
    other[:, 4:] += 5
    torch.testing.assert_close(attention(q, keys, keys, visible), attention(q, other, other, visible))
    torch.testing.assert_close(attention(q, keys, keys, visible), attention(q, keys[:, :4], keys[:, :4]))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_masks_that_are_all_empty_or_all_full_train(sign):
    """No query sees a place of its own, or every query all: gradients stay finite."""
    model = small().train()
    with torch.no_grad():
        model.decoder.mask_head[4].weight.zero_()
        model.decoder.mask_head[4].bias.fill_(1.0)
        model.pixel_decoder.mask_features.weight.zero_()
        model.pixel_decoder.mask_features.bias.fill_(sign)
    out = model(pictures())
    assert (out.masks.sign() == sign).all()
    mask_loss(out, [target(), target(0)], points=FEW).total.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_every_parameter_learns():
    model = small().train()
    mask_loss(model(pictures()), [target(3), target(0)], points=FEW).total.backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()] == []


def test_scales_take_turns(monkeypatch):
    model, seen = small(layers=5), []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[2].shape[1]))
    model(pictures(1, (64, 96)))
    assert seen == [6, 24, 96, 6, 24]  # 1/32, 1/16, 1/8 and again


# Positions


@torch.inference_mode()
def test_places_go_where_the_original_has_them():
    """Pixel decoder: sines plus its level's vector; decoder: sines for the keys alone, its level's vector on both."""
    model, found = small(), {}
    model.pixel_decoder.layers[0].register_forward_pre_hook(lambda _, inputs: found.update(pixel=inputs[2]))
    model.decoder.layers[1].register_forward_pre_hook(lambda _, inputs: found.update(keys=inputs[2], values=inputs[3]))
    model.pixel_decoder.register_forward_hook(lambda *call: found.update(levels=call[2][0]))
    model(pictures(1, (64, 96)))
    grids = [(2, 3), (4, 6), (8, 12)]
    sines = [sine_detr(grid, 32) for grid in grids]
    levels = model.pixel_decoder.level_embed.weight
    assert torch.equal(found["pixel"], torch.cat([sine + level for sine, level in zip(sines, levels, strict=True)]))
    torch.testing.assert_close(found["values"], found["levels"][1] + model.decoder.level_embed.weight[1])
    torch.testing.assert_close(found["keys"], found["values"] + sines[1])


@pytest.mark.parametrize("position", ["sine", "sine_deformable", "learned", "none"])
@torch.no_grad()
def test_every_position_runs_and_counts(position):
    model = small(position=position)
    out = model(pictures(1))
    assert torch.isfinite(out.masks).all()
    if position != "sine":
        other = small()
        other.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("position.")})
        assert not torch.equal(other(pictures(1)).masks, out.masks)


def test_learned_tables_refuse_a_grid_beyond_them():
    model = small(position="learned", table=(2, 2))
    model(pictures(1, (64, 64)))
    with pytest.raises(ValueError, match="beyond the tables' limit"):
        model(pictures(1, (64, 96)))


def test_encodings_are_float32_under_autocast():
    model = small()
    found: dict[str, object] = {}
    model.position.register_forward_hook(lambda *call: found.update(places=call[2]))
    with torch.autocast("cpu", torch.bfloat16):
        model(pictures(1))
    for place, grid in zip(found["places"], [(2, 3), (4, 6), (8, 12)], strict=True):
        assert place.dtype == torch.float32
        assert torch.equal(place, sine_detr(grid, 32))


@pytest.mark.parametrize("way", ["autocast", "weights"])
def test_bfloat16_is_finite(way):
    model, images = small().train(), pictures()
    if way == "weights":
        model, images = model.bfloat16(), images.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        out = model(images)
    loss = mask_loss(out, [target(), target(0)], points=FEW)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_bfloat16_start_learns():
    """Twenty steps on one picture under autocast: the loss falls and stays finite."""
    torch.manual_seed(0)
    model, images = small().train(), pictures(1)
    wanted = target(1)
    wanted["masks"][:] = False
    wanted["masks"][0, :, :48] = True
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images)
        loss = mask_loss(out, [wanted], points=FEW, generator=torch.Generator().manual_seed(step)).total
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


class Elements(TorchDispatchMode):
    """The largest tensor made between two places."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@torch.no_grad()
def test_attention_memory_grows_linearly_with_pixels():
    """Nothing in the pixel decoder or in the decoder is as large as tokens by tokens."""
    model, largest = small(), []
    for scale in (1, 4):
        maps = [torch.randn(1, c, 32 * scale // 2**i, 32 * scale // 2**i) for i, c in enumerate((16, 32, 64, 128))]
        grids = [(m.shape[2], m.shape[3]) for m in reversed(maps[1:])]
        with Elements() as elements:
            places = model.position(grids)
            levels, features = model.pixel_decoder(maps, places)
            model.decoder(levels, grids, places, features)
        largest.append(elements.largest)
    assert largest[1] / largest[0] == pytest.approx(16, rel=0.05)


@pytest.mark.slow
@torch.no_grad()
def test_it_compiles():
    model, images = small(), pictures(1)
    compiled = torch.compile(model, fullgraph=True)
    equal(compiled(images), model(images), 1e-4)


# Weights and knobs


def test_another_number_of_classes_gets_a_fresh_head():
    state = small().state_dict()
    model = vispe.load("mask2former_swin_tiny", state, origin="vispe", **{**SMALL, "num_classes": 2})
    assert len(model.report) == 2
    assert "decoder.class_head.weight: fresh [3, 32]" in model.report[0]
    assert torch.equal(model.decoder.norm.weight, state["decoder.norm.weight"])
    learned = vispe.load("mask2former_swin_tiny", state, origin="vispe", **SMALL, position="learned")
    assert len(learned.report) == 6
    with pytest.raises(vispe.WeightsError, match=r"of another shape.*decoder\.queries"):
        vispe.load("mask2former_swin_tiny", state, origin="vispe", **{**SMALL, "queries": 9})


def official_names(backbone: str) -> list[str]:
    """Keys of facebookresearch/Mask2Former's checkpoints, one of each kind."""
    pair = ("weight", "bias")
    norm = (*pair, "running_mean", "running_var")
    pixel, head = "sem_seg_head.pixel_decoder", "sem_seg_head.predictor"
    layer = f"{pixel}.transformer.encoder.layers.5"
    names = ["criterion.empty_weight", f"{pixel}.transformer.level_embed"]
    names += [f"{pixel}.{n}.{p}" for n in ("input_proj.2.0", "input_proj.0.1", "mask_features") for p in pair]
    names += [
        f"{pixel}.{n}" for n in ("adapter_1.weight", "adapter_1.norm.bias", "layer_1.weight", "layer_1.norm.weight")
    ]
    names += [f"{layer}.self_attn.{n}.{p}" for n in ("sampling_offsets", "attention_weights") for p in pair]
    names += [f"{layer}.self_attn.{n}.{p}" for n in ("value_proj", "output_proj") for p in pair]
    names += [f"{layer}.{n}.{p}" for n in ("linear1", "linear2", "norm1", "norm2") for p in pair]
    names += [f"{head}.{n}.weight" for n in ("query_feat", "query_embed", "level_embed")]
    for kind, name in (("self", "self_attn"), ("cross", "multihead_attn")):
        block = f"{head}.transformer_{kind}_attention_layers.8"
        names += [f"{block}.{name}.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")]
        names += [f"{block}.norm.{p}" for p in pair]
    names += [f"{head}.transformer_ffn_layers.8.{n}.{p}" for n in ("linear1", "linear2", "norm") for p in pair]
    names += [f"{head}.{n}.{p}" for n in ("decoder_norm", "class_embed", "mask_embed.layers.2") for p in pair]
    if backbone == "swin":
        block = "backbone.layers.2.blocks.5"
        parts = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        names += [f"{block}.{n}.{p}" for n in parts for p in pair]
        names += [f"{block}.attn.relative_position_{n}" for n in ("bias_table", "index")]
        names += [f"backbone.{n}.{p}" for n in ("patch_embed.proj", "patch_embed.norm", "norm0", "norm3") for p in pair]
        return [*names, "backbone.layers.2.downsample.reduction.weight", "backbone.layers.0.downsample.norm.bias"]
    for conv in ("stem.conv1", "res2.0.shortcut", "res2.0.conv1", "res5.2.conv3"):
        names += [f"backbone.{conv}.weight", *(f"backbone.{conv}.norm.{p}" for p in norm)]
    return names


@pytest.mark.parametrize("backbone", ["swin", "resnet"])
def test_the_official_names_are_all_known(backbone):
    """As a list: the files are pickles, which are not opened here."""
    table = facts("mask2former_resnet50")["origin"]["official"]
    names = official_names(backbone)
    assert accounts_for(table, names)
    assert not accounts_for(table, [*names, "backbone.res6.0.conv1.weight"])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"width": 48}, "width must be a multiple of 32"),
        ({"heads": 5}, "of the 5 heads"),
        ({"position": "sin"}, "position is sine"),
        ({"queries": 0}, "queries must be at least 1"),
        ({"encoder_layers": -1}, "encoder_layers must not be negative"),
        ({"norm": "sync"}, "norm is frozen or batch"),
        ({"table": (0, 5)}, "table must be"),
        ({"querys": 5}, "no 'querys'"),
    ],
)
def test_a_knob_that_cannot_be_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        Mask2FormerSpec().but(**knobs)


def test_what_is_no_image_or_no_backbone_is_refused():
    with pytest.raises(ValueError, match=r"images are \[b, 3, h, w\]"):
        small()(torch.zeros(1, 1, 64, 64))
    with pytest.raises(ValueError, match="not at 1/4"):
        small("mask2former_resnet50", backbone_knobs={**RESNET["backbone_knobs"], "out_indices": (0, 1, 2, 3)})


# What is read from the output, by hand


def halves() -> Segments:
    """Query 0 (class 1) has the left half, query 1 (class 2) the right; query 2 all of it and no object."""
    masks, logits = torch.full((1, 3, 4, 8), -12.0), torch.full((1, 3, 4), -12.0)
    masks[0, 0, :, :4], masks[0, 1, :, 4:], masks[0, 2] = 12.0, 12.0, 12.0
    logits[0, 0, 1], logits[0, 1, 2], logits[0, 2, 3] = 12.0, 12.0, 12.0
    return Segments(logits, masks)


def wanted(size: tuple[int, int]) -> Tensor:
    found = torch.full(size, 1)
    found[:, size[1] // 2 :] = 2
    return found


@pytest.mark.parametrize("size", [(16, 32), (8, 20), (40, 60)])
def test_halves_are_read_three_ways(size):
    (labels,) = semantic(halves(), [size])
    assert torch.equal(labels, wanted(size))
    (found,) = instances(halves(), [size], top=2)
    assert sorted(found.labels.tolist()) == [1, 2]
    for label, score, mask in zip(*found, strict=True):
        assert score > 0.9
        assert torch.equal(mask, wanted(size) == label)
    (both,) = panoptic(halves(), [size], thing_ids={1})
    assert torch.equal(both.ids, wanted(size).int())
    assert [(s.id, s.label, s.thing) for s in both.segments] == [(1, 1, True), (2, 2, False)]


def test_stuff_is_one_segment_and_things_are_many():
    output = halves()
    output.logits[0, 1] = output.logits[0, 0]  # both class 1
    (things,) = panoptic(output, [(16, 32)], thing_ids={1})
    (stuff,) = panoptic(output, [(16, 32)], thing_ids={0})
    assert [s.id for s in things.segments] == [1, 2]
    assert [s.id for s in stuff.segments] == [1]
    assert (stuff.ids == 1).all()


def test_a_mask_of_which_little_is_left_is_no_segment():
    """Query 2 as class 0, a little less sure: the others win every pixel of it, then all but a tenth."""
    output = halves()
    output.logits[0, 2] = torch.tensor([3.0, -9.0, -9.0, -9.0])
    (found,) = panoptic(output, [(16, 32)], thing_ids={0, 1, 2})
    assert [s.label for s in found.segments] == [1, 2]
    (none,) = panoptic(output, [(16, 32)], thing_ids={0}, threshold=1.0)
    assert none.segments == []
    assert not none.ids.any()


def test_only_things_are_instances_of_a_panoptic_model():
    (found,) = instances(halves(), [(16, 32)], top=9, thing_ids={2})
    assert set(found.labels.tolist()) == {2}
    assert (found.scores.diff() <= 0).all()
    (nothing,) = instances(halves(), [(16, 32)], thing_ids=())
    assert nothing.masks.shape == (0, 16, 32)


def test_padding_is_cut_off_before_masks_are_resized():
    """The left half alone is the picture: at the wanted size it is all class 1."""
    (labels,) = semantic(halves(), [(30, 30)], real=[(16, 16)])
    assert (labels == 1).all()
    (found,) = panoptic(halves(), [(30, 30)], thing_ids={1}, real=[(16, 16)])
    assert (found.ids == 1).all()
    with pytest.raises(ValueError, match="a size for each of 1 images"):
        semantic(halves(), [(8, 8), (8, 8)])
    with pytest.raises(ValueError, match="1 sizes and 2 real ones"):
        semantic(halves(), [(8, 8)], real=[(8, 8), (8, 8)])
