"""The machines of a Ray cluster: which ones there are, and which one starts the actor of a node."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

HEDGE_S = 10.0
"""How long a machine may take to start an actor before another machine is tried beside it."""

START_S = 90.0
"""How long all machines may take together. The head waits for 120 s, which includes importing Ray."""

AGAIN_S = 1.0
"""After this time the machines are tried again, if Ray still has the names of actors that were there before."""

REACH_S = 10.0
"""How long the address of a cluster may take to accept a connection."""

Machine = dict[str, Any]


def machines() -> list[Machine]:
    """Return the machines of the cluster that have CPUs to give, the largest first."""
    found = [
        {
            "id": each["NodeID"],
            "address": each["NodeManagerAddress"],
            "port": each["NodeManagerPort"],
            "cpus": int(each["Resources"].get("CPU", 0)),
        }
        for each in ray.nodes()
        if each["Alive"]
    ]
    usable = [each for each in found if each["cpus"]]
    return sorted(usable, key=lambda each: (-each["cpus"], each["address"], each["id"]))


def tell_machines(address: str) -> None:
    """Print the machines of a cluster, and whether strangers are kept out, as JSON. It runs in a process of its own."""
    if address != "auto":  # Ray would ask a wrong address for a minute
        host, _, port = address.rpartition(":")
        _reach(host.strip("[]"), int(port), REACH_S)
    connect(address)
    has_token = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    has_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")  # both sides show certificates then
    print(json.dumps({"machines": machines(), "is_safe": has_token or has_tls}))


def connect(address: str) -> None:
    """Make this process a driver of the cluster."""
    ray.init(address=address, namespace="synk", log_to_driver=False, configure_logging=False)


def _reach(host: str, port: int, timeout: float) -> None:
    """Raise OSError if nobody accepts a connection there."""
    socket.create_connection((host, port), timeout).close()


def _is_lost(machine: Machine) -> bool:
    """Whether a machine does not answer. Ray itself takes up to eleven seconds to say so."""
    try:
        _reach(machine["address"], machine["port"], 1.0)
    except OSError:
        return True
    return False


class Search:
    """Starts the actor of a node on a machine that has room for it.

    Parameters
    ----------
    num_nodes : int
        The number of nodes of the runtime.
    least_nodes : int
        The number of machines that it needs at least.
    number : int
        The number of the node.
    is_replacement : bool
        Whether the node is started again. Then it may share a machine with another node.
    """

    def __init__(self, num_nodes: int, least_nodes: int, number: int, *, is_replacement: bool) -> None:
        self._num_nodes, self._least_nodes = num_nodes, least_nodes
        self._number, self._is_replacement = number, is_replacement
        self._problems: list[str] = []

    def start(self, actor_type: type, setup: dict[str, Any], runtime: str) -> tuple[Any, int, str]:
        """Return an actor that has started, its place on its machine, and the address of the machine.

        In place 0 the actor has CPUs of its own. In a later place it shares those of another node.

        An actor that a machine does not start is ended only when another machine has started one, because nothing tells
        a slow machine from one that has no CPU to give.

        Raises
        ------
        SystemExit
            If no machine starts the actor.
        """
        pending: dict[Any, tuple[Any, Machine, int]] = {}
        places, limit, are_taken = self._places(), time.monotonic() + START_S, False
        while (remaining := limit - time.monotonic()) > 0:
            machine, place = next(places, (None, 0))
            if machine is not None:
                actor = _made(actor_type, setup, f"{runtime}-{machine['id']}-{place}", machine, place)
                if actor is None:
                    are_taken = True
                    continue
                pending[actor.host.remote()] = actor, machine, place
            elif not pending:
                if not (are_taken and self._is_replacement):
                    break
                time.sleep(AGAIN_S)
                places, are_taken = self._places(), False
                continue
            patience = remaining if machine is None else min(HEDGE_S, remaining)
            for asked in ray.wait([*pending], timeout=patience)[0]:
                actor, tried, place = pending.pop(asked)
                try:
                    host = ray.get(asked)
                except ray.exceptions.RayError as error:
                    self._give_up(actor, tried, f": {type(error).__name__}: {str(error).strip().splitlines()[-1]}")
                    continue
                for other, _, _ in pending.values():
                    ray.kill(other)
                return actor, place, host
        for actor, tried, _ in pending.values():
            self._give_up(actor, tried, " did not start it in time; perhaps its CPUs are taken")
        raise SystemExit("; ".join(self._problems) or "no machine of the Ray cluster is free for it.")

    def _give_up(self, actor: Any, machine: Machine, problem: str) -> None:
        self._problems.append(f"{machine['address']}{problem}")
        ray.kill(actor)

    def _places(self) -> Iterator[tuple[Machine, int]]:
        """Yield the machines to try, and the place on each.

        A node that is started again gets a machine of its own if there is one. Otherwise it gets a place beside another
        node, as long as the runtime has the machines that it needs.
        """
        may_share = self._is_replacement and self._least_nodes < self._num_nodes
        for place in range(self._num_nodes if may_share else 1):
            candidates = self._candidates()
            if len(candidates) < self._least_nodes:
                self._problems.append(
                    f"the cluster has only {len(candidates)} of at least {self._least_nodes} machines left"
                )
                return
            for machine in candidates:
                yield machine, place

    def _candidates(self) -> list[Machine]:
        """Return the machines to try: first the one that the head has counted; at a later start the spares first."""
        found = machines()
        own, spare = found[self._number : self._number + 1], found[self._num_nodes :]
        others = [each for each in found[: self._num_nodes] if each not in own]
        if not self._is_replacement:
            return [*own, *spare, *others]
        return [machine for machine in [*spare, *own, *others] if not _is_lost(machine)]


def _made(actor_type: type, setup: dict[str, Any], name: str, machine: Machine, place: int) -> Any:
    """Return an actor that is about to start on a machine, or None if another node has this place there.

    Ray counts the CPUs of the first place only. Names keep two nodes from the same place.
    """
    remote: Any = ray.remote
    make = remote(concurrency_groups={"carry": 1, "listen": 1, "control": 1})(actor_type)
    num_cpus = 0 if place else min(setup["num_workers"], machine["cpus"])
    strategy = NodeAffinitySchedulingStrategy(machine["id"], soft=False)
    try:
        return make.options(num_cpus=num_cpus, scheduling_strategy=strategy, name=name).remote(setup)
    except ValueError as error:  # another node of this runtime has an actor with this name
        if "already" not in str(error):
            raise
        return None
