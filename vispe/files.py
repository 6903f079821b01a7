"""Files that are whole or absent: written beside their place under another name, then moved there in one step."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path for the block to write; ``path`` becomes that file when the block ends without an exception.

    The temporary path is in the same folder and has the same suffix; it is removed on any failure, even an interrupt,
    and what a process that was killed left in that folder is removed too. The bytes are on the disk before the name
    changes. A symbolic link is followed, not replaced. ``OSError`` as :func:`check_file`.
    """
    target = check_file(path)
    temporary = _temporary(target.parent, target.suffix)
    _sweep(target.parent)
    try:
        yield temporary
        _to_disk(temporary)
        os.replace(temporary, target)
    finally:
        with suppress(FileNotFoundError):  # after a success there is nothing left to remove
            temporary.unlink()
    if os.name == "posix":
        _to_disk(target.parent)


def check_file(path: str | os.PathLike[str]) -> Path:
    """The file that ``path`` means, links followed.

    ``OSError``, which names ``path``, when the folder is missing or nothing can be written there, or when ``path``
    exists and is not a regular file: ``/dev/null`` shall stay what it is.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {os.fspath(path)!r}: there is no folder {str(target.parent)!r}")
    if target.exists() and not target.is_file():
        raise OSError(f"cannot write {os.fspath(path)!r}: it is not a regular file")
    _try(target.parent, path)
    return target


def check_writable(folder: str | os.PathLike[str]) -> None:
    """``OSError`` unless ``folder`` can be made, or is there and can be written into; nothing is left behind."""
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"cannot write into {os.fspath(folder)!r}: {str(there)!r} is not a folder")
    _try(there, folder)


def _temporary(folder: Path, suffix: str) -> Path:
    """A name that tells who made the file: the machine and the process."""
    return folder / f".vispe-{_machine()}-{os.getpid()}-{secrets.token_hex(8)}{suffix}"


def _try(folder: Path, wanted: str | os.PathLike[str]) -> None:
    tried = _temporary(folder, "")
    try:
        tried.touch(exist_ok=False)
        tried.unlink()
    except OSError as error:
        raise type(error)(f"cannot write {os.fspath(wanted)!r}: {(error.strerror or str(error)).lower()}") from None


@functools.cache  # once a folder: a thousand files shall not list it a thousand times
def _sweep(folder: Path) -> None:
    """Remove what processes of this machine that are no more had begun to write into ``folder``."""
    for path in folder.glob(f".vispe-{_machine()}-*"):
        found = re.match(r"\.vispe-[0-9a-f]{8}-(\d+)-[0-9a-f]{16}", path.name)
        if found and not _alive(int(found[1])):
            with suppress(OSError):
                path.unlink()


def _machine() -> str:
    """Eight digits that tell this machine from others that may share its disk."""
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _alive(process: int) -> bool:
    """Whether there is such a process here; True where that cannot be known."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


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
