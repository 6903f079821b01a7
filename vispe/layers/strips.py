"""Run a stack of convolutions strip by strip, so that its intermediate maps stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_strips(stack: Callable[[slice], Tensor], height: int, rows: int, halo: int) -> Tensor:
    """The map ``[b, c, height, w]`` that ``stack`` computes a ``slice`` of the rows of, built ``rows`` at a time.

    Each strip is asked for with ``halo`` more rows up and down: the sum of the radii of the kernels in the stack. They
    are dropped from the result, as the cut has spoilt them. At the borders of the map there is no such margin, so the
    stack's own zero padding applies there just as it would to the whole.
    """

    def strip(top: int) -> Tensor:
        start = max(top - halo, 0)
        return stack(slice(start, min(top + rows + halo, height))).narrow(2, top - start, min(rows, height - top))

    first = strip(0)
    if first.requires_grad:
        return torch.cat([first, *(strip(top) for top in range(rows, height, rows))], dim=2)
    whole = torch.empty_like(first[:, :, :1].expand(-1, -1, height, -1), memory_format=torch.channels_last)
    whole[:, :, :rows] = first
    for top in range(rows, height, rows):  # copied while it is still in the cache
        whole[:, :, top : top + rows] = strip(top)
    return whole
