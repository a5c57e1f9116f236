"""The module-level verbs: those of the current runtime, and two texts about it."""

from __future__ import annotations

import functools
import inspect
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from synk._api.current import current
from synk._api.runtime import Runtime
from synk._engine.profile import Profile
from synk._pure.tracebacks import verb
from synk._pure.words import Text
from synk._version import __version__
from synk._wire.cell import cell
from synk.backends import BACKENDS, backend_module


def _of_current(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method of the current runtime, with its documentation and its parameters."""

    name, whole = method.__name__, inspect.signature(method)
    signature = whole.replace(parameters=list(whole.parameters.values())[1:])

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        try:
            signature.bind(*args, **options)
        except TypeError as error:  # told also where there is no runtime yet
            raise TypeError(f"{name}() {error}") from None
        return method(current(), *args, **options)

    own: Any = run
    own.__signature__, own.__module__, own.__qualname__ = signature, __name__, name
    return verb(run)


if TYPE_CHECKING:
    _runtime = current()
    data, shared, resident = _runtime.data, _runtime.shared, _runtime.resident
    map = _runtime.map
    distribute = _runtime.distribute
else:
    data, shared, resident = _of_current(Runtime.data), _of_current(Runtime.shared), _of_current(Runtime.resident)
    map, distribute = _of_current(Runtime.map), _of_current(Runtime.distribute)


@verb
def profile() -> Profile:
    """Return time and bytes of all calls of the current runtime so far, by function. It prints as a table.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     @synk.function(outputs="sum")
    ...     def total(x):
    ...         return x.sum()
    ...     _ = total(np.ones(1000))
    ...     synk.profile().records["total"].nbytes_of("staged")
    8000
    """
    return current().profile


@verb
def info() -> str:
    """Return a description of synk, this machine, and the current runtime."""
    lines = [
        f"synk {__version__}, Python {platform.python_version()}, numpy {np.__version__}, {platform.platform()}",
        *(line for name in BACKENDS for line in backend_module(name).report()),
    ]
    if cell.runtime is not None:
        lines.append(current().info())
    else:
        lines.append("runtime: none (synk.fork() starts one)")
    return Text("\n".join(lines))
