"""Where the shipped facts and the cache are: the same answers in a checkout and in an installed wheel."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shared(room: str) -> Path:
    """The shipped folder ``models``, ``configs`` or ``data``; ``FileNotFoundError`` when the installation lacks it."""
    for root in (PACKAGE / "_shared", PACKAGE.parent):
        if (root / room).is_dir():
            return root / room
    raise FileNotFoundError(f"this installation of vispe has no {room!r} folder (looked beside {PACKAGE})")


def cache_dir() -> Path:
    """``$VISPE_CACHE``, else ``~/.cache/vispe``. Not created here."""
    return Path(os.environ.get("VISPE_CACHE") or Path.home() / ".cache" / "vispe").expanduser()
