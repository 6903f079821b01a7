"""Features of many images into one file, with progress, resumable."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from vispe.data.images import MAX_PIXELS, ImageError, read_image
from vispe.features import Look, extractor
from vispe.store import FeatureWriter
from vispe.weights.files import locate, sha256


def extract_all(
    images: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    name: str,
    *,
    max_keypoints: int = 2048,
    resize: int | None = None,
    side: Literal["long", "short"] = "long",
    skip_bad: bool = False,
    max_pixels: int = MAX_PIXELS,
    device: str = "auto",
    extractor_weights: str | os.PathLike[str] | None = None,
    **knobs: Any,
) -> tuple[int, int]:
    """Extract from every image into ``out`` (see ``FeatureWriter``); how many it holds now, and how many were left out.

    What is there already, made with the same options and weights from the same image content, is not made again: not in
    a finished ``out``, which is extended, and not in what an interrupted run left. The first image that cannot be read
    raises ``ImageError`` and leaves nothing behind, or with ``skip_bad`` is reported on stderr and left out.
    """
    from rich.console import Console
    from rich.progress import track

    names = list(dict.fromkeys(os.fspath(image) for image in images))
    look = Look(resize=resize, side=side)
    find = extractor(name, max_keypoints=max_keypoints, look=look, device=device, weights=extractor_weights, **knobs)
    made = {"extractor": name, "max_keypoints": max_keypoints, "resize": resize, "side": side, **knobs}
    if name != "sift":
        made["weights"] = sha256(extractor_weights or locate(name))
    bad, console = 0, Console(stderr=True)
    with FeatureWriter(out, made) as writer:
        for path in track(names, "extracting", console=console, transient=True, disable=not console.is_terminal):
            try:
                content = sha256(path) if os.path.isfile(path) else ""  # if it is no file, `read_image` says what it is
                if not writer.has(path, content):
                    writer.add(path, find(read_image(path, max_pixels=max_pixels), path), content)
            except ImageError as error:
                if not skip_bad:
                    raise
                print(error, file=sys.stderr)
                bad += 1
        if bad == len(names):
            raise ImageError("none of the images could be read")
        done = len(writer)
    return done, bad
