"""One structure for what several ranks returned."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from synk._pure.agreement import MISSING, agreed
from synk._pure.ops import EACH
from synk._pure.trees import flatten, skeleton_of

NESTINGS = st.recursive(
    st.just("leaf") | st.none(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


def skeleton(tree: Any) -> Any:
    leaves, structure = flatten(tree)
    return skeleton_of(structure, len(leaves))


@given(NESTINGS, st.integers(1, 4))
def test_ranks_with_one_structure_keep_it(tree: Any, num_ranks: int) -> None:
    own = skeleton(tree)
    found = agreed([own] * num_ranks, "sum", range(num_ranks), num_ranks)
    assert found is not None
    assert found.skeleton == own
    assert found.positions == [flatten(own)[0]] * num_ranks
    assert found.apart == {}


@given(st.lists(NESTINGS, min_size=1, max_size=4))
def test_under_op_none_each_leaf_of_each_rank_has_one_place(trees: list[Any]) -> None:
    skeletons, ranks = [skeleton(tree) for tree in trees], range(1, 2 * len(trees), 2)
    found = agreed(skeletons, EACH, ranks, 2 * len(trees))
    assert found is not None
    places = flatten(found.skeleton)[0]
    assert places == list(range(len(places)))
    for k, own in enumerate(skeletons):
        assert len(found.positions[k]) == len(places)
        assert sorted(position for position in found.positions[k] if position != MISSING) == flatten(own)[0]
    for place, k in found.apart.items():
        assert [voter for voter in range(len(trees)) if found.positions[voter][place] != MISSING] == [k]


@given(NESTINGS, NESTINGS)
def test_under_an_op_that_combines_structures_must_be_equal(one: Any, other: Any) -> None:
    found = agreed([skeleton(one), skeleton(other)], "sum", (0, 1), 2)
    assert (found is not None) == (flatten(one)[1] == flatten(other)[1])


def test_a_dict_that_ranks_fill_differently_keeps_its_kind() -> None:
    for make in (dict, OrderedDict, lambda items: defaultdict(list, items)):
        ops = {"a": EACH, "b": EACH}, EACH
        found = agreed([(make({"b": 0, "a": 1}), None), (make({"b": 0, "a": None}), 1)], ops, (0, 1), 2)
        assert found is not None
        merged = found.skeleton[0]
        assert type(merged) is type(make({}))
        assert getattr(merged, "default_factory", list) is list
