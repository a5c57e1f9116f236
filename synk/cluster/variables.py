"""The shared variables of a node: copies of those that the head has, for the node's own ranks.

The head decides. It tells a node which values it has set, and which call it has committed last; until then, what a
call has assigned waits in second buffers, as on one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from synk._master.calls.launched import Launched
from synk._master.session import Session
from synk._master.state.variable import Variable, Variables
from synk._wire.messages import Layout
from synk._wire.variables import shapes_of
from synk.cluster.orders import VariableNote


class NodeVariable(Variable):
    """One of them. Its value is a list of leaves; what the nesting of these is, only the ranks know."""

    __slots__ = ("_skeleton",)

    def __init__(self, variables: Variables, number: int, note: VariableNote) -> None:
        self._skeleton = note.skeleton
        super().__init__(variables, note.values[0], name=note.name, number=number)
        self.is_sharded = note.is_sharded

    def skeleton(self) -> bytes:
        return self._skeleton


class NodeVariables:
    """The variables of a node's session, by the numbers that they have in the head.

    Parameters
    ----------
    session : Session
        The node's.
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
        for rank, leaves in enumerate(note.values):
            for target, source in zip(variable.back(rank, shapes_of(leaves)), leaves):
                np.copyto(target, source)
        if len(note.values) < self._session.world_size:
            variable.unite(is_new=True)
        else:
            variable.flip(range(self._session.world_size))

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget variables that no longer exist in the head."""
        for number in numbers:
            self._known.pop(number, None)

    def assigned(self, launched: Launched, layouts: Sequence[Layout]) -> list[list[list[np.ndarray]]]:
        """Return what a call has assigned: for each rank that ran, the leaves of each variable. It is not decided."""
        if not launched.call.options.is_trial:
            self._undecided = launched, layouts
        return [
            [self[number].assigned_leaves(rank) for number, _ in layout.assigned]
            for rank, layout in zip(launched.call.ranks, layouts)
        ]

    def settle(self, committed: int | None) -> None:
        """Make what the last call has assigned the values if the head has committed it, else drop it."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None and undecided[0].number == committed:
            launched, layouts = undecided
            self._session.variables.commit(launched.call.ranks, layouts, launched.number)
