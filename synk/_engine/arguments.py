"""What a call looks like: the values of its arguments, leaf by leaf, and the part of its look that fixes a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from synk._engine.argument import NEW_NBYTES, Argument
from synk._engine.checked import Checks
from synk._engine.data import Data
from synk._engine.resident import Resident
from synk._pure.nested import PLAIN_TYPES, take_apart, take_apart_whole

_SCALARS = PLAIN_TYPES - {type(None)}


def look(
    callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], session: Any, is_submitted: bool
) -> tuple[Any, list[Any], list[Argument] | None]:
    """Return the key of a call's look, the values of its leaves, and the arguments if they had to be classified.

    The number of rows is no part of the key. Most arguments are plain arrays, ``Data``, numbers, resident objects, and
    nestings of plain arrays: their faces are found without classifying them, and say as much.
    """
    signature = callee.signature
    if not kwargs and signature._has_only_positional and signature._required <= len(args) <= len(callee.flags):
        faces: list[Any] = []
        values: list[Any] = []
        face: Any
        for value, is_whole in zip(args, callee.flags):
            kind = type(value)
            if kind is np.ndarray:
                face = _of_array(value, is_whole)
                values.append(value)
            elif kind is Data and value._session is session and session.has_shared_memory:
                contents = value._contents
                # One without bytes has no segment, whose number would say its dtype.
                is_known = contents.segment_id and (is_whole or value.ndim)
                face = (is_whole, contents.segment_id, contents.array.shape) if is_known else None
                values.append(contents)
            elif is_whole and kind in _SCALARS:
                face = "object"
                values.append(value)
            elif kind is Resident and is_whole and value._referent.residents is session.residents:
                face = "resident", value._referent.number
                values.append(value._referent)
            else:
                face = _of_nest(value, is_whole, values)
            if face is None:
                break
            faces.append(face)
        else:
            return tuple(faces), values, None
    arguments = classified(callee, args, kwargs, session, is_submitted)
    return tuple(map(_face, arguments)), list(map(_value, arguments)), arguments


def _of_array(value: np.ndarray, is_whole: bool) -> Any:
    """Return the face of a plain array; None if it must be classified."""
    dtype = value.dtype
    if dtype.kind in "OV" or (value.base is not None and value.nbytes >= NEW_NBYTES):
        return None
    if is_whole:
        return dtype, value.shape, 0
    return (dtype, value.shape[1:]) if value.ndim else None


def _of_nest(value: Any, is_whole: bool, values: list[Any]) -> Any:
    """Return the face of a dict or tuple of plain arrays, and add its leaves to ``values``; None for anything else."""
    kind = type(value)
    if kind is not dict and kind is not tuple and not (is_whole and kind is list):
        return None
    try:
        leaves, structure = take_apart_whole(value) if is_whole else take_apart(value)
    except (TypeError, RecursionError):  # what is wrong is said where it is classified
        return None
    faces = [structure]
    for leaf in leaves:
        face = _of_array(leaf, is_whole) if type(leaf) is np.ndarray else None
        if face is None:
            return None
        faces.append(face)
    values += leaves
    return tuple(faces) if leaves else None


def classified(
    callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], session: Any, is_submitted: bool
) -> list[Argument]:
    """Return the arguments of a call, leaf by leaf, after all checks."""
    checks = Checks(callee.name, callee.framework, session, is_submitted=is_submitted)
    arguments = checks.arguments(callee.signature.bind(args, kwargs))
    if not session.has_shared_memory:  # the rows of ``Data`` and of files travel as those of arrays do
        arguments = [each if each.contents is None else _by_value(each) for each in arguments]
    if callee.framework == "torch" or any(argument.is_tensor for argument in arguments):
        session.tell_of_unused_gpus(callee.name)
    return arguments


def _by_value(argument: Argument) -> Argument:
    assert argument.contents is not None
    array = argument.contents.array
    return replace(argument, array=array, dtype=array.dtype, contents=None, data=None, file=None)


def _face(argument: Argument) -> Any:
    nest = None if argument.nest is None else (argument.nest.num_leaves, argument.nest.structure)
    if argument.contents is None and argument.array is not None:
        array = argument.array
        shape = array.shape[1:] if argument.kind == "rows" else array.shape
        dtype = argument.dtype
        return argument.kind, shape, dtype, dtype.type, argument.tensor_dtype, argument.keyword, nest
    return argument.key, argument.keyword, nest


def _value(argument: Argument) -> Any:
    if argument.contents is not None:
        return argument.contents
    return argument.value if argument.array is None else argument.array
