"""``synk.comm``: collectives inside a function, through a real runtime; NumPy on the ranks' arrays is the oracle."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.rank_arrays import OPS, REDUCIBLE, assert_same, everywhere, numbers, reduced

import synk
from synk.errors import CollectiveMismatch, ReentrancyError, UnsupportedError

WORKERS = (1, 2, 3, 4)
EVERYWHERE = (*WORKERS, "inline")
COUNTS = (0, 1, 1000, 700_001)
"""Nothing, a number, a half, and several pieces of an odd length."""


def on_each(rt: Any, body: Callable[[int], Any], **options: Any) -> list[Any]:
    """Return ``body(rank)`` of every rank; one row each, so that all alike in weight."""
    return rt.function(lambda x: body(synk.comm.rank), outputs=None, name="body", **options)(np.zeros(rt.world_size))


def test_an_array_in_the_other_byte_order_keeps_its_values(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def reduce_and_send(x: np.ndarray) -> Any:
        size, rank = synk.comm.world_size, synk.comm.rank
        total = synk.comm.all_reduce(np.arange(3).astype(">f8"), "sum")
        synk.comm.send(np.arange(4).astype(">i4"), (rank + 1) % size)
        return total, synk.comm.recv((rank - 1) % size, like=np.empty(4, ">i4"))

    for total, received in rt.function(reduce_and_send, outputs=None)(np.ones(2)):
        assert total.tolist() == [0.0, 2.0, 4.0]
        assert received.tolist() == [0, 1, 2, 3]


def test_a_masked_array_is_refused(shared_runtimes: Any) -> None:
    """As everywhere else: the masked values would count."""
    rt = shared_runtimes[2]
    f = rt.function(lambda x: synk.comm.all_reduce(np.ma.masked_less(x, 1), "sum"), outputs=None)
    with (
        same_workers(rt),
        pytest.raises(TypeError, match=r"MaskedArray, which has .*value\.filled"),
    ):
        f(np.arange(4.0))


# ----- who is there


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_function_knows_its_rank_its_peers_and_their_rows(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]

    def who(x: Any) -> Any:
        comm = synk.comm
        facts = (comm.rank, comm.world_size, comm.ranks, comm.rows, comm.total_rows, comm.device)
        return repr(facts)

    f = rt.function(who, outputs=None)
    size = rt.world_size
    for rows in (1, size, 2 * size + 1):
        lengths = [len(part) for part in np.array_split(np.zeros(rows), size)]
        ranks = tuple(rank for rank, length in enumerate(lengths) if length)
        num = len(ranks)
        expected = [repr((rank, num, ranks, lengths[rank], rows, rt.devices[rank])) for rank in ranks]
        assert f(np.zeros(rows)) == expected + [None] * (size - len(ranks))
    assert f.serial(np.zeros(9))[0] == repr((0, 1, (0,), 9, 9, rt.devices[0]))
    rowless = rt.function(lambda: (synk.comm.ranks, synk.comm.total_rows), outputs="first")
    assert rowless() == (tuple(range(size)), size)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_comm_is_the_same_however_a_function_gets_at_it(shared_runtimes: Any, where: Any) -> None:
    from synk import comm

    rt = shared_runtimes[where]
    assert pickle.loads(pickle.dumps(comm)) is comm is synk.comm
    held = {"comm": comm}
    for sum_ranks in (
        lambda x: synk.comm.all_reduce(np.array([1.0]), "sum"),
        lambda x: comm.all_reduce(np.array([1.0]), "sum"),
        lambda x: held["comm"].all_reduce(np.array([1.0]), "sum"),
        lambda x: __import__("synk").comm.all_reduce(np.array([1.0]), "sum"),
    ):
        assert rt.function(sum_ranks, outputs="max")(np.zeros(rt.world_size)) == rt.world_size


def test_comm_has_no_meaning_in_the_master() -> None:
    assert repr(synk.comm) == "<synk.comm>"
    uses: list[Callable[[], Any]] = [
        lambda: synk.comm.rank,
        lambda: synk.comm.rows,
        lambda: synk.comm.all_reduce(np.zeros(2)),
        lambda: synk.comm.barrier(),
    ]
    for use in uses:
        with pytest.raises(ReentrancyError, match="only inside a function"):
            use()


# ----- reductions


@pytest.mark.parametrize(
    ("where", "op", "dtype"),
    [(2, *pair) for pair in REDUCIBLE] + [(where, op, "float32") for where in (1, 3, 4, "inline") for op in OPS],
)
@pytest.mark.sampled(90)
def test_reductions_equal_numpy(shared_runtimes: Any, where: Any, op: str, dtype: str) -> None:
    rt = shared_runtimes[where]
    size = rt.world_size
    values = [numbers(dtype, (2 * size, 3), rank) for rank in range(size)]

    def body(rank: int) -> Any:
        comm, mine = synk.comm, values[rank]
        kept = mine.copy()
        results = [
            comm.all_reduce(mine, op),
            [comm.reduce(mine, op, root) for root in range(size)],
            comm.reduce_scatter(mine, op),
            comm.all_reduce(mine[0, 0], op),
        ]
        np.testing.assert_array_equal(mine, kept)
        return pickle.dumps(results)

    everyone = [pickle.loads(each) for each in on_each(rt, body)]
    total = reduced(op, values)
    for rank, (all_reduced, to_roots, scattered, single) in enumerate(everyone):
        assert_same(all_reduced, total, is_rounded=True)
        assert [root for root, value in enumerate(to_roots) if value is not None] == [rank]
        assert_same(to_roots[rank], total, is_rounded=True)
        assert_same(scattered, total[2 * rank : 2 * rank + 2], is_rounded=True)
        assert_same(single, total[0, 0], is_rounded=True)
        assert_same(all_reduced, everyone[0][0])  # the same bits everywhere


@pytest.mark.parametrize("where", [2, 3, "inline"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.sampled(90)
def test_arrays_of_any_size(shared_runtimes: Any, where: Any, op: str, count: int) -> None:
    rt = shared_runtimes[where]
    values = [np.random.default_rng(rank).integers(-2, 3, count).astype("f8") for rank in range(rt.world_size)]

    def body(rank: int) -> Any:
        return synk.comm.all_reduce(np.random.default_rng(rank).integers(-2, 3, count).astype("f8"), op)

    for got in on_each(rt, body):
        assert_same(got, reduced(op, values), is_rounded=True)


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.sampled(90)
def test_averages_weigh_by_rows_or_as_told(shared_runtimes: Any, where: Any) -> None:
    """The average of means is the mean over all rows, however they are split; ranks without rows do not count."""
    rt = shared_runtimes[where]

    def mean_of(x: np.ndarray, weights: Any) -> Any:
        comm = synk.comm
        share = None
        if weights is not None:
            share = weights[comm.rank] / sum(weights[rank] for rank in comm.ranks)
        at_root = comm.reduce(x.mean(axis=0), weight=share)
        return comm.all_reduce(x.mean(axis=0), "avg", weight=share), x[0] if at_root is None else at_root

    f = rt.function(mean_of, bcast_inputs="weights", outputs=("first", "first"))
    rng = np.random.default_rng(0)
    for rows in (1, 2, 7, 50):
        x = rng.normal(size=(rows, 3))
        for got in f(x, None):
            np.testing.assert_allclose(got, x.mean(axis=0), rtol=1e-13)
        parts = [part for part in np.array_split(x, rt.world_size) if len(part)]
        weights = [1.0, 5.0, 2.0, 0.5][: rt.world_size]
        expected = np.average([part.mean(axis=0) for part in parts], axis=0, weights=weights[: len(parts)])
        for got in f(x, weights):
            np.testing.assert_allclose(got, expected, rtol=1e-13)


# ----- copies


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", ["f2", "f8", "i1", "u8", "c16", "?"])
@pytest.mark.sampled(90)
def test_broadcast_and_all_gather_move_arrays(shared_runtimes: Any, where: Any, dtype: str) -> None:
    rt = shared_runtimes[where]
    size = rt.world_size
    for shape in ((3, 2), (), (0, 4), (50_000,)):
        values = [numbers(dtype, shape, rank) for rank in range(size)]

        def body(rank: int) -> Any:
            mine = values[rank]  # noqa: B023
            results = [[synk.comm.broadcast(mine, root) for root in range(size)], synk.comm.all_gather(mine)]
            return pickle.dumps(results)

        for roots, gathered in map(pickle.loads, on_each(rt, body)):
            assert_same(roots, values)
            assert_same(gathered, np.stack(values))


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("count", [0, 3, 300_000])
@pytest.mark.sampled(90)
def test_messages_go_round_a_ring_in_order_and_by_tag(shared_runtimes: Any, where: Any, count: int) -> None:
    rt = shared_runtimes[where]
    size = rt.world_size

    def body(rank: int) -> Any:
        comm = synk.comm
        right, left = (rank + 1) % size, (rank - 1) % size
        like = np.empty(count)
        if size == 1:
            return True
        for turn in range(3):
            mine = np.full(count, 10.0 * rank + turn)
            if rank % 2:
                got = comm.recv(left, like=like, tag=turn % 2)
                comm.send(mine, right, tag=turn % 2)
            else:
                comm.send(mine, right, tag=turn % 2)
                got = comm.recv(left, like=like, tag=turn % 2)
            np.testing.assert_array_equal(got, np.full(count, 10.0 * left + turn))
        comm.barrier()
        return True

    assert all(on_each(rt, body))


@pytest.mark.parametrize("where", EVERYWHERE)
def test_results_are_new_and_inputs_of_any_layout_are_taken(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    size = rt.world_size

    def body(rank: int) -> Any:
        comm = synk.comm
        base = np.arange(24.0).reshape(4, 6)
        for view in (base[::2, ::-3], base.T, np.asfortranarray(base), base[1:1], np.float64(3.0), [1.0, 2.0]):
            expected = np.asarray(view) * size
            got = comm.all_reduce(view, "sum")
            np.testing.assert_array_equal(got, expected)
            got += 1  # writeable, and nobody else's
            np.testing.assert_array_equal(comm.all_reduce(view, "sum"), expected)
            sent = np.array(view)
            received = comm.broadcast(sent, 0)
            received += 1
            np.testing.assert_array_equal(sent, view)
        return True

    assert all(on_each(rt, body))


# ----- with the rest of a call


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_training_step_is_one_call(shared_runtimes: Any, where: Any) -> None:
    """Gradient, all_reduce and update inside one function, against the serial program."""
    rt = shared_runtimes[where]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(23, 4)), rng.normal(size=23)
    w, xs, ys = rt.shared(np.zeros(4)), rt.shared(x, sharded=True), rt.shared(y, sharded=True)

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        residual = x @ w.value - y
        gradient = synk.comm.all_reduce(x.T @ residual / len(x))
        w.value = w.value - 0.1 * gradient
        return residual @ residual / len(x)

    f = rt.function(step)
    expected = np.zeros(4)
    for k in range(12):
        batch = None if k % 3 else rng.permutation(23)[:11]
        rows = slice(None) if batch is None else batch
        residual = x[rows] @ expected - y[rows]
        loss = f(xs, ys, batch=batch)
        np.testing.assert_allclose(loss, residual @ residual / len(residual), rtol=1e-10)
        expected = expected - 0.1 * x[rows].T @ residual / len(residual)
        values = everywhere(rt, w)
        assert_same(values, [values[0]] * rt.world_size)  # the replicas hold the same bits
        np.testing.assert_allclose(values[0], expected, rtol=1e-10)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_only_the_ranks_with_rows_take_part(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    size = rt.world_size
    x = rt.shared(np.arange(2.0 * size), sharded=True)

    def body(x: np.ndarray) -> Any:
        comm = synk.comm
        assert comm.rank == comm.ranks.index(comm.ranks[comm.rank])
        gathered = comm.all_gather(np.array([comm.ranks[comm.rank]]))
        first, last = comm.broadcast(x[:1], 0), comm.broadcast(x[:1], comm.world_size - 1)
        return repr((gathered.tolist(), first.tolist(), last.tolist(), comm.all_reduce(np.ones(1), "sum").tolist()))

    f = rt.function(body, outputs=None)
    for ranks in ({0, size - 1}, {size - 1}, set(range(size // 2, size)), set(range(size))):
        present = sorted(ranks)
        batch = [2 * rank for rank in present]
        expected = repr(([[rank] for rank in present], [2.0 * present[0]], [2.0 * present[-1]], [float(len(present))]))
        assert f(x, batch=batch) == [expected if rank in ranks else None for rank in range(size)]
    if size > 1:
        with pytest.raises(ValueError, match=r"got root=1, expected a rank of this call, an int from 0 to 0\."):
            rt.function(lambda x: synk.comm.broadcast(x[:1], 1), outputs=None)(x, batch=[2 * size - 1])


def test_torch_tensors_stay_tensors(shared_runtimes: Any) -> None:
    rt = shared_runtimes["inline"]

    def body(x: Any) -> Any:
        results = [synk.comm.all_reduce(x, "sum"), synk.comm.broadcast(x), synk.comm.all_gather(x)[0]]
        results += [synk.comm.reduce(x, "max"), synk.comm.reduce_scatter(x, "sum")]
        assert all(type(each).__name__ == "Tensor" for each in results)
        return sum(results)

    f = rt.function(body, outputs="gather", framework="torch")
    assert_same(f(np.arange(4.0)), np.arange(4.0) * 5)


VERBS: dict[str, Any] = {
    "all_reduce": lambda x: synk.comm.all_reduce(x, "sum"),
    "reduce": lambda x: synk.comm.reduce(x, "sum"),
    "broadcast": lambda x: synk.comm.broadcast(x),
    "all_gather": lambda x: synk.comm.all_gather(x),
    "reduce_scatter": lambda x: synk.comm.reduce_scatter(x),
    "send": lambda x: synk.comm.send(x, 1 - synk.comm.rank),
    "recv": lambda x: synk.comm.recv(1 - synk.comm.rank, like=x),
}


@pytest.mark.parametrize("framework", [None, "torch"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_tensor_that_requires_grad_is_refused(shared_runtimes: Any, verb: str, framework: Any) -> None:
    """Its gradient would end there without a word. The same tensor detached is taken."""
    pytest.importorskip("torch")
    rt, communicate = shared_runtimes[2], VERBS[verb]

    def body(x: Any, is_detached: bool) -> int:
        import torch

        leaf = torch.ones(len(x), requires_grad=True)
        for tensor in (leaf, leaf * 2):
            communicate(tensor.detach() if is_detached else tensor)
        return 1

    f = rt.function(body, outputs="sum", framework=framework, bcast_inputs="is_detached")
    with pytest.raises(TypeError, match=rf"cannot {verb} a torch tensor: .*requires grad.*\.detach\(\)"):
        f(np.arange(4.0), False)
    if verb not in ("send", "recv"):
        assert f(np.arange(4.0), True) == 2


# ----- misuse


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (lambda comm: comm.all_reduce(np.ones(2), "mean"), ValueError, "op 'mean'"),
        (lambda comm: comm.reduce_scatter(np.ones(2), "gather"), ValueError, "op 'gather'"),
        (lambda comm: comm.all_reduce(np.ones(2, int)), TypeError, "int64"),
        (lambda comm: comm.all_reduce(np.ones(2, bool), "sum"), TypeError, "bool"),
        (lambda comm: comm.all_reduce(np.ones(2, complex), "max"), TypeError, "complex"),
        (lambda comm: comm.all_reduce(np.array(["a"]), "max"), UnsupportedError, "str"),
        (lambda comm: comm.all_reduce(np.array([None]), "sum"), TypeError, "object"),
        (lambda comm: comm.reduce_scatter(np.ones(3), "sum"), ValueError, "multiple of 2 rows"),
        (lambda comm: comm.reduce_scatter(np.float64(3), "sum"), ValueError, "multiple of 2 rows"),
        (lambda comm: comm.reduce(np.ones(2), root=2), ValueError, "root=2"),
        (lambda comm: comm.broadcast(np.ones(2), root=-1), ValueError, "root=-1"),
        (lambda comm: comm.scatter(np.ones(2), None), TypeError, "root=NoneType None"),
        (lambda comm: [comm.broadcast(np.ones(2), each) for each in (1, True)], TypeError, "root=bool True"),
        (lambda comm: comm.send(np.ones(2), 5), ValueError, "5"),
        (lambda comm: comm.recv(-1, like=np.ones(2)), ValueError, "-1"),
    ],
)
def test_a_request_without_a_meaning_is_refused(
    shared_runtimes: Any, body: Any, error: type[Exception], words: str
) -> None:
    rt = shared_runtimes[2]
    with same_workers(rt), pytest.raises(error, match=words):
        rt.function(lambda x: body(synk.comm), outputs=None)(np.zeros(2))


@pytest.mark.parametrize(
    "requests",
    [
        (lambda comm: comm.all_reduce(np.ones(2)), lambda comm: comm.all_reduce(np.ones(3))),
        (lambda comm: comm.all_reduce(np.ones(2)), lambda comm: comm.all_reduce(np.ones(2, "f4"))),
        (lambda comm: comm.all_reduce(np.ones(2), "sum"), lambda comm: comm.all_reduce(np.ones(2), "max")),
        (lambda comm: comm.all_reduce(np.ones(2)), lambda comm: comm.all_gather(np.ones(2))),
        (lambda comm: comm.broadcast(np.ones(2), 0), lambda comm: comm.broadcast(np.ones(2), 1)),
        (lambda comm: comm.barrier(), lambda comm: None),
        (lambda comm: None, lambda comm: comm.all_reduce(np.ones(2))),
        (lambda comm: comm.recv(1, like=np.ones(2)), lambda comm: None),
    ],
)
def test_ranks_that_disagree_are_told_and_nobody_hangs(shared_runtimes: Any, requests: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(2))

    def body(x: np.ndarray) -> float:
        w.value = w.value + 1
        requests[synk.comm.rank](synk.comm)
        return 0.0

    with same_workers(rt), pytest.raises(CollectiveMismatch, match=r"rank 0.*rank 1|rank 1.*rank 0"):
        rt.function(body)(np.zeros(2))
    assert_same(everywhere(rt, w), [np.zeros(2)] * 2)


def test_an_exception_on_one_rank_is_the_error_and_not_the_wait_of_its_peers(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]

    def body(x: np.ndarray) -> Any:
        if synk.comm.rank == 1:
            raise LookupError("rank 1 has no data")
        return synk.comm.all_reduce(np.ones(2))

    with same_workers(rt), pytest.raises(LookupError, match="rank 1 has no data"):
        rt.function(body)(np.zeros(3))
