"""Waiting on one of several nodes: for the ranks of this node, and at the same time for messages by wire."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from synk.communicators._mailbox import Mailbox
from synk.communicators._rendezvous import _PLACE_MASK, RECHECK_MS, RULE, Rendezvous, unpacked
from synk.communicators._schedule import Schedule
from synk.communicators._wire_mail import WireMailbox
from synk.errors import CollectiveMismatch

# A rank says by wire why it leaves, before it leaves. So that is on its way, unless the rank has no wires at all.
NUM_NAPS = 10
REPORT_S = 0.4
"""How long a rank sleeps before it tells the others what it waits for, each time."""


class WiredRendezvous(Rendezvous):
    """The rendezvous of a node's ranks, which also take in what comes by wire while they wait.

    Without wires, as in a call that runs on one node only, it is an ordinary rendezvous. Ranks keep the numbers that
    they have among all nodes.

    Attributes
    ----------
    mail : WireMailbox or None
        None in a call without wires.
    """

    mail: WireMailbox | None = None
    _mailbox: Mailbox
    _schedule: Schedule
    _reported: tuple[int, float] = -1, 0.0  # the nap of the last report, and when the next one is due

    def attach(self, mail: WireMailbox, mailbox: Mailbox, schedule: Schedule) -> None:
        """Listen to wires as well, until ``detach``."""
        self._mailbox, self._schedule = mailbox, schedule
        self._poll.register(mail.wires.fd, select.POLLIN)
        self.mail = mail
        mail.attach(self, self.check_joined)

    def detach(self) -> None:
        """Listen to the ranks of the node alone."""
        if self.mail is not None:
            self._poll.unregister(self.mail.wires.fd)
            self.mail = None

    def wait(self, is_ready: Callable[[], bool], *, is_message: bool = False) -> None:
        """Return once ``is_ready()`` is true; see :meth:`Rendezvous.wait`."""
        mail = self.mail
        if mail is None:
            super().wait(is_ready, is_message=is_message)
            return

        def look() -> bool:
            mail.progress()
            self._mailbox.progress()  # of the node, and the collectives in flight: another rank may wait for them
            if is_ready():
                return True
            if self.ranks:
                self._check_others(mail)
            return False

        super().wait(look, is_message=is_message)

    def _nap(self) -> bool:
        woken = {fd for fd, _ in self._poll.poll(RECHECK_MS)}
        own = self._eventfds[self.rank]
        if own in woken:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(own)
        return bool(woken)

    # -- ranks of other nodes ------------------------------------------------------------------------------------------

    def _check_others(self, mail: WireMailbox) -> None:
        """Raise if this rank waits for one that will not come."""
        if mail.verdict:
            self.fail(mail.verdict)
        self.check_joined(mail)

    def check_joined(self, mail: WireMailbox) -> None:
        """Raise if a collective is in flight that a rank has not joined before it left the call."""
        if self._schedule.operations:
            left = [rank for rank, each in sorted(mail.left.items()) if each.num_joined < mail.num_joined]
            if left:
                names = ", ".join(map(str, left))
                self.fail(
                    f"cannot finish a collective: {'rank' if len(left) == 1 else 'ranks'} {names} left the function "
                    f"without joining it; waiting: rank {self.rank}: {unpacked(self._line(False))}. {RULE}",
                    left,
                )

    def _line(self, is_asleep: bool = True) -> Any:
        """Return what this rank waits for, or the collective that it has asked for last."""
        place = self._places[self.rank] & _PLACE_MASK if is_asleep else self._place
        return self._requests[place][self.rank]

    def _check_deadlock(self) -> None:
        """Raise if every rank of all nodes has left, or sleeps until something happens that no rank can do any more.

        A rank of this node that waits for the others of this node may also be stuck because of another node. So the
        ranks look at this by wire alone, all of them in the same way.
        """
        mail = self.mail
        if mail is None:
            super()._check_deadlock()
            return
        nap, now = self._sleeps[self.rank], time.monotonic()
        if mail.is_stuck(nap):
            waiting = {rank: report.request for rank, report in mail.reports.items() if rank not in mail.left}
            waiting[self.rank] = bytes(self._line())
            texts = "; ".join(f"rank {rank}: {unpacked(line)}" for rank, line in sorted(waiting.items()))
            mail.give_verdict(f"cannot go on: every rank waits for another one: {texts}. {RULE}")
            self.fail(mail.verdict)
        last, due = self._reported
        if last != nap:
            self._reported = nap, now + REPORT_S
        elif now >= due:
            self._reported = nap, now + REPORT_S
            mail.report(nap, bytes(self._line()))

    def fail(self, text: str, left: Sequence[int] = ()) -> NoReturn:
        """Raise CollectiveMismatch, with the text with which the ranks in ``left`` have failed, if they have."""
        mail = self.mail
        if mail is None:
            super().fail(text, left)
        self.check_abort()
        for _ in range(NUM_NAPS):
            if all(rank in mail.left for rank in left):
                break
            self._nap()
            self.check_abort()
            mail.progress()
        causes = [mail.verdict, *(mail.left[rank].failure for rank in left if rank in mail.left), text]
        mail.failure = next(cause for cause in causes if cause)
        raise CollectiveMismatch(mail.failure)
