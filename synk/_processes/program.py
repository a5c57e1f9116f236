"""How a worker process is started: by the program's interpreter or, if that is frozen, as a copy of it.

Nothing may be unpickled before ``sys.path`` is the program's, so a worker's first message is JSON. It lies in a memory
file, because a command line or a search path may be larger than a packet.
"""

from __future__ import annotations

import contextvars
import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from synk._processes.placement import Placement
from synk._wire.cell import WORKER_ARGUMENT, cell, is_frozen
from synk._wire.mapping import Descriptor
from synk._wire.memory import create_fd
from synk.errors import StartupError

# The bootstrap must import nothing before the path is the program's: a pickle.py in the current directory must not run.
# synk's own imports use only absolute entries. The worker sets the exact path before it loads a function.
_BOOTSTRAP = """\
import sys
if sys.path and sys.path[0] == "": del sys.path[0]
import json, socket
with open(int(sys.argv[2]), "rb") as file: setup = json.load(file)
sock = socket.socket(fileno=setup["fds"]["socket"])
sys.path[:] = setup["import_path"]
from synk.{module} import main
main(sock, setup)
"""

ARMED: contextvars.ContextVar[Sequence[Sequence[Any]]] = contextvars.ContextVar("failpoints", default=())
"""The faults that a test arms in the workers of new runtimes; see ``synk._rank.failpoints``."""


def check_program() -> None:
    """Raise StartupError if no worker can be started.

    A frozen program must call ``synk.freeze_support``. Otherwise each worker, which is a copy of the program, would
    start workers of its own.
    """
    if not is_frozen():
        interpreter()
    elif not cell.has_freeze_support:
        raise StartupError(
            "cannot fork in a frozen program: got no call of synk.freeze_support(), without which each worker would "
            "run the whole program again. Call it first thing in the main program."
        )


def command(setup_fd: int, module: str, name: str) -> list[str]:
    """Return the command that starts the process whose first message is in ``setup_fd``.

    ``module``, below ``synk``, has its ``main``. ``name`` is shown in lists of processes.
    """
    if is_frozen():
        return [sys.executable, WORKER_ARGUMENT, str(setup_fd), name]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11) and "-P" not in flags and "-I" not in flags:
        flags.append("-P")
    return [interpreter(), *flags, "-c", _BOOTSTRAP.format(module=module), WORKER_ARGUMENT, str(setup_fd), name]


def write_setup(setup: dict[str, Any]) -> Descriptor:
    """Return a memory file with a worker's first message."""
    data = json.dumps(setup).encode("ascii")
    fd = create_fd(len(data))
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)  # the worker's descriptor shares the file position
    return fd


def search_path() -> list[str]:
    """Return the entries of ``sys.path`` that imports use: Python ignores entries that are not strings."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def interpreter() -> str:
    """Return the path of the interpreter that runs this program.

    ``sys.executable`` is empty in a program that embeds Python, or in an environment without PATH. Versions are
    compared at the hello.
    """
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    installed = [os.path.join(prefix, "bin", name) for prefix in (sys.exec_prefix, sys.base_exec_prefix)]
    for path in (sys.executable, *installed):
        if path and os.access(path, os.X_OK):
            return path
    raise StartupError(
        f"cannot start the workers: got {sys.executable!r} as sys.executable, and found no Python interpreter where "
        "this one was installed. Set sys.executable to the path of one."
    )


def setup_message(placement: Placement, rank: int, failpoints: Sequence[Any]) -> dict[str, Any]:
    """Return what the worker at position ``rank`` on this machine must know before it can unpickle anything."""
    home = os.path.abspath(__file__)
    for _ in __name__.split("."):
        home = os.path.dirname(home)  # at last the folder in which the package lies
    path = search_path()
    absolute = [entry for entry in path if os.path.isabs(entry)]
    return {
        "rank": rank,
        "world_size": len(placement.devices),
        "backend": placement.backend,
        "device": placement.assignment.devices[rank],
        "cpus": list(placement.cpus_of(rank)),
        "program_pid": os.getpid(),
        "sys_path": path,
        "import_path": absolute if home in absolute else [*absolute, home],
        "argv": [str(argument) for argument in getattr(sys, "argv", [""])],
        "failpoints": list(failpoints),
    }


def startup_text(what: str, error: OSError) -> str:
    """Return the error text for an operating system that refuses to start ``what``."""
    hints = {
        errno.EMFILE: "Raise the limit of open files (ulimit -n).",
        errno.ENFILE: "The system is out of file descriptors.",
        errno.EAGAIN: "Raise the limit of processes (ulimit -u).",
        errno.ENOMEM: "The system is out of memory.",
    }
    return f"cannot start {what}: {error}. {hints.get(error.errno or 0, '')}".rstrip()
