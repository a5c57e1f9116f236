"""Functions as a rank holds them.

Those that captured torch modules without ``updates=`` may read them, but not change them.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from synk._pure.ops import EACH
from synk._pure.output_ops import each_op, ops_of
from synk._pure.tensors import is_tensor
from synk._wire.cell import cell
from synk.backends import Backend


class Reading:
    """Wraps a function that captured torch modules without ``updates=``: it may read them, but not change them.

    A change, such as the running averages of a batch norm, would stay on this rank: neither the other ranks nor the
    program would have it. So the wrapper compares the versions and addresses of all parameters and buffers before and
    after each call, and raises a TypeError if any has changed. From then on every call raises it, because the modules
    of this rank are no longer those of the program.
    """

    def __init__(self, fn: Callable[..., Any], modules: Sequence[Any], name: str) -> None:
        self._fn = fn
        self._modules = modules
        self._name = name
        self._has_changed = ""
        self._message = 0  # the number of the message with the last call, if that has changed nothing
        self._tables: list[Any] = []  # views of the parameters and of the buffers of modules that have some
        self._empty: list[dict[str, Any]] = []
        self._values: list[Any] = []  # what the tables held, in order; None for a parameter or buffer without tensor
        self._tensors: list[Any] = []
        self._before: tuple[list[int], list[int]] = [], []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        message = cell.worker.num_messages
        # Other functions, and what the program sends, may change the tensors. If the rank's last message was a call of
        # this function, nothing else was here since it found the tensors unchanged.
        if message not in (self._message, self._message + 1) or not self._message:
            if not (self._tables and self._is_as_before()):
                self._find_tensors()
            self._before = _marks(self._tensors)
        self._message = 0  # the function may raise
        result = self._fn(*args, **kwargs)
        if not self._is_as_before() or _marks(self._tensors) != self._before:
            self._has_changed = self._name_of_changed()
            self._check()
        self._message = message
        return result

    def _find_tensors(self) -> None:
        tables = [t for m in self._modules for each in m.modules() for t in (each._parameters, each._buffers)]
        self._tables, self._empty = [t.values() for t in tables if t], [t for t in tables if not t]
        self._values = list(itertools.chain.from_iterable(self._tables))
        self._tensors = [each for each in self._values if each is not None]

    def _is_as_before(self) -> bool:
        """Whether the modules still have the same tensors. A tensor in a submodule added since is not noticed."""
        now = list(itertools.chain.from_iterable(self._tables))
        return len(now) == len(self._values) and all(map(operator.is_, now, self._values)) and not any(self._empty)

    def _name_of_changed(self) -> str:
        known = dict(zip(map(id, self._tensors), zip(*self._before)))
        for module in self._modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if known.get(id(tensor)) != (tensor._version, tensor.data_ptr()):
                    return str(name)
        return "a tensor"

    def _check(self) -> None:
        if self._has_changed:
            raise TypeError(
                f"cannot use the result of {self._name!r}: it has changed {self._has_changed!r} of a torch module that "
                "it captured, on this worker's copy alone, expected a function that only reads it (batch norms: "
                "module.eval()). Train with synk.torch.replicate(model, optimizer), or keep the module on the workers "
                "by synk.resident(module) and updates=[...]."
            )


def _marks(tensors: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return versions and addresses of tensors. A change of a parameter or buffer alters one of them."""
    torch: Any = sys.modules["torch"]
    return list(map(operator.attrgetter("_version"), tensors)), list(map(torch.Tensor.data_ptr, tensors))


class LoadedFunction:
    """A function as a worker holds it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        outputs: Any,
        framework: str | None,
        updates: Any,
        modules: Any,
        classes: Any,  # only to be kept
        backend: Backend,
    ) -> None:
        self.fn = Reading(fn, modules, name) if modules else fn
        self.name = name
        self.ops = ops_of(outputs, repr(name))
        # By these ops a list counts as rows, or anything as one object.
        self.whole = self.ops if any(op.concatenates or op is EACH for op in each_op(self.ops)) else None
        self.updates = updates
        self.to_framework: Callable[[Any], Any] | None = None
        self.from_framework: Callable[[Any], Any] | None = None
        self.is_tensor: Callable[[Any], bool] = is_tensor if framework == "torch" else _is_nothing
        if framework is not None:
            self.to_framework, self.from_framework = backend.converters(framework)


def _is_nothing(value: Any) -> bool:
    return False
