"""Seed 000: functions of NumPy whose messages travel while the rank computes, in an order that is found by itself.

``flow`` records what a function does with its arrays, has ``ordering`` put it in order, and runs it. Messages go by
``synk.comm``, on a rank inside a synk function; without messages a flow runs anywhere.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import optree
from numpy.lib.mixins import NDArrayOperatorsMixin
from ordering import schedule

import synk


class Timed(NamedTuple):
    """An operation, the start of a message, or the wait for one, with its seconds since the call of the step."""

    name: str
    start: float
    stop: float


def flow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose messages travel while it computes; its ``trace`` lists what the last call has run.

    At each call the function runs once with arrays that are not computed yet. Its operations are recorded and then run
    in the order of `schedule`: messages start as soon as their arrays exist, and are awaited when nothing else is left
    to do. The results are equal, bit for bit, to those of the plain function.

    Recorded are operators, indexing and methods of arrays, NumPy functions, `send` and `recv`. Anything that needs a
    value, such as ``float``, ``if``, ``shape`` or a function of another library, computes it at once. Random numbers
    are drawn in the line that draws them. An array of a flow cannot be written into.

    Notes
    -----
    The wait for a message comes after all sends that precede the receive in the program. So a program that does not
    deadlock as written, with ``isend`` and ``recv``, does not deadlock in this order either. Do not use collectives of
    ``synk.comm`` in a flow, since it cannot move them. Recording takes about 15 us for each operation.

    Examples
    --------
    >>> import numpy as np, synk
    >>> from dataflow import flow, recv, send
    >>> @flow
    ... def step(x):
    ...     other = (synk.comm.rank + 1) % synk.comm.world_size
    ...     double = 2 * x
    ...     theirs = recv(other)
    ...     total = double.sum() + theirs.sum()
    ...     send(x, other)
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

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        if _Recording.current is not None:
            return function(*args, **kwargs)  # inside of another step it is a part of that step
        recording = _Recording.current = _Recording()
        step.trace = recording.trace  # type: ignore[attr-defined]
        try:
            args, kwargs = _mapped(recording.given, (args, kwargs))
            result = function(*args, **kwargs)
            recording.run(recording.pending)
        finally:
            _Recording.current = None
        return _mapped(_value, result)

    return step


def send(array: Any, peer: int, tag: int = 0) -> None:
    """Send an array to rank ``peer`` as soon as it is computed."""
    name = f"send to {peer}" + (f" tag {tag}" if tag else "")
    _recording().message("send", name, lambda value: synk.comm.isend(value, peer, tag), array, (tag, peer))


def recv(peer: int, tag: int = 0) -> Deferred:
    """Return a message from rank ``peer``, which is awaited as late as possible."""
    name = f"recv from {peer}" + (f" tag {tag}" if tag else "")
    return _recording().message("recv", name, lambda _: synk.comm.irecv(peer, tag), None, (tag, peer))


def call(function: Callable[..., Any], *args: Any) -> Deferred:
    """Record a call of any function as one operation; its result may depend only on the arguments."""
    return _recording().work(function.__name__, function, *args)


def _recording() -> _Recording:
    if _Recording.current is None:
        raise RuntimeError("cannot send, receive or call: got no flow, expected a function that @flow has decorated.")
    return _Recording.current


class _Node:
    """An operation that is run once. ``run`` is None afterwards."""

    def __init__(
        self, kind: str, name: str, needs: list[_Node], run: Callable[[], Any] | None, tag: Any = None
    ) -> None:
        self.kind, self.name, self.needs, self.run, self.tag = kind, name, needs, run, tag
        self.value: Any = None


class _Recording:
    """One call of a step: its operations that are recorded and not run yet, in the order of the program."""

    current: _Recording | None = None  # of this process

    def __init__(self) -> None:
        self.trace: list[Timed] = []
        self.pending: list[_Node] = []
        self._begin = time.perf_counter()
        self._sends: list[_Node] = []
        self._last: dict[Any, _Node] = {}

    def given(self, value: Any) -> Any:
        """Return an argument of the step for its function: deferred if it is an array."""
        if type(value) is not np.ndarray:
            return value
        node = _Node("work", "", [], None)
        node.value = value
        return Deferred(self, node)

    def work(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Deferred:
        """Add a call of a function."""
        return Deferred(self, self._call("work", name, function, args, kwargs))

    def message(self, kind: str, name: str, start: Callable[[Any], Any], array: Any, tag: Any) -> Deferred:
        """Add the start of a message, and the wait for it."""
        begun = self._call(kind, name, start, (array,), {}, tag)
        begun.needs += [self._last[kind, tag]] if (kind, tag) in self._last else []  # they keep their order
        self._last[kind, tag] = begun
        self._sends += [begun] if kind == "send" else []
        # The peer's message may be the answer to any earlier message of this rank.
        needs = [begun] if kind == "send" else [begun, *self._sends]
        wait = _Node("wait", f"wait {name}", needs, lambda: begun.value.wait(), tag)
        self.pending.append(wait)
        return Deferred(self, wait)

    def _call(self, kind: str, name: str, function: Any, args: Any, kwargs: Any, tag: Any = None) -> _Node:
        needs: list[_Node] = []

        def captured(leaf: Any) -> Any:
            if isinstance(leaf, Deferred):
                needs.append(leaf._node)
            elif isinstance(leaf, np.ndarray) and leaf.flags.writeable:
                return _read_only(leaf.copy())  # the program may write into its own array before the operation runs
            return leaf

        args, kwargs = _mapped(captured, (args, kwargs))

        def run() -> Any:
            own_args, own_kwargs = _mapped(_input, (args, kwargs))
            return function(*own_args, **own_kwargs)

        self.pending.append(_Node(kind, name, needs, run, tag))
        return self.pending[-1]

    def value_of(self, node: _Node) -> Any:
        """Return a value, and compute it first if necessary, with messages that can start without a wait."""
        if node.run is not None:
            late: set[_Node] = set()
            wanted, found = {node}, [node]
            for each in self.pending:
                if each.kind == "wait" or not late.isdisjoint(each.needs):
                    late.add(each)
                elif each.kind != "work":
                    found.append(each)
            while found:
                each = found.pop()
                wanted.add(each)
                found += [need for need in each.needs if need.run is not None and need not in wanted]
            self.run([each for each in self.pending if each in wanted])
        return node.value

    def run(self, nodes: list[_Node]) -> None:
        """Run some of the pending operations, and whatever they need."""
        places = {node: place for place, node in enumerate(nodes)}
        needs = tuple(tuple(places[need] for need in node.needs if need in places) for node in nodes)
        for place in _order(needs, tuple(node.kind for node in nodes), tuple(node.tag for node in nodes)):
            node = nodes[place]
            if node.run is not None:
                start = time.perf_counter()
                node.value = node.run()
                self.trace.append(Timed(node.name, start - self._begin, time.perf_counter() - self._begin))
                node.run, node.needs = None, []  # they hold arrays, which can be freed now
        self.pending = [node for node in self.pending if node not in places]


@functools.lru_cache(maxsize=256)
def _order(needs: Any, kinds: Any, tags: Any) -> list[int]:
    """Return the order of nodes that are given by their places."""
    by_place = (dict(enumerate(each)) for each in (needs, kinds, tags))
    return schedule(range(len(kinds)), *by_place)


# Methods and attributes of arrays that give new values and are recorded. All others need the value.
_METHODS = frozenset(
    """
    all any argmax argmin argpartition argsort astype choose clip compress conj conjugate copy cumprod cumsum diagonal
    dot flatten max mean min nonzero prod ravel repeat reshape round searchsorted squeeze std sum swapaxes take trace
    transpose var view
    """.split()  # noqa: SIM905
)
_WRITERS = frozenset("byteswap fill partition put resize setfield setflags sort".split())  # noqa: SIM905


class Deferred(NDArrayOperatorsMixin):
    """An array, or another result of an operation, that a flow computes later.

    Arithmetic, indexing, NumPy functions and array methods give further deferred values. What needs the value computes
    it at once, with everything it depends on.
    """

    def __init__(self, recording: _Recording, node: _Node) -> None:
        self._recording, self._node = recording, node

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        _refuse_write(method == "at" or "out" in kwargs)
        result = self._recording.work(name, getattr(ufunc, method), *inputs, **kwargs)
        return result if ufunc.nout == 1 else tuple(result[place] for place in range(ufunc.nout))

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        _refuse_write("out" in kwargs)
        return self._recording.work(function.__name__, function, *args, **kwargs)

    def __getitem__(self, index: Any) -> Deferred:
        return self._recording.work("getitem", operator.getitem, self, index)

    def __getattr__(self, name: str) -> Any:
        _refuse_write(name in _WRITERS)
        if name in ("T", "mT", "real", "imag"):
            return self._recording.work(name, operator.attrgetter(name), self)
        if name.startswith("__"):  # a library asks whether this is one of its own arrays
            raise AttributeError(name)
        if name not in _METHODS:
            return getattr(_input(self), name)

        def method(*args: Any, **kwargs: Any) -> Deferred:
            _refuse_write("out" in kwargs)
            return self._recording.work(name, called, self, *args, **kwargs)

        def called(value: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(value, name)(*args, **kwargs)

        return method

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        _refuse_write(True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(_input(self), dtype, copy=copy)

    def __bool__(self) -> bool:
        return bool(_value(self))

    def __int__(self) -> int:
        return int(_value(self))

    def __float__(self) -> float:
        return float(_value(self))

    def __index__(self) -> int:
        return operator.index(_value(self))

    def __len__(self) -> int:
        return len(_value(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(_input(self))

    def __repr__(self) -> str:
        return repr(_value(self))


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a nesting with each leaf changed, the ends of slices among them."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(change(each) for each in (leaf.start, leaf.stop, leaf.step)))
        return change(leaf)

    return optree.tree_map(changed, tree, none_is_leaf=True)


def _value(leaf: Any) -> Any:
    return leaf._recording.value_of(leaf._node) if isinstance(leaf, Deferred) else leaf


def _input(leaf: Any) -> Any:
    """Return a value for an operation, which cannot write into it."""
    return _mapped(_read_only, _value(leaf)) if isinstance(leaf, Deferred) else leaf


def _read_only(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    return value


def _refuse_write(is_one: bool) -> Any:
    if is_one:
        raise TypeError(
            "cannot write into an array of a flow: got an assignment, a method that writes, or out=, expected "
            "operations with results of their own. Write x = x + y, or numpy.where."
        )
