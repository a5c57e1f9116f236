"""The worker processes and what the master watches of them: start, descriptors, printed lines, death, end.

Owns the processes and the poll set over their descriptors. Sends nothing and knows no message.
"""

from __future__ import annotations

import contextvars
import os
import select
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._master.epoch import Epoch
from synk._master.known import WorkerState
from synk._master.placement import Placement
from synk._master.process import WorkerProcess, setup_message, startup_text
from synk._pure.environment import spin_s
from synk._pure.interrupts import deferred, is_from_handler
from synk._wire.control import Down, Phase, Up, control_blocks, control_nbytes
from synk._wire.descriptors import NONE, Descriptor
from synk._wire.memory import Segment
from synk.errors import StartupError, WorkerDied

ARMED: contextvars.ContextVar[Sequence[Sequence[Any]]] = contextvars.ContextVar("failpoints", default=())
"""The faults that a test arms in the workers of runtimes that it makes; see ``synk._worker.failpoints``."""


class Crew:
    """The processes of one runtime, and the lower half of ``Workers``, which uses what begins with ``_``.

    Parameters
    ----------
    placement : Placement
    process_type : type
        What plays a rank: :class:`WorkerProcess`, or something that has no process.
    token : bytes

    Attributes
    ----------
    by_rank : list of WorkerState
        One per rank.
    down, up : ndarray of int64, shape (world_size, BLOCK_LENGTH)
        The numbers of lane 0 in shared memory; see ``synk._wire.messages``.
    eventfds : list of int
        One per rank, inherited by all workers: how they wake one another.
    epoch : Epoch
        Ends with everything that a remembered call relies on.

    Nothing is opened before :meth:`start`, so that whoever made it can end it wherever the start is broken off.
    """

    def __init__(self, placement: Placement, *, process_type: type, token: bytes) -> None:
        self.backend: str = placement.backend
        self.devices: tuple[str, ...] = placement.devices
        self.world_size = len(self.devices)
        self.is_inline = not issubclass(process_type, WorkerProcess)
        self._process_type = process_type
        self.is_closed = False
        self.epoch = Epoch()
        self.by_rank: list[WorkerState] = []
        self.eventfds: list[Descriptor] = []
        self.down = self.up = np.empty((0, 0), np.int64)
        self._placement = placement
        self._token = token
        self._failpoints = ARMED.get()
        self._control: Segment | None = None
        self._unreported_deaths: dict[int, str] = {}
        self._oom_kills = oom_kills()
        self._spin_s = spin_s()
        self._poll = select.poll()
        self._fds: dict[int, tuple[str, int]] = {}
        self._wake_fd: int = NONE

    def start(self) -> None:
        """Start one process for each rank.

        Raises
        ------
        StartupError
            If a process cannot be started.
        """
        with deferred():  # a handler's TimeoutError, raised after it, is no refusal of the operating system
            try:
                self._open()
            except OSError as error:
                raise StartupError(startup_text("the runtime", error)) from error

    def _open(self) -> None:
        self._wake_fd = _eventfd()
        self._control = Segment.create(control_nbytes(self.world_size))
        self.down, self.up = self.blocks(0)
        self.down[:, [Down.INTERRUPT, Down.COMMITTED]] = -1
        self._watch(self._wake_fd, "wake", -1)
        for _ in range(self.world_size):
            self.eventfds.append(_eventfd())
        for rank in range(self.world_size):
            self.by_rank.append(WorkerState(rank, self._new_process(rank), self.epoch))
            self._start(self.by_rank[rank], self._failpoints)

    def blocks(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers ``(down, up)`` of a lane."""
        assert self._control is not None
        return control_blocks(self._control.buffer, self.world_size, lane)

    def drop_plan(self, plan_id: int) -> None:
        """Have the workers forget a plan with their next message."""
        with deferred():
            for worker in self.by_rank:
                worker.drop_plan(plan_id)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _new_process(self, rank: int) -> Any:
        if not self.is_inline:
            return WorkerProcess(rank)
        assert self._control is not None
        device = self.devices[rank]
        control, eventfds, failpoints = self._control, self.eventfds, self._failpoints
        return self._process_type(rank, self.world_size, self.backend, device, control, eventfds, failpoints)

    def _start(self, worker: WorkerState, failpoints: Sequence[Sequence[Any]]) -> None:
        """Start a process for a rank, in the place of one that ended."""
        process, rank = worker.process, worker.rank
        if isinstance(process, WorkerProcess):
            assert self._control is not None
            if process.pid >= 0:
                process = worker.process = WorkerProcess(rank)
            placement, device = self._placement, self.devices[rank]
            setup = setup_message(self.world_size, self.backend, device, placement.cpus_of(rank), failpoints)
            setup |= {"control_nbytes": self._control.nbytes, "spin_s": self._spin_s}
            events: dict[str, int] = {f"event{peer}": fd for peer, fd in enumerate(self.eventfds)}
            process.start(setup, placement.environment(rank), self._control.fd, self._token, events)
            worker.restart(process)
            self._watch_worker(worker)

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watch(self, fd: int, kind: str, rank: int) -> None:
        self._fds[int(fd)] = (kind, rank)
        self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._fds.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _watch_worker(self, worker: WorkerState) -> None:
        process = worker.process
        if isinstance(process, WorkerProcess):
            self._watch(process.channel.read_fd, "up", worker.rank)
            self._watch(process.pidfd, "death", worker.rank)
            for fd in process.output_fds:
                self._watch(fd, "output", worker.rank)

    def _unwatch_worker(self, worker: WorkerState) -> None:
        for fd in [fd for fd, (_, rank) in self._fds.items() if rank == worker.rank]:
            self._unwatch(fd)

    def _forward(self, worker: WorkerState, fd: int) -> None:
        if isinstance(worker.process, WorkerProcess) and not worker.process.forward_output(fd):
            self._unwatch(fd)

    @property
    def has_dead(self) -> bool:
        """Whether a worker died that was not started again yet."""
        for worker in self.by_rank:  # asked at each call: no generator  # noqa: SIM110
            if worker.is_dead:
                return True
        return False

    def where(self) -> str:
        """Return what each rank is doing: phase, bytes published, Python stacks. For any thread, also during a call."""
        parts = []
        for worker in self.by_rank:
            if worker.is_dead:
                parts.append(f"rank {worker.rank}: ended with {worker.process.exit_text}")
                continue
            if not worker.is_ready:  # it has no handler yet: the signal would end it
                parts.append(
                    f"rank {worker.rank} (pid {worker.process.pid}, {self.devices[worker.rank]}): still starting"
                )
                continue
            phase = Phase(int(self.up[worker.rank, Up.PHASE])).name.lower() if len(self.up) else "closed"
            nbytes = int(self.up[worker.rank, Up.OUTPUT_NBYTES]) if len(self.up) else 0
            stacks = worker.process.stacks(1.0).strip().replace("\n", "\n    ")
            parts.append(
                f"rank {worker.rank} (pid {worker.process.pid}, {self.devices[worker.rank]}): {phase}, {nbytes} bytes "
                f"of outputs published so far\n    {stacks}"
            )
        return "\n".join(parts)

    # -- deaths --------------------------------------------------------------------------------------------------------

    def _bury(self, worker: WorkerState) -> str:
        """Release a dead worker's descriptors and return how it ended."""
        process = worker.process
        assert isinstance(process, WorkerProcess)
        with deferred():  # half a burial would leave a death that nobody sees, or descriptors that nobody closes
            self.epoch.end()
            worker.is_dead = True
            self._unwatch_worker(worker)
            return process.reap()

    def _worker_died(self, ranks: list[int], phase: str, what: str, began: float) -> WorkerDied:
        """Return the error for ``ranks``, with what they wrote to stderr since the monotonic time ``began``."""
        workers = [self.by_rank[rank] for rank in ranks]
        exits = tuple(worker.process.exit_text for worker in workers)
        ended = "; ".join(
            f"rank {worker.rank} of {self.world_size} (pid {worker.process.pid}, {self.devices[worker.rank]}) "
            f"ended with {how}"
            for worker, how in zip(workers, exits)
        )
        hints = "".join(self._kill_hint(worker.rank) for worker, how in zip(workers, exits) if how == "SIGKILL")
        message = f"{ended} during {what or phase}.{hints} The next call starts dead workers again."
        if phase != "start":
            message += " What functions kept there, in closures or globals, is gone."
        return WorkerDied(
            "\n".join([message, *stderr_tails(workers, began)]),
            ranks=tuple(ranks),
            pids=tuple(worker.process.pid for worker in workers),
            exits=exits,
            phase=phase,
        )

    def _kill_hint(self, rank: int) -> str:
        """Return what is known of a SIGKILL."""
        kills, self._oom_kills = self._oom_kills, oom_kills()
        why = (
            "The kernel's out-of-memory killer was at work"
            if self._oom_kills > kills
            else ("Likely out of memory, or somebody killed it")
        )
        rss = int(self.up[rank, Up.RSS])
        return f" {why}{f' (it held {rss >> 20} MiB at its last report)' if rss else ''}."

    # -- ending --------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill all workers."""
        for worker in self.by_rank:
            worker.process.kill()

    def tear_down(self) -> None:
        """Kill what still runs and release every descriptor. Never waits long; safe to repeat, in several threads."""
        with deferred():
            self.is_closed = True
            self.epoch.end()
            self.kill()
            for worker in self.by_rank:
                self._unwatch_worker(worker)
                worker.process.reap()
                worker.is_dead = True
            self._unwatch(self._wake_fd)
            self._release()
            self.down = self.up = np.empty((0, 0), np.int64)
            if self._control is not None:
                self._control.close()

    def abandon(self) -> None:
        """Close our copies of the descriptors in a forked child; the workers belong to the parent."""
        self.epoch.end()
        for worker in self.by_rank:
            worker.process.disown()
            worker.process.close()
        self._release()

    def _release(self) -> None:
        self._wake_fd = NONE
        self.eventfds = []


def _eventfd() -> Descriptor:
    return Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def stderr_tails(workers: Sequence[WorkerState], began: float) -> list[str]:
    """Return the last lines that workers wrote to stderr since the monotonic time ``began``, a text for each rank."""
    return [
        f"stderr of rank {worker.rank}: " + "\n  ".join(lines)
        for worker in workers
        if (lines := worker.process.stderr_since(began))
    ]


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck on this machine."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError as error:  # /proc is hidden: the signal alone has to do
        if is_from_handler(error):
            raise
        return 0
