"""Exported files in onnxruntime: a matcher for any number of pairs and keypoints, others for images of any size."""

from __future__ import annotations

import pytest
import torch

import vispe


@pytest.mark.slow
@torch.inference_mode()
def test_onnx_file_gives_the_same_matches_for_any_count(tmp_path, features, capfd):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the exported file")
    pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
    from vispe.export import export_onnx

    path = tmp_path / "lightglue.onnx"
    export_onnx("lightglue_aliked", path)
    assert capfd.readouterr() == ("", "")
    session = runtime.InferenceSession(str(path))
    named = shapes(session)
    assert named["keypoints0"] == ["batch", "keypoints0", 2]
    assert named["descriptors1"] == ["batch", "keypoints1", 128]
    assert named["matches1"] == named["scores1"] == ["batch", "keypoints1"]
    network = vispe.load("lightglue_aliked")
    whole = features("chelsea", 512)
    for b, m, n in ((1, 512, 400), (2, 100, 300), (1, 0, 50), (1, 50, 0), (1, 1, 20), (1, 2, 2), (3, 0, 0)):
        pair = [
            p._replace(
                keypoints=p.keypoints[:, :k].expand(b, -1, -1), descriptors=p.descriptors[:, :k].expand(b, -1, -1)
            )
            for p, k in zip(whole, (m, n), strict=True)
        ]
        feed = {}
        for k, p in enumerate(pair):
            feed |= {f"keypoints{k}": p.keypoints.numpy(), f"descriptors{k}": p.descriptors.numpy()}
            feed |= {f"size{k}": torch.tensor(p.size, dtype=torch.float32).expand(b, 2).numpy()}
        matches0, matches1, scores0, _ = (torch.from_numpy(array) for array in session.run(None, feed))
        wanted = network.match(*pair)
        assert torch.equal(matches0, wanted.matches0)
        assert torch.equal(matches1, wanted.matches1)
        torch.testing.assert_close(scores0, wanted.scores0, atol=2e-4, rtol=0)


@pytest.fixture
def runs(tmp_path):
    """Trained files, as small as they go, under the names "detr", "segformer" and "mask2former"."""
    pytest.importorskip("timm", reason="backbones are timm's")
    from vispe.data.coco import Category
    from vispe.detector import Detector, save_detector
    from vispe.segmenter import Segmenter, save_segmenter

    torch.manual_seed(0)
    small = {"backbone": "resnet18", "backbone_knobs": {"channels": (16, 16, 32, 32)}, "num_classes": 3, "heads": 2}
    table = (Category(5, "red"), Category(9, "green"), Category(100, "blue"))
    sizes = {"width": 32, "hidden": 32, "encoder_depth": 1, "decoder_depth": 2, "num_queries": 7}
    detr = vispe.build("detr_resnet50", **small, **sizes)
    sizes = {"width": 32, "hidden": 32, "encoder_hidden": 32, "layers": 1, "queries": 7}
    mask2former = vispe.build("mask2former_resnet50", **small, **sizes)
    for name, model in (("detr_resnet50", detr), ("mask2former_resnet50", mask2former)):
        path = tmp_path / f"{name.partition('_')[0]}.safetensors"
        save_detector(path, Detector(model.eval(), name, table, 64, 96, {}))
    knobs = {"widths": (8, 16, 16, 16), "depths": (1,) * 4, "heads": (1,) * 4, "num_classes": 3, "head_width": 24}
    segformer = vispe.build("segformer_b0", **knobs).eval()
    path = tmp_path / "segformer.safetensors"
    save_segmenter(path, Segmenter(segformer, "segformer_b0", ("red", "green", "blue"), None, {}))
    return tmp_path


def session(path):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the exported file")
    return runtime.InferenceSession(str(path))


def shapes(running):
    """What the file calls the axes of its inputs and outputs."""
    return {one.name: one.shape for one in (*running.get_inputs(), *running.get_outputs())}


@pytest.mark.slow
@torch.inference_mode()
def test_a_detr_for_images_of_any_size(runs):
    pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
    import json

    from vispe.data.scenes import normalised, padded
    from vispe.detector import load_detector
    from vispe.export import export_onnx

    export_onnx(str(runs / "detr.safetensors"), runs / "detr.onnx")
    running = session(runs / "detr.onnx")
    assert shapes(running) == {
        "images": ["batch", 3, "height", "width"], "mask": ["batch", "height", "width"],
        "logits": ["batch", 7, 4], "boxes": ["batch", 7, 4],
    }  # fmt: skip
    told = running.get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == ["red", "green", "blue"]
    assert json.loads(told["model"]) == "detr_resnet50"
    model = load_detector(runs / "detr.safetensors").model
    draw = torch.Generator().manual_seed(0)
    for sizes in (((70, 101), (50, 64)), ((128, 96),), ((65, 129), (33, 40), (64, 129)), ((161, 200), (150, 90))):
        items = [(torch.randint(0, 256, (3, h, w), dtype=torch.uint8, generator=draw), {}) for h, w in sizes]
        images, mask, _ = padded(items)
        logits, boxes = running.run(None, {"images": images.float().div(255).numpy(), "mask": mask.numpy()})
        wanted = model(normalised(images, mask, model.spec.mean, model.spec.std), mask)
        torch.testing.assert_close(torch.from_numpy(logits), wanted.logits, atol=2e-4, rtol=0)
        torch.testing.assert_close(torch.from_numpy(boxes), wanted.boxes, atol=1e-5, rtol=0)


@pytest.mark.slow
@torch.inference_mode()
def test_a_segformer_for_images_of_any_size(runs):
    pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
    from vispe.classifier import normalised
    from vispe.export import export_onnx
    from vispe.segmenter import load_segmenter

    export_onnx(str(runs / "segformer.safetensors"), runs / "segformer.onnx")
    running = session(runs / "segformer.onnx")
    assert shapes(running) == {
        "images": ["batch", 3, "height", "width"], "logits": ["batch", 3, "rows", "columns"]
    }  # fmt: skip
    model = load_segmenter(runs / "segformer.safetensors").model
    draw = torch.Generator().manual_seed(0)
    for b, size in ((1, (64, 64)), (2, (96, 128)), (3, (100, 70)), (1, (161, 33))):
        images = torch.randint(0, 256, (b, 3, *size), dtype=torch.uint8, generator=draw)
        (logits,) = running.run(None, {"images": images.float().div(255).numpy()})
        wanted = model(normalised(images, model.spec))
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aliked_n16", "'aliked_n16' cannot be exported; what can: lightglue_aliked"),
        ("nowhere.safetensors", "'nowhere.safetensors' is no model of the zoo and no file"),
        ("mask2former.safetensors", "is a mask2former_resnet50; a DETR, a SegFormer or a LightGlue can be exported"),
    ],
)
def test_what_cannot_be_exported_is_named(runs, monkeypatch, name, said):
    pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
    from vispe.export import export_onnx

    monkeypatch.chdir(runs)
    before = sorted(runs.iterdir())
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        export_onnx(name, runs / "x.onnx")
    assert said in str(caught.value)
    assert sorted(runs.iterdir()) == before


def test_a_file_has_its_own_weights(runs):
    pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
    from vispe.export import export_onnx

    with pytest.raises(ValueError, match="has its own weights; give a model's name to export others"):
        export_onnx(str(runs / "detr.safetensors"), runs / "x.onnx", weights="other.pth")


def test_mistakes_are_named_before_the_model_is_loaded(tmp_path):
    pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
    from vispe.export import export_onnx

    with pytest.raises(OSError, match=r"cannot write '.*x\.onnx': there is no folder"):
        export_onnx("no model at all", tmp_path / "no" / "x.onnx")
