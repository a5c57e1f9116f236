"""Resident objects in the master: which state they are in on which rank, and how all ranks come into the same one.

Ranks run the same calls, so their objects stay alike by themselves and a call that goes well costs nothing here. Only
where ranks may differ (a call failed, a worker died, a rank had no rows) are they asked how far they are; those that
lag behind get the state of the one that is furthest. That is done at the beginning of the next operation, when the
dead have been started again.
"""

from __future__ import annotations

import io
import itertools
import pickle
import time
import weakref
from collections.abc import Sequence
from typing import Any

from synk._master.code.handles import HandlePickler
from synk._master.processes.log import Dropped
from synk._master.processes.program import search_path
from synk._master.workers.failures import raise_failures
from synk._master.workers.workers import Workers
from synk._pure.interrupts import safe_point
from synk._wire.messages import Kind, Reply
from synk._wire.residents import NEVER, Adopt, Dump, Report, Restore, methods_of
from synk.errors import ClosedError, SerializationError, WorkerDied, add_note

ASK_S = 5.0
"""How long idle workers may take to say, after a call has failed, how far their objects are."""

State = tuple[int, bool, bytes]
"""Version, whether it is torn, and the mark that tells gradients apart; see ``synk._worker.held.residents``."""


class ResidentObject:
    """One object on every rank.

    Attributes
    ----------
    id : int
    name : str
    version : int
        Number of the last call that changed it and ended well, or came to its end on some rank.
    first_version : int
        What ``version`` was when the object was set.
    lost : str
        Why no rank has its state any more; empty: one has.
    """

    def __init__(self, residents: Residents, value: Any, name: str | None, dump: Any, load: Any) -> None:
        self.residents = residents
        self.id = next(residents.ids)
        self.name = name or type(value).__name__
        self._dump, self._load = dump, load
        self.version = self.first_version = 0
        self.lost = ""
        self.backup: bytes | None = None  # its state, while all workers are replaced
        self.pickle = self._pickled(value)
        residents.add(self)

    def _pickled(self, value: Any) -> bytes:
        dump, load = (self._dump, self._load) if self._load is not None else methods_of(value)
        file = io.BytesIO()
        try:
            safe_point(HandlePickler(file).dump, (value, dump, load))
        except Exception as error:
            raise SerializationError(
                f"cannot send resident object {self.name!r} to the workers: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. Make it of what can be pickled."
            ) from error
        return file.getvalue()

    def replace(self, value: Any, version: int) -> None:
        """Have all ranks make ``value`` their object; they are told before anything else."""
        data = self._pickled(value)
        self.pickle, self.lost = data, ""
        self.version = self.first_version = version
        self.residents.note_unsettled()

    def check(self, verb: str) -> None:
        """Raise where there is no state to work with.

        Raises
        ------
        WorkerDied
        """
        if self.lost:
            raise WorkerDied(f"cannot {verb}: {self.lost} Give it a new one with its set(...).", phase="idle")

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
        Numbers of objects that no longer exist; filled by finalizers.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.ids = itertools.count(1)
        self.is_unsettled = False
        self.dropped = Dropped(workers.log)
        self._living: weakref.WeakValueDictionary[int, ResidentObject] = weakref.WeakValueDictionary()

    @property
    def is_closed(self) -> bool:
        return self._workers.processes.is_closed

    def add(self, resident: ResidentObject) -> None:
        self._living[resident.id] = resident
        self.note_unsettled()

    def _all(self) -> list[ResidentObject]:
        living = [resident for ref in self._living.valuerefs() if (resident := ref()) is not None]
        return sorted(living, key=lambda resident: resident.id)

    def note_unsettled(self) -> None:
        """Ranks may differ: no call may begin before they are asked."""
        self.is_unsettled = True
        self._workers.log.note()

    def note_changed(self, residents: Sequence[ResidentObject], number: int, ranks: Sequence[int]) -> None:
        """Call ``number`` has changed objects and ended well on ``ranks``."""
        for resident in residents:
            resident.version = number
        if len(ranks) < self._workers.world_size:
            self.note_unsettled()

    def note_failed(self, residents: Sequence[ResidentObject], error: BaseException) -> None:
        """A call that changes objects has ended with ``error``: tell on it what has become of them, as far as known."""
        self.note_unsettled()
        workers = self._workers
        living = [each.rank for each in workers.by_rank if each.is_ready and not each.is_dead]
        if workers.processes.is_closed or workers.requests or not living:
            return
        try:
            reports = self._reports(residents, living, time.monotonic() + ASK_S)
        except Exception:
            return  # the next operation asks again
        names = ", ".join(repr(resident.name) for resident in residents)
        whole = [
            max((version for version, is_torn, _ in states if not is_torn), default=NEVER) for states in zip(*reports)
        ]
        if all(version > resident.version for version, resident in zip(whole, residents)):
            counted, note = True, f"{names} came through the call before it ended: do not repeat it."
        elif all(version == resident.version for version, resident in zip(whole, residents)):
            counted, note = False, f"{names} is as it was before the call."
        else:
            counted, note = (
                False,
                (f"{names} may hold a part of what the call was to change; all ranks get what rank {living[0]} has."),
            )
        BaseException.__setattr__(error, "step_counted", counted)
        add_note(error, note)

    # -- one state for all --------------------------------------------------------------------------------------------

    def settle(self, deadline: float | None) -> None:
        """Bring the objects of all ranks into one state: that of the rank that is furthest.

        All workers live. An object that no rank has come as far with as its calls did is lost from then on.
        """
        living = self._all()
        ranks = range(self._workers.world_size)
        for resident in living:
            first = resident.first_version
            lacking = [each for each in self._workers.by_rank if each.known.held["resident"].get(resident.id) != first]
            version = first if resident.version == first else NEVER
            adopt = Adopt(resident.id, resident.name, resident.pickle, version, search_path())
            self._order({each.rank: adopt for each in lacking}, f"load resident object {resident.name!r}", deadline)
            for each in lacking:
                each.known.held["resident"][resident.id] = first
        residents = [resident for resident in living if not resident.lost]
        if residents:
            reports = self._reports(residents, ranks, deadline)
            for position, resident in enumerate(residents):
                self._settle_one(resident, [states[position] for states in reports], deadline)
        self.is_unsettled = False

    def _settle_one(self, resident: ResidentObject, states: Sequence[State], deadline: float | None) -> None:
        whole = [version for version, is_torn, _ in states if not is_torn]
        best = max(whole, default=NEVER)
        if best < resident.version:
            # No rank came through the last call that changed it. One that was at it, and lives, has what there is.
            torn = [k for k, (version, is_torn, _) in enumerate(states) if is_torn and version == resident.version]
            if not torn and resident.backup is not None:
                restore = Restore(resident.id, resident.backup, resident.version)
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
            source, best = torn[0], resident.version
        else:
            source = [state[:2] for state in states].index((best, False))
        others = [k for k, state in enumerate(states) if state != (best, False, states[source][2]) and k != source]
        if states[source][1]:
            others.append(source)  # it is whole as soon as it has taken its own state back
        if others:
            state = self._fetch(resident, source, deadline)
            restore = Restore(resident.id, state, best)
            what = f"bring resident object {resident.name!r} into the state of rank {source}"
            self._order(dict.fromkeys(others, restore), what, deadline)
        resident.version = best

    def back_up(self, deadline: float | None) -> None:
        """Keep the state of all objects in the master: all workers are about to be replaced."""
        for resident in self._all():
            if not resident.lost and resident.version != resident.first_version:
                resident.backup = self._fetch(resident, 0, deadline)

    def _reports(
        self, residents: Sequence[ResidentObject], ranks: Sequence[int], deadline: float | None
    ) -> list[list[State]]:
        """Return how far objects are, by rank and object."""
        order = Report(tuple(resident.id for resident in residents))
        replies = self._order(dict.fromkeys(ranks, order), "ask for resident objects", deadline)
        return [pickle.loads(replies[rank].body)["states"] for rank in ranks]

    def _fetch(self, resident: ResidentObject, rank: int, deadline: float | None, *, is_whole: bool = False) -> bytes:
        what = f"read resident object {resident.name!r}"
        replies = self._order({rank: Dump(resident.id, is_whole)}, what, deadline)
        data: bytes = pickle.loads(replies[rank].body)["state"]
        return data

    def copy_of(self, resident: ResidentObject, rank: int, deadline: float | None) -> Any:
        """Return a copy of a rank's object."""
        return self._loaded(resident, self._fetch(resident, rank, deadline, is_whole=True), rank)

    def state_of(self, resident: ResidentObject, rank: int, deadline: float | None) -> Any:
        """Return what the object's ``dump`` says on a rank."""
        return self._loaded(resident, self._fetch(resident, rank, deadline), rank)

    def _loaded(self, resident: ResidentObject, data: bytes, rank: int) -> Any:
        try:
            return safe_point(pickle.loads, data)
        except Exception as error:
            raise SerializationError(
                f"cannot load resident object {resident.name!r} from rank {rank}: {type(error).__name__}: {error}."
            ) from error

    def restore(self, resident: ResidentObject, state: bytes, version: int, deadline: float | None) -> None:
        """Bring the object of every rank into a state, which counts as that after call ``version``."""
        order = Restore(resident.id, state, version)
        self.note_unsettled()  # until all have it
        ranks = range(self._workers.world_size)
        self._order(dict.fromkeys(ranks, order), f"set resident object {resident.name!r}", deadline)
        resident.version, self.is_unsettled = version, False

    def _order(self, orders: dict[int, Any], what: str, deadline: float | None) -> dict[int, Reply]:
        if not orders:
            return {}
        replies = self._workers.ask(Kind.RESIDENT, list(orders), 0, orders, [], deadline, "resident", what)
        raise_failures(replies, self._workers.world_size, what)
        return replies

    def free_dropped(self) -> None:
        """Have the workers forget objects that no longer exist."""
        while self.dropped:
            self._workers.log.drop_held("resident", self.dropped.popleft())


def check_owner(resident: ResidentObject, residents: Residents, what: str) -> None:
    """Raise where ``resident`` belongs to another runtime."""
    if resident.residents is not residents:
        if resident.residents.is_closed:
            raise ClosedError(
                f"cannot use {what}: the runtime of resident object {resident.name!r} was closed. Make it again."
            )
        raise ValueError(f"cannot use {what}: resident object {resident.name!r} belongs to another runtime.")
