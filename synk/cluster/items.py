"""The items of a map that run on a node. Several messages of the head are in flight at a time, each for one rank."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator

from synk._master.session import Session
from synk._master.workers.requests import Request
from synk._wire.messages import Status
from synk.cluster.orders import RankOrders, RankReplies, beside
from synk.errors import CallCancelled


class ItemsInFlight:
    """The messages with items that the head has sent and the node has not answered yet.

    No other operation begins in the meantime: the head settles a map before it sends anything else.

    Parameters
    ----------
    session : Session
        The session of the node.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._requests: dict[int, tuple[int, Request]] = {}  # by the number of the head's message, with its rank

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def are_running(self) -> bool:
        """Whether any rank runs items."""
        return any(request.pending and not request.is_lost for _, request in self._requests.values())

    def send(self, sequence: int, order: RankOrders) -> None:
        """Pass items on to their rank, unopened."""
        # Large pickles are views of the head's message, whose memory is freed with the last of them.
        ((rank, items),) = order.contents.items()
        items = items._replace(pickles=[*map(beside, items.pickles)])
        request = self._session.ranks.send_items(rank, items, [], None, order.what, has_residents=False)
        self._requests[sequence] = rank, request

    def settle(self) -> None:
        """Wait until no rank runs items any more."""
        try:
            for _, request in self._requests.values():
                self._session.workers.wait(request)
        except Exception as error:
            self._lose(error)

    def end(self) -> None:
        """End the items that ranks run."""
        error = CallCancelled("the items were interrupted.")
        self._session.workers.recovery.settle_after(error)
        self._lose(error)

    def answers(self) -> Iterator[tuple[int, Status, RankReplies | None]]:
        """Take in replies and deaths, without waiting. Yield the answers to the head: sequence, status and reply.

        A message is forgotten when its answer is taken from the generator. The caller may stop in between; the other
        answers come the next time.
        """
        session = self._session
        try:
            with session.entered("map"):
                session.workers.pump()
        except Exception as error:
            self._lose(error)
        for sequence, (rank, request) in list(self._requests.items()):
            if request.pending and request.error is None:
                continue
            # Only now that it has ended: a request that is not among the session's would be settled by nobody.
            del self._requests[sequence]
            session.workers.requests.pop(request.sequence, None)
            if request.error is None:
                reply = session.ranks.reply(request, rank)
                yield sequence, Status.DONE, RankReplies({rank: (int(reply.status), beside(reply.body))})
            elif isinstance(request.error, CallCancelled):  # the head has asked for this, and does not read the answer
                yield sequence, Status.INTERRUPTED, None
            else:
                yield sequence, Status.ERROR, RankReplies(error=pickled(request.error))

    def _lose(self, error: Exception) -> None:
        """Note the error that has ended items. A death loses the requests of all ranks, as in any session."""
        for _, request in self._requests.values():
            if request.is_lost and request.error is None:
                request.error = error


def pickled(error: Exception) -> bytes:
    """Pickle an exception of the node's session with its cause, which pickled exceptions leave out."""
    with contextlib.suppress(Exception):
        return pickle.dumps((error, error.__cause__), protocol=5)
    return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), None), protocol=5)
