"""Work in one process, and what is said of a number that is none; several are tried in test_predict and test_scenes."""

import pytest

from vispe.evaluate.team import started_outside, together


def test_one_process_does_all_of_it():
    seen = []
    assert together(lambda team, device: seen.append((team.rank, team.size, device)), "cpu")
    assert seen == [(0, 1, "cpu")]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="devices and nodes are at least 1, got 2 and 0"):
        together(lambda team, device: None, "cpu", 2, 0)


def test_who_starts_the_processes(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert not started_outside(1)
    assert started_outside(2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert started_outside(1)
