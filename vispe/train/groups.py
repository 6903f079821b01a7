"""Parameter groups of AdamW: the learning rate falls towards the input, and what is no matrix is not decayed.

A layer's rate is ``lr * layer_decay ** (depth + 1 - layer)``, layer 0 being embeddings and positions and ``depth + 1``
the final norm and the head (BEiT, section A; Clark et al. 2020). Weight decay leaves out positional parameters, tokens,
and everything of one dimension (biases, norms, layer scales).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn

from vispe.position.parameters import positional_parameters

TOKENS = ("cls_token", "dist_token", "reg_token", "mask_token")


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """The group of a parameter: its ``layer`` and whether its weights are ``decayed``."""

    layer: int
    decayed: bool


def places(model: nn.Module) -> dict[str, Place]:
    """Name -> group of every trainable parameter; all in layer 0 where the model has no ``layer_of``.

    Ask before the model is wrapped: FSDP flattens shapes away.
    """
    positional, layer_of = positional_parameters(model), getattr(model, "layer_of", lambda name: 0)
    made = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            free = name in positional or parameter.ndim <= 1 or name.rsplit(".", 1)[-1] in TOKENS
            made[name] = Place(layer_of(name), not free)
    return made


def groups(
    named: Iterable[tuple[str, nn.Parameter]],
    places: dict[str, Place],
    *,
    lr: float,
    weight_decay: float,
    layer_decay: float,
    last: int,
) -> list[dict[str, Any]]:
    """The groups of an optimiser, from layer 0 up; ``last`` is the layer whose rate is ``lr`` itself."""
    made: dict[Place, dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        place = places[name.replace("_fsdp_wrapped_module.", "")]
        scale = layer_decay ** (last - place.layer)
        decay = weight_decay if place.decayed else 0.0
        fresh = {"params": [], "lr": lr * scale, "weight_decay": decay, "layer": place.layer}
        made.setdefault(place, fresh)["params"].append(parameter)
    return [made[place] for place in sorted(made)]
