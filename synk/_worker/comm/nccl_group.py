"""NCCL on a worker: joining a group, giving it up, and the thread that watches a group that may be stuck.

The master decides when a group is joined, and numbers it. A process that gives a group up writes its number into shared
memory: the master for all ranks when a worker died, a rank for itself when it failed. Every rank watches both words in
a thread of its own, because its main thread may be waiting in the driver for a peer that will never come. Aborting the
communicator frees the main thread.

A group is used only after a proof: NCCL connects the ranks at the first collective, so a group whose ranks have all
joined may still fail, or wait for ever, at each.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from synk._wire.control import Down, Up
from synk._worker.comm.collectives import Collectives
from synk._worker.comm.user_arrays import UserArrays
from synk.backends import NcclBackend
from synk.communicators import Buffer
from synk.communicators._shm import ShmCommunicator
from synk.cuda._nccl import NcclCommunicator
from synk.cuda._nccl_bindings import Binding, load_binding
from synk.cuda._nccl_library import INTERNAL_ERROR, REMOTE_ERROR, NcclError

_WATCH_INTERVAL_S = 0.05
PROOF_TIMEOUT_S = 30.0
"""How long the first collective of a group may take. Between the GPUs of a machine it takes less than one second."""
_PROOF_COUNT = 1 << 18  # of 32-bit integers: NCCL uses other paths and protocols for a megabyte than for a few bytes


class WorkerGroup:
    """This rank's membership in an NCCL group.

    Parameters
    ----------
    rank, world_size : int
    down, up : ndarray
        The control blocks of all ranks.
    backend : NcclBackend

    Attributes
    ----------
    communicator : NcclCommunicator or None
        None while the rank is in no group.
    """

    def __init__(self, rank: int, world_size: int, down: np.ndarray, up: np.ndarray, backend: NcclBackend) -> None:
        self.rank = rank
        self.world_size = world_size
        self.communicator: NcclCommunicator | None = None
        self._number = 0
        self._down = down
        self._up = up
        self._backend = backend
        self._binding: Binding | None = None
        self._watch_end = threading.Event()

    def _load(self) -> Binding:
        if self._binding is None:
            self._binding = load_binding()
        return self._binding

    def new_id(self) -> bytes:
        """Return 128 bytes that name a new group."""
        return self._load().new_unique_id()

    def join(self, number: int, unique_id: bytes) -> str:
        """Leave the last group, and join group ``number`` and prove it. Return one line about NCCL.

        Raises
        ------
        NcclError, UnsupportedError
        """
        self.leave()
        self._number = number  # before the group is joined: a rank that fails in the middle gives up this number
        with self.giving_up_on_failure():
            self.communicator = NcclCommunicator(
                self._load(), unique_id, self.rank, self.world_size, is_broken=self.is_broken
            )
            self._prove(self.communicator)
        self._watch_end = threading.Event()
        watch = threading.Thread(
            target=self._watch, args=(self.communicator, self._watch_end), name="synk-watch", daemon=True
        )
        watch.start()
        capabilities = self.communicator.capabilities()
        return f"{capabilities.name} {capabilities.version} ({capabilities.library_path})"

    def _prove(self, communicator: NcclCommunicator) -> None:
        """Sum a megabyte of known integers over all ranks, and compare.

        Raises
        ------
        NcclError
            If the sums are wrong or do not come in time. The communicator is then aborted.
        """
        backend, dtype = self._backend, np.dtype(np.int32)
        numbers = np.arange(_PROOF_COUNT, dtype=dtype)
        array = backend.from_host(numbers + dtype.type(self.rank))
        buffer = Buffer(backend.address(array), _PROOF_COUNT, dtype.name)
        try:
            communicator.all_reduce(buffer, buffer, "sum", stream=backend.stream_handle)
            event = backend.mark()
            communicator.wait(lambda: bool(event.done), timeout_s=PROOF_TIMEOUT_S)
            found = backend.host_copy(array)
            expected = numbers * self.world_size + sum(range(self.world_size))
            if num_wrong := int((found != expected).sum()):
                raise NcclError(INTERNAL_ERROR, f"{num_wrong} of {_PROOF_COUNT} sums are wrong", "prove the group")
        except BaseException:
            communicator.abort()  # the device must not go on waiting for the others
            raise
        finally:
            backend.take_copied()  # no call has copied this

    def is_broken(self) -> bool:
        """Whether the master or any rank has given the group up."""
        number = self._number
        return bool(self._down[self.rank, Down.BROKEN] >= number or (self._up[:, Up.BROKEN] >= number).any())

    def give_up(self) -> None:
        """Tell all ranks, and the master before its next message, that this group is unusable."""
        self._up[self.rank, Up.BROKEN] = self._number

    @contextlib.contextmanager
    def giving_up_on_failure(self) -> Iterator[None]:
        """Give the group up if the body fails, in which ranks wait for each other: nobody may wait for this one."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def check(self) -> None:
        """Raise if the group broke, so that results of its collectives are not used.

        Raises
        ------
        NcclError
            With code 6.
        """
        if self.communicator is not None and (self.is_broken() or self.communicator.poll() == "error"):
            reason = "the group is broken; another worker died or failed"
            raise NcclError(REMOTE_ERROR, reason, "finish a collective")

    @staticmethod
    def is_lost_peer(error: BaseException) -> bool:
        """Whether an error means that a rank failed only because another one did."""
        return isinstance(error, NcclError) and error.code == REMOTE_ERROR

    def _watch(self, communicator: NcclCommunicator, end: threading.Event) -> None:
        while not end.wait(_WATCH_INTERVAL_S):
            if self.is_broken() or communicator.poll() == "error":
                # The word comes before the abort, which frees the main thread: ``check`` must find the group given up
                # there, or it would take unfinished sums for results.
                self.give_up()
                communicator.abort()
                return

    def collectives(self) -> Collectives:
        """Return the collectives between all ranks, for requests that the master has seen to be equal on all."""
        assert self.communicator is not None
        arrays = UserArrays(self._backend)
        return Collectives(self.communicator, self._backend, self.world_size, arrays, guard=self.giving_up_on_failure)

    def collectives_in(self, host: ShmCommunicator, framework: tuple[Any, Any]) -> Collectives:
        """Return the collectives of a function, between the ranks that ``host`` is in a call with.

        They go by NCCL once the ranks have agreed through ``host``; messages go through host memory.
        """
        assert self.communicator is not None
        return Collectives(
            self.communicator,
            self._backend,
            len(host.ranks),
            UserArrays(self._backend, framework),
            agree=host.agree_steps,
            guard=self.giving_up_on_failure,
            host=host,
        )

    def leave(self) -> None:
        """Free the communicator. Safe to repeat."""
        self._watch_end.set()
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            communicator.close()
