"""Images with index masks: every layout, what an index means, and every fault named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.data.images import ImageError
from vispe.data.segmentation import (
    CITYSCAPES,
    CITYSCAPES_IDS,
    VOID,
    Meaning,
    SemanticImages,
    SemanticSpec,
    open_semantic,
    open_semantic_part,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "cache"))


def picture(path, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (10, 20, 30)).save(path)


def mask(path, values=((0, 1, 2),), size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    made = np.resize(np.array(values), (size[1], size[0]))
    Image.fromarray(made.astype(np.uint16 if made.max() > 255 else np.uint8)).save(path)


def pair(images, masks, count=3, suffix="png", **knobs):
    for k in range(count):
        picture(images / f"{k}.{suffix}")
        mask(masks / f"{k}.png", **knobs)


def opened(root, **knobs):
    return open_semantic(SemanticSpec(root=str(root), **knobs))


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", ["masks", "labels", "annotations"])
@pytest.mark.parametrize("val", ["val", "valid", "test"])
def test_parts_above_or_below_the_kind(tmp_path, masks, val):
    for part, count in (("train", 3), (val, 2)):
        pair(tmp_path / "a" / part / "images", tmp_path / "a" / part / masks, count)
        pair(tmp_path / "b" / "images" / part, tmp_path / "b" / masks / part, count, suffix="jpg")
    for root in ("a", "b"):
        train, held = opened(tmp_path / root)
        assert (len(train), len(held)) == (3, 2)
        assert train.classes == held.classes == ("class 0", "class 1", "class 2")
        sample = train.read(0)
        assert sample.image.shape == (3, 4, 6)
        assert sample.image.dtype == torch.uint8
        assert sample.image[:, 0, 0].tolist() == [10, 20, 30]
        assert sample.mask.dtype == torch.int64
        assert sample.mask[0].tolist() == [0, 1, 2, 0, 1, 2]
        assert sample.name == train.name(0)


def test_camvids_own_folders(tmp_path):
    pair(tmp_path / "train", tmp_path / "trainannot", 3)
    pair(tmp_path / "val", tmp_path / "valannot", 2)
    train, val = opened(tmp_path, classes=11, void=11)
    assert (len(train), len(val), len(train.classes)) == (3, 2, 11)


def test_a_plain_folder_is_split_by_its_seed(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks", 10)
    train, val = opened(tmp_path)
    assert (len(train), len(val)) == (8, 2)
    assert not set(train.images) & set(val.images)
    assert opened(tmp_path)[1].images == val.images
    assert any(opened(tmp_path, split_seed=s)[1].images != val.images for s in range(1, 5))
    assert len(opened(tmp_path, val_fraction=0.5)[1]) == 5
    assert len(opened(tmp_path, train_limit=3, val_limit=1)[0]) == 3


def test_train_without_val_is_split(tmp_path):
    pair(tmp_path / "train/images", tmp_path / "train/masks", 5)
    assert [len(part) for part in opened(tmp_path)] == [4, 1]


def test_ade20k_counts_from_one(tmp_path):
    for part in ("training", "validation"):
        for k in range(2):
            picture(tmp_path / "images" / part / f"ADE_{k}.jpg")
            mask(tmp_path / "annotations" / part / f"ADE_{k}.png", ((0, 1, 150),))
    train, _ = opened(tmp_path)
    assert len(train.classes) == 150
    assert train.read(0).mask[0, :3].tolist() == [VOID, 0, 149]
    rows = ["Idx\tRatio\tTrain\tVal\tStuff\tName"] + [f"{k}\t0\t0\t0\t1\tthing {k}, other" for k in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows) + "\n")
    assert opened(tmp_path)[0].classes[:2] == ("thing 1", "thing 2")
    assert not opened(tmp_path, reduce_zero_label=False)[0].meaning.reduced


@pytest.mark.parametrize("kind", ["labelTrainIds", "labelIds"])
def test_cityscapes(tmp_path, kind):
    for part in ("train", "val"):
        picture(tmp_path / f"leftImg8bit/{part}/bonn/bonn_0_leftImg8bit.png")
        values = ((0, 18, 255),) if kind == "labelTrainIds" else ((7, 33, 4),)
        mask(tmp_path / f"gtFine/{part}/bonn/bonn_0_gtFine_{kind}.png", values)
    train, val = opened(tmp_path)
    assert train.classes == CITYSCAPES
    assert len(CITYSCAPES_IDS) == len(CITYSCAPES) == 19
    assert val.read(0).mask[0, :3].tolist() == [0, 18, VOID]


def test_names_behind_the_images_name(tmp_path):
    picture(tmp_path / "images/a.jpg")
    picture(tmp_path / "images/b.png")
    mask(tmp_path / "masks/a_mask.png")
    mask(tmp_path / "masks/b_L.png")
    train, val = opened(tmp_path)
    assert len(train) + len(val) == 2


# --- classes and void -------------------------------------------------------------------------------------------------


def test_names_are_given_or_lie_beside(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks")
    assert opened(tmp_path, classes=["x", "y", "z"])[0].classes == ("x", "y", "z")
    assert len(opened(tmp_path, classes=7)[0].classes) == 7
    (tmp_path / "classes.txt").write_text("sky\nroad\n\ntree\n")
    assert opened(tmp_path)[0].classes == ("sky", "road", "tree")
    with pytest.raises(ValueError, match="has 3 classes, got 4"):
        opened(tmp_path, classes=4)


def test_void_is_not_counted_as_a_class(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks", values=((0, 4, 11, 255),))
    assert len(opened(tmp_path)[0].classes) == 12
    assert len(opened(tmp_path, void=11)[0].classes) == 256
    mask(tmp_path / "masks/0.png", ((0, 4, 11),))
    mask(tmp_path / "masks/1.png", ((0, 4, 11),))
    mask(tmp_path / "masks/2.png", ((0, 4, 11),))
    train, _ = opened(tmp_path, void=11)
    assert len(train.classes) == 5
    assert train.read(0).mask[0, :3].tolist() == [0, 4, VOID]


def test_masks_of_white_and_black_are_not_taken_for_void(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks", values=((0, 255),))
    with pytest.raises(ValueError, match=r"hold nothing but class 0 and void \(255\)"):
        opened(tmp_path)


def test_more_than_256_classes(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks", values=((0, 300, 65535),))
    train, _ = opened(tmp_path, void=65535)
    assert len(train.classes) == 301
    assert train.read(0).mask[0, :3].tolist() == [0, 300, VOID]


def test_what_an_index_means():
    assert Meaning(255).table(2) == {0: 0, 1: 1, 255: VOID}
    assert Meaning(-1).table(2) == {0: 0, 1: 1}
    assert Meaning(255, reduced=True).table(2) == {0: VOID, 1: 0, 2: 1, 255: VOID}
    assert Meaning(ids=(7, 8)).table(2) == {7: 0, 8: 1}


# --- faults -----------------------------------------------------------------------------------------------------------


def test_an_image_without_a_mask_and_a_mask_without_an_image(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks")
    picture(tmp_path / "images/x.png")
    picture(tmp_path / "images/y.png")
    with pytest.raises(ValueError, match=r"images/x\.png' has no mask in '.*masks' \(and 1 more images\)"):
        opened(tmp_path)
    for name in ("x", "y", "z"):
        mask(tmp_path / f"masks/{name}.png")
    with pytest.raises(ValueError, match=r"masks/z\.png' is a mask without an image in '.*images'"):
        opened(tmp_path)


def test_a_mask_of_another_size(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks")
    mask(tmp_path / "masks/1.png", size=(4, 6))
    images = SemanticImages(
        (str(tmp_path / "images/1.png"),), (str(tmp_path / "masks/1.png"),), ("a", "b", "c"), Meaning()
    )
    with pytest.raises(ImageError, match=r"mask '.*masks/1\.png' is 4 x 6 pixels, its image '.*1\.png' is 6 x 4"):
        images.read(0)


def test_an_index_beyond_the_classes(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks", values=((0, 5, 11),))
    train, _ = opened(tmp_path, classes=5)
    with pytest.raises(
        ImageError, match=r"masks/\d\.png' holds the index 5 \(and 1 other values\), but 5 classes have 0 to 4, 255 for"
    ):
        train.read(0)
    train, _ = opened(tmp_path, classes=11, void=-1)
    with pytest.raises(ImageError, match=r"holds the index 11, but 11 classes have 0 to 10$"):
        train.read(0)
    train, _ = opened(tmp_path, classes=4, reduce_zero_label=True)
    with pytest.raises(ImageError, match=r"holds the index 5 .*4 classes have 1 to 4"):
        train.read(0)


def test_a_palette_is_read_as_indices(tmp_path):
    pair(tmp_path / "images", tmp_path / "masks")
    for k in range(3):
        made = Image.fromarray(np.resize([0, 1, 2], (4, 6)).astype(np.uint8), "P")
        made.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255] + [0] * 759)
        made.save(tmp_path / f"masks/{k}.png")
    assert opened(tmp_path)[0].read(0).mask[0].tolist() == [0, 1, 2, 0, 1, 2]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        opened(tmp_path / "nowhere")
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match="has no images beside masks: train/images and train/masks"):
        opened(tmp_path)
    (tmp_path / "masks").mkdir()
    with pytest.raises(ValueError, match="has no training images"):
        opened(tmp_path)
    pair(tmp_path / "images", tmp_path / "masks", 1)
    with pytest.raises(ValueError, match="a single image"):
        opened(tmp_path)
    (tmp_path / "c/leftImg8bit/train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"Cityscapes has a folder '.*gtFine/train'"):
        opened(tmp_path / "c")


def test_cityscapes_without_its_masks(tmp_path):
    picture(tmp_path / "leftImg8bit/train/bonn/bonn_0_leftImg8bit.png")
    (tmp_path / "gtFine/train").mkdir(parents=True)
    with pytest.raises(ValueError, match="has neither labelTrainIds nor labelIds"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"layout": "voc"}, "got 'voc'"),
        ({"classes": 1}, "got 1"),
        ({"classes": ("a",)}, "at least two"),
        ({"void": -2}, "got -2"),
        ({"val_fraction": 1.0}, "got 1.0"),
        ({"train_limit": 0}, "got 0"),
    ],
)
def test_mistakes_in_the_spec_are_named(knobs, why):
    with pytest.raises(ValueError, match=why):
        SemanticSpec(root="x", **knobs)


# --- to evaluate on ---------------------------------------------------------------------------------------------------


def test_the_part_to_evaluate_on(tmp_path):
    pair(tmp_path / "a/train/images", tmp_path / "a/train/masks", 3)
    pair(tmp_path / "a/val/images", tmp_path / "a/val/masks", 2)
    pair(tmp_path / "b/images", tmp_path / "b/masks", 4)
    pair(tmp_path / "c/val/images", tmp_path / "c/val/masks", 2)
    names = ("x", "y", "z")
    for root, count in (("a", 2), ("b", 4), ("c", 2)):
        part = open_semantic_part(SemanticSpec(root=str(tmp_path / root)), names)
        assert (len(part), part.classes) == (count, names)
    with pytest.raises(ValueError, match="are not the model's: 1 is 'q' and 'y'"):
        open_semantic_part(SemanticSpec(root=str(tmp_path / "a"), classes=("x", "q", "z")), names)
    with pytest.raises(ValueError, match="not the model's: 2 and 3"):
        open_semantic_part(SemanticSpec(root=str(tmp_path / "a"), classes=("x", "q")), names)
    with pytest.raises(ValueError, match="said to have 4 classes, the model has 3"):
        open_semantic_part(SemanticSpec(root=str(tmp_path / "a"), classes=4), names)


def test_camvid_as_it_lies_beside_a_checkout(measured_data):
    train, val = opened(measured_data / "camvid_small", classes=11, void=11)
    assert (len(train), len(val)) == (80, 30)
    sample = train.read(0)
    assert sample.image.shape == (3, 360, 480)
    assert sample.mask.shape == (360, 480)
    assert -1 <= int(sample.mask.min()) <= int(sample.mask.max()) <= 10
