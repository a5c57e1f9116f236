"""Programs whose messages travel while the rank computes, in an order that is found automatically.

`schedule` orders the nodes of any graph and runs nothing. `flow` records a NumPy function, orders its operations, and
runs them with ``synk.comm``.
"""

from __future__ import annotations

from synk.extensions._flow import Deferred, Flow, Step, Timed, flow
from synk.extensions._ordering import schedule

__all__ = ["Deferred", "Flow", "Step", "Timed", "flow", "schedule"]
