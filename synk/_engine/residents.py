"""Resident objects in the program: which ranks have them, and how a rank that lags behind gets the state of another.

A call that fails changes no object: ranks mark what they are about to change, and put it back. So ranks that have an
object have it in the state of the last call that was committed. A rank that has not run such a call, or is new, counts
as not knowing the object, and is told of it with the next order, in the state of the lowest rank that has it.

Some objects cannot put everything back (``synk.torch`` keeps no copy of the parameters). So ranks are asked what has
become of the objects of a call that failed. If one has them as after the call, the call counts for them, in spite of
its error, and all get that state. Otherwise all get the state of a rank that could put the most back.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from synk._code.parcels import HandlePickler
from synk._engine.things import Living, Once, Thing
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.words import text_of
from synk._wire.memory import Segment
from synk._wire.messages import COUNTED, TORN, methods_of
from synk.errors import SerializationError, WorkerDied, add_note


class ResidentObject(Thing):
    """One object on every rank.

    Attributes
    ----------
    name : str
    lost : str
        Why no rank has its state any more; empty if some rank does.
    has_dump : bool
        Whether its state is what a ``dump`` returns, and no pickle of the whole.
    state : bytes or None
        The state in which ranks that lack it get it; None: as it was set.
    has_changed : bool
        Whether calls have changed it since ``state`` was read.
    classes : list of type
        The classes that its pickle names. Functions that use the object capture those of the program.
    """

    kind = "resident"

    def __init__(self, owner: Residents, value: Any, name: str | None, dump: Any, load: Any) -> None:
        super().__init__(owner.engine)
        self.owner = owner
        self.name = name or type(value).__name__
        self._dump, self._load = dump, load
        self.lost = ""
        self.state: bytes | None = None
        self.has_changed = False
        self.version = 0  # how often it was set
        self.pickle = self._pickled(value)
        owner.add(self)

    @property
    def label(self) -> str:
        """Its name, for errors."""
        return f"resident object {self.name!r}"

    @property
    def is_current(self) -> bool:  # type: ignore[override]
        """Whether ``state`` is the one after the last call. Captured functions need the object, in whatever state."""
        return not self.has_changed

    def told(self, rank: int) -> tuple[Any, Sequence[Segment]]:
        return (self.name, self.version, self.pickle, self.state), ()

    def replace(self, value: Any) -> None:
        """Give every rank ``value`` as its object, with the next message."""
        self.pickle, self.lost, self.state, self.has_changed = self._pickled(value), "", None, False
        self.version += 1
        self.owner.engine.retell(self.number)

    def _pickled(self, value: Any) -> bytes:
        dump, load = (self._dump, self._load) if self._load is not None else methods_of(value)
        self.has_dump = load is not None
        file = io.BytesIO()
        try:
            pickler = HandlePickler(file)
            pickler.dump((value, dump, load))
        except Exception as error:
            raise_if_of_handler(error)
            raise SerializationError(
                f"cannot send resident object {self.name!r} to the workers: "
                f"{text_of(error).rstrip('.')}. Make it of what can be pickled."
            ) from error
        self.classes = pickler.named
        self.needs = tuple(each._referent for each in pickler.handles if isinstance(each._referent, Thing))
        return file.getvalue()

    def check(self, verb: str) -> None:
        """Raise if the state is lost.

        Raises
        ------
        WorkerDied
        """
        if self.lost:
            raise WorkerDied(f"cannot {verb}: {self.lost} Give it a new one with its set(...).", phase="idle")

    def check_has_dump(self, verb: str) -> None:
        """Raise if the state is a pickle, which would run code when it is loaded.

        Raises
        ------
        TypeError
        """
        if not self.has_dump:
            raise TypeError(
                f"cannot {verb}: got an object without dump and load, expected one with them, because the pickle of an "
                "object runs code when it is loaded. Make it by synk.resident(obj, dump=..., load=...)."
            )


class Residents(Living[ResidentObject]):
    """All resident objects of a runtime.

    Attributes
    ----------
    may_lag : bool
        Whether some rank may lack the state of an object that others have.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.may_lag = False
        self._failed: list[tuple[int, Sequence[ResidentObject], BaseException]] = []  # whose outcome is not known yet

    def bring_into_line(self, residents: Sequence[ResidentObject], verb: str = "") -> None:
        """Read the state of objects that some rank lacks from the lowest rank that has it.

        Raises
        ------
        WorkerDied
            If no rank has it any more, and there is a verb that needs it.
        """
        self.settle_failed()
        workers = self.engine.by_rank
        for resident in residents:
            if not resident.has_changed or all(resident.number in worker.known for worker in workers):
                continue
            having = [worker.rank for worker in workers if resident.number in worker.known]
            if not having:
                resident.lost = (
                    f"the state of resident object {resident.name!r} is lost, because the workers that had it have "
                    "ended."
                )
                continue
            resident.state, resident.has_changed = self.fetch(resident, having[0], None), False
        for resident in residents if verb else ():
            resident.check(verb)

    def catch_up(self) -> None:
        """Read the states that some rank lacks before anything else is done: those that have them might die."""
        self.may_lag = False  # first: an object that cannot be read must not end every operation
        self.bring_into_line([*self])

    def note_changed(self, residents: Sequence[ResidentObject], ranks: Sequence[int]) -> None:
        """Note that a committed call has changed objects on ``ranks``: the others lag behind."""
        self.may_lag = self.may_lag or len(ranks) < self.engine.world_size
        for resident in residents:
            resident.has_changed = True
            self.engine.retell(resident.number, [rank for rank in range(self.engine.world_size) if rank not in ranks])

    def note_failed(self, residents: Sequence[ResidentObject], number: int, error: BaseException) -> None:
        """Note that a call that was to change objects has ended with an error, which does not say yet if it counts."""
        BaseException.__setattr__(error, "step_counted", None)
        BaseException.__setattr__(error, "_is_put_back", False)
        self._failed.append((number, residents, error))

    def settle_failed(self) -> None:
        """Ask the ranks what has become of the objects of calls that failed, and say it on the errors."""
        while self._failed:
            number, residents, error = self._failed[0]
            having = [
                worker.rank
                for worker in self.engine.by_rank
                if worker.is_ready and not worker.is_dead and any(each.number in worker.known for each in residents)
            ]
            questions = {rank: Once(self.engine, "outcomes", number) for rank in having}
            outcomes = self.engine.ask(questions, "ask for resident objects", "resident")
            found = [self._agreed(each, outcomes) for each in residents]
            self._failed.pop(0)
            note_outcome(error, residents, found)

    def _agreed(self, resident: ResidentObject, outcomes: Mapping[int, Any]) -> int:
        """Choose whose state all ranks get. Return what has become of the object there."""
        by_rank = {
            rank: told.get(resident.number, 0)
            for rank, told in outcomes.items()
            if resident.number in self.engine.by_rank[rank].known
        }
        if not by_rank:
            return TORN if resident.has_changed else 0
        order = (COUNTED, 0, *(each for each in by_rank.values() if each > 0), TORN)
        best = min(by_rank.values(), key=order.index)
        others = [rank for rank, outcome in by_rank.items() if outcome != best or best == TORN]
        if best == TORN:
            others.remove(min(others))
        if best or others:
            resident.has_changed = True
            self.engine.retell(resident.number, others)
        return best

    def settle(
        self, residents: Sequence[ResidentObject] | None = None, verb: str = "", deadline: float | None = None
    ) -> None:
        """Have all ranks load the objects that they lack now, so that an object that cannot be loaded raises here."""
        residents = [*self] if residents is None else residents
        self.bring_into_line(residents, verb)
        for resident in residents:
            lacking = [w.rank for w in self.engine.by_rank if resident.number not in w.known and not resident.lost]
            if lacking:
                self.engine.ask(dict.fromkeys(lacking, resident), verb or resident.label, "resident", deadline)

    def fetch(self, resident: ResidentObject, rank: int, deadline: float | None, wanted: str = "state") -> bytes:
        """Return a pickle of a rank's object; see ``Rank.dumped``."""
        what = f"read resident object {resident.name!r}"
        dump = Once(self.engine, "dump", (resident.number, wanted), [resident])
        data: bytes = self.engine.ask({rank: dump}, what, "resident", deadline)[rank]
        return data

    def copy_of(self, resident: ResidentObject, rank: int, verb: str, wanted: str) -> Any:
        """Return a copy of a rank's object, or of what its ``dump`` returns; see ``Rank.dumped``."""
        self.bring_into_line([resident], verb)
        data = self.fetch(resident, rank, self.engine.deadline(None), wanted)
        try:
            return pickle.loads(data)
        except Exception as error:
            raise_if_of_handler(error)
            raise SerializationError(
                f"cannot load resident object {resident.name!r} from rank {rank}: {text_of(error)}."
            ) from error

    def restore(self, resident: ResidentObject, state: bytes) -> None:
        """Bring every rank's object into a state."""
        resident.state, resident.lost, resident.has_changed = state, "", False
        self.engine.retell(resident.number)
        self.settle([resident], f"set resident object {resident.name!r}", self.engine.deadline(None))

    def back_up(self, deadline: float | None) -> None:
        """Keep the state of all objects in the program: all ranks are about to be replaced."""
        for resident in self:
            having = [worker.rank for worker in self.engine.by_rank if resident.number in worker.known]
            if resident.has_changed and having:
                resident.state, resident.has_changed = self.fetch(resident, having[0], deadline), False


def note_outcome(error: BaseException, residents: Sequence[ResidentObject], outcomes: Sequence[int]) -> None:
    """Say on the error that ended a call what has become of the objects that the call was to change."""
    names = ", ".join(repr(resident.name) for resident in residents)
    has_counted = all(outcome == COUNTED for outcome in outcomes)
    BaseException.__setattr__(error, "step_counted", has_counted)
    BaseException.__setattr__(error, "_is_put_back", min(outcomes) >= 0)
    if has_counted:
        add_note(error, f"{names} came through the call before it ended: do not repeat it.")
    elif min(outcomes) >= 0:
        add_note(error, f"{names} is as it was before the call.")
    else:
        add_note(error, f"{names} may hold a part of what the call was to change. All ranks have the same.")
