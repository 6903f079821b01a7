"""The bar changes nothing but the screen; threads that work ahead keep the order, the bounds and the errors."""

import logging
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vispe.progress import ahead, quiet, track


def test_everything_comes_through_and_a_pipe_sees_nothing(capsys):
    assert list(track(range(5), "counting", "things")) == list(range(5))
    assert list(track(iter("ab"), "spelling", "letters", total=2)) == ["a", "b"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_count_and_rate(monkeypatch):
    import io

    import rich.console

    class Screen(io.StringIO):
        def isatty(self):
            return True

    screen, real = Screen(), rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **_: real(file=screen, force_terminal=True, width=100, color_system=None)
    )
    for _ in track(range(3), "matching", "pairs"):
        time.sleep(0.15)
    assert "3/3 pairs" in screen.getvalue()
    assert "/s" in screen.getvalue()
    seen = len(screen.getvalue())
    assert list(track(range(3), "matching", "pairs", shown=False)) == [0, 1, 2]
    assert len(screen.getvalue()) == seen


@given(st.lists(st.integers(), max_size=30), st.integers(0, 4))
def test_results_come_in_order(items, workers):
    assert list(ahead(lambda x: x * 2, items, workers)) == [x * 2 for x in items]


def test_it_is_never_far_ahead():
    begun = []
    results = ahead(lambda x: begun.append(x) or x, range(100), 2)
    for got in range(10):
        assert next(results) == got
        time.sleep(0.01)
        assert len(begun) <= got + 1 + 4
    results.close()


def test_an_error_comes_where_its_result_would():
    def half(x):
        if x == 2:
            raise ValueError("two")
        return x

    results = ahead(half, range(5), 3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)


def test_several_threads_work():
    barrier = threading.Barrier(2, timeout=20)
    assert list(ahead(lambda x: barrier.wait() >= 0, range(2), 2)) == [True, True]


def test_only_errors_are_said_while_it_is_quiet(caplog):
    log = logging.getLogger("a.library")
    with caplog.at_level(logging.INFO, "a"), quiet("a"):
        log.warning("retrying")
        log.error("broken")
    log.warning("after")
    assert [record.message for record in caplog.records] == ["broken", "after"]
