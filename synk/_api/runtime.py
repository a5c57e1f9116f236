"""The runtime: one call at a time on a team of workers, and everything that workers share with the master.

The path of a call in the master: ``Function.__call__`` -> ``Runtime.entered`` (one call at a time, dead ranks are
started again) -> ``calls.run_call`` (arguments, plan, numbers) -> ``Team.exchange`` -> ``Assembly`` -> the user.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import os
import pickle
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree  # noqa: F401  (used when a result is nested: by then a file of that name may lie in the current folder)

import synk._master.collectives as collectives  # finds the bound submodule where a worker has not run the package yet
from synk._api.data import Data
from synk._api.shared import Shared, check_owner
from synk._master.device_values import refresh, restore
from synk._master.failures import rebuild
from synk._master.known import Link
from synk._master.lanes import Lanes
from synk._master.nccl_group import Group
from synk._master.placement import place
from synk._master.profile import Profile
from synk._master.program import check_program, search_path
from synk._master.queue import Queue
from synk._master.results import Lease, ResultPool, before_fork
from synk._master.watch import Part, Watch, watch
from synk._master.workers import Team
from synk._pure.interrupts import deferred, is_from_handler, num_cancels
from synk._pure.limits import check_timeout, lock_s
from synk._pure.read_only import read_only
from synk._wire.arenas import Arenas
from synk._wire.cell import cell, refuse_inside_worker
from synk._wire.memory import Segment
from synk._wire.messages import Down, Extras, Kind, Layout, LoadOrder, Reload, Status
from synk._wire.orphans import orphans
from synk.errors import ClosedError, ReentrancyError, SerializationError, StartupError, SynkError

if TYPE_CHECKING:
    from synk._master.parcels import Book

_ON_RESTART = 0
"""In the place of a function's id."""

_open_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime:
    """A group of workers, one per device, and the verbs to use them.

    Made by :func:`synk.fork`, or directly where several are to live side by side. A context manager that closes itself.

    Parameters
    ----------
    num_workers : int or None
        One worker per visible GPU, else per usable CPU core, where None.
    backend : str
        ``"auto"``, ``"numpy"`` or ``"cupy"``.
    devices : sequence or None
        Which GPUs (backend ``"cupy"`` only); one may appear more than once.
    inline : bool
        One rank in this process, on the same path, for a debugger.
    timeout : float or None
        Default for all calls, in seconds.
    max_restarts : int
        How many dead workers are started again within 60 s before the runtime closes; 0: none.
    on_restart : callable, optional
        ``on_restart()`` is run by each worker that is started in the place of another, before its first call.

    Attributes
    ----------
    world_size : int
    backend : str
    devices : tuple of str
    profile : Profile
        Time and bytes of the calls so far, by function.
    counters : dict of str to int
        Messages and bytes between master and workers since the start: ``messages_down``, ``messages_up``,
        ``bytes_down``, ``bytes_up`` (doorbells and bodies), ``bytes_pickled`` (arguments), ``bytes_staged`` (plain
        arrays copied into shared memory), ``calls``, ``restarts``.

    Raises
    ------
    ValueError
        If an argument makes no sense here.
    StartupError
        If a worker cannot be started. One that starts and then fails raises it at the first use.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        backend: str = "auto",
        devices: Sequence[Any] | None = None,
        inline: bool = False,
        timeout: float | None = None,
        max_restarts: int = 3,
        on_restart: Callable[[], Any] | None = None,
        _failpoints: Sequence[Sequence[Any]] = (),
    ) -> None:
        refuse_inside_worker("fork")
        self._on_restart = _check_on_restart(on_restart)
        self.timeout = check_timeout(timeout)
        if isinstance(max_restarts, bool) or not isinstance(max_restarts, (int, np.integer)) or max_restarts < 0:
            raise ValueError(f"cannot fork: got max_restarts={max_restarts!r}, expected an integer of 0 or more.")
        placement = place(num_workers, backend, devices, inline)
        if not inline:
            check_program()
        self.backend = placement.backend
        self.devices: tuple[str, ...] = placement.devices
        self.world_size = len(self.devices)
        self.counters: dict[str, int] = dict.fromkeys(
            (
                "messages_down", "messages_up", "bytes_down", "bytes_up",
                "bytes_pickled", "bytes_staged", "calls", "restarts",
            ),
            0,
        )  # fmt: skip
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._last_error: BaseException | None = None
        # Filled by finalizers, at any time and in any thread; emptied when an operation begins.
        self._released: deque[Segment] = deque()
        self.arenas = Arenas(self._released)
        self._dropped_functions: deque[tuple[int, Any]] = deque()
        self._dropped_variables: deque[int] = deque()
        self._num_loaded_restarts = 0
        self._is_inline = inline
        self.book = self._new_book()
        self._variables: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()
        self._to_flip: list[tuple[Shared, int, int, bool]] = []
        self.has_devices = self.backend != "numpy"
        self._flip_call = -1
        self.bound: weakref.WeakSet[Any] = weakref.WeakSet()  # functions that are on the workers
        self.profile = Profile()
        self.numbers = itertools.count(1)  # of calls, and of collectives on devices
        self._num_changes = 0
        self.results = ResultPool()
        self.group = Group(placement.can_use_nccl)
        self.lanes = Lanes()
        self.team = Team(
            placement,
            is_inline=inline,
            max_restarts=max_restarts,
            failpoints=_failpoints,
            counters=self.counters,
            token=os.urandom(32),
            pack=self._pack,
            on_trouble=self._abort_collectives,
            on_idle=self._reset_collectives,
        )
        self.queue = Queue(self)
        _open_runtimes.add(self)
        try:
            with deferred():  # what is opened meanwhile has an owner that ends it
                self.team.start()
                self.lanes.begin(self.team)
        except BaseException:
            with deferred():
                self.team.tear_down()
                self._release_memory()
            raise

    # -- entering -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self.team.is_closed

    @property
    def cause(self) -> BaseException | None:
        """What closed the runtime, if it was a fault."""
        return self.team.cause

    def check_open(self, verb: str) -> None:
        """Raise ClosedError or ReentrancyError where ``verb`` cannot work any more."""
        if os.getpid() != self._pid:
            self.check_process(verb)
        if self.team.is_closed or self.team.is_closing:
            raise ClosedError(f"cannot {verb}: the runtime is closed. Call synk.fork() again.") from self.cause

    def check_process(self, verb: str) -> None:
        """Raise ReentrancyError in a forked copy of the master."""
        if os.getpid() != self._pid:
            raise ReentrancyError(
                f"cannot {verb}: this process is a forked copy of the master, and the workers belong to the original."
            )

    def entered(self, verb: str) -> contextlib.AbstractContextManager[Any]:
        """Return the lock to hold for one operation; :meth:`begin` is the first thing to do under it.

        The lock is the interpreter's own, because its ``with`` has no gap in which an interrupt could leave it held.

        Raises
        ------
        ReentrancyError
            Inside a worker, in a forked copy, or from a signal handler or finalizer during another operation.
        ClosedError
        """
        refuse_inside_worker(verb)
        self.check_open(verb)
        if self.is_mine():
            raise ReentrancyError(
                f"cannot {verb} while this thread is in another call: got here from a signal handler or a finalizer."
            )
        return self._lock

    def if_free(self, action: Callable[[], None], timeout: float = 0.0) -> bool:
        """Do ``action`` under the lock if it can be had within ``timeout`` seconds; return whether it was done."""
        if self.is_mine():
            return False
        lock = self._lock
        has_acted = False
        try:
            # An interrupt may come as soon as the lock is taken, and before the next line of Python anywhere; it is
            # given back by C code that nothing can come before.
            if lock.acquire(timeout=lock_s(timeout)):
                action()
                has_acted = True
        finally:
            try:
                lock.release()
            except RuntimeError as error:
                if is_from_handler(error):
                    raise
                # Another thread holds it.
        return has_acted

    def is_mine(self) -> bool:
        """Whether this thread is in an operation."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def begin(self, verb: str, deadline: float | None = None) -> None:
        """End the calls under way, free what finalizers dropped, settle what was broken off, bring the dead back.

        Raises
        ------
        ClosedError, StartupError
        CallTimeout
            If calls that were submitted had not ended, or the workers were not up, at ``deadline`` (monotonic); they go
            on.
        """
        self.resume(verb, deadline)
        if self._released or self._dropped_functions or self._dropped_variables:
            self._free_dropped()

    def resume(self, verb: str, deadline: float | None) -> None:
        """Do as ``begin`` in the middle of an operation: nothing is freed, because it may be in use."""
        self.check_open(verb)  # it may have been closed while this thread waited for the lock
        self.team.num_cancels = num_cancels()
        if self.queue.calls:
            self.queue.drain(verb, deadline)
        self._finish_commit()
        self.team.prepare(deadline)
        self.group.prepare(self.team)
        if self.team.restarted:
            restore(self, self._living_variables(), self.team.restarted)
            self.team.restarted.clear()

    def _free_dropped(self) -> None:
        self._reclaim()  # no worker is at anything: small segments come to lie where others have lain
        while self._dropped_functions:
            with deferred():
                function_id, plans = self._dropped_functions.popleft()
                self.book.forget_function(function_id)
                plans.drop_all(self)
                for link in self.team.links:
                    link.drop_function(function_id)
        while self._dropped_variables:
            with deferred():
                variable_id = self._dropped_variables.popleft()
                for link in self.team.links:
                    link.drop_variable(variable_id)

    def deadline(self, timeout: float | None) -> float | None:
        """Return the monotonic time at which an operation that begins now must end."""
        timeout = self.timeout if timeout is None else timeout
        return None if timeout is None else time.monotonic() + timeout

    # -- what messages bring ------------------------------------------------------------------------------------------

    @property
    def has_dropped(self) -> bool:
        """Whether something was dropped that the next operation has to free."""
        return bool(self._released or self._dropped_functions or self._dropped_variables)

    def _pack(
        self, link: Link, content: Any, needed: Sequence[Segment], lane: int
    ) -> tuple[Extras | None, list[Segment]]:
        """Return the body of a message: its content, and whatever the rank does not know yet."""
        news: list[Shared] = []
        num_changes = self._num_changes  # read first: another thread may make a variable meanwhile
        if link.num_changes != num_changes:
            news = [v for v in self._living_variables() if link.variables.get(v._id) != v.version]
            if len(news) == 0:
                link.num_changes = num_changes
        wanted = needed
        if news:
            wanted = [*needed, *(segment for variable in news for segment in variable.segments(link.rank))]
        return link.extras(content, wanted, self.lanes[lane], news)

    # -- memory -------------------------------------------------------------------------------------------------------

    def release(self, segment: Segment) -> None:
        """Free a segment now if nothing is running, else when the operation that may use it has ended."""
        self._released.append(segment)
        self.reclaim()

    def reclaim(self) -> None:
        """Free what finalizers dropped, if nothing is running."""
        if (self._released or orphans.ended) and not self.queue.calls and not self.team.flights:
            self.if_free(self._reclaim)

    def _reclaim(self) -> None:
        if orphans.ended:
            orphans.close_all()
        while self._released:
            with deferred():
                self.forget_segment(self._released.popleft())

    def forget_segment(self, segment: Segment) -> None:
        """Free a segment here; workers forget it with their next message."""
        with deferred():  # all of them, or an interrupt would leave some that hold what is gone
            for link in self.team.links:
                link.drop_segment(segment.id)
            segment.discard()
            self.arenas.sweep()

    def drop_plan(self, plan_id: int) -> None:
        """Have the workers forget a plan with their next message."""
        with deferred():
            for link in self.team.links:
                link.drop_plan(plan_id)

    def lease_result(self, nbytes: int) -> Lease:
        """Lease a buffer for large results."""
        with deferred():
            lease, dropped = self.results.take(nbytes)
            for old in dropped:
                self.forget_segment(old)
        return lease

    # -- functions ----------------------------------------------------------------------------------------------------

    def _new_book(self) -> Book:
        from synk._master.parcels import Book  # with cloudpickle, which ``import synk`` does without

        return Book(self._drop_parcel, is_inline=self._is_inline)

    def _drop_parcel(self, number: int, unbound: list[tuple[tuple[int, int], Any]]) -> None:
        for link in self.team.links:
            link.drop_parcel(number, unbound)

    def bring(
        self, functions: Sequence[tuple[int, Any, dict[str, Any], Watch]], names: str, deadline: float | None
    ) -> list[tuple[Part, int]]:
        """Send all workers functions (id, function, options, what it names) and what has changed of what they name.

        Returns
        -------
        list of (Part, size in bytes)
            What was sent because it had changed.

        Raises
        ------
        SerializationError
            If it cannot be pickled, or cannot be loaded; no rank counts as having it then.
        """
        book = self.book
        sent: list[tuple[Part, int]] = []
        reloads: list[Reload] = []
        try:
            try:
                for function_id, fn, options, watched in functions:
                    update = book.update(function_id, fn, options, watched)
                    reloads += update.reloads
                    sent += update.sent
            except Exception as error:
                if is_from_handler(error):
                    raise
                raise SerializationError(
                    f"cannot send {names} to the workers: {type(error).__name__}: {error}."
                ) from error
            self._load_missing(names, deadline, reloads)
        except BaseException:
            book.roll_back()
            raise
        book.commit()
        return sent

    def sent_nbytes(self, function_id: int) -> int:
        """Return the size of the pickles by which a function and what it captures came to the workers."""
        return self.book.nbytes_of(function_id)

    def ensure_loaded(self, deadline: float | None) -> None:
        """Send each worker the functions that it misses: all of them after it was started again."""
        self.book.roll_back()  # an operation that was broken off may not have come to it
        restarts = self.team.counters["restarts"]
        if restarts != self._num_loaded_restarts:
            self._load_missing("functions", deadline)
            self._prepare_restarted(deadline)
            self._num_loaded_restarts = restarts

    def _prepare_restarted(self, deadline: float | None) -> None:
        """Run ``on_restart`` on the workers that were started in the place of others."""
        waiting = [link for link in self.team.links if not link.is_prepared]
        if waiting and self._on_restart is not None:
            from synk._api.function import Function

            fn, name = self._on_restart, "on_restart"
            self.bring([(_ON_RESTART, fn, Function(fn, outputs=None, name=name).options, watch(fn))], name, deadline)
            orders = {link.rank: LoadOrder([], [], search_path(), _ON_RESTART) for link in waiting}
            failures, was_interrupted = self._order(orders, name, deadline)
            if failures or was_interrupted:
                what = f"{failures[0].type_name}: {failures[0].message}" if failures else "an interrupt"
                ranks = ", ".join(str(link.rank) for link in waiting)
                raise StartupError(
                    f"cannot use the worker that was started again as rank {ranks} "
                    f"of {self.world_size}: on_restart ended with {what}. The next call runs it again."
                ) from (rebuild(failures, self.world_size, name) if failures else None)
        for link in waiting:
            link.is_prepared = True

    def _load_missing(self, names: str, deadline: float | None, reloads: Sequence[Reload] = ()) -> None:
        orders: dict[int, LoadOrder] = {}
        for link in self.team.links:
            missing = [(number, p.data) for number, p in self.book.parcels.items() if number not in link.parcels]
            if missing or reloads:
                orders[link.rank] = LoadOrder(list(reloads), missing, search_path())
        failures, was_interrupted = self._order(orders, names, deadline)
        if failures:
            raise SerializationError(
                f"cannot load {names} on the workers: {failures[0].type_name}: {failures[0].message}. "
                "What a function needs must be importable there, or defined in the script itself."
            ) from rebuild(failures, self.world_size, names)
        if was_interrupted:
            raise SerializationError(f"loading {names} was interrupted.")

    def _order(self, orders: dict[int, LoadOrder], names: str, deadline: float | None) -> tuple[list[Any], bool]:
        """Have workers load, and note what those have that say so; return failures, and if one was interrupted."""
        if not orders:
            return [], False
        self.lanes.first.connect(self.team)
        replies = self.team.exchange(Kind.LOAD, list(orders), 0, orders, [], deadline, "distribute", names)
        for rank, reply in replies.items():
            if reply.status == Status.DONE:
                self.team.links[rank].parcels.update(number for number, _ in orders[rank].parcels)
                self.team.links[rank].functions.update(self.book.function_ids)
        failures = [pickle.loads(reply.body) for reply in replies.values() if reply.status == Status.ERROR]
        return failures, any(reply.status == Status.INTERRUPTED for reply in replies.values())

    # -- collectives inside functions ---------------------------------------------------------------------------------

    def _abort_collectives(self) -> None:
        self.group.break_up(self.team)
        for lane in self.lanes:
            lane.abort_collectives(self.team)

    def _reset_collectives(self) -> None:
        for lane in self.lanes:
            lane.reset_collectives(self.team)

    # -- variables ----------------------------------------------------------------------------------------------------

    def add_variable(self, variable: Shared) -> None:
        self._variables[variable._id] = variable
        self.note_change()

    def _living_variables(self) -> list[Shared]:
        """Return all variables; the copy is one step of the interpreter, during which no thread adds another."""
        return [variable for ref in self._variables.valuerefs() if (variable := ref()) is not None]

    def note_change(self) -> None:
        """A variable has changed from the master's side: look for news before the next message."""
        self._num_changes += 1

    def variable(self, variable_id: int) -> Shared:
        return self._variables[variable_id]

    def commit(self, ranks: Sequence[int], layouts: Sequence[Layout], number: int) -> None:
        """Make the assignments of call ``number`` hold, on all of its ranks at once.

        One store into shared memory decides: before it the call has changed nothing, after it everything. What follows
        is bookkeeping that an interrupt can put off.
        """
        flips = []
        for rank, layout in zip(ranks, layouts):
            for variable_id, shapes in layout.assigned:
                variable = self._variables[variable_id]
                back = 1 - variable.front[rank]
                variable.shapes[rank][back] = shapes
                flips.append((variable, rank, back, False))
        absent = sorted(set(range(self.world_size)) - set(ranks))
        for variable_id, _ in layouts[0].assigned if absent else ():
            variable = self._variables[variable_id]
            if not variable.is_sharded:
                # Ranks without rows did not run: they get the value of the lowest rank that did, or replicas would
                # drift.
                variable.copy_back(ranks[0], absent)
                flips += [(variable, rank, 1 - variable.front[rank], True) for rank in absent]
        self._flip_call = number
        self._to_flip = flips
        self.team.down[list(ranks), Down.COMMITTED] = number
        self._finish_commit()

    def _finish_commit(self) -> None:
        flips = self._to_flip
        if not flips:
            return
        if int(self.team.down[flips[0][1], Down.COMMITTED]) == self._flip_call:
            for variable, rank, front, is_followed in flips:
                variable.front[rank] = front
                if is_followed:
                    variable.note_written(rank)
                elif self.has_devices:
                    variable.is_stale[rank] = True
                    variable.lost.discard(rank)
            for variable in {variable for variable, *_ in flips}:
                variable.separate()
        self._to_flip = []

    # -- verbs --------------------------------------------------------------------------------------------------------

    def data(self, value: Any = None, **options: Any) -> Data:
        """Make a :class:`synk.Data` of this runtime; see :func:`synk.data`."""
        refuse_inside_worker("make Data")
        self.check_open("make Data")
        self.reclaim()
        return Data(self, value, **options)

    def shared(self, value: Any, *, sharded: bool = False, name: str | None = None) -> Shared:
        """Make a :class:`synk.Shared` of this runtime; see :func:`synk.shared`."""
        refuse_inside_worker("make a shared variable")
        self.check_open("make a shared variable")
        self.reclaim()
        return Shared(self, value, sharded=sharded, name=name)

    def function(self, fn: Any = None, **options: Any) -> Any:
        """Build a :class:`synk.Function` bound to this runtime; see :func:`synk.function`."""
        from synk._api.function import build_function

        self.check_open("build a function")
        return build_function(fn, options, self)

    def distribute(self) -> None:
        """Send all functions that are not yet on the workers; see :func:`synk.distribute`."""
        from synk._api.function import distribute_functions

        with self.entered("distribute"):
            self.begin("distribute")
            distribute_functions(self, deadline=self.deadline(None))

    def _list(self, verb: str, variables: Any) -> list[Shared]:
        """Return ``variables`` (one, or a sequence) as a list, checked."""
        if not isinstance(variables, (Shared, list, tuple)):
            raise TypeError(f"cannot {verb}: got {type(variables).__name__}, expected a Shared or a sequence of them.")
        listed = [variables] if isinstance(variables, Shared) else list(variables)
        for variable in listed:
            if not isinstance(variable, Shared):
                raise TypeError(f"cannot {verb}: got {type(variable).__name__}, expected a Shared or several.")
            check_owner(variable, self, f"{verb} argument")
        return listed

    def broadcast(self, variables: Any, values: Any = None) -> None:
        """Copy rank 0's value, or ``values``, to all ranks; see :func:`synk.broadcast`."""
        listed = self._list("broadcast", variables)
        with self.entered("broadcast"):
            self.begin("broadcast")
            pairs = collectives.pair(variables, listed, values)
            for variable, value in pairs:
                collectives.broadcast(self, variable, value)

    def scatter(self, variables: Any, values: Any, batch: Any = None) -> None:
        """Give each rank its part of the rows of ``values``; see :func:`synk.scatter`."""
        listed = self._list("scatter", variables)
        with self.entered("scatter"):
            self.begin("scatter")
            parts = [
                (variable, *collectives.check_scatter(variable, value, batch))
                for variable, value in collectives.pair(variables, listed, values)
            ]
            for variable, arrays, selection in parts:
                collectives.scatter(self, variable, arrays, selection)

    def gather(self, variables: Any, nd_up: int = 1) -> Any:
        """Return the values of all ranks, stacked or concatenated; see :func:`synk.gather`."""
        listed = self._list("gather", variables)
        with self.entered("gather"):
            self.begin("gather")
            results = [collectives.gather(self, variable, nd_up) for variable in listed]
        return results[0] if isinstance(variables, Shared) else results

    def all_gather(self, variables: Any) -> None:
        """Make every rank's value the concatenation of all; see :func:`synk.all_gather`."""
        listed = self._list("all_gather", variables)
        with self.entered("all_gather"):
            self.begin("all_gather")
            for variable in listed:
                collectives.check_rows(variable)
            for variable in listed:
                collectives.all_gather(self, variable)

    def reduce(self, variables: Any, op: str = "avg", in_place: bool = True) -> Any:
        """Reduce the values of all ranks to rank 0, or to the caller; see :func:`synk.reduce`."""
        listed = self._list("reduce", variables)
        with self.entered("reduce"):
            self.begin("reduce")
            for variable in listed:
                collectives.check_reduction(self, variable, op)
            results = [collectives.reduce(self, variable, op, in_place) for variable in listed]
        return results[0] if isinstance(variables, Shared) else results

    def all_reduce(self, variables: Any, op: str = "avg") -> None:
        """Reduce the values of all ranks to all ranks; see :func:`synk.all_reduce`."""
        listed = self._list("all_reduce", variables)
        with self.entered("all_reduce"):
            self.begin("all_reduce")
            for variable in listed:
                collectives.check_reduction(self, variable, op)
            for variable in listed:
                collectives.all_reduce(self, variable, op)

    def set_value(self, variable: Shared, value: Any, rank: int | None = None, batch: Any = None) -> None:
        """Set the value of one rank, or of all; see :func:`synk.set_value`."""
        (listed,) = self._list("set_value", variable)
        with self.entered("set_value"):
            self.begin("set_value")
            collectives.set_value(self, listed, value, rank, batch)

    def get_value(self, variable: Shared, rank: int = 0) -> Any:
        """Return a copy of the value of one rank; see :func:`synk.get_value`."""
        (listed,) = self._list("get_value", variable)
        with self.entered("get_value"):
            self.begin("get_value")
            return collectives.get_value(self, listed, rank)

    def value_of(self, variable: Shared) -> Any:
        """Return rank 0's value, or the concatenated shards."""
        (listed,) = self._list("read", variable)
        with self.entered("read"):
            self.begin("read")
            read = collectives.gather if listed.is_sharded else collectives.get_value
            value = read(self, listed, 0)
        return read_only(value)

    def get_lengths(self, variables: Any) -> Any:
        """Return the rows on each rank; see :func:`synk.get_lengths`."""
        listed = self._list("get_lengths", variables)
        with self.entered("get_lengths"):
            self.begin("get_lengths")
            results = [variable.lengths for variable in listed]
        return results[0] if isinstance(variables, Shared) else results

    def get_shapes(self, variables: Any) -> Any:
        """Return the shape on each rank; see :func:`synk.get_shapes`."""
        listed = self._list("get_shapes", variables)
        with self.entered("get_shapes"):
            self.begin("get_shapes")
            results = [collectives.shapes(variable) for variable in listed]
        return results[0] if isinstance(variables, Shared) else results

    def where(self) -> str:
        """Return what each rank is doing right now: its phase, the bytes it has published, its Python stacks.

        For another thread, or a signal handler, while a call seems stuck. A call that runs for more than
        ``SYNK_STUCK_AFTER`` seconds (an environment variable; 60 by default, 0 for never) is explained so in the log,
        once.
        """
        if self.is_closed:
            raise ClosedError("cannot look at the workers: the runtime is closed.") from self.cause
        return self.team.where()

    def info(self) -> str:
        """Return a description of the runtime, one line per rank."""
        title = f"runtime: {self.world_size} x {self.backend}{' inline' if self.team.is_inline else ''}"
        if self.is_closed:
            return f"{title}, closed"
        with self.entered("describe the workers"):
            self.begin("describe the workers")
            lines = [
                f"  rank {link.rank}: {self.devices[link.rank]}, pid {link.process.pid}, {link.description}"
                for link in self.team.links
            ]
        lines += [f"  NCCL: {self.group.library}"] if self.group.library else []
        lines += [f"  NCCL is not used: {self.group.problem}"] if self.group.problem else []
        return "\n".join([title, *lines])

    # -- ending -------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Replace all workers by new ones, which know of everything as it is now.

        For what a change of global names does not bring to the workers: environment variables, the working folder,
        ``np.seterr``, modules that they have imported, and elements of arrays, lists and dicts that functions
        capture. Takes about as long as :func:`synk.fork`. Functions are sent again when they are called; ``Data`` and
        shared variables keep their values. What functions kept on the workers, in closures or globals, is gone;
        ``on_restart`` of :func:`synk.fork` can bring it back.

        Raises
        ------
        StartupError, ClosedError
        """
        with self.entered("restart"):
            deadline = self.deadline(None)
            self.begin("restart", deadline)
            for variable in self._living_variables():
                refresh(self, variable)
            self.book = self._new_book()
            for function in list(self.bound):
                function.is_stale = True
            self.team.replace(deadline)
            self.begin("restart", deadline)
            self._prepare_restarted(deadline)

    def close(self) -> None:
        """End the workers and release everything; safe to repeat, bounded in time.

        A call that runs in another thread is ended with ``ClosedError`` there, and so are calls that were submitted.
        """
        team = self.team
        if os.getpid() != self._pid:
            return
        refuse_inside_worker("close")
        if self.is_mine():
            raise ReentrancyError("cannot close the runtime while this thread is in a call.")
        with deferred(team.kill):  # a runtime that is closed in part could neither be used nor be closed
            team.wake()
            try:
                if not self._lock.acquire(timeout=team.grace_s + 1):
                    team.kill()
                    self._lock.acquire(timeout=team.grace_s + 1)
                team.say_goodbye()
                team.tear_down()
                self._release_memory()
            finally:
                if self.is_mine():
                    self._lock.release()

    def _release_memory(self) -> None:
        self.queue.close()
        self.abandon_memory()
        _open_runtimes.discard(self)
        if cell.runtime is self:
            cell.runtime = None

    def abandon_memory(self) -> None:
        """Let go of all memory but what the user's arrays lie in."""
        for lane in self.lanes:
            lane.close()
        while self._released:
            self._released.popleft().close()
        self._dropped_functions.clear()  # their plans hold views of the staging segment
        for variable in self._living_variables():
            variable.close()
        for function in list(self.bound):
            function.forget_sent()
        self.book.clear()
        self.results.close()
        self.arenas.close()
        orphans.close_all()
        _open_runtimes.discard(self)
        if cell.runtime is self:
            cell.runtime = None

    def __enter__(self) -> Runtime:
        self.check_open("enter the runtime")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        team = getattr(self, "team", None)
        if team is None or team.is_closed or os.getpid() != self._pid:
            return
        if not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2, source=self)
        team.tear_down()
        self._release_memory()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "inline" if self.team.is_inline else "open"
        return f"<synk.Runtime {self.world_size} x {self.backend}, {state}>"


def _check_on_restart(fn: Any) -> Callable[[], Any] | None:
    if fn is None:
        return None
    if not callable(fn):
        raise TypeError(f"cannot fork: got on_restart of type {type(fn).__name__}, expected a callable.")
    try:
        inspect.signature(fn).bind()
    except TypeError as error:
        raise TypeError(
            f"cannot fork: got an on_restart that needs arguments ({error}), expected one without."
        ) from None
    except ValueError:  # a built-in function that does not tell
        pass
    from synk._api.function import Function

    return Function(fn, outputs=None, name="on_restart")._fn  # checks that it can be sent


def _close_all() -> None:
    for runtime in list(_open_runtimes):
        runtime.team.is_exiting = True
        with contextlib.suppress(SynkError):
            runtime.close()


_fork_lock = threading.RLock()  # held from before a fork to after it, so that threads fork one after the other


def _before_fork() -> None:
    with deferred():
        _fork_lock.acquire()
        before_fork()


def _after_fork() -> None:
    with contextlib.suppress(RuntimeError):  # an exception from a signal handler came before it was held
        _fork_lock.release()


def _in_forked_child() -> None:
    """A child must not hold descriptors that tell workers whether the master lives, nor memory that nobody can use."""
    _after_fork()
    for runtime in list(_open_runtimes):
        runtime.team.abandon()
        runtime.abandon_memory()
    _open_runtimes.clear()


atexit.register(_close_all)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_child)
