"""Nodes on the machines of a Ray cluster. Only ``synk.cluster.ray*`` import Ray, and never in the user's program.

For each node the program has a child, the *tunnel*. To the head it is the agent itself, with the same pipes and
sockets. It is a driver of Ray: it has an actor made on a machine, and carries messages between the program and the
actor, unopened. The actor starts the agent as a child of its own. Whoever ends takes the next one with it: Ray ends
the actors of a driver that is gone, and the kernel ends an agent whose actor is.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import numpy as np
import ray

from synk._master.processes.placement import num_threads_set
from synk._master.processes.worker_process import WorkerProcess
from synk._pure.cores import num_cores
from synk._wire.control import Down, Phase, Up, control_blocks
from synk._wire.descriptors import Descriptor
from synk._wire.lifeline import tie_to_master
from synk._wire.memory import Segment
from synk._wire.messages import HAS_BODY, Kind, Status
from synk.cluster.channel import NodeChannel
from synk.cluster.ray_machines import Search, connect
from synk.cluster.split import merged

_SMALL_NBYTES = 1 << 16
"""Bodies of at least this size travel as arrays, which Ray does not copy on the machine where they arrive."""

Event = tuple[Any, ...]


# -- the actor --------------------------------------------------------------------------------------------------------


class _AgentProcess(WorkerProcess):
    """The agent as a child of its actor."""

    _channel_type = NodeChannel
    _module, _kind = "cluster.loop", "node"

    def streams(self) -> dict[int, str]:
        """Return the names of what the agent prints to, by descriptor."""
        return {int(output.fd): name for output, name in zip(self._outputs, ("stdout", "stderr", "log"))}


class NodeActor:
    """Starts an agent on its machine, and passes messages on.

    Parameters
    ----------
    setup : dict
        The agent's first message.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._control = Segment.create(setup["control_nbytes"])
        down, _ = control_blocks(self._control.buffer, setup["world_size"], 0)
        self._down = down[setup["rank"]]
        self._down[[Down.INTERRUPT, Down.COMMITTED]] = -1
        self._process = _AgentProcess(setup["rank"])
        here = [entry for entry in sys.path if os.path.isabs(entry)]
        own = {"master_pid": os.getpid(), "import_path": here, "sys_path": merged(setup["sys_path"], here)}
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}  # that is Ray's
        environment |= num_threads_set(environment, max(num_cores() // setup["num_workers"], 1))
        self._process.start(
            {**setup, **own, "own_path": here, "host": self.place()}, environment, self._control.fd, os.urandom(32), {}
        )
        self._poll = select.poll()
        for fd, _ in self._process.watched():
            self._poll.register(fd, select.POLLIN)

    def place(self) -> str:
        """Return the address of the machine."""
        return ray.util.get_node_ip_address()

    def deliver(self, kind: int, flags: int, sequence: int, value: int, body: Any) -> None:
        """Pass a message on to the agent."""
        channel = self._process.channel
        if body is not None:
            channel.send_body(sequence, body)
        channel.ring(kind, flags, sequence, value)

    def events(self) -> list[Event]:
        """Wait until the agent has answered, printed or ended, and return what it was."""
        found: list[Event] = []
        while not found:
            process, names = self._process, self._process.streams()
            ready = [fd for fd, _ in self._poll.poll()]
            for fd in ready:
                if fd in names:
                    found += self._printed(fd, names[fd])
            if process.channel.read_fd in ready:
                found += self._answered()
            elif process.pidfd in ready:
                for fd, name in names.items():
                    while printed := self._printed(fd, name):
                        found += printed
                found.append(("end", process.reap()))
        return found

    def _printed(self, fd: int, name: str) -> list[Event]:
        try:
            data = os.read(fd, 1 << 16)
        except (BlockingIOError, OSError):
            return []
        if not data:
            self._poll.unregister(fd)
        return [("printed", name, data)] if data else []

    def _answered(self) -> list[Event]:
        channel = self._process.channel
        message = channel.answer()
        if message is None:  # its end follows
            self._poll.unregister(channel.read_fd)
            return []
        status, flags, sequence, value = message
        body = packed(channel.receive_body(sequence)[0]) if flags & HAS_BODY else None
        return [("answer", status, flags, sequence, value, body)]

    def interrupt(self, word: int) -> None:
        """Interrupt the agent. ``word`` says which messages are meant."""
        self._down[Down.INTERRUPT] = word
        self._process.interrupt()

    def stacks(self) -> str:
        return self._process.stacks(1.0)


def packed(body: Any) -> Any:
    """Return a body in the form in which Ray carries it: bytes if it is small, else an array."""
    array = np.frombuffer(body, np.uint8)
    return array.tobytes() if array.nbytes < _SMALL_NBYTES else array


# -- the tunnel -------------------------------------------------------------------------------------------------------


class Tunnel:
    """Carries messages between the head and an agent on another machine.

    Parameters
    ----------
    sock, setup
        As for an agent; see ``synk.cluster.loop``.
    """

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        fds = setup["fds"]
        for fd in fds.values():
            os.set_inheritable(fd, False)
        self._channel = NodeChannel(sock, Descriptor(fds["down"]), Descriptor(fds["up"]), bytes.fromhex(setup["token"]))
        self._head_fd, self._pulse = tie_to_master(setup)
        self._streams = {"stdout": os.dup(1), "stderr": os.dup(2), "log": fds["log"]}
        self._stacks_fd = fds["stacks"]
        self._control = Segment(fds["control"], setup["control_nbytes"], is_writable=True, segment_id=0)
        down, up = control_blocks(self._control.buffer, setup["world_size"], 0)
        self._own_down, self._own_up = down[setup["rank"]], up[setup["rank"]]
        self._control.close_fd()
        self._setup = {key: value for key, value in setup.items() if key not in ("fds", "token", "ray")}
        self._options = setup["ray"]
        self._runtime = hashlib.sha256(setup["token"].encode()).hexdigest()[:16]
        self._machine = ""
        self._is_over = False

    def open(self) -> None:
        """Connect to the cluster, and start the agent on a machine."""
        connect(self._options["address"])
        seed, options = self._setup["seed"], self._options
        search = Search(options["num_nodes"], options["least_nodes"], seed[1], is_replacement=len(seed) > 2)
        self._actor, self._machine, place = search.start(NodeActor, self._setup, self._runtime)
        if place:
            self._print(f"it runs beside another node on {self._machine}, for no other machine is free.")
        with open(os.devnull, "wb") as nowhere:  # Ray prints pages of its own logs when it loses a machine
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)

    def run(self) -> NoReturn:
        """Carry messages until the head or the agent is gone."""
        for target in (self._carry_up, self._carry_signals):
            threading.Thread(target=self._guarded, args=(target,), daemon=True).start()
        self._guarded(self._carry_down)
        raise AssertionError

    def _guarded(self, carry: Any) -> None:
        """Run one direction. This process ends with it: the head takes that for the end of the agent."""
        try:
            carry()
            self._end(0)
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            self._print(f"the agent on {self._machine} is lost: {type(error).__name__}: {lines[0] if lines else ''}")
            self._end(3)
        except (OSError, EOFError) as error:
            self._print(f"the head cannot be reached: {error}")
            self._end(3)

    def _end(self, code: int) -> NoReturn:
        self._is_over = True
        ray.kill(self._actor)
        os._exit(code)

    def _print(self, text: str) -> None:
        if not self._is_over:
            os.write(self._streams["stderr"], f"{text}\n".encode())

    def _carry_down(self) -> None:
        channel, deliver = self._channel, self._actor.deliver.options(concurrency_group="down")
        waiting = select.poll()
        waiting.register(channel.read_fd, select.POLLIN)
        waiting.register(self._head_fd, select.POLLIN)
        while True:
            message = channel.answer() if any(fd == channel.read_fd for fd, _ in waiting.poll()) else None
            if message is None:
                return
            kind, flags, sequence, value = message
            body = packed(channel.receive_body(sequence)[0]) if flags & HAS_BODY else None
            if kind in (Kind.CALL, Kind.LOAD):
                self._own_up[Up.PHASE] = Phase.FUNCTION if kind == Kind.CALL else Phase.LOADING
            deliver.remote(kind, flags, sequence, value, body)

    def _carry_up(self) -> None:
        events = self._actor.events.options(concurrency_group="up")
        while True:
            for event in ray.get(events.remote()):
                if event[0] == "answer":
                    self._answer(*event[1:])
                elif event[0] == "printed":
                    os.write(self._streams[event[1]], event[2])
                else:
                    self._print(f"the agent on {self._machine} ended with {event[1]}.")
                    self._end(0 if event[1] == "exit 0" else 3)

    def _answer(self, status: int, flags: int, sequence: int, value: int, body: Any) -> None:
        self._own_up[Up.PHASE] = Phase.IDLE
        if body is not None:
            self._channel.send_body(sequence, body)
        self._channel.ring(status, flags, sequence, value)
        if status == Status.BYE:
            self._end(0)

    def _carry_signals(self) -> None:
        call = {"concurrency_group": "control"}
        while True:
            if signal.sigwait({signal.SIGINT, signal.SIGUSR2}) == signal.SIGINT:
                self._actor.interrupt.options(**call).remote(int(self._own_down[Down.INTERRUPT]))
            else:
                text = ray.get(self._actor.stacks.options(**call).remote())
                os.write(self._stacks_fd, text.encode("utf-8", "replace")[: 1 << 15])


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Run a tunnel. The bootstrap calls this once ``sys.path`` is set."""
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT, signal.SIGUSR2})  # Ray's threads inherit this
    tunnel = Tunnel(sock, setup)
    tunnel.open()
    tunnel.run()
