"""What the head and an agent say to each other about a call. All other messages are those of a session and its workers.

Arrays travel in these messages, and so do pickles of the user's objects, which an agent passes on unopened.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from synk._pure.ops import OPS
from synk._wire.messages import Failure, Layout

_LARGE_NBYTES = 1 << 16

HELD = ("resident", "shard", "replica", "closed over")
"""The kinds of arguments that lie on the ranks."""


class FunctionNote(NamedTuple):
    """What an agent knows of a function. The function itself is loaded by the workers alone.

    Attributes
    ----------
    version : int
        Differs when the workers need new plans for it.
    outputs : name or nesting of them
        See :func:`without_code`.
    """

    id: int
    version: int
    name: str
    outputs: Any
    block_rows: int


class VariableNote(NamedTuple):
    """A shared variable as it is told to a node.

    Attributes
    ----------
    skeleton : bytes
        The pickled nesting of the value, with the position of each leaf in its place.
    values : list of lists of ndarray
        The leaves of each rank of the node; of one alone if they lie in the same memory.
    """

    name: str
    is_sharded: bool
    skeleton: bytes
    values: list[list[np.ndarray]]


class Part(NamedTuple):
    """One argument of a call, or one leaf of a nested one, as a node gets it: with the rows of its ranks.

    The attributes are those of ``synk._master.calls.arguments.Argument``. ``array`` is None for an object, and for a
    resident object and a variable, which have a ``number``.
    """

    label: str
    keyword: str
    kind: str
    array: np.ndarray | None
    tensor_dtype: str
    is_tensor: bool
    number: int = 0


class CallOrder(NamedTuple):
    """A call on one node.

    Attributes
    ----------
    parts : list of Part
    nests : bytes
        The structure of nested arguments, as in ``Plan.nests``.
    number : int
        The call's number, the same on all nodes.
    num_restarts : int or None
        How many workers the node has replaced, as far as the head knows. If it is another number, ranks lack resident
        objects which the call needs. None: it needs none.
    objects : tuple (bytes, list of buffers) or None
        The pickle of the other arguments and its buffers.
    has_rows : bool
        Whether arrays are divided.
    bounds : list of (low, high)
        For each rank of the node, its rows among those that the node gets.
    ranks : list of int
        Which ranks of the node run the call, counted on the node.
    rows : list of int
        The weights of these ranks.
    num_slices, output_subset, num_repeats, is_trial, is_apart
        As in ``Plan``.
    all_ranks : tuple of int
        The ranks of all nodes that run the call.
    all_rows : int
        The sum of their rows.
    group : int
        The number of the group by which the ranks of all nodes are joined; 0: none.
    local_ranges, local_indices
        Where the rows of the node's ranks lie in their shards, as in ``synk._pure.shards.Assignment``. None if no
        argument is sharded.
    """

    function: FunctionNote
    number: int
    num_restarts: int | None
    parts: list[Part]
    nests: bytes
    objects: tuple[bytes, list[Any]] | None
    has_rows: bool
    bounds: list[tuple[int, int]]
    ranks: list[int]
    rows: list[int]
    num_slices: int
    output_subset: tuple[Any, ...] | None
    num_repeats: int
    is_trial: bool
    is_apart: bool
    all_ranks: tuple[int, ...]
    all_rows: int
    group: int
    local_ranges: list[tuple[int, int]] | None
    local_indices: np.ndarray | None


class RankOrders(NamedTuple):
    """Messages for single ranks of a node, which the agent passes on.

    Attributes
    ----------
    contents : dict
        By rank, counted on the node.
    num_restarts : int or None
        How many workers the node has replaced, as far as the head knows. If it is another number, the node refuses.
        None: the head asks for it.
    phase, what : str
        For errors.
    is_for_living : bool
        Whether they are for those ranks only that live now. Otherwise workers that have ended are replaced first.
    """

    contents: dict[int, Any]
    num_restarts: int | None
    phase: str
    what: str
    is_for_living: bool


class RankReplies(NamedTuple):
    """The replies of single ranks of a node.

    Attributes
    ----------
    replies : dict of int to (status, body)
        By rank, counted on the node.
    num_restarts : int
        How many workers the node has replaced so far.
    error, warnings
        As in :class:`NodeReply`.
    """

    replies: Mapping[int, tuple[int, Any]] = MappingProxyType({})
    num_restarts: int = 0
    error: bytes = b""
    warnings: Sequence[tuple[str, type[Warning]]] = ()


class NodeReply(NamedTuple):
    """What a node answers to a call.

    Attributes
    ----------
    layouts, arrays
        See ``Assembly.outputs``: one of each for each rank that ran. There are no arrays if the node's own ranks do not
        agree; the head, which sees all ranks, says so.
    packed : list of lists of bytes
        The outputs of each rank that are not arrays, pickled by the rank.
    up : list of lists of int
        The numbers that each rank reports; see ``synk._wire.control.Up``.
    num_restarts : int
        How many workers the node has replaced so far.
    assigned : list of lists of lists of ndarray
        The new values of variables: for each rank that ran, the leaves of each variable in ``Layout.assigned``. The
        node makes them its own when the head has committed the call.
    failures : list of Failure
        The exceptions of ranks. Then there are no outputs.
    error : bytes
        The pickle of what the node's session raised: a death, or a lack of memory. Then there are no outputs.
    warnings : list of (text, category)
        What the node's session has warned of.
    """

    layouts: Sequence[Layout] = ()
    arrays: Sequence[list[np.ndarray | None]] = ()
    packed: Sequence[list[bytes]] = ()
    up: Sequence[list[int]] = ()
    num_restarts: int = 0
    assigned: Sequence[list[list[np.ndarray]]] = ()
    failures: Sequence[Failure] = ()
    error: bytes = b""
    warnings: Sequence[tuple[str, type[Warning]]] = ()


def beside(pickled: Any) -> Any:
    """Return a pickle so that it travels beside the message that holds it, uncopied, if it is large."""
    return pickle.PickleBuffer(pickled) if len(pickled) >= _LARGE_NBYTES else pickled


def without_code(ops: Any) -> Any:
    """Return ``outputs=`` from which an agent learns where outputs lie: by name, and with None for a user's own op.

    That stays in the program, with its code. One that concatenates counts as ``"gather"``.

    Examples
    --------
    >>> from synk import Op
    >>> class Median(Op):
    ...     concatenates = True
    >>> without_code({"a": OPS["avg"], "b": Median(), "c": OPS["first"]})
    {'a': 'avg', 'b': 'gather', 'c': 'first'}
    """
    if isinstance(ops, dict):
        return {key: without_code(child) for key, child in ops.items()}
    if isinstance(ops, (tuple, list)):
        return type(ops)([without_code(child) for child in ops])
    name = next((name for name, op in OPS.items() if op is ops), None)
    return "gather" if name is None and ops.concatenates else name
