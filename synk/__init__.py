"""Run a plain Python function on all GPUs of a machine, or on all its CPU cores, as if it were one call.

    >>> import numpy as np, synk
    >>> runtime = synk.fork(2)                    # workers; without a number one for each GPU, or core
    >>> @synk.function(outputs="gather")          # rows are divided, results joined in order
    ... def squares(x):
    ...     return x**2
    >>> squares(np.arange(4))
    array([0, 1, 4, 9])
    >>> bool(squares.verify(np.arange(4)))        # does it equal the plain function?
    True
    >>> list(synk.map(str.upper, ["a", "b"]))     # single items of any kind
    ['A', 'B']
    >>> synk.close()

fork, close, info               start and end the workers, look at them
function, map                   functions of rows, and of single items
data                            arrays that are copied to the workers once
shared, resident                arrays and objects that live on the workers
comm                            what ranks say to one another, inside a function
torch                           training loops of PyTorch
Program                         functions and their state, to be moved and stored
Executor                        the workers as a pool of concurrent.futures
errors                          all exceptions

Begin with ``help(synk.function)``. ``help(f)`` of a function that was built shows its options and verbs: ``f.verify``,
``f.submit``, ``f.stream``, ``f.serial``.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _sys.platform == "win32":
    raise ImportError(
        "cannot import synk: got the platform 'win32', expected Linux, whose shared memory and process descriptors it "
        "is built on. On Windows it runs in WSL 2."
    )

from synk import errors
from synk._pure.environment import at_import as _at_import
from synk._pure.environment import imported_late as _imported_late
from synk._pure.ops import Op
from synk._pure.words import no_attribute as _no_attribute
from synk._rank.program import freeze_support
from synk._version import __version__
from synk._wire.cell import cell as _cell
from synk._wire.cell import is_worker as _is_worker
from synk.errors import ItemError

# A worker imports the names of the program's half when a function first uses one: most functions use none. With
# ``comm`` it is the other way round. No process imports what few programs use before it is used.
if not _is_worker():
    from synk._api.names import *  # noqa: F403
if _is_worker() or _TYPE_CHECKING:
    from synk.communicators._comm import comm
if _TYPE_CHECKING:
    from synk._api.executor import Executor
    from synk._api.program import Program

_OWN_FILES = {
    "Executor": "synk._api.executor",
    "Program": "synk._api.program",
    "comm": "synk.communicators._comm",
}


def _register(joblib: _Any) -> None:
    """Have joblib know the backend ``"synk"``, of which nothing is imported before it is used."""
    if hasattr(joblib, "register_parallel_backend"):
        backend = "synk.extensions.joblib"
        joblib.register_parallel_backend("synk", lambda **options: _import_module(backend).SynkBackend(**options))


_at_import("joblib.parallel", _register)


def __getattr__(name: str) -> _Any:
    if name in ("torch", "profiler"):
        return _import_module(f"synk.{name}")
    if name not in __all__ and name != "map":
        raise _no_attribute("synk", _sys.modules[__name__], name)
    with _cell.uninterrupted():  # an import that is broken off leaves files open
        return getattr(_imported_late(_OWN_FILES.get(name, "synk._api.names")), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "map", "profiler", "torch"})


__all__ = [  # noqa: F405
    "Data",
    "Executor",
    "Function",
    "ItemError",
    "Op",
    "PendingCall",
    "Program",
    "Resident",
    "Runtime",
    "Shared",
    "__version__",
    "all_gather",
    "all_reduce",
    "broadcast",
    "close",
    "comm",
    "current",
    "data",
    "distribute",
    "errors",
    "fork",
    "freeze_support",
    "function",
    "gather",
    "info",
    "profile",
    "reduce",
    "replay",
    "resident",
    "scatter",
    "shared",
]
