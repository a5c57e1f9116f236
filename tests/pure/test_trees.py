"""Nestings taken apart and built again. The oracle is optree."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import optree
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import examples

from synk._pure.trees import describe, flatten, output_names, paths, skeleton_of, unflatten

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
