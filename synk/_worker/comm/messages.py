"""Messages between two ranks. They go through host memory, even between devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from synk._worker.comm.requests import Request
from synk._worker.comm.user_arrays import UserArrays
from synk.communicators._host import HostCommunicator


class Messages:
    """The messages of the current call.

    Parameters
    ----------
    host : HostCommunicator
        The communicator, which has begun the call.
    arrays : UserArrays
    """

    def __init__(self, host: HostCommunicator, arrays: UserArrays) -> None:
        self._host = host
        self._arrays = arrays

    def send(self, array: Any, peer: int, tag: int) -> None:
        peer = self._host.member("send", "peer", peer)
        self._host.send_array(self._arrays.to_host(array), peer, _checked(tag))

    def isend(self, array: Any, peer: int, tag: int) -> Request:
        peer = self._host.member("send", "peer", peer)
        self._host.isend_array(self._arrays.to_host(array), peer, _checked(tag))
        return Request(self._host, lambda: True, lambda: None)

    def recv(self, peer: int, tag: int, like: Any, out: Any) -> Any:
        return self.irecv(peer, tag, like, out).wait()

    def irecv(self, peer: int, tag: int, like: Any, out: Any) -> Request:
        host, arrays = self._host, self._arrays
        peer = host.member("recv", "peer", peer)
        message = host.irecv_array(arrays.host_target(like, out), peer, _checked(tag))
        return Request(
            host,
            lambda: host.test_message(message),
            lambda: arrays.received(host.finish_message(message), out),
        )


def _checked(tag: int) -> int:
    if not isinstance(tag, (int, np.integer)) or tag < 0:
        raise ValueError(f"cannot send or receive a message: got tag={tag!r}, expected an int from 0 on.")
    return int(tag)
