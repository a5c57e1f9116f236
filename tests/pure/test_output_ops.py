"""Which op belongs to which output. The oracle is optree's ``tree_broadcast_prefix``. No process."""

from __future__ import annotations

import operator
from typing import Any

import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import examples

from synk._pure.ops import EACH, OPS
from synk._pure.output_ops import each_op, match_ops, ops_of, wanted_leaves
from synk._pure.trees import flatten, skeleton_of

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
