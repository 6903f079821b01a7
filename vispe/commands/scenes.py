"""Detection, panoptic and semantic segmentation: the kinds of ``vispe evaluate`` that score them, and ``predict``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vispe.commands.printing import busy, complain, print_rows
from vispe.commands.words import command, needs, processes, size_of

if TYPE_CHECKING:
    from vispe.detector import Detector

Options = argparse.Namespace
AGAIN = "; predictions are kept in --out: the same line goes on after an interruption, and scores what is there"
NUMBERS = {  # of a report, as columns of a table
    "boxes": ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR1", "AR10", "AR100"),
    "panoptic": ("PQ", "SQ", "RQ", "PQ_things", "PQ_stuff"),
    "semantic": ("miou", "pixel_accuracy", "mean_accuracy"),
}
NUMBERS["masks"] = NUMBERS["boxes"]


def declare(kinds: Any) -> None:
    """The kinds of ``vispe evaluate`` for data in COCO's format."""
    add = command(kinds, "coco-detection", run_coco, "average precision of boxes, and masks, on COCO's files", AGAIN)
    _coco(add, "coco-detection")
    add = command(kinds, "coco-panoptic", run_coco, "panoptic quality on COCO's files", AGAIN)
    _coco(add, "coco-panoptic")


def _coco(add: Any, name: str) -> None:
    add("checkpoint", metavar="CHECKPOINT", type=Path, nargs="?", help="a .safetensors, or a training run's folder")
    published(add)
    add("--images", type=Path, required=True, metavar="DIR", help="where the images are")
    add("--annotations", type=Path, required=True, metavar="FILE.json", help="instances_*.json or panoptic_*.json")
    add("--pngs", type=Path, metavar="DIR", help="of a panoptic file; default: the folder of its name")
    add("--limit", type=int, metavar="N", help="look at the first N images")
    add("--bad", default="refuse", choices=("refuse", "skip"), help="images and annotations that cannot be used")
    add("--partial", action="store_true", help="leave out classes that the network cannot say; default: refuse")
    add("--size", metavar="N|NxM", help=SIZE_HELP)
    add("--batch", type=int, default=4, metavar="N", help="images at a time; default %(default)s")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")
    add("--workers", type=int, default=2, metavar="N", help="processes that read images; default %(default)s")
    processes(add)
    add("--out", type=Path, default=Path("out") / name, metavar="DIR", help="default %(default)s")


SIZE_HELP = "short side, and the most of the long one (default: in proportion); default: as it was trained"


def published(add: Any) -> None:
    """The options of a network of the zoo in a checkpoint's stead."""
    add("--model", metavar="NAME", help="a DETR or Mask2Former with COCO's published weights, instead of CHECKPOINT")
    add("--weights", metavar="FILE|URL", help="of --model; default: the published file")
    add("--origin", metavar="NAME", help="whose names these weights use; default: found out")


def detector_of(options: Options) -> Detector:
    """The network asked for, on the CPU, at the size asked for."""
    from vispe.detector import load_detector, published_detector

    if (options.checkpoint is None) == (options.model is None):
        raise ValueError("name a CHECKPOINT or a --model, one of them")
    if options.model is None and (options.weights is not None or options.origin is not None):
        raise ValueError("--weights and --origin belong to --model")
    if options.model is not None:
        found = published_detector(options.model, options.weights, options.origin)
    else:
        found = load_detector(options.checkpoint)
    return found if not options.size else sized(found, options.size)


def sized(detector: Detector, text: str) -> Detector:
    """``"480"`` or ``"480x800"``: the short side, and the most of the long one."""
    short, long = size_of(text)
    if "x" not in text.lower():
        long = max(round(detector.long * short / detector.short), short)
    if long < short:
        raise ValueError(f"--size is short x long, got {text!r}")
    return dataclasses.replace(detector, short=short, long=long)


def first(count: int, limit: int | None) -> range:
    """The first ``limit`` of ``count`` images."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is at least 1 image, got {limit}")
    return range(count if limit is None else min(limit, count))


def run_coco(options: Options) -> None:
    needs("pycocotools", "faster_coco_eval", extra="detect")
    from vispe.data.coco import open_coco
    from vispe.data.coco_parts import sound_scenes
    from vispe.evaluate.scenes import Objects, evaluate_scenes

    with busy("opening"):
        data = open_coco(options.images, options.annotations, pngs=options.pngs, bad=options.bad)
        data = data.subset(first(len(data), options.limit))
        broken: list[str] = []
        if options.bad == "skip":  # else the first that cannot be read ends the run
            data, broken = sound_scenes(data, "skip")
        network = detector_of(options)
        work = Objects(options.kind, network, data, options.partial)
    given = {name: getattr(options, name) for name in ("checkpoint", "weights", "annotations")}
    about = {name: None if value is None else str(value) for name, value in given.items()}
    reports = evaluate_scenes([work], options.out, about, **_shared(options))
    if reports is not None:
        print(f"{network.name}, {len(data)} image{'s' * (len(data) != 1)} of {options.annotations}")
        if unused := [*data.problems, *broken]:
            print(f"not used: {len(unused)}, first {unused[0]}")
        tell(reports, options.out)


def run_semantic_kept(options: Options, network: Any, images: Any, shorts: list[int | None]) -> None:
    """Semantic segmentation with predictions that are kept in a folder."""
    needs("pycocotools", extra="detect")
    from vispe.evaluate.scenes import Areas, evaluate_scenes

    works = [Areas(network, images, short) for short in shorts]
    about = {"checkpoint": str(options.checkpoint), "data_root": str(options.data)}
    reports = evaluate_scenes(works, options.out, about, **_shared(options))
    if reports is not None:
        tell(reports, options.out)


def _shared(options: Options) -> dict[str, Any]:
    names = ("device", "devices", "nodes", "workers")
    return {name: getattr(options, name) for name in names} | {"batch_size": options.batch}


def tell(reports: list[dict[str, Any]], out: Path) -> None:
    """A table of each kind of numbers, and what was written."""
    for kind in reports[0]["numbers"]:
        columns = NUMBERS[kind]
        semantic = kind == "semantic"
        rows = [("short side" if semantic else kind, *columns, "images/s")]
        for report in reports:
            values = (report["numbers"][kind][name] for name in columns)
            cells = ("-" if value is None else f"{value:.4f}" for value in values)
            first = str(report["made"]["short"] or "own") if semantic else ""
            rows.append((first, *cells, f"{report['timing']['images_per_second']:.1f}"))
        print_rows(rows)
    left_out = reports[0]["left_out"]
    if left_out:
        print(f"left out: {', '.join(left_out[:5])}" + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""))
    print(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir() if not path.name.startswith('.')))}")


# --- predict ----------------------------------------------------------------------------------------------------------


def run_predict_objects(options: Options) -> None:
    """Boxes and masks of images, written one by one, as they come."""
    needs("pycocotools", extra="detect")
    from vispe.classifier import image_paths
    from vispe.features import pick_device
    from vispe.objects import predict_objects, write_seen
    from vispe.segmenter import names_for

    device, paths, folder = pick_device(options.device), image_paths(options.images), options.out or Path("out/predict")
    names, problems, found = names_for(paths, folder), [], 0
    with busy("predicting"):
        detector = detector_of(argparse.Namespace(**{**vars(options), "size": next(iter(options.size), None)}))
        detector.model.to(device)
        for name, one in zip(names, predict_objects(detector, paths, options.threshold), strict=True):
            if one.problem:
                problems.append(one.problem)
            else:
                found += write_seen(folder, name, detector, one)
    if len(problems) == len(paths):
        raise ValueError(problems[0])
    for problem in problems:
        complain("vispe predict", problem)
    unread = f", {len(problems)} could not be read" if problems else ""
    what = "segments" if detector.tells_segments else "objects"
    print(f"wrote {folder}: {len(paths) - len(problems)} images, {found} {what}{unread}")
