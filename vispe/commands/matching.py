"""``vispe match``, ``extract`` and ``demo``: images to features, matches and pictures."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vispe.commands.printing import busy, counts, print_rows, timing
from vispe.commands.words import command, extraction, knobs, pairing, processes

if TYPE_CHECKING:
    from vispe.matching import Matches


def declare(commands: Any) -> None:
    add = command(
        commands, "match", run_match, "match two images", "; writes matches.npz, matches.json and matches.png"
    )
    add("image0", metavar="IMAGE0", type=Path)
    add("image1", metavar="IMAGE1", type=Path)
    extraction(add)
    pairing(add)
    add("--upright", default="0", metavar="DEGREES", help=UPRIGHT_HELP)
    add("--geometry", default="fundamental", metavar="MODEL", help=GEOMETRY_HELP)
    add("--threshold", type=float, metavar="PX", help="of inliers, in pixels; default: 2 pixels at the size looked at")
    add("--estimator", default="poselib", help="poselib, opencv or pycolmap; default %(default)s")
    add("--camera0", metavar="FX,FY,CX,CY", help="for --geometry essential, in pixels; default: assumed from the size")
    add("--camera1", metavar="FX,FY,CX,CY", help="the same for IMAGE1")
    add("--seed", type=int, default=0, metavar="N", help="of the robust estimation; default %(default)s")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="folder for the results; default %(default)s")

    add = command(commands, "match-pairs", run_match_pairs, "match all pairs of a list", PAIRS_HELP)
    add("list", metavar="LIST", type=Path, help="a line a pair: two names, in double quotes or with a tab if need be")
    add("--root", type=Path, default=Path(), metavar="DIR", help="what the names are relative to; default: here")
    extraction(add)
    pairing(add)
    processes(add)
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the two files, made or extended")

    add = command(commands, "extract", run_extract, "local features of images into one HDF5 file", RESUME_HELP)
    add("images", metavar="IMAGE", nargs="+", type=Path)
    extraction(add)
    add("--skip-bad", action="store_true", help="report images that cannot be read and go on without them")
    add("--out", type=Path, required=True, metavar="FILE.h5", help="the file to write or to extend")

    add = command(commands, "demo", run_demo, "match the Middlebury motorcycle pair and score it by its disparity")
    add("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default %(default)s")


GEOMETRY_HELP = "what inliers agree with: homography, fundamental, essential or none; default %(default)s"
PAIRS_HELP = "; writes features.h5 and matches.h5, and goes on after an interruption or for more pairs"
RESUME_HELP = "; what is there already is kept, so run it again after an interruption or for more images"
UPRIGHT_HELP = (
    "turn IMAGE1 counter-clockwise by 0, 90, 180 or 270; auto: try all if the match is weak; default %(default)s"
)


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
    with busy("matching"), results(options.out) as folder:
        images = [read_image(name, max_pixels=options.max_pixels) for name in names]
        matcher = Matcher(
            options.extractor,
            options.matcher,
            adaptive=options.adaptive,
            precision=options.precision,
            weights=options.weights,
            **knobs(options),
        )
        found = matcher(*images, names=names, upright=options.upright, max_pixels=options.max_pixels, **how)
        write(folder, found, images, names)
    print_rows([*counts(found), *timing(found)])
    _print_written(folder)


def run_match_pairs(options: argparse.Namespace) -> None:
    from vispe.data.pairs import read_pair_list
    from vispe.evaluate.predict import Pipeline, predict

    pairs = read_pair_list(options.list, options.root)
    pairs.check_files()
    given = {name: getattr(options, name) for name in ("extractor", "matcher", "adaptive", "precision", "weights")}
    given |= {name: value for name, value in knobs(options).items() if name != "detection_threshold"}
    more = {} if options.detection_threshold is None else {"detection_threshold": options.detection_threshold}
    paths = {name: str(given[name]) for name in ("weights", "extractor_weights") if given[name] is not None}
    made = Pipeline(**{**given, **paths}, knobs=more)
    how = {"devices": options.devices, "nodes": options.nodes, "max_pixels": options.max_pixels}
    if predict(pairs, options.out, made, **how):
        print(f"{len(pairs.pairs)} pairs of {len(pairs.images)} images in {options.out / 'matches.h5'}")


def run_extract(options: argparse.Namespace) -> None:
    from vispe.extract import extract_all

    done, bad = extract_all(
        options.images,
        options.out,
        options.extractor,
        skip_bad=options.skip_bad,
        max_pixels=options.max_pixels,
        **knobs(options),
    )
    print(f"{done} image{'s' * (done != 1)} in {options.out}" + (f", {bad} left out" if bad else ""))


def run_demo(options: argparse.Namespace) -> None:
    from vispe.data.motorcycle import disparity_errors, motorcycle
    from vispe.matching import Matcher

    with busy("matching the motorcycle pair"), results(options.out) as folder:
        pair = motorcycle()
        matcher = Matcher("aliked_n16", max_keypoints=1024, resize=1024)
        found = matcher(pair.left, pair.right)
        write(folder, found, [pair.left, pair.right], ("motorcycle left", "motorcycle right"))
    errors = disparity_errors(found.points0, found.points1, pair.disparity)
    errors = errors[errors >= 0]  # the disparity is not known everywhere
    precision = [(f"precision at {px} px", f"{(errors < px).mean():.3f}") for px in (1, 3)]
    print_rows([*counts(found), *precision, *timing(found)])
    _print_written(folder)


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
        title=" + ".join(filter(None, (found.extractor, found.matcher))),
        path=folder / "matches.png",
    )
    arrays = {name: getattr(found, name) for name in ("keypoints0", "keypoints1", "matches", "scores", "inliers")}
    write_atomically(folder / "matches.npz", lambda path: np.savez_compressed(path, **arrays))
    write_json(folder / "matches.json", found.summary(*names))


def _camera(option: str, given: str | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        fx, fy, cx, cy = (float(part) for part in given.split(","))
    except ValueError:
        raise ValueError(f"{option} takes four numbers FX,FY,CX,CY in pixels, got {given!r}") from None
    return fx, fy, cx, cy


def _print_written(folder: Path) -> None:
    print(f"wrote {folder / 'matches.png'}, matches.json and matches.npz")
