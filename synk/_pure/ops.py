"""The ops: how the values that the ranks return for an output become one. All that is asked of one is here. No process.

What is reduced is lifted first: a value becomes a partial result, in the accumulator dtype, and for an average times
its rows. Partial results are merged in any number of levels (slices, ranks). The last one is finished: divided and
rounded to the dtype of the values. Whoever finishes in between rounds twice, which changes about a quarter of the
elements of a float16 average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import as_numbers, assign, describe_dtype, is_bfloat16

# An accumulator block of this size stays in the second-level cache while every rank's part streams through it.
BLOCK_NBYTES = 1 << 18

EqualReduction = tuple[np.ufunc, Sequence[np.ndarray], int]
"""What combines, the values, the divisor"""


class Op:
    """How the values that the ranks return for an output become the result: the base class for ops of your own.

    Subclass it and pass an instance as an op of ``outputs``. An op that *combines* defines ``combine``, which gets what
    the function has returned on each rank. An op that *concatenates* sets ``concatenates = True`` and defines
    ``finish``, which gets the rows of all ranks joined in their order, as under ``"gather"``: so the result of a
    function that returns a row for each of its rows does not depend on the number of workers.

    ``combine`` and ``finish`` are called in your program, once for each call and output, and ``check`` on the workers,
    to which the op is sent with the function. What they raise fails the call; a note names the op and the function.

    Attributes
    ----------
    needs_rows : bool, default True
        Whether calls without rows to divide are refused, as for ``"sum"``: all ranks compute the same value there, so
        the result may depend on how many they are. ``function(..., per_rank=True)`` allows them.
    concatenates : bool, default False
        Whether the values have rows on axis 0, and are joined before ``finish``. They may be arrays of one dtype and
        trailing shape on all ranks, lists, Series or DataFrames.
    has_empty : bool, default False
        Whether a call for no rows has a result. The function is called once then, on rank 0 with no rows, and what it
        returns is combined and finished as any other value. Otherwise such a call is refused, as for ``"avg"``.

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

    # What else is asked of an op. Those of a user's own have no say in it: ``combine`` gets all slices of all ranks at
    # once, with their rows, so nobody has to know whether it may be applied to some of them first.
    is_weighted = True
    is_of_rank_0 = False
    keeps_slices = True

    def check(self, dtype: np.dtype, what: str) -> None:
        """Raise TypeError where the op has no meaning for arrays or numbers of a dtype; by default it has for all.

        Parameters
        ----------
        dtype : numpy.dtype
            Of what the function has returned on a rank. Of values that are no arrays or numbers nothing is asked.
        what : str
            Names the output in errors, as ``"the output of 'f'"``.
        """

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        """Return the values combined.

        Parameters
        ----------
        values : list
            What the function has returned on each rank that had rows, in their order; with ``num_slices`` for each
            slice of each of them. Arrays and tensors are the op's own. Ranks may return values of any kind and shape.
        rows : list of int
            How many rows each value stands for: 1 where there are no rows to divide.
        """
        raise TypeError(f"cannot combine with {self!r}: it has no combine(values, rows). Define one in its class.")

    def finish(self, value: Any) -> Any:
        """Return the result for what was combined or joined, by default that.

        What it returns as NumPy's where the function returns tensors comes back as a tensor.
        """
        return value

    @property
    def is_of_arrays(self) -> bool:
        """Whether it works on arrays, tables or lists of rows only, which must be alike on all ranks."""
        return self.concatenates

    def accumulate(self, values: list[Any], value: Any) -> None:
        """Take in the value of one more slice of a rank."""
        values.append(value)

    def __repr__(self) -> str:
        return type(self).__name__


class _Named(Op):
    """An op that has a word."""

    name: str
    is_weighted = False

    def __repr__(self) -> str:
        return repr(self.name)

    def __str__(self) -> str:
        return self.name


class Reduction(_Named):
    """An op that combines arrays element by element."""

    ufunc: str
    verb = ""
    """For errors, where it is another word than the name"""

    @property
    def is_of_arrays(self) -> bool:
        return True

    def check(self, dtype: np.dtype, what: str) -> None:
        """Raise TypeError where the op has no meaning for ``dtype``.

        The rules are the same on every backend: avg of floats and complex numbers only, no sum or prod of bools (it
        would silently mean "or"), no order of complex numbers, no arithmetic on text, dates and records.
        """
        if dtype.kind not in "biufc" and not is_bfloat16(dtype):
            raise TypeError(
                f"cannot reduce {what} with op {self!r}: got dtype {describe_dtype(dtype)}, expected a bool, integer, "
                "float or complex one. Use op 'gather' or None."
            )

    def combine(self, values: Sequence[np.ndarray], rows: Sequence[float]) -> np.ndarray:
        """Return a new array of the values' shape and dtype."""
        out = np.empty_like(values[0])
        with np.errstate(all="ignore"):
            self.reduce_into(values, rows, out)
        return out

    def lift(self, value: Any, rows: float = 1, *, xp: Any = np, out: Any = None) -> Any:
        """Return the partial result of a value that stands for ``rows`` rows; the value itself if nothing is to do.

        Parameters
        ----------
        value : array
        rows : float
            Its weight in an average; 1 where all weigh the same.
        xp : module
            NumPy, or the namespace of the array library that the value belongs to.
        out : array, optional
            Where it may be written, of the accumulator dtype.
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
        """Return the partial result of what two of them stand for; ``out`` may be one of them."""
        return getattr(xp, self.ufunc)(first, second, out=out)

    def finish_into(self, partial: Any, rows: float, out: Any, *, xp: Any = np) -> None:
        """Write the result to ``out``: of an average over ``rows`` rows the quotient. ``partial`` is overwritten."""
        if self.is_weighted:
            xp.divide(partial, partial.dtype.type(rows), out=partial)
        if partial is not out:
            assign(out, partial)

    def finished(self, partial: Any, rows: float, dtype: np.dtype) -> Any:
        """Return the result of a partial one of the host, overwritten, as ``dtype``; a scalar where it is one."""
        partial = np.asarray(partial)
        out = partial if partial.dtype == dtype else np.empty(partial.shape, dtype)
        self.finish_into(partial, rows, out)
        return out if out.ndim else out[()]

    def reduce_into(self, values: Sequence[np.ndarray], rows: Sequence[float] | None, out: np.ndarray) -> None:
        """Reduce ``values`` (of the shape and dtype of ``out``, C-contiguous) into ``out``, in the order given.

        Parameters
        ----------
        values : sequence of ndarray
            One per rank that votes; none of them may overlap ``out``.
        rows : sequence of float or None
            How many rows stand behind each value: the weights of ``avg``. ``None``: all alike.

        Overflow and NaN are the caller's numbers, as in a NumPy reduction: callers run this under ``np.errstate``.
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
        # The rows multiply before the one division, so that an average of equal values is that value.
        is_weighted = self.is_weighted and rows is not None and len(set(rows)) > 1
        weights: Sequence[float] = rows if is_weighted and rows is not None else [1] * len(blocks)
        term = np.empty(out.shape, wide) if is_weighted or total is not out else None
        partial = self.lift(blocks[0], weights[0], out=total)
        for block, weight in zip(blocks[1:], weights[1:]):
            partial = self.merge(partial, self.lift(block, weight, out=term), out=total)
        self.finish_into(partial, sum(weights), out)

    def equal_reduction(self, values: Sequence[np.ndarray]) -> EqualReduction | None:
        """Return what reduces values that weigh the same, where they are lifted as they are and nothing is rounded.

        Whoever reduces the same places again and again does no more than combine them, in order, and divide.
        """
        if not values or any(value.dtype != accumulator_dtype(value.dtype) for value in values):
            return None
        return getattr(np, self.ufunc), values, len(values) if self.is_weighted else 1


@functools.cache
def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are combined: float32 for the 16-bit floats, else ``dtype``."""
    return np.dtype(np.float32) if dtype.name == "float16" or is_bfloat16(dtype) else dtype


class _Avg(Reduction):
    name, ufunc, verb = "avg", "add", "average"
    needs_rows = False
    is_weighted = True

    def check(self, dtype: np.dtype, what: str) -> None:
        super().check(dtype, what)
        if dtype.kind in "biu":
            raise TypeError(
                f"cannot average {what}: got dtype {dtype}, expected a float or complex one. "
                "Use op 'sum', or cast the value to float in the function."
            )


class _Arithmetic(Reduction):
    def check(self, dtype: np.dtype, what: str) -> None:
        super().check(dtype, what)
        if dtype.kind == "b":
            raise TypeError(
                f"cannot {self} {what}: got dtype bool, expected a number. "
                "Use op 'max' (any) or 'min' (all), or cast the value to int in the function."
            )


class _Sum(_Arithmetic):
    name, ufunc = "sum", "add"
    has_empty = True


class _Prod(_Arithmetic):
    name, ufunc = "prod", "multiply"


class _Ordered(Reduction):
    needs_rows = False

    def check(self, dtype: np.dtype, what: str) -> None:
        super().check(dtype, what)
        if dtype.kind == "c":
            raise TypeError(
                f"cannot take the {self} of {what}: got dtype {dtype}, and complex numbers have no order. "
                "Reduce the real part, the imaginary part or the magnitude."
            )


class _Min(_Ordered):
    name, ufunc = "min", "minimum"


class _Max(_Ordered):
    name, ufunc = "max", "maximum"


class _Gather(_Named):
    name = "gather"
    concatenates = True
    has_empty = True


class _First(_Named):
    """The value of rank 0."""

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
    """What is given as None: the values are not combined."""

    needs_rows = False
    is_weighted = False

    def __repr__(self) -> str:
        return "None"


class Folded(Op):
    """What is given as a function of two values."""

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
"""What an op of a user's own must not define"""

EACH = _Each()

REDUCTIONS: dict[str, Reduction] = {op.name: op for op in (_Avg(), _Sum(), _Prod(), _Min(), _Max())}
REDUCE_OPS = tuple(REDUCTIONS)
OPS: dict[str, Op] = {**REDUCTIONS, **{op.name: op for op in (_Gather(), _First())}}
"""By their words."""
