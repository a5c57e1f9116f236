"""What a likely mistake is told: in a function on a worker, and with a name that does not exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import synk
import synk.extensions
from synk import profiler
from synk._api.current import NotebookCell
from synk._engine.profile import Profile
from synk._pure.words import GONE

Fork = Callable[..., Any]


def test_breakpoint_names_inline(reused: Fork) -> None:
    def stops(x: Any) -> float:
        breakpoint()
        return float(x.sum())

    with pytest.raises(RuntimeError, match=r"cannot stop at breakpoint\(\).*fork\(0\)"):
        reused(1).function(stops)(np.ones(2))


def test_arrays_where_tensors_are_meant_name_the_framework(reused: Fork) -> None:
    rt, x = reused(1), np.ones((4, 3), np.float32)
    for function in (lambda x: torch.relu(x).sum(), lambda x: x.relu().sum()):
        with pytest.raises((TypeError, AttributeError)) as caught:
            rt.function(function)(x)
        told = str(caught.value.__cause__) + "".join(getattr(caught.value, "__notes__", ()))
        assert 'framework="torch"' in told
        assert rt.function(function, framework="torch", outputs="sum")(x) == 12


def test_a_cell_of_a_notebook_is_known_again() -> None:
    first = NotebookCell("a", 1)
    assert NotebookCell("a", 2).is_run_again(first)
    assert not first.is_run_again(first) and not NotebookCell("b", 2).is_run_again(first)
    assert not first.is_run_again(None)


def test_a_time_limit_is_refused_where_the_program_is_the_rank(shared_runtimes: Any) -> None:
    rt, x = shared_runtimes[0], np.ones(4)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    for limit in (
        lambda: synk.Runtime(0, backend="numpy", timeout=1.0),
        lambda: setattr(rt, "timeout", 1.0),
        lambda: f(x, timeout=1.0),
        lambda: f.serial(x, timeout=1.0),
        lambda: f.submit(x, timeout=1.0),
        lambda: f.verify(x, timeout=1.0),
        lambda: f.repeat(2, x, timeout=1.0),
    ):
        with pytest.raises(ValueError, match=r"cannot limit the time of calls: got .* with num_workers=0"):
            limit()
    for wrong in (-1, False):
        with pytest.raises((ValueError, TypeError), match=f"got num_workers={wrong}"):
            synk.Runtime(wrong, backend="numpy")
    assert f(x) == 4 and f.verify(x)


def test_what_was_in_the_first_edition_says_what_to_write_instead(shared_runtimes: Any) -> None:
    owners = {
        "synk": synk, "profiler": profiler, "Function": synk.function(len, outputs="first"),
        "Program": synk.Program(), "Profile": Profile(), "Runtime": shared_runtimes[2], "Comm": synk.comm,
        "torch": synk.torch, "extensions": synk.extensions,
    }  # fmt: skip
    for name, instead in GONE.items():
        if name.endswith("=)"):
            continue
        owner, _, attribute = name.partition(".")
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(owners[owner], attribute)
        if owner == "extensions":
            for statement in (
                f"import synk.{name}",
                f"from synk.{name} import x",
                f"from synk.{owner} import {attribute}",
            ):
                with pytest.raises(ModuleNotFoundError, match=re.escape(instead)):
                    exec(statement)
    for option in ("balance", "transfer_guard"):
        with pytest.raises(TypeError, match="fork\\(\\) without it"):
            synk.fork(1, **{option: "measured"})


UNKNOWN = {
    "synk.fork(2, backed='numpy')": r"cannot call 'fork': got the argument 'backed', expected .*'backend'\?",
    "synk.fork(2, NumWorkers=4)": r"Did you mean 'num_workers'\?",
    "synk.fork(2, zzz=4)": r"got the argument 'zzz', expected .*nodes, check\.$",
    "synk.Runtime(workers=4)": r"cannot call 'Runtime': .*'num_workers'\?",
    "rt.map(len, items, batchsize=3)": r"cannot call 'Runtime.map': .*'batch_size'\?",
    "synk.function(len, output='sum')": r"got option 'output', .*'outputs'\?",
    "synk.function(len, changes=())": r"It was in synk 0\.1\. Write updates=",
    "synk.fork(inline=True)": r"Write num_workers=0",
}


def test_unknown_arguments_are_told_what_there_is(reused: Fork) -> None:
    rt = reused(2)
    told = {}
    for code in UNKNOWN:
        with pytest.raises(TypeError) as caught:
            eval(code, {"synk": synk, "rt": rt, "items": ["a"]})
        told[code] = str(caught.value)
    assert not {code: text for code, text in told.items() if not re.search(UNKNOWN[code], text)}


def test_other_names_are_missing_as_usual(reused: Fork) -> None:
    rt = reused(2)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    pending = f.submit(np.ones(4))
    for thing in (synk, rt, f, pending, synk.comm):
        for name in ("nothing_of_this_name", "_nothing", "__nothing__"):
            assert not hasattr(thing, name)
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
                getattr(thing, name)
    assert pending.result() == 4
    assert cloudpickle.dumps(synk.comm)
