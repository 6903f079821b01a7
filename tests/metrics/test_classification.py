"""The tally, by hand."""

import math

import torch

from vispe.metrics.classification import Tally


def test_three_images_by_hand():
    tally = Tally(2)
    logits = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [9.0, 0.0]])
    tally.add(logits, torch.tensor([0, 1, 1, -1]))  # right, right, wrong, padding
    assert tally.confusion.tolist() == [[1, 0], [1, 1]]
    told = tally.summary()
    assert told["accuracy"] == 2 / 3
    assert told["top5"] == 1.0
    assert told["images"] == 3
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(-2)) + math.log1p(math.exp(3))) / 3
    assert math.isclose(told["loss"], expected, rel_tol=1e-6)
    assert tally.per_class() == [1.0, 0.5]


def test_the_fifth_best_counts_and_the_sixth_does_not():
    tally = Tally(6)
    tally.add(torch.arange(6.0, 0.0, -1.0).expand(2, 6), torch.tensor([4, 5]))
    assert tally.summary()["top5"] == 0.5
    assert tally.per_class() == [None, None, None, None, 0.0, 0.0]


def test_parts_add_up():
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 7), torch.randint(7, (40,))
    whole, one, two = Tally(7), Tally(7), Tally(7)
    whole.add(logits, labels)
    one.add(logits[:13], labels[:13])
    two.add(logits[13:], labels[13:])
    one.unpack(one.packed() + two.packed())
    assert torch.equal(one.confusion, whole.confusion)
    assert math.isclose(one.summary()["loss"], whole.summary()["loss"], rel_tol=1e-6)


def test_an_empty_tally_has_no_accuracy():
    assert Tally(3).summary() == {"loss": 0.0, "accuracy": 0.0, "top5": 0.0, "images": 0}
