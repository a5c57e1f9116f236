"""Settings of libraries that change what a function computes: how the program reads them, and how a rank follows.

The program asks at each call whether one has changed, which takes about a microsecond. If they differ from what a rank
was told, the next message tells it, and the rank sets those that differ. A library that is not imported has no
settings: the program does not ask for them, and on a rank they wait until it is imported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy._core import umath


class Setting(NamedTuple):
    """A setting of a library.

    Attributes
    ----------
    library : str
        The module.
    reader : callable
        ``reader(module)`` returns a function that reads this thread's value: an object that is compared by ``==``, and
        is never changed in place unless it is a list.
    set : callable
        ``set(module, value)`` sets it for this thread.
    meaning : callable
        ``meaning(read)`` returns the value of what was read.
    """

    library: str
    reader: Callable[[Any], Callable[[], Any]]
    set: Callable[[Any, Any], Any]
    meaning: Callable[[Any], Any] = lambda read: read


def _set_filters(warnings: Any, filters: tuple[Any, ...]) -> None:
    warnings.resetwarnings()  # also tells the interpreter that the filters changed
    warnings.filters[:] = filters


# NumPy replaces this object whenever the float errors are set. Reading the errors themselves takes a hundred times as
# long.
_float_object = umath._extobj_contextvar.get if hasattr(umath, "_extobj_contextvar") else object


@functools.lru_cache(maxsize=16)
def _float_errors(_: Any) -> dict[str, Any]:
    return dict(np.geterr())


def _set_float_errors(numpy: Any, kinds: dict[str, str]) -> None:
    # functions to call do not travel
    numpy.seterr(**{kind: how for kind, how in kinds.items() if how not in ("call", "log")})


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
        return None  # torch cannot return one precision if those of single backends were set


def _set_matmul_precision(torch: Any, value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _differing(options: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that are not so at present: libraries warn of some that are set, even to what they are."""
    return {name: value for name, value in options.items() if name not in present or present[name] != value}


def _set_precisions(mpmath: Any, bits: tuple[int, int]) -> None:
    mpmath.mp.prec, mpmath.iv.prec = bits


# The cuDNN flags are read by torch's C functions: the properties of its module take three times as long.
SETTINGS: dict[str, Setting] = {
    "recursion limit": Setting(
        "sys", lambda sys: sys.getrecursionlimit, lambda sys, value: sys.setrecursionlimit(value)
    ),
    "warning filters": Setting(
        "warnings", lambda warnings: functools.partial(getattr, warnings, "filters"), _set_filters, tuple
    ),
    "floating-point errors": Setting("numpy", lambda _: _float_object, _set_float_errors, _float_errors),
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
    "configuration of scikit-learn": Setting(
        "sklearn",
        lambda sklearn: sklearn.get_config,
        lambda sklearn, config: sklearn.set_config(**_differing(config, sklearn.get_config())),
    ),
    "options of xarray": Setting(
        "xarray",
        lambda xarray: lambda: dict(xarray.get_options()),
        lambda xarray, options: xarray.set_options(**_differing(options, xarray.get_options())),
    ),
    "errors of scipy.special": Setting(
        "scipy.special", lambda special: special.geterr, lambda special, kinds: special.seterr(**kinds)
    ),
    "precision of mpmath": Setting("mpmath", lambda mpmath: lambda: (mpmath.mp.prec, mpmath.iv.prec), _set_precisions),
}


class Reader:
    """Reads the settings of all libraries that are imported."""

    def __init__(self) -> None:
        self._num_modules = 0
        self._names: list[str] = []
        self._readers: list[tuple[Callable[[], Any], Any]] = []  # each with what it has read last

    def may_differ(self) -> bool:
        """Whether a setting may have changed in this thread since :meth:`read`."""
        if len(sys.modules) != self._num_modules:
            return True
        for read, last in self._readers:  # noqa: SIM110  # a generator would cost a third more
            if read() != last:
                return True
        return False

    def read(self) -> dict[str, Any]:
        """Return the values of the settings for this thread, by name."""
        if len(sys.modules) != self._num_modules:
            self._find()
        found = [read() for read, _ in self._readers]
        self._readers = [
            (read, [*value] if type(value) is list else value) for (read, _), value in zip(self._readers, found)
        ]
        return {name: SETTINGS[name].meaning(value) for name, value in zip(self._names, found)}

    def _find(self) -> None:
        num_modules, found = len(sys.modules), {}
        for name, setting in SETTINGS.items():
            if (module := sys.modules.get(setting.library)) is not None:
                try:
                    found[name] = setting.reader(module)
                    found[name]()
                except AttributeError:  # another thread is importing it
                    found.pop(name, None)
                    num_modules = 0
        self._names, self._num_modules = list(found), num_modules
        self._readers = [(read, None) for read in found.values()]


def apply(settings: Mapping[str, Any]) -> None:
    """Set those that differ, of libraries that are imported, for this thread."""
    for name, value in Reader().read().items():
        if settings.get(name, value) != value:
            SETTINGS[name].set(sys.modules[SETTINGS[name].library], settings[name])


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the settings that the body changes."""
    before = Reader().read()
    try:
        yield
    finally:
        apply(before)
