"""Where the arrays of a variable lie in its buffer, and which values it takes. No process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synk._wire.variables import check_value, leaf_offsets, leaf_order

DTYPES = [np.dtype(name) for name in ("f2", "f4", "f8", "i1", "i8", "c16", "?", "S3", "U2", "i4,f8", "M8[s]")]

leaves = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple)), min_size=1, max_size=8
)


def nbytes_of(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


@given(leaves)
@settings(max_examples=200, deadline=None)
def test_leaves_lie_apart_on_cache_lines(
    drawn: list[tuple[np.dtype, tuple[int, ...]]],
) -> None:
    dtypes, shapes = [dtype for dtype, _ in drawn], tuple(shape for _, shape in drawn)
    offsets, total = leaf_offsets(dtypes, shapes)
    order = leaf_order(dtypes)
    assert sorted(order) == list(range(len(drawn)))
    end = 0
    for position in order:
        assert offsets[position] % 64 == 0
        assert offsets[position] >= end
        end = offsets[position] + nbytes_of(dtypes[position], shapes[position])
    assert total == -(-end // 64) * 64


def test_empty_leaves_take_no_room() -> None:
    assert leaf_offsets([np.dtype("f8"), np.dtype("f8")], ((0, 3), (2,))) == ([0, 0], 64)
    assert leaf_offsets([np.dtype("f8")], ((0,),)) == ([0], 0)


# ----- what a variable takes

F4 = (np.dtype("f4"),)
SHAPE = ((3, 2),)


FITTING = [
    np.zeros((3, 2), "f4"),
    np.zeros((7, 2), "f4"),
    np.zeros((0, 2), "f4"),
    np.zeros((3, 2), "f2"),
    np.zeros((3, 2), "i2"),
    np.zeros((3, 2), ">f4"),
    np.asfortranarray(np.zeros((3, 2), "f4")),
    [[1, 2.5]],
]
WRONG: list[tuple[Any, type[Exception], str]] = [
    (np.zeros((3, 2)), TypeError, r"'w': got dtype float64, expected float32.*astype\('float32'\)"),
    (np.zeros((3, 2), "c8"), TypeError, "complex64"),
    (np.zeros((3, 2), "U1"), TypeError, "<U1"),
    (np.zeros(3, "f4"), ValueError, r"1 axes \(3,\), expected 2 \(3, 2\)"),
    (np.zeros((3, 2, 1), "f4"), ValueError, "3 axes"),
    (np.float32(1), ValueError, "0 axes"),
    (np.zeros((2, 3), "f4"), ValueError, r"shape \(2, 3\), expected \(rows, 2\): only axis 0"),
    ([[1j, 0]], TypeError, "complex128"),
]


def test_a_value_with_the_axes_and_a_dtype_that_fits_is_taken(subtests: Any) -> None:
    for number, value in enumerate(FITTING):
        with subtests.test(case=number):
            (array,) = check_value("w", [value], F4, SHAPE, is_sharded=False)
            np.testing.assert_array_equal(array, value)
    for value, error, words in WRONG:
        with subtests.test(case=words), pytest.raises(error, match=words):
            check_value("w", [value], F4, SHAPE, is_sharded=False)
    for value in (1.5, [1.5], np.nan):  # numbers are not truncated to integers
        with pytest.raises(TypeError, match="float64, expected int64"):
            check_value("n", [value], (np.dtype("i8"),), (np.shape(value),), is_sharded=False)


def test_the_leaf_is_named_where_there_are_several() -> None:
    with pytest.raises(TypeError, match=r"'model' \(leaf 1\)"):
        check_value(
            "model", [np.zeros(2), np.zeros(2)], (np.dtype("f8"), np.dtype("f4")), ((2,), (2,)), is_sharded=False
        )


def test_shards_have_as_many_rows_in_each_leaf() -> None:
    two, value = (np.dtype("f8"),) * 2, [np.zeros((2, 3)), np.zeros(4)]
    with pytest.raises(ValueError, match=r"'data'.*2.*4"):
        check_value("data", value, two, ((5, 3), (5,)), is_sharded=True)
    assert len(check_value("data", value, two, ((5, 3), (5,)), is_sharded=False)) == 2
