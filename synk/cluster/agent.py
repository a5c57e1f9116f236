"""The agent of a node: to the head it is a process like a worker, and it is the master of the node's own workers.

It has an ordinary session. The functions and objects that workers load come from the head, and the agent passes them on
unopened. A call comes with the rows of the node and then takes the path of every call. Its outputs go back as the ranks
published them.

A worker of the node may die at any time, and the session replaces it at the beginning of the next operation. The new
worker lacks the resident objects that a call may need. So an order says how many replacements the head knows of, and
the agent refuses it if there were more.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from synk._master.calls.arguments import HELD
from synk._master.calls.call import abandon, load, send
from synk._master.calls.launched import Launched
from synk._master.calls.plans import Call
from synk._master.calls.replies import carry_out, publishing, take_layouts
from synk._master.calls.staging import plan_call, stage, values_of
from synk._master.code.parcels import Parcel
from synk._master.flight.queue import Queue
from synk._master.processes.placement import Placement, place
from synk._master.processes.processes import ARMED
from synk._master.processes.worker_process import WorkerProcess
from synk._master.session import Session
from synk._pure.environment import merged
from synk._pure.shards import Selection
from synk._wire.control import Down
from synk._wire.logs import set_levels
from synk._wire.messages import Body, Kind, LoadOrder, ParcelOrder, Status, WireOrder
from synk._wire.residents import Adopt
from synk.cluster.channel import Parts, with_code
from synk.cluster.items import ItemsInFlight, pickled
from synk.cluster.orders import CallOrder, FunctionNote, NodeReply, RankOrders, RankReplies
from synk.cluster.relayed import NodeFunction, NodeVariables, Numbered, RelayedReader, RelayedSettings
from synk.errors import CallCancelled, CollectiveMismatch, WorkerDied

Reply = tuple[Status, Any]


class Agent:
    """Acts on the head's messages to one node.

    Parameters
    ----------
    setup : dict
        The content of the first message.
    is_interrupted : callable
        Whether the head wants the current message to end.
    """

    def __init__(self, setup: dict[str, Any], is_interrupted: Callable[[], bool]) -> None:
        self._is_interrupted = is_interrupted
        _, node, *starts = setup["seed"]  # ``starts`` has the number of this start, unless it is the first
        self.node = node
        self._own_path: list[str] | None = setup.get("own_path")  # None on the head's own machine
        self._host: str = setup.get("host", "")
        placement = place(setup["num_workers"], setup["backend"], None)
        first_rank = setup["first_worker"]
        ARMED.set(setup["failpoints"])
        self.session = Session(
            Placement(
                placement.backend,
                placement.assignment,
                first_rank=first_rank,
                ranks_elsewhere=setup["ranks_elsewhere"],
                generation=starts[0] if starts else 1,
                node=f"node{self.node}:",
            ),
            timeout=None,
            seed=setup["runtime_seed"],
            max_restarts=setup["max_restarts"],
            on_restart=None,
            process_type=WorkerProcess,
            make_queue=Queue,
        )
        if starts:  # the first workers of an agent that was started again are replacements of others
            self.session.functions.note_replacements()
        self.session.workers.settings = RelayedReader(self.session)  # type: ignore[assignment]
        self._functions: dict[int, NodeFunction] = {}
        self._items = ItemsInFlight(self.session)
        self._variables = NodeVariables(self.session)
        self._untold: list[tuple[str, type[Warning]]] = []  # warnings that the next reply will bring
        # The last message and the name of its function, if it was a call in which ranks of other nodes may still wait
        # for ranks of this one.
        self._joint: tuple[int, str] | None = None

    @property
    def description(self) -> str:
        pids = ", ".join(str(worker.process.pid) for worker in self.session.workers.by_rank)
        place = f" on {self._host}" if self._host else ""
        return f"{self.session.world_size} x {self.session.backend}{place}, pids of its workers {pids}"

    @property
    def runs_items(self) -> bool:
        return bool(self._items)

    def watched(self) -> list[int]:
        """Return the descriptors to watch between messages. When one is readable, call :meth:`answers`."""
        workers = self.session.workers
        if self._items:
            return workers.processes.poll_set.fds
        living = [worker.process for worker in workers.by_rank if self._joint and not worker.is_dead]
        return [fd for process in living for fd, kind in process.watched() if kind == "death"]

    def answers(self) -> Iterator[tuple[int, Reply]]:
        """Return the replies to messages whose items have ended, each with the number of its message.

        A call that ended well here gets another reply if a worker dies before the next message comes: its last words
        to ranks of other nodes may be lost.
        """
        for sequence, status, reply in self._items.answers() if self._items else ():
            yield sequence, (status, pickle.dumps(None) if reply is None else self._packed(reply))
        if self._joint is not None:
            workers = self.session.workers
            dead = workers.processes.wait(0).deaths
            if dead:
                (sequence, name), self._joint = self._joint, None
                workers.recovery.bury_idle(dead)
                error = workers.recovery.reports.died(dead, "call", repr(name), workers.began)
                yield sequence, (Status.ERROR, self._packed(NodeReply(error=pickled(error))))

    def end_items(self) -> None:
        """End the items that ranks run, because the head wants all ranks to be idle."""
        if self._items:
            self._items.end()

    def act(self, kind: int, body: Body | None, sequence: int) -> Reply | None:
        """Act on a message. Return the status and the body of the reply, or None if items run now.

        An error of the session becomes the reply, so it does not end the agent.
        """
        self._joint = None
        reply: NodeReply | RankReplies
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)  # of workers that ended while nothing ran
            try:
                content: Any = None if body is None else body.content
                if body is not None:
                    self._take_in(body)
                if kind == Kind.LOAD:
                    return self._load(content)
                if kind == Kind.CALL:
                    reply = self._call(content)
                    self._joint = (sequence, content.function.name) if content.group else None
                elif kind == Kind.ITEMS:
                    self._send_items(sequence, content)
                    return None
                elif isinstance(content, RankOrders):
                    reply = self._relay(Kind(kind), content)
                else:
                    return Status.DONE, None
            except CallCancelled:  # the head has asked for the interrupt, and does not read the answer
                return Status.INTERRUPTED, pickle.dumps(None)
            except Exception as error:
                if kind == Kind.LOAD:
                    return Status.ERROR, pickled(error)
                reply = (NodeReply if kind == Kind.CALL else RankReplies)(error=pickled(error))
            finally:
                self._untold += [(str(each.message), each.category) for each in caught]
        has_failed = reply.error or (isinstance(reply, NodeReply) and reply.failures)
        return Status.ERROR if has_failed else Status.DONE, self._packed(reply)

    def _packed(self, reply: NodeReply | RankReplies) -> Parts:
        """Pack a reply, with the warnings of the node's session since the last one."""
        warned, self._untold = self._untold, []
        return with_code(reply._replace(warnings=warned))

    def _take_in(self, body: Body) -> None:
        """Take in the entries of the head's log that came with a message: settings, variables, and what was dropped."""
        session = self.session
        # The last call may have assigned variables, and only this message says whether the head has committed it.
        committed = next((value for kind, _, value in body.news if kind == "commit"), None)
        self._variables.settle(committed)  # first, because the head may have set or dropped variables since then
        for number, unbound in body.dropped.get("parcel", {}).items():
            parcel = session.functions.book.parcels.pop(number, None)
            if parcel is not None:  # otherwise its load has failed here, and ``_load`` has dropped it
                session.functions.drop_parcel(parcel, unbound)
        for number in body.dropped.get("function", ()):
            function = self._functions.pop(number, None)
            if function is not None:
                function.plans.drop_all(session.workers.log)
            # The agent knows a function from its first call on, the workers from its load. So they drop it in any case.
            session.workers.log.drop("function", number)
        for number in body.dropped.get("resident", ()):
            session.workers.log.drop("resident", number)
        self._variables.forget(body.dropped.get("variable", ()))
        for kind, number, value in body.news:
            if kind == "settings":
                session.workers.log.settings = RelayedSettings(value)
                session.workers.log.tell("settings")
            elif kind == "variable":
                self._variables.take(number, value)

    def _load(self, order: LoadOrder) -> Reply:
        """Have the workers load parcels. The agent keeps the parcels for workers that start later.

        A worker that was replaced is left out here. It gets all parcels at once in the next call, when it is sure that
        it has the objects to which they may refer.
        """
        functions = self.session.functions
        sys.path[:] = self._search_path(order.sys_path)
        set_levels(order.levels)
        self._begin("load functions")
        functions.has_on_restart = order.prepare is not None
        ranks = [worker.rank for worker in self.session.workers.by_rank if worker.is_prepared]
        for each in order.parcels:
            functions.book.parcels[each.number] = _parcel(each)
        is_loaded = False
        try:
            failures, was_interrupted = functions.send_missing("functions", None, ranks)
            is_loaded = not (failures or was_interrupted)
        finally:
            # The head counts none of them as loaded on this node. Ranks that have loaded some are told to drop them.
            if not is_loaded:
                for each in order.parcels:
                    functions.drop_parcel(functions.book.parcels.pop(each.number), [])
        if failures:
            return Status.ERROR, pickle.dumps(failures[0], protocol=5)
        if was_interrupted:
            return Status.INTERRUPTED, pickle.dumps(None)
        return Status.DONE, None

    def _search_path(self, wanted: list[str]) -> list[str]:
        """Return the search path for the workers: the program's or, on another machine, one merged with its own."""
        return wanted if self._own_path is None else merged(wanted, self._own_path)

    def _begin(self, verb: str) -> None:
        self.session.begin(verb)
        # ``begin`` forgets interrupts that came before it. The head's word in the control block still tells of one that
        # is meant for this message.
        if self._is_interrupted():
            raise CallCancelled(f"cannot {verb}: it was interrupted.")

    def _check_restarts(self, expected: int | None) -> None:
        """Raise WorkerDied if a worker was replaced whose resident objects the head relies on."""
        if expected is not None and expected != self.session.counters["restarts"]:
            raise WorkerDied(
                f"a worker of node {self.node} ended while idle and was replaced. It gets what it lacks before the "
                "next call.",
                phase="idle",
            )

    def _own(self, content: Any) -> Any:
        """Return a message to a rank, with the search path or the address of this machine filled in."""
        if isinstance(content, Adopt):
            return content._replace(sys_path=self._search_path(content.sys_path))
        return content._replace(host=self._host) if isinstance(content, WireOrder) else content

    def _relay(self, kind: Kind, order: RankOrders) -> RankReplies:
        """Pass messages on to ranks, unopened, and return their replies."""
        session = self.session
        with session.entered(order.what):
            if not order.is_for_living:
                self._begin(order.what)
                self._check_restarts(order.num_restarts)
            # A rank that is dead gets no message and no reply: the head sees in the replies which ranks have answered.
            living = {each.rank for each in session.workers.by_rank if each.is_ready and not each.is_dead}
            contents = {rank: self._own(content) for rank, content in order.contents.items() if rank in living}
            replies = session.ranks.ask(kind, contents, None, order.phase, order.what) if contents else {}
        found = {rank: (int(reply.status), reply.body) for rank, reply in replies.items()}
        return RankReplies(found, session.counters["restarts"])

    def _send_items(self, sequence: int, order: RankOrders) -> None:
        """Pass items on to their rank. If no rank runs items, this begins an operation."""
        session, items = self.session, self._items
        with session.entered(order.what):
            # Only ``begin`` replaces dead workers, and only when nothing is in flight. So the items that still run are
            # waited for first; their answers stay in ``items`` until the loop sends them.
            if session.workers.processes.has_dead:
                items.settle()
            if not items.are_running:
                self._begin(order.what)
                self._check_restarts(order.num_restarts)
                session.functions.ensure_loaded(None)
            items.send(sequence, order)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, order: CallOrder) -> NodeReply:
        """Run a call on the ranks of this node."""
        session = self.session
        with session.entered("call"):
            self._begin("call")
            session.numbers = itertools.repeat(order.number)  # all nodes give the call the head's number
            function = self._function(order.function)
            function.check = functools.partial(self._check_restarts, order.num_restarts)
            call = _bound(order, self._variables)
            load(session, function, call.arguments, None, "call")  # type: ignore[arg-type]
            state = session.workers.log.state
            cached = plan_call(session, function, call, call.options, session.lanes.first)  # type: ignore[arg-type]
            values, began = values_of(call, cached), time.monotonic_ns()
            launched = Launched(function, call, cached, values, None, began, 0, state)  # type: ignore[arg-type]
            launched.is_joint = bool(order.group)
            # The ranks read these numbers when they begin the call, so they are written before ``send`` rings.
            session.lanes.first.first_down[Down.ALL_ROWS] = order.all_rows
            session.lanes.first.first_down[Down.ALL_GROUP] = order.group
            # A death or an interrupt ends the wait in here. The session settles the call before it raises, so the ranks
            # are idle or dead when the head gets the reply.
            try:
                stage(session, launched)
                send(session, launched)
                return self._collected(launched)
            except BaseException as error:
                abandon(session, launched, error)
                raise

    def _function(self, note: FunctionNote) -> NodeFunction:
        """Return the function of a call. A new version drops the plans of the old one, on the workers too."""
        known = self._functions.get(note.id)
        if known is None or known.version != note.version:
            if known is not None:
                known.plans.drop_all(self.session.workers.log)
            known = self._functions[note.id] = NodeFunction(note)
        return known

    def _collected(self, launched: Launched) -> NodeReply:
        """Wait for the ranks and return their outputs or failures."""
        session, call, cached, name = self.session, launched.call, launched.cached, launched.function.name
        replies = session.workers.wait(launched)
        failed = [reply for reply in replies.values() if reply.status in (Status.ERROR, Status.INTERRUPTED)]
        if failed:
            launched.function.plans.discard(cached, session.workers.log)
            records = [pickle.loads(reply.body) for reply in failed if reply.status == Status.ERROR]
            if not records:
                raise CallCancelled(f"{name!r} was interrupted.")
            return NodeReply(failures=records)
        packed = take_layouts(name, cached, call.ranks, replies)
        up = [session.lanes.first.up[rank].tolist() for rank in call.ranks]
        num_restarts = session.counters["restarts"]
        try:
            assembly, lease = carry_out(session, publishing(session, launched, replies))
        except CollectiveMismatch:  # the head sees the ranks of all nodes, and raises the error that names them
            layouts = [cached.layouts[rank] for rank in call.ranks]
            nothing: list[list[np.ndarray | None]] = [[None] * len(layout.leaves) for layout in layouts]
            return NodeReply(layouts, nothing, packed, up, num_restarts)
        # The arrays are views of the ranks' slots, or of the lease's buffer. The reply copies them before the next call
        # can write there.
        layouts, arrays = assembly.outputs(None if lease is None else lease.deliver())
        cached.is_agreed = True
        assigned = self._variables.assigned(launched, layouts)
        return NodeReply(layouts, arrays, assembly.pickles(packed), up, num_restarts, assigned)


def _parcel(order: ParcelOrder) -> Parcel:
    parcel = Parcel(order.number)
    parcel.data, parcel.is_optional = order.data, order.is_optional
    return parcel


def _bound(order: CallOrder, variables: NodeVariables) -> Call:
    """Return an order as a bound call: the rows of the node, divided among its ranks."""
    for argument in order.arguments:
        if argument.kind in HELD:
            number = argument.value
            argument.value = Numbered(number) if argument.kind == "resident" else variables[number]
    objects = order.objects[0], [memoryview(buffer) for buffer in order.objects[1]]
    selection = Selection(order.bounds[-1][1]) if order.has_rows else None
    return Call(
        order.arguments, selection, order.bounds, order.ranks, order.rows, objects, order.options,
        owned=order.owned,
        index_arrays=(None, None if order.owned is None else order.owned.local_indices),
        is_timed=False,
        nests=order.nests,
        all_ranks=order.all_ranks,
    )  # fmt: skip
