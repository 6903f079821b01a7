"""Panoptic quality: cases worked by hand, the definition with sets of pixels, torchmetrics where it agrees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.metrics.panoptic import PanopticTally, Segment

CAR, PERSON, SKY = 0, 1, 2
THINGS = [True, True, False]


def tally(truth, true_segments, found, found_segments):
    made = PanopticTally(THINGS)
    made.add(np.array(truth), true_segments, np.array(found), found_segments)
    return made


def test_perfect():
    """Numbers of segments need not be the same."""
    truth, found = [[1, 1, 2], [3, 3, 3]], [[7, 7, 5], [9, 9, 9]]
    made = tally(truth, [Segment(1, CAR), Segment(2, CAR), Segment(3, SKY)],
                 found, [Segment(9, SKY), Segment(5, CAR), Segment(7, CAR)])  # fmt: skip
    assert made.counts.tolist() == [[2, 2, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    told = made.summary()
    assert [told[name] for name in ("PQ", "SQ", "RQ", "PQ_things", "PQ_stuff")] == [1, 1, 1, 1, 1]
    assert (told["classes"], told["classes_things"], told["classes_stuff"]) == (2, 1, 1)
    assert made.per_class()[PERSON] is None


def test_split():
    """One car of 10 pixels, found as two of 6 and 4: the first matches with 6 / 10, the second is extra."""
    made = tally([[1] * 10], [Segment(1, CAR)], [[1] * 6 + [2] * 4], [Segment(1, CAR), Segment(2, CAR)])
    assert made.counts[CAR].tolist() == [0.6, 1, 1, 0]
    assert made.per_class()[CAR] == {"PQ": pytest.approx(0.4), "SQ": 0.6, "RQ": pytest.approx(2 / 3)}


def test_merged():
    """Two cars of 5, found as one of 10: 5 / 10 is not above one half."""
    made = tally([[1] * 5 + [2] * 5], [Segment(1, CAR), Segment(2, CAR)], [[1] * 10], [Segment(1, CAR)])
    assert made.counts[CAR].tolist() == [0, 0, 1, 2]
    assert made.per_class()[CAR] == {"PQ": 0, "SQ": 0, "RQ": 0}


def test_merged_unequally():
    """Cars of 6 and 4, found as one of 10: 6 / 10 matches, the small one is missed."""
    made = tally([[1] * 6 + [2] * 4], [Segment(1, CAR), Segment(2, CAR)], [[1] * 10], [Segment(1, CAR)])
    assert made.counts[CAR].tolist() == [0.6, 1, 0, 1]


def test_another_class():
    made = tally([[1] * 4], [Segment(1, CAR)], [[1] * 4], [Segment(1, PERSON)])
    assert made.counts.tolist() == [[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert made.summary()["PQ"] == 0
    assert made.summary()["PQ_stuff"] is None


def test_void_leaves_the_union():
    """A car of 4, found as 8 of which 4 are void: IoU 4 / (8 + 4 - 4 - 4) = 1."""
    made = tally([[1] * 4 + [0] * 4], [Segment(1, CAR)], [[1] * 8], [Segment(1, CAR)])
    assert made.counts[CAR].tolist() == [1, 1, 0, 0]


def test_predicted_void_does_not():
    """A car of 10 of which 4 are left out: IoU 6 / 10. torchmetrics would say 1."""
    made = tally([[1] * 10], [Segment(1, CAR)], [[1] * 6 + [0] * 4], [Segment(1, CAR)])
    assert made.counts[CAR].tolist() == [0.6, 1, 0, 0]


@pytest.mark.parametrize(("void", "extra"), [(5, 1), (6, 0)])
def test_mostly_void_is_no_mistake(void, extra):
    """A found car of 10 pixels: only more than half of void forgives it."""
    made = tally([[0] * void + [1] * (10 - void)], [Segment(1, SKY)], [[1] * 10], [Segment(1, CAR)])
    assert made.counts.tolist() == [[0, 0, extra, 0], [0, 0, 0, 0], [0, 0, 0, 1]]


def test_crowd():
    """A crowd of persons neither matches nor is missed; a person found in it is no mistake, a car is."""
    truth = [[1] * 6 + [2] * 4]
    segments = [Segment(1, PERSON, crowd=True), Segment(2, SKY)]
    made = tally(truth, segments, [[1] * 6 + [2] * 4], [Segment(1, PERSON), Segment(2, SKY)])
    assert made.counts.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    made = tally(truth, segments, [[1] * 6 + [2] * 4], [Segment(1, CAR), Segment(2, SKY)])
    assert made.counts[CAR].tolist() == [0, 0, 1, 0]


def test_crowd_and_void_together_are_more_than_half():
    truth = [[1] * 3 + [0] * 3 + [2] * 4]
    made = tally(truth, [Segment(1, PERSON, crowd=True), Segment(2, SKY)], [[1] * 10], [Segment(1, PERSON)])
    assert made.counts[PERSON].tolist() == [0, 0, 0, 0]


def test_nothing_found():
    made = tally([[1, 1, 2, 0]], [Segment(1, CAR), Segment(2, SKY)], [[0] * 4], [])
    assert made.counts[:, 3].tolist() == [1, 0, 1]
    assert made.summary()["PQ"] == 0


def test_nothing_there():
    """All void: whatever is found is ignored, and there is no quality to tell."""
    made = tally([[0] * 4], [], [[1] * 4], [Segment(1, CAR)])
    assert not made.counts.any()
    assert made.summary()["PQ"] is None
    assert made.summary()["classes"] == 0


def test_a_true_segment_without_pixels_is_missed():
    assert tally([[0] * 4], [Segment(1, CAR)], [[0] * 4], []).counts[CAR].tolist() == [0, 0, 0, 1]


def test_the_mean_is_over_classes():
    """A car found as well as can be, a sky by 0.6."""
    made = tally([[1] * 4 + [2] * 10], [Segment(1, CAR), Segment(2, SKY)],
                 [[1] * 4 + [2] * 6 + [0] * 4], [Segment(1, CAR), Segment(2, SKY)])  # fmt: skip
    told = made.summary()
    assert (told["PQ"], told["PQ_things"], told["PQ_stuff"]) == (0.8, 1, 0.6)


@pytest.mark.parametrize(
    ("found", "segments", "reason"),
    [
        ([[1, 1, 1]], [Segment(1, CAR)], "size"),
        ([[1, 2]], [Segment(1, CAR)], "predicted segment 2 is drawn"),
        ([[1, 1]], [Segment(1, CAR), Segment(3, CAR)], "segment 3 has no pixels"),
        ([[1, 1]], [Segment(1, 3)], "one of 3 labels"),
        ([[0, 0]], [Segment(0, CAR)], "an id above 0"),
        ([[1, 1]], [Segment(1, CAR), Segment(1, SKY)], "twice"),
    ],
)
def test_refusals(found, segments, reason):
    with pytest.raises(ValueError, match=reason):
        tally([[1, 1]], [Segment(1, CAR)], found, segments)


# --- against others ---------------------------------------------------------------------------------------------------


@st.composite
def scene(draw, void=True, crowds=True):
    """A map of up to five segments in blobs, and what they are."""
    rows = draw(st.lists(st.lists(st.integers(0 if void else 1, 5), min_size=4, max_size=4), min_size=3, max_size=3))
    pixels = np.kron(np.array(rows), np.ones((1, 2), dtype=int))
    ids = sorted(set(pixels.ravel().tolist()) - {0})
    labels = draw(st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids)))
    crowd = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    segments, kinds = [], set()
    for k, (number, label) in enumerate(zip(ids, labels, strict=True)):
        is_crowd = crowds and crowd[k] and label not in kinds  # at most one of a class, as in COCO
        kinds |= {label} if is_crowd else set()
        segments.append(Segment(number, label, is_crowd))
    return pixels, segments


def brute(truth, true_segments, found, found_segments):
    """The definition with sets of pixels: [class][IoU, matched, extra, missed]."""
    cells = [(r, c) for r in range(truth.shape[0]) for c in range(truth.shape[1])]
    void = {p for p in cells if truth[p] == 0}
    one = {s: {p for p in cells if truth[p] == s.id} for s in true_segments}
    other = {s: {p for p in cells if found[p] == s.id} for s in found_segments}
    counts = [[0.0, 0, 0, 0] for _ in THINGS]
    used = set()
    for t, true_pixels in one.items():
        if t.crowd:
            continue
        for f, pixels in other.items():
            iou = len(true_pixels & pixels) / len((true_pixels | pixels) - (void & pixels))
            if f.label == t.label and iou > 0.5:
                counts[t.label][0] += iou
                counts[t.label][1] += 1
                used |= {("true", t), ("found", f)}
        if ("true", t) not in used:
            counts[t.label][3] += 1
    for f, pixels in other.items():
        ignored = set(void)
        for t, true_pixels in one.items():
            if t.crowd and t.label == f.label:
                ignored |= true_pixels
        if ("found", f) not in used and len(pixels & ignored) <= len(pixels) / 2:
            counts[f.label][2] += 1
    return counts


@given(scene(), scene(crowds=False))
def test_as_the_definition(truth, found):
    assert np.allclose(tally(*truth, *found).counts, brute(*truth, *found))


@given(st.lists(st.tuples(scene(), scene(crowds=False)), max_size=4), st.integers(0, 4))
def test_parts_add_up(images, cut):
    whole, one, two = (PanopticTally(THINGS) for _ in range(3))
    for k, (truth, found) in enumerate(images):
        whole.add(*truth, *found)
        (one if k < cut else two).add(*truth, *found)
    one.unpack(one.packed() + two.packed())
    assert np.allclose(one.counts, whole.counts)
    assert one.summary() == pytest.approx(whole.summary())


@pytest.mark.parametrize("seed", range(20))
def test_as_torchmetrics(seed):
    """Predictions without void, stuff in one piece, no crowds: there the definitions are one."""
    torch = pytest.importorskip("torch")
    detection = pytest.importorskip("torchmetrics.detection")
    draw = np.random.default_rng(seed)

    def image(void):
        blocks = np.kron(draw.integers(0 if void else 1, 5, (4, 4)), np.ones((3, 3), dtype=int))
        noise = draw.integers(0 if void else 1, 5, blocks.shape)
        return np.where(draw.random(blocks.shape) < 0.15, noise, blocks)

    truth = image(True)
    found = np.where(draw.random(truth.shape) < 0.2, image(False), np.where(truth == 0, 4, truth))
    segments = [Segment(1, CAR), Segment(2, CAR), Segment(3, PERSON), Segment(4, SKY)]
    made = PanopticTally(THINGS)
    made.add(
        truth, [s for s in segments if (truth == s.id).any()], found, [s for s in segments if (found == s.id).any()]
    )
    peer = detection.PanopticQuality(things={CAR, PERSON}, stuffs={SKY}, allow_unknown_preds_category=True)
    label = np.array([9, CAR, CAR, PERSON, SKY])

    def coloured(pixels):
        return torch.from_numpy(np.stack([label[pixels], pixels], -1))[None]

    # torchmetrics refuses unknown classes only in predictions: 9 is void in the truth
    assert made.summary()["PQ"] == pytest.approx(float(peer(coloured(found), coloured(truth))))


def test_the_truth_of_coco_tiny_is_perfect(measured_data):
    """Crowds apart, which nothing can find: what is predicted in them is ignored."""
    from vispe.data.coco import open_coco

    root = measured_data / "coco_tiny"
    data = open_coco(root / "val2017", root / "annotations/panoptic_val2017.json").subset(range(0, 100, 4))
    made = PanopticTally(data.things)
    for sample in data:
        columns = sample.ids.tolist(), sample.labels.tolist(), sample.crowd.tolist()
        segments = [Segment(*row) for row in zip(*columns, strict=True)]
        made.add(sample.segments(), segments, sample.segments(), [s._replace(crowd=False) for s in segments])
    told = made.summary()
    assert [told[name] for name in ("PQ", "SQ", "RQ", "PQ_things", "PQ_stuff")] == [1, 1, 1, 1, 1]
