"""A call on trial, on its rank: a copy of the function runs, and nothing is left of the run but its outputs.

Shared variables keep their values, because the master does not commit such a call. The rest happens here: what the
function captured is copied, the process's random generators are restored, and what the function prints and logs is
dropped. What it does outside of the process, and to modules that it imports, cannot be undone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import math
import pickle
import sys
import warnings
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from synk._pure.generators import generator_states, restore_generators
from synk._pure.ops import EACH
from synk._wire.cell import cell
from synk._wire.control import Traits
from synk._wire.parcels import Pickler
from synk._wire.settings import kept
from synk._worker.held.pickling import CappedFile
from synk.errors import SerializationError

if TYPE_CHECKING:
    from synk._worker.held.plans import LoadedFunction

_GENERATORS = {("numpy", "Generator"), ("numpy", "RandomState"), ("random", "Random"), ("torch", "Generator")}
_COMPILERS = {"jax", "jaxlib", "numba"}


class Trial:
    """One run of a function on trial.

    Attributes
    ----------
    function : LoadedFunction
        The copy to run.
    traits : Traits
        What the run did. Valid after ``running``.
    compiles : bool
        Whether the function uses a library that compiles for each shape.

    Raises
    ------
    SerializationError
        If what the function captured cannot be copied. The originals must not be touched.
    """

    def __init__(self, function: LoadedFunction, *, is_apart: bool, max_nbytes: float = math.inf) -> None:
        self.function = copy.copy(function)
        if is_apart:
            self.function.ops = EACH
        self.traits = Traits(0)
        self._classes: list[tuple[type, dict[str, Any]]] = []
        try:
            pickled = _Pickle(function.fn, max_nbytes)
            self.compiles, self._data = pickled.compiles, pickled.data
            # Cloudpickle loads a class into the existing one, so that one holds copies until the trial is over.
            self._classes = [(cls, dict(vars(cls))) for cls in pickled.classes]
            self.renew()
        except Exception as error:
            self._restore_classes()
            raise SerializationError(
                f"cannot try {function.name!r}: what it captured cannot be copied on its rank ({type(error).__name__}: "
                f"{error}), expected objects that can be pickled. Compare a call with f.serial(...) yourself."
            ) from error

    def renew(self) -> None:
        """Make a new copy of the function, in the state of the first one."""
        self.function.fn = pickle.loads(self._data)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Note what the body does to this process, and undo it."""
        fn, states = self.function.fn, _states()
        before = _Pickle(fn)
        generators = [_Pickle(generator).data for generator in before.generators]
        sink, level = io.StringIO(), logging.root.manager.disable
        logging.disable()
        try:
            with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink), kept():
                warnings.simplefilter("ignore")
                yield
            drawn = _states()
            if any(_bytes(state) != _bytes(drawn[name]) for name, state in states.items()):
                self.traits |= Traits.DRAWS
            with contextlib.suppress(Exception):  # what it captured during the run may not be picklable
                if generators != [_Pickle(generator).data for generator in before.generators]:
                    self.traits |= Traits.DRAWS
                elif before.data != _Pickle(fn).data:
                    self.traits |= Traits.CHANGES
        finally:
            logging.disable(level)
            self._restore_classes()
            self.function.fn = _nothing  # frees the copy, even if the plan is kept
            restore_generators(states)
            cell.worker.rng.bit_generator.state = states["synk.comm"]

    def _restore_classes(self) -> None:
        for cls, table in self._classes:
            now = dict(vars(cls))
            for name in now.keys() - table.keys():
                type.__delattr__(cls, name)
            for name, value in table.items():
                if now.get(name, self) is not value:
                    type.__setattr__(cls, name, value)


def _states() -> dict[str, Any]:
    """Return the states of the process's own random generators, by module."""
    return generator_states() | {"synk.comm": cell.worker.rng.bit_generator.state}


def _bytes(state: Any) -> bytes:
    return bytes(state.numpy()) if hasattr(state, "numpy") else pickle.dumps(state)  # torch pickles no two alike


def _nothing() -> None:
    pass


def _library_of(obj: Any) -> str:
    """Return the name of the library that a module, or the class of any other object, belongs to."""
    name = obj.__name__ if isinstance(obj, ModuleType) else getattr(type(obj), "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


class _Pickle(Pickler):
    """A pickle of an object, with the random generators that it holds and the classes that travel with it."""

    def __init__(self, value: Any, max_nbytes: float = math.inf) -> None:
        file = CappedFile(max_nbytes)
        super().__init__(file, protocol=5)
        self.generators: list[Any] = []
        self.classes: list[type] = []
        self.compiles = False
        self.dump(value)
        self.data = file.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if (kind.__module__.partition(".")[0], kind.__qualname__) in _GENERATORS:
            self.generators.append(obj)
        named = [obj, *map(obj.__globals__.get, obj.__code__.co_names)] if isinstance(obj, FunctionType) else [obj]
        self.compiles = self.compiles or not _COMPILERS.isdisjoint(map(_library_of, named))
        if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # cloudpickle misses subclasses, such as lazy modules
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            self.classes.append(obj)
        return reduced
