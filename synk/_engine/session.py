"""The session is handed to every part of the program's half: the engine, with a lock, and the life of a runtime.

Operations enter it one at a time, in the process that owns it, and not inside a worker.

In one file because it is one object; at the end: what becomes of open sessions when the program ends or forks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from synk._code.captured import referred_in
from synk._engine.callee import distribute
from synk._engine.captures import ON_RESTART
from synk._engine.devices import GRACE_S as NCCL_GRACE_S
from synk._engine.devices import DeviceValues, Group
from synk._engine.engine import Engine
from synk._engine.lanes import Lease, ResultPool, before_fork
from synk._engine.pool import Pool
from synk._engine.processes import Processes
from synk._engine.profile import Profile
from synk._engine.things import Once
from synk._engine.workers import GRACE_S, interrupted
from synk._processes.output import warn_at_users_line
from synk._processes.placement import Placement
from synk._pure.interrupts import deferred, holding, waiting
from synk._pure.limits import lock_s
from synk._pure.words import text_of
from synk._wire.arenas import Arenas
from synk._wire.cell import cell, is_inside_worker, refuse_inside_worker
from synk._wire.memory import Segment
from synk.backends import unused_gpus
from synk.errors import CallCancelled, ClosedError, ReentrancyError, StartupError, SynkError, UnsupportedError

_COUNTERS = (
    "messages_down", "messages_up", "bytes_down", "bytes_up", "bytes_pickled", "bytes_staged", "calls", "restarts",
)  # fmt: skip

T = TypeVar("T")

_open_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


class Memory:
    """The memory of ``Data`` and of results.

    Attributes
    ----------
    released : deque of Segment
        Filled by finalizers, at any time and in any thread. Emptied when an operation begins.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)
        self.released: deque[Segment] = deque()
        self.arenas = Arenas(self.released, engine.numbers)
        self.results = ResultPool(engine.numbers)

    def free_dropped(self) -> None:
        """Free what finalizers dropped. No call may be in flight that could read it."""
        while self.released:
            self._engine.free(self.released[0])
            self.released.popleft()  # last: a signal may break this off, and then it is done again
            self.arenas.sweep()  # which may release memory that nothing lies in any more

    def lease_result(self, nbytes: int) -> tuple[Lease, np.ndarray]:
        """Lease a buffer for large results. Return the lease, and the array of which they will be views."""
        lease, root, dropped = self.results.take(nbytes)
        for old in dropped:
            self._engine.free(old)
        return lease, root

    def close(self) -> None:
        while self.released:
            self.released.popleft().close()
        self.results.close()
        self.arenas.close()


class Session(Engine):
    """The workers of one runtime, and everything that they share with the program.

    It has many attributes, because every part of the program's half is handed it.

    Parameters
    ----------
    placement : Placement
    timeout, max_restarts
        As for :class:`synk.Runtime`.
    on_restart : (callable, dict) or None
    process_type : type
        What plays a rank: a worker process, or an object in this process.
    """

    has_shared_memory = True
    processes_type = Processes

    def __init__(
        self,
        placement: Placement,
        *,
        timeout: float | None,
        seed: int,
        max_restarts: int,
        on_restart: tuple[Any, dict[str, Any]] | None,
        process_type: Any,
    ) -> None:
        self.timeout = timeout
        self.backend, self.devices = placement.backend, placement.devices
        self.assignment = placement.assignment
        self.has_devices = self.assignment.has_devices
        self._may_miss_gpus = placement.is_on_cpu_by_default
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self.profile = Profile("synk.data" if self.has_shared_memory else "synk.shared")
        self.guests: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.nccl = self.group = Group(self, self.assignment.can_use_nccl)
        if self.assignment.can_use_nccl:
            self.grace_s = NCCL_GRACE_S
        processes = self.processes_type(placement, process_type=process_type, seed=seed)
        counters = dict.fromkeys(_COUNTERS, 0)
        super().__init__(processes, max_restarts=max_restarts, counters=counters, on_restart=on_restart)
        self.memory = Memory(self)
        self.device_values = DeviceValues(self)
        self.pool = Pool(self)
        self._failed_step: weakref.ref[Any] | None = None
        _open_sessions[id(self)] = self
        try:
            with deferred():  # everything that is opened in between has an owner that closes it
                self.processes.start()
                self.open_lanes()
        except BaseException:
            with deferred():
                self.processes.tear_down()
                self._release_memory()
            raise

    # -- entering -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self.processes.is_closed

    def check_open(self, verb: str) -> None:
        """Raise ClosedError or ReentrancyError if ``verb`` can no longer work."""
        self.check_process(verb)
        if self.processes.is_closed or self.is_closing:
            if self.is_exiting and threading.current_thread().daemon:
                raise SystemExit  # silently, as if it had begun its call before the program was over
            raise ClosedError(
                f"cannot {verb}: its runtime is closed. Make it again on one that is open."
            ) from self.cause

    def counted(self) -> dict[str, int]:
        """Return the counters as a user sees them: their bytes include those of the messages that have no body."""
        found = dict(self.counters)
        for way in ("down", "up"):
            found[f"bytes_{way}"] += 8 * found[f"messages_{way}"]
        return found

    @property
    def is_own_process(self) -> bool:
        """Whether this process owns the workers, and is not a forked copy of their program."""
        return os.getpid() == self.pid

    def check_process(self, verb: str) -> None:
        """Raise ReentrancyError in a forked copy of the program."""
        if not self.is_own_process:
            raise ReentrancyError(
                f"cannot {verb}: this process is a forked copy of the program, and the workers belong to the original."
            )

    def entered(self, verb: str) -> threading.RLock:
        """Return the lock to hold for one operation of a verb (which holds Ctrl-C back). Inside, :meth:`begin` first.

        Raises
        ------
        ReentrancyError
            Inside a worker, in a forked copy, or from code that runs in the middle of another operation of this thread.
        ClosedError
        """
        is_elsewhere = is_inside_worker() or os.getpid() != self.pid
        if is_elsewhere or self.processes.is_closed or self.is_closing or self.is_mine():
            refuse_inside_worker(verb)
            self.check_open(verb)
            raise ReentrancyError(
                f"cannot {verb} while this thread is in another call: got here from code that runs in the middle of "
                "it, such as a signal handler, a finalizer, a callback, an op or a method like __reduce__. Note there "
                "what is to be done, and do it after that call."
            )
        return self._lock

    def if_free(self, action: Callable[[], None], timeout: float = 0.0) -> bool:
        """Run ``action`` under the lock if the lock is free within ``timeout`` seconds. Return whether it ran."""
        if self.is_mine():
            return False
        lock = self._lock
        with holding():
            try:
                try:
                    is_free: bool = lock.acquire(blocking=False) or waiting(lock.acquire, timeout=lock_s(timeout))
                    if is_free:
                        action()
                    return is_free
                finally:
                    if self.is_mine():
                        lock.release()
            finally:  # a signal handler may have raised in the lines above
                if self.is_mine():
                    lock.release()

    def is_mine(self) -> bool:
        """Whether this thread is in an operation."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def deadline(self, timeout: float | None) -> float | None:
        """Return the monotonic time by which an operation that begins now must end."""
        if self.is_inline:
            refuse_limit(timeout)
        timeout = self.timeout if timeout is None else timeout
        return None if timeout is None else time.monotonic() + timeout

    def tell_of_unused_gpus(self, name: str) -> None:
        """Warn, once, that a function that computes with torch runs on the CPU beside GPUs that are not used."""
        if self._may_miss_gpus:
            self._may_miss_gpus = False
            if reason := unused_gpus():
                warn_at_users_line(f"{name!r} computes with torch on CPU workers: {reason}", RuntimeWarning)

    def check_here(self, verb: str, instead: str) -> None:
        """Raise UnsupportedError for what works on one machine only: this one is."""

    def begin(self, verb: str, deadline: float | None = None) -> None:
        """Begin an operation that no call may run beside: end the calls in flight, free what was dropped."""
        self.check_open(verb)  # another thread may have closed it while this one waited for the lock
        if not self.flight:
            self.is_interrupted = False
        self.settle_torn()
        self.settle_first(self.calls(), verb, deadline)
        self.join(verb, deadline)

    def run(self, verb: str, act: Callable[..., T], *args: Any) -> T:
        """Return what ``act(*args)`` returns as an operation that no call may run beside."""
        with self.entered(verb):
            self.begin(verb)
            return act(*args)

    def enter_call(self, verb: str, deadline: float | None) -> None:
        """Begin a call, which may join those in flight: ranks that replace others have run ``on_restart``."""
        self.join(verb, deadline)
        self.prepare_restarted(deadline)

    def join(self, verb: str, deadline: float | None) -> None:
        """Begin an operation that may join calls in flight."""
        if self.processes.is_closed or self.is_closing:
            self.check_open(verb)
        if self.functions.is_torn:
            self._replace_torn()
        if self.pool.is_open:
            self.pool.settle(verb, deadline)
        self.enter(deadline)
        if not self.flight:
            self.is_interrupted = False
            if self.memory.released or self.functions.dropped:
                self._free_dropped()
        if self.has_devices:
            self.nccl.prepare(deadline)
            self.device_values.restore()
        if self.residents.may_lag and not self.flight:
            self.residents.catch_up()

    def note_failed_step(self, future: Any) -> None:
        """Remember a failed call if it would have changed resident objects."""
        if future._changes:
            self._failed_step = weakref.ref(future)

    def after_failed_step(self, callee: Any) -> CallCancelled | None:
        """Return why a submitted call is not begun: another that changes the same objects has failed, unnoticed."""
        failed = self._failed_step() if self._failed_step is not None else None
        if failed is None or failed._unasked is None or failed._unasked.error is None:
            return None
        if not failed._changes & set(callee.changes):
            return None
        error = CallCancelled(
            f"the call of {callee.name!r} was not begun: one of {failed.name!r} that was submitted before it has "
            f"failed, and both change the same resident objects. Ask for the result of that one, then submit again."
        )
        error.__cause__ = failed._unasked.error
        return error

    # -- memory -------------------------------------------------------------------------------------------------------

    def release(self, segment: Segment) -> None:
        """Free a segment: now if nothing is running, else when the operation that may use it has ended."""
        self.memory.released.append(segment)
        self.reclaim()

    def is_read(self, segment: Segment) -> bool:
        """Whether a call that has not ended reads a segment."""
        return any(segment.id in call.plan.segments for call in self.calls())

    def await_readers(self, segment: Segment) -> None:
        """Wait for the calls that read a segment, because it is about to change."""
        if not (self.flight and self.is_own_process and self.is_read(segment)) or self.is_mine():
            return
        with holding(), self.entered("change Data"):
            self.settle_torn()
            for call in self.calls():
                if segment.id in call.plan.segments:
                    call.settle()

    def reclaim(self) -> None:
        """Free what finalizers dropped if nothing is running."""
        if self.memory.released or self.functions.dropped:
            self.if_free(self._free_if_idle)

    def _free_if_idle(self) -> None:
        if not self.flight and self.is_sure and not self.is_closed:
            self._free_dropped()

    def _free_dropped(self) -> None:
        if self.memory.released:
            self.memory.free_dropped()
        if self.functions.dropped:
            self.settle_unsettled()
            self.functions.free_dropped()
            self.note_drops()  # of what only they referred to

    # -- restarts -----------------------------------------------------------------------------------------------------

    def prepare_restarted(self, deadline: float | None) -> None:
        """Run ``on_restart`` on ranks that replace others."""
        if self.functions.on_restart is None:
            return
        waiting_ranks = [worker for worker in self.by_rank if not worker.is_prepared]
        if not waiting_ranks:
            return
        self.settle_all()
        fn, options = self.functions.on_restart
        self.settle_unsettled()
        self.functions.bring([(ON_RESTART, fn, options)], "on_restart")
        own, of_modules = self.functions.book.handles_of(ON_RESTART)
        needs = [*referred_in(own + of_modules).variables]
        prepare = {worker.rank: Once(self, "prepare", ON_RESTART, needs) for worker in waiting_ranks}
        try:
            self.ask(prepare, "on_restart", "distribute", deadline)
        except BaseException as error:
            self.functions.settle(is_taken_in=False)
            if not isinstance(error, Exception):
                raise
            ranks = self.processes.placement.among_all(worker.rank for worker in waiting_ranks)
            raise StartupError(
                f"cannot use the worker that was started again as {ranks}: on_restart ended with "
                f"{text_of(error).rstrip('.')}. The next call runs it again."
            ) from error
        self.functions.settle(is_taken_in=True)
        for worker in waiting_ranks:
            worker.is_prepared = True

    def _replace_torn(self) -> None:
        self.functions.is_torn = False
        self.replace_workers()
        warn_at_users_line(
            "all workers were started again: a signal handler had raised while functions were sent to them. What "
            "functions kept there, in closures or globals, is gone.",
            RuntimeWarning,
        )

    def replace_workers(self) -> None:
        """Replace all workers by new ones, which learn everything as it is now. Called inside an operation."""
        deadline = self.deadline(None)
        self.settle_all()
        for variable in self.variables:
            self.device_values.fetch(variable, set(range(self.world_size)) - variable.lost)
        self.residents.back_up(deadline)
        self.start_anew()
        self.enter_call("restart", deadline)

    def start_anew(self) -> None:
        """Start new workers, which know nothing. No call is in flight."""
        self.functions.begin_anew()
        for worker in self.by_rank:
            self.bury(worker)
        self.start_again(self.by_rank)

    def distribute(self) -> None:
        """Send all functions that the ranks do not have yet. Called inside an operation."""
        distribute(self)
        if self.functions.unsettled:
            names = ", ".join(repr(callee.name) for callee in self.functions.unsettled)
            self.load(names, self.deadline(None))

    # -- ending -------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End the calls in flight with ``CallCancelled``; from any thread, or a signal handler during a call."""
        refuse_inside_worker("interrupt")
        self.check_open("interrupt")
        if self.is_inline:
            raise UnsupportedError(
                "cannot interrupt a runtime with num_workers=0: got a function that runs in the thread which calls it, "
                "expected one on a worker. Press Ctrl-C, or fork workers."
            )
        if not self.if_free(lambda: self.recover(interrupted())):
            self.is_interrupted = True  # first, because the woken thread looks at it
            self.processes.wake()

    def close(self) -> None:
        """End the workers and release everything. Safe to call more than once; it ends within a bounded time."""
        if os.getpid() != self.pid:
            return
        refuse_inside_worker("close")
        if self.is_mine():
            raise ReentrancyError("cannot close the runtime: this thread is in a call. Close it afterwards.")
        with deferred(self.processes.kill):  # a runtime that is closed in part could be neither used nor closed
            self.is_closing = True
            self.processes.wake()
            try:
                if not self._lock.acquire(timeout=GRACE_S + 1):
                    self.processes.kill()
                    self._lock.acquire(timeout=GRACE_S + 1)
                error = ClosedError("the call was ended: the runtime was closed.")
                for owed in list(self.flight.values()):
                    owed.end(error)
                self.say_goodbye()
                self.processes.tear_down()
                self._release_memory()  # after the last worker has ended, which might still write there
            finally:
                if self.is_mine():
                    self._lock.release()

    def _release_memory(self) -> None:
        self.close_things()
        for lane in self.lanes:
            joint = None if lane.joint is None else lane.joint.segment
            for segment in (lane.staging, joint, *lane.slots.values()):
                if segment is not None:
                    segment.close()
            lane.slots, lane.staging, lane.call, lane.joint = {}, None, None, None
            lane.down = lane.up = lane.first_down = np.empty((0, 0), np.int64)
        self.functions.close()
        self.variables.is_closed = self.residents.is_closed = True
        for variable in self.variables:
            variable.close()
        self.pool.close()
        self.memory.close()
        _open_sessions.pop(id(self), None)
        if cell.session is self:
            cell.session = cell.runtime = None

    def __del__(self) -> None:
        processes = getattr(self, "processes", None)
        if processes is None or processes.is_closed or os.getpid() != self.pid:
            return
        if not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2, source=self)
        processes.tear_down()
        self._release_memory()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "in the program" if self.is_inline else "open"
        return f"<synk.Runtime {self.world_size} x {self.backend}, {state}>"


def refuse_limit(timeout: float | None) -> None:
    """Raise ValueError for a time limit where the program itself is the rank: nobody could end it."""
    if timeout is not None:
        raise ValueError(
            f"cannot limit the time of calls: got timeout={timeout!r} with num_workers=0, expected none, as the "
            "function runs in the program itself. Leave it out, and press Ctrl-C, or fork workers."
        )


# -- the program ends or forks ----------------------------------------------------------------------------------------

_fork_lock = threading.RLock()  # held from before a fork to after it, so that threads fork one at a time


def watch_over() -> None:
    """Close sessions when the program ends, and keep forked copies of it away from them."""
    atexit.register(_close_all)
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_child)


def _all_open() -> list[Session]:
    return [session for each in _open_sessions.valuerefs() if (session := each()) is not None]


def _close_all() -> None:
    for session in _all_open():
        session.is_exiting = True
        with contextlib.suppress(SynkError):
            session.close()


def _before_fork() -> None:
    with deferred():
        _fork_lock.acquire()
        before_fork()


def _after_fork() -> None:
    with deferred(), contextlib.suppress(RuntimeError):  # a signal handler may have raised before the lock was held
        _fork_lock.release()


def _in_forked_child() -> None:
    """Close the descriptors that tell workers whether the program lives, and memory that the child cannot use."""
    _after_fork()
    for session in _all_open():
        session.processes.abandon()
        session._release_memory()
    _open_sessions.clear()
