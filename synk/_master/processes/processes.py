"""The processes of the workers and what they inherit: start, watch, bury, end. Sends nothing and knows no message."""

from __future__ import annotations

import contextlib
import contextvars
import os
import select
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._master.processes.log import Known, Log
from synk._master.processes.placement import HASH_SEED, Placement, hash_seed_of
from synk._master.processes.process import Process
from synk._master.processes.program import setup_message, startup_text
from synk._pure.environment import spin_s
from synk._pure.interrupts import LOOK_S, deferred, waiting
from synk._wire.control import Down, control_blocks, control_nbytes
from synk._wire.descriptors import NONE, Descriptor
from synk._wire.memory import Segment
from synk._wire.messages import Reply
from synk.errors import StartupError


class Events(NamedTuple):
    """Events of the workers, sorted by kind, so that the caller chooses the order in which to handle them.

    Attributes
    ----------
    doorbells, deaths : list of int
        Ranks that have answered, and ranks whose process has ended.
    printed : list of (rank, descriptor)
        Ranks with text to read, and the descriptors to read it from.
    is_woken : bool
        Whether another thread woke this one; see :meth:`PollSet.wake`.
    """

    doorbells: list[int]
    deaths: list[int]
    printed: list[tuple[int, int]]
    is_woken: bool


_LOOK_MS = int(1000 * LOOK_S)


class PollSet:
    """The descriptors that the master watches, each with its kind and rank.

    Attributes
    ----------
    poll : select.poll
    """

    def __init__(self) -> None:
        self.poll = select.poll()
        self._fds: dict[int, tuple[str, int]] = {}
        self._wake_fd: int = NONE

    def open(self) -> None:
        """Make the descriptor by which another thread wakes the one that waits."""
        self._wake_fd = eventfd()
        self.watch(self._wake_fd, "wake", -1)

    @property
    def fds(self) -> list[int]:
        """All of them."""
        return list(self._fds)

    def watch(self, fd: int, kind: str, rank: int) -> None:
        self._fds[int(fd)] = (kind, rank)
        self.poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        if self._fds.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def unwatch_rank(self, rank: int) -> None:
        for fd in [fd for fd, (_, owner) in self._fds.items() if owner == rank]:
            self.unwatch(fd)

    def wait(self, timeout_ms: int | None) -> Events:
        """Return what has happened within a time limit, and in any case after ``LOOK_S``."""
        events = Events([], [], [], False)
        timeout_ms = _LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS)
        for fd, _ in waiting(self.poll.poll, timeout_ms):
            # Another thread may have closed the runtime since the poll. Then nobody asks for this descriptor any more.
            kind, rank = self._fds.get(fd, ("", -1))
            if kind == "up":
                events.doorbells.append(rank)
            elif kind == "death":
                events.deaths.append(rank)
            elif kind == "output":
                events.printed.append((rank, fd))
            elif kind == "wake":
                events = events._replace(is_woken=True)
        return events

    def wake(self) -> None:
        """End the wait of another thread. Further waits end at once, too, until :meth:`drain_wake` is called."""
        fd = self._wake_fd  # a reference: another thread may close the runtime in the meantime
        if fd >= 0:
            os.eventfd_write(fd, 1)

    def drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def close(self) -> None:
        """Drop the wake descriptor. Safe to call more than once, and by several threads."""
        self.unwatch(self._wake_fd)
        self._wake_fd = NONE


def eventfd() -> Descriptor:
    """Return a new event descriptor, close-on-exec and non-blocking."""
    return Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


ARMED: contextvars.ContextVar[Sequence[Sequence[Any]]] = contextvars.ContextVar("failpoints", default=())
"""The faults that a test arms in the workers of new runtimes; see ``synk._worker.failpoints``."""


class WorkerState:
    """The master's record of one rank's worker, whichever process plays the rank now.

    Attributes
    ----------
    process : Process
    known : Known
    hello : Reply or None
        Its first message, once it has come.
    is_ready : bool
        Whether the hello was checked, so that messages can be sent.
    is_dead : bool
        Whether it was buried: the process and everything it held are gone, and the next operation starts another.
    is_prepared : bool
        Whether it has run the function that replacements run first.
    description : str
        Describes its device.
    num_starts : int
        How many processes have played the rank.
    """

    def __init__(self, rank: int, process: Process, log: Log) -> None:
        self.rank = rank
        self.known = Known(rank, log)
        log.ranks.append(self.known)
        self.is_prepared = True
        self.num_starts = 0
        self.begin(process)

    def begin(self, process: Process) -> None:
        """Start over with a process that knows nothing."""
        self.known.clear()
        self.process = process
        self.hello: Reply | None = None
        self.description = ""
        self.is_dead = self.is_ready = False  # last: until then it counts as dead, and is started again


class Processes:
    """The processes of one runtime. Nothing is opened before :meth:`start`, so its owner can end it at any moment.

    Parameters
    ----------
    placement : Placement
    process_type : callable
        ``process_type(rank)`` makes a :class:`Process` that is not started.
    seed : int
        The seed of all ranks' random numbers.
    token : bytes
        The secret in the headers of this runtime's messages.

    Attributes
    ----------
    by_rank : list of WorkerState
    poll_set : PollSet
        Watches the descriptors of all workers.
    down, up : ndarray of int64, shape (world_size, BLOCK_LENGTH)
        The numbers of lane 0 in shared memory; see ``synk._wire.control``.
    eventfds : list of int
        One for each rank. All workers inherit all of them, and use them to wake each other.
    log : Log
        What all workers must know.
    is_closed : bool
    """

    def __init__(
        self,
        placement: Placement,
        *,
        process_type: Callable[[int], Process],
        seed: int,
        token: bytes,
    ) -> None:
        self.placement = placement
        self.devices: tuple[str, ...] = placement.devices
        self.world_size = len(self.devices)
        self.poll_set = PollSet()
        self.is_closed = False
        self.log = Log()
        self.by_rank: list[WorkerState] = []
        self.eventfds: list[Descriptor] = []
        self.down = self.up = np.empty((0, 0), np.int64)
        self._process_type = process_type
        self.seed = seed
        self._hash_seed = hash_seed_of(os.environ, seed)  # now: a replacement has the same, whatever was set meanwhile
        self._token = token
        self._failpoints = ARMED.get()
        self._control: Segment | None = None
        self._spin_s = spin_s()

    # -- starting -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start one process for each rank.

        Raises
        ------
        StartupError
            If a process cannot be started.
        """
        try:
            self._open()
        except OSError as error:
            raise StartupError(startup_text("the runtime", error)) from error

    def _open(self) -> None:
        self.poll_set.open()
        self._control = Segment.create(control_nbytes(self.world_size))
        self.down, self.up = self.blocks(0)
        self.down[:, [Down.INTERRUPT, Down.COMMITTED]] = -1
        for _ in range(self.world_size):
            self.eventfds.append(eventfd())
        for rank in range(self.world_size):
            # It enters the list before it is started, so that the teardown finds it wherever the start is broken off.
            self.by_rank.append(WorkerState(rank, self._new_process(rank), self.log))
            self._begin(self.by_rank[rank], self._failpoints)

    def start_again(self, worker: WorkerState) -> None:
        """Start a new process for a rank whose worker was buried, or not quite: an interrupt may have broken it off."""
        worker.process.kill()
        self.bury(worker)
        worker.process = self._new_process(worker.rank)
        self._begin(worker, [point for point in self._failpoints if point[2] == 0])

    def _new_process(self, rank: int) -> Process:
        return self._process_type(self.placement.first_rank + rank)

    def _begin(self, worker: WorkerState, failpoints: Sequence[Sequence[Any]]) -> None:
        assert self._control is not None
        process, rank, placement = worker.process, worker.rank, self.placement
        setup = setup_message(placement, rank, failpoints)
        worker.num_starts += 1
        # A replacement must not draw the random numbers of its predecessor again.
        number = placement.first_rank + rank
        spawn_key = [number] if worker.num_starts == 1 else [number, worker.num_starts]
        if placement.generation > 1:
            spawn_key = [number, worker.num_starts, placement.generation]
        setup["seed"] = [self.seed, *spawn_key]
        setup |= {"control_nbytes": self._control.nbytes, "spin_s": self._spin_s, "hash_seed": self._hash_seed}
        environment = {**placement.environment(rank), HASH_SEED: self._hash_seed}
        events: dict[str, int] = {f"event{peer}": fd for peer, fd in enumerate(self.eventfds)}
        process.start(setup, environment, self._control.fd, self._token, events)
        for fd, kind in process.watched():
            self.poll_set.watch(fd, kind, rank)
        worker.begin(process)  # last: if the start fails, the rank stays as it was

    def blocks(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the control blocks ``(down, up)`` of a lane."""
        assert self._control is not None
        return control_blocks(self._control.buffer, self.world_size, lane)

    # -- watching -----------------------------------------------------------------------------------------------------

    def wait(self, timeout_ms: int | None) -> Events:
        """Return what has happened within a time limit, and pass on what the workers printed.

        A worker flushes a function's output before it rings its doorbell. So one poll finds both, and the lines are
        shown before the call returns.
        """
        events = self.poll_set.wait(timeout_ms)
        for rank, fd in events.printed:
            if not self.by_rank[rank].process.forward_output(fd):
                self.poll_set.unwatch(fd)
        return events

    @property
    def has_dead(self) -> bool:
        """Whether a worker has died and was not replaced yet."""
        for worker in self.by_rank:  # asked at each call: no generator  # noqa: SIM110
            if worker.is_dead:
                return True
        return False

    # -- ending -------------------------------------------------------------------------------------------------------

    def bury(self, worker: WorkerState) -> str:
        """Release what belonged to a worker that has ended or was killed. Return how it ended."""
        with deferred():  # Half a burial would leave a death that nobody sees, or descriptors that nobody closes.
            self.log.note()
            worker.is_dead = True
            # Unwatch before the descriptors are closed: their numbers may be reused at once.
            self.poll_set.unwatch_rank(worker.rank)
            return worker.process.reap()

    def kill(self) -> None:
        """Kill all workers."""
        for worker in self.by_rank:
            worker.process.kill()

    def tear_down(self) -> None:
        """Kill the workers that still run and release every descriptor. Never waits long; any thread may repeat it."""
        with deferred():
            # First: no thread may send or wait, or fit a compiled call, once the first worker is killed.
            self.is_closed = True
            self.log.note()
            self.kill()  # all of them before waiting for the first, so that they end at the same time
            for worker in self.by_rank:
                self.poll_set.unwatch_rank(worker.rank)
                worker.process.reap()
                worker.is_dead = True
            self._release()
            self.down = self.up = np.empty((0, 0), np.int64)
            if self._control is not None:
                self._control.close()

    def abandon(self) -> None:
        """In a forked child, close this process's copies of the descriptors. The workers belong to the parent."""
        self.log.note()
        for worker in self.by_rank:
            worker.process.disown()
            # This also closes the child's copy of the lifeline, which would keep the workers alive after the parent.
            worker.process.close()
        self._release()

    def _release(self) -> None:
        self.poll_set.close()
        self.eventfds = []  # a new list, since another thread may still use the descriptors in the old one
