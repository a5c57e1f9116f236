"""The public names: what ``dir()`` shows of each module and object, and the options of the verbs that have most.

A name more is a promise more. ``LATER`` has what is not yet as it should be, and why; a row whose reason is gone fails.

Options are checked, and named where they are misspelt. A parameter with the name of a call's option never gets a value
in silence: it is refused where the function is built. Where parameters are not given by keyword, nothing could be
lost, and plain Python is the oracle.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
import synk.profiler
import synk.torch
from synk._engine.argument import OPTION_NAMES

NAMES = {
    "synk": """Data Executor Function ItemError Op PendingCall Program Resident Runtime Shared all_gather all_reduce
        broadcast close comm current data distribute errors fork freeze_support function gather info map profile
        profiler reduce replay resident scatter shared torch""",
    "synk.errors": """SynkError CallCancelled CallTimeout ClosedError CollectiveMismatch NotForkedError OpMismatch
        ReentrancyError RemoteError SerializationError SharedMemoryError StartupError UnsupportedError WorkerDied""",
    "synk.comm": """all_gather all_reduce all_to_all barrier broadcast device gather irecv isend rank ranks recv reduce
        reduce_scatter rng rows scatter send total_rows wait_all world_size""",
    "synk.torch": """DataParallel mean process_group replicate total all_gather all_reduce all_to_all broadcast gather
        irecv isend recv reduce reduce_scatter scatter send""",
    "synk.profiler": "cprofile span trace",
    "Runtime": """backend close data devices distribute function info interrupt is_closed map profile resident restart
        shared stacks timeout world_size""",
    "Function": "outputs repeat serial stream submit verify",
    "PendingCall": "add_done_callback done exception name ranks result",
    "Executor": "map shutdown submit",
    "Program": "close load on save sync_to_parent values",
    "Shared": "dtype is_sharded lengths name shape shapes value",
    "Resident": "get load name save set value",
    "Data": """T alloc_size astype copy data dtype free_memory max mean min name nbytes ndim reshape set_length
        set_shape set_value shape size std sum tolist var""",
    "fork": "num_workers backend devices timeout max_restarts on_restart seed check cluster nodes",
    "function": "fn bcast_inputs outputs updates per_rank framework retry on_oom reproducible",
    "f()": "args batch num_slices output_subset timeout kwargs",
    "data": "value dtype shape ndim force_cast oversize name",
    "shared": "value sharded name",
    "map": """fn iterables batch_size ordered progress on_error item_timeout max_tasks_per_worker max_worker_memory
        journal key version""",
}

LATER = {
    "synk.comm": {
        "shielded": "residents have no other way yet",
    },
    "synk.torch": {
        "Replicated": "a class that replicate makes", "StepFunction": "a class that replicate makes",
    },
    "Runtime": {"counters": "what the tests of messages count", "where": "the phases, which stacks does not show"},
}  # fmt: skip


def shown(rt: synk.Runtime) -> dict[str, Any]:
    """Return each object of ``NAMES`` that is looked at by ``dir()``."""
    f = rt.function(lambda x: x.sum(), outputs="sum")
    call = f.submit(np.ones(4))
    call.result()
    return {
        "synk": synk, "synk.errors": synk.errors, "synk.comm": synk.comm, "synk.torch": synk.torch,
        "synk.profiler": synk.profiler, "Runtime": rt, "Function": f, "PendingCall": call, "Executor": synk.Executor,
        "Program": synk.Program(f), "Shared": rt.shared(np.zeros(3)), "Resident": rt.resident({}),
        "Data": rt.data(np.zeros(3)),
    }  # fmt: skip


VERBS = {
    "fork": synk.fork, "function": synk.function, "f()": synk.Function.__call__, "data": synk.data,
    "shared": synk.shared, "map": synk.map,
}  # fmt: skip


def test_the_public_names_are_those_of_the_lists(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    found = {owner: {name for name in dir(each) if name[0] != "_"} for owner, each in shown(shared_runtimes[2]).items()}
    found |= {verb: {*inspect.signature(each).parameters} - {"self"} for verb, each in VERBS.items()}
    assert found.keys() == NAMES.keys()
    for owner, names in found.items():
        with subtests.test(owner=owner):
            assert names ^ {*NAMES[owner].split()} == {*LATER.get(owner, {})}


# ----- the options of a function


def test_help_and_editors_see_all_options_with_their_defaults() -> None:
    shown = inspect.signature(synk.function).parameters
    assert str(shown["outputs"]) == "outputs: 'Any' = 'avg'"
    assert {name: each.default for name, each in shown.items()} == {
        "fn": None, "bcast_inputs": (), "outputs": "avg", "updates": (), "framework": None, "per_rank": False,
        "reproducible": False, "retry": 0, "on_oom": "raise",
    }  # fmt: skip


def test_a_misspelt_option_is_named() -> None:
    for arguments in ((len,), ()):
        with pytest.raises(TypeError, match=r"got option 'ouputs', expected bcast_inputs.*Did you mean 'outputs'\?"):
            synk.function(*arguments, ouputs="sum")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "framework": ({"framework": "numpy"}, r"got framework='numpy', expected one of \(None, 'torch', 'jax'\)\."),
    "per_rank": ({"per_rank": 1}, "got per_rank=1, expected True or False."),
    "updates": ({"updates": [1]}, "got int in updates, expected what synk.shared or synk.resident made"),
    "retry": ({"retry": -1}, "got retry=-1, expected an integer of 0 or more."),
    "retry is no number": ({"retry": False}, "got retry=False, expected an integer of 0 or more."),
    "on_oom": ({"on_oom": True}, "got on_oom=True, expected 'raise' or 'slices'."),
    **{
        (name := f"reproducible={n}"): ({"reproducible": n}, f"got {name}, expected True, or the rows of a block.")
        for n in (0, -1, 2.5)
    },
    "blocks and ranks": (
        {"reproducible": 4, "per_rank": True},
        "got reproducible=4 with per_rank=, expected a function without: it is called for each block of rows.",
    ),
    "blocks and None": (
        {"reproducible": 4, "outputs": {"a": "sum", "b": (None, "avg")}},
        "got reproducible=4 with op None, expected an op for each output.",
    ),
    "blocks and slices": ({"reproducible": True, "on_oom": "slices"}, "got reproducible=True with on_oom=, expected"),
}


def test_a_value_that_does_not_fit_is_refused(subtests: pytest.Subtests) -> None:
    for name, (options, text) in REFUSED.items():
        with subtests.test(name), pytest.raises((TypeError, ValueError), match=f"^cannot build 'len': {text}"):
            synk.function(len, **options)


def test_what_changes_something_is_not_called_again(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for option, value in {"retry": 2, "on_oom": "slices", "reproducible": 4}.items():
        for changed in (shared_runtimes[2].shared(1.0), shared_runtimes[2].resident([])):
            with subtests.test(option), pytest.raises(ValueError, match=f"got {option}={value!r} with updates="):
                synk.function(len, updates=changed, **{option: value})


# ----- parameters with the names of options

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


def test_what_comes_by_position_only_cannot_be_lost(rt: Any) -> None:
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


def test_items_come_by_position(rt: Any) -> None:
    """No argument of ``map`` or ``submit`` could be meant for the option of a call: a map and a task have none."""
    with synk.Executor(runtime=rt) as executor:
        for option in sorted(OPTION_NAMES):
            plain = eval(f"lambda x, {option}=2.0, *, other=1.0: ({option}, x * other)")
            assert list(rt.map(plain, [1, 2], [5, 6])) == [plain(1, 5), plain(2, 6)]
            fixed = functools.partial(plain, **{option: 7})
            assert list(rt.map(fixed, [1, 2])) == [fixed(1), fixed(2)]
            assert executor.submit(plain, 1, **{option: 9, "other": 2}).result() == plain(1, **{option: 9, "other": 2})


def test_a_function_that_gets_such_a_parameter_later(shared_runtimes: Any) -> None:
    """The next call refuses it."""

    def total(x: Any) -> Any:
        return x.sum()

    f, limited = shared_runtimes[2].function(total, outputs="sum"), eval("lambda x, timeout=2.0: timeout * x.sum()")
    assert f(X) == X.sum()
    total.__code__, total.__defaults__ = limited.__code__, limited.__defaults__
    with pytest.raises(ValueError, match="got a parameter 'timeout'"):
        f(X)
