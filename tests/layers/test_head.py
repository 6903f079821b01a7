"""A head of other classes starts fresh as a whole; one that nobody asked for is missing."""

import torch

from vispe.layers.head import replace_head

OWN = {"a": torch.ones(1), "head.weight": torch.zeros(3, 2), "head.bias": torch.zeros(3)}
PARTS = ("head.",)


def test_a_head_that_fits_is_kept():
    state = {"a": torch.ones(1), "head.weight": torch.ones(3, 2), "head.bias": torch.ones(3)}
    assert replace_head(state, OWN, PARTS, asked=True) == []
    assert state["head.weight"].all()


def test_another_head_is_fresh_as_a_whole():
    state = {"a": torch.ones(1), "head.weight": torch.ones(5, 2), "head.scale": torch.ones(1)}
    assert replace_head(state, OWN, PARTS, asked=False) == [
        "head.scale: dropped, this model has no such head",
        "head.weight: fresh [3, 2], the checkpoint's [5, 2] is another head",
        "head.bias: fresh [3], there was none",
    ]
    assert state.keys() == OWN.keys()
    assert state["head.weight"] is OWN["head.weight"]


def test_a_missing_head_is_made_only_if_asked_for():
    state = {"a": torch.ones(1)}
    assert replace_head(state, OWN, PARTS, asked=False) == []
    assert state.keys() == {"a"}
    assert len(replace_head(state, OWN, PARTS, asked=True)) == 2
    assert state.keys() == OWN.keys()
