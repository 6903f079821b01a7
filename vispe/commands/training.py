"""``vispe train``, ``ablate`` and ``predict``: recipes to trained weights, and what these say of images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vispe.commands import scenes
from vispe.commands.matching import results
from vispe.commands.printing import busy, complain, print_rows
from vispe.commands.words import at_least, command, file_of, folder_of, needs, short_of, size_of


def declare(commands: Any) -> None:
    add = command(
        commands,
        "train",
        run_train,
        "train a classifier, segmenter, detector or matcher by a recipe",
        TRAIN_HELP,
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

    add = command(
        commands, "predict", run_predict, "classify, segment or find objects in images with a trained network"
    )
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors that vispe trained, or a run's folder")
    add("images", metavar="IMAGE|FOLDER", nargs="*", type=Path)
    scenes.published(add)
    add("--size", metavar="N|NxM", help=SIZE_HELP)
    add("--batch", type=at_least(1), metavar="N", help="images a classifier looks at together; default 32")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")
    add("--top", type=at_least(1), metavar="N", help="classes that a classifier tells of each image; default 5")
    add("--threshold", type=float, metavar="T", help="lowest score of an object; default: 0.5, of a panoptic map's 0.8")
    add("--skip-bad", action="store_true", help="images that cannot be read are told, and no failure: exit code 0")
    told = "of classes: write a table, default: print it; of pixels and objects: a folder, default: out/predict"
    add("--out", type=Path, metavar="FILE.csv|DIR", help=told)


SIZE_HELP = (
    "of classes: N or HxW; of pixels: N, the short side; of objects: N or NxM, the short side and the most of the long "
    "one; default: as it was trained"
)
MEANINGLESS = {  # options of `predict` by the task that has no use for them
    "classify": {"threshold": "is of objects; of classes, --top says how many are told"},
    "segment": {
        "top": "is of classifiers; here every pixel gets one class",
        "threshold": "is of objects; here every pixel gets one class",
        "batch": "is of classifiers; pixels are classified image by image",
    },
    "detect": {
        "top": "is of classifiers; of objects, --threshold says which are told",
        "batch": "is of classifiers; objects are found image by image",
    },
}
TRAIN_HELP = "; the same command goes on after an interruption, and says so when the run is finished"


def run_train(options: argparse.Namespace) -> None:
    needs("lightning", "pydantic", "yaml")
    from vispe import recipe
    from vispe.train.tasks import task_of

    out = folder_of(options.out or Path("out") / options.recipe.stem, "a run")
    if options.resume and not (out / "run.json").is_file():
        raise ValueError(f"there is no run to go on with in {str(out)!r}")
    given = recipe.mapping(_recipe(options.recipe))
    if "base" in given and "model" not in given:
        raise ValueError(f"{str(options.recipe)!r} is an ablation: vispe ablate {options.recipe} runs it")
    kind, trained = task_of(given)
    trained(recipe.of(given, kind, options.overrides), out)


def run_ablate(options: argparse.Namespace) -> None:
    needs("lightning", "pydantic", "yaml")
    from vispe import recipe
    from vispe.train.ablate import AblateRecipe, ablate
    from vispe.train.resolutions import ResolutionsRecipe, resolutions
    from vispe.train.scales import ScalesRecipe, scales
    from vispe.train.variants import VariantsRecipe, compare_variants

    out = folder_of(options.out or Path("out") / options.recipe.stem, "its runs")
    path = _recipe(options.recipe)
    given = recipe.mapping(path)
    if "base" not in given:
        raise ValueError(f"{str(options.recipe)!r} is no ablation, one training: vispe train {options.recipe} runs it")
    if "variants" in given:
        compare_variants(recipe.read(path, VariantsRecipe, options.overrides), out)
    elif "ways" in given:
        resolutions(recipe.read(path, ResolutionsRecipe, options.overrides), out)
    elif "others" in given:
        scales(recipe.read(path, ScalesRecipe, options.overrides), out)
    else:
        ablate(recipe.read(path, AblateRecipe, options.overrides), out)


def run_predict(options: argparse.Namespace) -> int:
    """As the file's task says; 2 where an image could not be read, unless those are to be skipped."""
    from vispe.classifier import task_of

    scenes.check_published(options)
    if options.model is not None:  # then every word is an image
        options.checkpoint, options.images = None, [options.checkpoint, *options.images]
    if not options.images:
        raise ValueError("the following arguments are required: IMAGE|FOLDER")
    task = "detect" if options.model is not None else task_of(options.checkpoint)
    for name, why in MEANINGLESS.get(task, {}).items():
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} {why}")
    ways = {"detect": scenes.run_predict_objects, "segment": run_predict_semantic}
    problems = ways.get(task, run_predict_classes)(options)
    for problem in problems:
        complain("vispe predict", problem)
    return 2 if problems and not options.skip_bad else 0


def run_predict_classes(options: argparse.Namespace) -> list[str]:
    """The likeliest classes, printed or as a table; what could not be read."""
    from vispe.classifier import image_paths, load_classifier, predict, write_predictions
    from vispe.features import pick_device

    if options.out is not None:
        file_of(options.out, ".csv")
    size = size_of(options.size) if options.size else None
    with busy("predicting"):
        paths = image_paths(options.images)
        classifier = load_classifier(options.checkpoint, pick_device(options.device))
        made = list(predict(classifier, paths, top=options.top or 5, batch_size=options.batch or 32, size=size))
    good = [one for one in made if not one.problem]
    if not good:
        raise ValueError(made[0].problem)
    if options.out is not None:
        write_predictions(options.out, made)
    else:
        best = [", ".join(f"{name} {chance:.3f}" for name, chance in one.best) for one in good]
        print_rows([(one.path, line) for one, line in zip(good, best, strict=True)])
    problems = [one.problem for one in made if one.problem]
    if options.out is not None:
        unread = f", {len(problems)} could not be read" if problems else ""
        print(f"wrote {options.out}: {len(good)} images{unread}")
    return problems


def run_predict_semantic(options: argparse.Namespace) -> list[str]:
    """Masks instead of classes; images are written one by one, as they come."""
    needs("pycocotools", extra="detect")
    from vispe.classifier import image_paths
    from vispe.features import pick_device
    from vispe.segmenter import load_segmenter, names_for, predict_semantic, write_segmented

    folder, paths = folder_of(options.out or Path("out/predict"), "masks and overlays"), image_paths(options.images)
    asked = short_of(options.size) if options.size else None
    segmenter = load_segmenter(options.checkpoint, pick_device(options.device))
    short = asked or segmenter.short
    problems = []
    with busy("predicting"), results(folder):
        names = names_for(paths, folder)
        for name, one in zip(names, predict_semantic(segmenter, paths, short), strict=True):
            if one.problem:
                problems.append(one.problem)
            else:
                write_segmented(folder, name, segmenter, one)
        if len(problems) == len(paths):
            raise ValueError(problems[0])
    unread = f", {len(problems)} could not be read" if problems else ""
    print(f"wrote {folder}: {len(paths) - len(problems)} images{unread}")
    return problems


def _recipe(path: Path) -> Path:
    """``path``, or the shipped recipe of that name: ``configs/...`` is there without a checkout too."""
    from vispe.paths import shared

    if not path.exists() and path.parts[:1] == ("configs",):
        shipped = shared("configs").joinpath(*path.parts[1:])
        return shipped if shipped.is_file() else path
    return path
