"""Files that are whole or absent: written beside their place under another name, then moved there in one step."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path for the block to write; ``path`` becomes that file when the block ends without an exception.

    The temporary path is in the same folder and has the same suffix; it is removed on any failure, even an interrupt.
    The bytes are on the disk before the name changes. A symbolic link is followed, not replaced. ``OSError`` when the
    folder is missing, or when ``path`` exists and is not a regular file: ``/dev/null`` shall stay what it is.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {os.fspath(path)!r}: there is no folder {str(target.parent)!r}")
    if target.exists() and not target.is_file():
        raise OSError(f"cannot write {os.fspath(path)!r}: it is not a regular file")
    temporary = target.parent / f".vispe-{secrets.token_hex(8)}{target.suffix}"
    try:
        yield temporary
        _to_disk(temporary)
        os.replace(temporary, target)
    finally:
        with suppress(FileNotFoundError):  # after a success there is nothing left to remove
            temporary.unlink()
    if os.name == "posix":
        _to_disk(target.parent)


def _to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: str | os.PathLike[str], writer: Callable[[Path], object]) -> None:
    """``writer(temporary)`` writes the file, which then takes the place of ``path``; see ``atomic``."""
    with atomic(path) as temporary:
        writer(temporary)


def remembered(path: Path) -> dict[str, Any]:
    """The JSON mapping in ``path``; empty when it is not there or damaged, as what is only remembered can be found out
    again."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_json(path: str | os.PathLike[str], obj: object) -> None:
    """``obj`` as UTF-8 JSON, indented by 2, in one step; ``ValueError`` for NaN and infinity, which are no JSON."""
    text = json.dumps(obj, allow_nan=False, ensure_ascii=False, indent=2) + "\n"
    # File names that are not UTF-8 arrive as lone surrogates; written as \udcXX, JSON's own escape, they survive.
    data = text.encode("utf-8", "backslashreplace")
    write_atomically(path, lambda temporary: temporary.write_bytes(data))
