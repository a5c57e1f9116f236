"""The processes of the ranks: start, watch, bury, end. It sends no order and knows no call."""

from __future__ import annotations

import contextlib
import functools
import os
import select
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._processes.placement import HASH_SEED, Placement, hash_seed_of
from synk._processes.program import ARMED, setup_message, startup_text
from synk._pure.environment import spin_s
from synk._pure.interrupts import LOOK_S, deferred, waiting
from synk._pure.limits import poll_ms
from synk._wire.mapping import NONE, Descriptor, eventfd
from synk._wire.memory import Segment
from synk._wire.orders import Down, control_blocks, control_nbytes
from synk._wire.patience import Patience
from synk.errors import StartupError

_LOOK_MS = int(1000 * LOOK_S)


class Worker:
    """One rank as the program knows it, whichever process plays it now.

    Attributes
    ----------
    process : WorkerProcess
    link : Link
    known : set of int
        The numbers of the things that it knows. Those in ``stale`` it holds, and is to be told of anew.
    parcels : set of int
        The parcels that it holds; ``parcels_state`` and ``settings_state`` say of which state it was told.
    forgets : list
        What the next body tells it to forget.
    committed : int
        The last call with state that it ran and that was committed.
    heard : int
        A number up to which all that was sent to it is settled.
    is_ready : bool
        Whether it has said hello.
    is_dead : bool
        Whether it was buried, or never started as a whole.
    """

    def __init__(self, rank: int, process: Any) -> None:
        self.rank = rank
        self.num_starts = 0
        self.is_prepared = True
        self.begin(process, None)
        self.is_dead = True

    def begin(self, process: Any, link: Any) -> None:
        """Start over with a process that knows nothing."""
        self.process, self.link = process, link
        self.known: set[int] = set()
        self.stale: set[int] = set()
        self.parcels: set[int] = set()
        self.parcels_state = self.settings_state = -1
        self.forgets: list[tuple[str, int, Any]] = []
        self.committed = self.heard = 0
        self.hello: Any = None
        self.description = ""
        self.is_dead = self.is_ready = False


class Processes:
    """The processes of one runtime. Nothing is opened before :meth:`start`.

    Attributes
    ----------
    by_rank : list of Worker
    down, up : ndarray of int64, shape (world_size, BLOCK_LENGTH)
        The words of lane 0; see ``synk._wire.orders``.
    is_inline : bool
    events : callable
        Returns what has happened, without waiting.
    """

    def __init__(self, placement: Placement, *, process_type: Any, seed: int) -> None:
        self.placement = placement
        self.devices: tuple[str, ...] = placement.devices
        self.world_size = len(self.devices)
        self.is_inline: bool = process_type.is_inline
        self.is_closed = False
        self.seed = seed
        self.by_rank: list[Worker] = []
        self.eventfds: list[Descriptor] = []
        self.down = self.up = np.empty((0, 0), np.int64)
        self._process_type = process_type
        self._hash_seed = hash_seed_of(os.environ, seed)
        self._failpoints = ARMED.get()
        self._spin_s = spin_s()
        self._control: Segment | None = None
        self._watched: dict[int, tuple[str, Worker | None]] = {}
        self._poll = select.poll()
        self._sleep: Callable[[int | None], Any] = functools.partial(
            waiting, self._poll.poll
        )  # Ctrl-C may be raised there
        self.events: Callable[[], list[tuple[int, int]]] = functools.partial(self._poll.poll, 0)
        self._patience = Patience(self._spin_s)
        self._wake_fd: int = NONE

    # -- starting -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start one process for each rank.

        Raises
        ------
        StartupError
        """
        try:
            self._wake_fd = eventfd()
            self._watch(self._wake_fd, "wake", None)
            self._control = Segment.create(control_nbytes(self.world_size), is_worker_writable=True)
            self.down, self.up = self.blocks(0)
            self.down[:, Down.INTERRUPT] = 0
            self.eventfds = [eventfd() for _ in range(self.world_size)]
        except OSError as error:
            raise StartupError(startup_text("the runtime", error)) from error
        for rank in range(self.world_size):
            self.by_rank.append(Worker(rank, self._process_type(rank)))
            self._begin(self.by_rank[rank], self._failpoints)

    def start_again(self, worker: Worker) -> None:
        """Start a new process for a rank whose process has ended."""
        self.bury(worker)
        worker.process = self._process_type(worker.rank)
        self._begin(worker, [point for point in self._failpoints if point[2] == 0])

    def _begin(self, worker: Worker, failpoints: Sequence[Sequence[Any]]) -> None:
        assert self._control is not None
        process, rank, placement = worker.process, worker.rank, self.placement
        setup = self._setup(rank, failpoints)
        worker.num_starts += 1
        # A replacement must not draw the random numbers of its predecessor again, nor those of an item, whose key has
        # two numbers.
        setup["seed"] = [self.seed, rank] if worker.num_starts == 1 else [self.seed, rank, worker.num_starts, 0]
        setup |= {"control_nbytes": self._control.nbytes, "spin_s": self._spin_s, "hash_seed": self._hash_seed}
        environment = {**placement.environment(rank), HASH_SEED: self._hash_seed}
        events: dict[str, int] = {f"event{peer}": fd for peer, fd in enumerate(self.eventfds)}
        process.start(setup, environment, self._control.fd, events)
        for fd, kind in process.watched():
            self._watch(fd, kind, worker)
        worker.begin(process, process.link)  # last: if the start fails, the rank counts as dead

    def _setup(self, rank: int, failpoints: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return what a rank must know before it can unpickle anything."""
        return setup_message(self.placement, rank, failpoints)

    def blocks(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the control blocks ``(down, up)`` of a lane."""
        assert self._control is not None
        return control_blocks(self._control.buffer, self.world_size, lane)

    # -- watching -----------------------------------------------------------------------------------------------------

    def _watch(self, fd: int, kind: str, worker: Worker | None) -> None:
        self._watched[int(fd)] = kind, worker
        self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._watched.pop(int(fd), None) is not None:
            self._poll.unregister(fd)

    def wait(self, seconds: float | None, *, awake: bool = True) -> list[tuple[int, int]]:
        """Return what happens within a time limit: awake at first, if that pays."""
        timeout_ms = _LOOK_MS if seconds is None else min(poll_ms(seconds), _LOOK_MS)
        if not awake:
            return self._sleep(timeout_ms)
        events: list[tuple[int, int]] = self._patience.wait(self._poll.poll, self._sleep, timeout_ms)
        return events

    def sort(self, events: Sequence[tuple[int, int]]) -> tuple[list[Worker], list[Worker], bool]:
        """Return who has answered, who has ended, and whether another thread woke this one. Pass on what was printed.

        A rank flushes what its function printed before it replies. So one poll finds both.
        """
        replied: list[Worker] = []
        ended: list[Worker] = []
        is_woken = False
        for fd, _ in events:
            kind, worker = self._watched.get(fd, ("", None))
            if worker is None:
                is_woken = is_woken or kind == "wake"
            elif kind == "up":
                replied.append(worker)
            elif kind == "death":
                ended.append(worker)
            elif not worker.process.forward_output(fd):
                self._unwatch(fd)
        return replied, ended, is_woken

    def descriptors(self) -> list[int]:
        """Return the descriptors that report answers and deaths."""
        return [fd for fd, (kind, _) in list(self._watched.items()) if kind in ("up", "death")]

    def wake(self) -> None:
        """End the wait of another thread; further waits end at once, until :meth:`drain_wake`."""
        fd = self._wake_fd
        if fd >= 0:
            os.eventfd_write(fd, 1)

    def drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    # -- ending -------------------------------------------------------------------------------------------------------

    def bury(self, worker: Worker) -> None:
        """End a process, and release what belonged to it."""
        with deferred():
            worker.is_dead = True
            for fd in [fd for fd, (_, owner) in self._watched.items() if owner is worker]:
                self._unwatch(fd)  # before the descriptors are closed: their numbers may be used again at once
            worker.process.kill()
            worker.process.reap()

    def kill(self) -> None:
        for worker in self.by_rank:
            worker.process.kill()

    def tear_down(self) -> None:
        """Kill what still runs and release every descriptor. Never waits long; any thread may repeat it."""
        with deferred():
            self.is_closed = True
            self.kill()
            for worker in self.by_rank:
                self.bury(worker)
            self._release()
            self.down = self.up = np.empty((0, 0), np.int64)
            if self._control is not None:
                self._control.close()

    def abandon(self) -> None:
        """In a forked child, close this process's copies of the descriptors. The ranks belong to the parent."""
        self.is_closed = True
        for worker in self.by_rank:
            worker.process.disown()
            worker.process.close()
        self._release()

    def _release(self) -> None:
        self._unwatch(self._wake_fd)
        self._wake_fd = NONE
        self.eventfds = []


def own_nbytes(pid: int) -> int:
    """Return the resident memory of a process, without what it shares with others; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            resident, shared = file.read().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
