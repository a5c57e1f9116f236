"""torch's tensors and the arrays that share their memory.

This file imports torch only if it is given a tensor or has to make one, never to find out whether there is one.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name, foreign, foreign_name, storage

_SHARED_DTYPES = frozenset(
    (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip
"""The dtypes that have the same name in NumPy and torch."""


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor of torch. Does not import torch: before it is imported there are none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def has_torch_dtype(array: Any) -> bool:
    """Whether torch has tensors of an array's dtype. It has none for text, dates and records."""
    name = dtype_name(array.dtype)
    return name in _SHARED_DTYPES or name == "bfloat16" or bool(foreign_name(array.dtype))


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's dtype, for instance ``"bfloat16"``."""
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: Any) -> bool:
    """Whether the elements of a tensor lie in memory like those of an array."""
    import torch

    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_dense and not tensor.is_meta


def array_of(tensor: Any) -> np.ndarray:
    """Return the memory of a plain tensor on the host as an array. ``dtypes`` has the dtypes that NumPy lacks."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    name = dtype_of(tensor)
    if name in _SHARED_DTYPES:
        return tensor.numpy()
    plain = storage(tensor.element_size())
    return tensor.view(getattr(torch, plain.name)).numpy().view(foreign(name, plain.itemsize))


def tensor_of(array: np.ndarray) -> Any:
    """Return a tensor on the memory of an array whose dtype torch has: on a copy if the array is read-only.

    torch has neither read-only tensors nor negative strides.
    """
    import torch

    if not array.flags.writeable or (array.ndim and min(array.strides) < 0):
        array = array.copy()
    name = dtype_name(array.dtype)
    if name in _SHARED_DTYPES:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(storage(array.dtype.itemsize))).view(getattr(torch, name))


def as_dtype(tensor: Any, name: str) -> Any:
    """Return a tensor on the same memory with the dtype ``name``, whose elements have the same size."""
    import torch

    return tensor.view(getattr(torch, name))


def is_ordinary(tensor: Any) -> bool:
    """Whether a tensor is nothing but its elements: no subclass, no gradient, no attributes."""
    import torch

    is_bare = type(tensor) is torch.Tensor and not tensor.requires_grad and not vars(tensor)
    return is_bare and tensor.device.type == "cpu" and is_plain(tensor)


def copied_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor with a copy of the bytes in ``buffer``. It may be changed and kept."""
    import torch

    if not len(buffer):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return as_dtype(torch.from_numpy(np.array(buffer, np.uint8)), dtype).reshape(shape)


def recipe_of_part(obj: Any) -> Any:
    """Return how a tensor is pickled that is a part of another, such as a row; None for other objects.

    torch pickles the memory of the whole with it.
    """
    if not is_tensor(obj) or not is_ordinary(obj) or obj.untyped_storage().nbytes() <= obj.nbytes:
        return None
    elements = np.ascontiguousarray(array_of(obj)).reshape(-1).view(np.uint8)
    return copied_tensor, (elements, dtype_of(obj), tuple(obj.shape))


def check_tensor(tensor: Any, what: str) -> np.ndarray:
    """Return the memory of a tensor argument as an array; see ``array_of``.

    Raises
    ------
    TypeError
        If the tensor requires grad, because calls carry no gradients, or has no plain memory on the host (sparse,
        quantized, nested, on a device, on the meta device).
    """
    check_no_grad(tensor, what)
    problem = _problem(tensor)
    if problem:
        raise TypeError(f"cannot share {what}: got {problem}.")
    try:
        return array_of(tensor)
    except Exception as error:  # a subclass of the user's, or of one of torch's transformations
        raise TypeError(
            f"cannot share {what}: got a {type(tensor).__name__} whose memory cannot be read ({error})."
        ) from error


def check_no_grad(tensor: Any, what: str) -> None:
    """Raise TypeError if a tensor requires grad: autograd would silently treat the result as a constant."""
    if tensor.requires_grad:
        raise TypeError(
            f"cannot share {what}: got a tensor that requires grad, and calls carry no gradients back. "
            "Pass tensor.detach(), or use synk.torch.DataParallel, which does carry them."
        )


def _problem(tensor: Any) -> str:
    """Return what is wrong with a tensor and what to do; empty if its memory can be read."""
    import torch

    if tensor.is_quantized:
        return "a quantized tensor, expected plain numbers. Pass tensor.dequantize(), or tensor.int_repr()"
    if tensor.is_nested:
        return "a nested tensor, expected one with rows. Pass torch.nested.to_padded_tensor(tensor, 0.0)"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}, expected a dense one. Pass tensor.to_dense()"
    if tensor.device.type == "meta":
        return "a tensor on device meta, which has no values"
    if tensor.device.type != "cpu":
        return (
            f"a tensor on {tensor.device}, expected one on the CPU: workers bring their rows to their own devices. "
            "Pass tensor.cpu()"
        )
    return ""


def is_torch_module(obj: Any) -> bool:
    """Whether ``obj`` is a torch module: a model or a part of one."""
    torch = sys.modules.get("torch")
    return isinstance(obj, getattr(getattr(torch, "nn", None), "Module", ()))


def is_torch_optimizer(obj: Any) -> bool:
    """Whether ``obj`` is a torch optimizer."""
    torch = sys.modules.get("torch")
    return isinstance(obj, getattr(getattr(torch, "optim", None), "Optimizer", ()))


def is_torch_device(obj: Any) -> bool:
    """Whether ``obj`` is a device of torch. Equal ones are different objects."""
    torch = sys.modules.get("torch")
    return isinstance(obj, getattr(torch, "device", ()))


def num_torch_threads() -> int:
    """Return how many threads torch computes with in this process; 1 before it is imported."""
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())
