"""Segmentation from end to end: it learns, goes on exactly, and every mistake has its sentence."""

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
from vispe.data.segmentation import SemanticSpec, open_semantic
from vispe.models.segformer import SegFormer
from vispe.segmenter import evaluate_semantic, load_segmenter
from vispe.train.module import NotFiniteError
from vispe.train.segment import (
    Segmentation,
    SegmentRecipe,
    SegmentTrain,
    open_looked_through,
    prior_tally,
    segment,
)

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["ground", "red", "green"]
LONGER = ("train.epochs=40", "train.validate_every=10", "train.lr=5e-3", "model.drop_path=0")
SEMANTIC = {
    "task": "segment",
    "model": {
        "name": "segformer_b0", "weights": "fresh", "widths": [8, 16, 16, 16], "depths": [1, 1, 1, 1],
        "heads": [1, 1, 1, 1], "reductions": [4, 2, 1, 1], "ratio": 2, "head_width": 24, "drop_path": 0.1,
    },
    "augment": {"crop": [32, 32], "scale": [0.75, 1.5]},
    "train": {
        "epochs": 3, "batch_size": 4, "lr": 2e-3, "head_lr": 2.0, "warmup_epochs": 0.5, "clip": 1.0, "ema": 0.9,
        "save_every": 2, "log_every": 1,
    },
    "run": {"accelerator": "cpu", "workers": 0},
}  # fmt: skip


def write_scenes(root: Path, train: int = 12, val: int = 5, size: tuple[int, int] = (40, 48)) -> Path:
    """Red and green rectangles on noise, their masks (255 on a border of void) and the names of the classes."""
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for folder in ("images", "masks"):
            (root / part / folder).mkdir(parents=True)
        for k in range(count):
            pixels = draw.integers(0, 90, (*size, 3), dtype=np.uint8)
            mask = np.zeros(size, np.uint8)
            for label in (1, 2):
                y, x = (int(draw.integers(0, side - 16)) for side in size)
                pixels[y : y + 16, x : x + 16, label - 1] = 230
                mask[y : y + 16, x : x + 16] = label
                pixels[y : y + 16, x : x + 16, 2 - label] = 0
            mask[:2] = 255
            Image.fromarray(pixels).save(root / part / "images" / f"{k}.png")
            Image.fromarray(mask).save(root / part / "masks" / f"{k}.png")
    (root / "classes.txt").write_text("\n".join(NAMES))
    return root


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture
def semantic(scenes):
    """``semantic("train.lr=1", ...)``: the small recipe with words on top."""

    def make(*words, root=scenes):
        return recipe.of({**SEMANTIC, "data": {"root": str(root)}}, SegmentRecipe, words)

    return make


@pytest.fixture(scope="module")
def finished(scenes, tmp_path_factory):
    """The folder of a run that learnt, and its report."""
    folder = tmp_path_factory.mktemp("segment") / "run"
    words = ["train.epochs=40", "train.validate_every=10", "train.lr=5e-3", "model.drop_path=0"]
    return folder, segment(
        recipe.of({**SEMANTIC, "data": {"root": str(scenes)}}, SegmentRecipe, words), folder, say=quiet
    )


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_it_learns_and_reports(finished, scenes):
    folder, report = finished
    files = {"run.json", "metrics.csv", "report.json", "best.safetensors", "last.safetensors", "curves.png"}
    assert {path.name for path in folder.iterdir()} - {"tensorboard"} == {*files, "examples.png"}
    assert json.loads((folder / "report.json").read_text()) == report
    assert report["miou"] > 0.8
    assert report["pixel_accuracy"] > 0.9
    assert list(report["per_class"]) == NAMES
    assert np.mean(list(report["per_class"].values())) == pytest.approx(report["miou"])
    assert report["location_prior"]["miou"] < 0.5
    assert report["location_prior"]["ratio"] == pytest.approx(report["miou"] / report["location_prior"]["miou"])
    assert report["data"] == {"train": 12, "val": 5, "classes": 3, "skipped": []}
    assert report["pixels"] == 5 * 38 * 48  # two rows are void
    rows = numbers(folder)
    assert [row["update"] for row in rows if "val_miou" in row] == [30, 60, 90, 120]
    assert rows[-1]["val_miou"] == pytest.approx(report["miou"], abs=1e-9)
    assert report["best_validation"]["miou"] == max(row["val_miou"] for row in rows if "val_miou" in row)
    for name in ("peak_memory_mib", "training_images_per_second", "parameters", "milliseconds_per_image"):
        assert report[name] > 0
    for name in ("curves.png", "examples.png"):
        with Image.open(folder / name) as image:
            image.load()
            assert min(image.size) > 300


def test_the_file_stands_alone(finished, scenes):
    folder, report = finished
    trained = load_segmenter(folder)
    assert trained.classes == tuple(NAMES)
    assert trained.short is None
    val = open_semantic(SemanticSpec(root=str(scenes)))[1]
    tally, _ = evaluate_semantic(trained, val, None, batch_size=1)
    assert tally.summary()["miou"] == pytest.approx(report["miou"], abs=1e-9)


def test_finished_means_finished(finished, semantic):
    said = []
    assert segment(semantic(*LONGER), finished[0], say=said.append) == finished[1]
    assert said == [f"this run is finished; its report is {finished[0] / 'report.json'}"]
    with pytest.raises(ValueError, match=r"holds a run of another recipe \(train.head_lr was 2.0 and is 3.0\)"):
        segment(semantic(*LONGER, "train.head_lr=3"), finished[0], say=quiet)


def test_training_starts_from_a_file(finished, semantic, tmp_path):
    """With a rate of nearly nothing it scores as it did; of other classes only the classifier is fresh."""
    words = (f"model.weights={finished[0]}", "train.epochs=1", "train.lr=1e-12", "train.ema=null", "model.drop_path=0")
    report = segment(semantic(*words), tmp_path / "run", say=quiet)
    assert report["miou"] > 0.5
    assert report["loaded"] == []
    more = semantic(*words, "data.classes=[ground, red, green, blue]")
    report = segment(more, tmp_path / "more", say=quiet)
    assert [sentence.partition(":")[0] for sentence in report["loaded"]] == [
        "head.classifier.weight", "head.classifier.bias",
    ]  # fmt: skip
    assert report["per_class"]["blue"] in (None, 0.0)
    with pytest.raises(ValueError, match="of another shape: widths"):
        segment(semantic(*words, "model.head_width=8"), tmp_path / "other", say=quiet)


def test_sizes_and_precision(semantic, tmp_path):
    """Crops that are not square nor multiples of the strides, validation at another size, bfloat16."""
    words = ("augment.crop=[27, 38]", "augment.eval_short=33", "train.precision=bf16", "train.epochs=1")
    report = segment(semantic(*words), tmp_path / "run", say=quiet)
    assert report["short"] == load_segmenter(tmp_path / "run").short == 33
    assert report["pixels"] == 5 * 38 * 48
    assert np.isfinite(numbers(tmp_path / "run")[-1]["val_loss"])


def test_a_plain_vit_is_trained_as_well(scenes, tmp_path):
    """Another network is its ``model:`` block alone; crops that its patches do not tile."""
    model = {
        "name": "segmenter_linear_tiny_patch16", "weights": "fresh", "image_size": [27, 38], "patch_size": 4,
        "width": 24, "depth": 2, "heads": 2, "hidden": 48, "drop_path": 0.1, "position": "table + axial",
    }  # fmt: skip
    words = ("augment.crop=[27, 38]", "augment.eval_short=33", "train.epochs=20", "train.validate_every=20")
    made = recipe.of({**SEMANTIC, "model": model, "data": {"root": str(scenes)}}, SegmentRecipe, words)
    report = segment(made, tmp_path / "run", say=quiet)
    assert report["miou"] > report["location_prior"]["miou"]
    trained = load_segmenter(tmp_path / "run")
    assert str(trained.model.spec.position) == "table + axial"
    val = open_semantic(SemanticSpec(root=str(scenes)))[1]
    tally, _ = evaluate_semantic(trained, val, 33, batch_size=2)
    assert tally.summary()["miou"] == pytest.approx(report["miou"], abs=1e-9)
    larger = made.model.but(weights=str(tmp_path / "run"), spec={**made.model.spec, "image_size": 40})
    again = made.but(model=larger, train=made.train.but(epochs=1, validate_every=1))
    more = segment(again, tmp_path / "more", say=quiet)
    assert [line.partition(":")[0] for line in more["loaded"]] == ["position.added.weight"]


def test_images_of_many_sizes(semantic, tmp_path):
    root = write_scenes(tmp_path / "d")
    more = write_scenes(tmp_path / "more", train=1, val=2, size=(50, 33))
    for part in ("train", "val"):
        for folder in ("images", "masks"):
            for path in (more / part / folder).iterdir():
                (root / part / folder / f"more_{path.name}").write_bytes(path.read_bytes())
    report = segment(semantic("train.epochs=1", root=root), tmp_path / "run", say=quiet)
    assert report["pixels"] == 5 * 38 * 48 + 2 * 48 * 33


def test_workers_change_nothing(semantic, tmp_path):
    segment(semantic("train.epochs=1"), tmp_path / "none", say=quiet)
    segment(semantic("train.epochs=1", "run.workers=2"), tmp_path / "two", say=quiet)
    assert numbers(tmp_path / "none") == numbers(tmp_path / "two")


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("train.accumulate=2", "train.ema=null")], ids=["plain", "accumulated"])
def test_a_run_goes_on_as_if_nothing_had_been(semantic, tmp_path, monkeypatch, extra):
    """Stopped before a checkpoint, after one, and just behind a validation: the same numbers and the same weights."""
    segment(semantic(*extra), tmp_path / "whole", say=quiet)
    for update in (1, 3, 5, 7):
        with monkeypatch.context() as patched:
            stopped_at(patched, update)
            with pytest.raises(KilledError):
                segment(semantic(*extra), tmp_path / "parts", say=quiet)
    said = []
    segment(semantic(*extra), tmp_path / "parts", say=said.append)
    assert "going on from update 6" in said
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    for name in ("last", "best"):
        one, two = (load_segmenter(tmp_path / run / f"{name}.safetensors").model for run in ("whole", "parts"))
        assert all(torch.equal(value, two.state_dict()[key]) for key, value in one.state_dict().items())


def test_stopped_between_the_last_update_and_the_report(semantic, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("vispe.train.segment.draw_examples", lambda *_: pytest.fail("stop"))
        with pytest.raises(pytest.fail.Exception):
            segment(semantic("train.epochs=1"), tmp_path / "run", say=quiet)
    assert (tmp_path / "run" / "last.ckpt").exists()
    assert segment(semantic("train.epochs=1"), tmp_path / "run", say=quiet)["updates"] == 3
    assert not (tmp_path / "run" / "last.ckpt").exists()


def test_other_classes_are_other_data(semantic, tmp_path, monkeypatch):
    root = write_scenes(tmp_path / "d")
    with monkeypatch.context() as patched:
        stopped_at(patched, 3)
        with pytest.raises(KilledError):
            segment(semantic(root=root), tmp_path / "run", say=quiet)
    (root / "classes.txt").write_text("ground\nred\nblue")
    with pytest.raises(ValueError, match="unfinished run on other images"):
        segment(semantic(root=root), tmp_path / "run", say=quiet)


def test_nan_stops_with_the_batch(semantic, tmp_path, monkeypatch):
    from safetensors import safe_open

    forward, count = SegFormer.forward, [0]

    def broken(self, images, mask=None):
        count[0] += self.training
        return forward(self, images, mask) * (float("nan") if count[0] > 2 else 1.0)

    monkeypatch.setattr(SegFormer, "forward", broken)
    with pytest.raises(NotFiniteError, match=r"the loss became nan at update 2 \(epoch 0\)"):
        segment(semantic(), tmp_path / "run", say=quiet)
    with safe_open(tmp_path / "run" / "bad_batch.safetensors", "pt") as held:
        assert held.get_tensor("images").shape == (4, 3, 32, 32)
        assert held.get_tensor("masks").shape == (4, 32, 32)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_rates_of_encoder_and_head(tmp_path):
    import vispe

    knobs = {key: value for key, value in SEMANTIC["model"].items() if key not in ("name", "weights")}
    model = vispe.build("segformer_b0", **knobs, num_classes=3)
    plan = Plan(images=8, batch_size=4, epochs=10, seed=0)
    learner = Segmentation(model, SegmentTrain(lr=1e-3, head_lr=10.0, warmup_epochs=0), plan, 3, tmp_path)
    made = learner.configure_optimizers()
    groups = made["optimizer"].param_groups
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 1e-3, 1e-2, 1e-2])
    head = {id(p) for p in model.head.parameters()}
    assert {id(p) for group in groups[2:] for p in group["params"]} == head
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    (lambdas,) = set(made["lr_scheduler"]["scheduler"].lr_lambdas)
    assert [lambdas(update) for update in (0, 5, 20)] == [1.0, 0.75, 0.0]


def test_the_prior_by_hand(tmp_path):
    """Two training masks say 0 on the left and 1 on the right; the validation mask has one pixel more of 0."""
    for part, masks in (("train", [[0, 0, 1, 1]] * 2), ("val", [[0, 0, 0, 1]])):
        for folder in ("images", "masks"):
            (tmp_path / part / folder).mkdir(parents=True)
        for k, row in enumerate(masks):
            Image.new("RGB", (4, 4)).save(tmp_path / part / "images" / f"{k}.png")
            Image.fromarray(np.array([row] * 4, np.uint8)).save(tmp_path / part / "masks" / f"{k}.png")
    train, val = open_semantic(SemanticSpec(root=str(tmp_path)))
    assert prior_tally(train, val).iou() == [2 / 3, 1 / 2]


def test_what_is_left_out_and_what_is_not_there_is_said(tmp_path):
    root = write_scenes(tmp_path / "d")
    (root / "train" / "images" / "3.png").write_text("junk")
    (root / "classes.txt").write_text("\n".join([*NAMES, "blue"]))
    said = []
    data = open_looked_through(SemanticSpec(root=str(root), corrupt="skip"), said.append)
    assert said == [
        "no training image shows blue",
        f"1 image cannot be used and is left out, first: {data.skipped[0]}",
    ]
    assert len(data.train) == 11
    assert "train/images/3.png" in data.skipped[0]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.name=vit_tiny_patch16_224",), "vit_tiny_patch16_224 is no network for semantic segmentation"),
        (("model.foo=1",), "foo"),
        (("model.num_classes=5",), "model.num_classes is 5, the data has 3 classes"),
        (("model.channels=1",), "photographs have 3 channels, the model takes 1"),
        (("augment.crop=[32, 8]",), "augment.crop is at least 13 pixels a side for this model, got (32, 8)"),
        (("train.size=32",), "the size of training images is augment.crop, not train.size"),
        (("train.head_lr=0",), "head_lr is positive, got 0"),
        (("train.schedule=step",), "train.schedule must be 'cosine' or 'linear', got 'step'"),
        (("train.layer_decay=0.5",), "layer_decay is a classifier's knob, here it is 1.0, got 0.5"),
        (("train.batch_size=64",), "12 training examples an epoch are fewer than a batch of 64"),
        (("run.strategy=fsdp", "train.ema=null"), "segmentation trains with ddp"),
        (("model.weights=/nowhere/x.safetensors",), "/nowhere/x"),
        (("data.root=/nowhere",), "there is no folder '/nowhere'"),
        (("data.classes=2",), "has 3 classes, got 2"),
        (("data.void=-1",), "holds the index 255, but 3 classes have 0 to 2"),
    ],
)  # fmt: skip
def test_mistakes_are_named(semantic, tmp_path, words, said):
    with pytest.raises((ValueError, OSError)) as caught:
        segment(semantic(*words), tmp_path / "run", say=quiet)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize("what", ["no val", "corrupt", "size", "void", "lonely"])
def test_bad_data_is_named(semantic, tmp_path, what):
    root = write_scenes(tmp_path / "d")
    if what == "no val":
        for path in (root / "val").rglob("*.png"):
            path.unlink()
    elif what == "corrupt":
        (root / "train" / "images" / "3.png").write_text("junk")
    elif what == "size":
        Image.new("L", (9, 9)).save(root / "val" / "masks" / "2.png")
    elif what == "void":
        for path in (root / "val" / "masks").iterdir():
            Image.new("L", (48, 40), 255).save(path)
    else:
        (root / "train" / "masks" / "5.png").unlink()
    said = {
        "no val": "validation", "corrupt": "train/images/3.png", "size": "val/masks/2.png' is 9 x 9 pixels",
        "void": "the masks of the 5 validation images", "lonely": "train/images/5.png' has no mask",
    }[what]  # fmt: skip
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        segment(semantic(root=root), tmp_path / "run", say=quiet)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "configs/segment").glob("seg*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_say_their_command(path):
    from vispe.train.start import SEMANTIC as KIND
    from vispe.train.start import model_overrides, variant

    text = path.read_text()
    assert f"# vispe train configs/segment/{path.name}" in text
    assert "# time: " in text
    assert "expected: " in text
    made = recipe.read(path, SegmentRecipe, ["data.root=photos"])
    assert variant(made.model).but(**model_overrides(made.model, KIND)).smallest <= min(made.augment.crop)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, scenes):
    """DDP over gloo, batch norms over both: the curve of one process; an odd number of validation images is padded."""
    import yaml

    path = tmp_path / "tiny.yaml"
    values = {**SEMANTIC, "data": {"root": str(scenes)}}
    values["model"] = {**values["model"], "drop_path": 0.0, "dropout": 0.0}
    path.write_text(yaml.safe_dump(values))
    env = {**os.environ, "VISPE_CACHE": str(tmp_path / "cache")}
    for name, words in (("one", []), ("two", ["run.devices=2", "run.strategy=ddp"])):
        command = [sys.executable, "-m", "vispe", "train", str(path), *words, "--out", str(tmp_path / name)]
        subprocess.run(command, env=env, check=True, capture_output=True)
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert len(one) == 12
    for a, b in zip(one, two, strict=True):
        # Biases before the head's batch norm have no gradient but rounding, which Adam makes steps of: training does
        # not see them, validation does a little.
        assert a == {name: pytest.approx(value, abs=0.01 if "val" in name else 1e-4) for name, value in b.items()}
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two")]
    assert reports[0]["pixels"] == reports[1]["pixels"] == 5 * 38 * 48
