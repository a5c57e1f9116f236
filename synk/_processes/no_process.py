"""A rank without a process: what the program does with processes has nothing to do here."""

from __future__ import annotations

import os
from typing import ClassVar


class NoProcess:
    """Plays the process of a rank that runs in the program itself. A subclass makes the rank, and drops it."""

    is_inline: ClassVar[bool] = True
    exit_text = ""
    started = 0.0

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, os.getpid()

    def interrupt(self) -> None:
        """Do nothing: a call runs in the thread that sends it, so it has ended when anybody can interrupt it."""

    def forward_output(self, fd: int) -> bool:
        """Do nothing: the rank prints to the streams of this process."""
        return True

    def stderr_since(self, began: float) -> list[str]:
        return []

    def stacks(self) -> str:
        """Return a text in place of stacks: the rank's stack is in the thread that called, where a debugger sees it."""
        return "inline: see the master's own stack"

    def kill(self) -> None:
        """Do nothing: there is no process to kill."""

    def reap(self) -> str:
        """Drop the rank's state."""
        self.close()
        return ""

    def disown(self) -> None:
        """Do nothing: the rank is a part of the forked child, where the function that forked may go on."""

    def close(self) -> None:
        """Drop the rank, and unmap its memory even if closures still refer to it. A second call does nothing."""
        raise NotImplementedError
