"""Variables as arguments: shards stay where they are, ``batch`` and ``shard_batch`` pick among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rank_arrays import assert_same, numbers
from support.seeds import examples

from synk.errors import CollectiveMismatch

WORKERS = (1, 2, 3, 4)
EVERYWHERE = (3, "inline", "1+3", *(pytest.param(where, marks=pytest.mark.storm) for where in (1, 2, 4)))


class Sharded:
    """A sharded variable with the rows that each rank holds; ``whole`` is all of them, rank after rank."""

    def __init__(self, rt: Any, lengths: list[int], seed: int = 0) -> None:
        self.rt = rt
        self.shards = [numbers("f8", (length, 2), seed + rank) for rank, length in enumerate(lengths)]
        self.whole = np.concatenate(self.shards)
        self.variable = rt.shared(np.zeros((1, 2)), sharded=True, name="x")
        for rank, shard in enumerate(self.shards):
            rt.set_value(self.variable, shard, rank=rank)
        self.edges = np.concatenate([[0], np.cumsum(lengths)]).astype(int)

    def owned(self, positions: np.ndarray) -> list[np.ndarray]:
        """Return the selected positions of each rank, in the order given."""
        return [positions[(low <= positions) & (positions < high)] for low, high in zip(self.edges, self.edges[1:])]


def pick(batch: Any, count: int) -> np.ndarray:
    """Return the positions that NumPy picks of ``count`` rows."""
    positions = np.arange(count)
    if batch is None:
        return positions
    if isinstance(batch, int):
        return positions[:batch]
    return positions[batch] if isinstance(batch, (slice, np.ndarray)) else positions[np.array(batch, int)]


def batch_of(kind: str, count: int, rng: np.random.Generator) -> Any:
    """Return a batch of a given kind that picks at least one of ``count`` rows."""
    low, high = sorted(rng.integers(0, count, 2).tolist())
    return {
        "none": None,
        "count": int(rng.integers(1, count + 1)),
        "slice": slice(low, high + 1),
        "step": slice(low, None, int(rng.integers(1, 4))),
        "backwards": slice(None, None, -int(rng.integers(1, 3))),
        "list": rng.integers(-count, count, int(rng.integers(1, 2 * count + 1))).tolist(),
        "array": rng.permutation(count)[: int(rng.integers(1, count + 1))],
        "mask": (rng.random(count) < 0.6) | (np.arange(count) == low),
    }[kind]


KINDS = ["none", "count", "slice", "step", "backwards", "list", "array", "mask"]
calls = {
    "lengths": st.lists(st.integers(0, 6), min_size=4, max_size=4),
    "kind": st.sampled_from(KINDS),
    "num_slices": st.sampled_from([1, 1, 2, 3, 7]),
    "seed": st.integers(0, 1000),
}
thorough = examples(5)


class Functions:
    """One set of functions per runtime: of the shards alone, and of the shards with other inputs."""

    def __init__(self, rt: Any) -> None:
        outputs = ("sum", "gather", "avg", None)
        self.alone = rt.function(lambda x: (x.sum(0), x * 2, x.mean(0), len(x)), outputs=outputs)
        self.beside = rt.function(
            lambda x, y, w: ((x * y[:, None]).sum(0) * w, x * y[:, None], x.mean(0), len(y)),
            outputs=outputs,
            bcast_inputs="w",
        )


@pytest.fixture(scope="module")
def functions(shared_runtimes: Any) -> Any:
    made: dict[int, Functions] = {}

    def get(rt: Any) -> Functions:
        if id(rt) not in made:
            made[id(rt)] = Functions(rt)
        return made[id(rt)]

    return get


def check(result: Any, rows: np.ndarray, counts: list[int], num_slices: int, scale: float = 1.0) -> None:
    """Compare the four outputs with NumPy on the selected rows, in the caller's order."""
    total, doubled, mean, lengths = result
    assert_same(total, rows.sum(axis=0) * scale)
    assert_same(doubled, rows * 2 if scale == 1.0 else rows)
    if scale == 1.0:
        assert_same(mean, rows.mean(axis=0), is_rounded=True)
    got = [sum(entry) if isinstance(entry, list) else entry or 0 for entry in lengths]
    assert got == counts


@pytest.mark.parametrize("where", EVERYWHERE)
@thorough
@given(**calls)
def test_a_call_on_shards_equals_numpy_on_all_rows(
    shared_runtimes: Any, functions: Any, where: Any, lengths: list[int], kind: str, num_slices: int, seed: int
) -> None:
    rt = shared_runtimes[where]
    lengths = lengths[: rt.world_size]
    lengths[-1] += not sum(lengths)
    x = Sharded(rt, lengths, seed)
    batch = batch_of(kind, sum(lengths), np.random.default_rng(seed))
    positions = pick(batch, sum(lengths))
    counts = [len(own) for own in x.owned(positions)]
    f = functions(rt)
    check(f.alone(x.variable, batch=batch, num_slices=num_slices), x.whole[positions], counts, num_slices)
    assert_same(f.alone.serial(x.variable, batch=batch)[0], x.whole[positions].sum(axis=0))
    # Other inputs hold the whole data set, or, as minibatch data, the rows of the batch in its order.
    y = np.random.default_rng(seed).integers(-3, 4, sum(lengths)).astype(float)
    w = rt.shared(2.0)
    rows = x.whole[positions] * y[positions][:, None]
    inputs = [y, rt.data(y)]
    if batch is not None:
        inputs.append(rt.data(np.append(y[positions], [9.0] * (seed % 3)), minibatch=True))
    for given_y in inputs:
        result = f.beside(x.variable, given_y, w, batch=batch, num_slices=num_slices)
        check(result, rows, counts, num_slices, scale=2.0)


@pytest.mark.parametrize("where", EVERYWHERE)
@thorough
@given(is_per_rank=st.booleans(), **calls)
def test_shard_batch_picks_among_the_rows_of_each_rank(
    shared_runtimes: Any,
    functions: Any,
    where: Any,
    is_per_rank: bool,
    lengths: list[int],
    kind: str,
    num_slices: int,
    seed: int,
) -> None:
    rt = shared_runtimes[where]
    lengths = [length + 1 for length in lengths[: rt.world_size]]
    x = Sharded(rt, lengths, seed)
    rng = np.random.default_rng(seed)
    if is_per_rank:
        shard_batch: Any = [batch_of(kind, length, rng) for length in lengths]
        if not any(isinstance(entry, (slice, list, np.ndarray)) for entry in shard_batch):
            shard_batch[0] = slice(None)
        entries = shard_batch
    else:
        shard_batch = batch_of("slice" if kind == "mask" else kind, min(lengths), rng)
        entries = [shard_batch] * len(lengths)
    local = [pick(entry, length) for entry, length in zip(entries, lengths, strict=True)]
    rows = np.concatenate([shard[own] for shard, own in zip(x.shards, local, strict=True)])
    counts = [len(own) for own in local]
    f = functions(rt)
    if shard_batch is None:
        shard_batch = slice(None)
    check(f.alone(x.variable, shard_batch=shard_batch, num_slices=num_slices), rows, counts, num_slices)
    # Other inputs hold one row for each selected one, rank after rank.
    y = np.arange(len(rows)) - 2.0
    result = f.beside(x.variable, y, rt.shared(2.0), shard_batch=shard_batch, num_slices=num_slices)
    check(result, rows * y[:, None], counts, num_slices, scale=2.0)
    # Or a batch of their own picks as many rows.
    whole = rng.integers(-3, 4, len(rows) + seed % 3).astype(float)
    for batch in (rng.permutation(len(whole))[: len(rows)], slice(None, -len(rows) - 1, -1), slice(len(rows))):
        picked = whole[batch]
        inputs = [whole, rt.data(whole)]
        if isinstance(batch, slice) and batch.step is None:
            inputs.append(rt.data(picked, minibatch=True))
        for given_y in inputs:
            options = {"batch": batch, "shard_batch": shard_batch, "num_slices": num_slices}
            result = f.beside(x.variable, given_y, rt.shared(2.0), **options)
            check(result, rows * picked[:, None], counts, num_slices, scale=2.0)


@pytest.mark.parametrize("where", (*WORKERS, "inline"))
def test_a_call_on_resident_data_moves_nothing(shared_runtimes: Any, where: Any) -> None:
    """One doorbell to each rank and one back; no byte staged, pickled or written to a pipe beside them."""
    rt = shared_runtimes[where]
    x, w = rt.shared(np.ones((4 * rt.world_size, 2)), sharded=True), rt.shared(np.ones(2))
    f = rt.function(lambda x, w: (x @ w).sum(), bcast_inputs="w", outputs="sum")
    for options in ({}, {"shard_batch": slice(1, 3)}, {"batch": slice(0, None, 2)}):
        f(x, w, **options)
        f(x, w, **options)
        before = dict(rt.counters)
        expected = {"shard_batch": 4.0, "batch": 4.0}.get(next(iter(options), ""), 8.0)
        assert f(x, w, **options) == expected * rt.world_size
        sent = {name: rt.counters[name] - before[name] for name in before}
        assert (sent["messages_down"], sent["messages_up"]) == (rt.world_size, rt.world_size)
        assert (sent["bytes_down"], sent["bytes_up"]) == (8 * rt.world_size, 8 * rt.world_size)
        assert (sent["bytes_staged"], sent["bytes_pickled"]) == (0, 0)


@pytest.mark.parametrize("where", [1, 3, "inline"])
def test_a_shared_tree_of_parameters_is_not_copied_again(shared_runtimes: Any, where: Any) -> None:
    """The same call with the plain tree copies its leaves each time. ``Data`` of a tree names this way."""
    rt = shared_runtimes[where]
    tree = {"w": np.arange(1000.0), "b": [np.ones(3), np.full(2, 2.0)]}
    f = rt.function(
        lambda p, x: p["w"].sum() + p["b"][0].sum() * p["b"][1].sum() + x.sum(), bcast_inputs="p", outputs="sum"
    )
    x = rt.data(np.zeros(4 * rt.world_size))
    for passed, nbytes in ((tree, 8 * 1005), (rt.shared(tree), 0)):
        for _ in range(3):
            f(passed, x)
        before = dict(rt.counters)
        assert f(passed, x) == rt.world_size * (499500 + 3 * 4)
        assert f.plan(passed, x).is_compiled
        assert rt.counters["bytes_pickled"] == before["bytes_pickled"]
        sent = rt.counters["bytes_staged"] - before["bytes_staged"]
        assert sent >= nbytes if nbytes else sent == 0
    with pytest.raises(TypeError, match=r"got a dict.*synk\.shared"):
        rt.data(tree)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_shards_arrive_read_only_and_as_views_where_they_are_a_range(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    x = rt.shared(np.arange(4.0 * rt.world_size), sharded=True)
    f = rt.function(lambda x: (x.flags.writeable, x.flags.owndata), outputs=None)
    views: list[dict[str, Any]] = [
        {},
        {"batch": slice(1, None, 2)},
        {"shard_batch": slice(None, None, -2)},
        {"batch": 3},
    ]
    for options in views:
        assert set(f(x, **options)) <= {(False, False), None}
    assert set(f(x, shard_batch=[2, 0])) == {(False, True)}


@pytest.mark.parametrize("where", EVERYWHERE)
def test_several_sharded_variables_together_and_by_name(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    x, y = numbers("f8", (9, 2), 0), numbers("i8", (9,), 1)
    xs, ys = rt.shared(x, sharded=True), rt.shared(y, sharded=True)
    f = rt.function(lambda a, b, *, c=None: a * b[:, None] + (0 if c is None else c[:, None]), outputs="gather")
    assert_same(f(xs, ys), x * y[:, None])
    assert_same(f(b=ys, a=xs), x * y[:, None])
    assert_same(f(xs, b=ys, c=np.arange(9.0), batch=[8, 0, 3]), (x * y[:, None] + np.arange(9.0)[:, None])[[8, 0, 3]])
    assert_same(f(xs, xs.value[:, 0] * 0 + 2.0), x * 2)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_nested_sharded_variable_is_a_data_set(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    x, y = numbers("f4", (9, 2), 0), numbers("i8", (9,), 1)
    data = rt.shared({"x": x, "y": y}, sharded=True, name="data")
    f = rt.function(lambda d: (d["x"] * d["y"][:, None].astype("f4"), d["y"].sum()), outputs=("gather", "sum"))
    product = x * y[:, None].astype("f4")
    for batch in (None, 4, slice(7, 1, -2), [0, 8, 8, 3]):
        rows = pick(batch, 9)
        for num_slices in (1, 2):
            got, total = f(data, batch=batch, num_slices=num_slices)
            assert_same(got, product[rows])
            assert total == y[rows].sum()
    with pytest.raises(TypeError, match=r"nested sharded variable"):
        f.serial(data)
    new = {"x": numbers("f4", (6, 2), 5), "y": numbers("i8", (6,), 6)}
    data.value = new
    assert_same(data.value, new)
    assert f(data)[1] == new["y"].sum()


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("batch", [None, 0, [], slice(2, 2)])
def test_no_rows_at_all(shared_runtimes: Any, where: Any, batch: Any) -> None:
    rt = shared_runtimes[where]
    x = rt.shared(np.zeros((0, 2)) if batch is None else np.ones((5, 2)), sharded=True)
    f = rt.function(lambda x: (x.sum(0), x), outputs=("sum", "gather"))
    total, rows = f(x, batch=batch)
    assert_same(total, np.zeros(2))
    assert_same(rows, np.zeros((0, 2)))
    with pytest.raises(ValueError, match="no rows"):
        rt.function(lambda x: x.sum(0))(x, batch=batch)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("value", [np.arange(3.0), np.float32(2), {"a": np.arange(3), "b": (np.ones(2), None)}])
def test_a_replica_is_a_broadcast_argument(shared_runtimes: Any, where: Any, value: Any) -> None:
    rt = shared_runtimes[where]
    w = rt.shared(value)
    f = rt.function(lambda w, x: [w, x.sum()], bcast_inputs="w", outputs=["first", "sum"])
    for arguments in ({"w": w, "x": np.ones(5)}, {"x": np.ones(5), "w": value}):
        got, total = f(**arguments)
        assert_same(got, value)
        assert total == 5
    alone = rt.function(lambda w: w, bcast_inputs="w", outputs="first")
    assert_same(alone(w), value)


def test_an_argument_and_a_closure_see_the_same_assignment(shared_runtimes: Any) -> None:
    """Passed as an argument it is the value of before the call, however the function assigns it."""
    rt = shared_runtimes[2]
    w, x = rt.shared(np.zeros(2)), rt.shared(np.arange(4.0), sharded=True)

    def step(w_old: np.ndarray, x_old: np.ndarray) -> Any:
        w.value = w.value + 1
        x.value = x.value * 2
        return w_old[0], w.value[0], x_old, x.value

    f = rt.function(step, bcast_inputs="w_old", outputs=("max", "max", "gather", "gather"))
    for count in range(3):
        old, new, x_old, x_new = f(w, x)
        assert (old, new) == (count, count + 1)
        assert_same(x_old, np.arange(4.0) * 2**count)
        assert_same(x_new, np.arange(4.0) * 2 ** (count + 1))


# ----- misuse


def test_replicated_and_sharded_are_not_taken_for_one_another(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w, x = rt.shared(np.ones(4), name="w"), rt.shared(np.ones(4), sharded=True, name="x")
    with pytest.raises(ValueError, match=r"'w' is replicated; add 'rows' to bcast_inputs"):
        rt.function(lambda rows: 0.0)(w)
    with pytest.raises(ValueError, match=r"'x' is sharded; take it out of bcast_inputs"):
        rt.function(lambda rows: 0.0, bcast_inputs="rows")(x)


def test_inputs_that_do_not_match_the_shards(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x, y = Sharded(rt, [3, 2]).variable, Sharded(rt, [2, 3]).variable
    w, plain = rt.shared(np.ones(5)), np.ones(5)
    f = rt.function(lambda a, b: (a[:, 0] if a.ndim > 1 else a).sum(), outputs="sum")
    g = rt.function(lambda a: a.sum(), outputs="sum")
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"a with \[3, 2\] rows.*b with \[2, 3\]", lambda: f(x, y)),
        (ValueError, r"b of '<lambda>': got 4 rows, expected 5", lambda: f(x, np.ones(4))),
        (ValueError, r"b of '<lambda>': got 5 rows, expected 4.*selected", lambda: f(x, plain, shard_batch=slice(2))),
        (ValueError, "batch was given, but no argument is scattered", lambda: g(x, batch=2, shard_batch=slice(1))),
        (ValueError, "batch of 3 rows of b, expected 4, as many as shard_batch",
            lambda: f(x, plain, batch=3, shard_batch=slice(2))),
        (ValueError, "no argument is a sharded variable", lambda: g(plain, shard_batch=slice(1))),
        (ValueError, "no argument is a sharded variable", lambda: rt.function(lambda a: 0.0, bcast_inputs="a")(
            w, shard_batch=slice(1))),
        (ValueError, "3 entries", lambda: g(x, shard_batch=[slice(1)] * 3)),
        (IndexError, "shard of rank 1.*index 2", lambda: g(x, shard_batch=[2])),
        (IndexError, "index 5", lambda: g(x, batch=[5])),
        (IndexError, "batch=6", lambda: g(x, batch=6)),
        (IndexError, "mask of 4", lambda: g(x, batch=np.ones(4, bool))),
        (ValueError, "got 1 rows, expected 2 or more", lambda: f(x, rt.data(np.ones(1), minibatch=True), batch=[0, 2])),
    ]  # fmt: skip
    for error, words, call in wrong:
        messages = rt.counters["messages_down"]
        with pytest.raises(error, match=words):
            call()
        assert rt.counters["messages_down"] == messages, "nothing was sent"


def test_gathered_rows_that_do_not_fit_the_order_of_the_batch(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x = rt.shared(np.arange(6.0), sharded=True)
    f = rt.function(lambda x: x[:1], outputs="gather")
    with pytest.raises(CollectiveMismatch, match=r"2 rows for 4 selected"):
        f(x, batch=[5, 0, 4, 1])
    assert_same(rt.function(lambda x: x + 1, outputs="gather")(x, batch=[5, 0]), np.array([6.0, 1.0]))
