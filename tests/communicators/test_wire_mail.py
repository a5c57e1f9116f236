"""What ranks tell each other by wire, without processes and without wires."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest

from synk.communicators._rendezvous import CommRequest, packed
from synk.communicators._wire_mail import WireMailbox

REQUEST = packed(CommRequest("barrier"))


class Post:
    """Wires of one process: what is sent to a rank lies here until it looks."""

    def __init__(self) -> None:
        self.boxes: dict[int, deque[tuple[bytes, np.ndarray | None]]] = defaultdict(deque)

    def wires(self, rank: int) -> Any:
        return PostBox(self, rank)


class PostBox:
    def __init__(self, post: Post, rank: int) -> None:
        self._post, self._rank = post, rank
        self._body: np.ndarray | None = None

    def send(self, rank: int, head: bytes, body: np.ndarray | None = None) -> None:
        self._post.boxes[rank].append((head, None if body is None else body.copy()))

    def receive(self) -> bytes | None:
        if not self._post.boxes[self._rank]:
            return None
        head, self._body = self._post.boxes[self._rank].popleft()
        return head

    def take(self, target: np.ndarray) -> int:
        if self._body is None:
            return 0
        target[: self._body.size] = self._body
        return self._body.size

    def drop(self) -> None:
        self._body = None


class Awake:
    """A rendezvous in which a rank never sleeps."""

    def rouse(self) -> None:
        pass


@pytest.fixture
def trio() -> tuple[Post, list[WireMailbox]]:
    post = Post()
    mails = [WireMailbox(rank, 3, post.wires(rank)) for rank in range(3)]
    for mail in mails:
        mail.begin((0, 1, 2), 1)
        mail.attach(Awake())  # type: ignore[arg-type]
    return post, mails


def report(*mails: WireMailbox, nap: int = 1) -> None:
    """Have ranks that sleep see each other's reports, and say so."""
    for _ in range(2):
        for mail in mails:
            mail.report(nap, REQUEST)
        for mail in mails:
            mail.progress()


def test_all_wait_for_each_other(trio: tuple[Post, list[WireMailbox]]) -> None:
    _, mails = trio
    report(*mails[:2])
    assert not mails[0].is_stuck(1)  # nobody knows what rank 2 does
    report(*mails)
    assert [mail.is_stuck(1) for mail in mails] == [True] * 3
    assert not mails[0].is_stuck(3)  # it has been awake since


def test_nobody_is_stuck_while_a_message_is_on_its_way(trio: tuple[Post, list[WireMailbox]]) -> None:
    post, mails = trio
    report(*mails)
    mails[1].isend(np.ones(3), 0, 0)
    message = post.boxes[0].pop()
    report(*mails, nap=3)
    assert [mail.is_stuck(3) for mail in mails] == [False] * 3
    post.boxes[0].append(message)
    mails[0].progress()
    report(*mails, nap=5)
    assert [mail.is_stuck(5) for mail in mails] == [True] * 3


def test_a_rank_may_be_awake_again_because_another_one_has_left(trio: tuple[Post, list[WireMailbox]]) -> None:
    """Before it left it may have sent something, which nobody else knows of."""
    _, mails = trio
    report(*mails[:2])
    mails[2].isend(np.ones(3), 1, 0)
    mails[2].leave()
    mails[0].progress()
    assert not mails[0].is_stuck(1)
    mails[1].progress()
    report(*mails[:2])
    assert mails[0].is_stuck(1)


def test_a_rank_that_has_nothing_new_to_say_is_silent(trio: tuple[Post, list[WireMailbox]]) -> None:
    post, mails = trio
    report(*mails)
    for mail in mails:
        mail.report(1, REQUEST)
    for mail in mails:
        mail.progress()
    for mail in mails:
        mail.report(1, REQUEST)
    assert not any(post.boxes.values())
    mails[0].report(3, REQUEST)
    assert [len(post.boxes[rank]) for rank in range(3)] == [0, 1, 1]
