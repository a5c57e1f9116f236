"""The worker processes and what the master watches of them: start, descriptors, printed lines, death, end.

Owns the processes and the poll set over their descriptors. Sends nothing and knows no message.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._environment import spin_s
from synk._inline import InlineProcess
from synk._interrupts import deferred
from synk._links import Link
from synk._memory import Segment
from synk._messages import Down, Phase, Up, control_blocks, control_nbytes
from synk._process import WorkerProcess, setup_message, startup_text
from synk.errors import StartupError, WorkerDied


class Crew:
    """The processes of one runtime, and the lower half of :class:`synk._team.Team`, which uses what begins with ``_``.

    Parameters
    ----------
    placement : Placement
    is_inline : bool
    failpoints : sequence
        Faults to arm, for tests.
    token : bytes

    Attributes
    ----------
    links : list of Link
        One per rank.
    down, up : ndarray of int64, shape (world_size, BLOCK_LENGTH)
        The numbers of lane 0 in shared memory; see ``synk._messages``.
    eventfds : list of int
        One per rank, inherited by all workers: how they wake one another.

    Raises
    ------
    StartupError
        If a process cannot be started; none is left then.
    """

    def __init__(self, placement: Any, *, is_inline: bool, failpoints: Sequence[Sequence[Any]], token: bytes) -> None:
        self.backend: str = placement.backend
        self.devices: tuple[str, ...] = placement.devices
        self.world_size = len(self.devices)
        self.is_inline = is_inline
        self.is_closed = False
        self.links: list[Link] = []
        self.eventfds: list[int] = []
        self._placement = placement
        self._token = token
        self._unreported_deaths: dict[int, str] = {}
        self._oom_kills = oom_kills()
        self._spin_s = spin_s()
        self._poll = select.poll()
        self._fds: dict[int, tuple[str, int]] = {}
        self._wake_fd = -1
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._control = Segment.create(control_nbytes(self.world_size))
            self.down, self.up = self.blocks(0)
            self.down[:, [Down.INTERRUPT, Down.COMMITTED]] = -1
            self._watch(self._wake_fd, "wake", -1)
            for _ in range(self.world_size):
                self.eventfds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            with deferred():
                for rank in range(self.world_size):
                    self.links.append(Link(rank, self._start(rank, failpoints)))
                    self._watch_link(self.links[rank])
        except OSError as error:
            self.tear_down()
            raise StartupError(startup_text("the runtime", error)) from error
        except BaseException:
            self.tear_down()
            raise

    def blocks(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers ``(down, up)`` of a lane."""
        return control_blocks(self._control.buffer, self.world_size, lane)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(self, rank: int, failpoints: Sequence[Sequence[Any]]) -> WorkerProcess | InlineProcess:
        device = self.devices[rank]
        if self.is_inline:
            return InlineProcess(rank, self.world_size, self.backend, device, self._control, self.eventfds, failpoints)
        setup = setup_message(self.world_size, self.backend, device, self._placement.cpus_of(rank), failpoints)
        setup |= {"control_nbytes": self._control.nbytes, "spin_s": self._spin_s}
        events = {f"event{peer}": fd for peer, fd in enumerate(self.eventfds)}
        return WorkerProcess(rank, setup, self._placement.environment(rank), self._control.fd, self._token, events)

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watch(self, fd: int, kind: str, rank: int) -> None:
        self._fds[fd] = (kind, rank)
        self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._fds.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _watch_link(self, link: Link) -> None:
        process = link.process
        if isinstance(process, WorkerProcess):
            self._watch(process.channel.read_fd, "up", link.rank)
            self._watch(process.pidfd, "death", link.rank)
            for fd in process.output_fds:
                self._watch(fd, "output", link.rank)

    def _unwatch_link(self, link: Link) -> None:
        for fd in [fd for fd, (_, rank) in self._fds.items() if rank == link.rank]:
            self._unwatch(fd)

    def _forward(self, link: Link, fd: int) -> None:
        if isinstance(link.process, WorkerProcess) and not link.process.forward_output(fd):
            self._unwatch(fd)

    @property
    def has_dead(self) -> bool:
        """Whether a worker died that was not started again yet."""
        for link in self.links:  # asked at each call: no generator  # noqa: SIM110
            if link.is_dead:
                return True
        return False

    def where(self) -> str:
        """Return what each rank is doing: phase, bytes published, Python stacks. For any thread, also during a call."""
        parts = []
        for link in self.links:
            if link.is_dead:
                parts.append(f"rank {link.rank}: ended with {link.process.exit_text}")
                continue
            if not link.is_ready:  # it has no handler yet: the signal would end it
                parts.append(f"rank {link.rank} (pid {link.process.pid}, {self.devices[link.rank]}): still starting")
                continue
            phase = Phase(int(self.up[link.rank, Up.PHASE])).name.lower() if len(self.up) else "closed"
            nbytes = int(self.up[link.rank, Up.OUTPUT_NBYTES]) if len(self.up) else 0
            stacks = link.process.stacks(1.0).strip().replace("\n", "\n    ")
            parts.append(
                f"rank {link.rank} (pid {link.process.pid}, {self.devices[link.rank]}): {phase}, {nbytes} bytes of "
                f"outputs published so far\n    {stacks}"
            )
        return "\n".join(parts)

    # -- deaths --------------------------------------------------------------------------------------------------------

    def _bury(self, link: Link) -> str:
        """Release a dead worker's descriptors and return how it ended."""
        process = link.process
        assert isinstance(process, WorkerProcess)
        with deferred():  # half a burial would leave a death that nobody sees, or descriptors that nobody closes
            link.is_dead = True
            self._unwatch_link(link)
            return process.reap()

    def _worker_died(self, ranks: list[int], phase: str, what: str, began: float) -> WorkerDied:
        """Return the error for ``ranks``, with what they wrote to stderr since the monotonic time ``began``."""
        links = [self.links[rank] for rank in ranks]
        exits = tuple(link.process.exit_text for link in links)
        ended = "; ".join(
            f"rank {link.rank} of {self.world_size} (pid {link.process.pid}, {self.devices[link.rank]}) "
            f"ended with {how}"
            for link, how in zip(links, exits)
        )
        hints = "".join(self._kill_hint(link.rank) for link, how in zip(links, exits) if how == "SIGKILL")
        tails = [
            f"stderr of rank {link.rank}: " + "\n  ".join(lines)
            for link in links
            if (lines := link.process.stderr_since(began))
        ]
        message = f"{ended} during {what or phase}.{hints} The next call starts dead workers again."
        if phase != "start":
            message += " What functions kept there, in closures or globals, is gone."
        return WorkerDied(
            "\n".join([message, *tails]),
            ranks=tuple(ranks),
            pids=tuple(link.process.pid for link in links),
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
        for link in self.links:
            link.process.kill()

    def tear_down(self) -> None:
        """Kill what still runs and release every descriptor. Never waits long; safe to repeat."""
        if self.is_closed:
            return
        self.is_closed = True
        alive = [link for link in self.links if not link.is_dead]
        for link in alive:
            link.process.kill()
        for link in alive:
            self._unwatch_link(link)
            link.process.reap()
            link.is_dead = True
        self._unwatch(self._wake_fd)
        for fd in (self._wake_fd, *self.eventfds):
            if fd >= 0:
                os.close(fd)
        self._wake_fd = -1
        self.eventfds = []
        self.down = self.up = np.empty((0, 0), np.int64)
        control = getattr(self, "_control", None)
        if control is not None:
            control.close()

    def abandon(self) -> None:
        """Close our copies of the descriptors in a forked child; the workers belong to the parent."""
        for link in self.links:
            link.process.disown()
            link.process.close()
        for fd in (self._wake_fd, *self.eventfds):
            if fd >= 0:
                os.close(fd)
        self._wake_fd = -1
        self.eventfds = []


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck on this machine."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:  # /proc is hidden: the signal alone has to do
        return 0
