"""How objects show themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.names import named

import synk

Fork = Callable[..., Any]


def test_tables_of_text_show_as_they_are(reused: Fork) -> None:
    rt = reused(2)
    mean = rt.function(named("a < b & c", lambda x: x.mean()))
    mean(np.ones(4))
    profile = rt.profile
    assert repr(profile) == str(profile) and "a < b & c" in repr(profile)
    info = synk.info()
    assert repr(info) == info and info.startswith("synk ") and "\n" in info
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
