"""COCO's files: what is read, what is refused and in which words, and the real ones where they lie."""

import pickle

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import drawn, instances, opened, opened_panoptic, panoptic, write
from vispe.data.coco import check_classes, open_coco, read_png

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")

# --- what is read -----------------------------------------------------------------------------------------------------


def test_samples(tmp_path):
    data = opened(tmp_path, instances())
    assert (len(data), data.kind, data.clipped, data.problems) == (3, "instances", 0, ())
    sample = data[1]
    assert (sample.image_id, sample.size, sample.path) == (7, (8, 9), tmp_path / "images/a.jpg")
    assert sample.boxes.dtype == np.float32
    assert sample.boxes.tolist() == [[2, 2, 6, 5], [0.5, 1, 2.75, 8]]
    assert sample.ids.tolist() == [1, 3]
    assert sample.area.tolist() == [12, 3]
    assert sample.crowd.tolist() == [False, False]
    assert data[0].crowd.tolist() == [True]


def test_labels_are_in_the_order_of_the_ids(tmp_path):
    data = opened(tmp_path, instances())
    assert data.classes == ("car", "dog")
    assert [category.id for category in data.categories] == [3, 18]
    assert data[1].labels.tolist() == [1, 0]
    assert data.things.tolist() == [True, True]


def test_masks(tmp_path):
    data = opened(tmp_path, instances())
    masks = data[1].masks()
    expected = np.zeros((2, 8, 9), dtype=bool)
    expected[0, 2:5, 2:6] = True
    expected[1, :3, 0] = True
    assert masks.dtype == bool
    assert np.array_equal(masks, expected)
    assert [rle["size"] for rle in data[1].rles()] == [[8, 9]] * 2
    assert data[0].masks()[0, :5].all()
    assert not data[0].masks()[0, 5:].any()


def test_an_image_without_objects(tmp_path):
    sample = opened(tmp_path, instances())[2]
    assert (sample.boxes.shape, sample.labels.shape, sample.masks().shape) == ((0, 4), (0,), (0, 5, 5))
    assert sample.rles() == []


def test_no_annotations_at_all(tmp_path):
    data = opened(tmp_path, instances() | {"annotations": []})
    assert len(data) == 3
    assert data[0].boxes.shape == (0, 4)


def test_boxes_without_masks_can_be_read(tmp_path):
    content = instances()
    for entry in content["annotations"]:
        del entry["segmentation"]
    content["annotations"][2]["segmentation"] = []
    sample = opened(tmp_path, content)[1]
    assert len(sample.boxes) == 2
    with pytest.raises(ValueError, match=r"instances\.json: annotation 1: a mask is polygons or run lengths, got None"):
        sample.masks()


def test_a_missing_area_is_that_of_the_box(tmp_path):
    content = instances()
    del content["annotations"][2]["area"]
    assert opened(tmp_path, content)[1].area.tolist() == [12, 2.25 * 7]


def test_subset_and_loader_processes(tmp_path):
    data = opened(tmp_path, instances())
    some = pickle.loads(pickle.dumps(data.subset([2, 1])))
    assert [sample.image_id for sample in (some[0], some[1])] == [9, 7]
    assert np.array_equal(some[1].masks(), data[1].masks())
    assert some.subset([1])[0].image_id == 7
    with pytest.raises(IndexError):
        some[2]


def test_boxes_are_clipped_and_counted(tmp_path):
    content = instances()
    content["annotations"][0]["bbox"] = [-3, 2, 5, 3]
    content["annotations"][2]["bbox"] = [5, 1, 4.0000001, 7]  # rounding
    data = opened(tmp_path, content)
    assert data.clipped == 1
    assert data[1].boxes.tolist() == [[0, 2, 2, 5], [5, 1, 9, 8]]
    assert data.notes == (f"{tmp_path / 'instances.json'}: 1 boxes were clipped, first that of annotation 1",)


def test_panoptic(tmp_path):
    data = opened_panoptic(tmp_path, panoptic())
    assert (data.kind, data.classes, data.things.tolist()) == ("panoptic", ("car", "sky"), [True, False])
    sample = data[1]
    assert sample.ids.tolist() == [300, 70000]
    assert sample.labels.tolist() == [1, 0]
    assert np.array_equal(sample.segments(), drawn())
    assert np.array_equal(sample.masks(), np.stack([drawn() == 300, drawn() == 70000]))
    assert len(sample.rles()) == 2
    assert not data[0].segments().any()  # an image without segments, and one without a PNG
    assert data[2].segments().shape == (5, 5)
    assert data[2].masks().shape == (0, 5, 5)


# --- what is refused --------------------------------------------------------------------------------------------------


def changed(what, **knobs):
    """A change of ``instances()``: entry k of a list, updated; a knob that is None is taken out."""

    def change(content):
        part, k = what
        content[part][k] |= knobs
        content[part][k] = {name: value for name, value in content[part][k].items() if value is not None}

    return change


def repeated(part, k, **knobs):
    return lambda content: content[part].append({**content[part][k], **knobs})


BOX = ("annotations", 0)
BAD = {
    "outside": (changed(BOX, bbox=[20, 2, 4, 3]), r"annotation 1: its box \[20, 2, 4, 3\] lies outside .* of 9 x 8"),
    "flat": (changed(BOX, bbox=[2, 2, 4, 0]), r"annotation 1: its box has zero area: \[2, 2, 4, 0\]"),
    "negative": (changed(BOX, bbox=[2, 2, -4, 3]), "annotation 1: its box has zero area"),
    "infinite": (changed(BOX, bbox=[2, 2, 1e999, 3]), "annotation 1: its box is not of finite numbers"),
    "huge": (changed(BOX, bbox=[2, 10**400, 1, 3]), "annotation 1: its box is not of finite numbers"),
    "nan": (changed(BOX, bbox=[2, float("nan"), 1, 3]), "annotation 1: its box is not of finite numbers"),
    "huge area": (changed(BOX, area=10**400), "annotation 1: its area is 1000"),
    "short": (changed(BOX, bbox=[2, 2, 4]), r"annotation 1: its box should be .* got \[2, 2, 4\]"),
    "no box": (changed(BOX, bbox=None), "annotation 1: its box should be .* got None"),
    "no area": (changed(BOX, area=0), "annotation 1: its area is 0"),
    "category": (changed(BOX, category_id=99), "annotation 1: there is no category 99"),
    "odd category": (changed(BOX, category_id=[3]), r"annotation 1: there is no category \[3\]"),
    "image": (changed(BOX, image_id=8), "annotation 1 is of image 8, which is not in the file"),
    "odd image": (changed(BOX, image_id={}), "annotation 1 is of image {}, which is not in the file"),
    "mask size": (changed(("annotations", 2), segmentation={"size": [9, 8], "counts": [72]}),
                  r"annotation 3: its mask is of size \[9, 8\], its image \[8, 9\]"),
    "mask length": (changed(("annotations", 2), segmentation={"size": [8, 9], "counts": [70]}),
                    "annotation 3: its run lengths cover 70 pixels, its image has 72"),
    "polygon": (changed(BOX, segmentation=[[1, 1, 2, 2]]), "annotation 1: a polygon has at least three points"),
    "twice": (repeated("annotations", 0), "annotation 1 is there twice"),
    "no id": (changed(BOX, id=None), "annotation None has no whole number as 'id'"),
    "image twice": (repeated("images", 1, file_name="b.jpg"), "image 7 is there twice, the second is 'b.jpg'"),
    "image size": (changed(("images", 2), height=0), r"image 9 has no 'height' and 'width', got \[0, 5\]"),
    "image name": (changed(("images", 2), file_name=None), "an image has a whole number 'id' and a 'file_name'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_named(tmp_path, case):
    change, reason = BAD[case]
    content = instances()
    change(content)
    with pytest.raises(ValueError, match=reason) as refused:
        opened(tmp_path, content)
    assert "instances.json" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    data = opened(tmp_path, content, bad="skip")
    assert len(data.problems) == 1
    assert len(data.ids) >= 2
    for k in range(len(data)):
        data[k].masks()


def test_the_first_is_named_and_the_others_counted(tmp_path):
    content = instances()
    content["annotations"][0]["category_id"] = content["annotations"][1]["category_id"] = 1
    with pytest.raises(ValueError, match=r"there is no category 1 \(and 1 more\); data.corrupt=skip, or --bad skip"):
        opened(tmp_path, content)
    assert [len(data.boxes) for data in opened(tmp_path, content, bad="skip")] == [0, 1, 0]


def test_missing_images_are_counted(tmp_path):
    images, path = write(tmp_path, instances())
    (images / "a.jpg").unlink()
    (images / "empty.jpg").unlink()
    with pytest.raises(ValueError, match=r"2 of 3 images are missing, first '.*a.jpg'; data.corrupt=skip"):
        open_coco(images, path)
    data = open_coco(images, path, bad="skip")
    assert [sample.image_id for sample in data] == [50]
    assert len(data.problems) == 1  # their annotations are no further problem
    (images / "b.jpg").unlink()
    with pytest.raises(ValueError, match="none of its 3 images can be used"):
        open_coco(images, path, bad="skip")


def test_images_in_folders_below(tmp_path):
    content = instances()
    (tmp_path / "images/part").mkdir(parents=True)
    content["images"][1]["file_name"] = "part/a.jpg"
    assert opened(tmp_path, content)[1].path == tmp_path / "images/part/a.jpg"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "this is not JSON"),
        ("\xff", "this is not JSON"),
        ("[" * 100000, "this is not JSON"),
        ("[]", "has no list of 'images'"),
        ('{"images": [], "annotations": {}, "categories": []}', "has no list of 'annotations'"),
        ('{"images": [], "annotations": [3], "categories": []}', "has no list of 'annotations'"),
        ('{"images": [], "annotations": []}', "has no list of 'categories'"),
        ('{"images": [], "annotations": [], "categories": []}', "it has no categories"),
        (
            '{"images": [], "annotations": [], "categories": [{"id": "a", "name": "b"}]}',
            "whole number",
        ),
        ('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "b"}, {"id": 1, "name": "c"}]}', "twice"),
        (
            '{"images": [], "annotations": [], "categories": [{"id": 1, "name": "b"}, {"id": 7, "name": "b"}]}',
            "categories 1 and 7 are both called 'b'",
        ),
        ('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "b"}]}', "the file has no images"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, reason):
    (tmp_path / "odd.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=reason) as refused:
        open_coco(tmp_path, tmp_path / "odd.json")
    assert "odd.json" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match="there is no folder of images"):
        open_coco(tmp_path / "none", tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"none\.json: no such file"):
        open_coco(tmp_path, tmp_path / "none.json")


def first(annotations):
    return annotations[0]["segments_info"]


BAD_SEGMENTS = {
    "category": (lambda a: first(a)[0].update(category_id=4), "segment 300 of image 7: there is no category 4"),
    "twice": (lambda a: first(a).append(first(a)[0]), "segment 300 of image 7 is there twice"),
    "id": (lambda a: first(a)[0].update(id=0), "segment 0 of image 7 is no whole number from 1"),
    "no segment": (lambda a: first(a).append("x"), "segment 'x' of image 7 is no whole number"),
    "box": (lambda a: first(a)[0].update(bbox=[0, 0, 0, 4]), "segment 300 of image 7: its box has zero area"),
    "image": (lambda a: a[0].update(image_id=70), "an annotation is of image 70, which is not in the file"),
    "image twice": (lambda a: a.append(a[0]), "the annotation of image 7 is there twice"),
    "no list": (lambda a: a[1].update(segments_info=3), "the annotation of image 50 is without a 'file_name' or"),
}


@pytest.mark.parametrize("case", BAD_SEGMENTS)
def test_bad_segments_are_named(tmp_path, case):
    change, reason = BAD_SEGMENTS[case]
    content = panoptic()
    change(content["annotations"])
    with pytest.raises(ValueError, match=reason):
        opened_panoptic(tmp_path, content)
    data = opened_panoptic(tmp_path, content, bad="skip")
    assert len(data.problems) == 1
    for k in range(len(data)):
        assert set(np.unique(data[k].segments())) - {0} <= set(data[k].ids.tolist())


def test_segments_of_the_png_and_of_the_json(tmp_path):
    extra = drawn()
    extra[7, 8] = 5
    with pytest.raises(ValueError, match=r"a\.png: segment 5 is in the PNG and not in .*panoptic\.json"):
        opened_panoptic(tmp_path, panoptic(), extra)[1].masks()
    assert opened_panoptic(tmp_path, panoptic(), extra, bad="skip")[1].segments()[7, 8] == 0
    with pytest.raises(ValueError, match=r"a\.png: segment 300 is not in the PNG but in .*panoptic\.json"):
        opened_panoptic(tmp_path, panoptic(), np.where(drawn() == 300, 0, drawn()))[1].masks()


def test_bad_pngs_are_named(tmp_path):
    data = opened_panoptic(tmp_path, panoptic(), np.zeros((9, 8), dtype=np.int32))
    with pytest.raises(ValueError, match=r"a.png: it is of size \[9, 8\], its image \[8, 9\]"):
        data[1].segments()
    path = tmp_path / "panoptic/a.png"
    Image.new("L", (9, 8)).save(path)
    with pytest.raises(ValueError, match=r"a\.png: a panoptic PNG has three colours, this one is 'L'"):
        data[1].segments()
    path.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"a\.png: it is no whole PNG"):
        data[1].segments()
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.png: no such file"):
        data[1].segments()


def test_numbers_in_colours(tmp_path):
    Image.new("RGB", (2, 1), (1, 2, 3)).save(tmp_path / "x.png")
    assert read_png(tmp_path / "x.png", (1, 2)).tolist() == [[1 + 2 * 256 + 3 * 256**2] * 2]


def test_classes_against_a_head(tmp_path):
    data = opened(tmp_path, instances())
    check_classes(data, 2)
    check_classes(data, ["car", "dog"])
    with pytest.raises(ValueError, match="has 2 classes, the model's head 91"):
        check_classes(data, 91)
    with pytest.raises(ValueError, match="has 'car' as class 0, the model 'dog'"):
        check_classes(data, ("dog", "car"))


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "objects", "images_with"), [("train", 746, 98), ("val", 712, 100)])
def test_coco_tiny(measured_data, part, objects, images_with):
    root = measured_data / "coco_tiny"
    data = open_coco(root / f"{part}2017", root / f"annotations/instances_{part}2017.json")
    assert (len(data), len(data.categories), len(data.ids)) == (100, 80, objects)
    assert sum(len(sample.ids) > 0 for sample in data) == images_with
    assert (data.categories[79].id, data.classes[79]) == (90, "toothbrush")
    for k in range(0, 100, 10):
        masks = data[k].masks()
        assert masks.sum((1, 2)).tolist() == data[k].area.tolist()


@pytest.mark.parametrize("part", ["train", "val"])
def test_coco_tiny_panoptic(measured_data, part):
    root = measured_data / "coco_tiny"
    data = open_coco(root / f"{part}2017", root / f"annotations/panoptic_{part}2017.json")
    assert (len(data), len(data.categories), int(data.things.sum())) == (100, 133, 80)
    for k in range(0, 100, 10):
        assert data[k].masks().sum((1, 2)).tolist() == data[k].area.tolist()
