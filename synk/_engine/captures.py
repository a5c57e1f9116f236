"""The functions of one runtime, and what they captured: parcels of the book, which go with the next order to each rank.

The book (``synk._master.code``) compares and packs. Here is what becomes of its parcels: each rank is told those that
it lacks, in their order, with whatever message comes next. They count as settled once the ranks of a message that
brought them have taken it in; until then nothing else is packed.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from synk._engine.mapped import MappedFunctions
from synk._engine.things import Thing
from synk._master.calls.callee import Callee as _Callee
from synk._master.calls.callee import _waiting, check_referred, referred
from synk._master.code.book import Book
from synk._master.code.capture import Capture
from synk._master.code.parcels import Parcel
from synk._master.state.captured import Referred
from synk._master.state.functions import packed
from synk._pure.interrupts import deferred
from synk._wire.memory import Segment

ON_RESTART = 0
"""The id of the function that replacement workers run."""

_LARGE_NBYTES = 1 << 18

ParcelTold = tuple[int, bytes, bool]
"""The number of a parcel, its pickle, and whether a rank goes on if it cannot load it."""


class Callee(_Callee):
    """A function as calls know it.

    Attributes
    ----------
    plans_by_key : dict
        By look, in the order in which they were made.
    object_room : int
        How much room its calls need for pickled objects.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans_by_key: dict[Any, Any] = {}
        self.object_room = 1 << 10
        names = self.signature._positional
        self.flags = [name in self.signature.broadcast for name in names]
        self.state_numbers: frozenset[int] = frozenset()

    def load(self, session: Any, deadline: float | None) -> None:
        """See that the next message brings the ranks the function as it is now."""
        if self.session is not session or self.is_stale or self.capture is None:
            distribute(session, [self])

    def renew(self) -> Any:
        fn, code = self.fn, self._code
        successor = super().renew()
        if self.fn is not fn or self._code is not code:
            self.flags = [name in self.signature.broadcast for name in self.signature._positional]
            self.plans_by_key.clear()
        return successor

    def note_sent(self, session: Any, found: Referred) -> None:
        """Note that the ranks have the function and what it captured, or get it with the next message."""
        is_new = self.session is not session
        self.session = session
        if self._home is None:
            self._home = self._find_home()
        home = [] if self._home is None else [(self._home[0].get, self._home[1], self._home[0].get(self._home[1]))]
        self.record = session.profile.record(self.fn, self.name)
        self.capture = Capture(session.functions.book, self.id, home, self._watch)
        self.is_stale = False
        self.variables, self.residents = found
        things: list[Any] = [*found.variables, *found.residents]
        numbers = frozenset(each.number for each in things)
        if numbers != self.state_numbers or is_new:
            self.plans_by_key.clear()
            self.state_numbers = numbers
        session.functions.bound.add(self)
        if is_new:
            is_large = session.functions.book.nbytes_of(self.id) >= _LARGE_NBYTES
            reclaimed = weakref.ref(session) if is_large else None
            dropped = weakref.finalize(self, _drop, session.functions.dropped, self.id, reclaimed)
            dropped.atexit = False  # the user's own exit handlers may still call it

    def note_unsent(self) -> None:
        """Note that the ranks may not have what the last message was to bring."""
        self.capture, self.is_stale = None, True
        self.plans_by_key.clear()

    def forget_sent(self) -> None:
        self.plans_by_key.clear()
        self.capture = None


def _drop(dropped: deque[int], function_id: int, session_ref: weakref.ref[Any] | None) -> None:
    """Note that a function no longer exists. What it captured is freed by the next operation or, if it is much, now.

    Only if it is much: an interrupt that comes just now, in a finalizer, is reported and lost.
    """
    dropped.append(function_id)
    session = None if session_ref is None else session_ref()
    if session is not None:
        session.reclaim()


class Functions:
    """The functions that the ranks of a runtime were told of.

    Attributes
    ----------
    book : Book
    state : int
        Rises when there are parcels that ranks may lack.
    bound : WeakSet of Callee
        The functions that are on the ranks.
    unsettled : list of Callee
        The functions whose parcels no rank has confirmed yet.
    """

    def __init__(self, engine: Any, on_restart: tuple[Any, dict[str, Any]] | None) -> None:
        self._engine = weakref.proxy(engine)
        self.on_restart = on_restart
        self.book = Book(self)
        self.state = 0
        self.bound: weakref.WeakSet[Callee] = weakref.WeakSet()
        self.ids = itertools.count(1)
        self.dropped: deque[int] = deque()
        self.mapped = MappedFunctions()
        self.unsettled: list[Callee] = []
        self.is_torn = False

    # -- what the book needs -------------------------------------------------------------------------------------------

    @property
    def is_inline(self) -> bool:
        return bool(self._engine.is_inline)

    @property
    def has_shared_memory(self) -> bool:
        return bool(self._engine.has_shared_memory)

    def new_id(self) -> int:
        """Return the number of the next segment."""
        return int(next(self._engine.numbers))

    def drop_parcel(self, parcel: Parcel, unbound: list[tuple[tuple[int, int], Any]]) -> None:
        """Have the ranks forget a parcel, and globals: (address of the namespace, name)."""
        for worker in self._engine.by_rank:
            worker.parcels.discard(parcel.number)
            worker.forgets.append(("parcel", parcel.number, unbound))
        if parcel.segment is not None:
            self._engine.forget(parcel.segment.id)
            parcel.segment.close()  # a function may have kept what lies in it

    def free_dropped(self) -> None:
        """Have the ranks forget functions that no longer exist."""
        if self.dropped:
            while self.dropped:
                function_id = self.dropped.popleft()
                self.book.forget_function(function_id)
                for worker in self._engine.by_rank:
                    worker.forgets.append(("function", function_id, None))
            self._step(self.book.collect)

    # -- telling ------------------------------------------------------------------------------------------------------

    def lacking(self, worker: Any) -> tuple[list[ParcelTold], list[Segment], list[Thing]]:
        """Return the parcels that a rank lacks, the memory in which their arrays lie, and what they refer to."""
        if worker.parcels_state == self.state:
            return [], [], []
        missing = [each for number, each in self.book.parcels.items() if number not in worker.parcels]
        referred: dict[int, Thing] = {}
        for parcel in missing:
            for handle in parcel.handles:
                thing = getattr(handle, "_referent", None)
                if isinstance(thing, Thing):
                    referred[thing.number] = thing
        segments = [each.segment for each in missing if each.segment is not None]
        told = [(each.number, each.data, each.is_optional) for each in missing]
        return told, segments, list(referred.values())

    def bring(
        self,
        functions: Sequence[tuple[int, Any, dict[str, Any]]],
        names: str,
        check: Callable[[int], None] = lambda function_id: None,
    ) -> list[tuple[Any, int]]:
        """Pack functions, and what has changed of what they captured, for the next message to each rank.

        Raises
        ------
        SerializationError
            If a function cannot be pickled.
        """
        try:
            sent = packed(self.book, functions, names, check)
        except BaseException:
            self._step(self.book.roll_back)
            raise
        self.state += 1
        return sent

    def settle(self, *, is_taken_in: bool) -> None:
        """Note whether the ranks have taken in what was packed last."""
        unsettled, self.unsettled = self.unsettled, []
        if is_taken_in:
            self._step(self.book.commit)
            return
        self._step(self.book.roll_back)
        self.state += 1
        for callee in unsettled:
            callee.note_unsent()

    def _step(self, step: Callable[[], None]) -> None:
        """Take a step of the book after which it is as the ranks are."""
        with deferred():
            self.is_torn = True
            step()
            self.is_torn = False

    # -- ending -------------------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Forget what was sent: all ranks are about to be replaced."""
        self.book.clear()
        self.book = Book(self)
        self.is_torn = False
        self.state += 1
        self.unsettled = []
        for function in list(self.bound):
            function.note_unsent()

    def close(self) -> None:
        self.mapped.clear()
        self.dropped.clear()
        self.unsettled = []
        for function in list(self.bound):
            function.forget_sent()
        self.book.clear()


def _made_and_not_sent() -> Sequence[Any]:
    return [made for ref in _waiting.keyrefs() if (made := ref()) is not None]


def distribute(session: Any, only: Sequence[Callee] | None = None) -> None:
    """Pack the functions that the ranks lack, together, for the next message to each rank."""
    candidates = _made_and_not_sent() if only is None else only
    functions: Sequence[Any] = [
        f for f in candidates
        if f.fixed_session in (None, session) and (f.session is not session or f.is_stale or f.capture is None)
    ]  # fmt: skip
    if not functions:
        return
    session.settle_unsettled()
    names = ", ".join(repr(function.name) for function in functions)
    for function in functions:
        if function.session is not session:
            function.id = next(session.functions.ids)
    by_id = {function.id: function for function in functions}
    book = session.functions.book
    nbytes = {0: book.packed_nbytes}

    def check(function_id: int) -> None:
        nbytes[function_id] = book.packed_nbytes
        check_referred(session, by_id[function_id])

    for function in functions:
        if function.session is session and not book.has(function.id, function.fn):
            function.plans_by_key.clear()  # ranks prepare plans for the function that they have
    sent = session.functions.bring([(f.id, f.fn, f.options) for f in functions], names, check)
    nbytes_of = {number: after - before for (_, before), (number, after) in itertools.pairwise(nbytes.items())}
    for function in functions:
        if function.id in book.sent_anew:
            book.sent_anew.discard(function.id)
            function.plans_by_key.clear()
        function.note_sent(session, referred(function, book))
        _waiting.pop(function, None)
        function.record.add_moved("code and captured objects", "captured", 1, nbytes_of[function.id])
    session.functions.unsettled = functions
    if len(functions) == 1:
        functions[0].large_changes.note(functions[0].fn, sent, session.counters["calls"])
        functions[0].large_changes.note_restless(functions[0].fn, book.restless.values())
