"""A worker's membership in a group of NCCL: joining it, proving it, giving it up.

The program decides when a group is joined, and numbers it. A process that gives a group up writes its number into
shared memory: the program for all ranks when a worker died, a rank for itself when it failed. The communicator's thread
on each rank watches both words.

A group is used only after a proof: NCCL connects the ranks at the first collective, so a group whose ranks have all
joined may still fail, or wait for ever, at each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from synk._wire.orders import Down, Up
from synk.cuda._cupy import CupyBackend
from synk.cuda._nccl import INTERNAL_ERROR, REMOTE_ERROR, Buffer, NcclCommunicator, NcclError, load_nccl, version_text

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
    backend : CupyBackend

    Attributes
    ----------
    communicator : NcclCommunicator or None
        None while the rank is in no group.
    """

    def __init__(self, rank: int, world_size: int, down: np.ndarray, up: np.ndarray, backend: CupyBackend) -> None:
        self.rank = rank
        self.world_size = world_size
        self.communicator: NcclCommunicator | None = None
        self._number = 0
        self._down = down
        self._up = up
        self._backend = backend

    def new_id(self) -> bytes:
        """Return 128 bytes that name a new group."""
        return bytes(load_nccl().get_unique_id())

    def join(self, number: int, unique_id: bytes) -> str:
        """Leave the last group, and join group ``number`` and prove it. Return one line about NCCL.

        Raises
        ------
        NcclError, UnsupportedError
        """
        self.leave()
        self._number = number  # before the group is joined: a rank that fails in the middle gives up this number
        with self.giving_up_on_failure():
            nccl: Any = load_nccl()
            self._backend.give_back()  # NCCL takes memory of its own; after a death the libraries may keep all of it
            communicator = NcclCommunicator(
                nccl, unique_id, self.rank, self.world_size,
                is_broken=lambda: self.is_broken(number), give_up=lambda: self.give_up(number),
            )  # fmt: skip
            try:
                self._prove(communicator)
            except BaseException:
                communicator.abort()  # the device must not go on waiting for the others
                raise
        self.communicator = communicator
        return f"{version_text(nccl.get_version())} by {nccl.__name__.partition('.')[0]}"

    def _prove(self, communicator: NcclCommunicator) -> None:
        """Sum a megabyte of known integers over all ranks, and compare.

        Raises
        ------
        NcclError
            If the sums are wrong or do not come in time.
        """
        backend, dtype = self._backend, np.dtype(np.int32)
        numbers = np.arange(_PROOF_COUNT, dtype=dtype)
        try:
            array = backend.from_host(numbers + dtype.type(self.rank))
            buffer = Buffer(backend.address(array), _PROOF_COUNT, dtype.name)
            communicator.all_reduce(buffer, buffer, "sum", stream=backend.stream_handle)
            event = backend.mark()
            communicator.wait(lambda: backend.is_done(event), timeout_s=PROOF_TIMEOUT_S)
            found = backend.host_copy(array)
        finally:
            backend.take_copied()  # no call has copied this
        expected = numbers * self.world_size + sum(range(self.world_size))
        if num_wrong := int((found != expected).sum()):
            raise NcclError(INTERNAL_ERROR, f"{num_wrong} wrong sums of {_PROOF_COUNT}", "prove the group")

    def is_broken(self, number: int) -> bool:
        """Whether the program or any rank has given group ``number`` up."""
        return bool(self._down[self.rank, Down.BROKEN] >= number or (self._up[:, Up.BROKEN] >= number).any())

    def give_up(self, number: int | None = None) -> None:
        """Tell all ranks, and the program before its next message, that this group, or an earlier one, is unusable."""
        number = self._number if number is None else number
        self._up[self.rank, Up.BROKEN] = max(number, self._up[self.rank, Up.BROKEN])

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
        if self.communicator is not None and (self.is_broken(self._number) or self.communicator.has_failed):
            raise NcclError(REMOTE_ERROR, "a broken group: another worker died or failed", "finish a collective")

    @staticmethod
    def is_lost_peer(error: BaseException) -> bool:
        """Whether an error means that a rank failed only because another one did."""
        return isinstance(error, NcclError) and error.code == REMOTE_ERROR

    def leave(self) -> None:
        """Free the communicator. Safe to repeat."""
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            communicator.close()
