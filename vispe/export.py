"""Networks as ONNX files, every axis that can vary dynamic: a LightGlue of fixed depth, a DETR, a SegFormer.

LightGlue. Inputs: ``keypoints0 [b, m, 2]`` float32 (x, y) pixels, ``descriptors0 [b, m, d]``, ``size0 [b, 2]`` (h, w),
the same for image 1 with ``n`` keypoints (and ``scales``, ``orientations [b, m]`` for weights trained with them).
Outputs of fixed shape, whatever matched: ``matches0 [b, m]`` int64 (-1: none), ``matches1 [b, n]``, ``scores0 [b, m]``,
``scores1 [b, n]`` float32. Zero keypoints are allowed.

DETR and SegFormer take ``images [b, 3, h, w]`` float32, RGB in [0, 1] of any size; the normalisation is in the file.
DETR has ``mask [b, h, w]`` bool besides, true where a batch holds image, and gives ``logits [b, q, classes + 1]`` and
``boxes [b, q, 4]`` (cx, cy, w, h as parts of the image); SegFormer ``logits [b, classes, h / 4, w / 4]``. The file's
metadata have the names of the classes where they are known. Dynamic axes are called ``batch``, ``keypoints0``,
``keypoints1``, ``height``, ``width``, and of a SegFormer's cells ``rows`` and ``columns``.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vispe.classifier import task_of
from vispe.detector import load_detector
from vispe.files import atomic, check_file
from vispe.layers.assignment import mutual
from vispe.models import MODELS
from vispe.models.detr import DETR
from vispe.models.lightglue import LightGlue, Points
from vispe.progress import quiet
from vispe.segmenter import load_segmenter
from vispe.weights import load

EXPORTED = ("lightglue", "detr", "segformer")  # the files of models that can be written


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


class Seeing(nn.Module):
    """A network of images with the normalisation in front of it: RGB in [0, 1] goes in."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        spec: Any = network.spec
        self.network = network
        self.register_buffer("mean", torch.tensor(spec.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(spec.std).view(3, 1, 1))

    mean: Tensor
    std: Tensor

    def normalised(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class Boxes(Seeing):
    """A DETR's last layer; ``mask`` is true where a batch holds image."""

    def forward(self, images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        output = self.network(self.normalised(images) * mask[:, None], mask)
        return output.logits, output.boxes


class Classes(Seeing):
    """Logits of classes, of pixels or cells, as the network gives them."""

    def forward(self, images: Tensor) -> Tensor:
        return self.network(self.normalised(images))


Axes = dict[int, str]  # the names of those that are dynamic


class _Job(NamedTuple):
    """What torch's exporter is handed, and the names that the file has: of inputs and outputs, and of their axes."""

    network: nn.Module
    example: tuple[Tensor, ...]
    inputs: dict[str, Axes]
    outputs: dict[str, Axes]


def export_onnx(name: str, out: str | os.PathLike[str], weights: Any = None, origin: str | None = None) -> None:
    """Write ``name`` to ``out``: a model of the zoo (its published weights, or ``weights``), a file that was trained
    here, or a run's folder.

    ``ValueError`` for a model that cannot be exported or when ``onnxscript`` is missing.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError("exporting needs onnxscript: pip install 'vispe[export]'") from error
    check_file(out)
    network, about = _network(name, weights, origin)
    job = _job(network)
    # The exporter's talk about its own internals.
    with atomic(Path(out)) as path, quiet("torch.onnx", "onnxscript", "onnx_ir"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            job.network.eval(), job.example, dynamo=True, dynamic_shapes=tuple(job.inputs.values()), verbose=False,
            input_names=list(job.inputs), output_names=list(job.outputs),
        )  # fmt: skip
        assert program is not None
        for output, axes in zip(program.model.graph.outputs, job.outputs.values(), strict=True):
            for axis, called in axes.items():  # else a formula of the inputs' names
                output.shape[axis] = called  # type: ignore[index]
        program.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
        program.save(path, external_data=False)


def _network(name: str, weights: Any, origin: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """The network of a name or a trained file, and what the file says of it."""
    if name.partition(".")[0] in MODELS:
        if MODELS[name.partition(".")[0]] not in EXPORTED:
            names = ", ".join(known for known, home in MODELS.items() if home in EXPORTED)
            raise ValueError(f"{name!r} cannot be exported; what can: {names}")
        return load(name, weights, origin), {"model": name}
    if not os.path.exists(name):
        raise ValueError(f"{name!r} is no model of the zoo and no file; vispe list models says which there are")
    if weights is not None:
        raise ValueError(f"{name!r} has its own weights; give a model's name to export others")
    task = task_of(name)
    trained: Any = {"detect": load_detector, "segment": load_segmenter}.get(task, lambda _: None)(name)
    if trained is None or type(trained.model).__name__ not in ("DETR", "SegFormer"):
        what = f"trained to {task}" if trained is None else f"a {trained.name}"
        raise ValueError(f"{name!r} is {what}; a DETR, a SegFormer or a LightGlue can be exported")
    classes = getattr(trained, "classes", None) or [category.name for category in trained.categories]
    return trained.model, {"model": trained.name, "classes": list(classes)}


def _job(network: nn.Module) -> _Job:
    """What ``network`` is exported by; of a DETR the earlier layers' predictions are left out."""
    images = {0: "batch", 2: "height", 3: "width"}
    if isinstance(network, LightGlue):
        points = [{0: "batch", 1: f"keypoints{k}"} for k in "01"]
        outputs = {f"{what}{k}": points[k] for what in ("matches", "scores") for k in (0, 1)}
        return _Job(FixedDepth(network), _example(network), _inputs(network, points), outputs)
    if isinstance(network, DETR):
        network.spec = network.spec.but(auxiliary=False)
        mask = torch.ones(2, 70, 101, dtype=torch.bool)
        mask[1, 50:] = mask[1, :, 64:] = False
        inputs = {"images": images, "mask": {0: "batch", 1: "height", 2: "width"}}
        outputs = {"logits": {0: "batch"}, "boxes": {0: "batch"}}
        return _Job(Boxes(network), (torch.rand(2, 3, 70, 101), mask), inputs, outputs)
    outputs = {"logits": {0: "batch", 2: "rows", 3: "columns"}}
    return _Job(Classes(network), (torch.rand(2, 3, 96, 128),), {"images": images}, outputs)


def _inputs(network: LightGlue, points: list[Axes]) -> dict[str, Axes]:
    names: dict[str, Axes] = {}
    for k, axes in enumerate(points):
        names |= {f"keypoints{k}": axes, f"descriptors{k}": axes, f"size{k}": {0: "batch"}}
    if network.spec.scale_and_orientation:
        names |= {f"{field}{k}": axes for k, axes in enumerate(points) for field in ("scales", "orientations")}
    return names


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
