"""train, ablate and predict as a person meets them: what they print, and one line for every mistake."""

import csv
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import vispe_
from tests.train.conftest import write_images

# --- train ------------------------------------------------------------------------------------------------------------


def test_train_says_what_it_did(place, capfd):
    again = ("train", place / "tiny.yaml", "train.epochs=2", "evaluate_at=[24]", "--out", place / "run")
    assert vispe_(*again) == 0
    assert "this run is finished" in capfd.readouterr().out
    assert (place / "run" / "curves.png").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.foo=1"], "there is no train.foo; train has epochs, batch_size"),
        (["train.lr=fast"], "train.lr must be a valid number, got 'fast'"),
        (["model.heads=5"], "5 heads do not divide the width 24"),
        (["data.root=/nowhere"], "there is no folder or zip '/nowhere'"),
        (["train.batch_size=64"], "40 training examples an epoch are fewer than a batch of 64"),
        (["--resume"], "there is no run to go on with"),
        (["--what"], "unrecognized arguments: --what"),
        (["run.accelerator=tpu"], "run.accelerator must be 'auto', 'cpu' or 'gpu', got 'tpu'"),
    ],
)
def test_mistakes_of_training(place, tmp_path, complaint, words, said):
    assert said in complaint("train", place / "tiny.yaml", *words, "--out", tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_recipes_that_are_not_there(tmp_path, complaint):
    assert "none.yaml" in complaint("train", tmp_path / "none.yaml")
    assert "configs/classify/none.yaml" in complaint("train", "configs/classify/none.yaml")


def test_another_recipe_in_the_same_folder(place, complaint):
    said = complaint("train", place / "tiny.yaml", "train.epochs=4", "--out", place / "run")
    assert "holds a run of another recipe" in said


@pytest.mark.parametrize("what", ["corrupt", "empty", "single"])
def test_data_that_cannot_be_trained_on(place, tmp_path, complaint, what):
    root = write_images(tmp_path / "d")
    if what == "corrupt":
        (root / "val" / "cold" / "2.png").write_bytes((root / "val" / "cold" / "2.png").read_bytes()[:300])
    else:
        for part in ("train", "val"):
            for path in (root / part / "warm").iterdir():
                path.unlink()
            if what == "single":
                (root / part / "warm").rmdir()
    said = complaint("train", place / "tiny.yaml", f"data.root={root}", "--out", tmp_path / "run")
    assert {"corrupt": "val/cold/2.png", "empty": "has no images", "single": "single class"}[what] in said


def test_libraries_that_are_not_there_are_named(complaint, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "lightning" else name)
    for command in ("train", "ablate"):
        said = complaint(command, "a.yaml")
        assert said == f"vispe {command}: this needs lightning: pip install 'vispe[train]'\n"


def test_mistakes_of_ablation(place, complaint):
    assert "none.yaml" in complaint("ablate", "none.yaml")
    said = complaint("ablate", place / "tiny.yaml")
    assert "is no ablation, one training: vispe train" in said
    assert "is an ablation: vispe ablate configs/ablate/fashion_mnist.yaml runs it" in complaint(
        "train", "configs/ablate/fashion_mnist.yaml"
    )
    assert "there is no whats" in complaint("ablate", "configs/ablate/fashion_mnist.yaml", "whats=1")  # shipped


def test_a_recipe_with_ways_is_of_resolutions(monkeypatch):
    asked = []
    monkeypatch.setattr("vispe.train.ablate.ablate", lambda recipe, out: asked.append(("encodings", out)))
    monkeypatch.setattr("vispe.train.resolutions.resolutions", lambda recipe, out: asked.append(("sizes", out)))
    assert vispe_("ablate", "configs/ablate/fashion_mnist.yaml") == 0
    assert vispe_("ablate", "configs/ablate/resolution_fashion_mnist.yaml", "--out", "there") == 0
    assert asked == [("encodings", Path("out/fashion_mnist")), ("sizes", Path("there"))]


# --- predict ----------------------------------------------------------------------------------------------------------


def test_predict_a_folder_with_a_broken_image(place, tmp_path, capfd):
    write_images(tmp_path / "new", train=2, val=1)
    (tmp_path / "new" / "a.jpg").write_text("junk")
    assert vispe_("predict", place / "run", tmp_path / "new", "--out", tmp_path / "p.csv", "--top", 1) == 2
    out, err = capfd.readouterr()
    assert f"wrote {tmp_path / 'p.csv'}: 6 images, 1 could not be read" in out
    assert "a.jpg" in err
    rows = list(csv.DictReader((tmp_path / "p.csv").open(encoding="utf-8")))
    assert [bool(row["problem"]) for row in rows] == [True] + [False] * 6
    assert {row["class_1"] for row in rows[1:]} <= {"cold", "warm"}


def test_predict_prints_without_a_file(place, tmp_path, capfd):
    Image.new("RGB", (20, 20), (0, 0, 255)).save(tmp_path / "x.png")
    assert vispe_("predict", place / "run" / "best.safetensors", tmp_path / "x.png", "--size", "24x16") == 0
    out = capfd.readouterr().out
    assert out.startswith(f"{tmp_path / 'x.png'}  ")
    assert "cold 0." in out
    assert "warm 0." in out


def test_mistakes_with_a_checkpoint(place, tmp_path, complaint):
    image = tmp_path / "x.png"
    Image.new("RGB", (20, 20)).save(image)
    (tmp_path / "junk.png").write_text("junk")
    assert "there is no checkpoint" in complaint("predict", tmp_path / "none.safetensors", image)
    assert "is not a .safetensors file" in complaint("predict", place / "run" / "run.json", image)
    assert "holds no last.safetensors" in complaint("predict", tmp_path, image)
    assert "junk.png" in complaint("predict", place / "run", tmp_path / "junk.png")
    assert "--size is N or HxW in pixels, got '3x'" in complaint("predict", place / "run", image, "--size", "3x")
    assert "17" in complaint("predict", place / "run", image, "--size", "17")
    assert "device 'cud'" in complaint("predict", place / "run", image, "--device", "cud")
    assert "--threshold is of objects" in complaint("predict", place / "run", image, "--threshold", "0.5")
    assert "--weights and --origin belong to --model" in complaint("predict", place / "run", image, "--weights", "x")
    assert "--out is a file FILE.csv, got 'there'" in complaint("predict", place / "run", image, "--out", "there")
    for option in ("--batch", "--top"):
        assert f"argument {option}: a whole number of at least 1" in complaint(
            "predict", place / "run", image, option, 0
        )


# --- segmentation -----------------------------------------------------------------------------------------------------


def test_predict_writes_masks(segmented, tmp_path, capfd):
    images = sorted((segmented / "scenes" / "val" / "images").iterdir())
    (tmp_path / "junk.png").write_text("junk")
    words = ("predict", segmented / "run", *images, tmp_path / "junk.png", "--out", tmp_path / "masks")
    assert vispe_(*words) == 2
    out, err = capfd.readouterr()
    assert out == f"wrote {tmp_path / 'masks'}: 5 images, 1 could not be read\n"
    assert "junk.png" in err
    names = {path.name for path in (tmp_path / "masks").iterdir()}
    assert names == {f"{k}{end}" for k in range(5) for end in (".png", ".json", "_overlay.png")}


def test_mistakes_of_segmentation(segmented, tmp_path, complaint):
    image, run = segmented / "scenes" / "val" / "images" / "0.png", segmented / "run"
    (tmp_path / "junk.png").write_text("junk")
    assert "--size is N, the short side in pixels, got '32x48'" in complaint("predict", run, image, "--size", "32x48")
    assert "would be written over" in complaint("predict", run, image, "--out", image.parent)
    assert "junk.png" in complaint("predict", run, tmp_path / "junk.png")
    train = ("train", segmented / "tiny.yaml", "--out", tmp_path / "run")
    assert "model.num_classes is 7, the data has 3 classes" in complaint(*train, "model.num_classes=7")
    assert "there is no folder '/nowhere'" in complaint(*train, "data.root=/nowhere")
    assert "was trained to segment, not to classify" in complaint(
        "evaluate", "classify", run, "--data", segmented / "scenes"
    )
