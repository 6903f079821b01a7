"""Every positional parameter is found, by what its class says and never by its name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn

import vispe.position
from vispe.position.bias import CausalT5Bias, DecomposedBias, ShawBias, SwinBias, SwinV2Bias, T5Bias
from vispe.position.conv import PEG, MixFFN
from vispe.position.parameters import positional_parameters
from vispe.position.rotary import LearnedBasis

MODULES = [importlib.import_module(f"vispe.position.{m.name}") for m in pkgutil.iter_modules(vispe.position.__path__)]
CLASSES = sorted(
    {c for module in MODULES for _, c in inspect.getmembers(module, inspect.isclass)
     if issubclass(c, nn.Module) and c.__module__ == module.__name__}, key=lambda c: c.__name__,
)  # fmt: skip


class Model(nn.Module):
    """A table of its own, an encoding in it, and parameters whose names would mislead a guess."""

    positional = ("pos_embed", "unused")

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 8))
        self.unused = None
        self.pos_norm = nn.LayerNorm(8)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList(nn.ModuleDict({"bias": SwinV2Bias((2, 2), 2), "mlp": MixFFN(8, 16)}) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pos_embed


FOUND = ["pos_embed"] + [
    f"blocks.{i}.{name}"
    for i in (0, 1)
    for name in ("bias.inner.weight", "bias.inner.bias", "bias.outer.weight", "mlp.conv.weight", "mlp.conv.bias")
]


def test_a_models_positions_are_found_and_nothing_else():
    model = Model()
    found = positional_parameters(model)
    assert list(found) == FOUND
    named = dict(model.named_parameters())
    assert all(found[name] is named[name] for name in found)


def test_wrappers_are_looked_through():
    model = Model()
    compiled = positional_parameters(torch.compile(model))
    assert list(compiled) == [f"_orig_mod.{name}" for name in FOUND]
    wrapped = nn.DataParallel(model)
    assert list(positional_parameters(wrapped)) == [f"module.{name}" for name in FOUND]
    assert set(compiled) <= dict(torch.compile(model).named_parameters()).keys()


def test_a_table_shared_by_all_layers_is_listed_once():
    shared = T5Bias(2)
    layers = nn.ModuleList([shared, shared, T5Bias(2)])
    layers[2].weight = shared.weight
    assert list(positional_parameters(layers)) == ["0.weight"]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (T5Bias(2), {"weight"}),
        (CausalT5Bias(2), {"weight"}),
        (ShawBias(4, 2), {"key_table", "value_table"}),
        (SwinBias((2, 2), 2), {"table"}),
        (SwinV2Bias((2, 2), 2), {"inner.weight", "inner.bias", "outer.weight"}),
        (DecomposedBias((2, 2), 4), {"rows", "columns"}),
        (PEG(4), {"conv.weight", "conv.bias"}),
        (MixFFN(4, 8), {"conv.weight", "conv.bias"}),
        (LearnedBasis(2, 8), {"weight"}),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_each_member_names_its_own(module, names):
    assert positional_parameters(module).keys() == names


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_every_module_of_the_package_says_what_is_positional(kind):
    """A new encoding that forgets the line would be decayed: `positional = ()` where it owns no parameter."""
    assert isinstance(getattr(kind, "positional", None), tuple)


def test_the_package_has_modules():
    assert {SwinBias, PEG, LearnedBasis} <= set(CLASSES)


def test_a_wrong_declaration_is_refused():
    class Misspelt(nn.Module):
        positional = ("wieght",)

    class NotATuple(nn.Module):
        positional = "weight"

    class Buffer(nn.Module):
        positional = ("weight",)

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(2))

    for kind, message in [
        (Misspelt, "'wieght'"),
        (NotATuple, "must be a tuple of names, got 'weight'"),
        (Buffer, "'weight'"),
    ]:
        with pytest.raises(ValueError, match=message):
            positional_parameters(nn.Sequential(kind()))


def test_they_make_an_optimisers_group():
    """No weight decay moves them when their gradient is zero; the rest shrinks."""
    model = nn.ModuleDict({"swin": SwinBias((2, 2), 2), "head": nn.Linear(4, 4)})
    positions = positional_parameters(model)
    rest = [p for name, p in model.named_parameters() if name not in positions]
    groups = [{"params": list(positions.values()), "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.5}]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.AdamW(groups, lr=0.1).step()
    assert torch.equal(model["swin"].table, before["swin.table"])
    assert model["head"].weight.norm() < before["head.weight"].norm()
