"""What is told of names and arguments that do not exist: what to write in place of those of synk 0.1."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

GONE = {
    "extensions.dataflow": "from dataflow import flow, with demos/seeds of the repository on the path",
    "extensions.mpi4torch": "import mpi4torch, with demos/seeds of the repository on the path",
    "extensions.pytensor": "synk.extensions.synkhronos; for send, recv and mode demos/seeds/theano_mpi.py",
    "extensions.train_function": "synk.extensions.optax, synk.torch.replicate, or demos/seeds/train_function.py",
    "extensions.updates": "optax, torch.optim, or demos/seeds/rules.py",
    "Comm.iall_gather": "synk.comm.all_gather(array, async_op=True)",
    "Comm.iall_reduce": "synk.comm.all_reduce(array, op, async_op=True)",
    "Comm.ibarrier": "synk.comm.barrier(async_op=True)",
    "Comm.ibroadcast": "synk.comm.broadcast(array, root, async_op=True)",
    "Comm.ireduce_scatter": "synk.comm.reduce_scatter(array, op, async_op=True)",
    "Function.build_inputs": "synk.data(a), synk.data(b)",
    "Function.cprofile": "synk.profiler.cprofile(f, *args)",
    "Function.name": "f.__name__",
    "Function.on": "synk.Program(f, state={...}).on(backend)",
    "Function.plan": "synk.profile() after the calls: it has the bytes and the time of each argument",
    "Function.refresh": "nothing: every call compares all that it captured",
    "Function.rows": "f.stream(x[k : k + n] for k in range(0, len(x), n))",
    "Profile.to_dict": "[each._asdict() for each in profile.transfers], and of profile.ranks",
    "Program.add": "synk.Program(step=step, predict=predict, state={...}), with all functions at once",
    "Program.names": "the functions by their names: p.step",
    "Program.program": "the program that you called on() of",
    "Program.runtime": "p.on(runtime), with a runtime of yours",
    "Program.sync_from_parent": "p.on(runtime) once more",
    "Runtime.all_gather": "synk.all_gather(w)",
    "Runtime.all_reduce": "synk.all_reduce(w)",
    "Runtime.broadcast": "synk.broadcast(w)",
    "Runtime.gather": "synk.gather(w)",
    "Runtime.get_lengths": "w.lengths",
    "Runtime.get_shapes": "w.shapes",
    "Runtime.get_value": "w.value, or w[rank]",
    "Runtime.reduce": "synk.reduce(w)",
    "Runtime.scatter": "synk.scatter(w, values)",
    "Runtime.set_value": "w.value = value, or w[rank] = value",
    "fork(balance=)": "fork() without it: rows are divided evenly",
    "fork(inline=)": "num_workers=0, one rank in the program itself",
    "fork(transfer_guard=)": "fork() without it, and look at synk.profile()",
    "function(block_rows=)": "reproducible=ROWS",
    "function(changes=)": "updates=, which takes variables and resident objects",
    "function(name=)": "a def with this name, or set fn.__name__: errors and profiles show that",
    "profiler.Trace": "synk.profiler.trace(path), which writes the file",
    "profiler.live": "print(synk.profile()) now and again",
    "profiler.transfer_guard": "synk.profile(): its table has the bytes of each argument",
    "synk.FunctionWrapper": "a function of your own that calls the synk function",
    "synk.get_lengths": "w.lengths",
    "synk.get_shapes": "w.shapes",
    "synk.get_value": "w.value, or w[rank]",
    "synk.set_value": "w.value = value, or w[rank] = value",
    "synk.wrap": "synk.fork(), and synk.function(f)",
    "torch.Handle": "the object that synk.torch.isend and irecv return: handle.wait(), handle.dummy",
    "torch.join_dummies": "loss + dummy, as a dummy is zero; for any other tensor loss + 0 * tensor.sum()",
    "torch.wait": "handle.wait()",
}
"""What was there in 0.1: what to write instead."""


def _instead_of(name: str) -> str:
    """Return a sentence on what to write in place of a name of 0.1, with a space before it; nothing for others."""
    return f" It was in synk 0.1. Write {GONE[name]}." if name in GONE else ""


def no_attribute(owner: str, obj: Any, name: str) -> AttributeError:
    """Return the error about a name that a module or an object does not have; Python adds what is spelt alike."""
    what = f"module {obj.__name__!r}" if isinstance(obj, types.ModuleType) else f"{owner!r} object"
    text, told = f"{what} has no attribute {name!r}", _instead_of(f"{owner}.{name}")
    return AttributeError(f"{text}.{told}") if told else AttributeError(text, name=name, obj=obj)


class Hinting:
    """A class whose objects tell what to write in place of what they had in 0.1."""

    if not TYPE_CHECKING:  # for a type checker a name that is missing stays a mistake

        def __getattr__(self, name: str) -> Any:
            names = [each.__name__ for each in type(self).__mro__]
            raise no_attribute(next((each for each in names if f"{each}.{name}" in GONE), names[0]), self, name)


def explain(error: TypeError, fn: Callable[..., Any], given: Iterable[str]) -> None:
    """Put into the error of a call what to write in place of arguments that ``fn`` does not have."""
    import inspect  # a program that makes no mistake needs none of it

    parameters = inspect.signature(fn).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    own = [each.name for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    unknown = [name for name in given if name not in own]
    if unknown:
        verb, expected = fn.__qualname__.removesuffix(".__init__"), ", ".join(name for name in own if name != "self")
        told = argument_hint(verb, unknown[0], own)
        error.args = (f"cannot call {verb!r}: got the argument {unknown[0]!r}, expected {expected}.{told}",)


def argument_hint(verb: str, name: str, own: Iterable[str]) -> str:
    """Return what to write in place of an argument that a verb does not have, as a sentence with a space before it."""
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), list(own), 1)
    return _instead_of(f"{verb}({name}=)") or (f" Did you mean {close[0]!r}?" if close else "")
