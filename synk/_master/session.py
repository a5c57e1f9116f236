"""The session is handed to every part of the master: the workers, what they share, and one operation on them at a time.

An operation holds the lock and begins with :meth:`Session.begin`: calls in flight end, what an interrupt left torn is
settled, dead workers are replaced. Everything above (calls, collectives, the user's verbs) runs inside an operation.
In one file because it is one object, which owns the parts. At the end: what becomes of open sessions when the program
ends or forks.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from synk._master.entrance import Entrance
from synk._master.processes.output import warn_at_users_line
from synk._master.processes.placement import Placement
from synk._master.state.device_values import DeviceValues
from synk._master.state.functions import Functions
from synk._master.state.in_flight import SubmittedCalls
from synk._master.state.lanes import Lane, Lanes
from synk._master.state.memory import Memory
from synk._master.state.nccl_group import Group
from synk._master.state.profile import Profile
from synk._master.state.resident import Residents
from synk._master.state.results import before_fork
from synk._master.state.variable import Variables
from synk._master.workers.ranks import Ranks
from synk._master.workers.waiting import interrupted
from synk._master.workers.workers import Workers
from synk._pure.interrupts import deferred
from synk._wire.cell import cell, refuse_inside_worker
from synk._wire.memory import Segment
from synk.errors import ClosedError, ReentrancyError, SynkError, UnsupportedError

if TYPE_CHECKING:
    from synk._master.state.trace import Tracer

_COUNTERS = (
    "messages_down", "messages_up", "bytes_down", "bytes_up", "bytes_pickled", "bytes_staged", "calls", "restarts",
)  # fmt: skip

_open_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


class Guest(Protocol):
    """An object of the program that keeps something of its own on the workers."""

    def _leave(self, session: Session, /) -> None:
        """Take it back. Called before a runtime is closed, while the workers still answer, the newest guest first."""


class Session(Entrance):
    """The workers of one runtime, and everything that they share with the master.

    It has many attributes, because every part of the master is handed it: they are the parts, and what several parts
    share.

    Parameters
    ----------
    placement : Placement
        Where the workers run.
    timeout, max_restarts
        As for :class:`synk.Runtime`.
    on_restart : (callable, dict) or None
        A function that replacement workers run first, and its options.
    process_type : type
        What plays a rank: a worker process, or an object in this process.
    make_queue : callable
        ``make_queue(session)`` makes the queue of submitted calls.

    Attributes
    ----------
    workers, ranks, lanes, group, memory, functions, variables, residents, device_values, queue, profile
        The parts of the session.
    tracer : Tracer or None
        Records the calls for a trace.
    counters : dict of str to int
        ``bytes_down`` and ``bytes_up`` count bodies here, without doorbells; see :meth:`counted`.
    numbers : iterator of int
        Numbers for calls, and for collectives on devices.
    plan_ids : iterator of int
    total_ranks : int
        The ranks of all nodes. This session divides rows among ``world_size`` of them.
    nodes : object or None
        What sends calls to nodes, if the processes of this session are agents; see ``synk.cluster.head``.
    """

    nodes: Any = None

    def __init__(
        self,
        placement: Placement,
        *,
        timeout: float | None,
        seed: int,
        max_restarts: int,
        on_restart: tuple[Any, dict[str, Any]] | None,
        process_type: type,
        make_queue: Callable[[Session], SubmittedCalls],
    ) -> None:
        self.timeout = timeout
        self.backend, self.devices = placement.backend, placement.devices
        self.world_size = len(placement.devices)
        self.total_ranks = placement.total_ranks
        self.assignment = placement.assignment
        self.has_devices = self.assignment.has_devices
        self._may_miss_gpus = placement.is_on_cpu_by_default
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self.profile = Profile()
        self.tracer: Tracer | None = None
        self.numbers: Iterator[int] = itertools.count(1)
        self.plan_ids = itertools.count(1)
        self.guests: weakref.WeakKeyDictionary[Guest, None] = weakref.WeakKeyDictionary()
        self.workers = Workers(
            placement,
            process_type=process_type,
            seed=seed,
            max_restarts=max_restarts,
            counters=self.counters,
            token=os.urandom(32),
            on_trouble=self._abort_collectives,
            on_idle=self._reset_collectives,
        )
        self.is_inline = self.workers.is_inline
        self.group = Group(self.assignment.can_use_nccl)
        self.lanes = Lanes()
        self.memory = Memory(self.workers.processes)
        self.functions = Functions(self.workers, self.lanes, self.memory, on_restart)
        self.ranks: Ranks = self._make_ranks()
        self.variables = Variables(self.ranks, self.memory, has_devices=self.has_devices)
        self.residents = Residents(self.ranks)
        self.workers.sources |= {"variable": self.variables.told, "lane": self.lanes.told}
        self.device_values = DeviceValues(self.workers, self.lanes, self.group, self.variables, self.numbers)
        self.queue = make_queue(self)
        _open_sessions[id(self)] = self
        try:
            with deferred():  # everything that is opened in between has an owner that closes it
                self.workers.processes.start()
                self.lanes.begin(self.workers.processes, self.memory.ids)
        except BaseException:
            with deferred():
                self.workers.processes.tear_down()
                self._release_memory()
            raise

    def _make_ranks(self) -> Ranks:
        return Ranks(self.workers)

    # -- entering -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self.workers.processes.is_closed

    @property
    def cause(self) -> BaseException | None:
        """The error that closed the runtime, if one did."""
        return self.workers.recovery.cause

    def check_open(self, verb: str) -> None:
        """Raise ClosedError or ReentrancyError if ``verb`` can no longer work."""
        if os.getpid() != self.pid:
            self.check_process(verb)
        if self.workers.processes.is_closed or self.workers.waiting.is_closing:
            raise ClosedError(f"cannot {verb}: the runtime is closed. Call synk.fork() again.") from self.cause

    def check_here(self, verb: str, instead: str) -> None:
        """Raise UnsupportedError for what works only on the workers of one machine, so far.

        Raises
        ------
        UnsupportedError
        """
        if self.nodes is not None:
            raise UnsupportedError(
                f"cannot {verb} over nodes: got a runtime with cluster='here', expected one without cluster=. {instead}"
            )

    def begin(self, verb: str, deadline: float | None = None) -> None:
        """End the calls in flight, free what finalizers dropped, settle what was broken off, replace dead workers.

        Raises
        ------
        ClosedError, StartupError
        CallTimeout
            If submitted calls have not ended, or the workers are not up, at ``deadline`` (monotonic). They go on.
        CallCancelled
            If another thread interrupted the wait for them.
        """
        if not self.queue.calls and self.queue.chunks is None:
            # A leftover interrupt was meant for an operation that has ended. With calls in flight it is meant for them.
            self.workers.waiting.is_interrupted = False
        self.resume(verb, deadline)
        if self.has_dropped:
            self.memory.free_dropped()  # No worker is busy, so the places of dropped small segments may be used again.
            self.functions.free_dropped()
            self.variables.free_dropped()
            self.residents.free_dropped()

    def resume(self, verb: str, deadline: float | None) -> None:
        """Do the same as ``begin`` in the middle of an operation. Nothing is freed, because it may be in use."""
        self.check_open(verb)  # another thread may have closed it while this one waited for the lock
        if self.queue.calls or self.queue.chunks is not None:
            num_interrupts = self.workers.waiting.num_interrupts
            self.queue.drain(verb, deadline)
            if self.workers.waiting.num_interrupts != num_interrupts:  # the interrupt was meant for this call too
                raise interrupted()
        # Before dead workers are replaced: new ones are told which buffers hold the values.
        self.variables.finish_commit()
        self.workers.prepare(deadline)
        if self.residents.has_any and self.ranks.prepare(deadline):
            self.residents.note_unsettled()
        self.group.prepare(self.workers, deadline)
        if self.workers.recovery.restarted:
            self.residents.note_unsettled()
            self.device_values.restore(self.workers.recovery.restarted, self.deadline(None))
            self.workers.recovery.restarted.clear()
        if self.residents.is_unsettled:
            self.residents.settle(self.deadline(None) if deadline is None else deadline)
        if self.functions.is_torn:
            self.replace_workers()
            warn_at_users_line(
                "all workers were started again: a signal handler had raised while functions were sent to them. What "
                "functions kept there, in closures or globals, is gone.",
                RuntimeWarning,
            )

    @property
    def has_dropped(self) -> bool:
        """Whether something was dropped that the next operation must free."""
        own = self.functions.dropped or self.variables.dropped or self.residents.dropped
        return bool(own or self.memory.has_dropped)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _abort_collectives(self) -> None:
        self.residents.note_unsettled()  # a call that is broken off may have succeeded on some ranks only
        self.group.break_up(self.workers)
        for lane in self.lanes:
            lane.abort_collectives(self.workers.processes)

    def _reset_collectives(self) -> None:
        for lane in self.lanes:
            lane.reset_collectives(self.workers.processes)

    # -- memory -------------------------------------------------------------------------------------------------------

    def release(self, segment: Segment) -> None:
        """Free a segment: now if nothing is running, else when the operation that may use it has ended."""
        self.memory.released.append(segment)
        self.reclaim()

    def reclaim(self) -> None:
        """Free what finalizers dropped if nothing is running."""
        if self.memory.has_dropped or self.functions.is_worth_freeing():
            self.if_free(self._free_if_idle)

    def _free_if_idle(self) -> None:
        # Under the lock: before, another thread could submit a call that reads what was dropped.
        if not self.queue.calls and not self.workers.requests:
            self.memory.free_dropped()
            self.functions.free_dropped()

    def grow_staging(self, lane: Lane, nbytes: int) -> Segment:
        """Return the staging segment of a lane, which holds at least ``nbytes`` bytes after this."""
        if lane.staging is None or lane.staging.nbytes < nbytes:
            self.workers.log.note()
            old = lane.replace_staging(nbytes)
            if old is not None:
                self.memory.forget(old)
                for function in list(self.functions.bound):  # Their views of the old segment would keep its memory.
                    function.plans.drop_staging(old.id, self.workers.log)
        assert lane.staging is not None
        return lane.staging

    def grow_slots(self, lane: Lane, slot_nbytes: int, published: Sequence[int]) -> None:
        """Make room for ``slot_nbytes`` bytes of outputs on each rank. Outputs of ``published`` ranks are kept."""
        self.memory.forget(lane.replace_slots(slot_nbytes, published))
        self.workers.log.tell("lane", lane.index)
        for function in list(self.functions.bound):
            function.plans.drop_assemblies(lane)

    # -- ending -------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End the calls in flight with ``CallCancelled``; from any thread, or a signal handler during a call."""
        refuse_inside_worker("interrupt")
        self.check_open("interrupt")
        if self.workers.is_inline:
            raise UnsupportedError(
                "cannot interrupt a runtime with num_workers=0: got a function that runs in the thread which calls it, "
                "expected one on a worker. Press Ctrl-C, or fork workers."
            )
        # If an operation holds the lock, its own wait ends it. Otherwise only submitted calls and items can be in
        # flight.
        if not self.if_free(lambda: self.queue.cancel(interrupted())):
            self.workers.waiting.interrupt()

    def replace_workers(self) -> None:
        """Replace all workers by new ones, which learn everything as it is now. Called inside an operation."""
        deadline = self.deadline(None)
        for variable in self.variables.living():
            self.device_values.refresh(variable, deadline)
        self.residents.back_up(deadline)
        self.functions.begin_anew()
        self.workers.replace(deadline)
        self.begin("restart", deadline)
        self.functions.prepare_restarted(deadline)

    def close(self) -> None:
        """End the workers and release everything. Safe to call more than once; it ends within a bounded time."""
        workers = self.workers
        if os.getpid() != self.pid:
            return
        refuse_inside_worker("close")
        if self.is_mine():
            raise ReentrancyError("cannot close the runtime: this thread is in a call. Close it afterwards.")
        with deferred(workers.processes.kill):  # A runtime that is closed in part could be neither used nor closed.
            workers.waiting.wake()
            try:
                if not self._lock.acquire(timeout=workers.recovery.grace_s + 1):
                    workers.processes.kill()
                    self._lock.acquire(timeout=workers.recovery.grace_s + 1)
                workers.recovery.say_goodbye()
                workers.processes.tear_down()
                self._release_memory()  # after the last worker has ended, which might still write there
            finally:
                if self.is_mine():
                    self._lock.release()

    def _release_memory(self) -> None:
        self.queue.close()
        self.abandon_memory()

    def abandon_memory(self) -> None:
        """Release all memory except what the user's arrays lie in."""
        self.workers.requests.clear()
        for lane in self.lanes:
            lane.close()
        self.functions.close()
        self.variables.close()
        self.memory.close()
        _open_sessions.pop(id(self), None)
        if cell.session is self:
            cell.session = cell.runtime = None

    def __del__(self) -> None:
        workers = getattr(self, "workers", None)
        if workers is None or workers.processes.is_closed or os.getpid() != self.pid:
            return
        if not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2, source=self)
        workers.processes.tear_down()
        self._release_memory()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "in the program" if self.workers.is_inline else "open"
        return f"<synk.Runtime {self.world_size} x {self.backend}, {state}>"


# -- the program ends or forks ----------------------------------------------------------------------------------------

_fork_lock = threading.RLock()  # held from before a fork to after it, so that threads fork one at a time


def watch_over() -> None:
    """Close sessions when the program ends, and keep forked copies of it away from them."""
    atexit.register(_close_all)
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_child)


def _all_open() -> list[Session]:
    """Return the open sessions, by a step that no other thread can break: it may open one at this moment."""
    return [session for each in _open_sessions.valuerefs() if (session := each()) is not None]


def _close_all() -> None:
    for session in _all_open():
        session.workers.waiting.is_exiting = True
        with contextlib.suppress(SynkError):
            session.close()


def _before_fork() -> None:
    with deferred():
        _fork_lock.acquire()
        for session in _all_open():  # the child must not use what the parent remembers
            session.workers.log.note()
        before_fork()


def _after_fork() -> None:
    with deferred(), contextlib.suppress(RuntimeError):  # a signal handler may have raised before the lock was held
        _fork_lock.release()


def _in_forked_child() -> None:
    """Close the descriptors that tell workers whether the master lives, and memory that the child cannot use."""
    _after_fork()
    for session in _all_open():
        session.workers.processes.abandon()
        session.abandon_memory()
    _open_sessions.clear()
