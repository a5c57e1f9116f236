"""The facets of arrays and tensors: their bytes, compared with the bytes that the ranks were sent.

A large array also lies in shared memory as it was sent, and is compared there.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._code.facets import UNKNOWN, Change, Facet
from synk._pure.tensors import array_of, is_tensor
from synk._wire.parcels import Mapped

LARGE_NBYTES = 1 << 16
"""A larger array is sent through shared memory."""


class ArrayContents(Facet):
    """The bytes of an array.

    Attributes
    ----------
    told : bytes, or ndarray of uint8
        What the ranks were sent. For a large array, a view of the shared memory from which they read it.
    place : Mapped or None
        Where that memory is, in terms that the ranks understand.
    memory : (mmap, int)
        Where that memory is in this process: the mapping, and the offset in it.
    form : tuple
        The dtype, the shape and the order of elements that were sent.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj
        self.form = self._form()
        self.told: Any = None
        self.place: Mapped | None = None
        self.memory: tuple[Any, int] = (None, 0)
        self.version = self._version()
        self._is_fixed = False

    # -- what an array is -----------------------------------------------------------------------------------------

    def _form(self) -> Any:
        return self.obj.dtype, self.obj.shape, self.order

    def _version(self) -> Any:
        return None

    @property
    def nbytes(self) -> int:
        return int(self.obj.nbytes)

    @property
    def is_large(self) -> bool:
        return self.nbytes > LARGE_NBYTES

    @property
    def is_row(self) -> bool:
        """Whether ``tobytes`` is all that a comparison needs: a small NumPy array in C order."""
        return type(self) is ArrayContents and not self.is_large and self.order == "C"

    def elements(self) -> np.ndarray:
        """Return the elements as a flat array, in the order in which they are sent: a view where possible."""
        return self.obj.reshape(-1) if self.obj.flags.c_contiguous else self.obj.ravel(self.order)

    @property
    def order(self) -> str:
        flags = self.obj.flags
        return "F" if flags.f_contiguous and not flags.c_contiguous else "C"

    def raw(self) -> bytes:
        return bytes(self.obj.tobytes(self.order))

    def value(self) -> Any:
        """Return a copy to send."""
        return self.obj.copy(self.order)

    def raw_of(self, copy: Any) -> bytes:
        """Return what ``raw`` was when ``value`` made a copy. Another thread may have written since."""
        return bytes(copy.tobytes(self.order))

    # -- comparing ------------------------------------------------------------------------------------------------

    def note_sent(self, told: Any) -> None:
        """Note that the ranks have ``told``, whose bytes are those of the array now."""
        # For a large array these are the bytes of shared memory, which only the program writes to.
        self.told = told
        self.form, self.version = self._form(), self._version()
        self._is_fixed = self.is_large and _is_fixed(self.obj)

    def is_current(self) -> bool:
        if self.told is None or self.form != self._form() or self.version != self._version():
            return False
        if self._is_fixed:
            return True
        if not self.is_large:
            return bool(self.raw() == self.told)
        part = self.elements().view(np.uint8).data  # methods of ``bytes`` and ``mmap`` compare without a copy
        if isinstance(self.told, bytes):
            return self.told.startswith(part)
        mapping, offset = self.memory
        return mapping.find(part, offset, offset + len(part)) == offset

    def is_unfit(self, known: Any = frozenset()) -> bool:
        return self.told is not None and self.form != self._form()

    def changes(self) -> list[Change]:
        return [] if self.is_current() else [self.change()]

    def change(self) -> Change:
        """Return the change that brings the ranks the contents of now."""
        if self.is_unfit():
            return Change("replace", None, None)
        if self.is_large and isinstance(self.told, np.ndarray):
            return Change("reload", None, self.told)
        return Change("contents", None, self.value())

    def tell(self, change: Change) -> None:
        if change.kind == "reload":  # the book has copied the bytes into the shared memory already
            self.note_sent(self.told)
        elif change.kind == "contents":
            self.note_sent(self.raw_of(change.value))

    def forget(self, change: Change) -> None:
        self.version = UNKNOWN


class RawContents(ArrayContents):
    """The bytes of a bytearray."""

    def __init__(self, obj: bytearray) -> None:
        super().__init__(obj)
        self.note_sent(bytes(obj))

    def _form(self) -> Any:
        return len(self.obj)

    @property
    def nbytes(self) -> int:
        return len(self.obj)

    def elements(self) -> np.ndarray:
        return np.frombuffer(self.obj, np.uint8)

    def raw(self) -> bytes:
        return bytes(self.obj)

    def is_unfit(self, known: Any = frozenset()) -> bool:
        return False

    def change(self) -> Change:
        return Change("elements", None, bytes(self.obj))

    def tell(self, change: Change) -> None:
        self.note_sent(change.value)  # what was sent, as in Elements.tell


class TensorContents(ArrayContents):
    """The bytes of a torch tensor, or only its version and address if the bytes cannot be read here.

    They are those of its memory from the first element to the last, with what lies between the elements of a view. So
    the elements are never copied to be compared, whatever their strides are.
    """

    @property
    def has_address(self) -> bool:
        """Whether it has memory of its own. Sparse tensors have none."""
        return str(self.obj.layout) == "torch.strided"

    @property
    def is_readable(self) -> bool:
        """Whether its memory can be read on the host."""
        obj = self.obj
        return bool(obj.device.type == "cpu" and self.has_address and not obj.is_quantized)

    @property
    def is_in_order(self) -> bool:
        """Whether its memory holds its elements, one after the other, and nothing else."""
        obj = self.obj
        return self.is_readable and bool(obj.is_contiguous() and not (obj.is_conj() or obj.is_neg()))

    def _form(self) -> Any:
        return self.obj.dtype, tuple(self.obj.shape)

    def _version(self) -> Any:
        place = (self.obj.data_ptr(), self.obj.stride()) if self.has_address else None
        return self.obj._version, self.obj.requires_grad, place

    @property
    def nbytes(self) -> int:
        return self._span() * int(self.obj.element_size()) if self.is_readable else 0

    def _span(self) -> int:
        """Return how many elements there are from the first one to the last one in memory."""
        obj = self.obj
        if not obj.numel() or obj.is_contiguous():
            return int(obj.numel())
        return 1 + sum((length - 1) * stride for length, stride in zip(obj.shape, obj.stride()))

    def elements(self) -> np.ndarray:
        import torch

        if not self.is_readable:
            return np.empty(0, np.uint8)
        memory = self.obj.detach()  # a conjugate or negative view is computed only when it is read
        memory = memory.conj() if memory.is_conj() else memory
        memory = torch._neg_view(memory) if memory.is_neg() else memory
        return array_of(memory.as_strided((self._span(),), (1,)))

    def raw(self) -> bytes:
        return self.elements().tobytes()

    def value(self) -> Any:
        return self.obj.detach().clone().requires_grad_(self.obj.requires_grad)

    def raw_of(self, copy: Any) -> bytes:
        return TensorContents(copy).raw() if self.is_in_order else self.raw()  # the copy has no gaps in its memory

    def change(self) -> Change:
        if self.form != self._form() or not self.is_in_order:  # a worker gives the same tensor other memory
            return Change("contents", None, self.value())
        return super().change()

    def is_unfit(self, known: Any = frozenset()) -> bool:
        return False


def contents_of(obj: Any) -> ArrayContents | None:
    """Return the facet of an array or a tensor; None for other objects, and for arrays that are compared otherwise."""
    if is_tensor(obj):
        return TensorContents(obj)
    if isinstance(obj, np.ndarray) and not obj.dtype.hasobject and is_plain(type(obj)):
        return ArrayContents(obj)
    return None


def versions_check(tensors: Sequence[Any]) -> Callable[[], bool]:
    """Return a check that the versions, addresses and ``requires_grad`` of tensors stay what they are now.

    Most changes alter one of them, some only bytes.
    """
    torch: Any = sys.modules["torch"]
    version, address, needs_grad = (
        operator.attrgetter("_version"),
        torch.Tensor.data_ptr,
        operator.attrgetter("requires_grad"),
    )
    versions, addresses, needs = (list(map(get, tensors)) for get in (version, address, needs_grad))
    return lambda: (
        list(map(version, tensors)) == versions
        and list(map(address, tensors)) == addresses
        and list(map(needs_grad, tensors)) == needs
    )


def tensor_bytes_check(facets: Sequence[TensorContents]) -> Callable[[], bool]:
    """Return a check that small tensors still have the bytes that were sent.

    The check goes on reading the memory that they have now. ``versions_check`` finds tensors that get other memory.
    """
    views = [memoryview(facet.elements().view(np.uint8)) for facet in facets]  # type: ignore[arg-type]
    told = b"".join(facet.told for facet in facets)
    return lambda: b"".join(views) == told


def _is_fixed(obj: Any) -> bool:
    """Whether an array lies in memory of ``bytes``, which nobody can change."""
    while isinstance(obj, np.ndarray):
        obj = obj.base
    return type(obj) is bytes


def is_plain(cls: type) -> bool:
    """Whether a class of arrays is pickled by NumPy's own rules."""
    rules: Any = np.ndarray
    return cls.__reduce__ is rules.__reduce__ and cls.__reduce_ex__ is rules.__reduce_ex__


def copy_bytes(elements: np.ndarray, target: np.ndarray) -> None:
    """Copy the bytes of contiguous elements."""
    target[:] = elements.reshape(-1).view(np.uint8) if elements.nbytes else elements.view(np.uint8)
