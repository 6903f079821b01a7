"""The list of encodings is true: everything in it exists, and nothing public is missing from it."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from vispe.position import ENCODINGS

SOCKETS = ("added", "rotated", "biased", "convolved", "none")


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_entry_is_where_it_says_and_names_its_source(name):
    entry = ENCODINGS[name]
    file, _, attribute = entry.home.partition(".")
    found = getattr(importlib.import_module(f"vispe.position.{file}"), attribute)
    assert callable(found)
    assert inspect.getdoc(found)
    assert entry.socket in SOCKETS
    assert entry.source


def test_every_socket_is_filled_and_no_home_is_listed_twice():
    assert {entry.socket for entry in ENCODINGS.values()} == set(SOCKETS)
    homes = [entry.home for entry in ENCODINGS.values()]
    assert len(homes) == len(set(homes))


def test_every_encoding_module_is_listed():
    """A sine, a table or a bias that is not in the list cannot be found: each public class of these files is."""
    listed = {entry.home for entry in ENCODINGS.values()}
    for file in ("learned", "bias", "fourier", "temporal", "conv", "axial"):
        module = importlib.import_module(f"vispe.position.{file}")
        own = [c for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__]
        parts = [c for c in own if any(issubclass(d, c) and d is not c for d in own)]  # bases of others
        missing = [c.__name__ for c in own if c not in parts and f"{file}.{c.__name__}" not in listed]
        assert not missing, (file, missing)


def test_the_list_needs_no_torch():
    code = "import sys, vispe.position; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
