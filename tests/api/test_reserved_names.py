"""A parameter with the name of a call's option never gets a value in silence: it is refused where the function is
built. Where parameters are not given by keyword, nothing could be lost, and plain Python is the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
from synk._master.calls.signature import OPTION_NAMES

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


@pytest.mark.parametrize("option", sorted(OPTION_NAMES))
def test_a_parameter_with_the_name_of_an_option_is_refused(option: str) -> None:
    for build in BUILDERS:
        for make in MAKERS:
            for kind, parameters in PARAMETERS.items():
                if "partial" in make and "rest" in parameters:
                    continue  # Python has no parameter behind it for the partial's own
                fn = MAKERS[make](parameters.format(option))
                with pytest.raises(ValueError, match=f"got a parameter '{option}'.*Rename it") as raised:
                    BUILDERS[build](fn)
                assert "cannot build function" in str(raised.value), (build, make, kind)


def test_a_value_that_a_partial_has_fixed_by_position_is_no_parameter(shared_runtimes: Any) -> None:
    scaled = functools.partial(lambda timeout, x: timeout * x.sum(), 2.0)
    assert shared_runtimes[2].function(scaled, outputs="sum")(X) == 2 * X.sum()


def test_by_position_only_nothing_can_be_lost(shared_runtimes: Any) -> None:
    plain = eval("lambda x, timeout=2.0, /: timeout * x.sum()")
    f = shared_runtimes[2].function(plain, outputs="sum", bcast_inputs="timeout")
    assert (f(X), f(X, 3.0), f(X, timeout=60.0)) == (plain(X), plain(X, 3.0), plain(X))


def test_the_text_shows_a_way_that_works(shared_runtimes: Any) -> None:
    def total(x: Any, timeout: float = 2.0) -> Any:
        return timeout * x.sum()

    with pytest.raises(ValueError, match=r"or fix its value: lambda x: total\(x, timeout=\.\.\.\)"):
        synk.function(total)
    f = shared_runtimes[2].function(lambda x: total(x, timeout=3.0), outputs="sum")
    assert f(X) == total(X, timeout=3.0)


@pytest.mark.parametrize("option", sorted(OPTION_NAMES))
def test_steps_of_replicated_models(shared_runtimes: Any, option: str) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(1, 1)
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])
    for parameters in PARAMETERS.values():
        step = function_with(f"model, {parameters.format(option)}")
        with pytest.raises(ValueError, match=f"got a parameter '{option}'"):
            rep.function(step, outputs="sum")
    # The objects come by position, whatever their parameters are called.
    total = rep.function(eval(f"lambda {option}, x: x.sum().item()"), outputs="sum")
    assert total(torch.ones(5, 1)) == 5


@pytest.mark.parametrize("option", sorted(OPTION_NAMES))
def test_items_come_by_position(shared_runtimes: Any, option: str) -> None:
    """No argument of ``map`` or ``submit`` could be meant for the option of a call: a map and a task have none."""
    rt = shared_runtimes[2]
    plain = eval(f"lambda x, {option}=2.0, *, other=1.0: ({option}, x * other)")
    assert list(rt.map(plain, [1, 2, 3])) == [plain(x) for x in (1, 2, 3)]
    assert list(rt.map(plain, [1, 2], [5, 6])) == [plain(1, 5), plain(2, 6)]
    fixed = functools.partial(plain, **{option: 7})
    assert list(rt.map(fixed, [1, 2])) == [fixed(1), fixed(2)]
    with synk.Executor(runtime=rt) as executor:
        assert executor.submit(plain, 1, **{option: 9, "other": 2}).result() == plain(1, **{option: 9, "other": 2})
        assert list(executor.map(plain, [1, 2], [3, 4])) == [plain(1, 3), plain(2, 4)]


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
