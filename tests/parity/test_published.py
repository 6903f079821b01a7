"""Networks in transformers' files, random weights, as the published ones come: their labels mean what COCO's do."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import vispe_
from tests.evaluate.small_scenes import write_scenes
from tests.parity import test_detr, test_mask2former
from vispe.data.coco_categories import by_id, contiguous
from vispe.detector import published_detector

pytest.importorskip("transformers", reason="transformers is the parity peer")
pytest.importorskip("timm", reason="the backbones are timm's")
pytest.importorskip("pycocotools", reason="the extra `detect` brings it")


def saved(model, path):
    from safetensors.torch import save_file

    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, path)
    return path


def small_detr(path):
    config = test_detr.transformers.DetrConfig(
        backbone="resnet18", use_pretrained_backbone=False, d_model=64, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, encoder_layers=1, decoder_layers=1,
        num_queries=10, num_labels=91,
    )  # fmt: skip
    torch.manual_seed(0)
    return saved(test_detr.transformers.DetrForObjectDetection(config).eval(), path)


DETR = {**test_detr.KNOBS, "num_classes": 91, "encoder_depth": 1, "decoder_depth": 1}


def test_a_detr_has_raw_ids(tmp_path):
    path = small_detr(tmp_path / "detr.safetensors")
    found = published_detector("detr_resnet50", path, "transformers", **DETR)
    assert found.categories == by_id()
    assert (found.short, found.long, found.draws) == (800, 1333, False)
    assert len(found.things) == 80
    assert published_detector("detr_resnet50.transformers", path, **DETR).categories == by_id()


@pytest.mark.parametrize(
    ("tag", "count", "things"), [("", 133, 80), (".coco_panoptic", 133, 80), (".coco_instance", 80, 80)]
)
def test_a_mask2former_has_them_in_order(tmp_path, tag, count, things):
    name = "mask2former_swin_tiny"
    knobs = {**test_mask2former.KNOBS, "backbone_knobs": test_mask2former.BACKBONES[name]} | {"num_classes": count}
    model = test_mask2former.peer(name)
    state = model.state_dict()
    for key, shape in (("weight", (count + 1, 64)), ("bias", (count + 1,))):
        state[f"class_predictor.{key}"] = torch.zeros(shape)
    torch.save({key: value for key, value in state.items()}, tmp_path / "model.bin")
    found = published_detector(f"{name}{tag}", tmp_path / "model.bin", "transformers", **knobs)
    assert found.categories == contiguous(stuff=count == 133)
    assert (len(found.things), found.draws) == (things, True)


def test_mistakes_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"is one of detr_resnet50, .*mask2former_resnet50, got 'vit_tiny_patch16_224'"
    ):
        published_detector("vit_tiny_patch16_224")
    for tag, count in (("ade_semantic", 150), ("cityscapes_panoptic", 19)):
        with pytest.raises(ValueError, match=f"the {count} classes of .* are not COCO's"):
            published_detector(f"mask2former_swin_tiny.{tag}")
    with pytest.raises(ValueError, match=r"starts with http:// or https://, got 'ftp://a/b.pth'"):
        published_detector("detr_resnet50", "ftp://a/b.pth")


def test_without_a_network_one_sentence_says_so(monkeypatch, complaint, tmp_path):
    from vispe.weights import files

    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "weights").mkdir(parents=True)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(files, "TIMEOUT", (0.5, 0.5))
    said = complaint("predict", "--model", "detr_resnet50", tmp_path / "x.png")
    assert "the weights of detr_resnet50 are not on this machine and could not be fetched from https://" in said


@pytest.mark.slow
def test_the_command_from_a_file_of_transformers(tmp_path, capfd):
    """ResNet-50, 6 + 6 layers, 91 classes; the data's own few classes, ids of their own."""
    config = test_detr.transformers.DetrConfig(use_pretrained_backbone=False, num_labels=91)
    torch.manual_seed(0)
    weights = saved(test_detr.transformers.DetrForObjectDetection(config).eval(), tmp_path / "detr.safetensors")
    root = write_scenes(tmp_path / "own")
    network = ("--model", "detr_resnet50", "--weights", weights, "--origin", "transformers", "--size", "64")
    data = ("--images", root / "images", "--annotations", root / "instances.json", "--limit", 2, "--workers", 0)
    assert vispe_("evaluate", "coco-detection", *network, *data, "--out", tmp_path / "out") == 0
    assert capfd.readouterr().out.startswith("detr_resnet50, 2 images of")
    words = ("predict", root / "images/0.png", *network, "--threshold", 0, "--out", tmp_path / "p")
    assert vispe_(*words) == 0
    assert (tmp_path / "p/0.json").is_file()
