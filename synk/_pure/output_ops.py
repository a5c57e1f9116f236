"""Which op belongs to which output: checks nestings of ops, looks up names, matches ops with results. No process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from synk._pure.ops import EACH, OPS, OWN_NAMES, Folded, Op
from synk._pure.trees import flatten

_WORDS = {
    "sum": "sum", "prod": "prod", "mean": "avg", "average": "avg", "min": "min", "amin": "min", "max": "max",
    "amax": "max", "all": "min", "any": "max", "concatenate": "gather", "vstack": "gather", "hstack": "gather",
    "concat": "gather", "cat": "gather", "stack": "gather", "add": "sum", "total": "sum", "mul": "prod",
    "product": "prod", "minimum": "min", "maximum": "max", "none": "None", "list": "None",
}  # fmt: skip
"""Names of functions that combine values, and of ops elsewhere, with the op that does the same. For errors."""


class DefaultOp(str):
    """The op of a function without ``outputs=``. Only this op is checked for whether it fits."""

    __slots__ = ()


DEFAULT_OP = DefaultOp("avg")


def ops_of(outputs: Any, what: str) -> Any:
    """Return the ops that ``outputs`` means, as a user gives it: one op, or a nesting of ops.

    Raises
    ------
    ValueError, TypeError
        Unless it is an op, or a nesting of tuples, lists and dicts of ops; ``what`` names the function.

    Examples
    --------
    >>> ops_of(("sum", {"a": None}), "'f'")
    ('sum', {'a': None})
    >>> ops_of("sum", "'f'") is OPS["sum"]
    True
    """
    if outputs is None:
        return EACH
    if isinstance(outputs, Op) or (isinstance(outputs, type) and issubclass(outputs, Op)):
        _check_own(outputs, what)
        return outputs
    if callable(outputs):
        _check_callable(outputs, what)
        return Folded(outputs)
    if isinstance(outputs, str):
        if outputs not in OPS:
            from difflib import get_close_matches

            word = _WORDS.get(outputs.lower()) or next(iter(get_close_matches(outputs.lower(), OPS, 1)), "")
            hint = f" Did you mean {word if word == 'None' else repr(word)}?" if word else ""
            raise ValueError(
                f"cannot build {what}: got op {outputs!r}, expected one of {', '.join(map(repr, OPS))}, None, a "
                f"callable or a synk.Op.{hint}"
            )
        return OPS[outputs]
    if isinstance(outputs, dict):
        return {key: ops_of(child, what) for key, child in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        ops = [ops_of(child, what) for child in outputs]
        return ops if isinstance(outputs, list) else tuple(ops)
    raise TypeError(
        f"cannot build {what}: got outputs of type {type(outputs).__name__}, expected an op, or a tuple, list or "
        "dict of ops."
    )


def _check_own(op: Any, what: str) -> None:
    """Raise unless a user's own op is usable."""
    if isinstance(op, type):
        raise TypeError(
            f"cannot build {what}: got the class {op.__name__} as an op, expected an instance of it. Write "
            f"{op.__name__}(...)."
        )
    defined = [vars(cls) for cls in type(op).__mro__ if cls is not Op] + [getattr(op, "__dict__", {})]
    for name in sorted(OWN_NAMES & set[str]().union(*defined)):
        raise TypeError(
            f"cannot build {what}: got op {op!r}, which defines {name}, expected another name, for synk uses this one. "
            "Rename it."
        )
    if type(op).combine is Op.combine and not op.concatenates:
        raise TypeError(
            f"cannot build {what}: got op {op!r} without a combine, expected a method combine(values, rows), or "
            "concatenates = True for an op that works on all rows."
        )


def _check_callable(op: Callable[..., Any], what: str) -> None:
    """Raise unless ``op`` combines two values. A callable whose second argument means something else is refused."""
    try:
        parameters = list(inspect.signature(op).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature: max, min, ufuncs
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


def each_op(outputs: Any) -> Iterator[Any]:
    """Yield the ops of ``outputs``, an op or a nesting of them."""
    if isinstance(outputs, dict):
        for child in outputs.values():
            yield from each_op(child)
    elif isinstance(outputs, (tuple, list)):
        for child in outputs:
            yield from each_op(child)
    else:
        yield outputs


def match_ops(outputs: Any, skeleton: Any, num_leaves: int, what: str) -> list[Any]:
    """Return the op of each leaf of a result.

    ``outputs`` is a prefix of the result's structure: an op stands for all leaves below it. Lists and tuples match each
    other; dicts match by key.

    Parameters
    ----------
    outputs : op, or nesting of ops
        Either as a user gives it or already looked up.
    skeleton : nesting of int
        The result, with the position of each leaf in its place.
    num_leaves : int
    what : str
        Names the function in errors.

    Raises
    ------
    ValueError
        If ``outputs`` and the result differ in length or keys.
    """
    ops: list[Any] = [None] * num_leaves
    _match(outputs, skeleton, ops, what, "")
    return ops


def _match(outputs: Any, skeleton: Any, ops: list[Any], what: str, path: str) -> None:
    is_op = not isinstance(outputs, (dict, tuple, list))
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
    """Return the positions of the leaves under the top-level positions or keys of ``subset``; None stands for all.

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
