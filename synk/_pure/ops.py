"""The reduction ops: their words, their dtype rules, and which output they are for. No process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from synk._pure.dtypes import describe_dtype, is_bfloat16
from synk._pure.trees import flatten

Op = str | Callable[[Any, Any], Any] | None

REDUCE_OPS = ("avg", "sum", "prod", "min", "max")
OPS = (*REDUCE_OPS, "gather", "first")


class DefaultOp(str):
    """The op of a function whose ``outputs`` nobody has named: it is checked whether it fits."""

    __slots__ = ()


DEFAULT_OP: Op = DefaultOp("avg")

_WORDS = {
    "sum": "sum", "prod": "prod", "mean": "avg", "average": "avg", "min": "min", "amin": "min", "max": "max",
    "amax": "max", "all": "min", "any": "max", "concatenate": "gather", "vstack": "gather", "hstack": "gather",
}  # fmt: skip
"""The ops that do what functions of one argument, many values, do."""


def is_reducible(op: Op) -> bool:
    """Whether ``op`` combines the values of all ranks element by element."""
    return isinstance(op, str) and op in REDUCE_OPS


def check_op(op: str, dtype: np.dtype, what: str) -> None:
    """Raise TypeError where ``op`` has no meaning for ``dtype``; ``what`` names the value in the message.

    The rules are the same on every backend: avg of floats and complex numbers only, no sum or prod of bools (it would
    silently mean "or"), no order of complex numbers, no arithmetic on text, dates and records.
    """
    kind = "f" if is_bfloat16(dtype) else dtype.kind
    if kind not in "biufc":
        raise TypeError(
            f"cannot reduce {what} with op {op!r}: got dtype {describe_dtype(dtype)}, expected a bool, integer, float "
            "or complex one. Use op 'gather' or None."
        )
    if op == "avg" and kind in "biu":
        raise TypeError(
            f"cannot average {what}: got dtype {dtype}, expected a float or complex one. "
            "Use op 'sum', or cast the value to float in the function."
        )
    if op in ("sum", "prod") and kind == "b":
        raise TypeError(
            f"cannot {op} {what}: got dtype bool, expected a number. "
            "Use op 'max' (any) or 'min' (all), or cast the value to int in the function."
        )
    if op in ("min", "max") and kind == "c":
        raise TypeError(
            f"cannot take the {op} of {what}: got dtype {dtype}, and complex numbers have no order. "
            "Reduce the real part, the imaginary part or the magnitude."
        )


def check_outputs(outputs: Any, what: str) -> None:
    """Raise unless ``outputs`` is an op, or a nesting of tuples, lists and dicts of ops."""
    if outputs is None:
        return
    if callable(outputs):
        _check_callable(outputs, what)
        return
    if isinstance(outputs, str):
        if outputs not in OPS:
            raise ValueError(
                f"cannot build {what}: got op {outputs!r}, expected one of {', '.join(map(repr, OPS))}, None or a "
                f"callable."
            )
        return
    if isinstance(outputs, dict):
        children: Any = outputs.values()
    elif isinstance(outputs, (tuple, list)):
        children = outputs
    else:
        raise TypeError(
            f"cannot build {what}: got outputs of type {type(outputs).__name__}, expected an op, or a tuple, list or "
            "dict of ops."
        )
    for child in children:
        check_outputs(child, what)


def _check_callable(op: Callable[..., Any], what: str) -> None:
    """Raise unless ``op`` takes two values. Those for which a second argument means something else combine wrongly."""
    try:
        parameters = list(inspect.signature(op).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have none: max and min, ufuncs
        return
    values = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    num_required = sum(p.default is p.empty for p in values)
    if num_required == 2 or (num_required < 2 and any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        return
    name = getattr(op, "__name__", type(op).__name__)
    word = _WORDS.get(name)
    hint = f" Name the op: {word!r}." if word else ""
    raise TypeError(
        f"cannot build {what}: got {name}({', '.join(map(str, parameters))}) as an op, expected op(a, b), which "
        f"returns the two ranks' values combined.{hint}"
    )


def each_op(outputs: Any) -> Iterator[Op]:
    """Yield the ops of ``outputs``, an op or a nesting of them."""
    if isinstance(outputs, dict):
        for child in outputs.values():
            yield from each_op(child)
    elif isinstance(outputs, (tuple, list)):
        for child in outputs:
            yield from each_op(child)
    else:
        yield outputs


def match_ops(outputs: Any, skeleton: Any, num_leaves: int, what: str) -> list[Op]:
    """Return the op of each leaf of a result.

    ``outputs`` is a prefix of the result's structure: an op stands for all leaves below it. A list matches a tuple and
    the other way round; dicts match by key.

    Parameters
    ----------
    outputs : op, or nesting of ops
    skeleton : nesting of int
        The result with the position of each leaf in its place.
    num_leaves : int
    what : str
        Names the function in errors.

    Raises
    ------
    ValueError
        If the two differ in length or keys.
    """
    ops: list[Op] = [None] * num_leaves
    _match(outputs, skeleton, ops, what, "")
    return ops


def _match(outputs: Any, skeleton: Any, ops: list[Op], what: str, path: str) -> None:
    is_op = outputs is None or isinstance(outputs, str) or callable(outputs)
    if skeleton is None:
        return
    if isinstance(skeleton, int):
        if not is_op:
            raise ValueError(_mismatch(what, path, outputs, "a single value"))
        ops[skeleton] = outputs
    elif isinstance(skeleton, dict):
        if not is_op and (not isinstance(outputs, dict) or outputs.keys() != skeleton.keys()):
            raise ValueError(_mismatch(what, path, outputs, f"a dict with the keys {list(skeleton)}"))
        for key, child in skeleton.items():
            _match(outputs if is_op else outputs[key], child, ops, what, f"{path}[{key!r}]")
    else:
        if not is_op and (not isinstance(outputs, (tuple, list)) or len(outputs) != len(skeleton)):
            raise ValueError(_mismatch(what, path, outputs, f"{len(skeleton)} values"))
        for position, child in enumerate(skeleton):
            _match(outputs if is_op else outputs[position], child, ops, what, f"{path}[{position}]")


def _mismatch(what: str, path: str, outputs: Any, got: str) -> str:
    return (
        f"cannot match the outputs of {what}: its result{path} is {got}, but outputs{path} is {outputs!r}. "
        "Give one op for all, or a structure of ops like that of the result."
    )


def wanted_leaves(skeleton: Any, subset: tuple[Any, ...] | None, name: str) -> set[int] | None:
    """Return the leaf positions under the top-level positions or keys of ``subset``; None for all.

    Raises
    ------
    IndexError, KeyError
        If the result has no such position or key.
    """
    if subset is None:
        return None
    wanted: set[int] = set()
    for key in subset:
        if isinstance(skeleton, dict):
            if key not in skeleton:
                raise KeyError(f"cannot select output {key!r} of {name!r}: expected one of {sorted(skeleton)}.")
        elif not isinstance(skeleton, (tuple, list)):
            raise IndexError(f"cannot select output {key!r} of {name!r}: it returns one value, and no tuple or dict.")
        elif not isinstance(key, int) or not -len(skeleton) <= key < len(skeleton):
            raise IndexError(
                f"cannot select output {key!r} of {name!r}: expected an integer from {-len(skeleton)} to "
                f"{len(skeleton) - 1}, for it returns {len(skeleton)} outputs."
            )
        wanted.update(flatten(skeleton[key])[0])
    return wanted
