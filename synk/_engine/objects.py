"""``Shared`` and ``Resident`` on the new engine: the same handles, with its variables and objects behind them."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from synk._engine import variables
from synk._engine.residents import ResidentObject
from synk._master.objects import resident, shared


class Shared(shared.Shared):
    """A variable on every rank; see ``synk._master.objects.shared``."""

    __slots__ = ()

    _collectives: ClassVar[Any] = variables


make_resident = functools.partial(resident.make_resident, make=ResidentObject)  # type: ignore[arg-type]
"""Make a :class:`synk.Resident` of an open runtime, on all of its workers."""
