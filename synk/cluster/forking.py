"""What ``fork`` does where ``cluster=`` is given: it checks the options, counts the machines, and starts the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._master.session import Session
from synk._master.state.in_flight import SubmittedCalls
from synk._pure.cores import num_cores
from synk._wire.cell import is_frozen
from synk.cluster.head import ClusterSession
from synk.cluster.here import agents
from synk.cluster.split import Layout, counts_of
from synk.errors import StartupError, UnsupportedError


def check_nodes(cluster: Any, nodes: Any) -> tuple[int, int | None]:
    """Return the least and the greatest number of nodes to start; None for all machines of a cluster.

    Raises
    ------
    ValueError
        If there is no such cluster.
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


def open_session(
    num_workers: int | Sequence[int] | None,
    cluster: Any,
    nodes: Any,
    *,
    insecure: bool,
    timeout: float | None,
    seed: int,
    max_restarts: int,
    on_restart: tuple[Any, dict[str, Any]] | None,
    make_queue: Callable[[Session], SubmittedCalls],
) -> ClusterSession:
    """Start the nodes of a runtime, with one worker for each core where ``num_workers`` does not say how many.

    Raises
    ------
    ValueError, TypeError
        If an argument makes no sense.
    StartupError
        If an agent cannot be started.
    """
    least, num_nodes = check_nodes(cluster, nodes)
    if is_frozen():
        raise UnsupportedError(
            f"cannot fork with cluster={cluster!r}: got a frozen program, expected one that the interpreter runs, for "
            "a copy of a frozen one becomes a worker and no agent. Fork without cluster=."
        )
    if cluster == "here":
        assert num_nodes is not None
        counts = counts_of(max(num_cores() // num_nodes, 1) if num_workers is None else num_workers, num_nodes)
        process_type = agents(Layout(counts), max_restarts, seed)
    else:
        from synk.cluster.remote import machines_of, remote_agents

        cpus = machines_of(cluster, insecure=insecure)
        if len(cpus) < least:
            raise StartupError(
                f"cannot fork on {least} nodes: the cluster {cluster!r} has {len(cpus)} machines with CPUs. Add "
                "machines, or fork on fewer."
            )
        cpus = cpus[:num_nodes]
        counts = counts_of(cpus if num_workers is None else num_workers, len(cpus))
        process_type = remote_agents(Layout(counts), max_restarts, seed, cluster, least)
    return ClusterSession(
        Layout(counts),
        process_type,
        timeout=timeout,
        seed=seed,
        max_restarts=max_restarts,
        on_restart=on_restart,
        make_queue=make_queue,
    )


def refuse(cluster: Any, **options: Any) -> None:
    """Raise for an option of ``fork`` that has no meaning over nodes, so far."""
    for name, (value, default) in options.items():
        if value != default:
            raise UnsupportedError(
                f"cannot fork with cluster={cluster!r}: got {name}={value!r}, expected {default!r}, for it does not "
                "work over nodes yet. Leave it out, or fork without cluster=."
            )
