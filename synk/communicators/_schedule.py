"""The collectives that a rank has in flight, in their order.

A collective is a generator, its *steps*. It yields first when it has checked its arguments and shown nothing to the
other ranks yet, and then each time it has raised the rank's tick, to go on when all ranks have met. Over several nodes
it also yields a function that says whether what it waits for has come by wire. All ranks start the same collectives in
the same order, so only the first one in flight takes steps. It does so whenever the rank waits for anything, and
whenever the function asks for its state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from synk.communicators._rendezvous import Rendezvous

Steps = Generator[Any, None, Any]


class Operation:
    """A collective in flight, or one that is done.

    Attributes
    ----------
    is_ready : callable or None
        Whether what its next step needs has come by wire. None: the step needs no wire.
    is_done : bool
    value : object
        What its steps returned, once it is done.
    """

    __slots__ = ("_steps", "is_done", "is_ready", "value")

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.is_ready = next(steps)
        self.value: Any = None
        self.is_done = False

    def advance(self) -> None:
        """Take the next step."""
        try:
            self.is_ready = next(self._steps)
        except StopIteration as end:
            self.value = end.value
            self.is_done = True


class Schedule:
    """The collectives of one rank in flight.

    Attributes
    ----------
    operations : deque of Operation
        The oldest first. Only this one takes steps.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self.operations: deque[Operation] = deque()

    def __bool__(self) -> bool:
        return bool(self.operations)

    @property
    def last(self) -> Operation:
        return self.operations[-1]

    def clear(self) -> None:
        """Forget the collectives that a failed call has left."""
        self.operations.clear()

    def append(self, operation: Operation) -> None:
        """Add a collective. It goes on here if no other is in flight, else when all before it are done."""
        self.operations.append(operation)
        if len(self.operations) == 1:
            self._go_on()

    def advance(self) -> None:
        """Take the steps for which the other ranks are ready."""
        if self.operations and not self._must_wait(self.operations[0]):
            self._go_on()

    def _must_wait(self, operation: Operation) -> bool:
        """Whether the oldest collective waits for the other ranks."""
        rendezvous = self._rendezvous
        if operation.is_ready is None:
            return rendezvous.is_meeting and not rendezvous.has_met()
        if not operation.is_ready():
            return True
        rendezvous.rouse()
        return False

    def _go_on(self) -> None:
        """Take steps until one must wait for the other ranks, or no collective is left."""
        operations = self.operations
        while operations:
            # If its steps raise, a broken collective stays the oldest. Nobody comes here with it again:
            # ``RunningOperation`` refuses all later operations of the call, and the next call clears the schedule.
            operations[0].advance()
            if operations[0].is_done:
                operations.popleft()
            elif self._must_wait(operations[0]):
                return
