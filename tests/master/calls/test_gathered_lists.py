"""``gather`` joins lists of one object per row; the oracle is the serial list."""

from __future__ import annotations

import itertools
from collections import defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.told import told

from synk.errors import CollectiveMismatch

X = np.arange(7.0)
Both = namedtuple("Both", "names values")
FORMS: tuple[Callable[[Any], Any], ...] = (
    lambda x: [f"row {value}" * int(value) for value in x],
    lambda x: [float(value) for value in x],
    lambda x: [np.full(int(value) % 3, value) for value in x],
    lambda x: [{"value": float(value)} for value in x],
    lambda x: [(int(value), None) for value in x],
    lambda x: [value for value in x.tolist() if value % 2],  # not one per row
    lambda x: [],
    lambda x: (["a" for _ in x], x * 2),
    lambda x: {"names": [str(value) for value in x], "values": x + 1},
    lambda x: defaultdict(list, names=[str(value) for value in x], twice=2 * x),
    lambda x: Both([str(value) for value in x], x),
)


def test_lists_are_joined_in_the_order_of_the_rows(shared_runtimes: Any, subtests: Any) -> None:
    for where, number in itertools.product((1, 2, 3, "inline"), range(len(FORMS))):
        fn = FORMS[number]
        f = shared_runtimes[where].function(fn, outputs="gather")
        with subtests.test(where=where, form=number):
            for rows in (X, X, X[:3], np.tile(X, 4)):
                assert told(f(rows)) == told(fn(rows))
            assert told(f(X, num_slices=2)) == told(f.submit(X).result()) == told(fn(X))
            assert told(f(X, batch=[5, 0, 3])) == told(fn(X[[5, 0, 3]]))
            assert f.verify(X)


def test_lists_beside_other_ops(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: ([str(v) for v in x], x.sum(), [x * 2, x * 3]), outputs=("gather", "sum", ["gather"] * 2))
    assert told(f(X)) == told(([str(v) for v in X], X.sum(), [X * 2, X * 3]))
    only = rt.function(lambda x: {"a": [str(v) for v in x], "b": x}, outputs={"a": "gather", "b": "gather"})
    assert only(X, output_subset="a") == {"a": [str(v) for v in X]}


def test_rows_of_sharded_variables_in_the_order_of_the_batch(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(X, sharded=True)
    f = rt.function(lambda x: [str(v) for v in x], outputs="gather")
    for batch in (None, [6, 1, 4, 0]):
        assert f(w, batch=batch) == [str(v) for v in (X if batch is None else X[batch])]
    with pytest.raises(CollectiveMismatch, match="expected one output row per input row"):
        rt.function(lambda x: ["one"], outputs="gather")(w, batch=[6, 1, 4, 0])


REFUSED: list[tuple[Callable[[Any], Any], str, type[Exception], str]] = [
    (lambda x: tuple(x.tolist()), "gather", ValueError, r"got a single number, .* Return np.array\(list\) or the list"),
    (
        lambda x: "text",
        "gather",
        TypeError,
        r"got str, .* Return a list with an object for each row, or np.array\(list\)",
    ),
    (
        lambda x: [*map(float, x)],
        "sum",
        CollectiveMismatch,
        r'joined .* under outputs="gather"; of numbers np.array\(list\)',
    ),
    (lambda x: [1] if x[0] == 0 else x, "gather", CollectiveMismatch, "cannot gather the output"),
]


def test_what_cannot_be_gathered_names_the_array(shared_runtimes: Any, subtests: Any) -> None:
    for fn, op, error, words in REFUSED:
        with subtests.test(words=words), pytest.raises(error, match=words):
            shared_runtimes[2].function(fn, outputs=op)(X)
