"""``build`` gives a model with fresh weights, ``load`` one with trained weights, ``list_models`` the names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vispe.models import MODELS, home
from vispe.weights.convert import WeightsError, convert, fill
from vispe.weights.files import facts, locate, read

__all__ = ["WeightsError", "build", "list_models", "load"]


def list_models() -> list[str]:
    """The names that :func:`build` and :func:`load` take."""
    return list(MODELS)


def build(name: str, **overrides: Any) -> nn.Module:
    """A model of the zoo with fresh weights, in eval mode; ``overrides`` change knobs of its spec.

    ``ValueError`` for an unknown name or knob. Touches neither disk nor network.
    """
    module = home(name)
    return module.MODEL(module.VARIANTS[name].but(**overrides)).eval()


def load(
    name: str,
    weights: str | os.PathLike[str] | Mapping[str, Tensor] | None = None,
    origin: str | None = None,
    **overrides: Any,
) -> nn.Module:
    """A model with trained weights, in eval mode on the CPU.

    ``weights``: None for the published file (from an installed package, the cache, or downloaded; sha256 checked), a path
    to a ``.safetensors`` or torch file, or a state dict. ``origin`` says whose names the keys are (``"official"``,
    ``"transformers"``, ...): they are converted by that table, strictly; None means the published file's own origin, and for
    a given file or state dict vispe's names when they fit, else the one origin whose table accounts for every key.
    ``WeightsError`` (a ``ValueError``) names what does not fit.
    """
    model = build(name, **overrides)
    known = facts(name)
    if weights is None:
        state, origin = read(locate(name)), origin or known["weights"]["origin"]
    else:
        state = dict(weights) if isinstance(weights, Mapping) else read(weights)
    fill(model, _ours(state, model, origin, known["origin"], name), name)
    return model


def _ours(state: dict[str, Tensor], model: nn.Module, origin: str | None, tables: dict[str, Any], name: str) -> dict[str, Tensor]:
    if origin == "vispe" or (origin is None and state.keys() == model.state_dict().keys()):
        return state
    if origin is not None:
        if origin not in tables:
            raise WeightsError(f"{name} has no rename table for origin {origin!r}; it has {', '.join(['vispe', *tables])}")
        return convert(state, tables[origin], origin)
    fitting = []
    for candidate, rules in tables.items():
        try:
            fitting.append(convert(state, rules, candidate))
        except WeightsError:
            continue
    return fitting[0] if len(fitting) == 1 else state  # unknown names: `fill` says which
