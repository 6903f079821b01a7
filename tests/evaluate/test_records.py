"""How a pair lies in the file: names that cannot be confused, truth to the bit, fingerprints of everything."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.cache import CacheReader, CacheWriter
from vispe.data.pairs import Pair, PairSet
from vispe.evaluate.records import Record, fingerprint, image_key, pair_key, stored

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/\\"), min_size=1).filter(
    lambda name: name.strip(".") and not name.startswith(".")
)
K = np.array([[500.0, 0, 320], [0, 510, 240], [0, 0, 1]])
POSE = np.eye(4) + np.array([[0, 0, 0, 1.0]] + [[0, 0, 0, 0]] * 3)


def one(pair, **more):
    return PairSet(name="pairs", root="/nowhere", pairs=(pair,), **more)


@given(NAMES, NAMES, st.integers(0, 3), st.integers(0, 3))
def test_names_and_turns_come_back(name0, name1, turns0, turns1):
    pair = Pair(image0=name0, image1=name1, turns0=turns0, turns1=turns1, homography=np.eye(3))
    key = pair_key(pair)
    first, second = key.split("\0\0")
    assert first == image_key(pair.image0, turns0)
    assert second == image_key(pair.image1, turns1)
    assert (first.partition("\0")[0], second.partition("\0")[0]) == (pair.image0, pair.image1)


@pytest.mark.parametrize("kind", ["homography", "pose", "pose at a size"])
def test_a_pair_is_read_as_it_was_stored(tmp_path, kind):
    truth = {"homography": np.eye(3) * [1, 2, 1]} if kind == "homography" else {"K0": K, "K1": K * 1.0, "pose": POSE}
    more = {"pixel": 0.5, "K_size": (480, 640)} if kind.endswith("size") else {}
    pair = Pair(image0="a b/é.png", image1="a-b/é.png", group="v é/1", **truth)
    attributes = stored(pair, one(pair, **more))
    with CacheWriter(tmp_path / "m.h5", {}) as writer:
        arrays = {"matches": np.array([[0, 70000]], np.int32), "scores": np.array([0.5], np.float32)}
        writer.add(pair_key(pair), arrays, {**attributes, "seconds": 1.5}, fingerprint(attributes, "x", "y"))
    with CacheReader(tmp_path / "m.h5") as file:
        found = Record.of(file.names()[0], file.read(file.names()[0]))
        assert found.made_from("x", "y") == file.sha256(file.names()[0]), "the same after it was read"
    assert found.names == ("a b/é.png", "a-b/é.png")
    assert found.group == "v é/1"
    assert found.matches.tolist() == [[0, 70000]]  # beyond 16 bits
    assert found.seconds == 1.5
    assert set(found.truth) == set(attributes)
    assert all(np.array_equal(found.truth[name], attributes[name]) for name in attributes)


def test_everything_a_score_comes_from_is_in_the_fingerprint():
    pair = Pair(image0="a", image1="b", K0=K, K1=K, pose=POSE)
    base = fingerprint(stored(pair, one(pair)), "x", "y")
    turned = Pair(image0="a", image1="b", K0=K, K1=K * [[1, 1, 1], [1, 1, 1.001], [1, 1, 1]], pose=POSE)
    others = [
        fingerprint(stored(pair, one(pair)), "x", "z"),
        fingerprint(stored(pair, one(pair)), "y", "x"),
        fingerprint(stored(pair, one(pair, pixel=0.5)), "x", "y"),
        fingerprint(stored(pair, one(pair, K_size=(480, 640))), "x", "y"),
        fingerprint(stored(turned, one(turned)), "x", "y"),
    ]
    assert len({base, *others}) == 6
