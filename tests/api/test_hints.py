"""What a likely mistake is told: in a function on a worker, and with a word of another library."""

from __future__ import annotations

import re
from typing import Any

import cloudpickle
import numpy as np
import pytest

import synk
import synk.extensions
from synk import profiler
from synk._engine.profile import Profile
from synk._pure.words import GONE, KEYWORDS, NAMES, squashed
from synk.communicators._comm import Comm


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


# ----- words of other libraries

WORDS = {
    "synk.init()": r"'init'. Write synk.fork\(num_workers\)",
    "synk.Pool(4)": r"'Pool'. Write synk.fork\(\) once, then synk.map\(f, items\).",
    "synk.Parallel(n_jobs=2)": r"Write synk.map\(f, items\)",
    "synk.Get_rank": r"Write synk.comm.rank inside a function",
    "synk.fork(n_jobs=4)": r"cannot call 'fork': got the argument 'n_jobs', expected num_workers, .*Write num_workers=",
    "synk.fork(2, max_workers=4)": r"got the argument 'max_workers', .*Write num_workers=",
    "synk.fork(2, NumWorkers=4)": r"Write num_workers=.$",
    "synk.fork(2, backed='numpy')": r"Did you mean 'backend'\?",
    "synk.Runtime(processes=4)": r"cannot call 'Runtime': .*Write num_workers=",
    "synk.map(len, items, chunksize=3)": r"cannot call 'map': got the argument 'chunksize', .*Write batch_size=",
    "rt.map(len, items, chunk_size=3)": r"cannot call 'Runtime.map': .*Write batch_size=",
    "synk.function(len, in_axes=0)": r"got option 'in_axes', .*Write bcast_inputs=",
    "synk.function(len, output='sum')": r"Write outputs=",
    "synk.function(len, changes=())": r"Write updates=",
    "synk.function(len, name='f')": r"Write .*fn.__name__",
    "synk.fork(inline=True)": r"Write num_workers=0",
    "synk.Executor(n_workers=2)": r"cannot call 'Executor': .*Write max_workers=",
    "pending.get()": r"'PendingCall' object has no attribute 'get'. Write call.result\(\).",
    "pending.cancel()": r"timeout=seconds",
    "pending.Result()": r"Write call.result.$",
    "f.remote(x)": r"Write f.submit\(...\).",
    "rt.submit(f, x)": r"Write f.submit\(...\)",
    "on_a_worker('size')": r"'Comm' object has no attribute 'size'. Write synk.comm.world_size.",
    "on_a_worker('Get_size')": r"Write synk.comm.world_size.",
    "on_a_worker('Get_rank')": r"Write synk.comm.rank.",
    "on_a_worker('allreduce')": r"Write synk.comm.all_reduce.",
    "on_a_worker('Iallreduce')": r"Write synk.comm.all_reduce\(array, op, async_op=True\).",
    "on_a_worker('all_reduce', group=None)": r"'group'.*Write synk.comm without it: all ranks",
    "on_a_worker('recv', source=0)": r"'source'.*Write peer=",
}


def test_words_of_other_libraries_are_told_what_to_write(rt: Any) -> None:
    f = rt.function(lambda x: x.sum(), outputs="sum")
    names = {"synk": synk, "rt": rt, "f": f, "x": np.ones(4), "items": ["a"], "pending": f.submit(np.ones(4))}

    def on_a_worker(name: str, **options: Any) -> Any:
        run = rt.function(lambda x: getattr(synk.comm, name)(x, **options), outputs=None)
        return run(np.ones(4))

    names["on_a_worker"] = on_a_worker
    told = {}
    for code in WORDS:
        with pytest.raises((AttributeError, TypeError)) as caught:
            eval(code, names)
        told[code] = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    wrong = {code: text for code, text in told.items() if not re.search(WORDS[code], text)}
    assert not wrong
    assert names["pending"].result() == 4


def test_other_names_are_missing_as_usual(rt: Any) -> None:
    f = rt.function(lambda x: x.sum(), outputs="sum")
    pending = f.submit(np.ones(4))
    for thing in (synk, rt, f, pending, synk.comm):
        for name in ("nothing_of_this_name", "_nothing", "__nothing__"):
            assert not hasattr(thing, name)
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
                getattr(thing, name)
    assert pending.result() == 4
    assert cloudpickle.dumps(synk.comm)


def test_what_is_told_exists() -> None:
    """Each name that a hint tells, and no word that is a name."""
    things = {
        "synk": synk, "Comm": Comm, "PendingCall": synk.PendingCall, "Function": synk.Function, "Runtime": synk.Runtime,
    }  # fmt: skip
    written = {"synk.comm": Comm, "synk": synk, "call": synk.PendingCall, "f": synk.Function, "runtime": synk.Runtime}
    for owner, words in NAMES.items():
        assert not words.keys() & {squashed(name) for name in dir(things[owner]) if name[0] != "_"}, owner
    for text in [text for words in (*NAMES.values(), *KEYWORDS.values()) for text in words.values()]:
        for prefix, name in re.findall(r"\b(synk\.comm|synk|call|f|runtime)\.(\w+)", text):
            assert name in ("comm", "__wrapped__") or hasattr(written[prefix], name), text
    for verb, words in KEYWORDS.items():
        assert all(word == squashed(word) for word in words), verb
