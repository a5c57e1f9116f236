"""A stand-in for CuPy on a machine without a GPU, for tests of the whole worker path.

Arrays wrap NumPy arrays and refuse what CuPy refuses: implicit conversion to NumPy, mixing with NumPy arrays, ``flags``
that can be set. Copies to the host happen when the stream is synchronised, not before, and a copy that is partly in
registered memory fails, as with CUDA. What it does not show: anything about speed, and the order of work on a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from . import cuda

__version__ = "14.0.fake"
LIMIT_NBYTES = 1 << 30
float16, float32, float64, int64, bool_, uint8 = np.float16, np.float32, np.float64, np.int64, np.bool_, np.uint8

_METHODS = frozenset(
    """
    all any argmax argmin astype clip conj copy cumsum diagonal dot max mean min nonzero prod ravel repeat reshape round
    squeeze std sum swapaxes trace transpose var view
    """.split()  # noqa: SIM905
)


class _Flags:
    """Contiguity, and nothing to set."""

    __slots__ = ("c_contiguous", "f_contiguous")

    def __init__(self, flags: Any) -> None:
        object.__setattr__(self, "c_contiguous", flags.c_contiguous)
        object.__setattr__(self, "f_contiguous", flags.f_contiguous)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"property {name!r} of CuPy's flags cannot be set")


class ndarray(NDArrayOperatorsMixin):
    """An array "on the device"."""

    __slots__ = ("__weakref__", "_a")

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
        nbytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        if nbytes > LIMIT_NBYTES:
            if cuda.runtime.os.environ.get("SYNK_FAKE_OOM") == "stick":
                cuda.fail_launch()
            raise cuda.memory.OutOfMemoryError(nbytes, 0)
        if memptr is not None:
            self._a = np.ndarray(shape, dtype, np.asarray(_Bytes(memptr, nbytes)))
            if strides is not None:
                self._a = np.lib.stride_tricks.as_strided(self._a, shape, strides)
            return
        self._a = np.empty(shape, dtype)
        self._a.view(np.uint8 if self._a.ndim else self._a.dtype)[...] = 1 if self._a.size else 0

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _wrap(getattr(ufunc, method)(*_unwrap(inputs), **_unwrap(kwargs)))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _wrap(func(*_unwrap(args), **_unwrap(kwargs)))

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return lambda *args, **kwargs: _wrap(getattr(self._a, name)(*_unwrap(args), **_unwrap(kwargs)))
        if name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides"):
            return getattr(self._a, name)
        if name in ("T", "real", "imag"):
            return _wrap(getattr(self._a, name))
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        key = _unwrap(key)
        return _wrap(self._a[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        key, value = _unwrap(key), _unwrap(value)
        cuda.runtime.launch(lambda: self._a.__setitem__(key, value))

    def take(self, indices: Any, axis: Any = None, out: Any = None) -> Any:
        if out is None:
            return _wrap(np.take(self._a, _unwrap(indices), axis))
        cuda.runtime.launch(lambda: np.take(self._a, _unwrap(indices), axis, out=out._a))
        return out

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Any:
        return (self[k] for k in range(len(self)))

    def __float__(self) -> float:
        return float(self._a)

    def __int__(self) -> int:
        return int(self._a)

    def __bool__(self) -> bool:
        return bool(self._a)

    def __repr__(self) -> str:
        return f"fake {self._a!r}"

    def __reduce__(self) -> Any:
        return array, (self._a,)

    def item(self, *args: int) -> Any:
        return self._a.item(*args)

    def tolist(self) -> Any:
        return self._a.tolist()

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        cuda.runtime.check()
        return self._a.copy(order)

    @property
    def flags(self) -> _Flags:
        return _Flags(self._a.flags)

    @property
    def data(self) -> Any:
        return cuda.MemoryPointer(self._a.__array_interface__["data"][0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._a.__array_interface__, "version": 3, "stream": None}

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")  # what takes it here has no CUDA

    def __dlpack_device__(self) -> Any:
        return 2, 0


class _Bytes:
    """Bytes of a block, which arrays over them keep alive."""

    def __init__(self, memptr: Any, nbytes: int) -> None:
        self.owner = memptr
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memptr.ptr, False),
            "version": 3,
        }


def _wrap(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_wrap, value))
    if isinstance(value, list):
        return list(map(_wrap, value))
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    cuda.runtime.check()
    result = ndarray.__new__(ndarray)
    result._a = np.asarray(value)
    return result


def _unwrap(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value._a
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, (tuple, list)):
        return type(value)(map(_unwrap, value))
    if isinstance(value, dict):
        return {key: _unwrap(item) for key, item in value.items()}
    return value


def array(obj: Any, dtype: Any = None, copy: bool = True, order: str = "K") -> ndarray:
    value = obj._a if isinstance(obj, ndarray) else np.asarray(obj)
    has_device_dtype = value.dtype.kind in "biufc" and value.dtype.char not in "gG"  # no long double
    if not has_device_dtype and value.dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {value.dtype}")
    return _wrap(np.array(value, dtype=dtype, order=order))


def asarray(a: Any, dtype: Any = None, order: str | None = None) -> ndarray:
    if isinstance(a, ndarray) and dtype in (None, a.dtype) and order is None:
        return a
    if isinstance(a, ndarray):
        return _wrap(np.asarray(a._a, dtype=dtype, order=order))
    return array(a, dtype, order=order or "K")


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    value = asarray(a, dtype) if isinstance(a, ndarray) and a.flags.c_contiguous else asarray(a, dtype, order="C")
    return value if value.ndim else value.reshape(1)  # like NumPy, CuPy gives an array without axes one


def asnumpy(a: Any, **kwargs: Any) -> np.ndarray:
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def empty(shape: Any, dtype: Any = float, **kwargs: Any) -> ndarray:
    return ndarray(shape, dtype)


def from_dlpack(value: Any) -> ndarray:
    raise RuntimeError("CuPy is built against CUDA, different from the backend that backs the incoming DLPack tensor")


def get_default_memory_pool() -> Any:
    return cuda.Pool()


def __getattr__(name: str) -> Any:
    function = getattr(np, name)
    if isinstance(function, type) or not callable(function):
        return function
    return lambda *args, **kwargs: _wrap(function(*_unwrap(args), **_unwrap(kwargs)))
