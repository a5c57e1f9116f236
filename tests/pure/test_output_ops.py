"""Which op belongs to which output, nestings taken apart and built again, batches that are refused. No process.

The oracles are optree and its ``tree_broadcast_prefix``. Which rows a batch means, and which ranks work on them:
``test_exactness.py`` and ``engine/test_shared.py``.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import namedtuple
from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import examples

from synk._pure.ops import EACH, OPS
from synk._pure.output_ops import each_op, match_ops, ops_of, wanted_leaves
from synk._pure.ranges import LINE_NBYTES, block_bounds, chunk_bounds
from synk._pure.shards import assign_owned, select_common
from synk._pure.trees import describe, flatten, output_names, paths, skeleton_of, unflatten

NAMES = sorted(OPS)


def skeleton(tree: Any) -> Any:
    leaves, structure = flatten(tree)
    return skeleton_of(structure, len(leaves))


@st.composite
def outputs_and_results(draw: Any, depth: int = 3) -> tuple[Any, Any]:
    """A nesting of ops, and a result of which it is a prefix."""
    if depth and draw(st.booleans()):
        children = draw(st.lists(outputs_and_results(depth - 1), min_size=1, max_size=3))
        ops, results = zip(*children)
        if draw(st.booleans()):
            return ops, results
        return {f"k{k}": op for k, op in enumerate(ops)}, {f"k{k}": result for k, result in enumerate(results)}
    leaf = st.just(0.0)
    below = st.one_of(leaf, st.lists(leaf, min_size=1, max_size=3).map(tuple), st.dictionaries(st.text(), leaf))
    return draw(st.sampled_from(NAMES)), draw(below)


@examples(50)
@given(outputs_and_results())
def test_an_op_stands_for_all_leaves_below_it(case: tuple[Any, Any]) -> None:
    outputs, result = case
    leaves = flatten(result)[0]
    expected = optree.tree_leaves(optree.tree_broadcast_prefix(outputs, result))
    assert match_ops(outputs, skeleton(result), len(leaves), "'f'") == expected
    assert list(each_op(ops_of(outputs, "'f'"))) == [OPS[name] for name in each_op(outputs)]


NO_PREFIX: list[tuple[Any, Any, str]] = [
    (("sum", "sum"), 0.0, r"its result is a single value, but outputs is \('sum', 'sum'\)"),
    (("sum",), (0.0, 0.0), r"its result is 2 values, but outputs is \('sum',\)"),
    ({"a": "sum"}, {"b": 0.0}, r"a dict with the keys \['b'\], but outputs is \{'a': 'sum'\}"),
    ({"a": "sum"}, (0.0,), "1 values"),
    (("sum",), {"a": 0.0}, "a dict with the keys"),
    (("sum", ("max",)), (0.0, 0.0), r"its result\[1\] is a single value, but outputs\[1\] is \('max',\)"),
    ({"a": ("sum", "max")}, {"a": (0.0,)}, r"its result\['a'\] is 1 values"),
]
MEANT = {
    "mean": "'avg'", "SUM": "'sum'", "concat": "'gather'", "all": "'min'", "any": "'max'", "list": "None",
    "gahter": "'gather'", "frist": "'first'", "xyz": "",
}  # fmt: skip


def test_what_does_not_fit_is_told(subtests: Any) -> None:
    """Ops that are no prefix of the result, misspelt ones, and callables that do not combine two values."""
    for outputs, result, words in NO_PREFIX:
        with subtests.test(words=words), pytest.raises(ValueError, match=words):
            match_ops(outputs, skeleton(result), len(flatten(result)[0]), "'f'")
    for word, meant in MEANT.items():
        with subtests.test(word=word):
            with pytest.raises(ValueError, match=f"got op '{word}', expected one of") as raised:
                ops_of(word, "'f'")
            assert (f"Did you mean {meant}?" if meant else "callable or a synk.Op.") in str(raised.value)
            assert meant or "Did you mean" not in str(raised.value)
    for outputs in (3, b"sum", {"sum"}):
        with (
            subtests.test(outputs=str(outputs)),
            pytest.raises(TypeError, match="expected an op, or a tuple, list or dict of ops"),
        ):
            ops_of(outputs, "'f'")
    bad: list[Any] = [lambda a: a, lambda a, b, c: a, lambda: 0, lambda a, axis=None: a, sum]
    for number, op in enumerate(bad):
        with subtests.test(bad=number), pytest.raises(TypeError, match=r"as an op, expected op\(a, b\)"):
            ops_of(op, "'f'")
    for op in (operator.add, max, min, lambda a, b: a, lambda a, b, c=1: a, lambda *values: values):
        assert not isinstance(ops_of(op, "'f'"), str)
    assert ops_of(None, "'f'") is EACH


SUBSETS: list[tuple[Any, Any, Any]] = [
    ((0.0, 0.0, 0.0), None, None),
    ((0.0, 0.0, 0.0), (), set()),
    ((0.0, 0.0, 0.0), (2, 0), {0, 2}),
    ((0.0, 0.0, 0.0), (-1,), {2}),
    ((0.0, (0.0, 0.0)), (1,), {1, 2}),
    ({"a": 0.0, "b": (0.0, 0.0)}, ("b",), {1, 2}),
    ((0.0,), (1,), IndexError),
    ((0.0,), ("a",), IndexError),
    (0.0, (0,), IndexError),
    ({"a": 0.0}, ("b",), KeyError),
]


def test_the_leaves_of_a_subset(subtests: Any) -> None:
    for result, subset, expected in SUBSETS:
        with subtests.test(result=str(result), subset=subset):
            if isinstance(expected, type):
                with pytest.raises(expected, match="cannot select output"):
                    wanted_leaves(skeleton(result), subset, "f")
            else:
                assert wanted_leaves(skeleton(result), subset, "f") == expected


Pair = namedtuple("Pair", "one two")

LEAVES = st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)
TREES = st.recursive(
    LEAVES | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@examples(50)
@given(TREES)
def test_leaves_are_those_of_optree_and_the_nesting_comes_back(tree: Any) -> None:
    leaves, structure = flatten(tree)
    assert leaves == optree.tree_leaves(tree)
    again = unflatten(structure, leaves)
    assert again == tree
    assert repr(again) == repr(tree), "types and the order of keys too"


@examples(50)
@given(TREES)
def test_each_path_leads_to_its_leaf(tree: Any) -> None:
    leaves, structure = flatten(tree)
    skeleton = skeleton_of(structure, len(leaves))
    assert flatten(skeleton)[0] == list(range(len(leaves)))
    for position, path in enumerate(paths(skeleton)):
        assert eval(f"tree{path}", {"tree": tree}) == leaves[position]


def test_in_words(subtests: Any) -> None:
    for tree, words, names in (
        (1.0, "one array", ["the output"]),
        ((1, 2), "(*, *)", ["output 0", "output 1"]),
        ([1, 2, 3], "[*, *, *]", ["output[0]", "output[1]", "output[2]"]),
        ({"b": (1, 2), "a": 2}, "{'a': *, 'b': (*, *)}", ["output['a']", "output['b'][0]", "output['b'][1]"]),
        ((1, None), "(*, None)", ["output[0]"]),
        (Pair(1, [2]), "Pair(one=*, two=[*])", ["output[0]", "output[1][0]"]),
    ):
        with subtests.test(tree=str(tree)):
            leaves, structure = flatten(tree)
            assert describe(structure) == words
            assert output_names(skeleton_of(structure, len(leaves))) == names


def test_lengths_may_differ_where_the_batch_means_the_same_rows() -> None:
    assert select_common(None, [("x", 5), ("y", 5), ("z", 5)], "'f'").count == 5
    for batch in (3, slice(1, 3), [2, 0], slice(0, 4)):
        selection = select_common(batch, [("x", 6), ("y", 4)], "'f'")
        picked = np.arange(4)[slice(batch) if isinstance(batch, int) else batch]
        np.testing.assert_array_equal(selection.positions(), picked)


XY = [("x", 6), ("y", 4)]
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (4, [("x", 3)], IndexError, "got batch=4, expected 0 to 3"),
    (-1, [("x", 3)], IndexError, "got batch=-1"),
    ([0, 3], [("x", 3)], IndexError, "got index 3"),
    ([-4], [("x", 3)], IndexError, "got index -4"),
    (np.array([2**63], np.uint64), [("x", 3)], IndexError, "9223372036854775808"),
    (np.array([True, False]), [("x", 3)], IndexError, "a mask of 2 values"),
    (np.zeros((1, 1), int), [("x", 3)], IndexError, r"shape \(1, 1\)"),
    ([0.5], [("x", 3)], IndexError, "dtype float64"),
    ("rows", [("x", 3)], IndexError, "dtype <U4"),
    (np.array([], float), [("x", 3)], IndexError, "dtype float64"),
    (True, [("x", 3)], TypeError, "batch=True"),
    (np.True_, [("x", 3)], TypeError, "expected an int"),
    ([[0], [1, 2]], [("x", 3)], TypeError, "type list"),
    (None, XY, ValueError, r"x with 6 rows and y with 4.*batch=4"),
    *[
        (batch, XY, ValueError, r"different rows of x \(6 rows\) and y \(4 rows\)")
        for batch in (slice(None), slice(-2, None), [-1], slice(0, 5))
    ],
]


def test_a_batch_that_names_no_rows_is_an_error_that_says_why(subtests: Any) -> None:
    for batch, inputs, error, words in REFUSED:
        with subtests.test(batch=str(batch), words=words):
            with pytest.raises(error, match=words) as caught:
                select_common(batch, inputs, "'loss'")
            assert "'loss'" in str(caught.value)
    with pytest.raises(IndexError, match="index 5"):
        assign_owned([5], [3, 2], "'f'")


def test_every_element_is_in_one_part() -> None:
    """Blocks are full but the last ones; edges of chunks lie on cache lines, of which ranks have as many."""
    for count, num_parts, itemsize in itertools.product((0, 1, 7, 64, 65, 4097), (1, 3, 7, 64), (1, 2, 4, 8, 16)):
        blocks, chunks = block_bounds(count, num_parts), chunk_bounds(count, itemsize, num_parts)
        for parts in (blocks, chunks):
            assert len(parts) == num_parts
            np.testing.assert_array_equal(np.concatenate([np.arange(*part) for part in parts]), np.arange(count))
        assert all(stop == count or stop - start == math.ceil(count / num_parts) for start, stop in blocks)
        assert all(stop == count or stop * itemsize % LINE_NBYTES == 0 for _, stop in chunks)
        lines = [math.ceil((stop - start) * itemsize / LINE_NBYTES) for start, stop in chunks]
        assert max(lines) - min(lines) <= 1
