"""Every room has its partners: a model its facts, card and test; a data set its facts; a module its test."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from vispe.models import EXTRACTORS, MODELS
from vispe.weights.files import facts

ROOT = Path(__file__).resolve().parents[1]
MODEL_FILES = sorted(p.stem for p in (ROOT / "vispe/models").glob("*.py") if p.stem != "__init__")
MODULES = sorted(p.relative_to(ROOT / "vispe") for p in (ROOT / "vispe").rglob("*.py") if not p.stem.startswith("__"))


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_model_has_facts_a_card_and_a_test(name):
    for partner in (f"models/{name}.toml", f"models/{name}.md", f"tests/models/test_{name}.py"):
        assert (ROOT / partner).is_file(), partner
    assert (ROOT / f"models/{name}.md").read_text(encoding="utf-8").startswith("# ")


def test_facts_and_cards_have_a_model():
    assert sorted(p.stem for p in (ROOT / "models").glob("*.toml")) == MODEL_FILES
    assert sorted(p.stem for p in (ROOT / "models").glob("*.md")) == MODEL_FILES


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lightglue"])  # that one is for one's own weights
def test_a_registered_model_is_declared_everywhere(name):
    module = importlib.import_module(f"vispe.models.{MODELS[name]}")
    assert name in module.VARIANTS
    assert isinstance(module.MODEL, type)
    known = facts(name)
    assert known["weights"].get("url", "https://").startswith("https://")
    assert ("url" in known["weights"]) != ("shipped" in known["weights"])
    assert known["weights"]["licence"]
    assert known["weights"]["origin"] in ("vispe", *known["origin"])


def test_variants_and_extractors_are_registered():
    for file in MODEL_FILES:
        for name in importlib.import_module(f"vispe.models.{file}").VARIANTS:
            assert MODELS[name] == file
    assert all(matcher is None or matcher in MODELS for matcher in EXTRACTORS.values())
    assert all(name in MODELS or name == "sift" for name in EXTRACTORS)


@pytest.mark.parametrize("path", sorted((ROOT / "data").glob("*.toml")), ids=lambda p: p.stem)
def test_a_data_set_has_a_loader_and_says_whose_it_is(path):
    assert (ROOT / "vispe/data" / f"{path.stem}.py").is_file()
    fact = tomllib.loads(path.read_text(encoding="utf-8"))["dataset"]
    assert {"title", "source", "licence"} <= fact.keys()


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_a_test(module):
    assert (ROOT / "tests" / module.parent / f"test_{module.name}").is_file(), module
