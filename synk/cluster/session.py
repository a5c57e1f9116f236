"""The session of a runtime over nodes: what the engine does otherwise because ranks share no memory with the program.

Orders, replies, plans, things, captures, recovery are those of one machine: to the engine a rank of a node is a rank.
Memory is where nodes differ, and here is all of it. Before a call is rung, each node gets what its ranks will read: the
rows of its ranks, whole arrays, objects, the words of the lane, and the variables that have changed. What ranks write
comes with their replies. Large outputs are reduced here, by the steps that ranks of one machine take: so the bits are
those of one machine. For ``synk.comm`` ranks are joined by wires before the first call, and again after any failure,
because a message may have been left half sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from synk._engine.engine import Call
from synk._engine.lanes import Joint, Lane
from synk._engine.processes import Worker
from synk._engine.session import Session
from synk._engine.things import Once, Thing
from synk._engine.variables import Variable
from synk._engine.workers import Owed, ended_with
from synk._rank.failpoints import nothing
from synk._rank.nodes import Wiring
from synk._rank.outputs import RankReduction
from synk._wire import orders as wire
from synk._wire.messages import COMMON_B
from synk._wire.orders import Down
from synk._wire.variables import leaf_offsets
from synk.cluster.nodes import Node, NodePlacement, NodeProcesses, RankOfNode
from synk.errors import UnsupportedError, WorkerDied

ALONE_S = 0.2
"""How long ranks may go on when another one has failed."""


class NodeJoint(Joint):
    """The memory in which the functions of one lane communicate: each node has one of its own."""

    is_arena = True

    def abort(self) -> None:
        """Have ranks that wait for others give up."""
        self._say("abort")

    def reset(self) -> None:
        """Let ranks communicate again."""
        self._say("reset")

    def _say(self, what: str) -> None:
        for node in self._engine.processes.nodes:
            node.say(what, node.share(self.segment))
            node.flush()


class Wires:
    """The wires between the ranks of all nodes.

    Attributes
    ----------
    number : int
        Of the group that calls may use; 0 if there is none.
    library, problem : str
        For reports.
    """

    name = "synk.comm between nodes"

    def __init__(self, num_nodes: int) -> None:
        self._last = self.number = 0
        self.is_wanted = num_nodes > 1
        self.library = self.problem = ""

    def join(self, session: NodeSession, deadline: float | None) -> None:
        """Join the ranks: they say where they listen, then each connects to all others."""
        self._last += 1
        ranks = range(session.world_size)
        answers = session.ask(self._told(session, {}), "join the nodes", "join", deadline)
        self.problem = next((each["problem"] for each in answers.values() if "problem" in each), "")
        if self.problem:
            self.is_wanted = False
            return
        self.library = answers[0]["library"]
        table = {rank: answers[rank]["place"] for rank in ranks}
        session.ask(self._told(session, table), "join the nodes", "join", deadline)
        self.number = self._last

    def _told(self, session: NodeSession, table: dict[int, Any]) -> dict[int, Thing | None]:
        return {rank: Once(session, "wires", Wiring(self._last, table)) for rank in range(session.world_size)}


class NodeSession(Session):
    """The session of a runtime over nodes."""

    has_shared_memory = False
    joint_type: Any = NodeJoint
    processes_type: Any = NodeProcesses
    processes: NodeProcesses

    def __init__(self, placement: NodePlacement, **options: Any) -> None:
        self.wires = Wires(len(placement.topology.counts))
        super().__init__(placement, process_type=RankOfNode, **options)
        self.group = self.wires  # type: ignore[assignment]
        self.processes.counters = self.counters

    def check_here(self, verb: str, instead: str) -> None:
        raise UnsupportedError(
            f"cannot {verb} over nodes: got a runtime with cluster=, expected one without. {instead}"
        )

    def enter_call(self, verb: str, deadline: float | None) -> None:
        super().enter_call(verb, deadline)
        self._join(deadline)

    def next_lane(self, verb: str, deadline: float | None) -> Lane:
        lane = super().next_lane(verb, deadline)
        self._join(deadline)  # a call that had the lane may have failed, and the wires with it
        return lane

    def _join(self, deadline: float | None) -> None:
        """Join the ranks, unless they are joined."""
        if self.wires.is_wanted and not self.wires.number:
            self.settle_all()
            self.wires.join(self, deadline)

    # -- what calls read ----------------------------------------------------------------------------------------------

    def send(self, owed: Owed, ranks: Iterable[int], *order: Any) -> None:
        *_, things, _ = order
        variables = {each.number: each for thing in things for each in _variables(thing)}
        for node in self.processes.nodes:
            own = [rank for rank in ranks if rank in node.ranks]
            if own and isinstance(owed, Call):
                self._carry(node, owed, own)
            for variable in variables.values() if own else ():
                self._carry_variable(node, variable)
        super().send(owed, ranks, *order)
        self.processes.flush()

    def _carry(self, node: Node, call: Call, ranks: Sequence[int]) -> None:
        """Bring the words of a call to a node, and the arguments of its ranks."""
        lane, bounds = call.lane, call.division.bounds
        lane.down[0, Down.ALL_GROUP] = self.wires.number
        node.say("words", lane.index, lane.down.copy())
        self._carry_arguments(node, call, bounds[ranks[0]][0], bounds[ranks[-1]][1])

    def _carry_arguments(self, node: Node, call: Call, low: int, high: int) -> None:
        plan = call.plan
        if plan.staging is None:
            return
        ranks = node.ranks
        for copy in plan.copies:
            at, base = plan.place_of(copy.leaf), copy.base
            first, stop = {"rows": (low, high), "table": (ranks.start, ranks.stop)}.get(copy.kind, (0, 0))
            if copy.kind != "whole":
                at += first * base.strides[0]
                base = base[first:stop]
            node.write(plan.staging, at, _bytes_of(base))
        for at, place in plan.other_places(low, high):
            node.write(plan.staging, at, _bytes_of(place))

    def _carry_variable(self, node: Node, variable: Variable) -> None:
        same = node.same.setdefault(variable.number, set())
        for rank in node.ranks:
            which = int(variable.fronts[rank])
            key = 0 if which <= COMMON_B else rank, which
            if key in same:
                continue
            same.add(key)
            place = variable.places[key]
            if not node.has(place.segment):  # the rank has made it, and would go on reading that
                self.retell(variable.number, [rank])
            nbytes = leaf_offsets(variable.dtypes, variable.value_shapes[rank])[1]
            node.write(place.segment, place.at, place.segment.buffer[place.at : place.at + nbytes])
        node.write(variable.memory, 0, variable.memory.buffer[: variable.fronts.strides[0] * self.world_size])

    def note_written(self, number: int, key: tuple[int, int]) -> None:
        for node in self.processes.nodes:
            node.same.get(number, set()).discard(key)

    def moves(self, assigned: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
        found = super().moves(assigned, ranks)
        for variable, rank, which, _ in found:
            if rank in ranks:  # its node has the value, which came from there
                for node in self.processes.nodes:
                    if rank in node.ranks:
                        node.same.setdefault(variable.number, set()).add((rank, which))
        return found

    # -- what they write ----------------------------------------------------------------------------------------------

    def reduce(self, shares: dict[int, Thing], call: Call) -> None:
        for share in shares.values():
            held = {each.id: each for each in share.needs}  # type: ignore[union-attr]
            rank = SimpleNamespace(held=held, failpoint=nothing)
            RankReduction(rank, share.payload).answer(rank, 0, 0, ())  # type: ignore[attr-defined]

    # -- trouble ------------------------------------------------------------------------------------------------------

    def after_recovery(self) -> None:
        self.wires.number = 0
        super().after_recovery()

    def raise_failures(self, owed: Owed) -> None:
        self.wires.number = 0
        super().raise_failures(owed)

    def start_again(self, workers: Sequence[Worker]) -> None:
        self.wires.number = 0
        if len(workers) == self.world_size:  # nodes may go to other machines, too
            self.processes.end_nodes()
        super().start_again(workers)

    def needed(self, owed: Owed) -> Iterable[int]:
        """Return all ranks of a call: one that has answered may have taken its last words to other nodes along."""
        return owed.ranks

    def _file(self, worker: Worker) -> bool:
        """File a reply. When a rank has failed, the others get a little time, from when the calls before have ended."""
        is_filed = super()._file(worker)
        owed = next((each for each in self.flight.values() if each.pending), None)
        if owed is not None and _has_failed(owed):
            limit = time.monotonic() + ALONE_S
            owed.deadline = limit if owed.deadline is None else min(owed.deadline, limit)
        return is_filed

    def _late(self, owed: Owed, urgent: Owed) -> NoReturn:
        if _has_failed(urgent):
            try:
                self.raise_failures(urgent)
            except Exception as error:
                if urgent is owed:
                    self.is_sure = True  # all that was heard is filed
                    raise
                urgent.end(error)
                raise ended_with(owed.what, error) from error
        super()._late(owed, urgent)

    def died(self, ranks: Sequence[int], owed: Owed) -> WorkerDied:
        error = super().died(ranks, owed)
        nodes = [node for node in self.processes.nodes if node.is_dead and any(rank in node.ranks for rank in ranks)]
        if nodes:
            ended = ", ".join(
                f"node {node.index} of {len(self.processes.nodes)} (pid {node.process.pid}) ended with {node.exit_text}"
                for node in nodes
            )
            error.args = (f"{ended}. So {error}",)
            error.nodes = tuple(node.index for node in nodes)
            error.pids = tuple(node.process.pid for node in nodes)
            error.exits = tuple(node.exit_text for node in nodes)
        return error

    def say_goodbye(self) -> None:
        super().say_goodbye()
        if not self.processes.is_closed:
            self.processes.dismiss()


def _has_failed(owed: Owed) -> bool:
    return any(status > wire.TOLD for status, _, _ in owed.replies.values())


def _variables(thing: Any) -> Iterator[Variable]:
    """Return the variables among what a rank must know for a thing."""
    if isinstance(thing, Variable):
        yield thing
    for each in thing.needs if isinstance(thing, Thing) else ():
        yield from _variables(each)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.view(np.ndarray).reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
