"""Detection from end to end: boxes and masks are learnt, runs go on exactly, and every mistake has its sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train.test_classify import KilledError, numbers, quiet, stopped_at
from vispe import recipe
from vispe.data.batches import Plan
from vispe.data.coco_parts import CocoSpec
from vispe.data.coco_results import write_png
from vispe.detector import load_detector, measure
from vispe.models.detr import DETR
from vispe.train.detect import Detection, DetectRecipe, DetectTrain, detect, open_looked_through
from vispe.train.module import NotFiniteError

pytest.importorskip("timm", reason="backbones are timm's")
pytest.importorskip("faster_coco_eval", reason="average precision needs faster-coco-eval")
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"backbone": "resnet18", "norm": "batch"}
DETECT = {
    "task": "detect",
    "model": {
        "name": "detr_resnet50", "weights": "fresh", **SMALL, "frozen_stages": 0, "num_queries": 8, "width": 32,
        "backbone_knobs": {"channels": [16, 16, 32, 32], "layers": [1, 1, 1, 1]}, "heads": 4, "hidden": 64,
        "encoder_depth": 1, "decoder_depth": 2, "dropout": 0.0,
    },
    "augment": {"crop": "none", "eval_short": 64, "eval_long": 96},
    "train": {
        "epochs": 3, "batch_size": 4, "lr": 1e-3, "backbone_lr": 1.0, "clip": 1.0, "ema": 0.9, "save_every": 2,
        "log_every": 1,
    },
    "run": {"accelerator": "cpu", "workers": 0},
}  # fmt: skip
MASKS = {
    **DETECT,
    "model": {
        "name": "mask2former_resnet50", "weights": "fresh", **SMALL, "queries": 8, "width": 32, "mask_width": 32,
        "backbone_knobs": {"channels": [32, 32, 32, 32], "layers": [1, 1, 1, 1], "norm_layer": "groupnorm"},
        "heads": 4, "hidden": 64, "encoder_hidden": 64, "encoder_layers": 1, "layers": 3,
    },
    "train": {**DETECT["train"], "points": 256},
}  # fmt: skip


def write_coco(root: Path, train: int = 8, val: int = 3, size: tuple[int, int] = (48, 64)) -> Path:
    """A red and a green square on dark noise, one image without; instances and, with a ground, a panoptic file."""
    draw = np.random.default_rng(0)
    table = [{"id": 5, "name": "red", "isthing": 1}, {"id": 9, "name": "green", "isthing": 1}]
    (root / "annotations").mkdir(parents=True)
    for part, count in (("train2017", train), ("val2017", val)):
        (root / part).mkdir()
        (root / "annotations" / f"panoptic_{part}").mkdir()
        images, objects, segments = [], [], []
        for k in range(count):
            pixels = draw.integers(0, 60, (*size, 3), dtype=np.uint8)
            ids = np.full(size, 7)
            info = []
            for label in (0, 1) if k else ():
                y, x = int(draw.integers(0, size[0] - 20)), int(draw.integers(0, 12)) + 32 * label
                pixels[y : y + 20, x : x + 20, label] = 240
                ids[y : y + 20, x : x + 20] = label + 1
                one = {"category_id": table[label]["id"], "bbox": [x, y, 20, 20], "area": 400, "iscrowd": 0}
                corners = [x, y, x + 20, y, x + 20, y + 20, x, y + 20]
                objects.append({"id": len(objects) + 1, "image_id": k + 1, "segmentation": [corners], **one})
                info.append({"id": label + 1, **one})
            ground = int((ids == 7).sum())
            info.append({"id": 7, "category_id": 100, "bbox": [0, 0, *size[::-1]], "area": ground, "iscrowd": 0})
            Image.fromarray(pixels).save(root / part / f"{k}.png")
            write_png(root / "annotations" / f"panoptic_{part}" / f"{k}.png", ids)
            images.append({"id": k + 1, "file_name": f"{k}.png", "height": size[0], "width": size[1]})
            segments.append({"image_id": k + 1, "file_name": f"{k}.png", "segments_info": info})
        whole = [*table, {"id": 100, "name": "ground", "isthing": 0}]
        for kind, annotations, categories in (("instances", objects, table), ("panoptic", segments, whole)):
            content = {"images": images, "annotations": annotations, "categories": categories}
            (root / "annotations" / f"{kind}_{part}.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"))


@pytest.fixture
def given(coco):
    """``given("train.lr=1", ...)``: the small recipe with words on top; ``of``: the one it is made of."""

    def make(*words, root=coco, of=DETECT, kind="instances"):
        parts = {f"{part}": f"annotations/{kind}_{part}2017.json" for part in ("train", "val")}
        return recipe.of({**of, "data": {"root": str(root), **parts}}, DetectRecipe, words)

    return make


# --- a whole run ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_boxes_are_learnt_and_reported(given, tmp_path):
    words = ("train.epochs=150", "train.validate_every=50", "train.measure_train=true", "augment.flip=0")
    folder = tmp_path / "run"
    report = detect(given(*words, "train.schedule=cosine", "train.lr=2e-3"), folder, say=quiet)
    files = {"run.json", "metrics.csv", "report.json", "best.safetensors", "last.safetensors", "curves.png"}
    assert {path.name for path in folder.iterdir()} - {"tensorboard"} == {*files, "examples.png"}
    assert json.loads((folder / "report.json").read_text()) == report
    assert report["results"]["train"]["boxes"]["AP50"] > 0.9
    assert report["results"]["val"]["boxes"]["images"] == 3
    assert report["data"] == {"train": 8, "val": 3, "classes": 2, "skipped": []}
    rows = numbers(folder)
    assert [row["update"] for row in rows if "val_AP" in row] == [100, 200, 300]
    assert rows[-1]["val_AP"] == pytest.approx(report["results"]["val"]["boxes"]["AP"], abs=1e-9)
    trained = load_detector(folder)
    assert [tuple(c) for c in trained.categories] == [(5, "red", True), (9, "green", True)]
    assert (trained.short, trained.long) == (64, 96)
    data = open_looked_through(CocoSpec(root=given().data.root), quiet).val
    told = measure(trained, data, batch_size=1)[0].summary()["boxes"]
    assert told["AP"] == pytest.approx(report["results"]["val"]["boxes"]["AP"], abs=1e-9)
    for name in ("curves.png", "examples.png"):
        with Image.open(folder / name) as image:
            image.load()
            assert min(image.size) > 300


@pytest.mark.slow
def test_panoptic_masks_are_learnt(given, tmp_path):
    """200 updates in bfloat16."""
    words = ("train.epochs=100", "train.validate_every=100", "train.measure_train=true", "augment.flip=0")
    knobs = ("train.schedule=cosine", "train.lr=3e-3", "train.precision=bf16")
    report = detect(given(*words, *knobs, of=MASKS, kind="panoptic"), tmp_path / "run", say=quiet)
    assert report["updates"] == 200
    assert all(np.isfinite(row["loss"]) for row in numbers(tmp_path / "run") if "loss" in row)
    assert report["results"]["train"]["panoptic"]["PQ"] > 0.6
    assert report["results"]["val"]["panoptic"]["classes"] == 3
    assert "val_PQ" in numbers(tmp_path / "run")[-1]


def test_instance_masks_and_jitter_and_bf16(given, tmp_path):
    """Images of all sizes padded to one canvas, of which a batch norm sees one pass; boxes and masks are scored."""
    words = ("augment.crop=jitter", "augment.size=[64, 72]", "augment.scale=[0.3, 1.5]", "augment.distort=0.5")
    knobs = ("train.epochs=1", "train.precision=bf16", "train.see_padding=true", "train.no_object=0.2")
    report = detect(given(*words, *knobs, of=MASKS), tmp_path / "run", say=quiet)
    assert set(report["results"]["val"]) >= {"boxes", "masks"}
    assert np.isfinite(numbers(tmp_path / "run")[-1]["val_loss"])


def test_detr_crops(given, tmp_path):
    words = ("augment.crop=detr", "augment.short=[48, 64]", "augment.long=96", "augment.crop_short=[60]")
    detect(given(*words, "augment.crop_sides=[20, 40]", "train.epochs=1"), tmp_path / "run", say=quiet)
    assert np.isfinite(numbers(tmp_path / "run")[-1]["val_loss"])


def test_training_starts_from_a_file(given, coco, tmp_path):
    """Weights of a run; for other classes the class head is fresh."""
    detect(given("train.epochs=1"), tmp_path / "one", say=quiet)
    words = (f"model.weights={tmp_path / 'one'}", "train.epochs=1", "train.lr=1e-12", "train.ema=null")
    report = detect(given(*words), tmp_path / "two", say=quiet)
    assert report["loaded"] == []
    one, two = (load_detector(tmp_path / run).model.class_head.weight for run in ("one", "two"))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    report = detect(given(*words, kind="panoptic"), tmp_path / "more", say=quiet)
    assert [sentence.partition(":")[0] for sentence in report["loaded"]] == ["class_head.weight", "class_head.bias"]
    with pytest.raises(ValueError, match=r"of another shape: .*backbone resnet18"):
        detect(given(*words, "model.width=64"), tmp_path / "other", say=quiet)


def test_a_backbone_starts_from_a_classifier(given, tmp_path):
    """A classifier's file gives the backbone its weights, and a rate of nothing keeps them; another's is refused."""
    import timm

    state = timm.create_model("resnet18", **DETECT["model"]["backbone_knobs"]).state_dict()
    torch.save(state, tmp_path / "classifier.pth")
    words = (f"train.backbone_weights={tmp_path / 'classifier.pth'}", "train.epochs=1", "train.ema=null")
    report = detect(given(*words, "train.lr=1e-12"), tmp_path / "run", say=quiet)
    assert report["loaded"] == [f"backbone resnet18: the weights of {tmp_path / 'classifier.pth'}"]
    own = load_detector(tmp_path / "run").model.backbone.body.state_dict()
    torch.testing.assert_close(own["layer1.0.conv1.weight"], state["layer1.0.conv1.weight"], atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="weights do not fit resnet18: missing"):
        detect(given(*words, of=MASKS), tmp_path / "other", say=quiet)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [DETECT, MASKS], ids=["boxes", "masks"])
def test_a_run_goes_on_as_if_nothing_had_been(given, tmp_path, monkeypatch, of):
    """Stopped after a checkpoint and just behind a validation: the same numbers and the same weights."""
    detect(given(of=of), tmp_path / "whole", say=quiet)
    for update in (3, 5):
        with monkeypatch.context() as patched:
            stopped_at(patched, update)
            with pytest.raises(KilledError):
                detect(given(of=of), tmp_path / "parts", say=quiet)
    said = []
    detect(given(of=of), tmp_path / "parts", say=said.append)
    assert "going on from update 4" in said
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    one, two = (load_detector(tmp_path / run).model.state_dict() for run in ("whole", "parts"))
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_other_objects_are_other_data(given, tmp_path, monkeypatch):
    root = write_coco(tmp_path / "d")
    with monkeypatch.context() as patched:
        stopped_at(patched, 3)
        with pytest.raises(KilledError):
            detect(given(root=root), tmp_path / "run", say=quiet)
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="unfinished run on other images"):
        detect(given(root=root), tmp_path / "run", say=quiet)


def test_nan_stops_with_the_batch(given, tmp_path, monkeypatch):
    from safetensors import safe_open

    forward, count = DETR.forward, [0]

    def broken(self, images, mask=None):
        count[0] += self.training
        made = forward(self, images, mask)
        return made._replace(logits=made.logits * (float("nan") if count[0] > 1 else 1.0))

    monkeypatch.setattr(DETR, "forward", broken)
    with pytest.raises(NotFiniteError, match=r"the loss became nan at update 1 \(epoch 0\)"):
        detect(given(), tmp_path / "run", say=quiet)
    with safe_open(tmp_path / "run" / "bad_batch.safetensors", "pt") as held:
        assert held.get_tensor("images").shape == (4, 3, 64, 85)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_rates_of_backbone_and_transformer(given, tmp_path):
    import vispe

    knobs = {key: value for key, value in DETECT["model"].items() if key not in ("name", "weights")}
    model = vispe.build("detr_resnet50", **knobs, num_classes=2)
    from vispe.detector import Detector

    data = open_looked_through(given().data, quiet)
    detector = Detector(model, "detr_resnet50", data.train.categories, 64, 96, {})
    spec = DetectTrain(lr=1e-3, backbone_lr=0.1, drops=(0.5, 0.75))
    plan = Plan(images=8, batch_size=4, epochs=10, seed=0)
    made = Detection(model, spec, plan, detector, data.val, tmp_path).configure_optimizers()
    groups = made["optimizer"].param_groups
    assert [group["lr"] for group in groups] == pytest.approx([1e-4, 1e-4, 1e-3, 1e-3])
    backbone = {id(p) for p in model.backbone.parameters()}
    assert {id(p) for group in groups[:2] for p in group["params"]} == backbone
    (lambdas,) = set(made["lr_scheduler"]["scheduler"].lr_lambdas)
    assert [lambdas(update) for update in (0, 9, 10, 14, 15, 19)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.name=vit_tiny_patch16_224",), "vit_tiny_patch16_224 is no DETR and no Mask2Former"),
        (("model.foo=1",), "foo"),
        (("model.num_classes=5",), "model.num_classes is 5, the data has 2 classes"),
        (("train.size=32",), "the sizes of training images are augment's, not train.size"),
        (("train.backbone_lr=0",), "backbone_lr lies in (0, 1], got 0"),
        (("train.schedule=poly",), "train.schedule must be"),
        (("train.drops=[1.5]",), "drops are parts of the run between 0 and 1, got [1.5]"),
        (("train.points=0",), "no_object is not negative, points at least 1, got 0.1 and 0"),
        (("train.layer_decay=0.5",), "are a classifier's knobs"),
        (("train.batch_size=64",), "8 training examples an epoch are fewer than a batch of 64"),
        (("run.strategy=fsdp", "train.ema=null"), "detection trains with ddp"),
        (("model.weights=/nowhere/x.safetensors",), "/nowhere/x"),
        (("data.root=/nowhere",), "/nowhere"),
        (("data.val=annotations/panoptic_val2017.json",), "has 3 classes"),
    ],
)
def test_mistakes_are_named(given, tmp_path, words, said):
    with pytest.raises((ValueError, OSError)) as caught:
        detect(given(*words), tmp_path / "run", say=quiet)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_batch_norms_of_many_passes_are_refused(given, tmp_path):
    words = ("run.devices=2", "run.strategy=ddp", "model.norm=batch")
    with pytest.raises(ValueError, match=r"need train\.see_padding=true"):
        detect(given(*words, of=MASKS), tmp_path / "run", say=quiet)


@pytest.mark.parametrize("what", ["corrupt", "size", "nothing", "category"])
def test_bad_data_is_named(given, tmp_path, what):
    root = write_coco(tmp_path / "d")
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    if what == "corrupt":
        (root / "train2017" / "3.png").write_text("junk")
    elif what == "size":
        Image.new("RGB", (9, 9)).save(root / "val2017" / "2.png")
    elif what == "nothing":
        content["annotations"] = []
    else:
        content["annotations"][0]["category_id"] = 77
    path.write_text(json.dumps(content))
    said = {
        "corrupt": "train2017/3.png", "size": "val2017/2.png: it is 9 x 9 pixels",
        "nothing": "the 8 training images of", "category": "there is no category 77",
    }[what]  # fmt: skip
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        detect(given(root=root), tmp_path / "run", say=quiet)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_masks_need_outlines(given, tmp_path):
    root = write_coco(tmp_path / "d")
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    del content["annotations"][3]["segmentation"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"instances_train2017\.json: 1 objects have no outline"):
        detect(given(root=root, of=MASKS), tmp_path / "run", say=quiet)
    assert not (tmp_path / "run").exists()


def test_annotations_that_are_left_out_are_said_once(tmp_path):
    root = write_coco(tmp_path / "d")
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["bbox"] = [0, 0, 0, 0]
    path.write_text(json.dumps(content))
    said = []
    data = open_looked_through(CocoSpec(root=str(root), corrupt="skip", val=None), said.append)
    assert len(said) == len(data.skipped) == 1
    assert "1 of its entries are left out, first: " in said[0]
    assert "zero area" in said[0]


def test_what_is_left_out_is_said(tmp_path):
    root = write_coco(tmp_path / "d")
    (root / "train2017" / "3.png").write_text("junk")
    said = []
    data = open_looked_through(CocoSpec(root=str(root), corrupt="skip"), said.append)
    assert said == [f"1 image cannot be used and is left out, first: {data.skipped[0]}"]
    assert len(data.train) == 7
    assert "3.png" in data.skipped[0]


# --- the command ------------------------------------------------------------------------------------------------------

SHIPPED = [*(ROOT / "configs/detect").glob("*.yaml"), *(ROOT / "configs/segment").glob("mask2former*.yaml")]


@pytest.mark.parametrize("path", sorted(SHIPPED), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_say_their_command(path):
    from vispe.detector import SPECS
    from vispe.train.start import model_overrides

    text = path.read_text()
    assert f"# vispe train configs/{path.parent.name}/{path.name}" in text
    assert "# time: " in text
    assert "expected: " in text
    made = recipe.read(path, DetectRecipe, ["data.root=photos"])
    model_overrides(made.model, SPECS)


@pytest.mark.slow
def test_two_processes_see_what_one_sees(tmp_path, coco):
    """DDP over gloo: objects found by both are scored together; class weights are each process's own."""
    import yaml

    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**DETECT, "data": {"root": str(coco)}}))
    env = {**os.environ, "VISPE_CACHE": str(tmp_path / "cache")}
    for name, words in (("one", []), ("two", ["run.devices=2", "run.strategy=ddp"])):
        command = [sys.executable, "-m", "vispe", "train", str(path), *words, "train.epochs=1", "--out"]
        subprocess.run([*command, str(tmp_path / name)], env=env, check=True, capture_output=True)
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert len(one) == len(two)
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=0.02)
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two")]
    assert reports[0]["results"]["val"]["boxes"]["images"] == reports[1]["results"]["val"]["boxes"]["images"] == 3
