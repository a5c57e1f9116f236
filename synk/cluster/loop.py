"""The process of an agent, whose life is tied to the head's.

The head interrupts it by SIGINT, whose handler only sets a flag and wakes the wait of the session. So no interrupt
breaks the session off between two lines. By SIGUSR2 the head asks for the stacks of the ranks.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
from typing import Any

from synk._master.processes.reports import where
from synk._master.workers.starting import own_versions
from synk._wire.control import Down, Phase, Up, is_interrupted
from synk._wire.descriptors import Descriptor
from synk._wire.logs import send_records
from synk._wire.messages import HAS_BODY, Body, Kind, Status
from synk.cluster.agent import Agent
from synk.cluster.channel import NodeEnd, unpacked


class AgentLoop(NodeEnd):
    """Receives messages, has the agent act on them, and replies, until the head says goodbye or is gone."""

    def __init__(self, sock: socket.socket, setup: dict[str, Any]) -> None:
        super().__init__(sock, setup)
        self._sequence = -1
        self._agent: Agent | None = None

    def start(self) -> None:
        """Start the session, and say hello."""
        # A process inherits blocked and ignored signals from the one that starts it.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGUSR2, self._on_question)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        send_records(Descriptor(self._setup["fds"]["log"]))
        self._agent = Agent(self._setup, self._is_interrupted)
        hello = {"versions": own_versions(), "device": self._agent.description}
        self._reply(Status.HELLO, 0, pickle.dumps(hello, protocol=5))

    def serve(self) -> None:
        """Answer messages until the head says goodbye or is gone."""
        agent = self._agent
        assert agent is not None
        while True:
            message = self._next_message(agent)
            if message is None:
                # The head is dead. The workers have process groups of their own, but are tied to this process and end
                # with it.
                os.killpg(0, signal.SIGKILL)
                return
            kind, flags, self._sequence, _ = message
            body = self._receive_body() if flags & HAS_BODY else None
            if kind == Kind.CLOSE:
                agent.session.close()  # before the reply, so that the node's workers are gone when the head has it
                self._reply(Status.BYE, self._sequence, None)
                return
            if kind == Kind.PING:
                agent.end_items()
                self._answer_items(agent)  # before the pong, because the head takes no answer to an older message later
                self._reply(Status.PONG, self._sequence, None)
            # ``_on_interrupt`` has ignored a signal that came before this message was read. From here on it does not,
            # because ``_sequence`` is the number of this message.
            elif self._is_interrupted():
                self._reply(Status.INTERRUPTED, self._sequence, pickle.dumps(None))
            else:
                self._own_up[Up.PHASE] = Phase.FUNCTION if kind in (Kind.CALL, Kind.ITEMS) else Phase.LOADING
                answer = agent.act(kind, body, self._sequence)
                body = None  # frees the memory of large arguments before the reply and the wait
                if answer is not None:
                    self._answer(self._sequence, *answer)

    def _next_message(self, agent: Agent) -> tuple[int, int, int, int] | None:
        """Wait for a message. Meanwhile answer messages whose items have ended. Return None if the head is gone.

        If answers are left because the socket is full, the wait also ends when it has room again.
        """
        channel = self._channel
        while True:
            are_answered = self._answer_items(agent)
            waiting = select.poll()
            for fd in (channel.read_fd, self._head_fd, *agent.watched()):
                waiting.register(fd, select.POLLIN)
            if not are_answered:
                waiting.register(channel.sock, select.POLLOUT)
            fds = {fd for fd, _ in waiting.poll()}
            if channel.read_fd in fds:
                self._answer_items(agent)  # what has happened before the message is told before it is acted on
                return channel.answer()
            if self._head_fd in fds:
                return None

    def _answer_items(self, agent: Agent) -> bool:
        """Answer messages whose items have ended, as long as sending does not wait. Return whether all were answered.

        The head may be sending at the same time. If both sides waited for room, neither would read.
        """
        answers = agent.answers()
        while self._channel.has_room:
            ended = next(answers, None)
            if ended is None:
                return True
            sequence, answer = ended
            self._answer(sequence, *answer)
        return False

    def _answer(self, sequence: int, status: Status, data: Any) -> None:
        """Reply to a message that ranks have run."""
        agent = self._agent
        self._own_up[Up.PHASE] = Phase.FUNCTION if agent is not None and agent.runs_items else Phase.IDLE
        for stream in (sys.stdout, sys.stderr):  # the output of a call must arrive before its reply
            stream.flush()
        self._reply(status, sequence, data)

    def _receive_body(self) -> Body:
        data, fds = self._channel.receive_body(self._sequence)
        for fd in fds:  # an agent shares no memory with the head
            os.close(fd)
        body = unpacked(data)
        assert isinstance(body, Body)
        return body

    def _reply(self, status: Status, sequence: int, body: Any) -> None:
        if body is not None:
            self._channel.send_body(sequence, body)
        self._channel.ring(status, HAS_BODY if body is not None else 0, sequence, 0)

    def _is_interrupted(self) -> bool:
        return is_interrupted(int(self._own_down[Down.INTERRUPT]), self._sequence)

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        # The word in the control block says for which message the signal is meant. A signal that comes late finds
        # another message, and is ignored.
        if self._agent is not None and self._is_interrupted():
            self._agent.session.workers.waiting.interrupt()

    def _on_question(self, signum: int, frame: Any) -> None:
        self._write_stacks("it is starting" if self._agent is None else where(self._agent.session.workers.processes))


def main(sock: socket.socket, setup: dict[str, Any]) -> None:
    """Run an agent. The bootstrap calls this once ``sys.path`` is set."""
    sys.path[:] = setup["sys_path"]
    sys.argv[:] = setup["argv"]
    loop = AgentLoop(sock, setup)
    loop.start()
    loop.serve()
