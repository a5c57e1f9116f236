"""Functions as a rank holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synk._pure.ops import EACH
from synk._pure.output_ops import each_op, ops_of
from synk._pure.tensors import is_tensor
from synk._rank.reading import Reading
from synk.backends import Backend


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
