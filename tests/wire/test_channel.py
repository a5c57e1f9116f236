"""The channel between the master and a worker: what a process at its limits receives."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from synk._wire.channel import INLINE_NBYTES, Channel, ProtocolError
from synk._wire.descriptors import Descriptor
from synk.errors import SharedMemoryError


def test_a_large_body_that_cannot_be_mapped_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptors that came along are closed, and the next body is read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = (Channel(sock, *map(Descriptor, os.pipe()), b"t" * 32) for sock in (ours, theirs))
    read_fd, write_fd = os.pipe()
    with ours, theirs, monkeypatch.context() as patch:
        sender.send_body(1, bytes(INLINE_NBYTES + 1), [write_fd])
        os.close(write_fd)
        patch.setattr(receiver, "_body_in", no_memory)
        with pytest.raises(SharedMemoryError, match=r"receive a message of 65537 bytes: .*Cannot allocate memory"):
            receiver.receive_body(1)
        assert os.read(read_fd, 1) == b""  # nobody holds the other end
        patch.undo()
        sender.send_body(2, b"next")
        assert receiver.receive_body(2) == (b"next", [])
    os.close(read_fd)


def test_a_doorbell_without_its_body_is_junk() -> None:
    """A body comes before its doorbell, so nobody waits for one, which a signal could not end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver = Channel(theirs, *map(Descriptor, os.pipe()), b"t" * 32)
    with ours, theirs, pytest.raises(ProtocolError, match="its body is missing"):
        receiver.receive_body(1)
    assert [Channel.understood(data) for data in (b"", b"x", bytes(7))] == [None, (0, 0, 0, 0), (0, 0, 0, 0)]


def no_memory(fd: int, nbytes: int) -> Any:
    os.close(fd)
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
