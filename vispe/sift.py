"""SIFT through OpenCV, in the convention the SIFT + LightGlue weights were trained with: COLMAP's (Lowe, IJCV 2004).

SIFT is not one thing. What this file translates, each measured against pycolmap on the same pictures: positions (the
doubled first octave costs OpenCV 0.25 pixel unless told otherwise), scale (OpenCV reports a diameter, COLMAP sigma),
orientation (degrees from 0 to 360; radians within pi of zero), contrast threshold (OpenCV divides it by the layers of
an octave), layers and octaves (COLMAP has 3 and 4), descriptors (RootSIFT, Arandjelovic and Zisserman 2012, unit norm).
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS = 3  # octave_resolution of COLMAP; with 4 the scales come out 3 % larger and fewer points coincide
OCTAVES = 4  # num_octaves of COLMAP, the first of them doubled: no blob larger than about 15 pixels was trained with
LUMA = (0.299, 0.587, 0.114)  # Rec. 601


class SiftFeatures(NamedTuple):
    """SIFT features of one image, strongest first, at most one to a pixel, all float32.

    ``keypoints [n, 2]`` are (x, y) in pixels with the first pixel's centre at (0, 0); ``scores [n]`` contrast of the
    extremum; ``descriptors [n, 128]`` RootSIFT, unit norm; ``scales [n]`` the blob's sigma in pixels; ``orientations
    [n]`` radians in (-pi, pi], clockwise on the screen from the x axis.
    """

    keypoints: Tensor
    scores: Tensor
    descriptors: Tensor
    scales: Tensor
    orientations: Tensor


def sift(
    image: Tensor, *, max_keypoints: int = 2048, detection_threshold: float = 0.0066667, edge_threshold: float = 10.0
) -> SiftFeatures:
    """SIFT features of ``image [1 or 3, h, w]``, floating point in [0, 1]; no gradient; any size, possibly no keypoint.

    The threshold is on the difference of Gaussians of a [0, 1] picture, as in COLMAP. Of several orientations of one
    point the one nearest to zero is kept, as in training. ``ValueError`` for a wrong image or without a working OpenCV.
    """
    if image.ndim != 3 or image.shape[0] not in (1, 3) or not image.numel() or not image.is_floating_point():
        raise ValueError(f"sift takes a floating-point image [1 or 3, h, w], got {image.dtype} {list(image.shape)}")
    if max_keypoints < 0:
        raise ValueError(f"max_keypoints is at least 0, got {max_keypoints}")
    points, descriptors = _detect(_grey_bytes(image), detection_threshold, edge_threshold)
    keypoints, sizes, degrees, scores = points[:, :2], points[:, 2], points[:, 3], points[:, 4]
    orientations = np.deg2rad(np.where(degrees > 180, degrees - 360, degrees))
    keep = _strongest_per_pixel(keypoints, scores, orientations)[:max_keypoints]
    kept = (keypoints[keep], scores[keep], descriptors[keep], sizes[keep] / 2, orientations[keep])
    found = SiftFeatures(*(torch.from_numpy(np.ascontiguousarray(each)).to(image.device) for each in kept))
    return found._replace(descriptors=root(found.descriptors))


def root(descriptors: Tensor) -> Tensor:
    """RootSIFT of ``[n, 128]``: square root of the L1-normalised histogram, whose Euclidean norm is 1 again."""
    return F.normalize(F.normalize(descriptors, p=1, dim=-1).sqrt(), dim=-1)


def _detect(grey: np.ndarray, detection_threshold: float, edge_threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """OpenCV's points ``[n, 5]`` (x, y, diameter, degrees, contrast) and descriptors ``[n, 128]`` of a grey picture."""
    detector = _opencv().SIFT_create(  # one a call: detectors keep their pyramid, so they are not shared by threads
        nfeatures=0,  # all: OpenCV's own cut counts every orientation of a point
        nOctaveLayers=LAYERS,
        contrastThreshold=LAYERS * detection_threshold,
        edgeThreshold=edge_threshold,
        enable_precise_upscale=True,
    )
    found, descriptors = detector.detectAndCompute(grey, None)
    if not found:  # then OpenCV's descriptors are None
        return np.zeros((0, 5), np.float32), np.zeros((0, 128), np.float32)
    points = np.array([(*p.pt, p.size, p.angle, p.response) for p in found], np.float32)
    octaves = np.array([p.octave for p in found]).astype(np.int8)  # the low byte, signed: -1 is the doubled picture
    kept = octaves < OCTAVES - 1
    return points[kept], descriptors[kept]


def _strongest_per_pixel(keypoints: np.ndarray, scores: np.ndarray, orientations: np.ndarray) -> np.ndarray:
    """Indices of the best point of every pixel, strongest first; equal scores go to the smallest |orientation|."""
    order = np.lexsort((np.abs(orientations), -scores))
    pixels = np.floor(keypoints[order] + 0.5).astype(np.int64)
    first = np.unique(pixels, axis=0, return_index=True)[1]
    return order[np.sort(first)]


def _grey_bytes(image: Tensor) -> np.ndarray:
    """``[1 or 3, h, w]`` in [0, 1] to ``[h, w]`` bytes, rounded: OpenCV's SIFT reads nothing else."""
    image = image.detach().float().cpu()
    if image.shape[0] == 3:
        image = torch.tensordot(torch.tensor(LUMA), image, dims=1)[None]
    return image[0].mul(255).round().clamp(0, 255).to(torch.uint8).numpy()


def _opencv() -> ModuleType:
    try:
        import cv2
    except ImportError as error:
        raise ValueError(f"SIFT needs a working OpenCV: pip install opencv-python-headless ({error})") from error
    return cv2
