"""The words of other libraries, and what synk has in their place: for whoever writes one out of habit. Short texts.

The words are in small letters and without underscores, so that ``Get_size`` and ``get_size`` are one. A name of synk's
own that differs in no more is found without them. ``short_repr`` and its neighbours shorten the user's objects.
"""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

_MAX_LENGTH = 80

TEXT_CAP = 20_000
"""How many characters of an exception's text are shown."""

_ARGUMENTS_CAP = 1 << 20

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


class Text(str):
    """A text of several lines that a REPL and a notebook show without quotes and escapes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened to one line. It never raises.

    Examples
    --------
    >>> short_repr({"a": [1, 2, 3]})
    "{'a': [1, 2, 3]}"
    >>> len(short_repr("x" * 1000)) <= 80
    True
    """
    try:
        text = " ".join(_repr.repr(value).split())
    except Exception:  # reprlib guards against instances that raise, but not against odd containers
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def message_of(error: BaseException) -> str:
    """Return ``str(error)``, cut to a limit. Never formats huge arguments, and never raises."""
    try:
        nbytes = sum(len(argument) for argument in error.args if isinstance(argument, (bytes, bytearray, str)))
        if nbytes > _ARGUMENTS_CAP:
            return f"<arguments of {nbytes} bytes>"
        text = str(error)
    except BaseException as inner:
        return f"<its text could not be made: {type(inner).__name__}>"
    return text if len(text) <= TEXT_CAP else f"{text[:TEXT_CAP]}... ({len(text)} characters)"


def text_of(error: BaseException) -> str:
    """Return the class and the message of an exception. It never raises.

    Examples
    --------
    >>> text_of(KeyError("x"))
    "KeyError: 'x'"
    """
    return f"{type(error).__name__}: {message_of(error)}"


def _each(rows: Mapping[str, str]) -> dict[str, str]:
    """Return the rows of a table with an entry for each word."""
    return {word: written for words, written in rows.items() for word in words.split()}


_ROWS = {
    "synk": {
        "init start setup initprocessgroup client": "synk.fork(num_workers): the workers live across calls",
        "pool threadpool processpool": "synk.fork() once, then synk.map(f, items)",
        "processpoolexecutor threadpoolexecutor": "synk.Executor()",
        "parallel delayed": 'synk.map(f, items), or joblib.Parallel(n_jobs=-1, backend="synk")',
        "imap starmap foreach": "synk.map(f, items), or synk.map(f, xs, ys)",
        "imapunordered": "synk.map(f, items, ordered=False)",
        "remote pmap vmap shardmap jit parallelize task": "synk.function(f), and call that",
        "put array asarray sharedarray sharedmemory": "synk.data(array)",
        "get wait compute": "f.submit(...).result()",
        "submit apply applyasync": "f.submit(...), or synk.Executor().submit(f, x)",
        "shutdown finalize stop terminate join destroyprocessgroup": "synk.close()",
        "size worldsize getworldsize getsize numworkers cpucount": "synk.current().world_size",
        "rank getrank localrank": "synk.comm.rank inside a function",
        "commworld mpi": "synk.comm inside a function",
        "send recv isend irecv barrier alltoall reducescatter": "synk.comm inside a function, which has it",
        "isinitialized": "synk.info()",
        "bcast": "synk.broadcast(w)",
        "dataparallel": "synk.torch.DataParallel(model)",
        "distributeddataparallel ddp replicate": "synk.torch.replicate(model, optimizer)",
    },
    "Comm": {
        "size getsize getworldsize numranks numworkers": "synk.comm.world_size",
        "getrank localrank": "synk.comm.rank",
        "bcast broadcastobjectlist": "synk.comm.broadcast(array, root)",
        "ibcast": "synk.comm.broadcast(array, root, async_op=True)",
        "iallreduce": "synk.comm.all_reduce(array, op, async_op=True)",
        "iallgather": "synk.comm.all_gather(array, async_op=True)",
        "ireducescatter ireducescatterblock": "synk.comm.reduce_scatter(array, op, async_op=True)",
        "igather": "synk.comm.gather(array, root, async_op=True)",
        "iscatter": "synk.comm.scatter(array, root, async_op=True)",
        "ialltoall": "synk.comm.all_to_all(array, async_op=True)",
        "psum": 'synk.comm.all_reduce(array, "sum")',
        "pmax": 'synk.comm.all_reduce(array, "max")',
        "pmin": 'synk.comm.all_reduce(array, "min")',
        "pmean": "synk.comm.all_reduce(array)",
        "allgatherintotensor allgatherobject allgatherv": "synk.comm.all_gather(array)",
        "reducescattertensor reducescatterblock psumscatter": "synk.comm.reduce_scatter(array)",
        "alltoallsingle alltoallv alltoallw": "synk.comm.all_to_all(array)",
        "gatherv gatherobject": "synk.comm.gather(array, root)",
        "scatterv scatterobjectlist": "synk.comm.scatter(array, root)",
        "ssend bsend rsend": "synk.comm.send(array, peer)",
        "sendrecv": "synk.comm.isend(array, peer) and then synk.comm.recv(peer)",
        "wait": "request.wait(), or synk.comm.wait_all(requests)",
        "abort": "raise, with which the call ends on all ranks",
        "commworld": "synk.comm itself",
    },
    "PendingCall": {
        "get wait value join compute": "call.result()",
        "ready isdone isready finished completed poll status state": "call.done()",
        "running": "not call.done()",
        "successful error failed": "call.exception()",
        "cancel kill abort revoke terminate": "f.submit(..., timeout=seconds), or synk.current().interrupt()",
        "then addcallback": "call.add_done_callback(fn)",
    },
    "Function": {
        "remote delay applyasync spawn": "f.submit(...)",
        "map imap starmap": "f.stream(batches), or synk.map of the plain function",
        "apply run call compute": "f(...)",
        "fn func": "f.__wrapped__",
    },
    "Runtime": {
        "size numworkers njobs nprocs maxworkers": "runtime.world_size",
        "submit apply applyasync": "f.submit(...), or synk.Executor(runtime=runtime).submit(f, x)",
        "imap starmap mapasync": "runtime.map(f, items), or runtime.map(f, xs, ys)",
        "imapunordered": "runtime.map(f, items, ordered=False)",
        "shutdown terminate join stop disconnect": "runtime.close()",
        "put array": "runtime.data(array)",
        "cancel": "runtime.interrupt()",
    },
}
NAMES = {owner: _each(rows) for owner, rows in _ROWS.items()}
"""By module or class: a name that it does not have, and what to write."""

_WRITTEN = {"synk": "synk.", "Comm": "synk.comm.", "PendingCall": "call.", "Function": "f.", "Runtime": "runtime."}
_WORKERS = (
    "njobs jobs workers nworkers maxworkers processes numprocesses nprocs nproc np numcpus cpus numgpus size worldsize"
)
_GPUS = "device gpus gpu deviceids gpuids"

_OF_FORK = _each(
    {
        _WORKERS: "num_workers=, by default one for each GPU or core",
        _GPUS: "devices=, such as devices=[0, 1]",
        "initializer initargs": "on_restart=, or let functions capture what they need",
        "address hosts": "cluster=",
        "numnodes nnodes": "nodes=, with cluster=",
        "randomstate": "seed=",
        "balance": "fork() without it: rows are divided evenly. It was in synk 0.1",
        "inline": "num_workers=0, one rank in the program itself",
        "transferguard": "fork() without it, and look at synk.profile(). It was in synk 0.1",
    }
)
_OF_MAP = _each(
    {
        "chunksize chunk batchsize": "batch_size=, or leave it out: it follows the time that items take",
        _WORKERS: "synk.fork(num_workers): a map runs on the workers that there are",
        "unordered keeporder returnas": "ordered=False",
        "verbose desc total tqdm": "progress=True",
        "timeout tasktimeout": "item_timeout=seconds for each item, or synk.fork(timeout=seconds)",
        "maxtasksperchild workerlifespan": "max_tasks_per_worker=",
        "maxmemory memorylimit": "max_worker_memory=bytes",
        "onexception errors ignoreerrors": 'on_error="return"',
    }
)
_OF_FUNCTION = _each(
    {
        "inaxes inspecs broadcast bcast replicated staticargnums staticargnames": "bcast_inputs=, names of arguments",
        "outaxes outspecs reduce reduction op ops combine output": "outputs=",
        f"{_WORKERS} {_GPUS}": "synk.fork(num_workers, devices=...): functions run on the workers that there are",
        "retries maxretries": "retry=",
        "name": "a def with this name, or set fn.__name__: errors and profiles show that",
        "changes": "updates=, which takes variables and resident objects",
        "batch batchsize timeout numslices": "the option in the call, as f(x, timeout=seconds)",
    }
)
KEYWORDS = {
    "fork": _OF_FORK,
    "Runtime.__init__": _OF_FORK,
    "map": _OF_MAP,
    "Runtime.map": _OF_MAP,
    "function": _OF_FUNCTION,
    "Comm": _each(
        {
            "group comm": "synk.comm without it: all ranks of the call take part",
            "tensor sendbuf obj": "array, the first argument",
            "tensorlist recvbuf outputtensor": "out=array",
            "src dst": "root= in collectives, peer= in messages",
            "source dest": "peer=",
            "dim": "axis=",
            "counts recvcounts sendcounts splits": "sizes=",
        }
    ),
    "Executor.__init__": _each({_WORKERS: "max_workers=, by default all"}),
}
"""By verb: an argument that it does not have, and what to write."""


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


def squashed(name: str) -> str:
    return name.replace("_", "").lower()


def hint(owner: Mapping[str, str], name: str, own: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """Return a sentence on what to write in place of ``name``, with a space before it; nothing if it is unknown."""
    word = squashed(name)
    same = [each for each in own if each[0] != "_" and squashed(each) == word]
    written = f"{prefix}{same[0]}{suffix}" if same else owner.get(word)
    return f" Write {written}." if written else ""


def no_attribute(owner: str, obj: Any, name: str) -> AttributeError:
    """Return the error about a name that a module or an object does not have; Python adds what is spelt alike."""
    told = "" if name.startswith("_") else hint(NAMES.get(owner, {}), name, dir(obj), _WRITTEN.get(owner, ""))
    if instead := GONE.get(f"{owner}.{name}"):
        told = f" It was in synk 0.1. Write {instead}."
    what = f"module {obj.__name__!r}" if isinstance(obj, types.ModuleType) else f"{owner!r} object"
    text = f"{what} has no attribute {name!r}"
    return AttributeError(f"{text}.{told}") if told else AttributeError(text, name=name, obj=obj)


class Hinting:
    """A class whose objects tell what to write in place of a name of another library."""

    if not TYPE_CHECKING:  # for a type checker a name that is missing stays a mistake

        def __getattr__(self, name: str) -> Any:
            names = [each.__name__ for each in type(self).__mro__]
            raise no_attribute(next((each for each in names if each in NAMES), names[0]), self, name)


def explain(error: TypeError, fn: Callable[..., Any], given: Iterable[str]) -> None:
    """Put into the error of a call what to write in place of arguments that ``fn`` does not have."""
    import inspect  # a program that makes no mistake needs none of it

    parameters = inspect.signature(fn).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    own = [each.name for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    unknown = [name for name in given if name not in own]
    if unknown:
        verb, expected = fn.__qualname__, ", ".join(name for name in own if name != "self")
        told = argument_hint(verb, unknown[0], own)
        verb = verb.removesuffix(".__init__")
        error.args = (f"cannot call {verb!r}: got the argument {unknown[0]!r}, expected {expected}.{told}",)


def argument_hint(verb: str, name: str, own: Iterable[str]) -> str:
    """Return what to write in place of an argument that a verb does not have, as a sentence with a space before it."""
    told = hint(KEYWORDS.get(verb, {}), name, own, suffix="=")
    if not told:
        from difflib import get_close_matches

        close = get_close_matches(name, list(own), 1)
        told = f" Did you mean {close[0]!r}?" if close else ""
    return told
