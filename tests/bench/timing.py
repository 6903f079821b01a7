"""Two functions timed in turns, so that a busy machine slows both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def in_turns(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median of theirs/ours over neighbouring runs, and our median in seconds; one run of each warms up."""
    spent: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for function, times in zip((ours, theirs), spent, strict=True):
            start = clock()
            function()
            if turn:
                times.append(clock() - start)
    return statistics.median(b / a for a, b in zip(*spent, strict=True)), statistics.median(spent[0])
