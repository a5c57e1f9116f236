"""Bridges to other libraries, each imported by its name: ``joblib``, ``optax``, ``synkhronos``."""

import sys as _sys
from typing import Any as _Any

from synk._pure.words import no_attribute as _no_attribute


def __getattr__(name: str) -> _Any:
    raise _no_attribute("extensions", _sys.modules[__name__], name)
