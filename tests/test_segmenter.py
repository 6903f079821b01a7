"""A trained segmenter's file stands alone; predictions and evaluations with it."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vispe
from vispe.classifier import load_classifier, task_of
from vispe.data.rle import mask as decoded
from vispe.data.segmentation import SemanticSpec, open_semantic_part
from vispe.models.segformer import semantic
from vispe.segmenter import (
    Segmenter,
    colours,
    evaluate_semantic,
    load_segmenter,
    names_for,
    overlay,
    painted,
    predict_semantic,
    save_segmenter,
    write_segmented,
)

CLASSES = ("a", "b", "ü")


@pytest.fixture(scope="module")
def segmenter():
    torch.manual_seed(0)
    knobs = {"widths": (8, 8, 8, 8), "depths": (1,) * 4, "heads": (1,) * 4, "reductions": (2, 1, 1, 1), "head_width": 8}
    model = vispe.build("segformer_b0", **knobs, num_classes=3)
    return Segmenter(model, "segformer_b0", CLASSES, 24, {"train": {"lr": 0.1}})


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    for part in ("images", "masks"):
        (tmp_path / "val" / part).mkdir(parents=True)
    for k, size in enumerate(((30, 40), (41, 33), (30, 40))):
        Image.fromarray(draw.integers(0, 255, (*size, 3), dtype=np.uint8)).save(tmp_path / f"val/images/{k}.png")
        Image.fromarray(draw.integers(0, 3, size, dtype=np.uint8)).save(tmp_path / f"val/masks/{k}.png")
    return tmp_path


def test_the_file(segmenter, tmp_path):
    save_segmenter(tmp_path / "last.safetensors", segmenter)
    read = load_segmenter(tmp_path)
    assert (read.name, read.classes, read.short, read.recipe) == ("segformer_b0", CLASSES, 24, segmenter.recipe)
    assert read.model.spec == segmenter.model.spec
    assert all(torch.equal(v, segmenter.model.state_dict()[k]) for k, v in read.model.state_dict().items())
    assert task_of(tmp_path) == "segment"
    with pytest.raises(ValueError, match="was trained to segment, not to classify"):
        load_classifier(tmp_path)


def test_a_padded_batch_is_its_images(segmenter):
    torch.manual_seed(1)
    images = torch.randint(0, 255, (2, 3, 40, 48), dtype=torch.uint8)
    real, sizes = torch.tensor([[40, 48], [33, 30]]), [(80, 96), (33, 30)]
    both = segmenter.masks(images, sizes, real)
    assert [tuple(mask.shape) for mask in both] == sizes
    assert torch.equal(both[1], segmenter.masks(images[1:, :, :33, :30], sizes[1:])[0])


def test_evaluation_by_hand(segmenter, folder):
    images = open_semantic_part(SemanticSpec(root=str(folder)), CLASSES)
    one, timing = evaluate_semantic(segmenter, images, 24, batch_size=1)
    all_, _ = evaluate_semantic(segmenter, images, 24, batch_size=3)
    assert torch.equal(one.confusion, all_.confusion)
    assert one.summary()["pixels"] == 2 * 30 * 40 + 41 * 33
    assert timing["images_per_second"] > 0
    found = [one for one in predict_semantic(segmenter, list(images.images), 24)]
    hits = sum(int((made.mask == images.mask(i)).sum()) for i, made in enumerate(found))
    assert one.confusion.trace() == hits
    with pytest.raises(ValueError, match="batch_size is at least 1"):
        evaluate_semantic(segmenter, images, None, batch_size=0)


def test_prediction_is_the_networks(segmenter, folder):
    path = str(folder / "val/images/0.png")
    (one,) = predict_semantic(segmenter, [path], None)
    from vispe.classifier import normalised

    with torch.inference_mode():
        (mask,) = semantic(segmenter.model(normalised(one.image[None], segmenter.model.spec)), [(30, 40)])
    assert torch.equal(one.mask, mask)


def test_what_cannot_be_used_says_so(segmenter, folder):
    (folder / "junk.png").write_text("junk")
    Image.new("RGB", (3, 3)).save(folder / "dot.png")
    junk, dot = predict_semantic(segmenter, [str(folder / "junk.png"), str(folder / "dot.png")], None)
    assert "junk.png" in junk.problem
    assert "dot.png': each side must have at least" in dot.problem


def test_files_of_a_prediction(segmenter, folder):
    pytest.importorskip("pycocotools", reason="run lengths are pycocotools'")
    (one,) = predict_semantic(segmenter, [str(folder / "val/images/1.png")], 24)
    write_segmented(folder / "out", "1", segmenter, one)
    with Image.open(folder / "out/1.png") as image:
        assert np.array_equal(np.asarray(image), one.mask.numpy())
    with Image.open(folder / "out/1_overlay.png") as image:
        assert image.size == (33, 41)
    told = json.loads((folder / "out/1.json").read_text())
    assert told["size"] == [41, 33]
    assert sum(segment["pixels"] for segment in told["segments"]) == 41 * 33
    for segment in told["segments"]:
        assert segment["name"] == CLASSES[segment["class"]]
        assert np.array_equal(decoded(segment["segmentation"], (41, 33)), one.mask.numpy() == segment["class"])


def test_names(tmp_path):
    assert names_for(["x/a.png", "x/b.jpg"], tmp_path) == ["a", "b"]
    with pytest.raises(ValueError, match=r"'x/a.png' and 'y/a.jpg' would both write"):
        names_for(["x/a.png", "y/a.jpg"], tmp_path)
    with pytest.raises(ValueError, match="would be written over"):
        names_for([str(tmp_path / "a.png")], tmp_path)


def test_colours():
    assert len({tuple(row) for row in colours(150).tolist()}) > 140
    mask = torch.tensor([[0, 1], [-1, 1]])
    picture = painted(mask, 2)
    assert picture[:, 1, 0].tolist() == [0, 0, 0]
    assert picture[:, 0, 1].tolist() == colours(2)[1].tolist()
    image = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    assert torch.equal(overlay(image, mask, 2, 0.0), image)
    assert torch.equal(overlay(image, mask, 2, 1.0), picture)
