"""Collectives between device arrays through host memory: where NCCL is missing, and where workers share a GPU.

Each operation copies to the host, lets a communicator of host memory do it (``_shm``), and copies back. It is slower
than NCCL and asks for nothing: no library, no peer access, any number of ranks on one device, every op and dtype of
NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np

from synk.communicators import Buffer, Capabilities
from synk.communicators._buffers import as_buffer, named_dtype
from synk.communicators._checks import check_buffers
from synk.communicators._schedule import Steps
from synk.communicators._shm import ShmCommunicator


class StagingCommunicator:
    """A rank's end of a group, over a communicator of host memory that is in a call.

    Parameters
    ----------
    host : ShmCommunicator
    copy : callable
        ``copy(destination, source, nbytes, stream)``: copy between host and device memory, ordered on the stream.
    synchronize : callable
        ``synchronize(stream)``: return when the stream has done everything.
    """

    def __init__(
        self, host: ShmCommunicator, copy: Callable[[int, int, int, int], None], synchronize: Callable[[int], None]
    ) -> None:
        self.rank = host.rank
        self.world_size = host.world_size
        self._host = host
        self._copy = copy
        self._synchronize = synchronize

    def _fetch(self, buffer: Buffer, stream: int) -> np.ndarray:
        """Return a copy of device memory on the host."""
        array = np.empty(buffer.count, named_dtype(buffer.dtype))
        if buffer.count:
            self._copy(as_buffer(array).ptr, buffer.ptr, array.nbytes, stream)
            self._synchronize(stream)
        return array

    def _give(self, array: np.ndarray, buffer: Buffer, stream: int) -> None:
        """Copy a host array to device memory; it may be freed when this returns."""
        if buffer.count:
            self._copy(buffer.ptr, as_buffer(array).ptr, array.nbytes, stream)
            self._synchronize(stream)

    def all_reduce(self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0) -> None:
        self._host.run(self.all_reduce_steps(send, recv, op, weight=weight, stream=stream))

    def all_reduce_steps(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        check_buffers("all_reduce", send, recv, send_count=send.count, recv_count=send.count)
        array = self._fetch(send, stream)
        yield from self._host.all_reduce_steps(as_buffer(array), as_buffer(array), op, weight=weight)
        self._give(array, recv, stream)

    def reduce(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> None:
        self._host.run(self.reduce_steps(send, recv, op, root, weight=weight, stream=stream))

    def reduce_steps(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        check_buffers("reduce", send, recv, send_count=send.count, recv_count=send.count)
        array = self._fetch(send, stream)
        yield from self._host.reduce_steps(as_buffer(array), as_buffer(array), op, root, weight=weight)
        if self.rank == root:
            self._give(array, recv, stream)

    def broadcast(self, buffer: Buffer, root: int, *, stream: int = 0) -> None:
        self._host.run(self.broadcast_steps(buffer, root, stream=stream))

    def broadcast_steps(self, buffer: Buffer, root: int, *, stream: int = 0) -> Steps:
        is_root = self.rank == root
        array = self._fetch(buffer, stream) if is_root else np.empty(buffer.count, named_dtype(buffer.dtype))
        yield from self._host.broadcast_steps(as_buffer(array), root)
        if not is_root:
            self._give(array, buffer, stream)

    def all_gather(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> None:
        self._host.run(self.all_gather_steps(send, recv, stream=stream))

    def all_gather_steps(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> Steps:
        mine = self._fetch(send, stream)
        everything = np.empty(recv.count, named_dtype(recv.dtype))
        yield from self._host.all_gather_steps(as_buffer(mine), as_buffer(everything))
        self._give(everything, recv, stream)

    def reduce_scatter(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> None:
        self._host.run(self.reduce_scatter_steps(send, recv, op, weight=weight, stream=stream))

    def reduce_scatter_steps(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> Steps:
        whole = self._fetch(send, stream)
        block = np.empty(recv.count, named_dtype(recv.dtype))
        yield from self._host.reduce_scatter_steps(as_buffer(whole), as_buffer(block), op, weight=weight)
        self._give(block, recv, stream)

    def send(self, buffer: Buffer, peer: int, tag: int = 0, *, stream: int = 0) -> None:
        array = self._fetch(buffer, stream)
        self._host.send(as_buffer(array), peer, tag)

    def recv(self, buffer: Buffer, peer: int, tag: int = 0, *, stream: int = 0) -> None:
        array = np.empty(buffer.count, named_dtype(buffer.dtype))
        self._host.recv(as_buffer(array), peer, tag)
        self._give(array, buffer, stream)

    def barrier(self) -> None:
        self._host.barrier()

    def group(self) -> contextlib.AbstractContextManager[None]:
        return self._host.group()

    def poll(self) -> str:
        return self._host.poll()

    def abort(self) -> None:
        self._host.abort()

    def close(self) -> None:
        """Nothing is held; the host communicator belongs to whoever made it."""

    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self._host.capabilities(), name="staging")
