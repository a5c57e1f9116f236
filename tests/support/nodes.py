"""What tests over nodes look at: the agents, and what a runtime is waiting for."""

from __future__ import annotations

import fcntl
import sys
import termios
from typing import Any

import numpy as np

import synk
from support.harness import assert_right, kill_and_wait, wait_for


def agents(runtime: Any) -> list[int]:
    """Return the pid of each node's agent."""
    return [node.process.pid for node in runtime._session.processes.nodes]


def kill_and_hear(runtime: Any, *pids: int) -> None:
    """End workers or agents, and wait until the program knows of it: agents tell of their workers a little later."""
    kill_and_wait(*pids)
    hear_of(runtime, *pids)


def hear_of(runtime: Any, *pids: int) -> None:
    """Wait until the program knows that workers or agents have ended."""
    nodes = runtime._session.processes.nodes

    def is_known() -> bool:
        for node in nodes:
            node.pump()
        return not any(process.pid in pids for node in nodes for process in node.living.values())

    assert wait_for(is_known)


def num_unread(runtime: Any, node: int) -> int:
    """Return how many answers of a node the head has not read."""
    fd = runtime._session.processes.nodes[node].process.link.read_fd
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder) // 8


def square(n: int) -> int:
    return n * n


def assert_maps(runtime: synk.Runtime) -> None:
    """Assert that all ranks take items, and that calls are right."""
    assert list(runtime.map(square, range(50), batch_size=1)) == [n * n for n in range(50)]
    assert_right(runtime)


def total(x: np.ndarray) -> Any:
    return synk.comm.all_reduce(x.sum(), "sum")


def assert_talks(runtime: synk.Runtime) -> None:
    """Assert that all ranks reach each other, by short and by long arrays."""
    f = runtime.function(lambda x: (total(x), synk.comm.all_reduce(np.full(100_000, x[0]), "sum")[-1]), outputs=None)
    assert f(np.arange(4.0)) == [(6.0, 6.0)] * 4
