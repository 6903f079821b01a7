"""Reading everything once: counts by hand, and each kind of damage in its own line."""

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import drawn, instances, opened, opened_panoptic, panoptic
from vispe.data.coco import open_coco
from vispe.data.coco_verify import verify

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")


def test_counts(tmp_path):
    told = verify(opened(tmp_path, instances()))
    assert (told.images, told.empty, told.objects, told.crowds, told.masks) == (3, 1, 3, 1, 3)
    assert told.per_class == {"car": 1, "dog": 1}
    assert (told.problems, told.notes) == ((), ())


def test_panoptic_counts(tmp_path):
    told = verify(opened_panoptic(tmp_path, panoptic()))
    assert (told.images, told.empty, told.objects, told.masks, told.problems) == (3, 2, 2, 2, ())


def test_data_without_masks(tmp_path):
    content = instances()
    for entry in content["annotations"]:
        del entry["segmentation"]
    told = verify(opened(tmp_path, content))
    assert (told.objects, told.masks, told.problems) == (3, 0, ())


def test_damage_is_named_line_by_line(tmp_path):
    content = instances()
    content["annotations"][2]["segmentation"] = {"size": [8, 9], "counts": [72]}
    content["annotations"][1]["category_id"] = 4
    data = opened(tmp_path, content, bad="skip")
    (tmp_path / "images/b.jpg").write_bytes(b"junk")
    Image.new("RGB", (9, 7)).save(tmp_path / "images/a.jpg")
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (5, 4)).save(tmp_path / "images/empty.jpg", exif=turned)
    lines = verify(data, workers=0, shown=False).problems
    wanted = ["annotation 2: there is no category 4", "cannot read image '.*b.jpg'", "a.jpg: it is 9 x 7 pixels",
              "annotation 3 of image 7: its mask is empty", "empty.jpg: it is 4 x 5 pixels, .* says 5 x 5"]  # fmt: skip
    assert len(lines) == len(wanted)
    for line, pattern in zip(lines, wanted, strict=True):
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(line)


def test_an_image_that_is_turned(tmp_path):
    data = opened(tmp_path, instances())
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (9, 8)).save(tmp_path / "images/a.jpg", exif=turned)
    (line,) = verify(data).problems
    assert "a.jpg: it is 8 x 9 pixels (turned as its EXIF data ask for), " in line


def test_masks_that_leave_their_box(tmp_path):
    content = instances()
    content["annotations"][0]["bbox"] = [5, 2, 1, 3]
    (note,) = verify(opened(tmp_path, content)).notes
    assert note.endswith("1 masks leave their box, first that of annotation 1")


def test_segments_that_do_not_fit(tmp_path):
    lines = verify(opened_panoptic(tmp_path, panoptic(), np.where(drawn() == 300, 0, drawn()))).problems
    assert len(lines) == 1
    assert "segment 300 is not in the PNG" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["instances", "panoptic"])
def test_coco_tiny(measured_data, kind):
    root = measured_data / "coco_tiny"
    told = verify(open_coco(root / "val2017", root / f"annotations/{kind}_val2017.json"))
    assert (told.images, told.problems, told.notes) == (100, (), ())
    assert told.objects == told.masks == {"instances": 712, "panoptic": 1078}[kind]
    assert told.crowds == 5
