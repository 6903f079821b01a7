"""A recipe so small that a run takes a second, on images made here; small views of photographs made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("lightning", reason="training needs lightning")
pytest.importorskip("pydantic", reason="recipes need pydantic")

from vispe.data.homographies import ViewSpec
from vispe.train.photos import PhotoSpec, photographs
from vispe.train.views import FeatureSpec, view_features

SMALL = ViewSpec(size=(96, 128), views=4, look=0.0, scale=(0.7, 1.0), overlap=0.3)
SIFT = FeatureSpec(name="sift", max_keypoints=64)

TINY = {
    "model": {
        "name": "vit_tiny_patch16_224", "weights": "fresh", "image_size": 16, "patch_size": 4, "width": 24, "depth": 2,
        "heads": 2, "hidden": 48, "drop_path": 0.2,
    },
    "augment": {"crop": "padded", "pad": 1, "mixup": 0.2},
    "train": {
        "epochs": 3, "batch_size": 8, "lr": 1e-3, "ema": 0.9, "layer_decay": 0.8, "save_every": 2,
        "log_every": 1,
    },
    "run": {"accelerator": "cpu", "workers": 0},
}  # fmt: skip


def write_images(root: Path, size: tuple[int, int] = (16, 16), train: int = 20, val: int = 5) -> Path:
    """Two classes told apart by their colour, with noise; ``size`` (h, w)."""
    noise = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(("cold", "warm")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = noise.integers(0, 200, (*size, 3), dtype=np.uint8)
                pixels[..., 2 * (1 - label)] = 255
                Image.fromarray(pixels).save(folder / f"{k}.png")
    return root


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("photos"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def tiny(photos):
    """``tiny("train.lr=1", ...)``: the small recipe with words on top."""
    from vispe import recipe
    from vispe.train.spec import ClassifyRecipe

    def make(*words: str, root: Path | None = None):
        return recipe.of({**TINY, "data": {"root": str(root or photos)}}, ClassifyRecipe, words)

    return make


@pytest.fixture(scope="session")
def snapshots(tmp_path_factory):
    """Six photographs and a broken one."""
    root = tmp_path_factory.mktemp("snapshots")
    draw = np.random.default_rng(0)
    for k in range(6):
        coarse = draw.integers(0, 255, (15, 20, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((200, 150), Image.Resampling.BICUBIC).save(root / f"{k}.png")
    (root / "broken.png").write_text("junk")
    return root


@pytest.fixture(scope="session")
def found(snapshots, tmp_path_factory):
    """Where the features of the photographs' views lie, both parts, the names that can be used, what was left out."""
    pytest.importorskip("cv2", reason="SIFT is OpenCV's")
    path = tmp_path_factory.mktemp("features") / "features.h5"
    train, val = photographs(PhotoSpec(roots=(str(snapshots),), val_part=0.3))
    names, skipped = view_features(path, [*train, *val], SMALL, SIFT, 0, "cpu", False)
    return path, train, val, names, skipped
