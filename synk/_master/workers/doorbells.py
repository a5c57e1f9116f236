"""Messages and replies that are doorbells without a body: a call that all ranks know, answered as before.

From its first doorbell on, such a message is a request like any other, so an interrupt at any line finds it in flight.
Only replies that are byte for byte as expected are handled here. Everything else (errors, deaths, prints, new outputs,
time limits) is left to the ordinary wait.
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
"""The longest wait here. The ordinary wait takes over after it: that one knows deadlines and reports stuck calls."""

_DONE = int(Status.DONE)


class Doorbells:
    """Rings some ranks and hears their replies, for as long as the state of the log does not change.

    It holds no descriptor open: a channel closes its own, whoever refers to it.

    Parameters
    ----------
    poll : select.poll
        Reports everything that happens to the workers.
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
        """Whether nothing is reported except replies to calls in flight."""
        # This runs at each call, so it uses no generator.
        for fd, _ in self._poll.poll(0):  # noqa: SIM110
            if fd not in self._by_fd or not self._requests:
                return False
        return True

    def ring(self, request: Request, kind: Kind, value: int, lane: int) -> None:
        """Send a message that is a doorbell without a body."""
        requests = self._requests
        sequence = request.sequence = requests.sequence = requests.sequence % 0xFFFF + 1
        flags = lane << LANE_SHIFT | (0 if requests else IS_ALONE)
        # First the request, then the doorbells: if the ringing is broken off, all ranks count as having the message.
        requests[sequence] = request
        try:
            for channel in self._channels:
                channel.ring(kind, flags, sequence, value)
        except BaseException as error:
            self._recovery.settle_after(error)
            raise
        self._counters["messages_down"] += len(self._channels)

    def hear(self, request: Request, *, is_assembled: bool) -> bool:
        """Wait for the replies to ``request``. Return whether all ranks answered as expected.

        The expected reply says that the function returned outputs of the known layout and, if ``is_assembled``, that
        the large ones are in place. If anything else comes, the ordinary wait must go on.
        """
        answer = ASSEMBLED if is_assembled else DONE
        pending, deadline, by_fd = request.pending, request.deadline, self._by_fd
        expected = DOORBELL.pack(_DONE, answer.flags, request.sequence, 0)
        timeout_ms = _WAIT_MS if deadline is None else min(poll_ms(deadline - request.began), _WAIT_MS)
        num_heard = 0
        try:
            while pending:
                # The ranks have equal shares of the work: where one has answered, the others are near.
                events = waiting(self._patience.wait, self._poll, timeout_ms, num_heard > 0)
                if not events:
                    return False
                for fd, _ in events:
                    # Printed text, a log record, a death, the end of the runtime. Before any answer is taken: what a
                    # rank has printed before it answered must be shown before the call returns.
                    if fd not in by_fd:
                        return False
                for fd, _ in events:
                    rank, channel = by_fd[fd]
                    # A signal handler may raise between this read and the lines below, and the answer is lost. The rank
                    # then still counts as owing one, so ``settle_after`` makes it idle.
                    doorbell = os.read(channel.read_fd, 8)
                    if doorbell == expected:
                        request.replies[rank] = answer
                        pending.discard(rank)
                        num_heard += 1
                    elif not self._requests.take_doorbell(rank, doorbell):
                        return False
                if deadline is not None:
                    timeout_ms = min(poll_ms(deadline - time.monotonic()), _WAIT_MS)
        except BaseException as error:
            self._recovery.settle_after(error)
            raise
        finally:
            self._counters["messages_up"] += num_heard
        # Others may have come while another call was waited for.
        return num_heard == len(by_fd) or list(request.replies.values()).count(answer) == len(by_fd)
