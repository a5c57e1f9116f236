"""Functions each of whose calls is made of several: with ``reproducible=``, ``retry=``, ``on_oom=`` or ``SYNK_REPLAY``.

Each of these is a plain function around a call, and the call knows nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from synk._api.blocks import in_blocks
from synk._api.function import Function, P, R
from synk._api.options import Options, call_options, check_slices
from synk._api.replay import recorded, replay_folder
from synk._master.calls.signature import OPTION_NAMES, Signature
from synk._master.flight.pending import PendingCall
from synk._master.objects.shared import Shared
from synk._master.processes.output import report
from synk._master.session import Session
from synk._pure.nested import take_apart
from synk._pure.tracebacks import verb
from synk._wire.replayed import moment
from synk.errors import RemoteError, WorkerDied, add_note

Call = Callable[..., Any]


class Composed(Function[P, R]):
    """A :class:`synk.Function` with these options. They are about calls: all other verbs are those of a plain one."""

    def __init__(self, fn: Callable[P, R], options: Options, session: Session | None = None) -> None:
        super().__init__(fn, options, session)
        callee, call, serial = self._callee, super().__call__, super().serial
        if options.reproducible:
            call = in_blocks(fn, options, session)
            call, serial = self._checked(call), functools.partial(call, is_serial=True)
        elif folder := replay_folder():
            ask: Function[..., Any] = Function(moment, Options.of(moment, outputs=None, per_rank=True), session)
            call = recorded(call, self, ask, folder)
        self._serial: Call = serial
        if options.on_oom == "slices":
            call = in_slices(call, callee.signature, self.__name__)
        if options.retry:
            call = retried(call, options.retry)
        self._call: Call = call

    @verb
    def __call__(self, /, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)

    @verb
    def serial(self, /, *args: Any, **options: Any) -> Any:
        """Run the whole input on one worker; see :meth:`synk.Function.serial`."""
        return self._serial(*args, **options)

    def _checked(self, call: Call) -> Call:
        """Return a call whose result is held back until the default op is known to fit, as that of a plain one."""

        def checked(*args: Any, **options: Any) -> Any:
            given = {key: value for key, value in options.items() if key not in OPTION_NAMES}
            own = call_options(options.get("batch"), 2, options.get("output_subset"), options.get("timeout"))
            release = self._begin(args, given, own)
            result = call(*args, **options)
            if release is not None:
                release(result)
            return result

        return checked

    @verb
    def repeat(self, num_repeats: int, /, *args: Any, **options: Any) -> Any:
        """Call the function several times with one message; see :meth:`synk.Function.repeat`. Never in blocks."""
        if self._options.reproducible:
            raise ValueError(
                f"cannot repeat {self.__name__!r}: got a function with reproducible=, expected one without: one "
                "message has no blocks. Call it in a loop."
            )
        return super().repeat(num_repeats, *args, **options)

    @verb
    def submit(self, /, *args: Any, **options: Any) -> Any:
        """Refuse it: a call that is submitted is one call. With ``SYNK_REPLAY`` alone, the call is made at once."""
        given = [f"{name}={value!r}" for name, value in self._options.of_calls.items()]
        if given:
            raise ValueError(
                f"cannot submit {self.__name__!r}: got a function with {', '.join(given)}, expected one without: its "
                "calls are made of several, and a call that is submitted is one. Call it, or build it without."
            )
        pending: PendingCall[Any] = PendingCall(self._bound_session().queue, self.__name__)
        try:
            pending._end(self._call(*args, **options), None)
        except Exception as error:
            pending._end(None, error)
        return pending


def retried(call: Call, times: int) -> Call:
    """Return a call that is made again after a worker has died in it, at most so many times."""

    def again(*args: Any, **options: Any) -> Any:
        for _ in range(times):
            with contextlib.suppress(WorkerDied):
                return call(*args, **options)
        return call(*args, **options)

    return again


def in_slices(call: Call, signature: Signature, name: str) -> Call:
    """Return a call that is made again with twice as many slices if it runs out of memory on a rank.

    The number is remembered for arguments of the same shapes.
    """
    known: dict[Any, int] = {}

    def sliced(*args: Any, num_slices: int = 1, **options: Any) -> Any:
        given = {key: value for key, value in options.items() if key not in OPTION_NAMES}
        num_slices = check_slices(num_slices)
        if known:
            num_slices = max(num_slices, known.get(_shapes(signature, args, given)[0], 1))
        while True:
            try:
                return call(*args, num_slices=num_slices, **options)
            except MemoryError as error:
                if not isinstance(error.__cause__, RemoteError):
                    raise  # it is the program that lacks memory
                shapes, num_rows = _shapes(signature, args, given)
                if num_slices >= num_rows:
                    add_note(error, f"{name!r} runs out of memory with a single row in each of {num_slices} slices.")
                    raise
                if shapes not in known:
                    why = str(error).partition("\n")[0]
                    report(
                        "%r ran out of memory on a rank%s. Calls with such arguments are run in slices from now on, "
                        "twice as many until they fit.",
                        name,
                        f" ({why})" if why else "",
                    )
                num_slices = known[shapes] = 2 * num_slices

    return sliced


def _shapes(signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Return what calls of like size have in common, however their arguments are passed, and the number of rows."""
    shapes, num_rows = set(), 0
    for label, _, is_broadcast, value in signature.bind(tuple(args), kwargs):
        for number, leaf in enumerate([value] if is_broadcast else take_apart(value)[0]):
            shape = _shape_of(leaf)
            shapes.add((label, number, shape))
            if shape and not is_broadcast:
                num_rows = max(num_rows, shape[0])
    return frozenset(shapes), num_rows


def _shape_of(leaf: Any) -> Any:
    """Return the shape of an argument, of which only the first length counts; None if it has no rows."""
    if isinstance(leaf, Shared):
        return (sum(leaf._referent.lengths),) if leaf.is_sharded else None
    return (len(leaf),) if isinstance(leaf, (list, tuple)) else getattr(leaf, "shape", None)
