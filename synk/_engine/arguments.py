"""What a call looks like: the values of its arguments, leaf by leaf, and the part of its look that fixes a plan."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from synk._engine.argument import NEW_NBYTES, Argument
from synk._engine.checked import Checks
from synk._engine.data import Data
from synk._engine.resident import Resident
from synk._pure.nested import LEAF, PLAIN_TYPES, is_plain_object, take_apart, take_apart_whole


def look(
    callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], session: Any, is_submitted: bool
) -> tuple[Any, list[Any], list[Argument] | None]:
    """Return the key of a call's look, the values of its leaves, and the arguments if they had to be classified.

    The number of rows is no part of the key. Most arguments are plain arrays, tensors, ``Data``, numbers, resident
    objects, and nestings of these: their faces are found without classifying them, and say as much.
    """
    names = tuple(kwargs)
    form = callee.signature.forms.get((len(args), names)) or callee.signature.form(len(args), names)
    faces: list[Any] = [names]
    values: list[Any] = []
    face: Any
    for (_, _, is_whole), value in zip(form, (*args, *kwargs.values()) if names else args):
        kind = type(value)
        if kind is np.ndarray:
            face = _of_array(value, is_whole)
            values.append(value)
        elif kind is Data and value._session is session and session.has_shared_memory:
            contents = value._contents
            segment, shape = contents.segment, contents.array.shape
            # One without bytes has no segment, whose number would say its dtype.
            face = (is_whole, segment.id, shape) if segment is not None and (is_whole or shape) else None
            values.append(contents)
        elif kind is Resident and is_whole and value._referent.owner is session.residents:
            face = "resident", value._referent.number
            values.append(value._referent)
        else:
            face = _of_other(value, is_whole, callee.framework, values)
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


def _of_other(value: Any, is_whole: bool, framework: str | None, values: list[Any]) -> Any:
    """Return the face of a nesting, a tensor or a plain object, and add its leaves to ``values``; None for the rest."""
    kind = type(value)
    if kind is not dict and kind is not tuple and not (is_whole and kind is list):
        return _of_leaf(value, is_whole, is_whole, framework, values)
    try:
        leaves, structure = take_apart_whole(value) if is_whole else take_apart(value)
    except (TypeError, RecursionError):  # what is wrong is said where it is classified
        return None
    if not leaves or (structure == LEAF and not is_whole):
        return None
    faces = [structure]
    for leaf in leaves:
        if type(leaf) is np.ndarray:
            face = _of_array(leaf, is_whole)
            values.append(leaf)
        else:
            face = _of_leaf(leaf, is_whole, True, framework, values)
        if face is None:
            return None
        faces.append(face)
    return tuple(faces)


def _of_leaf(value: Any, is_whole: bool, may_be_single: bool, framework: str | None, values: list[Any]) -> Any:
    """Return the face of a tensor or a plain object, and add it to ``values``; None if it must be classified.

    ``may_be_single``: a number or a text may stand here, which goes to every rank.
    """
    kind = type(value)
    if may_be_single and (kind in PLAIN_TYPES or (is_whole and is_plain_object(value))):
        values.append(value)
        return "object"
    if kind is getattr(sys.modules.get("torch"), "Tensor", None) and (framework == "torch" or not is_whole):
        try:
            array = value.numpy()
        except (TypeError, RuntimeError):  # it requires grad, lies on a device, has a dtype that NumPy lacks
            return None
        values.append(array)
        if is_whole:
            return "tensor", array.dtype, array.shape, 0
        return ("tensor", array.dtype, array.shape[1:]) if array.ndim else None
    return None


def classified(
    callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], session: Any, is_submitted: bool
) -> list[Argument]:
    """Return the arguments of a call, leaf by leaf, after all checks."""
    checks = Checks(callee, session, is_submitted=is_submitted)
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
    return argument.key, argument.keyword, nest


def _value(argument: Argument) -> Any:
    if argument.contents is not None:
        return argument.contents
    return argument.value if argument.array is None else argument.array
