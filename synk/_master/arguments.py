"""From the user's arguments to places in shared memory: binding, checks, and the staging of plain arrays.

All checks happen here, before anything is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from synk._master.contents import Contents, DataHandle
from synk._master.session import Session
from synk._master.variable import Variable, VariableHandle, check_owner
from synk._pure.arrays import as_plain_array, check_shareable
from synk._pure.interrupts import is_from_handler
from synk._pure.nested import SINGLE_VALUES, is_nested, paths, take_apart
from synk._pure.read_only import ReadOnlyArray
from synk._pure.shards import Assignment, Selection, assign_local, assign_owned, bounds_of, select_common
from synk._wire.messages import Input
from synk.errors import SerializationError

_ALIGNMENT = 64
_PAGE = 4096
_PLAIN_TYPES = (int, float, complex, bool, str, bytes, type(None))


class Nest(NamedTuple):
    """The nested value that an argument and those behind it are the leaves of; see ``synk._pure.nested``."""

    num_leaves: int
    structure: Any


@dataclass
class Argument:
    """One argument of a call, or a leaf of a nested one, checked.

    Attributes
    ----------
    label : str
        How errors call it.
    keyword : str
        Under which name the function gets it; empty for by position.
    kind : str
        As ``Input.kind``.
    array : ndarray or None
        What must be staged (``rows`` and ``whole`` that are no ``Data``).
    data : synk.Data or None
    contents : Contents or None
        Of ``data`` when the argument was bound. Another thread may replace them at any time, so the whole call goes by
        these.
    value : object
        For ``object``, ``shard`` and ``replica``.
    nest : Nest or None
        Of the first leaf of a nested argument.
    """

    label: str
    keyword: str
    kind: str
    array: np.ndarray | None = None
    data: Any = None
    contents: Contents | None = None
    value: Any = None
    dtype: Any = None
    nest: Nest | None = None

    @property
    def key(self) -> Any:
        """What must be equal for a plan to be used again."""
        if self.contents is not None:
            array = self.contents.array
            return (self.kind, self.contents.segment_id, array.shape, array.dtype, array.dtype.type, self.is_minibatch)
        if self.kind == "closed over":
            return (self.kind, self.value.id, self.array.shape)  # type: ignore[union-attr]
        if self.array is not None:  # the type as well: NumPy calls np.record equal to a plain record
            return (self.kind, self.array.shape, self.dtype, self.dtype.type)
        if self.kind in ("shard", "replica"):
            return (self.kind, self.value.id)
        return self.kind

    @property
    def is_minibatch(self) -> bool:
        """Whether it holds the rows of the batch only."""
        return self.data is not None and self.data.minibatch

    @property
    def num_rows(self) -> int:
        if self.kind == "shard":
            return sum(self.value.lengths)
        return len(self.contents.array if self.contents is not None else self.array)  # type: ignore[arg-type]


def check_arguments(
    bound: Iterable[tuple[str, str, bool, Any]], function_name: str, session: Session
) -> list[Argument]:
    """Classify the arguments of a call, as ``Signature.bind`` returned them; nested ones leaf by leaf.

    Raises
    ------
    TypeError
        If a scattered argument is no array, has no rows (pass it as broadcast), or holds Python objects.
    ClosedError, ValueError
        If it is a ``Data`` or ``Shared`` of another runtime.
    """
    arguments: list[Argument] = []
    for label, keyword, is_broadcast, value in bound:
        if is_broadcast or not is_nested(value):
            arguments.append(_check_argument(label, keyword, is_broadcast, value, function_name, session))
        else:
            arguments += _check_nested(label, keyword, value, function_name, session)
    return arguments


def _check_nested(label: str, keyword: str, value: Any, function_name: str, session: Session) -> list[Argument]:
    """Classify the leaves of a scattered argument: those with rows are divided, single values go to every rank."""
    what = f"{label} of {function_name!r}"
    try:
        leaves, structure = take_apart(value)
    except TypeError as error:
        if is_from_handler(error):
            raise
        raise TypeError(f"cannot scatter {what}: {error}. Pass its arrays in a dict or a tuple.") from None
    except RecursionError:
        raise ValueError(
            f"cannot scatter {what}: got a {type(value).__name__} that holds itself, or is nested too deeply. "
            "Pass its arrays in a dict or a tuple."
        ) from None
    arguments = []
    for leaf, path in zip(leaves, paths(structure)):
        if isinstance(leaf, SINGLE_VALUES):
            arguments.append(Argument(label + path, keyword, "object", value=leaf))
        else:
            arguments.append(_check_argument(label + path, keyword, False, leaf, function_name, session, is_part=True))
    if not any(argument.kind in ("rows", "shard") for argument in arguments):
        raise TypeError(_no_rows(label, function_name, f"a {type(value).__name__} in which nothing has rows"))
    arguments[0].nest = Nest(len(arguments), structure)
    return arguments


def _check_argument(
    label: str,
    keyword: str,
    is_broadcast: bool,
    value: Any,
    function_name: str,
    session: Session,
    *,
    is_part: bool = False,
) -> Argument:
    """Classify one argument; with ``is_part`` a leaf of a nested one, which may be a single value as well."""
    if isinstance(value, DataHandle):
        value._check_owner(session, f"{label} of {function_name!r}")
        is_whole = is_broadcast or (is_part and value.ndim == 0)
        if not is_whole and value.ndim == 0:
            raise TypeError(_no_rows(label, function_name, "a Data with no axes"))
        return Argument(label, keyword, "whole" if is_whole else "rows", data=value, contents=value._contents)
    if isinstance(value, VariableHandle):
        return _check_shared(label, keyword, is_broadcast, is_part, value._variable, function_name, session)
    if isinstance(value, ReadOnlyArray):
        value = value.view(np.ndarray)
    if is_broadcast:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject and type(value) is np.ndarray:
            return Argument(label, keyword, "whole", array=value, dtype=check_shareable(value.dtype, label))
        return Argument(label, keyword, "object", value=value)
    array = as_plain_array(value, f"{label} of {function_name!r}")
    if array.ndim == 0 and not is_part:
        raise TypeError(_no_rows(label, function_name, f"a single value ({type(value).__name__})"))
    kind = "rows" if array.ndim else "whole"
    return Argument(label, keyword, kind, array=array, dtype=check_shareable(array.dtype, label))


def _check_shared(
    label: str,
    keyword: str,
    is_broadcast: bool,
    is_part: bool,
    variable: Variable,
    function_name: str,
    session: Session,
) -> Argument:
    check_owner(variable, session.variables, f"{label} of {function_name!r}")
    if is_broadcast == variable.is_sharded:
        is_kind = "sharded" if variable.is_sharded else "replicated"
        hint = "take it out of bcast_inputs" if variable.is_sharded else f"add {label!r} to bcast_inputs"
        if is_part:
            hint = "pass it as an argument of its own that bcast_inputs names"
        raise ValueError(f"cannot pass {label} of {function_name!r}: variable {variable.name!r} is {is_kind}; {hint}.")
    return Argument(label, keyword, "shard" if variable.is_sharded else "replica", value=variable)


def _no_rows(label: str, function_name: str, got: str) -> str:
    return (
        f"cannot scatter {label} of {function_name!r}: got {got}, expected an array with rows on axis 0. "
        f"Pass it as a broadcast input: bcast_inputs={label!r}."
    )


def select(arguments: Sequence[Argument], batch: Any, function_name: str) -> Selection | None:
    """Return the rows of a call, or None where no argument is scattered."""
    rows = [argument for argument in arguments if argument.kind == "rows"]
    if not rows:
        if batch is not None:
            raise ValueError(f"cannot select rows of {function_name!r}: batch was given, but no argument is scattered.")
        return None
    whole = [(a.label, a.num_rows) for a in rows if not a.is_minibatch]
    mini = [(a.label, a.num_rows) for a in rows if a.is_minibatch]
    return select_common(batch, whole, mini, repr(function_name))


def own_rows(variables: Sequence[Variable], world_size: int, function_name: str) -> tuple[list[tuple[int, int]], str]:
    """Return the bounds of each rank's rows where the sharded ``variables`` of a function are all that has rows.

    Returns
    -------
    bounds : list of (low, high)
        All zero where there are no variables. Where shards differ in length, the longest one of a rank counts.
    unequal : str
        The text of an error if they are no weights of an average, because the variables are not divided alike.
    """
    lengths = [variable.lengths for variable in variables]
    unequal = ""
    for variable, own in zip(variables, lengths):
        if any(a * sum(lengths[0]) != b * sum(own) for a, b in zip(own, lengths[0])):
            unequal = (
                f"cannot average the outputs of {function_name!r}: it closes over the sharded variables "
                f"{variables[0].name!r} with {lengths[0]} rows on the ranks and {variable.name!r} with {own}, expected "
                "one division of rows, which gives the weights. Pass the one that is averaged over as an argument."
            )
    return bounds_of([max(own) for own in zip(*lengths)] or [0] * world_size), unequal


def assign(
    arguments: Sequence[Argument], shards: Sequence[Argument], batch: Any, shard_batch: Any, function_name: str
) -> Assignment:
    """Return which rank works on which rows where some arguments are sharded variables: each on those it owns.

    Raises
    ------
    ValueError
        If the variables' shards differ in length, or other inputs do not have one row for each of theirs.
    """
    lengths = shards[0].value.lengths
    for other in shards[1:]:
        if other.value.lengths != lengths:
            raise ValueError(
                f"cannot call {function_name!r}: got {shards[0].label} with {lengths} rows on the ranks and "
                f"{other.label} with "
                f"{other.value.lengths}, expected equal shards."
            )
    if batch is not None and shard_batch is not None:
        raise ValueError(f"cannot call {function_name!r}: got batch and shard_batch, expected one of them.")
    if shard_batch is not None:
        assignment = assign_local(shard_batch, lengths, repr(function_name))
        expected = assignment.selection.count
    else:
        assignment = assign_owned(batch, lengths, repr(function_name))
        expected = sum(lengths)
    is_batched = batch is not None or shard_batch is not None
    for argument in arguments:
        if argument.kind != "rows":
            continue
        is_mini = argument.is_minibatch and is_batched
        wanted = assignment.selection.count if is_mini else expected
        if argument.num_rows < wanted or (argument.num_rows > wanted and not is_mini):
            raise ValueError(
                f"cannot scatter {argument.label} of {function_name!r}: got {argument.num_rows} rows, expected "
                f"{wanted}{' or more' if is_mini else ''}, one for each "
                f"{'selected ' if is_mini or shard_batch is not None else ''}row of the sharded variable "
                f"{shards[0].label}."
            )
    return assignment


# -- staging ----------------------------------------------------------------------------------------------------------


def pickle_objects(values: list[Any], labels: list[str], function_name: str) -> tuple[bytes, list[memoryview]]:
    """Pickle the broadcast objects of a call as one tuple; arrays inside go out of band.

    Returns
    -------
    data : bytes
    buffers : list of memoryview
        Contiguous, in the order in which the pickle refers to them.

    Raises
    ------
    SerializationError
        Naming the argument that cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    if all(type(value) in _PLAIN_TYPES for value in values):
        return pickle.dumps(tuple(values), protocol=5), []
    try:
        data = cloudpickle.dumps(tuple(values), protocol=5, buffer_callback=buffers.append)
    except Exception as error:
        if is_from_handler(error):
            raise
        for label, value in zip(labels, values):
            try:
                cloudpickle.dumps(value, protocol=5)
            except Exception as inner:
                if is_from_handler(inner):
                    raise
                raise SerializationError(
                    f"cannot send {label} of {function_name!r}: {type(inner).__name__}: {inner}. "
                    "Broadcast inputs must be arrays or picklable."
                ) from inner
        raise SerializationError(f"cannot send the broadcast inputs of {function_name!r}: {error}") from error
    return data, [buffer.raw() for buffer in buffers]


def pickle_nests(arguments: Sequence[Argument], function_name: str) -> bytes:
    """Pickle ``(first, num_leaves, structure)`` of each nested argument; nothing where there are none."""
    nests = [(first, *a.nest) for first, a in enumerate(arguments) if a.nest is not None]
    if not nests:
        return b""
    try:
        return cloudpickle.dumps(nests, protocol=5)
    except Exception as error:
        if is_from_handler(error):
            raise
        raise SerializationError(
            f"cannot send the structure of the arguments of {function_name!r}: {type(error).__name__}: {error}. Keys "
            "and classes of nested arguments must be picklable."
        ) from error


def aligned(offset: int, nbytes: int) -> int:
    """Return the next offset where ``nbytes`` bytes should start: on a cache line, on a page if they are many."""
    alignment = _PAGE if nbytes >= (1 << 20) else _ALIGNMENT
    return -(-offset // alignment) * alignment


def capacity_for(nbytes: int) -> int:
    """Return the room for a pickle of ``nbytes`` bytes: powers of two, so that small changes keep the plan."""
    return 256 if nbytes <= 256 else 1 << (nbytes - 1).bit_length()


def input_of(argument: Argument, segment_id: int, offset: int) -> Input:
    """Return the worker's description of an argument at its place."""
    if argument.kind == "object":
        return Input(argument.keyword, "object", 0, offset)
    if argument.kind in ("shard", "replica"):
        return Input(argument.keyword, argument.kind, argument.value.id)
    if argument.contents is not None:
        array, segment_id = argument.contents.array, argument.contents.segment_id
        return Input(argument.keyword, argument.kind, segment_id, 0, array.shape, array.dtype, argument.is_minibatch)
    assert argument.array is not None
    if argument.kind == "closed over":
        name = str(argument.value.id)
        return Input(name, argument.kind, segment_id, offset, argument.array.shape, argument.dtype)
    return Input(argument.keyword, argument.kind, segment_id, offset, argument.array.shape, argument.dtype)
