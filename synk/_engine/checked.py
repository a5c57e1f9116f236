"""Checks the arguments of a call: which are rows, which go whole to every rank, and where a nested one ends.

Every error names the leaf that caused it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from synk._code.parcels import Handle
from synk._engine.argument import NEW_NBYTES, Argument, Nest
from synk._engine.data import Contents, Data
from synk._engine.resident import Resident
from synk._engine.shared import Shared
from synk._engine.things import check_owner
from synk._pure.arrays import as_plain_array, check_shareable
from synk._pure.dtypes import foreign_name, storage
from synk._pure.nested import (
    LEAF,
    PLAIN_TYPES,
    SINGLE_VALUES,
    check_no_list,
    has_inner_rows,
    is_nested,
    paths,
    take_apart,
    take_apart_whole,
)
from synk._pure.read_only import ReadOnlyArray
from synk._pure.tables import is_table, kind_of
from synk._pure.tensors import check_no_grad, check_tensor, is_tensor
from synk._wire.file_maps import check_length, recipe_of_map
from synk._wire.messages import DEVICE_DTYPES


class Checks:
    """The checks of the arguments of one function.

    Parameters
    ----------
    callee : Callee
    session : Session
    is_submitted : bool
        Whether the call is submitted: it uses what the arguments hold now, whatever is written into them later.
    """

    def __init__(self, callee: Any, session: Any, *, is_submitted: bool) -> None:
        self._name, self._framework = callee.name, callee.framework
        self._named = callee.signature.broadcast
        self._session = session
        self._is_submitted = is_submitted

    def arguments(self, bound: Iterable[tuple[str, str, bool, Any]]) -> list[Argument]:
        """Classify the arguments of a call, as ``Signature.bind`` returned them. Nested ones are classified leaf by
        leaf.

        Raises
        ------
        TypeError
            If a scattered argument is no array, has no rows (pass it as broadcast), or holds Python objects.
        ClosedError, ValueError
            If it is a ``Data`` or ``Shared`` of another runtime.
        """
        arguments: list[Argument] = []
        for label, keyword, is_broadcast, value in bound:
            if is_broadcast:
                arguments += self._whole(label, keyword, value)
            elif is_nested(value):
                arguments += self._nested(label, keyword, value)
            else:
                arguments.append(self._scattered(label, keyword, value))
        return arguments

    def _whole(self, label: str, keyword: str, value: Any) -> list[Argument]:
        """Classify a broadcast argument. Arrays in dicts, lists, tuples and dataclasses are classified one by one."""
        if type(value) is np.ndarray or isinstance(value, (Data, Handle)):
            return [self._broadcast(label, keyword, value)]
        self._check_constants(label, value)
        leaves, structure = take_apart_whole(value)
        if structure is LEAF:
            return [self._broadcast(label, keyword, value)]
        steps = paths(structure)
        if any(isinstance(leaf, (Data, Handle)) for leaf in leaves):
            return [Argument(label, keyword, "object", value=value)]  # its pickling says where these are allowed
        arguments = [self._inner(label + step, keyword, leaf) for step, leaf in zip(steps, leaves)]
        arguments[0].nest = Nest(len(arguments), structure, is_whole=True)
        return arguments

    def _inner(self, label: str, keyword: str, value: Any) -> Argument:
        """Classify a leaf of a broadcast argument. What a device cannot hold stays on the host, as in an object."""
        argument = self._broadcast(label, keyword, value)
        dtype = argument.dtype if argument.contents is None else argument.contents.array.dtype
        if dtype is None or argument.tensor_dtype or not self._session.has_devices:
            return argument
        if not (dtype.isnative and dtype.name in DEVICE_DTYPES):
            return Argument(label, keyword, "object", value=value)
        return argument

    def _broadcast(self, label: str, keyword: str, value: Any) -> Argument:
        if isinstance(value, Data):
            return self._data(label, keyword, "whole", value)
        if isinstance(value, (Shared, Resident)):
            argument = self._held(label, keyword, value)
            if argument.kind == "shard":
                raise self._misplaced(label, argument.value, "take it out of bcast_inputs")
            return argument
        self._check_constants(label, value)
        if is_tensor(value) and self._framework == "torch":
            return self._array(label, keyword, value)
        if isinstance(value, (ReadOnlyArray, np.memmap)):
            value = value.view(np.ndarray)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return self._array(label, keyword, value)
        return Argument(label, keyword, "object", value=value)

    def _scattered(self, label: str, keyword: str, value: Any) -> Argument:
        if value is None:
            raise TypeError(self._no_rows(label, "a single value (NoneType)"))
        argument = self._leaf(label, keyword, value)
        if argument.kind == "whole":
            what = "a Data with no axes" if argument.data is not None else f"a single value ({type(value).__name__})"
            raise TypeError(self._no_rows(label, what))
        if argument.kind in ("replica", "resident"):
            raise self._misplaced(label, argument.value, f"add {label!r} to bcast_inputs")
        return argument

    def _nested(self, label: str, keyword: str, value: Any) -> list[Argument]:
        """Classify the leaves of a scattered argument: leaves with rows are divided, single values go to every rank."""
        what, kind = f"{label} of {self._name!r}", type(value).__name__
        try:
            leaves, structure = take_apart(value)
        except TypeError as error:
            raise TypeError(f"cannot scatter {what}: {error}. Pass its arrays in a dict or a tuple.") from None
        except RecursionError:
            raise ValueError(
                f"cannot scatter {what}: got a {kind} that holds itself, or is nested too deeply. "
                "Pass its arrays in a dict or a tuple."
            ) from None
        arguments = []
        for leaf, path in zip(leaves, paths(structure)):
            if isinstance(leaf, SINGLE_VALUES):
                arguments.append(Argument(label + path, keyword, "object", value=leaf))
                continue
            argument = self._leaf(label + path, keyword, leaf)
            if argument.kind in ("replica", "resident"):
                hint = "pass it as an argument of its own that bcast_inputs names"
                raise self._misplaced(label + path, argument.value, hint)
            arguments.append(argument)
        if not any(argument.kind in ("rows", "table", "shard") for argument in arguments):
            raise TypeError(self._no_rows(label, f"a {kind} in which nothing has rows"))
        arguments[0].nest = Nest(len(arguments), structure)
        return arguments

    def _leaf(self, label: str, keyword: str, value: Any) -> Argument:
        """Classify a value that is not nested: ``rows`` or ``shard``, or without rows ``whole`` or ``replica``."""
        if isinstance(value, Data):
            return self._data(label, keyword, "rows" if value.ndim else "whole", value)
        if isinstance(value, (Shared, Resident)):
            return self._held(label, keyword, value)
        if isinstance(value, ReadOnlyArray):
            value = value.view(np.ndarray)
        if type(value) is not np.ndarray:
            if has_inner_rows(value):
                self._check_inner_rows(label, value)
                return Argument(label, keyword, "table", value=value)
            caller = self._name if label.isidentifier() else ""
            check_no_list(value, "scatter", f"{label} of {self._name!r}", label, caller)
        argument = self._array(label, keyword, value)
        array = argument.whole_array
        if array is not None and array.ndim:
            argument.kind = "rows"
        return argument

    def _array(self, label: str, keyword: str, value: Any) -> Argument:
        """Return an array, or a value that becomes one, as an argument that goes whole to every rank."""
        what, tensor_dtype = f"{label} of {self._name!r}", ""
        was_tensor = is_tensor(value)
        if was_tensor and self._framework == "torch":
            array = check_tensor(value, what)
            tensor_dtype = foreign_name(array.dtype)
            if tensor_dtype:
                array = array.view(storage(array.dtype.itemsize))
        else:
            array = as_plain_array(value, what)
        dtype = check_shareable(array.dtype, label)
        if not was_tensor and array.nbytes >= NEW_NBYTES and array.flags.aligned and array.dtype.isnative:
            # The program may write to a map before a submitted call reads it.
            recipe = recipe_of_map(array, ("r",) if self._is_submitted else ("r", "r+", "w+"))
            if recipe is not None:
                check_length(array, what)
                return Argument(label, keyword, "whole", contents=Contents(None, array), file=recipe[1])
        return Argument(
            label, keyword, "whole", array=array, dtype=dtype, tensor_dtype=tensor_dtype, is_tensor=was_tensor
        )

    def _check_inner_rows(self, label: str, value: Any) -> None:
        """Raise for a sparse matrix or a table if the function gets inputs of another form."""
        if self._framework or self._session.has_devices:
            inputs = f"tensors of {self._framework}" if self._framework else "arrays on devices"
            what, cure = "sparse matrix", ".toarray(), by blocks of rows if it is large"
            if is_table(value):
                what, cure = kind_of(value), ".to_numpy()"
            raise TypeError(
                f"cannot scatter {label} of {self._name!r}: got a {what}, and its inputs are {inputs}, expected an "
                f"array. Pass {label}{cure}."
            )

    def _data(self, label: str, keyword: str, kind: str, value: Data) -> Argument:
        check_owner(value._session, self._session, value._label, f"{label} of {self._name!r}")
        return Argument(label, keyword, kind, data=value, contents=value._contents)

    def _held(self, label: str, keyword: str, value: Handle) -> Argument:
        """Return what the ranks have already, as an argument: ``shard``, ``replica`` or ``resident``."""
        held: Any = value._referent
        is_resident = isinstance(value, Resident)
        owner = self._session.residents if is_resident else self._session.variables
        check_owner(held.owner, owner, held.label, f"{label} of {self._name!r}")
        kind = "resident" if is_resident else "shard" if held.is_sharded else "replica"
        return Argument(label, keyword, kind, value=held)

    def _check_constants(self, label: str, value: Any) -> None:
        """Raise for tensors that require grad in a broadcast argument and its containers, but not in a module."""
        if "torch" not in sys.modules:
            return
        pending: list[tuple[Any, Any]] = [(None, value)]  # where it lies: its container's own place, and its key there
        seen = set()
        while pending:
            place, value = pending.pop()
            if is_tensor(value):
                keys = []
                while place is not None:
                    place, key = place
                    keys.append(f"[{key!r}]")
                check_no_grad(value, f"{label}{''.join(reversed(keys))} of {self._name!r}")
            elif isinstance(value, (tuple, list, dict)) and id(value) not in seen:
                seen.add(id(value))
                parts = value if isinstance(value, dict) else dict(enumerate(value))
                if not PLAIN_TYPES.issuperset(map(type, parts.values())):
                    pending += [((place, key), part) for key, part in parts.items()]

    def _misplaced(self, label: str, meant: Any, hint: str) -> ValueError:
        if meant.kind == "variable":
            what = f"variable {meant.name!r} is {'sharded' if meant.is_sharded else 'replicated'}"
        else:
            what = f"resident object {meant.name!r} has no rows"
        return ValueError(f"cannot pass {label} of {self._name!r}: {what}; {hint}.")

    def _no_rows(self, label: str, got: str) -> str:
        names = (*sorted(self._named), label) if self._named else label
        return (
            f"cannot scatter {label} of {self._name!r}: got {got}, expected an array with rows on axis 0. "
            f"Pass it as a broadcast input: bcast_inputs={names!r}."
        )
