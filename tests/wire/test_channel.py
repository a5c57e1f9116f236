"""The channel between the master and a worker: what a process at its limits receives."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from synk._wire.channel import INLINE_NBYTES, Channel
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


def no_memory(fd: int, nbytes: int) -> Any:
    os.close(fd)
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
