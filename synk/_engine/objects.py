"""``Shared`` and ``Resident`` on the new engine: the same handles, with its variables and objects behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synk._engine import variables
from synk._engine.residents import ResidentObject
from synk._engine.variables import Variable
from synk._master.objects.resident import Resident
from synk._master.objects.shared import Shared as _Shared
from synk._pure.read_only import read_only
from synk._pure.tracebacks import verb
from synk._wire.cell import refuse_inside_worker


class Shared(_Shared):
    """A variable on every rank: an array, or a nesting of arrays such as the parameters of a model.

    Made by :func:`synk.shared`. Inside a function ``w.value`` reads and assigns this rank's value; functions refer to
    the variable by closing over it. A call is a transaction: its assignments take effect on all ranks if it succeeds,
    and on none if it fails.
    """

    __slots__ = ()

    def __init__(self, session: Any, variable: Variable) -> None:
        super().__init__(session, variable)  # type: ignore[arg-type]

    @property
    @verb
    def value(self) -> Any:
        """A read-only copy of rank 0's value, or if sharded, of the shards concatenated along axis 0."""
        return read_only(self._read())

    @value.setter
    @verb
    def value(self, value: Any) -> None:
        with self._session.entered("assign"):
            self._session.begin("assign")
            variables.assign(self._session, self._referent, value)

    @verb
    def __getitem__(self, rank: int) -> Any:
        """Return a read-only copy of the value on one rank."""
        with self._session.entered("read"):
            self._session.begin("read")
            return read_only(variables.get_value(self._session, self._referent, rank))

    @verb
    def __setitem__(self, rank: int, value: Any) -> None:
        """Set the value of one rank."""
        with self._session.entered("assign"):
            self._session.begin("assign")
            variables.set_value(self._session, self._referent, value, rank)

    def _read(self) -> Any:
        with self._session.entered("read"):
            self._session.begin("read")
            read = variables.gather if self.is_sharded else variables.get_value
            return read(self._session, self._referent, 0)


def make_resident(
    session: Any,
    value: Any,
    name: str | None,
    dump: Callable[[Any], Any] | None,
    load: Callable[[Any, Any], None] | None,
) -> Resident:
    """Make a :class:`Resident` of an open runtime, on all of its workers."""
    refuse_inside_worker("make a resident object")
    if (dump is None) != (load is None):
        raise TypeError("cannot make a resident object: got only one of dump and load, expected both or none.")
    verb = "make a resident object"
    with session.entered(verb):
        session.begin(verb)
        resident = ResidentObject(session.residents, value, name, dump, load)
        session.residents.settle(session.deadline(None))
    return Resident(session, resident)  # type: ignore[arg-type]
