"""``reproducible=``: the same bits for any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.names import named

import synk
from synk.errors import UnsupportedError

RNG = np.random.default_rng(5)
X = RNG.normal(size=(5003, 7)) * 10.0 ** RNG.integers(-8, 8, size=(5003, 1))
"""Rows of very different sizes: their sum depends on the order in almost every bit."""


def moments(x: np.ndarray) -> dict[str, Any]:
    return {
        "mean": x.mean(axis=0),
        "total": x.sum(),
        "product": np.prod(1 + x[:, 0] * 1e-9),
        "least": x.min(axis=0),
        "most": float(x.max()),
        "count": len(x),
        "half": np.tanh(x.mean(axis=0)).astype(np.float16),
        "complex": x.sum() + 1j * x[:, 1].sum(),
    }


OPS = {
    "mean": "avg", "total": "sum", "product": "prod", "least": "min", "most": "max", "count": "sum", "half": "avg",
    "complex": "sum",
}  # fmt: skip


def raw(result: dict[str, Any]) -> dict[str, Any]:
    return {key: (np.asarray(value).dtype, np.asarray(value).tobytes()) for key, value in result.items()}


@pytest.mark.parametrize("block_rows", [1024, 100, 1, 5003, 10_000])
def test_any_number_of_workers_gives_the_same_bits(shared_runtimes: Any, block_rows: int) -> None:
    x, found = X[:300] if block_rows == 1 else X, []
    for num_workers in (1, 2, 3):
        f = shared_runtimes[num_workers].function(moments, outputs=OPS, reproducible=block_rows)
        found += [f(x), f.serial(x)]
    assert all(raw(each) == raw(found[0]) for each in found)
    want = moments(x)
    for key, value in found[0].items():
        if key != "half":  # no sum over rows
            np.testing.assert_allclose(np.asarray(value, complex), np.asarray(want[key], complex), rtol=1e-9, atol=1e-3)


def test_without_it_the_bits_depend_on_the_workers(shared_runtimes: Any) -> None:
    """Or the test above would prove nothing."""
    found = [shared_runtimes[n].function(lambda x: x.sum(), outputs="sum")(X) for n in (1, 2, 3)]
    assert len({value.tobytes() for value in found}) > 1


def test_averages_are_weighted_by_the_rows_of_the_blocks(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: x.mean(), outputs="avg", reproducible=4)
    x = np.arange(9.0)  # blocks of 4, 4 and 1 rows
    assert f(x) == 4.0
    assert f.verify(x)


BATCHES = (None, 700, slice(10, 4000, 3), [5, 3, 900, 7] * 50, X[:, 0] > 0)


def test_batches_data_and_tensors_are_cut_into_blocks(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """What is gathered is as without blocks."""
    torch = pytest.importorskip("torch")
    w = np.linspace(0, 1, 7)
    options: dict[str, Any] = {
        "bcast_inputs": "w",
        "outputs": ("sum", "gather"),
        "reproducible": 64,
    }
    for number, batch in enumerate(BATCHES):
        for kind in ("array", "data", "tensor"):
            with subtests.test(batch=number, kind=kind):
                totals = set()
                for num_workers in (1, 2, 3):
                    rt = shared_runtimes[num_workers]
                    x = {"array": X, "data": rt.data(X), "tensor": torch.tensor(X)}[kind]
                    framework = "torch" if kind == "tensor" else None
                    f = rt.function(lambda x, w: ((x * w).sum(), x[:, 0]), framework=framework, **options)
                    total, column = f(x, torch.tensor(w) if framework else w, batch=batch)
                    chosen = X if batch is None else X[:batch] if isinstance(batch, int) else X[batch]
                    np.testing.assert_array_equal(column, chosen[:, 0])
                    np.testing.assert_allclose(total, (chosen * w).sum(), rtol=1e-9)
                    totals.add(np.asarray(total).tobytes())
                assert len(totals) == 1


def test_what_does_not_go_with_it_is_refused(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"per_rank": True}, "with per_rank"),
        ({"on_oom": "slices"}, "with on_oom"),
        ({"reproducible": -1}, "got reproducible=-1"),
        ({"reproducible": 2.5}, "got reproducible=2.5"),
    ]
    for options, words in wrong:
        with pytest.raises((ValueError, TypeError), match=words):
            rt.function(lambda x: x.sum(), outputs="sum", **{"reproducible": True, **options})
    f = rt.function(lambda x: x, outputs="sum", reproducible=4)
    with pytest.raises(ValueError, match="cannot combine blocks with op 'sum'"):
        f(np.ones(10))
    with pytest.raises(ValueError, match="got the sharded variable"):
        f(rt.shared(np.ones(8), sharded=True))
    shard = rt.shared(np.ones(8), sharded=True)
    f = rt.function(lambda x: x.sum() + shard.value.sum(), outputs="sum", reproducible=4)
    with pytest.raises(ValueError, match="got the sharded variable"):
        f(np.ones(10))


@pytest.mark.parametrize("kind", [2, 0])
def test_what_the_ranks_say_is_refused(shared_runtimes: Any, subtests: pytest.Subtests, kind: int) -> None:
    """And is there again in the next call of another function."""
    rt = shared_runtimes[kind]
    uses = {
        "rank": lambda x: x.sum() + synk.comm.rank,
        "rows": lambda x: x.sum() / synk.comm.total_rows,
        "rng": lambda x: x.sum() + synk.comm.rng.random(),
        "all_reduce": lambda x: synk.comm.all_reduce(x.sum(), "sum"),
        "send": lambda x: synk.comm.send(x, 0),
    }
    for name, use in uses.items():
        f = rt.function(use, outputs="sum", reproducible=4)
        for call in (f, f.serial):
            for rows in (3, 10, 100):
                with subtests.test(name, rows=rows), pytest.raises(UnsupportedError, match=r"cannot use synk\.comm\."):
                    call(np.ones(rows))
    assert rt.function(lambda x: synk.comm.total_rows, outputs="first")(np.ones(5)) == 5
    alone = rt.function(lambda w: w + synk.comm.rank, bcast_inputs="w", outputs="first", reproducible=4)
    with pytest.raises(UnsupportedError, match=r"cannot use synk\.comm\.rank"):
        alone(1.0)


def several(x: np.ndarray) -> Any:
    return [x.sum(), {"rows": x[:, 0], "list": [str(len(x))], "first": len(x), "most": x.max(), "each": (len(x), None)}]


def test_each_op_and_subset_goes_by_blocks(shared_runtimes: Any) -> None:
    """A callable and "first" fold the blocks in their order, and under op None there is one object for each block."""
    ops = ["sum", {"rows": "gather", "list": "gather", "first": "first", "most": max, "each": None}]
    x = X[:10]
    for num_workers in (1, 2, 3):
        f = shared_runtimes[num_workers].function(several, outputs=ops, reproducible=4)
        total, rest = f(x)
        assert np.isclose(total, x.sum())
        np.testing.assert_array_equal(rest.pop("rows"), x[:, 0])
        assert rest == {"list": ["4", "4", "2"], "first": 4, "most": x.max(), "each": [(4, None), (4, None), (2, None)]}
        assert f(x, output_subset=[0]) == [total]
        assert f.serial(x)[0].tobytes() == total.tobytes()
        with pytest.raises(IndexError, match="cannot select rows of 'several': got batch=11"):
            f(x, batch=11)


def test_the_default_op_is_checked(shared_runtimes: Any) -> None:
    for num_workers in (1, 2):
        rt = shared_runtimes[num_workers]
        assert rt.function(lambda x: x.mean(), reproducible=4)(np.arange(6.0)) == 2.5
        with pytest.raises(synk.errors.OpMismatch):
            rt.function(lambda x: x.sum(), reproducible=4)(np.arange(6.0))
    f = rt.function(np.sum, outputs="sum", reproducible=4)
    with pytest.raises(ValueError, match=r"cannot submit .* reproducible=4"):
        f.submit(np.zeros(3))
    with pytest.raises(ValueError, match=r"cannot repeat .* reproducible="):
        f.repeat(2, np.zeros(3))


def test_wrong_input_is_refused_as_by_an_ordinary_call(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    rt = shared_runtimes[2]
    fn = named("total", lambda x, y: x.sum() + y.sum())
    plain, blocks = rt.function(fn, outputs="sum"), rt.function(fn, outputs="sum", reproducible=4)
    wrong: dict[str, Callable[[Any], Any]] = {
        "row counts": lambda f: f(np.ones(10), np.ones(9)),
        "batch": lambda f: f(np.ones(10), np.ones(10), batch=slice(0, 4.5)),
        "mask": lambda f: f(np.ones(10), np.ones(10), batch=np.ones(9, bool)),
        "missing": lambda f: f(np.ones(10)),
        "type": lambda f: f(np.ones(10), {1, 2}),
        "objects": lambda f: f(np.ones(10), object()),
    }
    for name, call in wrong.items():
        with subtests.test(name):
            said = []
            for f in (plain, blocks):
                with pytest.raises((TypeError, ValueError, IndexError)) as caught:
                    call(f)
                said.append((caught.type, str(caught.value)))
            assert said[0] == said[1]
            assert blocks(np.ones(10), np.ones(10)) == 20.0
