"""Devices, seen from the program: NCCL between the ranks, and values of shared variables that lie on devices.

Joining a group takes a second or more and needs all ranks, so it is done before the first call, and again after a
death. If the first group fails, or its proof does, it is tried once more in new workers without peer access. If that
fails, or a later group, the runtime goes on without NCCL: large outputs are then reduced through shared memory, as on
the CPU.

On CPU workers every value lies in shared memory, and this file does nothing. A value that a function has assigned on a
device is brought to shared memory when it is read. It is lost with its worker. A replica gets the value of the other
ranks, with a warning, if they all hold the same one; a shard, or a value that differs between them, is lost.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from synk._engine.things import Once
from synk._engine.variables import Variable
from synk._processes.output import warn_at_users_line
from synk._wire.messages import DEVICE_DTYPES
from synk._wire.orders import Down, Up
from synk.errors import CallTimeout, WorkerDied

logger = logging.getLogger("synk")

_NO_PEERS = "NCCL_P2P_DISABLE"

GRACE_S = 5.0
"""How long a rank may take to abort a collective on its device. One that is killed loses the values there."""

JOIN_TIMEOUT_S = 120.0
"""For all ranks together. Each has limits of its own; this one is for a rank that sticks in the driver."""


class Group:
    """The NCCL group of a runtime.

    Parameters
    ----------
    session : Session
    is_wanted : bool
        Whether NCCL can join the ranks at all: there are several, each on its own device.

    Attributes
    ----------
    name : str
        For messages.
    problem : str
        Why NCCL is not used although it could be.
    library : str
        The binding and the version of the library, once the group was joined.
    """

    name = "NCCL"

    def __init__(self, session: Any, is_wanted: bool) -> None:
        self._session = weakref.proxy(session)
        self._is_wanted = is_wanted
        self._number = 0
        self._is_joined = False
        self._num_restarts = 0
        self.problem = ""
        self.library = ""

    def prepare(self, deadline: float | None) -> None:
        """Join the group if it is wanted and not joined.

        Raises
        ------
        WorkerDied, CallTimeout, KeyboardInterrupt
        """
        if not self._is_wanted or self.is_usable():
            return
        session = self._session
        session.settle_all()
        # A join may have been broken off, and no rank may go on waiting in it.
        self.break_up()
        self._number += 1
        problem = self._join()
        if problem and self._number == 1 and self._turn_peers_off():
            session.start_anew()  # NCCL reads its environment once; there is nothing on the devices yet
            for worker in session.by_rank:
                worker.is_prepared = True  # nor anything for ``on_restart`` to make again
            session.enter(deadline)
            self._number += 1
            problem = self._join()
        if problem:
            self._give_up(problem)

    def break_up(self) -> None:
        """Make all ranks leave the group, because one of them cannot go on with it."""
        if self._is_wanted:
            self._is_joined = False
            # A thread on each rank watches this word, since the main thread may be waiting in the driver for a rank
            # that is dead.
            self._session.processes.down[:, Down.BROKEN] = self._number

    def _turn_peers_off(self) -> bool:
        """Have new workers copy between GPUs through the host. Return whether that makes a difference."""
        environments = self._session.assignment.environments
        is_on = any(environment.get(_NO_PEERS) != "1" for environment in environments)
        for environment in environments:
            environment[_NO_PEERS] = "1"
        return is_on

    def _join(self) -> str:
        """Have the ranks join a new group. Return why it is not to be used, or an empty string."""
        self._num_restarts = self._session.counters["restarts"]
        try:
            unique_id = self._ask([0], None)["unique_id"]
        except (WorkerDied, CallTimeout):
            raise
        except Exception as error:  # there is no NCCL to try again
            self._give_up(str(error))
            return ""
        try:
            self.library = self._ask(range(self._session.world_size), unique_id)["library"]
        except (WorkerDied, CallTimeout):
            raise
        except Exception as error:
            self.break_up()
            return str(error)
        self.problem, self._is_joined = "", True
        return ""

    def _ask(self, ranks: Iterable[int], unique_id: bytes | None) -> dict[str, Any]:
        """Ask ranks for an id, or to join. Return the lowest rank's answer."""
        orders = {rank: Once(self._session, "join", (self._number, unique_id)) for rank in ranks}
        try:
            answers = self._session.ask(orders, "the start of NCCL", "join NCCL", time.monotonic() + JOIN_TIMEOUT_S)
        except CallTimeout:
            self._give_up(f"its start took more than {JOIN_TIMEOUT_S:g} s")
            raise
        return dict(answers[0])

    def _give_up(self, problem: str) -> None:
        self._is_wanted, self.problem = False, problem
        logger.warning("NCCL is not used, large outputs go through host memory: %s", problem)

    def is_usable(self) -> bool:
        """Whether all ranks are in the group, and no rank has since given it up or been replaced."""
        return (
            self._is_joined
            and self._num_restarts == self._session.counters["restarts"]
            and not (self._session.processes.up[:, Up.BROKEN] >= self._number).any()
        )

    def announce(self, lane: Any, num_ranks: int) -> None:
        """Write whether the next call of a lane communicates by NCCL. It does if all ranks run it."""
        is_in_use = num_ranks == self._session.world_size and self.is_usable()
        lane.down[:, Down.GROUP] = self._number if is_in_use else 0


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

    def collective(self, variable: Variable, kind: str, op: str = "") -> bool:
        """Run a collective by NCCL if there are values on devices and it can. Return whether it did.

        ``"broadcast"`` starts from rank 0; ``"all_gather"`` concatenates values of one shape along axis 0.
        """
        session = self._session
        if not any(variable.on_device) or not session.nccl.is_usable():
            return False
        if len(set(variable.value_shapes)) > 1 or any(dtype.name not in DEVICE_DTYPES for dtype in variable.dtypes):
            return False
        ranks = range(session.world_size)
        check_not_lost([variable], [0] if kind == "broadcast" else ranks, f"{kind} variable {variable.name!r}")
        orders = {rank: Once(session, "collective", (variable.number, kind, op), [variable]) for rank in ranks}
        told = session.ask(orders, f"variable {variable.name!r}", "collective", session.deadline(None))
        for rank, (which, found) in told.items():
            variable.note_assigned(rank, which, found)
        session.commit([(variable, rank, *found) for rank, found in told.items()])
        return True

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
