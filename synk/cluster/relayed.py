"""The objects that stand for the program's functions, objects, variables and settings in an agent, which opens none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._master.calls.launched import Launched
from synk._master.calls.plans import PlanCache
from synk._master.processes.log import PickledSettings
from synk._master.session import Session
from synk._master.state.ledger import Record
from synk._master.state.repeated import Repeated
from synk._master.state.variable import Variable, Variables
from synk._pure.output_ops import ops_of
from synk._wire.messages import Layout
from synk.cluster.orders import FunctionNote, VariableNote


class NodeFunction:
    """A function as an agent knows it: by its id on the workers, its name and its ops.

    It has the attributes of ``synk._master.calls.callee.Callee`` that a call needs once its arguments are bound.
    """

    is_partial = True
    changes = residents = variables = ()

    def __init__(self, note: FunctionNote) -> None:
        self.id, self.version, self.name = note.id, note.version, note.name
        self.title = repr(note.name)
        self.ops = ops_of(note.outputs, self.title)
        self.plans = PlanCache()
        self.record = Record(note.name)
        self.repeated = Repeated(note.name, is_silent=True)
        self.check: Callable[[], None] = lambda: None

    def load(self, session: Session, deadline: float | None) -> None:
        """Make sure that all workers have the function, which workers that were started again lack.

        ``check()`` comes first and raises if there are such workers and the head relies on their resident objects: the
        function may refer to them.
        """
        self.check()
        session.functions.ensure_loaded(deadline)


class Numbered(NamedTuple):
    """A resident object as an agent knows it: by its number on the workers."""

    id: int

    def check(self, verb: str) -> None:
        """Do nothing: the head has checked that its state is not lost."""


class NodeVariable(Variable):
    """A shared variable of a node. Its value is a list of leaves, because only the ranks know how they are nested."""

    __slots__ = ("_skeleton",)

    def __init__(self, variables: Variables, number: int, note: VariableNote) -> None:
        self._skeleton = note.skeleton
        super().__init__(variables, note.values[0], name=note.name, number=number)
        self.is_sharded = note.is_sharded

    def skeleton(self) -> bytes:
        return self._skeleton


class NodeVariables:
    """The shared variables of a node, by their numbers in the head: copies for the node's own ranks.

    The head decides which values hold. Its messages say which values it has set and which call it has committed last.
    Until the next message the values that a call has assigned wait in back buffers, as on one machine. If the head or
    the agent dies in between, they are lost here, and a new agent gets all values from the head.

    Parameters
    ----------
    session : Session
        The session of the node.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[int, Variable] = {}
        self._undecided: tuple[Launched, Sequence[Layout]] | None = None

    def __getitem__(self, number: int) -> Variable:
        return self._known[number]

    def take(self, number: int, note: VariableNote) -> None:
        """Give the ranks the values of a variable."""
        variable = self._known.get(number)
        if variable is None:
            variable = self._known[number] = NodeVariable(self._session.variables, number, note)
        # No call runs on the node meanwhile, so its ranks see the old values or the new ones, and never a part of them.
        for rank, leaves in enumerate(note.values):
            variable.fill_back(rank, leaves)
        if len(note.values) < self._session.world_size:
            variable.unite(is_new=True)
        else:
            variable.flip(range(self._session.world_size))

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget variables that no longer exist in the head."""
        for number in numbers:
            self._known.pop(number, None)

    def assigned(self, launched: Launched, layouts: Sequence[Layout]) -> list[list[list[np.ndarray]]]:
        """Return the values that a call has assigned: for each rank that ran, the leaves of each variable.

        They are not committed yet: the head decides, and its next message tells.
        """
        self._undecided = launched, layouts
        return [
            [self[number].assigned_leaves(rank) for number, _ in layout.assigned]
            for rank, layout in zip(launched.call.ranks, layouts)
        ]

    def settle(self, committed: int | None) -> None:
        """Commit the values that the last call has assigned if the head has committed this call; else drop them."""
        # Without a commit nothing has to be undone: the next assignment overwrites the back buffers.
        undecided, self._undecided = self._undecided, None
        if undecided is not None and undecided[0].number == committed:
            launched, layouts = undecided
            self._session.variables.commit(launched.call.ranks, layouts, launched.number)


class RelayedSettings(PickledSettings):
    """The program's settings, pickled by the head."""

    def __init__(self, data: bytes) -> None:
        self.values = [data]
        self._data = data


class RelayedReader:
    """Stands for the reader of a program's settings, because the settings of the agent's own process do not count."""

    names: Sequence[str] = ()

    def __init__(self, session: Session) -> None:
        self._log = session.workers.log

    def read(self) -> list[Any]:
        """Return the settings that came last from the head."""
        return [] if self._log.settings is None else self._log.settings.values
