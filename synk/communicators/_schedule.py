"""The collectives that a rank has started and not finished, in their order.

A collective is a generator, its *steps*. It first yields when it has refused what it refuses and shown nothing yet,
then each time it has raised the rank's tick, and goes on when all ranks have met. All ranks start the same ones in the
same order, so one is under way at a time. The rank goes on with it whatever it waits for, and whenever it is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from synk.communicators._rendezvous import Rendezvous

Steps = Generator[None, None, Any]


class Operation:
    """A collective that was started."""

    __slots__ = ("_returned", "_steps")

    def __init__(self, steps: Steps) -> None:
        self._returned: list[Any] = []
        self._steps = _to_the_end(steps, self._returned)
        next(self._steps)

    @property
    def is_done(self) -> bool:
        return bool(self._returned)

    @property
    def value(self) -> Any:
        """What its steps have returned; it is done."""
        return self._returned[0]

    def advance(self) -> None:
        """Take the next step."""
        next(self._steps, None)


def _to_the_end(steps: Steps, returned: list[Any]) -> Steps:
    """Take the steps, and note what they return."""
    returned.append((yield from steps))


class Schedule:
    """The collectives of one rank that are not finished.

    Attributes
    ----------
    operations : deque of Operation
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
        """Forget what a failed call has left."""
        self.operations.clear()

    def append(self, operation: Operation) -> None:
        """Start one; its turn comes when those before it are done."""
        self.operations.append(operation)
        if len(self.operations) == 1:
            self._go_on()

    def advance(self) -> None:
        """Go on as far as the other ranks have come."""
        if self.operations and self._rendezvous.has_met():
            self._go_on()

    def _go_on(self) -> None:
        operations, rendezvous = self.operations, self._rendezvous
        while operations:
            operations[0].advance()
            if operations[0].is_done:
                operations.popleft()
            elif rendezvous.is_meeting and not rendezvous.has_met():
                return
