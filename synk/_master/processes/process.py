"""What plays a rank, as the rest of the master sees it: the one protocol of worker processes and of ranks inline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from synk._wire.memory import Segment
from synk._wire.messages import Body


class Line(Protocol):
    """The master's end of the connection with a rank; see :class:`synk._wire.channel.Channel`."""

    @property
    def read_fd(self) -> int:
        """What can be read when the rank has answered."""

    def ring(self, kind: int, flags: int, sequence: int, value: int) -> None:
        """Send a message without a body."""

    def answer(self) -> tuple[int, int, int, int] | None:
        """Read one doorbell; None when the rank is gone."""

    def receive_body(self, sequence: int) -> tuple[bytes, list[int]]:
        """Receive the body of an answer."""


class Process(Protocol):
    """What plays a rank, as the rest of the master sees it: a process, or a part of the master's own.

    Nothing is held before :meth:`start`. A process that has ended is not used again; there is another one then.

    Attributes
    ----------
    is_inline : bool
        Whether the rank lives in the master's process.
    pid : int
        -1 where there is none.
    started : float
        Monotonic time at which it was started.
    exit_text : str
        How it ended, once it was reaped.
    channel : Line
        From the start to the end.
    """

    is_inline: ClassVar[bool]
    pid: int
    started: float
    exit_text: str

    @property
    def channel(self) -> Line: ...

    def start(
        self,
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        token: bytes,
        extra_fds: dict[str, int],
    ) -> None:
        """Start it; its first answer is a hello."""

    def watched(self) -> list[tuple[int, str]]:
        """Return the descriptors that tell of it, each with what it tells: ``"up"``, ``"death"`` or ``"output"``."""

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
        """Send a message with its body and the segments that it brings; return the body's bytes.

        ``note`` is called as the message goes out, in one step with it: what the rank holds and what the master takes
        it to hold must not differ, wherever a signal handler raises.
        """

    def interrupt(self) -> None:
        """Have it end the call that it is at."""

    def forward_output(self, fd: int) -> bool:
        """Pass on what it printed; return False where ``fd`` is at its end."""

    def note_backlog(self) -> None:
        """Remember that what it has printed so far is of earlier operations."""

    def stderr_since(self, began: float) -> list[str]:
        """Return the last lines that it wrote to stderr since the monotonic time ``began``."""

    def stacks(self, timeout_s: float) -> str:
        """Return the Python stacks of its threads, or why there are none."""

    def kill(self) -> None:
        """End it at once."""

    def reap(self) -> str:
        """See it end, release everything, and return how it ended."""

    def disown(self) -> None:
        """In a forked child: it is not ours to wait for."""

    def close(self) -> None:
        """Release everything; safe to repeat."""
