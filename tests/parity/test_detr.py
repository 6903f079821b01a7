"""DETR against transformers' DetrForObjectDetection: its random weights through the rename table, strictly."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import vispe
from vispe.losses.detection import detection_loss
from vispe.models.detr import DETR, DETROutput, detections

transformers = pytest.importorskip("transformers", reason="transformers is the parity peer")
pytest.importorskip("timm", reason="the backbones are timm's")

KNOBS = {
    "backbone": "resnet18",
    "width": 64,
    "heads": 4,
    "hidden": 96,
    "encoder_depth": 2,
    "decoder_depth": 3,
    "num_queries": 10,
    "num_classes": 7,
    "padding": "original",
}


def randomised(model: nn.Module) -> nn.Module:
    """Weights large enough that every part matters, frozen norms that do something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "backbone" in name:
                continue
            if parameter.ndim > 1:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
            elif name.endswith("weight"):
                buffer.uniform_(0.5, 1)
            elif buffer.is_floating_point():
                buffer.normal_(std=0.2)
        model.model.query_position_embeddings.weight.normal_()  # type: ignore[union-attr, operator]
    return model


def peer(**knobs: object) -> nn.Module:
    config = transformers.DetrConfig(
        backbone="resnet18",
        use_pretrained_backbone=False,
        d_model=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_layers=2,
        decoder_layers=3,
        num_queries=10,
        num_labels=7,
        **knobs,
    )
    torch.manual_seed(0)
    return randomised(transformers.DetrForObjectDetection(config).eval())


def ours(model: nn.Module, **knobs: object) -> DETR:
    return vispe.load("detr_resnet50", weights=model.state_dict(), origin="transformers", **{**KNOBS, **knobs})


def batch(*sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random images of these sizes, padded to the largest sides."""
    g = torch.Generator().manual_seed(1)
    h, w = (max(size[side] for size in sizes) for side in (0, 1))
    images, mask = torch.zeros(len(sizes), 3, h, w), torch.zeros(len(sizes), h, w, dtype=torch.bool)
    for i, (rows, columns) in enumerate(sizes):
        images[i, :, :rows, :columns] = torch.randn(3, rows, columns, generator=g)
        mask[i, :rows, :columns] = True
    return images, mask


def compare(network: DETR, model: nn.Module, images: Tensor, mask: Tensor | None) -> DETROutput:
    found, theirs = network(images, mask), model(images, pixel_mask=mask)
    torch.testing.assert_close(found.logits, theirs.logits, atol=5e-5, rtol=0)
    torch.testing.assert_close(found.boxes, theirs.pred_boxes, atol=1e-5, rtol=0)
    assert theirs.logits.std(1).mean() > 0.01  # the queries differ
    return found


@pytest.mark.parametrize("dilation", [False, True])
@pytest.mark.parametrize("position", ["sine", "learned"])
@torch.inference_mode()
def test_with_and_without_padding(position, dilation):
    """Sizes that 32 does not divide; the padded batch with the padding left as it is, as the peer does."""
    model = peer(position_embedding_type=position, dilation=dilation)
    network = ours(model, position=position, stride=16 if dilation else 32)
    images, mask = batch((101, 150), (77, 93), (33, 149))
    compare(network, model, images, None)
    compare(network, model, images, mask)
    compare(network, model, images[:1], mask[:1])
    compare(network, model, images[1:2, :, :77, :93], None)


@pytest.mark.parametrize(("position", "atol"), [("learned", 1e-11), ("sine", 1e-6)])
@torch.inference_mode()
def test_in_float64_nothing_is_left_of_the_difference(position, atol):
    """Rounding is all that separates the two; our sines are float32 always, the peer's are float64 here."""
    model = peer(position_embedding_type=position)
    network = ours(model, position=position).double()
    images, mask = batch((101, 150), (77, 93))
    found, theirs = network(images.double(), mask), model.double()(images.double(), pixel_mask=mask)
    torch.testing.assert_close(found.logits, theirs.logits, atol=atol, rtol=0)
    torch.testing.assert_close(found.boxes, theirs.pred_boxes, atol=atol, rtol=0)


@torch.inference_mode()
def test_an_image_alone_is_what_it_is_in_a_batch_and_in_the_peer_it_is_not():
    """The one difference of ``padding="zeroed"``, the default. Alone, both are the peer's numbers; in a padded batch
    the peer's own numbers move, since its backbone sees what the padding has become."""
    model = peer()
    network = ours(model, padding="zeroed")
    sizes = (101, 150), (77, 93), (64, 160)
    images, mask = batch(*sizes)
    together, theirs = network(images, mask), model(images, pixel_mask=mask)
    moved = []
    for i, (h, w) in enumerate(sizes):
        alone = compare(network, model, images[i : i + 1, :, :h, :w], None)
        torch.testing.assert_close(together.logits[i : i + 1], alone.logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(together.boxes[i : i + 1], alone.boxes, atol=1e-5, rtol=0)
        moved.append((theirs.logits[i : i + 1] - alone.logits).abs().max().item())
    assert max(moved) > 1e-2


@pytest.mark.slow
@torch.inference_mode()
def test_the_whole_model():
    """ResNet-50, 6 + 6 layers, 100 queries, 91 classes, on an image and on a padded pair."""
    config = transformers.DetrConfig(use_pretrained_backbone=False, num_labels=91)
    torch.manual_seed(0)
    model = randomised(transformers.DetrForObjectDetection(config).eval())
    network = vispe.load("detr_resnet50", model.state_dict(), origin="transformers", padding="original")
    images, mask = batch((160, 213), (131, 160))
    for given in (None, mask):
        found, theirs = network(images, given), model(images, pixel_mask=given)
        torch.testing.assert_close(found.logits, theirs.logits, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(found.boxes, theirs.pred_boxes, atol=1e-4, rtol=0)


def targets(counts: tuple[int, ...], classes: int = 7) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(sum(counts))
    return [
        {"labels": torch.randint(classes, (n,), generator=g), "boxes": torch.rand(n, 4, generator=g) * 0.5 + 0.2}
        for n in counts
    ]


@pytest.mark.parametrize("counts", [(3, 1, 4), (2, 0, 5), (0, 0, 0), (10, 10, 10), (1, 14, 0)])
def test_the_loss_is_the_peers(counts):
    """On our own outputs, with auxiliary layers; 14 objects are more than there are queries."""
    network = ours(peer())
    images, mask = batch((64, 96), (50, 70), (64, 40))
    with torch.no_grad():
        output = network(images, mask)
    wanted = targets(counts)
    config = transformers.DetrConfig(auxiliary_loss=True, decoder_layers=3, num_labels=7)
    layers = (*output.aux, output)
    total, parts, _ = model_loss(config, layers, wanted)
    found = detection_loss(output, wanted)
    torch.testing.assert_close(found.total, total, atol=1e-5, rtol=1e-6)
    for name, mine in (("loss_ce", found.classes), ("loss_bbox", found.boxes), ("loss_giou", found.giou)):
        torch.testing.assert_close(mine, parts[name], atol=1e-5, rtol=1e-6)
        for i, layer in enumerate(output.aux):
            alone = getattr(detection_loss(layer, wanted), {"ce": "classes", "bbox": "boxes"}.get(name[5:], name[5:]))
            torch.testing.assert_close(alone, parts[f"{name}_{i}"], atol=1e-5, rtol=1e-6)
    assert found.cardinality.item() == pytest.approx(parts["cardinality_error"].item())


def model_loss(config, layers, wanted):
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    logits, boxes = torch.stack([each.logits for each in layers]), torch.stack([each.boxes for each in layers])
    labels = [{"class_labels": each["labels"], "boxes": each["boxes"]} for each in wanted]
    return ForObjectDetectionLoss(logits[-1], labels, "cpu", boxes[-1], config, logits, boxes)


def test_gradients_of_a_training_step_are_the_peers():
    model = peer(dropout=0.0)
    network = ours(model, dropout=0.0, auxiliary=False).train()
    images, mask = batch((64, 96), (50, 70))
    wanted = targets((2, 0))
    labels = [{"class_labels": each["labels"], "boxes": each["boxes"]} for each in wanted]
    theirs = model.train()(images, pixel_mask=mask, labels=labels)
    theirs.loss.backward()
    found = detection_loss(network(images, mask), wanted)
    found.total.backward()
    torch.testing.assert_close(found.total, theirs.loss, atol=1e-5, rtol=1e-5)
    inner = model.model
    pairs = (
        (network.queries.position, inner.query_position_embeddings.weight),
        (network.project.weight, inner.input_projection.weight),
        (network.backbone.body.layer4[0].conv1.weight, inner.backbone.model.layer4[0].conv1.weight),
        (network.backbone.body.layer2[0].conv1.weight, inner.backbone.model.layer2[0].conv1.weight),
        (network.encoder[0].attn.proj.weight, inner.encoder.layers[0].self_attn.o_proj.weight),
        (network.decoder[2].cross_attn.proj.bias, inner.decoder.layers[2].encoder_attn.o_proj.bias),
    )
    for mine, peers in pairs:
        scale = peers.grad.abs().max()
        torch.testing.assert_close(mine.grad / scale, peers.grad / scale, atol=1e-4, rtol=0)
    names = dict(
        network.backbone.body.named_parameters()
    )  # frozen as the original says; the peer freezes none of timm's
    assert {n for n, p in names.items() if p.requires_grad} == {
        n for n in names if n[:6] in ("layer2", "layer3", "layer4")
    }


def test_what_differs_the_peers_auxiliary_layers():
    """With ``auxiliary_loss`` transformers normalises the queries between decoder layers and once more at the end; the
    original, its published weights and we do not. Without it the numbers agree (above)."""
    model = peer(auxiliary_loss=True)
    network = ours(model)
    images, _ = batch((64, 96))
    with torch.inference_mode():
        theirs, found = model(images), network(images)
        model.config.auxiliary_loss = False
        torch.testing.assert_close(found.logits, model(images).logits, atol=5e-5, rtol=0)
    assert (found.logits - theirs.logits).abs().max() > 1e-2


@torch.inference_mode()
def test_detections_are_the_peers():
    model = peer()
    images, mask = batch((64, 96), (50, 70))
    output, sizes = ours(model)(images, mask), [(640, 961), (500, 701)]
    threshold = output.logits.softmax(-1)[..., :-1].amax(-1).median().item()
    process = transformers.DetrImageProcessor().post_process_object_detection
    theirs = process(model(images, pixel_mask=mask), threshold, sizes)
    for mine, peers in zip(detections(output, sizes, threshold), theirs, strict=True):
        order = peers["scores"].argsort(descending=True, stable=True)
        assert 0 < len(order) < 10
        assert torch.equal(mine.labels, peers["labels"][order])
        torch.testing.assert_close(mine.scores, peers["scores"][order], atol=1e-5, rtol=0)
        torch.testing.assert_close(mine.boxes, peers["boxes"][order], atol=1e-2, rtol=0)


def classic(key: str) -> str:
    """transformers 5's name -> the one in its published files."""
    key = key.replace("model.backbone.model.", "model.backbone.conv_encoder.model.").replace("o_proj", "out_proj")
    return re.sub(r"\.mlp\.(fc[12])", r".\1", key)


def facebook(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers 5's state in the names of facebookresearch, q, k and v stacked as torch's attention keeps them."""
    made: dict[str, Tensor] = {}
    for key, value in state.items():
        found = re.fullmatch(r"(.+?)(encoder_attn|self_attn)\.([qkv])_proj\.(weight|bias)", key)
        if found:
            stack = made.setdefault(f"{found[1]}{found[2]}.in_proj_{found[4]}", torch.zeros(3, *value.shape))
            stack["qkv".index(found[3])] = value
        else:
            made[key.replace("o_proj", "out_proj")] = value
    renamed = {}
    for key, value in made.items():
        if "in_proj_" in key:
            value = value.flatten(0, 1)
        decoder = key.startswith("model.decoder")
        for ours, theirs in (
            (r"^model\.backbone\.model\.", "backbone.0.body."),
            (r"^model\.(encoder|decoder)\.layers", r"transformer.\1.layers"),
            (r"^model\.decoder\.layernorm", "transformer.decoder.norm"),
            (r"^model\.input_projection", "input_proj"),
            (r"^model\.query_position_embeddings", "query_embed"),
            (r"^class_labels_classifier", "class_embed"),
            (r"^bbox_predictor", "bbox_embed"),
            (r"mlp\.fc", "linear"),
            (r"self_attn_layer_norm", "norm1"),
            (r"encoder_attn_layer_norm", "norm2"),
            (r"final_layer_norm", "norm3" if decoder else "norm2"),
            (r"encoder_attn", "multihead_attn"),
            (r"^model\.position_embedding\.row_embeddings", "backbone.1.row_embed"),
            (r"^model\.position_embedding\.column_embeddings", "backbone.1.col_embed"),
        ):
            key = re.sub(ours, theirs, key)
        renamed[key] = value
    return renamed


@pytest.mark.parametrize("position", ["sine", "learned"])
def test_the_names_of_every_origin_load_the_same(position):
    model = peer(position_embedding_type=position)
    state, knobs = model.state_dict(), {**KNOBS, "position": position}
    wanted = ours(model, position=position).state_dict()
    official, hub = facebook(state), {classic(key): value for key, value in state.items()}
    assert "transformer.decoder.layers.2.multihead_attn.in_proj_weight" in official
    assert "transformer.encoder.layers.0.self_attn.out_proj.bias" in official
    assert "backbone.0.body.layer4.0.downsample.1.running_mean" in official
    assert "model.backbone.conv_encoder.model.layer1.0.bn1.weight" in hub
    assert "model.decoder.layers.0.fc1.weight" in hub
    for given, origin in ((official, "facebook"), (hub, "transformers"), (official, None), (hub, None)):
        found = vispe.load("detr_resnet50", weights=given, origin=origin, **knobs).state_dict()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    counter = {"backbone.0.body.bn1.num_batches_tracked": torch.tensor(3)}
    vispe.load("detr_resnet50", weights={**official, **counter}, origin="facebook", **knobs)
    strange, short = {**official, "query_embed.bias": torch.zeros(3)}, dict(official)
    del short["query_embed.weight"]
    with pytest.raises(vispe.WeightsError, match=r"nothing is known of 'query_embed\.bias'"):
        vispe.load("detr_resnet50", strange, origin="facebook", **knobs)
    with pytest.raises(vispe.WeightsError, match=r"missing 'queries\.position'"):
        vispe.load("detr_resnet50", short, origin="facebook", **knobs)
