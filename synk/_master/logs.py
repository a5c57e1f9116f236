"""Log records of a worker on their way to the loggers of the master. What a handler raises ends here."""

from __future__ import annotations

import logging
import os
from typing import Any

from synk._master.output import report
from synk._pure.interrupts import is_from_handler
from synk._wire.descriptors import NONE, Descriptor
from synk._wire.logs import unpack_record


class Records:
    """The log records of one worker; stands beside what it prints, see :class:`synk._master.output.Output`.

    Parameters
    ----------
    fd : Descriptor
        The end of a pipe to read from.
    rank : int
    """

    def __init__(self, fd: Descriptor, rank: int) -> None:
        self.fd: int = fd
        self._rank = rank
        self._line = b""
        os.set_blocking(fd, False)

    def forward(self, max_nbytes: int = 1 << 22) -> bool:
        """Pass on what is there, at most ``max_nbytes``; return False at the end of the stream."""
        while (fd := self.fd) >= 0 and max_nbytes > 0:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            max_nbytes -= len(data)
            *lines, self._line = (self._line + data).split(b"\n")
            for line in lines:
                if line:
                    self._log(line)
        return True

    def _log(self, line: bytes) -> None:
        try:
            record = unpack_record(line, self._rank)
            logger: Any = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        except BaseException as error:  # cut off by an interrupt, or whatever a handler of the user's raises
            if is_from_handler(error):
                raise
            report("a log record of rank %d is lost: %s: %s", self._rank, type(error).__name__, error)

    def note_backlog(self) -> None:
        """Records are nobody's cause of death."""

    def since(self, began: float) -> list[str]:
        return []

    def close(self) -> None:
        self.fd = NONE
