"""The shapes that signatures promise are kept: the tests of these rooms run once more with the annotations enforced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


@pytest.mark.slow
def test_shapes_in_signatures_are_enforced():
    for package in ("jaxtyping", "beartype"):
        pytest.importorskip(package, reason=f"{package} enforces the annotations")
    rooms = [str(TESTS / room) for room in ("position", "layers")]
    hook = "--jaxtyping-packages=vispe.position,vispe.layers,beartype.beartype"
    # The hook notices mistakes first and cannot be traced; and in test_scaling whole numbers stand for floats.
    chosen = ["-m", "not slow", "-k", "not mistakes_are_named and not export"]
    whole = f"--ignore={TESTS / 'position' / 'test_scaling.py'}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen, hook, whole, *rooms]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_wrong_shape_is_noticed():
    """The hook bites: otherwise the test above could not fail."""
    pytest.importorskip("beartype", reason="beartype enforces the annotations")
    code = """
from jaxtyping import install_import_hook
with install_import_hook("vispe.position", "beartype.beartype"):
    from vispe.position.grid import normalize_keypoints
import torch
normalize_keypoints(torch.zeros(1, 5, 3), torch.ones(1, 2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "TypeCheckError" in done.stderr
