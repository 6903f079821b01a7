"""What there is: the tables of ``vispe list``."""

from __future__ import annotations

import tomllib

from vispe.models import MODELS
from vispe.paths import shared
from vispe.position import ENCODINGS
from vispe.weights.files import cached, facts, packaged

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def model_rows() -> Table:
    """Every model, where its weights are now and their licence. Nothing is downloaded."""
    rows: list[tuple[str, ...]] = []
    for name in MODELS:
        weights = facts(name)["weights"]
        if not weights:
            rows.append((name, "none published", "", ""))
            continue
        if "shipped" in weights:
            state = "ships with vispe"
        elif packaged(weights):
            state = f"installed ({weights['carrier'].partition('/')[0]})"
        elif cached(weights).is_file():
            state = "in the cache"
        else:
            state = f"to download ({weights['bytes'] / 1e6:.0f} MB)" if "bytes" in weights else "to download"
        rows.append((name, state, "yes" if "sha256" in weights else "no", weights["licence"]))
    return ("model", "weights", "sha256 pinned", "licence of the weights"), rows


def data_rows() -> Table:
    """Every data set with its source and licence."""
    rows: list[tuple[str, ...]] = []
    for path in sorted(shared("data").glob("*.toml")):
        fact = tomllib.loads(path.read_text(encoding="utf-8"))["dataset"]
        rows.append((path.stem, fact["title"], fact["source"], fact["licence"]))
    return ("data", "what", "source", "licence"), rows


def encoding_rows() -> Table:
    """Every position encoding with its socket, where it is, its source and who uses it."""
    rows: list[tuple[str, ...]] = [
        (name, e.socket, f"vispe.position.{e.home}", e.source, e.used_by) for name, e in ENCODINGS.items()
    ]
    return ("encoding", "socket", "where", "source", "used by"), rows
