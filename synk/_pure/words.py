"""The words of other libraries, and what synk has in their place: for whoever writes one out of habit.

Their keys are in small letters and without underscores, so that ``Get_size`` and ``get_size`` are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

_COUNT = "num_workers=, by default one for each GPU or core"
_LIVE = "synk.fork(num_workers), once: the workers live across calls"
_END = "synk.close()"
_FUNCTION = "synk.function(f), and call that"
_SIZE = "synk.current().world_size"
_LIMIT = "f.submit(..., timeout=seconds), or end what is in flight by synk.current().interrupt()"
_INSIDE = "inside a function, on the workers"

NAMES: dict[str, dict[str, str]] = {
    "synk": {
        **dict.fromkeys(("init", "start", "setup", "initprocessgroup", "client", "cluster", "localcluster"), _LIVE),
        **dict.fromkeys(("pool", "threadpool", "processpool"), "synk.fork() once, then synk.map(f, items)"),
        **dict.fromkeys(("processpoolexecutor", "threadpoolexecutor", "poolexecutor"), "synk.Executor()"),
        **dict.fromkeys(("parallel", "delayed"), 'synk.map(f, items), or joblib.Parallel(n_jobs=-1, backend="synk")'),
        **dict.fromkeys(("starmap", "foreach"), "synk.map(f, xs, ys)"),
        **dict.fromkeys(("imap", "parallelmap", "pmapitems"), "synk.map(f, items)"),
        "imapunordered": "synk.map(f, items, ordered=False)",
        **dict.fromkeys(("remote", "pmap", "vmap", "shardmap", "jit", "parallelize", "task", "actor"), _FUNCTION),
        **dict.fromkeys(("put", "array", "asarray", "sharedarray", "tensor", "sharedmemory"), "synk.data(array)"),
        **dict.fromkeys(("get", "wait", "compute", "gatherresults"), "f.submit(...).result()"),
        **dict.fromkeys(
            ("submit", "apply", "applyasync", "run", "call"), "f.submit(...), or synk.Executor().submit(f, x)"
        ),
        **dict.fromkeys(("shutdown", "finalize", "stop", "terminate", "join", "destroyprocessgroup", "exit"), _END),
        **dict.fromkeys(("size", "worldsize", "getworldsize", "getsize", "numworkers", "cpucount", "nprocs"), _SIZE),
        **dict.fromkeys(("rank", "getrank", "localrank", "processindex"), f"synk.comm.rank {_INSIDE}"),
        **dict.fromkeys(("commworld", "mpi", "world"), f"synk.comm {_INSIDE}"),
        **{
            name.replace("_", ""): f"synk.comm.{name} {_INSIDE}"
            for name in ("send", "recv", "isend", "irecv", "barrier", "all_to_all", "reduce_scatter")
        },
        "isinitialized": "synk.info()",
        "bcast": "synk.broadcast(w)",
        "dataparallel": "synk.torch.DataParallel(model)",
        **dict.fromkeys(("distributeddataparallel", "ddp", "replicate"), "synk.torch.replicate(model, optimizer)"),
    },
    "Comm": {
        **dict.fromkeys(
            ("size", "getsize", "getworldsize", "nprocs", "numranks", "numworkers"), "synk.comm.world_size"
        ),
        **dict.fromkeys(("getrank", "localrank", "id", "processindex"), "synk.comm.rank"),
        **dict.fromkeys(("bcast", "broadcastobjectlist", "broadcasttensor"), "synk.comm.broadcast(array, root)"),
        "ibcast": "synk.comm.ibroadcast(array, root)",
        "psum": 'synk.comm.all_reduce(array, "sum")',
        "pmean": "synk.comm.all_reduce(array)",
        "pmax": 'synk.comm.all_reduce(array, "max")',
        "pmin": 'synk.comm.all_reduce(array, "min")',
        **dict.fromkeys(("allgatherintotensor", "allgatherobject", "allgatherv"), "synk.comm.all_gather(array)"),
        **dict.fromkeys(
            ("reducescattertensor", "reducescatterblock", "psumscatter"), "synk.comm.reduce_scatter(array)"
        ),
        **dict.fromkeys(("alltoallsingle", "alltoallv", "alltoallw"), "synk.comm.all_to_all(array)"),
        **dict.fromkeys(("gatherv", "gatherobject"), "synk.comm.gather(array, root)"),
        **dict.fromkeys(("scatterv", "scatterobjectlist"), "synk.comm.scatter(array, root)"),
        **dict.fromkeys(("ssend", "bsend", "rsend", "sendobject"), "synk.comm.send(array, peer)"),
        "sendrecv": "synk.comm.isend(array, peer) and then synk.comm.recv(peer)",
        "wait": "request.wait(), or synk.comm.wait_all(requests)",
        "abort": "raise, with which the call ends on all ranks",
        **dict.fromkeys(("commworld", "world"), "synk.comm itself"),
    },
    "PendingCall": {
        **dict.fromkeys(("get", "wait", "value", "join", "compute", "resolve", "output"), "call.result()"),
        **dict.fromkeys(
            ("ready", "isdone", "isready", "finished", "completed", "poll", "status", "state"), "call.done()"
        ),
        "running": "not call.done()",
        **dict.fromkeys(("successful", "error", "failed"), "call.exception()"),
        **dict.fromkeys(("cancel", "kill", "abort", "revoke", "terminate"), _LIMIT),
        **dict.fromkeys(("then", "addcallback", "callback"), "call.add_done_callback(fn)"),
    },
    "Function": {
        **dict.fromkeys(
            ("remote", "delay", "applyasync", "async", "send", "spawn", "future", "starttask"), "f.submit(...)"
        ),
        **dict.fromkeys(("map", "imap", "starmap", "foreach"), "f.stream(batches), or synk.map of the plain function"),
        **dict.fromkeys(("apply", "run", "call", "execute", "compute"), "f(...)"),
        **dict.fromkeys(("fn", "func", "function", "target", "pyfunc"), "f.__wrapped__"),
        **dict.fromkeys(("check", "test", "validate"), "f.verify(...)"),
    },
    "Runtime": {
        **dict.fromkeys(("size", "numworkers", "njobs", "nprocs", "processes", "maxworkers"), "runtime.world_size"),
        **dict.fromkeys(
            ("submit", "apply", "applyasync"), "f.submit(...), or synk.Executor(runtime=runtime).submit(f, x)"
        ),
        **dict.fromkeys(("starmap", "starmapasync"), "runtime.map(f, xs, ys)"),
        **dict.fromkeys(("imap", "mapasync"), "runtime.map(f, items)"),
        "imapunordered": "runtime.map(f, items, ordered=False)",
        **dict.fromkeys(("shutdown", "terminate", "join", "stop", "disconnect", "finalize"), "runtime.close()"),
        **dict.fromkeys(("put", "array"), "runtime.data(array)"),
        "cancel": "runtime.interrupt()",
    },
}
"""By module or class: a name that it does not have, and what to write."""

_WRITTEN = {"Comm": "synk.comm.", "PendingCall": "call.", "Function": "f.", "Runtime": "runtime."}

_WORKERS = (
    *(
        "njobs",
        "jobs",
        "workers",
        "nworkers",
        "maxworkers",
        "processes",
        "numprocesses",
        "nprocesses",
        "nprocs",
        "nproc",
    ),
    *("np", "numcpus", "ncpus", "cpus", "numgpus", "ngpus", "worldsize", "size", "ncores", "cores"),
)
_GPUS = ("device", "gpus", "gpu", "deviceids", "gpuids", "visibledevices")
_CHUNK = ("chunksize", "chunk", "batchsize", "chunks", "blocksize")
_BROADCAST = ("inaxes", "inspecs", "broadcast", "bcast", "replicated", "staticargnums", "staticargnames", "constants")
_OUTPUTS = ("outaxes", "outspecs", "reduce", "reduction", "op", "ops", "combine", "output", "aggregate")

_OF_FORK = {
    **dict.fromkeys(_WORKERS, _COUNT),
    **dict.fromkeys(_GPUS, "devices=, such as devices=[0, 1]"),
    **dict.fromkeys(("initializer", "initargs", "init"), "on_restart=, or let functions capture what they need"),
    **dict.fromkeys(("address", "master", "hosts"), "cluster="),
    **dict.fromkeys(("numnodes", "nnodes", "machines"), "nodes=, with cluster="),
    "randomstate": "seed=",
}
_OF_MAP = {
    **dict.fromkeys(_CHUNK, "batch_size=, or leave it out: it follows the time that items take"),
    **dict.fromkeys(_WORKERS, "synk.fork(num_workers): a map runs on the workers that there are"),
    **dict.fromkeys(("unordered", "order", "keeporder", "returnas"), "ordered=False"),
    **dict.fromkeys(("verbose", "desc", "total", "progressbar", "tqdm"), "progress=True"),
    "timeout": "synk.fork(timeout=seconds)",
}
_OF_FUNCTION = {
    **dict.fromkeys(_BROADCAST, "bcast_inputs=, the names of arguments that go whole to every worker"),
    **dict.fromkeys(_OUTPUTS, "outputs="),
    **dict.fromkeys(
        (*_WORKERS, *_GPUS), "synk.fork(num_workers, devices=...): functions run on the workers that there are"
    ),
    **dict.fromkeys(("retries", "maxretries"), "retry="),
    **dict.fromkeys(("batch", "batchsize", "timeout", "numslices"), "the option in the call, as f(x, timeout=seconds)"),
}

KEYWORDS: dict[str, dict[str, str]] = {
    "fork": _OF_FORK,
    "Runtime.__init__": _OF_FORK,
    "map": _OF_MAP,
    "Runtime.map": _OF_MAP,
    "function": _OF_FUNCTION,
    "Executor.__init__": dict.fromkeys(_WORKERS, "max_workers=, by default all"),
    "PendingCall.result": {"timeouts": "timeout=", "block": "call.done(), which never waits"},
}
"""By verb: an argument that it does not have, and what to write."""


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
    if owner == "synk":
        what, prefix = "module 'synk'", "synk."
    else:
        what, prefix = f"{owner!r} object", _WRITTEN[owner]
    told = "" if name.startswith("_") else hint(NAMES.get(owner, {}), name, dir(obj), prefix)
    text = f"{what} has no attribute {name!r}"
    return AttributeError(f"{text}.{told}") if told else AttributeError(text, name=name, obj=obj)


class Hinting:
    """A class whose objects tell what to write in place of a name of another library."""

    if not TYPE_CHECKING:  # for a type checker a name that is missing stays a mistake

        def __getattr__(self, name: str) -> Any:
            owner = next(each.__name__ for each in type(self).__mro__ if each.__name__ in NAMES)
            raise no_attribute(owner, self, name)


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
