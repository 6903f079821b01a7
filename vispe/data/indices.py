"""Index masks in files: pictures whose values are classes, read as they are, and how often each value occurs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from vispe.data.images import ImageError
from vispe.files import remembered, write_json
from vispe.paths import cache_dir

LOSSY = ("JPEG", "WEBP", "JPEG2000", "AVIF")
MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")
MOST = 2**16 - 1

Progress = Callable[[int, int], object]  # (files done, files in all)


def read_indices(path: str | os.PathLike[str]) -> np.ndarray:
    """The indices ``[h, w]`` in a mask, uint8 or uint16: grey of 1, 8 or 16 bits, or a palette's numbers, whatever its
    colours. ``ImageError`` for a coloured or lossy picture, whose values are no indices."""
    name = os.fspath(path)
    try:
        with Image.open(name) as mask:
            if mask.format in LOSSY:
                raise ImageError(f"{mask.format} changes indices; masks are PNG, TIFF, BMP or PGM")
            if mask.mode not in MODES:
                raise ImageError(f"it is a picture of mode {mask.mode}; a mask has one channel of class indices")
            indices = np.asarray(mask)
    except Exception as error:  # a damaged file can lead Pillow's plugins into any exception at all
        reason = str(error) if isinstance(error, ImageError) else f"it is damaged or no image ({_said(error)})"
        raise ImageError(f"cannot read mask {name!r}: {reason}") from None
    low, high = int(indices.min(initial=0)), int(indices.max(initial=0))
    if low < 0 or high > MOST:
        wrong = low if low < 0 else high
        raise ImageError(f"cannot read mask {name!r}: it holds {wrong}; indices lie between 0 and {MOST}")
    return indices.astype(np.uint8 if high < 256 else np.uint16)


def histogram(indices: np.ndarray) -> dict[int, int]:
    """Value -> how many pixels have it."""
    counts = np.bincount(indices.ravel())
    return {int(value): int(counts[value]) for value in np.flatnonzero(counts)}


def histograms(masks: Sequence[str], progress: Progress | None = None) -> Iterator[tuple[int, Mapping[int, int] | str]]:
    """(number, its histogram, or what is wrong with the file) of each mask.

    What was seen before, and is unchanged since by size and time, comes from the cache.
    """
    folder = os.path.dirname(masks[0]) if masks else ""
    path = cache_dir() / "verified" / f"masks-{hashlib.sha256(folder.encode(errors='replace')).hexdigest()[:24]}.json"
    known, keys = remembered(path), [_stamped(mask) for mask in masks]
    todo = [i for i, key in enumerate(keys) if key not in known]

    def attempt(i: int) -> tuple[int, Mapping[str, int] | str]:
        try:
            return i, {str(value): count for value, count in histogram(read_indices(masks[i])).items()}
        except ImageError as error:
            return i, str(error)

    for done, (i, found) in enumerate(threaded(attempt, todo), 1):
        known[keys[i]] = found
        if progress is not None:
            progress(done, len(todo))
    if todo:
        with suppress(OSError):  # a cache that cannot be written is no reason to stop
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
    for i, key in enumerate(keys):
        found = known[key]
        yield i, found if isinstance(found, str) else {int(value): count for value, count in found.items()}


def threaded(attempt: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
    """``attempt`` of each number, in order; decoders release Python's lock, so threads share the cores."""
    with ThreadPoolExecutor(max_workers=max(len(os.sched_getaffinity(0)), 1)) as pool:
        yield from pool.map(attempt, numbers)


def _said(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())


def _stamped(mask: str) -> str:
    try:
        state = os.stat(mask)
    except OSError:
        return f"{mask}|gone"
    return f"{mask}|{state.st_size}-{state.st_mtime_ns}"
