"""From what the ranks have published to the result of a call, against NumPy on the list of their values. No process.

Large outputs are put in place here as the plan of the assembly asks the ranks to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import REDUCIBLE, assert_same, numbers, reduced

from synk._master.calls.assembly import Assembly
from synk._pure.ops import EACH, OPS, REDUCTIONS
from synk._pure.trees import flatten, skeleton_of
from synk._wire.memory import Segment
from synk._wire.messages import LARGE_NBYTES, Layout, Leaf, slot_offsets
from synk.errors import CollectiveMismatch

LARGE = LARGE_NBYTES // 8 + 5


def op_of(outputs: Any) -> Any:
    """Return the ops of names in a nesting; None stays what a user writes."""
    if isinstance(outputs, dict):
        return {key: op_of(value) for key, value in outputs.items()}
    if isinstance(outputs, tuple):
        return tuple(map(op_of, outputs))
    return EACH if outputs is None else OPS[outputs]


def layout_of(value: Any) -> Layout:
    leaves, structure = flatten(value)
    arrays = [leaf if isinstance(leaf, (np.ndarray, np.generic)) else None for leaf in leaves]
    found = [Leaf((), None) if array is None else Leaf(array.shape, array.dtype) for array in arrays]
    return Layout(skeleton_of(structure, len(leaves)), tuple(found))


def combined(
    outputs: Any,
    values: Sequence[Any],
    rows: Sequence[int] | None = None,
    voters: Sequence[int] | None = None,
    world_size: int | None = None,
    subset: tuple[Any, ...] | None = None,
    order: np.ndarray | None = None,
) -> Any:
    """Return the result of a call whose ranks returned ``values``."""
    ranks = list(range(len(values))) if voters is None else list(voters)
    num_ranks = len(values) if world_size is None else world_size
    slot_nbytes = 1 << 21
    slots = Segment.create(num_ranks * slot_nbytes)
    layouts = [layout_of(value) for value in values]
    made = Assembly("f", op_of(outputs), subset, ranks, layouts, slots, slot_nbytes, num_ranks)
    root = np.full(made.result_nbytes, 0xAA, np.uint8)
    for rank, value, layout, positions in zip(ranks, values, layouts, made._positions):
        leaves = flatten(value)[0]
        ops = dict(zip(positions, made.ops))
        offsets, _ = slot_offsets(layout.leaves, [ops[k] for k in range(len(leaves))], len(ranks), False)
        for leaf, offset, item in zip(leaves, offsets, layout.leaves):
            if item.dtype is not None and item.nbytes < LARGE_NBYTES:
                slots.view(rank * slot_nbytes + offset, item.shape, item.dtype)[...] = leaf
        for move in made.moves[rank]:
            part = np.ascontiguousarray(leaves[move.leaf]).reshape(-1)
            if move.kind == "reduce":
                everyone = [np.asarray(flatten(each)[0][move.leaf]).reshape(-1) for each in values]
                part = reduced(move.op, [each[move.start : move.stop] for each in everyone], rows)
            start = move.offset + move.start * part.itemsize
            root[start : start + part.nbytes] = part.view(np.uint8)
    objects = [
        [leaf for leaf in flatten(value)[0] if not isinstance(leaf, (np.ndarray, np.generic))] for value in values
    ]
    result = made.build([1] * len(values) if rows is None else rows, objects if any(objects) else (), root, order)
    slots.close()
    return result


@pytest.mark.parametrize(("op", "dtype"), REDUCIBLE)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (4,), (2, 0), (3, 5)], ids=str)
@pytest.mark.sampled(60)
def test_reductions(op: str, dtype: str, num_ranks: int, shape: tuple[int, ...]) -> None:
    values = [numbers(dtype, shape, seed) for seed in range(num_ranks)]
    assert_same(combined(op, values), reduced(op, values), is_rounded=op in ("avg", "prod"))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("rows", [(1, 1), (3, 2), (7, 0, 1), (1, 5, 100)], ids=str)
def test_averages_are_weighted_by_rows(dtype: str, rows: tuple[int, ...]) -> None:
    values = [numbers(dtype, (6,), seed) for seed in range(len(rows))]
    assert_same(combined("avg", values, rows), reduced("avg", values, rows), is_rounded=True)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("op", sorted(REDUCTIONS))
@pytest.mark.parametrize("count", [LARGE_NBYTES // 8 - 1, LARGE_NBYTES // 8, LARGE])
def test_large_reductions_lie_where_the_ranks_put_them(op: str, count: int) -> None:
    values = [np.random.default_rng(seed).normal(size=count) for seed in range(3)]
    assert_same(combined(op, values, [2, 2, 2]), reduced(op, values), is_rounded=True)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("dtype", ["f8", "i4", "?", "U3", "M8[s]", "c8"])
@pytest.mark.parametrize("lengths", [(1,), (2, 1), (0, 3, 2), (2, LARGE, 1), (LARGE, LARGE, 0)], ids=str)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_gathered_rows(dtype: str, lengths: tuple[int, ...], is_ordered: bool) -> None:
    values = [numbers(dtype, (length,), seed) for seed, length in enumerate(lengths)]
    order = np.random.default_rng(0).permutation(sum(lengths)) if is_ordered else None
    whole = np.concatenate(values)
    expected = whole if order is None else whole[np.argsort(order)]
    assert_same(combined("gather", values, lengths, order=order), expected)


VALUES = {
    "array": [np.arange(3.0), np.arange(3.0) + 1, np.arange(3.0) + 2],
    "number": [np.float32(1), np.float32(2), np.float32(3)],
    "object": ["a", {1}, 3.5],
    "large": [np.full(LARGE, 1.0), np.full(LARGE, 2.0), np.full(LARGE, 3.0)],
    "other shapes": [np.zeros(2), np.zeros((3, 1)), np.float64(1)],
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("voters", [(0, 1, 2), (0, 2, 3), (1, 2, 4)], ids=str)
def test_op_none_gives_what_each_rank_returned(kind: str, voters: tuple[int, ...]) -> None:
    expected: list[Any] = [None] * 5
    for rank, value in zip(voters, VALUES[kind]):
        expected[rank] = value
    found = combined(None, VALUES[kind], voters=voters, world_size=5)
    assert len(found) == 5
    for one, other in zip(found, expected):
        assert type(one) is type(other)
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize("kind", VALUES)
def test_the_first_rank_alone_counts_for_op_first(kind: str) -> None:
    np.testing.assert_equal(combined("first", VALUES[kind]), VALUES[kind][0])


NESTED = {
    "a tuple": (("sum", "max"), lambda k: (np.float64(k), np.arange(4) + k), lambda s, m: (s, m)),
    "a dict": (
        {"b": "max", "a": "sum"},
        lambda k: {"b": np.arange(4) + k, "a": np.float64(k)},
        lambda s, m: {"b": m, "a": s},
    ),
    "one op for all": ("max", lambda k: [np.float64(k), (np.arange(4) + k,)], lambda s, m: [np.float64(2), (m,)]),
    "ops in a nesting": (
        {"x": ("sum", None), "y": "max"},
        lambda k: {"x": (np.float64(k), f"rank {k}"), "y": np.arange(4) + k},
        lambda s, m: {"x": (s, ["rank 0", "rank 1", "rank 2"]), "y": m},
    ),
    "None inside": (("sum", "max"), lambda k: (None, np.arange(4) + k), lambda s, m: (None, m)),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_outputs_keep_their_nesting(name: str) -> None:
    outputs, value, expected = NESTED[name]
    found = combined(outputs, [value(k) for k in range(3)])
    right = expected(np.float64(3), np.arange(4) + 2)
    assert flatten(found)[1] == flatten(right)[1]
    np.testing.assert_equal(flatten(found)[0], flatten(right)[0])


@pytest.mark.parametrize(
    ("subset", "expected"),
    [((0,), (3.0,)), ((2, 0), ("z", 3.0)), ((1,), (np.arange(2) + 3,)), ((), ())],
)
def test_a_subset_of_the_outputs(subset: tuple[int, ...], expected: Any) -> None:
    values = [(np.float64(k + 1), np.arange(2) + k, "z") for k in range(2)]
    found = combined(("sum", "sum", "first"), values, subset=subset)
    for one, other in zip(found, [expected[k] if subset != (1,) else np.arange(2) * 2 + 1 for k in range(len(subset))]):
        np.testing.assert_equal(one, other)
    assert len(found) == len(subset)


DIFFERENT = {
    "shapes": (
        "sum",
        [np.zeros(2), np.zeros(3)],
        r"rank 0: float64 \(2,\); rank 1: float64 \(3,\).*outputs=\"gather\"",
    ),
    "dtypes": ("max", [np.zeros(2), np.zeros(2, "f4")], r"float64 \(2,\); rank 1: float32 \(2,\)"),
    "trailing shapes": (
        "gather",
        [np.zeros((2, 2)), np.zeros((2, 3))],
        r"cannot gather .*the same dtype and trailing shape",
    ),
    "texts": ("gather", [np.array(["a"]), np.array(["ab"])], r"Give texts one width"),
    "a number and a tuple": ("sum", [np.float64(1), (np.float64(1),)], r"rank 0: value; rank 1: \(value,\)"),
    "other keys": ("sum", [{"a": np.float64(1)}, {"b": np.float64(1)}], r"\{'a': value\}; rank 1: \{'b': value\}"),
    "None on one rank": ("sum", [None, np.float64(1)], r"rank 0: None; rank 1: value"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_disagree_are_told(name: str) -> None:
    outputs, values, words = DIFFERENT[name]
    with pytest.raises(CollectiveMismatch, match=words):
        combined(outputs, values)


def test_gathered_rows_are_as_many_as_were_selected() -> None:
    with pytest.raises(CollectiveMismatch, match="got 3 rows for 2 selected ones"):
        combined("gather", [np.zeros(2), np.zeros(1)], order=np.arange(2))
