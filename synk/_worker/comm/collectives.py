"""Collectives on a rank: from a user's arrays to those of a communicator in host memory.

Between GPUs that are joined by NCCL a subclass takes its place: ``NcclCollectives`` in ``synk.cuda``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synk._pure.dtypes import dtype_name
from synk._worker.comm.messages import Messages
from synk._worker.comm.rows import RowCollectives
from synk._worker.comm.user_arrays import UserArrays
from synk.communicators._checks import check_reduction, named_dtype
from synk.communicators._host import HostCommunicator
from synk.communicators._messages import NUMBERS
from synk.communicators._schedule import Steps


class Collectives:
    """The collectives of a function on a rank.

    Parameters
    ----------
    host : HostCommunicator or None
        The communicator of host memory in which the current call has begun. It keeps the order of collectives in
        flight. None for collectives that the master asks for.
    arrays : UserArrays
        Takes arrays from the function that runs, and gives it arrays.
    size : int
        Ranks that take part.

    Attributes
    ----------
    share : float or None
        A cache of this rank's share of the rows of the call.
    at_once : callable or None
        The way without steps, for NumPy arrays on one machine; see ``ShmCommunicator``.
    """

    def __init__(self, host: HostCommunicator | None, arrays: UserArrays, size: int) -> None:
        self._shared = host
        self.arrays = arrays
        self._size = size
        self.share: float | None = None
        self.at_once: Callable[..., Any] | None = None
        self._messages = None if host is None else Messages(host, self.arrays)
        self._rows = None if host is None else RowCollectives(host, self.arrays)

    @property
    def host(self) -> HostCommunicator:
        """The communicator of host memory in which the current call has begun."""
        assert self._shared is not None
        return self._shared

    @property
    def messages(self) -> Messages:
        """The messages of the current call."""
        assert self._messages is not None
        return self._messages

    @property
    def rows(self) -> RowCollectives:
        """The collectives of rows of the current call."""
        assert self._rows is not None
        return self._rows

    # Here and below, everything that can be refused is refused before the first step.

    def all_reduce(self, array: Any, op: str, weight: float | None, out: Any, is_started: bool = False) -> Steps:
        send = self.arrays.apart(self.arrays.take(array), out, is_in_place=True)
        self._check(op, send, weight)
        place = self._place(out, send.shape, send.dtype)
        result = yield from self._reduced("all_reduce", send, send.shape, op, weight, place)
        return self._given(result, place, out)

    def reduce(self, array: Any, op: str, root: int, weight: float | None, out: Any) -> Steps:
        send, root = self.arrays.take(array), self.host.member("reduce", "root", root)
        send = self.arrays.apart(send, out, is_in_place=True)
        self._check(op, send, weight)
        is_root = self.host.rank == root
        place = self._place(out, send.shape, send.dtype) if is_root else None
        result = yield from self._reduced("reduce", send, send.shape, op, weight, place, root)
        return self._given(result, place, out) if is_root else None

    def broadcast(self, array: Any, root: int, out: Any) -> Steps:
        send, root = self.arrays.take(array), self.host.member("broadcast", "root", root)
        place = self._place(out, send.shape, send.dtype)
        result = yield from self._copied("broadcast", send, send.shape, place, root)
        return self._given(result, place, out)

    def all_gather(self, array: Any, out: Any) -> Steps:
        send = self.arrays.apart(self.arrays.take(array), out)
        shape = (self._size, *send.shape)
        place = self._place(out, shape, send.dtype)
        result = yield from self._copied("all_gather", send, shape, place)
        return self._given(result, place, out)

    def reduce_scatter(self, array: Any, op: str, weight: float | None, out: Any) -> Steps:
        send = self.arrays.apart(self.arrays.take(array), out)
        self._check(op, send, weight)
        if send.ndim == 0 or len(send) % self._size:
            raise ValueError(
                f"cannot reduce_scatter: got shape {send.shape}, expected a multiple of {self._size} rows (the ranks "
                "of the call)."
            )
        shape = (len(send) // self._size, *send.shape[1:])
        place = self._place(out, shape, send.dtype)
        result = yield from self._reduced("reduce_scatter", send, shape, op, weight, place)
        return self._given(result, place, out)

    def _reduced(
        self, kind: str, send: Any, shape: tuple[int, ...], op: str, weight: float | None, place: Any, *root: int
    ) -> Steps:
        """Take the steps of a reduction. Return an array with the result: ``place`` if it could go there."""
        result = self.arrays.empty(shape, send.dtype) if place is None else place
        take = getattr(self.host, f"{kind}_steps")
        yield from take(_flat(send), _flat(result), op, weight, *root)
        return result

    def _copied(self, kind: str, send: Any, shape: tuple[int, ...], place: Any, root: int = -1) -> Steps:
        """Take the steps of an ``all_gather``, or of a ``broadcast`` from ``root``. Return an array with the result."""
        result = self.arrays.empty(shape, send.dtype) if place is None else place
        if kind == "all_gather":
            yield from self.host.all_gather_steps(_flat(send), _flat(result))
            return result
        if self.host.rank == root and result is not send:
            result[...] = send
        yield from self.host.broadcast_steps(_flat(result), root)
        return result

    def _place(self, out: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return None if out is None else self.arrays.place(out, shape, dtype)

    def _given(self, result: Any, place: Any, out: Any) -> Any:
        """Return a result in the function's framework, or in ``out`` if the function gave one."""
        if place is None:
            return self.arrays.give(result)
        if result is not place:  # it could not be written there
            place[...] = result
        return self.arrays.filled(place, out)

    def _check(self, op: str, array: Any, weight: float | None) -> None:
        """Refuse an op that the dtype does not have, before the ranks agree on it."""
        check_reduction(op, dtype_name(array.dtype), weight)

    # What a device makes of collectives that were started; in host memory there is nothing to do.

    def joined(self, value: Any) -> Any:
        """Return the result of a collective that was started. Later work on the function's stream may use it."""
        return value

    def is_there(self, value: Any) -> bool:
        """Whether the device has finished a collective that was started."""
        return True

    def join_communication(self) -> None:
        """Let later work use all collectives that were started. The function has returned, or another one begins."""


def _flat(array: Any) -> Any:
    """Return a flat view of a contiguous array, in synk's own dtype where NumPy has none.

    Raises
    ------
    UnsupportedError
        If values of its dtype cannot be communicated.
    """
    if array.dtype not in NUMBERS:
        array = array.view(named_dtype(dtype_name(array.dtype)))
    return array if array.ndim == 1 else array.reshape(-1)
