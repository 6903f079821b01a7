"""Pre-training from end to end: it learns, goes on exactly, and its encoder is a ViT's."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import vispe
from tests.train.test_classify import KilledError, numbers, quiet, stopped_at
from vispe import cli, recipe
from vispe.classifier import load_classifier, normalised
from vispe.data.batches import Plan
from vispe.models.mae import MAE
from vispe.train.classify import fit
from vispe.train.module import NotFiniteError
from vispe.train.pretrain import PretrainRecipe, fixed_noise, load_mae, pretrain, training_noise
from vispe.train.spec import ClassifyRecipe
from vispe.train.start import starting_model

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "task": "pretrain",
    "model": {
        "name": "mae_vit_base_patch16", "image_size": 16, "patch_size": 4, "width": 24, "depth": 2, "heads": 2,
        "hidden": 48, "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, "decoder_hidden": 32,
    },
    "augment": {"crop": "padded", "pad": 1},
    "train": {
        "epochs": 3, "batch_size": 8, "lr": 1e-2, "warmup_epochs": 0.5, "clip": 1.0, "save_every": 2, "log_every": 1,
    },
    "run": {"accelerator": "cpu", "workers": 0},
}  # fmt: skip


@pytest.fixture
def masked(photos):
    """``masked("train.lr=1", ...)``: the small recipe with words on top."""

    def make(*words, root=photos):
        return recipe.of({**TINY, "data": {"root": str(root)}}, PretrainRecipe, words)

    return make


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """The folder of a run, and its report."""
    folder = tmp_path_factory.mktemp("mae") / "run"
    values = {**TINY, "data": {"root": str(photos)}}
    return folder, pretrain(recipe.of(values, PretrainRecipe, ["train.epochs=8"]), folder, say=quiet)


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_the_loss_falls(finished):
    folder, report = finished
    rows = numbers(folder)
    assert [row["update"] for row in rows if "loss" in row] == list(range(1, 41))
    assert [row["update"] for row in rows if "val_loss" in row] == list(range(5, 41, 5))
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert losses[-1] == report["validation_loss"]
    assert [one["loss"] for one in report["validations"]] == losses


def test_what_a_run_leaves(finished):
    folder, report = finished
    files = {"run.json", "metrics.csv", "report.json", "mae.safetensors", "encoder.safetensors", "curves.png"}
    assert {path.name for path in folder.iterdir()} - {"tensorboard"} == {*files, "reconstructions.png"}
    assert json.loads((folder / "report.json").read_text()) == report
    assert report["data"] == {"train": 40, "val": 10, "skipped": []}
    assert report["recipe"]["task"] == "pretrain"
    for name in ("peak_memory_mib", "training_images_per_second", "training_milliseconds_per_image", "parameters"):
        assert report[name] > 0
    for name in ("curves.png", "reconstructions.png"):
        with Image.open(folder / name) as image:
            image.load()
            assert min(image.size) > 300
    said = []
    values = {**TINY, "data": report["recipe"]["data"]}
    assert pretrain(recipe.of(values, PretrainRecipe, ["train.epochs=8"]), folder, say=said.append) == report
    assert said == [f"this run is finished; its report is {folder / 'report.json'}"]


def test_the_validation_loss_is_that_of_the_file(finished, photos):
    """By hand: every image with the noise of its own number."""
    folder, report = finished
    model, images = load_mae(folder), []
    for path in sorted((photos / "val").rglob("*.png")):
        with Image.open(path) as image:
            images.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(16, 16, 3))
    batch = torch.stack(images).permute(0, 3, 1, 2)
    with torch.inference_mode():
        loss = model(normalised(batch, model.spec), fixed_noise(torch.arange(10), 16)).loss
    assert float(loss) == pytest.approx(report["validation_loss"], rel=1e-5)


def test_the_encoder_is_a_vit(finished, tmp_path, photos):
    """The same tokens, and a classification recipe that starts from it."""
    folder, report = finished
    words = report["classify"]
    assert words["weights"] == str(folder / "encoder.safetensors")
    given = recipe.of({"model": words, "data": {"root": str(photos)}}, ClassifyRecipe).model
    vit, told = starting_model(given, 2)
    mae, images = load_mae(folder), torch.rand(3, 3, 16, 16)
    with torch.inference_mode():
        assert torch.equal(mae.norm(vit.tokens(images)), mae.encode(images))
    assert (vit.spec.mean, vit.spec.std) == (mae.spec.mean, mae.spec.std)
    assert any(sentence.startswith("head.weight: fresh") for sentence in told)
    tuned = {"train": {"epochs": 1, "batch_size": 8}, "augment": {"crop": "none"}, "run": TINY["run"]}
    made = recipe.of({"model": words, "data": {"root": str(photos)}, **tuned}, ClassifyRecipe)
    fit(made, tmp_path / "tuned", say=quiet)
    assert load_classifier(tmp_path / "tuned").model.spec.pool == "avg"


def test_training_goes_on_from_a_file(finished, masked, tmp_path):
    folder, _ = finished
    words = (f"model.weights={folder / 'mae.safetensors'}", "model.origin=vispe", "train.epochs=1", "train.lr=0")
    report = pretrain(masked(*words), tmp_path / "run", say=quiet)
    assert report["validation_loss"] == pytest.approx(finished[1]["validation_loss"], rel=1e-6)


@pytest.mark.parametrize("layout", ["flat", "parts", "single"])
def test_images_need_no_class_folders(masked, tmp_path, photos, layout):
    places = {"flat": ("", ""), "parts": ("train", "val"), "single": ("all", "all")}[layout]
    for k, path in enumerate(sorted(photos.rglob("*.png"))):
        folder = tmp_path / "images" / places["val" in path.parts]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k}.png").write_bytes(path.read_bytes())
    recipe_ = masked("train.epochs=1", root=tmp_path / "images")
    report = pretrain(recipe_, tmp_path / "run", say=quiet)
    assert report["data"]["train"] == 40
    assert report["data"]["val"] == 10


def test_averages_and_another_size(masked, tmp_path):
    """Averaged weights are those that are validated and kept; images of a size that is not the model's, not square."""
    report = pretrain(masked("train.ema=0.9", "train.size=[8, 24]", "train.epochs=1"), tmp_path / "run", say=quiet)
    assert report["size"] == report["classify"]["image_size"] == [8, 24]
    assert numbers(tmp_path / "run")[-1]["val_loss"] == report["validation_loss"]


# --- what is hidden ---------------------------------------------------------------------------------------------------


def test_noise_depends_on_seed_and_update_alone():
    one = training_noise(0, 3, 8, 16)
    assert torch.equal(one, training_noise(0, 3, 8, 16))
    assert not torch.equal(one, training_noise(0, 4, 8, 16))
    assert not torch.equal(one, training_noise(1, 3, 8, 16))
    fixed = fixed_noise(torch.tensor([4, 1]), 16)
    assert torch.equal(fixed[1:], fixed_noise(torch.tensor([1]), 16))
    assert not torch.equal(fixed[0], fixed[1])


def test_each_process_has_its_rows(monkeypatch):
    """Processes and accumulated parts together hide what one would hide."""
    from vispe.train import pretrain as module

    seen = []
    monkeypatch.setattr(module.Pretraining, "_error", lambda self, images, noise: seen.append(noise))
    for rank, batch_idx in ((0, 6), (1, 6), (0, 7), (1, 7)):
        monkeypatch.setattr(module.Pretraining, "global_rank", rank)
        learner = module.Pretraining(
            vispe.build("mae_vit_base_patch16", **{k: v for k, v in TINY["model"].items() if k != "name"}),
            module.MaskedTrain(), Plan(images=8, batch_size=8, epochs=9, seed=0, accumulate=2, world=2), Path(),
        )  # fmt: skip
        learner.loss_of(module.Batch(torch.zeros(2, 3, 16, 16), torch.zeros(2), torch.zeros(2)), batch_idx)
    assert torch.equal(torch.cat(seen), training_noise(0, 3, 8, 16))


def test_accumulation_changes_nothing_but_rounding(masked, tmp_path):
    pretrain(masked("train.epochs=1"), tmp_path / "one", say=quiet)
    pretrain(masked("train.epochs=1", "train.accumulate=4"), tmp_path / "four", say=quiet)
    for a, b in zip(numbers(tmp_path / "one"), numbers(tmp_path / "four"), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("train.accumulate=2", "train.ema=0.9")], ids=["plain", "accumulated"])
def test_a_run_goes_on_as_if_nothing_had_been(masked, tmp_path, monkeypatch, extra):
    """Stopped before a checkpoint, after one, and just behind a validation: the same numbers and the same weights."""
    pretrain(masked(*extra), tmp_path / "whole", say=quiet)
    for update in (1, 3, 6, 12):
        with monkeypatch.context() as patched:
            stopped_at(patched, update)
            with pytest.raises(KilledError):
                pretrain(masked(*extra), tmp_path / "parts", say=quiet)
    said = []
    pretrain(masked(*extra), tmp_path / "parts", say=said.append)
    assert "going on from update 10" in said
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    one, two = (load_mae(tmp_path / run).state_dict() for run in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_stopped_between_the_last_update_and_the_report(masked, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("vispe.train.pretrain.draw_reconstructions", lambda *_: pytest.fail("stop"))
        with pytest.raises(pytest.fail.Exception):
            pretrain(masked("train.epochs=1"), tmp_path / "run", say=quiet)
    assert (tmp_path / "run" / "last.ckpt").exists()
    assert pretrain(masked("train.epochs=1"), tmp_path / "run", say=quiet)["updates"] == 5
    assert not (tmp_path / "run" / "last.ckpt").exists()


def test_nan_stops_with_the_batch(masked, tmp_path, monkeypatch):
    decode, count = MAE.decode, [0]

    def broken(self, *given):
        count[0] += self.training
        return decode(self, *given) * (float("nan") if count[0] > 3 else 1.0)

    monkeypatch.setattr(MAE, "decode", broken)
    with pytest.raises(NotFiniteError, match=r"the loss became nan at update 3 \(epoch 0\)"):
        pretrain(masked(), tmp_path / "run", say=quiet)
    assert (tmp_path / "run" / "bad_batch.safetensors").is_file()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.name=vit_base_patch16_224",), "vit_base_patch16_224 is no masked autoencoder"),
        (("model.foo=1",), "foo"),
        (("model.mask_ratio=0.97",), "mask_ratio 0.97 leaves none of 16 patches to see"),
        (("train.size=18",), "18"),
        (("model.channels=1",), "photographs have 3 channels, the model takes 1"),
        (("augment.mixup=0.2",), "there are no labels to mix: mixup and cutmix are 0, got 0.2, 0.0"),
        (("train.layer_decay=0.5",), "layer_decay is a classifier's knob, here it is 1.0, got 0.5"),
        (("train.batch_size=64",), "40 training examples an epoch are fewer than a batch of 64"),
        (("train.ema=0.9", "run.strategy=fsdp"), "ema averages whole weights"),
        (("model.weights=/nowhere/mae.safetensors",), "/nowhere/mae"),
        (("data.root=/nowhere",), "there is no folder or zip '/nowhere'"),
    ],
)
def test_mistakes_are_named(masked, tmp_path, words, said):
    with pytest.raises((ValueError, OSError), match=said.replace("(", r"\(")) as caught:
        pretrain(masked(*words), tmp_path / "run", say=quiet)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_folders_without_images_are_refused(masked, tmp_path):
    with pytest.raises(ValueError, match="has no images"):
        pretrain(masked(root=tmp_path), tmp_path / "run", say=quiet)
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    with pytest.raises(ValueError, match="leaves no image for validation: there must be at least two"):
        pretrain(masked(root=tmp_path), tmp_path / "run", say=quiet)


def test_files_that_are_no_autoencoder(finished, tmp_path):
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    for path in (tmp_path / "junk.safetensors", finished[0] / "encoder.safetensors"):
        with pytest.raises(ValueError, match="is no autoencoder that vispe trained"):
            load_mae(path)
    with pytest.raises(ValueError, match="there is no autoencoder"):
        load_mae(tmp_path)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_recipe_says_its_task(tmp_path, photos, capfd):
    path, out = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump({**TINY, "data": {"root": str(photos)}}))
    assert cli.main(["train", str(path), "train.epochs=1", "--out", str(out)]) == 0
    assert "validation loss" in capfd.readouterr().out
    with open(out / "metrics.csv", newline="") as file:
        assert "val_loss" in next(csv.reader(file))
    path.write_text(yaml.safe_dump({**TINY, "task": "paint"}))
    assert cli.main(["train", str(path), "--out", str(out)]) == 2
    assert "segment, detect, match, match_dense, got 'paint'" in capfd.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs/pretrain").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_say_their_command(path):
    from vispe.train.pretrain import _knobs

    text = path.read_text()
    assert f"# vispe train configs/pretrain/{path.name}" in text
    assert "# time: " in text
    assert "expected: " in text
    words = [] if "FashionMNIST" in text else ["data.root=photos"]
    made = recipe.read(path, PretrainRecipe, words)
    assert vispe.build(made.model.name, **_knobs(made.model)).spec.channels == 3


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, photos):
    """DDP over gloo: the curve of one process with the whole batch; an odd number of validation images is padded."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "data": {"root": str(photos), "val_limit": 7}}))
    env = {**os.environ, "VISPE_CACHE": str(tmp_path / "cache")}
    for name, words in (("one", []), ("two", ["run.devices=2", "run.strategy=ddp"])):
        command = [sys.executable, "-m", "vispe", "train", str(path), *words, "--out", str(tmp_path / name)]
        subprocess.run(command, env=env, check=True, capture_output=True)
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert len(one) == 18
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
