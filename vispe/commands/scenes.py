"""Detection, panoptic and semantic segmentation: the kinds of ``vispe evaluate`` that score them, and ``predict``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vispe.commands.matching import results
from vispe.commands.printing import busy, print_rows
from vispe.commands.words import at_least, command, fitting_of, folder_of, needs, processes

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
    add("--limit", type=at_least(1), metavar="N", help="look at the first N images")
    add("--bad", default="refuse", choices=("refuse", "skip"), help="images and annotations that cannot be used")
    add("--partial", action="store_true", help="leave out classes that the network cannot say; default: refuse")
    add("--size", metavar="N|NxM", help=SIZE_HELP)
    add("--batch", type=at_least(1), default=4, metavar="N", help="images at a time; default %(default)s")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")
    add("--workers", type=at_least(0), default=2, metavar="N", help="processes that read images; default %(default)s")
    processes(add)
    add("--out", type=Path, default=Path("out") / name, metavar="DIR", help="default %(default)s")


SIZE_HELP = "the short side, and the most of the long one (default: in proportion); default: as it was trained"


def published(add: Any) -> None:
    """The options of a network of the zoo in a checkpoint's stead."""
    add("--model", metavar="NAME", help="a DETR or Mask2Former with COCO's published weights, instead of CHECKPOINT")
    add("--weights", metavar="FILE|URL", help="of --model; default: the published file")
    add("--origin", metavar="NAME", help="whose names these weights use; default: found out")


def check_published(options: Options) -> None:
    """``ValueError`` for weights or an origin without a model's name."""
    if options.model is None and (options.weights is not None or options.origin is not None):
        raise ValueError("--weights and --origin belong to --model")


def detector_of(options: Options) -> Detector:
    """The network asked for, on the CPU, at the size asked for."""
    from vispe.detector import load_detector, published_detector

    if (options.checkpoint is None) == (options.model is None):
        raise ValueError("name a CHECKPOINT or a --model, one of them")
    check_published(options)
    size = fitting_of(options.size) if options.size else None
    if options.model is not None:
        found = published_detector(options.model, options.weights, options.origin)
    else:
        found = load_detector(options.checkpoint)
    return found if size is None else sized(found, *size)


def sized(detector: Detector, short: int, long: int | None) -> Detector:
    """With images of a short side of ``short``, and at most ``long``, by default in proportion."""
    if long is None:
        long = max(round(detector.long * short / detector.short), short)
    return dataclasses.replace(detector, short=short, long=long)


def first(count: int, limit: int | None) -> range:
    """The first ``limit`` of ``count`` images."""
    return range(count if limit is None else min(limit, count))


def run_coco(options: Options) -> None:
    needs("pycocotools", "faster_coco_eval", extra="detect")
    from vispe.data.coco import open_coco
    from vispe.data.coco_parts import sound_scenes
    from vispe.evaluate.scenes import Objects, check_folder, evaluate_scenes
    from vispe.features import pick_device

    given = {name: getattr(options, name) for name in ("checkpoint", "weights", "annotations")}
    about = {name: None if value is None else str(value) for name, value in given.items()}
    out = folder_of(options.out, "a report and predictions")
    pick_device(options.device)
    check_folder(out, options.kind, about)
    with results(out):
        with busy("opening"):
            data = open_coco(options.images, options.annotations, pngs=options.pngs, bad=options.bad)
            data = data.subset(first(len(data), options.limit))
            network = detector_of(options)
            Objects(options.kind, network, data, options.partial)  # what does not go together is said first
            broken: list[str] = []
            if options.bad == "skip" or not (out / "predictions.h5").is_file():  # else it was looked through
                data, broken = sound_scenes(data, "skip")
            if broken and options.bad == "refuse":
                others = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
                raise ValueError(f"{broken[0]}{others}; --bad skip goes on without")
        work = Objects(options.kind, network, data, options.partial)
        reports = evaluate_scenes([work], out, about, **_shared(options))
    if reports is not None:
        print(f"{network.name}, {len(data)} image{'s' * (len(data) != 1)} of {options.annotations}")
        if unused := [*data.problems, *broken]:
            print(f"not used: {len(unused)}, first {unused[0]}")
        tell(reports, options.out)


def run_semantic_kept(options: Options, network: Any, images: Any, shorts: list[int | None]) -> None:
    """Semantic segmentation with predictions that are kept in a folder."""
    needs("pycocotools", extra="detect")
    from vispe.evaluate.scenes import Areas, check_folder, evaluate_scenes

    works, about = [Areas(network, images, short) for short in shorts], _about_semantic(options)
    check_folder(options.out, "semantic", about)
    with results(options.out):
        if not all((options.out / f"predictions{work.suffix}.h5").is_file() for work in works):
            _look_through(images)
        reports = evaluate_scenes(works, options.out, about, **_shared(options))
    if reports is not None:
        print(f"{network.name}, {len(images)} image{'s' * (len(images) != 1)} of {options.data}")
        tell(reports, options.out)


def run_semantic_once(options: Options, network: Any, images: Any, shorts: list[int | None]) -> None:
    """Semantic segmentation of which only the report is kept, if that."""
    import vispe
    from vispe.evaluate.scene_score import libraries
    from vispe.files import write_json
    from vispe.segmenter import evaluate_semantic

    _look_through(images)
    reports = []
    for short in shorts:
        with busy(f"evaluating at {short or 'their own size'}"):
            tally, timing = evaluate_semantic(network, images, short, batch_size=options.batch, workers=options.workers)
        reports.append({
            "task": "semantic", **_about_semantic(options),
            "numbers": {"semantic": tally.summary()},
            "per_class": {"semantic": dict(zip(images.classes, tally.iou(), strict=True))},
            "made": {"task": "semantic", "model": network.name, "short": short}, "data": {"images": len(images)},
            "version": vispe.__version__, "libraries": libraries(), "timing": timing,
        })  # fmt: skip
    print(f"{network.name}, {len(images)} image{'s' * (len(images) != 1)} of {options.data}")
    print_numbers(reports)
    if options.out is not None:
        write_json(options.out, {"results": reports})
        print(f"wrote {options.out}")


def _about_semantic(options: Options) -> dict[str, str]:
    return {"checkpoint": str(options.checkpoint), "data_root": str(options.data)}


def _look_through(images: Any) -> None:
    """``ValueError`` names an image or a mask that cannot be used, before any is predicted."""
    from vispe.data.segmentation_verify import survey

    with busy("looking through the images"):
        problems = list(survey(images).problems.values())
    if problems:
        raise ValueError(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


def _shared(options: Options) -> dict[str, Any]:
    names = ("device", "devices", "nodes", "workers")
    return {name: getattr(options, name) for name in names} | {"batch_size": options.batch}


def print_numbers(reports: list[dict[str, Any]]) -> None:
    """A table of each kind of numbers."""
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


def tell(reports: list[dict[str, Any]], out: Path) -> None:
    """A table of each kind of numbers, and what was written."""
    print_numbers(reports)
    left_out = reports[0]["left_out"]
    if left_out:
        print(f"left out: {', '.join(left_out[:5])}" + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""))
    print(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir() if not path.name.startswith('.')))}")


# --- predict ----------------------------------------------------------------------------------------------------------


def run_predict_objects(options: Options) -> list[str]:
    """Boxes and masks of images, written one by one, as they come; what could not be read."""
    needs("pycocotools", extra="detect")
    from vispe.classifier import image_paths
    from vispe.features import pick_device
    from vispe.objects import predict_objects, write_seen
    from vispe.segmenter import names_for

    folder = folder_of(options.out or Path("out/predict"), "JSON files and overlays")
    device, paths = pick_device(options.device), image_paths(options.images)
    names, problems, found = names_for(paths, folder), list[str](), 0
    with busy("predicting"), results(folder):
        detector = detector_of(options)
        detector.model.to(device)
        for name, one in zip(names, predict_objects(detector, paths, options.threshold), strict=True):
            if one.problem:
                problems.append(one.problem)
            else:
                found += write_seen(folder, name, detector, one)
        if len(problems) == len(paths):
            raise ValueError(problems[0])
    unread = f", {len(problems)} could not be read" if problems else ""
    what = "segments" if detector.tells_segments else "objects"
    print(f"wrote {folder}: {len(paths) - len(problems)} images, {found} {what}{unread}")
    return problems
