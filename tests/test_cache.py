"""Cached results: whole or absent, resumable after anything, true to names and contents, filled by many at once."""

import json
import multiprocessing
import os
import random
import signal
import string
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.cache import CacheReader, CacheWriter, Team, as_key, as_name, difference

NAMES = ["a b/c.png", "a b-c.png", "a%20b.png", "é/ü.png", "..", ".", "x" * 300, "/abs/p.png", "line\nbreak", "a\0\0b"]


def put(writer, name, n=3, sha256="s", **attributes):
    arrays = {"numbers": np.arange(n, dtype=np.float32), "none": np.zeros((0, 2), np.int32)}
    writer.add(name, arrays, attributes, sha256)


def count(path, name):
    with CacheReader(path) as file:
        return len(file.read(name).arrays["numbers"])


def names(path):
    with CacheReader(path) as file:
        return file.names()


def interrupt(path, made, error=KeyboardInterrupt, **how):
    with pytest.raises(error), CacheWriter(path, made, **how) as writer:  # noqa: PT012
        put(writer, "a")
        raise error


# --- names and contents -----------------------------------------------------------------------------------------------


def test_what_is_written_is_read_whatever_the_name(tmp_path):
    path = tmp_path / "f é.h5"
    written = [*NAMES, os.fsdecode(b"\xff.png")]
    with CacheWriter(path, {"k": 1}) as writer:
        for i, name in enumerate(written):
            put(writer, name, i, size=(3, i), ratio=0.5)
            assert writer.has(name, "s")
            assert not writer.has(name, "t")
        assert len(writer) == len(written)
        assert not path.exists()
    assert os.listdir(tmp_path) == ["f é.h5"]
    with CacheReader(path) as file:
        assert file.made == {"k": 1}
        assert file.names() == written
        assert len(file) == len(written)
        for i, name in enumerate(written):
            entry = file.read(name)
            assert entry.arrays["numbers"].dtype == np.float32
            assert entry.arrays["numbers"].tolist() == list(range(i))
            assert entry.arrays["none"].shape == (0, 2)
            assert entry.attributes["size"].tolist() == [3, i]
            assert set(entry.attributes) == {"size", "ratio"}
            assert file.sha256(name) == "s"
            assert list(file.read(name, ["none", "absent"]).arrays) == ["none"]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_names_become_keys_and_back(name):
    assert as_name(as_key(name)) == name
    assert "/" not in as_key(name)


@given(st.sets(st.text(min_size=1, alphabet=string.ascii_letters + "/-% é\0"), max_size=20))
def test_different_names_are_different_keys(found):
    assert len({as_key(name) for name in found}) == len(found)


def test_a_name_that_is_not_there_is_a_key_error(tmp_path):
    with CacheWriter(tmp_path / "f.h5", {}) as writer:
        put(writer, "a")
    with CacheReader(tmp_path / "f.h5") as file, pytest.raises(KeyError, match=r"f\.h5' has no entry 'b'"):
        file.read("b")


def test_an_entry_added_again_is_replaced(tmp_path):
    for batch in (1, 10):
        path = tmp_path / f"{batch}.h5"
        with CacheWriter(path, {}, batch=batch, seconds=1e9 if batch > 1 else 0) as writer:
            put(writer, "a", 3, "old")
            put(writer, "a", 5, "new")
            assert len(writer) == 1
        assert count(path, "a") == 5


def test_entries_come_in_the_order_asked_for(tmp_path):
    wanted = [f"p{i}" for i in range(40)]
    shuffled = random.Random(0).sample(wanted, len(wanted))
    with CacheWriter(tmp_path / "f.h5", {}, names=wanted, batch=7, seconds=1e9) as writer:
        for name in shuffled:
            put(writer, name)
    assert names(tmp_path / "f.h5") == wanted


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_an_interruption_keeps_what_was_done(tmp_path):
    path = tmp_path / "f.h5"
    interrupt(path, {"k": 1})
    assert os.listdir(tmp_path) == ["f.h5.part"]
    with CacheWriter(path, {"k": 1}) as writer:
        assert writer.has("a", "s")
        put(writer, "b")
    assert os.listdir(tmp_path) == ["f.h5"]
    assert names(path) == ["a", "b"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_kept_error_keeps_even_what_waited(tmp_path, error):
    path = tmp_path / "f.h5"
    interrupt(path, {}, error, keep=True, batch=100, seconds=1e9)
    with CacheWriter(path, {}) as writer:
        assert writer.has("a", "s")


def test_an_error_leaves_nothing_behind(tmp_path):
    interrupt(tmp_path / "f.h5", {"k": 1}, error=ValueError)
    assert os.listdir(tmp_path) == []


def test_other_options_start_over(tmp_path):
    path = tmp_path / "f.h5"
    interrupt(path, {"k": 1})
    with CacheWriter(path, {"k": 2}) as writer:
        assert not writer.has("a", "s")
    assert names(path) == []
    assert os.listdir(tmp_path) == ["f.h5"]


@pytest.mark.parametrize("left", ["temporary", "cut", "unfinished"])
def test_half_an_entry_is_no_entry(tmp_path, left):
    """What kills and full disks leave: never taken for the real thing, made again, and gone in the end."""
    path, part = tmp_path / "f.h5", tmp_path / "f.h5.part"
    interrupt(path, {})
    whole = next(part.glob("0*.h5")).read_bytes()
    if left == "temporary":
        (part / ".vispe-0123.h5").write_bytes(whole)
    elif left == "cut":
        (part / "9.h5").write_bytes(whole[: len(whole) // 2])
    else:  # the fingerprint is the last thing that is written
        with h5py.File(part / "9.h5", "w") as file:
            file.create_group("b")["numbers"] = 1
    with CacheWriter(path, {}) as writer:
        assert writer.has("a", "s")
        assert not writer.has("b", "s")
        put(writer, "b", 7)
    assert names(path) == ["a", "b"]
    assert count(path, "b") == 7
    assert os.listdir(tmp_path) == ["f.h5"]


@pytest.mark.parametrize("left", ["empty folder", "file"])
def test_a_part_from_elsewhere_is_replaced(tmp_path, left):
    part = tmp_path / "f.h5.part"
    part.mkdir() if left == "empty folder" else part.write_bytes(b"x")
    with CacheWriter(tmp_path / "f.h5", {}) as writer:
        put(writer, "a")
    assert os.listdir(tmp_path) == ["f.h5"]


def test_what_waits_is_bounded(tmp_path):
    def waits(writer):
        return {name for name in "abcde" if as_key(name) in writer.waiting}

    with CacheWriter(tmp_path / "f.h5", {}, batch=3, seconds=1e9) as writer:
        put(writer, "a"), put(writer, "b")
        assert waits(writer) == {"a", "b"}
        put(writer, "c")
        assert waits(writer) == set()
        put(writer, "d")
        writer.seconds = 0.0
        put(writer, "e")
        assert waits(writer) == set()
    assert names(tmp_path / "f.h5") == list("abcde")


SLOW = """
import sys, time, numpy as np
from vispe.cache import CacheWriter
with CacheWriter(sys.argv[1], {"k": 1}, batch=8, seconds=1e9, keep=True) as writer:
    for i in range(100_000):
        name = str(i)
        if not writer.has(name, "s"):
            writer.add(name, {"n": np.full(5, i)}, {"i": i}, "s")
        print(i, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_a_random_moment_loses_less_than_a_batch(tmp_path, seed):
    path, moment = tmp_path / "f.h5", random.Random(seed).uniform(0.05, 0.4)
    running = subprocess.Popen([sys.executable, "-c", SLOW, str(path)], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    running.stdout.readline()
    time.sleep(moment)
    running.send_signal(signal.SIGKILL)
    reached = 1 + len(running.stdout.read().split())
    running.wait()
    with CacheWriter(path, {"k": 1}, names=[str(i) for i in range(reached)]) as writer:
        kept = [i for i in range(reached) if writer.has(str(i), "s")]
        assert kept == list(range(len(kept)))
        assert reached - len(kept) <= 8 + 1  # one may have been added and not yet told
        for i in range(len(kept), reached):
            writer.add(str(i), {"n": np.full(5, i)}, {"i": i}, "s")
    with CacheReader(path) as file:
        assert all(file.read(str(i)).arrays["n"].tolist() == [i] * 5 for i in range(reached))


# --- files that are there ---------------------------------------------------------------------------------------------


def test_a_finished_file_is_extended(tmp_path):
    path = tmp_path / "f.h5"
    with CacheWriter(path, {"k": 1}) as writer:
        put(writer, "a", 3), put(writer, "b", 4)
    with CacheWriter(path, {"k": 1}) as writer:
        assert writer.has("a", "s")
        put(writer, "b", 5, "changed"), put(writer, "c", 6)
        assert count(path, "b") == 4, "the old file stays until the new one is whole"
    assert {name: count(path, name) for name in names(path)} == {"a": 3, "b": 5, "c": 6}


def test_a_file_with_nothing_new_is_left_alone(tmp_path):
    path = tmp_path / "f.h5"
    with CacheWriter(path, {}, names=["a", "b"]) as writer:
        put(writer, "a"), put(writer, "b")
    before = path.stat()
    with CacheWriter(path, {}, names=["a", "b"]) as writer:
        assert writer.has("a", "s")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_shorter_list_keeps_the_rest_unless_it_is_exact(tmp_path):
    path = tmp_path / "f.h5"
    with CacheWriter(path, {}) as writer:
        put(writer, "a"), put(writer, "b")
    with CacheWriter(path, {}, names=["b"]):
        pass
    assert names(path) == ["b", "a"]
    with CacheWriter(path, {}, names=["b"], exact=True):
        pass
    assert names(path) == ["b"]


def test_a_file_made_otherwise_is_never_replaced(tmp_path):
    path = tmp_path / "f.h5"
    with CacheWriter(path, {"k": 1, "n": 2}):
        pass
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"it was made with k 1, not 3, m None, not 4; give --out another name"):
        CacheWriter(path, {"k": 3, "n": 2, "m": 4})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"some text", b"\x89HDF\r\n\x1a\nbroken"])
def test_a_file_that_is_not_ours_is_never_replaced(tmp_path, content):
    path = tmp_path / "thesis.doc"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged, or not a file that vispe made"):
        CacheWriter(path, {})
    assert path.read_bytes() == content
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["data"] = 1
    with pytest.raises(ValueError, match="damaged, or not a file that vispe made"):
        CacheWriter(tmp_path / "other.h5", {})


def test_what_is_missing_at_the_end_is_said(tmp_path):
    path = tmp_path / "f.h5"
    with (
        pytest.raises(ValueError, match=r"f\.h5' is not complete: 2 of 3 entries are missing, the first is 'b'"),
        CacheWriter(path, {}, names=["a", "b", "c"], keep=True) as writer,
    ):
        put(writer, "a")
    assert not path.exists()
    with CacheWriter(path, {}) as writer:
        assert writer.has("a", "s"), "what was done is kept"


def test_an_error_before_anything_was_done_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), CacheWriter(tmp_path / "f.h5", {}, keep=True):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_named_in_a_few_words():
    one = {"weights": "a" * 64, "short": 640, "spec.width": 9, "categories": [[1, "x", True]] * 80}
    assert difference(one, {**one, "short": 512}) == "short 640, not 512"
    assert difference(one, {**one, "categories": []}) == "other categories"
    assert difference(one, {**one, "weights": "b" * 64, "spec.width": 8, "categories": []}) == "other weights"
    assert difference({}, dict.fromkeys("abcde", 1)).endswith("c None, not 1 and 2 more")


def test_damage_is_noticed_when_it_is_read(tmp_path):
    path = tmp_path / "f.h5"
    with CacheWriter(path, {}) as writer:
        writer.add("a", {"numbers": np.arange(1000, dtype=np.float32)}, {}, "s")
    data = bytearray(path.read_bytes())
    at = data.find(np.arange(500, 510, dtype=np.float32).tobytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    with CacheReader(path) as file, pytest.raises(ValueError, match=r"f\.h5' is damaged"):
        file.read("a")


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError):
        CacheReader(tmp_path / "f.h5")


def test_places_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(ValueError, match="it is a folder"):
        CacheWriter(tmp_path, {})
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        CacheWriter(tmp_path / "nowhere" / "f.h5", {})


# --- many processes ---------------------------------------------------------------------------------------------------


def test_two_runs_at_once_are_refused(tmp_path):
    path = tmp_path / "f.h5"
    with CacheWriter(path, {"a": 1}) as first:
        put(first, "x.png")
        with pytest.raises(ValueError, match="another run is writing"), CacheWriter(path, {"a": 1}):
            pass
    assert names(path) == ["x.png"]


@given(st.integers(0, 50), st.integers(1, 8))
def test_shares_are_everything_once(n, size):
    shares = [Team(rank=rank, size=size).share(range(n)) for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def _member(path, rank, barrier):
    team = Team(rank=rank, size=3, wait=barrier.wait)
    wanted = [str(i) for i in range(100)]
    with CacheWriter(path, {}, names=wanted, batch=5, seconds=1e9, team=team) as writer:
        for name in team.share(wanted):
            put(writer, name, int(name))


def test_a_team_fills_one_file(tmp_path):
    path, spawn = tmp_path / "f.h5", multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(3)
    team = [spawn.Process(target=_member, args=(path, rank, barrier)) for rank in range(3)]
    for member in team:
        member.start()
    for member in team:
        member.join()
    assert [member.exitcode for member in team] == [0, 0, 0]
    assert names(path) == [str(i) for i in range(100)]
    assert [count(path, str(i)) for i in range(100)] == list(range(100))
    assert os.listdir(tmp_path) == ["f.h5"]


def _read(path, out):
    with CacheReader(path) as file:
        out.put([len(file.read(name).arrays["numbers"]) for name in file.names()])


def test_many_read_at_once(tmp_path):
    path, spawn = tmp_path / "f.h5", multiprocessing.get_context("spawn")
    with CacheWriter(path, {}) as writer:
        for i in range(20):
            put(writer, str(i), i)
    out = spawn.Queue()
    readers = [spawn.Process(target=_read, args=(path, out)) for _ in range(3)]
    for reader in readers:
        reader.start()
    assert [out.get(timeout=60) for _ in readers] == [list(range(20))] * 3
    for reader in readers:
        reader.join()


def test_how_it_was_made_is_readable_json(tmp_path):
    with CacheWriter(tmp_path / "f.h5", {"resize": (3, 4), "n": None}):
        pass
    with h5py.File(tmp_path / "f.h5") as file:
        assert json.loads(file.attrs["made"]) == {"resize": [3, 4], "n": None}


@pytest.mark.parametrize("seed", range(40))
def test_any_damage_is_a_sentence_or_harmless(tmp_path, seed):
    """A bit turned anywhere in the file: what is read is right, or a ValueError says so, or the entry is not there."""
    path = tmp_path / "f.h5"
    with CacheWriter(path, {"k": 1}) as writer:
        for i in range(6):
            put(writer, f"name {i}", 50 + i, size=(3, i))
    data = bytearray(path.read_bytes())
    turned = random.Random(seed).randrange(len(data) * 8)
    data[turned // 8] ^= 1 << turned % 8
    path.write_bytes(data)
    try:
        with CacheReader(path) as file:
            file.hashes()
            for name in file.names():
                entry = file.read(name)
                if name.startswith("name ") and name[5:] in "012345":
                    assert entry.arrays["numbers"].tolist() == list(range(50 + int(name[5:])))
    except (ValueError, KeyError) as error:
        said = str(error)
        assert "f.h5" in said
