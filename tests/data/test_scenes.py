"""Scenes: pixels tell where boxes and masks must be; batches; chance from (seed, epoch, image) alone.

Object k of a drawn scene is a rectangle of full brightness in channel k: wherever the pixels go, it can be found.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.data.conftest import instances, opened, opened_panoptic, panoptic
from vispe.data.augment import photo
from vispe.data.batches import Parts, Plan, Shares
from vispe.data.scenes import (
    EvalScenes,
    SceneSpec,
    TrainScenes,
    cropped,
    evaluation_transform,
    finished,
    fitted,
    flipped,
    normalised,
    padded,
    read_scene,
    resized,
    scene,
    scene_loader,
    train_transform,
)

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")
DETR = SceneSpec(short=(24, 40), long=64, crop_short=(20, 30), crop_sides=(12, 24))
JITTER = SceneSpec(crop="jitter", size=(40, 48), scale=(0.4, 2.0))
PLAIN = SceneSpec(crop="none", eval_short=32, eval_long=50)


def draw(size, corners, masks=True):
    image = torch.zeros(3, *size, dtype=torch.uint8)
    drawn = torch.zeros(len(corners), *size, dtype=torch.bool)
    for k, (x0, y0, x1, y1) in enumerate(corners):
        image[k, y0:y1, x0:x1] = 255
        drawn[k, y0:y1, x0:x1] = True
    boxes = torch.tensor(corners, dtype=torch.float32).reshape(-1, 4)
    return scene(image, boxes, torch.arange(len(corners)), drawn if masks else None)


@st.composite
def scenes(draw_):
    h, w = draw_(st.integers(20, 60)), draw_(st.integers(20, 60))
    corners = []
    for _ in range(draw_(st.integers(0, 3))):
        x0, y0 = draw_(st.integers(0, w - 8)), draw_(st.integers(0, h - 8))
        corners.append((x0, y0, draw_(st.integers(x0 + 6, w)), draw_(st.integers(y0 + 6, h))))
    return draw((h, w), corners)


def corners_of(target, size):
    """Boxes in pixels, as corners."""
    cx, cy, w, h = (target["boxes"] * torch.tensor([size[1], size[0]] * 2)).unbind(1)
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], 1)


def tight(mask):
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], dtype=torch.float32)


def assert_right(image, target, slack):
    """Every object that is left is where its pixels are, and what is not left has no pixels to speak of."""
    size = tuple(image.shape[1:])
    assert image.dtype == torch.uint8
    assert set(target) == {"labels", "boxes", "masks"}
    assert target["masks"].dtype == torch.bool
    assert target["masks"].shape == (len(target["labels"]), *size)
    assert target["boxes"].dtype == torch.float32
    assert target["boxes"].shape == (len(target["labels"]), 4)
    for label, box, mask in zip(target["labels"].tolist(), corners_of(target, size), target["masks"], strict=True):
        assert mask.any()
        assert mask[image[label] > 247].all()
        assert not mask[image[label] < 8].any()
        assert (tight(mask) - box).abs().max() <= slack
        assert box.min() >= -1e-4
        assert (box <= torch.tensor([size[1], size[0]] * 2) + 1e-4).all()
    for gone in set(range(3)) - set(target["labels"].tolist()):
        seen = image[gone] > 127
        assert min(seen.any(0).sum(), seen.any(1).sum()) <= 1


@given(scenes(), st.integers(0, 2**31))
def test_detr_keeps_them_together(it, seed):
    image, target = finished(photo(it, train_transform(DETR), seed))
    assert min(image.shape[1:]) in DETR.short or max(image.shape[1:]) > DETR.long - 3
    assert max(image.shape[1:]) <= DETR.long + 2  # a short side that is right but for rounding stays as it is
    assert_right(image, target, slack=2.5)  # two resizes, the second of up to 40 / 12


@given(scenes(), st.integers(0, 2**31))
def test_jitter_keeps_them_together(it, seed):
    image, target = finished(photo(it, train_transform(JITTER), seed))
    assert image.shape[1] <= 40
    assert image.shape[2] <= 48
    assert_right(image, target, slack=1.01)


@given(scenes(), st.integers(0, 2**31))
def test_evaluation_and_plain_training_keep_them_together(it, seed):
    image, target = finished(evaluation_transform(PLAIN)(it))
    assert_right(image, target, slack=1.01)
    again, _ = finished(photo(it, train_transform(PLAIN), seed))
    assert torch.equal(again, image) or torch.equal(again, finished(flipped(evaluation_transform(PLAIN)(it)))[0]) or (
        (again.int() - finished(evaluation_transform(PLAIN)(flipped(it)))[0].int()).abs().max() <= 1
    )  # fmt: skip


@given(scenes(), st.data())
def test_crops_are_exact(it, data):
    h, w = data.draw(st.integers(1, it.size[0])), data.draw(st.integers(1, it.size[1]))
    top, left = data.draw(st.integers(0, it.size[0] - h)), data.draw(st.integers(0, it.size[1] - w))
    image, target = finished(cropped(it, top, left, (h, w)))
    assert torch.equal(image, it.image[:, top : top + h, left : left + w])
    kept = target["labels"].tolist()
    assert kept == [k for k in range(len(it.labels)) if image[k].any()]
    for k, box, mask in zip(kept, corners_of(target, (h, w)), target["masks"], strict=True):
        assert torch.equal(mask, image[k] == 255)
        assert torch.allclose(box, tight(mask), atol=1e-3)


@given(scenes())
def test_flips_are_exact(it):
    image, target = finished(flipped(it))
    assert torch.equal(image, it.image.flip(-1))
    for k, box in enumerate(corners_of(target, it.size)):
        assert torch.equal(target["masks"][k], image[k] == 255)
        assert torch.allclose(box, tight(image[k] == 255), atol=1e-3)


@given(scenes(), st.sampled_from([2, 3]))
def test_enlarging_is_exact(it, factor):
    size = (it.size[0] * factor, it.size[1] * factor)
    _, target = finished(resized(it, size))
    expected = it.masks.repeat_interleave(factor, 1).repeat_interleave(factor, 2).bool()
    assert torch.equal(target["masks"], expected)
    assert torch.allclose(corners_of(target, size), it.boxes * factor, atol=1e-3)


def test_shrinking_takes_the_pixel_under_the_centre():
    """A column of odd width, by 3: torchvision's own rule would take columns 0, 3, 6 and move the mask by a pixel."""
    it = draw((9, 9), [(4, 0, 9, 9)])
    _, target = finished(resized(it, (3, 3)))
    assert target["masks"][0].int().tolist() == [[0, 1, 1]] * 3  # centres at 1, 4, 7
    assert torch.allclose(corners_of(target, (3, 3))[0], torch.tensor([4 / 3, 0, 3, 3]))


def test_what_is_cut_away_is_gone_everywhere():
    it = draw((20, 30), [(0, 0, 10, 10), (15, 5, 30, 20), (12, 0, 14, 3)])
    _, target = finished(cropped(it, 5, 14, (15, 16)))
    assert target["labels"].tolist() == [1]
    assert torch.allclose(target["boxes"], torch.tensor([[(1 + 16) / 2 / 16, 0.5, 15 / 16, 1]]))
    assert target["masks"].shape == (1, 15, 16)


def test_a_box_without_a_pixel_of_its_mask_is_gone():
    """An L: the box reaches into the crop, the mask does not."""
    it = draw((20, 20), [(0, 0, 20, 20)])
    masks = it.masks.clone()
    masks[:, 5:, 5:] = 0
    _, target = finished(cropped(it._replace(masks=masks), 8, 8, (10, 10)))
    assert [len(part) for part in target.values()] == [0, 0, 0]
    _, target = finished(cropped(it._replace(masks=None), 8, 8, (10, 10)))
    assert target["labels"].tolist() == [0]
    assert set(target) == {"labels", "boxes"}


@pytest.mark.parametrize("spec", [DETR, JITTER, PLAIN])
@pytest.mark.parametrize("masks", [True, False])
def test_nothing_to_see_is_legal(spec, masks):
    image, target = finished(photo(draw((30, 40), [], masks), train_transform(spec), 3))
    assert target["boxes"].shape == (0, 4)
    assert target["labels"].shape == (0,)
    assert target["labels"].dtype == torch.int64
    if masks:
        assert target["masks"].shape == (0, *image.shape[1:])


def test_colours_change_and_places_do_not():
    it = draw((30, 40), [(5, 5, 25, 25)])
    it = it._replace(image=type(it.image)(it.image // 2 + 40))
    spec = SceneSpec(crop="none", eval_short=30, eval_long=40, flip=0, distort=1.0)
    changed = [finished(photo(it, train_transform(spec), seed)) for seed in range(5)]
    assert any(not torch.equal(image, it.image) for image, _ in changed)
    assert all(torch.equal(target["masks"][0], it.masks[0].bool()) for _, target in changed)


def test_flip_is_a_probability():
    it = draw((30, 40), [(0, 0, 10, 10)])
    for flip, expected in ((0.0, {0}), (1.0, {1}), (0.5, {0, 1})):
        transform = train_transform(SceneSpec(crop="none", eval_short=30, eval_long=40, flip=flip))
        seen = [finished(photo(it, transform, seed))[0] for seed in range(12)]
        assert {int(torch.equal(image, it.image.flip(-1))) for image in seen} == expected


@pytest.mark.parametrize(
    ("size", "short", "long", "expected"),
    [
        ((480, 640), 800, 1333, (800, 1066)),  # DETR's README
        ((640, 480), 800, 1333, (1066, 800)),
        ((427, 640), 800, 1333, (800, 1199)),
        ((200, 640), 800, 1333, (417, 1333)),
        ((800, 900), 800, 1333, (800, 900)),
        ((500, 500), 320, 400, (320, 320)),
        ((1, 500), 100, 200, (1, 500)),
    ],
)
def test_sizes_of_evaluation(size, short, long, expected):
    assert fitted(*size, short, long) == expected


def test_sizes_as_transformers_has_them():
    peer = pytest.importorskip("transformers.image_transforms", reason="the peer")
    rule = getattr(peer, "get_size_with_aspect_ratio", None)
    if rule is None:
        pytest.skip("this transformers keeps its rule elsewhere")
    draw_ = np.random.default_rng(0)
    for h, w in draw_.integers(100, 1500, (200, 2)).tolist():
        assert fitted(h, w, 800, 1333) == rule((h, w), 800, 1333)


@pytest.mark.parametrize(
    "knobs",
    [
        {"short": ()},
        {"short": (0,)},
        {"crop_sides": (600, 384)},
        {"scale": (2.0, 1.0)},
        {"scale": (0.0, 1.0)},
        {"flip": 1.2},
        {"distort": -0.1},
        {"multiple": 0},
        {"eval_long": 0},
    ],
)
def test_knobs(knobs):
    with pytest.raises(ValueError, match="got"):
        SceneSpec(**knobs)


def test_objects_that_do_not_belong_together():
    with pytest.raises(ValueError, match="not of the same objects"):
        scene(torch.zeros(3, 5, 6, dtype=torch.uint8), torch.zeros(1, 4), torch.zeros(2, dtype=torch.long), None)
    with pytest.raises(ValueError, match="not of the same objects"):
        scene(torch.zeros(3, 5, 6, dtype=torch.uint8), torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, 6, 5).bool())


# --- batches ----------------------------------------------------------------------------------------------------------


def items():
    return [
        finished(draw((20, 30), [(0, 0, 10, 10)])),
        finished(draw((25, 15), [])),
        finished(draw((8, 8), [(1, 1, 8, 8)])),
    ]


@pytest.mark.parametrize(("multiple", "size"), [(1, (25, 30)), (16, (32, 32)), (7, (28, 35))])
def test_padding(multiple, size):
    images, mask, targets = padded(items(), multiple=multiple)
    assert images.shape == (3, 3, *size)
    assert mask.shape == (3, *size)
    for k, (image, target) in enumerate(items()):
        h, w = image.shape[1:]
        assert torch.equal(images[k, :, :h, :w], image)
        assert mask[k, :h, :w].all()
        assert mask[k].sum() == h * w
        assert images[k].sum() == image.sum()
        assert torch.equal(targets[k]["boxes"], target["boxes"])  # parts of the image, not of the canvas
        assert targets[k]["masks"].shape == (len(target["labels"]), *size)
        assert torch.equal(targets[k]["masks"][:, :h, :w], target["masks"])
        assert targets[k]["masks"].sum() == target["masks"].sum()


def test_a_canvas_that_is_given():
    assert padded(items(), size=(40, 48))[0].shape == (3, 3, 40, 48)
    with pytest.raises(ValueError, match="25 x 30 does not go into a canvas of 24 x 48"):
        padded(items(), size=(24, 48))


def test_padding_is_zero_once_normalised():
    images, mask, _ = padded(items())
    made = normalised(images, mask, (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
    assert made.dtype == torch.float32
    assert made[1, :, :, 15:].abs().max() == 0
    assert torch.allclose(made[0, :, 0, 0], torch.tensor([(1 - 0.5) / 0.2, -0.4 / 0.25, -0.3 / 0.5]))


def coco(tmp_path, count=6):
    """Images of different sizes with a rectangle or two each, the last without."""
    content = {"images": [], "annotations": [], "categories": [{"id": 5, "name": "red"}, {"id": 9, "name": "green"}]}
    for k in range(count):
        w, h = 40 + 3 * k, 36 + 2 * k
        content["images"].append({"id": 100 + k, "file_name": f"{k}.png", "height": h, "width": w})
        for channel in range(0 if k == count - 1 else 1 + k % 2):
            x, y = 3 + k + 9 * channel, 4 + 2 * k
            outline = [[x, y, x + 15, y, x + 15, y + 12, x, y + 12]]
            entry = {"id": len(content["annotations"]) + 1, "image_id": 100 + k, "category_id": (5, 9)[channel]}
            entry |= {"bbox": [x, y, 15, 12], "area": 180, "segmentation": outline, "iscrowd": 0}
            content["annotations"].append(entry)
    data = opened(tmp_path, content)
    for k in range(count):
        pixels = np.zeros((36 + 2 * k, 40 + 3 * k, 3), dtype=np.uint8)
        for annotation in content["annotations"]:
            if annotation["image_id"] == 100 + k:
                x, y, w, h = annotation["bbox"]
                pixels[y : y + h, x : x + w, 0 if annotation["category_id"] == 5 else 1] = 255
        Image.fromarray(pixels).save(tmp_path / f"images/{k}.png")
    return data


def by_image(batches):
    """(image, how often seen before) -> its real pixels and its target."""
    made, count = {}, itertools.count()
    for batch in batches:
        assert batch.problem == ""
        for k, index in enumerate(batch.indices.tolist()):
            h, w = batch.sizes[k].tolist()
            made[index, next(count)] = (batch.images[k, :, :h, :w], batch.targets[k])
    return made


def test_training_scenes(tmp_path):
    data = TrainScenes(coco(tmp_path), DETR, 1, masks=True)
    batch = data.__getitems__([(0, 3), (0, 5)])
    assert batch.images.shape[2:] == batch.mask.shape[1:] == tuple(batch.sizes.amax(0).tolist())
    assert batch.image_ids.tolist() == [103, 105]
    assert batch.originals.tolist() == [[42, 49], [46, 55]]
    assert batch.indices.tolist() == [3, 5]
    assert len(batch.targets[1]["labels"]) == 0
    for k in range(2):
        h, w = batch.sizes[k].tolist()
        target = batch.targets[k]
        assert_right(batch.images[k, :, :h, :w], {**target, "masks": target["masks"][:, :h, :w]}, slack=2.5)


def test_jitter_pads_to_its_size(tmp_path):
    batch = TrainScenes(coco(tmp_path), JITTER, 1, masks=True).__getitems__([(0, 3), (2, 1)])
    assert batch.images.shape == (2, 3, 40, 48)
    assert batch.targets[0]["masks"].shape[1:] == (40, 48)


@pytest.mark.parametrize("spec", [DETR, JITTER])
def test_a_scene_looks_the_same_whoever_brings_it(tmp_path, spec):
    data = coco(tmp_path)
    torch.manual_seed(0)
    alone = TrainScenes(data, spec, 1, masks=True).__getitems__([(2, 1)])
    torch.manual_seed(9)
    torch.rand(5)
    among = TrainScenes(data, spec, 1, masks=True).__getitems__([(2, 4), (2, 1)])
    h, w = alone.sizes[0].tolist()
    assert alone.sizes[0].tolist() == among.sizes[1].tolist()
    assert torch.equal(alone.images[0, :, :h, :w], among.images[1, :, :h, :w])
    assert torch.equal(alone.targets[0]["boxes"], among.targets[1]["boxes"])
    others = [TrainScenes(data, spec, seed, masks=True).__getitems__([(epoch, 1)]) for seed, epoch in ((1, 3), (2, 2))]
    assert all(not torch.equal(other.images, alone.images) for other in others)


def test_worker_processes_bring_the_same(tmp_path):
    data, plan = coco(tmp_path), Plan(images=6, batch_size=2, epochs=2, seed=0)
    here = by_image(scene_loader(TrainScenes(data, DETR, 1, masks=True), Parts(plan), 0))
    there = by_image(scene_loader(TrainScenes(data, DETR, 1, masks=True), Parts(plan), 2))
    assert here.keys() == there.keys()
    assert len(here) == 12
    for key, (image, target) in here.items():
        assert torch.equal(image, there[key][0])
        assert torch.equal(target["boxes"], there[key][1]["boxes"])


def test_evaluation_scenes(tmp_path):
    data = coco(tmp_path)
    batches = list(scene_loader(EvalScenes(data, PLAIN, masks=False), Shares(6, 4, 4, 3), 0))
    assert batches[0].indices.tolist() == [-1, -1]  # 6 images in 4 shares of 2
    batches = list(scene_loader(EvalScenes(data, PLAIN, masks=False), Shares(6, 4), 0))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]
    assert batches[0].sizes[0].tolist() == [32, 35]
    assert set(batches[0].targets[0]) == {"labels", "boxes"}
    assert torch.allclose(batches[0].targets[0]["boxes"], torch.tensor([[10.5 / 40, 10 / 36, 15 / 40, 12 / 36]]))


def test_crowds_are_no_examples(tmp_path):
    data = opened(tmp_path, instances())
    assert len(read_scene(data[0], masks=True).labels) == 0
    assert read_scene(data[1], masks=True).labels.tolist() == [1, 0]


def test_segments_are_objects(tmp_path):
    it = read_scene(opened_panoptic(tmp_path, panoptic())[1], masks=True)
    assert it.labels.tolist() == [1, 0]
    assert it.masks.sum((1, 2)).tolist() == [36, 6]


def test_a_file_that_breaks_later_is_named(tmp_path):
    data = coco(tmp_path)
    (tmp_path / "images/1.png").write_bytes(b"junk")
    Image.new("RGB", (10, 10)).save(tmp_path / "images/2.png")
    for index, reason in ((1, "cannot read image '.*1.png'"), (2, "2.png: it is 10 x 10 pixels, .*json says 46 x 40")):
        batch = TrainScenes(data, DETR, 1, masks=True).__getitems__([(0, 0), (0, index)])
        with pytest.raises(ValueError, match=reason):
            raise ValueError(batch.problem)
        assert EvalScenes(data, DETR, masks=True).__getitems__([index]).problem == batch.problem


def test_coco_tiny(measured_data):
    from vispe.data.coco import open_coco

    root = measured_data / "coco_tiny"
    spec = SceneSpec(short=(160, 192), long=320, crop_short=(128, 160), crop_sides=(96, 128), multiple=32)
    for kind in ("instances", "panoptic"):
        data = open_coco(root / "train2017", root / f"annotations/{kind}_train2017.json")
        batch = TrainScenes(data, spec, 0, masks=True).__getitems__([(0, k) for k in range(8)])
        assert batch.problem == ""
        assert batch.images.shape[2] % 32 == batch.images.shape[3] % 32 == 0
        for target in batch.targets:
            assert (target["boxes"] >= 0).all()
            assert (target["boxes"] <= 1).all()
            assert target["masks"].any(-1).any(-1).all()
