"""The process of a rank: tied to the program's life, it reads an order, has the rank answer it, and replies."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import threading
from typing import Any

from synk._rank import process
from synk._rank.failpoints import arm
from synk._rank.failures import dumps, pack_failure
from synk._rank.rank import Rank
from synk._wire import orders as wire
from synk._wire.lifeline import tie_to_program
from synk._wire.logs import send_records
from synk._wire.mapping import Descriptor
from synk._wire.memory import Segment
from synk._wire.messages import versions
from synk._wire.orders import Up
from synk._wire.patience import Patience
from synk.backends import backend_module
from synk.errors import SharedMemoryError

AGAIN_S = 0.05
"""An interrupt that comes while a module is imported comes again after this time."""

_EXTRA_NBYTES = 1 << 20
"""The largest pickle of a value that a log record brings along."""

_RSS_INTERVAL = 1000


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Run a rank. The bootstrap calls this once ``sys.path`` is set."""
    process.prepare(setup["fds"]["stacks"])
    fds = setup["fds"]
    for fd in fds.values():
        os.set_inheritable(fd, False)  # programs that a function starts must not keep our pipes open
    link = wire.Link(sock, Descriptor(fds["down"]), Descriptor(fds["up"]))
    # First: whatever happens below, and however long it takes, this process cannot outlive the program any more.
    program_fd, pulse = tie_to_program(setup)
    rank = _started(setup)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)

    def on_interrupt(signum: int, frame: Any) -> None:
        if not rank.on_interrupt(frame):
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), signum)).start()

    signal.signal(signal.SIGINT, on_interrupt)
    rank.failpoint("start.ready")
    rank.peek = link.peek
    link.send_body(0, hello_of(rank))
    link.write(wire.REPLY.pack(0, wire.READY, *wire.NO_TIMES))
    process.take_over(setup)
    _serve(rank, link, program_fd, setup["spin_s"])
    link.close()
    assert pulse is None or pulse >= 0


def _started(setup: dict[str, Any]) -> Rank:
    """Make the rank of this process."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the program sends none before the hello
    process.prefer_for_oom()
    fds = setup["fds"]
    send_records(Descriptor(fds["log"]), lambda value: dumps(value, _EXTRA_NBYTES))
    failpoint = arm(setup["failpoints"], setup["rank"])
    failpoint("start.import")
    control = Segment(fds["control"], setup["control_nbytes"], is_writable=True, segment_id=0)
    if setup["cpus"]:
        os.sched_setaffinity(0, setup["cpus"])  # before the array library starts its threads
    eventfds = [fds.get(f"event{rank}", -1) for rank in range(setup["world_size"])]
    who = setup["rank"], setup["world_size"], setup["backend"], setup["device"]
    rank = open_rank(*who, control, eventfds, setup.get("nodes", ()), setup.get("host", ""))
    rank.device = setup.get("node", "") + setup["device"]
    rank.own_path = setup.get("own_path", [])
    rank.failpoint, rank.seed = failpoint, setup["seed"]
    rank.peers.patience_s = setup["spin_s"]
    os.register_at_fork(after_in_child=rank.disown)
    control.close_fd()
    return rank


def open_rank(rank: int, world_size: int, backend_name: str, device: str, *others: Any) -> Rank:
    """Open the device of a rank, and return the rank; ``others`` are the last arguments of ``Rank``."""
    backend = backend_module(backend_name).open_device(device)
    if not backend.is_device:
        return Rank(rank, world_size, backend, *others)
    from synk._rank.device import DeviceRank  # CPU workers need none of it

    return DeviceRank(rank, world_size, backend, *others)


def hello_of(rank: Rank) -> bytes:
    """Return what a rank says first."""
    device = rank.backend.describe() + (f" on {rank.host}" if rank.host else "")
    return pickle.dumps({"versions": versions(), "device": device}, protocol=5)


def _serve(rank: Rank, link: wire.Link, program_fd: int, spin_s: float) -> None:
    """Answer orders until the program says goodbye or is gone."""
    waiting = select.poll()
    waiting.register(link.read_fd, select.POLLIN)
    waiting.register(program_fd, select.POLLIN)
    patience = Patience(spin_s)
    count = 0
    while True:
        if not link.ahead:
            events = patience.wait(waiting.poll, waiting.poll)
            if len(events) == 1 and events[0][0] != link.read_fd:
                os.killpg(0, signal.SIGKILL)  # only the program's pidfd is ready: it is dead, and no order is left
        order = link.read(wire.ORDER_NBYTES)
        if len(order) < wire.ORDER_NBYTES:
            os.killpg(0, signal.SIGKILL)
            return
        if not _answer(rank, link, order):
            return
        rank.failpoint("call.after_reply")
        rank.lane.wake_sleepers()
        count += 1
        if count % _RSS_INTERVAL == 1:
            rank.own_up[Up.RSS] = process.resident_nbytes()


def _answer(rank: Rank, link: wire.Link, order: bytes) -> bool:
    """Answer one order. Return False if it was to end."""
    number, plan, _, _, _, has_body = wire.ORDER.unpack_from(order)
    if plan == wire.CLOSE:
        return False
    body: Any = None
    fds: list[Descriptor] = []
    if plan == wire.SYNC:
        link.drain()  # bodies whose orders were never sent
    if has_body:
        try:
            body, fds = link.receive_body(number)
        except Exception as error:  # this process hit a limit, or cannot load it: the program sends all again
            link.send_body(number, pack_failure(error, rank.rank, rank.device))
            link.write(wire.REPLY.pack(number, wire.UNREAD, *wire.NO_TIMES))
            return True
    status, content, segments = rank.answer(order, body, fds)
    del body
    process.flush_output()
    rank.failpoint("call.before_reply")
    if status in wire.WITH_BODY:
        try:
            link.send_body(number, content, segments)
        except SharedMemoryError as error:  # a long body needs a descriptor, this short error does not
            status = wire.FAILED
            link.send_body(number, pack_failure(error, rank.rank, rank.device))
        rank.failpoint("call.after_header")
        for segment in segments:
            segment.close_fd()  # after a SYNC other memory is made
    link.write(wire.REPLY.pack(number, status, *rank.times()))
    return True
