"""``build`` gives a model with fresh weights, ``load`` one with trained weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vispe.models import home
from vispe.weights.convert import WeightsError, accounts_for, convert, fill
from vispe.weights.files import facts, locate, read, tensors

__all__ = ["WeightsError", "build", "load"]


def build(name: str, **overrides: Any) -> nn.Module:
    """A model of the zoo with fresh weights, in eval mode; ``overrides`` change knobs of its spec.

    The weights follow from the state of torch's CPU generator, which is left as it was: the next call makes the same
    ones, until ``torch.manual_seed`` or a draw of the caller's moves it. ``ValueError`` for an unknown name or knob.
    Touches neither disk nor network.
    """
    module = home(name)
    spec = module.VARIANTS[name].but(**overrides)
    with torch.random.fork_rng(devices=[]):
        return module.MODEL(spec).eval()


def load(
    name: str,
    weights: str | os.PathLike[str] | Mapping[str, Tensor] | None = None,
    origin: str | None = None,
    **overrides: Any,
) -> nn.Module:
    """A model with trained weights, in eval mode on the CPU.

    ``weights``: None for the published file (from an installed package, the cache, or downloaded; sha256 checked), a
    path to a ``.safetensors`` or torch file, or a state dict. ``origin`` says whose names the keys are (``"vispe"``,
    ``"official"``, ``"transformers"``, ...): they are converted by that table, strictly; None means the published
    file's own origin, and for a given file or state dict vispe's names when they fit, else the one origin whose table
    accounts for every key. ``WeightsError`` (a ``ValueError``) names what does not fit.
    """
    model = build(name, **overrides)
    known = facts(name)
    _check_origin(origin, known["origin"], name)
    if weights is None:
        state, origin = read(locate(name)), origin or known["weights"]["origin"]
    else:
        state = tensors(weights, "the mapping given") if isinstance(weights, Mapping) else read(weights)
    fill(model, _ours(state, model, origin, known["origin"], name), name)
    return model


def _check_origin(origin: str | None, tables: Mapping[str, Any], name: str) -> None:
    if origin not in (None, "vispe", *tables):
        raise WeightsError(f"{name} has no rename table for origin {origin!r}; it has {_origins(tables)}")


def _ours(
    state: dict[str, Tensor], model: nn.Module, origin: str | None, tables: Mapping[str, Any], name: str
) -> dict[str, Tensor]:
    """``state`` in vispe's names."""
    own = model.state_dict().keys()
    if origin == "vispe" or (origin is None and state.keys() == own):
        return state
    if origin is not None:
        return convert(state, tables[origin], origin)
    fitting = [who for who, rules in tables.items() if accounts_for(rules, state)]
    if len(fitting) == 1:
        return convert(state, tables[fitting[0]], fitting[0])
    if fitting or not state.keys() & own:
        whose = f"fit {' and '.join(fitting)} alike" if fitting else "fit none"
        raise WeightsError(
            f"the keys, such as {min(state)!r}, {whose} of the origins known for {name}: {_origins(tables)}"
        )
    return state  # vispe's names, more or less: `fill` says which


def _origins(tables: Mapping[str, Any]) -> str:
    return ", ".join(["vispe", *tables])
