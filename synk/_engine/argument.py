"""The parameters of a user's function, and an argument as calls know it: its kind, its pickle, what it transfers."""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from synk._code.captured import culprit_in
from synk._engine.data import Contents
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.nested import PLAIN_TYPES, Container, Restored
from synk._pure.tables import packed, pickled_rows
from synk._pure.tensors import array_of, copied_tensor, dtype_of, is_ordinary, is_tensor
from synk._pure.words import argument_hint, text_of
from synk._wire.parcels import TravelPickler, dumps
from synk.errors import SerializationError

OPTION_NAMES = frozenset({"batch", "num_slices", "output_subset", "timeout"})
"""Keywords that belong to a call. They never reach the function, so no parameter of it may have such a name."""

Form = tuple[tuple[str, str, bool], ...]
"""Of each argument of a call ``(label, keyword, is_broadcast)``: its name in errors, the name under which the function
gets it, empty if by position, and whether it goes whole to every rank."""

_MAX_FORMS = 64


class Signature:
    """The parameters of a user's function, and which of them are broadcast.

    Parameters
    ----------
    fn, bcast_inputs, name
        As for :func:`synk.function`.
    reserved : frozenset of str
        Names that no argument by keyword can have.

    Attributes
    ----------
    names : tuple of str
        The names of all parameters in order; empty if Python does not know them.
    broadcast : frozenset of str
    first_scattered : int
        The position of the first argument that is not broadcast.
    forms : dict of (int, tuple of str) to Form
        Those that :meth:`form` has returned.

    Raises
    ------
    ValueError
        If ``bcast_inputs`` names a parameter that does not exist, or a parameter has a reserved name.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        bcast_inputs: str | Sequence[str],
        name: str,
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self._reserved = reserved
        self.forms: dict[tuple[int, tuple[str, ...]], Form] = {}
        if not isinstance(bcast_inputs, Iterable):
            raise TypeError(
                f"cannot build function {name!r}: got bcast_inputs={bcast_inputs!r}, expected the name of a parameter, "
                "or several."
            )
        self.broadcast = frozenset([bcast_inputs] if isinstance(bcast_inputs, str) else bcast_inputs)
        try:
            self._signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):  # Some builtins have no signature: their arguments by position are scattered.
            self._signature = None
        parameters = list(self._signature.parameters.values()) if self._signature else []
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._positional = [p.name for p in positional]
        self._var_positional = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "argument")
        self._var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
        self.names = tuple(p.name for p in parameters)
        scattered = [k for k, each in enumerate(self._positional) if each not in self.broadcast]
        self.first_scattered = scattered[0] if scattered else len(self._positional)
        names = set(self.names)
        unknown = sorted(self.broadcast - names)
        if unknown and self._signature is not None and not self._var_keyword:
            raise ValueError(
                f"cannot build function {name!r}: got bcast_inputs {unknown}, expected names of its parameters "
                f"{[p.name for p in parameters]}."
            )
        # One by position only cannot be given by keyword, in Python either.
        named = (each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
        for taken in reserved.intersection(named):
            raise ValueError(
                f"cannot build function {name!r}: got a parameter {taken!r}, expected another name: {taken}= is an "
                f"option of every call and would not reach the function. Rename it, or fix its value: lambda x: "
                f"{name}(x, {taken}=...)."
            )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, bool, Any]]:
        """Return ``(label, keyword, is_broadcast, value)`` of each argument.

        Raises
        ------
        TypeError
            As for a Python call of the function.
        """
        form = self.form(len(args), tuple(kwargs))
        return [(*each, value) for each, value in zip(form, (*args, *kwargs.values()))]

    def form(self, num_args: int, names: tuple[str, ...]) -> Form:
        """Return the form of calls with so many arguments by position, and those names of arguments by keyword.

        Raises
        ------
        TypeError
            As for a Python call of the function.
        """
        found = self.forms.get((num_args, names))
        if found is None:
            if len(self.forms) >= _MAX_FORMS:
                self.forms.clear()
            found = self.forms[num_args, names] = tuple(self._new_form(num_args, names))
        return found

    def _new_form(self, num_args: int, names: tuple[str, ...]) -> Iterator[tuple[str, str, bool]]:
        if self._signature is not None:
            self._check(num_args, names)
        for position in range(num_args):
            is_named = position < len(self._positional)
            parameter = self._positional[position] if is_named else self._var_positional
            label = parameter if is_named else f"{parameter}[{position - len(self._positional)}]"
            if self._signature is None:
                label = f"argument {position}"
            yield label, "", parameter in self.broadcast
        for key in names:
            parameter = key if key in self.names else self._var_keyword
            yield key, key, key in self.broadcast or parameter in self.broadcast

    def _check(self, num_args: int, names: tuple[str, ...]) -> None:
        assert self._signature is not None
        try:
            self._signature.bind(*range(num_args), **dict.fromkeys(names))
        except TypeError as error:
            unknown = [key for key in names if key not in self.names]
            if unknown:  # say this first, and not that the argument it was meant for is missing
                options = sorted(self._reserved)
                also = f" or an option of the call, {options}" if options else ""
                told = argument_hint("call", unknown[0], [*self.names, *options])
                raise TypeError(
                    f"{self.name}() got an unexpected keyword argument {unknown[0]!r}, expected one of "
                    f"{list(self.names)}{also}.{told}"
                ) from None
            raise TypeError(f"{self.name}() {error}") from None


NEW_NBYTES = 1 << 22
"""Copying that much costs as much as a call that is new. Larger arrays are mapped by name, or copied by rows."""


HELD = frozenset({"shard", "replica", "resident"})
"""The kinds of arguments that the ranks already have."""


class Nest(NamedTuple):
    """A nested value. Its leaves are consecutive arguments, from the one that holds this; see ``synk._pure.nested``."""

    num_leaves: int
    structure: Any
    is_whole: bool = False
    """Whether the value goes whole to every rank, so that its lists are structure."""


@dataclass
class Argument:
    """One argument of a call, or one leaf of a nested argument, after the checks.

    Attributes
    ----------
    label : str
        Its name in errors.
    keyword : str
        The name under which the function gets it; empty if by position.
    kind : str
        As in ``Input.kind``.
    array : ndarray or None
        The array to stage: ``rows``, ``picked`` or ``whole`` that lies in no segment yet; for ``table``, the packed
        rows of all ranks.
    data : synk.Data or None
    contents : Contents or None
        The contents of ``data`` when the argument was bound, or a memory-mapped array. Another thread may replace the
        contents of ``data`` at any time, so the whole call uses these.
    file : tuple or None
        How a rank maps the file in which the array lies: the arguments of ``map_again``.
    value : object
        For ``object``, ``shard``, ``replica`` and ``resident``; for ``table``, a table or a CSR matrix with rows.
    tensor_dtype : str
        As in ``Input.tensor_dtype``.
    is_tensor : bool
        Whether ``array`` is the memory of a torch tensor.
    nest : Nest or None
        The nested value, if this is its first leaf.
    """

    label: str
    keyword: str
    kind: str
    array: np.ndarray | None = None
    data: Any = None
    contents: Contents | None = None
    file: Any = None
    value: Any = None
    dtype: Any = None
    tensor_dtype: str = ""
    is_tensor: bool = False
    nest: Nest | None = None

    @property
    def key(self) -> Any:
        """The part of a plan's key that comes from this argument: equal keys can share a plan."""
        if self.contents is not None:
            array = self.contents.array
            return (self.kind, self.contents.segment_id, self.file, array.shape, array.dtype, array.dtype.type)
        if self.array is not None:  # the type too: NumPy calls np.record equal to a plain record
            shape = self.array.shape[1:] if self.kind == "rows" else self.array.shape
            return (self.kind, shape, self.dtype, self.dtype.type, self.tensor_dtype)
        if self.kind in HELD:
            return (self.kind, self.value.number)
        return self.kind

    @property
    def num_rows(self) -> int | None:
        """How many rows are to be divided; None if the argument has none, or is a shard."""
        if self.kind == "table":
            return int(self.value.shape[0])
        return len(self.whole_array) if self.kind == "rows" and self.whole_array is not None else None

    @property
    def whole_array(self) -> np.ndarray | None:
        """The array, wherever it lies; None if it is not an array."""
        return self.array if self.contents is None else self.contents.array


class ObjectPickler(TravelPickler):
    """Pickles broadcast objects. The memory of tensors goes out of band, like that of arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj) and is_ordinary(obj):
            array: Any = np.ascontiguousarray(array_of(obj)).reshape(-1).view(np.uint8)
            buffer = pickle.PickleBuffer(array)
            return copied_tensor, (buffer, dtype_of(obj), tuple(obj.shape))
        return super().reducer_override(obj)


def pickle_objects(values: list[Any], labels: list[str], function_name: str) -> tuple[list[Any], list[type]]:
    """Pickle the broadcast objects of a call as one tuple. Arrays in them go out of band.

    Returns
    -------
    parts : list of buffer
        The pickle, then its buffers: contiguous, in the order in which it refers to them.
    classes : list of type
        The classes that the pickle names.

    Raises
    ------
    SerializationError
        With the name of the argument that cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    if all(type(value) in PLAIN_TYPES for value in values):
        return [pickle.dumps(tuple(values), protocol=5)], []
    try:
        file = io.BytesIO()
        pickler = ObjectPickler(file, protocol=5, buffer_callback=buffers.append)
        pickler.dump(tuple(values))
    except Exception as error:
        raise_if_of_handler(error)
        for label, value in zip(labels, values):
            try:
                dumps(value)
            except Exception as inner:
                place, part = culprit_in(label, value, dumps)
                raise SerializationError(
                    f"cannot send {place} of {function_name!r} ({type(part).__name__}): "
                    f"{text_of(inner).rstrip('.')}. Broadcast inputs must be arrays or picklable."
                ) from inner
        raise SerializationError(f"cannot send the broadcast inputs of {function_name!r}: {error}") from error
    return [file.getvalue(), *(buffer.raw() for buffer in buffers)], pickler.named


def pack_tables(arguments: Sequence[Argument], division: Any, name: str) -> None:
    """Give each table the packed rows of all ranks that run the call.

    No function captures the classes in them, so the pickle itself says how those of the program are now.

    Raises
    ------
    TypeError
        If rows cannot be pickled. The text names the column.
    """
    dumps_now = functools.partial(dumps, has_word=True)
    for argument in arguments:
        if argument.kind == "table" and division.selection is not None:
            pickles: list[list[Any]] = [[] for _ in division.bounds]
            try:
                for rank in division.ranks:
                    rows = division.selection.between(*division.bounds[rank])
                    pickles[rank] = pickled_rows(argument.value, rows, dumps_now)
            except TypeError as error:
                raise TypeError(
                    f"cannot scatter {argument.label} of {name!r}: {error}. Pass its arrays in a dict or a tuple."
                ) from None
            argument.array = packed(pickles)
            argument.dtype = argument.array.dtype


def pickle_nests(arguments: Sequence[Argument], function_name: str) -> bytes:
    """Pickle ``(first, num_leaves, structure)`` of each nested argument; empty if there are none."""
    nests = [(first, a.nest.num_leaves, a.nest.structure) for first, a in enumerate(arguments) if a.nest is not None]
    if not nests:
        return b""
    try:
        return dumps(nests)
    except Exception as error:
        raise_if_of_handler(error)
        raise SerializationError(
            f"cannot send the structure of the arguments of {function_name!r}: {text_of(error)}. Keys "
            "and classes of nested arguments must be picklable."
        ) from error


def classes_in(structure: Any) -> Iterator[type]:
    """Yield the classes of which the containers of a nested argument are built. They travel once, with the plan."""
    if isinstance(structure, Container):
        made = structure.make.cls if isinstance(structure.make, Restored) else structure.make
        if isinstance(made, type):
            yield made
        for part in structure.parts:
            yield from classes_in(part)
