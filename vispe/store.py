"""Local features of many images in one HDF5 file (see ``vispe/cache.py``).

Each image is a group named by its percent-encoded path, with ``keypoints [n, 2]`` float32 (x, y; the first pixel's
centre at 0), ``scores [n]``, ``descriptors [n, d]``, ``scales`` and ``orientations`` where there are any, and
attributes ``size`` (h, w), ``pixel`` and ``sha256`` of the image file.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from vispe.cache import CacheReader, CacheWriter, Entry
from vispe.features import Features

ARRAYS = ("keypoints", "scores", "descriptors", "scales", "orientations")


def add_features(writer: CacheWriter, name: str, features: Features, sha256: str, **attributes: Any) -> None:
    """Store the features of one image, made from a file with this content."""
    writer.add(name, *as_stored(features, **attributes), sha256)


def as_stored(features: Features, **attributes: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and attributes, as a ``CacheWriter`` takes them."""
    arrays = {array: getattr(features, array) for array in ARRAYS if getattr(features, array) is not None}
    arrays = {array: value.detach().float().cpu().numpy() for array, value in arrays.items()}
    return arrays, {"size": features.size, "pixel": features.pixel, **attributes}


def as_features(entry: Entry) -> Features:
    """The features that ``add_features`` stored."""
    arrays = {array: torch.from_numpy(value) for array, value in entry.arrays.items()}
    h, w = (int(side) for side in entry.attributes["size"])
    return Features(**arrays, size=(h, w), pixel=float(entry.attributes["pixel"]))


def read_names(path: str | os.PathLike[str]) -> list[str]:
    """The image names in a feature file, sorted."""
    with CacheReader(path) as file:
        return sorted(file.names())


def read_features(path: str | os.PathLike[str], name: str) -> Features:
    """The features of image ``name``; ``KeyError`` when the file has none of it."""
    with CacheReader(path) as file:
        return as_features(file.read(name))
