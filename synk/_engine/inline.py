"""Rank 0 in the program itself, for a debugger: the same orders and replies, answered at once."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from synk._pure.interrupts import waiting
from synk._rank import failpoints as _failpoints
from synk._rank.loop import hello_of, open_rank
from synk._wire import orders as wire
from synk._wire.cell import cell
from synk._wire.mapping import Descriptor, owned
from synk._wire.memory import Segment


class InlineProcess:
    """Plays a rank without a process of its own, and is the connection to it.

    What the program does with processes has nothing to do here.
    """

    is_inline: ClassVar[bool] = True
    is_open = False

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, os.getpid()
        self._rank: Any = None
        self._replies: deque[bytes] = deque()
        self._bodies: dict[int, tuple[Any, list[Descriptor]]] = {}

    @property
    def link(self) -> InlineProcess:
        return self

    def start(self, setup: dict[str, Any], environment: dict[str, str], control_fd: int, extra: dict[str, int]) -> None:
        """Make the rank, which says hello at once. It uses the environment and the import path of this process."""
        (own,) = owned(map(os.dup, [control_fd]))
        control = Segment(own, setup["control_nbytes"], is_writable=True, segment_id=0)
        eventfds = [extra[f"event{rank}"] for rank in range(setup["world_size"])]
        half = open_rank(setup["rank"], setup["world_size"], setup["backend"], setup["device"], control, eventfds)
        control.close_fd()
        half.interrupts = KeyboardInterrupt
        half.failpoint = _failpoints.arm(setup["failpoints"], self.rank)
        half.seed = setup["seed"]
        self._rank, self.is_open = half, True
        self._bodies[0] = hello_of(half), []
        self._replies.append(wire.REPLY.pack(0, wire.READY, *wire.NO_TIMES))

    def watched(self) -> list[tuple[int, str]]:
        return []

    def stacks(self) -> str:
        """Return a text in place of stacks: the rank's stack is in the thread that called, where a debugger sees it."""
        return "inline: see the program's own stack"

    def kill(self) -> None:
        """Do nothing: there is no process to kill."""

    def reap(self) -> str:
        """Drop the rank's state."""
        self.close()
        return ""

    def disown(self) -> None:
        """In a child that the function has forked: it is no rank, and ends where the function does."""
        if self._rank is not None and cell.worker is self._rank:
            self._rank.disown()

    def close(self) -> None:
        """Drop the rank, and unmap its memory even if closures still refer to it. A second call does nothing."""
        half, self._rank, self.is_open = self._rank, None, False
        if half is not None:
            half.close()

    # -- the connection ------------------------------------------------------------------------------------------------

    def send_body(self, number: int, content: Any, segments: Sequence[Segment] = ()) -> int:
        self._bodies = {number: (content, owned(map(os.dup, [each.fd for each in segments])))}
        return 0

    def write(self, order: bytes) -> None:
        """Answer an order."""
        waiting(self._act, order)

    def _act(self, order: bytes) -> None:
        number = wire.ORDER.unpack_from(order)[0]
        body, fds = self._bodies.pop(number, (None, []))
        self._rank.thread = threading.get_ident()
        try:
            status, content, segments = self._rank.answer(order, body, fds)
        finally:
            cell.worker = None  # Ctrl-C may come at any line
        if status in wire.WITH_BODY:
            self._bodies[number] = content, owned(map(os.dup, [each.fd for each in segments]))
        self._replies.append(wire.REPLY.pack(number, status, *self._rank.times()))
        self._rank.lane.wake_sleepers()

    def read(self, nbytes: int) -> bytes:
        return self._replies.popleft() if self._replies else b""

    def receive_body(self, number: int) -> tuple[Any, list[Descriptor]]:
        return self._bodies.pop(number)

    def reset(self) -> None:
        """Drop what was not read, and what the rank has told."""
        self._replies.clear()
        self._bodies.clear()
        self._rank.variables.abandon()
        self._rank.slots.clear()
        self._rank.told_slots.clear()
