"""What an agent has in the place of the program's functions, objects and settings, which it passes on unopened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from synk._master.calls.plans import PlanCache
from synk._master.processes.log import PickledSettings
from synk._master.session import Session
from synk._master.state.guard import Copies
from synk._master.state.ledger import Record
from synk._pure.output_ops import ops_of
from synk.cluster.orders import FunctionNote


class NodeFunction:
    """A function as an agent knows it: by its id on the workers, its name and its ops.

    It has those attributes of ``synk._master.calls.callee.Callee`` that a call needs once its arguments are bound.
    """

    is_partial = True
    is_stale = is_unchecked = per_rank = False
    changes = residents = variables = ()

    def __init__(self, note: FunctionNote) -> None:
        self.id, self.version, self.name, self.block_rows = note.id, note.version, note.name, note.block_rows
        self.title = repr(note.name)
        self.ops = ops_of(note.outputs, self.title)
        self.plans = PlanCache()
        self.record = Record(note.name)
        self.copies = Copies(note.name)
        self.check: Callable[[], None] = lambda: None

    def load(self, session: Session, deadline: float | None) -> None:
        """See that all workers have it: those that were started again lack it.

        First ``check()`` must not raise: what they lack may refer to resident objects, which they would lack, too.
        """
        self.check()
        session.functions.ensure_loaded(deadline)


class Numbered(NamedTuple):
    """A resident object as an agent knows it: by its number on the workers."""

    id: int

    def check(self, verb: str) -> None:
        """Do nothing: the head has checked that its state is not lost."""


class RelayedSettings(PickledSettings):
    """The program's settings, pickled by the head."""

    def __init__(self, data: bytes) -> None:
        self.values = [data]
        self._data = data


class RelayedReader:
    """Takes the place of what reads a program's settings: an agent's own mean nothing."""

    names: Sequence[str] = ()

    def __init__(self, session: Session) -> None:
        self._log = session.workers.log

    def read(self) -> list[Any]:
        """Return the settings that were told last."""
        return [] if self._log.settings is None else self._log.settings.values
