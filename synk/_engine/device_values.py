"""Values of shared variables that lie on devices, as the program handles them: read, move, restore after a death.

On CPU workers every value lies in shared memory, and this file does nothing. A value that a function has assigned on a
device is brought to shared memory when it is read. It is lost with its worker. A replica gets the value of the other
ranks, with a warning, if they all hold the same one; a shard, or a value that differs between them, is lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from synk._engine.things import Once
from synk._engine.variables import Variable
from synk._processes.output import warn_at_users_line
from synk._wire.control import Up
from synk.errors import WorkerDied

_COPIES = (
    ("to the devices", "h2d", Up.H2D_NBYTES),
    ("from the devices", "d2h", Up.D2H_NBYTES),
    ("by pageable memory", "pageable", Up.PAGEABLE_NBYTES),
)


class DeviceValues:
    """Reads, moves and restores values on devices, for the program."""

    def __init__(self, session: Any) -> None:
        self._session = weakref.proxy(session)
        self._num_starts = [1] * session.world_size

    def fetch(self, variable: Variable, ranks: Iterable[int]) -> None:
        """Copy values from devices to their places in shared memory."""
        session = self._session
        ranks = list(ranks)
        check_not_lost([variable], ranks, f"read variable {variable.name!r}")
        fetched = [rank for rank in ranks if variable.on_device[rank]]
        for rank in fetched:
            variable.reserve(rank, int(variable.fronts[rank]), variable.value_shapes[rank])
        if fetched:
            orders = {rank: Once(session, "fetch", variable.number, [variable]) for rank in fetched}
            session.ask(orders, f"variable {variable.name!r}", "read", session.deadline(None))
        for rank in fetched:
            variable.on_device[rank] = False

    def note_copies(self, call: Any) -> None:
        """Note in the profile what ranks have copied to their devices and back in a call."""
        for rank in call.ranks:
            for argument, kind, word in _COPIES:
                if nbytes := int(call.lane.up[rank, word]):
                    call.callee.record.add_moved(argument, kind, 1, nbytes)

    def restore(self) -> None:
        """Give ranks that have new workers the values of their variables if these can be restored."""
        session = self._session
        num_starts = [worker.num_starts for worker in session.by_rank]
        if num_starts == self._num_starts:
            return
        session.settle_all()
        replaced = [rank for rank, count in enumerate(num_starts) if count != self._num_starts[rank]]
        taken: list[str] = []
        for variable in session.variables:
            gone = [rank for rank in replaced if variable.on_device[rank]]
            if not gone:
                continue
            others = [rank for rank in range(session.world_size) if rank not in gone]
            if not variable.is_sharded and others and self._is_alike(variable, others):
                variable.set_ranks(dict.fromkeys(gone, variable.leaves(others[0])))
                taken.append(f"{variable.name!r} of rank {', '.join(map(str, gone))}")
            else:
                variable.lost.update(gone)
            for rank in gone:
                variable.on_device[rank] = False
        self._num_starts = num_starts
        if taken:
            warn_at_users_line(
                f"the value of {'; '.join(taken)} lay on the device of a worker that died, and is now that of the "
                "other ranks. Set it again if it was another one: variable[rank] = ....",
                RuntimeWarning,
            )

    def _is_alike(self, variable: Variable, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` hold the same value, bit for bit."""
        if variable.lost.intersection(ranks):
            return False
        self.fetch(variable, ranks)
        first, *others = (variable.leaves(rank) for rank in ranks)
        return all(
            mine.shape == one.shape and mine.tobytes() == one.tobytes()
            for other in others
            for mine, one in zip(first, other)
        )


def check_not_lost(variables: Iterable[Any], ranks: Sequence[int] | range, verb: str) -> None:
    """Raise if a value that is needed on some ranks was lost with its worker.

    Raises
    ------
    WorkerDied
        With the names of the variables and the ranks.
    """
    lost = {each.name: sorted(each.lost.intersection(ranks)) for each in variables if each.lost}
    named = [f"{name!r} of rank {', '.join(map(str, where))}" for name, where in sorted(lost.items()) if where]
    if named:
        raise WorkerDied(
            f"cannot {verb}: the value of {'; '.join(named)} lay on the device of a worker that died; no other rank "
            "holds it. Set it again: variable.value = ..., or variable[rank] = ....",
            ranks=tuple(sorted({rank for where in lost.values() for rank in where})),
            phase="recover",
        )
