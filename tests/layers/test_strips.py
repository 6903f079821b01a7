"""A map computed in strips is the map computed at once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vispe.layers.strips import in_strips

STACK = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SELU(), nn.Conv2d(4, 3, 3, padding=1)).double()
STACK.requires_grad_(False)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(2, 4))
def test_strips_equal_the_whole(height: int, rows: int, halo: int) -> None:
    x = torch.randn(2, 2, height, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(height))
    got = in_strips(lambda part: STACK(x[:, :, part]), height, rows, halo)
    torch.testing.assert_close(got, STACK(x), atol=1e-12, rtol=0)


def test_too_small_a_halo_shows() -> None:
    x = torch.randn(1, 2, 12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(in_strips(lambda part: STACK(x[:, :, part]), 12, 4, 1), STACK(x))
