"""A comparison on a terminal, readable from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vispe.evaluate.compare import Comparison, Line
from vispe.evaluate.recall import sentences
from vispe.evaluate.runs import amount, printable, told_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GROUPS = 8  # of more groups than this, only all pairs are shown
CELL = 20  # characters of a cell such as "-10.6 [-13.4, -8.0]*"


def show(found: Comparison, console: Console | None = None) -> None:
    """Print it: the runs and what differs in their making, AUCs and differences to the first run, everything else."""
    from rich.console import Console

    console = console or Console(highlight=False)
    first = found.first

    def say(text: str, style: str = "") -> None:  # one line whatever its length: a path shall be copied whole
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(f"{first.benchmark}, {first.pairs} pairs, the same in all runs and scored alike", "bold")
    for letter, run in found.runs.items():
        say(f"  {letter}  {printable(run.label)}  ({printable(run.path)})")
    for warning in found.warnings:
        say(f"WARNING: {warning}", "bold yellow")
    for table in _making(found, console.width):
        console.print("", table, sep="\n")
    say("\nAUC in percent [95 % interval over pairs]; lost: pairs without a model", "bold")
    say("Below: differences to the first run, paired; * where the interval excludes 0")
    groups = list(first.scores["groups"]) if len(first.scores["groups"]) <= GROUPS else ["all"]
    if left := len(first.scores["groups"]) - len(groups):
        say(f"({left} groups more are in compare.json)")
    for table in _auc_tables(found, groups, console.width):
        console.print("", table, sep="\n")
    for table in _rest(found, console.width):
        console.print("", table, sep="\n")
    for i, line in enumerate(sentences(found.recalls)):
        say(line if i else f"\n{line}")


def _making(found: Comparison, width: int) -> Iterator[Table]:
    columns = {letter: [values[i] for values in found.settings.values()] for i, letter in enumerate(found.runs)}
    yield from _side_by_side("Made differently", list(found.settings), columns, width)


def _rest(found: Comparison, width: int) -> Iterator[Table]:
    """Means and medians of the other columns over all pairs, and seconds."""
    groups = {letter: run.scores["groups"]["all"] for letter, run in found.runs.items()}
    seconds = {letter: told_seconds(run) for letter, run in found.runs.items()}
    names = list(dict.fromkeys(name for group in groups.values() for name in group["mean"]))
    stages = list(dict.fromkeys(stage for known in seconds.values() for stage in known))
    columns = {
        letter: [
            *(f"{_short(group['mean'].get(name))} ({_short(group['median'].get(name))})" for name in names),
            *(_short(seconds[letter].get(stage)) for stage in stages),
        ]
        for letter, group in groups.items()
    }
    labels = [*names, *(f"seconds to {stage}" for stage in stages)]
    yield from _side_by_side("Mean (median) over all pairs", labels, columns, width)


def _side_by_side(
    title: str, labels: Sequence[str], columns: Mapping[str, Sequence[str]], width: int
) -> Iterator[Table]:
    """A column a run, as many beside each other as fit; the others below."""
    left = dict(columns) if labels else {}
    while left:
        table = _table(title)
        table.add_column("", no_wrap=True)
        room = width - max(map(len, labels))
        taken: list[str] = []
        for letter, cells in left.items():
            room -= 2 + max(map(len, cells))
            if room < 0 and taken:
                break
            taken.append(letter)
            table.add_column(letter, justify="right", overflow="fold")
        rows = zip(labels, *(left.pop(letter) for letter in taken), strict=True)
        for row in rows:
            table.add_row(*map(_plain, row))
        yield table


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(
        title=_plain(title), title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False,
        padding=(0, 1),
    )  # fmt: skip


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _auc_tables(found: Comparison, groups: Sequence[str], width: int) -> Iterator[Table]:
    """A table an estimator and group: a row a run, then a row a difference to the first run."""
    keys = dict.fromkeys((line.group, line.estimator) for line in found.lines if line.group in groups)
    for group, estimator in keys:
        lines = [line for line in found.lines if (line.group, line.estimator) == (group, estimator)]
        rows = {_name(line, lines): [*_cells(line), str(line.failures)] for line in lines}
        rows |= {f"{line.run} - {lines[0].run}": [*_differences(line), ""] for line in lines[1:]}
        widest = max(len(cell) for cells in rows.values() for cell in cells)
        taken = max(map(len, rows)) + len(lines[0].at) * (max(widest, CELL) + 2) + len("  lost")
        below = taken > width  # no room: intervals stand below their numbers
        table = _table(f"{printable(group)}, {_estimator(lines)}")
        table.add_column("", min_width=5, no_wrap=True)
        for threshold in lines[0].at:
            head = f"@{amount(threshold, found.first.unit)} "
            table.add_column(head, justify="right", no_wrap=True, min_width=0 if below else CELL)
        table.add_column("lost", justify="right", no_wrap=True)
        for name, cells in rows.items():
            shown = [cell.replace(" [", " \n[") for cell in cells] if below else cells
            table.add_row(*map(_plain, [name, *shown]), style="bold" if any("*" in cell for cell in cells) else "")
        yield table


def _name(line: Line, lines: Sequence[Line]) -> str:
    """The run's letter, and the threshold where each run has its own."""
    varied = len({other.threshold for other in lines}) > 1 and line.threshold is not None
    return f"{line.run}, {line.threshold:g} px" if varied else line.run


def _cells(line: Line) -> list[str]:
    """``37.1 [34.0, 40.2]``, in percent, one a threshold; room behind it for a mark."""
    values = zip(line.auc, line.low, line.high, strict=True)
    return [f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}] " for value, low, high in values]


def _differences(line: Line) -> list[str]:
    """``+1.4 [+0.3, +2.5]*``, in points, one a threshold."""
    values = zip(line.difference, line.difference_low, line.difference_high, line.apart, strict=True)
    return [f"{100 * v:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]{' *'[sure]}" for v, low, high, sure in values]


def _estimator(lines: Sequence[Line]) -> str:
    thresholds = {line.threshold for line in lines}
    told = f", {lines[0].threshold:g} px" if len(thresholds) == 1 and lines[0].threshold is not None else ""
    return f"{lines[0].estimator}{told}" + ("" if lines[0].choice == "fixed" else f", {lines[0].choice}")


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
