"""Many images into one feature file: each once, nothing twice, nothing lost when a run is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.data.images import ImageError
from vispe.extract import extract_all
from vispe.features import Extractor, Features
from vispe.store import read_features, read_names


def same(a: Features, b: Features) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("keypoints", "scores", "descriptors", "scales")
    )


def paint(path, seed=0):
    path.parent.mkdir(exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    Image.fromarray(np.kron(noise, np.ones((8, 8, 1), np.uint8))).save(path)
    return path


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Four pictures with awkward names in the current folder, and a list of those an extractor has looked at."""
    monkeypatch.chdir(tmp_path)
    names = ["a/b.png", "a-b.png", "sub dir/é.png", "c.png"]
    for i, name in enumerate(names):
        paint(Path(name), i)
    return names


@pytest.fixture
def looks(monkeypatch):
    seen = []
    real = Extractor.__call__

    def call(self, image, name="image"):
        seen.append(name)
        return real(self, image, name)

    monkeypatch.setattr(Extractor, "__call__", call)
    return seen


def test_every_image_is_there_once(pictures, looks):
    assert extract_all([*pictures, *pictures], "f.h5", "sift", max_keypoints=9) == (4, 0)
    assert looks == pictures
    assert read_names("f.h5") == sorted(pictures)
    found = read_features("f.h5", "sub dir/é.png")
    assert found.size == (64, 80)
    assert 0 < len(found) <= 9
    assert found.scales is not None


def test_what_is_done_is_not_done_again(pictures, looks):
    for _ in range(2):
        assert extract_all(pictures[:3], "f.h5", "sift", max_keypoints=9) == (3, 0)
    assert looks == pictures[:3]
    assert extract_all(pictures[2:], "f.h5", "sift", max_keypoints=9) == (4, 0)
    assert looks == pictures


def test_a_changed_image_is_done_again(pictures, looks):
    extract_all(pictures, "f.h5", "sift", max_keypoints=9)
    before = read_features("f.h5", "a-b.png")
    paint(Path("a-b.png"), 99)
    extract_all(pictures, "f.h5", "sift", max_keypoints=9)
    assert looks == [*pictures, "a-b.png"]
    assert not same(read_features("f.h5", "a-b.png"), before)


@pytest.mark.parametrize("other", [{"max_keypoints": 8}, {"resize": 32}, {"side": "short"}, {"edge_threshold": 9.0}])
def test_other_options_do_not_mix(pictures, other):
    extract_all(pictures, "f.h5", "sift", **{"max_keypoints": 9, "resize": 64})
    with pytest.raises(ValueError, match=f"will not replace 'f.h5': it was made with .*{next(iter(other))}"):
        extract_all(pictures, "f.h5", "sift", **{"max_keypoints": 9, "resize": 64, **other})


def test_other_weights_do_not_mix(pictures):
    import vispe

    state = vispe.build("superpoint").state_dict()
    torch.save(state, "one.pth")
    torch.save({key: value * 0.9 for key, value in state.items()}, "two.pth")
    knobs = {"max_keypoints": 5, "detection_threshold": 0.0}
    assert extract_all(pictures, "f.h5", "superpoint", extractor_weights="one.pth", **knobs) == (4, 0)
    os.rename("one.pth", "same.pth")
    assert extract_all(pictures, "f.h5", "superpoint", extractor_weights="same.pth", **knobs) == (4, 0)
    with pytest.raises(ValueError, match="it was made with other weights"):
        extract_all(pictures, "f.h5", "superpoint", extractor_weights="two.pth", **knobs)


@pytest.mark.parametrize("bad", ["missing.png", "a", "bad.png"])
def test_a_bad_image_stops_all_or_is_left_out(pictures, tmp_path, bad, capsys):
    Path("bad.png").write_bytes(b"not an image")
    before = sorted(os.listdir())
    with pytest.raises(ImageError, match=bad):
        extract_all([*pictures, bad], "f.h5", "sift")
    assert sorted(os.listdir()) == before
    assert extract_all([bad, *pictures, bad], "f.h5", "sift", skip_bad=True) == (4, 1)
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(ImageError, match="none of the images could be read"):
        extract_all([bad], "g.h5", "sift", skip_bad=True)
    assert not Path("g.h5").exists()


def test_a_killed_run_goes_on_where_it_was(pictures, looks):
    """SIGKILL in the middle of the third image: two are kept, and only the others are looked at again."""
    code = """
import os, signal, sys
from vispe import extract, features
real, count = features.Extractor.__call__, 0
def call(self, *args):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *args)
features.Extractor.__call__ = call
extract.extract_all(sys.argv[1:], "f.h5", "sift", max_keypoints=9)
"""
    killed = subprocess.run([sys.executable, "-c", code, *pictures], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not Path("f.h5").exists()
    assert extract_all(pictures, "f.h5", "sift", max_keypoints=9) == (4, 0)
    assert looks == pictures[2:]
    assert read_names("f.h5") == sorted(pictures)
    assert not Path("f.h5.part").exists()


def test_the_same_features_as_in_memory(pictures):
    from vispe.data.images import read_image
    from vispe.features import extractor

    extract_all(pictures, "f.h5", "sift", max_keypoints=9)
    assert same(read_features("f.h5", "c.png"), extractor("sift", max_keypoints=9)(read_image("c.png")))
