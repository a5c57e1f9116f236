"""One worker process as the master holds it: start, doorbells, signals, death, output.

Owns every descriptor of that worker in the master. Knows nothing of functions, plans or calls.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np

import synk
from synk._channel import Channel
from synk.errors import StartupError

# The bootstrap may import nothing before the path is the master's: a pickle.py in the current directory must not run.
# Only absolute entries are used for our own imports; the worker sets the path exactly before it loads a function. The
# package's own file, which imports the master's half, is run at the first use of a public name: most functions use
# none, and it would double what a worker imports beside NumPy.
_BOOTSTRAP = """\
import sys
if sys.path and sys.path[0] == "": del sys.path[0]
import contextlib, importlib.util, json, socket
sock = socket.socket(fileno=int(sys.argv[1]))
setup = json.loads(sock.recv(1 << 17))
sys.path[:] = setup["import_path"]
spec = importlib.util.find_spec("synk")
package = importlib.util.module_from_spec(spec)
class Package(type(sys)):
    def __setattr__(self, name, value):  # an import would put the module where the package puts the verb
        if name not in ("data", "function", "shared"): super().__setattr__(name, value)
package.__class__ = Package
def complete(name):
    if name.startswith("_") and name != "__version__": raise AttributeError(name)
    from synk._cell import cell
    del package.__getattr__
    # An import that is broken off leaves files open.
    with cell.worker.uninterrupted() if cell.worker else contextlib.nullcontext():
        try:
            spec.loader.exec_module(package)
        except BaseException:
            package.__getattr__ = complete
            raise
    return getattr(package, name)
package.__getattr__ = complete
sys.modules["synk"] = package
from synk._serve import main
main(sock, setup)
"""

_STDERR_LINES = 20
_INT = struct.Struct("i")
_LINE_NBYTES = 1 << 16
_PIECE = 1024  # characters: at most 4096 bytes, which a pipe takes as a whole
_STALL_MS = 50


class _Output:
    """Text of one worker on its way to a stream of the master, line by line."""

    def __init__(self, fd: int, rank: int, stream_name: str) -> None:
        self.fd = fd
        self._prefix = f"[rank {rank}] "
        self._stream_name = stream_name
        self._rest = b""
        self._unwritten = ""
        self._backlog = 0  # bytes in the pipe that were written before the operation under way
        self._tail: deque[tuple[float, str]] = deque(maxlen=_STDERR_LINES)  # the last lines, and when they came
        os.set_blocking(fd, False)

    def forward(self, max_nbytes: int = 1 << 22) -> bool:
        """Pass on what is there, at most ``max_nbytes``; return False at the end of the stream."""
        while self.fd >= 0 and max_nbytes > 0:
            if self._unwritten and not self._flush():
                return True  # the master's own stream is full: the worker waits, as it would at a terminal
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                self._write([self._rest] if self._rest else [])
                self._rest = b""
                return False
            max_nbytes -= len(data)
            num_old = data.count(b"\n", 0, self._backlog)
            self._backlog = max(self._backlog - len(data), 0)
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LINE_NBYTES:
                lines.append(self._rest)
                self._rest = b""
            self._write(lines, num_old)
        return True

    def note_backlog(self) -> None:
        """Remember that what lies in the pipe is of earlier operations: the master's own stream is full."""
        if self.fd >= 0:
            (self._backlog,) = _INT.unpack(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(_INT.size)))

    def since(self, began: float) -> list[str]:
        """Return the last lines that were written since the monotonic time ``began``."""
        return [text for came, text in self._tail if came >= began]

    def _write(self, lines: list[bytes], num_old: int = 0) -> None:
        texts = [line.decode("utf-8", "backslashreplace") for line in lines]
        if not texts:
            return
        now = time.monotonic()
        self._tail.extend((now if k >= num_old else 0.0, text[:2000]) for k, text in enumerate(texts))
        self._unwritten += "".join(f"{self._prefix}{text}\n" for text in texts)
        self._flush()

    def _flush(self) -> bool:
        """Write what can be written without blocking for long; return False if something is left."""
        stream: TextIO | None = getattr(sys, self._stream_name)
        text, self._unwritten = self._unwritten, ""
        if stream is None:
            return True
        try:
            poll = select.poll()
            poll.register(stream.fileno(), select.POLLOUT)
        except (AttributeError, OSError, ValueError):  # a notebook's or a test's stream: never blocks
            poll = None
        try:
            while text:
                if poll is not None and not poll.poll(_STALL_MS):
                    self._unwritten = text
                    return False
                # A pipe that is ready takes this much without blocking.
                part, text = (text[:_PIECE], text[_PIECE:]) if poll is not None else (text, "")
                try:
                    stream.write(part)
                except UnicodeEncodeError:
                    stream.write(part.encode("ascii", "backslashreplace").decode("ascii"))
                stream.flush()
        except (OSError, ValueError):  # the master's own stream is closed: output has nowhere to go
            return True
        return True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class WorkerProcess:
    """A started worker.

    Parameters
    ----------
    rank : int
    setup : dict
        What the first message carries beside the descriptors; JSON, because nothing is unpickled before the path is
        set.
    environment : dict
    control_fd : int
        Descriptor of the control segment.
    extra_fds : dict of str to int
        More descriptors for the worker, by the name under which it finds them.
    """

    def __init__(
        self,
        rank: int,
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        token: bytes,
        extra_fds: dict[str, int],
    ) -> None:
        self.rank = rank
        self.pid = -1
        self.pidfd = -1
        self.is_ready = False
        self.exit_text = ""
        self._popen: subprocess.Popen[bytes] | None = None
        self._outputs: list[_Output] = []
        self._lifeline = -1
        self._stacks = -1
        self._worker_down = -1
        opened: list[int] = []
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    for _ in range(6):
                        opened += os.pipe()
                    self._start(rank, setup, environment, control_fd, token, extra_fds, opened, mine, theirs)
                except BaseException:
                    mine.close()
                    raise
        except OSError as error:
            raise StartupError(startup_text(f"worker rank {rank}", error)) from error
        finally:
            for fd in opened:
                os.close(fd)

    def _start(
        self,
        rank: int,
        setup: dict[str, Any],
        environment: dict[str, str],
        control_fd: int,
        token: bytes,
        extra_fds: dict[str, int],
        opened: list[int],
        mine: socket.socket,
        theirs: socket.socket,
    ) -> None:
        down_read, down_write, up_read, up_write, life_read, life_write, *others = opened
        out_read, out_write, err_read, err_write, stacks_read, stacks_write = others
        theirs_fds = {"down": down_read, "up": up_write, "lifeline": life_read, "control": control_fd}
        theirs_fds |= {"stacks": stacks_write, **extra_fds}
        message = {**setup, "rank": rank, "fds": theirs_fds, "token": token.hex()}
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        if sys.version_info >= (3, 11) and "-P" not in flags and "-I" not in flags:
            flags.append("-P")
        mine.send(json.dumps(message).encode("ascii"))
        popen = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOTSTRAP, str(theirs.fileno()), f"synk-worker-{rank}"],
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            pass_fds=(theirs.fileno(), *theirs_fds.values()),
            start_new_session=True,
            env=environment,
        )
        self._popen = popen
        self.pid = popen.pid
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except OSError:
            popen.kill()
            popen.wait()
            raise
        for fd in (up_write, life_read, out_write, err_write, stacks_write):
            os.close(fd)
        # The master keeps the worker's end of the down pipe open: ringing a dead worker must not raise SIGPIPE.
        self._worker_down = down_read
        self._lifeline = life_write
        self._stacks = stacks_read
        os.set_blocking(stacks_read, False)
        self._outputs = [_Output(out_read, rank, "stdout"), _Output(err_read, rank, "stderr")]
        self.channel = Channel(mine, up_read, down_write, token)
        opened.clear()

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def output_fds(self) -> list[int]:
        return [output.fd for output in self._outputs if output.fd >= 0]

    def forward_output(self, fd: int | None = None) -> bool:
        """Pass on what the worker printed; return False if ``fd`` is at its end."""
        is_open = True
        for output in self._outputs:
            if fd is None or output.fd == fd:
                is_open = output.forward() and is_open
        return is_open

    def note_backlog(self) -> None:
        """Remember that what the worker has written so far is of earlier operations."""
        for output in self._outputs:
            output.note_backlog()

    def stderr_since(self, began: float) -> list[str]:
        """Return the last lines that the worker wrote to stderr since the monotonic time ``began``."""
        return self._outputs[1].since(began) if self._outputs else []

    def signal(self, number: int) -> None:
        """Send a signal to this very process, never to a stranger that got its pid."""
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                return

    def stacks(self, timeout_s: float) -> str:
        """Return the Python stacks of the worker's threads, innermost frame first, or why there are none."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            return "the process is gone"
        if state in "TtZ":
            return "the process is stopped (SIGSTOP)" if state in "Tt" else "the process has ended"
        self.signal(signal.SIGUSR2)
        poll = select.poll()
        poll.register(self._stacks, select.POLLIN)
        text = b""
        wait_ms = timeout_s * 1000
        while poll.poll(wait_ms):  # the dump has no end mark: it is over when nothing comes for a while
            data = os.read(self._stacks, 1 << 16)
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
        if self.pidfd < 0 or self._popen is None or self._popen.returncode is not None:
            return
        try:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises where it was reaped
            os.killpg(self.pid, signal.SIGKILL)
        except (ChildProcessError, ProcessLookupError, PermissionError):
            return

    def reap(self, timeout_s: float = 5.0) -> str:
        """Wait for the end of the process, release everything, and return how it ended (as ``"exit 3"``)."""
        popen = self._popen
        if popen is None:
            return self.exit_text
        deadline = time.monotonic() + timeout_s
        is_known = self._wait_exited(deadline)
        self._kill_group()
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

    def _wait_exited(self, deadline: float) -> bool:
        """Wait until the process has ended; return False where somebody else took its exit code."""
        while True:
            try:
                if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
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
        """Close every descriptor; closing the lifeline ends the process if it still runs."""
        if self._popen is None:
            return
        for fd in (self._lifeline, self._worker_down, self.pidfd, self._stacks):
            if fd >= 0:
                os.close(fd)
        self._lifeline = self._worker_down = self.pidfd = self._stacks = -1
        for output in self._outputs:
            output.close()
        self.channel.close()
        self._popen = None


def setup_message(
    world_size: int, backend: str, device: str, cpus: Sequence[int], failpoints: Sequence[Any]
) -> dict[str, Any]:
    """Return what a worker must know before it can unpickle anything."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(synk.__file__)))
    absolute = [entry for entry in sys.path if os.path.isabs(entry)]
    return {
        "world_size": world_size,
        "backend": backend,
        "device": device,
        "cpus": list(cpus),
        "master_pid": os.getpid(),
        "sys_path": sys.path,
        "import_path": absolute if home in absolute else [*absolute, home],
        "argv": sys.argv,
        "failpoints": list(failpoints),
        "float_errors": np.geterr(),
    }


def _exit_text(code: int | None, is_known: bool) -> str:
    if not is_known or code is None:
        return "exit code unknown"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit {code}"


def startup_text(what: str, error: OSError) -> str:
    """Return the message for an operating system's refusal to start ``what``."""
    hints = {
        errno.EMFILE: "Raise the limit of open files (ulimit -n).",
        errno.ENFILE: "The system is out of file descriptors.",
        errno.EAGAIN: "Raise the limit of processes (ulimit -u).",
        errno.ENOMEM: "The system is out of memory.",
    }
    return f"cannot start {what}: {error}. {hints.get(error.errno or 0, '')}".rstrip()
