"""What commands say: rows and counts on stdout; a mistake, or that there is work going on, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vispe.models import EXTRACTORS, SHIPPED

if TYPE_CHECKING:
    from vispe.matching import Matches


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Columns of equal width; the last one is as long as it is, so that a program can read the lines as well."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def counts(found: Matches) -> list[tuple[str, str]]:
    """Rows of who matched, how many keypoints, matches and inliers there are, and why there is no model if there is
    none."""
    rows = [("matcher", f"{found.network or found.matcher}{_whose(found.network)}")]
    rows += [("keypoints", f"{len(found.keypoints0)}, {len(found.keypoints1)}"), ("matches", str(len(found)))]
    rows += [("rotation of image 1", f"{found.rotation} degrees")] if found.rotation else []
    model = found.geometry
    if model is not None:
        rows += [("inliers", f"{model.num_inliers} ({model.model}, {model.threshold:.2f} px)")]
        rows += [("no model", model.reason)] if model.reason else []
    return rows


def _whose(network: str | None) -> str:
    if network in SHIPPED.values():
        return " (vispe's own: the published weights are not on this machine)"
    return " (vispe's own: none were published)" if network == EXTRACTORS["aliked_t16"] else ""


def timing(found: Matches) -> list[tuple[str, str]]:
    """Rows of how long each stage took."""
    return [(f"seconds to {stage}", f"{seconds:.2f}") for stage, seconds in found.seconds.items()]


def complain(who: str, what: object) -> int:
    """One line on stderr, whatever the message holds; the exit code of a mistake."""
    if isinstance(what, OSError) and what.strerror:  # without its number
        what = (f"{what.filename}: " if what.filename is not None else "") + what.strerror.lower()
    print(f"{who}: {' '.join(str(what).splitlines()) or type(what).__name__}", file=sys.stderr)
    return 2


def busy(what: str) -> Any:
    """A context that shows on a terminal's stderr that ``what`` is going on."""
    from rich.console import Console

    return Console(stderr=True).status(what)
