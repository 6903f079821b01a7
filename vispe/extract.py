"""Features of many images into one file, with progress, resumable."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from vispe.cache import CacheWriter
from vispe.data.images import MAX_PIXELS, ImageError, read_image
from vispe.data.resizing import rotate90
from vispe.features import Features, Look, extractor
from vispe.progress import ahead, track
from vispe.store import add_features
from vispe.weights.files import locate, sha256

WORKERS = 2  # threads that hash and decode ahead


@dataclass(frozen=True)
class Job:
    """An image whose features are stored as ``name``; it is looked at ``turns`` quarter turns counter-clockwise, and
    its features are those of the image as it lies."""

    name: str
    path: str
    turns: int = 0


def extract_all(
    images: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    name: str,
    *,
    max_keypoints: int = 2048,
    resize: int | tuple[int, int] | None = None,
    side: Literal["long", "short"] = "long",
    skip_bad: bool = False,
    max_pixels: int = MAX_PIXELS,
    device: str = "auto",
    extractor_weights: str | os.PathLike[str] | None = None,
    **knobs: Any,
) -> tuple[int, int]:
    """Extract from every image into ``out`` (see ``CacheWriter``); how many it holds now, and how many were left out.

    What is there already, made with the same options and weights from the same image content, is not made again: not in
    a finished ``out``, which is extended, and not in what an interrupted run left. The first image that cannot be read
    raises ``ImageError`` and leaves nothing behind, or with ``skip_bad`` is reported on stderr and left out.
    """
    jobs = [Job(path, path) for path in dict.fromkeys(os.fspath(image) for image in images)]
    look = Look(resize=resize, side=side)
    find = extractor(name, max_keypoints=max_keypoints, look=look, device=device, weights=extractor_weights, **knobs)
    made = features_made(
        name, max_keypoints=max_keypoints, resize=resize, side=side, weights=extractor_weights, **knobs
    )
    with CacheWriter(out, made) as writer:
        bad = extract_into(writer, jobs, lambda: find, skip_bad=skip_bad, max_pixels=max_pixels)
        if bad == len(jobs):
            raise ImageError("none of the images could be read")
        done = len(writer)
    return done, bad


def features_made(name: str, *, weights: str | os.PathLike[str] | None = None, **knobs: Any) -> dict[str, Any]:
    """How features are made, as their file says it: the extractor, its knobs and the sha256 of its weights."""
    made = {"extractor": name, **knobs}
    if name != "sift":
        made["weights"] = sha256(weights or locate(name))
    return made


def extract_into(
    writer: CacheWriter,
    jobs: Sequence[Job],
    find: Callable[[], Callable[[Tensor, str], Features]],
    *,
    skip_bad: bool = False,
    max_pixels: int = MAX_PIXELS,
    workers: int = WORKERS,
    shown: bool = True,
) -> int:
    """Features of those ``jobs`` that ``writer`` does not have from the same content; how many could not be read.

    ``find`` gives the extractor, and is not asked when there is nothing to do.
    """
    hashed = zip(jobs, ahead(lambda job: _content(job.path), jobs, workers), strict=True)
    todo = [(job, content) for job, content in hashed if not writer.has(job.name, content)]

    def image(work: tuple[Job, str]) -> Any:
        try:
            return read_image(work[0].path, max_pixels=max_pixels)
        except ImageError as error:
            return error

    bad, found = 0, zip(todo, ahead(image, todo, workers), strict=True)
    for (job, content), picture in track(found, "extracting", "images", total=len(todo), shown=shown):
        try:
            if isinstance(picture, ImageError):
                raise picture
            start = time.perf_counter()
            features = find()(rotate90(picture, job.turns) if job.turns else picture, job.path)
            seconds = time.perf_counter() - start
        except ImageError as error:
            if not skip_bad:
                raise
            print(error, file=sys.stderr)
            bad += 1
            continue
        size = (picture.shape[-2], picture.shape[-1])
        add_features(writer, job.name, features.turned_back(job.turns, size), content, seconds=seconds)
    return bad


def _content(path: str) -> str:
    return sha256(path) if os.path.isfile(path) else ""  # if it is no file, `read_image` says what it is
