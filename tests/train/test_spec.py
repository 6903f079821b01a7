"""Knobs that cannot be are refused with their value."""

import pytest

from vispe.data.classification import DataSpec
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
