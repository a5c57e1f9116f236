"""A parameter with the name of a call's option never gets a value in silence: it is refused where the function is
built. Where parameters are not given by keyword, nothing could be lost, and plain Python is the oracle.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
from synk._engine.signature import OPTION_NAMES

X = np.arange(6.0)


def function_with(parameters: str) -> Callable[..., Any]:
    return eval(f"lambda {parameters}: 0.0")


def method_with(parameters: str) -> Any:
    cls: Any = type("Owner", (), {"method": function_with(f"self, {parameters}")})
    return cls().method


def callable_with(parameters: str) -> Any:
    return type("Called", (), {"__call__": function_with(f"self, {parameters}")})()


def wrapped_with(parameters: str) -> Any:
    fn = function_with(parameters)
    return functools.wraps(fn)(lambda *args, **named: fn(*args, **named))


MAKERS: dict[str, Callable[[str], Any]] = {
    "a function": function_with,
    "a method": method_with,
    "a callable object": callable_with,
    "a wrapper": wrapped_with,
    "a partial": lambda parameters: functools.partial(function_with(f"{parameters}, more=0"), more=1),
    "a partial of a method": lambda parameters: functools.partial(method_with(f"{parameters}, more=0"), more=1),
}
PARAMETERS = {
    "required": "x, {}",
    "first": "{}, x",
    "with a default": "x, {}=2.0",
    "keyword-only": "x, *, {}",
    "keyword-only with a default": "x, *, {}=2.0",
    "behind any number": "x, *rest, {}=2.0",
}
BUILDERS: dict[str, Callable[[Any], Any]] = {
    "function": lambda fn: synk.function(fn, outputs="sum"),
    "a decorator": lambda fn: synk.function(outputs="sum")(fn),
    "broadcast": lambda fn: synk.function(fn, bcast_inputs="x", per_rank=True),
}


def test_a_parameter_with_the_name_of_an_option_is_refused() -> None:
    for option, build, make, kind in itertools.product(sorted(OPTION_NAMES), BUILDERS, MAKERS, PARAMETERS):
        if "partial" in make and "rest" in PARAMETERS[kind]:
            continue  # Python has no parameter behind it for the partial's own
        fn = MAKERS[make](PARAMETERS[kind].format(option))
        with pytest.raises(ValueError, match=f"got a parameter '{option}'.*Rename it") as raised:
            BUILDERS[build](fn)
        assert "cannot build function" in str(raised.value), (option, build, make, kind)


def test_what_comes_by_position_only_cannot_be_lost(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    scaled = functools.partial(lambda timeout, x: timeout * x.sum(), 2.0)
    assert rt.function(scaled, outputs="sum")(X) == 2 * X.sum()
    plain = eval("lambda x, timeout=2.0, /: timeout * x.sum()")
    f = rt.function(plain, outputs="sum", bcast_inputs="timeout")
    assert (f(X), f(X, 3.0), f(X, timeout=60.0)) == (plain(X), plain(X, 3.0), plain(X))


def test_the_text_shows_a_way_that_works(shared_runtimes: Any) -> None:
    def total(x: Any, timeout: float = 2.0) -> Any:
        return timeout * x.sum()

    with pytest.raises(ValueError, match=r"or fix its value: lambda x: total\(x, timeout=\.\.\.\)"):
        synk.function(total)
    f = shared_runtimes[2].function(lambda x: total(x, timeout=3.0), outputs="sum")
    assert f(X) == total(X, timeout=3.0)


def test_steps_of_replicated_models(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    rep = synk.torch.replicate(torch.nn.Linear(1, 1), runtime=shared_runtimes[2])
    for option, parameters in zip(sorted(OPTION_NAMES), PARAMETERS.values()):
        with pytest.raises(ValueError, match=f"got a parameter '{option}'"):
            rep.function(function_with(f"model, {parameters.format(option)}"), outputs="sum")
    # The objects come by position, whatever their parameters are called.
    assert rep.function(lambda timeout, x: x.sum().item(), outputs="sum")(torch.ones(5, 1)) == 5


def test_items_come_by_position(shared_runtimes: Any) -> None:
    """No argument of ``map`` or ``submit`` could be meant for the option of a call: a map and a task have none."""
    rt = shared_runtimes[2]
    with synk.Executor(runtime=rt) as executor:
        for option in sorted(OPTION_NAMES):
            plain = eval(f"lambda x, {option}=2.0, *, other=1.0: ({option}, x * other)")
            assert list(rt.map(plain, [1, 2], [5, 6])) == [plain(1, 5), plain(2, 6)]
            fixed = functools.partial(plain, **{option: 7})
            assert list(rt.map(fixed, [1, 2])) == [fixed(1), fixed(2)]
            assert executor.submit(plain, 1, **{option: 9, "other": 2}).result() == plain(1, **{option: 9, "other": 2})


def test_a_function_that_gets_such_a_parameter_later(shared_runtimes: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """By a reload of its module: the next call refuses it."""
    import importlib
    import sys

    path = tmp_path / "gets_a_limit.py"
    path.write_text("def total(x):\n    return x.sum()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module: Any = importlib.import_module("gets_a_limit")
    f = shared_runtimes[2].function(module.total, outputs="sum")
    assert f(X) == X.sum()
    path.write_text("def total(x, timeout=2.0):\n    return timeout * x.sum()\n", encoding="utf-8")
    importlib.reload(module)
    with pytest.raises(ValueError, match="got a parameter 'timeout'"):
        f(X)
