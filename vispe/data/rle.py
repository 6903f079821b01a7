"""Masks as COCO stores them: polygons, run lengths as a list, run lengths as a string.

Run lengths go down the columns, background first; ``size`` is always ``(h, w)``. They are decoded here, in numpy:
pycocotools leaves memory as it found it where the lengths do not add up to the image, and takes a polygon of four
numbers for a box. Polygons are drawn by pycocotools, whose rule for which pixels are inside is COCO's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool
from numpy.typing import NDArray

Rle = dict[str, Any]  # {"size": [h, w], "counts": str}: what pycocotools and COCO's result files take
LONGEST = 12  # characters of one number of a string: more do not fit 64 bits


def mask(segmentation: object, size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    """The pixels of a COCO ``segmentation`` in an image of ``size``; ``ValueError`` says what is wrong with it."""
    told = segmentation if isinstance(segmentation, Mapping) else compressed(segmentation, size)
    runs = run_lengths(told, size)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(size[::-1]).T


def compressed(segmentation: object, size: tuple[int, int]) -> Rle:
    """The same as run lengths in a string."""
    check(segmentation, size)
    if isinstance(segmentation, Mapping) and isinstance(segmentation["counts"], str):
        return {"size": list(size), "counts": segmentation["counts"]}
    from pycocotools import mask as coco

    drawn = coco.frPyObjects(segmentation, *size)
    return _text(coco.merge(drawn) if isinstance(drawn, list) else drawn)


def encode(masks: Bool[np.ndarray, "n h w"]) -> list[Rle]:
    """Run lengths in strings, one for each mask."""
    from pycocotools import mask as coco

    if masks.ndim != 3:
        raise ValueError(f"masks are [n, h, w], got {list(masks.shape)}")
    if not len(masks):
        return []
    return [_text(rle) for rle in coco.encode(np.asfortranarray(masks.transpose(1, 2, 0), dtype=np.uint8))]


def check(segmentation: object, size: tuple[int, int]) -> None:
    """``ValueError`` unless ``segmentation`` is a mask of an image of ``size``; nothing is drawn."""
    if isinstance(segmentation, Mapping):
        run_lengths(segmentation, size)
    elif isinstance(segmentation, list) and segmentation:
        for polygon in segmentation:
            _check_polygon(polygon, size)
    else:
        raise ValueError(f"a mask is polygons or run lengths, got {_short(segmentation)}")


def run_lengths(rle: Mapping[str, Any], size: tuple[int, int]) -> NDArray[np.int64]:
    """The lengths of a run-length mask, held against ``size``."""
    told, counts = rle.get("size"), rle.get("counts")
    if not isinstance(told, list | tuple) or tuple(told) != tuple(size):
        raise ValueError(f"its mask is of size {_short(told)}, its image {list(size)} (height, width)")
    if isinstance(counts, str | bytes):
        runs = _parsed(counts)
    elif isinstance(counts, list) and all(type(n) is int and 0 <= n < 2**40 for n in counts):
        runs = np.array(counts, dtype=np.int64)
    else:
        raise ValueError(f"run lengths are whole numbers or a string, got {_short(counts)}")
    if (runs < 0).any() or runs.sum() != size[0] * size[1]:
        raise ValueError(f"its run lengths cover {runs.sum()} pixels, its image has {size[0] * size[1]}")
    return runs


def _parsed(text: str | bytes) -> NDArray[np.int64]:
    """Six bits a character: five of the number, lowest first, and whether more follow; the last is signed.

    From the fourth on, a number is the difference from the one two before it.
    """
    data = text.encode("ascii", "replace") if isinstance(text, str) else text
    digits = np.frombuffer(data, dtype=np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(digits & 32 == 0)
    if not len(ends) or ends[-1] != len(digits) - 1 or digits.min() < 0 or digits.max() > 63:
        raise ValueError(f"its run lengths are no COCO string: {_short(text)}")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > LONGEST:
        raise ValueError(f"its run lengths are no COCO string: {_short(text)}")
    place = np.arange(len(digits)) - np.repeat(starts, lengths)
    runs = np.add.reduceat((digits & 31) << (5 * place), starts)
    runs -= np.where(digits[ends] & 16, np.int64(1) << (5 * lengths), 0)
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs


def _check_polygon(polygon: object, size: tuple[int, int]) -> None:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        raise ValueError(f"a polygon has at least three points x, y, got {_short(polygon)}")
    try:
        points = np.array(polygon, dtype=np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise ValueError(f"a polygon is numbers, got {_short(polygon)}") from None
    reach = np.array(size[::-1], dtype=np.float64)  # far points cost pycocotools memory without bound
    if not ((points >= -reach) & (points <= 2 * reach)).all():
        raise ValueError(f"a point of its polygon is far outside the image: {_short(polygon)}")


def _text(rle: Mapping[str, Any]) -> Rle:
    counts = rle["counts"]
    return {
        "size": [int(n) for n in rle["size"]],
        "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts,
    }


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, Sequence) or len(value) < 40 else repr(value[:12])
    return text if len(text) <= 60 else f"{text[:57]}..."
