"""Several networks under one recipe, at several test sizes: what is trained, what is told, and that it goes on."""

import json

import pytest

from tests.train.test_classify import quiet
from tests.train.test_segment import SEMANTIC, write_scenes
from vispe import recipe as recipes
from vispe.data.segmentation import open_semantic
from vispe.segmenter import evaluate_semantic, load_segmenter
from vispe.train import scales as module
from vispe.train.scales import ScalesRecipe, draw, scales, summarise, table, trained_and_tested

VIT = {
    "name": "segmenter_linear_tiny_patch16", "weights": "fresh", "image_size": 32, "patch_size": 8, "width": 24,
    "depth": 1, "heads": 2, "hidden": 48,
}  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture
def make(scenes):
    def made(**more):
        base = {
            **SEMANTIC,
            "data": {"root": str(scenes)},
            "augment": {**SEMANTIC["augment"], "eval_short": 40},
            "train": {**SEMANTIC["train"], "epochs": 1},
        }
        return recipes.of({"base": base, "others": {"ViT, table": VIT}, "scales": [0.5, 2.0], **more}, ScalesRecipe)

    return made


def test_a_run_changes_the_network_and_the_seed_only(make):
    recipe = make(seeds=[0, 3])
    assert recipe.labels == ("segformer_b0", "ViT, table")
    assert recipe.run("segformer_b0", 0) == recipe.base
    other = recipe.run("ViT, table", 3)
    assert other.model.name == VIT["name"]
    assert other.model.spec["patch_size"] == 8
    assert other.but(model=recipe.base.model, train=recipe.base.train) == recipe.base
    assert other.train == recipe.base.train.but(seed=3)


def test_scale_1_is_always_there_and_sizes_are_whole_pixels(make):
    assert make(scales=[2.0, 0.33]).shorts() == {0.33: 13, 1.0: 40, 2.0: 80}
    assert make(scales=[0.001, 1.0]).shorts() == {0.001: 1, 1.0: 40}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"seeds": [1, 1]}, "each once"),
        ({"seeds": []}, "seeds must be some values"),
        ({"jobs": 0}, "at least 1, got 0"),
        ({"scales": [0.0]}, "positive factors of eval_short"),
        ({"others": {"a b": VIT, "a-b": VIT}}, "must differ in letters or numbers"),
        ({"others": {"segformer_b0": VIT}}, "must differ in letters or numbers"),
    ],
)
def test_mistakes_are_named(make, more, words):
    with pytest.raises(ValueError, match=words):
        make(**more)


def test_mistakes_of_a_training_size_and_of_the_last_network_are_named(make, tmp_path):
    recipe = make()
    with pytest.raises(ValueError, match="eval_short is what scales multiply"):
        recipe.but(base=recipe.base.but(augment=recipe.base.augment.but(eval_short=None)))
    for wrong, words in (({"widht": 3}, "has no 'widht'"), ({"name": "vit_tiny_patch16_224"}, "is no network for")):
        with pytest.raises(ValueError, match=words):
            scales(make(others={"ViT": {**VIT, **wrong}}), tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def test_one_run_is_measured_as_evaluate_does_and_not_twice(make, scenes, tmp_path, monkeypatch):
    recipe = make()
    run, shorts = recipe.run("ViT, table", 0), list(recipe.shorts().values())
    first = trained_and_tested(shorts[:2], run, tmp_path, quiet)
    assert list(first["at"]) == ["20", "40"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert first["at"]["40"]["miou"] == pytest.approx(report["miou"], abs=1e-9)
    assert first["parameters"] == report["parameters"]
    tally, _ = evaluate_semantic(load_segmenter(tmp_path), open_semantic(run.data)[1], 20)
    assert first["at"]["20"]["miou"] == pytest.approx(tally.summary()["miou"], abs=1e-9)
    seen = []
    monkeypatch.setattr(
        module, "evaluate_semantic", lambda *args, **more: seen.append(args[2]) or evaluate_semantic(*args, **more)
    )
    again = trained_and_tested(shorts, run, tmp_path, quiet)
    assert seen == [80]
    assert {**again["at"], **first["at"]} == again["at"]
    kept = json.loads((tmp_path / "scales.json").read_text())
    (tmp_path / "scales.json").write_text(json.dumps({**kept, "sha256": "of other weights"}))
    trained_and_tested(shorts[:1], run, tmp_path, quiet)
    assert seen == [80, 20]


def measured(*mious):
    return {
        "parameters": 1_234_567,
        "location_prior": 0.125,
        "at": {str(short): {"miou": miou} for short, miou in zip((20, 40, 80), mious, strict=True)},
    }


def test_the_summary_by_hand(make):
    """Each seed is divided by its own score at scale 1, then they are averaged."""
    recipe = make(seeds=[0, 1])
    found = {
        ("segformer_b0", 0): measured(0.2, 0.4, 0.5), ("segformer_b0", 1): measured(0.3, 0.5, 0.4),
        ("ViT, table", 0): measured(0.1, 0.2, 0.1), ("ViT, table", 1): measured(0.1, 0.1, 0.1),
    }  # fmt: skip
    summary = summarise(recipe, found)
    half, one, two = summary["networks"]["segformer_b0"]["scales"]
    assert (half["scale"], half["short"], one["short"], two["short"]) == (0.5, 20, 40, 80)
    assert half["miou"]["mean"] == pytest.approx(0.25)
    assert (half["miou"]["low"], half["miou"]["high"]) == (0.2, 0.3)
    assert half["relative"]["seeds"] == pytest.approx([0.5, 0.6])
    assert one["relative"]["seeds"] == [1.0, 1.0]
    text = table(summary)
    assert "| mIoU, percent | parameters | 0.5x (20) | 1x (40) | 2x (80) |" in text
    assert "| segformer_b0 | 1.23 M | 25.0 (20.0 to 30.0) | 45.0 (40.0 to 50.0) | 45.0 (40.0 to 50.0) |" in text
    assert "| ViT, table | 1.23 M | 75.0 (50.0 to 100.0) | 100.0 (100.0 to 100.0) | 75.0 (50.0 to 100.0) |" in text
    assert "Mean of 2 seeds (lowest to highest). The most frequent class of each location scores 12.5." in text
    assert [len(panel.lines) for panel in draw(summary).axes] == [4, 3]  # two networks, scale 1, locations alone


def test_one_seed_has_no_spread(make):
    recipe = make()
    summary = summarise(recipe, {(label, 0): measured(0.1, 0.2, 0.3) for label in recipe.labels})
    text = table(summary)
    assert "| segformer_b0 | 1.23 M | 10.0 | 20.0 | 30.0 |" in text
    assert "One seed: no spread is known." in text


@pytest.mark.slow
def test_from_end_to_end_and_again(make, tmp_path):
    said = []
    summary = scales(make(), tmp_path, said.append)
    assert json.loads((tmp_path / "scales.json").read_text()) == json.loads(json.dumps(summary))
    assert {path.name for path in tmp_path.iterdir()} == {
        "segformer_b0-0", "vit-table-0", "scales.json", "scales.md", "scales.png",
    }  # fmt: skip
    assert sum("/2  " in line for line in said) == 2
    stamp = (tmp_path / "vit-table-0" / "last.safetensors").stat().st_mtime_ns
    assert scales(make(), tmp_path, quiet) == summary
    assert (tmp_path / "vit-table-0" / "last.safetensors").stat().st_mtime_ns == stamp


def test_the_shipped_recipe_is_the_trainings_own():
    """``base`` is the recipe that ``vispe train`` has for CamVid, and the others have as many parameters."""
    from tests.train.test_segment import ROOT
    from vispe.train.start import SEMANTIC as KIND
    from vispe.train.start import fresh_model, model_overrides

    path = ROOT / "configs/ablate/segment_resolution.yaml"
    assert f"# vispe ablate configs/ablate/{path.name}" in path.read_text()
    recipe = recipes.read(path, ScalesRecipe, ["base.data.root=photos"])
    shipped = ROOT / "configs/segment/segformer_b0_camvid.yaml"
    assert recipe.base == recipes.read(shipped, type(recipe.base), ["data.root=photos"])
    counts = []
    for label in recipe.labels:
        run = recipe.run(label, 0)
        assert model_overrides(run.model, KIND)
        counts.append(sum(p.numel() for p in fresh_model(run.model, 11, KIND).parameters()))
    assert max(counts) < 1.05 * counts[0]
    assert min(counts) > 0.95 * counts[0]
