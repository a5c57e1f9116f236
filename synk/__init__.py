"""synk: run a plain Python function on all GPUs of a machine, or on all its CPU cores, as if it were one call."""

from synk import errors
from synk._api.current import close, current, fork
from synk._api.data import Data
from synk._api.function import Function, distribute, function, wrap
from synk._api.runtime import Runtime
from synk._api.shared import Shared
from synk._api.verbs import (
    all_gather,
    all_reduce,
    broadcast,
    data,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    info,
    profile,
    reduce,
    scatter,
    set_value,
    shared,
)
from synk._master.program import freeze_support
from synk._master.queue import PendingCall
from synk._version import __version__
from synk._worker.comm import comm

__all__ = [
    "Data",
    "Function",
    "PendingCall",
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
    "scatter",
    "set_value",
    "shared",
    "wrap",
]
