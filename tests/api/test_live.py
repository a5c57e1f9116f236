"""``synk.profiler.live()``: the table of the profile, renewed while the program runs."""

from __future__ import annotations

import io
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
from synk._wire.cell import cell
from synk.profiler import live

HEAD = "function     calls"


@pytest.fixture
def rt(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runtime with two workers, which is the current one, and a profile that is new."""
    runtime = shared_runtimes[2]
    monkeypatch.setattr(cell, "runtime", runtime)
    monkeypatch.setattr(cell, "session", runtime._session)
    runtime.profile.reset()
    return runtime


class Written:
    """What was written to the standard error output so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    def __call__(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Written:
    """What is written where rich is not installed."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    return Written(capsys)


def run(rt: Any, count: int) -> None:
    f = rt.function(lambda x: x.sum(), outputs="sum", name="watched")
    for k in range(count):
        assert f(np.full(8, float(k))) == 8.0 * k


def test_it_is_text_where_there_is_nothing_better(rt: Any, plain: Written) -> None:
    threads = threading.active_count()
    with live(every=0) as profile:
        assert profile is rt.profile
        run(rt, 5)
        assert threading.active_count() == threads
        assert plain().count(HEAD) == 5
    tables = plain().strip().split("\n\n")
    assert tables[-1].splitlines()[0] == repr(rt.profile).splitlines()[0] and len(tables) == 6
    assert [int(line.split()[1]) for line in plain().splitlines() if line.startswith("watched")] == [
        1, 2, 3, 4, 5, 5
    ]  # fmt: skip
    assert not rt._session.watchers
    run(rt, 1)
    assert plain().count(HEAD) == 6


def test_it_is_not_renewed_too_often_but_at_the_end(rt: Any, plain: Written) -> None:
    with live(every=1000):
        run(rt, 5)
        assert plain() == ""
    assert plain().count(HEAD) == 1


def test_maps_renew_it(rt: Any, plain: Written) -> None:
    with live(every=0):
        assert list(rt.map(abs, range(-10, 0))) == list(range(10, 0, -1))
        assert plain().count("abs") >= 1


def test_a_notebook_shows_it_in_one_place(rt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = types.SimpleNamespace(update=lambda value: shown.append(value._repr_html_()))
    ipython = pytest.importorskip("IPython")
    monkeypatch.setattr(ipython, "get_ipython", lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setattr("IPython.display.display", lambda value, display_id: handle)
    with live(every=0):
        run(rt, 3)
    assert len(shown) == 4 and shown[-1] == rt.profile._repr_html_()
    assert all("<td style='text-align:left'>watched</td>" in each for each in shown)


def test_a_terminal_shows_it_by_rich(rt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    console = pytest.importorskip("rich.console")
    stream = io.StringIO()
    made = console.Console(file=stream, force_terminal=True, width=200)
    monkeypatch.setattr(console, "Console", lambda stderr: made)
    threads = threading.active_count()
    with live(every=0):
        run(rt, 3)
        assert threading.active_count() == threads
    assert stream.getvalue().count(HEAD) >= 4 and "\x1b[" in stream.getvalue()
    assert any(line.split()[:2] == ["watched", "3"] for line in stream.getvalue().splitlines())


def test_a_stream_that_is_closed_costs_no_call_its_result(
    rt: Any, plain: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(ValueError, match="closed file"), live(every=0):
        run(rt, 3)  # checks each result
    assert rt.profile.records["watched"].num_calls == 3 and not rt._session.followers


def test_the_body_may_raise_or_close_the_runtime(
    runtime: Callable[..., Any], plain: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = runtime(1)
    monkeypatch.setattr(cell, "runtime", rt)
    monkeypatch.setattr(cell, "session", rt._session)
    with pytest.raises(KeyError), live(every=1000):
        run(rt, 2)
        raise KeyError
    with live(every=1000):
        rt.close()
    assert plain().count(HEAD) == 2


def test_what_it_cannot_do_is_refused(rt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got every=-1, expected seconds"):
        live(every=-1)
    monkeypatch.setattr(cell, "session", None)  # if there was one before, it was closed
    with pytest.raises((synk.errors.NotForkedError, synk.errors.ClosedError)), live():
        pass


def test_the_screen_is_closed_after_an_error(rt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise rich would go on taking over the standard output."""
    closed: list[bool] = []

    def show() -> None:
        raise OSError("the terminal is gone")

    screen = types.SimpleNamespace(show=show, close=lambda: closed.append(True))
    monkeypatch.setattr("synk._api.screen.screen_for", lambda value: screen)
    for every in (0, 1000):  # in a call, and at the end
        with pytest.raises(OSError, match="the terminal is gone"), live(every=every):
            run(rt, 1)
    assert closed == [True, True] and not rt._session.followers
