"""Sends what a function logs on a worker to the loggers of the master. The user's handlers exist only there."""

from __future__ import annotations

import logging
import os

from synk._wire.descriptors import Descriptor
from synk._wire.logs import pack_record


class PipeHandler(logging.Handler):
    """Writes all records to a pipe to the master."""

    def __init__(self, fd: Descriptor) -> None:
        super().__init__()
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = memoryview(pack_record(record))
            while data:
                data = data[os.write(self._fd, data) :]
        except Exception:  # as in any handler: the record's message could not be formatted
            self.handleError(record)


def send_records(fd: Descriptor) -> None:
    """Have all loggers of this process send their records to the master."""
    logging.root.addHandler(PipeHandler(fd))
