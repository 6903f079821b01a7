"""Which images cannot be decoded: found before training, once, by decoding them all, and remembered in the cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from vispe.data.classification import Images
from vispe.data.images import ImageError
from vispe.files import remembered, write_json
from vispe.paths import cache_dir

Progress = Callable[[int, int], object]  # (images done, images in all)


def broken(images: Images, progress: Progress | None = None) -> dict[int, str]:
    """Index -> reason of every image that cannot be decoded. Images seen before, unchanged since, are not decoded."""
    keys = [f"{images.name(i)}|{_stamp(images, i)}" for i in range(len(images))]
    path = (
        cache_dir()
        / "verified"
        / f"{hashlib.sha256(keys[0].rsplit('|', 1)[0].encode(errors='replace')).hexdigest()[:24]}.json"
    )
    known = remembered(path)
    todo = [i for i, key in enumerate(keys) if key not in known]
    for done, (i, reason) in enumerate(_decoded(images, todo), 1):
        known[keys[i]] = reason
        if progress is not None:
            progress(done, len(todo))
    if todo:
        with suppress(OSError):  # a cache that cannot be written is no reason to stop
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
    return {i: known[key] for i, key in enumerate(keys) if known[key]}


def sound(images: Images, corrupt: str, progress: Progress | None = None) -> tuple[Images, list[str]]:
    """The images without the broken ones, and a sentence for each of those.

    ``corrupt="refuse"``: a ``ValueError`` names the first one instead and counts the others.
    """
    found = broken(images, progress)
    sentences = list(found.values())
    check_enough(sentences, len(images), corrupt, "read")
    return images.subset(_without(len(images), found)) if found else images, sentences


def check_enough(sentences: list[str], count: int, corrupt: str, what: str) -> None:
    """``ValueError`` when the faults, a sentence an image, are refused, or leave none of ``count`` images that can be
    ``what``, such as ``"read"``."""
    if sentences and corrupt == "refuse":
        others = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
        raise ValueError(f"{sentences[0]}{others}; data.corrupt=skip goes on without")
    if len(sentences) == count:
        raise ValueError(f"none of {count} images can be {what}; the first: {sentences[0]}")


def _without(count: int, found: dict[int, str]) -> Tensor:
    return torch.tensor([i for i in range(count) if i not in found], dtype=torch.long)


def _stamp(images: Images, i: int) -> str:
    try:
        return images.source.stamp(int(images.where[i]))
    except OSError as error:
        return f"gone: {error.strerror}"


def _decoded(images: Images, todo: list[int]) -> Iterator[tuple[int, str]]:
    """(index, reason or "") of each; decoders release Python's lock, so threads share the cores."""

    def attempt(i: int) -> tuple[int, str]:
        try:
            images.read(i)
        except ImageError as error:
            return i, str(error)
        return i, ""

    with ThreadPoolExecutor(max_workers=max(len(os.sched_getaffinity(0)), 1)) as pool:
        yield from pool.map(attempt, todo)
