"""Framed messages between the master and one worker, over inherited descriptors, and how to wait for them.

Two pipes carry doorbells of eight bytes, which POSIX writes atomically, so a doorbell is never torn. A SOCK_SEQPACKET
pair carries bodies. Each is a single packet with a fixed header; a large body travels in a sealed memory file. The
header is checked before any byte of the body is used.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from synk._wire.descriptors import NONE, Descriptor
from synk._wire.memory import Segment
from synk._wire.messages import DOORBELL, VERSION
from synk.errors import SharedMemoryError, SynkError

MAGIC = b"synk"
TOKEN_NBYTES = 32
HEADER = struct.Struct(f"<4sHHIQ{TOKEN_NBYTES}s")
"""magic, version, flags, sequence, body length, token"""

INLINE_NBYTES = 1 << 16
MAX_BODY_NBYTES = 1 << 40
MAX_FDS = 250  # SCM_MAX_FD is 253; one is reserved for a large body
_TORN = (0, 0, 0, 0)
IS_LARGE = 1

_LATE_NS = 1_000_000
_MIN_PENALTY, _MAX_PENALTY = 32, 4096
_MAX_WINDOW_S = 3600.0


class ProtocolError(SynkError):
    """Bytes that the other side cannot have sent. The receiver treats that side as dead."""


def encode_header(sequence: int, nbytes: int, token: bytes, flags: int = 0) -> bytes:
    """Return the header of a body of ``nbytes`` bytes."""
    return HEADER.pack(MAGIC, VERSION, flags, sequence & 0xFFFF, nbytes, token)


def decode_header(packet: bytes, token: bytes) -> tuple[int, int, int]:
    """Return ``(flags, sequence, nbytes)`` of a packet.

    Raises
    ------
    ProtocolError
        If the packet is too short, or its magic, version, token or length is wrong.
    """
    if len(packet) < HEADER.size:
        raise ProtocolError(f"cannot read a message: got {len(packet)} bytes, expected at least {HEADER.size}.")
    magic, version, flags, sequence, nbytes, sent_token = HEADER.unpack_from(packet)
    if magic != MAGIC or version != VERSION or sent_token != token:
        raise ProtocolError("cannot read a message: its magic, version or token is not that of this runtime.")
    if flags not in (0, IS_LARGE) or nbytes > MAX_BODY_NBYTES:
        raise ProtocolError(f"cannot read a message: got flags {flags} and a length of {nbytes} bytes.")
    if not flags and nbytes != len(packet) - HEADER.size:
        raise ProtocolError(f"cannot read a message: got {len(packet) - HEADER.size} bytes, its header says {nbytes}.")
    return flags, sequence, nbytes


class Polled(Protocol):
    """Anything that :class:`Patience` can wait for: a ``select.poll``, or a :class:`Looked`."""

    def poll(self, timeout_ms: int | None = None, /) -> Any:
        """Return what has arrived, after sleeping for at most ``timeout_ms``."""


class Looked:
    """Waits for a condition in shared memory.

    Parameters
    ----------
    look : callable
        Returns whether the condition holds.
    sleep : callable
        Sleeps until the condition holds and returns True, or returns False at once if this process must not sleep.
    """

    def __init__(self, look: Callable[[], bool], sleep: Callable[[], bool]) -> None:
        self._look = look
        self._sleep = sleep

    def poll(self, timeout_ms: int | None = None, /) -> bool:
        return self._look() if timeout_ms == 0 else self._sleep()

    def awaited(self, patience: Patience) -> bool:
        """Wait until the condition holds, awake at first; return False if this process must not sleep."""
        began = time.monotonic_ns()
        try:
            return bool(patience.wait(self))
        finally:
            patience.waited_ns += time.monotonic_ns() - began


class Patience:
    """Waits for messages, awake at first if that pays: waking a sleeping process can take 50 us and more.

    It pays only if the next message is near, so the previous wait must have ended within ``window_s``. It
    must not cost others anything either. So the wait offers its core to other processes at every turn. If the core
    comes back late, another process wants it: this side then sleeps at once in the next waits, in more of them each
    time.

    Parameters
    ----------
    window_s : float
        The longest time to wait awake; 0 to sleep at once.

    Attributes
    ----------
    waited_ns : int
        How long waits for conditions in shared memory have taken. The reader may reset it to 0.
    """

    def __init__(self, window_s: float) -> None:
        self.waited_ns = 0
        self._window_ns = int(min(window_s, _MAX_WINDOW_S) * 1e9)
        self._was_short = self._window_ns > 0
        self._num_asleep = 0  # how many of the next waits sleep at once
        self._penalty = _MIN_PENALTY  # how many will do so the next time

    @property
    def pays(self) -> bool:
        """Whether the next wait starts awake."""
        return self._was_short and not self._num_asleep

    def wait(self, poll: Polled, timeout_ms: int | None = None, is_near: bool = False) -> Any:
        """Return what ``poll`` reports. The time limit starts when the wait falls asleep.

        ``is_near`` says that something will probably come soon, however long the last wait was.
        """
        began = now = time.monotonic_ns()
        if self._num_asleep:
            self._num_asleep -= 1
        elif self._was_short or is_near:
            while now - began < self._window_ns:
                events = poll.poll(0)
                if events:
                    self._penalty = max(self._penalty - 1, _MIN_PENALTY)
                    return events
                os.sched_yield()
                last, now = now, time.monotonic_ns()
                if now - last > _LATE_NS:
                    self._num_asleep, self._penalty = self._penalty, min(2 * self._penalty, _MAX_PENALTY)
                    break
        events = poll.poll(timeout_ms)
        self._was_short = time.monotonic_ns() - began < self._window_ns
        return events


class Channel:
    """One side of the connection between the master and a worker.

    Parameters
    ----------
    sock : socket
        This side's end of the SEQPACKET pair.
    read_fd, write_fd : Descriptor
        Pipe ends for doorbells.
    token : bytes
        A secret of the runtime that every header carries.
    """

    def __init__(self, sock: socket.socket, read_fd: Descriptor, write_fd: Descriptor, token: bytes) -> None:
        self.sock = sock
        self.read_fd: int = read_fd
        self.write_fd: int = write_fd
        self._token = token

    def ring(self, kind: int, flags: int, sequence: int, value: int) -> None:
        """Write one doorbell."""
        # A pipe takes eight bytes whole or not at all. So a doorbell is never torn, even if its writer is killed.
        os.write(self.write_fd, DOORBELL.pack(kind, flags, sequence & 0xFFFF, value))

    def answer(self) -> tuple[int, int, int, int] | None:
        """Read one doorbell ``(kind, flags, sequence, value)``; None if the other side is gone."""
        # Doorbells are written whole, so a read gives eight bytes, or none when the last writer has closed the pipe.
        return self.understood(os.read(self.read_fd, DOORBELL.size))

    @staticmethod
    def understood(data: bytes) -> tuple[int, int, int, int] | None:
        """Decode the bytes of a doorbell; None at the end of the pipe. What no process of ours writes has kind 0."""
        if len(data) == DOORBELL.size:
            return DOORBELL.unpack(data)
        return _TORN if data else None

    def send_body(self, sequence: int, body: Any, fds: Sequence[int] = ()) -> None:
        """Send one body with descriptors ``fds`` (at most ``MAX_FDS``).

        Raises
        ------
        OSError
            If the other side is gone.
        SharedMemoryError
            If there is no memory for a large body.
        """
        if len(body) <= INLINE_NBYTES:
            packet = encode_header(sequence, len(body), self._token) + body
            socket.send_fds(self.sock, [packet], list(fds), socket.MSG_NOSIGNAL)
            return
        # The descriptor that travels keeps the memory alive after this side has closed its own. If the other side dies
        # before it receives the packet, the kernel closes that descriptor with the socket, and nothing is left.
        segment = Segment.create(len(body))
        try:
            segment.buffer[: len(body)] = memoryview(body)
            header = encode_header(sequence, len(body), self._token, IS_LARGE)
            socket.send_fds(self.sock, [header], [*fds, segment.fd], socket.MSG_NOSIGNAL)
        finally:
            segment.close()

    def receive_body(self, sequence: int | None) -> tuple[bytes, list[int]]:
        """Receive the body of message ``sequence`` (None: of any message) and its descriptors, which are close-on-exec.

        It never waits, because a body is sent before its doorbell. Bodies of earlier messages, which an interrupted
        wait left in the socket, are discarded.

        Raises
        ------
        ProtocolError
            If the header is wrong, or there is no body.
        SharedMemoryError
            If this process's limits on descriptors or memory are too low.
        EOFError
            If the other side is gone.
        """
        while True:
            packet, fds, message_flags = _receive(self.sock)
            if not packet:
                raise EOFError("the other side closed its end")
            try:
                if message_flags & socket.MSG_CTRUNC:
                    raise SharedMemoryError(
                        "cannot receive shared segments: this process is out of file descriptors. Raise ulimit -n."
                    )
                flags, got_sequence, nbytes = decode_header(packet, self._token)
                if flags & IS_LARGE and not fds:
                    raise ProtocolError("cannot read a message: its large body is missing.")
            except SynkError:
                _close_all(fds)
                raise
            body = packet[HEADER.size :]
            if flags & IS_LARGE:
                try:
                    body = self._body_in(fds.pop(), nbytes)  # the sender appends the descriptor of a large body last
                except OSError as error:  # a limit on this process's memory
                    _close_all(fds)
                    raise SharedMemoryError(
                        f"cannot receive a message of {nbytes} bytes: {error}. Raise the limit on memory (ulimit -v)."
                    ) from error
            if sequence is None or got_sequence == sequence & 0xFFFF:
                return body, list(fds)
            # The sender was broken off between this body and its doorbell, or the doorbell was read and the body was
            # not. Nobody else knows these descriptors.
            _close_all(fds)

    def _body_in(self, fd: int, nbytes: int) -> Any:
        """Return a large body, and close the descriptor of the memory in which it came."""
        try:
            with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                # A copy: this process keeps nothing of the file, which the kernel frees when the sender has closed its
                # own descriptor, too.
                return mapping[:nbytes]
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close all three descriptors. Safe to call more than once."""
        self.sock.close()
        # A thread that is reading or writing holds a reference to the number, so it is closed only when that returns.
        self.read_fd = self.write_fd = NONE


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """Return a packet, its descriptors and its flags. The descriptors are close-on-exec.

    ``socket.recv_fds`` ignores its flags (CPython 3.11 to 3.14), and a program that a function starts would inherit the
    descriptors.
    """
    fds = array.array("i")
    room = socket.CMSG_LEN((MAX_FDS + 1) * fds.itemsize)
    try:
        packet, ancillary, flags, _ = sock.recvmsg(
            HEADER.size + INLINE_NBYTES, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
    except BlockingIOError:
        raise ProtocolError("cannot read a message: its body is missing.") from None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return packet, list(fds), flags


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
