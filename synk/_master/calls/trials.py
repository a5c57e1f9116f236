"""The findings of a call on trial, which leaves nothing behind but its outputs. ``verify`` makes such calls."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._master.calls.assembly import Assembly
from synk._master.calls.plans import Call
from synk._master.state.variable import Variable
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk._pure.trees import leaves_of
from synk._wire.control import Traits, Up


@dataclass
class Tried:
    """The findings of one call on trial.

    Attributes
    ----------
    leaves : list
        The outputs. If they were not combined, each is a list with one entry for each rank.
    skeleton
        The nesting of the outputs, with the position of each leaf in its place.
    ranks, rows : list of int
        The ranks that ran, and the rows of each.
    traits : Traits
    assigned : dict of Variable to list of lists of ndarray
        New values of variables, for each rank that ran as a list of arrays. None of them is committed.
    """

    leaves: list[Any]
    skeleton: Any
    ranks: list[int]
    rows: list[int]
    traits: Traits
    assigned: dict[Variable, list[list[np.ndarray]]]


def tried(call: Call, assembly: Assembly, result: Any, up_words: Any, assigned: dict[Any, Any]) -> Tried:
    """Return what a call on trial has shown. ``up_words`` are the numbers that ranks have reported, by rank."""
    traits = functools.reduce(operator.or_, [up_words[rank][Up.TRAITS] for rank in call.ranks])
    leaves = [_comparable(leaf) for leaf in leaves_of(assembly.structure, result)]
    return Tried(leaves, assembly.skeleton, call.ranks, call.rows, Traits(traits), assigned)


def _comparable(leaf: Any) -> Any:
    """Return an output, or the list of all ranks' outputs, with tensors as arrays that can be compared."""
    if isinstance(leaf, list):
        return [_comparable(part) for part in leaf]
    return array_of(leaf) if is_tensor(leaf) and is_plain(leaf) else leaf
