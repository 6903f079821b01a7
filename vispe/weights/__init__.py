"""``build`` gives a model with fresh weights, ``load`` one with trained weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vispe.models import home
from vispe.weights.convert import WeightsError, accounts_for, convert, fill
from vispe.weights.files import facts, locate, read, tensors, told

__all__ = ["WeightsError", "build", "load", "published"]


def build(name: str, **overrides: Any) -> nn.Module:
    """A model of the zoo with fresh weights, in eval mode; ``overrides`` change knobs of its spec.

    A tag in the name, ``"vit_base_patch16_224.mae"``, chooses the spec of those published weights.

    The weights follow from the state of torch's CPU generator, which is left as it was: the next call makes the same
    ones, until ``torch.manual_seed`` or a draw of the caller's moves it. ``ValueError`` for an unknown name or knob.
    Touches neither disk nor network, but for the shipped facts about a tag.
    """
    spec = published(name).but(**overrides)
    with torch.random.fork_rng(devices=[]):
        return home(name).MODEL(spec).eval()


def load(
    name: str,
    weights: str | os.PathLike[str] | Mapping[str, Tensor] | None = None,
    origin: str | None = None,
    source_size: tuple[int, int] | None = None,
    **overrides: Any,
) -> nn.Module:
    """A model with trained weights, in eval mode on the CPU.

    ``name`` may carry a tag, ``"vit_base_patch16_224.augreg"``: which published weights. ``overrides`` change knobs of
    the spec: ``image_size=(384, 512)`` resamples learned positions, ``num_classes=10`` gives a fresh head; every such
    change is a sentence in ``model.report``. ``source_size``: the image size (h, w) that given weights were trained at,
    where it is not the one in the name.

    ``weights``: None for the published file (from an installed package, the cache, or downloaded; sha256 checked), a
    path to a ``.safetensors`` or torch file, or a state dict. ``origin`` says whose names the keys are (``"vispe"``,
    ``"official"``, ``"transformers"``, ...): they are converted by that table, strictly; None means the published
    file's own origin, and for a given file or state dict vispe's names when they fit, else the one origin whose table
    accounts for every key (or several, if they make the same of it). ``WeightsError`` (a ``ValueError``) names what
    does not fit. A file that vispe trained brings its own spec, which ``overrides`` change as they do the name's.
    """
    own = _own_spec(name, weights)
    model = build(name, **{**own, **overrides})
    known = facts(name)
    _check_origin(origin, known["origin"], name)
    if weights is None:
        state, origin = read(locate(name)), origin or known["weights"]["origin"]
    else:
        state = tensors(weights, "the mapping given") if isinstance(weights, Mapping) else read(weights)
    if source_size is not None and not hasattr(model, "adapt"):
        raise WeightsError(f"{name} knows no image size: source_size is for models with a learned table")
    try:
        state = _ours(state, model, origin, known["origin"], name)
        if hasattr(model, "adapt"):
            source = published(name).but(**own)
            if source_size is not None:
                source = source.but(image_size=source_size, patch_size=model.spec.patch_size)  # type: ignore[union-attr]
            state = _adapted(model, state, source)
        fill(model, state, name)
    except WeightsError as error:
        raise WeightsError(f"{_whose(weights)}{error}") from error
    return model


def _whose(weights: Any) -> str:
    """The file that was given, and what it says it holds, in front of what is wrong with it."""
    if not isinstance(weights, str | os.PathLike):
        return ""
    held = told(weights).get("model")
    return f"{os.fspath(weights)}{f' holds a {held}' if held else ''}: "


def _own_spec(name: str, weights: Any) -> dict[str, Any]:
    """The spec that a file in which this model was trained has in its header; empty for other weights."""
    about = told(weights) if isinstance(weights, str | os.PathLike) else {}
    if str(about.get("model", "")).partition(".")[0] != name.partition(".")[0]:
        return {}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in about["spec"].items()}


def published(name: str) -> Any:
    """The spec that ``name``'s published weights were trained with: the variant's, changed by what its tag says."""
    variant, _, tag = name.partition(".")
    spec = home(name).VARIANTS[variant]
    return spec.but(**facts(name)["weights"].get("spec", {})) if tag else spec


def _adapted(model: nn.Module, state: dict[str, Tensor], source: Any) -> dict[str, Tensor]:
    try:
        return model.adapt(state, source)  # type: ignore[operator]
    except WeightsError:
        raise
    except ValueError as error:
        raise WeightsError(f"{error}; is source_size the image size these weights were trained at?") from error


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
    made = [convert(state, tables[who], who) for who in fitting]
    if made and all(_equal(other, made[0]) for other in made[1:]):  # libraries share names
        return made[0]
    if fitting or not state.keys() & own:
        whose = f"fit {' and '.join(fitting)} alike" if fitting else "fit none"
        raise WeightsError(
            f"the keys, such as {min(state)!r}, {whose} of the origins known for {name}: {_origins(tables)}"
        )
    return state  # vispe's names, more or less: `fill` says which


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _origins(tables: Mapping[str, Any]) -> str:
    return ", ".join(["vispe", *tables])
