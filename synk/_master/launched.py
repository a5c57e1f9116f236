"""A call on its way: what is called, what was sent, and what a call on trial has shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._master.callee import Callee
from synk._master.plans import CachedPlan, Call
from synk._master.requests import Request
from synk._master.results import Lease
from synk._master.variable import Variable
from synk._wire.control import Traits


@dataclass(slots=True)
class Launched:
    """A call that was sent to the workers."""

    function: Callee
    call: Call
    cached: CachedPlan
    number: int
    request: Request
    lease: Lease | None
    deadline: float | None
    started_ns: int = 0
    staged_nbytes: int = 0
    pickled_nbytes: int = 0
    epoch: int = 0  # in which it began


@dataclass
class Tried:
    """What a call on trial showed.

    Attributes
    ----------
    leaves : list
        The outputs; where they were not combined, each a list with one entry per rank.
    skeleton
        The nesting of the outputs, with leaf positions as leaves.
    ranks, rows : list of int
        Who ran, and the rows of each.
    traits : Traits
    assigned : dict of Variable to list of lists of ndarray
        New values of variables by rank that ran, each as its arrays. None of them holds.
    """

    leaves: list[Any]
    skeleton: Any
    ranks: list[int]
    rows: list[int]
    traits: Traits
    assigned: dict[Variable, list[list[np.ndarray]]]
