"""Messages and replies that are a doorbell and nothing else: a call that all ranks know, and its end as before.

From the first doorbell on such a message is a request like others: an interrupt at any line finds it among those in
flight. What is heard here is only what is, byte for byte, expected; everything else (errors, deaths, prints, new
outputs, time limits) is left to the ordinary wait, which knows about it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import Any

from synk._master.workers.recovery import Recovery
from synk._master.workers.requests import Request, Requests
from synk._pure.interrupts import waiting
from synk._pure.limits import poll_ms
from synk._wire.channel import Patience
from synk._wire.messages import ASSEMBLED, DONE, DOORBELL, IS_ALONE, LANE_SHIFT, Kind, Status

_WAIT_MS = 100
"""The longest wait here; the ordinary one, which goes on then, knows deadlines and reports calls that seem stuck."""

_DONE = int(Status.DONE)


class Doorbells:
    """How some ranks are rung and heard, as long as the state of the log is the same.

    No descriptor is held: a channel closes its own, whoever refers to it.

    Parameters
    ----------
    poll : select.poll
        What tells of whatever happens to the workers.
    channels : dict of int to Channel
        By rank.
    requests : Requests
    patience : Patience
    recovery : Recovery
    counters : dict of str to int
    """

    def __init__(
        self,
        poll: select.poll,
        channels: dict[int, Any],
        requests: Requests,
        patience: Patience,
        recovery: Recovery,
        counters: dict[str, int],
    ) -> None:
        self._poll = poll
        self._channels: Sequence[Any] = list(channels.values())
        self._by_fd = {int(channel.read_fd): (rank, channel) for rank, channel in channels.items()}
        self._requests = requests
        self._patience = patience
        self._recovery = recovery
        self._counters = counters

    def are_silent(self) -> bool:
        """Whether nothing is reported but replies to calls in flight."""
        # Asked at each call: no generator.
        for fd, _ in self._poll.poll(0):  # noqa: SIM110
            if fd not in self._by_fd or not self._requests:
                return False
        return True

    def ring(self, request: Request, kind: Kind, value: int, lane: int) -> None:
        """Send a message that is a doorbell."""
        requests, counters = self._requests, self._counters
        sequence = request.sequence = requests.sequence = requests.sequence % 0xFFFF + 1
        flags = lane << LANE_SHIFT | (0 if requests else IS_ALONE)
        requests[sequence] = request  # first: wherever the ringing is broken off, all count as having it
        try:
            for channel in self._channels:
                channel.ring(kind, flags, sequence, value)
        except BaseException as error:
            self._recovery.settle_after(error)
            raise
        counters["messages_down"] += len(self._channels)
        counters["bytes_down"] += 8 * len(self._channels)

    def hear(self, request: Request, *, is_assembled: bool) -> bool:
        """Wait for the replies to ``request``; return whether all ranks have answered as expected.

        Expected is that the function has returned what looks as before, and that large outputs are in place, where
        ``is_assembled``. If anything else has come, the ordinary wait goes on.
        """
        answer = ASSEMBLED if is_assembled else DONE
        pending, deadline, counters = request.pending, request.deadline, self._counters
        expected = DOORBELL.pack(_DONE, answer.flags, request.sequence, 0)
        timeout_ms = _WAIT_MS if deadline is None else min(poll_ms(deadline - request.began), _WAIT_MS)
        try:
            while pending:
                events = waiting(self._patience.wait, self._poll, timeout_ms)
                if not events:
                    return False
                for fd, _ in events:
                    if fd not in self._by_fd:  # a printed line, a death, the end of the runtime
                        return False
                for fd, _ in events:
                    rank, channel = self._by_fd[fd]
                    doorbell = os.read(channel.read_fd, 8)
                    if doorbell == expected:
                        request.replies[rank] = answer
                        pending.discard(rank)
                        counters["messages_up"] += 1
                        counters["bytes_up"] += 8
                    elif not self._requests.take_doorbell(rank, doorbell):
                        return False
                if deadline is not None:
                    timeout_ms = min(poll_ms(deadline - time.monotonic()), _WAIT_MS)
        except BaseException as error:
            self._recovery.settle_after(error)
            raise
        return list(request.replies.values()).count(answer) == len(self._channels)
