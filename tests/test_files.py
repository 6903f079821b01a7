"""A file is whole or absent, whatever happens while it is written."""

import json
import os
import stat
import subprocess
import sys

import pytest

from vispe.files import atomic, check_file, check_writable, write_atomically, write_json


def test_the_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "a b é.txt"
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".txt"
        assert not path.exists()
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "x.json"
    path.write_text("old")

    def writer(temporary):
        temporary.write_text("half")
        raise error

    with pytest.raises(error):
        write_atomically(path, writer)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_block_that_writes_nothing_fails(tmp_path):
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "x"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder.*nowhere"):
        write_atomically(tmp_path / "nowhere" / "x", lambda temporary: temporary.write_text("x"))


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_regular_files_are_replaced(tmp_path, kind):
    path = tmp_path / "x"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        write_json(path, {})
    assert not stat.S_ISREG(path.stat().st_mode)


def test_a_link_is_followed(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    write_json(link, [1])
    assert link.is_symlink()
    assert json.loads(real.read_text()) == [1]


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_json(tmp_path / "x", 1)
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_longest_name_can_be_written(tmp_path):
    path = tmp_path / ("x" * 250 + ".json")
    write_json(path, 1)
    assert path.read_text() == "1\n"


def test_json_is_utf8_and_indented_by_two(tmp_path):
    write_json(tmp_path / "x.json", {"é": ["☃"]})
    assert (tmp_path / "x.json").read_bytes() == '{\n  "é": [\n    "☃"\n  ]\n}\n'.encode()


def test_json_keeps_file_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.jpg")
    write_json(tmp_path / "x.json", [name])
    assert json.loads((tmp_path / "x.json").read_bytes()) == [name]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_what_json_lacks(tmp_path, value):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"a": [value]})
    assert os.listdir(tmp_path) == []


def test_what_is_remembered_is_a_mapping_or_nothing(tmp_path):
    from vispe.files import remembered

    path = tmp_path / "known.json"
    assert remembered(path) == {}
    for text, known in (('{"a": 1}', {"a": 1}), ("[1]", {}), ("{", {}), ("", {})):
        path.write_text(text)
        assert remembered(path) == known


KILLED = """
import os, signal, sys
from vispe.files import atomic
with atomic(sys.argv[1]) as path:
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "x.json")], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".vispe-")
    foreign = [tmp_path / name for name in (".vispe-notes", ".vispe-0123.h5", "x.txt")]
    with atomic(tmp_path / "held") as held:
        held.write_text("")
        foreign.append(tmp_path / held.name.replace(held.name.split("-")[1], "00000000"))  # of another machine
        for path in foreign:
            path.write_text("")
    code = "import sys; from vispe.files import write_json; write_json(sys.argv[1], 1)"
    with atomic(tmp_path / "kept") as kept:  # of a process that lives
        kept.write_text("")
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.json")], check=True)
        assert kept.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "held", "kept", *(path.name for path in foreign)}


def test_mistakes_are_named_before_the_work(tmp_path, monkeypatch):
    check_file(tmp_path / "x")
    check_writable(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []
    (tmp_path / "x").write_text("")
    with pytest.raises(OSError, match="there is no folder"):
        check_file(tmp_path / "a" / "x")
    with pytest.raises(OSError, match=r"cannot write into .*x/a': .*x' is not a folder"):
        check_writable(tmp_path / "x" / "a")

    def refused(self, **knobs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.touch", refused)
    for check in (check_file, check_writable):
        with pytest.raises(PermissionError) as caught:
            check(tmp_path / "y")
        assert str(caught.value) == f"cannot write {str(tmp_path / 'y')!r}: permission denied"
