"""Workers that are forked from a process which has imported what they need: for tests that are not about their start.

A worker is an interpreter of its own. It imports NumPy and synk (0.2 s of a core), with the first function that uses it
torch (1.1 s), and with the first optimizer more of torch (1 s). A *nursery* imports that once and forks the workers of
the test process (``nursery_process``). Each has what a worker that was started has: its parent, session, descriptors,
arguments, search path, folder and environment. The options of the interpreter, the seed of hashes, and the variables
that libraries read when they are imported are the nursery's.

Tests about how workers start have the mark ``own_start``. Their workers are started, as are all those of programs that
a test runs, of the storm, and with ``SYNK_TEST_NURSERY=0``.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.nursery_process import CLONE
from synk._master.processes.program import command
from synk._master.processes.worker_process import WorkerProcess
from synk._wire.cell import WORKER_ARGUMENT

_BOOT = """\
import sys
sys.path[:0] = {folders!r}
from support.nursery_process import serve
serve(int(sys.argv[2]), {modules!r})
"""
_TESTS = Path(__file__).resolve().parents[1]
_MODULES = (
    "synk._worker.loop.serve",
    "synk._worker.held.pickling",
    "synk._worker.comm.comm",
    "numpy.random",
    "cloudpickle",
)
_TORCH = ("torch._dynamo", "synk.torch")
_NUM_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1: a copy of a process has none of the threads that a library has started in it."""

_started = WorkerProcess._launch


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A child of this process that its nursery has made. Signals and waits are those of ``Popen``."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25


def is_possible() -> bool:
    """Whether workers can be forked: not without the number of a system call, or if the environment forbids it."""
    return os.uname().machine in CLONE and os.environ.get("SYNK_TEST_NURSERY") != "0"


class Nursery:
    """A process that forks workers. It imports nothing before it is first asked for one.

    Parameters
    ----------
    modules : sequence of str
        What its workers have imported.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        boot = _BOOT.format(folders=[str(_TESTS), str(_TESTS.parent)], modules=tuple(modules))
        started = command(theirs.fileno(), "", "nursery")
        started[started.index("-c") + 1] = boot
        with theirs:
            self._popen = subprocess.Popen(
                started,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **dict.fromkeys(_NUM_THREADS, "1")},
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_mine(self) -> bool:
        """Whether it forks for this process. It does not for a forked copy, whose children the workers would not be."""
        return self._owner == os.getpid()

    def fork(
        self,
        module: str,
        args: Sequence[str],
        fds: Sequence[int],
        streams: tuple[int, int],
        environment: Mapping[str, str],
    ) -> Forked:
        """Return a process that goes on in the ``main`` of a module, with these descriptors under the same numbers.

        ``streams`` become its standard output and standard error.
        """
        numbers = [int(fd) for fd in fds]
        message = json.dumps([module, list(args), numbers, dict(environment), os.getcwd()]).encode()
        rights = array.array("i", [*map(int, streams), *numbers])
        with self._lock:
            self._socket.sendmsg([len(message).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self._socket.sendall(message)
            pid = int.from_bytes(self._socket.recv(8, socket.MSG_WAITALL), "little")
        if not pid:
            raise RuntimeError("the nursery has ended")
        return Forked(pid, args)

    def close(self) -> None:
        """End it. Its workers live on."""
        self._socket.close()
        self._popen.wait()


class Nurseries:
    """Two nurseries, one without torch and one with it, from which all workers of this process come."""

    def __init__(self) -> None:
        self._by_torch = {False: Nursery(_MODULES), True: Nursery(_MODULES + _TORCH)}
        self._chosen: Nursery | None = None

        def launched(worker: WorkerProcess, message: int, fds: Sequence[int], *rest: object) -> object:
            return self._launch(worker, message, fds, *rest)

        WorkerProcess._launch = launched  # type: ignore[assignment, method-assign]

    @property
    def pids(self) -> set[int]:
        return {nursery.pid for nursery in self._by_torch.values()}

    def choose(self, has_torch: bool | None) -> None:
        """Have workers forked by one of the two from now on, or with ``None`` started."""
        self._chosen = None if has_torch is None else self._by_torch[has_torch]

    def _launch(
        self,
        worker: WorkerProcess,
        message: int,
        fds: Sequence[int],
        stdout: int,
        stderr: int,
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        nursery = self._chosen
        if nursery is None or not nursery.is_mine:
            return _started(worker, message, fds, stdout, stderr, environment)  # type: ignore[arg-type]
        args = [WORKER_ARGUMENT, str(int(message)), f"synk-{worker._kind}-{worker.rank}"]
        return nursery.fork(worker._module, args, fds, (stdout, stderr), environment)

    def close(self) -> None:
        """End both, and have workers started again."""
        WorkerProcess._launch = _started  # type: ignore[method-assign]
        for nursery in self._by_torch.values():
            nursery.close()
