"""A folder says what run it holds, and refuses another."""

import json

import pytest

from tests.train.conftest import write_images
from vispe.train.classify import fit
from vispe.train.folder import finished_report


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from tests.train.conftest import TINY
    from vispe import recipe
    from vispe.train.spec import ClassifyRecipe

    folder = tmp_path_factory.mktemp("finished")
    values = {**TINY, "data": {"root": str(write_images(folder / "d"))}}
    made = recipe.of(values, ClassifyRecipe, ["train.epochs=1"])
    fit(made, folder / "run", say=lambda _: None)
    return folder / "run", made


def test_a_finished_run_says_so(finished):
    folder, made = finished
    said = []
    report = fit(made, folder, say=said.append)
    assert said == [f"this run is finished; its report is {folder / 'report.json'}"]
    assert report == finished_report(folder, made)


def test_another_recipe_is_refused(finished):
    folder, made = finished
    other = made.but(train=made.train.but(lr=5.0))
    with pytest.raises(ValueError, match=r"another recipe \(train.lr was 0.001 and is 5.0\)"):
        fit(other, folder)


def test_where_it_runs_and_how_often_it_saves_may_change(finished):
    folder, made = finished
    other = made.but(train=made.train.but(save_every=7), run=made.run.but(workers=2))
    assert finished_report(folder, other) is not None


def test_a_run_from_before_recipes_said_their_task(finished, tmp_path):
    folder, made = finished
    told = json.loads((folder / "run.json").read_text())
    assert told["recipe"].pop("task") == "classify"
    (tmp_path / "run.json").write_text(json.dumps(told))
    assert finished_report(tmp_path, made) is None


def test_a_damaged_run(finished, tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        finished_report(tmp_path, finished[1])
    assert finished_report(tmp_path / "none", finished[1]) is None


@pytest.mark.parametrize("name", ["report.json", "encoder.safetensors"])
def test_somebody_elses_files_are_not_written_over(tiny, tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=name):
        finished_report(tmp_path, tiny())
    assert (tmp_path / name).read_text() == "precious"
