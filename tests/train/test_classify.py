"""Runs from end to end: what they leave, what they refuse, that they go on exactly, and that two processes are one."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

from tests.train.conftest import TINY, write_images
from vispe.classifier import load_classifier
from vispe.train.classify import fit
from vispe.train.curves import read_curves


def quiet(_):
    """Nobody to talk to."""


def numbers(folder):
    """The rows of a run without what a clock said."""
    return [{k: v for k, v in row.items() if k != "images_per_second"} for row in read_curves(folder / "metrics.csv")]


class KilledError(Exception):
    """Stands for the end of the process."""


def stopped_at(monkeypatch, update):
    """Training ends with an exception at ``update``, after its numbers were logged."""
    from vispe.train.callbacks import Record

    log = Record._log

    def stop(self, trainer, told):
        log(self, trainer, told)
        if trainer.global_step == update and "loss" in told:
            raise KilledError

    monkeypatch.setattr(Record, "_log", stop)


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_reports(tiny, tmp_path):
    recipe = tiny("train.epochs=6", "train.lr=5e-3", "augment.mixup=0", "evaluate_at=[24, [16, 32]]")
    report = fit(recipe, tmp_path / "run", say=quiet)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    files = {"run.json", "metrics.csv", "report.json", "best.safetensors", "last.safetensors", "confusion.png"}
    assert names - {"tensorboard"} == {*files, "curves.png"}
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    assert [entry["size"] for entry in report["results"]] == [[16, 16], [24, 24], [16, 32]]
    assert report["results"][0]["accuracy"] == 1.0
    assert report["results"][0]["images"] == 10
    assert report["per_class"] == {"cold": 1.0, "warm": 1.0}
    assert report["data"] == {"train": 40, "val": 10, "classes": 2, "skipped": []}
    assert report["updates"] == 30
    assert report["recipe"]["train"]["lr"] == 5e-3
    assert report["versions"]["torch"]
    for name in ("peak_memory_mib", "training_images_per_second", "training_milliseconds_per_image", "parameters"):
        assert report[name] > 0
    rows = numbers(tmp_path / "run")
    assert [row["update"] for row in rows if "loss" in row] == list(range(1, 31))
    assert [row["update"] for row in rows if "val_loss" in row] == [5, 10, 15, 20, 25, 30]
    trained = load_classifier(tmp_path / "run")
    assert trained.classes == ("cold", "warm")
    assert rows[-1]["val_accuracy"] == report["results"][0]["accuracy"]


def test_the_host_is_left_as_it_was(tiny, tmp_path):
    import logging
    import warnings

    def state():
        level = logging.getLogger("lightning.pytorch").level
        return [torch.get_rng_state().tolist(), level, list(map(str, warnings.filters)), torch.is_grad_enabled()]

    before = state()
    fit(tiny("train.epochs=1"), tmp_path / "run", say=quiet)
    assert state() == before


def test_accumulation_changes_nothing_but_rounding(tiny, tmp_path):
    words = ("augment.mixup=0", "model.drop_path=0", "train.epochs=2")
    fit(tiny(*words), tmp_path / "one", say=quiet)
    fit(tiny(*words, "train.accumulate=4"), tmp_path / "four", say=quiet)
    for a, b in zip(numbers(tmp_path / "one"), numbers(tmp_path / "four"), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_workers_change_nothing(tiny, tmp_path):
    words = ("data.memory=never", "augment.crop=resized", "augment.randaugment=[1, 5]", "train.epochs=2")
    fit(tiny(*words), tmp_path / "none", say=quiet)
    fit(tiny(*words, "run.workers=2"), tmp_path / "two", say=quiet)
    assert numbers(tmp_path / "none") == numbers(tmp_path / "two")


def test_best_is_what_was_best(tiny, tmp_path):
    report = fit(tiny("train.report=best"), tmp_path / "run", say=quiet)
    assert report["weights"] == "best.safetensors"
    assert report["results"][0]["accuracy"] == report["best_validation"]["accuracy"]


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("train.accumulate=2", "train.ema=null")], ids=["plain", "accumulated"])
def test_a_run_goes_on_as_if_nothing_had_been(tiny, tmp_path, monkeypatch, extra):
    """Stopped before a checkpoint, after one, and just behind a validation: the same numbers and the same weights."""
    fit(tiny(*extra), tmp_path / "whole", say=quiet)
    for update in (1, 3, 6, 12):
        with monkeypatch.context() as patched:
            stopped_at(patched, update)
            with pytest.raises(KilledError):
                fit(tiny(*extra), tmp_path / "parts", say=quiet)
    said = []
    fit(tiny(*extra), tmp_path / "parts", say=said.append)
    assert "going on from update 10" in said
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    for name in ("last", "best"):
        one, two = (load_classifier(tmp_path / run / f"{name}.safetensors") for run in ("whole", "parts"))
        for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_stopped_between_the_last_update_and_the_report(tiny, tmp_path, monkeypatch):
    fit(tiny(), tmp_path / "whole", say=quiet)
    with monkeypatch.context() as patched:
        patched.setattr("vispe.train.classify.evaluate", lambda *_, **__: pytest.fail("stop"))
        with pytest.raises(pytest.fail.Exception):
            fit(tiny(), tmp_path / "parts", say=quiet)
    report = fit(tiny(), tmp_path / "parts", say=quiet)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert report["updates"] == 15
    assert not (tmp_path / "parts" / "last.ckpt").exists()


def test_other_images_are_refused(tiny, tmp_path, monkeypatch):
    root = write_images(tmp_path / "d")
    with monkeypatch.context() as patched:
        stopped_at(patched, 3)
        with pytest.raises(KilledError):
            fit(tiny(root=root), tmp_path / "run", say=quiet)
    (root / "train" / "warm" / "0.png").unlink()
    with pytest.raises(ValueError, match="holds an unfinished run on other images"):
        fit(tiny(root=root), tmp_path / "run", say=quiet)


def test_the_starting_file_may_be_gone(tiny, tmp_path, monkeypatch):
    fit(tiny("train.epochs=1"), tmp_path / "start", say=quiet)
    words = (f"model.weights={tmp_path / 'start' / 'last.safetensors'}", "model.image_size=24")
    with monkeypatch.context() as patched:
        stopped_at(patched, 3)
        with pytest.raises(KilledError):
            fit(tiny(*words), tmp_path / "run", say=quiet)
    (tmp_path / "start" / "last.safetensors").unlink()
    report = fit(tiny(*words), tmp_path / "run", say=quiet)
    assert any("position" in sentence for sentence in report["loaded"])


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.batch_size=64",), "40 training examples an epoch are fewer than a batch of 64"),
        (("train.accumulate=3",), "train.batch_size=8 does not divide into 1 processes"),
        (("evaluate_at=[17]",), "17"),
        (("train.size=18",), "18"),
        (("model.channels=1",), "photographs have 3 channels, the model takes 1"),
        (("run.strategy=fsdp", "train.ema=null"), "fsdp shards over GPUs"),
        (("run.accelerator=gpu",), "run.accelerator=gpu: torch finds no GPU here"),
    ],
)
def test_what_does_not_fit_is_said_before_training(tiny, tmp_path, words, said):
    if "GPU" in said and torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    with pytest.raises(ValueError, match=said):
        fit(tiny(*words), tmp_path / "run", say=quiet)
    assert not (tmp_path / "run").exists()


def test_mistakes_are_named_before_the_data_are_opened(tiny, tmp_path):
    with pytest.raises(ValueError, match="not a whole number of patches"):
        fit(tiny("evaluate_at=[17]", "data.root=/nowhere"), tmp_path / "run", say=quiet)
    (tmp_path / "run").write_text("")
    with pytest.raises(OSError, match=r"cannot write into .*run': .*run' is not a folder"):
        fit(tiny("data.root=/nowhere"), tmp_path / "run", say=quiet)


# --- real processes ---------------------------------------------------------------------------------------------------


def recipe_file(tmp_path, root):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "data": {"root": str(root)}}))
    return path


def command(path, out, *words):
    return [sys.executable, "-m", "vispe", "train", str(path), *words, "--out", str(out)]


def environment(tmp_path):
    return {**os.environ, "VISPE_CACHE": str(tmp_path / "cache")}


def logged(folder):
    try:
        with open(folder / "metrics.csv", newline="") as file:
            return sum(1 for row in csv.reader(file) if row and row[0].isdigit())
    except OSError:
        return 0


@pytest.mark.slow
def test_kill_minus_nine(tmp_path, photos):
    path, env = recipe_file(tmp_path, photos), environment(tmp_path)
    words = ("train.epochs=24",)
    subprocess.run(command(path, tmp_path / "whole", *words), env=env, check=True, capture_output=True)
    for rows in (9, 30):
        run = subprocess.Popen(command(path, tmp_path / "parts", *words), env=env, stderr=subprocess.DEVNULL)
        while run.poll() is None and logged(tmp_path / "parts") < rows:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    last = command(path, tmp_path / "parts", *words, "--resume")
    done = subprocess.run(last, env=env, check=True, capture_output=True, text=True)
    assert "going on from update" in done.stdout
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    one, two = ((tmp_path / run / "last.safetensors").read_bytes() for run in ("whole", "parts"))
    assert one == two
    assert "this run is finished" in subprocess.run(last, env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, photos):
    """DDP over gloo, images larger than the table's grid: the same curve as one process with the whole batch."""
    path, env = recipe_file(tmp_path, photos), environment(tmp_path)
    words = ("train.size=24", "augment.mixup=0", "model.drop_path=0", "train.epochs=4")
    subprocess.run(command(path, tmp_path / "one", *words), env=env, check=True, capture_output=True)
    ddp = (*words, "run.devices=2", "run.strategy=ddp")
    subprocess.run(command(path, tmp_path / "two", *ddp), env=env, check=True, capture_output=True)
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert len(one) == 24
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    for run in ("one", "two"):
        report = json.loads((tmp_path / run / "report.json").read_text())
        assert report["results"][0]["accuracy"] == one[-1]["val_accuracy"]
