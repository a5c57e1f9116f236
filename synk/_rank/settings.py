"""The program's settings of libraries, as a rank takes them over: each is set once its library is imported.

What a function sets itself stays, as in a plain program, until the program's own value changes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from synk._pure.environment import follow
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
    """The settings of one rank."""

    def __init__(self) -> None:
        self._data = b""
        self._set: dict[str, Any] = {}  # by name, as the program told them
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

    def _apply(self, imported: Any = None) -> None:
        """Apply what can be: also at the end of the import of a module for which some of them wait."""
        unpickler = _Unpickler(self._data)
        told: dict[str, Any] = unpickler.load()
        for name, value in told.items():
            library = SETTINGS[name].library
            module: Any = sys.modules.get(library)
            spec = None if module is imported else getattr(module, "__spec__", None)
            if module is None or getattr(spec, "_initializing", False):  # the import has not come to its end
                unpickler.missing.add(library)
            elif not (self._is_importing and library == "warnings") and self._set.get(name, _nothing) != value:
                self._set[name] = value
                try:
                    SETTINGS[name].set(module, value)
                except Exception as error:
                    _log.warning("a worker cannot follow the program's %s (%r): %s", name, value, error)
        for name in unpickler.missing:
            follow(name, self._apply)
