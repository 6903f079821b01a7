"""The size of an image after resizing: the one rule, in plain numbers."""

from __future__ import annotations

from typing import Literal

Side = Literal["long", "short", "exact"]


def resized(h: int, w: int, size: int | tuple[int, int], side: Side) -> tuple[int, int]:
    """``(h', w')``; the free side is rounded down, but not to nothing.

    ``size`` is the length of the long or short side in pixels, or with ``side="exact"`` the whole ``(h', w')``.
    """
    wanted = list(size) if isinstance(size, tuple | list) else [size]
    if len(wanted) != (2 if side == "exact" else 1) or not all(type(n) is int and n > 0 for n in wanted):
        raise ValueError(
            f"size is one positive int, or (h, w) of them with side='exact'; got {size!r} with side={side!r}"
        )
    if side == "exact":
        return wanted[0], wanted[1]
    if side not in ("long", "short"):
        raise ValueError(f"side is 'long', 'short' or 'exact', got {side!r}")
    aspect = w / h  # kornia's arithmetic, so that its rounding is ours
    if (side == "short") != (aspect < 1.0):
        return wanted[0], max(int(wanted[0] * aspect), 1)
    return max(int(wanted[0] / aspect), 1), wanted[0]
