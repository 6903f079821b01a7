"""A finished run on disk: ``scores.json``, the numbers, and ``pairs.csv``, a row a pair."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vispe.evaluate.protocol import column
from vispe.files import write_atomically

Column = list[str] | NDArray[Any]  # text, int64 or float64

TEXT = ("image0", "image1", "group")  # the columns that are no numbers, in every pairs.csv
ERRORS = {"homography": "corner_error", "pose": "pose_error"}  # what AUCs are made of
UNITS = {"homography": "px", "pose": "°"}
KEYS = {"benchmark": str, "version": str, "task": str, "pairs": int, "protocol": dict, "made": dict, "groups": dict}
ENTRY = {"estimator", "threshold", "at", "auc", "low", "high", "failures"}  # of each line of AUCs
INTEGER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """What was measured: ``scores`` as in ``scores.json``, ``rows`` the columns of ``pairs.csv`` by name."""

    path: Path
    scores: dict[str, Any]
    rows: dict[str, Column]

    @property
    def benchmark(self) -> str:
        return self.scores["benchmark"]

    @property
    def task(self) -> str:
        """``"homography"`` or ``"pose"``."""
        return self.scores["task"]

    @property
    def pairs(self) -> int:
        return self.scores["pairs"]

    @property
    def unit(self) -> str:
        """Of the errors that AUCs are made of: pixels or degrees."""
        return UNITS[self.task]

    @property
    def label(self) -> str:
        """Extractor, matcher and keypoints, such as ``"aliked_n16 + lightglue, 2048 keypoints, adaptive"``."""
        made, protocol = self.scores["made"], self.scores["protocol"]
        names = [str(made[key]) for key in ("extractor", "matcher") if made.get(key)]
        keypoints = made.get("max_keypoints") or protocol.get("max_keypoints")
        more = [f"{keypoints} keypoints"] if keypoints else []
        return ", ".join([" + ".join(names) or self.path.name, *more, *(["adaptive"] if made.get("adaptive") else [])])

    @cached_property
    def timing(self) -> dict[str, Any]:
        """``timing.json``, kept apart since no two runs agree on it; empty where there is none."""
        path = self.path / "timing.json"
        return _json(path, f"remove it, or {_again(self.path)}") if path.is_file() else {}

    def lines(self, group: str = "all") -> list[dict[str, Any]]:
        """The AUCs of a group, an entry an estimator."""
        return self.scores["groups"][group]["auc"]

    def text(self, name: str) -> list[str]:
        """A column of text."""
        return list(self.rows[name])

    def numbers(self) -> dict[str, NDArray[Any]]:
        """The columns that are numbers."""
        return {name: np.asarray(column) for name, column in self.rows.items() if name not in TEXT}

    def errors(self, estimator: str, threshold: float | None = None) -> NDArray[np.float64]:
        """Corner errors (pixels) or pose errors (degrees) of all pairs by one estimator, inf where it failed.

        ``threshold`` is the estimator's, None for one that has none. ``ValueError`` for what was not measured.
        """
        name = error_column(self.task, estimator, threshold)
        if name not in self.rows:
            there = [name for name in self.rows if name.startswith(ERRORS[self.task])]
            raise ValueError(
                f"{_shown(self.path)} has no column {name!r}; it has {', '.join(map(repr, there)) or 'none'}"
            )
        return np.asarray(self.rows[name], dtype=np.float64)

    def members(self, group: str) -> NDArray[np.bool_]:
        """Which pairs belong to a group; ``"all"`` is every one."""
        return np.array([group in ("all", name) for name in self.text("group")], dtype=bool)


def error_column(task: str, estimator: str, threshold: float | None) -> str:
    """The name of a column of errors, such as ``"corner_error poselib 2.0"`` or ``"corner_error dlt"``."""
    return column(ERRORS[task], estimator, threshold)


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run in a folder; a ``ValueError`` of one line says what is missing or broken there, and what to run."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {_shown(folder)}: {_again(folder)}")
    scores = _json(folder / "scores.json", _again(folder))
    _check_scores(scores, folder)
    rows = read_rows(folder / "pairs.csv", _again(folder))
    if hashlib.sha256((folder / "pairs.csv").read_bytes()).hexdigest() != scores.get("pairs_csv", ""):
        raise ValueError(
            f"{_shown(folder / 'pairs.csv')} is not the one that scores.json was made of: {_again(folder)}"
        )
    wanted = [*TEXT, *(error_column(scores["task"], e["estimator"], e["threshold"]) for e in _entries(scores))]
    if missing := [name for name in wanted if name not in rows]:
        raise ValueError(f"{_shown(folder / 'pairs.csv')} has no column {missing[0]!r}: {_again(folder)}")
    if len(rows["image0"]) != scores["pairs"]:
        told = f"scores.json tells of {scores['pairs']} pairs, pairs.csv has {len(rows['image0'])}"
        raise ValueError(f"{_shown(folder)} does not agree with itself ({told}): {_again(folder)}")
    return Run(path=folder, scores=scores, rows=rows)


def _again(folder: Path) -> str:
    return f"run `vispe evaluate BENCHMARK --out {printable(folder)}` first"


def _shown(path: Path) -> str:
    return repr(printable(path))


def _json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{_shown(path)} is not there: {remedy}")
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{_shown(path)} is not JSON ({' '.join(str(error).split())}): {remedy}") from error
    if not isinstance(made, dict):
        raise ValueError(f"{_shown(path)} holds no table but {type(made).__name__}: {remedy}")
    return made


def _check_scores(scores: dict[str, Any], folder: Path) -> None:
    """``ValueError`` unless everything that is read from it later is there."""

    def wrong(what: str) -> ValueError:
        return ValueError(f"{_shown(folder / 'scores.json')} {what}: {_again(folder)}")

    for key, kind in KEYS.items():
        if not isinstance(scores.get(key), kind):
            raise wrong(f"has no {key!r}" if key not in scores else f"has {scores[key]!r} as its {key!r}")
    if scores["task"] not in ERRORS:
        raise wrong(f"tells of the task {scores['task']!r}, not of {' or '.join(map(repr, ERRORS))}")
    if "all" not in scores["groups"]:
        raise wrong("has no group 'all'")
    for name, group in scores["groups"].items():
        for entry in _entries(scores, name):
            lists = [entry.get(key) for key in ("at", "auc", "low", "high")]
            lengths = {len(values) if isinstance(values, list) else -1 for values in lists}
            if not entry.keys() >= ENTRY or len(lengths) != 1 or -1 in lengths:
                raise wrong(f"has an unknown kind of AUC in group {name!r}")
        if not all(isinstance(group.get(key), dict) for key in ("mean", "median")):
            raise wrong(f"has no means or medians in group {name!r}")


def _entries(scores: dict[str, Any], group: str = "all") -> list[dict[str, Any]]:
    found = scores["groups"][group]
    lines = found.get("auc") if isinstance(found, dict) else None
    return [entry if isinstance(entry, dict) else {} for entry in lines] if isinstance(lines, list) else [{}]


# --- pairs.csv --------------------------------------------------------------------------------------------------------


def write_rows(path: str | os.PathLike[str], columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
    """Columns of equal length as CSV with a header, in one step: ``read_rows`` gives back equal text and numbers.

    Floats are written by ``repr``, ints as ints, infinity as ``inf``. Bytes of a file name that are no UTF-8 are
    written as they are.
    """
    cells = [[_cell(value) for value in column] for column in columns.values()]
    lines = [[_quoted(name) for name in columns], *zip(*cells, strict=True)]
    data = "".join(",".join(line) + "\n" for line in lines).encode("utf-8", "surrogateescape")
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    assert not isinstance(value, bool | np.bool_), "a truth value is no number"
    return str(int(value)) if isinstance(value, int | np.integer) else repr(float(value))


def _quoted(text: str) -> str:
    """Python 3.11's csv.writer leaves a lone carriage return unquoted when lines end in a line feed: not this."""
    return '"' + text.replace('"', '""') + '"' if re.search(r'[",\r\n]', text) else text


def read_rows(path: str | os.PathLike[str], remedy: str = "write it again") -> dict[str, Column]:
    """The columns of a CSV file by name: ``TEXT`` as lists of str, whole numbers as int64, others as float64.

    A ``ValueError`` of one line, ending in ``remedy``, for a file that is missing or broken.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{_shown(file)} is not there: {remedy}")
    text = file.read_bytes().decode("utf-8", "surrogateescape")
    lines: list[list[str]] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for line in reader:
            lines.append(line)
            if len(line) != len(lines[0]):
                raise csv.Error(f"{len(line)} cells, not {len(lines[0])}")
        if not lines or len(set(lines[0])) != len(lines[0]):
            raise csv.Error("a header names each column once")
        columns = zip(*lines[1:], strict=True) if lines[1:] else ([] for _ in lines[0])
        return {name: _column(name, list(cells)) for name, cells in zip(lines[0], columns, strict=True)}
    except _CellError as error:
        raise ValueError(f"{_shown(file)}, {error}: {remedy}") from error
    except csv.Error as error:
        raise ValueError(f"{_shown(file)}, line {reader.line_num}: {error}: {remedy}") from error


class _CellError(ValueError):
    """A cell that is no number."""


def _column(name: str, cells: list[str]) -> Column:
    if name in TEXT:
        return cells
    whole = bool(cells) and all(INTEGER.fullmatch(cell) for cell in cells)
    try:
        return np.array([int(c) for c in cells], np.int64) if whole else np.array([float(c) for c in cells], np.float64)
    except (ValueError, OverflowError) as error:
        raise _CellError(f"column {printable(name)!r}: {' '.join(str(error).split())}") from error


# --- for people -------------------------------------------------------------------------------------------------------


def printable(value: object) -> str:
    """Text that any terminal or page can show: bytes that are no UTF-8 as U+FFFD, control characters as pictures."""
    text = str(value).encode("utf-8", "surrogateescape" if _escaped(str(value)) else "replace")
    return re.sub(r"[\x00-\x1f\x7f]", _picture, text.decode("utf-8", "replace"))


def _escaped(text: str) -> bool:
    """Whether all lone surrogates are those of bytes in file names."""
    return not re.search("[\ud800-\udc7f\udd00-\udfff]", text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2421 if code == 0x7F else 0x2400 + code)


def amount(value: float, unit: str) -> str:
    """``"5 px"``, ``"20°"``."""
    return f"{value:g}{unit}" if unit == "°" else f"{value:g} {unit}"


def told_seconds(run: Run) -> dict[str, float]:
    """Seconds an image or a pair for each stage of ``timing.json`` that has a ``seconds_mean``."""
    stages = {name: stage.get("seconds_mean") for name, stage in run.timing.items() if isinstance(stage, dict)}
    return {name: float(seconds) for name, seconds in stages.items() if isinstance(seconds, int | float)}
