"""IoU worked out by hand, void left out, parts that add up, torchmetrics' numbers, and the prior of places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vispe.metrics.semantic import SemanticTally, location_prior, stretched


def tally(predicted, truth, classes=3, **knobs):
    made = SemanticTally(classes, **knobs)
    made.add(torch.tensor(predicted), torch.tensor(truth))
    return made


def test_by_hand():
    """Class 0: 2 of 3 true, 1 wrongly taken, IoU 2/4. Class 1: 1 of 2, 1 wrongly, 1/3. Class 2: nowhere."""
    found = tally([[0, 0, 1], [0, 1, 2]], [[0, 0, 0], [1, 1, -1]])
    assert found.confusion.tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert found.iou()[2] is None
    assert found.iou()[:2] == pytest.approx([1 / 2, 1 / 3])
    assert found.accuracy()[:2] == pytest.approx([2 / 3, 1 / 2])
    summary = found.summary()
    assert summary["miou"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert summary["pixel_accuracy"] == pytest.approx(3 / 5)
    assert summary["mean_accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert summary["pixels"] == 5


def test_a_class_that_is_only_predicted_has_an_iou_of_nothing():
    found = tally([0, 2], [0, 0])
    assert found.iou() == [0.5, None, 0.0]
    assert found.accuracy() == [0.5, None, None]
    assert found.summary()["miou"] == pytest.approx(0.25)
    assert found.summary()["mean_accuracy"] == pytest.approx(0.5)


def test_void_is_left_out_whatever_was_predicted():
    assert tally([0, 1, 99], [0, 1, -1]).summary()["miou"] == 1.0
    assert tally([0, 1, 2], [0, 1, 255], void=255).summary()["pixels"] == 2
    assert SemanticTally(3).summary() == {"miou": 0.0, "pixel_accuracy": 0.0, "mean_accuracy": 0.0, "pixels": 0}


def test_bytes_are_counted_too():
    made = SemanticTally(200, void=255)
    made.add(torch.tensor([150, 150], dtype=torch.uint8), torch.tensor([150, 255], dtype=torch.uint8))
    assert made.confusion[150, 150] == 1
    assert made.confusion.sum() == 1


@given(st.integers(0, 10_000))
def test_parts_add_up(seed):
    g = torch.Generator().manual_seed(seed)
    predicted, truth = torch.randint(0, 4, (6, 5, 7), generator=g), torch.randint(-1, 4, (6, 5, 7), generator=g)
    whole, parts = SemanticTally(4), [SemanticTally(4), SemanticTally(4)]
    whole.add(predicted, truth)
    for k in range(6):
        parts[k % 2].add(predicted[k], truth[k])
    both = SemanticTally(4)
    both.unpack(parts[0].packed() + parts[1].packed())
    assert torch.equal(both.confusion, whole.confusion)
    assert both.summary() == whole.summary()


@pytest.mark.parametrize("seed", range(3))
def test_the_numbers_of_torchmetrics(seed):
    pytest.importorskip("torchmetrics", reason="torchmetrics is the peer")
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    g = torch.Generator().manual_seed(seed)
    truth = torch.randint(-1, 5, (3, 20, 30), generator=g)
    predicted = torch.where(torch.rand(truth.shape, generator=g) < 0.6, truth.clamp(min=0), 5 - truth.clamp(min=1))
    ours = SemanticTally(6)  # class 5 is nowhere
    ours.add(predicted, truth)
    jaccard = {a: MulticlassJaccardIndex(6, average=a, ignore_index=-1)(predicted, truth) for a in ("macro", "none")}
    assert ours.summary()["miou"] == pytest.approx(float(jaccard["macro"]), abs=1e-6)
    assert [value or 0.0 for value in ours.iou()] == pytest.approx(jaccard["none"].tolist(), abs=1e-6)
    micro = MulticlassAccuracy(6, average="micro", ignore_index=-1)(predicted, truth)
    assert ours.summary()["pixel_accuracy"] == pytest.approx(float(micro), abs=1e-6)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"predicted \[2\] is not of the truth's shape \[3\]"):
        tally([0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="predicted classes are 0 to 2, got 0 to 3"):
        tally([0, 3], [0, 1])
    with pytest.raises(ValueError, match="true classes are 0 to 2, got 0 to 255"):
        tally([0, 1], [0, 255])


# --- places alone -----------------------------------------------------------------------------------------------------


def test_the_most_frequent_class_of_each_place_by_hand():
    masks = [torch.tensor(m) for m in ([[0, 1, -1]], [[0, 2, -1]], [[1, 2, -1]], [[1, -1, -1]])]
    assert location_prior(masks, 3, (1, 3)).tolist() == [[0, 2, 1]]  # a tie: 0; two of three; nobody: 1 leads (3 votes)
    assert location_prior([torch.tensor([[0, 0, 2, 2]])], 3, (1, 2)).tolist() == [[0, 2]]


def test_maps_at_another_size():
    assert stretched(torch.tensor([[5, 6, 7]]), (1, 1)).tolist() == [[6]]
    assert stretched(torch.tensor([[-1, 4]]), (2, 4)).tolist() == [[-1, -1, 4, 4]] * 2


def test_mistakes_of_the_prior_are_named():
    with pytest.raises(ValueError, match="holds the class 3, there are 3"):
        location_prior([torch.tensor([[3]])], 3, (1, 1))
    with pytest.raises(ValueError, match="label no pixel"):
        location_prior([torch.tensor([[-1]])], 3, (1, 1))


def test_camvids_places_are_sky_above_and_road_below(measured_data):
    from vispe.data.segmentation import SemanticSpec, open_semantic

    train, val = open_semantic(SemanticSpec(root=str(measured_data / "camvid_small"), classes=11, void=11))
    prior = location_prior((train.mask(i) for i in range(len(train))), 11, (360, 480))
    assert prior[0].mode().values == 0
    assert prior[-60, 240] == 3
    score = SemanticTally(11)
    for i in range(len(val)):
        score.add(prior, val.mask(i))
    assert 0.05 < score.summary()["miou"] < 0.4
    print({k: round(v, 4) for k, v in score.summary().items()})
