"""Programs over nodes give what they give on one machine with as many workers. Single calls: ``test_exactness.py``."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.rank_arrays import Median, assert_same

import synk

Pair = collections.namedtuple("Pair", "low high")
X = np.arange(7.0)


class Weighted(synk.Op):
    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return sum(value * count for value, count in zip(values, rows))


@dataclass
class Batch:
    x: Any
    label: str


class Point(NamedTuple):
    x: Any
    y: Any


class Model:
    scale = 1.0


def structures_of_outputs(rt: Any) -> Any:
    f = rt.function(
        lambda x, k: (x * k, {"mean": x.mean(), "n": len(x)}, [x.max(), None], Pair(x.min(), str(len(x)))),
        bcast_inputs="k",
        outputs=("gather", {"mean": "avg", "n": None}, "max", ("min", "first")),
    )
    found = f(X, 2.0)
    assert type(found[3]) is Pair
    return found, f(X[:2], 1.0)[1], f(X, 2.0, output_subset=[0])


def ops_of_the_user(rt: Any) -> Any:
    f = rt.function(
        lambda x: (float(x.max()), x, float(x.mean())), outputs=(lambda a, b: max(a, b), Median(), Weighted())
    )
    return [f(np.arange(10.0), num_slices=num_slices) for num_slices in (1, 2)]


def uneven_large_outputs(rt: Any) -> Any:
    grown = rt.function(lambda x: np.repeat(x, 30_000 if x[0] else 10)[:, None], outputs="gather")
    return grown(np.array([1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0]))


def lists_tables_and_sparse_matrices(rt: Any) -> Any:
    pandas, sparse = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    table = pandas.DataFrame({"a": X, "b": np.arange(7)}, index=list("abcdefg"))
    matrix = sparse.random(9, 5, 0.4, format="csr", random_state=1)
    return [
        rt.function(lambda x: [f"{value:g}" for value in x], outputs="gather")(X),
        rt.function(lambda frame: frame * 2, outputs="gather")(table).reset_index().to_dict("list"),
        rt.function(lambda m: np.asarray(m.sum(axis=0)).ravel(), outputs="sum")(matrix),
    ]


def nested_arguments(rt: Any) -> Any:
    f = rt.function(
        lambda fields, weights, *, k: (fields.x @ weights["w"] + weights["list"][1] * k, fields.label),
        bcast_inputs=("weights", "k"),
        outputs=("gather", "first"),
    )
    return f(Batch(np.arange(10.0).reshape(5, 2), "train"), {"w": np.array([1.0, 2.0]), "list": [None, 3.0]}, k=2)


def no_rows(rt: Any) -> Any:
    ranks = rt.function(lambda: (synk.comm.rank, synk.comm.world_size), outputs=None, per_rank=True)
    empty = rt.function(lambda x: x.sum(axis=0), outputs="sum")(np.empty((0, 3)))
    return empty, ranks(), raised(lambda: rt.function(lambda x: x.mean(), outputs="avg")(np.empty(0)))


def repetitions_submissions_and_streams(rt: Any) -> Any:
    counts: list[int] = []
    f = rt.function(lambda x: (counts.append(1), x.sum(), len(counts))[1:], outputs=("sum", "max"))
    total, talk = rt.function(np.sum, outputs="sum"), rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"))
    x, calls = np.ones(4), []
    for k in range(5):
        x[:] = k  # a submitted call has the values of the moment
        calls += [total.submit(x), talk.submit(x)]
    return [
        f.repeat(3, np.arange(5.0)),
        [float(call.result()) for call in calls],
        list(total.stream(np.full(4, k) for k in range(4))),
    ]


def captured_objects(rt: Any) -> Any:
    """A call computes with what they hold in the program then; what only a rank has changed stays its own."""
    small, numbers, model, seen, table = np.zeros(3), [1.0], Model(), [], np.zeros(100_000)
    box = {"offset": 0.0}

    def compute(x: np.ndarray) -> Any:
        seen.append(1)
        return x * model.scale + small[0] + sum(numbers) + box["offset"] + table.sum(), len(seen)

    f, found = rt.function(compute, outputs=("gather", "min")), []
    for _ in range(3):
        found.append(f(X))
        small[0] += 1
        numbers.append(2.0)
        model.scale *= 2
        box["offset"] = -5.0
        table[:] += 1
    return found, f.serial(X)[0]


def shards_that_have_outgrown_their_place(rt: Any) -> Any:
    """Ranks have made memory for both places of a shard, to one of which the program writes."""
    s, found = rt.shared(np.arange(4.0), sharded=True), []
    renew = rt.function(lambda: setattr(s, "value", np.full(5000, s.value[0])), outputs=None, per_rank=True)
    total = rt.function(lambda: float(s.value.sum()), outputs=None, per_rank=True)
    for _ in range(3):
        renew()
        renew()
        for rank in (1, 3, 1):
            s[rank] = np.arange(5000.0) + rank
            found.append(total())
    return found


def settings_of_libraries(rt: Any) -> Any:
    f = rt.function(lambda x: 1 / x, outputs="gather")
    with np.errstate(divide="raise"):
        error = raised(lambda: f(X))
    with np.errstate(divide="ignore"):
        return error[0], f(X)


def disagreement(rt: Any) -> Any:
    f = rt.function(lambda x: np.zeros(1 + int(x[0] == 6)), outputs="sum")
    g = rt.function(lambda x: (1.0, 2.0) if x[0] < 4 else {"a": 1.0}, outputs="max")
    h = rt.function(lambda x: np.zeros(100_000 + int(x[0] == 6)), outputs="sum")
    errors = [raised(lambda call=call: call(np.arange(8.0))) for call in (f, g, h)]
    assert "rank 2: float64 (1,); rank 3: float64 (2,)" in errors[0][1]
    return errors[:1], [name for name, _ in errors], h(np.arange(4.0)).sum()


def raised(act: Callable[[], Any]) -> tuple[str, str]:
    """Return the name of the exception that it raises, and what that says."""
    with pytest.raises(Exception) as caught:
        act()
    return type(caught.value).__name__, str(caught.value)


PROGRAMS: list[Callable[[Any], Any]] = [
    *(structures_of_outputs, ops_of_the_user, uneven_large_outputs, lists_tables_and_sparse_matrices, nested_arguments),
    *(no_rows, repetitions_submissions_and_streams, captured_objects, settings_of_libraries, disagreement),
    shards_that_have_outgrown_their_place,
]


def test_programs_give_what_they_give_on_one_machine(shared_runtimes: Any, subtests: Any) -> None:
    for number, program in enumerate(PROGRAMS):
        size, division = 4, ("1+3", "2+2")[number % 2]
        if program is lists_tables_and_sparse_matrices:  # each worker imports pandas and SciPy
            size, division = 2, "1+1"
        with subtests.test(case=program.__name__, division=division):
            expected, found = program(shared_runtimes[size]), program(shared_runtimes[division])
            if pickle.dumps(found) != pickle.dumps(expected):
                assert_same(found, expected)


def test_tensors(nodes: synk.Runtime) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(12.0, dtype=torch.bfloat16).reshape(6, 2)
    f = nodes.function(lambda x, w: x * w, bcast_inputs="w", outputs="gather", framework="torch")
    got = f(x, torch.tensor(3.0))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, x * 3)
