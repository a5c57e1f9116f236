"""What is printed of an error is short, and shows the user's own lines."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import script

import synk
from synk._pure.tracebacks import frames_of, outline
from synk.errors import CallTimeout, RemoteError

Fork = Callable[..., Any]


def printed(call: Callable[[], Any]) -> list[str]:
    """Return the lines that a program would print which ends with the error of ``call``."""
    try:
        call()
    except Exception as error:
        return "".join(traceback.format_exception(error)).splitlines()
    raise AssertionError("it raises")


def test_a_name_error_in_a_script_takes_twelve_lines() -> None:
    result = script(
        """
        synk.fork(2, backend="numpy")

        @synk.function
        def loss(x):
            y = 2 * x
            return no_such_name(y)

        loss(np.ones(4))
        """
    ).check(returncode=1, stderr=None)
    lines = result.stderr.strip().splitlines()
    assert len(lines) <= 12 + sum(set(line) <= set(" ~^") for line in lines), result.stderr
    assert "no_such_name(y)" in result.stderr and "loss(np.ones(4))" in result.stderr
    assert lines[-1] == "NameError: name 'no_such_name' is not defined"
    assert lines[0] == "synk.errors.RemoteError: on rank 0 of 2 (cpu:0) in 'loss', and likewise on 1 more:"


def fails(x: Any) -> float:
    raise KeyError("mine")


@pytest.mark.parametrize("way", ("call", "serial", "submit"))
def test_errors_of_a_function_show_no_line_of_synk_but_the_call(reused: Fork, way: str) -> None:
    function = reused(2).function(fails)
    calls = {
        "call": lambda: function(np.ones(4)),
        "serial": lambda: function.serial(np.ones(4)),
        "submit": lambda: function.submit(np.ones(4)).result(),
    }
    lines = printed(calls[way])
    own = [line for line in lines if f"{synk.__path__[0]}/" in line]
    assert len(own) == 1, lines
    assert any('raise KeyError("mine")' in line for line in lines)


def test_mistakes_and_time_limits_show_no_line_of_synk_but_the_call(reused: Fork) -> None:
    import time

    function = reused(2).function(lambda x: time.sleep(x[0]) or 1.0)
    for call in (
        lambda: function(np.ones(4), 3),
        lambda: function(np.ones(4), batch=-1.5),
        lambda: function(np.full(4, 100.0), timeout=0.2),
    ):
        lines = printed(call)
        assert len([line for line in lines if f"{synk.__path__[0]}/" in line]) == 1, lines


def test_all_lines_are_shown_on_demand(reused: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNK_FULL_TRACEBACK", "1")
    function = reused(2).function(fails)
    lines = printed(lambda: function(np.ones(4)))
    assert len([line for line in lines if f"{synk.__path__[0]}/" in line]) > 3


def test_a_bug_of_our_own_keeps_its_lines() -> None:
    def bug() -> None:
        raise ValueError("not enough values to unpack")

    for error_type, is_kept in ((CallTimeout, False), (AttributeError, True)):

        def raises(error_type: type[Exception] = error_type) -> None:
            raise error_type("x")

        with pytest.raises(error_type) as caught:
            raises()
        outline(caught.value)
        assert (caught.value.__traceback__ is not None) is is_kept
    with pytest.raises(ValueError) as unexpected:
        bug()
    outline(unexpected.value)
    assert unexpected.value.__traceback__ is not None


def test_different_errors_of_ranks_are_all_told(reused: Fork) -> None:
    def fail(x: Any) -> float:
        raise (KeyError if x[0] else OSError)(f"row {int(x[0])}")

    with pytest.raises(OSError, match="row 0") as caught:
        reused(2).function(fail)(np.arange(2.0))
    assert "rank 1 raised KeyError: 'row 1'" in caught.value.__notes__
    assert isinstance(caught.value.__cause__, RemoteError)


def test_lines_of_a_cell_are_found_in_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "/tmp/ipykernel_1/2.py"
    monkeypatch.setitem(linecache.cache, cell, (9, None, ["def f(x):\n", "    return g(x)\n"], cell))
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{cell}", line 2, in f\n'
        '  File "/known.py", line 7, in g\n'
        "    return h[x]\n"
        "           ~^^^\n"
        "IndexError: list index\n  with a line more\n"
    )
    assert frames_of(text).splitlines()[:4] == [
        f'  File "{cell}", line 2, in f',
        "    return g(x)",
        '  File "/known.py", line 7, in g',
        "    return h[x]",
    ]


def test_a_chain_of_errors_is_kept(reused: Fork) -> None:
    def fail(x: Any) -> float:
        try:
            raise LookupError("first")
        except LookupError as error:
            raise KeyError("second") from error

    lines = printed(lambda: reused(1).function(fail)(np.ones(2)))
    assert "LookupError: first" in lines and lines[-1] == "KeyError: 'second'"
