"""Nodes on other machines, as the head sees them: child processes that carry messages; see ``synk.cluster.ray``."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, ClassVar

from synk._master.processes.program import interpreter, search_path
from synk.cluster.here import AgentProcess
from synk.cluster.split import Layout
from synk.errors import StartupError

CONNECT_S = 60.0
"""How long a cluster may take to say which machines it has."""

_TELL = """\
import sys, json
sys.path[:] = json.loads(sys.argv[1])
from synk.cluster.ray_machines import tell_machines
tell_machines(sys.argv[2])
"""

_MISSING = (
    "cannot fork on a cluster: got no Ray in this environment, expected it here and on all machines. Install it: "
    "pip install 'synkhronos[ray]'."
)


class RemoteProcess(AgentProcess):
    """The agent of a node on another machine: a child of the program which carries its messages.

    Attributes
    ----------
    address : str
        Of the cluster. Set in a subclass for each runtime, like those of the base.
    least_nodes : int
        With as many machines the runtime goes on: nodes whose machines are lost move to those that are left.
    """

    address: ClassVar[str]
    least_nodes: ClassVar[int]
    _module, _kind = "cluster.ray", "tunnel"

    def start(self, setup: dict[str, Any], *others: Any) -> None:
        num_nodes = len(self.layout.counts)
        cluster = {"address": self.address, "num_nodes": num_nodes, "least_nodes": min(self.least_nodes, num_nodes)}
        super().start({**setup, "ray": cluster}, *others)


def remote_agents(layout: Layout, max_restarts: int, seed: int, address: str, least_nodes: int) -> type[RemoteProcess]:
    """Return the type of the agents of one runtime."""
    of_runtime = {"layout": layout, "max_restarts": max_restarts, "seed": seed}
    own = {**of_runtime, "address": address, "least_nodes": least_nodes}
    return type("RemoteProcess", (RemoteProcess,), own)


def machines_of(address: str, *, insecure: bool) -> list[int]:
    """Return how many CPUs each machine of a Ray cluster has.

    Raises
    ------
    StartupError
        If the cluster cannot be reached, or it asks for no token and ``insecure`` is False.
    """
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    arguments = [interpreter(), *safe_path, "-c", _TELL, json.dumps(search_path()), address]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=CONNECT_S, check=False)
    except subprocess.TimeoutExpired:
        raise StartupError(
            f"cannot fork on the cluster {address!r}: it did not answer within {CONNECT_S:g} s."
        ) from None
    if done.returncode != 0:
        if "No module named 'ray'" in done.stderr:
            raise StartupError(_MISSING)
        last = done.stderr.strip().splitlines()[-1:] or ["no reason was given"]
        raise StartupError(f"cannot fork on the cluster {address!r}: {last[0]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    if not (told["has_token"] or insecure):
        raise StartupError(
            f"cannot fork on the cluster {address!r}: it asks for no token, so whoever reaches its ports can run code "
            "on all machines. Start it with RAY_AUTH_MODE=token, or pass insecure=True in a network that you trust."
        )
    return [machine["cpus"] for machine in told["machines"]]
