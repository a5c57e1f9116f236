"""How objects show themselves in a REPL and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from support.names import named

import synk

Fork = Callable[..., Any]


class _Table(HTMLParser):
    """Collects the cells of a table, and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self._text = ""
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._open.append(tag)
        self._text = ""
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in ("td", "th"):
            self.rows[-1].append(self._text)


def cells(shown: Any) -> dict[str, str]:
    return {row[0]: row[1] for row in _Table(shown._repr_html_()).rows}


def test_objects_show_what_they_are(reused: Fork) -> None:
    rt = reused(2)
    data = rt.data(np.zeros((6, 3), np.float32), name="x")
    assert cells(data)["shape"] == "(6, 3)" and cells(data)["dtype"] == "float32"
    shard = rt.shared(np.arange(5.0), sharded=True, name="rows")
    assert cells(shard)["kind"] == "sharded, [3, 2] rows on the ranks"
    assert cells(rt.shared(np.arange(5.0)))["kind"] == "replicated"
    total = rt.function(named("total", lambda x, w: x.sum() * w), bcast_inputs="w", outputs="sum")
    shown = {"divided by rows": "x", "whole to every rank": "w", "outputs": "sum"}
    assert cells(total) == shown and repr(total) == "<synk.Function 'total' outputs='sum'>"
    seen = rt.resident({}, name="seen")
    step = rt.function(lambda x: {"a": x.sum()}, outputs={"a": "avg"}, framework="torch", updates=[seen])
    assert cells(step) == {"divided by rows": "x", "outputs": "{'a': 'avg'}", "framework": "torch", "updates": "seen"}
    call = rt.function(lambda x: x.sum(), outputs="sum").submit(np.ones(4))
    assert cells(call)["ranks"] == "0, 1" and cells(call)["function"] == "<lambda>"
    call.result()
    assert cells(call)["state"] == "done"
    assert cells(rt)["workers"] == "2 x numpy" and cells(rt)["state"] == "open, idle"


def test_what_is_closed_shows_itself(runtime: Fork) -> None:
    rt = runtime(0)
    data = rt.data(np.zeros(2))
    rt.close()
    assert cells(rt)["state"] == "closed" and cells(data)["shape"] == "(2,)"


def test_tables_of_text_show_as_they_are(reused: Fork, capsys: pytest.CaptureFixture[str]) -> None:
    rt = reused(2)
    mean = rt.function(named("a < b & c", lambda x: x.mean()))
    mean(np.ones(4))
    profile = rt.profile
    assert repr(profile) == str(profile) and "a < b & c" in repr(profile)
    heads, *rows = _Table(profile._repr_html_()).rows
    assert heads[:2] == ["function", "calls"] and any(row[:2] == ["a < b & c", "1"] for row in rows)
    report = mean.verify(np.arange(4.0))
    assert repr(report).splitlines()[0] in html.unescape(report._repr_html_())
    info = synk.info()
    assert repr(info) == info and info.startswith("synk ") and "\n" in info
    assert info._repr_html_().startswith("<pre>synk ")
    assert repr(rt.info()) == rt.info()


def test_results_say_what_they_are(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def square(n: Any) -> Any:
        return n**2

    mapped = rt.map(square, range(3))
    assert repr(mapped) == "<synk.map of 'square', 0 results so far>"
    assert next(mapped) == 0 and repr(mapped) == "<synk.map of 'square', 1 result so far>"
    assert list(mapped) == [1, 4] and repr(mapped) == "<synk.map of 'square', 3 results so far>"
    assert next(mapped, "no more") == "no more"
    failing = rt.map(lambda n: 1 // n, [1, 0, 1])
    with pytest.raises(ZeroDivisionError):
        list(failing)
    assert repr(failing) == "<synk.map of '<lambda>', 1 result so far>" and not list(failing)
    streamed = rt.function(square, outputs="gather").stream([np.arange(2)] * 2)
    assert iter(streamed) is streamed
    next(streamed)
    assert repr(streamed) == "<synk.Function.stream of 'square', 1 result so far>"
    streamed.close()
    assert not list(streamed)
    with synk.Executor(runtime=rt) as executor:
        assert repr(executor.map(square, range(3))) == "<synk.Executor.map of 'square', 0 results so far>"


def test_threads_of_torch_in_the_program_are_told(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    try:
        for num_threads, count in ((3, 1), (1, 0)):
            torch.set_num_threads(num_threads)
            assert shared_runtimes[2].info().count(f"torch computes with {num_threads} threads in the program") == count
    finally:
        torch.set_num_threads(before)
