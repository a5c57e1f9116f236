"""Resident objects in the master: which state each rank has, and how all ranks get the same one.

Ranks run the same calls, so their objects stay alike by themselves, and a call that succeeds costs nothing here. Ranks
may differ after a failed call, a death, or a call in which a rank had no rows. Then the next operation, once it has
replaced the dead, asks all ranks for their state. Ranks that lag behind get the state of the one that is furthest.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import time
import weakref
from collections.abc import Sequence
from typing import Any

from synk._master.processes.log import Dropped
from synk._master.processes.program import search_path
from synk._master.state.resident_value import ResidentValue
from synk._master.workers.failures import raise_failures
from synk._master.workers.ranks import Ranks
from synk._wire.messages import Kind, Reply
from synk._wire.residents import NEVER, Adopt, Dump, ReportStates, Restore
from synk.errors import SerializationError, add_note

ASK_S = 5.0
"""How long idle workers may take to report, after a failed call, which state their objects have."""

State = tuple[int, bool, bytes]
"""The version, whether it is torn, and the mark that tells gradients apart; see ``synk._worker.held.residents``."""


class ResidentObject(ResidentValue):
    """One object on every rank.

    Attributes
    ----------
    id : int
    name : str
    version : int
        The number of the last call that changed it and succeeded, at least on some rank.
    first_version : int
        The ``version`` with which the object was set.
    lost : str
        Why no rank has its state any more; empty if some rank does.
    has_dump : bool
        Whether its state is what a ``dump`` returns, and no pickle of the whole.
    classes : list of type
        The classes that its pickle names. Functions that use the object capture those of the program.
    """

    kind = "resident"

    def __init__(self, residents: Residents, value: Any, name: str | None, dump: Any, load: Any) -> None:
        self.residents = residents
        self.id = next(residents.ids)
        self.name = name or type(value).__name__
        self._dump, self._load = dump, load
        self.version = 0
        self.first_version = 0
        self.lost = ""
        self.backup: tuple[int, bytes] | None = None  # its version and state, before all workers are replaced
        self.pickle = self._pickled(value)
        residents.add(self)

    def replace(self, value: Any, version: int) -> None:
        """Give every rank ``value`` as its object. The ranks learn of it before anything else."""
        data = self._pickled(value)
        self.pickle, self.lost = data, ""
        self.version = self.first_version = version
        self.residents.note_unsettled()

    def __del__(self) -> None:
        residents = getattr(self, "residents", None)
        if residents is not None:
            residents.dropped.append(self.id)


class Residents:
    """All resident objects of a runtime.

    Attributes
    ----------
    is_unsettled : bool
        Whether ranks may differ.
    dropped : Dropped, of int
        Numbers of objects that no longer exist. Filled by finalizers.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.ids = itertools.count(1)
        self.is_unsettled = False
        self.dropped = Dropped(ranks.log)
        self._living: weakref.WeakValueDictionary[int, ResidentObject] = weakref.WeakValueDictionary()

    @property
    def is_closed(self) -> bool:
        return self._ranks.is_closed

    @property
    def has_any(self) -> bool:
        return bool(self._living)

    def add(self, resident: ResidentObject) -> None:
        self._living[resident.id] = resident
        self.note_unsettled()

    def _all(self) -> list[ResidentObject]:
        living = [resident for ref in self._living.valuerefs() if (resident := ref()) is not None]
        return sorted(living, key=lambda resident: resident.id)

    def note_unsettled(self) -> None:
        """Note that ranks may differ: no call may begin before they were asked."""
        self.is_unsettled = True
        self._ranks.log.note()

    def note_changed(self, residents: Sequence[ResidentObject], number: int, ranks: Sequence[int]) -> None:
        """Note that call ``number`` changed objects and succeeded on ``ranks``."""
        for resident in residents:
            resident.version = number
        if len(ranks) < self._ranks.num_ranks:
            self.note_unsettled()

    def note_failed(self, residents: Sequence[ResidentObject], error: BaseException) -> None:
        """Note that a call that changes objects raised ``error``, and add to it what has become of them."""
        self.note_unsettled()
        BaseException.__setattr__(error, "step_counted", None)  # unknown, until the ranks have said what became of it
        BaseException.__setattr__(error, "_is_put_back", False)
        # Only the ranks that live are asked, and only while nothing else is in flight. Otherwise nobody knows yet, and
        # the next operation asks all.
        deadline, what = time.monotonic() + ASK_S, "ask for resident objects"
        try:
            replies = self._ranks.ask_living(Kind.RESIDENT, _report_of(residents), deadline, "resident", what)
            reports = [[each or (NEVER, False, b"") for each in states] for states in _states(replies)]
        except Exception:
            return  # the next operation asks again
        if not reports:
            return
        living = sorted(replies)
        names = ", ".join(repr(resident.name) for resident in residents)
        whole = [
            max((version for version, is_torn, _ in states if not is_torn), default=NEVER) for states in zip(*reports)
        ]
        versions = [resident.version for resident in residents]
        furthest = living[max(range(len(living)), key=lambda k: reports[k][0][0])]
        if all(map(operator.gt, whole, versions)):
            counted, note = True, f"{names} came through the call before it ended: do not repeat it."
        elif whole == versions:
            counted, note = False, f"{names} is as it was before the call."
        else:
            counted, note = (
                False,
                (f"{names} may hold a part of what the call was to change; all ranks get what rank {furthest} has."),
            )
        BaseException.__setattr__(error, "step_counted", counted)
        BaseException.__setattr__(error, "_is_put_back", whole == versions)
        add_note(error, note)

    # -- one state for all --------------------------------------------------------------------------------------------

    def settle(self, deadline: float | None) -> None:
        """Bring the objects of all ranks into one state: that of the rank that is furthest.

        All workers must be alive. An object is lost if no rank has come as far with it as its calls did.
        """
        if residents := self._all():
            ranks = range(self._ranks.num_ranks)
            reports = self._order(dict.fromkeys(ranks, _report_of(residents)), "ask for resident objects", deadline)
            for resident, states in zip(residents, zip(*_states(reports))):
                self._settle_one(resident, self._adopted(resident, states, deadline), deadline)
        self.is_unsettled = False  # last: if a rank dies or fails above, the next operation asks again

    def _adopted(
        self, resident: ResidentObject, states: Sequence[State | None], deadline: float | None
    ) -> Sequence[State]:
        """Give ranks that lack an object the one with which it was set. Return the states of all ranks."""
        first = resident.first_version
        version = first if resident.version == first else NEVER
        adopt = Adopt(resident.id, resident.name, resident.pickle, first, version, search_path())
        lacking = [rank for rank, state in enumerate(states) if state is None]
        self._order(dict.fromkeys(lacking, adopt), f"load resident object {resident.name!r}", deadline)
        return [(version, False, b"") if state is None else state for state in states]

    def _settle_one(self, resident: ResidentObject, states: Sequence[State], deadline: float | None) -> None:
        if resident.lost:
            return
        whole = [version for version, is_torn, _ in states if not is_torn]
        best = max(whole, default=NEVER)
        if best < resident.version:
            # No rank came through the last call that changed it. A living rank that was in the call has the only state
            # there is.
            torn = [k for k, (version, is_torn, _) in enumerate(states) if is_torn and version >= resident.version]
            backup = resident.backup
            # If a restart was broken off, the backup is still there, and calls may have changed the object since then.
            if not torn and backup is not None and backup[0] == resident.version:
                restore = Restore(resident.id, backup[1], resident.version)
                what = f"bring resident object {resident.name!r} back"
                self._order(dict.fromkeys(range(len(states)), restore), what, deadline)
                resident.backup = None
                return
            if not torn:
                resident.lost = (
                    f"the state of resident object {resident.name!r} is lost, because the workers that had it have "
                    "ended."
                )
                return
            source = max(torn, key=lambda k: states[k][0])  # the lowest of those that are furthest
            best = states[source][0]
        else:
            source = [state[:2] for state in states].index((best, False))
        others = [k for k, state in enumerate(states) if state != (best, False, states[source][2]) and k != source]
        if states[source][1]:
            others.append(source)  # it counts as whole once it has loaded its own state
        if others:
            state = self.fetch(resident, source, deadline)
            restore = Restore(resident.id, state, best)
            what = f"bring resident object {resident.name!r} into the state of rank {source}"
            self._order(dict.fromkeys(others, restore), what, deadline)
        resident.version = best

    def back_up(self, deadline: float | None) -> None:
        """Keep the state of all objects in the master: all workers are about to be replaced."""
        for resident in self._all():
            if not resident.lost and resident.version != resident.first_version:
                resident.backup = resident.version, self.fetch(resident, 0, deadline)

    def fetch(self, resident: ResidentObject, rank: int, deadline: float | None, *, is_whole: bool = False) -> bytes:
        """Return the pickled state of a rank's object, or the whole object."""
        what = f"read resident object {resident.name!r}"
        replies = self._order({rank: Dump(resident.id, is_whole)}, what, deadline)
        data: bytes = pickle.loads(replies[rank].body)["state"]
        return data

    def copy_of(self, resident: ResidentObject, rank: int, deadline: float | None) -> Any:
        """Return a copy of a rank's object."""
        return self._loaded(resident, self.fetch(resident, rank, deadline, is_whole=True), rank)

    def state_of(self, resident: ResidentObject, rank: int, deadline: float | None) -> Any:
        """Return what the object's ``dump`` returns on a rank."""
        return self._loaded(resident, self.fetch(resident, rank, deadline), rank)

    def _loaded(self, resident: ResidentObject, data: bytes, rank: int) -> Any:
        try:
            return pickle.loads(data)
        except Exception as error:
            raise SerializationError(
                f"cannot load resident object {resident.name!r} from rank {rank}: {type(error).__name__}: {error}."
            ) from error

    def restore(self, resident: ResidentObject, state: bytes, version: int, deadline: float | None) -> None:
        """Bring every rank's object into a state that counts as the one after call ``version``.

        If the object's state was lost, ``state`` must be a whole one.
        """
        order = Restore(resident.id, state, version)
        self.note_unsettled()  # until all ranks have it
        ranks = range(self._ranks.num_ranks)
        self._order(dict.fromkeys(ranks, order), f"set resident object {resident.name!r}", deadline)
        resident.version, self.is_unsettled, resident.lost = version, False, ""

    def _order(self, orders: dict[int, Any], what: str, deadline: float | None) -> dict[int, Reply]:
        if not orders:
            return {}
        replies = self._ranks.ask(Kind.RESIDENT, orders, deadline, "resident", what)
        raise_failures(replies, self._ranks.num_ranks, what)
        return replies

    def free_dropped(self) -> None:
        """Have the workers forget objects that no longer exist."""
        while self.dropped:
            self._ranks.log.drop("resident", self.dropped.popleft())


def _report_of(residents: Sequence[ResidentObject]) -> ReportStates:
    """Return the order to report how far objects are."""
    return ReportStates(tuple((resident.id, resident.first_version) for resident in residents))


def _states(replies: dict[int, Reply]) -> list[list[State | None]]:
    """Return the states that ranks have reported, by rank and object; None for an object that a rank lacks."""
    return [pickle.loads(replies[rank].body)["states"] for rank in sorted(replies)]
