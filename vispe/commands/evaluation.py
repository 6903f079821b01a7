"""``vispe evaluate KIND``: models on data whose truth is known, each kind with its own options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vispe.commands import benchmark, scenes
from vispe.commands.printing import busy, print_rows
from vispe.commands.words import (
    at_least,
    command,
    file_of,
    folder_of,
    inference,
    kinds_of,
    processes,
    short_of,
    size_of,
)


def declare(commands: Any) -> None:
    kinds = kinds_of(commands, "evaluate", "measure models on data whose truth is known")

    add = command(kinds, "classify", run_classify, "measure a trained checkpoint on labelled images")
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors that vispe trained, or a run's folder")
    add("--data", type=Path, required=True, metavar="DIR", help="class folders (or val/ or test/ with them), or a zip")
    inference(add, "N|HxW", "image sizes, N for a square")
    add("--out", type=Path, metavar="FILE.json", help="write the numbers, with those of each class")

    add = command(kinds, "semantic", run_semantic, "measure a trained checkpoint on images with masks of classes")
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors that vispe trained, or a run's folder")
    add("--data", type=Path, required=True, metavar="DIR", help="images and masks, or their val part")
    add("--layout", default="auto", metavar="NAME", help="auto, ade20k, cityscapes or folders; default %(default)s")
    add("--void", type=int, metavar="K", help="the index that means unknown in the masks; default: as in training")
    inference(add, "N", "short sides that images are brought to")
    add("--limit", type=at_least(1), metavar="N", help="look at the first N images")
    add("--workers", type=at_least(0), default=0, metavar="N", help="processes that read images; default %(default)s")
    processes(add)
    add("--out", type=Path, metavar="FILE.json|DIR", help=OUT_HELP)
    scenes.declare(kinds)
    benchmark.declare(kinds)


OUT_HELP = (
    "write the report, with the numbers of each class; a folder has it as report.json, with predictions and pictures: "
    "the same line then goes on after an interruption, and scores what is there"
)


def run_classify(options: argparse.Namespace) -> None:
    from vispe.classifier import evaluate, load_classifier
    from vispe.data.classification import open_part
    from vispe.features import pick_device
    from vispe.files import write_json

    sizes = [size_of(text) for text in options.size]
    if options.out is not None:
        file_of(options.out, ".json")
    classifier = load_classifier(options.checkpoint, pick_device(options.device))
    images = open_part(options.data, classifier.classes)
    rows, told = [("size", "images", "accuracy", "top 5", "images/s")], []
    for size in sizes or [classifier.size]:
        with busy(f"evaluating at {size[0]} x {size[1]}"):
            tally, timing = evaluate(classifier, images, size, batch_size=options.batch)
        numbers = tally.summary()
        top = (f"{numbers['accuracy']:.4f}", f"{numbers['top5']:.4f}", f"{timing['images_per_second']:.1f}")
        rows.append((f"{size[0]}x{size[1]}", str(len(images)), *top))
        per_class = dict(zip(classifier.classes, tally.per_class(), strict=True))
        told.append({"size": list(size), **numbers, **timing, "per_class": per_class})
    print_rows(rows)
    if options.out is not None:
        write_json(options.out, {"checkpoint": str(options.checkpoint), "data": str(options.data), "results": told})
        print(f"wrote {options.out}")


def run_semantic(options: argparse.Namespace) -> None:
    from vispe.data.segmentation import SemanticSpec, open_semantic_part
    from vispe.features import pick_device
    from vispe.segmenter import load_segmenter

    shorts: list[int | None] = [short_of(text) for text in options.size]
    kept = options.out is not None and options.out.suffix != ".json"
    if not kept and (options.devices, options.nodes) != (1, 1):
        raise ValueError("several processes keep their predictions in a folder: give it by --out DIR")
    if kept:
        folder_of(options.out, "a report and predictions, or FILE.json")
    elif options.out is not None:
        file_of(options.out, ".json")
    device = pick_device(options.device)
    segmenter = load_segmenter(options.checkpoint, "cpu" if kept else device)
    trained = segmenter.recipe.get("data", {})  # what an index means is a matter of the masks it was trained on
    void = trained.get("void") if options.void is None else options.void
    spec = SemanticSpec(
        root=str(options.data), layout=options.layout, void=void, reduce_zero_label=trained.get("reduce_zero_label")
    )
    images = open_semantic_part(spec, segmenter.classes)
    if not len(images):
        raise ValueError(f"there are no images in {str(options.data)!r}")
    images = images.subset(scenes.first(len(images), options.limit))
    run = scenes.run_semantic_kept if kept else scenes.run_semantic_once
    run(options, segmenter, images, shorts or [segmenter.short])
