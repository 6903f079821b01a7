"""Local features of one image, whoever finds them, behind one typed result.

Keypoints leave this file in pixels of the image as a person sees it, whatever size it was looked at: they and the size
travel together, and so do scale and orientation where the detector has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vispe.data.images import MINIMUM_SIDE, ImageError, check_size
from vispe.data.resizing import resize, to_original, unrotate_points
from vispe.models import EXTRACTORS, home
from vispe.models.lightglue import Points
from vispe.sift import sift
from vispe.weights import load

LONG_SIDE = 1024  # pixels: larger images are looked at this size unless another is asked for
RESIZES = range(16, 16385)  # what may be asked for; beyond, an image would not fit in memory


@dataclass(frozen=True, eq=False, kw_only=True)
class Features:
    """``n`` local features of one image of ``size`` (h, w), strongest first.

    ``keypoints [n, 2]`` (x, y) pixels of that image; ``scores [n]``; ``descriptors [n, d]`` unit norm; ``scales [n]``
    in pixels of the image the network saw, and ``orientations [n]`` in radians, only from detectors that have them.
    ``pixel`` is how many pixels of the image one pixel of the looked-at image spans.
    """

    keypoints: Tensor
    scores: Tensor
    descriptors: Tensor
    size: tuple[int, int]
    pixel: float
    scales: Tensor | None = None
    orientations: Tensor | None = None

    def __len__(self) -> int:
        return len(self.keypoints)

    def points(self) -> Points:
        """A batch of one for the matcher."""
        scales, orientations = (None if t is None else t[None] for t in (self.scales, self.orientations))
        return Points(self.keypoints[None], self.descriptors[None], self.size, None, scales, orientations)

    def turned_back(self, quarter_turns: int, size: tuple[int, int]) -> Features:
        """Features found on ``rotate90(image, quarter_turns)`` as features of the image itself, of ``size``."""
        if quarter_turns % 4 == 0:
            return self
        keypoints, orientations = unrotate_points(self.keypoints, quarter_turns, size), self.orientations
        if orientations is not None:  # y points down: a counter-clockwise turn lowers an angle, turning back raises it
            raised = orientations + (quarter_turns / 2 + 1) * torch.pi
            orientations = torch.remainder(raised, 2 * torch.pi) - torch.pi
        return replace(self, keypoints=keypoints, size=size, orientations=orientations)


@dataclass(frozen=True, kw_only=True)
class Look:
    """At which size an image is looked at: its ``side`` made ``resize`` pixels long; None: the long side at most 1024,
    never enlarged; 0: as it is; ``(h, w)``: exactly that, whatever its shape."""

    resize: int | tuple[int, int] | None = None
    side: Literal["long", "short"] = "long"

    def __post_init__(self) -> None:
        sides = self.resize if isinstance(self.resize, tuple) else (self.resize,)
        if self.resize not in (None, 0) and not all(side in RESIZES for side in sides):
            raise ValueError(f"resize must be 0 (off) or {RESIZES[0]} to {RESIZES[-1]} pixels, got {self.resize}")
        if self.side not in ("long", "short"):
            raise ValueError(f"side must be 'long' or 'short', got {self.side!r}")

    def __call__(self, image: Tensor) -> tuple[Tensor, tuple[float, float]]:
        h, w = image.shape[-2:]
        if self.resize == 0 or (self.resize is None and max(h, w) <= LONG_SIDE):
            return image, (1.0, 1.0)
        if isinstance(self.resize, tuple):
            return resize(image, self.resize, side="exact")
        return resize(image, self.resize or LONG_SIDE, side=self.side if self.resize else "long")

    def at(self, image: Tensor, name: str) -> tuple[Tensor, tuple[float, float]]:
        """The image as looked at and its scale; ``ImageError`` when it, or what is left of it, is too small."""
        h, w = image.shape[-2:]
        check_size(h, w, name)
        seen, scale = self(image)
        if min(seen.shape[-2:]) < MINIMUM_SIDE:
            raise ImageError(
                f"image {name!r} of {w} x {h} pixels is only {seen.shape[-1]} x {seen.shape[-2]} as looked at, "
                f"too thin to use: ask for a larger one (--resize N, --side short; --resize 0 takes it as it is)"
            )
        return seen, scale


class Extractor:
    """A detector and descriptor by name: ``extractor(image) -> Features``. Holds no state that a call changes."""

    def __init__(self, name: str, find: Callable[[Tensor], Any], device: torch.device, look: Look) -> None:
        self.name, self.find, self.device, self.look = name, find, device, look

    @torch.inference_mode()
    def __call__(self, image: Tensor, name: str = "image") -> Features:
        """Features of ``image [3, h, w]``; ``ImageError`` when it, or what resizing leaves of it, is too small."""
        seen, scale = self.look.at(image, name)
        found = self.find(seen.to(self.device))
        return Features(
            keypoints=to_original(found.keypoints, scale),
            scores=found.scores,
            descriptors=found.descriptors,
            size=(image.shape[-2], image.shape[-1]),
            pixel=2.0 / (scale[0] + scale[1]),
            scales=getattr(found, "scales", None),
            orientations=getattr(found, "orientations", None),
        )


def extractor(
    name: str,
    *,
    max_keypoints: int = 2048,
    look: Look = Look(),
    device: torch.device | str = "auto",
    weights: Any = None,
    **knobs: Any,
) -> Extractor:
    """The extractor ``name`` with its published weights (or ``weights``: a path or state dict), on ``device``.

    At most ``max_keypoints``; ``knobs`` are those of the model's spec (``detection_threshold``, ``nms_radius``, ...).
    ``ValueError`` for an unknown name or knob, ``WeightsError`` when weights cannot be had.
    """
    if name not in EXTRACTORS:
        raise ValueError(f"extractor must be one of {', '.join(EXTRACTORS)}, got {name!r}")
    if max_keypoints < 1:
        raise ValueError(f"max_keypoints must be at least 1, got {max_keypoints}")
    if not abs(knobs.get("detection_threshold", 0.0)) < float("inf"):
        raise ValueError(f"detection_threshold must be a finite number, got {knobs['detection_threshold']}")
    device = pick_device(device)
    if name == "sift":
        return Extractor(name, _sift(max_keypoints, weights, knobs), device, look)
    network: nn.Module = load(name, weights, max_keypoints=max_keypoints, **knobs).to(device)
    return Extractor(name, lambda image: network(image[None])[0], device, look)


def described(name: str, **knobs: Any) -> tuple[int, bool]:
    """How many numbers a descriptor of the extractor ``name`` has, and whether its points have scales and orientations.

    ``knobs`` as of :func:`extractor`, and ``ValueError`` for an unknown one.
    """
    if name == "sift":
        return 128, True
    spec = home(name).VARIANTS[name].but(**knobs)
    return spec.dim if hasattr(spec, "dim") else spec.descriptor_dim, False


def _sift(max_keypoints: int, weights: Any, knobs: dict[str, Any]) -> Callable[[Tensor], Any]:
    known = [knob for knob in inspect.signature(sift).parameters if knob != "image"]
    if unknown := sorted(set(knobs) - set(known)):
        raise ValueError(f"sift has no {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
    if weights is not None:
        raise ValueError("sift has no weights")
    return lambda image: sift(image, max_keypoints=max_keypoints, **knobs)


def pick_device(device: str | torch.device) -> torch.device:
    """``"auto"`` is CUDA when there is one, else the CPU; ``ValueError`` for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:  # torch's ways of saying no
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return chosen
