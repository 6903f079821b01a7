"""From another library's state dict to ours: a table of renamings, read strictly.

A table is a list of rules in ``models/<file>.toml`` under ``[origin]``. A rule has ``from`` (a pattern for the whole key) and one of
- ``to``: our key, with ``\\1`` for the pattern's groups; with ``part = k`` several keys become one tensor, joined along their first axis; with
  ``twin = true`` a second key may claim the place, if it holds the same numbers;
- ``drop = "why"``: a key that is known and not needed.
``change`` names a tensor surgery of this file. A key that no rule names, or two that claim one place, are an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class WeightsError(ValueError):
    """Weights that cannot be had or do not fit; the message names the file or the keys."""


def qkv_last_to_first(tensor: Tensor, heads: int) -> Tensor:
    """Rows ordered (heads, head_dim, 3), as the official LightGlue's Wqkv, into (3, heads, head_dim)."""
    return tensor.unflatten(0, (heads, -1, 3)).permute(2, 0, 1, *range(3, tensor.ndim + 2)).flatten(0, 2)


CHANGES: dict[str, Callable[..., Tensor]] = {"qkv_last_to_first_4_heads": lambda t: qkv_last_to_first(t, 4)}


def convert(state: Mapping[str, Tensor], rules: Sequence[Mapping[str, Any]], origin: str) -> dict[str, Tensor]:
    """``state`` in our names; ``WeightsError`` names every key that the rules of ``origin`` do not account for."""
    compiled = [(re.compile(rule["from"]), rule) for rule in rules]
    parts: dict[str, dict[int, Tensor]] = {}
    unknown = []
    for key, tensor in state.items():
        hit = next(((match, rule) for pattern, rule in compiled if (match := pattern.fullmatch(key))), None)
        if hit is None:
            unknown.append(key)
        elif "drop" not in hit[1]:
            match, rule = hit
            ours, part = match.expand(rule["to"]), rule.get("part", 0)
            place = parts.setdefault(ours, {})
            value = CHANGES[rule["change"]](tensor) if "change" in rule else tensor
            if part in place and not (rule.get("twin") and torch.equal(place[part], value)):
                raise WeightsError(f"{key!r} and another key of {origin} both become {ours!r}, with different values")
            place[part] = value
    if unknown:
        raise WeightsError(f"these are not {origin} weights for this model: nothing is known of {_some(unknown)}")
    return {key: place[0] if len(place) == 1 else torch.cat([place[i] for i in sorted(place)]) for key, place in parts.items()}


def fill(module: nn.Module, state: Mapping[str, Tensor], name: str) -> None:
    """Load ``state`` into ``module``, every key and shape accounted for; nothing is changed when anything is wrong."""
    own = module.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    counters = {key for key in missing if key.endswith("num_batches_tracked")}  # of no use at inference; old files lack them
    missing = [key for key in missing if key not in counters]
    shapes = [f"{k} {list(state[k].shape)} for {list(own[k].shape)}" for k in own.keys() & state.keys() if own[k].shape != state[k].shape]
    wrong = [f"{what} {_some(keys)}" for what, keys in (("missing", missing), ("unknown", extra), ("of another shape:", shapes)) if keys]
    if wrong:
        raise WeightsError(f"weights do not fit {name}: " + "; ".join(wrong))
    bad = sorted(k for k, t in state.items() if t.is_floating_point() and not bool(torch.isfinite(t).all()))
    if bad:
        raise WeightsError(f"weights for {name} are not finite: {_some(bad)}")
    module.load_state_dict({**own, **state}, strict=True)


def _some(keys: Sequence[str], most: int = 6) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(map(repr, keys[:most])) + more
