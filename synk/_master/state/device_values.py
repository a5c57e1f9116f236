"""Values of shared variables that lie on devices, as the master handles them: read, move, restore after a death.

On CPU workers every value lies in shared memory, and this file does nothing. A value that a function assigned on a
device is *stale* in shared memory until it is read. It is lost with its worker. A replica can be restored from the
other ranks if they all hold the same value; a shard, or a value that differs between ranks, cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from synk._master.state.lanes import Lanes
from synk._master.state.nccl_group import Group
from synk._master.state.variable import Variable, Variables
from synk._master.workers.failures import raise_failures
from synk._master.workers.workers import Workers
from synk._wire.control import Down
from synk._wire.messages import DEVICE_DTYPES, Kind, Layout
from synk._wire.variables import DeviceCollective, Fetch, Shapes
from synk.errors import WorkerDied


class DeviceValues:
    """Reads, moves and restores values on devices, for the master.

    Parameters
    ----------
    workers : Workers
    lanes : Lanes
    group : Group
    variables : Variables
    numbers : iterator of int
        Numbers for calls and collectives.
    """

    def __init__(
        self, workers: Workers, lanes: Lanes, group: Group, variables: Variables, numbers: Iterator[int]
    ) -> None:
        self._workers = workers
        self._lanes = lanes
        self._group = group
        self._variables = variables
        self._numbers = numbers

    def refresh(self, variable: Variable, deadline: float | None, ranks: Sequence[int] | range | None = None) -> None:
        """Copy values from devices into shared memory, for the code that reads them next."""
        wanted = range(self._workers.world_size) if ranks is None else ranks
        stale = [rank for rank in wanted if variable.is_stale[rank]]
        if not stale:
            return
        check_not_lost([variable], stale, f"read variable {variable.name!r}")
        segments = [variable.reserve_front(rank) for rank in stale]
        contents = dict.fromkeys(stale, Fetch(variable.id))
        replies = self._workers.ask(
            Kind.VARIABLE, stale, 0, contents, segments, deadline, "read", f"variable {variable.name!r}"
        )
        raise_failures(replies, self._workers.world_size, variable.name)
        for rank in stale:
            variable.is_stale[rank] = False

    def collective(self, variable: Variable, deadline: float | None, kind: str, shapes: Shapes, op: str = "") -> bool:
        """Run a collective by NCCL if the values lie on the devices. Return whether it did.

        Parameters
        ----------
        kind : str
            As in ``DeviceCollective``.
        shapes : Shapes
            The shapes of the result on every rank.
        """
        if not any(variable.is_stale) or not self._group.is_usable(self._workers):
            return False
        fronts = [pairs[front] for pairs, front in zip(variable.shapes, variable.front)]
        if len(set(fronts)) > 1 or any(dtype.name not in DEVICE_DTYPES for dtype in variable.dtypes):
            return False
        check_not_lost([variable], [0] if kind == "broadcast" else None, f"{kind} variable {variable.name!r}")
        ranks = list(range(self._workers.world_size))
        # Written before the message: each rank notes under this number what it stores, and the commit names the number.
        number = next(self._numbers)
        self._lanes.first.down[0, Down.CALL] = number
        replies = self._workers.ask(
            Kind.VARIABLE,
            ranks,
            0,
            dict.fromkeys(ranks, DeviceCollective(variable.id, kind, op)),
            [segment for rank in ranks for segment in variable.segments(rank)],
            deadline,
            "collective",
            f"variable {variable.name!r}",
        )
        raise_failures(replies, self._workers.world_size, variable.name)
        self._variables.commit(ranks, [Layout(None, (), ((variable.id, shapes),))] * len(ranks), number)
        return True

    def restore(self, ranks: Sequence[int], deadline: float | None) -> None:
        """Give ``ranks``, which have new workers, the values of their variables if these can be restored."""
        for variable in self._variables.living():
            gone = [rank for rank in ranks if variable.is_stale[rank]]
            if not gone:
                continue
            survivors = [rank for rank in range(self._workers.world_size) if rank not in gone]
            if not variable.is_sharded and survivors and self._is_alike(variable, survivors, deadline):
                values = variable.leaves(survivors[0])
                for rank in gone:
                    for target, value in zip(variable.back(rank, tuple(value.shape for value in values)), values):
                        np.copyto(target, value)
                variable.flip(gone)
            else:
                variable.lost.update(gone)

    def _is_alike(self, variable: Variable, ranks: Sequence[int], deadline: float | None) -> bool:
        """Whether all of ``ranks`` hold the same value, bit for bit."""
        if variable.lost.intersection(ranks):
            return False
        self.refresh(variable, deadline, ranks)
        first = variable.leaves(ranks[0])
        return all(
            mine.shape == other.shape and mine.tobytes() == other.tobytes()
            for rank in ranks[1:]
            for mine, other in zip(first, variable.leaves(rank))
        )


def check_not_lost(variables: Iterable[Variable], ranks: Iterable[int] | None, verb: str) -> None:
    """Raise if a value that is needed (on ``ranks``, or on any) was lost with its worker.

    Raises
    ------
    WorkerDied
        With the names of the variables and the ranks.
    """
    lost = {
        variable.name: sorted(variable.lost if ranks is None else variable.lost.intersection(ranks))
        for variable in variables
        if variable.lost
    }
    named = [f"{name!r} of rank {', '.join(map(str, where))}" for name, where in sorted(lost.items()) if where]
    if named:
        raise WorkerDied(
            f"cannot {verb}: the value of {'; '.join(named)} lay on the device of a worker that died; no other rank "
            "holds it. Set it again: variable.value = ..., or variable[rank] = ....",
            ranks=tuple(sorted({rank for where in lost.values() for rank in where})),
            phase="recover",
        )
