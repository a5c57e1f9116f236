"""``gather`` joins lists of one object per row; the oracle is the serial list."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest

from synk.errors import CollectiveMismatch

X = np.arange(7.0)
Both = namedtuple("Both", "names values")


def same(value: Any, expected: Any) -> None:
    assert type(value) is type(expected)
    if isinstance(expected, dict):
        assert list(value) == list(expected)
        value, expected = list(value.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(value) == len(expected)
        for one, other in zip(value, expected):
            same(one, other)
    else:
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: [f"row {value}" for value in x],
        lambda x: [float(value) for value in x],
        lambda x: [np.full(int(value) % 3, value) for value in x],
        lambda x: [{"value": float(value)} for value in x],
        lambda x: [(int(value), None) for value in x],
        lambda x: [value for value in x.tolist() if value % 2],  # not one per row
        lambda x: [],
        lambda x: (["a" for _ in x], x * 2),
        lambda x: {"names": [str(value) for value in x], "values": x + 1},
        lambda x: Both([str(value) for value in x], x),
    ],
)
@pytest.mark.sampled(60)
def test_lists_are_joined_in_the_order_of_the_rows(shared_runtimes: Any, num_workers: Any, fn: Any) -> None:
    rt = shared_runtimes[num_workers]
    f = rt.function(fn, outputs="gather")
    for _ in range(3):
        same(f(X), fn(X))
    same(f(X, num_slices=2), fn(X))
    same(f(X, batch=[5, 0, 3]), fn(X[[5, 0, 3]]))
    same(f.submit(X).result(), fn(X))
    assert f.verify(X)


def test_lists_beside_other_ops(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: ([str(v) for v in x], x.sum(), [x * 2, x * 3]), outputs=("gather", "sum", ["gather"] * 2))
    names, total, doubled = f(X)
    assert names == [str(v) for v in X] and total == X.sum()
    same(doubled, [X * 2, X * 3])
    only = rt.function(lambda x: {"a": [str(v) for v in x], "b": x}, outputs={"a": "gather", "b": "gather"})
    assert only(X, output_subset="a") == {"a": [str(v) for v in X]}


def test_rows_of_sharded_variables_in_the_order_of_the_batch(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(X, sharded=True)
    f = rt.function(lambda x: [str(v) for v in x], outputs="gather")
    assert f(w) == [str(v) for v in X]
    assert f(w, batch=[6, 1, 4, 0]) == [str(v) for v in X[[6, 1, 4, 0]]]
    short = rt.function(lambda x: ["one"], outputs="gather")
    with pytest.raises(CollectiveMismatch, match="expected one output row per input row"):
        short(w, batch=[6, 1, 4, 0])


def test_what_cannot_be_gathered_names_the_array(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    with pytest.raises(ValueError, match=r"got a single number, .* Return np.array\(list\) or the list"):
        rt.function(lambda x: tuple(x.tolist()), outputs="gather")(X[:4])
    with pytest.raises(TypeError, match=r"got str, .* Return a list with an object for each row, or np.array\(list\)"):
        rt.function(lambda x: "text", outputs="gather")(X)
    with pytest.raises(CollectiveMismatch, match=r"joined .* under outputs=\"gather\"; of numbers np.array\(list\)"):
        rt.function(lambda x: [float(v) for v in x], outputs="sum")(X)
    with pytest.raises(CollectiveMismatch, match="cannot gather the output"):
        rt.function(lambda x: [1] if x[0] == 0 else x, outputs="gather")(X)


@pytest.mark.parametrize("num_workers", [2, 3, "inline"])
def test_a_defaultdict_is_joined_as_a_dict_is(shared_runtimes: Any, num_workers: Any) -> None:
    def fn(x: np.ndarray) -> Any:
        found: Any = defaultdict(list)
        for value in x:
            found["names"].append(f"row {value}")
        found["twice"] = 2 * x
        return found

    value = shared_runtimes[num_workers].function(fn, outputs="gather")(X)
    same(dict(value), dict(fn(X)))
