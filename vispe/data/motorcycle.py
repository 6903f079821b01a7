"""The Middlebury motorcycle: a rectified stereo pair with the disparity of every left pixel (Scharstein et al. 2014).

It comes inside scikit-image, a quarter of the published size. A point (x, y) of the left image is at (x - d(x, y), y)
in the right one, so every match of the pair can be told right or wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class StereoPair(NamedTuple):
    """``left``, ``right [3, h, w]`` in [0, 1]; ``disparity [h, w]`` in pixels, not finite where it is unknown."""

    left: Tensor
    right: Tensor
    disparity: np.ndarray


def motorcycle() -> StereoPair:
    """The pair; ``ValueError`` when scikit-image is not installed."""
    try:
        from skimage.data import stereo_motorcycle
    except ImportError as error:
        raise ValueError("the motorcycle pair comes with scikit-image: pip install 'vispe[demo]'") from error
    left, right, disparity = stereo_motorcycle()
    left, right = (torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255 for image in (left, right))
    return StereoPair(left, right, np.asarray(disparity, np.float64))


def disparity_errors(points0: np.ndarray, points1: np.ndarray, disparity: np.ndarray) -> np.ndarray:
    """How far ``points1 [k, 2]`` are from where the disparity at ``points0`` (nearest pixel) puts them, else NaN."""
    h, w = disparity.shape
    column, row = np.rint(points0).astype(int).clip(0, (w - 1, h - 1)).T
    d = np.where(np.isfinite(disparity[row, column]), disparity[row, column], np.nan)
    return np.hypot(points1[:, 0] - (points0[:, 0] - d), points1[:, 1] - points0[:, 1])
