"""synk: run a plain Python function on all GPUs of a machine, or on all its CPU cores, as if it were one call."""

from typing import Any

__version__ = "0.1.0"

from synk import errors
from synk.data import Data
from synk.function import Function, distribute, function, wrap
from synk.runtime import Runtime, close, current, fork
from synk._verbs import data, info

__all__ = [
    "Data",
    "Function",
    "Runtime",
    "close",
    "current",
    "data",
    "distribute",
    "errors",
    "fork",
    "function",
    "info",
    "wrap",
]
