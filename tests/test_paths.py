"""Where the shipped facts and the cache are."""

from pathlib import Path

import pytest

from vispe.paths import cache_dir, shared


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "c"))
    assert cache_dir() == tmp_path / "c"
    monkeypatch.setenv("VISPE_CACHE", "~/c")
    assert cache_dir() == Path.home() / "c"
    monkeypatch.setenv("VISPE_CACHE", "")
    assert cache_dir() == Path.home() / ".cache" / "vispe"
    assert not (tmp_path / "c").exists()


def test_a_room_that_is_not_shipped_is_named():
    assert (shared("models") / "lightglue.toml").is_file()
    with pytest.raises(FileNotFoundError, match="no 'attic' folder"):
        shared("attic")
