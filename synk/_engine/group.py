"""NCCL between the ranks, seen from the program: when they join a group, and whether a call may use it.

Joining takes a second or more and needs all ranks, so it is done before the first call, and again after a death. If the
first group fails, or its proof does, it is tried once more in new workers without peer access. If that fails, or a
later group, the runtime goes on without NCCL: large outputs are then reduced through shared memory, as on the CPU.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable
from typing import Any

from synk._engine.things import Once
from synk._wire.control import Down, Up
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
