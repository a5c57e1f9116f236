"""synk: run a plain Python function on all GPUs of a machine, or on all its CPU cores, as if it were one call."""

from importlib import import_module as _import_module
from typing import Any as _Any

from synk import errors
from synk._api.build import function
from synk._api.current import close, current, fork
from synk._api.data import Data
from synk._api.function import Function
from synk._api.resident import Resident
from synk._api.runtime import Runtime
from synk._api.shared import Shared
from synk._api.verbs import (
    all_gather,
    all_reduce,
    broadcast,
    data,
    distribute,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    info,
    profile,
    reduce,
    resident,
    scatter,
    set_value,
    shared,
)
from synk._api.wrap import wrap
from synk._api.wrapper import FunctionWrapper
from synk._master.pending import PendingCall
from synk._version import __version__
from synk._worker.comm import comm
from synk._worker.program import freeze_support


def __getattr__(name: str) -> _Any:
    if name == "torch":  # loaded when it is first used, because it imports torch
        return _import_module("synk.torch")
    raise AttributeError(f"module 'synk' has no attribute {name!r}")


__all__ = [
    "Data",
    "Function",
    "FunctionWrapper",
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
