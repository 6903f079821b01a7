"""Two files, or one that is parted; classes and kinds that must agree; images that cannot be used."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import drawn, instances, panoptic, write
from vispe.data.coco_parts import CocoSpec, open_parts, sound_scenes
from vispe.data.coco_results import write_png


def spec(root, **knobs):
    given = {"train": "instances.json", "train_images": "images", "val": "instances.json", "val_images": "images"}
    return CocoSpec(root=str(root), **{**given, **knobs})


def many(tmp_path, count=20):
    content = instances()
    content["images"] = [{"id": k + 1, "file_name": f"{k}.png", "height": 8, "width": 9} for k in range(count)]
    content["annotations"] = [
        {"id": k + 1, "image_id": k + 1, "category_id": 3, "bbox": [0, 0, 4, 4], "area": 16} for k in range(count)
    ]
    write(tmp_path, content)
    return tmp_path


def test_two_files(tmp_path):
    write(tmp_path, instances())
    train, val = open_parts(spec(tmp_path))
    assert (len(train), len(val)) == (3, 3)
    assert len(open_parts(spec(tmp_path, first=2))[0]) == 2
    assert len(open_parts(spec(tmp_path, first=99))[0]) == 3


def test_one_file_is_parted_the_same_way_every_time(tmp_path):
    root = many(tmp_path)
    train, val = open_parts(spec(root, val=None, val_part=0.25))
    ids = [{data[i].image_id for i in range(len(data))} for data in (train, val)]
    assert (len(ids[0]), len(ids[1])) == (15, 5)
    assert ids[0] | ids[1] == set(range(1, 21))
    again = open_parts(spec(root, val=None, val_part=0.25))[1]
    assert [again[i].image_id for i in range(5)] == [val[i].image_id for i in range(5)]
    assert len(open_parts(spec(root, val=None, val_part=0.25, first=3))[0]) == 3
    assert len(open_parts(spec(root, val=None, val_part=0.001))[1]) == 1


def test_absolute_paths_leave_the_root(tmp_path):
    write(tmp_path, instances())
    where = {"train": str(tmp_path / "instances.json"), "train_images": str(tmp_path / "images")}
    assert len(open_parts(spec(tmp_path, **where))[0]) == 3


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"val_part": 1.0}, "val_part lies between 0 and 1, got 1.0"),
        ({"first": 0}, "first is a number of images of at least 1, got 0"),
        ({"corrupt": "maybe"}, "corrupt is refuse or skip, got 'maybe'"),
        ({"val": None, "val_part": 0.99}, "3 images are too few to hold out 0.99 of; give data.val"),
        ({"train": "nowhere.json"}, "nowhere.json"),
        ({"val_images": "nowhere"}, "nowhere"),
        ({"val": "panoptic.json"}, "has 2 classes"),
        ({"val": "same_classes.json"}, "instances.json is of instances"),
        ({"val": "others.json"}, "'cat' as class 0, the model 'car'"),
    ],
)
def test_mistakes_are_named(tmp_path, knobs, said):
    write(tmp_path, instances())
    (tmp_path / "panoptic").mkdir()
    (tmp_path / "same_classes").mkdir()
    for name, change in (("panoptic", {"name": "tree"}), ("same_classes", {})):
        content = panoptic()
        content["categories"] = instances()["categories"] + ([{"id": 4, **change}] if change else [])
        for row in content["annotations"][0]["segments_info"]:
            row["category_id"] = 3
        write(tmp_path, content, f"{name}.json")
        write_png(tmp_path / name / "a.png", drawn())
        write_png(tmp_path / name / "b.png", np.zeros((10, 12), dtype=np.int32))
    others = instances()
    others["categories"][1]["name"] = "cat"
    write(tmp_path, others, "others.json")
    if knobs.get("val") == "panoptic.json":
        said = "has 3 classes, the model's head 2"
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        open_parts(spec(tmp_path, **knobs))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_that_cannot_be_used(tmp_path):
    root = many(tmp_path, 4)
    (root / "images" / "1.png").write_text("junk")
    Image.new("RGB", (5, 5)).save(root / "images" / "2.png")
    train, _ = open_parts(spec(root))
    seen = []
    kept, told = sound_scenes(train, "skip", lambda done, total: seen.append((done, total)))
    assert [kept[i].image_id for i in range(len(kept))] == [1, 4]
    assert "1.png" in told[0]
    assert "it is 5 x 5 pixels" in told[1]
    assert seen[-1] == (4, 4)
    with pytest.raises(ValueError, match=r"1.png.*\(and 1 more\); data.corrupt=skip goes on without"):
        sound_scenes(train, "refuse")
    assert json.loads((root / "instances.json").read_text())["images"][1]["file_name"] == "1.png"
