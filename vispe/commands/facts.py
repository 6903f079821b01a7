"""``vispe list``, ``plot`` and ``export``: what there is, drawn and written for others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import vispe
from vispe.commands.matching import results
from vispe.commands.printing import busy, complain, print_rows
from vispe.commands.words import command


def declare(commands: Any) -> None:
    add = command(
        commands, "list", run_list, "list models with the state of their weights, position encodings, or data sets"
    )
    add("what", choices=("models", "encodings", "data"))

    add = command(
        commands,
        "plot",
        run_plot,
        "draw what position encodings do",
        "; writes similarity, resampling, decay, learned_basis",
    )
    add("what", choices=("encodings",))
    add("--out", type=Path, default=Path("out/encodings"), metavar="DIR", help="default %(default)s")
    add("--format", default="png", choices=("png", "svg"), help="default %(default)s")

    add = command(
        commands, "export", run_export, "write a LightGlue, DETR or SegFormer as ONNX", "; sizes and counts are dynamic"
    )
    add("model", metavar="MODEL", help="lightglue_*, detr_*, segformer_*, a file that vispe trained, or a run's folder")
    add("--weights", metavar="PATH", type=Path, help="weights from this file")
    add("--origin", metavar="NAME", help="whose names these weights have; default: as published")
    add("--out", type=Path, required=True, metavar="FILE.onnx")


def run_list(options: argparse.Namespace) -> None:
    from vispe.listing import data_rows, encoding_rows, model_rows

    header, rows = {"models": model_rows, "encodings": encoding_rows, "data": data_rows}[options.what]()
    print_rows([header, *rows])


def run_plot(options: argparse.Namespace) -> None:
    from vispe.plots import plot_encodings, trained_bases

    with busy("drawing"), results(options.out) as folder:
        try:
            bases, missing = trained_bases(), ""
        except vispe.WeightsError as error:
            bases, missing = {}, f"learned_basis is left out: {error}"
        paths = plot_encodings(folder, options.format, bases)
    if missing:
        complain("vispe plot", missing)
    print(f"wrote {', '.join([str(paths[0]), *(path.name for path in paths[1:])])}")


def run_export(options: argparse.Namespace) -> None:
    from vispe.export import export_onnx

    if options.out.suffix != ".onnx":
        raise ValueError(f"--out is a file called NAME.onnx, got {str(options.out)!r}")
    with busy(f"exporting {options.model}"):
        export_onnx(options.model, options.out, weights=options.weights, origin=options.origin)
    print(f"wrote {options.out}")
