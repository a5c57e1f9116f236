"""The facets of arrays and tensors: their bytes, compared with those that the ranks were sent.

Small ones are compared whole. A large one lies in shared memory as it was sent: at each call some samples are compared
with that, which finds dense changes at once, and a window that moves on from call to call, which finds all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._master.code.facets import UNKNOWN, Change, Facet
from synk._pure.tensors import is_tensor
from synk._wire.parcels import Mapped

LARGE_NBYTES = 1 << 16
"""A larger array lies in shared memory, and is compared in turn."""

WINDOW_NBYTES = 1 << 16
"""How much of a function's large arrays is compared at each call."""

_NUM_SAMPLES = 64


class Contents(Facet):
    """The bytes of an array.

    Attributes
    ----------
    told : bytes, or ndarray of uint8
        What the ranks were sent; for a large array a view of the shared memory from which they read it.
    place : Mapped or None
        Where that memory is, for the ranks.
    memory : (mmap, int)
        Where it is here: the mapping, and the offset in it.
    form : tuple
        Its dtype and shape then.
    num_unseen : int
        How often another function has found a change that no call had seen.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj
        self.form = self._form()
        self.told: Any = None
        self.place: Mapped | None = None
        self.memory: tuple[Any, int] = (None, 0)
        self._samples = b""
        self._step = 1
        self.num_unseen = 0
        self.at = 0
        self.version = self._version()

    # -- what an array is -----------------------------------------------------------------------------------------

    def _form(self) -> Any:
        return self.obj.dtype, self.obj.shape

    def _version(self) -> Any:
        return None

    @property
    def nbytes(self) -> int:
        return int(self.obj.nbytes)

    @property
    def is_large(self) -> bool:
        return self.nbytes > LARGE_NBYTES

    def elements(self) -> np.ndarray:
        """Return the elements in the order in which they are sent, one after the other; a view where that can be."""
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

    # -- comparing ------------------------------------------------------------------------------------------------

    def note_sent(self, told: Any) -> None:
        """Take it that the ranks have ``told``, which equals the array now."""
        self.told = told
        self.form, self.version = self._form(), self._version()
        self._samples = b""
        if self.is_large and self.is_view:
            elements = self.elements()
            self._step = max(len(elements) // _NUM_SAMPLES, 1)
            self._samples = elements[:: self._step].tobytes()

    @property
    def is_view(self) -> bool:
        """Whether the elements can be had without a copy of all of them."""
        return bool(self.obj.flags.c_contiguous or self.obj.flags.f_contiguous)

    def glance(self) -> bool:
        """Whether nothing is seen to differ: all of a small array, and samples of a large one."""
        if self.told is None or self.form != self._form() or self.version != self._version():
            return False
        if not self.is_large:
            return self.raw() == self.told
        return not self._samples or self.elements()[:: self._step].tobytes() == self._samples

    def window(self, nbytes: int) -> tuple[bool, int]:
        """Compare the next part of a large array; return whether it is equal, and how many bytes it has.

        No view is kept from one call to the next: an array can be given other memory meanwhile.
        """
        raw = self.elements().view(np.uint8)
        first, last = self.at, min(self.at + nbytes, len(raw))
        self.at = 0 if last == len(raw) else last
        return self._is_same(raw, first, last), last - first

    def _is_same(self, raw: np.ndarray, first: int, last: int) -> bool:
        """Whether bytes are those that were sent. The methods of ``bytes`` and ``mmap`` compare without a copy."""
        part = raw[first:last].data
        if isinstance(self.told, bytes):
            return (
                self.told.startswith(part)
                if last - first == len(self.told)
                else self.told[first:last] == part.tobytes()
            )
        mapping, offset = self.memory
        return mapping.find(part, offset + first, offset + last) == offset + first

    def is_current(self) -> bool:
        if not self.glance():
            return False
        return not self.is_large or self._is_same(self.elements().view(np.uint8), 0, self.nbytes)

    def changes(self) -> list[Change]:
        return [] if self.glance() else [self.change()]

    def change(self) -> Change:
        """Return how the ranks are told of the contents."""
        if self.told is not None and self.told is not UNKNOWN and self.form != self._form():
            return Change("replace", None, None)
        if self.is_large and isinstance(self.told, np.ndarray):
            return Change("reload", None, self.told)
        return Change("contents", None, self.value())

    def tell(self, change: Change) -> None:
        if change.kind == "reload":  # the shared memory holds it already
            self.note_sent(self.told)
        elif change.kind == "contents":
            self.note_sent(self.raw())

    def forget(self, change: Change) -> None:
        self.version = UNKNOWN

    def doubt(self) -> None:
        self.version = UNKNOWN


class RawContents(Contents):
    """The bytes of a bytearray."""

    def __init__(self, obj: bytearray) -> None:
        super().__init__(obj)
        self.note_sent(bytes(obj))

    def _form(self) -> Any:
        return len(self.obj)

    @property
    def nbytes(self) -> int:
        return len(self.obj)

    @property
    def is_view(self) -> bool:
        return True

    def elements(self) -> np.ndarray:
        return np.frombuffer(self.obj, np.uint8)

    def raw(self) -> bytes:
        return bytes(self.obj)

    def change(self) -> Change:
        return Change("elements", None, bytes(self.obj))

    def tell(self, change: Change) -> None:
        self.note_sent(bytes(self.obj))


class TensorContents(Contents):
    """The bytes of a tensor of torch's on the host; of others their version and address alone."""

    @property
    def has_address(self) -> bool:
        """Whether it has memory of its own: sparse ones have not."""
        return str(self.obj.layout) == "torch.strided"

    @property
    def is_readable(self) -> bool:
        """Whether its bytes can be looked at here."""
        obj = self.obj
        return bool(
            obj.device.type == "cpu" and str(obj.layout) == "torch.strided" and obj.is_contiguous()
            and not (obj.is_quantized or obj.is_conj() or obj.is_neg())
        )  # fmt: skip

    def _form(self) -> Any:
        return self.obj.dtype, tuple(self.obj.shape)

    def _version(self) -> Any:
        return versions_of([self.obj]) if self.has_address else (self.obj._version, self.obj.requires_grad)

    @property
    def nbytes(self) -> int:
        return int(self.obj.numel() * self.obj.element_size()) if self.is_readable else 0

    def elements(self) -> np.ndarray:
        import torch

        if not self.is_readable or not self.obj.numel():
            return np.empty(0, np.uint8)
        flat: np.ndarray = self.obj.detach().reshape(-1).view(torch.uint8).numpy()
        return flat

    def raw(self) -> bytes:
        return self.elements().tobytes()

    def value(self) -> Any:
        return self.obj.detach().clone().requires_grad_(self.obj.requires_grad)

    def change(self) -> Change:
        if self.form != self._form():  # a worker gives the same tensor other memory
            return Change("contents", None, self.value())
        return super().change()

    @property
    def is_view(self) -> bool:
        return True


def contents_of(obj: Any) -> Contents | None:
    """Return the facet of an array's or a tensor's bytes; None for other objects and for arrays of objects."""
    if is_tensor(obj):
        return TensorContents(obj)
    if isinstance(obj, np.ndarray) and not obj.dtype.hasobject and is_plain(type(obj)):
        return Contents(obj)
    return None


def versions_of(tensors: Sequence[Any]) -> tuple[list[int], list[int], list[bool]]:
    """Return what differs after most changes of tensors; their bytes differ after all."""
    return (
        [tensor._version for tensor in tensors],
        [tensor.data_ptr() for tensor in tensors],
        [tensor.requires_grad for tensor in tensors],
    )


def is_plain(cls: type) -> bool:
    """Whether arrays of a class are pickled by NumPy's own rules."""
    rules: Any = np.ndarray
    return cls.__reduce__ is rules.__reduce__ and cls.__reduce_ex__ is rules.__reduce_ex__


def copy_bytes(elements: np.ndarray, target: np.ndarray) -> None:
    """Copy the bytes of elements that follow one another."""
    target[:] = elements.reshape(-1).view(np.uint8) if elements.nbytes else elements.view(np.uint8)
