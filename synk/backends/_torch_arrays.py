"""Tensors with NumPy's names for attributes and functions, as far as synk needs them.

Functions never see these arrays: they get the tensors themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from synk._pure.dtypes import dtype_name, foreign
from synk._pure.tensors import dtype_of, tensor_of

# torch lacks most operations for these unsigned dtypes. They are computed with signed integers of the same size.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return NumPy's dtype with the name of torch's, or a dtype that stands for it."""
    tensor = torch.empty(0, dtype=dtype)
    name = dtype_of(tensor)
    try:
        return np.dtype(name)
    except TypeError:
        return foreign(name, tensor.element_size())


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for one of NumPy's.

    Raises
    ------
    TypeError
        If torch has no such dtype.
    """
    found = getattr(torch, dtype_name(np.dtype(dtype)), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(
            f"cannot make a tensor of dtype {dtype}: expected bools, integers, floats or complex numbers. Pass it "
            "inside a broadcast tuple, or encode it as integers."
        )
    return found


class NumpysTensor(torch.Tensor):
    """A tensor for functions that name no library: its ``std``, ``var`` and ``repeat`` mean what they do in NumPy.

    torch's own names (``dim``, ``unbiased``, ``correction``, ``keepdim``), and more than two sizes of ``repeat``, mean
    what they do in torch.
    """

    def std(self, axis: Any = None, *args: Any, **options: Any) -> Any:  # type: ignore[override]  # as in NumPy
        return _spread(torch.Tensor.std, self, axis, *args, **options)

    def var(self, axis: Any = None, *args: Any, **options: Any) -> Any:  # type: ignore[override]  # as in NumPy
        return _spread(torch.Tensor.var, self, axis, *args, **options)

    def repeat(self, repeats: Any, axis: Any = None, *sizes: Any) -> Any:  # type: ignore[override]  # as in NumPy
        if sizes:
            return super().repeat(repeats, axis, *sizes)
        counts = repeats if isinstance(repeats, int) else torch.as_tensor(repeats, device=self.device)
        return self.repeat_interleave(counts, dim=axis)


def _spread(
    compute: Callable[..., Any],
    tensor: torch.Tensor,
    axis: Any,
    dtype: Any = None,
    out: Any = None,
    ddof: float = 0,
    keepdims: bool = False,
    **torchs: Any,
) -> Any:
    if torchs or isinstance(axis, bool):
        return compute(tensor, *(() if axis is None else (axis,)), **torchs)
    if dtype is not None or not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.float64 if dtype is None else torch_dtype(dtype))
    result = compute(tensor, dim=axis, correction=ddof, keepdim=keepdims)
    return result if out is None else out.copy_(result)


class TorchArray:
    """A tensor as an array."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> np.dtype:
        return numpy_dtype(self.tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def size(self) -> int:
        return self.tensor.numel()

    @property
    def itemsize(self) -> int:
        return self.tensor.element_size()

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def flags(self) -> Any:
        return SimpleNamespace(c_contiguous=self.tensor.is_contiguous())

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, key: Any) -> TorchArray:
        return TorchArray(self.tensor[key])

    def __setitem__(self, key: Any, value: TorchArray) -> None:
        self.tensor[key] = value.tensor

    def reshape(self, *shape: Any) -> TorchArray:
        return TorchArray(self.tensor.reshape(*shape))

    def astype(self, dtype: Any, copy: bool = True) -> TorchArray:
        return TorchArray(self.tensor.to(torch_dtype(dtype), copy=copy))


class Namespace:
    """NumPy's functions for the arrays on one device."""

    ndarray = TorchArray

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: Any, dtype: Any = float) -> TorchArray:
        return TorchArray(torch.empty(shape, dtype=torch_dtype(dtype), device=self._device))

    def array(self, value: Any, dtype: Any = None, order: str = "K") -> TorchArray:
        return TorchArray(self.asarray(value, dtype).tensor.clone(memory_format=_FORMATS[order]))

    def asarray(self, value: Any, dtype: Any = None, order: str = "K") -> TorchArray:
        tensor = value.tensor if isinstance(value, TorchArray) else tensor_of(np.array(value))
        tensor = tensor.to(self._device, None if dtype is None else torch_dtype(dtype))
        return TorchArray(tensor.contiguous() if order == "C" else tensor)

    def concatenate(self, arrays: Sequence[TorchArray]) -> TorchArray:
        return TorchArray(torch.cat([array.tensor for array in arrays]))

    def add(self, first: TorchArray, second: Any, out: Any = None, dtype: Any = None) -> TorchArray:
        return _computed(torch.add, first, second, out, dtype)

    def multiply(self, first: TorchArray, second: Any, out: Any = None, dtype: Any = None) -> TorchArray:
        return _computed(torch.mul, first, second, out, dtype)

    def divide(self, first: TorchArray, second: Any, out: Any = None, dtype: Any = None) -> TorchArray:
        return _computed(torch.div, first, second, out, dtype)

    def minimum(self, first: TorchArray, second: TorchArray, out: Any = None) -> TorchArray:
        return _computed(torch.minimum, first, second, out, None, orders=True)

    def maximum(self, first: TorchArray, second: TorchArray, out: Any = None) -> TorchArray:
        return _computed(torch.maximum, first, second, out, None, orders=True)


_FORMATS = {"K": torch.preserve_format, "C": torch.contiguous_format}


def _computed(
    function: Callable[..., torch.Tensor], first: TorchArray, second: Any, out: Any, dtype: Any, *, orders: bool = False
) -> TorchArray:
    """Return the result of ``function`` for an array and an array or a number, in ``out`` if that is given.

    ``orders`` says whether the function compares the elements.
    """
    left = first.tensor if dtype is None else first.tensor.to(torch_dtype(dtype))
    right = second.tensor if isinstance(second, TorchArray) else second.item()
    result = function(left, right) if left.dtype not in _SIGNED else _in_signed(function, left, right, orders)
    if out is None:
        return TorchArray(result)
    out.tensor.copy_(result)
    return TorchArray(out.tensor)


def _in_signed(
    function: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor, orders: bool
) -> torch.Tensor:
    """Return the result of ``function`` for unsigned integers, computed with signed ones.

    These have the same bits, or, for functions that compare, the same order.
    """
    signed = _SIGNED[left.dtype]
    flip = torch.iinfo(signed).min if orders else 0
    return (function(left.view(signed) ^ flip, right.view(signed) ^ flip) ^ flip).view(left.dtype)
