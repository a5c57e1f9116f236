"""Pickles without tensors, which travel beside them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from synk._wire.parcels import TravelPickler
from synk.errors import SerializationError


class Apart:
    """Mixed into a pickler: ``place`` returns what stands for a tensor; None pickles it.

    Examples
    --------
    >>> class Pickler(Apart, pickle.Pickler):
    ...     pass
    >>> tensors, file = [], io.BytesIO()
    >>> pickler = Pickler(file)
    >>> pickler.place = lambda tensor: (tensors.append(tensor), len(tensors) - 1)[1]
    >>> pickler.dump({"x": [torch.ones(2), "text"], "n": 3})
    >>> len(tensors), load_joined(file.getvalue(), [torch.zeros(1)].__getitem__)
    (1, {'x': [tensor([0.]), 'text'], 'n': 3})
    """

    place: Callable[[torch.Tensor], Any]

    def persistent_id(self, obj: Any) -> Any:
        return self.place(obj) if isinstance(obj, torch.Tensor) else None


class _Joining(pickle.Unpickler):
    def __init__(self, data: bytes, tensor_of: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor_of = tensor_of

    def persistent_load(self, place: Any) -> torch.Tensor:
        return self._tensor_of(place)


def load_joined(data: bytes, tensor_of: Callable[[Any], torch.Tensor]) -> Any:
    """Return what a pickle holds, with the tensors that ``tensor_of`` returns for their places."""
    return _Joining(data, tensor_of).load()


class TensorlessPickler(Apart, TravelPickler):
    """Pickles what goes to the workers, without tensors."""


def dump_apart(
    what: str, value: Any, place: Callable[[torch.Tensor], Any], kind: Callable[..., Any] = TensorlessPickler
) -> tuple[bytes, list[type]]:
    """Return a value pickled without its tensors, and the classes that the pickle names.

    Raises
    ------
    SerializationError
        If it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = kind(file, protocol=5)
    pickler.place = place
    try:
        pickler.dump(value)
    except Exception as error:
        raise SerializationError(
            f"cannot send {what}: {type(error).__name__}: {str(error).rstrip('.')}. Make it of what can be pickled."
        ) from error
    return file.getvalue(), pickler.named
