"""The head of a runtime over nodes: a session whose processes are agents, and which divides rows among all ranks.

Binding arguments, what functions capture, submitted calls, deaths, time limits and interrupts are those of any session.
Only two steps of a call differ: its rows travel to the nodes in orders, and the outputs of all ranks come in replies.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from synk._master.calls.arguments import pickle_nests, transfers_in
from synk._master.calls.callee import Callee
from synk._master.calls.launched import Launched
from synk._master.calls.plans import CachedPlan, Call
from synk._master.calls.replies import unpickled
from synk._master.processes.output import warn_at_users_line
from synk._master.session import Session
from synk._master.state.in_flight import SubmittedCalls
from synk._master.state.lanes import Lane
from synk._master.workers.failures import rebuild
from synk._master.workers.recovery import GRACE_S
from synk._master.workers.requests import Request
from synk._pure.cores import num_cores
from synk._wire.messages import Plan, Status
from synk._wire.messages import Reply as WorkerReply
from synk._wire.program import is_frozen
from synk.backends._assignment import DeviceAssignment
from synk.cluster.channel import unpacked
from synk.cluster.here import NodePlacement, agents
from synk.cluster.orders import CallOrder, FunctionNote, NodeReply, Part, without_code
from synk.cluster.outputs import GatheredOutputs
from synk.cluster.split import Layout, counts_of, own_bounds, rows_between
from synk.errors import CallCancelled, ClosedError, UnsupportedError

AGENT_GRACE_S = 2 * GRACE_S + 1
"""How long an agent may take to answer an interrupt: it gives its workers ``GRACE_S``."""

FELLOWS_S = 0.2
"""How long the other nodes may take to end by themselves when a call has failed on one, before they are interrupted."""


class NodesCall(Launched):
    """A call in flight on several nodes, whose replies are those of nodes."""

    def __init__(self, nodes: Sequence[int], session: Session, *launched: Any) -> None:
        super().__init__(*launched)
        self.nodes = tuple(nodes)
        self.pending = set(nodes)
        self.total_ranks, self.recovery = session.total_ranks, session.workers.recovery
        self.failed: dict[int, NodeReply] = {}

    def take(self, rank: int, reply: WorkerReply) -> None:
        """Note the reply of a node. If the call has failed there, the others get little time to end by themselves."""
        super().take(rank, reply)
        if reply.status == Status.ERROR and not self.failed:
            soon = time.monotonic() + FELLOWS_S
            self.deadline = soon if self.deadline is None else min(self.deadline, soon)
        if reply.status == Status.ERROR:
            self.failed[rank] = unpacked(reply.body)

    def late(self, ranks: str) -> Exception:
        return self.error_of_nodes() if self.failed else super().late(ranks)

    def error_of_nodes(self) -> Exception:
        """Return what a call raises that has failed on nodes: a death first, else the error of the lowest rank."""
        for _, reply in sorted(self.failed.items()):
            tell_warnings(reply)
            if reply.error:
                error, error.__cause__ = pickle.loads(reply.error)
                if isinstance(error, ClosedError):  # the workers of a node died too often
                    self.recovery.fail(error)
                return error
        failures = [failure for reply in self.failed.values() for failure in reply.failures]
        return rebuild(failures, self.total_ranks, self.function.name)


class Nodes:
    """Sends calls to the nodes of a session, and takes in what they answer.

    Parameters
    ----------
    session : Session
    layout : Layout
    """

    def __init__(self, session: Session, layout: Layout) -> None:
        self._session = session
        self.layout = layout

    def check(self, function: Callee, call: Call) -> None:
        """Raise UnsupportedError for a call that nodes cannot run, so far."""
        if call.options.is_trial:
            self._session.check_here(
                f"run {function.name!r} on trial", "Verify the function there, with as many workers."
            )

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
        """Return a bound call as one that is about to be sent."""
        plan = Plan(next(self._session.plan_ids), function.id, ())
        cached = CachedPlan(plan, lane, [], [], [], None, [], (), transfers_in(call.arguments, call.objects))
        nodes = sorted({self.layout.node_of(rank) for rank in call.ranks})
        return NodesCall(
            nodes, self._session, function, call, cached, (), deadline, started_ns, pickled_nbytes, log_state
        )

    def orders(self, launched: NodesCall) -> dict[int, CallOrder]:
        """Return the order of each node that runs a call."""
        function, call = launched.function, launched.call
        note = FunctionNote(
            function.id, function.plans.version, function.name, without_code(function.ops), function.block_rows
        )
        nests = pickle_nests(call.arguments, function.name)
        objects = None
        if call.objects is not None:
            objects = call.objects[0], [pickle.PickleBuffer(view) for view in call.objects[1]]
        weights = dict(zip(call.ranks, call.rows))
        found = {}
        for node in launched.nodes:
            ranks = self.layout.ranks_of(node)
            low, high, bounds = own_bounds(call.bounds, ranks)
            mine = [rank for rank in ranks if rank in weights]
            found[node] = CallOrder(
                note,
                _parts(call, low, high),
                nests,
                objects,
                call.selection is not None,
                bounds,
                [rank - ranks[0] for rank in mine],
                [weights[rank] for rank in mine],
                call.options.num_slices,
                call.options.output_subset,
                call.options.num_repeats,
                len(call.ranks),
                sum(call.rows),
            )
        return found

    def collecting(self, launched: NodesCall) -> Generator[Request, dict[int, WorkerReply], Any]:
        """Turn the replies of the nodes into the result; see ``synk._master.calls.replies.collecting``."""
        session, call, function = self._session, launched.call, launched.function
        replies = yield launched
        if launched.failed:
            raise launched.error_of_nodes()
        if any(reply.status == Status.INTERRUPTED for reply in replies.values()):
            raise CallCancelled(f"the call of {function.name!r} was ended by an interrupt. Call it again.")
        answers: list[NodeReply] = [unpacked(replies[node].body) for node in launched.nodes]
        for answer in answers:
            tell_warnings(answer)
        outputs = GatheredOutputs(
            function.name,
            function.ops,
            call.options.output_subset,
            call.ranks,
            [layout for answer in answers for layout in answer.layouts],
            [arrays for answer in answers for arrays in answer.arrays],
            session.world_size,
        )
        packed = [parts for answer in answers for parts in answer.packed]
        objects = [unpickled(parts, function.name, rank) for rank, parts in zip(call.ranks, packed)]
        result = outputs.build(call.rows, objects, None, None)
        session.workers.requests.pop(launched.sequence, None)
        launched.assembly = outputs
        ended_ns = time.monotonic_ns()
        words = dict(zip(call.ranks, (words for answer in answers for words in answer.up)))
        wall_ns = ended_ns - launched.started_ns
        function.record.add(launched.cached.transfers, call.ranks, call.rows, words, wall_ns)
        for follow in session.followers:
            follow(session, launched, result, ended_ns, ended_ns)
        return result


def _parts(call: Call, low: int, high: int) -> list[Part]:
    """Return the arguments of a call as a node gets them: of scattered arrays rows ``low`` to ``high``."""
    found = []
    for argument in call.arguments:
        array = argument.array if argument.contents is None else argument.contents.array
        if array is not None and argument.kind == "rows":
            assert call.selection is not None
            array = rows_between(array, call.selection, low, high)
        if array is not None:
            array = np.asarray(array)
        kind, label, keyword = argument.kind, argument.label, argument.keyword
        found.append(Part(label, keyword, kind, array, argument.tensor_dtype, argument.is_tensor))
    return found


def tell_warnings(reply: NodeReply) -> None:
    """Warn of what a node's session has warned of."""
    for text, category in reply.warnings:
        warn_at_users_line(text, category)


class ClusterSession(Session):
    """The session of a runtime over nodes.

    Parameters
    ----------
    layout : Layout
    timeout, seed, max_restarts, make_queue
        As for :class:`Session`.
    """

    nodes: Nodes

    def __init__(
        self,
        layout: Layout,
        *,
        timeout: float | None,
        seed: int,
        max_restarts: int,
        make_queue: Callable[[Session], SubmittedCalls],
    ) -> None:
        assignment = DeviceAssignment(tuple(map(layout.described, range(len(layout.counts)))))
        super().__init__(
            NodePlacement("numpy", assignment, layout=layout),
            timeout=timeout,
            seed=seed,
            max_restarts=max_restarts,
            on_restart=None,
            transfer_guard="allow",
            process_type=agents(layout, max_restarts, seed),
            make_queue=make_queue,
        )
        self.nodes = Nodes(self, layout)
        self.world_size = layout.total_ranks
        self.devices = tuple(
            f"node{node}:cpu:{position}" for node, count in enumerate(layout.counts) for position in range(count)
        )
        self.workers.recovery.grace_s = AGENT_GRACE_S
        self.workers.sources["lane"] = lambda rank, number: None  # agents share no memory with the head


def check_cluster(cluster: Any, nodes: Any) -> int:
    """Return the number of nodes to start.

    Raises
    ------
    ValueError
        If there is no such cluster.
    """
    if cluster != "here":
        raise ValueError(
            f"cannot fork: got cluster={cluster!r}, expected None or 'here': the nodes are processes of this machine. "
            "Clusters of several machines are not built yet."
        )
    if isinstance(nodes, bool) or not isinstance(nodes, (int, np.integer)) or nodes < 1:
        raise ValueError(f"cannot fork: got nodes={nodes!r}, expected how many nodes to start: an integer above 0.")
    return int(nodes)


def open_session(
    num_workers: int | Sequence[int] | None,
    cluster: Any,
    nodes: Any,
    *,
    timeout: float | None,
    seed: int,
    max_restarts: int,
    make_queue: Callable[[Session], SubmittedCalls],
) -> ClusterSession:
    """Start the nodes of a runtime, with one worker for each core where ``num_workers`` does not say how many.

    Raises
    ------
    ValueError, TypeError
        If an argument makes no sense.
    StartupError
        If an agent cannot be started.
    """
    num_nodes = check_cluster(cluster, nodes)
    if is_frozen():
        raise UnsupportedError(
            "cannot fork with cluster='here': got a frozen program, expected one that the interpreter runs, for a copy "
            "of a frozen one becomes a worker and no agent. Fork without cluster=."
        )
    counts = counts_of(max(num_cores() // num_nodes, 1) if num_workers is None else num_workers, num_nodes)
    return ClusterSession(Layout(counts), timeout=timeout, seed=seed, max_restarts=max_restarts, make_queue=make_queue)


def refuse(**options: Any) -> None:
    """Raise for an option of ``fork`` that has no meaning over nodes, so far."""
    for name, (value, default) in options.items():
        if value != default:
            raise UnsupportedError(
                f"cannot fork with cluster='here': got {name}={value!r}, expected {default!r}, for it does not work "
                "over nodes yet. Leave it out, or fork without cluster=."
            )
