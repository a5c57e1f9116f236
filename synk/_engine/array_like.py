"""What an object needs to be used as the array it holds: NumPy's operators and functions, and a few methods.

Results are ordinary arrays and never the object itself. Only operations in place return it, after writing to its
memory.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin


class ArrayLike(NDArrayOperatorsMixin, abc.ABC):
    """The base of :class:`synk.Data`.

    The binary operators are ndarray's own. Those of the mixin call ufuncs, which cannot compare records (``==``) and do
    not leave the work to the other operand when they should (``@`` with a sparse matrix).
    """

    __slots__ = ()
    __hash__ = object.__hash__  # by identity, although == compares elements

    @property
    @abc.abstractmethod
    def data(self) -> np.ndarray:
        """The array, to keep or to write to."""

    @abc.abstractmethod
    def _operand(self) -> np.ndarray:
        """Return the array, to read at once."""

    # -- ufuncs -------------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Any, ...] = (), **kw: Any) -> Any:
        arrays = [_operand_of(value) for value in inputs]
        kw = {name: _operand_of(value) for name, value in kw.items()}  # where= may be one
        if method == "at":  # this ufunc method writes into its first operand
            arrays[0] = _target_of(inputs[0])
        if out:
            kw["out"] = tuple(_target_of(target) for target in out)
        results = getattr(ufunc, method)(*arrays, **kw)
        # NumPy's own functions reduce into out= and continue with the return value, which must be an array.
        if not out or method != "__call__":
            return results
        given = tuple(
            target if isinstance(target, ArrayLike) else result
            for target, result in zip(out, results if ufunc.nout > 1 else (results,))
        )
        return given if ufunc.nout > 1 else given[0]

    # -- methods of an array: these and no others ----------------------------------------------------------------------

    @property
    def T(self) -> np.ndarray:
        return self.data.T

    def astype(self, dtype: npt.DTypeLike, *args: Any, **options: Any) -> np.ndarray:
        return self.data.astype(dtype, *args, **options)

    def copy(self, order: Any = "C") -> np.ndarray:
        return self._operand().copy(order)

    def mean(self, *args: Any, **options: Any) -> Any:
        return self._operand().mean(*args, **options)

    def std(self, *args: Any, **options: Any) -> Any:
        return self._operand().std(*args, **options)

    def sum(self, *args: Any, **options: Any) -> Any:
        return self._operand().sum(*args, **options)

    def min(self, *args: Any, **options: Any) -> Any:
        return self._operand().min(*args, **options)

    def max(self, *args: Any, **options: Any) -> Any:
        return self._operand().max(*args, **options)

    def var(self, *args: Any, **options: Any) -> Any:
        return self._operand().var(*args, **options)

    def reshape(self, *shape: Any, **options: Any) -> np.ndarray:
        return self.data.reshape(*shape, **options)

    def tolist(self) -> Any:
        return self._operand().tolist()

    def __bool__(self) -> bool:
        return bool(self._operand())

    def __contains__(self, value: Any) -> bool:
        return value in self._operand()


def _operand_of(value: Any) -> Any:
    return value._operand() if isinstance(value, ArrayLike) else value


def _target_of(value: Any) -> Any:
    return value.data if isinstance(value, ArrayLike) else value


def _binary(operate: Callable[[Any, Any], Any]) -> Callable[[ArrayLike, Any], Any]:
    return lambda self, other: operate(self._operand(), _operand_of(other))


def _reflected(operate: Callable[[Any, Any], Any]) -> Callable[[ArrayLike, Any], Any]:
    return lambda self, other: operate(_operand_of(other), self._operand())


def _in_place(name: str) -> Callable[[ArrayLike, Any], ArrayLike]:
    own = getattr(np.ndarray, name)

    def operate(self: ArrayLike, other: Any) -> ArrayLike:
        if own(self.data, _operand_of(other)) is NotImplemented:
            # Python would fall back to the binary operator, and bind the name to an array that no worker sees.
            raise TypeError(
                f"cannot apply {name} to Data: got {type(other).__name__}, expected an array or a number. Convert it "
                "with numpy.asarray."
            )
        return self

    return operate


_ARITHMETIC = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "xor", "or",
)  # fmt: skip
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(ArrayLike, f"__{_name}__", _binary(getattr(operator, f"__{_name}__")))
for _name in (*_ARITHMETIC, "divmod"):
    _operate = divmod if _name == "divmod" else getattr(operator, f"__{_name}__")
    setattr(ArrayLike, f"__{_name}__", _binary(_operate))
    setattr(ArrayLike, f"__r{_name}__", _reflected(_operate))
for _name in _ARITHMETIC:
    setattr(ArrayLike, f"__i{_name}__", _in_place(f"__i{_name}__"))
