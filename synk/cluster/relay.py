"""The agent of a node: it starts the node's ranks, holds their memory, and passes orders and replies on, unopened.

It is a child of the program, or of an actor of Ray on another machine. It runs no code of the user's and never waits
for a rank, so it is always there to pass on an interrupt. To the ranks it is the program: they are tied to its life.

All memory that the program tells ranks of has a twin here, in which the events of the program write what is new before
they pass on an order. With a reply goes up what the rank has written: its outputs and the values of variables. Where
these lie is known from what the program has told of plans and variables, and the ranks of layouts.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._processes.worker_process import WorkerProcess
from synk._pure.environment import merged
from synk._pure.ranges import LINE_NBYTES
from synk._wire import orders as wire
from synk._wire.lifeline import tie_to_program
from synk._wire.logs import send_records
from synk._wire.mapping import Descriptor, eventfd
from synk._wire.memory import Segment, create_fd
from synk._wire.messages import Layout, News, spare_of
from synk._wire.orders import Down, Up, control_blocks, control_nbytes
from synk._wire.variables import leaf_offsets
from synk.cluster.post import Event, Post
from synk.communicators._rendezvous import reset, set_abort
from synk.errors import StartupError

STACKS_NBYTES = 1 << 15
"""How much of its ranks' stacks an agent writes at most: it must not wait for a reader."""


class NodeRank:
    """One rank of this node, and what tells where it writes.

    Attributes
    ----------
    start : int
        Which start of the rank this is: what is about another one is of no interest.
    lanes : dict of int to int
        By plan.
    calls : dict of int to int
        By the number of a message that was not answered, its plan.
    slots : dict of int to int
        By lane, the number of the memory of the outputs.
    variables : dict
        By number: dtypes, for each of four places the number of the memory and where it begins there, and the memory
        that says which of them holds the value.
    """

    def __init__(self, rank: int, start: int) -> None:
        self.rank, self.start = rank, start
        self.process = WorkerProcess(rank)
        self.began = time.monotonic()
        self.lanes: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.layouts: dict[int, Layout] = {}
        self.variables: dict[int, tuple[Any, list[tuple[int, int]], int]] = {}

    def take_notes(self, notes: Sequence[Event]) -> None:
        """Note what the program has told the rank."""
        for kind, number, what in notes:
            if kind == "plan":
                self.lanes[number] = what
                self.layouts.pop(number, None)
            elif kind == "variable":
                self.variables[number] = what
            else:
                self.lanes.pop(number, None)
                self.layouts.pop(number, None)
                self.variables.pop(number, None)

    def written(
        self, plan: int, content: Any, made: list[int], memory: dict[int, Segment]
    ) -> list[tuple[int, int, int]]:
        """Return what a call has written: memory, from where, how many bytes. ``made`` is the memory that is new."""
        lane = self.lanes[plan]
        if content is not None:
            news, own = News(*content), list(made)
            if news.slot:
                self.slots[lane] = own.pop(0)
            for (variable, which, _), number in zip(news.places, own):
                self.variables[variable][1][which] = number, 0
            if news.layout is not None:
                self.layouts[plan] = Layout(*news.layout)
        layout = self.layouts[plan]
        end = max((at + leaf.nbytes for at, leaf in zip(layout.places, layout.leaves)), default=0)
        spans = [(self.slots[lane], 0, end)] if end else []
        for variable, _, shapes in layout.assigned:
            dtypes, places, words = self.variables[variable]
            front = memory[words].view(self.rank * LINE_NBYTES, (1,), np.dtype(np.int64))[0]
            spans.append((*places[spare_of(front)], leaf_offsets(dtypes, shapes)[1]))
        return spans


class Agent:
    """Acts on the program's events, and tells it of its ranks, until the program says goodbye or is gone.

    Parameters
    ----------
    sock : socket.socket
    setup : dict
        The first message.
    """

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        fds = setup["fds"]
        for fd in fds.values():
            os.set_inheritable(fd, False)  # a rank that outlived this process would keep the program's pipes open
        os.close(fds["control"])
        link = wire.Link(sock, Descriptor(fds["down"]), Descriptor(fds["up"]))
        os.set_blocking(link.read_fd, False)
        self._post = Post(link)
        # From here on the kernel ends this process with the one that has started it.
        self._head_fd, self._pulse = tie_to_program(setup)
        self._stacks_fd = fds["stacks"]
        self._own_path: Sequence[str] = setup.get("own_path", ())
        self._host: str = setup.get("host", "")
        num_ranks = self._num_ranks = setup["world_size"]
        self._control = Segment.create(control_nbytes(num_ranks), is_worker_writable=True)
        self._blocks = [control_blocks(self._control.buffer, num_ranks, lane) for lane in range(3)]
        self._eventfds = {rank: eventfd() for rank in range(*setup["ranks"])}
        self._memory: dict[int, Segment] = {}
        self._made = itertools.count(-1, -1)  # the numbers of memory that ranks have made
        self._ranks: dict[int, NodeRank] = {}
        self._exits: dict[int, str] = {}  # how ranks have ended that were not started again
        self._events: list[Event] = []  # for the program
        self._poll = select.poll()
        for fd in (link.read_fd, self._head_fd):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Pass on what comes from either side. What ranks have said goes first: it came before."""
        read_fd, sock_fd = self._post.link.read_fd, self._post.fd
        while True:
            if self._events and self._post.has_room():
                events, self._events = self._events, []
                self._post.send(events)
            if self._events:
                self._poll.register(sock_fd, select.POLLOUT)
            fds = {fd for fd, _ in self._poll.poll()}
            if sock_fd in fds:
                self._poll.unregister(sock_fd)
            for each in list(self._ranks.values()):
                self._hear(each, fds)
            if read_fd in fds:
                for events in self._post.received():
                    for name, *what in events:
                        getattr(self, name)(*what)
            elif self._head_fd in fds:
                os.killpg(0, signal.SIGKILL)

    # -- what ranks say -----------------------------------------------------------------------------------------------

    def _hear(self, each: NodeRank, fds: set[int]) -> None:
        process = each.process
        for fd, kind in process.watched():
            if fd not in fds:
                continue
            if kind == "output":  # before the replies, which a rank sends after what its function has printed
                if not process.forward_output(fd):
                    self._poll.unregister(fd)
            elif kind == "up":
                self._pass_up(each)
            elif kind == "death":
                self._pass_up(each)
                self._bury(each)
                return

    def _pass_up(self, each: NodeRank) -> None:
        """Pass on the replies of a rank that are there."""
        link = each.process.link
        while len(reply := link.read(wire.REPLY.size)) == wire.REPLY.size:
            number, status, *_ = wire.REPLY.unpack(reply)
            content: Any = None
            made: list[int] = []
            if status in wire.WITH_BODY:
                try:
                    content, fds = link.receive_body(number)
                except (EOFError, ConnectionResetError):  # it died, and the body with it
                    return
                while fds:
                    made.append(self._taken(fds.pop(0)))
            written = []
            plan = each.calls.pop(number, None)
            if plan is not None and status <= wire.TOLD:
                written = each.written(plan, content, made, self._memory)
            arrays = [(memory, at, self._memory[memory].buffer[at : at + nbytes]) for memory, at, nbytes in written]
            sizes = [(memory, self._memory[memory].nbytes) for memory in made]
            self._tell("replied", each, reply, content, sizes, arrays)
            self._forget_replaced(each)

    def _taken(self, fd: int) -> int:
        """Take memory that a rank has made."""
        number = next(self._made)
        self._memory[number] = Segment(fd, os.fstat(fd).st_size, is_writable=True, segment_id=0)
        return number

    def _forget_replaced(self, *others: NodeRank) -> None:
        """Forget memory that ranks have made and use no more."""
        used: set[int] = set()
        for each in (*self._ranks.values(), *others):
            used.update(
                each.slots.values(), (memory for _, places, _ in each.variables.values() for memory, _ in places)
            )
        gone = [number for number in self._memory if number < 0 and number not in used]
        if gone:
            self.free(gone)
            self._events.append(("forgot", gone))

    def _bury(self, each: NodeRank) -> None:
        process = each.process
        for fd, _ in process.watched():
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
        process.kill()
        lines_of = process.stderr_since
        text = process.reap()
        self._ranks.pop(each.rank, None)
        self._exits[each.rank] = text
        self._tell("ended", each, text, self._blocks[0][1][each.rank].copy(), lines_of(each.began))
        self._forget_replaced()

    def _tell(self, name: str, each: NodeRank, *what: Any) -> None:
        self._events.append((name, each.rank, each.start, *what))

    # -- what the program says ----------------------------------------------------------------------------------------

    def start(self, rank: int, start: int, setup: dict[str, Any]) -> None:
        """Start a rank."""
        each = self._ranks.get(rank)
        if each is not None:
            self._bury(each)
        each = NodeRank(rank, start)
        own = {"program_pid": os.getpid(), "host": self._host}
        if self._own_path:
            here = list(self._own_path)
            own |= {"own_path": here, "import_path": here, "sys_path": merged(setup["sys_path"], here)}
        events: dict[str, int] = {f"event{rank}": fd for rank, fd in self._eventfds.items()}
        try:
            each.process.start(setup | own, dict(os.environ), self._control.fd, events)
        except StartupError as error:
            self._tell("ended", each, str(error), self._blocks[0][1][rank].copy(), [])
            return
        self._ranks[rank] = each
        self._exits.pop(rank, None)
        for fd, _ in each.process.watched():
            self._poll.register(fd, select.POLLIN)
        self._tell("started", each, each.process.pid)

    def memory(self, number: int, nbytes: int, is_sparse: bool, content: np.ndarray | None) -> None:
        """Make memory, with a content or empty."""
        if is_sparse:
            segment = Segment(create_fd(nbytes, is_reserved=False), nbytes, is_writable=True, segment_id=0)
        else:
            segment = Segment.create(nbytes)
        if content is not None:
            segment.buffer[:] = content
        self._memory[number] = segment

    def write(self, number: int, at: int, content: np.ndarray) -> None:
        """Write what ranks will read."""
        self._memory[number].buffer[at : at + content.nbytes] = content

    def free(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            segment = self._memory.pop(number, None)
            if segment is not None:
                segment.close()

    def words(self, lane: int, words: np.ndarray) -> None:
        """Write the words of the program for all ranks in a lane."""
        self._blocks[lane][0][:] = words

    def order(self, rank: int, start: int, order: bytes, body: Any) -> None:
        """Pass on an order."""
        each = self._living(rank, start)
        if each is None:
            return
        link, (number, plan) = each.process.link, wire.ORDER.unpack_from(order)[:2]
        if not each.calls:
            each.began = time.monotonic()
        if body is not None:
            data, buffers, memory, notes = body
            each.take_notes(notes)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end comes up
                link.send_dumped(number, data, buffers, [self._memory[each] for each in memory])
        if plan in each.lanes:
            each.calls[number] = plan
        link.write(order)

    def interrupt(self, rank: int, start: int, word: int) -> None:
        each = self._living(rank, start)
        if each is not None:
            self._blocks[0][0][rank, Down.INTERRUPT] = word  # before the signal, whose handler reads it
            each.process.interrupt()

    def kill(self, rank: int, start: int) -> None:
        each = self._living(rank, start)
        if each is not None:
            self._bury(each)

    def abort(self, number: int) -> None:
        """Have ranks that wait for each other give up."""
        if number in self._memory:
            set_abort(self._memory[number], list(self._eventfds.values()))

    def reset(self, number: int) -> None:
        """Let ranks communicate again."""
        if number in self._memory:
            reset(self._memory[number], self._num_ranks)

    def close(self) -> None:
        """End, with all ranks."""
        for each in list(self._ranks.values()):
            self._bury(each)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)

    def _living(self, rank: int, start: int) -> NodeRank | None:
        each = self._ranks.get(rank)
        return each if each is not None and each.start == start else None

    # -- stacks -------------------------------------------------------------------------------------------------------

    def write_stacks(self) -> None:
        """Write what each rank is doing to the pipe from which the program reads it."""
        up = self._blocks[0][1]
        parts = [
            f"rank {each.rank} {int(up[each.rank, Up.PHASE])}\n{each.process.stacks().strip()}\n"
            for each in list(self._ranks.values())
        ] + [f"rank {rank} 0\nit has ended with {text}" for rank, text in self._exits.items()]
        os.write(self._stacks_fd, "\0".join(parts).encode("utf-8", "replace")[:STACKS_NBYTES])


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Run an agent. The bootstrap calls this once ``sys.path`` is set."""
    sys.path[:] = setup["sys_path"]
    sys.argv[:] = setup["argv"]
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a process inherits blocked signals
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program tells which ranks are interrupted
    send_records(Descriptor(setup["fds"]["log"]))
    logging.root.setLevel(logging.NOTSET)  # it passes on what the ranks send, which have the program's levels
    agent = Agent(sock, setup)
    signal.signal(signal.SIGUSR2, lambda *_: agent.write_stacks())
    agent.serve()
