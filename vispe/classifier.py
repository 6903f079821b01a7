"""A trained image classifier in one file: weights, spec, class names and recipe; images or folders in, classes out.

The file is a ``.safetensors`` with JSON in its header. Reading a stranger's file runs none of his code.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vispe.data.augment import evaluation_transform
from vispe.data.batches import EvalSet, Shares, loader
from vispe.data.classification import Images
from vispe.data.images import ImageError, read_image
from vispe.data.sources import folder_files
from vispe.files import write_atomically
from vispe.metrics.classification import Tally
from vispe.weights import build
from vispe.weights.files import CHECKPOINTS, checkpoint

T = TypeVar("T")
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Classifier:
    """``model`` (in eval mode) called ``name`` in the zoo tells ``classes`` apart at ``size`` (h, w).

    ``recipe`` is how it was trained, as plain JSON.
    """

    model: nn.Module
    name: str
    classes: tuple[str, ...]
    size: tuple[int, int]
    eval_crop: float
    recipe: dict[str, Any]

    def logits(self, images: Tensor) -> Tensor:
        """uint8 ``[b, 3, h, w]`` of any size the patches tile -> float32 ``[b, classes]``, on the model's device."""
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            return self.model(normalised(images.to(device), self.model.spec)).float()


def normalised(images: Tensor, spec: Any) -> Tensor:
    """uint8 ``[b, 3, h, w]`` -> float32 with the mean and deviation that a model's spec expects."""
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (spec.mean, spec.std))
    return (images.float() / 255 - mean) / std


# --- the file ---------------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], classifier: Classifier, state: dict[str, Tensor] | None = None) -> None:
    """Write the file in one step. ``state``: weights to write instead of the model's own."""
    write_trained(path, "classify", classifier, state)


def load_classifier(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Classifier:
    """The classifier of a file, or of a training run's folder (its ``last``, else its ``best``).

    ``ValueError`` when it is no such file or its weights do not fit its spec.
    """

    def made(about: dict[str, Any], model: nn.Module) -> Classifier:
        size, classes = (int(about["size"][0]), int(about["size"][1])), tuple(map(str, about["classes"]))
        return Classifier(model, about["model"], classes, size, float(about["eval_crop"]), dict(about["recipe"]))

    return load_trained(path, "classify", made, device)


# --- any trained file -------------------------------------------------------------------------------------------------


def write_trained(
    path: str | os.PathLike[str], task: str, trained: Any, state: dict[str, Tensor] | None = None
) -> None:
    """Write a dataclass like :class:`Classifier` in one step: ``model``'s weights, or ``state``; the rest as JSON."""
    from safetensors.torch import save as packed

    fields = {field.name: getattr(trained, field.name) for field in dataclasses.fields(trained)}
    model, name = fields.pop("model"), fields.pop("name")
    spec = json.loads(json.dumps(dataclasses.asdict(model.spec)))
    about = {"format": FORMAT, "task": task, "model": name, "spec": spec, **fields}
    state = model.state_dict() if state is None else state
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    data = packed(tensors, {"vispe": json.dumps(about)})  # by hand: save_file makes files only their owner can read
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def load_trained(
    path: str | os.PathLike[str],
    task: str,
    made: Callable[[dict[str, Any], nn.Module], T],
    device: torch.device | str = "cpu",
) -> T:
    """What ``made`` makes of the header and the model of a file, or of a run's folder, that was written for ``task``.

    ``ValueError`` when it is no such file, is of another task, or its weights do not fit its spec.
    """
    file = _file(path)
    about, state = _read(file)
    if _task(about) != task:
        raise ValueError(f"{str(file)!r} was trained to {_task(about)}, not to {task}")
    try:
        spec = {key: tuple(v) if isinstance(v, list) else v for key, v in about["spec"].items()}
        model = build(about["model"], **spec)
        model.load_state_dict(state)
        trained = made(about, model)
    except (KeyError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"{str(file)!r} does not fit together: {str(error).partition(chr(10))[0]}") from None
    model.to(device).eval()
    return trained


def task_of(path: str | os.PathLike[str]) -> str:
    """What a trained file, or a run's folder, is for: "classify", "segment", ...; ``ValueError`` when it is none."""
    return _task(_read(_file(path))[0])


def _task(about: dict[str, Any]) -> str:
    return str(about.get("task", "classify"))  # the first files did not say


def _file(path: str | os.PathLike[str]) -> Path:
    found = checkpoint(path)
    if found.is_dir():
        raise ValueError(f"{str(found)!r} holds no {' or '.join(CHECKPOINTS)}: it is no trained run, or not yet")
    return found


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ValueError(f"there is no checkpoint {str(file)!r}")
    try:
        with safe_open(file, "pt") as opened:
            about = json.loads((opened.metadata() or {}).get("vispe", "null"))
            state = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{str(file)!r} is not a .safetensors file: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{str(file)!r} holds weights but not a model that vispe trained")
    return about, state


# --- prediction -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prediction:
    """``best``: (class, probability), the likeliest first; empty when ``problem`` says why there is none."""

    path: str
    best: tuple[tuple[str, float], ...]
    problem: str = ""


def image_paths(given: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Files as they are, folders replaced by every image below them; ``ValueError`` for an empty or missing one."""
    paths: list[str] = []
    for path in given:
        if os.path.isdir(path):
            files = folder_files(path)
            if not len(files):
                raise ValueError(f"there are no images in {os.fspath(path)!r}")
            paths += [files.name(k) for k in range(len(files))]
        else:
            paths.append(os.fspath(path))
    return paths


def predict(
    classifier: Classifier,
    paths: Sequence[str],
    *,
    top: int = 5,
    batch_size: int = 32,
    size: tuple[int, int] | None = None,
) -> Iterator[Prediction]:
    """A prediction for each path, in order; an image that cannot be read gets one that says so."""
    if top < 1 or batch_size < 1:
        raise ValueError(f"top and batch_size are at least 1, got {top} and {batch_size}")
    transform = evaluation_transform(size or classifier.size, classifier.eval_crop)
    for start in range(0, len(paths), batch_size):
        made: dict[str, Tensor] = {}
        problems: dict[str, str] = {}
        for path in paths[start : start + batch_size]:
            try:
                made[path] = transform(read_image(path))
            except ImageError as error:
                problems[path] = str(error)
        found = _ranked(classifier, made, top)
        for path in paths[start : start + batch_size]:
            yield Prediction(path, found.get(path, ()), problems.get(path, ""))


def _ranked(classifier: Classifier, images: dict[str, Tensor], top: int) -> dict[str, tuple[tuple[str, float], ...]]:
    if not images:
        return {}
    chances = classifier.logits(torch.stack(list(images.values()))).softmax(1)
    values, indices = chances.topk(min(top, len(classifier.classes)), dim=1)
    rows = zip(images, values.tolist(), indices.tolist(), strict=True)
    return {path: tuple((classifier.classes[i], v) for v, i in zip(vs, js, strict=True)) for path, vs, js in rows}


def write_predictions(path: str | os.PathLike[str], predictions: Sequence[Prediction]) -> None:
    """CSV in one step: path, problem, class_1, probability_1, class_2, ..."""
    top = max((len(one.best) for one in predictions), default=0)
    head = ["path", "problem", *(f"{what}_{k + 1}" for k in range(top) for what in ("class", "probability"))]

    def write(temporary: Path) -> None:
        with open(temporary, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = csv.writer(file)
            rows.writerow(head)
            for one in predictions:
                rows.writerow([one.path, one.problem, *(cell for name, p in one.best for cell in (name, f"{p:.6f}"))])

    write_atomically(path, write)


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(
    classifier: Classifier,
    images: Images,
    size: tuple[int, int],
    *,
    batch_size: int = 64,
    workers: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[Tally, dict[str, float]]:
    """The counts at ``size`` (h, w), and ``seconds`` in the network with ``images_per_second``.

    ``ValueError`` when patches do not tile ``size``; ``ImageError`` names an image that cannot be read.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is at least 1, got {batch_size}")
    device = next(classifier.model.parameters()).device
    tally, spent = Tally(len(classifier.classes), device), 0.0
    brought = loader(EvalSet(images, size, classifier.eval_crop), Shares(len(images), batch_size), workers)
    for done, batch in enumerate(brought, 1):
        if batch.problem:
            raise ImageError(batch.problem)
        start = time.perf_counter()
        tally.add(classifier.logits(batch.images), batch.labels.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent += time.perf_counter() - start
        if progress is not None:
            progress(min(done * batch_size, len(images)), len(images))
    return tally, {"seconds": spent, "images_per_second": len(images) / max(spent, 1e-9)}
