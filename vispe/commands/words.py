"""How a command is declared, and the options of several commands with what is made of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vispe.models import EXTRACTORS, MATCHERS

Run = Callable[[argparse.Namespace], int | None]  # its result is the exit code, None: 0


def command(commands: Any, name: str, run: Run, help: str, more: str = "") -> Any:
    """Declare a command; returns what adds its arguments."""
    p = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}{more}.")
    p.set_defaults(run=run, prog=p.prog)
    return p.add_argument


def kinds_of(commands: Any, name: str, help: str) -> Any:
    """Declare a command of several kinds, each with its own options; returns where :func:`command` declares them."""
    p = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    return p.add_subparsers(dest="kind", required=True, metavar="KIND")


def extraction(add: Any) -> None:
    """The options of a local feature extractor; :func:`knobs` hands them on."""
    names = ", ".join(EXTRACTORS)
    add("--extractor", default="aliked_n16", choices=EXTRACTORS, metavar="NAME", help=f"{names}; default %(default)s")
    add("--max-keypoints", type=int, default=2048, metavar="N", help="default %(default)s")
    add("--detection-threshold", type=float, metavar="T", help="lowest score of a keypoint; default: the model's own")
    add("--resize", type=int, metavar="N", help=RESIZE_HELP)
    add("--side", default="long", choices=("long", "short"), help="the side that --resize means; default %(default)s")
    add("--extractor-weights", metavar="PATH", type=Path, help="extractor weights from this file")
    add("--max-pixels", type=int, default=200_000_000, metavar="N", help="refuse larger images; default %(default)s")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")


def pairing(add: Any) -> None:
    """The options of a matcher."""
    names = ", ".join(MATCHERS)
    add("--matcher", default="lightglue", choices=MATCHERS, metavar="NAME", help=f"{names}; default %(default)s")
    add("--adaptive", action="store_true", help="LightGlue: stop early and drop points; faster, a few other matches")
    add("--weights", metavar="PATH", type=Path, help="weights of the matcher: a file, or the folder of a training run")
    add("--precision", default="fp32", help="of the matcher: fp32, fp16 or bf16; default %(default)s")


def processes(add: Any) -> None:
    """The options of work that several devices share."""
    add("--devices", type=at_least(1), default=1, metavar="N", help=DEVICES_HELP)
    add("--nodes", type=at_least(1), default=1, metavar="N", help=NODES_HELP)


DEVICES_HELP = "processes that predict, one a device; default %(default)s"
NODES_HELP = "machines, each running this line under torchrun or SLURM"


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from ``least`` on."""

    def number(text: str) -> int:
        try:
            given = int(text)
        except ValueError:
            given = least - 1
        if given < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed, got {text!r}")
        return given

    return number


RESIZE_HELP = "look at images with a side of N pixels; 0: as they are; default: long side 1024, never enlarged"


def knobs(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a ``Matcher`` or ``extract_all`` that :func:`extraction` asked for."""
    names = ("max_keypoints", "resize", "side", "device", "extractor_weights")
    chosen = {name: getattr(options, name) for name in names}
    if options.detection_threshold is not None:
        chosen["detection_threshold"] = options.detection_threshold
    return chosen


def inference(add: Any, metavar: str, sizes: str) -> None:
    """The options of a trained checkpoint that is measured at one or several ``--size``."""
    add("--size", nargs="+", default=[], metavar=metavar, help=f"{sizes}; default: as it was trained")
    add("--batch", type=at_least(1), default=32, metavar="N", help="images at a time; default %(default)s")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")


def size_of(text: str) -> tuple[int, int]:
    """``"384"`` or ``"224x448"`` (h x w): the size that images are brought to."""
    sides = _sides(text)
    if not 1 <= len(sides) <= 2:
        raise ValueError(f"--size is N or HxW in pixels, got {text!r}")
    return sides[0], sides[-1]


def fitting_of(text: str) -> tuple[int, int | None]:
    """``"480"`` or ``"480x800"``: the short side that images are brought to, and the most of the long one."""
    sides = _sides(text)
    if not 1 <= len(sides) <= 2 or sides[0] > sides[-1]:
        raise ValueError(f"--size is N or NxM, the short side and the most of the long one in pixels, got {text!r}")
    return sides[0], sides[1] if len(sides) == 2 else None


def _sides(text: str) -> list[int]:
    """The numbers between the x, none where one is no whole number above 0."""
    parts = text.lower().split("x")
    return [int(part) for part in parts] if all(part.isdecimal() and int(part) for part in parts) else []


def short_of(text: str) -> int:
    """``"384"``: the short side that images are brought to, where whole images are looked at."""
    if not text.isdecimal() or not int(text):
        raise ValueError(f"--size is N, the short side in pixels, got {text!r}")
    return int(text)


FILES = (".csv", ".json", ".h5", ".png", ".jpg", ".jpeg", ".txt", ".onnx", ".safetensors", ".zip")


def folder_of(path: Path, holds: str) -> Path:
    """``--out`` where it is a folder; ``ValueError`` for the name of a file. ``holds``: what it is going to hold."""
    if path.is_file() or (path.suffix.lower() in FILES and not path.is_dir()):
        raise ValueError(f"--out is a folder, for {holds}, got {str(path)!r}")
    return path


def file_of(path: Path, suffix: str) -> Path:
    """``--out`` where it is a file, that can be written; ``ValueError`` or ``OSError`` before the work is done."""
    from vispe.files import check_file

    if path.suffix != suffix:
        raise ValueError(f"--out is a file FILE{suffix}, got {str(path)!r}")
    check_file(path)
    return path


def needs(*libraries: str, extra: str = "train") -> None:
    """``ValueError`` unless these libraries are there; it says which of vispe's extras brings them."""
    from importlib.util import find_spec

    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}: pip install 'vispe[{extra}]'")
