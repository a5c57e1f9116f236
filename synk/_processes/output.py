"""Passes what workers print to the streams of the program, and writes the reports that the program itself makes.

Whole lines are passed on, each behind the rank that printed it. Only a progress bar, which rewrites its line after a
carriage return, is shown before its line ends, so that it moves as it would without workers.

No stream and no log handler may decide over a call: every exception they raise ends here.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, TextIO

from synk._pure.words import text_of
from synk._wire.cell import cell
from synk._wire.logs import unpack_record
from synk._wire.mapping import NONE, Descriptor

_STDERR_LINES = 20
_LINE_NBYTES = 1 << 16
_PIECE = 1024  # characters: at most 4096 bytes, which a pipe accepts as a whole
_STALL_MS = 50

_logger = logging.getLogger("synk")


class Output:
    """Passes the text of one worker to a stream of the program, line by line.

    Parameters
    ----------
    fd : Descriptor
        The read end of the worker's pipe.
    rank : int or None
        Stands before each line. None: nothing does, for an agent's lines name their ranks already.
    stream_name : {"stdout", "stderr"}
    """

    def __init__(self, fd: Descriptor, rank: int | None, stream_name: str) -> None:
        self.fd: int = fd
        self._prefix = "" if rank is None else f"[rank {rank}] "
        self._stream_name = stream_name
        self._line: list[tuple[float, bytes]] = []  # the unfinished line: its pieces and when each came
        self._num_shown = 0  # how many bytes of it were already shown
        self._unwritten = ""
        self._tail: deque[list[tuple[float, bytes]]] = deque(maxlen=_STDERR_LINES)  # the last lines, for errors
        os.set_blocking(fd, False)

    def forward(self, max_nbytes: int = 1 << 22) -> bool:
        """Pass on what has arrived, at most ``max_nbytes``. Return False at the end of the stream."""
        while (fd := self.fd) >= 0 and max_nbytes > 0:
            if self._unwritten and not self._flush():
                return True  # the program's own stream is full: the worker waits, as it would at a terminal
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                self._write([self._unfinished()])
                return True
            if not data:
                self._write([self._end_line()] if self._line else [])
                return False
            max_nbytes -= len(data)
            self._write(list(self._take(data, time.monotonic())))
        return True

    def since(self, began: float) -> list[str]:
        """Return the last lines written since the monotonic time ``began``, without text that is older."""
        found = []
        for pieces in self._tail:
            new = [piece for came, piece in pieces if came >= began]
            if any(new) or len(new) == len(pieces):
                found.append(_decoded(b"".join(new).removesuffix(b"\r").rpartition(b"\r")[2][:2000]))
        return found

    def _take(self, data: bytes, came: float) -> Iterator[str]:
        """Yield the lines that ``data`` completes, as they will be written."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._line.append((came, end))
            yield self._end_line()
        if rest:
            self._line.append((came, rest))
            if sum(len(piece) for _, piece in self._line) > _LINE_NBYTES:
                yield self._end_line()

    def _end_line(self) -> str:
        pieces, self._line = self._line, []
        self._tail.append(pieces)
        data, self._num_shown = b"".join([piece for _, piece in pieces])[self._num_shown :], 0
        text = self._placed(_decoded(data.removesuffix(b"\r"))) + "\n"
        cell.unfinished.pop(self._stream_name, None)
        return text

    def _unfinished(self) -> str:
        """Return the part of an unfinished line to show: nothing, unless it is rewritten like a progress bar."""
        line = b"".join([piece for _, piece in self._line])
        data = line[self._num_shown :]
        data = data[: _num_whole(data)].removesuffix(b"\r")  # a carriage return at the end may be half of a line end
        if not data or b"\r" not in line:
            return ""
        self._num_shown += len(data)
        text = self._placed(_decoded(data))
        cell.unfinished[self._stream_name] = self
        return text

    def _placed(self, text: str) -> str:
        """Return text that continues this worker's line, or starts a new line if the stream shows another one."""
        last = cell.unfinished.get(self._stream_name)
        rewritten = text.replace("\r", f"\r{self._prefix}")
        if last is self:
            return rewritten
        if text.startswith("\r"):  # progress bars of several ranks share one line
            return rewritten
        return ("" if last is None else "\n") + self._prefix + rewritten

    def _write(self, lines: list[str]) -> None:
        text = "".join(lines)
        if text:
            self._unwritten += text
            self._flush()

    def _flush(self) -> bool:
        """Write what can be written without blocking for long. Return False if text is left."""
        stream: TextIO | None = getattr(sys, self._stream_name, None)
        # Taken out first: if a signal handler raises while the stream is written, the text is lost rather than shown
        # twice.
        text, self._unwritten = self._unwritten, ""
        if stream is None:
            return True
        try:
            self._unwritten = _write_some(stream, text)
        except BaseException as error:
            self._report(error)
        return not self._unwritten

    def _report(self, error: BaseException) -> None:
        if self._stream_name not in cell.broken_streams:
            cell.broken_streams.add(self._stream_name)
            name = self._stream_name
            report("what workers print to %s is dropped: sys.%s raised %s", name, name, text_of(error))

    def close(self) -> None:
        self.fd = NONE
        if cell.unfinished.get(self._stream_name) is self:
            del cell.unfinished[self._stream_name]


def _num_whole(data: bytes) -> int:
    """Return how many bytes of ``data`` are complete characters: the last one may still be incomplete."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the first byte of a character of several bytes
            return len(data) if back >= 2 + (byte >= 0xE0) + (byte >= 0xF0) else len(data) - back
        if byte < 0x80:
            break
    return len(data)


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


def _write_some(stream: TextIO, text: str) -> str:
    """Write to a stream until it would block. Return what is left."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
    except (AttributeError, OSError, ValueError, TypeError):  # the stream of a notebook or of a test: it never blocks
        poll = None
    while text:
        if poll is not None and not poll.poll(_STALL_MS):
            break
        # A ready pipe takes this much without blocking. The piece ends with a line, since another rank's text may
        # follow.
        end = len(text) if poll is None else text.rfind("\n", 0, _PIECE) + 1 or _PIECE
        part, text = text[:end], text[end:]
        try:
            stream.write(part)
        except UnicodeEncodeError:
            stream.write(part.encode("ascii", "backslashreplace").decode("ascii"))
        stream.flush()
    return text


def report(message: str, *args: Any) -> None:
    """Log a warning. A log handler of the user's that raises must not end the call: stderr gets the text instead."""
    try:
        _logger.warning(message, *args)
    except BaseException as error:
        if sys.__stderr__ is not None:
            sys.__stderr__.write(f"synk: {message % args}\n(a handler of logging raised {type(error).__name__})\n")


def warn_at_users_line(text: str, category: type[Warning]) -> None:
    """Warn at the line of the program that called synk."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "synk":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


class Records:
    """Passes the log records of one worker to the program's loggers. The counterpart of :class:`Output`.

    Parameters
    ----------
    fd : Descriptor
        The read end of the worker's pipe.
    rank : int or None
        As for :class:`Output`.
    """

    def __init__(self, fd: Descriptor, rank: int | None) -> None:
        self.fd: int = fd
        self._rank = rank
        self._line = b""
        os.set_blocking(fd, False)

    def forward(self, max_nbytes: int = 1 << 22) -> bool:
        """Pass on what has arrived, at most ``max_nbytes``. Return False at the end of the stream."""
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
        # The record was cut off by an interrupt, or a handler of the user's raised something.
        except BaseException as error:
            report("a log record of rank %s is lost: %s", self._rank, text_of(error))

    def close(self) -> None:
        self.fd = NONE
