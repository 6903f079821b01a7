"""Labelled images: folders, zips, names; and what is refused."""

import zipfile

import pytest
import torch
from PIL import Image

from vispe.data.classification import DataSpec, open_data, open_part, open_unlabelled


def picture(path, colour=(200, 30, 30), size=(20, 24)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def tree(root, parts=("train", "val"), classes=("ants", "bees"), count=3):
    for part in parts:
        for name in classes:
            for k in range(count):
                picture(root / part / name / f"{k}.png")
    return root


def opened(root, **knobs):
    return open_data(DataSpec(root=str(root), **knobs))


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["val", "valid", "validation", "test"])
def test_train_and_val(tmp_path, part):
    train, val = opened(tree(tmp_path, ("train", part)))
    assert train.classes == val.classes == ("ants", "bees")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.name(4).endswith("train/bees/1.png")
    assert val.name(0).endswith(f"{part}/ants/0.png")
    assert train.read(0).shape == (3, 24, 20)


def test_val_may_lack_a_class(tmp_path):
    tree(tmp_path, classes=("a", "b", "c"))
    for path in (tmp_path / "val" / "b").iterdir():
        path.unlink()
    (tmp_path / "val" / "b").rmdir()
    _, val = opened(tmp_path)
    assert val.labels.tolist() == [0, 0, 0, 2, 2, 2]


def test_one_folder_is_split_by_class_and_seed(tmp_path):
    tree(tmp_path, ("",), count=10)
    train, val = opened(tmp_path, val_fraction=0.3)
    assert val.labels.bincount().tolist() == [3, 3]
    names = [{i.name(k) for k in range(len(i))} for i in (train, val)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 20
    again = opened(tmp_path, val_fraction=0.3)[1]
    assert torch.equal(again.where, val.where)
    other = opened(tmp_path, val_fraction=0.3, split_seed=1)[1]
    assert not torch.equal(other.where, val.where)


def test_deep_folders_hidden_files_and_other_files(tmp_path):
    tree(tmp_path)
    picture(tmp_path / "train" / "ants" / "deep" / "er" / "x.JPG")
    picture(tmp_path / "train" / "ants" / ".hidden.png")
    (tmp_path / "train" / "ants" / "notes.txt").write_text("no image")
    picture(tmp_path / ".cache" / "y.png")
    train, _ = opened(tmp_path)
    assert train.labels.bincount().tolist() == [4, 3]


def test_limits_take_the_classes_in_turn(tmp_path):
    train, val = opened(tree(tmp_path, count=10), train_limit=7, val_limit=2)
    assert sorted(train.labels.bincount().tolist()) == [3, 4]
    assert val.labels.bincount().tolist() == [1, 1]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_missing_and_empty_folders(tmp_path):
    with pytest.raises(ValueError, match="there is no folder or zip"):
        opened(tmp_path / "none")
    with pytest.raises(ValueError, match="has no images in class folders"):
        opened(tmp_path)
    picture(tmp_path / "loose.png")
    with pytest.raises(ValueError, match="has no images in class folders"):
        opened(tmp_path)


def test_an_empty_class_folder_is_named(tmp_path):
    tree(tmp_path)
    (tmp_path / "train" / "wasps").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*wasps.* has no images"):
        opened(tmp_path)


def test_a_class_folder_whose_name_begins_another_is_not_taken_for_it(tmp_path):
    tree(tmp_path, classes=("ant", "antler"))
    for path in (tmp_path / "train" / "ant").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"class folder .*/ant' has no images"):
        opened(tmp_path)


def test_a_single_class(tmp_path):
    with pytest.raises(ValueError, match="single class, 'ants'"):
        opened(tree(tmp_path, classes=("ants",)))


def test_train_without_val(tmp_path):
    tree(tmp_path, ("train", "more"))
    with pytest.raises(ValueError, match="none of val, valid, validation, test"):
        opened(tmp_path)


def test_a_class_that_training_does_not_have(tmp_path):
    tree(tmp_path)
    picture(tmp_path / "val" / "wasps" / "0.png")
    with pytest.raises(ValueError, match="class 'wasps', which training does not have: ants, bees"):
        opened(tmp_path)


def test_one_image_a_class_leaves_nothing_to_validate(tmp_path):
    with pytest.raises(ValueError, match="no image for validation"):
        opened(tree(tmp_path, ("",), count=1))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({}, "data.root=FOLDER"),
        ({"root": "x", "val_fraction": 1.0}, "val_fraction lies between 0 and 1, got 1.0"),
        ({"root": "x", "train_limit": 0}, "at least 1 image, got 0"),
    ],
)
def test_knobs(knobs, said):
    with pytest.raises(ValueError, match=said):
        DataSpec(**knobs)


# --- zips -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", ["", "everything/"])
def test_a_zip_is_read_without_unpacking(tmp_path, top):
    tree(tmp_path / "made")
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        archive.writestr(f"{top}README.md", "words")
        for path in sorted((tmp_path / "made").rglob("*.png")):
            archive.write(path, f"{top}{path.relative_to(tmp_path / 'made')}")
    train, val = opened(tmp_path / "d.zip")
    assert (len(train), len(val), train.classes) == (6, 6, ("ants", "bees"))
    assert train.read(5).shape == (3, 24, 20)
    assert train.name(0) == f"{tmp_path}/d.zip:{top}train/ants/0.png"


# --- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CIFAR", "ImageFolder", "wrap_dataset_for_transforms_v2"])
def test_unknown_names(name, tmp_path):
    with pytest.raises(ValueError, match=f"torchvision has no data set '{name}'"):
        opened(tmp_path, name=name)


def test_a_torchvision_set_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="torchvision's CIFAR10 in"):
        opened(tmp_path, name="CIFAR10", download=False)


def test_a_torchvision_set(tmp_path, monkeypatch):
    from torchvision import datasets

    class Made(datasets.VisionDataset):
        classes = ("zero", "one")

        def __init__(self, root, train=True, download=False):
            super().__init__(root)
            self.targets = [0, 1] * (4 if train else 2)

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, k):
            return Image.new("L", (8, 8), 10 * k), self.targets[k]

    monkeypatch.setattr(datasets, "CIFAR10", Made)
    train, val = opened(tmp_path, name="CIFAR10")
    assert (len(train), len(val), train.classes) == (8, 4, ("zero", "one"))
    assert torch.allclose(train.read(3), torch.full((3, 8, 8), 30 / 255))
    assert val.name(1) == "CIFAR10 test[1]"


# --- to evaluate on ---------------------------------------------------------------------------------------------------


# --- without labels ---------------------------------------------------------------------------------------------------


def test_class_folders_are_split_alike_with_and_without_labels(tmp_path):
    tree(tmp_path, ("",), count=10)
    for one, two in zip(opened(tmp_path), open_unlabelled(DataSpec(root=str(tmp_path))), strict=True):
        assert torch.equal(one.where, two.where)


def test_images_beside_folders_count(tmp_path):
    tree(tmp_path, ("",), count=2)
    picture(tmp_path / "one.png")
    train, val = open_unlabelled(DataSpec(root=str(tmp_path), val_limit=1))
    assert (len(train), len(val)) == (4, 1)


@pytest.mark.parametrize("folder", ["", "photos/", "train/"])
def test_a_flat_zip_or_folder(tmp_path, folder):
    for k in range(5):
        picture(tmp_path / "d" / folder / f"{k}.png")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for path in sorted((tmp_path / "d").rglob("*.png")):
            archive.write(path, path.relative_to(tmp_path / "d"))
    for root in ("d", "z.zip"):
        train, val = open_unlabelled(DataSpec(root=str(tmp_path / root)))
        assert (len(train), len(val)) == (4, 1)
        assert set(train.where.tolist()) | set(val.where.tolist()) == set(range(5))


def test_parts_without_class_folders(tmp_path):
    for k, part in enumerate(("train", "train", "val")):
        picture(tmp_path / part / f"{k}.png")
    train, val = open_unlabelled(DataSpec(root=str(tmp_path)))
    assert [train.name(k).rsplit("/", 1)[1] for k in range(2)] == ["0.png", "1.png"]
    assert val.name(0).endswith("val/2.png")


def test_no_images_without_labels_either(tmp_path):
    with pytest.raises(ValueError, match="has no images"):
        open_unlabelled(DataSpec(root=str(tmp_path)))
    picture(tmp_path / "one.png")
    with pytest.raises(ValueError, match="there must be at least two"):
        open_unlabelled(DataSpec(root=str(tmp_path)))


def test_a_part_to_evaluate_on(tmp_path):
    tree(tmp_path / "both")
    assert len(open_part(tmp_path / "both", ("ants", "bees"))) == 6
    tree(tmp_path / "plain", ("",), classes=("bees",))
    assert open_part(tmp_path / "plain", ("ants", "bees")).labels.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="class 'bees', which training does not have"):
        open_part(tmp_path / "plain", ("ants", "wasps"))
