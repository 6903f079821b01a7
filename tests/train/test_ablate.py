"""The ablation changes one line and nothing else, goes on where it was, and claims no difference within the spread."""

import json

import pytest

from tests.train.conftest import TINY
from vispe import recipe as recipes
from vispe.train import ablate as module
from vispe.train.ablate import AblateRecipe, ablate, draw, draw_table, summarise, table


def quiet(_):
    """Nobody to talk to."""


@pytest.fixture
def make(photos):
    def made(**more):
        base = {**TINY, "data": {"root": str(photos)}, "train": {**TINY["train"], "epochs": 1}}
        return recipes.of({"base": base, "positions": ["none", "table"], "seeds": [0, 1], **more}, AblateRecipe)

    return made


def test_a_run_changes_the_position_the_seed_and_the_sizes_only(make):
    recipe = make()
    one, two = recipe.run("none", 0), recipe.run("table + axial", 1)
    assert one.model.spec == {**recipe.base.model.spec, "position": "none"}
    assert two.model.spec["position"] == "table + axial"
    assert (one.train.seed, two.train.seed) == (0, 1)
    assert one.but(model=two.model, train=two.train) == two
    assert one.train.but(seed=1) == two.train


@pytest.mark.parametrize(
    ("image", "scales", "wanted"),
    [
        (16, [0.75, 1.5, 2.0], [(16, 16), (12, 12), (24, 24), (32, 32)]),
        ([16, 24], [0.5], [(16, 24), (8, 12)]),
        (16, [0.7], [(16, 16), (12, 12)]),  # 11.2 is 2.8 patches of 4: three
        (16, [1.0, 0.1], [(16, 16), (4, 4)]),  # the training size once; never less than a patch
    ],
)
def test_sizes_are_whole_patches(make, image, scales, wanted):
    recipe = make(scales=scales)
    base = recipe.base.but(model=recipe.base.model.but(spec={**recipe.base.model.spec, "image_size": image}))
    assert recipe.but(base=base).sizes() == wanted


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"positions": []}, "positions"),
        ({"positions": ["none", "none"]}, "each once"),
        ({"positions": ["spiral"]}, "spiral"),
        ({"seeds": []}, "seeds"),
        ({"jobs": 0}, "got 0"),
        ({"scales": [-1.0]}, "-1.0"),
    ],
)
def test_mistakes_are_named(make, more, words):
    with pytest.raises(ValueError, match=words):
        make(**more)


def accuracies(**seeds):
    """line -> accuracies of seeds 0 and 1 at every size."""
    sizes = [(16, 16), (12, 12), (24, 24), (32, 32)]
    return {(line, seed): dict.fromkeys(sizes, value) for line, two in seeds.items() for seed, value in enumerate(two)}


def test_a_difference_within_the_spread_is_no_difference(make):
    """By hand: table is best with 0.80; peg reaches into its seeds, none does not."""
    recipe = make(positions=["none", "table", "peg"])
    summary = summarise(recipe, accuracies(none=[0.5, 0.6], table=[0.75, 0.85], peg=[0.7, 0.76]))
    first = {line: cells[0] for line, cells in summary["positions"].items()}
    assert first["table"]["best"]
    assert first["none"]["mean"] == pytest.approx(0.55)
    assert (first["peg"]["low"], first["peg"]["high"]) == (0.7, 0.76)
    assert {line: cell["apart"] for line, cell in first.items()} == {"none": True, "table": False, "peg": False}
    text = table(summary)
    assert "| none | 55.0 (50.0 to 60.0) |" in text
    assert "| peg | **73.0** (70.0 to 76.0) |" in text
    assert "0.614" in text  # the published anchors stand beside it
    assert len([axes for axes in draw(summary).axes if axes.get_visible()]) == 3


@pytest.mark.slow
def test_from_end_to_end_and_again(make, tmp_path, monkeypatch):
    said = []
    summary = ablate(make(), tmp_path, said.append)
    assert set(summary["positions"]) == {"none", "table"}
    assert json.loads((tmp_path / "ablation.json").read_text()) == json.loads(json.dumps(summary))
    assert {path.name for path in tmp_path.iterdir()} == {
        "none-0", "none-1", "table-0", "table-1",
        "ablation.json", "ablation.md", "ablation.png", "table_similarity.png",
    }  # fmt: skip
    assert sum("seed" in line and "/4" in line for line in said) == 4
    (tmp_path / "table-1" / "report.json").unlink()  # as if stopped before its report
    stamp = (tmp_path / "none-0" / "report.json").stat().st_mtime_ns
    assert ablate(make(), tmp_path, quiet) == summary
    assert (tmp_path / "none-0" / "report.json").stat().st_mtime_ns == stamp
    figure = draw_table(tmp_path / "table-0" / "last.safetensors")
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert [float(maps[i][i // 4, i % 4]) for i in range(16)] == pytest.approx([1.0] * 16, abs=1e-5)


def test_the_first_failure_stops_the_rest(make, tmp_path):
    recipe = make(positions=["table"], seeds=[0])
    broken = recipe.but(base=recipe.base.but(data=recipe.base.data.but(root=str(tmp_path / "nowhere"))))
    with pytest.raises(ValueError, match="nowhere"):
        ablate(broken, tmp_path / "out", quiet)


def test_names_of_folders_are_plain():
    assert module.folder_name("table + axial", 2) == "table-axial-2"
