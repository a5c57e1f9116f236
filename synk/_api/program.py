"""``Program``: functions and the state that they share, on no device; and ``RunningProgram``, a copy on a runtime.

In one file because each uses the other: a program makes running programs, whose state comes back to it.
"""

from __future__ import annotations

import pickle
import sys
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from synk._api import moves
from synk._api.function import Function
from synk._api.moves import Part, part_of, session_of
from synk._api.program_file import FORMAT, check, read, values_in
from synk._api.runtime import Runtime
from synk._master.calls.callee import FunctionHandle
from synk._master.objects.shared import Shared
from synk._master.processes.output import warn_at_users_line
from synk._master.session import Session
from synk._pure import files, plain_values
from synk._pure.tracebacks import verb
from synk._version import __version__
from synk._wire.cell import refuse_inside_worker
from synk.errors import ClosedError

_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


class _Slot:
    """A variable, resident object or replicated object to which functions refer.

    Attributes
    ----------
    handle : Handle or None
        The handle in this process, if it was made here.
    part : Part or None
        The program's own copy of the contents, once the handle's runtime is closed, or if the program was loaded.
    """

    def __init__(self, handle: Any = None, part: Part | None = None) -> None:
        self.handle = handle
        self.part = part

    @property
    def is_open(self) -> bool:
        """Whether the handle's runtime is open. Then the handle's values are those of the program."""
        return self.handle is not None and not session_of(self.handle).is_closed

    @property
    def is_shared(self) -> bool:
        return isinstance(self.handle, Shared) or (self.part is not None and self.part["kind"] == "shared")

    def now(self) -> Part:
        """Return the present contents.

        Raises
        ------
        ClosedError
            If the handle's runtime ended before the program had a copy.
        """
        if self.is_open:
            return part_of(self.handle)
        if self.part is None:
            raise ClosedError(
                f"cannot copy {self.handle.name!r}: the runtime that held it ended by a fault, before the program had "
                "a copy. Save programs that matter, by p.save(path)."
            ) from session_of(self.handle).cause
        return self.part


class Program:
    """Functions and the state that they share, on no device: to be moved, stored and run elsewhere.

    A program is built of functions, together with the shared variables, resident objects and replicated training
    objects to which they refer. While the runtime of these is open, their values are the program's values. When the
    runtime closes, the program keeps a copy. A program can be pickled, saved, and put on any runtime, with another
    number of workers and another backend.

    Parameters
    ----------
    **functions : Function or FunctionWrapper
        The functions by their names in the program.

    Raises
    ------
    TypeError
        If an argument is not a function of synk.
    SerializationError
        If a function cannot be pickled.

    Notes
    -----
    A program carries the functions, by value; shared variables, where shards are divided again among the new ranks;
    resident and replicated objects as they are on rank 0; the seed of the runtime and, for the same number of workers,
    the states of ``synk.comm.rng``. Captured objects travel with the contents that they have in the master: changes
    that workers have made by themselves are left out, and ``print(program)`` names these objects. When a program that
    was unpickled or loaded is put on a runtime, it runs code: use only your own files.

    Examples
    --------
    >>> import pickle, numpy as np, synk
    >>> with synk.fork(2):
    ...     w = synk.shared(np.zeros(2), name="w")
    ...     @synk.function(updates=[w])
    ...     def step(x):
    ...         return x.sum(), w.value + 1
    ...     p = synk.Program(step=step)
    ...     _ = step.repeat(3, np.ones(4))
    >>> data = pickle.dumps(p)                     # the runtime is closed
    >>> with pickle.loads(data).on(num_workers=3) as q:
    ...     _ = q.step(np.ones(4))
    ...     q.sync_to_parent()
    >>> q.program.values()
    {'w': array([4., 4.])}
    """

    @verb
    def __init__(self, /, **functions: Any) -> None:
        refuse_inside_worker("make a program")
        self._functions: dict[str, Any] = {}
        self._codes: list[tuple[tuple[str, ...], bytes]] = []  # names and pickles of functions that were loaded
        self._captured: list[str] = []
        self._slots: list[_Slot] = []
        self._seed: int | None = None
        self._streams: list[Any] = []
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._add(functions)

    @verb
    def add(self, name: str, function: Any) -> None:
        """Add a function. Variables that it shares with the others stay shared.

        Raises
        ------
        ValueError
            If the name is taken.
        TypeError
            If ``function`` is not a function of synk.
        SerializationError
            If the function cannot be pickled.
        """
        self._add({name: function})

    def _add(self, functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"cannot add a function to a program: got the name {name!r}, expected a text.")
            if name in self.names:
                raise ValueError(f"cannot add {name!r} to the program: the name is taken. Choose another name.")
            if not isinstance(getattr(function, "function", function), FunctionHandle):
                raise TypeError(
                    f"cannot add {name!r} to a program: got {type(function).__name__}, expected a synk function. Make "
                    f"it by synk.function({name})."
                )
        handles = [slot.handle for slot in self._slots]
        moves.dumps(functions, lambda handle: moves.slot_in(handles, handle))  # only to find the handles
        self._slots += map(_Slot, handles[len(self._slots) :])
        self._functions.update(functions)
        for session in self._parents():
            if session not in self._sessions:
                self._sessions.add(session)
                session.guests[self] = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the program's functions."""
        return (*(name for names, _ in self._codes for name in names), *self._functions)

    @verb
    def on(self, runtime: Runtime | None = None, /, **options: Any) -> RunningProgram:
        """Put copies of the functions, and of all objects to which they refer, on a runtime.

        Parameters
        ----------
        runtime : Runtime, optional
            The runtime to use. It stays open when the running program is closed.
        **options
            Without a runtime, the options of a new one, as for :class:`synk.Runtime`: ``num_workers``, ``backend``, ...
            The new runtime belongs to the running program, which closes it. By default its ``seed`` is that of the
            parent's runtime.

        Returns
        -------
        RunningProgram
            A context manager.

        Raises
        ------
        TypeError
            If both a runtime and options are given.
        ValueError, UnsupportedError
            As for :class:`synk.Runtime`.
        SerializationError
            If a module that the functions need cannot be imported here.
        ClosedError
            If the runtime is closed.
        """
        refuse_inside_worker("put a program on a runtime")
        if runtime is not None:
            moves.check_runtime(runtime, "a program")
            if options:
                raise TypeError(
                    f"cannot put a program on {runtime!r}: got {', '.join(options)} as well, expected either a runtime "
                    "or the options of a new one."
                )
            return RunningProgram(self, runtime, *_built_on(runtime, self._state()), is_owner=False)
        state = self._state()
        if state["seed"] is not None:
            options.setdefault("seed", state["seed"])
        own = Runtime(**options)
        try:
            return RunningProgram(self, own, *_built_on(own, state), is_owner=True)
        except BaseException:
            own.close()
            raise

    # -- its state ----------------------------------------------------------------------------------------------------

    def _parents(self) -> list[Session]:
        """Return the open sessions of the program's functions and of their handles."""
        functions = [getattr(each, "function", each)._callee for each in self._functions.values()]
        found = [session_of(slot.handle) for slot in self._slots if slot.handle is not None]
        found += [s for callee in functions for s in (callee.fixed_session, callee.session) if s is not None]
        return [each for each in dict.fromkeys(found) if not each.is_closed]

    def _state(self) -> dict[str, Any]:
        """Return the whole state, which is pickled, saved, and put on a runtime."""
        handles = [slot.handle for slot in self._slots]
        codes = list(self._codes)
        if self._functions:
            code = moves.dumps(self._functions, lambda handle: moves.slot_in(handles, handle))
            codes.append((tuple(self._functions), code))
            self._slots += map(_Slot, handles[len(self._slots) :])
        self._take_numbers()
        return {
            "format": FORMAT,
            "python": _PYTHON,
            "synk": __version__,
            "codes": codes,
            "parts": [slot.now() for slot in self._slots],
            "seed": self._seed,
            "streams": self._streams,
            "captured": [*self._captured, *moves.names_of_captured(self._functions.items())],
        }

    def _take_numbers(self) -> None:
        """Take over the seed and the random streams of the open runtime."""
        for session in self._parents()[:1]:
            self._seed = session.workers.processes.seed
            self._streams = _streams_of(session)

    def _leave(self, session: Session, /) -> None:
        """Keep the contents of a runtime's handles, because the runtime is about to be closed.

        The workers still answer. If this fails, a warning says so, and the runtime is closed anyway.
        """
        try:
            for slot in self._slots:
                if slot.is_open and session_of(slot.handle) is session:
                    slot.part = part_of(slot.handle)
            if session in self._parents()[:1]:
                self._take_numbers()
        except Exception as error:
            warn_at_users_line(
                f"the program of {', '.join(self.names)} could not keep its values when their runtime was closed: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
            )

    @verb
    def values(self) -> dict[str, Any]:
        """Return copies of the shared variables by name: arrays, or dicts of arrays by path."""
        return values_in(slot.now() for slot in self._slots if slot.is_shared)

    # -- files --------------------------------------------------------------------------------------------------------

    @verb
    def save(self, path: files.Path, *, wait: bool = True) -> Future[None] | None:
        """Write the program to a file, as a whole or not at all: values as NumPy arrays, functions beside them.

        Parameters
        ----------
        path : path
            A process that is killed at any instruction leaves either the whole old file or the whole new one.
        wait : bool
            True returns when the file is on the disk. False returns a future as soon as the values were copied; its
            ``result()`` waits for the file.

        Returns
        -------
        concurrent.futures.Future or None

        Raises
        ------
        OSError
            If the file cannot be written. An older file is not changed.
        ClosedError
            If the runtime that held a value ended by a fault, before the program had a copy.
        """
        return files.save(path, self._state, plain_values.write, wait=wait)

    @classmethod
    def load(cls, path: files.Path, *, values_only: bool = False) -> Any:
        """Return the program in a file that :meth:`save` wrote.

        Code of the file runs when the program is put on a runtime, and not before: load only your own files.

        Parameters
        ----------
        path : path
        values_only : bool
            Whether to return only the values, as :meth:`values` does. This never runs code.

        Returns
        -------
        Program or dict

        Raises
        ------
        SerializationError
            If another minor version of Python, or a newer synk, has written the file.
        ValueError
            If the file is not a program, or is damaged.
        OSError
            If the file cannot be read.
        """
        state = read(path)
        return values_in(state["parts"]) if values_only else _program_of(state)

    def __reduce__(self) -> Any:
        return _program_of, (self._state(),)

    def __repr__(self) -> str:
        return f"<synk.Program {', '.join(self.names)}>"

    def __str__(self) -> str:
        is_open = bool(self._parents())
        lines = [f"program of {len(self.names)} functions: {', '.join(self.names)}"]
        for slot in self._slots:
            known = slot.part or {"kind": type(slot.handle).__name__.lower(), "name": _name_of(slot.handle)}
            lines.append(f"  {known['kind']} {known['name']}")
        where = "those of the open runtime" if is_open else "its own"
        lines.append(f"  values: {where}; seed {'unknown' if self._seed is None and not is_open else 'kept'}")
        captured = [*self._captured, *moves.names_of_captured(self._functions.items())]
        if captured:
            lines.append(f"  left out: what the workers have changed by themselves of {', '.join(captured)}")
        return "\n".join(lines)


class RunningProgram:
    """A program on a runtime; made by :meth:`Program.on`. A context manager that closes the runtime it has opened.

    ``q.step(x)`` and ``q["step"](x)`` call a function. A function with the name of an attribute of this class or of
    :class:`Program` can be called in the second way only: ``q["save"](x)``.

    Attributes
    ----------
    program : Program
        The parent.
    runtime : Runtime
    """

    def __init__(
        self, program: Program, runtime: Runtime, functions: dict[str, Any], handles: Sequence[Any], *, is_owner: bool
    ) -> None:
        self.program = program
        self.runtime = runtime
        self._functions = functions
        self._handles = handles
        self._is_owner = is_owner

    def __getitem__(self, name: str) -> Any:
        if name not in self._functions:
            raise KeyError(
                f"cannot find {name!r} in the running program: expected one of {', '.join(map(repr, self._functions))}."
            )
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __getattr__(self, name: str) -> Any:
        functions = self.__dict__.get("_functions", {})
        if name in functions and not hasattr(Program, name):
            return functions[name]
        hint = f" The function of that name is q[{name!r}]." if name in functions else ""
        raise AttributeError(
            f"cannot read {name!r} of a running program: expected a function's name, one of "
            f"{', '.join(map(repr, functions))}.{hint}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._functions})

    @verb
    def sync_to_parent(self) -> None:
        """Give the parent the present values of this runtime. Replicas and objects are those of rank 0.

        While the runtime of the parent's functions is open, its variables are assigned, all of them or none. Otherwise
        the program's own values are set. Resident and replicated objects are set before the variables.

        Raises
        ------
        ValueError, TypeError
            If the parent's variables have another shape or dtype now. Nothing has changed then.
        """
        slots = self.program._slots[: len(self._handles)]
        parts = [part_of(handle) for handle in self._handles]
        open_slots = [(slot.handle, part) for slot, part in zip(slots, parts) if slot.is_open]
        moves.put([handle for handle, _ in open_slots], [part for _, part in open_slots])
        for slot, part in zip(slots, parts):
            if not slot.is_open:
                slot.part = part
        streams = _streams_of(self.runtime._session)
        for session in self.program._parents()[:1]:
            _set_streams(session, streams)
            return
        self.program._streams = streams

    @verb
    def sync_from_parent(self) -> None:
        """Take over the present values of the parent; the other direction of :meth:`sync_to_parent`."""
        moves.put(self._handles, [slot.now() for slot in self.program._slots[: len(self._handles)]])
        self.program._take_numbers()
        _set_streams(self.runtime._session, self.program._streams)

    @verb
    def close(self) -> None:
        """Close the runtime, if this program has opened it. The parent keeps the values of the last sync."""
        if self._is_owner:
            self.runtime.close()

    def __enter__(self) -> RunningProgram:
        self.runtime._session.check_open("enter the running program")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "cannot pickle a running program: it belongs to its runtime, and unpickling never forks. Call "
            "q.sync_to_parent() and pickle q.program."
        )

    def __repr__(self) -> str:
        return f"<running {self.program!r} on {self.runtime!r}>"


def _program_of(state: dict[str, Any]) -> Program:
    """Return the program of a state. None of its code runs yet."""
    check(state, _PYTHON)
    program = Program()
    program._codes = [(tuple(names), code) for names, code in state["codes"]]
    program._slots = [_Slot(part=part) for part in state["parts"]]
    program._seed, program._streams = state["seed"], state["streams"]
    program._captured = state["captured"]
    return program


def _built_on(runtime: Runtime, state: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the functions of a state on a runtime, and the handles there."""
    handles = [moves.make_handle(runtime, part) for part in state["parts"]]
    found: dict[str, Any] = {}
    for _, code in state["codes"]:
        found |= moves.loads(code, runtime, handles)
    _set_streams(runtime._session, state["streams"])
    return found, handles


def _name_of(handle: Any) -> str:
    return handle.name if hasattr(handle, "name") else repr(handle)


# -- random numbers ---------------------------------------------------------------------------------------------------


def _streams_of(session: Session) -> list[Any]:
    """Return the states of ``synk.comm.rng`` of all ranks."""

    def tell() -> bytes:
        from synk._wire.cell import cell

        return pickle.dumps(cell.worker.rng.bit_generator.state)  # a dict would be one output for each entry

    found: Any = Function(tell, outputs=None, per_rank=True, session=session)()
    return [pickle.loads(each) for each in found]


def _set_streams(session: Session, streams: Sequence[Any]) -> None:
    """Set ``synk.comm.rng`` of all ranks to these states, if there is one for each rank."""

    def go_on(states: Any) -> None:
        from synk._wire.cell import cell

        cell.worker.rng.bit_generator.state = states[cell.worker.number]

    if len(streams) == session.world_size:
        Function(go_on, bcast_inputs="states", outputs=None, per_rank=True, session=session)(streams)
