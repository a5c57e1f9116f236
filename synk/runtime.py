"""The runtime: starts workers, sends each call as one message to each rank, waits for replies and deaths, brings dead
workers back, and ends everything.

The path of a call in the master: ``Function.__call__`` -> ``Runtime.entered`` (one call at a time, dead ranks are
started again) -> ``calls.run_call`` (arguments, plan, numbers) -> ``Runtime.exchange`` -> ``Assembly`` -> the user.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import math
import os
import pickle
import secrets
import select
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from synk import _worker
from synk._channel import MAX_FDS, ProtocolError
from synk._failures import Failure, rebuild
from synk._inline import InlineProcess
from synk._interrupts import deferred, held_back
from synk._links import Link, Reply
from synk._memory import Segment
from synk._messages import Down, Extras, Kind, Status, Up, control_blocks, control_nbytes
from synk._process import WorkerProcess, cpu_environment, setup_message
from synk._results import ResultPool
from synk.data import Data
from synk.errors import (
    CallTimeout,
    ClosedError,
    NotForkedError,
    ReentrancyError,
    SerializationError,
    StartupError,
    SynkError,
    WorkerDied,
)

GRACE_S = 2.0
"""How long a worker may take to answer an interrupt before it is killed."""

RESTART_WINDOW_S = 60.0
START_TIMEOUT_S = 120.0
_SLOT_NBYTES = 1 << 19

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
        How many dead workers are started again within 60 s before the runtime closes.

    Attributes
    ----------
    world_size : int
    backend : str
    devices : tuple of str
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
        _failpoints: Sequence[Sequence[Any]] = (),
    ) -> None:
        _worker.refuse_inside_worker("fork")
        self._is_closed = True  # until everything below has worked
        self._pid = os.getpid()
        self.timeout = check_timeout(timeout)
        self._placements = choose_devices(num_workers, backend, devices, inline)
        self.backend = self._placements.backend
        self.devices: tuple[str, ...] = self._placements.devices
        self.world_size = len(self.devices)
        self.is_inline = inline
        self.max_restarts = max_restarts
        self.counters: dict[str, int] = dict.fromkeys(
            (
                "messages_down", "messages_up", "bytes_down", "bytes_up",
                "bytes_pickled", "bytes_staged", "calls", "restarts",
            ),
            0,
        )  # fmt: skip
        self._failpoints = _failpoints
        self._token = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._sequence = 0
        self._unsettled: list[int] = []
        self._unreported_deaths: dict[int, str] = {}
        self._cause: BaseException | None = None
        self._is_closing = False
        self._restarts: deque[float] = deque()
        self._released: deque[Segment] = deque()
        self._poll = select.poll()
        self._fds: dict[int, tuple[str, int]] = {}
        self._links: list[Link] = []
        self.segments: dict[int, Segment] = {}
        self._functions: dict[int, bytes] = {}
        self._dropped_functions: deque[int] = deque()
        self.last_numbers: Any = None
        self.results = ResultPool()
        self.staging: Segment | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._control = Segment.create(control_nbytes(self.world_size))
            self.down, self.up = control_blocks(self._control.buffer, self.world_size)
            self.down[:, Down.INTERRUPT] = -1
            self.exchange_segment = Segment.create(self.world_size * _SLOT_NBYTES, is_worker_writable=True)
            self.slot_nbytes = _SLOT_NBYTES
            self._watch(self._wake_fd, "wake", -1)
            with deferred():
                for rank in range(self.world_size):
                    self._links.append(Link(rank, self._start(rank, _failpoints)))
                    self._watch_link(self._links[rank])
        except BaseException:
            self._tear_down()
            raise
        self._is_closed = False
        _open_runtimes.add(self)

    # -- starting -----------------------------------------------------------------------------------------------------

    def _start(self, rank: int, failpoints: Sequence[Sequence[Any]]) -> WorkerProcess | InlineProcess:
        device = self.devices[rank]
        if self.is_inline:
            return InlineProcess(rank, self.world_size, self.backend, device, self._control, failpoints)
        setup = setup_message(self.world_size, self.backend, device, failpoints)
        setup["control_nbytes"] = self._control.nbytes
        environment = self._placements.environment(rank) or cpu_environment(self.world_size)
        return WorkerProcess(rank, setup, environment, self._control.fd, self._token, {})

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

    def _await_ready(self) -> None:
        """Wait until every started worker has said hello.

        Raises
        ------
        StartupError
            Naming the ranks that did not, with the end of their stderr. The runtime is closed then.
        """
        waiting = {link.rank for link in self._links if not link.is_ready}
        if not waiting:
            return
        try:
            replies = self._wait(waiting, None, time.monotonic() + START_TIMEOUT_S, "start")
            for rank, reply in replies.items():
                self._greet(self._links[rank], reply)
        except (WorkerDied, CallTimeout, ProtocolError, SerializationError) as error:
            died = getattr(error, "ranks", ()) or tuple(sorted(waiting))
            failure = StartupError(
                f"cannot start the workers: rank {', '.join(map(str, died))} of {self.world_size} did not come up. {error}"
            )
            self._fail(failure)
            raise failure from error
        except StartupError as error:
            self._fail(error)
            raise

    def _greet(self, link: Link, reply: Reply) -> None:
        hello = pickle.loads(reply.body)
        mine = own_versions()
        if hello["versions"] != mine:
            differing = [f"{k} {v} (master: {mine[k]})" for k, v in hello["versions"].items() if v != mine[k]]
            raise StartupError(f"cannot use worker rank {link.rank}: it runs {', '.join(differing)}.")
        link.description = hello["device"]
        link.is_ready = True

    # -- entering -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _check_open(self, verb: str) -> None:
        if self._is_closed or self._is_closing:
            raise ClosedError(f"cannot {verb}: the runtime is closed. Call synk.fork() again.") from self._cause
        if os.getpid() != self._pid:
            raise ReentrancyError(
                f"cannot {verb}: this process is a forked copy of the master, and the workers belong to the original."
            )

    @contextlib.contextmanager
    def entered(self, verb: str) -> Iterator[None]:
        """Hold the runtime for one operation, with all workers alive, or raise.

        Raises
        ------
        ReentrancyError
            Inside a worker, in a forked copy, or from a signal handler or finalizer during another operation.
        ClosedError, StartupError
        """
        _worker.refuse_inside_worker(verb)
        self._check_open(verb)
        me = threading.get_ident()
        if self._owner == me:
            raise ReentrancyError(
                f"cannot {verb} while this thread is in another call: got here from a signal handler or a finalizer."
            )
        with self._lock:
            self._owner = me
            try:
                self._check_open(verb)
                self._prepare()
                yield
            finally:
                self._owner = None

    def _prepare(self) -> None:
        """Bring the workers to a known state: settle what an interrupt left, free what was dropped, revive the dead."""
        if self._unsettled:
            self._settle()
        while self._released:
            self._forget_segment(self._released.popleft())
        while self._dropped_functions:
            self._functions.pop(self._dropped_functions.popleft(), None)
        if not self.is_inline:
            self._drain_events()
        if any(link.is_dead for link in self._links):
            self._revive()
        self._await_ready()

    def _drain_events(self) -> None:
        """Handle what happened while nobody waited: deaths, and lines printed by threads of workers."""
        for fd, _ in self._poll.poll(0):
            kind, rank = self._fds.get(fd, ("", -1))
            link = self._links[rank]
            if kind == "death":
                how = self._bury(link)
                self._unreported_deaths[rank] = how
            elif kind == "output" and isinstance(link.process, WorkerProcess):
                if not link.process.forward_output(fd):
                    self._unwatch(fd)
            elif kind == "wake":
                os.eventfd_read(fd)

    def _bury(self, link: Link) -> str:
        """Release a dead worker's descriptors and return how it ended."""
        process = link.process
        assert isinstance(process, WorkerProcess)
        self._unwatch_link(link)
        link.is_dead = True
        return process.reap()

    def _revive(self) -> None:
        """Start dead ranks again; they get their functions with the next load, segments and plans with the next call."""
        dead = [link for link in self._links if link.is_dead]
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        reports = [
            f"rank {rank} (pid {self._links[rank].process.pid}) ended with {how} while idle"
            for rank, how in sorted(self._unreported_deaths.items())
        ]
        self._unreported_deaths.clear()
        if len(self._restarts) >= self.max_restarts:
            ended = ", ".join(f"rank {link.rank} ({link.process.exit_text})" for link in dead)
            error = ClosedError(
                f"the runtime closed itself: workers died {len(self._restarts) + 1} times within "
                f"{RESTART_WINDOW_S:.0f} s, last {ended}; max_restarts is {self.max_restarts}. Call synk.fork() again."
            )
            cause = self._cause
            self._fail(error)
            raise error from cause
        self._restarts.append(now)
        lasting = [point for point in self._failpoints if point[2] == 0]
        with deferred():
            for link in dead:
                self.counters["restarts"] += 1
                link.restart(self._start(link.rank, lasting))
                self._watch_link(link)
        self._await_ready()
        if reports:
            warnings.warn(f"{'; '.join(reports)} and was started again.", RuntimeWarning, stacklevel=6)

    # -- exchanging ---------------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        self._sequence = (self._sequence + 1) & 0xFFFF
        return self._sequence

    def exchange(
        self,
        kind: Kind,
        ranks: Sequence[int],
        value: int,
        contents: dict[int, Any],
        segments: Iterable[Segment],
        deadline: float | None,
        phase: str,
        what: str,
    ) -> dict[int, Reply]:
        """Send one message to each of ``ranks`` and return their replies.

        Parameters
        ----------
        contents : dict
            Body of the message for the ranks that need one.
        segments : iterable of Segment
            What the message refers to; ranks that do not hold one yet get it with the message.
        deadline : float or None
            Monotonic time at which the exchange ends with ``CallTimeout``.
        phase, what : str
            For errors.

        Raises
        ------
        WorkerDied, CallTimeout, ClosedError, KeyboardInterrupt
            The workers that are alive then are idle again.
        """
        needed = list(segments)
        sequence = self.next_sequence()
        self._unsettled = list(ranks)
        try:
            for rank in ranks:
                self._send(self._links[rank], kind, sequence, value, contents.get(rank), needed)
            replies = self._wait(set(ranks), sequence, deadline, phase, what)
        except WorkerDied:
            self._unsettled = []
            raise
        except BaseException:
            if self._unsettled and not self._is_closed:
                self._settle()
            raise
        self._unsettled = []
        return replies

    def _send(
        self, link: Link, kind: Kind, sequence: int, value: int, content: Any, needed: Sequence[Segment]
    ) -> None:
        extras, missing = link.extras(content, needed, self.exchange_segment, self.slot_nbytes)
        process = link.process
        self.counters["messages_down"] += 1
        self.counters["bytes_down"] += 8
        if isinstance(process, InlineProcess):
            for segment in missing:
                process.give(segment)
            link.note_sent(extras, missing)
            process.handle(kind, sequence, value, extras)
            return
        has_body = 0
        if extras is not None:
            if len(missing) > MAX_FDS:
                missing = self._send_segments(link, missing)
                extras.segments = link.describe(missing)
            body = pickle.dumps(extras, protocol=5)
            self.counters["bytes_down"] += len(body)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is found in the wait
                process.channel.send_body(sequence, body, [segment.fd for segment in missing])
            has_body = 1
        process.channel.ring(kind, has_body, sequence, value)
        link.note_sent(extras, missing)

    def _send_segments(self, link: Link, missing: list[Segment]) -> list[Segment]:
        """Send more descriptors than one message can carry, a message at a time; return the rest."""
        process = link.process
        assert isinstance(process, WorkerProcess)
        while len(missing) > MAX_FDS:
            part, missing = missing[:MAX_FDS], missing[MAX_FDS:]
            sequence = self._sequence - 1  # answered before the message itself is sent
            extras = Extras(segments=link.describe(part))
            process.channel.send_body(sequence, pickle.dumps(extras, protocol=5), [segment.fd for segment in part])
            process.channel.ring(Kind.PING, 1, sequence, 0)
            self._wait({link.rank}, sequence, time.monotonic() + GRACE_S, "send")
            link.note_sent(extras, part)
        return missing

    def _wait(
        self, pending: set[int], sequence: int | None, deadline: float | None, phase: str, what: str = ""
    ) -> dict[int, Reply]:
        """Collect one reply from each pending rank; a death or the deadline ends the wait with an error.

        Replies are taken before deaths: a worker that answered and then died has answered.
        """
        replies: dict[int, Reply] = {}
        dead: list[int] = []
        if self.is_inline:
            process = self._links[0].process
            assert isinstance(process, InlineProcess)
            self.counters["messages_up"] += 1
            self.counters["bytes_up"] += 8
            return {0: process.reply()}
        while pending:
            timeout_ms = None
            if deadline is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._on_timeout(pending, phase, what)
                timeout_ms = math.ceil(remaining * 1000)
            # What a function printed lies in its pipe before the doorbell rings, so one poll reports both, and the
            # lines are shown before the call returns.
            for fd, _ in self._poll.poll(timeout_ms):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "up":
                    reply = self._read_reply(self._links[rank], sequence)
                    if reply is not None and rank in pending:
                        replies[rank] = reply
                        pending.discard(rank)
                elif kind == "death":
                    dead.append(rank)
                elif kind == "output":
                    self._forward(self._links[rank], fd)
                elif kind == "wake":
                    self._on_wake(fd)
            if dead:
                self._on_deaths(dead, pending, replies, sequence, phase, what)
                dead = []
        return replies

    def _forward(self, link: Link, fd: int) -> None:
        if isinstance(link.process, WorkerProcess) and not link.process.forward_output(fd):
            self._unwatch(fd)

    def _on_wake(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
        if self._is_closing:
            raise ClosedError("the call was ended: the runtime is being closed by another thread.")

    def _read_reply(self, link: Link, sequence: int | None) -> Reply | None:
        """Read one doorbell and its body; None for the answer to an earlier message."""
        process = link.process
        assert isinstance(process, WorkerProcess)
        message = process.channel.answer()
        if message is None:
            self._unwatch(process.channel.read_fd)  # its end is closed; the pidfd tells of the death
            return None
        status, flags, got_sequence, _ = message
        self.counters["messages_up"] += 1
        self.counters["bytes_up"] += 8
        if sequence is not None and got_sequence != sequence:
            return None
        body = b""
        fds: list[int] = []
        if flags & 1:
            try:
                body, fds = process.channel.receive_body(got_sequence)
            except (ProtocolError, EOFError, ConnectionResetError):
                process.kill()  # what it sends is not what our worker sends
                return None
            self.counters["bytes_up"] += len(body)
        for fd in fds:
            os.close(fd)
        return Reply(Status(status), flags, body)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _on_deaths(
        self,
        dead: list[int],
        pending: set[int],
        replies: dict[int, Reply],
        sequence: int | None,
        phase: str,
        what: str,
    ) -> None:
        """Take late replies of dead ranks; raise WorkerDied if one of them still owed a reply."""
        for rank in dead:
            link = self._links[rank]
            process = link.process
            assert isinstance(process, WorkerProcess)
            os.set_blocking(process.channel.read_fd, False)
            while rank in pending:
                try:
                    reply = self._read_reply(link, sequence)
                except BlockingIOError:
                    break
                if reply is not None:
                    replies[rank] = reply
                    pending.discard(rank)
                elif process.channel.read_fd not in self._fds:
                    break
        owing = [rank for rank in dead if rank in pending]
        for rank in dead:
            how = self._bury(self._links[rank])
            if rank not in owing:
                self._unreported_deaths[rank] = how
        if not owing:
            return
        survivors = pending - set(owing)
        self._end_calls(survivors, kill_at=time.monotonic() + GRACE_S)
        fallen = sorted(set(owing) | {rank for rank in survivors if self._links[rank].is_dead})
        error = self._worker_died(fallen, phase, what)
        self._cause = copy.copy(error)  # without the traceback that will hold the caller's frames
        raise error

    def _worker_died(self, ranks: list[int], phase: str, what: str) -> WorkerDied:
        links = [self._links[rank] for rank in ranks]
        exits = tuple(link.process.exit_text for link in links)
        parts = []
        for link, how in zip(links, exits):
            text = (
                f"rank {link.rank} of {self.world_size} (pid {link.process.pid}, {self.devices[link.rank]}) "
                f"ended with {how}"
            )
            if how == "SIGKILL":
                text += f". Likely the system's memory limit, or somebody killed it{self._rss_text(link.rank)}"
            parts.append(text)
        tails = [f"stderr of rank {link.rank}: " + "\n  ".join(link.process.stderr_tail) for link in links
                 if link.process.stderr_tail]  # fmt: skip
        during = f" during {what}" if what else f" during {phase}"
        message = f"{'; '.join(parts)}{during}. The next call starts dead workers again."
        return WorkerDied(
            "\n".join([message, *tails]),
            ranks=tuple(ranks),
            pids=tuple(link.process.pid for link in links),
            exits=exits,
            phase=phase,
        )

    def _rss_text(self, rank: int) -> str:
        rss = int(self.up[rank, Up.RSS])
        return f" (it held {rss >> 20} MiB at its last report)" if rss else ""

    def _on_timeout(self, pending: set[int], phase: str, what: str) -> None:
        ranks = sorted(pending)
        self._settle()
        raise CallTimeout(
            f"{what or phase} did not end in time on rank {', '.join(map(str, ranks))} of {self.world_size}. "
            "Raise timeout=, or give the function less to do."
        )

    def _end_calls(self, ranks: Iterable[int], kill_at: float) -> None:
        """Have ``ranks`` give up what they run: SIGINT, then a ping whose answer proves them idle, then SIGKILL."""
        ranks = [rank for rank in ranks if not self._links[rank].is_dead]
        if not ranks:
            return
        running = self._sequence
        for rank in ranks:
            self.down[rank, Down.INTERRUPT] = running
            process = self._links[rank].process
            assert isinstance(process, WorkerProcess)
            process.signal(signal.SIGINT)
        ping = self.next_sequence()
        for rank in ranks:
            process = self._links[rank].process
            assert isinstance(process, WorkerProcess)
            process.channel.ring(Kind.PING, 0, ping, 0)
        silent = set(ranks)
        while silent and time.monotonic() < kill_at:
            for fd, _ in self._poll.poll(max(1, math.ceil((kill_at - time.monotonic()) * 1000))):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "up":
                    reply = self._read_reply(self._links[rank], ping)
                    if reply is not None:
                        silent.discard(rank)
                elif kind == "death":
                    self._bury(self._links[rank])
                    silent.discard(rank)
                elif kind == "output":
                    self._forward(self._links[rank], fd)
                elif kind == "wake":
                    os.eventfd_read(fd)
        for rank in silent:
            process = self._links[rank].process
            assert isinstance(process, WorkerProcess)
            process.kill()
            self._bury(self._links[rank])
        for rank in ranks:
            self.down[rank, Down.INTERRUPT] = -1

    def _settle(self) -> None:
        """After an exception in the middle of an exchange: every rank idle again, or dead."""
        ranks = list(self._unsettled)
        if self.is_inline:
            self._unsettled = []
            return
        kill_at = [time.monotonic() + GRACE_S]
        is_second = False

        def on_interrupt(count: int) -> None:
            nonlocal is_second
            is_second = True
            kill_at[0] = 0.0
            for rank in ranks:
                process = self._links[rank].process
                if isinstance(process, WorkerProcess):
                    process.signal(signal.SIGKILL)

        with held_back(on_interrupt):
            self._end_calls(ranks, kill_at[0])
            self._unsettled = []
            if is_second:
                self._fail(ClosedError("the runtime was closed by a second Ctrl-C while it ended a call."))
        if is_second:
            raise KeyboardInterrupt

    def _fail(self, error: BaseException) -> None:
        """Close at once, because of ``error``."""
        self._cause = self._cause or error
        self._tear_down()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _release(self, segment: Segment) -> None:
        """Free a segment now if nothing is running, else when the operation that may use it has ended."""
        if self._owner is None and self._lock.acquire(blocking=False):
            try:
                self._forget_segment(segment)
            finally:
                self._lock.release()
        else:
            self._released.append(segment)

    def _forget_segment(self, segment: Segment) -> None:
        self.segments.pop(segment.id, None)
        for link in self._links:
            link.drop_segment(segment.id)
        segment.discard()

    def reserve_staging(self, nbytes: int) -> Segment:
        """Return the staging segment, grown to at least ``nbytes`` bytes."""
        if self.staging is None or self.staging.nbytes < nbytes:
            larger = Segment.create(max(int(nbytes * 1.25), 1 << 16))
            if self.staging is not None:
                self._forget_segment(self.staging)
            self.staging = larger
        return self.staging

    def grow_exchange(self, slot_nbytes: int) -> None:
        """Make room for ``slot_nbytes`` bytes of outputs per rank."""
        slot_nbytes = -(-slot_nbytes // 4096) * 4096
        larger = Segment.create(self.world_size * slot_nbytes, is_worker_writable=True)
        self._forget_segment(self.exchange_segment)
        self.exchange_segment, self.slot_nbytes = larger, slot_nbytes

    def lease_result(self, nbytes: int) -> tuple[Segment, np.ndarray]:
        """Lease a buffer for large results."""
        segment, root, dropped = self.results.take(nbytes)
        for old in dropped:
            self._forget_segment(old)
        return segment, root

    # -- functions ----------------------------------------------------------------------------------------------------

    def load(self, data: bytes, function_ids: Sequence[int], names: str) -> None:
        """Send pickled functions to all workers, and remember them for workers that are started later.

        Raises
        ------
        SerializationError
            If they cannot be loaded; they are then on no rank.
        """
        for function_id in function_ids:
            self._functions[function_id] = data
        try:
            self._load_missing(names)
        except BaseException:
            for function_id in function_ids:
                self._functions.pop(function_id, None)
                for link in self._links:
                    link.functions.discard(function_id)
            raise

    def ensure_loaded(self) -> None:
        """Send each worker the functions that it misses: all of them after it was started again."""
        if any(not self._functions.keys() <= link.functions for link in self._links):
            self._load_missing("functions")

    def _load_missing(self, names: str) -> None:
        while True:
            batches: dict[int, bytes] = {}
            for link in self._links:
                missing = [fid for fid in self._functions if fid not in link.functions]
                if missing:
                    batches[link.rank] = self._functions[missing[0]]
            if not batches:
                return
            replies = self.exchange(
                Kind.LOAD, list(batches), 0, batches, self.shared_segments(), self._deadline(None), "distribute", names
            )
            failures = [pickle.loads(reply.body) for reply in replies.values() if reply.status == Status.ERROR]
            if failures:
                error = rebuild(failures, self.world_size, names)
                raise SerializationError(
                    f"cannot load {names} on the workers: {failures[0].type_name}: {failures[0].message}. "
                    "What a function needs must be importable there, or defined in the script itself."
                ) from error
            if any(reply.status == Status.INTERRUPTED for reply in replies.values()):
                raise SerializationError(f"loading {names} was interrupted.")
            for rank, data in batches.items():
                self._links[rank].functions.update(fid for fid, blob in self._functions.items() if blob is data)

    def link(self, rank: int) -> Link:
        """What is known of one rank."""
        return self._links[rank]

    def drop_plan(self, plan_id: int) -> None:
        """Have the workers forget a plan with their next message."""
        for link in self._links:
            link.drop_plan(plan_id)

    def shared_segments(self) -> list[Segment]:
        """Segments that every worker must hold before it loads functions."""
        return []

    def _deadline(self, timeout: float | None) -> float | None:
        timeout = self.timeout if timeout is None else timeout
        return None if timeout is None else time.monotonic() + timeout

    # -- verbs --------------------------------------------------------------------------------------------------------

    def data(self, value: Any = None, **options: Any) -> Data:
        """Make a :class:`synk.Data` of this runtime; see :func:`synk.data`."""
        _worker.refuse_inside_worker("make Data")
        self._check_open("make Data")
        return Data(self, value, **options)

    def function(self, fn: Any = None, **options: Any) -> Any:
        """Build a :class:`synk.Function` bound to this runtime; see :func:`synk.function`."""
        from synk.function import build_function

        self._check_open("build a function")
        return build_function(fn, options, self)

    def distribute(self) -> None:
        """Send all functions that are not yet on the workers; see :func:`synk.distribute`."""
        from synk.function import distribute_functions

        with self.entered("distribute"):
            distribute_functions(self)

    def info(self) -> str:
        """Return a description of the runtime, one line per rank."""
        lines = [f"runtime: {self.world_size} x {self.backend}{' inline' if self.is_inline else ''}"]
        if self._is_closed:
            return f"{lines[0]}, closed"
        with self.entered("describe the workers"):
            for link in self._links:
                lines.append(f"  rank {link.rank}: {self.devices[link.rank]}, pid {link.process.pid}, {link.description}")
        return "\n".join(lines)

    # -- ending -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and release everything; safe to repeat, bounded in time.

        A call that runs in another thread is ended with ``ClosedError`` there.
        """
        if os.getpid() != self._pid or self._is_closed:
            return
        _worker.refuse_inside_worker("close")
        if self._owner == threading.get_ident():
            raise ReentrancyError("cannot close the runtime while this thread is in a call.")
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        got_lock = self._lock.acquire(timeout=GRACE_S + 1)
        if not got_lock:
            for link in self._links:
                link.process.kill()
            got_lock = self._lock.acquire(timeout=GRACE_S + 1)
        try:
            with held_back(lambda count: [link.process.kill() for link in self._links] and None):
                self._say_goodbye()
                self._tear_down()
        finally:
            if got_lock:
                self._lock.release()

    def _say_goodbye(self) -> None:
        """Ask idle workers to end; the teardown kills whoever does not."""
        if self._is_closed or self.is_inline or self._unsettled:
            return
        sequence = self.next_sequence()
        waiting = set()
        for link in self._links:
            if link.is_ready and not link.is_dead and isinstance(link.process, WorkerProcess):
                link.process.channel.ring(Kind.CLOSE, 0, sequence, 0)
                waiting.add(link.rank)
        deadline = time.monotonic() + GRACE_S
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(math.ceil(remaining * 1000)):
                kind, rank = self._fds.get(fd, ("", -1))
                if kind == "death":
                    self._bury(self._links[rank])
                    waiting.discard(rank)
                elif kind == "output":
                    self._forward(self._links[rank], fd)
                elif kind == "up":
                    self._read_reply(self._links[rank], sequence)  # the bye; the death follows
                elif kind == "wake":
                    os.eventfd_read(fd)

    def _tear_down(self) -> None:
        """Kill what still runs and release every descriptor and segment. Never waits long."""
        if self._wake_fd < 0:
            return
        alive = [link for link in self._links if not link.is_dead]
        for link in alive:
            link.process.kill()
        for link in alive:
            self._unwatch_link(link)
            link.process.reap()
            link.is_dead = True
        self._is_closed = True
        self._unwatch(self._wake_fd)
        os.close(self._wake_fd)
        self._wake_fd = -1
        for name in ("_control", "exchange_segment", "staging"):
            segment = getattr(self, name, None)
            if segment is not None:
                segment.close()
        while self._released:
            self._released.popleft().close()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self.results.close()
        _open_runtimes.discard(self)
        forget_current(self)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_wake_fd", -1) < 0 or os.getpid() != self._pid:
            return
        if not self._is_closed and not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, source=self)
        self._tear_down()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "inline" if self.is_inline else "open"
        return f"<synk.Runtime {self.world_size} x {self.backend}, {state}>"


# -- the current runtime ----------------------------------------------------------------------------------------------


class _Current:
    """The one process-wide cell: which runtime the module-level verbs work on."""

    runtime: Runtime | None = None
    last: Runtime | None = None


_cell = _Current()


def set_current(runtime: Runtime) -> None:
    """Make ``runtime`` the one that module-level verbs use."""
    _cell.runtime = _cell.last = runtime


def forget_current(runtime: Runtime) -> None:
    if _cell.runtime is runtime:
        _cell.runtime = None


def has_current() -> bool:
    """Whether there is an open current runtime."""
    return _cell.runtime is not None


def current() -> Runtime:
    """Return the runtime that ``synk.fork()`` made.

    Raises
    ------
    NotForkedError
        If there is none.
    ClosedError
        If it was closed.
    """
    _worker.refuse_inside_worker("use the runtime")
    if _cell.runtime is None:
        if _cell.last is not None:
            raise ClosedError("the runtime is closed. Call synk.fork() again.") from _cell.last._cause
        raise NotForkedError("there is no runtime yet. Call synk.fork() first.")
    return _cell.runtime


def fork(
    num_workers: int | None = None,
    *,
    backend: str = "auto",
    devices: Sequence[Any] | None = None,
    inline: bool = False,
    timeout: float | None = None,
    max_restarts: int = 3,
    _failpoints: Sequence[Sequence[Any]] = (),
) -> Runtime:
    """Start one worker process per device and make their runtime the current one.

    Returns at once: the workers come up while the program goes on, and the first verb that needs them waits.

    Parameters
    ----------
    num_workers : int or None
        None: one per visible GPU, else one per usable CPU core.
    backend : str
        ``"auto"`` (cupy where a GPU is visible and CuPy is installed, else numpy), ``"numpy"`` or ``"cupy"``.
    devices : sequence or None
        Which GPUs, by index or UUID; one may appear more than once.
    inline : bool
        Run the one rank in this process, on the same path, for a debugger.
    timeout : float or None
        Default for all calls, in seconds; None: no limit.
    max_restarts : int
        How many dead workers are started again within 60 s before the runtime closes.

    Returns
    -------
    Runtime

    Raises
    ------
    SynkError
        If a runtime made by ``fork`` is still running.
    StartupError
        If a worker process cannot be started.
    ValueError, TypeError
        For arguments that make no sense.

    Examples
    --------
    >>> import synk
    >>> runtime = synk.fork(2)
    >>> runtime.world_size
    2
    >>> synk.close()
    """
    _worker.refuse_inside_worker("fork")
    if _cell.runtime is not None and _cell.runtime._pid == os.getpid():
        raise SynkError(
            f"cannot fork: {_cell.runtime!r} is already running. Call synk.close() first, or make a second one with "
            "synk.Runtime(...)."
        )
    runtime = Runtime(
        num_workers,
        backend=backend,
        devices=devices,
        inline=inline,
        timeout=timeout,
        max_restarts=max_restarts,
        _failpoints=_failpoints,
    )
    set_current(runtime)
    return runtime


def close() -> None:
    """Close the current runtime, if there is one. Data, functions and variables of it raise ``ClosedError`` from then."""
    if _cell.runtime is not None:
        _cell.runtime.close()


def check_timeout(timeout: float | None) -> float | None:
    """Return ``timeout`` if it is None or a positive number of seconds."""
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"cannot set a timeout: got {timeout!r}, expected seconds above 0, or None.")
    return timeout


def own_versions() -> dict[str, str]:
    """Versions that master and workers must share."""
    import platform

    import synk

    return {"python": platform.python_version(), "numpy": np.__version__, "synk": synk.__version__}


def choose_devices(num_workers: int | None, backend: str, devices: Sequence[Any] | None, inline: bool) -> Any:
    """Return the placement of the ranks; see ``synk._placement``."""
    from synk._placement import place

    return place(num_workers, backend, devices, inline)


def _close_all() -> None:
    for runtime in list(_open_runtimes):
        with contextlib.suppress(SynkError):
            runtime.close()


def _in_forked_child() -> None:
    """A child made by os.fork must not hold descriptors that tell workers whether the master lives."""
    for runtime in list(_open_runtimes):
        for link in runtime._links:
            link.process.close()
        os.close(runtime._wake_fd)
        runtime._wake_fd = -1


atexit.register(_close_all)
os.register_at_fork(after_in_child=_in_forked_child)

__all__ = ["Failure", "Runtime", "close", "current", "fork", "has_current"]
