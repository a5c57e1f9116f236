"""``flow``: records a NumPy function, orders its operations so that messages and work overlap, and runs it.

It runs on a rank, inside a function, and uses ``synk.comm``. Without messages it runs anywhere.
"""

from __future__ import annotations

import functools
import linecache
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

import synk
from synk.errors import add_note
from synk.extensions._deferred import Deferred, mapped, read_only
from synk.extensions._ordering import schedule

_current: ContextVar[_Recording | None] = ContextVar("flow", default=None)
_OWN = ("synk.extensions._flow", "synk.extensions._deferred")


class Timed(NamedTuple):
    """An event in the trace of a flow: an operation, the start of a message, or the wait for one.

    Attributes
    ----------
    name : str
    start, stop : float
        Seconds since the call of the step.
    """

    name: str
    start: float
    stop: float


class Step:
    """A function that is recorded at each call, ordered and run; made by `flow`.

    Attributes
    ----------
    trace : list of Timed
        The events of the last call in this process, in order.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self.trace: list[Timed] = []

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function, with arrays in place of deferred values."""
        if _current.get() is not None:
            return self._function(*args, **kwargs)  # inside of another step it is a part of that step
        recording = _Recording(self._name)
        self.trace = recording.trace
        token = _current.set(recording)
        try:
            args, kwargs = mapped(recording.given, (args, kwargs))
            result = self._function(*args, **kwargs)
            recording.finish()
            return mapped(_value, result)
        finally:
            recording.end()
            _current.reset(token)


class Flow:
    """Order a NumPy function so that its messages travel while it computes. The only instance is ``flow``.

    As a decorator it makes a `Step`. At each call the function runs once with arrays that are not computed yet. Its
    operations are recorded, and then run in the order of `schedule`. Messages start as soon as their arrays exist, and
    are awaited when nothing else is left to do. The results are equal, bit for bit, to those of the plain function.

    The flow records operators, indexing and methods of arrays, NumPy functions, ``flow.send``, ``flow.recv`` and
    ``flow.call``. Anything that needs a value, such as ``float``, ``if``, ``shape`` or a function of another library,
    computes it at once. Random numbers are drawn in the line that draws them. An array of the flow cannot be written
    into.

    Raises
    ------
    TypeError
        For an assignment to a part of an array of the flow, ``out=``, ``x += y`` and the like.
    ValueError
        From NumPy, for functions that try to write into one of their arguments.

    Notes
    -----
    An operation raises its error when it is run; a note names its line in the function. A wait for a message comes
    after all sends that precede the receive in the program. So a program that does not deadlock as written, with
    ``isend`` and ``recv``, does not deadlock in this order either. Do not use collectives of ``synk.comm`` in a flow,
    since it cannot move them. If an operation takes an array of the program, the array is copied when its line is
    recorded, unless it is an argument of the step or read-only. A result that is a view of another array is read-only.

    Recording takes about 15 us for each operation. The order of a graph is kept for later calls with the same graph.

    Examples
    --------
    >>> import numpy as np, synk
    >>> from synk.extensions.dataflow import flow
    >>> @flow
    ... def step(x):
    ...     other = (synk.comm.rank + 1) % synk.comm.world_size
    ...     double = 2 * x
    ...     theirs = flow.recv(other)
    ...     total = double.sum() + theirs.sum()
    ...     flow.send(x, other)
    ...     return total
    >>> def run(x):
    ...     return step(x), " | ".join(each.name for each in step.trace)
    >>> with synk.fork(2, backend="numpy"):
    ...     totals, orders = synk.function(run, outputs=(None, None))(np.arange(4.0))
    >>> [float(total) for total in totals]
    [7.0, 11.0]
    >>> print(orders[0])
    recv from 1 | send to 1 | multiply | sum | wait recv from 1 | sum | add | wait send to 1
    """

    def __call__(self, function: Callable[..., Any]) -> Step:
        """Return a function as a step whose operations are ordered."""
        return Step(function)

    @staticmethod
    def send(array: Any, peer: int, tag: int = 0) -> None:
        """Send an array to rank ``peer`` as soon as it is computed, by ``synk.comm.isend``.

        Raises
        ------
        RuntimeError
            Outside of a flow, or inside of a function that the flow calls itself.
        ValueError
            If ``peer`` or ``tag`` is not an integer of at least 0.
        """
        recording = _recording("send")
        name, peer, tag = _message("send to", peer, tag)
        recording.message("send", name, lambda value: synk.comm.isend(value, peer, tag), array, peer, tag)

    @staticmethod
    def recv(peer: int, tag: int = 0, *, like: Any = None) -> Deferred:
        """Return a message from rank ``peer``, as ``synk.comm.recv`` does. It is awaited as late as possible.

        Raises
        ------
        RuntimeError, ValueError
            As for :meth:`send`.
        """
        recording = _recording("receive")
        name, peer, tag = _message("recv from", peer, tag)
        return recording.message("recv", name, lambda value: synk.comm.irecv(peer, tag, like=value), like, peer, tag)

    @staticmethod
    def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Deferred:
        """Record a call of any function as one operation.

        The result may depend only on the arguments, because the function runs at an unknown time. The function gets
        read-only arrays.

        Raises
        ------
        TypeError
            For a function that draws random numbers.
        RuntimeError
            Outside of a flow.
        """
        if isinstance(getattr(function, "__self__", None), (np.random.Generator, np.random.RandomState)):
            raise TypeError(
                f"cannot record {function.__name__}() in a flow: got a function that draws random numbers, expected "
                "one whose result depends on its arguments alone. Call it in a line of its own, without flow.call."
            )
        name = getattr(function, "__name__", type(function).__name__)
        return _recording("call a function").work(name, function, args, kwargs)


flow = Flow()


class _Node:
    """An operation that is run once. ``run`` is None afterwards."""

    __slots__ = ("kind", "line", "name", "needs", "run", "tag", "value")

    def __init__(self, kind: str, name: str, needs: list[_Node], run: Callable[[], Any] | None, value: Any) -> None:
        self.kind = kind
        self.name = name
        self.needs = needs
        self.run = run
        self.value = value
        self.tag: tuple[int, int] | None = None
        self.line = _line() if run is not None else None


class _Recording:
    """One call of a step: its operations that are recorded and not run yet, in the order of the program."""

    def __init__(self, name: str) -> None:
        self.trace: list[Timed] = []
        self._name = name
        self._begin = time.perf_counter()
        self._pending: list[_Node] = []
        self._sends: list[_Node] = []
        self._last: dict[tuple[str, int, int], _Node] = {}
        # While operations run, and after the step, operations are run at once instead of being recorded.
        self._is_eager = False

    # -- recording ----------------------------------------------------------------------------------------------------

    def given(self, value: Any) -> Any:
        """Return an argument of the step for its function: deferred if it is an array."""
        return Deferred(self, _Node("work", "", [], None, value)) if type(value) is np.ndarray else value

    def work(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Deferred:
        """Add a call of a function."""
        return Deferred(self, self._add(self._call("work", name, function, args, kwargs)))

    def message(self, kind: str, name: str, start: Callable[[Any], Any], array: Any, peer: int, tag: int) -> Deferred:
        """Add the start of a message, and the wait for it."""
        if self._is_eager:
            raise RuntimeError(
                f"cannot {name}: got it in a function that the flow {self._name!r} calls itself, expected messages in "
                "the step. Return the array, and send or receive it there."
            )
        begun = self._call(kind, name, start, (array,), {})
        begun.tag = (tag, peer)
        before = self._last.get((kind, tag, peer))
        if before is not None:  # messages with one tag keep the order of the program
            begun.needs.append(before)
        self._last[kind, tag, peer] = self._add(begun)
        if kind == "send":
            self._sends.append(begun)
            needs = [begun]
        else:  # the peer's message may be the answer to any earlier message of this rank
            self._sends = [send for send in self._sends if send.run is not None]
            needs = [begun, *self._sends]
        return Deferred(self, self._add(_Node("wait", f"wait {name}", needs, lambda: begun.value.wait(), None)))

    def _call(self, kind: str, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> _Node:
        needs: list[_Node] = []

        def captured(leaf: Any) -> Any:
            if isinstance(leaf, Deferred):
                needs.append(leaf._node)
            elif isinstance(leaf, np.ndarray) and leaf.flags.writeable:
                return read_only(leaf.copy())  # the program may write into its own array before the operation runs
            return leaf

        args = mapped(captured, args)
        kwargs = kwargs and mapped(captured, kwargs)

        def run() -> Any:
            return function(*mapped(_input, args), **(kwargs and mapped(_input, kwargs)))

        return _Node(kind, name, needs, run, None)

    def _add(self, node: _Node) -> _Node:
        if self._is_eager:
            self._run_one(node)
        else:
            self._pending.append(node)
        return node

    # -- running ------------------------------------------------------------------------------------------------------

    def value_of(self, node: _Node) -> Any:
        """Return a value, and compute it first if necessary."""
        if node.run is not None:
            if node not in self._pending:
                raise RuntimeError(
                    f"cannot use {node.name!r} of the flow {self._name!r}: got an array that was never computed, "
                    "because the step has failed, expected one of a step that has returned."
                )
            self._run(self._needed_for(node))
        return node.value

    def finish(self) -> None:
        """Run everything that is left."""
        self._run(self._pending)

    def end(self) -> None:
        """Stop recording."""
        self._is_eager = True
        self._pending = []

    def _needed_for(self, node: _Node) -> list[_Node]:
        """Return a node and everything that it depends on, and messages that can start without waiting for others."""
        waiting: set[_Node] = set()
        found = [node]
        for each in self._pending:
            if each.kind == "wait" or not waiting.isdisjoint(each.needs):
                waiting.add(each)
            elif each.kind != "work":
                found.append(each)
        wanted = set(found)
        while found:
            ahead = [need for need in found.pop().needs if need.run is not None and need not in wanted]
            wanted.update(ahead)
            found += ahead
        return [each for each in self._pending if each in wanted]

    def _run(self, nodes: Sequence[_Node]) -> None:
        # `schedule` takes the tag of a wait from the start of its message, so starts that have run already are in the
        # graph, too, before all others and in one chain.
        started = [node.needs[0] for node in nodes if node.kind == "wait" and node.needs[0].run is None]
        nodes = [*started, *nodes]
        places = {node: place for place, node in enumerate(nodes)}
        needs = [[places[need] for need in node.needs if need in places] for node in nodes]
        for place, node in enumerate(nodes):
            if started and node.tag is not None and place:
                needs[place].append(min(place, len(started)) - 1)
        graph = tuple((node.kind, node.tag, tuple(each)) for node, each in zip(nodes, needs, strict=True))
        was_eager, self._is_eager = self._is_eager, True
        try:
            for place in _order(graph):
                self._run_one(nodes[place])
        finally:
            self._is_eager = was_eager
        self._pending = [node for node in self._pending if node not in places]

    def _run_one(self, node: _Node) -> None:
        if node.run is None:  # an earlier part of the program, or another operation, has needed it already
            return
        start = time.perf_counter()
        try:
            node.value = mapped(_value, node.run())
        except Exception as error:
            if node.line is not None:
                add_note(error, _note_of(self._name, node.name, node.line))
            raise
        self.trace.append(Timed(node.name, start - self._begin, time.perf_counter() - self._begin))
        node.run, node.needs = None, []  # they hold arrays, which can be freed now


@functools.lru_cache(maxsize=256)
def _order(graph: tuple[tuple[str, tuple[int, int] | None, tuple[int, ...]], ...]) -> tuple[int, ...]:
    """Return the order of nodes, each given by its kind, its tag and peer, and the positions of the nodes it needs."""
    return tuple(
        schedule(
            range(len(graph)),
            lambda place: graph[place][2],
            lambda place: graph[place][0],
            lambda place: graph[place][1] or place,
        )
    )


def _value(leaf: Any) -> Any:
    return leaf._forced() if isinstance(leaf, Deferred) else leaf


def _input(leaf: Any) -> Any:
    return mapped(read_only, leaf._forced()) if isinstance(leaf, Deferred) else leaf


def _recording(verb: str) -> _Recording:
    recording = _current.get()
    if recording is None:
        raise RuntimeError(
            f"cannot {verb}: got a call outside of a flow, expected one in a function that @flow has decorated, while "
            "it is called. Elsewhere use synk.comm."
        )
    return recording


def _message(verb: str, peer: Any, tag: Any) -> tuple[str, int, int]:
    """Return the name of a message, with its peer and tag after a check."""
    for name, value in (("peer", peer), ("tag", tag)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(f"cannot {verb.split()[0]} in a flow: got {name}={value!r}, expected an int from 0 on.")
    return f"{verb} {peer}" + (f" tag {tag}" if tag else ""), int(peer), int(tag)


def _line() -> tuple[str, int, str] | None:
    """Return the file, line and function of the program's current line, outside of NumPy and this package."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in _OWN and not module.startswith("numpy."):
            return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return None


def _note_of(flow_name: str, name: str, line: tuple[str, int, str]) -> str:
    file, number, function = line
    source = linecache.getline(file, number).strip()
    return f'Of the flow {flow_name!r}: {name!r}, recorded in {function}, file "{file}", line {number}' + (
        f": {source}" if source else "."
    )
