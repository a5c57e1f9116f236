"""Faults at each step of a large message: one that is left in shared memory for its receiver, and one that it reads
where it lies. The limits on that memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.signs import hear, say, sign

import synk
from synk.errors import CollectiveMismatch, WorkerDied

COUNT = 600_000
"""More than a ring takes, in several chunks."""

STEPS = ("the place is taken", "the receiver is told", "half is copied", "the receiver has all")
OFFERED_STEPS = ("it is offered", "the receiver has read it")
BY_RECEIVER = (STEPS[-1], OFFERED_STEPS[-1])


@contextlib.contextmanager
def acting(step: str, act: Callable[[], None]) -> Iterator[None]:
    """On a rank: have it act at a step of a large message."""
    from synk.communicators._mailbox import Mailbox
    from synk.communicators._outbox import Outbox

    owner, name = {
        "the place is taken": (Outbox, "take"),
        "the receiver is told": (Mailbox, "_put"),
        "half is copied": (Outbox, "show"),
        "the receiver has all": (Outbox, "release"),
        "it is offered": (Mailbox, "_put"),
        "the receiver has read it": (Mailbox, "_read_offered"),
    }[step]
    usual = getattr(owner, name)

    def run(*args: Any) -> Any:
        if name == "release":
            act()
        result = usual(*args)
        act()
        return result

    setattr(owner, name, run)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def exchange(step: str, act: Callable[[], None]) -> float:
    """Send a large message from rank 0 to rank 1; either acts at a step of it."""
    from synk.communicators import _mailbox

    comm, usual = synk.comm, _mailbox.OFFERED_NBYTES
    place = acting(step, act) if comm.rank == int(step in BY_RECEIVER) else contextlib.nullcontext()
    with place:
        if comm.rank == 1:
            return float(comm.recv(0).sum())
        _mailbox.OFFERED_NBYTES = 1
        try:
            (comm.send if step in OFFERED_STEPS else comm.isend)(np.arange(float(COUNT)), 1)
        finally:
            _mailbox.OFFERED_NBYTES = usual
        return 0.0


def nothing() -> None:
    pass


def works(rt: synk.Runtime) -> bool:
    total = rt.function(lambda x: exchange(STEPS[0], nothing), outputs="sum")
    return bool(total(np.zeros(2)) == COUNT * (COUNT - 1) / 2)


@pytest.mark.parametrize("step", STEPS + OFFERED_STEPS)
@pytest.mark.sampled(3)
def test_a_rank_is_killed_at_a_step_of_a_message(reused: Any, step: str) -> None:
    rt = reused(2)
    f = rt.function(lambda x: exchange(step, lambda: os.kill(os.getpid(), signal.SIGKILL)), outputs="sum")
    for _ in range(2):  # also into what the first one has left
        with pytest.raises(WorkerDied, match="SIGKILL"):
            f(np.zeros(2))
        assert works(rt)


@pytest.mark.parametrize("step", STEPS + OFFERED_STEPS)
def test_ctrl_c_at_a_step_of_a_message(shared_runtimes: Any, step: str) -> None:
    rt, master = shared_runtimes[2], os.getpid()

    def act() -> None:
        os.kill(master, signal.SIGINT)
        time.sleep(60)  # the interrupt comes here

    pids = [worker.process.pid for worker in rt._session.workers.by_rank]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            rt.function(lambda x: exchange(step, act), outputs="sum")(np.zeros(2))
        assert works(rt)
    assert pids == [worker.process.pid for worker in rt._session.workers.by_rank]


def test_an_exception_at_a_step_leaves_nothing(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def act() -> None:
        raise LookupError("not today")

    for step in STEPS + OFFERED_STEPS:
        with pytest.raises(LookupError, match="not today"):
            rt.function(lambda x, step=step: exchange(step, act), outputs="sum")(np.zeros(2))
        assert works(rt)


def test_an_offer_that_was_broken_off_is_no_result(shared_runtimes: Any, tmp_path: Path) -> None:
    """The receiver may read what the sender has changed since."""
    rt = shared_runtimes[2]
    is_changed = sign(tmp_path / "changed")

    def act() -> None:
        raise LookupError("no time")

    def f(x: np.ndarray) -> float:
        from synk.communicators import _mailbox

        if synk.comm.rank == 1:
            hear(is_changed)
            return float(synk.comm.recv(0).sum())
        array, usual = np.ones(COUNT), _mailbox.OFFERED_NBYTES
        _mailbox.OFFERED_NBYTES = 1
        try:
            with acting("it is offered", act):
                synk.comm.send(array, 1)
        except LookupError:
            array[:] = 7
        finally:
            _mailbox.OFFERED_NBYTES = usual
            say(is_changed)
        return 0.0

    with pytest.raises(CollectiveMismatch, match=r"cannot finish send\(.*Let the exception leave the function"):
        rt.function(f, outputs="sum")(np.zeros(2))
    assert works(rt)


def outbox_nbytes() -> int:
    """On a rank: how much memory of the segment through which it communicates is there: its longest mapping."""
    found: dict[int, int] = {}
    with open("/proc/self/smaps", encoding="ascii") as file:
        length = 0
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(each, 16) for each in first.split("-"))
                length = end - begin if "memfd:synk" in line else 0
            elif first == "Rss:" and length:
                found[length] = int(line.split()[1]) << 10
    return found[max(found)]


def test_memory_of_large_messages_is_given_back(shared_runtimes: Any) -> None:
    rt, nbytes = shared_runtimes[2], 100 << 20
    size = rt.world_size

    def body(x: np.ndarray) -> int:
        comm = synk.comm
        for turn in range(3):
            request = comm.irecv(1 - comm.rank)
            comm.isend(np.full(nbytes, turn, np.uint8), 1 - comm.rank)
            assert (request.wait() == turn).all()
        comm.barrier()
        return outbox_nbytes()

    within = max(rt.function(body, outputs=None)(np.zeros(size)))
    after = max(rt.function(lambda x: (synk.comm.barrier(), outbox_nbytes())[1], outputs=None)(np.zeros(size)))
    assert within > 2 * nbytes
    assert after < size * (80 << 20)


def resident_nbytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_calls", "count"), [(1, 6), pytest.param(10, 100, marks=pytest.mark.storm)])
def test_exchanges_of_64_mb_do_not_grow(shared_runtimes: Any, num_calls: int, count: int) -> None:
    """Neither within a call, where a rank may be ahead of the other by a message, nor from call to call."""
    rt, nbytes = shared_runtimes[2], 64 << 20

    def body(x: np.ndarray, count: int) -> int:
        comm, peer = synk.comm, 1 - synk.comm.rank
        for number in range(count):
            request = comm.irecv(peer)
            comm.isend(np.full(nbytes, number % 256, np.uint8), peer)
            assert (request.wait() == number % 256).all()
        comm.barrier()
        return resident_nbytes()

    exchange = rt.function(body, bcast_inputs="count", outputs=None)
    resident = rt.function(lambda x: (synk.comm.barrier(), resident_nbytes())[1], outputs=None)
    exchange(np.zeros(2), 1)
    before = max(resident(np.zeros(2)))
    for _ in range(num_calls):
        assert max(exchange(np.zeros(2), count)) < before + 6 * nbytes  # three messages of each rank
        assert max(resident(np.zeros(2))) < before + (16 << 20)


def test_memory_that_runs_out_is_an_exception(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def body(x: np.ndarray) -> float:
        from synk.communicators import _outbox

        comm, usual = synk.comm, _outbox.available_nbytes
        _outbox.available_nbytes = lambda: 1 << 20
        try:
            with pytest.raises(MemoryError, match="cannot leave a message"):
                comm.isend(np.zeros(100 << 20, np.uint8), 1 - comm.rank)
        finally:
            _outbox.available_nbytes = usual
        return float(comm.all_reduce(np.ones(1), "sum")[0])

    assert rt.function(body, outputs="first")(np.zeros(2)) == 2.0


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_without_an_outbox_messages_go_through_the_rings(limit: str) -> None:
    """Under a limit on addresses or on the size of files: slower, with the same results, and ``info`` says so."""
    number = getattr(resource, limit)
    usual = resource.getrlimit(number)
    resource.setrlimit(number, (1 << (30 if limit == "RLIMIT_FSIZE" else 44), usual[1]))
    try:
        with synk.Runtime(2, backend="numpy") as rt:
            assert works(rt)
            assert "through rings only" in str(rt.info())
            with pytest.raises(CollectiveMismatch, match="without receiving"):
                rt.function(lambda x: synk.comm.isend(np.zeros(COUNT), 0).wait(), outputs=None)(np.zeros(2))
            assert works(rt)
    finally:
        resource.setrlimit(number, usual)
