"""Feature files: what an extractor found comes back, to the bit, under the image's own name."""

import h5py
import numpy as np
import pytest
import torch

from vispe.cache import CacheWriter
from vispe.features import Features
from vispe.store import add_features, read_features, read_names

NAMES = ["a b/c.png", "a b-c.png", "a%20b.png", "é/ü.png"]


def some(n=3, seed=0, orientations=False):
    generator = torch.Generator().manual_seed(seed)
    extra = torch.rand(n, generator=generator) if orientations else None
    return Features(
        keypoints=torch.rand(n, 2, generator=generator) * 3000, scores=torch.rand(n, generator=generator),
        descriptors=torch.rand(n, 8, generator=generator), size=(30, 40), pixel=1.5, scales=extra, orientations=extra,
    )  # fmt: skip


def same(a, b):
    arrays = ("keypoints", "scores", "descriptors", "scales", "orientations")
    pairs = [(getattr(a, name), getattr(b, name)) for name in arrays]
    return (a.size, a.pixel) == (b.size, b.pixel) and all(
        x is y is None or (x.dtype == y.dtype and torch.equal(x, y)) for x, y in pairs
    )


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "f.h5"
    written = {name: some(i, i, orientations=i % 2 == 1) for i, name in enumerate(NAMES)}
    with CacheWriter(path, {}) as writer:
        for name, features in written.items():
            add_features(writer, name, features, "s", seconds=0.5)
    assert read_names(path) == sorted(written)
    assert all(same(read_features(path, name), features) for name, features in written.items())


def test_coordinates_keep_single_precision_whatever_they_were(tmp_path):
    found = some(4)
    keypoints = torch.tensor([[4095.25, 0.125]] * 4, dtype=torch.float64)
    with CacheWriter(tmp_path / "f.h5", {}) as writer:
        add_features(writer, "a", Features(**{**vars(found), "keypoints": keypoints}), "s")
    assert read_features(tmp_path / "f.h5", "a").keypoints.tolist() == keypoints.tolist()


def test_the_layout_is_the_documented_one(tmp_path):
    with CacheWriter(tmp_path / "f.h5", {"extractor": "x"}) as writer:
        add_features(writer, "dir/a b.png", some(4), "abc")
    with h5py.File(tmp_path / "f.h5") as file:
        assert file.attrs["made"] == '{"extractor": "x"}'
        group = file["dir%2Fa%20b.png"]
        assert {key: (group[key].shape, group[key].dtype) for key in group} == {
            "keypoints": ((4, 2), np.float32), "scores": ((4,), np.float32), "descriptors": ((4, 8), np.float32),
        }  # fmt: skip
        assert group.attrs["size"].tolist() == [30, 40]
        assert group.attrs["pixel"] == 1.5
        assert group.attrs["sha256"] == "abc"


def test_a_name_that_is_not_there_is_a_key_error(tmp_path):
    with CacheWriter(tmp_path / "f.h5", {}) as writer:
        add_features(writer, "a", some(), "s")
    with pytest.raises(KeyError, match=r"f\.h5' has no entry 'b'"):
        read_features(tmp_path / "f.h5", "b")
