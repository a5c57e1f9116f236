"""A rank as functions, ``synk.comm`` and the wings see it, whichever loop answers the program's messages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from synk._rank.functions import LoadedFunction
from synk._wire.control import Down, Phase, Up
from synk.backends import DeviceBackend
from synk.communicators._collectives import Collectives
from synk.errors import ReentrancyError

_PHASE, _FUNCTION = int(Up.PHASE), int(Phase.FUNCTION)


class Interrupted(KeyboardInterrupt):
    """The master asked this worker to end its call."""


class Member:
    """A rank as what it runs sees it. A subclass sets the attributes, and answers messages.

    Attributes
    ----------
    rank : int
    lane
        The lane of the current call.
    mapped : LoadedFunction or None
        The function of a map, while this rank runs some of its items.
    seed : sequence of int
        The runtime's seed, then the key of this rank's own stream.
    is_copy : bool
        Whether a function has forked this process: the child is no rank.
    is_held : bool
        Whether a first interrupt waits for the end of a step; see ``hold_back``.
    is_due : bool
        Whether one waits now.
    """

    rank: int
    lane: Any
    lanes: Sequence[Any]
    peers: Any
    variables: Any
    backend: Any
    own_up: Any
    mapped: LoadedFunction | None
    seed: Sequence[int]
    is_copy: bool
    is_held: bool
    is_due: bool

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """This rank's own generator of random numbers."""
        seed, *key = self.seed
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(key)))

    @property
    def num_rows(self) -> int:
        """This rank's rows in the call."""
        return int(self.lane.down[self.rank, Down.ROWS])

    @property
    def function_name(self) -> str:
        if self.mapped is not None:
            return self.mapped.name
        called = self.lane.called
        return called.function.name if called is not None else ""

    def disown(self) -> None:
        """In a child that the function has forked: it is no rank, and ``synk.comm`` refuses it."""
        self.is_copy = True
        self.peers.short_path = self.peers.current = None
        for lane in self.lanes:
            if lane.communicator is not None:
                lane.communicator.disown()

    def collectives(self) -> Collectives:
        """Return the collectives of the current call, for ``synk.comm``."""
        if self.is_copy:
            raise ReentrancyError(
                f"cannot communicate in a process that {self.function_name!r} has forked: its parent is the rank. Send "
                "its results to the parent, which communicates."
            )
        self.check_called()
        if self.variables.is_sliced:
            raise ValueError(
                f"cannot communicate in {self.function_name!r}: the call has num_slices above 1, so each rank runs the "
                "function several times, and not all of them equally often. Call it with num_slices=1."
            )
        called = self.lane.called
        if called is None or self.own_up[_PHASE] != _FUNCTION:
            # To join the lane's last call once more would be worse: no rank would be there, and nobody would leave it.
            raise ValueError(
                "cannot communicate outside of a call: got a collective or a message in on_restart, or in code that "
                "runs while an object is loaded or sent, expected one in a function that all ranks run together."
            )
        if self.backend.is_device:
            cast(DeviceBackend, self.backend).enter_thread()
        return self.peers.collectives(self.lane, called.function)

    def check_called(self) -> None:
        """Raise in an item of a map, which runs on one rank: what follows is for calls that all ranks run together."""
        if self.mapped is not None:
            raise ValueError(
                f"cannot communicate in {self.function_name!r}: synk.map runs it for each item on one worker, while "
                "the others are at other items, expected a function that needs no other rank. Use synk.function for "
                "one that all ranks run together."
            )

    def interrupt(self) -> None:
        """End the current call now, or at the end of its step if ``hold_back`` says so."""
        if self.is_held and not self.is_due:
            self.is_due = True
            return
        raise Interrupted

    def hold_back(self, is_held: bool) -> None:
        """Begin or end a step that this rank can finish by itself: an interrupt in it is raised only at its end.

        This is weaker than :meth:`uninterrupted`: the master sends a second interrupt to a rank that has not answered
        the first one, and that one is raised at once. So even code that never ends can be ended.
        """
        was_due = self.is_due
        self.is_held, self.is_due = is_held, False
        if was_due:
            raise Interrupted
