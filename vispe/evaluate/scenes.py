"""Detection, panoptic and semantic segmentation from images to a report: predict to disk, score from disk, draw.

Pass 1 is here. A batch is always of the same neighbours in the data: whoever makes it, and after whatever stop, the
numbers are the same to the byte where the kind of machine is. What is there already, made alike from the same images,
is not made again. ``scene_score.py`` is pass 2, which knows no network.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from vispe.cache import CacheWriter, Team
from vispe.data.coco import Coco
from vispe.data.images import ImageError
from vispe.data.rle import encode
from vispe.data.scenes import EvalScenes, SceneBatch, scene_loader
from vispe.data.segmentation import SemanticImages
from vispe.data.segmentation_batches import SemanticBatch, SemanticEvalSet, semantic_loader
from vispe.detector import TOP, Detector, around, segments_of
from vispe.evaluate.scene_examples import draw_examples
from vispe.evaluate.scene_records import Classes, Task, classes, entry_of, pack
from vispe.evaluate.scene_score import Scored, chosen_examples, forget, score_classes, score_objects
from vispe.evaluate.team import together
from vispe.features import pick_device
from vispe.files import write_json
from vispe.metrics.detection import Found
from vispe.progress import ahead, track
from vispe.segmenter import Segmenter
from vispe.weights.files import sha256

WAITING, SECONDS = 64, 1.0  # images are on the disk once so many wait, or so much time has passed
HASHING = 2  # threads that hash images ahead


class Work(Protocol):
    """A network, the data it is measured on, and what both have to say to the two passes."""

    @property
    def task(self) -> Task: ...
    @property
    def network(self) -> Detector | Segmenter: ...
    @property
    def suffix(self) -> str:
        """Of the names of its files."""

    def made(self) -> dict[str, Any]:
        """How predictions are made, but for the weights."""

    def files(self) -> list[tuple[str, str, tuple[int, int] | None]]:
        """Of each image the name of its entry, its path and, where the data tell it, its size."""

    def loader(self, batches: list[list[int]], workers: int) -> Iterable[Any]: ...
    def found(self, batch: Any) -> list[tuple[Found, tuple[int, int]]]:
        """Of each image of a batch what was found and the size of the image."""

    def score(self, predictions: Path, out: Path) -> Scored: ...


@dataclasses.dataclass(frozen=True)
class Objects:
    """What ``network`` finds in ``data``: the work of coco-detection and coco-panoptic. ``partial``: classes that it
    cannot say are left out."""

    task: Task
    network: Detector
    data: Coco
    partial: bool = False
    suffix: str = ""

    def __post_init__(self) -> None:
        if not len(self.data):
            raise ValueError(f"there are no images in {self.data.annotations}")
        if self.task == "coco-panoptic" and not self.network.draws:
            raise ValueError(f"{self.network.name} finds boxes, no segments: vispe evaluate coco-detection measures it")
        if self.task == "coco-panoptic" and self.data.kind != "panoptic":
            raise ValueError(
                f"{self.data.annotations} has objects and no segments: coco-panoptic needs a panoptic file"
            )
        self.classes()

    def classes(self) -> Classes:
        """What its labels mean in the data; ``ValueError`` as :func:`vispe.evaluate.scene_records.classes`."""
        return classes(self.network.categories, self.data, self.task, partial=self.partial)

    def made(self) -> dict[str, Any]:
        n = self.network
        sizes = {"short": n.short, "long": n.long}
        return {**sizes, "top": TOP, "categories": [list(category) for category in n.categories]}

    def files(self) -> list[tuple[str, str, tuple[int, int] | None]]:
        samples = (self.data[i] for i in range(len(self.data)))
        return [(str(sample.image_id), str(sample.path), sample.size) for sample in samples]

    def loader(self, batches: list[list[int]], workers: int) -> Iterable[Any]:
        return scene_loader(EvalScenes(self.data, self.network.sizes, masks=False), batches, workers)

    def found(self, batch: SceneBatch) -> list[tuple[Found, tuple[int, int]]]:
        sizes = [(int(h), int(w)) for h, w in batch.originals.tolist()]
        output = self.network.output(batch)
        if self.task == "coco-detection":
            return list(zip(self.network.objects(output, batch), sizes, strict=True))
        shown = [segments_of(one) for one in self.network.panoptic(output, batch)]
        found = [Found(one.boxes, one.labels, one.scores, encode(one.masks)) for one in shown]  # type: ignore[arg-type]
        return list(zip(found, sizes, strict=True))

    def score(self, predictions: Path, out: Path) -> Scored:
        return score_objects(predictions, self.data, self.task, out, partial=self.partial)


@dataclasses.dataclass(frozen=True)
class Areas:
    """The class of every pixel of ``data``, whose classes are the network's, seen with a short side of ``short``."""

    network: Segmenter
    data: SemanticImages
    short: int | None
    task: Task = "semantic"

    @property
    def suffix(self) -> str:
        return f"_{self.short or 'own'}"

    def made(self) -> dict[str, Any]:
        return {"short": self.short, "categories": [[k, name, False] for k, name in enumerate(self.network.classes)]}

    def files(self) -> list[tuple[str, str, tuple[int, int] | None]]:
        return [(entry_of(self.data, i), self.data.images[i], None) for i in range(len(self.data))]

    def loader(self, batches: list[list[int]], workers: int) -> Iterable[Any]:
        return semantic_loader(SemanticEvalSet(self.data, self.short), batches, workers)  # type: ignore[arg-type]

    def found(self, batch: SemanticBatch) -> list[tuple[Found, tuple[int, int]]]:
        sizes = [(int(h), int(w)) for h, w in batch.sizes.tolist()]
        found = []
        for mask, size in zip(self.network.masks(batch.images, sizes, batch.real), sizes, strict=True):
            plain = mask.cpu().numpy()
            labels = np.unique(plain).astype(np.int64)
            masks = plain == labels[:, None, None]
            found.append((Found(around(masks), labels, np.ones(len(labels)), encode(masks)), size))
        return found

    def score(self, predictions: Path, out: Path) -> Scored:
        return score_classes(predictions, self.data)


# --- pass 1 -----------------------------------------------------------------------------------------------------------


def predict_scenes(
    work: Work,
    predictions: Path,
    *,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    workers: int = 0,
    batch_size: int = 4,
) -> bool:
    """Write ``predictions`` (HDF5, see ``scene_records.py``), or what of it is not there yet; whether this process is
    the one that goes on, as :func:`vispe.evaluate.team.together`.

    ``workers``: processes that read images for each device. ``ImageError`` names an image that cannot be read; what was
    done until then stays. ``ValueError`` where a file is there that was made otherwise.
    """
    if batch_size < 1 or workers < 0:
        raise ValueError(f"batch_size is at least 1 and workers 0, got {batch_size} and {workers}")
    made = made_by(work)
    share = functools.partial(
        _predict, work=work, made=made, predictions=predictions, workers=workers, batch_size=batch_size
    )
    return together(share, device, devices, nodes)


def made_by(work: Work) -> dict[str, Any]:
    """How predictions are made: everything that could change them."""
    model: Any = work.network.model
    return {
        "task": work.task,
        "model": work.network.name,
        "weights": weights_sha256(model),
        **{f"spec.{name}": value for name, value in dataclasses.asdict(model.spec).items()},
        **work.made(),
    }


def weights_sha256(model: nn.Module) -> str:
    """The sha256 of a network's numbers, whatever file they came from."""
    whole = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        whole.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def _predict(
    team: Team, device: str, work: Work, made: Mapping[str, Any], predictions: Path, workers: int, batch_size: int
) -> None:
    files = work.files()
    if team.rank == 0:
        predictions.parent.mkdir(parents=True, exist_ok=True)
    team.wait()
    names = [name for name, _, _ in files]
    writer = CacheWriter(
        predictions, made, names=names, keep=True, batch=WAITING, seconds=SECONDS, team=team,
        otherwise="give --out another folder",
    )  # fmt: skip
    with writer:
        starts = team.share(range(0, len(files), batch_size))
        own = range(starts[0], min(starts[-1] + batch_size, len(files))) if len(starts) else range(0)
        contents = dict(zip(own, ahead(_content, [files[i] for i in own], HASHING), strict=True))
        batches = [list(range(start, min(start + batch_size, len(files)))) for start in starts]
        todo = [some for some in batches if not all(writer.has(names[i], contents[i]) for i in some)]
        if todo:
            work.network.model.to(pick_device(device))
        brought = work.loader(todo, workers) if todo else ()
        for batch in track(brought, "predicting", "batches", total=len(todo), shown=team.rank == 0):
            if batch.problem:
                raise ImageError(batch.problem)
            start = time.perf_counter()
            found = work.found(batch)
            seconds = (time.perf_counter() - start) / len(found)
            for i, (one, size) in zip(batch.indices.tolist(), found, strict=True):
                attributes = {"size": np.array(size, dtype=np.int64), "seconds": seconds}
                writer.add(names[i], pack(one), attributes, contents[i])


def _content(file: tuple[str, str, tuple[int, int] | None]) -> str:
    """The fingerprint of an image; of one that is no file, `read_image` says what it is."""
    _, path, size = file
    return (sha256(path) if os.path.isfile(path) else "") + ("" if size is None else f" {size[0]}x{size[1]}")


# --- all of it --------------------------------------------------------------------------------------------------------


def evaluate_scenes(
    works: Sequence[Work],
    out: Path,
    about: Mapping[str, Any],
    *,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    workers: int = 0,
    batch_size: int = 4,
) -> list[dict[str, Any]] | None:
    """Predict, score and draw each of ``works`` into the folder ``out``; their reports, or None in a process that only
    helped.

    ``report.json`` is the report, or of semantic ``{"results": [...]}``, one a size, and comes last; ``about`` goes
    into each. But for their ``timing``, reports follow from the network, the data and the kind of machine.
    """
    pick_device(device)  # before there is a folder
    check_folder(out, works[0].task, about)
    done = []
    for work in works:
        predictions = out / f"predictions{work.suffix}.h5"
        if not predict_scenes(
            work, predictions, device=device, devices=devices, nodes=nodes, workers=workers, batch_size=batch_size
        ):
            return None
        done.append((work, predictions))
    forget(out)
    reports = []
    for work, predictions in done:
        scored = work.score(predictions, out)
        examples = chosen_examples(scored)
        draw_examples(predictions, work.data, examples, out / f"examples{work.suffix}.png")  # type: ignore[attr-defined]
        reports.append({"task": work.task, **about, **scored.report(), "examples": examples})
    write_json(out / "report.json", {"results": reports} if works[0].task == "semantic" else reports[0])
    return reports


def check_folder(out: Path, task: str, about: Mapping[str, Any]) -> None:
    """``ValueError`` for a folder with files of a training or of another evaluation: they would be written over."""
    if (out / "run.json").exists():
        raise ValueError(f"{os.fspath(out)!r} holds a training run; give --out another folder")
    try:
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError):
        report = {}
    earlier = report.get("results", [report])[0] if isinstance(report, dict) else {}
    wanted = {"task": task, **about}
    if odd := [name for name, value in wanted.items() if earlier.get(name) != value]:
        told = f"{odd[0]} {earlier.get(odd[0])!r}, not {wanted[odd[0]]!r}"
        raise ValueError(f"{os.fspath(out)!r} holds another evaluation ({told}); give --out another folder")
