"""Feature files: whole or absent, resumable after anything, and true to the names and contents of the images."""

import os

import h5py
import numpy as np
import pytest
import torch

from vispe.features import Features
from vispe.store import FeatureWriter, read_features, read_names

NAMES = ["a b/c.png", "a b-c.png", "a%20b.png", "é/ü.png", "..", "x" * 300, "/abs/p.png", "line\nbreak", "a b"]


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


# --- the writer -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_whatever_the_name(tmp_path):
    path = tmp_path / "f é.h5"
    written = {name: some(i, i, orientations=i % 2 == 1) for i, name in enumerate([*NAMES, os.fsdecode(b"\xff.png")])}
    with FeatureWriter(path, {"k": 1}) as writer:
        for name, features in written.items():
            writer.add(name, features, "s")
            assert writer.has(name, "s")
            assert not writer.has(name, "t")
        assert len(writer) == len(written)
        assert not path.exists()
    assert os.listdir(tmp_path) == ["f é.h5"]
    assert read_names(path) == sorted(written)
    assert all(same(read_features(path, name), features) for name, features in written.items())


def test_the_layout_is_the_documented_one(tmp_path):
    with FeatureWriter(tmp_path / "f.h5", {"extractor": "x"}) as writer:
        writer.add("dir/a b.png", some(4), "abc")
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
    with FeatureWriter(tmp_path / "f.h5", {}) as writer:
        writer.add("a", some(), "s")
    with pytest.raises(KeyError, match=r"f\.h5' has no features of 'b'"):
        read_features(tmp_path / "f.h5", "b")


def test_an_image_added_again_is_replaced(tmp_path):
    with FeatureWriter(tmp_path / "f.h5", {}) as writer:
        writer.add("a", some(3), "old")
        writer.add("a", some(5), "new")
        assert len(writer) == 1
    assert len(read_features(tmp_path / "f.h5", "a")) == 5


def interrupt(path, made, error=KeyboardInterrupt):
    with pytest.raises(error), FeatureWriter(path, made) as writer:  # noqa: PT012
        writer.add("a", some(3), "s")
        raise error


def test_an_interruption_keeps_what_was_done(tmp_path):
    path = tmp_path / "f.h5"
    interrupt(path, {"k": 1})
    assert os.listdir(tmp_path) == ["f.h5.part"]
    with FeatureWriter(path, {"k": 1}) as writer:
        assert writer.has("a", "s")
        writer.add("b", some(2), "s")
    assert os.listdir(tmp_path) == ["f.h5"]
    assert read_names(path) == ["a", "b"]


def test_other_options_start_over(tmp_path):
    path = tmp_path / "f.h5"
    interrupt(path, {"k": 1})
    with FeatureWriter(path, {"k": 2}) as writer:
        assert not writer.has("a", "s")
    assert read_names(path) == []
    assert os.listdir(tmp_path) == ["f.h5"]


def test_an_error_leaves_nothing_behind(tmp_path):
    interrupt(tmp_path / "f.h5", {"k": 1}, error=ValueError)
    assert os.listdir(tmp_path) == []


def test_half_an_image_is_no_image(tmp_path):
    """What a kill in the middle of a write leaves: a temporary file that nobody takes for the real one."""
    path = tmp_path / "f.h5"
    interrupt(path, {})
    (tmp_path / "f.h5.part" / ".vispe-0123.h5").write_bytes(b"\x89HDF\r\n")
    with FeatureWriter(path, {}) as writer:
        assert writer.has("a", "s")
    assert os.listdir(tmp_path) == ["f.h5"]


@pytest.mark.parametrize("left", ["empty folder", "file"])
def test_a_part_from_elsewhere_is_replaced(tmp_path, left):
    part = tmp_path / "f.h5.part"
    part.mkdir() if left == "empty folder" else part.write_bytes(b"x")
    with FeatureWriter(tmp_path / "f.h5", {}) as writer:
        writer.add("a", some(), "s")
    assert os.listdir(tmp_path) == ["f.h5"]


def test_a_finished_file_is_extended(tmp_path):
    path = tmp_path / "f.h5"
    with FeatureWriter(path, {"k": 1}) as writer:
        writer.add("a", some(3), "s")
        writer.add("b", some(4), "s")
    with FeatureWriter(path, {"k": 1}) as writer:
        assert writer.has("a", "s")
        writer.add("b", some(5), "changed")
        writer.add("c", some(6), "s")
        assert len(read_features(path, "b")) == 4, "the old file stays until the new one is whole"
    assert {name: len(read_features(path, name)) for name in read_names(path)} == {"a": 3, "b": 5, "c": 6}


def test_a_file_made_otherwise_is_never_replaced(tmp_path):
    path = tmp_path / "f.h5"
    with FeatureWriter(path, {"k": 1, "n": 2}):
        pass
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"it was made with k 1, not 3, m None, not 4; name another file|k 1, not 3"):
        FeatureWriter(path, {"k": 3, "n": 2, "m": 4})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"some text", b"\x89HDF\r\n\x1a\nbroken"])
def test_a_file_that_is_no_feature_file_is_never_replaced(tmp_path, content):
    path = tmp_path / "thesis.doc"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="it is not a file of features"):
        FeatureWriter(path, {})
    assert path.read_bytes() == content
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["data"] = 1
    with pytest.raises(ValueError, match="it is not a file of features"):
        FeatureWriter(tmp_path / "other.h5", {})


def test_places_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(ValueError, match="it is a folder"):
        FeatureWriter(tmp_path, {})
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        FeatureWriter(tmp_path / "nowhere" / "f.h5", {})


def test_two_runs_at_once_are_refused(tmp_path):
    path = tmp_path / "f.h5"
    with FeatureWriter(path, {"a": 1}) as first:
        first.add("x.png", some(), "hash")
        with pytest.raises(ValueError, match="another run is writing"), FeatureWriter(path, {"a": 1}):
            pass
    assert read_names(path) == ["x.png"]
