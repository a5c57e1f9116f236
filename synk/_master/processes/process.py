"""The protocol of what plays a rank: a worker process, or with ``num_workers=0`` an object in the master."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from synk._wire.memory import Segment
from synk._wire.messages import Body


class RankChannel(Protocol):
    """The master's end of the connection with a rank; see :class:`synk._wire.channel.Channel`."""

    @property
    def read_fd(self) -> int:
        """The descriptor that becomes readable when the rank has answered."""

    def ring(self, kind: int, flags: int, sequence: int, value: int) -> None:
        """Send a message without a body."""

    def answer(self) -> tuple[int, int, int, int] | None:
        """Read one doorbell; None if the rank is gone."""

    def receive_body(self, sequence: int) -> tuple[bytes, list[int]]:
        """Receive the body of an answer."""


class Process(Protocol):
    """The protocol of whatever plays a rank: a process of its own, or an object in the master's process.

    It holds nothing before :meth:`start`. After it has ended it is not used again; another object takes the rank over.

    Attributes
    ----------
    is_inline : bool
        Whether the rank lives in the master's process.
    pid : int
        -1 if there is no process.
    started : float
        Monotonic time of the start.
    exit_text : str
        How it ended, once it was reaped.
    channel : RankChannel
        The connection with the rank, from the start to the end.
    """

    is_inline: ClassVar[bool]
    pid: int
    started: float
    exit_text: str

    @property
    def channel(self) -> RankChannel: ...

    def start(
        self,
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        token: bytes,
        extra_fds: dict[str, int],
    ) -> None:
        """Start it. Its first answer is a hello."""

    def watched(self) -> list[tuple[int, str]]:
        """Return the descriptors that report on it, each with its kind: ``"up"``, ``"death"`` or ``"output"``."""

    def deliver(
        self,
        kind: int,
        flags: int,
        sequence: int,
        value: int,
        body: Body,
        segments: Sequence[Segment],
        note: Callable[[], None],
    ) -> int:
        """Send a message with its body and the segments that it brings. Return the number of bytes of the body.

        ``note`` is called in one step with the sending. So what the rank holds and what the master believes it holds
        cannot differ, wherever a signal handler raises.
        """

    def interrupt(self) -> None:
        """Make it end its current call."""

    def forward_output(self, fd: int) -> bool:
        """Pass on what it printed. Return False if ``fd`` is at its end."""

    def note_backlog(self) -> None:
        """Note that what it printed so far belongs to earlier operations."""

    def stderr_since(self, began: float) -> list[str]:
        """Return the last lines that it wrote to stderr since the monotonic time ``began``."""

    def stacks(self) -> str:
        """Return the Python stacks of its threads, or the reason why there are none."""

    def kill(self) -> None:
        """End it at once."""

    def reap(self) -> str:
        """Wait for its end, release everything, and return how it ended."""

    def disown(self) -> None:
        """In a forked child: forget the process, which belongs to the parent."""

    def close(self) -> None:
        """Release everything. Safe to call more than once."""
