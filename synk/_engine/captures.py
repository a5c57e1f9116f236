"""The functions of one runtime, and what they captured: parcels of the book, which go with the next order to each rank.

The book (``synk._code``) compares and packs. Here is what becomes of its parcels: each rank is told those that
it lacks, in their order, with whatever message comes next. They count as settled once the ranks of a message that
brought them have taken it in; until then nothing else is packed.

A function of maps is sent only once. One that a module holds under its name is remembered as long as that is so. Any
other is forgotten with the last map of it, and what it captured is freed then.
"""

from __future__ import annotations

import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from synk._code.book import Book
from synk._code.captured import unsendable
from synk._code.parcels import Parcel
from synk._engine.things import Thing
from synk._pure.interrupts import deferred
from synk._wire.memory import Segment
from synk.errors import SynkError


class MappedFunctions:
    """What was made of functions that are mapped."""

    def __init__(self) -> None:
        self._living: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
        self._kept: dict[tuple[Any, ...], Any] = {}

    def get(self, fn: Any, make: Callable[[], Any], *, is_spread: bool = False) -> Any:
        """Return what was made for a function, or make it. Any thread may call it.

        ``is_spread``: whether the function is called with several items as separate arguments.
        """
        self._kept = {key: (held, made) for key, (held, made) in list(self._kept.items()) if _is_in_module(held)}
        # A method is a new object each time it is read. Equal ones belong to the same object.
        is_method = type(fn) is types.MethodType
        key = (id(fn.__self__), id(fn.__func__), is_spread) if is_method else (id(fn), is_spread)
        made = self._living.get(key)
        known = None if made is None else made.fn.args[0] if is_spread else made.fn
        if made is None or not (known is fn or (is_method and known == fn)):  # else its module was loaded again
            made = self._living[key] = make()
        if _is_in_module(fn):
            self._kept[key] = fn, made
        return made

    def clear(self) -> None:
        self._living.clear()
        self._kept.clear()


def _is_in_module(fn: Any) -> bool:
    """Whether a module holds a function under its name."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    return module is not None and vars(module).get(getattr(fn, "__qualname__", "")) is fn


ON_RESTART = 0
"""The id of the function that replacement workers run."""

ParcelTold = tuple[int, bytes, bool]
"""The number of a parcel, its pickle, and whether a rank goes on if it cannot load it."""


class Functions:
    """The functions that the ranks of a runtime were told of.

    Attributes
    ----------
    book : Book
    state : int
        Rises when there are parcels that ranks may lack.
    bound : WeakSet of Any
        The functions that are on the ranks.
    unsettled : list of Any
        The functions whose parcels no rank has confirmed yet.
    """

    def __init__(self, engine: Any, on_restart: tuple[Any, dict[str, Any]] | None) -> None:
        self._engine = weakref.proxy(engine)
        self.on_restart = on_restart
        self.book = Book(self._engine, self._drop_parcel)
        self.state = 0
        self.bound: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ids = itertools.count(1)
        self.dropped: deque[int] = deque()
        self.mapped = MappedFunctions()
        self.unsettled: list[Any] = []
        self.is_torn = False

    # -- dropping -----------------------------------------------------------------------------------------------------

    def _drop_parcel(self, parcel: Parcel, unbound: list[tuple[tuple[int, int], Any]]) -> None:
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
    ) -> None:
        """Pack functions, and what has changed of what they captured, for the next message to each rank.

        Raises
        ------
        SerializationError
            If a function cannot be pickled.
        """
        try:
            for function_id, fn, options in functions:
                try:
                    self.book.update(function_id, fn, options)
                except SynkError:
                    raise
                except Exception as error:
                    raise unsendable(names, fn, error) from error
                check(function_id)
        except BaseException:
            self._step(self.book.roll_back)
            raise
        self.state += 1

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
        self.book = Book(self._engine, self._drop_parcel)
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
            function.note_unsent()
        self.book.clear()
