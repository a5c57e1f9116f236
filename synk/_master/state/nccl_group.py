"""NCCL between the workers, seen from the master: when they join a group, and whether a call may use it.

Joining takes a second or more and needs all ranks, so it is done before the first call, and again after a death. If the
first group fails, or its proof does, it is tried once more in new workers without peer access. If that fails, or a
later group, the runtime goes on without NCCL: large outputs are then reduced through shared memory, as on the CPU.
"""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any

from synk._master.state.lanes import Lane
from synk._master.workers.workers import Workers
from synk._wire.control import Down, Up
from synk._wire.messages import IS_COLLATERAL, JoinOrder, Kind, Status
from synk.errors import CallTimeout

logger = logging.getLogger("synk")

_NO_PEERS = "NCCL_P2P_DISABLE"

JOIN_TIMEOUT_S = 120.0
"""For all ranks together. Each has limits of its own; this one is for a rank that sticks in the driver."""


class Group:
    """The NCCL group of a runtime.

    Parameters
    ----------
    is_wanted : bool
        Whether NCCL can join the ranks at all: there are several, each on its own device.

    Attributes
    ----------
    name : str
        For messages.
    problem : str
        Why NCCL is not used although it could be.
    library : str
        The binding, the version and the path of the library, once the group was joined.
    """

    name = "NCCL"

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._number = 0
        self._is_joined = False
        self._num_restarts = 0
        self.problem = ""
        self.library = ""

    @property
    def is_settled(self) -> bool:
        """Whether calls can be sent as things are; otherwise :meth:`prepare` must come first."""
        return True

    def prepare(self, workers: Workers, deadline: float | None) -> None:
        """Join the group if it is wanted and not joined.

        Raises
        ------
        WorkerDied, KeyboardInterrupt
        """
        if not self._is_wanted or self.is_usable(workers):
            return
        self._is_joined = False
        # A join may have been broken off, and no rank may go on waiting in it.
        self.break_up(workers)
        self._number += 1
        problem = self._join(workers)
        if problem and self._number == 1 and self._turn_peers_off(workers):
            workers.replace(deadline)  # NCCL reads its environment once; there is nothing on the devices yet
            for worker in workers.by_rank:
                worker.is_prepared = True  # nor anything for ``on_restart`` to make again
            self._number += 1
            problem = self._join(workers)
        if problem:
            self._give_up(problem)

    def break_up(self, workers: Workers) -> None:
        """Make all ranks leave the group, because one of them cannot go on with it."""
        if self._is_wanted:
            self._is_joined = False
            # A thread on each rank watches this word, since the main thread may be waiting in the driver for a rank
            # that is dead.
            workers.processes.down[:, Down.BROKEN] = self._number

    @staticmethod
    def _turn_peers_off(workers: Workers) -> bool:
        """Have new workers copy between GPUs through the host. Return whether that makes a difference."""
        environments = workers.processes.placement.assignment.environments
        is_on = any(environment.get(_NO_PEERS) != "1" for environment in environments)
        for environment in environments:
            environment[_NO_PEERS] = "1"
        return is_on

    def _join(self, workers: Workers) -> str:
        """Have the ranks join a new group. Return why it is not to be used, or an empty string."""
        self._num_restarts = workers.counters["restarts"]
        answer, problem = self._order(workers, [0], None)
        if not answer:
            if problem:  # there is no NCCL to try again
                self._give_up(problem)
            return ""
        answer, problem = self._order(workers, range(workers.world_size), answer["unique_id"])
        if answer:
            self.library, self.problem, self._is_joined = answer["library"], "", True
        return problem

    def _order(self, workers: Workers, ranks: range | list[int], unique_id: bytes | None) -> tuple[dict[str, Any], str]:
        """Send the order. Return the lowest rank's answer, or nothing and why a rank could not follow the order."""
        contents = dict.fromkeys(ranks, JoinOrder(self._number, unique_id))
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        try:
            replies = workers.ask(Kind.GROUP, list(ranks), 0, contents, [], deadline, "join NCCL", "the start of NCCL")
        except CallTimeout:
            self._give_up(f"its start took more than {JOIN_TIMEOUT_S:g} s")
            raise
        failed = [reply for reply in replies.values() if reply.status != Status.DONE]
        if failed:
            self.break_up(workers)
            # Ranks that failed only because another one did say less.
            cause = min(failed, key=lambda reply: bool(reply.flags & IS_COLLATERAL))
            failure = pickle.loads(cause.body) if cause.body else None
            if failure is None:  # the next operation tries again
                self.problem = "the start was interrupted"
            return {}, "" if failure is None else failure.message
        return dict(pickle.loads(replies[ranks[0]].body)), ""

    def _give_up(self, problem: str) -> None:
        self._is_wanted, self.problem = False, problem
        logger.warning("NCCL is not used, large outputs go through host memory: %s", problem)

    def is_usable(self, workers: Workers) -> bool:
        """Whether all ranks are in the group, and no rank has since given it up or been replaced."""
        return (
            self._is_joined
            and self._num_restarts == workers.counters["restarts"]
            and not (workers.processes.up[:, Up.BROKEN] >= self._number).any()
        )

    def announce(self, workers: Workers, lane: Lane, num_ranks: int) -> bool:
        """Return whether a call in ``lane`` reduces its large outputs by NCCL. It does if all ranks run it.

        The workers read this before the call, which is sent afterwards.
        """
        is_in_use = num_ranks == workers.world_size and self.is_usable(workers)
        if self._number:  # also after the group was given up, since the number of an earlier call must not stay
            lane.down[:, Down.GROUP] = self._number if is_in_use else 0
        return is_in_use
