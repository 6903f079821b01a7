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

EXTRACTORS: dict[str, str | None] = {
    # name -> the LightGlue weights trained for its descriptors
    "aliked_n16": "lightglue_aliked",
    "aliked_n16rot": "lightglue_aliked",
    "aliked_n32": "lightglue_aliked",
    "aliked_t16": None,  # 64-dimensional descriptors: no LightGlue was published for them
    "disk": "lightglue_disk",
    "sift": "lightglue_sift",
    "superpoint": "lightglue_superpoint",
}
MATCHERS = ("lightglue", "mutual_nn")


def list_models() -> list[str]:
    """The names that ``vispe.build`` and ``vispe.load`` take."""
    return list(MODELS)


def home(name: str) -> ModuleType:
    """The module of model ``name``; ``ValueError`` lists the names there are."""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    return importlib.import_module(f"vispe.models.{MODELS[name]}")
