"""``FunctionWrapper``: the base of classes that are called like a function and finish the results of its calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import synk


class WrappedCall:
    """A submitted call of a :class:`FunctionWrapper`, used like :class:`synk.PendingCall`."""

    def __init__(self, call: synk.PendingCall[Any], finish: Callable[[Any], Any]) -> None:
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
        """Wait for the call to end and return its finished result, as :meth:`synk.PendingCall.result` does.

        The result is finished once, by the first call of this method that succeeds.
        """
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
        """Call ``fn(call)`` when the call has ended, as :meth:`synk.PendingCall.add_done_callback` does."""
        self._call.add_done_callback(lambda _: fn(self))

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error. This never waits."""
        return self._call.done()

    def __repr__(self) -> str:
        return f"<synk.WrappedCall of {self._call!r}>"


class FunctionWrapper:
    """The base of a class whose objects are called like the function that they wrap.

    They have the verbs of a function: calls with all options, ``serial``, ``repeat``, ``submit``, ``stream``,
    ``verify``. A derived class turns a result into the caller's result in :meth:`finish`.

    Parameters
    ----------
    function : Function

    Attributes
    ----------
    function : Function

    Examples
    --------
    >>> import numpy as np, synk
    >>> from synk.extensions._wrapper import FunctionWrapper
    >>> class Mean(FunctionWrapper):
    ...     def finish(self, result):
    ...         total, rows = result
    ...         return float(total / rows)
    >>> with synk.fork(2):
    ...     mean = Mean(synk.function(lambda x: (x.sum(), len(x)), outputs="sum"))
    ...     mean(np.arange(5.0)), mean.serial(np.arange(5.0)), mean.submit(np.arange(5.0), batch=3).result()
    (2.0, 2.0, 1.0)
    """

    function: synk.Function[..., Any]

    def __init__(self, function: synk.Function[..., Any]) -> None:
        self.function = function

    def finish(self, result: Any) -> Any:
        """Return the caller's result for the result of a call. This runs once for each call, in the master."""
        return result

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        """Call the function; see :class:`synk.Function`."""
        return self.finish(self.function(*args, **options))

    def serial(self, /, *args: Any, **options: Any) -> Any:
        """Call the function serially; see :meth:`synk.Function.serial`."""
        return self.finish(self.function.serial(*args, **options))

    def repeat(self, num_repeats: int, /, *args: Any, **options: Any) -> Any:
        """Call it repeatedly with one message; see :meth:`synk.Function.repeat`. Only the last result is finished."""
        return self.finish(self.function.repeat(num_repeats, *args, **options))

    def submit(self, /, *args: Any, **options: Any) -> WrappedCall:
        """Submit a call; see :meth:`synk.Function.submit`. Its result is finished when it is asked for."""
        return WrappedCall(self.function.submit(*args, **options), self.finish)

    def verify(self, /, *args: Any, **options: Any) -> Any:
        """Compare the results of the wrapped function, not finished; see :meth:`synk.Function.verify`."""
        return self.function.verify(*args, **options)

    def stream(self, batches: Iterable[Any], *, progress: bool = False) -> Iterator[Any]:
        """Call the function for each batch; see :meth:`synk.Function.stream`. Results are finished one by one."""
        return self.function._streamed(self.submit, batches, progress)

    def build_inputs(self, *arrays: Any, **options: Any) -> tuple[synk.Data, ...]:
        """Return one :class:`synk.Data` for each array, for the parameters in order; see :func:`synk.data`."""
        return tuple(synk.data(array, **options) for array in arrays)
