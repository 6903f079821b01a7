"""Suppression and its window maximum, against max_pool2d and by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vispe.layers.detection import grey, suppress, window_maximum


def pooled(x: torch.Tensor, radius: int) -> torch.Tensor:
    return F.max_pool2d(x[:, None], 2 * radius + 1, stride=1, padding=radius)[:, 0]


def suppress_by_pooling(scores: torch.Tensor, radius: int) -> torch.Tensor:
    """The two-round suppression as published (SuperPoint, ALIKE), written with max_pool2d and where."""
    keep = scores == pooled(scores, radius)
    for _ in range(2):
        shadow = pooled(keep.float(), radius) > 0
        rest = torch.where(shadow, 0.0, scores)
        keep |= (rest == pooled(rest, radius)) & ~shadow
    return torch.where(keep, scores, 0.0)


@st.composite
def maps(draw: st.DrawFn, low: float = -1.0) -> torch.Tensor:
    """Small maps, half of them with few distinct values, so that ties are common."""
    b, h, w = draw(st.integers(1, 2)), draw(st.integers(1, 17)), draw(st.integers(1, 17))
    x = torch.rand(b, h, w, generator=torch.Generator().manual_seed(draw(st.integers(0, 10_000)))) * (1 - low) + low
    return (x * 4).round() / 4 if draw(st.booleans()) else x


@settings(deadline=None)
@given(maps(), st.integers(0, 5))
def test_window_maximum_is_max_pool(x: torch.Tensor, radius: int) -> None:
    assert torch.equal(window_maximum(x, radius), pooled(x, radius))


@settings(deadline=None)
@given(maps(low=0.0), st.integers(1, 4))
def test_suppress_is_the_published_one(scores: torch.Tensor, radius: int) -> None:
    assert torch.equal(suppress(scores, radius), suppress_by_pooling(scores, radius))


@settings(deadline=None)
@given(maps(low=0.0), st.integers(1, 4))
def test_survivors_are_apart_unless_equal(scores: torch.Tensor, radius: int) -> None:
    kept = suppress(scores, radius)
    strongest = window_maximum(kept, radius)
    assert torch.equal(kept[kept > 0], strongest[kept > 0])


def test_window_maximum_of_bytes() -> None:
    x = torch.zeros(1, 5, 7, dtype=torch.uint8)
    x[0, 1, 5] = 3
    want = torch.zeros_like(x)
    want[0, 0:3, 4:7] = 3
    assert torch.equal(window_maximum(x, 1), want)


def test_second_round_brings_back_what_a_loser_hid() -> None:
    # 0.5 is no maximum of its window because of 0.7, but 0.7 itself falls to 0.9.
    scores = torch.tensor([[[0.9, 0.0, 0.7, 0.0, 0.5, 0.0]]])
    assert suppress(scores, 2).nonzero()[:, 2].tolist() == [0, 4]


def test_ties_all_survive() -> None:
    assert suppress(torch.full((1, 4, 4), 0.5), 1).eq(0.5).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1)])
def test_slivers(size: tuple[int, int]) -> None:
    scores = torch.zeros(1, *size)
    scores[0, size[0] // 2, size[1] // 2] = 0.3
    assert torch.equal(suppress(scores, 3), scores)


def test_grey_weighs_colours_and_leaves_grey_alone():
    image = torch.zeros(1, 3, 2, 2)
    image[0, :, 0, 0], image[0, 0, 1, 1] = 1.0, 1.0
    torch.testing.assert_close(grey(image), torch.tensor([[[[1.0, 0.0], [0.0, 0.299]]]]))
    assert torch.equal(grey(image[:, :1]), image[:, :1])
