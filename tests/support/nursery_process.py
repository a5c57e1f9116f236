"""The process of a nursery: it imports once what workers need, and forks them; see ``support.nursery``.

For workers it imports nothing of the master's half, which a worker does not have either. The agents of nodes, and the
programs of scenarios, have a nursery of their own: a copy from before they have begun.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

_CLONE_PARENT = 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}
"""The number of the system call, by machine."""

AGENT = "cluster.relay"
"""The module, below ``synk``, in which the agent of a node goes on."""

NAME = "synk-nursery"
"""By which the harness knows a nursery of an agent or a program, and counts it as none of its children."""

WORKER_MODULES = (
    "synk._rank.loop",
    "synk._rank.failures",
    "synk.communicators._comm",
    "numpy.random",
    "cloudpickle",
    "optree",
)

IMPORTS = "SYNK_TEST_IMPORTS"
"""The variable in the environment of a worker that names what else its nursery is to import, once for all workers."""

_MOST_FDS = 253  # in one message


def serve(fd: int, modules: Sequence[str]) -> None:
    """Fork a process for each request, until the one that asks has ended."""
    sock = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    has_imported = False
    while True:
        header, ancillary, _, _ = sock.recvmsg(8, socket.CMSG_SPACE(_MOST_FDS * 4))
        if not header:
            return
        rights = array.array("i", b"".join(data[: len(data) // 4 * 4] for _, _, data in ancillary))
        size = int.from_bytes(header, "little")
        module, args, numbers, environment, folder = json.loads(sock.recv(size, socket.MSG_WAITALL))
        if not has_imported:
            has_imported = True
            for name in modules:
                importlib.import_module(name)
            for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
                finalizer.atexit = False  # those of torch take 0.05 s at the end of each worker
            gc.collect()
            gc.freeze()
        for name in environment.get(IMPORTS, "").split():
            importlib.import_module(name)
        pid = fork_sibling()
        if pid == 0:
            sock.close()
            inherit({**dict(zip(numbers, rights[2:])), 1: rights[0], 2: rights[1]})
            go_on(module, args, environment, folder)
        for each in rights:
            os.close(each)
        sock.sendall(pid.to_bytes(8, "little"))


def fork_sibling() -> int:
    """Fork a child of this process's parent, which waits for it. Return 0 in the child."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)  # both hold the interpreter's lock, as fork does
    libc.syscall.restype = ctypes.c_long
    arguments = [CLONE[os.uname().machine], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0]
    python.PyOS_BeforeFork()
    pid = libc.syscall(*map(ctypes.c_long, arguments))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("cannot fork a worker")
    return int(pid)


def raise_own_workers() -> None:
    """Have a copy of this process fork the workers that it starts: of an agent, or a program, that has not begun yet.

    The copy ends when this process does, or is killed with its group.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        for name in os.listdir("/proc/self/fd"):  # who waits for the ends of this process's pipes would wait for it
            if int(name) not in (0, 1, 2, theirs.fileno()):
                with contextlib.suppress(OSError):  # that of the listing itself
                    os.close(int(name))
        rename(NAME)
        sys.argv[:] = ["-c", "--synk-worker"]  # synk reads it at its import
        serve(theirs.detach(), WORKER_MODULES)
        os._exit(0)
    theirs.close()
    from support import nursery  # not before: it imports the master's half

    own = nursery.Nursery(ours)
    nursery.choose_by(lambda worker: own)


def rename(name: str) -> None:
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def inherit(fds: Mapping[int, int]) -> None:
    """Have each descriptor under the number that is its key, and no other one except standard input."""
    above = max(*fds, *fds.values()) + 1
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in fds.items()}
    for name in os.listdir("/proc/self/fd"):
        if 0 < int(name) < above:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)


def go_on(module: str, args: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Run the ``main`` of a module, of synk or ``support``, as a process does that was started with these arguments,
    and end.
    """
    np: Any = sys.modules["numpy"]
    os.setsid()
    rename(os.path.basename(sys.executable)[:15])
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["-c", *args]
    for number, name in ((1, "stdout"), (2, "stderr")):  # the nursery's own know what kind of file theirs are
        stream = open(number, "w", encoding=getattr(sys, name).encoding, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()  # from the system, as at an import; ``random`` does it at each fork
    status = 1
    try:
        if module.startswith("support."):
            importlib.import_module(module).main(*map(int, args))
        else:
            run_in_synk(module, int(args[1]))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)  # to take apart what was imported costs 0.2 s with torch


def run_in_synk(module: str, setup_fd: int) -> None:
    """Run the ``main`` of a worker or an agent."""
    with open(setup_fd, "rb") as file:
        setup = json.load(file)
    sys.path[:] = setup["import_path"]
    if module == AGENT:
        raise_own_workers()
    importlib.import_module(f"synk.{module}").main(socket.socket(fileno=setup["fds"]["socket"]), setup)
