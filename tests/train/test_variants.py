"""Rows are a model's knobs: every variant is trained with every seed, once, and told in one table."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.train.conftest import TINY
from vispe import recipe
from vispe.train import variants
from vispe.train.variants import VariantsRecipe, compare_variants, table

WORDS = ("base.train.epochs=1", "base.train.validate_every=1")


@pytest.fixture
def given(photos):
    def make(*words):
        values = {
            "base": {"task": "classify", **TINY, "data": {"root": str(photos)}},
            "variants": {"none": {"position": "none"}, "a table": {"position": "table"}},
            "scores": {"accuracy": "results.val.accuracy", "parameters": "parameters"},
            "published": {"a table": 0.642},
        }
        values["scores"]["accuracy"] = "best_validation.accuracy"
        return recipe.of(values, VariantsRecipe, (*WORDS, *words))

    return make


def test_a_row_each(given, tmp_path):
    said = []
    summary = compare_variants(given("seeds=[0, 1]"), tmp_path / "out", said.append)
    rows = summary["rows"]
    assert list(rows) == ["none", "a table"]
    assert all(len(values) == 2 for row in rows.values() for values in row.values())
    assert rows["a table"]["parameters"][0] > rows["none"]["parameters"][0]  # the knob was turned
    assert json.loads((tmp_path / "out" / "variants.json").read_text()) == summary
    text = (tmp_path / "out" / "variants.md").read_text()
    assert said[-1] == text
    assert "| variant | accuracy | parameters | published |" in text
    assert text.splitlines()[3].endswith("| 0.642 |")
    assert "Mean of 2 seeds" in text
    with Image.open(tmp_path / "out" / "variants.png") as image:
        image.load()
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {
        "none-0", "none-1", "a-table-0", "a-table-1",
    }  # fmt: skip
    before = (tmp_path / "out" / "none-0" / "metrics.csv").stat().st_mtime_ns
    assert compare_variants(given("seeds=[0, 1]"), tmp_path / "out", said.append) == summary
    assert (tmp_path / "out" / "none-0" / "metrics.csv").stat().st_mtime_ns == before


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_share_the_features_that_one_of_them_finds(tmp_path, monkeypatch, jobs):
    """Two at a time would write one file together."""
    path = Path(__file__).parents[2] / "configs/ablate/lightglue_position.yaml"
    seen = {}

    def reports(tasks, *_):
        seen.update({key: run.features.file for key, (run, _) in tasks.items()})
        raise KeyboardInterrupt

    monkeypatch.setattr(variants, "reports", reports)
    with pytest.raises(KeyboardInterrupt):
        compare_variants(recipe.read(path, VariantsRecipe, [f"jobs={jobs}"]), tmp_path / "out", list)
    assert len(seen) == 5
    assert set(seen.values()) == {str(tmp_path / "out" / "features.h5") if jobs == 1 else None}
    assert not (tmp_path / "out").exists()


def test_the_table_by_hand():
    about = {"scores": {"AP": "x"}, "published": {}, "published_as": "p", "seeds": [0, 1]}
    summary = {"rows": {"one": {"AP": [0.5, 0.25]}, "two": {"AP": [None, None]}}, "recipe": about}
    assert table(summary).splitlines()[2:4] == ["| one | 0.375 (0.250 to 0.500) |", "| two | none |"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("scores.accuracy=nowhere.at.all", "there is no 'nowhere.at.all' in a report: 'nowhere' is missing"),
        ("scores.accuracy=recipe.task", "'recipe.task' in a report is no number but 'classify'"),
    ],
)
def test_a_score_that_is_not_there_is_named(given, tmp_path, word, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        compare_variants(given(word), tmp_path / "out", lambda sentence: None)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("seeds=[]",), "seeds must be some values"),
        (("seeds=[1, 1]",), "each once, got [1, 1]"),
        (("published.other=1.0",), "published has 'other', the variants are none, a table"),
        (("jobs=0",), "jobs and threads are at least 1, got 0, 1"),
        (("base.task=walk",), "task is one of"),
        (("base.train.foo=1",), "there is no train.foo"),
        (("variants={}",), "needs variants (rows) and scores (columns)"),
    ],
)
def test_mistakes_are_named(given, words, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        given(*words)
    assert said in str(caught.value)
