"""The state of replicated objects as values that ``torch.load(weights_only=True)`` loads without running code.

Tensors, numbers, texts and collections of them are unchanged. Everything else becomes a dict with the key ``"synk"``,
which says what it was. Loading fills the objects that the loading program has. So no class or function is imported or
called by a name that stands in a file.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from synk.torch._state_bytes import references_to, referents
from synk.torch._take_over import CODE, has_only_attributes

_KEY = "synk"
_NATIVE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_GENERATORS = {kind.__name__: kind for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937,
                                                np.random.Philox, np.random.SFC64)}  # fmt: skip
_MISSING = object()


class Plain:
    """Makes states plain.

    Attributes
    ----------
    left_out : list of str
        The places of the values that cannot be plain.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._keys = references_to(objects)
        self._open: set[int] = set()  # containers that are being copied, by address: one inside itself is left out
        self.left_out: list[str] = []

    def plain(self, value: Any, where: str) -> Any:
        """Return a copy of a value that holds only the kinds of objects that a file may hold."""
        if id(value) in self._keys:
            return {_KEY: "part", "key": self._keys[id(value)]}
        if type(value) in _NATIVE:
            return value
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            copied = value.detach().cpu().clone()
            return copied.requires_grad_() if value.requires_grad and value.is_leaf else copied
        if isinstance(value, CODE):
            return {_KEY: "kept"}  # code has no state
        if id(value) in self._open:
            return self._left_out(where)
        self._open.add(id(value))
        try:
            return self._made_plain(value, where)
        finally:
            self._open.discard(id(value))

    def _made_plain(self, value: Any, where: str) -> Any:
        kind: Any = type(value)
        if kind in (list, tuple):
            return kind(self.plain(item, f"{where}[{number}]") for number, item in enumerate(value))
        if kind in (dict, collections.OrderedDict) and all(_is_key(key) for key in value):
            items = {key: self.plain(item, f"{where}[{key!r}]") for key, item in value.items()}
            return {_KEY: "dict", "items": items} if _KEY in items else items
        if kind is set and all(type(item) in _NATIVE for item in value):
            return set(value)
        if kind is collections.deque:
            return {_KEY: "deque", "items": self.plain(list(value), where), "maxlen": value.maxlen}
        if isinstance(value, np.generic) or (kind is np.ndarray and not value.dtype.hasobject):
            return _plain_array(value)
        if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in _GENERATORS:
            return {_KEY: "numpy generator", "state": self.plain(value.bit_generator.state, where)}
        if kind is torch.Generator and value.device.type == "cpu":
            return {_KEY: "torch generator", "state": value.get_state()}
        if kind is random.Random:
            return {_KEY: "python generator", "state": value.getstate()}
        if has_only_attributes(value):
            return {_KEY: "object", "class": kind.__qualname__, "attributes": self.plain(vars(value), where)}
        return self._left_out(where)

    def _left_out(self, where: str) -> dict[str, Any]:
        self.left_out.append(where)
        return {_KEY: "kept"}


def _is_kept(plain: Any) -> bool:
    return isinstance(plain, dict) and plain.get(_KEY) == "kept"


def _is_key(key: Any) -> bool:
    return type(key) in _NATIVE or (type(key) is tuple and all(map(_is_key, key)))


def _plain_array(value: Any) -> dict[str, Any]:
    array = np.ascontiguousarray(value)
    values = (
        torch.from_numpy(array.reshape(-1).view(np.uint8).copy()) if array.size else torch.empty(0, dtype=torch.uint8)
    )
    descr = np.lib.format.dtype_to_descr(array.dtype)
    is_scalar = isinstance(value, np.generic)
    return {_KEY: "array", "dtype": descr, "shape": tuple(np.shape(value)), "values": values, "is_scalar": is_scalar}


class Restored:
    """Turns plain values back into values for the objects of this process."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._referents = referents(objects)

    def restored(self, plain: Any, old: Any = _MISSING) -> Any:
        """Return the value of ``plain``. ``old`` is the value that the program has in its place.

        Raises
        ------
        ValueError
            If the file does not hold the whole value, and the program has nothing in its place, or an object of another
            class.
        """
        if type(plain) is torch.Tensor:
            return plain.detach().clone().requires_grad_(plain.requires_grad)
        if type(plain) in (list, tuple):
            before = old if isinstance(old, (list, tuple)) else ()
            pairs = [(item, before[k] if k < len(before) else _MISSING) for k, item in enumerate(plain)]
            return type(plain)(self.restored(*pair) for pair in pairs)
        if not isinstance(plain, dict):
            return plain
        if _KEY not in plain:
            return self._dict(plain, old)
        kind = plain[_KEY]
        if kind == "part":
            return self._referents[plain["key"]]
        if kind == "kept":
            if old is _MISSING:
                raise ValueError(
                    "cannot load a state: got a list with something that is not data, expected the program to have it "
                    "in the same place. Make the objects as the program did that saved them."
                )
            return old
        if kind == "dict":
            return self._dict(plain["items"], old)
        if kind == "object":
            return self._object(plain, old)
        return self._made(kind, plain)

    def _dict(self, plain: dict[Any, Any], old: Any) -> dict[Any, Any]:
        before = old if isinstance(old, dict) else {}
        kept = {key: item for key, item in plain.items() if key in before or not _is_kept(item)}
        return {key: self.restored(item, before.get(key, _MISSING)) for key, item in kept.items()}

    def _object(self, plain: dict[str, Any], old: Any) -> Any:
        if old is _MISSING or type(old).__qualname__ != plain["class"] or not has_only_attributes(old):
            found = "nothing" if old is _MISSING else f"a {type(old).__qualname__}"
            raise ValueError(
                f"cannot load a state: got a {plain['class']} where the program has {found}, expected objects of one "
                "class. Make the objects as the program did that saved them."
            )
        made = object.__new__(type(old))
        made.__dict__.update(self._dict(plain["attributes"], vars(old)))
        return made

    def _made(self, kind: str, plain: dict[str, Any]) -> Any:
        if kind == "array":
            dtype = np.lib.format.descr_to_dtype(plain["dtype"])
            array = np.frombuffer(plain["values"].numpy().tobytes(), dtype, math.prod(plain["shape"]))
            array = array.reshape(plain["shape"]).copy()
            return array[()] if plain["is_scalar"] else array
        if kind == "deque":
            return collections.deque(self.restored(plain["items"]), plain["maxlen"])
        state = self.restored(plain["state"])
        if kind == "numpy generator":
            bits = _GENERATORS[state["bit_generator"]]()
            bits.state = state
            return np.random.Generator(bits)
        made: Any = torch.Generator() if kind == "torch generator" else random.Random()
        made.set_state(state) if kind == "torch generator" else made.setstate(state)
        return made
