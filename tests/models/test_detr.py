"""DETR's promises: padding is invisible, queries are a set, places come from the encodings and from nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import vispe
from vispe.losses.detection import detection_loss
from vispe.models.detr import DETR, INPUT_SCALE, POSITIONS, DETROutput, DETRSpec, detections
from vispe.position import sine
from vispe.position.parameters import positional_parameters

pytest.importorskip("timm", reason="the backbones are timm's")

SMALL = {
    "backbone": "resnet18",
    "width": 32,
    "heads": 4,
    "hidden": 48,
    "encoder_depth": 2,
    "decoder_depth": 2,
    "num_queries": 9,
    "num_classes": 5,
}


def small(seed: int = 0, **knobs: object) -> DETR:
    """A small model whose queries already differ, with norms that do something."""
    torch.manual_seed(seed)
    model = vispe.build("detr_resnet50", **{**SMALL, **knobs})
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.backbone.named_buffers():
            if buffer.is_floating_point() and name.endswith(("running_var", "weight")):
                buffer.copy_(torch.rand(buffer.shape, generator=g) * 0.5 + 0.5)
            elif buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape, generator=g) * 0.2)
    return model


def batch(*sizes: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random images of these sizes, padded to the largest sides with numbers that must not be seen."""
    g = torch.Generator().manual_seed(seed)
    h, w = (max(size[side] for size in sizes) for side in (0, 1))
    images, mask = torch.full((len(sizes), 3, h, w), 7.0), torch.zeros(len(sizes), h, w, dtype=torch.bool)
    for i, (rows, columns) in enumerate(sizes):
        images[i, :, :rows, :columns] = torch.randn(3, rows, columns, generator=g)
        mask[i, :rows, :columns] = True
    return images, mask


def close(found: DETROutput, wanted: DETROutput, atol: float = 1e-4) -> None:
    for a, b in zip((found, *found.aux), (wanted, *wanted.aux), strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=atol, rtol=0)
        torch.testing.assert_close(a.boxes, b.boxes, atol=atol, rtol=0)


TWO = [
    {"labels": torch.tensor([1, 4]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.6, 0.2, 0.3]])},
    {"labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)},
]


@torch.inference_mode()
def test_what_comes_out():
    out = small()(torch.randn(2, 3, 70, 101))
    assert out.logits.shape == (2, 9, 6)
    assert out.boxes.shape == (2, 9, 4)
    assert len(out.aux) == 1
    assert not out.aux[0].aux
    assert bool(((out.boxes > 0) & (out.boxes < 1)).all())
    assert not small(auxiliary=False)(torch.randn(1, 3, 70, 101)).aux
    assert torch.pdist(out.boxes[0]).min() > 0  # every query says something of its own


@pytest.mark.parametrize("stride", [32, 16])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("at", ["every_layer", "input"])
@torch.inference_mode()
def test_an_image_alone_is_what_it_is_in_a_batch(position, at, stride):
    """Whatever the padding holds, sizes that 32 does not divide, one side or both padded."""
    model = small(position=position, position_at=at, stride=stride)
    sizes = (101, 150), (77, 93), (33, 149), (97, 31)
    images, mask = batch(*sizes)
    together = model(images, mask)
    for i, (h, w) in enumerate(sizes):
        alone = model(images[i : i + 1, :, :h, :w])
        torch.testing.assert_close(together.logits[i : i + 1], alone.logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(together.boxes[i : i + 1], alone.boxes, atol=1e-5, rtol=0)
    assert (together.logits[0] - together.logits[1]).abs().max() > 1e-2


@torch.inference_mode()
def test_a_mask_without_padding_changes_nothing():
    model, (images, mask) = small(), batch((70, 101), (70, 101))
    close(model(images, mask), model(images), 1e-5)


@pytest.mark.parametrize("backbone", ["resnet50d", "convnext_atto", "regnety_002"])
@torch.inference_mode()
def test_other_networks_of_timms_see_no_padding_either(backbone):
    model = small(backbone=backbone, frozen_stages=0, norm="batch")
    images, mask = batch((96, 128), (64, 93), (64, 93))
    together = model(images, mask)
    alone = model(images[1:2, :, :64, :93])
    torch.testing.assert_close(together.logits[1:2], alone.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(together.boxes[1:2], alone.boxes, atol=1e-5, rtol=0)


@pytest.mark.parametrize("at", ["every_layer", "input"])
@torch.inference_mode()
def test_queries_are_a_set(at):
    model, images = small(position_at=at), torch.randn(1, 3, 64, 96)
    before, order = model(images), torch.randperm(9)
    model.queries.position.copy_(model.queries.position[order].clone())
    after = model(images)
    torch.testing.assert_close(after.logits, before.logits[:, order], atol=1e-5, rtol=0)
    torch.testing.assert_close(after.boxes, before.boxes[:, order], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_places_come_from_the_encoding_and_from_nothing_else():
    """Shuffle the cells behind the backbone: with no encoding nothing changes, with one it does, and shuffled along
    with the cells it does not."""
    x, order = torch.randn(1, 12, 32), torch.randperm(12)
    for position in ("none", "sine", "learned"):
        for at in ("every_layer", "input"):
            model = small(position=position, position_at=at)
            place = model.place((3, 4), None, x.device)
            assert (place is None) == (position == "none")
            before, moved = model.decode(x, place, None), model.decode(x[:, order], place, None)
            assert ((moved - before).abs().max() < 1e-4) == (position == "none")
            along = model.decode(x[:, order], None if place is None else place[order], None)
            torch.testing.assert_close(along, before, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_every_layer_is_told_anew_and_the_input_once():
    """Counted where the places are added: q and k of each encoder layer, the keys of cross-attention, never values."""
    seen: list[tuple[str, bool, bool]] = []

    def record(name: str):
        def hook(_: nn.Module, given: tuple, named: dict) -> None:
            queries, values, *rest = given
            keys = rest[0] if rest and rest[0] is not None else queries
            seen.append((name, queries is not values, keys is not values))

        return hook

    for at, told in (("every_layer", True), ("input", False)):
        model = small(position_at=at)
        seen.clear()
        for name, part in model.named_modules():
            if name.endswith("attn"):
                part.register_forward_pre_hook(record(name), with_kwargs=True)
        model(torch.randn(1, 3, 64, 64))
        assert len(seen) == 2 + 2 * 2
        for name, queries, keys in seen:
            assert keys == told, name
            assert queries == (told or "cross" in name), name


@torch.inference_mode()
def test_the_exact_forms_of_the_encodings():
    grid, mask = (3, 5), torch.zeros(2, 3, 5, dtype=torch.bool)
    mask[0], mask[1, :2, :4] = True, True
    for name, given in (("sine", sine.sine_detr), ("sine_deformable", sine.sine_deformable)):
        model = small(position=name)
        torch.testing.assert_close(model.place(grid, mask, mask.device), given(grid, 32, mask), atol=0, rtol=0)
        torch.testing.assert_close(model.place(grid, None, mask.device), given(grid, 32), atol=0, rtol=0)
    for name in ("sine_mae", "sine_moco", "sine_timm"):
        found = small(position=name).place(grid, mask, mask.device)
        torch.testing.assert_close(found, getattr(sine, name)(grid, 32), atol=0, rtol=0)
    model = small(position="learned")
    assert model.position is not None
    assert model.position.limit == (50, 50)
    row, column = model.position.row, model.position.column
    found = model.place(grid, None, mask.device)
    assert found is not None
    torch.testing.assert_close(found[7], torch.cat((column[2], row[1])), atol=0, rtol=0)  # x first, as in the source
    torch.manual_seed(0)
    x, place = torch.randn(1, 15, 32), sine.sine_detr(grid, 32)
    once, never = small(position_at="input"), small(position_at="input", position="none")
    assert INPUT_SCALE == 0.1
    torch.testing.assert_close(once.decode(x, place, None), never.decode(x + 0.1 * place, None, None))


@torch.inference_mode()
def test_a_grid_beyond_the_learned_tables_is_refused_and_the_sines_know_any():
    images = torch.randn(1, 3, 32, 51 * 32)
    with pytest.raises(ValueError, match=r"\(1, 51\) cells.* 50 rows and 50 columns.*1600 x 1600.*stride 32"):
        small(position="learned")(images)
    with pytest.raises(ValueError, match=r"\(51, 2\).*800 x 800 pixels at stride 16"):
        small(position="learned", stride=16)(torch.randn(1, 3, 801, 32))
    assert small()(images).boxes.isfinite().all()


def test_a_padded_batch_trains_and_every_gradient_is_finite():
    model, (images, mask) = small(dropout=0.1).train(), batch((70, 101), (50, 64))
    mask[1] = False  # even an image that is padding altogether
    detection_loss(model(images, mask), TWO).total.backward()
    frozen = {"conv1", "layer1"}
    for name, parameter in model.named_parameters():
        if name.split(".")[2:3] and name.startswith("backbone.") and name.split(".")[2] in frozen:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


def test_images_without_objects_train():
    model, nothing = small().train(), [TWO[1], TWO[1]]
    loss = detection_loss(model(torch.randn(2, 3, 64, 64)), nothing)
    loss.total.backward()
    assert loss.boxes.item() == loss.giou.item() == 0
    assert bool(model.class_head.weight.grad.any())


def test_it_learns_one_picture():
    model = small(dropout=0.0, norm="batch", frozen_stages=0).train()
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = detection_loss(model(images), TWO).total
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_encodings_are_float32_under_autocast_and_boxes_too():
    """bfloat16 places would merge neighbours: the numbers stay those of the float32 run until they meet the tokens."""
    model, (images, mask) = small(), batch((70, 101), (50, 64))
    wanted = model.place((3, 4), mask[:, ::32, ::32], images.device)
    made: list[Tensor] = []
    place = model.place

    def spy(*given: object) -> Tensor | None:
        made.append(place(*given))  # type: ignore[arg-type]
        return made[-1]

    model.place = spy  # type: ignore[method-assign]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        out = model(images, mask)
    assert made[0].dtype == torch.float32
    torch.testing.assert_close(made[0], wanted, atol=0, rtol=0)
    assert out.boxes.dtype == out.logits.dtype == torch.float32
    with torch.inference_mode():
        close(out, model(images, mask), 0.1)


@pytest.mark.parametrize("position", ["sine", "learned"])
@torch.inference_mode()
def test_a_model_in_half_precision_runs(position):
    model, (images, mask) = small(position=position).bfloat16(), batch((70, 101), (50, 64))
    out = model(images.bfloat16(), mask)
    assert out.logits.dtype == torch.bfloat16
    assert out.boxes.dtype == torch.float32
    assert bool(out.boxes.isfinite().all())


@pytest.mark.slow
def test_bfloat16_training_is_stable_for_200_steps():
    model = small(dropout=0.1, norm="batch", frozen_stages=0, backbone="test_resnet").train()
    images, mask = batch((64, 96), (50, 64))
    optimiser = torch.optim.AdamW(model.parameters(), 5e-4)
    losses = []
    for _ in range(200):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(images, mask)
        loss = detection_loss(output, TWO).total
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimiser.step()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])


def test_frozen_norms_stay_and_positions_are_found():
    model = small(position="learned").train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(2, 3, 64, 64)).logits.sum().backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert set(positional_parameters(model)) == {"position.row", "position.column", "queries.position"}


def test_the_published_sizes():
    """41 million parameters with ResNet-50, 60 with ResNet-101 (the paper's table 1), frozen norms not among them."""
    with torch.device("meta"):
        for name, millions in (("detr_resnet50", 41.3), ("detr_resnet101", 60.2), ("detr_resnet50_dc5", 41.3)):
            model = DETR(vispe.models.detr.VARIANTS[name])
            count = sum(p.numel() for p in model.parameters())
            assert count / 1e6 == pytest.approx(millions, abs=0.3)
    assert DETR(DETRSpec(**{**SMALL, "stride": 16})).backbone.stride == 16


@pytest.mark.slow
def test_torch_compile_gives_the_same():
    model, (images, mask) = small(), batch((70, 101), (50, 64))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(images, mask), model(images, mask), 1e-5)
        close(compiled(images), model(images), 1e-5)
    output = compiled(images, mask)
    detection_loss(output, TWO).total.backward()
    assert model.queries.position.grad is not None


@pytest.mark.slow
def test_one_compiled_graph_serves_every_size():
    from torch._dynamo.testing import CompileCounterWithBackend

    model, counter = small(), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for sizes in (((70, 101), (50, 64)), ((96, 64), (96, 33)), ((129, 65), (64, 65)), ((160, 200), (150, 90))):
            images, mask = batch(*sizes)
            close(compiled(images, mask), model(images, mask), 1e-4)
    assert counter.frame_count == 1


def test_detections_worked_out_by_hand():
    logits = torch.tensor([[[0.0, 2.0, 0.0], [0.0, 0.0, 9.0], [3.0, 0.0, 0.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.5, 0.2], [0.1, 0.1, 0.1, 0.1], [0.25, 0.5, 0.5, 1.0]]])
    (found,) = detections(DETROutput(logits, boxes), [(100, 200)], threshold=0.5)
    assert found.labels.tolist() == [0, 1]  # the surest first; query 1 says there is no object
    assert found.scores.tolist() == pytest.approx([math.exp(3) / (math.exp(3) + 2), math.exp(2) / (math.exp(2) + 2)])
    torch.testing.assert_close(found.boxes, torch.tensor([[0.0, 0, 100, 100], [50.0, 40, 150, 60]]))
    assert len(detections(DETROutput(logits, boxes), torch.tensor([[100, 200]]))[0].scores) == 3
    with pytest.raises(ValueError, match="each of 1 images"):
        detections(DETROutput(logits, boxes), [(100, 200), (100, 200)])


def test_a_head_of_other_classes_is_fresh_and_said_so():
    state = small().state_dict()
    model = vispe.load("detr_resnet50", weights=state, origin="vispe", **{**SMALL, "num_classes": 3})
    assert model.class_head.weight.shape == (4, 32)
    assert torch.equal(model.queries.position, state["queries.position"])
    assert [said.split(":")[0] for said in model.report] == ["class_head.weight", "class_head.bias"]
    with pytest.raises(vispe.WeightsError, match=r"queries\.position"):
        vispe.load("detr_resnet50", weights=state, origin="vispe", **{**SMALL, "num_queries": 4})


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"heads": 5}, "5 heads do not divide the width 32"),
        ({"width": 30, "heads": 2}, "4 divides, got 30"),
        ({"stride": 8}, "stride must be one of 32, 16, got 8"),
        ({"position": "rope"}, "position must be one of sine, .*got 'rope'"),
        ({"position_at": "twice"}, "every_layer, input, got 'twice'"),
        ({"padding": "none"}, "zeroed, original, got 'none'"),
        ({"norm": "layer"}, "frozen, batch, got 'layer'"),
        ({"dropout": 1.0}, "got 1.0"),
        ({"backbone": "resnet49"}, "no backbone 'resnet49'"),
        ({"backbone": "convnext_atto", "frozen_stages": 9}, "convnext_atto has no 9 stages"),
        ({"backbone_knobs": {"wide": 3}}, "'wide'"),
        ({"queries": 3}, "has no 'queries'"),
    ],
)
def test_bad_knobs_are_named(knobs, named):
    with pytest.raises(ValueError, match=named):
        small(**knobs)


@pytest.mark.parametrize(
    ("images", "mask", "named"),
    [
        (torch.zeros(3, 64, 64), None, r"\[b, 3, h, w\], got \[3, 64, 64\]"),
        (torch.zeros(1, 1, 64, 64), None, r"got \[1, 1, 64, 64\]"),
        (torch.zeros(1, 3, 64, 64), torch.ones(1, 64, 64), "boolean.*got torch.float32"),
        (torch.zeros(1, 3, 64, 64), torch.ones(1, 64, 60, dtype=torch.bool), r"got \[1, 64, 60\]"),
    ],
)
def test_bad_images_are_named(images, mask, named):
    with pytest.raises(ValueError, match=named):
        small()(images, mask)
