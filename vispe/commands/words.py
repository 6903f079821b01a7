"""How a command is declared, and the options of several commands with what is made of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vispe.models import EXTRACTORS, MATCHERS


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], help: str, more: str = "") -> Any:
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


def pairing(add: Any, matcher: str | None = "lightglue") -> None:
    """The options of a matcher; ``matcher`` is its default, None: the one for the extractor."""
    told = "default %(default)s" if matcher else "default: lightglue, mutual_nn where none was trained"
    add("--matcher", default=matcher, choices=MATCHERS, metavar="NAME", help=f"{', '.join(MATCHERS)}; {told}")
    add("--adaptive", action="store_true", help="LightGlue: stop early and drop points; faster, a few other matches")
    add("--weights", metavar="PATH", type=Path, help="weights of the matcher: a file, or the folder of a training run")
    add("--precision", default="fp32", help="of the matcher: fp32, fp16 or bf16; default %(default)s")


def processes(add: Any) -> None:
    """The options of work that several devices share."""
    add("--devices", type=int, default=1, metavar="N", help="processes that predict, one a device; default %(default)s")
    add("--nodes", type=int, default=1, metavar="N", help="machines, each running this line under torchrun or SLURM")


RESIZE_HELP = "look at images with a side of N pixels; 0: as they are; default: long side 1024, never enlarged"


def knobs(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a ``Matcher`` or ``extract_all`` that :func:`extraction` asked for."""
    names = ("max_keypoints", "resize", "side", "device", "extractor_weights")
    chosen = {name: getattr(options, name) for name in names}
    if options.detection_threshold is not None:
        chosen["detection_threshold"] = options.detection_threshold
    return chosen


def inference(add: Any) -> None:
    """The options of a trained checkpoint at work; :func:`size_of` reads each ``--size``."""
    add("--size", nargs="+", default=[], metavar="N", help="image sizes, N or HxW; default: as it was trained")
    add("--batch", type=int, default=32, metavar="N", help="images at a time; default %(default)s")
    add("--device", default="auto", help="a torch device; auto: CUDA when there is one")


def size_of(text: str) -> tuple[int, int]:
    """``"384"`` or ``"224x448"`` (h x w)."""
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) for part in parts) or len(parts) > 2:
        raise ValueError(f"--size is N or HxW in pixels, got {text!r}")
    return int(parts[0]), int(parts[-1])


def short_of(text: str) -> int:
    """``"384"``: the short side that images are brought to, where whole images are looked at."""
    if not text.isdigit() or not int(text):
        raise ValueError(f"--size is N, the short side in pixels, got {text!r}")
    return int(text)


def needs(*libraries: str, extra: str = "train") -> None:
    """``ValueError`` unless these libraries are there; it says which of vispe's extras brings them."""
    from importlib.util import find_spec

    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}: pip install 'vispe[{extra}]'")
