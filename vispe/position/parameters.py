"""Which parameters of a model are positions: optimisers leave them undecayed and give them layer id 0.

A class says so in one line, ``positional = ("weight",)``: the names of its own parameters, or of submodules of which
every parameter counts. Modules of ``vispe.position`` always say it, ``()`` where they own none (a test asks them); a
model says it for the tables it owns itself. A parameter's name is never guessed at.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def positional_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, named and ordered by ``module`` as ``named_parameters`` does; frozen ones are included.

    Wrapped modules (DDP, ``torch.compile``) are looked through: the class of the inner part speaks. A shared parameter
    is listed once. A declared name that is neither a parameter nor a module (nor a parameter left out, None) is a
    ValueError.
    """
    found: dict[str, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for name, parameter in _declared(part):
            if not any(parameter is other for other in found.values()):
                found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def _declared(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    names = getattr(type(part), "positional", ())  # of the class: torch.compile's wrapper lends its inner's attributes
    if not isinstance(names, tuple):
        raise ValueError(f"{type(part).__name__}.positional must be a tuple of names, got {names!r}")
    for name in names:
        value = getattr(part, name, "missing")
        if isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
        elif value is not None:
            raise ValueError(f"{type(part).__name__} has no parameter or submodule named {name!r}")
