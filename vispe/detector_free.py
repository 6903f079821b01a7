"""Matchers without a detector: two images in, points that belong together out, as features without descriptors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.data.resizing import to_original
from vispe.features import Features, Look, pick_device
from vispe.models import DETECTOR_FREE
from vispe.weights import load


class DetectorFree:
    """A matcher of whole images by name, with its published weights or ``weights``: a path or state dict.

    At most ``max_matches`` a pair, the best; ``precision``: a dtype for autocast, or None; ``knobs`` are those of the
    model's spec (``threshold``, ``border``, ...). Holds no state that a call changes.
    """

    def __init__(
        self,
        name: str,
        *,
        max_matches: int = 2048,
        look: Look | None = None,
        device: torch.device | str = "auto",
        precision: torch.dtype | None = None,
        weights: Any = None,
        **knobs: Any,
    ) -> None:
        if name not in DETECTOR_FREE:
            raise ValueError(f"a detector-free matcher is one of {', '.join(DETECTOR_FREE)}, got {name!r}")
        if max_matches < 1:
            raise ValueError(f"max_keypoints must be at least 1, got {max_matches}")
        self.name, self.max_matches, self.look, self.precision = name, max_matches, look or Look(), precision
        self.device = pick_device(device)
        self.network = load(DETECTOR_FREE[name], weights, **knobs).to(self.device)

    @torch.inference_mode()
    def __call__(
        self, image0: Tensor, image1: Tensor, names: tuple[str, str] = ("image0", "image1")
    ) -> tuple[Features, Features]:
        """Matched points of ``image0 [3, h, w]`` and ``image1``, best first: point i of one belongs to point i of the
        other. ``ImageError`` when an image is too small."""
        images = (image0, image1)
        (seen0, scale0), (seen1, scale1) = (self.look.at(*each) for each in zip(images, names, strict=True))
        with torch.autocast(self.device.type, dtype=self.precision, enabled=self.precision is not None):
            found = self.network(seen0[None].to(self.device), seen1[None].to(self.device))
        best = found.scores.argsort(descending=True, stable=True)[: self.max_matches]
        sides = ((image0, found.keypoints0, scale0), (image1, found.keypoints1, scale1))
        f0, f1 = (
            Features(
                keypoints=to_original(points[best], scale),
                scores=found.scores[best],
                descriptors=points.new_empty(len(best), 0),
                size=(image.shape[-2], image.shape[-1]),
                pixel=2.0 / (scale[0] + scale[1]),
            )
            for image, points, scale in sides
        )
        return f0, f1

    def no_keypoints(self, image: Tensor, name: str = "image") -> Features:
        """What an image has on its own: none. ``ImageError`` when it is too small."""
        _, scale = self.look.at(image, name)
        none = torch.zeros(0)
        size = (image.shape[-2], image.shape[-1])
        return Features(
            keypoints=none.view(0, 2), scores=none, descriptors=none.view(0, 0), size=size,
            pixel=2.0 / (scale[0] + scale[1]),
        )  # fmt: skip
