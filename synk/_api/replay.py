"""``SYNK_REPLAY=folder``: a body that fails on a rank is written to a file, from which ``synk.replay`` runs it again.

It is made of calls that a user could write. Before a call the ranks say how their generators stand; after a failure the
rank says with which arguments it would call the function. Nothing in a message or on a worker knows of it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from synk._api.comparison import leave_out
from synk._api.options import name_of
from synk._api.plain import ByReference, CodePickler, in_framework
from synk._engine.jobs import is_failure
from synk._engine.rows import CallOptions
from synk._engine.shared import Shared
from synk._processes.output import report
from synk._pure import files
from synk._pure.generators import generator_states, restore_generators
from synk._pure.interrupts import waiting
from synk._pure.tracebacks import verb
from synk._pure.trees import flatten, unflatten
from synk._pure.words import text_of
from synk._wire.cell import cell, refuse_inside_worker
from synk._wire.parcels import dumps
from synk._wire.replayed import Noted, ReplayedRank, Taken
from synk._wire.settings import Reader, apply, kept
from synk._wire.variables import value_as_array
from synk.backends._frameworks import host_converters
from synk.errors import RemoteError, WorkerDied, add_note

Call = Callable[[tuple[Any, ...], dict[str, Any], CallOptions], Any]
Pairs = Generator[tuple[int, Any], None, None]

_MAGIC = f"synk replay 1, Python {sys.version_info.major}.{sys.version_info.minor}"
_SAID = (
    "synk.replay(path) runs it again. What follows is a pickle: to load it runs code, so load only your own files.\n"
    "It holds the function and what that captured as the program had them: what a rank itself had changed in its copy "
    "is not in it.\n\n"
)
_numbers = itertools.count()


def replay_folder() -> str | None:
    """Return where failures are written, or None."""
    return os.environ.get("SYNK_REPLAY") or None


def recorded(call: Call, function: Any, ask: Any, folder: str) -> Call:
    """Return a call that writes a file if the function fails on a rank. ``ask`` is a function of ``moment``."""

    def noted(args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        known = ask()
        leave_out(ask)
        try:
            return call(args, kwargs, options)
        except Exception as error:
            rank = _rank_of(error)
            if rank is not None:
                what = f"a call of {function.__name__!r} failed on rank {rank}"
                with _writing(folder, function._callee.fn, what, error) as body:
                    body["runs"] = _taken(function, rank, args, kwargs, options)
                    body["moment"] = known[rank]
                    body["framework"] = function._callee.framework
            raise

    return noted


def _rank_of(error: BaseException | None) -> int | None:
    """Return the rank on which a function has failed, or None if something else has ended the call."""
    if isinstance(error, WorkerDied) and error.ranks:
        return error.ranks[0]
    remote = error if isinstance(error, RemoteError) else getattr(error, "__cause__", None)
    return remote.rank if isinstance(remote, RemoteError) else None


def _taken(function: Any, rank: int, args: Any, kwargs: dict[str, Any], options: CallOptions) -> list[Any]:
    """Return the arguments with which a rank calls a function in a call, one slice after the other."""
    taken = function._alike(Taken(function._callee.fn, rank), outputs=None)
    found = taken(*args, batch=options.batch, num_slices=options.num_slices, **kwargs)[rank]
    leave_out(taken)
    return found if isinstance(found, list) else [found]


def recorded_items(run: Callable[..., Pairs], folder: str, fn: Any, pairs: Iterator[Any], *, is_spread: bool) -> Pairs:
    """Return what ``run(fn, pairs, is_spread=)`` returns, the outcomes of numbered items, and write a file for each
    item that fails. The ranks note in a folder what they know before an item, until it has succeeded.
    """
    notes = os.path.join(os.path.abspath(folder), f".running-{os.getpid()}-{next(_numbers)}")
    spread = ((number, (number, *(item if is_spread else (item,)))) for number, item in pairs)
    found = run(Noted(fn, notes), spread, is_spread=True)

    def outcomes() -> Pairs:
        os.makedirs(notes)
        try:
            with contextlib.closing(found):
                for number, outcome in found:
                    path = os.path.join(notes, str(number))
                    if is_failure(outcome) and os.path.exists(path):  # otherwise its body has not begun
                        what = f"item {number} of a map of {name_of(fn)!r} failed"
                        with _writing(folder, fn, what, outcome.exception) as body, open(path, "rb") as file:
                            body["moment"], arguments = pickle.load(file)
                            body["runs"] = [(arguments, body["moment"].ranks, 0, 0)]
                    yield number, outcome
        finally:
            os.rename(notes, gone := f"{notes}-gone")  # so that ranks which still run an item write no more into it
            shutil.rmtree(gone)

    return outcomes()


@contextlib.contextmanager
def _writing(folder: str, fn: Any, what: str, error: Any) -> Iterator[dict[str, Any]]:
    """Write what the body puts into a dict, together with the function; or log why this cannot be done."""
    path = os.path.join(folder, f"{re.sub(r'[^0-9a-zA-Z_]+', '-', what)}-{os.getpid()}-{next(_numbers)}.replay")
    handles: list[Any] = []
    code = io.BytesIO()
    body: dict[str, Any] = {"framework": None}

    def number_of(handle: Any) -> int:
        handles.append(handle)
        return len(handles) - 1

    try:
        CodePickler(code, number_of).dump(fn)
        yield body
        rank = body["moment"].rank
        body["values"] = [
            (each.name, each[rank] if isinstance(each, Shared) else each.get(rank), isinstance(each, Shared))
            for each in handles
        ]
        body["settings"] = Reader().read()
        text = f"{_MAGIC}\n{what}: {' '.join(text_of(error).split())}\n{_SAID}"
        data = text.encode() + dumps({**body, "code": code.getvalue()})
        os.makedirs(folder, exist_ok=True)
        files.save(path, lambda: data, lambda data, file: file.write(data), wait=True)
    except Exception as problem:
        report("%s, which cannot be written for synk.replay: %s: %s", what, type(problem).__name__, problem)
    else:
        add_note(error, f"synk.replay({path!r}) runs it again.")


@verb
def replay(path: files.Path, *, pdb: bool = False) -> Any:
    """Run a body that failed on a rank once more in this process, alone, with its rows or its item, and its generators.

    With ``SYNK_REPLAY=folder`` in the environment of a program, each failure of a call or of an item of a map writes a
    file there, whose name is in a note on the exception.

    Parameters
    ----------
    path : path-like
        The file. It is a pickle: to load it runs code, so load only your own files.
    pdb : bool
        Whether to run it under Python's debugger, from its first line on.

    Returns
    -------
    Any
        What the body returns, if it does not fail here.

    Raises
    ------
    ValueError
        If the file is not of this version of Python, or none of these.
    UnsupportedError
        If the body communicates: the other ranks are not here.
    Exception
        What the body raises. A body that killed its worker kills this process.

    Notes
    -----
    Function and captured objects are those of the program: what the rank had changed in its copy before is not
    in the file. A resident object that the body changes is as the failure has left it. Functions travel by value;
    modules and their classes must be there.
    """
    refuse_inside_worker("replay a failure")
    with open(path, "rb") as file:
        found = file.readline().decode(errors="replace").strip()
        if found != _MAGIC:
            raise ValueError(f"cannot replay {os.fspath(path)!r}: got a file of {found[:40]!r}, expected {_MAGIC!r}.")
        while file.readline().strip():  # what it says to a reader
            pass
        body = pickle.load(file)
    convert = None if body["framework"] is None else host_converters(body["framework"])[0]
    values = [
        _Variable(name, value, convert) if is_variable else SimpleNamespace(name=name, value=value)
        for name, value, is_variable in body["values"]
    ]
    call = ByReference(body["code"], values).load()
    if pdb:
        from pdb import Pdb

        call = functools.partial(Pdb().runcall, call)
    before = generator_states()
    restore_generators(body["moment"].generators)
    try:
        with kept():
            apply(body["settings"])
            for arguments, *rows in body["runs"]:
                args, kwargs = pickle.loads(arguments)
                cell.worker = ReplayedRank(body["moment"], *rows)
                result = waiting(call, *args, **kwargs)
    finally:
        cell.worker = None
        restore_generators(before)
    return result


class _Variable:
    """Stands for a shared variable in a replay."""

    def __init__(self, name: str, value: Any, convert: Any) -> None:
        leaves, structure = flatten(value)
        if convert is None:  # a rank's tensors are writable
            for leaf in leaves:
                leaf.flags.writeable = False
        self.name, self.value = name, in_framework(value, convert)
        self.dtype = unflatten(structure, [leaf.dtype for leaf in leaves])

    @property
    def shape(self) -> Any:
        leaves, structure = flatten(self.value)
        return unflatten(structure, [tuple(leaf.shape) for leaf in leaves])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return value_as_array(self, flatten(self.value)[1], dtype, copy)
