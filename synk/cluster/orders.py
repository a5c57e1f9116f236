"""The messages between the head and an agent about calls, and about single ranks.

All other messages are those of a session to its workers. Arrays travel in these messages, and so do pickles of the
user's objects, which an agent passes on unopened.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from synk._master.calls.arguments import Argument
from synk._pure.call_options import CallOptions
from synk._pure.ops import OPS
from synk._pure.shards import Assignment
from synk._wire.messages import Failure, Layout, PickledOutput

_LARGE_NBYTES = 1 << 16


class FunctionNote(NamedTuple):
    """A function in an order. Only the workers load the function itself.

    Attributes
    ----------
    id : int
        The number of the function on the workers.
    version : int
        Changes when the workers need new plans for the function.
    outputs : name or nesting of names
        See :func:`without_code`.
    """

    id: int
    version: int
    name: str
    outputs: Any


class VariableNote(NamedTuple):
    """A shared variable, for a node.

    Attributes
    ----------
    skeleton : bytes
        The pickled nesting of the value, with the position of each leaf in its place.
    values : list of lists of ndarray
        The leaves of each rank of the node, or of one rank if all of them share memory.
    """

    name: str
    is_sharded: bool
    skeleton: bytes
    values: list[list[np.ndarray]]


class CallOrder(NamedTuple):
    """A call on one node.

    Attributes
    ----------
    arguments : list of Argument
        The arguments, with the rows of the node's ranks. The ``value`` of a resident object or a variable is its
        number; other arguments have no ``value``.
    nests : bytes
        The structure of nested arguments, as in ``Plan.nests``.
    number : int
        The call's number, the same on all nodes.
    num_restarts : int or None
        How many workers the node has replaced, as far as the head knows. If the node has another number, its ranks
        may lack resident objects that the call needs, and it refuses. None if there are no resident objects.
    objects : tuple (bytes, list of buffers)
        The pickle of the other arguments, and its buffers.
    has_rows : bool
        Whether there are rows to divide.
    bounds : list of (low, high)
        The rows of each rank of the node, counted from the first row of the node.
    ranks : list of int
        The ranks of the node that run the call, counted on the node.
    rows : list of int
        The weights of these ranks.
    options : CallOptions
        The options as bound: those that choose rows or set a time limit have their defaults.
    all_ranks : tuple of int
        The ranks of all nodes that run the call.
    all_rows : int
        The sum of the rows of these ranks.
    group : int
        The number of the group in which the ranks of all nodes are joined; 0 if there is none.
    owned : Assignment or None
        Where the rows of the node's ranks lie in their shards. None if no argument is sharded.
    """

    function: FunctionNote
    number: int
    num_restarts: int | None
    arguments: list[Argument]
    nests: bytes
    objects: tuple[bytes, list[Any]]
    has_rows: bool
    bounds: list[tuple[int, int]]
    ranks: list[int]
    rows: list[int]
    options: CallOptions
    all_ranks: tuple[int, ...]
    all_rows: int
    group: int
    owned: Assignment | None


class RankOrders(NamedTuple):
    """Messages for single ranks of a node, which the agent passes on.

    Attributes
    ----------
    contents : dict
        The messages by rank, counted on the node.
    num_restarts : int or None
        How many workers the node has replaced, as far as the head knows. If the node has another number, it refuses.
        None if the head asks for the number, or does not rely on it.
    phase, what : str
        The phase and the operation, for errors.
    is_for_living : bool
        Whether only ranks that live now get their message. Otherwise workers that have ended are replaced first.
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
        The replies by rank, counted on the node. A rank that has died is missing.
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
    """The reply of a node to a call.

    Attributes
    ----------
    layouts, arrays
        See ``Assembly.outputs``: one of each for each rank that ran. There are no arrays if the node's own ranks do not
        agree. Then the head, which sees all ranks, raises the error.
    packed : list of lists of PickledOutput
        The outputs of each rank that are not arrays, pickled by the rank.
    up : list of lists of int
        The numbers in the control block of each rank; see ``synk._wire.control.Up``.
    num_restarts : int
        How many workers the node has replaced so far.
    assigned : list of lists of lists of ndarray
        The new values of variables: for each rank that ran, the leaves of each variable in ``Layout.assigned``. The
        node makes them its own when the head has committed the call.
    failures : list of Failure
        The exceptions of ranks. Then there are no outputs.
    error : bytes
        The pickle of the exception that the node's session raised: a death, or a lack of memory. Then there are no
        outputs.
    warnings : list of (text, category)
        The warnings of the node's session.
    """

    layouts: Sequence[Layout] = ()
    arrays: Sequence[list[np.ndarray | None]] = ()
    packed: Sequence[list[PickledOutput]] = ()
    up: Sequence[list[int]] = ()
    num_restarts: int = 0
    assigned: Sequence[list[list[np.ndarray]]] = ()
    failures: Sequence[Failure] = ()
    error: bytes = b""
    warnings: Sequence[tuple[str, type[Warning]]] = ()


def beside(pickled: Any) -> Any:
    """Return a large pickle as a buffer, which travels beside the message without a copy; a small one unchanged."""
    return pickle.PickleBuffer(pickled) if len(pickled) >= _LARGE_NBYTES else pickled


def without_code(ops: Any) -> Any:
    """Return ``outputs=`` for an agent, with the names of ops, and None in place of a user's own op.

    The user's op stays in the program, with its code. If it concatenates, the agent gets ``"gather"``, because it must
    know where outputs lie.

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
