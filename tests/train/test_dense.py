"""LoFTR's training from end to end: it learns, goes on exactly, its file matches images, mistakes have a sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vispe
from tests.data.test_megadepth import write_posed
from tests.train.test_classify import KilledError, numbers, quiet, stopped_at
from tests.train.test_image_pairs import write_photos
from vispe import recipe
from vispe.data.megadepth import read_depth
from vispe.models.loftr import LoFTR
from vispe.train.dense import DenseRecipe, load_dense, match_dense, measure, opened_pairs
from vispe.train.module import NotFiniteError

ROOT = Path(__file__).resolve().parents[2]
DENSE = {
    "task": "match_dense",
    "model": {
        "name": "loftr_outdoor", "weights": "fresh", "stem": 8, "widths": [8, 12, 16], "depth": 2, "num_heads": 4,
        "border": 0, "position": "sine_loftr", "threshold": 0.05,
    },
    "data": {
        "val_part": 0.3, "val_pairs": 5,
        "views": {
            "size": [64, 80], "views": 4, "angle": 5.0, "scale": [0.9, 1.0], "perspective": 0.05, "look": 0.0,
            "overlap": 0.5,
        },
    },
    "train": {
        "epochs": 3, "batch_size": 4, "lr": 3e-3, "warmup_epochs": 0.5, "save_every": 1, "log_every": 1,
        "coarse": "likelihood", "ema": 0.9,
    },
    "run": {"accelerator": "cpu", "workers": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos") / "six", 6, (96, 72))


@pytest.fixture
def given(photos):
    return lambda *words: recipe.of(DENSE, DenseRecipe, (f"data.roots=[{photos}]", *words))


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "run"
    words = (f"data.roots=[{photos}]", "train.epochs=24", "train.validate_every=24", "train.ema=null")
    return folder, match_dense(recipe.of(DENSE, DenseRecipe, words), folder, say=quiet)


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_it_learns_and_says_what_it_is_worth(finished):
    folder, report = finished
    files = {"run.json", "metrics.csv", "report.json", "best.safetensors", "last.safetensors", "curves.png"}
    assert {p.name for p in folder.iterdir()} - {"tensorboard"} == {*files, "examples.png"}
    assert json.loads((folder / "report.json").read_text()) == report
    losses = [row["loss"] for row in numbers(folder) if "loss" in row]
    assert np.mean(losses[-8:]) < 0.6 * np.mean(losses[:8])
    told, rows = report["results"]["val"], [row for row in numbers(folder) if "val_loss" in row]
    assert rows[-1]["val_precision"] == pytest.approx(told["precision"], abs=1e-6)
    assert rows[-1]["val_recall"] == pytest.approx(told["recall"], abs=1e-6)
    assert told["matches"] > 2
    assert told["precision"] > 0.3
    assert report["data"] == {"train": 4, "val": 2, "skipped": []}
    for name in ("curves.png", "examples.png"):
        with Image.open(folder / name) as image:
            image.load()


def test_the_file_is_a_matcher(finished, given, photos):
    """Through ``vispe.load``, its own shape read from the file, and as weights of ``--matcher loftr``; a run's folder
    stands for its last weights."""
    folder, report = finished
    trained = load_dense(folder)
    assert trained.model.spec.widths == (8, 12, 16)
    loaded = vispe.load("loftr_outdoor", folder / "last.safetensors")
    assert all(torch.equal(v, trained.model.state_dict()[k]) for k, v in loaded.state_dict().items())
    assert measure(trained.model, opened_pairs(given(), quiet).val, 4, 0) == report["results"]["val"]
    with Image.open(photos / "0.png") as image:
        picture = np.asarray(image)
    found = [
        vispe.Matcher(matcher="loftr", weights=weights, threshold=0.0)(picture, picture, geometry="none")
        for weights in (folder / "last.safetensors", folder)
    ]
    assert len(found[0]) > 10
    assert np.array_equal(found[0].keypoints1, found[1].keypoints1)


def test_a_start_from_a_file_keeps_what_it_knew(finished, given, tmp_path):
    words = (f"model.weights={finished[0] / 'last.safetensors'}", "train.epochs=1", "train.lr=1e-12", "train.ema=0")
    report = match_dense(given(*words), tmp_path / "run", say=quiet)
    assert report["results"]["val"]["precision"] == pytest.approx(finished[1]["results"]["val"]["precision"], abs=0.2)
    assert report["loaded"] == [f"weights: {finished[0] / 'last.safetensors'}"]


@pytest.mark.parametrize("words", [("model.matching=optimal_transport", "train.coarse=focal"), ("model.fine_depth=0",)])
def test_other_kinds_learn(given, tmp_path, words):
    match_dense(given("train.epochs=16", "train.validate_every=16", *words), tmp_path / "run", say=quiet)
    losses = [row["loss"] for row in numbers(tmp_path / "run") if "loss" in row]
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])


def test_images_with_poses_and_depths(tmp_path):
    """In MegaDepth's layout, padded to a square: the loss falls, the report tells the pose's error."""
    root = write_posed(tmp_path / "megadepth")
    poses = {"root": str(root), "pairs": 8, "val_pairs": 3, "resize": 96}
    made = recipe.of({**DENSE, "poses": poses}, DenseRecipe, ["train.epochs=8", "train.validate_every=8"])
    report = match_dense(made, tmp_path / "run", say=quiet)
    assert report["data"]["train"] == 4
    assert len(report["results"]["val"]["auc"]) == 3
    losses = [row["loss"] for row in numbers(tmp_path / "run") if "loss" in row]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    for path in (root / "depths" / "0001").iterdir():
        path.write_text("junk")
    read_depth.cache_clear()
    with pytest.raises(ValueError, match="is no depth map"):
        match_dense(made, tmp_path / "other", say=quiet)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_as_if_nothing_had_been(given, tmp_path, monkeypatch):
    """Also where the file that it started from is gone."""
    match_dense(given("train.epochs=1"), tmp_path / "start", say=quiet)
    os.rename(tmp_path / "start" / "last.safetensors", tmp_path / "start.safetensors")
    made = given(f"model.weights={tmp_path / 'start.safetensors'}")
    match_dense(made, tmp_path / "whole", say=quiet)
    for update in (1, 3, 5):
        with monkeypatch.context() as patched:
            stopped_at(patched, update)
            with pytest.raises(KilledError):
                match_dense(made, tmp_path / "parts", say=quiet)
        if update == 3:
            (tmp_path / "start.safetensors").unlink()
    match_dense(made, tmp_path / "parts", say=quiet)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    one, two = (load_dense(tmp_path / run).model.state_dict() for run in ("whole", "parts"))
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_bf16(given, tmp_path):
    match_dense(given("train.epochs=1", "train.precision=bf16"), tmp_path / "run", say=quiet)
    assert np.isfinite(numbers(tmp_path / "run")[-1]["val_loss"])


def test_nan_stops(given, tmp_path, monkeypatch):
    lesson = LoFTR.lesson

    def broken(self, *args, **kwargs):
        told = lesson(self, *args, **kwargs)
        return told._replace(coarse=told.coarse * float("nan"))

    monkeypatch.setattr(LoFTR, "lesson", broken)
    with pytest.raises(NotFiniteError, match="the loss became nan at update 0"):
        match_dense(given(), tmp_path / "run", say=quiet)


# --- scores -----------------------------------------------------------------------------------------------------------


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.name=lightglue_sift",), "lightglue_sift is no LoFTR"),
        (("model.foo=1",), "foo"),
        (("model.window=1",), "model.window is 1: nothing is refined in it; take 3, or model.fine_depth=0"),
        (("train.coarse=cross",), "coarse"),
        (("train.fine=-1",), "fine is not negative, got -1"),
        (("train.refined=0",), "refined lies in (0, 1], given in [0, 1], got 0"),
        (("train.layer_decay=0.5",), "are a classifier's knobs"),
        (("data.roots=[/nowhere]",), "/nowhere"),
        (("data.views.size=[8, 8]",), "sides of at least 32 pixels"),
        (("model.weights=/nowhere/x.safetensors",), "/nowhere/x"),
        (("run.strategy=fsdp",), "matchers train with ddp"),
        (("train.batch_size=64",), "8 training examples an epoch are fewer than a batch of 64"),
    ],
)
def test_mistakes_are_named(given, tmp_path, words, said):
    with pytest.raises((ValueError, OSError)) as caught:
        match_dense(given(*words), tmp_path / "run", say=quiet)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_photographs_none_of_which_can_be_read_and_other_mistakes_are_named(given, finished, tmp_path):
    for k in range(4):
        (tmp_path / f"{k}.png").write_text("junk")
    with pytest.raises(ValueError, match=r"of 3 \+ 1 photographs too few can be used: .*png"):
        match_dense(given(f"data.roots=[{tmp_path}]"), tmp_path / "run", say=quiet)
    four = (f"model.weights={finished[0] / 'last.safetensors'}", "model.widths=[8, 8, 12, 16]")
    with pytest.raises(ValueError, match="fit"):
        match_dense(given(*four), tmp_path / "run", say=quiet)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/match").glob("loftr_*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_say_their_command(path):
    text = path.read_text()
    assert f"# vispe train configs/match/{path.name}" in text
    assert "# time: " in text
    assert "expected: " in text
    recipe.read(path, DenseRecipe, [])


@pytest.mark.slow
def test_two_processes_are_one(photos, tmp_path):
    """DDP over gloo, batch norms over both, gives the curve of one process, at a rate at which Adam's first steps
    (signs of gradients) do not blow up what float32 rounds."""
    import yaml

    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**DENSE, "data": {**DENSE["data"], "roots": [str(photos)]}}))
    env = {**os.environ, "VISPE_CACHE": str(tmp_path / "cache")}
    for name, words in (("one", []), ("two", ["run.devices=2", "run.strategy=ddp"])):
        command = [sys.executable, "-m", "vispe", "train", str(path), *words, "train.epochs=2", "train.lr=1e-5"]
        subprocess.run([*command, "--out", str(tmp_path / name)], env=env, check=True, capture_output=True)
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        norms = [row.pop("grad_norm", 0) for row in (a, b)]
        assert norms[0] == pytest.approx(norms[1], rel=2e-2)
        assert a == {key: pytest.approx(value, rel=1e-4, abs=1e-4) for key, value in b.items()}
