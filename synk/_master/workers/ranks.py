"""Messages that are addressed to single ranks, wherever their workers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synk._master.workers.requests import Request
from synk._master.workers.workers import Workers
from synk._wire.items import Items
from synk._wire.memory import Segment
from synk._wire.messages import Kind, Reply


class Ranks:
    """The ranks of a runtime whose workers run on this machine. Over nodes, ``synk.cluster.ranks`` takes its place.

    Parameters
    ----------
    workers : Workers

    Attributes
    ----------
    log : Log
        What all ranks must know.
    words : object
        Has ``down``, the numbers of all ranks; see ``synk._wire.control``.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.log = workers.log
        self.words: Any = workers.processes

    @property
    def num_ranks(self) -> int:
        return self._workers.world_size

    @property
    def is_closed(self) -> bool:
        return self._workers.processes.is_closed

    def prepare(self, deadline: float | None) -> bool:
        """Have workers replaced that have ended. Return whether any was, so that its rank may lack something."""
        return False  # the session knows which of its workers are new

    def send_items(
        self,
        rank: int,
        items: Items,
        segments: Sequence[Segment],
        deadline: float | None,
        what: str,
        *,
        has_residents: bool,
    ) -> Request:
        """Send one rank items of a map, while other ranks may be at theirs. :meth:`reply` returns the reply.

        ``has_residents``: whether they need the resident objects that the rank holds.
        """
        return self._workers.send(Kind.ITEMS, [rank], 0, {rank: items}, segments, deadline, "map", what)

    def reply(self, request: Request, rank: int) -> Reply:
        """Return the reply to what one rank was sent, once it has answered."""
        return request.replies[rank]

    def ask(
        self, kind: Kind, contents: dict[int, Any], deadline: float | None, phase: str, what: str
    ) -> dict[int, Reply]:
        """Send each rank in ``contents`` its message and return their replies; see ``Workers.ask``."""
        return self._workers.ask(kind, list(contents), 0, contents, [], deadline, phase, what)

    def ask_living(self, kind: Kind, content: Any, deadline: float, phase: str, what: str) -> dict[int, Reply]:
        """Send a message to the ranks that live and return their replies. No rank is asked while any is busy."""
        workers = self._workers
        living = [each.rank for each in workers.by_rank if each.is_ready and not each.is_dead]
        if self.is_closed or workers.requests or not living:
            return {}
        return self._ask_of(living, kind, content, deadline, phase, what)

    def _ask_of(
        self, processes: list[int], kind: Kind, content: Any, deadline: float, phase: str, what: str
    ) -> dict[int, Reply]:
        """Send a message to all ranks of living processes and return their replies."""
        return self.ask(kind, dict.fromkeys(processes, content), deadline, phase, what)
