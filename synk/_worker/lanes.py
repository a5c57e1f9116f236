"""The lanes of a rank: what each call in flight has to itself there; see ``synk._master.lanes``."""

from __future__ import annotations

from synk._wire.control import Down, Up, control_blocks
from synk._wire.memory import Segment
from synk._worker.execute import Executor
from synk._worker.plans import PreparedPlan
from synk.backends import Backend
from synk.communicators._shm import ShmCommunicator


class WorkerLane:
    """What a call has to itself on its rank; see ``synk._master.lanes``."""

    def __init__(self, index: int, rank: int, world_size: int, control: Segment, backend: Backend) -> None:
        self.index = index
        self.down, self.up = control_blocks(control.buffer, world_size, index)
        self.executor = Executor(rank, backend, self.down)
        self.first_down = memoryview(self.down[0])
        self.own_up = memoryview(self.up[rank])  # stores through it cost a third of NumPy's
        self.published = memoryview(self.up.T[Up.PUBLISHED])
        self.communicator: ShmCommunicator | None = None
        self.called: PreparedPlan | None = None  # the plan of the last call

    def rows(self) -> dict[int, int]:
        """Return how many rows each rank has that runs the call under way."""
        return {rank: row[Down.ROWS] for rank, row in enumerate(self.down.tolist()) if row[Down.PARTICIPATES]}
