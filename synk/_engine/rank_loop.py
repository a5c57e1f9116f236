"""The process of a rank: tied to the program's life, it reads an order, has the rank answer it, and replies."""

from __future__ import annotations

import io
import linecache
import os
import pickle
import platform
import select
import signal
import socket
import sys
import threading
from typing import Any

import numpy as np

from synk._engine import wire
from synk._engine.rank import Rank
from synk._version import __version__
from synk._wire.channel import Patience
from synk._wire.control import Up
from synk._wire.descriptors import Descriptor
from synk._wire.lifeline import tie_to_master
from synk._wire.logs import send_records
from synk._wire.memory import Segment
from synk._worker import failpoints as _failpoints
from synk._worker.failures import pack_failure
from synk.errors import SharedMemoryError

AGAIN_S = 0.05
"""An interrupt that comes while a module is imported comes again after this time."""

_RSS_INTERVAL = 1000


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Run a rank. The bootstrap calls this once ``sys.path`` is set."""
    import faulthandler

    # The stack of C would push the lines of Python out of the error.
    options = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    faulthandler.enable(**options)
    # Python 3.13 and later would show lines of the bootstrap under any frame of a text that was run with exec.
    vars(linecache).get("_interactive_cache", linecache.cache).clear()
    # This answers even while C code holds the interpreter: where() must explain a rank that is stuck.
    faulthandler.register(signal.SIGUSR2, file=setup["fds"]["stacks"], all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    fds = setup["fds"]
    for fd in fds.values():
        os.set_inheritable(fd, False)  # programs that a function starts must not keep our pipes open
    link = wire.Link(sock, Descriptor(fds["down"]), Descriptor(fds["up"]))
    # First: whatever happens below, and however long it takes, this process cannot outlive the program any more.
    master_fd, pulse = tie_to_master(setup)
    rank = _started(setup)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)

    def on_interrupt(signum: int, frame: Any) -> None:
        if not rank.on_interrupt(frame):
            threading.Timer(AGAIN_S, signal.pthread_kill, (threading.get_ident(), signum)).start()

    signal.signal(signal.SIGINT, on_interrupt)
    rank.reach("start.ready")
    link.send_body(0, hello_of(rank))
    link.write(wire.REPLY.pack(0, wire.READY, 0))
    if not os.environ.get("PYTHONBREAKPOINT"):  # else the user has chosen a debugger, or none
        sys.breakpointhook = _refuse_breakpoint
    sys.path[:] = setup["sys_path"]
    sys.argv[:] = setup["argv"]
    _serve(rank, link, master_fd, setup["spin_s"])
    link.close()
    assert pulse is None or pulse >= 0


def _started(setup: dict[str, Any]) -> Rank:
    """Make the rank of this process."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the program sends none before the hello
    _prefer_for_oom()
    fds = setup["fds"]
    send_records(Descriptor(fds["log"]))
    failpoint = _failpoints.arm(setup["failpoints"], setup["rank"])
    failpoint("start.import")
    control = Segment(fds["control"], setup["control_nbytes"], is_writable=True, segment_id=0)
    if setup["cpus"]:
        os.sched_setaffinity(0, setup["cpus"])  # before the array library starts its threads
    eventfds = [fds[f"event{rank}"] for rank in range(setup["world_size"])]
    rank = Rank(setup["rank"], setup["world_size"], setup["backend"], setup["device"], control, eventfds)
    rank.failpoint, rank.seed = failpoint, setup["seed"]
    rank.peers.patience_s = setup["spin_s"]
    os.register_at_fork(after_in_child=rank.disown)
    control.close_fd()
    return rank


def hello_of(rank: Rank) -> bytes:
    """Return what a rank says first."""
    versions = {"python": platform.python_version(), "numpy": np.__version__, "synk": __version__}
    return pickle.dumps({"versions": versions, "device": rank.backend.describe()}, protocol=5)


def _serve(rank: Rank, link: wire.Link, master_fd: int, spin_s: float) -> None:
    """Answer orders until the program says goodbye or is gone."""
    waiting = select.poll()
    waiting.register(link.read_fd, select.POLLIN)
    waiting.register(master_fd, select.POLLIN)
    patience = Patience(spin_s)
    count = 0
    while True:
        events = patience.wait(waiting)
        if len(events) == 1 and events[0][0] != link.read_fd:
            os.killpg(0, signal.SIGKILL)  # only the program's pidfd is ready: it is dead, and no order is left
        order = link.read(wire.ORDER_NBYTES)
        if len(order) < wire.ORDER_NBYTES:
            os.killpg(0, signal.SIGKILL)
            return
        if not _answer(rank, link, order):
            return
        rank.reach("call.after_reply")
        rank.tidy()
        count += 1
        if count % _RSS_INTERVAL == 1:
            rank.own_up[Up.RSS] = _resident_nbytes()


def _answer(rank: Rank, link: wire.Link, order: bytes) -> bool:
    """Answer one order. Return False if it was to end."""
    number, plan, _, _, _, has_body = wire.ORDER.unpack_from(order)
    if plan == wire.CLOSE:
        return False
    body: Any = None
    fds = wire.Fds()
    if plan == wire.SYNC:
        link.drain()  # bodies whose orders were never sent
    if has_body:
        try:
            body, fds = link.receive_body(number)
        except Exception as error:  # this process hit a limit, or cannot load it: the program sends all again
            link.send_body(number, pack_failure(error, rank.number, rank.device))
            link.write(wire.REPLY.pack(number, wire.UNREAD, 0))
            return True
    status, content, segments = rank.answer(order, body, fds)
    del body
    _flush_output(rank)
    rank.reach("call.before_reply")
    if status in wire.WITH_BODY:
        try:
            link.send_body(number, content, segments)
        except SharedMemoryError as error:  # a long body needs a descriptor, this short error does not
            status = wire.FAILED
            link.send_body(number, pack_failure(error, rank.number, rank.device))
        rank.reach("call.after_header")
        for segment in segments:
            segment.close_fd()  # after a SYNC other memory is made
    link.write(wire.REPLY.pack(number, status, rank.spent_ns))
    return True


def _resident_nbytes() -> int:
    """Return the resident memory of this process. The error text shows it if the process is killed."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:  # out of descriptors: a report is not worth a failed call
        return 0


def _flush_output(rank: Rank) -> None:
    """Flush what was printed, so that it reaches the program before the reply."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # the user's function may have closed or replaced it: that must not end the rank
            continue


def _prefer_for_oom() -> None:
    """When memory runs out, let the kernel kill a rank, which can be replaced, rather than the user's session."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            score = int(file.read())
            file.write(str(min(score + 300, 1000)))
    except OSError:  # /proc is read-only in some containers: the kernel then chooses by itself
        pass


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "cannot stop at breakpoint(): got there on a worker, which has no terminal. "
        "Run the program with synk.fork(0): the function then runs in its own process."
    )
