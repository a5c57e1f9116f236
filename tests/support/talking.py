"""Whether a synk function communicates, and what becomes of its call on one rank: serially, and with one row.

One row is one rank's, so the call must give what its serial call gives, which is the oracle.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import synk
from synk._pure.output_ops import each_op

VERBS = {
    *("send", "recv", "isend", "irecv", "barrier", "broadcast", "gather", "scatter", "all_to_all"),
    *("all_reduce", "all_gather", "reduce_scatter"),
}


def talks(function: Any) -> bool:
    """Whether the code of a function, or of those that it calls, names a collective or a message."""
    return any(VERBS.intersection(code.co_names) for code in codes(inspect.unwrap(function), set()))


def codes(fn: Any, seen: set[int]) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions that it reaches by names in its module and its closure."""
    if not isinstance(fn, types.FunctionType) or id(fn) in seen or fn.__module__.partition(".")[0] == "synk":
        return
    seen.add(id(fn))
    pending = [fn.__code__]
    for code in pending:
        yield code
        pending += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    names = {name for code in pending for name in code.co_names}
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    for value in [*cells, *(fn.__globals__[name] for name in names & fn.__globals__.keys())]:
        yield from codes(inspect.unwrap(value) if callable(value) else value, seen)


def check_on_one_rank(function: synk.Function, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that talks, serially and with one row as well; return the result of the call.

    Of one whose call fails, as an example of an error does, the serial call may fail likewise. One that changes what
    its ranks keep is only run.
    """
    try:
        result = call(function, *args, **kwargs)
    except Exception as error:
        with contextlib.suppress(type(error)):
            function.serial(*args, **kwargs)
        raise
    try:
        _check_alone(function, call, args, kwargs, result)
    except Exception as error:
        raise AssertionError(f"{function.__name__!r} on one rank: {error}") from error
    return result


def _check_alone(function: synk.Function, call: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
    is_compared = not function._callee.changes
    alone = function.serial(*args, **kwargs)
    if is_compared and None not in each_op(function.outputs):
        assert_alike(result, alone)
    with np.errstate(all="ignore"):  # the deviation of one row is 0
        try:
            serial = function.serial(*args, **kwargs, batch=[0])
        except ValueError as error:
            assert "no argument is scattered" in str(error)
            return
        one_row = call(function, *args, **kwargs, batch=[0])
    if is_compared:
        assert_alike(one_row, serial)


def assert_alike(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for pair in zip(found, expected):
            assert_alike(*pair)
    elif expected is None or isinstance(expected, str):
        assert found == expected
    else:
        found, expected = (np.asarray(each) for each in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * max(np.abs(expected).max(initial=0), 1e-9))
