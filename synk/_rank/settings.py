"""The program's settings of libraries, as a rank takes them over: each is set once its library is imported.

What a function sets itself stays, as in a plain program, until the program's own value changes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from synk._wire.settings import SETTINGS

_log = logging.getLogger("synk")
_nothing = object()


class _NotImported(Warning):
    """Stands for a warning class from a module that is not imported here, so that nothing can raise such a warning."""


class _Unpickler(pickle.Unpickler):
    """Unpickles without importing anything, except what cloudpickle needs.

    Attributes
    ----------
    missing : set of str
        The modules that it did not import.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.missing: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module in sys.modules or module.partition(".")[0] == "cloudpickle":
            with contextlib.suppress(AttributeError):  # the module is only half imported
                return super().find_class(module, name)
        self.missing.add(module)
        return _NotImported


class Settings:
    """The settings of one rank. While some of them wait for a module to be imported, this is also a module finder."""

    def __init__(self) -> None:
        self._data = b""
        self._set: dict[str, Any] = {}  # by name, as the program told them
        self._awaited: set[str] = set()  # modules that are not imported yet
        self._begun: set[str] = set()  # modules that are being imported
        self._is_importing = False

    def told(self, name: str, default: Any) -> Any:
        """Return a setting as the program has it, or ``default`` if the program has not told it."""
        return self._set.get(name, default)

    def take_in(self, data: bytes) -> None:
        """Apply the settings that differ from those that the program told before."""
        self._data = data
        self._apply()

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Silence the warnings of imports in the body: the program imported the modules before it set its filters."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._is_importing = True
            try:
                yield
            finally:
                self._is_importing = False
        if self._data:
            self._apply()

    def _apply(self) -> None:
        unpickler = _Unpickler(self._data)
        told: dict[str, Any] = unpickler.load()
        self._awaited = unpickler.missing
        for name, value in told.items():
            library = SETTINGS[name].library
            if library not in sys.modules or library in self._begun:
                self._awaited.add(library)
            elif not (self._is_importing and library == "warnings") and self._set.get(name, _nothing) != value:
                self._set[name] = value
                try:
                    SETTINGS[name].set(sys.modules[library], value)
                except Exception as error:
                    _log.warning("a worker cannot follow the program's %s (%r): %s", name, value, error)
        if self._awaited and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        elif not self._awaited and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module that settings wait for. At the end of its import they are applied."""
        if name not in self._awaited:
            return None
        self._awaited.discard(name)
        spec = importlib.util.find_spec(name)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is None:
            return spec

        def execute_and_set(module: Any) -> None:
            self._begun.add(name)
            try:
                execute(module)
            finally:
                self._begun.discard(name)
                self._apply()

        spec.loader.exec_module = execute_and_set  # type: ignore[union-attr, method-assign]
        return spec
