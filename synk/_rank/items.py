"""Items of a map on their rank: each is loaded, the function called with it, and its result pickled at once.

At once, because a function may return the same object for each item, changed in place. Results that cannot change are
pickled together, and large arrays are copied straight into memory that goes with the reply.
"""

from __future__ import annotations

import io
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from synk._pure.nested import PLAIN_TYPES
from synk._pure.words import short_repr, text_of
from synk._rank.failures import HostPickler
from synk._rank.outputs import Published
from synk._wire import orders as wire
from synk._wire.memory import Segment
from synk._wire.messages import ITEM_BITS, ItemsOrder
from synk._wire.orders import Phase, Up
from synk.errors import SerializationError

LARGE_NBYTES = 1 << 20

_TOGETHER, _QUICK_NS = 16, 200_000
"""So many items are timed together as long as they take less than this: it may cost more than a tiny item."""

_PHASE, _ITEM, _FUNCTION = int(Up.PHASE), int(Up.ITEM), int(Phase.FUNCTION)


class RankItems:
    """A chunk of items. If this rank dies here, ``Up.ITEM`` says at which of them.

    Attributes
    ----------
    order : ItemsOrder
    """

    is_once = True

    def __init__(self, payload: tuple[Any, ...]) -> None:
        self.order = ItemsOrder(*payload)
        self._generator: tuple[int, Any] = -1, None

    def rng(self, rank: Any) -> np.random.Generator:
        """Return the generator of the present item, which its number seeds."""
        index = rank.own_up[_ITEM] & ((1 << ITEM_BITS) - 1)
        if self._generator[0] != index:
            key = (self.order.job, int(self.order.numbers[index]))
            self._generator = index, np.random.default_rng(np.random.SeedSequence(rank.seed[0], spawn_key=key))
        generator: np.random.Generator = self._generator[1]
        return generator

    def answer(self, rank: Any, number: int, in_place: int, rows: tuple[int, ...]) -> Published:
        """Run the function on each item. Return the reply, with the results."""
        function = rank.mapped = rank.functions[self.order.function]
        rank.items = self
        rank.variables.begin(function, False)
        rank.own_up[_PHASE] = _FUNCTION
        rank.check_interrupt(number)
        rank.detach()
        results = _Results(rank, function.name)
        rank.began_ns = rank.ended_ns = time.monotonic_ns()
        slowest = self._run(rank, number << ITEM_BITS, function, results)
        rank.ended_ns = time.monotonic_ns()
        results.flush()
        content = results.outcomes, wire.apart(results.stream.getvalue()), results.sizes, slowest
        return wire.TOLD, content, results.segments, None

    def _run(self, rank: Any, place: int, function: Any, results: _Results) -> tuple[int, int]:
        """Return the longest time that an item took, in ns, and which one it was, if all were timed."""
        up, variables, fn, clock = rank.own_up, rank.variables, function.fn, time.monotonic_ns
        plain, add = results.plain, results.add
        together = 1 if self.order.is_timed else _TOGETHER
        look_at, slowest, most_ns = 0, 0, -1
        began = clock()
        until = began + self.order.most_ns if self.order.most_ns else sys.maxsize
        for first, items in self._parts(rank, place, results):
            for index, item in enumerate(items, first):
                up[_ITEM] = place + index
                try:
                    result = fn(item)
                    if rank.is_copy or variables.given or variables.assigned:
                        _check(rank, function.name)
                    if type(result) in PLAIN_TYPES:
                        plain.append(result)
                    else:
                        add(result)
                except rank.interrupts:
                    raise
                except BaseException as error:  # not even SystemExit may end a rank
                    self._fail(rank, item, error, results)
                    if not self.order.goes_on:
                        return most_ns, slowest
                if index >= look_at:
                    now = clock()
                    spent_ns = now - began
                    if spent_ns > most_ns:
                        most_ns, slowest = spent_ns, index
                    if now >= until:
                        return most_ns, slowest
                    began, look_at = now, index + (together if spent_ns < _QUICK_NS else 1)
        return most_ns, slowest

    def _parts(self, rank: Any, place: int, results: _Results) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield the items in lists, each with the position of its first one. One that cannot be loaded has failed."""
        index = at = 0
        for count, nbytes in self.order.parts:
            rank.own_up[_ITEM] = place + index
            items = _loaded(rank, self.order.stream[at : at + nbytes], count, results)
            if not items and not self.order.goes_on:
                return
            yield index, items
            index += max(count, 1)
            at += nbytes

    @staticmethod
    def _fail(rank: Any, item: Any, error: BaseException, results: _Results) -> None:
        """Note what an item has raised."""
        rank.end_if_copy(error)
        rank.variables.abandon()
        rank.recover("")
        results.fail(rank._failure(error), short_repr(item))

    def leave(self, rank: Any) -> None:
        rank.mapped = rank.items = None
        rank.variables.abandon()


def _loaded(rank: Any, data: Any, count: int, results: _Results) -> Sequence[Any]:
    """Return some items; none, if the one that was pickled alone cannot be loaded."""
    try:
        loaded = pickle.loads(data)
        return loaded if count else (loaded,)
    except rank.interrupts:
        raise
    except BaseException as error:
        unloadable = SerializationError(
            f"cannot load an item of the map of {results.name!r} on the workers: {text_of(error)}. "
            "Its class must be importable there, or defined in the script."
        )
        unloadable.__cause__ = error
        results.fail(rank._failure(unloadable), "")
        return ()


def _check(rank: Any, name: str) -> None:
    """End a forked copy of this process. Raise TypeError if an item has assigned a variable."""
    rank.end_if_copy()
    variables = rank.variables
    if variables.given:
        variables.check_given()
    if variables.assigned:
        names = ", ".join(repr(replica.name) for replica in variables.assigned)
        raise TypeError(
            f"cannot assign variable {names} in a map of {name!r}: each item runs on one worker alone, and "
            "the others would not have the new value. Return it, and assign in the program; or use synk.function."
        )


class _ResultPickler(HostPickler):
    """Pickles a result, whose arrays are the program's own: it may write to them, as to those of any other call."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (np.ndarray, np.memmap) and not obj.flags.writeable:  # a large item, or a view of one
            return obj.copy("K").__reduce_ex__(5)
        return super().reducer_override(obj)


class _Results:
    """The results of some items, pickled.

    Attributes
    ----------
    stream : io.BytesIO
    outcomes : list of (count, what)
        In the order of the items. ``what`` is the size of a pickled list of so many results; with a count of 0, that of
        one result, and how many of ``segments`` it has; or a failure, and a text that names its item.
    plain : list
        The last results that cannot change: they wait for others.
    segments, sizes : list of Segment, list of int
        The large arrays, and how many bytes they have.
    """

    def __init__(self, rank: Any, name: str) -> None:
        self._rank = rank
        self.stream = io.BytesIO()
        self.outcomes: list[tuple[int, Any]] = []
        self.segments: list[Segment] = []
        self.sizes: list[int] = []
        self.plain: list[Any] = []
        self.name = name

    def add(self, result: Any) -> None:
        """Add the result of the next item, which is not plain."""
        self.flush()
        began, before = self.stream.tell(), len(self.segments)
        try:
            _ResultPickler(self.stream, protocol=5, buffer_callback=self._take).dump(result)
        except BaseException as error:  # __reduce__ of a result is the user's code
            self.stream.seek(began)
            self.stream.truncate()
            del self.segments[before:], self.sizes[before:]
            if isinstance(error, self._rank.interrupts):
                raise
            raise SerializationError(
                f"cannot send what {self.name!r} returned: {text_of(error)}. Return arrays, numbers or "
                "picklable objects (a generator: return list(...))."
            ) from error
        self.outcomes.append((0, (self.stream.tell() - began, len(self.segments) - before)))

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        """Copy a large buffer. Return whether it is to lie in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < LARGE_NBYTES or self._rank.is_far:  # the program may be on another machine
            return True
        segment = Segment.create(raw.nbytes)
        segment.buffer[: raw.nbytes] = np.frombuffer(raw, np.uint8)
        self.segments.append(segment)
        self.sizes.append(raw.nbytes)
        return False

    def fail(self, failure: Any, item: str) -> None:
        """Note the failure of the next item."""
        self.flush()
        self.outcomes.append((0, (failure, item)))

    def flush(self) -> None:
        """Pickle those that could wait, because nobody can change them."""
        if self.plain:
            nbytes = self.stream.write(pickle.dumps(self.plain, protocol=5))
            self.outcomes.append((len(self.plain), nbytes))
            self.plain.clear()
