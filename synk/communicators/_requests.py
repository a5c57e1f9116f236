"""Requests: collectives and messages that a function starts and waits for later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synk.communicators._host import HostCommunicator
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
