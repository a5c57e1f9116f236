"""Bridges to other libraries, each imported by its name: ``joblib``, ``optax``, ``synkhronos``."""

import sys as _sys
from typing import Any as _Any

from synk._pure.words import GONE as _GONE
from synk._pure.words import no_attribute as _no_attribute


def __getattr__(name: str) -> _Any:
    raise _no_attribute("extensions", _sys.modules[__name__], name)


class _Gone:
    """Says what to write instead where a module of 0.1 is imported. Python asks it last, if nothing else finds one."""

    @staticmethod
    def find_spec(fullname: str, path: _Any = None, target: _Any = None) -> None:
        owner, _, name = fullname.rpartition(".")
        if owner == __name__ and f"extensions.{name}" in _GONE:
            raise ModuleNotFoundError(str(_no_attribute("extensions", _sys.modules[__name__], name)))


_sys.meta_path.append(_Gone)
