"""``synk.fork(check=True)``: the first call of each function is verified, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from synk._api.comparison import Tolerance
from synk._engine.rows import CallOptions
from synk._processes.output import warn_at_users_line
from synk._pure.words import text_of

verified: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions whose functions are verified at their first calls: those of ``synk.fork(check=True)``."""

Release = Callable[[Any], None]
"""What is done with the result of a call before it is given out."""


def verifying(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, release: Release | None
) -> Release | None:
    """Return what to do with the result of a first call: ``release``, and then, in such a session, verify the call."""
    if function._bound_session() not in verified or function._options.per_rank:  # there, ranks are to differ
        function._is_new = False
        return release

    def check(result: Any) -> None:
        from synk._api.verify import verify

        if release is not None:
            release(result)
        if not function._is_new:
            return  # another call was verified meanwhile
        function._is_new = False
        what = f"the first call of {function.__name__!r}"
        whole = replace(options, output_subset=None, is_submitted=False)
        try:
            report = verify(function._renewed(), args, kwargs, whole, Tolerance(None, None))
            text = "" if report else f"{what} differs: {report}"
        except Exception as error:
            text = f"{what} could not be verified: {text_of(error)}"
        if text:
            warn_at_users_line(text, RuntimeWarning)

    return check
