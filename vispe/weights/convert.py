"""From another library's state dict to ours: a table of renamings, read strictly.

A table is a list of rules in ``models/<file>.toml`` under ``[origin]``. A rule has ``from`` (a pattern for the whole
key) and one of
- ``to``: our key, with ``\\1`` for the pattern's groups; with ``part = k`` several keys become one tensor, joined
  along their first axis; with ``twin = true`` a second key may claim the place, if it holds the same numbers; with
  ``zeros = k`` part k is zeros of this part's shape where no key gives it; with ``alone = true`` this part may be the
  whole;
- ``drop = "why"``: a key that is known and not needed.
``change`` names a tensor surgery of this file; ``must = true``: without such a key the table is not taken for a state
dict of unknown origin. A key that no rule names, or two that claim one place, are an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Rules = Sequence[Mapping[str, Any]]


class WeightsError(ValueError):
    """Weights that cannot be had or do not fit; the message names the file or the keys."""


def qkv_last_to_first(tensor: Tensor, heads: int) -> Tensor:
    """Rows ordered (heads, head_dim, 3), as the official LightGlue's Wqkv, into (3, heads, head_dim)."""
    return tensor.unflatten(0, (heads, -1, 3)).permute(2, 0, 1, *range(3, tensor.ndim + 2)).flatten(0, 2)


def first_of_one(tensor: Tensor) -> Tensor:
    """``[1, n, d]`` -> ``[n, d]``: a table that is kept with a batch axis."""
    if tensor.shape[0] != 1:
        raise IndexError(f"a batch axis of 1 is expected, got {tensor.shape[0]}")
    return tensor[0]


def no_key_bias(tensor: Tensor) -> Tensor:
    """The bias of q, k and v with k's third put to zero, as DINOv3's mask does in every forward."""
    q, k, v = tensor.unflatten(0, (3, -1))
    return torch.cat((q, torch.zeros_like(k), v))


CHANGES: dict[str, Callable[..., Tensor]] = {
    "qkv_last_to_first_4_heads": lambda t: qkv_last_to_first(t, 4),
    "first_of_one": first_of_one,
    "no_key_bias": no_key_bias,
}


def accounts_for(rules: Rules, keys: Iterable[str]) -> bool:
    """Whether every key has a rule, and every rule that must have one a key."""
    keys = list(keys)
    signs = [rule["from"] for rule in rules if rule.get("must")]
    known = all(_rule(rules, key) for key in keys)
    return known and all(any(re.fullmatch(sign, key) for key in keys) for sign in signs)


def convert(state: Mapping[str, Tensor], rules: Rules, origin: str) -> dict[str, Tensor]:
    """``state`` in our names; ``WeightsError`` names every key that the rules of ``origin`` do not account for."""
    unknown = [key for key in state if not _rule(rules, key)]
    if unknown:
        raise WeightsError(f"these are not {origin} weights for this model: nothing is known of {_some(unknown)}")
    places: dict[str, dict[int, Tensor]] = {}
    empty: dict[str, tuple[int, Tensor]] = {}
    lone: set[tuple[str, int]] = set()
    for key, tensor in state.items():
        hit = _rule(rules, key)
        assert hit is not None
        match, rule = hit
        if "drop" in rule:
            continue
        place, part = places.setdefault(match.expand(rule["to"]), {}), rule.get("part", 0)
        value = _changed(tensor, rule, key)
        if part in place and not (rule.get("twin") and torch.equal(place[part], value)):
            ours = match.expand(rule["to"])
            raise WeightsError(f"{key!r} and another key of {origin} both become {ours!r}, with different values")
        place[part] = value
        if "zeros" in rule:
            empty[match.expand(rule["to"])] = (rule["zeros"], torch.zeros_like(value))
        if rule.get("alone"):
            lone.add((match.expand(rule["to"]), part))
    for ours, (part, zeros) in empty.items():
        places[ours].setdefault(part, zeros)
    for ours, part in lone:
        if places[ours].keys() == {part}:
            places[ours] = {0: places[ours][part]}
    return {key: _joined(parts, key) for key, parts in places.items()}


def _rule(rules: Rules, key: str) -> tuple[re.Match[str], Mapping[str, Any]] | None:
    """The first rule whose pattern is the whole key, with the match."""
    return next(((match, rule) for rule in rules if (match := re.fullmatch(rule["from"], key))), None)


def _changed(tensor: Tensor, rule: Mapping[str, Any], key: str) -> Tensor:
    try:
        return CHANGES[rule["change"]](tensor) if "change" in rule else tensor
    except (RuntimeError, IndexError) as error:
        raise WeightsError(f"{key!r} has an unexpected shape, {list(tensor.shape)}") from error


def _joined(parts: Mapping[int, Tensor], key: str) -> Tensor:
    try:
        return parts[0] if parts.keys() == {0} else torch.cat([parts[i] for i in range(len(parts))])
    except (KeyError, RuntimeError) as error:
        shapes = ", ".join(f"{i}: {list(parts[i].shape)}" for i in sorted(parts))
        raise WeightsError(f"the parts of {key!r} do not fit together ({shapes})") from error


def fill(module: nn.Module, state: Mapping[str, Tensor], name: str) -> None:
    """Load ``state`` into ``module``, every key and shape accounted for; nothing is changed when anything is wrong."""
    own = module.state_dict()
    # A batch norm's counter is of no use at inference, and old files lack it.
    missing = sorted(key for key in own.keys() - state.keys() if not key.endswith("num_batches_tracked"))
    extra = sorted(state.keys() - own.keys())
    reshaped = [key for key in own if key in state and state[key].shape != own[key].shape]
    shapes = [f"{key} {list(state[key].shape)} for {list(own[key].shape)}" for key in reshaped]
    faults = (("missing", missing), ("unknown", extra), ("of another shape:", shapes))
    if any(keys for _, keys in faults):
        wrong = "; ".join(f"{what} {_some(keys)}" for what, keys in faults if keys)
        raise WeightsError(f"weights do not fit {name}: {wrong}")
    bad = sorted(key for key, tensor in state.items() if not bool(torch.isfinite(tensor).all()))
    if bad:
        raise WeightsError(f"weights for {name} are not finite: {_some(bad)}")
    module.load_state_dict({**own, **state}, strict=True)


def _some(keys: Sequence[str], most: int = 6) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(map(repr, keys[:most])) + more
