"""A call on its way: what is called, what was sent, and what a call on trial has shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._master.calls.callee import Callee
from synk._master.calls.plans import CachedPlan, Call
from synk._master.state.results import Lease
from synk._master.state.variable import Variable
from synk._master.workers.doorbells import Doorbells
from synk._master.workers.requests import Request
from synk._wire.control import Traits


class Launched(Request):
    """A call, and the message by which the workers hear of it.

    Parameters
    ----------
    values : sequence of ndarray
        What is copied to ``cached.targets``.
    deadline : float or None
        Monotonic time by which all ranks must have answered.
    started_ns, pickled_nbytes : int
        When it began, and what was pickled for it.
    log_state : int
        In which it began.
    doorbells : Doorbells or None
        Those of a call that fits a compiled one; None for a new one, of which the workers may have to learn something.
    lease : Lease or None
        The buffer for its large outputs, where one was taken.

    Attributes
    ----------
    assembly : Assembly or None
        How the outputs of the call before were put together.
    number : int
        By which the workers tell it from others of its plan.
    is_submitted : bool
    result : tuple or None
        The result, while its function is checked after the call; see ``synk._master.calls.trials``.
    """

    phase = "call"
    sequence = number = 0
    is_submitted = False
    result: tuple[Any] | None = None

    def __init__(
        self,
        function: Callee,
        call: Call,
        cached: CachedPlan,
        values: Sequence[Any],
        deadline: float | None,
        started_ns: int,
        pickled_nbytes: int,
        log_state: int,
        doorbells: Doorbells | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.pending = set(call.ranks)
        self.replies = {}
        self.what = function.title
        self.function = function
        self.call = call
        self.cached = cached
        self.assembly = cached.assembly
        self.values = values
        self.deadline = deadline
        self.started_ns = started_ns
        self.pickled_nbytes = pickled_nbytes
        self.log_state = log_state
        self.doorbells = doorbells
        self.lease = lease

    @property
    def later_deadline(self) -> float | None:
        """The deadline of the messages about its outputs, which wait behind calls that were submitted later."""
        return None if self.is_submitted else self.deadline


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
