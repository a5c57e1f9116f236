"""How workers start: each says hello when its process is ready. One that does not is killed and replaced."""

from __future__ import annotations

import math
import pickle
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np

from synk._master.processes.processes import Processes, WorkerState
from synk._master.processes.reports import signs_of_life, stderr_tails
from synk._master.workers.recovery import Recovery
from synk._master.workers.requests import HELLO, Request, Requests
from synk._version import __version__
from synk._wire.channel import ProtocolError
from synk._wire.messages import Reply
from synk.errors import CallTimeout, SerializationError, StartupError, WorkerDied

START_TIMEOUT_S = 120.0
"""How long a worker may start without a sign of life."""


class Starting:
    """Waits for the workers of one runtime that are starting.

    Parameters
    ----------
    processes : Processes
    requests : Requests
    recovery : Recovery
    wait : callable
        ``wait(request)`` returns when all ranks have answered.
    """

    def __init__(
        self, processes: Processes, requests: Requests, recovery: Recovery, wait: Callable[[Request], object]
    ) -> None:
        self._processes = processes
        self._requests = requests
        self._recovery = recovery
        self._wait = wait
        self._signs: dict[int, tuple[int, float]] = {}  # by pid: its signs of life, and when they were seen to change
        self._once_stuck: set[int] = set()  # ranks whose process replaces one that got stuck while it started

    def await_ready(self, deadline: float | None) -> None:
        """Wait until every started worker has said hello. A worker that gets stuck while it starts is killed and
        replaced.

        Raises
        ------
        StartupError
            If workers did not come up. It names the ranks and shows the end of their stderr. The runtime is closed
            then.
        WorkerDied
            If a replacement died.
        CallTimeout
            If workers are not up at ``deadline``. They go on starting.
        """
        while waiting := [worker for worker in self._processes.by_rank if not worker.is_ready]:
            # The time counts from the process itself, so that calls with shorter limits cannot postpone it.
            silent = [self._last_sign(worker) for worker in waiting if worker.hello is None]
            limit = min(silent, default=math.inf) + START_TIMEOUT_S
            next_look = time.monotonic() + START_TIMEOUT_S / 4
            try:
                self._await_hellos(waiting, min(limit, next_look, math.inf if deadline is None else deadline))
            except CallTimeout:
                now = time.monotonic()
                if now >= limit:
                    self._replace_stuck()
                elif deadline is not None and now >= deadline:
                    raise

    def _last_sign(self, worker: WorkerState) -> float:
        """Return when a process that starts gave its last sign of life: it has started, or read from files.

        A library on a slow file system takes minutes to import, and is read all the time.
        """
        pid, signs = worker.process.pid, signs_of_life(worker.process.pid)
        before, seen = self._signs.get(pid, (signs, 0.0))
        self._signs[pid] = signs, seen if signs == before else time.monotonic()
        return max(self._signs[pid][1], worker.process.started)

    def _await_hellos(self, waiting: Sequence[WorkerState], deadline: float) -> None:
        ranks = {worker.rank for worker in waiting}
        try:
            silent = {worker.rank for worker in waiting if worker.hello is None}
            self._requests[HELLO] = hello = Request(HELLO, silent, deadline, "start", "")
            # Nobody is interrupted: a worker that is still starting has no signal handler, and the signal would end it.
            try:
                self._wait(hello)
            finally:
                self._requests.pop(HELLO, None)
            for worker in waiting:
                assert worker.hello is not None
                self._greet(worker, worker.hello)
        except (WorkerDied, ProtocolError, SerializationError) as error:
            if isinstance(error, WorkerDied) and self._recovery.has_restarted:
                raise  # a replacement died: that is one more death, and the next operation starts another
            first_rank = self._processes.placement.first_rank
            own = [rank - first_rank for rank in getattr(error, "ranks", ())]
            died = list(getattr(error, "nodes", ())) or own or sorted(ranks)
            self._fail(died, f"did not come up. {error}", error)
        except StartupError as error:
            self._recovery.fail(error)
            raise

    def _fail(self, ranks: Iterable[int], what_happened: str, error: BaseException | None) -> NoReturn:
        who = self._processes.placement.among_all(ranks)
        failure = StartupError(f"cannot start the workers: {who} {what_happened}")
        self._recovery.fail(failure)
        raise failure from error

    def _replace_stuck(self) -> None:
        """Kill and replace workers without a sign of life. If a replacement gets stuck too, the runtime fails."""
        latest = time.monotonic() - START_TIMEOUT_S
        stuck = [worker for worker in self._processes.by_rank if not worker.is_ready and worker.hello is None]
        stuck = [worker for worker in stuck if self._last_sign(worker) <= latest]
        if not stuck:
            return
        for worker in stuck:  # they owe no reply except their hello
            worker.process.kill()
            self._processes.bury(worker)
            self._recovery.unreported[worker.rank] = (
                f"was not up {START_TIMEOUT_S:g} s after its last sign of life, was killed,"
            )
        ranks = {worker.rank for worker in stuck}
        if self._recovery.max_restarts == 0 or ranks & self._once_stuck:
            tails = "\n".join(["", *stderr_tails(self._processes, stuck, 0.0)])
            self._fail(sorted(ranks), f"was not up {START_TIMEOUT_S:g} s after its last sign of life.{tails}", None)
        self._once_stuck |= ranks
        self._recovery.restart_dead()

    def _greet(self, worker: WorkerState, reply: Reply) -> None:
        hello = pickle.loads(reply.body)
        mine = own_versions()
        if hello["versions"] != mine:
            differing = [f"{k} {v} (master: {mine[k]})" for k, v in hello["versions"].items() if v != mine[k]]
            raise StartupError(
                f"cannot use worker {self._processes.placement.named([worker.rank])}: it runs {', '.join(differing)}."
            )
        worker.description = hello["device"]
        worker.is_ready = True
        self._once_stuck.discard(worker.rank)


def own_versions() -> dict[str, str]:
    """Return the versions that the master and the workers must share."""
    return {"python": platform.python_version(), "numpy": np.__version__, "synk": __version__}
