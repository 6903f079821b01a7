"""How far long work is: a bar with the rate and the time that is left, on stderr, where a person looks at it; and no
library talking in between."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def track(items: Iterable[T], what: str, unit: str, *, total: int | None = None, shown: bool = True) -> Iterator[T]:
    """``items``, with a bar such as ``matching ━━━━ 120/540 pairs 3.1/s 0:02:15`` when stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:.1f}/s" if speed else "")

    console = Console(stderr=True)
    count = TextColumn(f"{{task.completed}}/{{task.total}} {unit}")
    columns = (TextColumn("{task.description}"), BarColumn(24), count, Rate(), TimeRemainingColumn(compact=True))
    bar = Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
    length = total if total is not None else len(items)  # type: ignore[arg-type]
    with bar:
        yield from bar.track(items, total=length, description=what)


def ahead(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """``map(function, items)`` in order, by threads that are at most twice ``workers`` items ahead; 0: no threads.

    An exception comes out where its result would have.
    """
    if workers < 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        rest = iter(items)
        waiting = deque(pool.submit(function, item) for item in islice(rest, 2 * workers))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(function, item) for item in islice(rest, 1))
                yield result
        finally:
            for left in waiting:
                left.cancel()


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """What these loggers say below an error stays unsaid while the block runs."""
    logs = [logging.getLogger(name) for name in libraries]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
