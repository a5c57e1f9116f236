"""The engine on which the public names stand: that of ``synk._master`` or, with ``SYNK_ENGINE=next``, the new one.

Until the engines are switched, this is the only file that knows of both.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from synk._master.objects.resident import Resident as Resident

__all__ = [
    "IS_NEXT", "Callee", "PendingCall", "Profile", "Queue", "Resident", "Session", "Shared", "Tracer", "Variable",
    "WorkerProcess", "collectives", "distribute", "inline_process", "install", "made_at_once", "make_resident",
    "watch_over",
]  # fmt: skip

IS_NEXT = os.environ.get("SYNK_ENGINE") == "next"

if TYPE_CHECKING or not IS_NEXT:
    from synk._master import collectives as collectives
    from synk._master.calls.callee import Callee as Callee
    from synk._master.calls.callee import distribute as distribute
    from synk._master.flight.pending import PendingCall as PendingCall
    from synk._master.flight.queue import Queue as Queue
    from synk._master.objects.resident import make_resident as make_resident
    from synk._master.objects.shared import Shared as Shared
    from synk._master.processes.worker_process import WorkerProcess as WorkerProcess
    from synk._master.session import Session as Session
    from synk._master.session import watch_over as watch_over
    from synk._master.state.profile import Profile as Profile
    from synk._master.state.trace import Tracer as Tracer
    from synk._master.state.variable import Variable as Variable
else:
    from synk._engine import variables as collectives
    from synk._engine.captures import Callee as Callee
    from synk._engine.objects import Shared as Shared
    from synk._engine.objects import make_resident as make_resident
    from synk._engine.pending import PendingCall as PendingCall
    from synk._engine.processes import RankProcess as WorkerProcess
    from synk._engine.profile import Profile as Profile
    from synk._engine.session import Session as Session
    from synk._engine.session import watch_over as watch_over
    from synk._engine.trace import Tracer as Tracer
    from synk._engine.variables import Variable as Variable

    Queue = None

    def distribute(session: Any, *, deadline: float | None) -> None:
        """Send all functions that the ranks do not have yet."""
        session.distribute()


def made_at_once(session: Any, name: str) -> Any:
    """Return the future of a call that whoever asks for it makes at once."""
    return PendingCall(session if IS_NEXT else session.queue, name)


def inline_process() -> Any:
    """Return what plays a rank in the program itself; imported when it is used, with the rank's half."""
    if IS_NEXT:
        from synk._engine.inline import InlineProcess as Next

        return Next
    from synk._api.inline import InlineProcess

    return InlineProcess


def install(function: Any) -> None:
    """Have ``synk.Function`` make its calls by the new engine, if that is chosen."""
    if not IS_NEXT:
        return
    import functools

    from synk._api.options import call_options
    from synk._engine import function as engine
    from synk._pure.interrupts import holding
    from synk._pure.tracebacks import outline, verb

    def call(
        self: Any,
        /,
        *args: Any,
        batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            check = self._op_check
            if self._is_new or (check is not None and check.may_be_due(args)):
                with holding():
                    options = call_options(batch, num_slices, output_subset, timeout)
                    return self._run_checked(args, kwargs, options)
            is_one = type(num_slices) is int and num_slices == 1
            if is_one and batch is None and output_subset is None and timeout is None:
                return engine.run(self, args, kwargs, engine.PLAIN)
            return engine.run(self, args, kwargs, call_options(batch, num_slices, output_subset, timeout))
        except BaseException as error:
            __tracebackhide__ = True
            outline(error)
            if sys.version_info < (3, 11):
                raise error
            raise

    def submit(
        self: Any,
        /,
        *args: Any,
        batch: Any = None,
        num_slices: int = 1,
        output_subset: Any = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        options = call_options(batch, num_slices, output_subset, timeout, is_submitted=True)
        is_checked = self._op_check is None or not self._op_check.may_be_due(args)
        release = None if is_checked and not self._is_new else self._begin(args, kwargs, options)
        return engine.submit(self, args, kwargs, options, release)

    function.submit = functools.wraps(function.submit)(verb(submit))
    function.__call__ = functools.wraps(function.__call__)(call)
    function._run = engine.run
