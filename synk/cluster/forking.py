"""``fork`` with ``cluster=``: checks the options, counts the machines, and starts the nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._processes.program import interpreter, search_path
from synk._pure.environment import num_cores
from synk._wire.cell import is_frozen
from synk.backends._assignment import DeviceAssignment
from synk.cluster import nodes as nodes_of
from synk.cluster.session import NodeSession
from synk.cluster.split import Topology, counts_of
from synk.errors import StartupError, UnsupportedError

CONNECT_S = 60.0
"""How long a cluster may take to say which machines it has."""

INSECURE = "SYNK_INSECURE_CLUSTER"
"""The variable of the environment that allows a cluster which lets strangers in."""

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


def check_nodes(cluster: Any, nodes: Any) -> tuple[int, int | None]:
    """Return the least and the greatest number of nodes to start; None in place of the greatest means all machines.

    Raises
    ------
    ValueError
        If ``cluster`` is not of a known form, or ``nodes`` is not a number of nodes or a pair of numbers.
    """
    is_address = isinstance(cluster, str) and (cluster == "auto" or ":" in cluster)
    if cluster != "here" and not is_address:
        raise ValueError(
            f"cannot fork: got cluster={cluster!r}, expected None, 'here' (the nodes are processes of this machine), "
            "'auto' or the address of a Ray cluster, such as '10.0.0.1:6379'."
        )
    if nodes is None and is_address:
        return 1, None
    bounds = nodes if isinstance(nodes, tuple) and len(nodes) == 2 else (nodes, nodes)
    are_integers = all(isinstance(each, (int, np.integer)) and not isinstance(each, bool) for each in bounds)
    if not are_integers or not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(
            f"cannot fork: got nodes={nodes!r}, expected how many nodes to start: an integer above 0, or the least and "
            "the greatest number, such as (2, 4)."
        )
    return int(bounds[0]), int(bounds[1])


def open_session(num_workers: int | Sequence[int] | None, cluster: Any, nodes: Any, **how: Any) -> Any:
    """Start the nodes of a runtime. Without ``num_workers`` a node has one worker for each of its cores.

    ``how``: what any session is given.

    Raises
    ------
    ValueError, TypeError
        If ``cluster``, ``nodes`` or ``num_workers`` has no valid value.
    UnsupportedError
        If the program is frozen.
    StartupError
        If the cluster has too few machines or cannot be reached, or an agent cannot be started.
    """
    least, num_nodes = check_nodes(cluster, nodes)
    if is_frozen():
        raise UnsupportedError(
            f"cannot fork with cluster={cluster!r}: got a frozen program, expected one that the interpreter runs: a "
            "copy of a frozen program can become a worker, but not an agent. Fork without cluster=."
        )
    options: dict[str, Any] = {"max_restarts": how["max_restarts"], "runtime_seed": how["seed"]}
    if cluster == "here":
        assert num_nodes is not None
        counts = counts_of(max(num_cores() // num_nodes, 1) if num_workers is None else num_workers, num_nodes)
    else:
        cpus = machines_of(cluster)
        if len(cpus) < least:
            raise StartupError(
                f"cannot fork on {least} nodes: the cluster {cluster!r} has {len(cpus)} machines with CPUs. Add "
                "machines, or fork on fewer."
            )
        cpus = cpus[:num_nodes]
        counts = counts_of(cpus if num_workers is None else num_workers, len(cpus))
        options["ray"] = {"address": cluster, "num_nodes": len(cpus), "least_nodes": least}
    assignment = DeviceAssignment(tuple(f"cpu:{rank}" for count in counts for rank in range(count)))
    kind = nodes_of.TunnelProcess if "ray" in options else nodes_of.AgentProcess
    topology = Topology(counts)
    placement = nodes_of.NodePlacement("numpy", assignment, topology=topology, process_type=kind, options=options)
    return NodeSession(placement, **how)


def machines_of(address: str) -> list[int]:
    """Return how many CPUs each machine of a Ray cluster has.

    A child asks, because Ray is never imported into the user's program.

    Raises
    ------
    StartupError
        If the cluster cannot be reached, or it lets strangers in and the environment does not allow that.
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
    if not told["is_safe"] and os.environ.get(INSECURE, "0") in ("", "0"):
        raise StartupError(
            f"cannot fork on the cluster {address!r}: it has neither token authentication nor TLS, so whoever reaches "
            "its ports can run code on all machines. Start Ray and this program with RAY_AUTH_MODE=token or "
            f"RAY_USE_TLS=1, or set {INSECURE}=1 in a network that you trust."
        )
    return [machine["cpus"] for machine in told["machines"]]


def refuse(cluster: Any, **options: Any) -> None:
    """Raise UnsupportedError for an option of ``fork`` that does not work over nodes yet.

    ``options`` maps the name of an option to its value and its default.
    """
    for name, (value, default) in options.items():
        if value != default:
            raise UnsupportedError(
                f"cannot fork with cluster={cluster!r}: got {name}={value!r}, expected {default!r}, because it does "
                "not work over nodes yet. Leave it out, or fork without cluster=."
            )
