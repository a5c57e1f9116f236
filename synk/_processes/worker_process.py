"""One worker process as the program holds it: start, signals, death, output.

It owns every descriptor of that worker in the program. It knows nothing of functions, plans or calls.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from synk._processes.output import Output, Records
from synk._processes.program import command, startup_text, write_setup
from synk._wire.lifeline import Pulse
from synk._wire.mapping import NONE, owned, packet_pair, pipe
from synk._wire.orders import Link
from synk.errors import StartupError

_REAP_S = 5.0
"""How long to wait for the end of a process that was killed."""

_running: set[WorkerProcess] = set()
"""The processes that were started and not closed.

This set holds them in addition to their runtime, because a runtime may be dropped without ``close()``. The garbage
collector ends the objects of a cycle in any order. It might close the descriptors first, and then the runtime's signals
would go to nobody, or to a process that got the same number.
"""


class WorkerProcess:
    """A worker's process. It holds nothing before :meth:`start`, so it has an owner before there is anything to lose.

    Parameters
    ----------
    rank : int

    Attributes
    ----------
    pid, pidfd : int
        -1 if there is no process.
    started : float
        Monotonic time of the start.
    """

    is_inline: ClassVar[bool] = False
    link: Link
    _module, _kind = "_rank.loop", "worker"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = -1
        self.pidfd: int = NONE
        self.started = 0.0
        self.exit_text = ""
        self._popen: subprocess.Popen[bytes] | None = None
        self._outputs: list[Output | Records] = []
        self._stderr: Output | None = None  # one of them: the only one that errors quote
        self._lifeline: int = NONE
        self._stacks: int = NONE
        self._worker_down: int = NONE
        self._pulse: Pulse | None = None

    def start(
        self,
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        extra_fds: dict[str, int],
    ) -> None:
        """Start the process.

        Parameters
        ----------
        setup : dict
            The content of the first message, without the descriptors.
        environment : dict
        control_fd : int
            Descriptor of the control segment.
        extra_fds : dict of str to int
            More descriptors for the worker, by their names in the first message.

        Raises
        ------
        StartupError
        """
        try:
            # ``theirs`` goes when this method returns, and with it the worker's ends of the pipes in this process. From
            # then on the kernel closes the pipes when the worker dies.
            theirs = self._open()
            self._spawn(theirs, setup, environment, control_fd, extra_fds)
        except BaseException as error:
            theirs = {}
            traceback.clear_frames(error.__traceback__)  # the frames hold descriptors
            # The process runs and nobody else knows of it, so it must not outlive this attempt.
            if self._popen is not None:
                self._popen.kill()
                self._popen.wait()
            self.close()
            if isinstance(error, OSError):
                raise StartupError(startup_text(self._title, error)) from error
            raise

    def _open(self) -> dict[str, int]:
        """Open the connection. Return the worker's ends by name."""
        # The program keeps the worker's end of the down pipe open: an order for a dead worker must not raise SIGPIPE.
        self._worker_down, down_write = pipe()
        up_read, their_up = pipe()
        their_life, self._lifeline = pipe()
        self._pulse = Pulse()
        out_read, their_out = pipe()
        err_read, their_err = pipe()
        log_read, their_log = pipe()
        stderr = Output(err_read, self._shown_rank, "stderr")
        self._outputs = [Output(out_read, self._shown_rank, "stdout"), stderr, Records(log_read, self._shown_rank)]
        self._stderr = stderr  # after the list, by which ``close`` finds it
        self._stacks, their_stacks = pipe()
        os.set_blocking(self._stacks, False)
        sock, their_sock = packet_pair()
        os.set_blocking(up_read, False)
        self.link = Link(sock, up_read, down_write)
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

    @property
    def _title(self) -> str:
        return f"worker rank {self.rank}"

    @property
    def _shown_rank(self) -> int | None:
        """The rank that is shown before each line that it prints."""
        return self.rank

    def _spawn(
        self,
        theirs: Mapping[str, int],
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        extra_fds: dict[str, int],
    ) -> None:
        fds = {"control": control_fd, **extra_fds, **theirs}
        stdout, stderr = fds.pop("stdout"), fds.pop("stderr")
        numbers = {name: int(fd) for name, fd in fds.items()}
        message = write_setup({**setup, "module": self._module, "fds": numbers})
        self.started = time.monotonic()
        _running.add(self)  # before the process exists, so that there is no moment in which nobody holds it
        self._popen = self._launch(message, [message, *numbers.values()], stdout, stderr, environment)
        self.pid = self._popen.pid
        (self.pidfd,) = owned(map(os.pidfd_open, [self.pid]))

    def _launch(
        self, message: int, fds: Sequence[int], stdout: int, stderr: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start the program that reads its first message from the descriptor ``message``."""
        return subprocess.Popen(
            command(message, self._module, f"synk-{self._kind}-{self.rank}"),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=fds,
            start_new_session=True,
            env=environment,
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    def watched(self) -> list[tuple[int, str]]:
        """Return the descriptors that report on the worker, each with what it reports."""
        outputs = [(output.fd, "output") for output in self._outputs if output.fd >= 0]
        return [(self.link.read_fd, "up"), (self.pidfd, "death"), *outputs]

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def forward_output(self, fd: int) -> bool:
        """Pass on what the worker printed. Return False if ``fd`` is at its end."""
        return all(output.forward() for output in self._outputs if output.fd == fd)

    def stderr_since(self, began: float) -> list[str]:
        """Return the last lines that the worker wrote to stderr since the monotonic time ``began``."""
        return [] if self._stderr is None else self._stderr.since(began)

    def signal(self, number: int) -> None:
        """Send a signal to this very process, never to a stranger that got the same pid."""
        pidfd = self.pidfd  # a reference, so that no other thread can close the number and have it reused
        if pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def stacks(self) -> str:
        """Return the Python stacks of the worker's threads, innermost frame first, or the reason why there are none."""
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
        wait_ms = 1000
        while poll.poll(wait_ms):  # the dump has no end mark: it is over when nothing comes for a while
            data = os.read(stacks, 1 << 16)
            if not data:
                break
            text += data
            wait_ms = 50
        return text.decode("utf-8", "replace") or "it does not answer (it may still be starting)"

    def kill(self) -> None:
        """Kill the worker and the processes that it started."""
        self.signal(signal.SIGKILL)
        self._kill_group()

    def _kill_group(self) -> None:
        """Kill the worker's process group while the group's number is surely its own: before the worker is reaped."""
        pidfd, popen = self.pidfd, self._popen
        if pidfd < 0 or popen is None or popen.returncode is not None:
            return
        try:
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if the worker was reaped
            os.killpg(self.pid, signal.SIGKILL)
        except (ChildProcessError, ProcessLookupError, PermissionError):
            return

    def reap(self) -> str:
        """Wait for the end of the process, release everything, and return how it ended (for instance ``"exit 3"``)."""
        popen = self._popen
        if popen is None or self.pidfd < 0:  # done before, or a signal handler broke it off in ``close``
            self.close()
            return self.exit_text
        began = time.monotonic()
        deadline = began + _REAP_S
        is_known = self._wait_exited(self.pidfd, deadline)
        # While the worker is a zombie: after it is reaped, the number of its group may belong to a stranger.
        self._kill_group()
        # The pipes still hold what the worker wrote before it died, and the error for its death quotes that.
        for output in self._outputs:
            # The group is dead, so the stream will end soon. Only a child in another session can hold it open.
            while output.forward() and time.monotonic() < began + 0.3:
                time.sleep(0.002)
        code: int | None = None
        try:
            code = popen.wait(timeout=max(deadline - time.monotonic(), 0.1)) if is_known else popen.poll()
        except subprocess.TimeoutExpired:
            # the kernel holds it (uninterruptible sleep), and nothing more can be done
            popen.returncode = -signal.SIGKILL
        self.exit_text = _exit_text(code, is_known)
        self.close()
        return self.exit_text

    def _wait_exited(self, pidfd: int, deadline: float) -> bool:
        """Wait until the process has ended. Return False if someone else took its exit code."""
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
        """In a forked child: forget the process, which belongs to the parent."""
        if self._popen is not None:
            self._popen.returncode = 0

    def close(self) -> None:
        """Close every descriptor, which ends the process if it still runs. Safe to call more than once."""
        _running.discard(self)
        self._lifeline = self._worker_down = self.pidfd = self._stacks = NONE
        if self._pulse is not None:
            self._pulse.close()
        for output in self._outputs:
            output.close()
        link = getattr(self, "link", None)
        if link is not None:
            link.close()
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
