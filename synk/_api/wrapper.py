"""``FunctionWrapper``: the base of what is called like a function and does something with the results of its calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from synk._api.function import Function
from synk._api.verify import Report
from synk._master.flight.pending import PendingCall
from synk._master.objects.data import Data


class WrappedCall:
    """A submitted call of a :class:`FunctionWrapper`; as :class:`synk.PendingCall`."""

    def __init__(self, call: PendingCall, finish: Callable[[Any], Any]) -> None:
        self._call = call
        self._finish: Callable[[Any], Any] | None = finish
        self._value: Any = None

    @property
    def name(self) -> str:
        return self._call.name

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._call.ranks

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call to end and return its result, finished; as :meth:`synk.PendingCall.result`."""
        if self._finish is not None:
            self._value = self._finish(self._call.result(timeout))
            self._finish = None
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._arrive().__await__()

    async def _arrive(self) -> Any:
        await self._call
        return self.result()

    def add_done_callback(self, fn: Callable[[WrappedCall], Any]) -> None:
        """Have ``fn(call)`` called once the call has ended; as :meth:`synk.PendingCall.add_done_callback`."""
        self._call.add_done_callback(lambda _: fn(self))

    def done(self) -> bool:
        """Return whether the call has ended, well or not; never waits for it."""
        return self._call.done()

    def __repr__(self) -> str:
        return f"<synk.WrappedCall of {self._call!r}>"


class FunctionWrapper:
    """The base of a class whose objects are called like the function that they wrap.

    Whatever a function has they have: calls with all options, ``serial``, ``submit``, ``stream``, ``rows``, ``verify``,
    ``build_inputs``. A
    derived class says in :meth:`finish` what becomes of a result.

    Parameters
    ----------
    function : Function

    Attributes
    ----------
    function : Function

    Examples
    --------
    >>> import numpy as np, synk
    >>> class Mean(synk.FunctionWrapper):
    ...     def finish(self, result):
    ...         total, rows = result
    ...         return float(total / rows)
    >>> with synk.fork(2):
    ...     mean = Mean(synk.function(lambda x: (x.sum(), len(x)), outputs="sum"))
    ...     mean(np.arange(5.0)), mean.serial(np.arange(5.0)), mean.submit(np.arange(5.0), batch=3).result()
    (2.0, 2.0, 1.0)
    """

    function: Function

    def __init__(self, function: Function) -> None:
        self.function = function

    def finish(self, result: Any) -> Any:
        """Return what the caller gets for the result of a call. Runs once for each, in the master."""
        return result

    @property
    def name(self) -> str:
        return self.function.name

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        """As :class:`synk.Function`."""
        return self.finish(self.function(*args, **options))

    def serial(self, /, *args: Any, **options: Any) -> Any:
        """As :meth:`synk.Function.serial`."""
        return self.finish(self.function.serial(*args, **options))

    def submit(self, /, *args: Any, **options: Any) -> WrappedCall:
        """As :meth:`synk.Function.submit`; the result is finished when it is asked for."""
        return WrappedCall(self.function.submit(*args, **options), self.finish)

    def verify(self, /, *args: Any, **options: Any) -> Report:
        """As :meth:`synk.Function.verify`, which compares what the wrapped function returns."""
        return self.function.verify(*args, **options)

    def stream(self, batches: Iterable[Any], **options: Any) -> Iterator[Any]:
        """As :meth:`synk.Function.stream`; each result is finished when it is asked for."""
        results = self.function.stream(batches, **options)
        return (self.finish(result) for result in results)

    def rows(self, /, *args: Any, **options: Any) -> Iterator[Any]:
        """As :meth:`synk.Function.rows`; each result is finished when it is asked for."""
        results = self.function.rows(*args, **options)
        return (self.finish(result) for result in results)

    def build_inputs(self, *arrays: Any, **options: Any) -> tuple[Data, ...]:
        """As :meth:`synk.Function.build_inputs`."""
        return self.function.build_inputs(*arrays, **options)
