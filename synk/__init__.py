"""synk: run a plain Python function on all GPUs of a machine, or on all its CPU cores, as if it were one call."""

import sys as _sys
from importlib import import_module as _import_module
from typing import Any as _Any

if _sys.platform != "linux":
    raise ImportError(
        f"cannot import synk: got the platform {_sys.platform!r}, expected Linux, whose shared memory and process "
        "descriptors it is built on. On Windows it runs in WSL 2."
    )

from synk import errors
from synk._pure.ops import Op
from synk._version import __version__
from synk._wire.cell import cell as _cell
from synk._wire.program import is_worker as _is_worker
from synk._worker.comm.comm import comm
from synk._worker.loop.program import freeze_support

# In the master these are imported with synk: later they would be looked for in whatever folder the program is in by
# then. A worker has them looked up when a function uses one; most use none, and they bring all of the master's half.
if not _is_worker():
    from synk._api.names import *  # noqa: F403


def __getattr__(name: str) -> _Any:
    if name == "torch":  # it imports torch
        return _import_module("synk.torch")
    if name not in __all__ and name != "map":
        raise AttributeError(f"module 'synk' has no attribute {name!r}")
    with _cell.uninterrupted():  # an import that is broken off leaves files open
        return getattr(_import_module("synk._api.names"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "map"})


__all__ = [  # noqa: F405
    "Data",
    "Executor",
    "Function",
    "FunctionWrapper",
    "Op",
    "PendingCall",
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
    "get_lengths",
    "get_shapes",
    "get_value",
    "info",
    "profile",
    "reduce",
    "resident",
    "scatter",
    "set_value",
    "shared",
    "wrap",
]
