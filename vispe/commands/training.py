"""``vispe train``, ``ablate`` and ``predict``: recipes to trained weights, and what these say of images."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vispe.commands.printing import busy, complain, print_rows
from vispe.commands.words import command, inference, short_of, size_of


def declare(commands: Any) -> None:
    add = command(
        commands, "train", run_train, "train a classifier, a segmenter or an autoencoder by a recipe", TRAIN_HELP
    )
    add("recipe", metavar="RECIPE.yaml", type=Path)
    add(
        "overrides", metavar="key=value", nargs="*", help="on top of the recipe, such as train.lr=1e-4 data.root=photos"
    )
    add("--out", type=Path, metavar="DIR", help="folder of the run; default: out/ and the recipe's name")
    add("--resume", action="store_true", help="only go on: refuse to start where there is no unfinished run")

    add = command(
        commands,
        "ablate",
        run_ablate,
        "train what differs in one thing alone: position, resampling, network",
        TRAIN_HELP,
    )
    add("recipe", metavar="RECIPE.yaml", type=Path)
    add("overrides", metavar="key=value", nargs="*", help="on top of the recipe, such as jobs=4 seeds=[0]")
    add("--out", type=Path, metavar="DIR", help="folder of the runs; default: out/ and the recipe's name")

    add = command(commands, "predict", run_predict, "classify or segment images with a trained checkpoint")
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors that vispe trained, or a run's folder")
    add("images", metavar="IMAGE|FOLDER", nargs="+", type=Path)
    inference(add)
    add("--top", type=int, default=5, metavar="N", help="classes for each image; default %(default)s")
    told = "of classes: write a table, default: print it; of pixels: write masks here, default: out/predict"
    add("--out", type=Path, metavar="FILE.csv|DIR", help=told)


TRAIN_HELP = "; the same command goes on after an interruption, and says so when the run is finished"


def run_train(options: argparse.Namespace) -> None:
    _needs("lightning", "pydantic", "yaml")
    from vispe import recipe
    from vispe.train.classify import fit
    from vispe.train.pretrain import PretrainRecipe, pretrain
    from vispe.train.segment import SegmentRecipe, segment
    from vispe.train.spec import ClassifyRecipe

    out = options.out or Path("out") / options.recipe.stem
    if options.resume and not (out / "run.json").is_file():
        raise ValueError(f"there is no run to go on with in {str(out)!r}")
    given = recipe.mapping(_recipe(options.recipe))
    task = given.get("task", "classify")
    tasks: dict[Any, tuple[type[Any], Callable[..., Any]]] = {
        "classify": (ClassifyRecipe, fit),
        "pretrain": (PretrainRecipe, pretrain),
        "segment": (SegmentRecipe, segment),
    }
    if task not in tasks:
        raise ValueError(f"task is one of {', '.join(tasks)}, got {task!r}")
    kind, trained = tasks[task]
    trained(recipe.of(given, kind, options.overrides), out)


def run_ablate(options: argparse.Namespace) -> None:
    _needs("lightning", "pydantic", "yaml")
    from vispe import recipe
    from vispe.train.ablate import AblateRecipe, ablate
    from vispe.train.resolutions import ResolutionsRecipe, resolutions
    from vispe.train.scales import ScalesRecipe, scales

    out = options.out or Path("out") / options.recipe.stem
    path = _recipe(options.recipe)
    given = recipe.mapping(path)
    if "ways" in given:
        resolutions(recipe.read(path, ResolutionsRecipe, options.overrides), out)
    elif "others" in given:
        scales(recipe.read(path, ScalesRecipe, options.overrides), out)
    else:
        ablate(recipe.read(path, AblateRecipe, options.overrides), out)


def run_predict(options: argparse.Namespace) -> None:
    from vispe.classifier import image_paths, load_classifier, predict, task_of, write_predictions
    from vispe.features import pick_device

    sizes = [size_of(text) for text in options.size]
    if len(sizes) > 1:
        raise ValueError(f"predict looks at one --size, got {len(sizes)}")
    if task_of(options.checkpoint) == "segment":
        return run_predict_semantic(options)
    with busy("predicting"):
        paths = image_paths(options.images)
        classifier = load_classifier(options.checkpoint, pick_device(options.device))
        size = sizes[0] if sizes else None
        made = list(predict(classifier, paths, top=options.top, batch_size=options.batch, size=size))
    good = [one for one in made if not one.problem]
    if not good:
        raise ValueError(made[0].problem)
    if options.out is not None:
        write_predictions(options.out, made)
    else:
        best = [", ".join(f"{name} {chance:.3f}" for name, chance in one.best) for one in good]
        print_rows([(one.path, line) for one, line in zip(good, best, strict=True)])
    for one in made:
        if one.problem:
            complain("vispe predict", one.problem)
    if options.out is not None:
        bad = len(made) - len(good)
        print(f"wrote {options.out}: {len(good)} images" + (f", {bad} could not be read" if bad else ""))


def run_predict_semantic(options: argparse.Namespace) -> None:
    """Masks instead of classes; images are written one by one, as they come."""
    _needs("pycocotools", extra="detect")
    from vispe.classifier import image_paths
    from vispe.features import pick_device
    from vispe.segmenter import load_segmenter, names_for, predict_semantic, write_segmented

    segmenter = load_segmenter(options.checkpoint, pick_device(options.device))
    short = short_of(options.size[0]) if options.size else segmenter.short
    folder, paths = options.out or Path("out") / "predict", image_paths(options.images)
    problems = []
    with busy("predicting"):
        names = names_for(paths, folder)
        for name, one in zip(names, predict_semantic(segmenter, paths, short), strict=True):
            if one.problem:
                problems.append(one.problem)
            else:
                write_segmented(folder, name, segmenter, one)
    if len(problems) == len(paths):
        raise ValueError(problems[0])
    for problem in problems:
        complain("vispe predict", problem)
    unread = f", {len(problems)} could not be read" if problems else ""
    print(f"wrote {folder}: {len(paths) - len(problems)} images{unread}")


def _recipe(path: Path) -> Path:
    """``path``, or the shipped recipe of that name: ``configs/...`` is there without a checkout too."""
    from vispe.paths import shared

    if not path.exists() and path.parts[:1] == ("configs",):
        shipped = shared("configs").joinpath(*path.parts[1:])
        return shipped if shipped.is_file() else path
    return path


def _needs(*libraries: str, extra: str = "train") -> None:
    from importlib.util import find_spec

    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}: pip install 'vispe[{extra}]'")
