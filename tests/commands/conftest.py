"""What the commands are tried on: small images, files that are none, and a tiny classifier that was trained."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.conftest import vispe_


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Two views of one noisy wall, 40 pixels apart, and files that are no images, by name."""
    folder = tmp_path_factory.mktemp("images with spaces é")
    rng = np.random.default_rng(0)
    wall = np.kron(rng.integers(0, 256, (30, 42, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    Image.fromarray(wall[:, :-40]).save(folder / "left.png")
    Image.fromarray(wall[:, 40:]).save(folder / "right ü.png")
    Image.fromarray(wall[:, 40:]).save(folder / "new\nline.png")
    Image.fromarray(wall).save(folder / "whole.jpg")
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:2000])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("two\nlines")
    (folder / "folder.png").mkdir()
    for name, size in (("dot.png", (1, 1)), ("thread.png", (5000, 1)), ("plain.png", (64, 48))):
        Image.new("RGB", size, (90, 90, 90)).save(folder / name)
    return folder


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Images, a recipe, and the run of it."""
    from tests.train.conftest import TINY, write_images  # skips where training's libraries are not

    yaml = pytest.importorskip("yaml", reason="recipes need PyYAML")
    folder = tmp_path_factory.mktemp("place with spaces é")
    root = write_images(folder / "photos")
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "data": {"root": str(root)}}))
    assert vispe_("train", folder / "tiny.yaml", "--out", folder / "run", "train.epochs=2", "evaluate_at=[24]") == 0
    return folder


@pytest.fixture(scope="session")
def segmented(tmp_path_factory):
    """Scenes with masks, a recipe of segmentation, and the run of it."""
    pytest.importorskip("lightning", reason="training needs lightning")
    yaml = pytest.importorskip("yaml", reason="recipes need PyYAML")
    from tests.train.test_segment import SEMANTIC, write_scenes

    folder = tmp_path_factory.mktemp("scenes with spaces é")
    root = write_scenes(folder / "scenes")
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**SEMANTIC, "data": {"root": str(root)}}))
    assert vispe_("train", folder / "tiny.yaml", "--out", folder / "run", "train.epochs=1") == 0
    return folder
