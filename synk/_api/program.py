"""``Program``: functions and their state, which run on another backend after they were built, and can be stored.

It is made of calls that a user could write: values are read and assigned, and functions are built once more.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from synk._api.composed import Composed
from synk._api.function import Function
from synk._api.options import OPTIONS
from synk._api.plain import ByReference, CodePickler
from synk._api.runtime import Runtime
from synk._code.captured import unsendable
from synk._code.parcels import Handle
from synk._engine.resident import Resident
from synk._engine.shared import Shared
from synk._pure import files
from synk._pure.tracebacks import verb
from synk._pure.words import no_attribute, text_of
from synk._wire.cell import refuse_inside_worker
from synk._wire.parcels import dumps
from synk.errors import SerializationError

_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


class _Value(NamedTuple):
    """What a variable or a resident object holds, and how a runtime makes another one of it."""

    kind: str
    value: Any
    options: dict[str, Any]


class _Stored(NamedTuple):
    """A program that was pickled or saved: the version of Python, and pickles of its functions and of its values."""

    python: str
    code: bytes
    values: bytes


class Program:
    """Functions and their state: build them once, run them here, put them on another backend later.

    The values of a program are those of its variables. ``p.on(backend)`` makes a copy of it on other workers, with the
    values of that moment. From then on each has its own, until ``q.sync_to_parent()`` copies those of the copy back.

    Parameters
    ----------
    function : Function, optional
        It is called like the program itself: ``p(x)``.
    state : dict of str to Shared or Resident, optional
        All variables and resident objects to which the functions refer, by names of your choice.
    **functions : Function
        Each is called by its name: ``p.step(x)``.

    Raises
    ------
    TypeError
        If a function is not one of synk, or an entry of ``state`` neither a variable nor a resident object.
    ValueError
        If a name is one that programs use themselves, or ``state`` has an object under two names.
    SerializationError
        If a function cannot be pickled, or refers to something on the workers that is not in ``state``.

    Notes
    -----
    Functions travel by value, as bytecode, with what they have captured in the program; classes and modules travel by
    name. Of replicas and resident objects the values are those of rank 0; the rows of sharded variables are divided
    anew. Random generators do not travel: keep one in a resident object, or name the ``seed`` of the other runtime.

    A program on a runtime loses its values with that runtime. ``save`` and ``pickle.dumps`` keep them: a program that
    was loaded is on no runtime, and ``on`` puts it there. Loading a program runs code: load only your own files.

    The two steps, and the word that copies values back, are of a proposal for Theano, whose functions were built for
    NumPy and then run by another library ("Strategy for OpenCL support", theano-dev, 2013).

    Examples
    --------
    >>> import pickle, numpy as np, synk
    >>> with synk.fork(2):
    ...     w = synk.shared(np.zeros(2))
    ...     @synk.function(updates=[w])
    ...     def step(x):
    ...         return x.sum(), w.value + 1
    ...     p = synk.Program(step=step, state={"w": w})
    ...     _ = p.step(np.ones(4))                     # here
    ...     with p.on("numpy", num_workers=3) as q:    # there
    ...         _ = q.step.repeat(3, np.ones(4))
    ...         q.sync_to_parent()
    ...     data = pickle.dumps(p)
    >>> pickle.loads(data).values()
    {'w': array([4., 4.])}
    """

    @verb
    def __init__(
        self, function: Function[..., Any] | None = None, /, *, state: Mapping[str, Any] | None = None, **functions: Any
    ) -> None:
        refuse_inside_worker("make a program")
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(
                f"cannot make a program: got {type(state).__name__} as its state, expected a dict of variables and "
                "resident objects by name. A function cannot be named 'state': rename it."
            )
        self._functions: dict[str, Any] = functions if function is None else {"": function, **functions}
        self._state: dict[str, Any] = dict(state or {})
        self._stored: _Stored | None = None
        self._parent: Program | None = None
        self._own_runtime: Runtime | None = None
        for name, each in self._functions.items():
            if type(each) not in (Function, Composed):
                raise TypeError(
                    f"cannot make a program: got {type(each).__name__} as {name or 'its function'}, expected a synk "
                    "function. Make it by synk.function(fn); a training step is stored by its rep.save(path)."
                )
            if hasattr(Program, name) or name in vars(self):
                raise ValueError(
                    f"cannot make a program: got a function named {name!r}, expected a name that programs do not use "
                    "themselves. Rename it."
                )
        for name, each in self._state.items():
            if not isinstance(each, (Shared, Resident)):
                raise TypeError(
                    f"cannot make a program: got {type(each).__name__} as {name!r} of its state, expected what "
                    "synk.shared or synk.resident returned."
                )
            if same := [other for other in self._state if self._state[other] is each and other != name]:
                raise ValueError(
                    f"cannot make a program: got one object as {name!r} and {same[0]!r} of its state, expected each "
                    "under one name, since on() makes another one for each name. Leave one name out."
                )
        _code_of(self._functions, self._state)  # for its errors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that has no name."""
        return getattr(self, "")(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        functions = vars(self).get("_functions", {})
        if name in functions:
            return functions[name]
        if vars(self).get("_stored") and not name.startswith("_"):
            raise AttributeError(f"cannot use {name!r} of a program on no runtime. Put it on one: p.on(backend).{name}")
        raise no_attribute("Program", self, name)

    @verb
    def on(self, backend: str | Runtime = "auto", **options: Any) -> Program:
        """Return a copy on other workers: of a new runtime with these options, or of one that is there.

        Parameters
        ----------
        backend : str or Runtime
        **options
            As for :class:`synk.Runtime`. The new runtime belongs to the copy, which closes it: use it in a ``with``.

        Raises
        ------
        TypeError
            If both a runtime and options are given.
        SerializationError
            If what the functions import is missing, or another minor version of Python has stored the program.
        ClosedError
            If the runtime that holds the values is closed.
        """
        refuse_inside_worker("put a program on a runtime")
        code, values = self._code(), self._values()
        is_given = isinstance(backend, Runtime)
        if is_given and options:
            raise TypeError(f"cannot put a program on {backend!r}: got {', '.join(options)} as well, expected neither.")
        runtime = backend if isinstance(backend, Runtime) else Runtime(backend=backend, **options)
        try:
            state = {
                name: getattr(runtime, each.kind)(each.value, name=name, **each.options)
                for name, each in values.items()
            }
            functions = {name: runtime.function(fn, **built) for name, (fn, built) in _built(code, state).items()}
            copy = Program(functions.pop("", None), state=state, **functions)
        except BaseException:
            if not is_given:
                runtime.close()
            raise
        copy._parent, copy._own_runtime = self, None if is_given else runtime
        return copy

    @verb
    def values(self) -> dict[str, Any]:
        """Return copies of the values by name: arrays, nestings of arrays, and resident objects."""
        return {name: each.value for name, each in self._values().items()}

    @verb
    def sync_to_parent(self) -> None:
        """Give the program of which this one is a copy the values that this one has now, one after the other.

        Raises
        ------
        ValueError, TypeError
            If there is no such program, or a variable of it does not take the value.
        """
        parent = self._parent
        if parent is None:
            raise ValueError("cannot sync a program: got one without a parent, expected one that on() has returned.")
        values = self._values()
        if parent._stored:
            parent._stored = parent._stored._replace(values=dumps(values))
            return
        for name, each in values.items():
            handle = parent._state[name]
            if isinstance(handle, Shared):
                handle.value = each.value
            else:
                handle.set(each.value)

    @verb
    def save(self, path: files.Path) -> None:
        """Write the functions and the values to a file, as a whole or not at all: what ``pickle.dumps`` returns."""
        files.save(path, lambda: self, pickle.dump, wait=True)

    @classmethod
    def load(cls, path: files.Path) -> Program:
        """Return the program in a file that :meth:`save` wrote. This runs code: load only your own files.

        Raises
        ------
        ValueError
            If the file is not a program, or is damaged.
        """
        with open(path, "rb") as file:
            data = file.read()
        try:
            program = pickle.loads(data)
        except Exception as error:  # what a damaged pickle raises depends on where the damage is
            text = text_of(error).rstrip(".")
            raise ValueError(
                f"cannot load {path!r}: {text}, expected what save() has written. It may be damaged."
            ) from error
        if not isinstance(program, Program):
            raise ValueError(f"cannot load {path!r}: got {type(program).__name__}, expected what save() has written.")
        return program

    @verb
    def close(self) -> None:
        """Close the runtime, if :meth:`on` has made it. The values that it has are lost."""
        if self._own_runtime is not None:
            self._own_runtime.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        stored = self._stored or _Stored(_PYTHON, self._code(), dumps(self._values()))
        return _program_of, (stored, _checksum(stored))

    def __repr__(self) -> str:
        names = "on no runtime" if self._stored else ", ".join(filter(None, self._functions))
        return f"<synk.Program {names}>"

    def _code(self) -> bytes:
        if self._stored is None:
            return _code_of(self._functions, self._state)
        if self._stored.python != _PYTHON:
            raise SerializationError(
                f"cannot run a program: got functions of Python {self._stored.python}, and this is Python {_PYTHON}, "
                "expected the same minor version, because they travel as bytecode. Its values() can be read here."
            )
        return self._stored.code

    def _values(self) -> dict[str, _Value]:
        if self._stored is None:
            return {name: _value_of(handle) for name, handle in self._state.items()}
        values: dict[str, _Value] = pickle.loads(self._stored.values)
        return values


def _checksum(stored: _Stored) -> int:
    return zlib.crc32(stored.values, zlib.crc32(stored.code, zlib.crc32(stored.python.encode())))


def _program_of(stored: _Stored, checksum: int) -> Program:
    if _checksum(stored) != checksum:
        raise ValueError("cannot load a program: got other bytes than were stored, expected the same. It is damaged.")
    program = Program()
    program._stored = stored
    return program


def _value_of(handle: Any) -> _Value:
    if isinstance(handle, Shared):
        return _Value("shared", handle._read(), {"sharded": handle.is_sharded})
    return _Value("resident", handle.get(), {"dump": handle._referent._dump, "load": handle._referent._load})


def _code_of(functions: dict[str, Any], state: dict[str, Any]) -> bytes:
    """Return functions and what they were built with as one pickle, so that what they share stays shared."""
    built = {
        name: (each._callee.fn, {option.name: getattr(each._options, option.name) for option in OPTIONS})
        for name, each in functions.items()
    }
    names = {id(handle): name for name, handle in state.items()}

    def name_of(handle: Handle) -> str:
        if id(handle) not in names:
            raise SerializationError(
                f"cannot make a program: a function refers to {handle!r}, which is not in its state. Name it there: "
                "synk.Program(step=step, state={'w': w})."
            )
        return names[id(handle)]

    file = io.BytesIO()
    try:
        CodePickler(file, name_of).dump(built)
    except SerializationError:
        raise
    except Exception as error:
        fn = next((fn for fn, _ in built.values()), None)
        raise unsendable(", ".join(map(repr, functions)), fn, error) from error
    return file.getvalue()


def _built(code: bytes, state: dict[str, Any]) -> dict[str, Any]:
    """Return plain functions that refer to the handles of a state, and the options to build them with."""
    try:
        built: dict[str, Any] = ByReference(code, state).load()
    except (ImportError, AttributeError, pickle.UnpicklingError) as error:
        raise SerializationError(
            f"cannot build the functions of a program here: {type(error).__name__}: {error}. Install what they import; "
            "functions travel by value, classes and modules by name."
        ) from error
    return built
