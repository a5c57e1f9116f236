"""Nodes and their ranks as the program's engine sees them: processes like those of one machine, behind one link a node.

What the engine does with a rank becomes an event for the agent of its node. Events wait until the engine waits, or has
rung all ranks of a call, and go as one message. The replies of ranks, and their ends, are what an agent tells.
In one file because a node and its ranks share one link.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from synk._engine.processes import Processes, Worker
from synk._engine.workers import GRACE_S
from synk._processes.placement import HASH_SEED, Placement, num_threads_set
from synk._processes.program import setup_message
from synk._processes.worker_process import WorkerProcess
from synk._pure.environment import num_cores
from synk._pure.interrupts import deferred
from synk._wire import orders as wire
from synk._wire.mapping import Descriptor, owned
from synk._wire.memory import Segment
from synk._wire.orders import Down, Up
from synk.cluster.post import Event, Post
from synk.cluster.split import Topology

_STACKS = re.compile(r"rank (\d+) (\d+)\n(.*)", re.DOTALL)


@dataclass(frozen=True)
class NodePlacement(Placement):
    """The placement of the ranks of all nodes.

    Attributes
    ----------
    topology : Topology
    process_type : type
        The class of an agent's process.
    options : dict
        What the first message to an agent says besides.
    """

    topology: Topology = field(kw_only=True)
    process_type: type[AgentProcess] = field(kw_only=True)
    options: dict[str, Any] = field(kw_only=True)

    @property
    def devices(self) -> tuple[str, ...]:
        nodes = [(node, rank) for node in range(len(self.topology.counts)) for rank in self.topology.ranks_of(node)]
        return tuple(f"node{node}:cpu:{rank - self.topology.ranks_of(node)[0]}" for node, rank in nodes)


class AgentProcess(WorkerProcess):
    """The agent of a node, as a child of the program. It inherits its ends of the pipes, so no socket listens.

    Like a rank it ends when the program ends, in whatever way. Its own ranks end with it, because each of them is tied
    to the agent's life as the agent is tied to the program's.
    """

    _module, _kind = "cluster.relay", "node"

    @property
    def _title(self) -> str:
        return f"node {self.rank}"

    @property
    def _shown_rank(self) -> int | None:
        return None


class TunnelProcess(AgentProcess):
    """The tunnel to the agent of a node on another machine; see ``synk.cluster.ray_tunnel``."""

    _module, _kind = "cluster.ray_tunnel", "tunnel"


class RankLink:
    """The connection to a rank, by way of its node's agent."""

    def __init__(self, node: Node, process: RankOfNode) -> None:
        self._node, self._process = node, process
        self.is_open = True
        self._body: Any = None
        self.replies: deque[tuple[bytes, Any, list[Segment]]] = deque()
        self._read: tuple[Any, list[Segment]] = None, []

    def send_body(self, number: int, content: Any, segments: Sequence[Segment] = ()) -> int:
        """Keep the body of a message for :meth:`write`."""
        with deferred():
            memory = [self._node.share(each) for each in segments]
            data, buffers = wire.dumped(content)
            # Ranks are often told the same: one object is pickled once in a message.
            data = self._node.bodies.setdefault(data, data)
            self._body = data, buffers, memory, _notes(content, iter(memory))
        return 0  # messages to nodes are counted as a whole

    def write(self, order: bytes) -> None:
        """Send an order."""
        body, self._body = (self._body, None) if wire.ORDER.unpack_from(order)[5] else (None, None)
        self._node.tell("order", self._process, order, body)

    def read(self, nbytes: int) -> bytes:
        """Return the next reply that is there."""
        if not self.replies:
            return b""
        reply, *self._read = self.replies.popleft()  # type: ignore[assignment]
        return reply

    def receive_body(self, number: int) -> tuple[Any, list[Descriptor]]:
        """Return the body of the reply that was read. Its memory is that of this program in which copies arrive."""
        (content, made), self._read = self._read, (None, [])
        return content, owned(map(os.dup, [segment.fd for segment in made]))

    def drain(self) -> None:
        """Drop the replies that are there."""
        self.replies.clear()

    def close(self) -> None:
        self.is_open = False


def _notes(content: Any, memory: Iterator[int]) -> list[Event]:
    """Return what an agent must know of the things that a rank is told: (kind, number, what)."""
    notes: list[Event] = []
    forgets, _, items, *_ = content
    notes += [("forget", number, None) for kind, number, _ in forgets if kind == "thing"]
    for kind, number, what in items:
        if kind == "memory":
            next(memory)
            continue
        payload, num_fds = what
        own = list(itertools.islice(memory, num_fds))
        if kind == "plan":
            notes.append((kind, number, payload.lane))
        elif kind == "variable":
            _, _, dtypes, _, _, _, places, _ = payload
            notes.append((kind, number, (dtypes, [(own[k], at) for k, at, _ in places], own[0])))
    return notes


class RankOfNode:
    """The process of a rank on a node."""

    is_inline: ClassVar[bool] = False

    def __init__(self, rank: int, node: Node) -> None:
        self.rank, self.node = rank, node
        self.pid = -1
        self.started = 0.0
        self.exit_text = ""
        self.number = -1
        self.link = RankLink(node, self)
        self._lines: list[str] = []

    def start(self, setup: dict[str, Any], environment: Any, control_fd: int, extra_fds: Any) -> None:
        self.started = time.monotonic()
        self.node.start(self, setup)

    def watched(self) -> list[tuple[int, str]]:
        return []

    def interrupt(self) -> None:
        word = int(self.node.processes.down[self.rank, Down.INTERRUPT])
        self.node.tell("interrupt", self, word)
        self.node.flush()

    def forward_output(self, fd: int) -> bool:
        return True

    def stderr_since(self, began: float) -> list[str]:
        return self._lines

    def stacks(self) -> str:
        return self.node.stacks(self.rank)

    def ended(self, text: str, lines: list[str]) -> None:
        """Note how it has ended."""
        self.exit_text, self._lines = text, lines
        self.node.living.pop(self.rank, None)

    @property
    def _is_living(self) -> bool:
        return self.node.living.get(self.rank) is self

    def kill(self) -> None:
        if self._is_living:
            self.node.tell("kill", self)
            self.node.flush()

    def reap(self) -> str:
        """Wait for its end. An agent that does not tell of it is stuck, and ends with all its ranks."""
        end = time.monotonic() + GRACE_S
        while self._is_living and not self.node.is_dead:
            left = end - time.monotonic()
            self.node.pump(max(left, 0.0))
            if left <= 0 and self._is_living:
                self.node.kill()
        self.close()
        return self.exit_text

    def disown(self) -> None:
        self.node.process.disown()

    def close(self) -> None:
        self.link.close()


class Node:
    """One node: its agent, what it was told, and what waits to be told.

    Attributes
    ----------
    ranks : range
    process : AgentProcess
    living : dict of int to RankOfNode
        The ranks that were started and have not ended.
    memory : dict of int to Segment
        By number, the twins here of what ranks have made.
    same : dict of int to set of (int, int)
        By variable, the places that are on the node as they are here: no others need to be sent.
    """

    def __init__(self, index: int, ranks: range, processes: NodeProcesses) -> None:
        self.index, self.ranks, self.processes = index, ranks, processes
        self.num_starts = 0
        self.is_dead = True
        self.process: AgentProcess = processes.placement.process_type(index)
        self.exit_text = ""
        self.living: dict[int, RankOfNode] = {}
        self._starts = itertools.count(1)
        self._numbers = itertools.count(1)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.memory: dict[int, Segment] = {}
        self.bodies: dict[bytes, bytes] = {}
        self.same: dict[int, set[tuple[int, int]]] = {}
        self._shared: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()
        self._of_number: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()
        self._events: list[Event] = []

    def begin(self) -> None:
        """Start an agent, which has no rank and no memory."""
        self._begin_anew()
        processes = self.processes
        placement = processes.placement
        self.num_starts += 1
        self.process = placement.process_type(self.index)
        seed = [processes.seed, self.index, self.num_starts]
        setup = setup_message(placement, self.ranks[0], []) | placement.options
        setup |= {"ranks": [self.ranks.start, self.ranks.stop], "seed": seed[: 2 if self.num_starts == 1 else 3]}
        setup |= {"num_workers": len(self.ranks), "hash_seed": processes.hash_seed}
        setup |= {"runtime": processes.token}
        environment = dict(os.environ)
        environment |= num_threads_set(environment, max(num_cores() // len(placement.devices), 1))
        environment[HASH_SEED] = processes.hash_seed
        self.process.start(setup, environment, processes.control_fd, {})
        self.post = Post(self.process.link)
        self.is_dead = False
        processes.watch_node(self)

    # -- down ---------------------------------------------------------------------------------------------------------

    def start(self, process: RankOfNode, setup: dict[str, Any]) -> None:
        with deferred():
            if self.is_dead:
                self.begin()
            process.number = next(self._starts)
            self.living[process.rank] = process
            self._events.append(("start", process.rank, process.number, setup))

    def tell(self, name: str, process: RankOfNode, *what: Any) -> None:
        """Have an event of a rank sent with the next message."""
        self._events.append((name, process.rank, process.number, *what))

    def say(self, *event: Any) -> None:
        """Have an event sent with the next message."""
        self._events.append(event)

    def has(self, segment: Segment) -> bool:
        """Whether memory of the program has a twin on the node."""
        return segment in self._shared

    def share(self, segment: Segment) -> int:
        """Return the number of memory on the node. It has the content, unless calls bring that."""
        number = self._shared.get(segment)
        if number is None:
            number = self._shared[segment] = next(self._numbers)
            self._of_number[number] = segment
            weakref.finalize(segment, self._dropped.append, number).atexit = False
            content = None if segment.is_staging or segment.is_arena else segment.buffer
            self._events.append(("memory", number, segment.nbytes, segment.is_arena, content))
        return number

    def write(self, segment: Segment, at: int, content: np.ndarray) -> None:
        """Have bytes of memory written on the node."""
        if content.nbytes:
            self._events.append(("write", self.share(segment), at, content))

    def flush(self) -> None:
        """Send what waits. What an agent that is busy, or frozen, has no room for is sent as the program waits."""
        if self.is_dead or not (self._events or self._dropped or self.post.unsent):
            return
        with deferred():
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            if dropped:
                self._events.append(("free", dropped))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the wait finds its end
                self.post.send_unsent()
                if self._events:
                    self.processes.counters["bytes_down"] += self.post.queue(self._events)
            self._events, self.bodies = [], {}
            self.processes.watch_room(self)

    # -- up -----------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        for fd, kind in self.process.watched():
            if kind == "output":
                self.process.forward_output(fd)

    def pump(self, seconds: float = 0.0) -> None:
        """Take in what the agent tells, and its end."""
        if self.is_dead:
            return
        if seconds:
            self.flush()
            poll = select.poll()
            for fd, _ in self.process.watched():
                poll.register(fd, select.POLLIN)
            if self.post.unsent:
                poll.register(self.post.fd, select.POLLOUT)
            poll.poll(1000 * seconds)
        self._forward()
        with deferred():
            self._receive()
            if self._has_ended():
                self._receive()
                self._note_end()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            for events in self.post.received():
                for name, *what in events:
                    getattr(self, f"_{name}")(*what)

    def _has_ended(self) -> bool:
        if self.process.pidfd < 0:
            return True
        poll = select.poll()  # ``select`` takes no descriptor above 1023
        poll.register(self.process.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """End an agent that does not answer."""
        self.process.kill()
        with deferred():
            self._note_end()

    def _note_end(self) -> None:
        self.is_dead = True
        self.processes.unwatch_node(self)
        self.exit_text = self.process.reap()
        for process in list(self.living.values()):
            process.ended(f"node {self.index} ({self.exit_text})", self.process.stderr_since(0.0))
            self.processes.ended.add(process)

    def _of(self, rank: int, start: int) -> RankOfNode | None:
        process = self.living.get(rank)
        return process if process is not None and process.number == start else None

    def _started(self, rank: int, start: int, pid: int) -> None:
        if (process := self._of(rank, start)) is not None:
            process.pid = pid

    def _replied(
        self, rank: int, start: int, reply: bytes, content: Any, made: list[tuple[int, int]],
        written: list[tuple[int, int, np.ndarray]],
    ) -> None:  # fmt: skip
        process = self._of(rank, start)
        for number, nbytes in made:
            self.memory[number] = Segment.create(nbytes, is_worker_writable=True)
        if process is None:
            return
        for number, at, array in written:
            segment = self.memory[number] if number < 0 else self._of_number.get(number)
            if segment is not None:
                segment.buffer[at : at + array.nbytes] = array
        # With the memory itself: if the rank has died, its agent says that it is gone before the reply is read.
        process.link.replies.append((reply, content, [self.memory[number] for number, _ in made]))

    def _ended(self, rank: int, start: int, text: str, up: np.ndarray, lines: list[str]) -> None:
        if (process := self._of(rank, start)) is not None:
            self.processes.up[rank] = up
            process.ended(text, lines)
            self.processes.ended.add(process)

    def _forgot(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.memory.pop(number, None)

    # -- stacks -------------------------------------------------------------------------------------------------------

    def stacks(self, rank: int) -> str:
        """Return the stacks of a rank. Any thread may ask."""
        text = self.process.stacks()
        for part in text.split("\0"):
            found = _STACKS.match(part)
            if found is not None and int(found[1]) == rank:
                up = self.processes.up
                if len(up):
                    up[rank, Up.PHASE] = int(found[2])
                return found[3].strip()
        return text if "\0" not in text and not _STACKS.match(text) else "it has not told"


class NodeProcesses(Processes):
    """The processes of the ranks of all nodes.

    Attributes
    ----------
    nodes : list of Node
    ended : set of RankOfNode
        Those that have ended, as agents have told and :meth:`sort` has not.
    """

    placement: NodePlacement

    def __init__(self, placement: NodePlacement, *, process_type: Any, seed: int) -> None:
        super().__init__(placement, process_type=process_type, seed=seed)
        topology = placement.topology
        self._process_type = lambda rank: RankOfNode(rank, self.nodes[topology.node_of(rank)])
        self.ended: set[RankOfNode] = set()
        look = self.events

        def events() -> list[tuple[int, int]]:
            self.flush()
            return look() or self._untold()

        self.events = events
        self.token = os.urandom(8).hex()
        self.counters = {"bytes_down": 0}  # the session's, once it is made
        self._by_fd: dict[int, Node] = {}
        self.nodes: list[Node] = []
        self.nodes += [Node(index, topology.ranks_of(index), self) for index in range(len(topology.counts))]

    @property
    def hash_seed(self) -> str:
        return self._hash_seed

    @property
    def control_fd(self) -> int:
        assert self._control is not None
        return self._control.fd

    def _setup(self, rank: int, failpoints: Sequence[Sequence[Any]]) -> dict[str, Any]:
        topology = self.placement.topology
        node = f"node{topology.node_of(rank)}:"
        return super()._setup(rank, failpoints) | {"nodes": topology.counts, "node": node}

    # -- watching -----------------------------------------------------------------------------------------------------

    def watch_node(self, node: Node) -> None:
        for fd, _ in node.process.watched():
            self._by_fd[fd] = node
            self._watch(fd, "node", None)

    def watch_room(self, node: Node) -> None:
        """See that a wait ends when a node can be sent what there was no room for."""
        fd, is_watched = node.post.fd, node.post.fd in self._watched
        if node.post.unsent and not is_watched:
            self._watched[fd] = "room", None  # whoever waits next sends it
            self._poll.register(fd, select.POLLOUT)
        elif is_watched and not node.post.unsent:
            self._unwatch(fd)

    def unwatch_node(self, node: Node) -> None:
        self._unwatch(node.post.fd)
        for fd in [fd for fd, owner in self._by_fd.items() if owner is node]:
            del self._by_fd[fd]
            self._unwatch(fd)

    def flush(self) -> None:
        for node in self.nodes:
            node.flush()

    def wait(self, seconds: float | None, *, awake: bool = True) -> list[tuple[int, int]]:
        self.flush()
        return self._untold() or super().wait(seconds, awake=awake)

    def _untold(self) -> list[tuple[int, int]]:
        """Return an event if agents have told of something that nobody has sorted."""
        return [(-1, select.POLLIN)] if self.ended or self._with_replies() else []

    def _with_replies(self) -> list[Worker]:
        return [worker for worker in self.by_rank if not worker.is_dead and worker.link.replies]

    def sort(self, events: Sequence[tuple[int, int]]) -> tuple[list[Worker], list[Worker], bool]:
        for node in {self._by_fd[fd].index: self._by_fd[fd] for fd, _ in events if fd in self._by_fd}.values():
            node.pump()
        is_woken = super().sort([event for event in events if event[0] not in self._by_fd])[2]
        with deferred():
            ended, self.ended = self.ended, set()
        # Not those that were buried before it was told, and may have successors by now.
        workers = [worker for worker in self.by_rank if worker.process in ended and not worker.is_dead]
        return self._with_replies(), workers, is_woken

    def descriptors(self) -> list[int]:
        return [*super().descriptors(), *self._by_fd]

    # -- ending -------------------------------------------------------------------------------------------------------

    def dismiss(self) -> None:
        """Have agents end whose ranks have ended, and wait a while for that."""
        end = time.monotonic() + GRACE_S
        for node in self.nodes:
            node.say("close")
            node.flush()
        for node in self.nodes:
            while not node.is_dead and (left := end - time.monotonic()) > 0:
                node.pump(left)

    def kill(self) -> None:
        for node in self.nodes:
            node.process.kill()

    def tear_down(self) -> None:
        with deferred():
            self.end_nodes()
            super().tear_down()

    def end_nodes(self) -> None:
        """Kill all agents, with their ranks."""
        self.kill()
        for node in self.nodes:
            if not node.is_dead:
                node.kill()

    def abandon(self) -> None:
        super().abandon()
        for node in self.nodes:
            node.process.disown()
            node.process.close()


__all__ = ["AgentProcess", "Node", "NodePlacement", "NodeProcesses", "RankOfNode", "TunnelProcess"]
