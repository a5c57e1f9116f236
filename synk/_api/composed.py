"""Functions each of whose calls is made of several: with ``reproducible=``, ``retry=``, ``on_oom=`` or ``SYNK_REPLAY``.

Each of these is a plain function around a call, and the call knows nothing of it.

``reproducible=ROWS`` gives the result of a serial call with one slice for each block, whatever the number of workers.
The workers compute the blocks, under op None. One of them then gets what was returned for each block, and an ordinary
call combines it in the order of the blocks. So everything that a call checks is checked, and combined as by a call.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from synk._api.function import Function, P, R
from synk._api.options import Options, call_options
from synk._api.plain import ScatteredArguments
from synk._api.replay import recorded
from synk._api.serial import call_serially
from synk._engine.argument import OPTION_NAMES
from synk._engine.arguments import classified
from synk._engine.callee import Callee
from synk._engine.pending import PendingCall
from synk._engine.rows import CallOptions, divided
from synk._engine.session import Session
from synk._processes.output import report
from synk._pure.nested import take_apart
from synk._pure.shards import Selection
from synk._pure.tracebacks import verb
from synk._wire.apart import BlockValues, Silent, next_block
from synk._wire.replayed import moment
from synk.errors import RemoteError, WorkerDied, add_note

BLOCK_ROWS = 1024
"""The most rows of a block under ``reproducible=True``."""


def call_in_blocks(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
    """Return the result of a call, whose bits are the same for any number of ranks, or for one rank alone."""
    function = function._renewed()
    if not function._options.reproducible:  # the user has edited its module
        return function._run(args, kwargs, options)
    rows_of_block = function._options.reproducible
    block_rows = BLOCK_ROWS if rows_of_block is True else int(rows_of_block)
    whole, blocks, combined = function._made_once(Silent, functools.partial(_made_of, function))
    selection, deadline = _begun(whole, args, kwargs, options)
    count = 0 if selection is None else selection.count
    num_blocks, num_ranks = max(-(-count // block_rows), 1), whole._bound_session().world_size
    if selection is None or 1 in (num_blocks, num_ranks, options.num_ranks):
        return whole._run(args, kwargs, _on_first(options, num_blocks, deadline))
    values: list[Any] = []
    low, (size, num_larger) = 0, divmod(count, num_blocks)
    for same, rows in ((num_larger, size + 1), (num_blocks - num_larger, size)):
        # As many of these blocks on each rank, then one on each of some.
        each, left = divmod(same, num_ranks)
        for slices, among in ((each, num_ranks), (1, left)):
            if slices * among:
                part = _part(selection, low, low := low + slices * among * rows)
                own = CallOptions(part, slices, None, _left_s(deadline), among)
                by_rank = blocks._run(args, kwargs, own)[:among]
                values += by_rank if slices == 1 else [value for parts in by_rank for value in parts]
    weights = np.broadcast_to(False, count)  # a row for each row, cut into slices as the rows were into blocks
    options = replace(options, batch=None)
    return combined._run((BlockValues(values), weights), {}, _on_first(options, num_blocks, deadline))


def _made_of(function: Any) -> tuple[Function[..., Any], ...]:
    """Return the functions that it is called as: of one rank's rows, of each block, and of the values of all blocks."""
    options, session = function._options, function._bound_session()
    silent = Silent(function._callee.fn)
    return (
        Function(silent, options, session),
        Function(silent, replace(options, outputs=None, reproducible=False), session),
        Function(Silent(next_block), replace(options, bcast_inputs="values"), session),
    )


def _begun(function: Any, args: Any, kwargs: Any, options: CallOptions) -> tuple[Selection | None, float | None]:
    """Check the arguments of a call as any call does. Return the rows that it uses, and when it must have ended."""
    session, callee = function._bound_session(), function._callee
    with session.entered(function._verb):
        deadline = session.deadline(options.timeout)
        session.begin(function._verb, deadline)
        arguments = classified(callee, args, kwargs, session, options.is_submitted)
        callee.load(session)
        division = divided(session, callee, arguments, options)
        passed = [argument.value for argument in arguments if argument.kind in ("shard", "resident")]
        shards = [variable for variable in callee.variables if variable.is_sharded]
        for held in (*passed, *shards, *callee.residents):
            raise ValueError(
                f"cannot call {callee.name!r}: got {held.name!r}, which each rank holds for itself, expected neither a "
                "sharded variable nor a resident object with reproducible=. Pass an array, or the object itself."
            )
        return division.selection, deadline


def _on_first(options: CallOptions, num_slices: int, deadline: float | None) -> CallOptions:
    return replace(options, num_slices=num_slices, timeout=_left_s(deadline), num_ranks=1)


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)


def _part(selection: Selection, low: int, high: int) -> Any:
    """Return the ``batch`` that picks some of the selected rows."""
    if selection.indices is not None or selection.step < 0:
        return selection.positions()[low:high]
    start, step = selection.start, selection.step
    return slice(start + low * step, start + high * step, step)


Call = Callable[[tuple[Any, ...], dict[str, Any], CallOptions], Any]


class Composed(Function[P, R]):
    """A :class:`synk.Function` with these options. They are about calls: all other verbs are those of a plain one.

    ``folder`` is where the calls that the user makes are recorded if they fail.
    """

    def __init__(
        self, fn: Callable[P, R], options: Options, session: Session | None = None, folder: str | None = None
    ) -> None:
        super().__init__(fn, options, session)
        call: Call = self._call_once
        self._serial: Call = functools.partial(call_serially, self)
        if options.reproducible:
            self._serial = functools.partial(call_in_blocks, self)
            call = functools.partial(self._run_checked, run=self._serial)
        elif folder is not None:
            ask: Function[..., Any] = Function(moment, Options(options.name, outputs=None, per_rank=True), session)
            call = recorded(call, self, ask, folder)
        self._call, self._serial = self._composed(call, options), self._composed(self._serial, options)

    def _composed(self, call: Call, options: Options) -> Call:
        if options.on_oom == "slices":
            call = in_slices(call, self._callee)
        return retried(call, options.retry) if options.retry else call

    def _call_once(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        return super().__call__(*args, **options.of_user, **kwargs)

    @verb
    def __call__(self, /, *args: Any, **options: Any) -> Any:
        return self._call(args, *_split(options))

    @verb
    def serial(self, /, *args: Any, **options: Any) -> Any:
        """Run the whole input on one worker; see :meth:`synk.Function.serial`."""
        return self._serial(args, *_split(options, num_ranks=1))

    @verb
    def repeat(self, num_repeats: int, /, *args: Any, **options: Any) -> Any:
        """Call the function several times with one message; see :meth:`synk.Function.repeat`. Never in blocks."""
        if self._options.of_calls:
            raise self._refused("repeat", "the repetitions are one call. Call it in a loop")
        return super().repeat(num_repeats, *args, **options)

    @verb
    def submit(self, /, *args: Any, **options: Any) -> Any:
        """Refuse it: a call that is submitted is one call. With ``SYNK_REPLAY`` alone, the call is made at once."""
        if self._options.of_calls:
            raise self._refused("submit", "a call that is submitted is one. Call it")
        pending: PendingCall[Any] = PendingCall(self._bound_session(), self.__name__)
        try:
            pending._end(self(*args, **options), None)
        except Exception as error:
            pending._end(None, error)
        return pending

    def _refused(self, verb: str, why: str) -> ValueError:
        given = ", ".join(f"{name}={value!r}" for name, value in self._options.of_calls.items())
        return ValueError(
            f"cannot {verb} {self.__name__!r}: got a function with {given}, expected one without: its calls are made "
            f"of several, and {why}, or build it without."
        )


def _split(options: dict[str, Any], **how: Any) -> tuple[dict[str, Any], CallOptions]:
    """Return the function's own arguments and the options of a call, which were all given by name."""
    given = {name: options.pop(name) for name in OPTION_NAMES & options.keys()}
    return options, call_options(**given, **how)


def retried(call: Call, times: int) -> Call:
    """Return a call that is made again after a worker has died in it, at most so many times."""

    def again(*call_of: Any) -> Any:
        for _ in range(times):
            with contextlib.suppress(WorkerDied):
                return call(*call_of)
        return call(*call_of)

    return again


def in_slices(call: Call, callee: Callee) -> Call:
    """Return a call that is made again with twice as many slices if it runs out of memory on a rank.

    Once it fits, the number is remembered for arguments of the same shapes.
    """
    known: dict[Any, int] = {}

    def sliced(args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        num_slices = options.num_slices
        if known:
            with contextlib.suppress(Exception):  # wrong input, which the call will refuse
                num_slices = max(num_slices, known.get(_size(callee, args, kwargs, options.batch), 1))
        full, size = "", None
        while True:
            try:
                result = call(args, kwargs, replace(options, num_slices=num_slices))
            except MemoryError as error:
                if not isinstance(error.__cause__, RemoteError):
                    raise  # it is the program that lacks memory
                size = _size(callee, args, kwargs, options.batch)
                if num_slices >= size[0]:
                    add_note(error, f"{callee.name!r} runs out of memory with a single row in each slice.")
                    raise
                full, num_slices = str(error).partition("\n")[0] or "MemoryError", 2 * num_slices
            except Exception as error:
                if full:
                    add_note(error, f'on_oom="slices" had divided the call into {num_slices} slices, after {full!r}.')
                raise
            else:
                if full and size not in known:
                    report(
                        "%r ran out of memory on a rank (%s) and fits in %d slices. Calls with such arguments are run "
                        "in slices from now on.",
                        callee.name,
                        full,
                        num_slices,
                    )
                if full:
                    known[size] = num_slices
                return result

    return sliced


def _size(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> tuple[int, Any]:
    """Return how many rows a call uses, and what else calls of like size have in common."""
    selection = ScatteredArguments(callee, args, kwargs).select(batch)
    shapes = set()
    for label, _, is_broadcast, value in callee.signature.bind(args, kwargs):
        for leaf in [value] if is_broadcast else take_apart(value)[0]:
            shape = getattr(leaf, "shape", None) or ()
            shapes.add((label, shape if is_broadcast else shape[1:]))
    return 0 if selection is None else selection.count, frozenset(shapes)
