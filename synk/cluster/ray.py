"""Nodes on the machines of a Ray cluster. Only ``synk.cluster.ray*`` import Ray, and never in the user's program.

For each node the program has a child, the *tunnel*. To the head the tunnel is the agent itself, with the same pipes and
sockets. It is a driver of Ray: it has Ray start an actor on a machine, connects to the actor, and carries messages
between it and the program, unopened. The actor starts the agent as its own child.

Each of these processes ends when the one before it has ended: the kernel ends the tunnel with the program, Ray ends the
actors of a driver that is gone, and the kernel ends the agent with its actor. In the other direction the tunnel ends
itself when it loses the actor, or when the actor reports the end of the agent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any, NoReturn

import ray

from synk._master.processes.placement import HASH_SEED, num_threads_set
from synk._master.processes.worker_process import WorkerProcess
from synk._pure.cores import num_cores
from synk._wire.control import Down, Phase, Up, control_blocks
from synk._wire.memory import Segment
from synk._wire.messages import HAS_BODY, Kind, Status
from synk.cluster.channel import NodeChannel, NodeEnd
from synk.cluster.link import Arriving, Link, LinkLost, Place
from synk.cluster.ray_machines import Search, connect
from synk.cluster.split import merged

REASON_S = 0.5
"""How long a lost connection waits for Ray to give a better reason."""

GONE_S = 2.0
"""How long an actor may take to end."""

_DOORBELL = struct.Struct("=4q")
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

    ``carry_down`` and ``carry_up`` each run in a thread of their own until the agent ends. The other methods share one.

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
        # Ray brings interrupts, and may be slower than the links: one that is over when it comes must not be kept.
        self._num_pongs = 0
        self._interrupting = threading.Lock()
        self._process = _AgentProcess(setup["rank"])
        host = self._host = ray.util.get_node_ip_address()
        here = [entry for entry in sys.path if os.path.isabs(entry)]
        own = {"master_pid": os.getpid(), "import_path": here, "sys_path": merged(setup["sys_path"], here)}
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}  # Ray has set it
        environment |= num_threads_set(environment, max(num_cores() // setup["num_workers"], 1))
        environment[HASH_SEED] = setup["hash_seed"]
        self._process.start(
            {**setup, **own, "own_path": here, "host": host}, environment, self._control.fd, os.urandom(32), {}
        )
        self._poll = select.poll()
        for fd, _ in self._process.watched():
            self._poll.register(fd, select.POLLIN)
        self._down_link, self._up_link = Link(False, host=host), Link(True, host=host)

    def places(self) -> tuple[str, Place, Place]:
        """Return the address of the machine, and the places of the links to the agent and from it."""
        return self._host, self._down_link.place, self._up_link.place

    def carry_down(self) -> None:
        """Pass messages on to the agent."""
        channel = self._process.channel
        while True:
            (head,), body = self._down_link.receive()
            kind, flags, sequence, value = _DOORBELL.unpack(head)
            try:
                if body is not None:
                    channel.send_body(sequence, body)
                channel.ring(kind, flags, sequence, value)
            except OSError:  # the agent is dead, and ``carry_up`` reports how it has ended
                return

    def carry_up(self) -> None:
        """Pass on the agent's replies and its output, until it has ended.

        A reply that the agent sent before its death goes first, then the rest of its output, then its end.
        """
        process = self._process
        while True:
            names = process.streams()
            ready = [fd for fd, _ in self._poll.poll()]
            for fd in ready:
                if fd in names:
                    self._print(fd, names[fd])
            if process.channel.read_fd in ready:
                self._answer()
            elif process.pidfd in ready:
                for fd, name in names.items():
                    while self._print(fd, name):
                        pass
                self._up_link.send(b"end", process.reap().encode())
                return

    def _print(self, fd: int, name: str) -> bool:
        """Pass on the agent's output from one stream. Return whether there was any."""
        try:
            data = os.read(fd, 1 << 16)
        except OSError:  # often because there is none now
            return False
        if data:
            self._up_link.send(name.encode(), data)
        else:
            with contextlib.suppress(KeyError):  # the end of this stream was seen before
                self._poll.unregister(fd)
        return bool(data)

    def _answer(self) -> None:
        channel = self._process.channel
        message = channel.answer()
        if message is None:  # the agent has closed its pipe; its end follows
            self._poll.unregister(channel.read_fd)
            return
        _, flags, sequence, _ = message
        body = channel.receive_body(sequence)[0] if flags & HAS_BODY else None
        if message[0] == Status.PONG:  # the interrupt is over; forgotten here, it is before the head's next one
            with self._interrupting:
                self._num_pongs += 1
                self._down[Down.INTERRUPT] = -1
        self._up_link.send(b"answer", _DOORBELL.pack(*message), body=body)

    def interrupt(self, word: int, num_pongs: int) -> None:
        """Interrupt the agent, unless that is over.

        Parameters
        ----------
        word : int
            Which messages are meant.
        num_pongs : int
            How many interrupts were over when the head sent this one.
        """
        with self._interrupting:
            if num_pongs == self._num_pongs:
                self._down[Down.INTERRUPT] = word  # before the signal, whose handler reads it
                self._process.interrupt()

    def stacks(self) -> str:
        return self._process.stacks()


# -- the tunnel -------------------------------------------------------------------------------------------------------


class Tunnel(NodeEnd):
    """Carries messages between the head and an agent on another machine.

    It has a thread for each direction, one that waits for signals and one that waits for Ray. The first of them that
    fails, or finds one side gone, ends the process.

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
        self._num_pongs = 0
        self._ending = threading.Lock()  # held by the thread that ends this process

    def open(self) -> None:
        """Connect to the cluster, and start the agent on a machine."""
        seed, options = self._setup["seed"], self._setup["ray"]
        first_message = {key: value for key, value in self._setup.items() if key not in ("fds", "token", "ray")}
        runtime = hashlib.sha256(self._setup["token"].encode()).hexdigest()[:16]
        connect(options["address"])
        search = Search(options["num_nodes"], options["least_nodes"], seed[1], is_replacement=len(seed) > 2)
        self._actor, place, (self._machine, *links) = search.start(NodeActor, first_message, runtime)
        try:
            self._down_link, self._up_link = Link(True, place=links[0]), Link(False, place=links[1])
        except LinkLost as error:
            raise SystemExit(
                f"{error} Open the ports that the system gives to programs, between these machines."
            ) from None
        if place:
            self._print(f"it runs beside another node on {self._machine}, because no other machine is free.")
        with open(os.devnull, "wb") as nowhere:  # when Ray loses a machine it prints pages of its own logs
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)

    def run(self) -> NoReturn:
        """Carry messages until the head or the agent is gone."""
        for target in (self._carry_up, self._carry_signals, self._watch):
            threading.Thread(target=self._guarded, args=(target,), daemon=True).start()
        self._guarded(self._carry_down)
        self._end(3)

    def _guarded(self, carry: Any) -> None:
        """Run a thread of the tunnel. An error ends this process; to the head the agent has ended then."""
        try:
            carry()
        except BaseException as error:
            lost = f"messages of the agent on {self._machine} are lost: {type(error).__name__}: {error}"
            if isinstance(error, ray.exceptions.RayError):
                lines = str(error).strip().splitlines() or [""]
                line = lines[-1] if isinstance(error, ray.exceptions.RayTaskError) else lines[0]
                lost = f"the agent on {self._machine} is lost: {type(error).__name__}: {line}"
            elif isinstance(error, LinkLost):
                time.sleep(REASON_S)  # if Ray reports the actor's end meanwhile, ``_watch`` ends this process first
                lost = f"the agent on {self._machine} is lost: {error}"
            self._print(lost)
            self._end(3)

    def _end(self, code: int) -> NoReturn:
        """End the actor, and then this process. With code 0 the actor is gone when the process has ended."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process; this one must not return
        try:
            ray.kill(self._actor)
            if code == 0:
                self._up_link.await_cut(GONE_S)
        finally:
            os._exit(code)  # without the exit handlers of Ray, which could wait for a machine that is lost

    def _print(self, text: str) -> None:
        if not self._ending.locked():
            os.write(self._streams["stderr"], f"{text}\n".encode())

    def _watch(self) -> None:
        """Have the actor carry messages, and raise when Ray says that the actor is lost."""
        running = [
            self._actor.carry_down.options(concurrency_group="down").remote(),
            self._actor.carry_up.options(concurrency_group="up").remote(),
        ]
        # Both calls end by themselves only when the agent is dead, and ``_carry_up`` then ends this process.
        while running:
            ended, running = ray.wait(running)
            ray.get(ended)

    def _carry_down(self) -> None:
        """Carry messages to the agent until the head is gone."""
        channel = self._channel
        waiting = select.poll()
        waiting.register(channel.read_fd, select.POLLIN)
        waiting.register(self._head_fd, select.POLLIN)
        while True:
            message = channel.answer() if any(fd == channel.read_fd for fd, _ in waiting.poll()) else None
            if message is None:
                return
            kind, flags, sequence, _ = message
            body = channel.receive_body(sequence)[0] if flags & HAS_BODY else None
            self._own_up[Up.PHASE] = Phase.FUNCTION if kind in (Kind.CALL, Kind.ITEMS) else Phase.LOADING
            self._down_link.send(_DOORBELL.pack(*message), body=body)

    def _carry_up(self) -> None:
        """Carry replies and output from the agent. Its end becomes the end of this process."""
        while True:
            (what, content), body = self._up_link.receive()
            if what == b"answer":
                self._answer(_DOORBELL.unpack(content), body)
            elif what == b"end":
                if content == b"exit 0":
                    self._end(0)
                self._print(f"the agent on {self._machine} ended with {content.decode()}.")
                self._end(3)
            else:
                os.write(self._streams[what.decode()], content)

    def _answer(self, message: tuple[int, ...], body: Arriving | None) -> None:
        status, flags, sequence, value = message
        self._own_up[Up.PHASE] = Phase.IDLE
        if body is not None:
            self._channel.send_body(sequence, body)
        if status == Status.PONG:  # before the head gets it, so before the head's next interrupt
            self._num_pongs += 1
        self._channel.ring(status, flags, sequence, value)

    def _carry_signals(self) -> None:
        """Pass the head's signals on. They are blocked in all threads, so only ``sigwait`` takes them."""
        call = {"concurrency_group": "control"}
        while True:
            if signal.sigwait({signal.SIGINT, signal.SIGUSR2}) == signal.SIGINT:
                # Counted before the word is read: a word that comes in between has its own signal, which is taken next.
                num_pongs = self._num_pongs
                self._actor.interrupt.options(**call).remote(int(self._own_down[Down.INTERRUPT]), num_pongs)
            else:
                self._write_stacks(ray.get(self._actor.stacks.options(**call).remote()))


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Run a tunnel. The bootstrap calls this once ``sys.path`` is set."""
    # Before Ray starts threads, which inherit the mask: ``_carry_signals`` must be the only one to take these signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT, signal.SIGUSR2})
    tunnel = Tunnel(sock, setup)
    tunnel.open()
    tunnel.run()
