"""A call in flight: what is called and what was sent."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from synk._master.calls.callee import Callee
from synk._master.calls.plans import CachedPlan, Call
from synk._master.state.results import Lease
from synk._master.workers.doorbells import Doorbells
from synk._master.workers.requests import Request
from synk._wire.messages import Reply

R = TypeVar("R")

Steps = Generator[Request, dict[int, Reply], R]
"""Yields each request whose replies it needs, is sent the replies, and returns a result."""


class Launched(Request):
    """A call, and the message that tells the workers of it.

    Parameters
    ----------
    values : sequence of ndarray
        What is copied to ``cached.targets``.
    deadline : float or None
        Monotonic time by which all ranks must have answered.
    started_ns, pickled_nbytes : int
        When it began, and how many bytes were pickled for it.
    log_state : int
        The state of the log when it began.
    doorbells : Doorbells or None
        The doorbells of a call that fits a compiled one. None for a new call, which may bring the workers
        something that they do not have.
    lease : Lease or None
        The buffer for its large outputs, if one was leased.

    Attributes
    ----------
    assembly : Assembly or None
        How the outputs are put together. Before the replies have come, it is the assembly of the call before.
    number : int
        The number by which the workers tell it from other calls of its plan.
    sent_ns : int
        When the ranks were told; only in a trace.
    is_submitted : bool
    """

    phase = "call"
    sequence = number = sent_ns = 0
    is_submitted = False

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
        # All ranks owe a reply from the beginning: wherever the ringing is interrupted, none is forgotten.
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
        """The deadline of messages about its outputs. After ``submit`` there is none: they wait behind later calls."""
        return None if self.is_submitted else self.deadline
