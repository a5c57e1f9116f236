"""Workers that are forked from a process which has imported what they need: for tests that are not about their start.

A worker is an interpreter of its own. It imports NumPy and synk (0.2 s of a core), with the first function that uses it
torch (1.1 s), and with the first optimizer more of torch (1 s). A *nursery* imports that once and forks the workers of
the test process (``nursery_process``). Each has what a worker that was started has: its parent, session, descriptors,
arguments, search path, folder and environment. The options of the interpreter, the seed of hashes, and the variables
that libraries read when they are imported are the nursery's. The agents of nodes are forked, too, and their workers by
a nursery that each agent has for itself; these workers have imported the master's half, which the agent needs. The
program of a scenario is started, and forks a nursery for its workers once it has imported NumPy.

Tests about how workers start have the mark ``own_start``. Their workers are started, as are those of the storm, of
other programs than scenarios, and with ``SYNK_TEST_NURSERY=0``.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from support.nursery_process import AGENT, CLONE, WORKER_MODULES
from synk._processes.program import command
from synk._processes.worker_process import WorkerProcess
from synk._wire.cell import WORKER_ARGUMENT

_BOOT = """\
import sys
sys.path[:0] = {folders!r}
from support.nursery_process import serve
serve(int(sys.argv[2]), {modules!r})
"""
_TESTS = Path(__file__).resolve().parents[1]
_MODULES = (
    *WORKER_MODULES,
    "pytest",  # a function of a module of tests has its workers import the module: a fifth of a second
    "hypothesis",
    "support.harness",
)
_TORCH = ("torch._dynamo", "synk.torch") if find_spec("torch") else ()
_NODES = (f"synk.{AGENT}", "support.nursery", "synk._rank.nodes", "synk.communicators._wires")
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
    """A process that forks workers for this one.

    Parameters
    ----------
    connection : socket.socket
        To its ``serve``.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._socket = connection

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


class StartedNursery(Nursery):
    """A nursery that was started as a child of this process. It imports nothing before it is first asked for a worker.

    Parameters
    ----------
    modules : sequence of str
        What its workers have imported.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        super().__init__(ours)
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

    def close(self) -> None:
        super().close()
        self._popen.wait()


Choice = Callable[[WorkerProcess], "Nursery | None"]


def choose_by(choice: Choice) -> None:
    """From now on have each worker forked by the nursery that ``choice`` returns for it, or with ``None`` started."""

    def launch(
        worker: WorkerProcess,
        message: int,
        fds: Sequence[int],
        stdout: int,
        stderr: int,
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        nursery = choice(worker)
        if nursery is None or not nursery.is_mine:
            return _started(worker, message, fds, stdout, stderr, environment)  # type: ignore[arg-type]
        args = [WORKER_ARGUMENT, str(int(message)), f"synk-{worker._kind}-{worker.rank}"]
        return nursery.fork(worker._module, args, fds, (stdout, stderr), environment)

    WorkerProcess._launch = launch  # type: ignore[assignment, method-assign]


class Nurseries:
    """Where all workers of this process come from: a nursery without torch and one with it, and two for agents."""

    current: ClassVar[Nurseries | None] = None

    def __init__(self) -> None:
        self._has_torch: bool | None = None
        Nurseries.current = self
        self._nurseries = {
            (is_agent, has_torch): StartedNursery(_MODULES + _NODES * is_agent + _TORCH * has_torch)
            for is_agent in (False, True)
            for has_torch in (False, True)
        }
        choose_by(self._of)

    @property
    def pids(self) -> set[int]:
        return {nursery.pid for nursery in self._nurseries.values()}

    def choose(self, has_torch: bool | None) -> None:
        """From now on have workers forked that have imported torch or not, or with ``None`` have them started."""
        self._has_torch = has_torch

    def fork(self, module: str, args: Sequence[str], fds: Sequence[int]) -> Forked | None:
        """Return a process in the ``main`` of a module of ``support``, or ``None`` where workers are to be started."""
        if self._has_torch is None:
            return None
        return self._nurseries[False, False].fork(module, args, fds, (1, 2), os.environ)

    def _of(self, worker: WorkerProcess) -> Nursery | None:
        return None if self._has_torch is None else self._nurseries[worker._module == AGENT, self._has_torch]

    def close(self) -> None:
        """End all, and have workers started again."""
        Nurseries.current = None
        WorkerProcess._launch = _started  # type: ignore[method-assign]
        for nursery in self._nurseries.values():
            nursery.close()
