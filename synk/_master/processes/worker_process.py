"""One worker process as the master holds it: start, doorbells, signals, death, output.

Owns every descriptor of that worker in the master. Knows nothing of functions, plans or calls.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from synk._master.processes.output import Output, Records
from synk._master.processes.program import command, startup_text, write_setup
from synk._wire.channel import Channel
from synk._wire.descriptors import NONE, Descriptor, packet_pair, pipe
from synk._wire.lifeline import Pulse
from synk._wire.memory import Segment
from synk._wire.messages import HAS_BODY, Body
from synk.errors import StartupError

_running: set[WorkerProcess] = set()
"""Those that are started and not closed.

They are held here, and not by their runtime alone, because of runtimes that are dropped without ``close()``: the
garbage collector ends the objects of a circle in any order. It might close descriptors first, and the runtime would
then send its signals to nobody, or to a process that has got the number.
"""


class WorkerProcess:
    """A worker's process, which holds nothing before :meth:`start`: it has an owner before it has something to lose.

    Parameters
    ----------
    rank : int

    Attributes
    ----------
    pid, pidfd : int
        -1 where there is none.
    started : float
        Monotonic time at which it was started.
    """

    is_inline: ClassVar[bool] = False
    channel: Channel

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = -1
        self.pidfd: int = NONE
        self.started = 0.0
        self.exit_text = ""
        self._popen: subprocess.Popen[bytes] | None = None
        self._outputs: list[Output | Records] = []
        self._lifeline: int = NONE
        self._stacks: int = NONE
        self._worker_down: int = NONE
        self._pulse: Pulse | None = None

    def start(
        self,
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        token: bytes,
        extra_fds: dict[str, int],
    ) -> None:
        """Start the process.

        Parameters
        ----------
        setup : dict
            What the first message carries beside the descriptors.
        environment : dict
        control_fd : int
            Descriptor of the control segment.
        token : bytes
        extra_fds : dict of str to int
            More descriptors for the worker, by the name under which it finds them.

        Raises
        ------
        StartupError
        """
        try:
            theirs = self._open(token)
            self._spawn(theirs, setup, environment, control_fd, token, extra_fds)
        except BaseException as error:
            theirs = {}
            traceback.clear_frames(error.__traceback__)  # they hold descriptors
            if self._popen is not None:  # it runs, and nobody else knows of it: it must not outlive this attempt
                self._popen.kill()
                self._popen.wait()
            self.close()
            if isinstance(error, OSError):
                raise StartupError(startup_text(f"worker rank {self.rank}", error)) from error
            raise

    def _open(self, token: bytes) -> dict[str, int]:
        """Open the connection, and return the worker's ends by name."""
        # The master keeps the worker's end of the down pipe open: ringing a dead worker must not raise SIGPIPE.
        self._worker_down, down_write = pipe()
        up_read, their_up = pipe()
        their_life, self._lifeline = pipe()
        self._pulse = Pulse()
        out_read, their_out = pipe()
        err_read, their_err = pipe()
        log_read, their_log = pipe()
        self._outputs = [
            Output(out_read, self.rank, "stdout"), Output(err_read, self.rank, "stderr"), Records(log_read, self.rank)
        ]  # fmt: skip
        self._stacks, their_stacks = pipe()
        os.set_blocking(self._stacks, False)
        sock, their_sock = packet_pair()
        self.channel = Channel(sock, up_read, down_write, token)
        return {
            "socket": their_sock,
            "down": self._worker_down,
            "up": their_up,
            "lifeline": their_life,
            "pulse": self._pulse.take(),
            "stdout": their_out,
            "stderr": their_err,
            "log": their_log,
            "stacks": their_stacks,
        }

    def _spawn(
        self,
        theirs: Mapping[str, int],
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        token: bytes,
        extra_fds: dict[str, int],
    ) -> None:
        fds = {"control": control_fd, **extra_fds, **theirs}
        stdout, stderr = fds.pop("stdout"), fds.pop("stderr")
        numbers = {name: int(fd) for name, fd in fds.items()}
        message = write_setup({**setup, "fds": numbers, "token": token.hex()})
        self.started = time.monotonic()
        _running.add(self)
        self._popen = subprocess.Popen(
            command(message, self.rank),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(message, *numbers.values()),
            start_new_session=True,
            env=environment,
        )
        self.pid = self._popen.pid
        self.pidfd = Descriptor(os.pidfd_open(self.pid))

    # -- life ---------------------------------------------------------------------------------------------------------

    def watched(self) -> list[tuple[int, str]]:
        """Return the descriptors that tell of it, each with what it tells."""
        outputs = [(output.fd, "output") for output in self._outputs if output.fd >= 0]
        return [(self.channel.read_fd, "up"), (self.pidfd, "death"), *outputs]

    def deliver(
        self,
        kind: int,
        flags: int,
        sequence: int,
        value: int,
        body: Body,
        segments: Sequence[Segment],
        note: Callable[[], None],
    ) -> int:
        """Send a message with its body; segments in arenas have no descriptor of their own."""
        data = pickle.dumps(body, protocol=5)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is found in the wait
            self.channel.send_body(sequence, data, [each.fd for each in segments if each.arena is None])
        self.channel.ring(kind, HAS_BODY | flags, sequence, value)
        note()
        return len(data)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def forward_output(self, fd: int) -> bool:
        """Pass on what the worker printed; return False where ``fd`` is at its end."""
        return all(output.forward() for output in self._outputs if output.fd == fd)

    def note_backlog(self) -> None:
        """Remember that what the worker has written so far is of earlier operations."""
        for output in self._outputs:
            output.note_backlog()

    def stderr_since(self, began: float) -> list[str]:
        """Return the last lines that the worker wrote to stderr since the monotonic time ``began``."""
        return self._outputs[1].since(began) if self._outputs else []

    def signal(self, number: int) -> None:
        """Send a signal to this very process, never to a stranger that got its pid."""
        pidfd = self.pidfd  # held, so that another thread cannot give the number away meanwhile
        if pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def stacks(self, timeout_s: float) -> str:
        """Return the Python stacks of the worker's threads, innermost frame first, or why there are none."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            return "the process is gone"
        if state in "TtZ":
            return "the process is stopped (SIGSTOP)" if state in "Tt" else "the process has ended"
        stacks = self._stacks
        if stacks < 0:
            return "the process is gone"
        self.signal(signal.SIGUSR2)
        poll = select.poll()
        poll.register(stacks, select.POLLIN)
        text = b""
        wait_ms = timeout_s * 1000
        while poll.poll(wait_ms):  # the dump has no end mark: it is over when nothing comes for a while
            data = os.read(stacks, 1 << 16)
            if not data:
                break
            text += data
            wait_ms = 50
        return text.decode("utf-8", "replace") or "it does not answer (it may still be starting)"

    def kill(self) -> None:
        """End the worker and what it started, at once."""
        self.signal(signal.SIGKILL)
        self._kill_group()

    def _kill_group(self) -> None:
        """Kill the worker's process group, if the group id is certainly still its own: while it is not reaped."""
        pidfd, popen = self.pidfd, self._popen
        if pidfd < 0 or popen is None or popen.returncode is not None:
            return
        try:
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises where it was reaped
            os.killpg(self.pid, signal.SIGKILL)
        except (ChildProcessError, ProcessLookupError, PermissionError):
            return

    def reap(self, timeout_s: float = 5.0) -> str:
        """Wait for the end of the process, release everything, and return how it ended (as ``"exit 3"``)."""
        popen = self._popen
        if popen is None:
            return self.exit_text
        deadline = time.monotonic() + timeout_s
        is_known = self._wait_exited(self.pidfd, deadline)
        self._kill_group()  # while the worker is a zombie: once it is reaped, its group's number may be a stranger's
        for output in self._outputs:
            # The group is dead, so the end of the stream is near; only a child in another session can hold it open.
            while output.forward() and time.monotonic() < deadline - timeout_s + 0.3:
                time.sleep(0.002)
        code: int | None = None
        try:
            code = popen.wait(timeout=max(deadline - time.monotonic(), 0.1)) if is_known else popen.poll()
        except subprocess.TimeoutExpired:
            popen.returncode = -signal.SIGKILL  # in the kernel's hands (uninterruptible); nothing more can be done
        self.exit_text = _exit_text(code, is_known)
        self.close()
        return self.exit_text

    def _wait_exited(self, pidfd: int, deadline: float) -> bool:
        """Wait until the process has ended; return False where somebody else took its exit code."""
        while True:
            try:
                if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    return True
            except ChildProcessError:
                return False
            if time.monotonic() > deadline:
                return True
            time.sleep(0.001)

    def disown(self) -> None:
        """In a forked child: the process is not ours to wait for."""
        if self._popen is not None:
            self._popen.returncode = 0

    def close(self) -> None:
        """Close every descriptor; closing the lifeline ends the process if it still runs. Safe to repeat."""
        _running.discard(self)
        self._lifeline = self._worker_down = self.pidfd = self._stacks = NONE
        if self._pulse is not None:
            self._pulse.close()
        for output in self._outputs:
            output.close()
        channel = getattr(self, "channel", None)
        if channel is not None:
            channel.close()
        self._popen = None


def _exit_text(code: int | None, is_known: bool) -> str:
    if not is_known or code is None:
        return "exit code unknown"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit {code}"
