"""A trained classifier's file stands alone; predictions and evaluations with it."""

import csv
import json

import pytest
import torch
from PIL import Image

import vispe
from vispe.classifier import (
    Classifier,
    evaluate,
    image_paths,
    load_classifier,
    normalised,
    predict,
    save,
    write_predictions,
)
from vispe.data.classification import open_part
from vispe.data.images import ImageError


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    knobs = {"image_size": (16, 24), "patch_size": 8, "width": 24, "depth": 1, "heads": 2, "hidden": 24}
    model = vispe.build("vit_tiny_patch16_224", **knobs, num_classes=3, position="table + mixed", drop_path=0.1)
    return Classifier(model, "vit_tiny_patch16_224", ("a", "b", "ü"), (16, 24), 0.9, {"train": {"lr": 0.1}})


@pytest.fixture
def file(classifier, tmp_path):
    save(tmp_path / "last.safetensors", classifier)
    return tmp_path / "last.safetensors"


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "images"
    (root / "deep").mkdir(parents=True)
    for k in range(3):
        Image.new("RGB", (30, 20 + k), (80 * k, 10, 10)).save(root / "deep" / f"{k}.png")
    (root / "broken.jpg").write_text("junk")
    return root


def test_the_file_stands_alone(classifier, file):
    made = load_classifier(file)
    assert (made.name, made.classes, made.size, made.eval_crop) == (
        "vit_tiny_patch16_224", ("a", "b", "ü"), (16, 24), 0.9,
    )  # fmt: skip
    assert made.recipe == {"train": {"lr": 0.1}}
    assert made.model.spec == classifier.model.spec
    assert not made.model.training
    images = torch.randint(0, 256, (2, 3, 16, 24), dtype=torch.uint8)
    assert torch.equal(made.logits(images), classifier.logits(images))
    assert made.logits(images.repeat(1, 1, 2, 1)).shape == (2, 3)


def test_a_run_folder_stands_for_its_last(file):
    assert load_classifier(file.parent).classes == ("a", "b", "ü")
    with pytest.raises(ValueError, match=r"holds no last\.safetensors"):
        load_classifier(file.parent.parent)


@pytest.mark.parametrize("name", ["none.safetensors", "junk.safetensors", "plain.safetensors"])
def test_files_that_are_none(tmp_path, name):
    from safetensors.torch import save_file

    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    save_file({"a": torch.ones(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=name):
        load_classifier(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spec": {"depth": 2}}, "does not fit together"),
        ({"spec": {"depht": 2}}, "has no 'depht'"),
        ({"classes": 3}, "does not fit together"),
        ({"model": "x"}, "no model is called 'x'"),
    ],
)
def test_what_does_not_fit_together(classifier, tmp_path, change, said):
    from safetensors.torch import save_file

    save(tmp_path / "a.safetensors", classifier)
    from safetensors import safe_open

    with safe_open(tmp_path / "a.safetensors", "pt") as opened:
        about = json.loads(opened.metadata()["vispe"])
    for key, value in change.items():
        about[key] = {**about[key], **value} if isinstance(value, dict) else value
    save_file(classifier.model.state_dict(), tmp_path / "a.safetensors", {"vispe": json.dumps(about)})
    with pytest.raises(ValueError, match=said):
        load_classifier(tmp_path / "a.safetensors")


def test_normalisation_by_hand(classifier):
    spec = classifier.model.spec.but(mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 0.25))
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    assert torch.allclose(normalised(images, spec).flatten(), torch.tensor([0.0, 1.0, -3.2]))


# --- prediction -------------------------------------------------------------------------------------------------------


def test_a_folder_with_a_broken_image(classifier, folder, tmp_path):
    paths = image_paths([folder])
    assert [path.rsplit("/", 1)[1] for path in paths] == ["broken.jpg", "0.png", "1.png", "2.png"]
    made = list(predict(classifier, paths, top=2, batch_size=3))
    assert [one.path for one in made] == paths
    assert "broken.jpg" in made[0].problem
    assert made[0].best == ()
    assert all(len(one.best) == 2 and not one.problem for one in made[1:])
    assert all(one.best[0][1] >= one.best[1][1] for one in made[1:])
    write_predictions(tmp_path / "p.csv", made)
    rows = list(csv.DictReader((tmp_path / "p.csv").open(encoding="utf-8")))
    assert list(rows[0]) == ["path", "problem", "class_1", "probability_1", "class_2", "probability_2"]
    assert rows[0]["class_1"] is None or rows[0]["class_1"] == ""
    assert rows[1]["class_1"] == made[1].best[0][0]


def test_batches_do_not_matter(classifier, folder):
    paths = image_paths([folder / "deep"])
    one, two = (list(predict(classifier, paths, batch_size=n)) for n in (1, 8))
    for a, b in zip(one, two, strict=True):
        assert [name for name, _ in a.best] == [name for name, _ in b.best]
        assert torch.allclose(torch.tensor([p for _, p in a.best]), torch.tensor([p for _, p in b.best]), atol=1e-6)
    assert sum(p for _, p in one[0].best) == pytest.approx(1.0, abs=1e-5)


def test_an_empty_folder_and_bad_numbers(classifier, tmp_path):
    with pytest.raises(ValueError, match="there are no images"):
        image_paths([tmp_path])
    with pytest.raises(ValueError, match="got 0 and 32"):
        list(predict(classifier, ["x"], top=0))


# --- evaluation -------------------------------------------------------------------------------------------------------


def labelled(tmp_path):
    for k in range(5):
        path = tmp_path / "val" / "ab"[k % 2] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20), (50 * k, 99, 0)).save(path)
    return open_part(tmp_path, ("a", "b", "ü"))


@pytest.mark.parametrize("size", [(16, 24), (32, 16)])
def test_evaluation_counts_what_prediction_says(classifier, tmp_path, size):
    images = labelled(tmp_path)
    tally, timing = evaluate(classifier, images, size, batch_size=2)
    said = [one.best[0][0] for one in predict(classifier, [images.name(i) for i in range(5)], size=size)]
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for label, name in zip(images.labels.tolist(), said, strict=True):
        expected[label, classifier.classes.index(name)] += 1
    assert torch.equal(tally.confusion, expected)
    assert timing["images_per_second"] > 0


def test_evaluation_names_what_does_not_work(classifier, tmp_path):
    images = labelled(tmp_path)
    with pytest.raises(ValueError, match="15"):
        evaluate(classifier, images, (15, 16))
    (tmp_path / "val" / "a" / "0.png").write_text("junk")
    with pytest.raises(ImageError, match=r"a/0\.png"):
        evaluate(classifier, images, (16, 16))
