"""The ops: how the values that the ranks return for an output become one result.

In one file because a new op is one class here: all that is asked of an op is in the base class.

A reduction has three steps. A value is *lifted* to a partial result: it is converted to the accumulator dtype, and for
an average it is multiplied by its rows. Partial results are *merged*, in any number of levels (slices, ranks). The last
one is *finished*: it is divided and rounded to the dtype of the values. Finishing at an inner level would round twice,
which changes about a quarter of the elements of a float16 average.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import as_numbers, assign, describe_dtype, is_bfloat16

# An accumulator block of this size stays in the second-level cache while every rank's part streams through it.
BLOCK_NBYTES = 1 << 18

EqualReduction = tuple[np.ufunc, Sequence[np.ndarray], int]
"""The function that combines, the values, the divisor."""


class Op:
    """The base class of ops of your own: how the values that the ranks return for an output become the result.

    Subclass it and pass an instance as an op of ``outputs``. There are two kinds. An op that *combines* defines
    ``combine``, which gets what the function returned on each rank. An op that *concatenates* sets ``concatenates =
    True`` and defines ``finish``, which gets the rows of all ranks, joined in their order as under ``"gather"``. With
    it, a function that returns a row for each of its rows gives the same result for every number of workers.

    ``combine`` and ``finish`` are called in your program, once for each call and output. ``check`` is called on the
    workers; the op travels there with the function. An exception in any of them fails the call. One in ``combine`` or
    ``finish`` has a note that names the op and the function; ``check`` gets the words for that.

    Attributes
    ----------
    needs_rows : bool, default True
        Whether calls without rows to divide are refused, as for ``"sum"``. In such a call every rank computes the same
        value, so the result may depend on the number of ranks. ``function(..., per_rank=True)`` allows them.
    concatenates : bool, default False
        Whether the values have rows on axis 0 that are joined before ``finish``. The values may be lists, Series or
        DataFrames, or arrays that have one dtype and trailing shape on all ranks.
    has_empty : bool, default False
        Whether a call for no rows has a result. If so, the function is called once, on rank 0 with no rows, and its
        value is combined and finished like any other. If not, such a call is refused, as for ``"avg"``.

    Examples
    --------
    A median is not the median of the ranks' medians, so all rows are needed:

    >>> import numpy as np, synk
    >>> class Median(synk.Op):
    ...     concatenates = True
    ...
    ...     def check(self, dtype, what):
    ...         if dtype.kind not in "iuf":
    ...             raise TypeError(f"cannot take the median of {what}: got dtype {dtype}, expected a real number.")
    ...
    ...     def finish(self, value):
    ...         return np.median(value, axis=0)
    >>> with synk.fork(2):
    ...     length = synk.function(lambda x: np.hypot(x[:, 0], x[:, 1]), outputs=Median())
    ...     float(length(np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0]])))
    5.0
    """

    needs_rows = True
    concatenates = False
    has_empty = False

    # The other properties of an op. A user's own op does not choose them: its ``combine`` gets the values of all slices
    # of all ranks at once, with their rows, so it does not matter whether it could be applied to some of them first.
    is_weighted = True
    is_of_rank_0 = False
    keeps_slices = True

    def check(self, dtype: np.dtype, what: str) -> None:
        """Raise TypeError if the op has no meaning for arrays or numbers of a dtype. By default it accepts every dtype.

        Parameters
        ----------
        dtype : numpy.dtype
            The dtype of what the function returned on a rank. Only arrays and numbers are checked.
        what : str
            Names the output in errors, for instance ``"the output of 'f'"``.
        """

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        """Return the values combined.

        Parameters
        ----------
        values : list
            What the function returned on each rank that had rows, in rank order; with ``num_slices``, on each slice of
            each rank. Arrays and tensors belong to the op, which may change them. Ranks may return values of any kind
            and shape.
        rows : list of int
            How many rows each value stands for: 1 where there are no rows to divide.
        """
        raise TypeError(f"cannot combine with {self!r}: it has no combine(values, rows). Define one in its class.")

    def finish(self, value: Any) -> Any:
        """Return the result for the combined or joined value. By default that is the value itself.

        If the function returns tensors, a NumPy array that this returns comes back as a tensor.
        """
        return value

    @property
    def is_of_arrays(self) -> bool:
        """Whether the op accepts only arrays, tables or lists of rows, which must be alike on all ranks."""
        return self.concatenates

    def accumulate(self, values: list[Any], value: Any) -> None:
        """Add the value of one more slice of a rank to ``values``."""
        values.append(value)

    def __repr__(self) -> str:
        return type(self).__name__


class _Named(Op):
    """An op that has a name."""

    name: str
    is_weighted = False

    def __repr__(self) -> str:
        return repr(self.name)

    def __str__(self) -> str:
        return self.name


class Reduction(_Named):
    """An op that combines arrays element by element."""

    ufunc: str
    of_ints: Callable[[int, int], int]
    """Combines two ints of Python, which have any size."""
    verb = ""
    """Names the op in errors, if not by its name."""
    refused, instead = "", ""
    """Kinds of dtypes for which it has no meaning, and what to do with these."""

    @property
    def is_of_arrays(self) -> bool:
        return True

    def check(self, dtype: np.dtype, what: str) -> None:
        """Raise TypeError if the op has no meaning for ``dtype``.

        The rules are the same on every backend: no avg of integers and bools, no sum or prod of bools (it would
        silently mean "or"), no order of complex numbers, no arithmetic on text, dates and records.
        """
        if dtype.kind not in "biufc" and not is_bfloat16(dtype):
            raise TypeError(
                f"cannot reduce {what} with op {self!r}: got dtype {describe_dtype(dtype)}, expected a bool, integer, "
                "float or complex one. Gather it: op 'gather' or None for an output, synk.gather for a variable."
            )
        if dtype.kind in self.refused:
            raise TypeError(f"cannot {self.verb or self.name} {what}: got dtype {dtype}, {self.instead}")

    def combine(self, values: Sequence[np.ndarray], rows: Sequence[float]) -> np.ndarray:
        """Return a new array with the shape and dtype of the values."""
        out = np.empty_like(values[0])
        with np.errstate(all="ignore"):
            self.reduce_into(values, rows, out)
        return out

    def combine_ints(self, values: Sequence[Any], what: str) -> Any:
        """Return ints of Python combined, exactly. Beside NumPy's integers they count as NumPy's, which wrap.

        Raises
        ------
        OverflowError
            If an int does not fit the dtype of NumPy's integers beside it; ``what`` names the output.
        """
        dtypes = {value.dtype for value in values if not is_int(value)}
        if not dtypes:
            return functools.reduce(self.of_ints, values)
        (dtype,) = dtypes
        return self.combine([int_as(value, dtype, what) for value in values], [1] * len(values))[()]

    def lift(self, value: Any, rows: float = 1, *, xp: Any = np, out: Any = None) -> Any:
        """Return the partial result of a value that stands for ``rows`` rows: the value itself if nothing has to be
        done.

        Parameters
        ----------
        value : array
        rows : float
            Its weight in an average; 1 where all values weigh the same.
        xp : module
            NumPy, or the namespace of the array library that the value belongs to.
        out : array, optional
            An array of the accumulator dtype into which the result may be written.
        """
        wide = accumulator_dtype(value.dtype)
        if wide != value.dtype:
            value = as_numbers(value)
        if self.is_weighted and rows != 1:
            return xp.multiply(value, wide.type(rows), out=out, dtype=wide)
        if out is None or wide == value.dtype:
            return value.astype(wide, copy=False)
        out[...] = value
        return out

    def merge(self, first: Any, second: Any, *, xp: Any = np, out: Any = None) -> Any:
        """Return two partial results merged into one; ``out`` may be either of them."""
        return getattr(xp, self.ufunc)(first, second, out=out)

    def finish_into(self, partial: Any, rows: float, out: Any, *, xp: Any = np) -> None:
        """Write the result of a partial one to ``out``; an average is divided by ``rows``. Overwrites ``partial``."""
        if self.is_weighted:
            xp.divide(partial, partial.dtype.type(rows), out=partial)
        if partial is not out:
            assign(out, partial)

    def finished(self, partial: Any, rows: float, dtype: np.dtype) -> Any:
        """Return the result of a partial one on the host, as ``dtype``, and overwrite ``partial``. 0-d is a scalar."""
        partial = np.asarray(partial)
        out = partial if partial.dtype == dtype else np.empty(partial.shape, dtype)
        self.finish_into(partial, rows, out)
        return out if out.ndim else out[()]

    def reduce_into(self, values: Sequence[np.ndarray], rows: Sequence[float] | None, out: np.ndarray) -> None:
        """Reduce ``values`` (of the shape and dtype of ``out``, C-contiguous) into ``out``, in the order given.

        Parameters
        ----------
        values : sequence of ndarray
            One for each rank that votes. None may overlap ``out``.
        rows : sequence of float or None
            How many rows each value stands for: the weights of ``avg``. ``None``: all weigh the same.

        Overflow and NaN are the caller's business, as in a NumPy reduction: callers use ``np.errstate``.
        """
        if out.nbytes <= BLOCK_NBYTES:
            self._reduce_block(values, rows, out)
            return
        flat_out = out.reshape(-1)
        flat = [value.reshape(-1) for value in values]
        length = max(BLOCK_NBYTES // out.itemsize, 1)
        for start in range(0, flat_out.size, length):
            stop = start + length
            self._reduce_block([value[start:stop] for value in flat], rows, flat_out[start:stop])

    def _reduce_block(self, blocks: Sequence[np.ndarray], rows: Sequence[float] | None, out: np.ndarray) -> None:
        """Reduce equally long 1-d blocks into ``out``, in order."""
        if len(blocks) == 1:
            out[...] = blocks[0]
            return
        wide = accumulator_dtype(out.dtype)
        total = out if wide == out.dtype else np.empty(out.shape, wide)
        # Multiply by the rows before the one division, so that an average of equal values is that value.
        is_weighted = self.is_weighted and rows is not None and len(set(rows)) > 1
        weights: Sequence[float] = rows if is_weighted and rows is not None else [1] * len(blocks)
        term = np.empty(out.shape, wide) if is_weighted or total is not out else None
        partial = self.lift(blocks[0], weights[0], out=total)
        for block, weight in zip(blocks[1:], weights[1:]):
            partial = self.merge(partial, self.lift(block, weight, out=term), out=total)
        self.finish_into(partial, sum(weights), out)

    def equal_reduction(self, values: Sequence[np.ndarray]) -> EqualReduction | None:
        """Return how to reduce values of equal weight that need no conversion and no rounding; None for other values.

        Code that reduces the same places again and again then only combines them in order and divides.
        """
        if not values or any(value.dtype != accumulator_dtype(value.dtype) for value in values):
            return None
        return getattr(np, self.ufunc), values, len(values) if self.is_weighted else 1


def is_int(value: Any) -> bool:
    """Whether a value is an int of Python, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def int_as(value: Any, dtype: np.dtype, what: str) -> np.ndarray:
    """Return a value as an array. An int of Python gets ``dtype``, if that is an integer one, or raises OverflowError.

    ``what`` names the output.
    """
    if not is_int(value) or dtype.kind not in "iu":
        return np.asarray(value)
    if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise OverflowError(
            f"cannot combine {what}: got an int of {value.bit_length()} bits beside values of dtype {dtype}, expected "
            "one that fits. Return int(...) of all values, which has no limit."
        )
    return np.asarray(value, dtype)


@functools.cache
def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are combined: float32 for the 16-bit floats, else ``dtype``."""
    return np.dtype(np.float32) if dtype.name == "float16" or is_bfloat16(dtype) else dtype


class _Avg(Reduction):
    name, ufunc, verb = "avg", "add", "average"
    needs_rows = False
    is_weighted = True
    refused = "biu"
    instead = "expected a float or complex one. Use op 'sum' (of bools 'min' or 'max'), or cast the value to float."


class _Arithmetic(Reduction):
    refused = "b"
    instead = "expected a number. Use op 'max' (any) or 'min' (all), or cast the value to int."


class _Sum(_Arithmetic):
    name, ufunc, of_ints = "sum", "add", staticmethod(operator.add)
    has_empty = True


class _Prod(_Arithmetic):
    name, ufunc, of_ints = "prod", "multiply", staticmethod(operator.mul)


class _Ordered(Reduction):
    needs_rows = False
    refused = "c"
    instead = "and complex numbers have no order. Reduce the real part, the imaginary part or the magnitude."


class _Min(_Ordered):
    name, ufunc, verb, of_ints = "min", "minimum", "take the min of", staticmethod(min)


class _Max(_Ordered):
    name, ufunc, verb, of_ints = "max", "maximum", "take the max of", staticmethod(max)


class _Gather(_Named):
    name = "gather"
    concatenates = True
    has_empty = True


class _First(_Named):
    """The value of the lowest rank that ran."""

    name = "first"
    needs_rows = False
    is_of_rank_0 = True
    keeps_slices = False

    def accumulate(self, values: list[Any], value: Any) -> None:
        if not values:
            values.append(value)

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return values[0]


class _Each(Op):
    """The op that is written None: what each rank has returned is one object, whatever it holds."""

    needs_rows = False
    is_weighted = False

    def __repr__(self) -> str:
        return "None"


class Folded(Op):
    """The op that is given as a function of two values."""

    is_weighted = False
    keeps_slices = False

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        self.fn = fn

    def accumulate(self, values: list[Any], value: Any) -> None:
        values[:] = [self.fn(values[0], value) if values else value]

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return functools.reduce(self.fn, values)

    def __repr__(self) -> str:
        return repr(self.fn)


OWN_NAMES = frozenset({"is_weighted", "is_of_rank_0", "keeps_slices", "is_of_arrays", "accumulate"})
"""The names that a user's own op must not define."""

EACH = _Each()

REDUCTIONS: dict[str, Reduction] = {op.name: op for op in (_Avg(), _Sum(), _Prod(), _Min(), _Max())}
REDUCE_OPS = tuple(REDUCTIONS)
OPS: dict[str, Op] = {**REDUCTIONS, **{op.name: op for op in (_Gather(), _First())}}
"""The ops by name."""
