"""The command ``vispe``: words to calls. Parse, call, print; heavy imports wait until a command runs.

A person's mistake (a wrong name, a broken file, weights that are not there) is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import vispe
from vispe.models import EXTRACTORS, MATCHERS, MODELS

if TYPE_CHECKING:
    from vispe.matching import Matches


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parsed(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries' remarks about themselves
            options.run(options)
            if sys.stdout is not None:  # it may be closed
                sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has left: `vispe list models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, MemoryError) as error:
        return _complain(f"vispe {options.command}", error)
    except RuntimeError as error:  # torch's own word for it is no MemoryError
        if "memory" not in str(error):
            raise
        return _complain(f"vispe {options.command}", str(error).partition("\n")[0])
    except KeyboardInterrupt:
        print(f"vispe {options.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; overrides of a recipe may stand behind options too, which argparse does not allow by itself."""
    top = parser()
    options, others = top.parse_known_args(argv)
    if others and (options.command not in ("train", "ablate") or any(word.startswith("-") for word in others)):
        top.error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        options.overrides += others
    return options


def _complain(who: str, what: object) -> int:
    """One line on stderr, whatever the message holds; the exit code of a mistake."""
    if isinstance(what, OSError) and what.strerror and what.filename is not None:  # without its number
        what = f"{what.filename}: {what.strerror.lower()}"
    print(f"{who}: {' '.join(str(what).splitlines()) or type(what).__name__}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """Wrong words are one line too, without the usage; ``--help`` gives every default."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(_complain(self.prog, f"{message} (see {self.prog} --help)"))


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = Parser(prog="vispe", description="A vision and feature-matching model zoo about position.")
    top.add_argument("--version", action="version", version=vispe.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str, more: str = "") -> Any:
        p = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}{more}.")
        p.set_defaults(run=run)
        return p.add_argument

    add = command("match", run_match, "match two images", "; writes matches.npz, matches.json and matches.png")
    add("image0", metavar="IMAGE0", type=Path)
    add("image1", metavar="IMAGE1", type=Path)
    _extraction(add)
    add("--matcher", default="lightglue", choices=MATCHERS, help="default %(default)s")
    add("--adaptive", action="store_true", help="LightGlue: stop early and drop points; faster, a few other matches")
    add("--weights", metavar="PATH", type=Path, help="LightGlue weights from this file")
    add("--precision", default="fp32", help="of the matcher: fp32, fp16 or bf16; default %(default)s")
    add("--upright", default="0", metavar="DEGREES", help=UPRIGHT_HELP)
    add("--geometry", default="fundamental", metavar="MODEL", help=GEOMETRY_HELP)
    add("--threshold", type=float, metavar="PX", help="of inliers, in pixels; default: 2 pixels at the size looked at")
    add("--estimator", default="poselib", help="poselib, opencv or pycolmap; default %(default)s")
    add("--camera0", metavar="FX,FY,CX,CY", help="for --geometry essential, in pixels; default: assumed from the size")
    add("--camera1", metavar="FX,FY,CX,CY", help="the same for IMAGE1")
    add("--seed", type=int, default=0, metavar="N", help="of the robust estimation; default %(default)s")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="folder for the results; default %(default)s")

    add = command("extract", run_extract, "local features of images into one HDF5 file", RESUME_HELP)
    add("images", metavar="IMAGE", nargs="+", type=Path)
    _extraction(add)
    add("--skip-bad", action="store_true", help="report images that cannot be read and go on without them")
    add("--out", type=Path, required=True, metavar="FILE.h5", help="the file to write or to extend")

    add = command("train", run_train, "train a classifier, or pre-train an autoencoder, by a recipe", TRAIN_HELP)
    add("recipe", metavar="RECIPE.yaml", type=Path)
    add(
        "overrides", metavar="key=value", nargs="*", help="on top of the recipe, such as train.lr=1e-4 data.root=photos"
    )
    add("--out", type=Path, metavar="DIR", help="folder of the run; default: out/ and the recipe's name")
    add("--resume", action="store_true", help="only go on: refuse to start where there is no unfinished run")

    add = command("ablate", run_ablate, "train one model with every position encoding, or every resampling", TRAIN_HELP)
    add("recipe", metavar="RECIPE.yaml", type=Path)
    add("overrides", metavar="key=value", nargs="*", help="on top of the recipe, such as jobs=4 seeds=[0]")
    add("--out", type=Path, metavar="DIR", help="folder of the runs; default: out/ and the recipe's name")

    add = command("predict", run_predict, "classify images with a trained checkpoint")
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors that vispe trained, or a run's folder")
    add("images", metavar="IMAGE|FOLDER", nargs="+", type=Path)
    _inference(add)
    add("--top", type=int, default=5, metavar="N", help="classes for each image; default %(default)s")
    add("--out", type=Path, metavar="FILE.csv", help="write a table; default: print it")

    add = command("evaluate", run_evaluate, "measure a trained checkpoint on labelled images")
    add("what", choices=("classify",))
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors that vispe trained, or a run's folder")
    add("--data", type=Path, required=True, metavar="DIR", help="class folders (or val/ or test/ with them), or a zip")
    _inference(add)
    add("--out", type=Path, metavar="FILE.json", help="write the numbers, with those of each class")

    add = command("list", run_list, "list models with the state of their weights, position encodings, or data sets")
    add("what", choices=("models", "encodings", "data"))

    add = command(
        "plot", run_plot, "draw what position encodings do", "; writes similarity, resampling, decay, learned_basis"
    )
    add("what", choices=("encodings",))
    add("--out", type=Path, default=Path("out/encodings"), metavar="DIR", help="default %(default)s")
    add("--format", default="png", choices=("png", "svg"), help="default %(default)s")

    add = command("export", run_export, "write a LightGlue of fixed depth as ONNX", "; batch and keypoints are dynamic")
    add("model", metavar="MODEL", help=", ".join(name for name in MODELS if name.startswith("lightglue")))
    add("--weights", metavar="PATH", type=Path, help="weights from this file")
    add("--out", type=Path, required=True, metavar="FILE.onnx")

    add = command("demo", run_demo, "match the Middlebury motorcycle pair and score it by its disparity")
    add("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default %(default)s")
    return top


GEOMETRY_HELP = "what inliers agree with: homography, fundamental, essential or none; default %(default)s"
RESIZE_HELP = "look at images with a side of N pixels; 0: as they are; default: long side 1024, never enlarged"
RESUME_HELP = "; what is there already is kept, so run it again after an interruption or for more images"
TRAIN_HELP = "; the same command goes on after an interruption, and says so when the run is finished"
UPRIGHT_HELP = (
    "turn IMAGE1 counter-clockwise by 0, 90, 180 or 270; auto: try all if the match is weak; default %(default)s"
)


def _extraction(add: Any) -> None:
    names = ", ".join(EXTRACTORS)
    add("--extractor", default="aliked_n16", choices=EXTRACTORS, metavar="NAME", help=f"{names}; default %(default)s")
    add("--max-keypoints", type=int, default=2048, metavar="N", help="default %(default)s")
    add("--detection-threshold", type=float, metavar="T", help="lowest score of a keypoint; default: the model's own")
    add("--resize", type=int, metavar="N", help=RESIZE_HELP)
    add("--side", default="long", choices=("long", "short"), help="the side that --resize means; default %(default)s")
    add("--extractor-weights", metavar="PATH", type=Path, help="extractor weights from this file")
    add("--max-pixels", type=int, default=200_000_000, metavar="N", help="refuse larger images; default %(default)s")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")


def _inference(add: Any) -> None:
    add("--size", nargs="+", default=[], metavar="N", help="image sizes, N or HxW; default: as it was trained")
    add("--batch", type=int, default=32, metavar="N", help="images at a time; default %(default)s")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")


# --- the commands -----------------------------------------------------------------------------------------------------


def run_match(options: argparse.Namespace) -> None:
    from vispe.data.images import read_image
    from vispe.matching import Matcher, Verification

    how: dict[str, Any] = {
        "geometry": options.geometry,
        "threshold": options.threshold,
        "backend": options.estimator,
        "cameras": (_camera("--camera0", options.camera0), _camera("--camera1", options.camera1)),
        "seed": options.seed,
    }
    Verification(**how)  # a mistake in these shall not wait for the matches
    names = (str(options.image0), str(options.image1))
    with _busy("matching"), results(options.out) as folder:
        images = [read_image(name, max_pixels=options.max_pixels) for name in names]
        matcher = Matcher(
            options.extractor,
            options.matcher,
            adaptive=options.adaptive,
            precision=options.precision,
            weights=options.weights,
            **_knobs(options),
        )
        found = matcher(*images, names=names, upright=options.upright, max_pixels=options.max_pixels, **how)
        write(folder, found, images, names)
    _print_rows([*_counts(found), *_timing(found)])
    _print_written(folder)


def run_extract(options: argparse.Namespace) -> None:
    from vispe.extract import extract_all

    done, bad = extract_all(
        options.images,
        options.out,
        options.extractor,
        skip_bad=options.skip_bad,
        max_pixels=options.max_pixels,
        **_knobs(options),
    )
    print(f"{done} image{'s' * (done != 1)} in {options.out}" + (f", {bad} left out" if bad else ""))


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

    sizes = [_size(text) for text in options.size]
    if len(sizes) > 1:
        raise ValueError(f"predict looks at one --size, got {len(sizes)}")
    with _busy("predicting"):
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
        _print_rows([(one.path, line) for one, line in zip(good, best, strict=True)])
    for one in made:
        if one.problem:
            _complain("vispe predict", one.problem)
    if options.out is not None:
        bad = len(made) - len(good)
        print(f"wrote {options.out}: {len(good)} images" + (f", {bad} could not be read" if bad else ""))


def run_evaluate(options: argparse.Namespace) -> None:
    from vispe.classifier import evaluate, load_classifier
    from vispe.data.classification import open_part
    from vispe.features import pick_device
    from vispe.files import write_json

    classifier = load_classifier(options.checkpoint, pick_device(options.device))
    images = open_part(options.data, classifier.classes)
    rows, told = [("size", "images", "accuracy", "top 5", "images/s")], []
    for size in [_size(text) for text in options.size] or [classifier.size]:
        with _busy(f"evaluating at {size[0]} x {size[1]}"):
            tally, timing = evaluate(classifier, images, size, batch_size=options.batch)
        numbers = tally.summary()
        top = (f"{numbers['accuracy']:.4f}", f"{numbers['top5']:.4f}", f"{timing['images_per_second']:.1f}")
        rows.append((f"{size[0]}x{size[1]}", str(len(images)), *top))
        per_class = dict(zip(classifier.classes, tally.per_class(), strict=True))
        told.append({"size": list(size), **numbers, **timing, "per_class": per_class})
    _print_rows(rows)
    if options.out is not None:
        write_json(options.out, {"checkpoint": str(options.checkpoint), "data": str(options.data), "results": told})
        print(f"wrote {options.out}")


def run_list(options: argparse.Namespace) -> None:
    from vispe.listing import data_rows, encoding_rows, model_rows

    header, rows = {"models": model_rows, "encodings": encoding_rows, "data": data_rows}[options.what]()
    _print_rows([header, *rows])


def run_plot(options: argparse.Namespace) -> None:
    from vispe.plots import plot_encodings, trained_bases

    with _busy("drawing"), results(options.out) as folder:
        try:
            bases, missing = trained_bases(), ""
        except vispe.WeightsError as error:
            bases, missing = {}, f"learned_basis is left out: {error}"
        paths = plot_encodings(folder, options.format, bases)
    if missing:
        _complain("vispe plot", missing)
    print(f"wrote {', '.join([str(paths[0]), *(path.name for path in paths[1:])])}")


def run_export(options: argparse.Namespace) -> None:
    from vispe.export import export_onnx

    with _busy(f"exporting {options.model}"):
        export_onnx(options.model, options.out, weights=options.weights)
    print(f"wrote {options.out}")


def run_demo(options: argparse.Namespace) -> None:
    from vispe.data.motorcycle import disparity_errors, motorcycle
    from vispe.matching import Matcher

    with _busy("matching the motorcycle pair"), results(options.out) as folder:
        pair = motorcycle()
        matcher = Matcher("aliked_n16", max_keypoints=1024, resize=1024)
        found = matcher(pair.left, pair.right)
        write(folder, found, [pair.left, pair.right], ("motorcycle left", "motorcycle right"))
    errors = disparity_errors(found.points0, found.points1, pair.disparity)
    errors = errors[errors >= 0]  # the disparity is not known everywhere
    precision = [(f"precision at {px} px", f"{(errors < px).mean():.3f}") for px in (1, 3)]
    _print_rows([*_counts(found), *precision, *_timing(found)])
    _print_written(folder)


# --- what they share --------------------------------------------------------------------------------------------------


@contextmanager
def results(folder: Path) -> Iterator[Path]:
    """The folder for results, made at once, so that one that cannot be written is found before the work is done.

    What was made for it is removed again when the work fails.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write results into {str(folder)!r}: {error.strerror}") from error
    try:
        yield folder
    except BaseException:
        for path in new:
            with suppress(OSError):
                path.rmdir()
        raise


def write(folder: Path, found: Matches, images: Sequence[Any], names: tuple[str, str]) -> None:
    """``matches.png``, ``matches.npz`` and ``matches.json`` in ``folder``, each whole or absent."""
    import numpy as np
    import torch

    from vispe.files import write_atomically, write_json
    from vispe.viz import draw_matches

    draw_matches(
        images[0],
        images[1],
        *(torch.from_numpy(array) for array in (found.points0, found.points1, found.scores)),
        inliers=torch.from_numpy(found.inliers) if found.geometry else None,
        title=f"{found.extractor} + {found.matcher}",
        path=folder / "matches.png",
    )
    arrays = {name: getattr(found, name) for name in ("keypoints0", "keypoints1", "matches", "scores", "inliers")}
    write_atomically(folder / "matches.npz", lambda path: np.savez_compressed(path, **arrays))
    write_json(folder / "matches.json", found.summary(*names))


def _knobs(options: argparse.Namespace) -> dict[str, Any]:
    names = ("max_keypoints", "resize", "side", "device", "extractor_weights")
    knobs = {name: getattr(options, name) for name in names}
    if options.detection_threshold is not None:
        knobs["detection_threshold"] = options.detection_threshold
    return knobs


def _camera(option: str, given: str | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        fx, fy, cx, cy = (float(part) for part in given.split(","))
    except ValueError:
        raise ValueError(f"{option} takes four numbers FX,FY,CX,CY in pixels, got {given!r}") from None
    return fx, fy, cx, cy


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


def _size(text: str) -> tuple[int, int]:
    """``"384"`` or ``"224x448"`` (h x w)."""
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) for part in parts) or len(parts) > 2:
        raise ValueError(f"--size is N or HxW in pixels, got {text!r}")
    return int(parts[0]), int(parts[-1])


def _counts(found: Matches) -> list[tuple[str, str]]:
    rows = [("keypoints", f"{len(found.keypoints0)}, {len(found.keypoints1)}"), ("matches", str(len(found)))]
    rows += [("rotation of image 1", f"{found.rotation} degrees")] if found.rotation else []
    model = found.geometry
    if model is not None:
        rows += [("inliers", f"{model.num_inliers} ({model.model}, {model.threshold:.2f} px)")]
        rows += [("no model", model.reason)] if model.reason else []
    return rows


def _timing(found: Matches) -> list[tuple[str, str]]:
    return [(f"seconds to {stage}", f"{seconds:.2f}") for stage, seconds in found.seconds.items()]


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Columns of equal width; the last one is as long as it is, so that a program can read the lines as well."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_written(folder: Path) -> None:
    print(f"wrote {folder / 'matches.png'}, matches.json and matches.npz")


def _busy(what: str) -> Any:
    from rich.console import Console

    return Console(stderr=True).status(what)
