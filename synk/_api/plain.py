"""Calls the plain function in the program: the oracle of ``verify`` that shares nothing with the workers.

It calls a copy on copies of the arguments (``synk._api.plain_copy``), so nothing in the program changes. Random number
generators are put back, and printed text is dropped. Effects on modules and outside of the process cannot be undone.

The arguments are those that the user passed, without the conversions of a call, because a conversion may be the
mistake: a column of a table stays a column, and a list a list. A function that raises on a list is called once more
with what ``numpy.asarray`` makes of it, and the report says which it got. Only a few must be converted: ``Data``
becomes an array, ``batch`` selects rows, and a function with a framework gets tensors.
"""

from __future__ import annotations

import contextlib
import io
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from synk._api.plain_copy import RESIDENT, SHARED, NotComparable, PlainCopy, copied, why_no_handle
from synk._master.calls.binding import RowCount, select
from synk._master.calls.callee import Callee
from synk._master.code.handles import Handle
from synk._master.objects.data import Data
from synk._master.objects.shared import Shared
from synk._pure.generators import generator_states, restore_generators
from synk._pure.interrupts import waiting
from synk._pure.nested import build, take_apart
from synk._pure.shards import Selection
from synk._pure.sparse import is_csr
from synk._pure.tables import is_table, taken_rows
from synk._pure.tensors import array_of, is_plain, is_tensor
from synk._pure.trees import flatten, unflatten
from synk._wire.settings import kept
from synk.backends._frameworks import Converter, host_converters
from synk.errors import ReentrancyError

_GOT_LIST = "The plain function got lists as they are."
_GOT_ARRAY = "The plain function got numpy.asarray(list) for each list, because it raised {} on the list itself."

MAX_S = 10.0
"""If the serial call takes longer, the function is not called in the program, where nothing could end it."""


class PlainOutputs(NamedTuple):
    """The outputs of the plain function.

    Attributes
    ----------
    is_run : bool
        Whether the function was called. If it was not, ``note`` says why.
    leaves : list or None
        The outputs, in the order of the serial outputs. None if the two cannot be compared.
    note : str
        A sentence for the report. It may be empty.
    error : str
        The type of the exception that the function raised; empty if it returned.
    """

    is_run: bool
    leaves: list[Any] | None
    note: str
    error: str = ""

    @classmethod
    def not_run(cls, why: str) -> PlainOutputs:
        return cls(False, None, f"Not compared with the plain function: {why}.")


@dataclass(frozen=True)
class PlainCall:
    """A call of the plain function in the program.

    Attributes
    ----------
    callee : Callee
    args, kwargs, batch
        The arguments as the user passed them.
    """

    callee: Callee
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any

    def why_not(self) -> str:
        """Return why the call cannot mean the same in the program as on a worker; an empty string if it can.

        The answer is right only after the call was made on the workers, when the function's variables and resident
        objects are known.
        """
        callee = self.callee
        if callee.variables:
            return SHARED
        if callee.residents or callee.changes:
            return RESIDENT
        if callee.session is not None and callee.session.has_devices:
            return "the workers compute on devices, and the program touches none"
        return ""

    def run(self, skeleton: Any, serial_s: float) -> PlainOutputs:
        """Call the function, unless that may take too much time or memory.

        Parameters
        ----------
        skeleton
            The nesting of the serial outputs, with the position of each leaf in its place.
        serial_s : float
            The time of the serial call, in seconds.
        """
        if serial_s > MAX_S:
            return PlainOutputs.not_run(f"its serial call takes {serial_s:.0f} s, expected at most {MAX_S:.0f} s")
        try:
            with _unseen():
                if not self._has_list():
                    return self._called(self._copied(), skeleton)
                found = self._called(self._copied(), skeleton)
                if found.error:
                    again = self._called(self._copied(has_arrays=True), skeleton)
                    return again._replace(note=f"{_GOT_ARRAY.format(found.error)} {again.note}".strip())
                return found._replace(note=f"{_GOT_LIST} {found.note}".strip())
        except NotComparable as why:
            return PlainOutputs.not_run(str(why))

    def _has_list(self) -> bool:
        return any(map(_is_list, ScatteredArguments(self.callee, self.args, self.kwargs).leaves))

    def _copied(self, *, has_arrays: bool = False) -> PlainCopy:
        try:
            args, kwargs = plain_arguments(self.callee, self.args, self.kwargs, self.batch, has_arrays=has_arrays)
            return copied(self.callee.fn, args, kwargs)
        except Exception as error:
            if isinstance(error, NotComparable):
                raise
            text = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise NotComparable(f"it cannot be copied with its arguments ({text})") from None

    def _called(self, copy: PlainCopy, skeleton: Any) -> PlainOutputs:
        try:
            result = waiting(copy.fn, *copy.args, **copy.kwargs)
        except ReentrancyError:
            raise NotComparable("it uses synk.comm, which has no meaning outside of a worker") from None
        except MemoryError:
            raise NotComparable("the program has not enough memory for it") from None
        except Exception as error:
            text = f"The plain function raised {type(error).__name__}: {error}, and the serial call did not."
            return PlainOutputs(True, None, text, type(error).__name__)
        leaves: dict[int, Any] = {}
        if not _take_leaves(skeleton, copy.with_own_classes(result), leaves):
            return PlainOutputs(True, None, "The plain function returned another nesting of outputs.")
        framework = self.callee.framework
        from_framework = host_converters(framework)[1] if framework is not None else _unchanged
        return PlainOutputs(True, [_as_array(leaves[position], from_framework) for position in sorted(leaves)], "")


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Drop printed text and warnings, and put settings and random number generators back."""
    states, sink = generator_states(), io.StringIO()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink), kept():
            warnings.simplefilter("ignore")
            yield
    finally:
        restore_generators(states)


def _take_leaves(skeleton: Any, value: Any, leaves: dict[int, Any]) -> bool:
    """Note the part of a result at the place of each leaf of ``skeleton``. Return whether the nesting is the same."""
    if isinstance(skeleton, int):
        leaves[skeleton] = value
        return True
    if skeleton is None:
        return value is None
    if isinstance(skeleton, dict):
        return (
            isinstance(value, dict)
            and value.keys() == skeleton.keys()
            and all(_take_leaves(part, value[key], leaves) for key, part in skeleton.items())
        )
    return (
        isinstance(value, (tuple, list))
        and len(value) == len(skeleton)
        and all(_take_leaves(part, own, leaves) for part, own in zip(skeleton, value))
    )


def _as_array(value: Any, from_framework: Converter) -> Any:
    """Return an output in the form of a serial output that comes from a worker."""
    if type(value) is list:  # one object for each row
        return [_as_array(part, from_framework) for part in value]
    value = from_framework(value)
    return array_of(value.detach().cpu()) if is_tensor(value) and is_plain(value) else value


def _unchanged(value: Any) -> Any:
    return value


def plain_arguments(
    callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any, *, has_arrays: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments, by position and by name, as the plain function gets them. They share the user's memory.

    ``has_arrays``: what NumPy makes of lists, in place of the lists.

    Raises
    ------
    NotComparable
        If an argument lives on the workers, or ``batch`` cannot select its rows here.
    ImportError
        If the program does not have the framework.
    """
    to_framework = host_converters(callee.framework)[0] if callee.framework is not None else None
    scattered = ScatteredArguments(callee, args, kwargs)
    picked = None if batch is None else scattered.select(batch)

    def plain(leaf: Any) -> Any:
        value = as_plain(leaf)
        if picked is not None and has_rows(value):
            value = rows_at(value, picked.positions())
        if has_arrays and _is_list(value):
            value = np.asarray(value)
        return _in_framework(value, to_framework, is_column=True)

    return scattered.replaced(plain, lambda value: _in_framework(as_plain(value), to_framework))


class ScatteredArguments:
    """The arguments of a call, with those that are scattered taken apart.

    Attributes
    ----------
    leaves : list
        The scattered leaves of all arguments.
    """

    def __init__(self, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._name = callee.name
        self._bound = list(callee.signature.bind(args, kwargs))
        self._apart = [([], None) if is_broadcast else take_apart(value) for _, _, is_broadcast, value in self._bound]
        self.leaves = [leaf for leaves, _ in self._apart for leaf in leaves]

    def select(self, batch: Any) -> Selection | None:
        """Return the rows that ``batch`` selects, or all rows for None; None if no leaf has rows."""
        shards = [leaf for leaf in self.leaves if isinstance(leaf, Shared) and leaf.is_sharded]
        rows = [RowCount("", sum(shard._referent.lengths)) for shard in shards]
        values = [as_plain(leaf) for leaf in self.leaves if not isinstance(leaf, Handle)]
        rows += [RowCount("", _num_rows(value)) for value in values if has_rows(value)]
        return select(rows, batch, self._name)

    def replaced(
        self, scattered: Callable[[Any], Any], broadcast: Callable[[Any], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments, by position and by name, with other leaves, and other broadcast arguments."""
        positional, by_name = [], {}
        for (_, keyword, is_broadcast, value), (leaves, structure) in zip(self._bound, self._apart):
            if is_broadcast:
                new = broadcast(value)
            else:
                own = [scattered(leaf) for leaf in leaves]
                is_same = all(map(operator.is_, own, leaves))
                new = value if is_same else build(structure, iter(own))
            if keyword:
                by_name[keyword] = new
            else:
                positional.append(new)
        return positional, by_name


def rows_at(value: Any, positions: np.ndarray) -> Any:
    """Return some rows of an array, a tensor, a table or a list.

    Raises
    ------
    NotComparable
        If rows of such an object can be picked on the workers only.
    """
    if isinstance(value, np.ndarray) or is_tensor(value) or is_csr(value):
        return value[positions]
    if is_table(value):
        return taken_rows(value, positions)
    if _is_list(value):
        rows = [value[place] for place in np.arange(len(value))[positions]]
        return tuple(rows) if type(value) is tuple else rows
    raise NotComparable(f"batch= picks rows of a {type(value).__name__} on the workers only")


def as_plain(value: Any) -> Any:
    if isinstance(value, Handle):
        raise NotComparable(why_no_handle(value))
    return value._contents.array if isinstance(value, Data) else value


def has_rows(value: Any) -> bool:
    return bool(value.shape) if hasattr(value, "shape") else _is_list(value)


def _num_rows(value: Any) -> int:
    return int(value.shape[0]) if hasattr(value, "shape") else len(value)


def _is_list(value: Any) -> bool:
    """Whether a scattered leaf is a list, a tuple or another sequence of Python's."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _in_framework(value: Any, to_framework: Converter | None, *, is_column: bool = False) -> Any:
    """Return a value with its arrays converted to arrays of the framework.

    With ``is_column``, objects that NumPy can make an array of are converted, too, as a call does with the columns of a
    table.
    """
    if to_framework is None:
        return value
    leaves, structure = flatten(value)
    for position, leaf in enumerate(leaves):
        if is_column and not is_tensor(leaf) and hasattr(leaf, "__array__") and not isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            leaves[position] = to_framework(leaf.view(np.ndarray))
    return unflatten(structure, leaves)
