"""The learning rate over a run: a linear warm-up, then half a cosine, a line or steps; of the update's number alone."""

from __future__ import annotations

import math
from collections.abc import Sequence


def factor(update: int, *, warmup: int, total: int, final: float) -> float:
    """What the learning rate is multiplied by at ``update`` (from 0) of ``total``.

    ``(update + 1) / warmup`` for the first ``warmup`` updates, then ``final + (1 - final) (1 + cos(pi t)) / 2`` with
    ``t`` from 0 towards 1 over the others.
    """
    if update < warmup:
        return (update + 1) / warmup
    t = min((update - warmup) / max(total - warmup, 1), 1.0)
    return final + (1 - final) * (1 + math.cos(math.pi * t)) / 2


def linear(update: int, *, warmup: int, total: int, final: float) -> float:
    """The same along a line, ``final + (1 - final) (1 - t)``: what is called a polynomial schedule of power 1."""
    if update < warmup:
        return (update + 1) / warmup
    return final + (1 - final) * (1 - min((update - warmup) / max(total - warmup, 1), 1.0))


def stepped(update: int, *, warmup: int, total: int, final: float, drops: Sequence[float]) -> float:
    """The same in steps: a tenth for each of the parts ``drops`` of the run that is over, but never below ``final``."""
    if update < warmup:
        return (update + 1) / warmup
    return max(0.1 ** sum(update >= round(drop * total) for drop in drops), final)
