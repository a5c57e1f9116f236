"""Collectives on a rank: from a user's arrays to those of a communicator in host memory.

Requests are collectives and messages that a function starts and waits for later. Between GPUs that are joined by NCCL a
subclass takes the place of this: ``NcclCollectives`` in ``synk.cuda``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk.communicators._checks import check_reduction, named_dtype
from synk.communicators._host import HostCommunicator
from synk.communicators._messages import NUMBERS
from synk.communicators._schedule import Steps
from synk.communicators._user_arrays import UserArrays
from synk.errors import CollectiveMismatch


class Request:
    """A collective or message in flight. Made by collectives with ``async_op=True``, ``isend`` and ``irecv``.

    It belongs to the call that started it. When the function returns, synk finishes everything that the function has
    started, and from then on the request cannot be used.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.Runtime(2, backend="numpy") as runtime:
    ...     def total(x):
    ...         request = synk.comm.all_reduce(x.sum(), "sum", async_op=True)
    ...         largest = x.max()  # meanwhile
    ...         return request.wait(), largest
    ...     results = runtime.function(total, outputs=("first", "max"))(np.arange(4.0))
    >>> [float(result) for result in results]
    [6.0, 3.0]
    """

    def __init__(self, host: HostCommunicator, test: Callable[[], bool], finish: Callable[[], Any]) -> None:
        self._host = host
        self._call = host.call
        self._test: Callable[[], bool] = test
        self._finish: Callable[[], Any] | None = finish
        self._value: Any = None

    def wait(self) -> Any:
        """Wait until it is done, and return its result: None for ``isend`` and ``barrier``.

        You may call it again; it returns the same result.

        Raises
        ------
        CollectiveMismatch
            If it cannot be done, because the ranks' requests differ, a rank has left the function, or all ranks wait
            for each other. Also if the call that started it is over.
        """
        self._check_call("wait for")
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None  # frees the arrays that it holds
        return self._value

    def test(self) -> bool:
        """Return whether it is done, without waiting.

        On CPU workers this also advances everything in flight, as far as the other ranks are ready. Nothing makes
        progress by itself there, only in ``test`` and ``wait``, and while other calls of ``synk.comm`` wait.

        Raises
        ------
        CollectiveMismatch
            If the ranks' requests differ, or the other rank has left the function: then it will never be done.
        """
        self._check_call("test")
        return self._finish is None or self._test()

    def _check_call(self, verb: str) -> None:
        if self._host.call != self._call:
            raise CollectiveMismatch(
                f"cannot {verb} a request of synk.comm: got one that a call has started which is over, expected one of "
                "the present call. Wait for it in the function that has started it."
            )


class Collectives:
    """The collectives of a function on a rank.

    Parameters
    ----------
    host : HostCommunicator or None
        The communicator of host memory in which the current call has begun. It keeps the order of collectives in
        flight. None for collectives that the program asks for.
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

    @property
    def host(self) -> HostCommunicator:
        """The communicator of host memory in which the current call has begun."""
        assert self._shared is not None
        return self._shared

    # Here and below, everything that can be refused is refused before the first step.

    def steps(
        self,
        kind: str,
        array: Any,
        out: Any,
        *,
        op: str = "",
        weight: float | None = None,
        root: int = -1,
        sizes: Sequence[int] | None = None,
        axis: int = 0,
        is_started: bool = False,
    ) -> Steps:
        """Return the steps of a collective. They return its result, in ``out`` if the function gave one."""
        if kind == "barrier":
            return self.host.barrier_steps()
        if kind in ("all_reduce", "reduce", "reduce_scatter"):
            return self.reduce(kind, array, op, weight, root, out, is_started)
        if kind in ("broadcast", "all_gather"):
            return self.copy(kind, array, root, out)
        if kind in ("gather", "scatter", "all_to_all"):
            return self.exchange(kind, array, root, sizes, out)
        return self.join(kind, array, axis, out)

    def reduce(
        self, kind: str, array: Any, op: str, weight: float | None, root: int, out: Any, is_started: bool
    ) -> Steps:
        send, is_divided = self.arrays.take(array), kind == "reduce_scatter"
        at = [self.host.member(kind, "root", root)] if kind == "reduce" else []
        memory = self.arrays.memory(out)
        send = self.arrays.apart(send, memory, is_in_place=not is_divided)
        self._check(op, send, weight)
        shape = send.shape
        if is_divided:
            if not shape or len(send) % self._size:
                raise ValueError(
                    f"cannot reduce_scatter: got shape {shape}, expected a multiple of {self._size} rows (the ranks of "
                    "the call)."
                )
            shape = (len(send) // self._size, *shape[1:])
        is_receiver = not at or self.host.rank == at[0]
        place = self._place(memory, shape, send.dtype) if is_receiver else None
        result = yield from self._reduced(kind, send, shape, op, weight, place, *at)
        return self._given(result, place, memory, out) if is_receiver else None

    def copy(self, kind: str, array: Any, root: int, out: Any) -> Steps:
        send, memory = self.arrays.take(array), self.arrays.memory(out)
        if kind == "broadcast":
            root, shape = self.host.member(kind, "root", root), send.shape
        else:
            send = self.arrays.apart(send, memory)
            shape = (self._size, *send.shape)
        place = self._place(memory, shape, send.dtype)
        result = yield from self._copied(kind, send, shape, place, root)
        return self._given(result, place, memory, out)

    def _reduced(
        self, kind: str, send: Any, shape: tuple[int, ...], op: str, weight: float | None, place: Any, *root: int
    ) -> Steps:
        """Take the steps of a reduction. Return an array with the result: ``place`` if it could go there."""
        result = self.arrays.empty(shape, send.dtype) if place is None else place
        yield from self.host.reduce_steps(kind, _flat(send), _flat(result), op, weight, *root)
        return result

    def _copied(self, kind: str, send: Any, shape: tuple[int, ...], place: Any, root: int) -> Steps:
        """Take the steps of an ``all_gather``, or of a ``broadcast`` from ``root``. Return an array with the result."""
        result = self.arrays.empty(shape, send.dtype) if place is None else place
        if kind == "all_gather":
            yield from self.host.all_gather_steps(_flat(send), _flat(result))
            return result
        if self.host.rank == root and result is not send:
            result[...] = send
        yield from self.host.broadcast_steps(_flat(result), root)
        return result

    def _place(self, memory: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return None if memory is None else self.arrays.place(memory, shape, dtype)

    def _given(self, result: Any, place: Any, memory: Any, out: Any) -> Any:
        """Return a result in the function's framework, or ``out``, which has this memory, if the function gave one."""
        if place is None:
            return self.arrays.give(result)
        if result is not place:  # it could not be written there
            place[...] = result
        self.arrays.filled(place, memory)
        return out

    def _check(self, op: str, array: Any, weight: float | None) -> None:
        """Refuse an op that the dtype does not have, before the ranks agree on it."""
        check_reduction(op, dtype_name(array.dtype), weight)

    # -- rows: blocks whose lengths need not be equal. They go through host memory, even between devices -------------

    def exchange(self, kind: str, array: Any, root: int, sizes: Sequence[int] | None, out: Any) -> Steps:
        host, rows, blocks = self.host, None, None
        if kind != "all_to_all":
            root = host.member(kind, "root", root)
        if kind != "scatter" or host.rank == root:
            rows = self._rows(kind, array)
            if kind != "gather":
                blocks = self._block_sizes(kind, rows, sizes)
            elif sizes is not None and self._checked_sizes(kind, sizes)[host.ranks.index(host.rank)] != len(rows):
                raise ValueError(
                    f"cannot gather: got {len(rows)} rows and sizes={list(sizes)} on rank {host.rank}, expected the "
                    "number of its rows there."
                )
        joined = yield from self._exchange(kind, rows, blocks, root, out)
        return None if joined is None else self.arrays.received(joined, out)

    def join(self, kind: str, array: Any, axis: int, out: Any) -> Steps:
        """Join the arrays of all ranks along an axis."""
        rows = self._rows("all_gather", array)
        if not -rows.ndim <= operator.index(axis) < rows.ndim:
            raise ValueError(
                f"cannot all_gather along axis={axis}: got an array of shape {rows.shape}, expected "
                f"{-rows.ndim} <= axis < {rows.ndim}."
            )
        moved = np.moveaxis(rows, axis, 0)
        if axis in (0, -moved.ndim):
            joined = yield from self._exchange(kind, moved, None, -1, out)
            return self.arrays.received(joined, out)
        joined = yield from self._exchange(kind, np.ascontiguousarray(moved), None, -1, None)
        joined = np.moveaxis(joined, 0, axis)
        if out is None:
            return self.arrays.from_host(joined)
        place = self.arrays.host_place(out, joined.shape, joined.dtype)
        place[...] = joined
        return self.arrays.received(place, out)

    def _exchange(self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, out: Any) -> Steps:
        def place(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            # What the ranks agree on is synk's bfloat16; a rank that has brought that of ml_dtypes gets it back.
            return self.arrays.host_place(out, shape, dtype if rows is None else rows.dtype)

        return self.host.exchange_steps(kind, self.arrays.apart(rows, out), sizes, root, place)

    def _rows(self, kind: str, array: Any) -> np.ndarray:
        rows = self.arrays.to_host(array)
        named_dtype(dtype_name(rows.dtype))  # raises if the others could not read it
        if rows.ndim == 0:
            raise ValueError(f"cannot {kind}: got an array without axes, expected rows. Pass numpy.atleast_1d(array).")
        return rows

    def _block_sizes(self, kind: str, rows: np.ndarray, sizes: Sequence[int] | None) -> list[int]:
        """Return how many rows are for each rank: ``sizes``, or the same number for all."""
        num_ranks = len(self.host.ranks)
        if sizes is None:
            if len(rows) % num_ranks:
                raise ValueError(
                    f"cannot {kind}: got {len(rows)} rows, expected a multiple of {num_ranks} (the ranks of the "
                    "call). Pass sizes= for blocks of different lengths."
                )
            return [len(rows) // num_ranks] * num_ranks
        checked = self._checked_sizes(kind, sizes)
        if sum(checked) != len(rows):
            raise ValueError(f"cannot {kind}: got sizes={checked} for {len(rows)} rows, expected as many in all.")
        return checked

    def _checked_sizes(self, kind: str, sizes: Sequence[int]) -> list[int]:
        found, num_ranks = [operator.index(size) for size in sizes], len(self.host.ranks)
        if len(found) != num_ranks or min(found) < 0:
            raise ValueError(
                f"cannot {kind}: got sizes={found}, expected a number of rows for each of the {num_ranks} ranks of the "
                "call."
            )
        return found

    # -- messages, through host memory as well ---------------------------------------------------------------------

    def send(self, array: Any, peer: int, tag: int) -> None:
        peer = self.host.member("send", "peer", peer)
        self.host.send_array(self.arrays.to_host(array), peer, _checked(tag))

    def isend(self, array: Any, peer: int, tag: int) -> Request:
        peer = self.host.member("send", "peer", peer)
        self.host.isend_array(self.arrays.to_host(array), peer, _checked(tag))
        return Request(self.host, lambda: True, lambda: None)

    def recv(self, peer: int, tag: int, like: Any, out: Any) -> Any:
        return self.irecv(peer, tag, like, out).wait()

    def irecv(self, peer: int, tag: int, like: Any, out: Any) -> Request:
        host, arrays = self.host, self.arrays
        peer = host.member("recv", "peer", peer)
        message = host.irecv_array(arrays.host_target(like, out), peer, _checked(tag))
        return Request(
            host,
            lambda: host.test_message(message),
            lambda: arrays.received(host.finish_message(message), out),
        )

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


def _checked(tag: int) -> int:
    if not isinstance(tag, (int, np.integer)) or not 0 <= tag < 1 << 63:
        raise ValueError(f"cannot send or receive a message: got tag={tag!r}, expected an int from 0 to 2**63 - 1.")
    return int(tag)
