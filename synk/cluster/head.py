"""The head of a runtime over nodes: a session whose processes are agents, and which divides rows among all ranks.

Most of a call is the same as in any session: binding, captured objects, submitted calls, deaths, time limits,
interrupts. Two steps differ: the rows travel to the nodes in orders, and the outputs of all ranks come back in replies.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from synk._master.calls.arguments import HELD, Argument, pickle_nests, transfers_in
from synk._master.calls.assembly import Assembly
from synk._master.calls.callee import Callee
from synk._master.calls.launched import Launched, Steps
from synk._master.calls.plans import CachedPlan, Call
from synk._master.calls.replies import conclude
from synk._master.processes.processes import Processes
from synk._master.processes.reports import stacks, stacks_in
from synk._master.session import Session
from synk._master.state.in_flight import SubmittedCalls
from synk._master.state.lanes import Lane
from synk._master.workers.failures import rebuild
from synk._master.workers.recovery import GRACE_S
from synk._wire.combining import loaded_objects
from synk._wire.memory import Segment
from synk._wire.messages import Kind, Layout, Plan, Status
from synk._wire.messages import Reply as WorkerReply
from synk.backends._assignment import DeviceAssignment
from synk.cluster.agent_process import AgentProcess, NodePlacement
from synk.cluster.channel import unpacked
from synk.cluster.orders import CallOrder, FunctionNote, NodeReply, VariableNote, without_code
from synk.cluster.ranks import NodeRanks, error_of, show_warnings
from synk.cluster.split import Topology, own_bounds, own_rows
from synk.cluster.wire_group import WireGroup
from synk.errors import CallCancelled

AGENT_GRACE_S = 2 * GRACE_S + 1
"""How long an agent may take to answer an interrupt, since it gives its own workers ``GRACE_S``."""

FELLOWS_S = 0.2
"""When a call has failed on one node: how long the others may take to end by themselves before they are interrupted."""


class NodesCall(Launched):
    """A call in flight on several nodes. Each of its replies comes from a node."""

    def __init__(self, nodes: Sequence[int], session: Session, *launched: Any) -> None:
        super().__init__(*launched)
        self.nodes = tuple(nodes)
        self.pending = set(nodes)
        self.total_ranks, self.recovery = session.total_ranks, session.workers.recovery
        self.failed: dict[int, NodeReply] = {}
        self.orders: dict[int, CallOrder] = {}  # until they are sent

    def take(self, rank: int, reply: WorkerReply) -> None:
        """Note the reply of a node. If the call has failed there, give the other nodes little time to end."""
        super().take(rank, reply)
        # Nodes that have not ended by this time count as late, and are interrupted. ``late`` then raises the failure
        # that came, and not the time limit.
        if reply.status == Status.ERROR and not self.failed:
            soon = time.monotonic() + FELLOWS_S
            self.deadline = soon if self.deadline is None else min(self.deadline, soon)
        if reply.status == Status.ERROR:
            self.failed[rank] = unpacked(reply.body)

    def late(self, ranks: str) -> Exception:
        return self.error_of_nodes() if self.failed else super().late(ranks)

    def error_of_nodes(self) -> Exception:
        """Return the error of a call that failed on nodes: a death if there was one, else that of the lowest rank."""
        for _, reply in sorted(self.failed.items()):
            show_warnings(reply)
            if reply.error:
                return error_of(reply, self.recovery)
        failures = [failure for reply in self.failed.values() for failure in reply.failures]
        return rebuild(failures, self.total_ranks, self.function.name)


class GatheredOutputs(Assembly):
    """The assembly of one call's outputs in the head. They came in messages, so the head combines all of them itself.

    Small outputs came as one value for each rank, so the result has the bits that it would have on one machine with as
    many ranks. Large reductions came as one partial result from each node.

    Parameters
    ----------
    name, outputs, subset, voters, layouts, world_size
        As for :class:`Assembly`.
    arrays : list of lists of ndarray or None
        Each voter's arrays; see ``Assembly.outputs``.
    """

    def __init__(
        self,
        name: str,
        outputs: Any,
        subset: tuple[Any, ...] | None,
        voters: list[int],
        layouts: list[Layout],
        arrays: Sequence[list[np.ndarray | None]],
        world_size: int,
    ) -> None:
        self._arrays = arrays
        super().__init__(name, outputs, subset, voters, layouts, None, 0, world_size)

    def _own_views(self, voter: int, slots: Segment | None, slot_nbytes: int) -> list[np.ndarray | None]:
        return self._arrays[voter]

    def _place(self, leaf: int) -> None:
        """Do nothing: the outputs lie in this process."""


class Nodes:
    """Sends calls to the nodes of a session, and turns their replies into results.

    Parameters
    ----------
    session : Session
    topology : Topology
    ranks : NodeRanks
    group : WireGroup
    """

    def __init__(self, session: Session, topology: Topology, ranks: NodeRanks, group: WireGroup) -> None:
        self._session, self._ranks, self._group = session, ranks, group
        self.topology = topology

    def stacks(self, processes: Processes) -> dict[int, str]:
        """Return the Python stacks of the ranks of all nodes."""
        found: dict[int, str] = {}
        for text in stacks(processes).values():
            found |= stacks_in(text)
        return found

    def variable_note(self, node: int, variable_id: int) -> tuple[VariableNote, list[Segment]] | None:
        """Return the log's entry of a variable for a node; None if the variable was dropped."""
        variable = self._session.variables.get(variable_id)
        if variable is None:
            return None
        ranks = self.topology.ranks_of(node)
        # Replicas that are known to be equal lie in the head's memory once, and travel once.
        memory = {id(variable.buffers[rank][variable.front[rank]]) for rank in ranks}
        values = [variable.leaves(rank) for rank in (ranks if len(memory) > 1 else ranks[:1])]
        return VariableNote(variable.name, variable.is_sharded, variable.skeleton(), values), []

    def launched(
        self,
        function: Callee,
        call: Call,
        lane: Lane,
        deadline: float | None,
        started_ns: int,
        pickled_nbytes: int,
        log_state: int,
    ) -> NodesCall:
        """Return the request for a bound call. It is not sent yet."""
        plan = Plan(next(self._session.plan_ids), function.id, ())
        cached = CachedPlan(plan, lane, [], [], [], None, [], (), transfers_in(call.arguments, call.objects))
        nodes = sorted({self.topology.node_of(rank) for rank in call.ranks})
        return NodesCall(
            nodes, self._session, function, call, cached, (), deadline, started_ns, pickled_nbytes, log_state
        )

    def stage(self, launched: NodesCall) -> None:
        """Make the order of each node that runs a call, with the rows of the arguments as they are now.

        The rows are views where that is possible. ``send`` copies them, so the caller may change its arrays after it.
        """
        function, call = launched.function, launched.call
        launched.number = next(self._session.numbers)  # the nodes do not count: all ranks of a call must use one number
        note = FunctionNote(function.id, function.plans.version, function.name, without_code(function.ops))
        nests = pickle_nests(call.arguments, function.name)
        objects = call.objects[0], [pickle.PickleBuffer(view) for view in call.objects[1]]
        weights = dict(zip(call.ranks, call.rows))
        # A worker that is replaced meanwhile loses only resident objects: the agent has functions and variables.
        known = self._ranks.num_restarts if self._session.residents.has_any else {}
        # The head has bound the call: the node's session divides no rows, and any number of its ranks may run it.
        options = replace(call.options, batch=None, timeout=None, num_ranks=None)
        for node in launched.nodes:
            ranks = self.topology.ranks_of(node)
            low, high, bounds = own_bounds(call.bounds, ranks)
            mine = [rank for rank in ranks if rank in weights]
            launched.orders[node] = CallOrder(
                note,
                launched.number,
                known.get(node),
                _arguments(call, low, high, ranks),
                nests,
                objects,
                call.selection is not None,
                bounds,
                [rank - ranks[0] for rank in mine],
                [weights[rank] for rank in mine],
                options,
                tuple(call.ranks),
                sum(call.rows),
                self._group.number,
                None if call.owned is None else own_rows(call.owned, ranks),
            )

    def send(self, launched: NodesCall) -> None:
        """Send a staged call to the nodes that run it."""
        launched.is_joint = self._group.number > 0
        self._session.counters["calls"] += 1
        orders, lane = launched.orders, launched.cached.lane.index
        self._session.workers.send(
            Kind.CALL, list(orders), 0, orders, [], launched.deadline, "call", launched.what, lane, launched
        )
        launched.orders = {}  # they hold views of the user's arrays

    def collecting(self, launched: NodesCall) -> Steps[Any]:
        """Turn the replies of the nodes into the result; see ``synk._master.calls.replies.collecting``."""
        session, call, function = self._session, launched.call, launched.function
        replies = yield launched
        # After a failure or an interrupt ranks may have been broken off at any line, and have left half of a message on
        # a wire. So the next call gets new wires. The nodes drop the assigned values, because no commit comes.
        if launched.failed:
            self._group.break_up(session.workers)
            raise launched.error_of_nodes()
        if any(reply.status == Status.INTERRUPTED for reply in replies.values()):
            self._group.break_up(session.workers)
            raise CallCancelled(f"the call of {function.name!r} was ended by an interrupt. Call it again.")
        answers: list[NodeReply] = [unpacked(replies[node].body) for node in launched.nodes]
        for node, answer in zip(launched.nodes, answers):
            show_warnings(answer)
            self._group.note_restarts(node, answer.num_restarts)
        layouts = [layout for answer in answers for layout in answer.layouts]
        outputs = launched.assembly = self._outputs(launched, layouts, answers)
        packed = [parts for answer in answers for parts in answer.packed]
        objects = [loaded_objects(parts, function.name, rank) for rank, parts in zip(call.ranks, packed)]
        words = dict(zip(call.ranks, (words for answer in answers for words in answer.up)))
        assigned = [values for answer in answers for values in answer.assigned]
        if outputs.has_assignments:
            self._take_in(launched, layouts, assigned)
        result = conclude(session, launched, objects, None, words)
        # ``conclude`` has committed the call in the head, by one store. The nodes hear of it with their next messages;
        # a node that dies before gets the committed values when it is started again.
        if outputs.has_assignments:
            session.workers.log.tell("commit")
        return result

    def _outputs(self, launched: NodesCall, layouts: list[Layout], answers: Sequence[NodeReply]) -> GatheredOutputs:
        """Return the assembly of the outputs of all ranks.

        Raises
        ------
        CollectiveMismatch, ValueError
            If the outputs do not fit together, or an average would need weights that the call does not have.
        """
        function, call = launched.function, launched.call
        outputs = GatheredOutputs(
            function.name,
            function.ops,
            call.options.output_subset,
            call.ranks,
            layouts,
            [arrays for answer in answers for arrays in answer.arrays],
            self._session.world_size,
        )
        if call.unequal and outputs.has_weights:
            raise ValueError(call.unequal)
        return outputs

    def _take_in(self, launched: NodesCall, layouts: list[Layout], assigned: list[list[list[np.ndarray]]]) -> None:
        """Copy the values that ranks assigned to variables to the back buffers. The commit brings them to the front."""
        session, call = self._session, launched.call
        for rank, layout, values in zip(call.ranks, layouts, assigned):
            for (variable_id, shapes), leaves in zip(layout.assigned, values):
                for target, source in zip(session.variables[variable_id].back(rank, shapes), leaves):
                    np.copyto(target, source)


def _arguments(call: Call, low: int, high: int, ranks: range) -> list[Argument]:
    """Return the arguments of a call for one node: rows ``low`` to ``high`` of each scattered array."""
    found = []
    for argument in call.arguments:
        array = argument.whole_array
        if array is not None and argument.kind == "table":
            array = array[ranks.start : ranks.stop]
        elif array is not None and argument.kind == "rows":
            assert call.selection is not None
            array = array[call.selection.between(low, high)]
        if array is not None:
            array = np.asarray(array)
        dtype = None if array is None else array.dtype
        number = argument.value.id if argument.kind in HELD else None
        found.append(
            replace(argument, array=array, dtype=dtype, data=None, contents=None, file=None, value=number, nest=None)
        )
    return found


class ClusterSession(Session):
    """The session of a runtime over nodes.

    Parameters
    ----------
    topology : Topology
    process_type : type
        The class that stands for an agent in the head.
    timeout, seed, max_restarts, on_restart, make_queue
        As for :class:`Session`.
    """

    nodes: Nodes
    ranks: NodeRanks

    def __init__(
        self,
        topology: Topology,
        process_type: type[AgentProcess],
        *,
        timeout: float | None,
        seed: int,
        max_restarts: int,
        on_restart: tuple[Any, dict[str, Any]] | None,
        make_queue: Callable[[Session], SubmittedCalls],
    ) -> None:
        self._topology = topology
        assignment = DeviceAssignment(tuple(map(topology.described, range(len(topology.counts)))))
        super().__init__(
            NodePlacement("numpy", assignment, topology=topology),
            timeout=timeout,
            seed=seed,
            max_restarts=max_restarts,
            on_restart=on_restart,
            process_type=process_type,
            make_queue=make_queue,
        )
        self.group = WireGroup(self.ranks, topology, self.residents.note_unsettled)
        self.nodes = Nodes(self, topology, self.ranks, self.group)
        self.world_size = topology.total_ranks
        self.devices = tuple(
            f"node{node}:cpu:{position}" for node, count in enumerate(topology.counts) for position in range(count)
        )
        self.workers.recovery.grace_s = AGENT_GRACE_S
        self.workers.sources["lane"] = lambda rank, number: None  # agents share no memory with the head
        self.workers.sources["commit"] = self.ranks.committed
        self.workers.sources["variable"] = self.nodes.variable_note

    def _make_ranks(self) -> NodeRanks:
        return NodeRanks(self.workers, self._topology)
