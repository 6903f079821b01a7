"""``vispe train``, ``ablate`` and ``predict``: recipes to trained weights, and what these say of images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vispe.commands.printing import busy, complain, print_rows
from vispe.commands.words import command, inference, size_of


def declare(commands: Any) -> None:
    add = command(
        commands, "train", run_train, "train a classifier, or pre-train an autoencoder, by a recipe", TRAIN_HELP
    )
    add("recipe", metavar="RECIPE.yaml", type=Path)
    add(
        "overrides", metavar="key=value", nargs="*", help="on top of the recipe, such as train.lr=1e-4 data.root=photos"
    )
    add("--out", type=Path, metavar="DIR", help="folder of the run; default: out/ and the recipe's name")
    add("--resume", action="store_true", help="only go on: refuse to start where there is no unfinished run")

    add = command(
        commands, "ablate", run_ablate, "train one model with every position encoding, or every resampling", TRAIN_HELP
    )
    add("recipe", metavar="RECIPE.yaml", type=Path)
    add("overrides", metavar="key=value", nargs="*", help="on top of the recipe, such as jobs=4 seeds=[0]")
    add("--out", type=Path, metavar="DIR", help="folder of the runs; default: out/ and the recipe's name")

    add = command(commands, "predict", run_predict, "classify images with a trained checkpoint")
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors that vispe trained, or a run's folder")
    add("images", metavar="IMAGE|FOLDER", nargs="+", type=Path)
    inference(add)
    add("--top", type=int, default=5, metavar="N", help="classes for each image; default %(default)s")
    add("--out", type=Path, metavar="FILE.csv", help="write a table; default: print it")


TRAIN_HELP = "; the same command goes on after an interruption, and says so when the run is finished"


def run_train(options: argparse.Namespace) -> None:
    _needs("lightning", "pydantic", "yaml")
    from vispe import recipe
    from vispe.train.classify import fit
    from vispe.train.pretrain import PretrainRecipe, pretrain
    from vispe.train.spec import ClassifyRecipe

    out = options.out or Path("out") / options.recipe.stem
    if options.resume and not (out / "run.json").is_file():
        raise ValueError(f"there is no run to go on with in {str(out)!r}")
    given = recipe.mapping(_recipe(options.recipe))
    task = given.get("task", "classify")
    if task == "classify":
        fit(recipe.of(given, ClassifyRecipe, options.overrides), out)
    elif task == "pretrain":
        pretrain(recipe.of(given, PretrainRecipe, options.overrides), out)
    else:
        raise ValueError(f"task is classify or pretrain, got {task!r}")


def run_ablate(options: argparse.Namespace) -> None:
    _needs("lightning", "pydantic", "yaml")
    from vispe import recipe
    from vispe.train.ablate import AblateRecipe, ablate
    from vispe.train.resolutions import ResolutionsRecipe, resolutions

    out = options.out or Path("out") / options.recipe.stem
    path = _recipe(options.recipe)
    if "ways" in recipe.mapping(path):
        resolutions(recipe.read(path, ResolutionsRecipe, options.overrides), out)
    else:
        ablate(recipe.read(path, AblateRecipe, options.overrides), out)


def run_predict(options: argparse.Namespace) -> None:
    from vispe.classifier import image_paths, load_classifier, predict, write_predictions
    from vispe.features import pick_device

    sizes = [size_of(text) for text in options.size]
    if len(sizes) > 1:
        raise ValueError(f"predict looks at one --size, got {len(sizes)}")
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


def _recipe(path: Path) -> Path:
    """``path``, or the shipped recipe of that name: ``configs/...`` is there without a checkout too."""
    from vispe.paths import shared

    if not path.exists() and path.parts[:1] == ("configs",):
        shipped = shared("configs").joinpath(*path.parts[1:])
        return shipped if shipped.is_file() else path
    return path


def _needs(*libraries: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}: pip install 'vispe[train]'")
