"""The epoch: one number that changes with everything by which a call that is remembered can become wrong."""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)


class Epoch:
    """A number that is never the same again once something has happened.

    Whoever changes what a remembered call relies on ends the epoch: the burial of a worker and the start of another, a
    body that is sent to a rank, a plan, function, variable or segment that ranks have to forget, a change of a variable
    from the master's side, memory of a lane that is replaced, a fork of this process, closing. Where it is not certain
    that a change matters, it ends the epoch too: the next call is a new one, and that is all.

    The numbers come from one counter for all. So a store by which one thread overtakes another can hide a number but no
    change: what stands there in the end was not there before.

    Attributes
    ----------
    number : int
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = next(_numbers)

    def end(self) -> None:
        """Begin another epoch."""
        self.number = next(_numbers)
