"""Settings of libraries by which a function computes otherwise: how the program reads them, and how a rank follows.

The program reads all of them at each call, which takes about a microsecond. A rank is told with the next message where
they are others than it was told last, and sets those that differ. A library that is not imported has none: in the
program it is not asked, and on a rank its settings wait until it is.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy._core import umath

from synk._pure.interrupts import as_operation


class Setting(NamedTuple):
    """A setting of a library.

    Attributes
    ----------
    library : str
        The module.
    reader : callable
        ``reader(module)`` returns what reads the value for this thread: one that nobody changes, compared by ``==``.
    set : callable
        ``set(module, value)`` sets it for this thread.
    """

    library: str
    reader: Callable[[Any], Callable[[], Any]]
    set: Callable[[Any, Any], Any]


def _set_filters(warnings: Any, filters: tuple[Any, ...]) -> None:
    warnings.resetwarnings()  # which also tells the interpreter that they are others
    warnings.filters[:] = filters


# NumPy holds them in an object that is another one whenever they are set. To read it takes a hundred times as long.
_float_object = umath._extobj_contextvar.get if hasattr(umath, "_extobj_contextvar") else object


@functools.lru_cache(maxsize=16)
def _float_errors(_: Any) -> dict[str, Any]:
    return dict(np.geterr())


def _set_float_errors(numpy: Any, kinds: dict[str, str]) -> None:
    numpy.seterr(**{kind: how for kind, how in kinds.items() if how not in ("call", "log")})  # what to call is no value


def _decimal_context(getcontext: Callable[[], Any]) -> tuple[Any, ...]:
    *arguments, _, traps = getcontext().__reduce__()[1]  # without the flags, which are results
    return (*arguments, traps)


def _set_decimal(decimal: Any, values: tuple[Any, ...]) -> None:
    *arguments, traps = values
    context = decimal.Context(*arguments, [], traps)
    context.flags.update(decimal.getcontext().flags)
    decimal.setcontext(context)


def _set_cudnn(name: str) -> Callable[[Any, Any], None]:
    return lambda torch, value: setattr(torch.backends.cudnn, name, value)


def _matmul_precision(torch: Any) -> str | None:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return None  # the precisions of single backends have been set, which torch does not let one read together


def _set_matmul_precision(torch: Any, value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


# The flags of cuDNN are read by torch's functions in C: properties of a module take three times as long.
SETTINGS: dict[str, Setting] = {
    "recursion limit": Setting(
        "sys", lambda sys: sys.getrecursionlimit, lambda sys, value: sys.setrecursionlimit(value)
    ),
    "warning filters": Setting("warnings", lambda warnings: lambda: tuple(warnings.filters), _set_filters),
    "floating-point errors": Setting("numpy", lambda _: lambda: _float_errors(_float_object()), _set_float_errors),
    "decimal context": Setting(
        "decimal", lambda decimal: functools.partial(_decimal_context, decimal.getcontext), _set_decimal
    ),
    "grad mode": Setting(
        "torch", lambda torch: torch.is_grad_enabled, lambda torch, value: torch.set_grad_enabled(value)
    ),
    "default dtype": Setting(
        "torch", lambda torch: torch.get_default_dtype, lambda torch, value: torch.set_default_dtype(value)
    ),
    "deterministic algorithms": Setting(
        "torch",
        lambda torch: torch.get_deterministic_debug_mode,
        lambda torch, value: torch.set_deterministic_debug_mode(value),
    ),
    "float32 matmul precision": Setting(
        "torch", lambda torch: functools.partial(_matmul_precision, torch), _set_matmul_precision
    ),
    "cudnn.deterministic": Setting(
        "torch", lambda torch: torch._C._get_cudnn_deterministic, _set_cudnn("deterministic")
    ),
    "cudnn.benchmark": Setting("torch", lambda torch: torch._C._get_cudnn_benchmark, _set_cudnn("benchmark")),
    "jax_enable_x64": Setting(
        "jax",
        lambda jax: lambda: jax.config.jax_enable_x64,
        lambda jax, value: jax.config.update("jax_enable_x64", value),
    ),
}


class Reader:
    """Reads the settings of all libraries that are imported.

    Attributes
    ----------
    names : list of str
        Those of the settings that were read last.
    """

    def __init__(self) -> None:
        self._num_modules = 0
        self.names: list[str] = []
        self._readers: list[Callable[[], Any]] = []

    def read(self) -> list[Any]:
        """Return the values, for this thread."""
        if len(sys.modules) != self._num_modules:
            self._look()
        return [read() for read in self._readers]

    @as_operation
    def _look(self) -> None:
        num_modules, found = len(sys.modules), {}
        for name, setting in SETTINGS.items():
            if (module := sys.modules.get(setting.library)) is not None:
                try:
                    found[name] = setting.reader(module)
                    found[name]()
                except AttributeError:  # another thread is importing it
                    found.pop(name, None)
                    num_modules = 0
        self.names, self._readers, self._num_modules = list(found), list(found.values()), num_modules


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put back what the body changes."""
    reader = Reader()
    values = reader.read()
    before = dict(zip(reader.names, values))
    try:
        yield
    finally:
        values = reader.read()
        for name, value in zip(reader.names, values):
            if before.get(name, value) != value:
                SETTINGS[name].set(sys.modules[SETTINGS[name].library], before[name])
