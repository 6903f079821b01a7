"""The zoo's whole registry: a model's name and the file it lives in.

Each file has ``MODEL`` (its class), a Spec above it and ``VARIANTS`` (name -> spec); the facts about its weights are in
``models/<file>.toml``. Listing names imports no torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType

MODELS: dict[str, str] = {
    "aliked_t16": "aliked",
    "aliked_n16": "aliked",
    "aliked_n16rot": "aliked",
    "aliked_n32": "aliked",
    "disk": "disk",
    "superpoint": "superpoint",
    "lightglue_aliked": "lightglue",
    "lightglue_disk": "lightglue",
    "lightglue_superpoint": "lightglue",
    "lightglue_sift": "lightglue",
    "lightglue_doghardnet": "lightglue",
}


def home(name: str) -> ModuleType:
    """The module of model ``name``; ``ValueError`` lists the names there are."""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    return importlib.import_module(f"vispe.models.{MODELS[name]}")
