"""PyTorch on all workers: training loops, and differentiable collectives and messages for use inside functions.

It is loaded when ``synk.torch`` is first used. synk does not import torch by itself.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from synk._pure.words import no_attribute as _no_attribute
from synk._wire.cell import cell as _cell
from synk.torch._collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from synk.torch._point_to_point import irecv, isend, recv, send

if TYPE_CHECKING:
    from synk.torch._data_parallel import DataParallel
    from synk.torch._process_group import process_group
    from synk.torch._rank import mean, total
    from synk.torch._replicate import Replicated, replicate
    from synk.torch._steps import StepFunction

# These names import the program's half of synk or are useless without it, so they are imported at first use. Functions
# on the workers seldom need one.
_TRAINING = {
    "DataParallel": "synk.torch._data_parallel",
    "Replicated": "synk.torch._replicate",
    "StepFunction": "synk.torch._steps",
    "mean": "synk.torch._rank",
    "process_group": "synk.torch._process_group",
    "replicate": "synk.torch._replicate",
    "total": "synk.torch._rank",
}


def __getattr__(name: str) -> _Any:
    if name not in _TRAINING:
        raise _no_attribute("torch", _sys.modules[__name__], name)
    with _cell.uninterrupted():  # an import that is broken off leaves files open
        return getattr(_import_module(_TRAINING[name]), name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "DataParallel",
    "Replicated",
    "StepFunction",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "mean",
    "process_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scatter",
    "send",
    "total",
]
