"""A Ray cluster of several raylets on this machine, in a process of its own. It does what it is told line by line.

It prints its address. ``lose PID`` kills the machine on which a process runs, without a word to anybody; ``add`` adds a
machine. Each line is answered by ``done``. The end of its input ends the cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster


def main(num_machines: int, num_cpus: int) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    machines = [cluster.add_node(num_cpus=num_cpus) for _ in range(num_machines)]
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "lose":
            above = set(ancestors(int(rest[0])))
            lost = next(each for each in machines if raylet_pid(each) in above)
            machines.remove(lost)
            cluster.remove_node(lost, allow_graceful=False)
        elif word == "add":
            machines.append(cluster.add_node(num_cpus=num_cpus))
            cluster.wait_for_nodes()
        print("done", flush=True)
    cluster.shutdown()


def raylet_pid(machine: Any) -> int:
    (raylet,) = machine.all_processes["raylet"]
    return int(raylet.process.pid)


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        pid = int(stat.rsplit(")", 1)[1].split()[1])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
