"""The reduction ops: their words, their dtype rules and their arithmetic. Pure NumPy, no process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from synk._pure.trees import flatten

Op = str | Callable[[Any, Any], Any] | None

REDUCE_OPS = ("avg", "sum", "prod", "min", "max")
OPS = (*REDUCE_OPS, "gather", "first")

# An accumulator block of this size stays in the second-level cache while every rank's part streams through it.
BLOCK_NBYTES = 1 << 18

_UFUNC_NAMES = {"avg": "add", "sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}
UFUNCS = {op: getattr(np, name) for op, name in _UFUNC_NAMES.items()}


def is_reducible(op: Op) -> bool:
    """Whether ``op`` combines the values of all ranks element by element."""
    return isinstance(op, str) and op in UFUNCS


@functools.cache  # NumPy composes the name of a dtype anew each time: 3 us
def is_bfloat16(dtype: np.dtype) -> bool:
    return dtype.name == "bfloat16"


def check_op(op: str, dtype: np.dtype, what: str) -> None:
    """Raise TypeError where ``op`` has no meaning for ``dtype``; ``what`` names the value in the message.

    The rules are the same on every backend: avg of floats and complex numbers only, no sum or prod of bools (it would
    silently mean "or"), no order of complex numbers, no arithmetic on text, dates and records.
    """
    kind = "f" if is_bfloat16(dtype) else dtype.kind
    if kind not in "biufc":
        raise TypeError(
            f"cannot reduce {what} with op {op!r}: got dtype {dtype}, expected a bool, integer, float or complex one. "
            "Use op 'gather' or None."
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


@functools.cache
def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are combined: float32 for the 16-bit floats, else ``dtype``."""
    return np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype


def _reduce_block(op: str, blocks: Sequence[np.ndarray], rows: Sequence[float] | None, out: np.ndarray) -> None:
    """Reduce equally long 1-d blocks into ``out``, in order, in the accumulator dtype."""
    ufunc = UFUNCS[op]
    wide = accumulator_dtype(out.dtype)
    if op == "avg" and rows is not None and len(set(rows)) > 1:
        # The rows multiply before the one division, so that an average of equal values is that value.
        total = wide.type(sum(rows))
        accumulator = np.empty(out.shape, wide)
        term = np.empty(out.shape, wide)
        np.multiply(blocks[0], wide.type(rows[0]), out=accumulator)
        for block, num_rows in zip(blocks[1:], rows[1:]):
            np.multiply(block, wide.type(num_rows), out=term)
            np.add(accumulator, term, out=accumulator)
        np.divide(accumulator, total, out=accumulator)
        out[...] = accumulator
        return
    accumulator = out if wide == out.dtype else np.empty(out.shape, wide)
    if len(blocks) == 1:
        out[...] = blocks[0]
        return
    first, second = blocks[0], blocks[1]
    if wide != out.dtype:
        first, second = first.astype(wide), second.astype(wide)
    ufunc(first, second, out=accumulator)
    for block in blocks[2:]:
        ufunc(accumulator, block.astype(wide, copy=False), out=accumulator)
    if op == "avg":
        np.divide(accumulator, wide.type(len(blocks)), out=accumulator)
    if accumulator is not out:
        out[...] = accumulator


def reduce_into(op: str, values: Sequence[np.ndarray], rows: Sequence[float] | None, out: np.ndarray) -> None:
    """Reduce ``values`` (all of the shape and dtype of ``out``, C-contiguous) into ``out``, in the order given.

    Parameters
    ----------
    op : str
        One of ``REDUCE_OPS``.
    values : sequence of ndarray
        One per rank that votes; none of them may overlap ``out``.
    rows : sequence of float or None
        How many rows stand behind each value: the weights of ``avg``. ``None``: all alike.

    Overflow and NaN are the caller's numbers, as in a NumPy reduction: callers run this under ``np.errstate``.
    """
    if out.nbytes <= BLOCK_NBYTES:
        _reduce_block(op, values, rows, out)
        return
    flat_out = out.reshape(-1)
    flat = [value.reshape(-1) for value in values]
    length = max(BLOCK_NBYTES // out.itemsize, 1)
    for start in range(0, flat_out.size, length):
        stop = start + length
        _reduce_block(op, [value[start:stop] for value in flat], rows, flat_out[start:stop])


class Accumulator:
    """The running value of one output over the slices of one rank.

    Parameters
    ----------
    op : Op
    what : str
        Names the output in errors.
    xp : module
        NumPy, or the namespace of the array library that the values belong to.
    is_single : bool
        There will be one slice only: its value is taken without a copy.
    """

    def __init__(self, op: Op, what: str, xp: Any = np, *, is_single: bool = False) -> None:
        self.op = op
        self._is_single = is_single
        self.what = what
        self._xp = xp
        self._parts: list[Any] = []
        self._rows: list[int] = []
        self._sum: Any = None

    def add(self, value: Any, num_rows: int) -> None:
        """Take in the value of one slice of ``num_rows`` rows (an array, or any object where the op allows it)."""
        op = self.op
        self._rows.append(num_rows)
        if not self._is_single and (_is_on_host(value) or isinstance(value, self._xp.ndarray)):
            # A function may return a buffer that it fills again for the next slice.
            value = (np if _is_on_host(value) else self._xp).array(value)
        if op is None or op == "gather":
            self._parts.append(value)
        elif not self._parts:
            self._parts = [value]  # as it is: with one slice nothing is computed
        elif callable(op):
            self._parts = [op(self._parts[0], value)]
        elif op != "first":
            self._combine(op, value, num_rows)

    def _combine(self, op: str, value: Any, num_rows: int) -> None:
        first = self._parts[0]
        if self._sum is None:
            check_op(op, first.dtype, self.what)
            self._sum = self._xp.array(self._term(op, first, self._rows[0]), order="C")
        if value.shape != first.shape or value.dtype != first.dtype:
            raise ValueError(
                f"cannot accumulate {self.what} over slices: got shape {value.shape} and dtype {value.dtype} after "
                f"shape "
                f"{first.shape} and dtype {first.dtype}, expected the same for every slice. "
                "Use op 'gather' where the length follows the rows."
            )
        with np.errstate(all="ignore"):  # overflow and NaN are the caller's numbers, as in a NumPy reduction
            getattr(self._xp, _UFUNC_NAMES[op])(self._sum, self._term(op, value, num_rows), out=self._sum)

    def _term(self, op: str, value: Any, num_rows: int) -> Any:
        """Return ``value`` in the accumulator dtype, for an average times its rows."""
        value = self._xp.asarray(value)  # a number may still be on the host
        wide = accumulator_dtype(value.dtype)
        with np.errstate(all="ignore"):
            if op == "avg":
                return self._xp.multiply(value, wide.type(num_rows), dtype=wide)
            return value.astype(wide, copy=False)

    def result(self) -> Any:
        """Return the value over all slices taken in so far."""
        if self.op is None:
            return self._parts
        if self.op == "gather":
            if all(_is_on_host(part) for part in self._parts):
                return concatenate(self._parts)
            return self._xp.concatenate([self._xp.asarray(part) for part in self._parts])
        if self._sum is None:
            return self._parts[0]
        with np.errstate(all="ignore"):
            total = self._sum
            if self.op == "avg":
                total = total / total.dtype.type(sum(self._rows))
            return self._xp.asarray(total, dtype=self._parts[0].dtype)


def concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join host arrays along axis 0. Where they agree on a dtype it is kept: ``np.concatenate`` would pack records."""
    dtype = parts[0].dtype
    if any(part.dtype != dtype for part in parts):
        return np.concatenate(parts)
    out = np.empty((sum([len(part) for part in parts]), *parts[0].shape[1:]), dtype)
    return np.concatenate(parts, out=out)


def _is_on_host(value: Any) -> bool:
    """Whether ``value`` is NumPy's, as text and numbers of a function on a device may be."""
    return isinstance(value, (np.ndarray, np.generic))


def check_outputs(outputs: Any, what: str) -> None:
    """Raise unless ``outputs`` is an op, or a nesting of tuples, lists and dicts of ops."""
    if outputs is None or callable(outputs):
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
