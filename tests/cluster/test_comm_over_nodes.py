"""``synk.comm`` over nodes: the tests of one machine with the ranks divided among nodes, and what goes wrong there."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import ctrl_c_when, kill_and_wait, pids, same_workers, script, wait_for

import synk
from synk.errors import CallTimeout, CollectiveMismatch, WorkerDied

sys.path.append(str(Path(__file__).parents[1] / "worker" / "comm"))

from test_comm import *  # noqa: F403
from test_comm_out import *  # noqa: F403
from test_comm_programs import *  # noqa: F403
from test_comm_requests import *  # noqa: F403

pytestmark = pytest.mark.sampled(90, together=0)  # each test over one division of the ranks among nodes
NODES = {1: "1+1", 2: "1+1", 3: "1+2", 4: "2+2", "inline": "1+2"}

_disagreeing = test_ranks_that_disagree_are_told_and_nobody_hangs.pytestmark[0].args[1]  # noqa: F405
del test_a_function_knows_its_rank_its_peers_and_their_rows  # noqa: F821  (it names devices without their node)
del test_a_tensor_that_requires_grad_is_refused  # noqa: F821  (an interrupt may come into the import of torch)
del test_a_training_step_is_one_call  # noqa: F821  (this and the others: shared variables)
del test_only_the_ranks_with_rows_take_part  # noqa: F821
del test_ranks_that_disagree_are_told_and_nobody_hangs  # noqa: F821
del test_what_nobody_waited_for_is_brought_to_its_end  # noqa: F821
del test_a_message_that_nobody_receives_is_an_error_at_any_size  # noqa: F821
del test_a_message_to_oneself  # noqa: F821  (without nodes)
del test_torch_tensors_stay_tensors  # noqa: F821  (without nodes)


class OverNodes:
    """Runtimes over nodes, by the number of their ranks."""

    def __init__(self, runtimes: Any) -> None:
        self._runtimes = runtimes

    def __getitem__(self, num_workers: Any) -> Any:
        return self._runtimes[NODES.get(num_workers, num_workers)]


@pytest.fixture
def shared_runtimes(shared_runtimes: Any) -> OverNodes:
    return OverNodes(shared_runtimes)


@pytest.fixture(params=("1+3", "2+2"))
def nodes(request: pytest.FixtureRequest, reused: Any) -> synk.Runtime:
    runtime: synk.Runtime = reused(request.param)
    return runtime


def total(x: np.ndarray) -> Any:
    return synk.comm.all_reduce(x.sum(), "sum")


def assert_talks(rt: synk.Runtime) -> None:
    """Assert that all ranks reach each other, by short and by long arrays."""
    f = rt.function(lambda x: (total(x), synk.comm.all_reduce(np.full(100_000, x[0]), "sum")[-1]), outputs=None)
    assert f(np.arange(4.0)) == [(6.0, 6.0)] * 4


def in_flight(rt: Any) -> bool:
    requests = list(rt._session.workers.requests.values())
    return any(request.pending and request.phase == "call" for request in requests)


# -- as on one machine ------------------------------------------------------------------------------------------------


def test_reductions_have_the_bits_of_one_machine_or_of_the_other_repetition(
    nodes: synk.Runtime, shared_runtimes: Any
) -> None:
    """Small arrays are folded in rank order. Large ones are folded by nodes: equal on all ranks, each time."""

    def reduce(x: np.ndarray, count: int) -> Any:
        values = np.random.default_rng(synk.comm.rank).normal(size=count).astype("f4")
        return [synk.comm.all_reduce(values, op).tobytes() for op in ("avg", "sum", "prod")]

    x = np.zeros(7)
    on_one = shared_runtimes._runtimes[4].function(reduce, bcast_inputs="count", outputs=None)
    f = nodes.function(reduce, bcast_inputs="count", outputs=None)
    assert f(x, 1000) == on_one(x, 1000)
    found = f(x, 300_000)
    assert found == [found[0]] * 4
    assert f(x, 300_000) == found


def test_16_bit_floats_are_rounded_once(nodes: synk.Runtime) -> None:
    """A sum of the nodes' rounded averages would be another number."""

    def average(x: np.ndarray) -> Any:
        values = np.random.default_rng(synk.comm.rank).integers(0, 2048, 200_000).astype("f2")
        return values, synk.comm.all_reduce(values, "avg")

    values, averages = nodes.function(average, outputs=(None, None))(np.zeros(7))
    exact = np.average(np.array(values, "f8"), axis=0, weights=[2, 2, 2, 1]).astype("f4").astype("f2")
    for each in averages:
        np.testing.assert_array_equal(each, exact)


def test_ranks_without_rows_take_no_part(nodes: synk.Runtime) -> None:
    f = nodes.function(lambda x: (total(x), str(synk.comm.ranks)), outputs=None)
    for rows in (1, 2, 3, 4):
        assert f(np.ones(rows)) == [(float(rows), str(tuple(range(rows))))] * rows + [None] * (4 - rows)
    assert nodes.function(total, outputs="first").serial(np.ones(5)) == 5.0


def test_submitted_calls_talk(nodes: synk.Runtime) -> None:
    f = nodes.function(total, outputs="first")
    pending = [f.submit(np.full(4, float(k))) for k in range(6)]
    assert [each.result() for each in pending] == [4.0 * k for k in range(6)]


def test_gradients_cross_nodes(nodes: synk.Runtime) -> None:
    torch = pytest.importorskip("torch")

    def gradient(x: Any) -> Any:
        weight = torch.full((3,), float(synk.comm.rank + 1), dtype=torch.float64, requires_grad=True)
        shared = synk.torch.all_reduce(weight * weight, "sum")
        (shared * x.sum()).sum().backward()
        return weight.grad

    x = np.arange(8.0)
    found = nodes.function(gradient, outputs=None, framework="torch")(x)
    for rank, each in enumerate(found):  # each rank's loss has its own sum of rows; all losses count
        np.testing.assert_allclose(np.asarray(each), np.full(3, 2.0 * (rank + 1) * x.sum()))


# -- disagreement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", _disagreeing)
@pytest.mark.sampled(90)
def test_ranks_of_two_nodes_that_disagree_are_told(shared_runtimes: Any, requests: Any) -> None:
    rt = shared_runtimes[2]
    with same_workers(rt), pytest.raises(CollectiveMismatch, match=r"rank 0.*rank 1|rank 1.*rank 0"):
        rt.function(lambda x: requests[synk.comm.rank](synk.comm), outputs=None, name="disagree")(np.zeros(2))


def test_all_ranks_are_told_what_each_asked_for(nodes: synk.Runtime) -> None:
    """Also what they caught: it is the same text everywhere."""

    def ask(x: np.ndarray) -> str:
        try:
            synk.comm.all_reduce(np.ones(3 if synk.comm.rank == 2 else 2), "sum")
        except CollectiveMismatch as error:
            return str(error)
        return ""

    with same_workers(nodes):
        texts = nodes.function(ask, outputs=None)(np.zeros(4))
        assert len(set(texts)) == 1
        for rank in range(4):
            assert f"rank {rank}: all_reduce(sum, float64, {3 if rank == 2 else 2} elements)" in texts[0]
    assert_talks(nodes)


@pytest.mark.parametrize("num_rows", [1, 50_000])
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
@pytest.mark.sampled(90)
def test_all_ranks_are_told_that_rows_differ_in_shape(nodes: synk.Runtime, kind: str, num_rows: int) -> None:
    """Also those that would only have sent."""

    def exchange(x: np.ndarray) -> str:
        shape = (2, 3) if synk.comm.rank != 2 else (3, 2)
        try:
            getattr(synk.comm, kind)(np.ones((4 * num_rows, *shape)))
        except CollectiveMismatch as error:
            return str(error)
        return ""

    expected = f"cannot {kind}: got rows of shape (3, 2) from rank 2, expected (2, 3) as from rank 0."
    with same_workers(nodes):
        texts = nodes.function(exchange, outputs=None)(np.zeros(4))
    assert len(set(texts)) == 1
    assert texts[0].startswith(expected)
    assert_talks(nodes)


@pytest.mark.parametrize("joins", ["0", "3", "01", "123"])
@pytest.mark.sampled(90)
def test_ranks_leave_without_joining(nodes: synk.Runtime, joins: str) -> None:
    """Also a whole node, none of whose ranks has communicated."""

    def join(x: np.ndarray) -> None:
        if f"{x[0]:g}" in joins:
            synk.comm.barrier()

    text = rf"ranks? [^{joins}]+ left the function without joining it; waiting: rank [{joins}]: barrier"
    with same_workers(nodes), pytest.raises(CollectiveMismatch, match=text):
        nodes.function(join, outputs=None)(np.arange(4.0))
    assert_talks(nodes)


@pytest.mark.parametrize("peers", [{0: 3, 3: 0}, {0: 1, 1: 2, 2: 3, 3: 0}])
@pytest.mark.sampled(90)
def test_ranks_that_wait_for_each_other_are_told(nodes: synk.Runtime, peers: dict[int, int]) -> None:
    def wait(x: np.ndarray) -> Any:
        rank = synk.comm.rank
        return synk.comm.recv(peers[rank]) if rank in peers else synk.comm.barrier()

    with same_workers(nodes), pytest.raises(CollectiveMismatch, match="every rank waits for another one") as caught:
        nodes.function(wait, outputs=None)(np.zeros(4))
    for rank in range(4):
        asked = f"recv(any array, from rank {peers[rank]}, tag 0)" if rank in peers else "barrier()"
        assert f"rank {rank}: {asked}" in str(caught.value)


@pytest.mark.parametrize("count", [1, 500, 2_000_000])
@pytest.mark.parametrize("is_asked_for_something_else", [False, True])
@pytest.mark.sampled(90)
def test_a_message_to_another_node_that_nobody_receives(
    nodes: synk.Runtime, count: int, is_asked_for_something_else: bool
) -> None:
    """Also if the receiver has taken it in: it has got a later one of another tag."""

    def send(x: np.ndarray) -> None:
        comm = synk.comm
        if comm.rank == 0:
            comm.isend(np.ones(count), 3, 4)
            comm.isend(np.ones(1), 3, 5)
        if comm.rank == 3 and is_asked_for_something_else:
            comm.recv(0, 5)

    text = rf"send\(float64, {count} elements, to rank 3, tag 4\) of rank 0"
    with same_workers(nodes), pytest.raises(CollectiveMismatch, match=text):
        nodes.function(send, outputs=None)(np.zeros(4))
    assert_talks(nodes)


# -- faults -----------------------------------------------------------------------------------------------------------


def waiting(victim: int, act: Callable[[], None]) -> Callable[[np.ndarray], Any]:
    """Return a function in which all ranks wait for one by wire or by way of one that does, while it acts."""

    def wait(x: np.ndarray) -> Any:
        if synk.comm.rank == victim:
            act()
        return synk.comm.all_reduce(np.ones(300_000), "sum")[0]

    return wait


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.sampled(90)
def test_a_worker_dies_while_ranks_wait_for_it(nodes: synk.Runtime, victim: int) -> None:
    before = pids(nodes)
    with pytest.raises(WorkerDied, match=f"rank {victim} of 4 .*SIGKILL"):
        nodes.function(waiting(victim, lambda: os.kill(os.getpid(), signal.SIGKILL)), outputs=None)(np.zeros(4))
    assert_talks(nodes)
    assert [mine == his for mine, his in zip(pids(nodes), before)] == [rank != victim for rank in range(4)]


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("nth", [1, 2, 9])
@pytest.mark.sampled(90)
def test_a_worker_dies_when_it_has_sent_a_part(nodes: synk.Runtime, victim: int, nth: int) -> None:
    def die(x: np.ndarray) -> Any:
        if synk.comm.rank == victim:
            from synk.communicators._wires import Wires

            usual, sent = Wires.send, []

            def send(*args: Any) -> None:
                usual(*args)
                sent.append(1)
                if len(sent) == nth:
                    os.kill(os.getpid(), signal.SIGKILL)

            Wires.send = send  # type: ignore[method-assign]
        others = synk.comm.all_to_all(np.ones((4, 400_000)))
        return synk.comm.all_reduce(others.reshape(-1), "sum")[0]

    with pytest.raises(WorkerDied, match=f"rank {victim} of 4 .*SIGKILL"):
        nodes.function(die, outputs=None)(np.zeros(4))
    assert_talks(nodes)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.sampled(90)
def test_an_agent_dies_while_ranks_wait(nodes: synk.Runtime, node: int) -> None:
    assert_talks(nodes)
    agent = nodes._session.workers.by_rank[node].process.pid
    f = nodes.function(waiting(3 if node else 0, lambda: time.sleep(600)), outputs=None)
    killed = threading.Thread(target=lambda: (wait_for(lambda: in_flight(nodes)), kill_and_wait(agent)))
    killed.start()
    with pytest.raises(WorkerDied) as caught:
        f(np.zeros(4))
    killed.join()
    assert caught.value.nodes == (node,)
    assert_talks(nodes)


def test_a_worker_is_frozen_while_ranks_wait_for_it(nodes: synk.Runtime) -> None:
    assert_talks(nodes)
    before = pids(nodes)
    f = nodes.function(waiting(3, lambda: os.kill(os.getpid(), signal.SIGSTOP)), outputs=None)
    with pytest.raises(CallTimeout):
        f(np.zeros(4), timeout=1.0)
    assert_talks(nodes)
    assert [mine == his for mine, his in zip(pids(nodes), before)] == [True, True, True, False]


@pytest.mark.parametrize("sleeper", [0, 3])
@pytest.mark.sampled(90)
def test_ctrl_c_while_ranks_wait(nodes: synk.Runtime, sleeper: int) -> None:
    f = nodes.function(waiting(sleeper, lambda: time.sleep(600)), outputs=None)
    assert_talks(nodes)
    with same_workers(nodes):
        with pytest.raises(KeyboardInterrupt), ctrl_c_when(lambda: in_flight(nodes)):
            f(np.zeros(4))
        assert_talks(nodes)


def test_a_time_limit_while_ranks_wait(nodes: synk.Runtime) -> None:
    f = nodes.function(waiting(3, lambda: time.sleep(600)), outputs=None)
    assert_talks(nodes)
    with same_workers(nodes), pytest.raises(CallTimeout):
        f(np.zeros(4), timeout=0.5)
    assert_talks(nodes)


def test_an_exception_of_one_rank_is_the_error(nodes: synk.Runtime) -> None:
    def refuse() -> None:
        raise LookupError("no data")

    for victim in (0, 3):
        with same_workers(nodes), pytest.raises(LookupError, match="no data"):
            nodes.function(waiting(victim, refuse), outputs=None)(np.zeros(4))
    assert_talks(nodes)


def test_a_worker_that_died_while_idle_is_joined_again(nodes: synk.Runtime) -> None:
    """If the next call does not communicate, nobody notices. One that does says so, and the next one works."""
    silent, talks = nodes.function(np.sum, outputs="sum"), nodes.function(total, outputs="first")
    assert (silent(np.arange(4.0)), talks(np.arange(4.0))) == (6.0, 6.0)
    kill_and_wait(pids(nodes)[3])
    with pytest.warns(RuntimeWarning, match="was started again"):
        assert silent(np.arange(4.0)) == 6.0
    assert talks(np.arange(4.0)) == 6.0
    kill_and_wait(pids(nodes)[3])
    with pytest.raises(WorkerDied, match="rank 3: its worker ended while idle"), pytest.warns(RuntimeWarning):
        talks(np.arange(4.0))
    assert_talks(nodes)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.sampled(90)
def test_a_node_that_died_while_idle_is_joined_before_the_next_call(nodes: synk.Runtime, node: int) -> None:
    talks = nodes.function(total, outputs="first")
    assert talks(np.arange(4.0)) == 6.0
    kill_and_wait(nodes._session.workers.by_rank[node].process.pid)
    with pytest.warns(RuntimeWarning, match=f"node {node} .*was started again"):
        assert talks(np.arange(4.0)) == 6.0


def test_without_pyzmq_all_else_works(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('no zmq here')\n", encoding="utf-8")
    script(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        rt = synk.Runtime(1, cluster="here", nodes=2)
        f = rt.function(lambda x: x.sum(), outputs="sum")
        assert f(np.arange(4.0)) == 6.0
        talk = rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")
        for _ in range(2):
            try:
                talk(np.arange(4.0))
            except synk.errors.UnsupportedError as error:
                assert "synkhronos[cluster]" in str(error), error
            else:
                raise AssertionError
        assert f(np.arange(4.0)) == 6.0
        assert talk.serial(np.arange(4.0)) == 6.0
        assert "is not used" in rt.info()
        rt.close()
        """
    ).check("")
