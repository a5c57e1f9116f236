"""The functions that were sent to the workers of one runtime: once, and later what has changed of what they capture."""

from __future__ import annotations

import itertools
import pickle
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from synk._master.code.book import Book
from synk._master.code.parcels import Parcel
from synk._master.processes.log import Dropped
from synk._master.processes.program import search_path
from synk._master.state.captured import unsendable
from synk._master.state.lanes import Lanes
from synk._master.state.memory import Memory
from synk._master.workers.failures import rebuild
from synk._master.workers.workers import Workers
from synk._pure.interrupts import deferred
from synk._wire.logs import levels
from synk._wire.memory import Segment
from synk._wire.messages import Failure, Kind, LoadOrder, ParcelOrder, Status
from synk.errors import SerializationError, StartupError, SynkError

_ON_RESTART = 0
"""Takes the place of a function's id."""


_NUM_MAPPED = 8
_QUICK_S = 0.001
_PATIENCE = 20
"""Many functions that are dropped one by one are forgotten together: each time, all that are left are looked at."""


class MappedFunctions:
    """The functions that were mapped last, so that each is sent only once. Holds them and what they capture."""

    def __init__(self) -> None:
        self._known: deque[tuple[Any, bool, Any]] = deque(maxlen=_NUM_MAPPED)

    def get(self, fn: Any, make: Callable[[], Any], *, is_spread: bool = False) -> Any:
        """Return what was made for a function, or make it. Any thread may call it.

        ``is_spread``: whether the function is called with several items as separate arguments.
        """
        for known, was_spread, made in list(self._known):
            # A method is a new object each time it is read. Equal ones belong to the same object.
            is_same = known is fn or (type(fn) is types.MethodType is type(known) and known == fn)
            if is_same and was_spread == is_spread:
                return made
        made = make()
        self._known.append((fn, is_spread, made))
        return made

    def clear(self) -> None:
        self._known.clear()


class Functions:
    """The functions that the workers of a runtime were sent.

    Parameters
    ----------
    workers : Workers
    lanes : Lanes
    memory : Memory
    on_restart : (callable, dict) or None
        A function that replacement workers run before their first call, and its options.

    Attributes
    ----------
    book : Book
        All parcels, in the order in which they are loaded.
    bound : WeakSet of Callee
        The functions that are on the workers.
    ids : iterator of int
        Numbers for functions that are sent for the first time.
    mapped : MappedFunctions
    dropped : Dropped, of (int, OrderedDict)
        Functions that no longer exist, by id, with their plans by key. Filled by finalizers.
    is_torn : bool
        Whether a signal handler has broken off a step of the book. The workers are then replaced.
    has_on_restart : bool
        Whether replacement workers run a function before their first call. An agent learns this with the function, of
        which it has the parcels alone.
    """

    def __init__(
        self, workers: Workers, lanes: Lanes, memory: Memory, on_restart: tuple[Any, dict[str, Any]] | None
    ) -> None:
        self._workers = workers
        self._lanes = lanes
        self._memory = memory
        self._on_restart = on_restart
        self.has_on_restart = on_restart is not None
        self._num_loaded_restarts = 0
        self.bound: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ids = itertools.count(1)
        self.dropped = Dropped(workers.log)
        self._freed_s = self._freeing_s = 0.0
        self.mapped = MappedFunctions()
        self.book = Book(self)
        self.is_torn = False

    # -- what the book needs -------------------------------------------------------------------------------------------

    @property
    def is_inline(self) -> bool:
        return self._workers.is_inline

    @property
    def has_shared_memory(self) -> bool:
        return self._workers.has_shared_memory

    def new_id(self) -> int:
        """Return the number of the next segment."""
        return next(self._memory.ids)

    def drop_parcel(self, parcel: Parcel, unbound: list[tuple[tuple[int, int], Any]]) -> None:
        """Have the workers forget a parcel, and globals: (address of the namespace, name)."""
        for worker in self._workers.by_rank:
            worker.known.held["parcel"].discard(parcel.number)
        # also on ranks that it reached although the load was broken off
        self._workers.log.drop("parcel", parcel.number, unbound)
        if parcel.segment is not None:
            self._memory.forget(parcel.segment, is_kept=True)

    def free_dropped(self) -> None:
        """Have the workers forget functions that no longer exist, and their plans."""
        if not self.dropped:
            return
        began = time.monotonic()
        while self.dropped:
            function_id, plans = self.dropped.popleft()
            self.book.forget_function(function_id)
            for cached in plans.values():
                self._workers.log.drop_held("plan", cached.plan.plan_id)
            self._workers.log.drop("function", function_id)
        self._settle(self.book.collect)
        self._freed_s = time.monotonic()
        self._freeing_s = self._freed_s - began

    def is_worth_freeing(self) -> bool:
        """Whether functions were dropped, and it takes little of the time to forget them now."""
        is_quick = self._freeing_s < _QUICK_S or time.monotonic() - self._freed_s > _PATIENCE * self._freeing_s
        return is_quick and bool(self.dropped)

    # -- loading ------------------------------------------------------------------------------------------------------

    def bring(
        self,
        functions: Sequence[tuple[int, Any, dict[str, Any]]],
        names: str,
        deadline: float | None,
        check: Callable[[int], None] = lambda function_id: None,
    ) -> list[tuple[Any, int]]:
        """Send functions to all workers, and what has changed of what they captured.

        Parameters
        ----------
        functions : sequence of (id, function, options)
        check : callable
            Raises if what a function captures must not be sent.

        Returns
        -------
        list of (object, size in bytes)
            What was sent because it had changed.

        Raises
        ------
        SerializationError
            If a function cannot be pickled, or not be loaded. No rank then counts as having it.
        """
        try:
            sent = packed(self.book, functions, names, check)
            self.load_missing(names, deadline)
        except BaseException:
            self._settle(self.book.roll_back)
            raise
        self._settle(self.book.commit)
        return sent

    def _settle(self, step: Callable[[], None]) -> None:
        """Take a step of the book after which it is as the ranks are."""
        with deferred():
            self.is_torn = True
            step()
            self.is_torn = False

    def ensure_loaded(self, deadline: float | None) -> None:
        """Send each worker the functions that it lacks. A replacement lacks all of them."""
        self._settle(self.book.roll_back)  # an operation that was broken off may not have done this
        restarts = self._workers.counters["restarts"]
        if restarts != self._num_loaded_restarts:
            self.load_missing("functions", deadline)
            self.prepare_restarted(deadline)
            self._num_loaded_restarts = restarts
        elif self._is_by_agents:
            self._bring_on_restart(deadline)

    @property
    def _is_by_agents(self) -> bool:
        """Whether agents replace workers, so that they must have ``on_restart`` as it is now at any time."""
        return self.has_on_restart and not self.has_shared_memory

    def _bring_on_restart(self, deadline: float | None) -> None:
        if self._on_restart is not None:
            fn, options = self._on_restart
            self.bring([(_ON_RESTART, fn, options)], "on_restart", deadline)

    def note_replacements(self) -> None:
        """Note that all workers replace others: this session is that of a node that was started again."""
        self._num_loaded_restarts = -1
        for worker in self._workers.by_rank:
            worker.is_prepared = False

    def prepare_restarted(self, deadline: float | None) -> None:
        """Run ``on_restart`` on the replacement workers."""
        waiting = [worker for worker in self._workers.by_rank if not worker.is_prepared]
        if waiting and self.has_on_restart:
            self._bring_on_restart(deadline)
            orders = {worker.rank: LoadOrder([], search_path(), levels(), _ON_RESTART) for worker in waiting}
            failures, was_interrupted = self._order(orders, "on_restart", deadline)
            if failures or was_interrupted:
                what = f"{failures[0].type_name}: {failures[0].message}" if failures else "an interrupt"
                ranks = self._workers.processes.placement.among_all(worker.rank for worker in waiting)
                raise StartupError(
                    f"cannot use the worker that was started again as {ranks}: on_restart ended with {what}. The next "
                    "call runs it again."
                ) from (rebuild(failures, self._workers.total_ranks, "on_restart") if failures else None)
        for worker in waiting:
            worker.is_prepared = True

    def load_missing(self, names: str, deadline: float | None) -> None:
        """Send each worker the parcels that it lacks. Raise SerializationError if it cannot load them."""
        ranks = range(self._workers.world_size)
        failures, was_interrupted = self.send_missing(names, deadline, ranks)
        if failures:
            raise SerializationError(
                f"cannot load {names} on the workers: {failures[0].type_name}: {failures[0].message}. "
                "What a function needs must be importable there, or defined in the script itself."
            ) from rebuild(failures, self._workers.total_ranks, names)
        if was_interrupted:
            raise SerializationError(f"cannot load {names} on the workers: the loading was interrupted. Call again.")

    def send_missing(self, names: str, deadline: float | None, ranks: Sequence[int]) -> tuple[list[Any], bool]:
        """Send workers the parcels that they lack. Return the failures, and whether one was interrupted."""
        orders: dict[int, LoadOrder] = {}
        segments: dict[int, Segment] = {}
        for worker in map(self._workers.by_rank.__getitem__, ranks):
            missing = [p for number, p in self.book.parcels.items() if number not in worker.known.held["parcel"]]
            if missing:
                parcels = [ParcelOrder(each.number, each.data, each.is_optional) for each in missing]
                orders[worker.rank] = LoadOrder(
                    parcels, search_path(), levels(), _ON_RESTART if self._is_by_agents else None
                )
                segments.update((each.segment.id, each.segment) for each in missing if each.segment is not None)
        return self._order(orders, names, deadline, list(segments.values()))

    def _order(
        self, orders: dict[int, LoadOrder], names: str, deadline: float | None, segments: Sequence[Segment] = ()
    ) -> tuple[list[Any], bool]:
        """Have workers load, and note what they loaded. Return the failures, and whether one was interrupted."""
        if not orders:
            return [], False
        self._lanes.first.connect(self._workers.processes)
        replies = self._workers.ask(Kind.LOAD, list(orders), 0, orders, segments, deadline, "distribute", names)
        # A rank holds a parcel once it has said so. One that died, failed or was interrupted counts as lacking all.
        for rank, reply in replies.items():
            if reply.status == Status.DONE:
                parcels = self._workers.by_rank[rank].known.held["parcel"]
                parcels.update(parcel.number for parcel in orders[rank].parcels)
        failures = [pickle.loads(reply.body) for reply in replies.values() if reply.status == Status.ERROR]
        for failure in failures:
            if not isinstance(failure, Failure):  # an agent could not even ask its workers: its error, and the cause
                error, error.__cause__ = failure
                raise error
        return failures, any(reply.status == Status.INTERRUPTED for reply in replies.values())

    # -- ending -------------------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Forget what was sent: the workers are about to be replaced."""
        self.book.clear()
        self.book = Book(self)
        self.is_torn = False
        for function in list(self.bound):
            function.is_stale = True

    def close(self) -> None:
        """Release everything: the runtime is closed."""
        self.mapped.clear()
        self.dropped.clear()  # their plans hold views of the staging segment
        for function in list(self.bound):
            function.forget_sent()
        self.book.clear()


def packed(
    book: Book, functions: Sequence[tuple[int, Any, dict[str, Any]]], names: str, check: Callable[[int], None]
) -> list[tuple[Any, int]]:
    """Pack functions, and what has changed of what they captured. Return what had changed, with its size.

    Raises
    ------
    SerializationError
        If a function cannot be pickled.
    """
    sent: list[tuple[Any, int]] = []
    for function_id, fn, options in functions:
        try:
            sent += book.update(function_id, fn, options)
        except Exception as error:
            if isinstance(error, SynkError):
                raise
            raise unsendable(names, fn, error) from error
        check(function_id)
    return sent
