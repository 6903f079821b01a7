"""Average precision: known answers, the two engines against each other, masks."""

import numpy as np
import pytest

from vispe.metrics.detection import Found, Truth, average_precision

pytest.importorskip("pycocotools", reason="the extra `detect` brings it")
pytest.importorskip("faster_coco_eval", reason="the extra `detect` brings it")
ENGINES = ("faster-coco-eval", "pycocotools")
engines = pytest.mark.parametrize("engine", ENGINES)


def truth(boxes, labels, crowd=None, area=None, masks=None):
    boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    sides = boxes[:, 2:] - boxes[:, :2]
    crowd = np.zeros(len(boxes), dtype=bool) if crowd is None else np.array(crowd)
    return Truth(
        boxes, np.array(labels, dtype=np.int64), crowd, sides.prod(1) if area is None else np.array(area), masks
    )


def found(boxes, labels, scores, masks=None):
    boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    return Found(boxes, np.array(labels, dtype=np.int64), np.array(scores, dtype=np.float32), masks)


NOTHING, NONE = truth([], []), found([], [], [])
SMALL, MEDIUM, LARGE = [10, 10, 30, 30], [50, 50, 100, 100], [100, 100, 300, 300]


@engines
def test_perfect(engine):
    true = {7: truth([SMALL, MEDIUM], [0, 1]), 3: truth([LARGE, MEDIUM], [1, 1])}
    told = average_precision(true, {k: found(t.boxes, t.labels, [0.9, 0.8]) for k, t in true.items()}, 3, engine=engine)
    known = {name: value for name, value in told.items() if name not in ("per_class", "images", "objects", "AR1")}
    assert set(known) == {"AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR10", "AR100", "AR_small",
                          "AR_medium", "AR_large"}  # fmt: skip
    assert all(value == pytest.approx(1, abs=1e-12) for value in known.values())
    assert told["AR1"] == pytest.approx((1 + 2 / 3) / 2)  # one of the two in image 3
    assert told["per_class"][:2] == pytest.approx([1, 1])
    assert told["per_class"][2] is None
    assert (told["images"], told["objects"]) == (2, 4)


@engines
def test_two_images_by_hand(engine):
    """Three true boxes of one class. By score: right (0.9), wrong (0.8), right (0.7); one is missed.

    Recall 1/3 at precision 1, then 2/3 at precision 2/3: of the 101 recalls 0, 0.01 ... 34 are at most 1/3, 33 more at
    most 2/3. AP50 = (34 + 33 * 2/3) / 101. The second right box has IoU 0.8: it counts for 0.5 to 0.8, seven of the ten
    thresholds; above, AP is 34 / 101.
    """
    true = {1: truth([LARGE, MEDIUM], [0, 0]), 2: truth([[0, 0, 100, 100]], [0])}
    made = {1: found([LARGE, [400, 400, 450, 450]], [0, 0], [0.9, 0.8]), 2: found([[0, 0, 100, 80]], [0], [0.7])}
    told = average_precision(true, made, 1, engine=engine)
    both, first = (34 + 33 * 2 / 3) / 101, 34 / 101
    assert told["AP50"] == pytest.approx(both)
    assert told["AP75"] == pytest.approx(both)
    assert told["AP"] == pytest.approx((7 * both + 3 * first) / 10)
    assert told["AR100"] == pytest.approx((7 * 2 / 3 + 3 / 3) / 10)
    assert told["AP_medium"] == 0
    assert told["AP_small"] is None


@engines
def test_nothing_found(engine):
    told = average_precision({1: truth([SMALL], [1])}, {1: NONE}, 2, engine=engine)
    assert (told["AP"], told["AR100"], told["AP_small"]) == (0, 0, 0)
    assert told["per_class"] == [None, 0]


@engines
def test_an_image_without_truth_counts_its_mistakes(engine):
    """The mistake comes first: precision is 1/2 at every recall."""
    true, made = {1: truth([SMALL], [0]), 2: NOTHING}, {1: found([SMALL], [0], [0.5])}
    assert average_precision(true, made | {2: NONE}, 1, engine=engine)["AP"] == pytest.approx(1)
    assert average_precision(true, made | {2: found([SMALL], [0], [0.9])}, 1, engine=engine)["AP"] == pytest.approx(0.5)


@engines
@pytest.mark.parametrize("made", [NONE, found([SMALL], [0], [0.9])])
def test_no_truth_at_all(engine, made):
    told = average_precision({1: NOTHING}, {1: made}, 2, engine=engine)
    assert told["AP"] is None
    assert told["AR_large"] is None
    assert told["per_class"] == [None, None]
    assert (told["images"], told["objects"]) == (1, 0)


@engines
def test_a_crowd_is_neither_missed_nor_a_mistake(engine):
    true = {1: truth([SMALL, LARGE], [0, 0], crowd=[False, True])}
    inside = [[110, 110, 150, 150], [200, 200, 250, 250]]
    told = average_precision(true, {1: found([*inside, SMALL], [0, 0, 0], [0.9, 0.8, 0.7])}, 1, engine=engine)
    assert told["AP"] == pytest.approx(1)
    assert told["objects"] == 1


def test_the_area_of_the_mask_says_what_is_small():
    told = average_precision({1: truth([MEDIUM], [0], area=[900])}, {1: found([MEDIUM], [0], [1])}, 1)
    assert told["AP_small"] == pytest.approx(1)
    assert told["AP_medium"] is None


def rectangles(boxes, size=(120, 120)):
    from pycocotools import mask

    made = np.zeros((len(boxes), *size), dtype=np.uint8)
    for k, (x0, y0, x1, y1) in enumerate(boxes):
        made[k, y0:y1, x0:x1] = 1
    rles = mask.encode(np.asfortranarray(made.transpose(1, 2, 0)))
    return [{"size": list(size), "counts": rle["counts"].decode()} for rle in rles]


@engines
def test_masks_are_judged_by_their_pixels(engine):
    """Boxes that are wrong do not matter; half of the pixels is an IoU of exactly 0.5, which counts at 0.5 alone."""
    boxes = [[0, 0, 60, 60], [60, 60, 120, 120]]
    true = {1: truth(boxes, [0, 1], masks=rectangles(boxes))}
    made = {1: found([[0, 0, 1, 1]] * 2, [0, 1], [0.9, 0.8], rectangles([boxes[0], [60, 60, 120, 90]]))}
    told = average_precision(true, made, 2, "masks", engine)
    assert told["per_class"] == pytest.approx([1, 0.1])
    assert told["AP50"] == pytest.approx(1)
    assert made[1].masks == rectangles([boxes[0], [60, 60, 120, 90]])  # nothing is done to what was given


@pytest.mark.parametrize("kind", ["boxes", "masks"])
@pytest.mark.parametrize("seed", range(3))
def test_the_engines_agree(kind, seed):
    draw = np.random.default_rng(seed)

    def some(count):
        corner, side = draw.integers(0, 70, (count, 2)), draw.integers(4, 50, (count, 2))
        return np.concatenate([corner, corner + side], 1)

    true, made = {}, {}
    for image in range(20):
        boxes, labels = some(6), draw.integers(0, 3, 6)
        true[image] = truth(boxes, labels, crowd=draw.random(6) < 0.15, masks=rectangles(boxes))
        moved = np.concatenate([(boxes + draw.integers(-4, 5, boxes.shape)).clip(0, 120), some(10)])
        moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
        scores = draw.integers(0, 20, 16) / 20  # with ties
        made[image] = found(moved, np.concatenate([labels, draw.integers(0, 3, 10)]), scores, rectangles(moved))
    one, other = (average_precision(true, made, 4, kind, engine) for engine in ENGINES)
    assert one.pop("per_class")[:3] == pytest.approx(other.pop("per_class")[:3], abs=1e-12)
    assert one == pytest.approx(other, abs=1e-12)
    assert 0.05 < one["AP"] < 0.9


def test_as_torchmetrics():
    torch = pytest.importorskip("torch")
    peer = pytest.importorskip("torchmetrics.detection").MeanAveragePrecision()
    draw = np.random.default_rng(0)
    true, made = {}, {}
    for image in range(10):
        corner, side = draw.uniform(0, 300, (5, 2)), draw.uniform(10, 200, (5, 2))
        boxes, labels = np.concatenate([corner, corner + side], 1), draw.integers(0, 2, 5)
        true[image] = truth(boxes, labels)
        made[image] = found(boxes + draw.normal(0, 2, boxes.shape), labels, draw.random(5))

    def tensors(objects, *names):
        return [{name: torch.from_numpy(getattr(one, name)) for name in names} for one in objects.values()]

    peer.update(tensors(made, "boxes", "labels", "scores"), tensors(true, "boxes", "labels"))
    told, known = average_precision(true, made, 2), peer.compute()
    names = {
        "AP": "map",
        "AP50": "map_50",
        "AP75": "map_75",
        "AP_medium": "map_medium",
        "AR100": "mar_100",
        "AR1": "mar_1",
    }
    assert [told[name] for name in names] == pytest.approx([float(known[name]) for name in names.values()], abs=1e-6)


def test_a_box_inside_out_is_a_mistake():
    """torchmetrics passes its negative area on to pycocotools, which then ignores it."""
    made = found([[30, 10, 10, 30], SMALL], [0, 0], [0.9, 0.8])
    assert average_precision({1: truth([SMALL], [0])}, {1: made}, 1)["AP"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("true", "made", "reason"),
    [
        ({1: NOTHING, 2: NOTHING, 3: NOTHING}, {1: NONE}, r"no prediction for image 2 \(and 1 more\)"),
        ({1: NOTHING}, {1: NONE, 5: NONE}, "no truth for image 5"),
        ({1: truth([SMALL], [2])}, {1: NONE}, "image 1: labels are 0 to 1"),
        ({1: NOTHING}, {1: found([SMALL], [-1], [0.5])}, "image 1: labels are 0 to 1"),
        ({1: NOTHING}, {1: found([SMALL], [0], [float("nan")])}, "a score is nan"),
        ({1: NOTHING}, {1: found([[0, 0, float("inf"), 1]], [0], [0.1])}, "not finite"),
        ({1: NOTHING}, {1: found([SMALL], [0, 1], [0.1, 0.2])}, "2 labels for 1 boxes"),
    ],
)
def test_refusals(true, made, reason):
    with pytest.raises(ValueError, match=reason):
        average_precision(true, made, 2)


def test_masks_that_are_not_there():
    with pytest.raises(ValueError, match="image 1: 0 masks for 1 objects"):
        average_precision({1: truth([SMALL], [0])}, {1: NONE}, 2, "masks")


def test_an_unknown_engine():
    with pytest.raises(ValueError, match="got 'mine'"):
        average_precision({1: truth([SMALL], [0])}, {1: NONE}, 2, engine="mine")


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_the_truth_of_coco_tiny_is_perfect(measured_data, kind):
    from vispe.data.coco import open_coco

    root = measured_data / "coco_tiny"
    data = open_coco(root / "val2017", root / "annotations/instances_val2017.json").subset(range(0, 100, 4))
    true = {s.image_id: Truth(s.boxes, s.labels, s.crowd, s.area, s.rles()) for s in data}
    made = {k: Found(t.boxes, t.labels, np.ones(len(t.labels)), t.masks) for k, t in true.items()}
    told = average_precision(true, made, len(data.classes), kind)
    assert [told[name] for name in ("AP", "AP50", "AP_small", "AR100")] == pytest.approx([1, 1, 1, 1])
