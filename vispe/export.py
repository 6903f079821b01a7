"""A LightGlue of fixed depth as an ONNX file; batch and keypoint axes are dynamic.

Inputs: ``keypoints0 [b, m, 2]`` float32 (x, y) pixels, ``descriptors0 [b, m, d]``, ``size0 [b, 2]`` (h, w), the same
for image 1 with ``n`` keypoints (and ``scales``, ``orientations [b, m]`` for weights trained with them). Outputs of
fixed shape, whatever matched: ``matches0 [b, m]`` int64 (-1: none), ``matches1 [b, n]``, ``scores0 [b, m]``, ``scores1
[b, n]`` float32. Zero keypoints are allowed.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vispe.files import atomic
from vispe.layers.assignment import mutual
from vispe.models import MODELS
from vispe.models.lightglue import LightGlue, Points
from vispe.weights import load


class FixedDepth(nn.Module):
    """All layers, then the mutual best entries of the whole log-assignment: no control flow that depends on data."""

    def __init__(self, network: LightGlue) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, keypoints0: Tensor, descriptors0: Tensor, size0: Tensor,
        keypoints1: Tensor, descriptors1: Tensor, size1: Tensor,
        scales0: Tensor | None = None, orientations0: Tensor | None = None,
        scales1: Tensor | None = None, orientations1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        points0 = _with_room(Points(keypoints0, descriptors0, size0, None, scales0, orientations0))
        points1 = _with_room(Points(keypoints1, descriptors1, size1, None, scales1, orientations1))
        scores = self.network.log_assignment(points0, points1)[:, :-1, :-1]
        (value0, best0), (_, best1) = scores.max(2), scores.max(1)
        m0, m1, p0, p1 = (t[:, :-1] for t in mutual(best0, best1, value0.exp(), self.network.spec.threshold))
        assert points0.mask is not None
        assert points1.mask is not None
        hollow = ((points0.mask.sum(1) < 2) | (points1.mask.sum(1) < 2))[:, None]  # as LightGlue.match says
        return (
            m0.masked_fill(hollow, -1),
            m1.masked_fill(hollow, -1),
            p0.masked_fill(hollow, 0),
            p1.masked_fill(hollow, 0),
        )


def _with_room(points: Points) -> Points:
    """One padded (masked) point more, so that no axis is ever empty."""
    keypoints, descriptors, size, _, *extra = points
    mask = F.pad(torch.ones_like(keypoints[..., 0], dtype=torch.bool), (0, 1))
    scales, orientations = (None if t is None else F.pad(t, (0, 1)) for t in extra)
    return Points(F.pad(keypoints, (0, 0, 0, 1)), F.pad(descriptors, (0, 0, 0, 1)), size, mask, scales, orientations)


def export_onnx(name: str, out: str | os.PathLike[str], weights: Any = None) -> None:
    """Write matcher ``name`` to ``out``; ``ValueError`` for a model that is no matcher or when ``onnxscript`` is
    missing."""
    if MODELS.get(name) != "lightglue":
        names = ", ".join(known for known, home in MODELS.items() if home == "lightglue")
        raise ValueError(f"only matchers can be exported, not {name!r}: {names}")
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError("exporting needs onnxscript: pip install 'vispe[export]'") from error
    network = load(name, weights)
    assert isinstance(network, LightGlue)
    with atomic(Path(out)) as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's talk about its own internals
        program = torch.onnx.export(
            FixedDepth(network).eval(), _example(network), dynamo=True, dynamic_shapes=_axes(network), verbose=False,
            input_names=_inputs(network), output_names=["matches0", "matches1", "scores0", "scores1"],
        )  # fmt: skip
        assert program is not None
        program.save(path, external_data=False)


def _inputs(network: LightGlue) -> list[str]:
    names = [f"{field}{k}" for k in "01" for field in ("keypoints", "descriptors", "size")]
    extra = [f"{field}{k}" for k in "01" for field in ("scales", "orientations")]
    return names + extra * network.spec.scale_and_orientation


def _example(network: LightGlue) -> tuple[Tensor, ...]:
    b, d = 2, network.spec.input_dim
    example: list[Tensor] = []
    for n in (5, 7):
        example += [
            torch.rand(b, n, 2) * 100,
            F.normalize(torch.randn(b, n, d), dim=-1),
            torch.tensor([[100.0, 120.0]] * b),
        ]
    if network.spec.scale_and_orientation:
        example += [torch.rand(b, n) for n in (5, 5, 7, 7)]
    return tuple(example)


def _axes(network: LightGlue) -> tuple[dict[int, Any], ...]:
    b, m, n = (torch.export.Dim.DYNAMIC for _ in range(3))
    axes: list[dict[int, Any]] = []
    for count in (m, n):
        axes += [{0: b, 1: count}, {0: b, 1: count}, {0: b}]
    if network.spec.scale_and_orientation:
        axes += [{0: b, 1: count} for count in (m, m, n, n)]
    return tuple(axes)
