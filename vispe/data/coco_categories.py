"""The categories of COCO 2017 as published networks number their outputs."""

from __future__ import annotations

import tomllib
from pathlib import Path

from vispe.data.coco import Category


def contiguous(*, stuff: bool) -> tuple[Category, ...]:
    """The 80 things by id, with ``stuff`` its 53 categories behind them: label k is the k-th of them."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    kinds = ("things", "stuff") if stuff else ("things",)
    return tuple(Category(number, name, kind == "things") for kind in kinds for number, name in table[kind])


def by_id() -> tuple[Category, ...]:
    """Ids 0 to 90 as they are, as DETR's labels: those that name nothing are called ``""`` and are no thing."""
    known = {category.id: category for category in contiguous(stuff=False)}
    return tuple(known.get(k, Category(k, "", False)) for k in range(max(known) + 1))
