"""Nodes on the machines of a Ray cluster. Only ``synk.cluster.ray*`` import Ray, and never in the user's program.

For each node the program has a child, the *tunnel*. To the head the tunnel is the agent itself, with the same pipes and
sockets. It is a driver of Ray: it has Ray start an actor on a machine, and hands each message of the program to a call
of the actor, unopened. The actor starts the agent as its own child, and what the agent replies and prints comes back
as the values of one call of the actor that lasts as long as the agent. Ray carries both ways, stores what is large, and
says when a machine is lost.

Each of these processes ends when the one before it has ended: the kernel ends the tunnel with the program, Ray ends the
actors of a driver that is gone, and the kernel ends the agent with its actor. In the other direction the tunnel ends
itself when Ray has lost the actor, or when the actor reports the end of the agent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import ray

from synk._master.processes.placement import HASH_SEED, num_threads_set
from synk._master.processes.worker_process import WorkerProcess
from synk._pure.cores import num_cores
from synk._pure.environment import merged
from synk._wire.channel import Channel
from synk._wire.control import Down, Phase, Up, control_blocks, is_interrupted
from synk._wire.memory import Segment
from synk._wire.messages import HAS_BODY, Kind
from synk.cluster.channel import NodeChannel, NodeEnd
from synk.cluster.ray_machines import Search, connect

GONE_S = 2.0
"""How long an actor may take to end."""

MAX_UNREAD = 64
"""How many replies and pieces of output may wait for the tunnel before the actor reads no more of them."""

Message = tuple[int, int, int, int]
"""kind or status, flags, sequence, value"""


# -- the actor --------------------------------------------------------------------------------------------------------


class _AgentProcess(WorkerProcess):
    """The agent as a child of its actor."""

    _channel_type = NodeChannel
    _module, _kind = "cluster.loop", "node"

    def streams(self) -> dict[int, str]:
        """Return the names of the agent's output streams, by descriptor."""
        return {int(output.fd): name for output, name in zip(self._outputs, ("stdout", "stderr", "log"))}


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
        # The head's control block is on another machine. This one tells the agent which messages are interrupted.
        self._control = Segment.create(setup["control_nbytes"])
        down, _ = control_blocks(self._control.buffer, setup["world_size"], 0)
        self._down = down[setup["rank"]]
        self._down[[Down.INTERRUPT, Down.COMMITTED]] = -1
        self._process = _AgentProcess(setup["rank"])
        self._host = ray.util.get_node_ip_address()
        here = [entry for entry in sys.path if os.path.isabs(entry)]
        own = {"master_pid": os.getpid(), "import_path": here, "sys_path": merged(setup["sys_path"], here)}
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}  # Ray has set it
        environment |= num_threads_set(environment, max(num_cores() // setup["num_workers"], 1))
        environment[HASH_SEED] = setup["hash_seed"]
        self._process.start(
            {**setup, **own, "own_path": here, "host": self._host}, environment, self._control.fd, os.urandom(32), {}
        )
        self._poll = select.poll()
        for fd, _ in self._process.watched():
            self._poll.register(fd, select.POLLIN)

    @ray.method(concurrency_group="control")
    def host(self) -> str:
        """Return the address of the machine."""
        return self._host

    @ray.method(concurrency_group="carry")
    def carry(self, message: Message, body: np.ndarray | None) -> None:
        """Pass a message on to the agent."""
        channel, (kind, flags, sequence, value) = self._process.channel, message
        # The head goes on only when its interrupts are over, so a word that came late must not be kept.
        if kind != Kind.PING and not is_interrupted(int(self._down[Down.INTERRUPT]), sequence):
            self._down[Down.INTERRUPT] = -1
        with contextlib.suppress(OSError):  # the agent is dead, and ``listen`` reports how it has ended
            if body is not None:
                channel.send_body(sequence, body.data)
            channel.ring(kind, flags, sequence, value)

    @ray.method(concurrency_group="listen", _generator_backpressure_num_objects=MAX_UNREAD)
    def listen(self) -> Iterator[tuple[str, Any, np.ndarray | None]]:
        """Yield the agent's replies and its output, until it has ended.

        A reply that the agent sent before its death goes first, then the rest of its output, then its end.
        """
        process = self._process
        while True:
            names = process.streams()
            ready = [fd for fd, _ in self._poll.poll()]
            for fd in ready:
                if fd in names and (printed := self._printed(fd)):
                    yield names[fd], printed, None
            if process.channel.read_fd in ready:
                yield from self._replies()
            elif process.pidfd in ready:
                for fd, name in names.items():
                    while printed := self._printed(fd):
                        yield name, printed, None
                yield "end", process.reap(), None
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

    def _replies(self) -> Iterator[tuple[str, Message, np.ndarray | None]]:
        channel = self._process.channel
        message = channel.answer()
        if message is None:  # the agent has closed its pipe; its end follows
            self._poll.unregister(channel.read_fd)
        else:
            yield "reply", message, _body_of(channel, message)

    @ray.method(concurrency_group="control")
    def interrupt(self, word: int) -> None:
        """Interrupt the agent, if it still acts on one of the messages that ``word`` means."""
        self._down[Down.INTERRUPT] = word  # before the signal, whose handler reads it
        self._process.interrupt()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        return self._process.stacks()


def _body_of(channel: Channel, message: Message) -> np.ndarray | None:
    """Receive the body of a message: an array of bytes, which Ray copies once and does not pickle."""
    _, flags, sequence, _ = message
    return np.frombuffer(channel.receive_body(sequence)[0], np.uint8) if flags & HAS_BODY else None


# -- the tunnel -------------------------------------------------------------------------------------------------------


class Tunnel(NodeEnd):
    """Carries messages between the head and an agent on another machine.

    One thread carries what comes from the head, and one what comes from the agent. The first of them that fails, or
    finds its side gone, ends the process.

    Parameters
    ----------
    sock, setup
        As for an agent; see ``synk.cluster.loop``.
    """

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        super().__init__(sock, setup)
        # Copies, because ``open`` sends this process's own streams, to which Ray prints, to nowhere.
        self._streams = {"stdout": os.dup(1), "stderr": os.dup(2), "log": setup["fds"]["log"]}
        self._machine = ""
        self._ending = threading.Lock()  # held by the thread that ends this process
        # The head's signals become bytes of this pipe, whatever this process is doing.
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)

    def open(self) -> None:
        """Connect to the cluster, and start the agent on a machine."""
        seed, options = self._setup["seed"], self._setup["ray"]
        first_message = {key: value for key, value in self._setup.items() if key not in ("fds", "token", "ray")}
        runtime = hashlib.sha256(self._setup["token"].encode()).hexdigest()[:16]
        connect(options["address"])
        search = Search(options["num_nodes"], options["least_nodes"], seed[1], is_replacement=len(seed) > 2)
        self._actor, place, self._machine = search.start(NodeActor, first_message, runtime)
        if place:
            self._print(f"it runs beside another node on {self._machine}, because no other machine is free.")
        with open(os.devnull, "wb") as nowhere:  # when Ray loses a machine it prints pages of its own logs
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)

    def run(self) -> NoReturn:
        """Carry messages until the head or the agent is gone."""
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
        """Carry messages and signals to the agent until the head is gone."""
        channel, actor = self._channel, self._actor
        waiting = select.poll()
        for fd in (channel.read_fd, self._head_fd, self._signals):
            waiting.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in waiting.poll()}
            if self._signals in ready:
                numbers = os.read(self._signals, 64)
                if signal.SIGINT in numbers:
                    actor.interrupt.remote(int(self._own_down[Down.INTERRUPT]))
                if signal.SIGUSR2 in numbers:
                    self._write_stacks(ray.get(actor.stacks.remote()))
            if channel.read_fd in ready:
                message = channel.answer()
                if message is None:
                    return
                self._own_up[Up.PHASE] = Phase.FUNCTION if message[0] in (Kind.CALL, Kind.ITEMS) else Phase.LOADING
                actor.carry.remote(message, _body_of(channel, message))
            elif self._head_fd in ready:
                return

    def _carry_up(self) -> None:
        """Carry replies and output from the agent. Its end becomes the end of this process."""
        values = self._actor.listen.remote()
        while True:
            # No variable may hold a value while the next one is awaited: Ray would keep its memory.
            self._take_up(*ray.get(next(values)))

    def _take_up(self, what: str, content: Any, body: np.ndarray | None) -> None:
        if what == "reply":
            self._own_up[Up.PHASE] = Phase.IDLE
            if body is not None:
                self._channel.send_body(content[2], body.data)
            self._channel.ring(*content)
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
