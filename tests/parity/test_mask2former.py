"""Mask2Former against transformers': random weights through the rename table, its image processor, its loss."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import vispe
from vispe.losses.masks import Points, mask_loss
from vispe.models.mask2former import Mask2Former, Segments, instances, panoptic, semantic

transformers = pytest.importorskip("transformers", reason="transformers is the parity peer")
pytest.importorskip("timm", reason="backbones are timm's")

STAGES = [f"stage{i}" for i in range(1, 5)]
KNOBS = {
    "num_classes": 7,
    "queries": 12,
    "width": 64,
    "mask_width": 32,
    "heads": 4,
    "layers": 5,
    "hidden": 80,
    "encoder_layers": 2,
    "encoder_hidden": 96,
    "drop_path": 0.0,
}
BACKBONES = {
    "mask2former_swin_tiny": {"embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8), "window_size": 4},
    "mask2former_resnet50": {"layers": (1, 2, 1, 1), "channels": (8, 16, 24, 32)},
}
SIZES = [(64, 96), (77, 101), (50, 130)]


def peer(name: str, **knobs: object) -> nn.Module:
    if name == "mask2former_swin_tiny":
        backbone = transformers.SwinConfig(
            embed_dim=24, depths=[2] * 4, num_heads=[1, 2, 4, 8], window_size=4, out_features=STAGES, drop_path_rate=0.0
        )
    else:
        backbone = transformers.ResNetConfig(hidden_sizes=[32, 64, 96, 128], depths=[1, 2, 1, 1], out_features=STAGES)
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=64,
        mask_feature_size=32,
        hidden_dim=64,
        encoder_layers=2,
        decoder_layers=6,  # one more than there are
        num_attention_heads=4,
        encoder_feedforward_dim=96,
        dim_feedforward=80,
        num_queries=12,
        num_labels=7,
        **knobs,
    )
    torch.manual_seed(0)
    model = transformers.Mask2FormerForUniversalSegmentation(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            _large(key, tensor)
    return model


def _large(key: str, tensor: Tensor) -> None:
    """Numbers large enough that every part shows in the result."""
    if key.endswith("running_var"):
        tensor.uniform_(0.5, 1.5)
    elif not tensor.is_floating_point() or "empty_weight" in key or "sampling_offsets.bias" in key:
        return
    elif tensor.ndim == 1:
        tensor.normal_(std=0.2).add_(1.0 if key.endswith("weight") else 0.0)
    elif "queries" not in key and "level_embed" not in key:
        tensor.normal_(std=(1.3 if "mask_" in key else 1.0) * tensor[0].numel() ** -0.5)


def ours(name: str, state: dict[str, Tensor], **knobs: object) -> Mask2Former:
    return vispe.load(
        name, weights=state, origin="transformers", **{**KNOBS, "backbone_knobs": BACKBONES[name], **knobs}
    )


@pytest.fixture(scope="module", params=list(BACKBONES))
def pair(request) -> tuple[nn.Module, Mask2Former]:
    model = peer(request.param)
    return model, ours(request.param, model.state_dict())


def images(b: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(b, 3, *size, generator=torch.Generator().manual_seed(b))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-5 * float(wanted.std()), rtol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
@torch.inference_mode()
def test_logits_and_masks(pair, size):
    model, network = pair
    theirs, found = model(images(2, size)), network(images(2, size))
    assert theirs.masks_queries_logits.std() > 0.3
    assert theirs.class_queries_logits.std() > 0.3
    close(found.logits, theirs.class_queries_logits)
    close(found.masks, theirs.masks_queries_logits)
    assert (found.masks - theirs.masks_queries_logits).abs().max() < 1e-4


@torch.inference_mode()
def test_every_layers_prediction(pair):
    model, network = pair
    theirs = model(images(1, (77, 101)), output_auxiliary_logits=True).auxiliary_logits
    found = network.train()(images(1, (77, 101))).aux
    network.eval()
    for own, other in zip(found, theirs, strict=True):
        close(own.logits, other["class_queries_logits"])
        close(own.masks, other["masks_queries_logits"])


@torch.inference_mode()
def test_a_pixel_mask_changes_nothing_there_and_something_here(pair):
    """The peer takes one and ignores it; here it says what is padding."""
    model, network = pair
    x = images(2, (64, 96))
    x[1, :, :, 60:] = 0
    mask = torch.ones(2, 64, 96, dtype=torch.bool)
    mask[1, :, 60:] = False
    theirs = model(x, pixel_mask=mask.long())
    assert torch.equal(theirs.masks_queries_logits, model(x).masks_queries_logits)
    close(network(x).masks, theirs.masks_queries_logits)
    cut = network(x, mask)
    close(cut.masks[:1], theirs.masks_queries_logits[:1])
    alone = model(x[1:, :, :, :60])
    close(cut.masks[1:, :, :, :15], alone.masks_queries_logits)
    close(cut.logits[1:], alone.class_queries_logits)


def targets(*counts: int, size: tuple[int, int] = (64, 96)) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        {"labels": torch.randint(0, 7, (n,), generator=g), "masks": torch.rand(n, *size, generator=g) > 0.6}
        for n in counts
    ]


@pytest.mark.parametrize("counts", [(3, 5), (0, 2), (4, 0), (0, 0)], ids=str)
def test_the_loss_with_the_same_points(counts):
    """Both draw from torch's generator, in the same order: the points are equal, so is everything after them."""
    model = peer("mask2former_swin_tiny", train_num_points=200)
    network = ours("mask2former_swin_tiny", model.state_dict()).train()
    wanted, x = targets(*counts), images(2, (64, 96))
    torch.manual_seed(5)
    theirs = model.train()(
        x, mask_labels=[t["masks"].float() for t in wanted], class_labels=[t["labels"] for t in wanted]
    ).loss
    torch.manual_seed(5)
    found = mask_loss(network(x), wanted, points=Points(200)).total
    torch.testing.assert_close(found, theirs, atol=1e-4, rtol=1e-5)
    theirs.backward()
    found.backward()
    pairs = (
        (network.decoder.queries.position, model.model.transformer_module.queries_embedder.weight),
        (network.pixel_decoder.level_embed.weight, model.model.pixel_level_module.decoder.level_embed),
        (network.decoder.level_embed.weight, model.model.transformer_module.level_embed.weight),
        (network.backbone.norms[0].weight, model.model.pixel_level_module.encoder.hidden_states_norms["stage1"].weight),
    )
    for mine, other in pairs:
        close(mine.grad, other.grad)


def test_the_hub_files_classic_names_load_the_same():
    model = peer("mask2former_swin_tiny")
    state = {_classic(key): value for key, value in model.state_dict().items() if "swin.layernorm" not in key}
    table = torch.arange(256).reshape(16, 16)
    for i in range(4):
        state[f"{ENCODER}.encoder.layers.{i}.blocks.0.attention.self.relative_position_index"] = table
    assert f"{ENCODER}.encoder.layers.0.blocks.1.attention.self.query.weight" in state
    assert f"{ENCODER}.embeddings.norm.bias" in state
    one, other = ours("mask2former_swin_tiny", state), ours("mask2former_swin_tiny", model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    found = vispe.load(
        "mask2former_swin_tiny", state, **{**KNOBS, "backbone_knobs": BACKBONES["mask2former_swin_tiny"]}
    )
    assert torch.equal(found.decoder.queries.content, one.decoder.queries.content)  # whose names they are is found


ENCODER = "model.pixel_level_module.encoder"
CLASSIC = {"q": "query", "k": "key", "v": "value"}


def _classic(key: str) -> str:
    """transformers 5's name -> the one in its published files."""
    if not key.startswith(ENCODER):
        return key
    key = key.replace(f"{ENCODER}.swin.", f"{ENCODER}.")
    key = re.sub(r"attention\.([qkv])_proj", lambda m: f"attention.self.{CLASSIC[m[1]]}", key)
    key = key.replace("attention.relative_position_bias.", "attention.self.").replace("o_proj", "output.dense")
    return key.replace("mlp.fc1", "intermediate.dense").replace("mlp.fc2", "output.dense")


def test_a_key_too_many_is_refused():
    state = peer("mask2former_swin_tiny").state_dict()
    with pytest.raises(vispe.WeightsError, match=r"nothing is known of 'model\.more'"):
        ours("mask2former_swin_tiny", {**state, "model.more": torch.zeros(1)})


# What is read from the output. The peer first brings every mask to 384 x 384, which is 4 x 96.


def predicted(seed: int, sharp: float = 3.0) -> Segments:
    g = torch.Generator().manual_seed(seed)
    blobs = torch.nn.functional.interpolate(torch.randn(2, 12, 6, 6, generator=g), size=(96, 96), mode="bicubic")
    return Segments(torch.randn(2, 12, 8, generator=g) * sharp, blobs * 3)


def processor() -> object:
    return transformers.Mask2FormerImageProcessor()


def as_theirs(output: Segments) -> SimpleNamespace:
    return SimpleNamespace(class_queries_logits=output.logits, masks_queries_logits=output.masks.clone())


@pytest.mark.parametrize("sizes", [[(384, 384)] * 2, [(100, 171), (431, 384)]], ids=["same", "other"])
def test_semantic_maps(sizes):
    output = predicted(0)
    theirs = processor().post_process_semantic_segmentation(as_theirs(output), target_sizes=sizes)
    for own, other in zip(semantic(output, sizes), theirs, strict=True):
        assert own.shape == other.shape
        assert (own == other).float().mean() > 0.9999


def test_instances():
    """The same masks, classes and scores; the peer leaves out what scores below its threshold or is empty."""
    output = predicted(1)
    theirs = processor().post_process_instance_segmentation(as_theirs(output), threshold=0.0, return_binary_maps=True)
    for own, other in zip(instances(output, [(384, 384)] * 2, top=12), theirs, strict=True):
        shown = own.masks.flatten(1).any(1)
        found = sorted(
            zip(own.labels[shown].tolist(), own.scores[shown].tolist(), own.masks[shown], strict=True), key=_key
        )
        info = [(s["label_id"], s["score"]) for s in other["segments_info"]]
        wanted = sorted(((*i, m) for i, m in zip(info, other["segmentation"], strict=True)), key=_key)
        assert [label for label, _, _ in found] == [label for label, _, _ in wanted]
        for (_, score, mask), (_, their_score, their_mask) in zip(found, wanted, strict=True):
            assert score == pytest.approx(their_score, abs=2e-6)
            assert torch.equal(mask, their_mask.bool())


def _key(item: tuple) -> tuple[int, float]:
    return item[0], round(item[1], 5)


def test_panoptic_maps_where_masks_do_not_contend():
    """On masks that tile the picture and sure classes the rules agree: ids, classes, fused stuff, what is left out.

    The stuff that is fused comes last: after it the peer counts on from its number and gives one out twice.
    """
    masks = torch.full((1, 6, 96, 96), -9.0)
    for k in range(5):
        masks[0, k, :, k * 20 : 96 if k == 4 else (k + 1) * 20] = 9.0
    masks[0, 5, :50] = 9.0  # a sixth under the others: its share is too small
    logits = torch.full((1, 6, 8), -9.0)
    for k, (label, sure) in enumerate([(0, 9.0), (5, 9.0), (0, 9.0), (2, 9.0), (5, 9.0), (3, 0.0)]):
        logits[0, k, label] = sure
    logits[0, 5, 4] = -3.0
    output = Segments(logits, masks)
    (theirs,) = processor().post_process_panoptic_segmentation(
        as_theirs(output), threshold=0.8, label_ids_to_fuse={5, 6}, target_sizes=[(384, 384)]
    )
    (own,) = panoptic(output, [(384, 384)], thing_ids={0, 1, 2, 3, 4})
    assert torch.equal(own.ids, theirs["segmentation"])
    info = [(s["id"], s["label_id"]) for s in theirs["segments_info"]]
    assert [(s.id, s.label) for s in own.segments] == info[:4]
    assert info[4:] == [info[1]]  # the peer lists a fused segment twice
    assert [s.thing for s in own.segments] == [True, False, True, True]


def original_panoptic(logits: Tensor, masks: Tensor, things: set[int]) -> tuple[Tensor, list[tuple[int, int]]]:
    """facebookresearch/Mask2Former ``panoptic_inference``, its rules one by one, on masks at the final size."""
    scores, labels = logits.softmax(-1).max(-1)
    queries = [k for k in range(len(scores)) if labels[k] != logits.shape[1] - 1 and scores[k] > 0.8]
    probability = masks.sigmoid()
    ids, found, stuff = torch.zeros(masks.shape[1:], dtype=torch.int32), [], {}
    if not queries:
        return ids, found
    winner = torch.stack([scores[k] * probability[k] for k in queries]).argmax(0)
    for place, k in enumerate(queries):
        label, won, whole = int(labels[k]), winner == place, probability[k] >= 0.5
        mask = won & whole
        if not (won.sum() > 0 and whole.sum() > 0 and mask.sum() > 0) or won.sum() / whole.sum() < 0.8:
            continue
        if label not in things and label in stuff:
            ids[mask] = stuff[label]
            continue
        found.append((len(found) + 1, label))
        ids[mask] = len(found)
        if label not in things:
            stuff[label] = len(found)
    return ids, found


@pytest.mark.parametrize("seed", range(4))
def test_panoptic_maps_are_the_originals_on_random_predictions(seed):
    output = predicted(seed, sharp=6.0)
    own = panoptic(output, [(384, 384)] * 2, thing_ids={0, 1, 2})
    big = torch.nn.functional.interpolate(output.masks, size=(384, 384), mode="bilinear", align_corners=False)
    for i, found in enumerate(own):
        ids, segments = original_panoptic(output.logits[i], big[i], {0, 1, 2})
        assert torch.equal(found.ids, ids)
        assert [(s.id, s.label) for s in found.segments] == segments
