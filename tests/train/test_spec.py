"""Knobs that cannot be are refused with their value."""

import pytest

from vispe import recipe
from vispe.data.classification import DataSpec
from vispe.train.detect import DetectRecipe
from vispe.train.spec import ClassifyRecipe, ModelSpec, RunSpec, TrainSpec, pair


@pytest.mark.parametrize(
    "knobs",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"accumulate": 0},
        {"lr": -1.0},
        {"lr": float("inf")},
        {"warmup_epochs": float("nan")},
        {"layer_decay": 0.0},
        {"layer_decay": 1.1},
        {"label_smoothing": 1.0},
        {"ema": 1.0},
        {"clip": 0.0},
        {"betas": (0.9, 1.0)},
    ],
)
def test_training_knobs(knobs):
    with pytest.raises(ValueError, match="got"):
        TrainSpec(**knobs)


def test_the_last_epoch_is_validated():
    with pytest.raises(ValueError, match="validate_every, 4, does not divide 30 epochs"):
        TrainSpec(validate_every=4)


@pytest.mark.parametrize("knobs", [{"devices": 0}, {"num_nodes": 0}, {"workers": -1}])
def test_run_knobs(knobs):
    with pytest.raises(ValueError, match="got"):
        RunSpec(**knobs)


def test_averages_need_whole_weights():
    with pytest.raises(ValueError, match="ema averages whole weights"):
        ClassifyRecipe(
            model=ModelSpec(name="x"),
            data=DataSpec(root="x"),
            train=TrainSpec(ema=0.9),
            run=RunSpec(strategy="fsdp"),
        )


def test_one_number_is_a_square():
    assert pair(3) == (3, 3)
    assert pair((2, 3)) == (2, 3)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.validate_every=7", "train.validate_every, 7, does not divide 2 epochs"),
        ("augment.eval_short=0", "augment.eval_short is at least 1 pixel, got 0"),
        ("data.first=0", "data.first is a number of images of at least 1, got 0"),
        ("run.devices=0", "run.devices is at least 1, got 0"),
        ("run.devices=2", "train.batch_size=3 does not divide into 2 processes (run.devices x run.num_nodes) x"),
    ],
)
def test_mistakes_are_named_by_their_key(word, said):
    given = {"task": "detect", "model": {"name": "detr_resnet50"}, "data": {}, "train": {"epochs": 2, "batch_size": 3}}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        recipe.of(given, DetectRecipe, [word])
    assert str(caught.value).startswith(said)
    assert len(str(caught.value)) < 120
