"""``process_group``: the ranks of a call as an initialised group of ``torch.distributed``, kept between calls.

The ranks find one another through a ``FileStore`` in a memory file of rank 0, which has no name, so nothing is left
behind, whatever ends the workers. Gloo then connects them over loopback. A rank that waits in a collective of the group
is in C++ code, which no signal interrupts. So a thread watches whether the call has ended on another rank. If it has,
the thread cuts this rank's connections, which ends the wait.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from synk._wire.cell import cell
from synk._wire.orders import Phase, Up
from synk.communicators._comm import comm
from synk.errors import UnsupportedError

_WATCH_INTERVAL_S = 0.05
_FOREVER = datetime.timedelta(days=365)  # the call has the time limit, not the group
_LOOPBACK = "lo"
_LOST_PEER = ("gloo/transport/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def process_group() -> dist.ProcessGroup:
    """Return the ranks of this call as the default group of ``torch.distributed``; on the workers, inside a function.

    With it ``torch.distributed`` and libraries built on it work as under torchrun: ``fully_shard`` (FSDP2),
    ``DTensor``, tensor parallelism, ``torch.distributed.checkpoint``. All ranks must call ``process_group``, as they
    would call a collective. The first call makes the group. It is kept for later calls, in all functions, until a call
    that has used it fails or a worker dies. The next call then makes a new group, and objects that were built on the
    old one must be built again. The group ends with the runtime.

    Returns
    -------
    torch.distributed.ProcessGroup
        The same object as long as the group lives. It uses Gloo for tensors on the CPU and NCCL for tensors on GPUs.

    Raises
    ------
    ValueError
        If the call is made in the program, not all workers run it, or the function has made a default group by itself.
    UnsupportedError
        If the runtime has workers on other nodes.

    Notes
    -----
    While the group lives, each worker listens on a port of the loopback interface: see the page on security. Not yet
    run on GPUs.

    Examples
    --------
    >>> import torch, synk
    >>> def total():
    ...     group = synk.torch.process_group()
    ...     value = torch.ones(()) * (group.rank() + 1)
    ...     torch.distributed.all_reduce(value)
    ...     return value
    >>> with synk.fork(2):
    ...     synk.function(total, per_rank=True, outputs="first", framework="torch")()
    tensor(3.)
    """
    worker = cell.worker
    if worker is None:
        raise ValueError(
            "cannot make a process group in the program: it can only be made on the workers, expected a call inside a "
            "function. Use synk.function(fn, per_rank=True)."
        )
    if worker.has_other_nodes:
        raise UnsupportedError(
            "cannot make a process group over several nodes: got a runtime with cluster=, expected one without it, for "
            "its ranks cannot reach those of other nodes yet."
        )
    if comm.world_size != worker.world_size:
        raise ValueError(
            f"cannot make a process group: got a call that {comm.world_size} of {worker.world_size} workers run, "
            "expected all of them. Use synk.function(..., per_rank=True) without rows, or at least as many rows."
        )
    # A rank that was replaced, or that has left the group, has number 0. All ranks must decide alike whether to make a
    # new group, so they compare their numbers first.
    own = worker.process_group
    number = 0 if own is None or own.is_abandoned else own.number
    if set(comm.all_gather(np.array([number])).ravel().tolist()) != {number} or not number:
        if own is not None:
            own.close()
        if dist.is_initialized():
            raise ValueError(
                "cannot make a process group: got one that the function has made by itself, expected none. Call "
                "torch.distributed.destroy_process_group() first."
            )
        own = worker.process_group = _Group()
    own.watch()
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class _Group:
    """The group, on one rank.

    Attributes
    ----------
    number : int
        Identifies the group; the same on all ranks. 0 stands for no group.
    is_abandoned : bool
        Whether this rank has left the group. Then no other rank can use it either.
    """

    def __init__(self) -> None:
        worker = cell.worker
        self.is_abandoned = self._has_left = False
        self._leaving = threading.Lock()  # two threads may leave at once
        self._is_in_call = threading.Event()
        self._is_closed = False
        self._descriptor = os.memfd_create("synk-store") if comm.rank == 0 else -1
        place = np.array([os.getpid(), self._descriptor, int.from_bytes(os.urandom(4), "little") + 1])
        pid, descriptor, self.number = comm.broadcast(place).tolist()
        self._pids = comm.all_gather(np.array([os.getpid()])).ravel().tolist()
        # Subgroups that the user makes read these variables, too. The last one switches off NCCL's port for monitoring.
        os.environ.update(GLOO_SOCKET_IFNAME=_LOOPBACK, NCCL_SOCKET_IFNAME=_LOOPBACK, NCCL_RAS_ENABLE="0")
        # Rank 0 keeps the descriptor open until ``close``: every operation of the store opens the file through it, and
        # so do the stores of subgroups later.
        store = dist.FileStore(f"/proc/{pid}/fd/{descriptor}", comm.world_size)
        options: dict[str, Any] = {"backend": "gloo"}
        if worker.backend.torch_device() == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
        dist.init_process_group(store=store, rank=comm.rank, world_size=comm.world_size, timeout=_FOREVER, **options)
        self._thread = threading.Thread(target=self._watch, name="synk-watch", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """From now to the end of this call, leave the group if the call ends on another rank."""
        self._is_in_call.set()

    def _watch(self) -> None:
        worker = cell.worker
        while not self._is_closed:
            self._is_in_call.wait()
            # Once the function has ended on this rank, nobody waits in the group here, and the group stays as it is.
            communicator = worker.lane.communicator
            if worker.own_up[Up.PHASE] != Phase.FUNCTION:
                self._is_in_call.clear()
            elif communicator is not None and communicator._rendezvous.is_aborted():
                self.abandon()
                self._is_in_call.clear()
            else:
                time.sleep(_WATCH_INTERVAL_S)

    def is_lost_peer(self, error: BaseException) -> bool:
        """Whether a collective of torch failed on this rank because another rank has left the group."""
        return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)

    def abandon(self) -> None:
        """Cut this rank's connections with the other ranks, so that neither side waits for the other any more.

        The watching thread calls this while the main thread is in C++ code. Gloo's descriptors stay open, since Gloo
        closes them: only copies of them are shut down, which ends the connections for both.
        """
        self.is_abandoned = True
        with self._leaving:
            if self._has_left:
                return
            # A connection has a port on which one of the ranks listens, at one of its two ends. A rank that has died
            # has no ports here any more, but the kernel has closed its connections.
            ports = {port for pid in self._pids for port in _listening(pid)}
            connections = list(_connections())  # the abort may close some of the descriptors
            _abort()
            for connection in connections:
                with connection, contextlib.suppress(OSError):  # the other side may have gone
                    if {connection.getsockname()[1], connection.getpeername()[1]} & ports:
                        connection.shutdown(socket.SHUT_RDWR)
            self._has_left = True  # last: an interrupt that breaks this off is followed by another call

    def close(self) -> None:
        """Leave the group and free it. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._is_in_call.set()  # wakes the watching thread, which then ends
            self.abandon()  # the others must not wait for this rank
            if dist.is_initialized():
                dist.destroy_process_group()
            if self._descriptor >= 0:
                os.close(self._descriptor)
            if self._thread is not threading.current_thread():
                self._thread.join()  # the thread holds the worker, which may be an object in the program's own process


def _abort() -> None:
    """Abort the operations of the default group and its subgroups.

    NCCL's kernels would otherwise wait on the devices for ranks that are gone. That comes before the connections are
    cut, or NCCL's own threads report the broken ones and end this process.
    """
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)  # since torch 2.5
    if abort is not None and dist.is_initialized():
        abort()


# -- sockets of this process ------------------------------------------------------------------------------------------


def _socket_descriptors(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the descriptors of a process that are sockets, with their inodes. A process that has ended has none."""
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(f"/proc/{pid}/fd")
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{name}").partition(":[")
            if kind == "socket":
                yield int(name), int(inode[:-1])


def _listening(pid: int) -> list[int]:
    """Return the ports on which a process listens."""
    own, found = {inode for _, inode in _socket_descriptors(pid)}, []
    for family in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{family}") as file:
            lines = [line.split() for line in file][1:]
        found += [int(each[1].partition(":")[2], 16) for each in lines if each[3] == "0A" and int(each[9]) in own]
    return found


def _connections() -> Iterator[socket.socket]:
    """Yield the TCP connections of this process. Each is a copy, which the caller closes."""
    for descriptor, _ in list(_socket_descriptors(os.getpid())):
        with contextlib.suppress(OSError):  # closed meanwhile
            copied = socket.socket(fileno=os.dup(descriptor))
            is_tcp = copied.family in (socket.AF_INET, socket.AF_INET6) and copied.type == socket.SOCK_STREAM
            if is_tcp and not copied.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield copied
            else:
                copied.close()
