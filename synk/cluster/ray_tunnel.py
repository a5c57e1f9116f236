"""Nodes on the machines of a Ray cluster. Only this file and ``ray_machines`` import Ray, never the user's program.

For each node the program has a child, the *tunnel*. To the program the tunnel is the agent itself, with the same pipes
and sockets. It is a driver of Ray: it has Ray start an actor on a machine, and hands each message of the program to a
call of the actor, unopened. The actor starts the agent as its own child, and what the agent tells and prints comes back
as the values of one call of the actor that lasts as long as the agent. Ray carries both ways, stores what is large, and
says when a machine is lost.

Each of these processes ends when the one before it has ended: the kernel ends the tunnel with the program, Ray ends the
actors of a driver that is gone, and the kernel ends the agent with its actor. In the other direction the tunnel ends
itself when Ray has lost the actor, or when the actor reports the end of the agent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import ray

from synk._processes.placement import HASH_SEED, num_threads_set
from synk._pure.environment import merged, num_cores
from synk._wire import orders as wire
from synk._wire.lifeline import tie_to_program
from synk._wire.mapping import Descriptor
from synk._wire.memory import Segment
from synk.cluster.nodes import AgentProcess
from synk.cluster.post import Event, Post
from synk.cluster.ray_machines import Search, connect

GONE_S = 2.0
"""How long an actor may take to end."""

MAX_UNREAD = 64
"""How many messages and pieces of output may wait for the tunnel before the actor reads no more of them."""


# -- the actor --------------------------------------------------------------------------------------------------------


class NodeActor:
    """Starts an agent on its machine, and passes messages on.

    Messages go down by :meth:`carry`, in the order of its calls. :meth:`listen` is called once, and has what comes up.
    Both and the other methods have a thread each.

    Parameters
    ----------
    setup : dict
        The agent's first message.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._process = process = AgentProcess(setup["rank"])
        self._host = ray.util.get_node_ip_address()
        here = [entry for entry in sys.path if os.path.isabs(entry)]
        own = {"program_pid": os.getpid(), "import_path": here, "sys_path": merged(setup["sys_path"], here)}
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}  # Ray has set it
        environment |= num_threads_set(environment, max(num_cores() // setup["num_workers"], 1))
        environment[HASH_SEED] = setup["hash_seed"]
        control = Segment.create(1)
        process.start({**setup, **own, "own_path": here, "host": self._host}, environment, control.fd, {})
        control.close()
        self._post = Post(process.link)
        self._poll = select.poll()
        self._outputs = {}
        for (fd, kind), name in zip(process.watched(), ("", "", "stdout", "stderr", "log")):
            self._poll.register(fd, select.POLLIN)
            if kind == "output":
                self._outputs[int(fd)] = name

    @ray.method(concurrency_group="control")
    def host(self) -> str:
        """Return the address of the machine."""
        return self._host

    @ray.method(concurrency_group="carry")
    def carry(self, events: list[Event]) -> None:
        """Pass a message on to the agent."""
        with contextlib.suppress(OSError):  # the agent is dead, and ``listen`` reports how it has ended
            self._post.send(events)

    @ray.method(concurrency_group="listen", _generator_backpressure_num_objects=MAX_UNREAD)
    def listen(self) -> Iterator[tuple[str, Any]]:
        """Yield the agent's messages and its output, until it has ended.

        A message that the agent sent before its death goes first, then the rest of its output, then its end.
        """
        process = self._process
        while True:
            ready = [fd for fd, _ in self._poll.poll()]
            for fd in ready:
                if fd in self._outputs and (printed := self._printed(fd)):
                    yield self._outputs[fd], printed
            told = list(self._post.received())
            yield from (("told", events) for events in told)
            if process.pidfd in ready and not told:
                for fd, name in self._outputs.items():
                    while printed := self._printed(fd):
                        yield name, printed
                yield "end", process.reap()
                return

    def _printed(self, fd: int) -> bytes:
        """Return what the agent has written to a stream; nothing if there is nothing now, or no more."""
        try:
            data = os.read(fd, 1 << 16)
        except OSError:
            return b""
        if not data:
            with contextlib.suppress(KeyError):  # the end of this stream was seen before
                self._poll.unregister(fd)
        return data

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        return self._process.stacks()


# -- the tunnel -------------------------------------------------------------------------------------------------------


class Tunnel:
    """Carries messages between the program and an agent on another machine.

    One thread carries what comes from the program, and one what comes from the agent. The first of them that fails, or
    finds its side gone, ends the process.

    Parameters
    ----------
    sock, setup
        As for an agent; see ``synk.cluster.relay``.
    """

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        fds = setup["fds"]
        for fd in fds.values():
            os.set_inheritable(fd, False)
        os.close(fds["control"])
        link = wire.Link(sock, Descriptor(fds["down"]), Descriptor(fds["up"]))
        os.set_blocking(link.read_fd, False)
        self._post = Post(link)
        self._head_fd, self._pulse = tie_to_program(setup)
        self._setup = setup
        # Copies, because ``open`` sends this process's own streams, to which Ray prints, to nowhere.
        self._streams = {"stdout": os.dup(1), "stderr": os.dup(2), "log": fds["log"]}
        self._machine = ""
        self._ending = threading.Lock()  # held by the thread that ends this process
        # The program asks for stacks by a signal, which becomes a byte of this pipe, whatever this process is doing.
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGUSR2, lambda *_: None)

    def open(self) -> None:
        """Connect to the cluster, and start the agent on a machine."""
        seed, options = self._setup["seed"], self._setup["ray"]
        first_message = {key: value for key, value in self._setup.items() if key not in ("fds", "ray")}
        connect(options["address"])
        search = Search(options["num_nodes"], options["least_nodes"], seed[1], is_replacement=len(seed) > 2)
        self._actor, place, self._machine = search.start(NodeActor, first_message, self._setup["runtime"])
        if place:
            self._print(f"it runs beside another node on {self._machine}, because no other machine is free.")
        with open(os.devnull, "wb") as nowhere:  # when Ray loses a machine it prints pages of its own logs
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)

    def run(self) -> NoReturn:
        """Carry messages until the program or the agent is gone."""
        threading.Thread(target=self._guarded, args=(self._carry_up,), daemon=True).start()
        self._guarded(self._carry_down)
        self._end(3)

    def _guarded(self, carry: Callable[[], None]) -> None:
        """Carry. An error ends this process; to the head the agent has ended then."""
        try:
            carry()
        except BaseException as error:
            lines = str(error).strip().splitlines() or [""]
            line = lines[-1] if isinstance(error, ray.exceptions.RayTaskError) else lines[0]
            self._print(f"the agent on {self._machine} is lost: {type(error).__name__}: {line}")
            self._end(3)

    def _end(self, code: int) -> NoReturn:
        """End the actor, and then this process. With code 0 the actor is gone when the process has ended."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process; this one must not return
        try:
            ray.kill(self._actor)
            if code == 0:
                ray.wait([self._actor.host.remote()], timeout=GONE_S)  # it fails once the actor is gone
        finally:
            os._exit(code)  # without the exit handlers of Ray, which could wait for a machine that is lost

    def _print(self, text: str) -> None:
        if not self._ending.locked():
            os.write(self._streams["stderr"], f"{text}\n".encode())

    def _carry_down(self) -> None:
        """Carry messages to the agent until the program is gone."""
        actor, read_fd = self._actor, self._post.link.read_fd
        waiting = select.poll()
        for fd in (read_fd, self._head_fd, self._signals):
            waiting.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in waiting.poll()}
            if self._signals in ready:
                os.read(self._signals, 64)
                os.write(self._setup["fds"]["stacks"], ray.get(actor.stacks.remote()).encode("utf-8", "replace"))
            if read_fd in ready:
                for events in self._post.received():
                    actor.carry.remote(events)
            elif self._head_fd in ready:
                return

    def _carry_up(self) -> None:
        """Carry messages and output from the agent. Its end becomes the end of this process."""
        values = self._actor.listen.remote()
        while True:
            # No variable may hold a value while the next one is awaited: Ray would keep its memory.
            self._take_up(*ray.get(next(values)))

    def _take_up(self, what: str, content: Any) -> None:
        if what == "told":
            self._post.send(content)
        elif what == "end":
            if content == "exit 0":
                self._end(0)
            self._print(f"the agent on {self._machine} ended with {content}.")
            self._end(3)
        else:
            os.write(self._streams[what], content)


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Run a tunnel. The bootstrap calls this once ``sys.path`` is set."""
    tunnel = Tunnel(sock, setup)
    tunnel.open()
    tunnel.run()
