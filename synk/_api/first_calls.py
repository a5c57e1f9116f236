"""``synk.fork(check=True)``: the first call of each function is verified before it is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from synk._master.calls.plans import CallOptions
from synk._master.processes.output import warn_at_users_line

verified: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions whose functions are verified at their first calls: those of ``synk.fork(check=True)``."""


def verify_first_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> str | None:
    """Warn if a call that is about to be made is not what the plain function computes.

    Returns
    -------
    str or None
        A warning for a call that succeeds although this could not be found out.
    """
    if function._bound_session() not in verified:
        return None
    what = f"the first call of {function.__name__!r}"
    try:
        how = {"batch": options.batch, "num_slices": options.num_slices, "timeout": options.timeout}
        report = function.verify(*args, **how, **kwargs)
    except Exception as error:  # most often one that the call itself raises
        return f"{what} could not be verified: {type(error).__name__}: {error}"
    if not report:
        warn_at_users_line(f"{what} differs: {report}", RuntimeWarning)
    return None


def warning_first(text: str, release: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Return what is to be done with the result of a call: warn, and then what was to be done anyway."""

    def warn(result: Any) -> None:
        warn_at_users_line(text, RuntimeWarning)
        if release is not None:
            release(result)

    return warn
