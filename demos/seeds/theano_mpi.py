"""Seed 000: the names of Theano's ``tensor.io`` and ``gof.sched``, for graphs of PyTensor on synk's workers.

A program that uses them runs in a synk function after a change of its imports; its ranks are those of the call.

Examples
--------
>>> import numpy as np, pytensor.tensor as pt, synk
>>> from pytensor import function as compiled
>>> from theano_mpi import mode, recv, send
>>> def double_elsewhere(x):
...     if synk.comm.rank == 0:
...         v = pt.vector("v", dtype="float64")
...         run = compiled([v], [recv((3,), "float64", 1, 2), send(v, 1, 1)], mode=mode())
...         return run(x)[0]
...     run = compiled([], [send(2 * recv((3,), "float64", 0, 1), 0, 2)], mode=mode())
...     run()
...     return x
>>> with synk.fork(2, backend="numpy"):
...     synk.function(double_elsewhere, bcast_inputs="x", outputs=None)(np.arange(3.0))[0]
array([0., 2., 4.])
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ordering import schedule
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.link.c.basic import OpWiseCLinker
from pytensor.link.c.type import generic
from pytensor.tensor import as_tensor_variable, tensor

import synk


class _Message(Op):
    """The start of a message, or the wait for it. Each is an op of its own, so that PyTensor never merges two.

    Attributes
    ----------
    kind : str
        As for `schedule`.
    peer, tag : int
    built : int
        The time at which it was built, in ns of the monotonic clock. It orders the messages of a program, also if
        another process of this machine has built some of them.
    """

    kind: str
    label: str

    def __init__(self, peer: int, tag: int, built: int) -> None:
        self.peer = peer
        self.tag = tag
        self.built = built

    def do_constant_folding(self, fgraph: Any, node: Apply) -> bool:
        return False

    def __str__(self) -> str:
        return self.label


class _Send(_Message):
    kind = "send"
    label = "MPISend"

    def make_node(self, array: Variable) -> Apply:
        return Apply(self, [array], [generic()])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Any) -> None:
        outputs[0][0] = synk.comm.isend(inputs[0], self.peer, self.tag)

    def __str__(self) -> str:
        return f"{self.label}{{dest: {self.peer}, tag: {self.tag}}}"


class _SendWait(_Message):
    kind = "wait"
    label = "MPISendWait"

    def make_node(self, request: Variable) -> Apply:
        return Apply(self, [request], [generic()])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Any) -> None:
        inputs[0].wait()
        outputs[0][0] = True


class _Recv(_Message):
    kind = "recv"
    label = "MPIRecv"

    def __init__(self, peer: int, tag: int, built: int, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__(peer, tag, built)
        self.shape = shape
        self.dtype = dtype

    def make_node(self) -> Apply:
        return Apply(self, [], [generic()])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Any) -> None:
        outputs[0][0] = synk.comm.irecv(self.peer, self.tag, out=np.empty(self.shape, self.dtype))

    def __str__(self) -> str:
        return f"{self.label}{{source: {self.peer}, tag: {self.tag}, shape: {self.shape}, dtype: {self.dtype}}}"


class _RecvWait(_Message):
    kind = "wait"
    label = "MPIRecvWait"

    def make_node(self, request: Variable) -> Apply:
        start = request.owner.op
        return Apply(self, [request], [tensor(shape=start.shape, dtype=start.dtype)])

    def perform(self, node: Apply, inputs: Sequence[Any], outputs: Any) -> None:
        outputs[0][0] = inputs[0].wait()


def send(x: Any, dest: int, tag: int) -> Variable:
    """Send ``x`` to rank ``dest`` when the receipt, which is returned, is computed.

    Parameters
    ----------
    x : variable or array
    dest, tag : int
        Integers of at least 0.

    Returns
    -------
    variable
        The receipt: True once the message has been sent. Make it an output of the compiled function. Otherwise it is
        not computed, and nothing is sent.
    """
    message = dest, tag, time.monotonic_ns()
    return _SendWait(*message)(_Send(*message)(as_tensor_variable(x)))


def recv(shape: Sequence[int], dtype: Any, source: int, tag: int) -> Variable:
    """Return the message that rank ``source`` sends with ``tag``.

    Parameters
    ----------
    shape : sequence of int
    dtype : dtype
        The shape and dtype of the message.
    source, tag : int
        Integers of at least 0.

    Returns
    -------
    variable
    """
    message = source, tag, time.monotonic_ns()
    sizes = tuple(int(size) for size in shape)
    return _RecvWait(*message)(_Recv(*message, sizes, np.dtype(dtype).name)())


def _message_of(node: Apply) -> tuple[str, tuple[int, int]] | None:
    return (node.op.kind, (node.op.tag, node.op.peer)) if isinstance(node.op, _Message) else None


mpi_cmps: tuple[Callable[[Apply], tuple[str, Any] | None], ...] = (_message_of,)
"""The argument of `sort_schedule_fn` for the messages of this module."""


def sort_schedule_fn(*cmps: Callable[[Apply], tuple[str, Any] | None]) -> Callable[[Any], list[Apply]]:
    """Return a function that orders the nodes of a graph, for ``OpWiseCLinker(schedule=...)``.

    Parameters
    ----------
    *cmps : callable
        ``*mpi_cmps``. Each returns the kind and tag of a node for `schedule`, or None. The first result that is not
        None counts. A node without one is work.

    Returns
    -------
    callable
        Maps a ``FunctionGraph`` to its nodes in the order of `schedule`. The wait for a receive comes after all sends
        that the program built before it, because the received message may be the answer to them.

    Raises
    ------
    ValueError
        When a function is compiled in which two messages with one kind, peer and tag have no order.
    """
    return functools.partial(_ordered, cmps)


def _ordered(cmps: Sequence[Callable[[Apply], tuple[str, Any] | None]], graph: Any) -> list[Apply]:
    nodes = list(graph.toposort())
    known = {node: next(filter(None, (tells(node) for tells in cmps)), ("work", None)) for node in nodes}
    # An op that destroys its input comes after all others that use it. The graph's orderings say so.
    before = graph.orderings()
    needs = {
        node: {*before.get(node, ()), *(each.owner for each in node.inputs if each.owner is not None)} for node in nodes
    }
    messages = [node for node in nodes if isinstance(node.op, _Message)]
    for node in messages:
        if isinstance(node.op, _RecvWait):
            needs[node].update(each for each in messages if each.op.kind == "send" and each.op.built < node.op.built)
    kinds, tags = ({node: each[place] for node, each in known.items()} for place in (0, 1))
    return schedule(nodes, needs, kinds, tags)


def mode() -> Mode:
    """Return the mode for functions whose messages are ordered: ``pytensor.function(inputs, outputs, mode=mode())``.

    It compiles each operation in C if there is a C++ compiler. Without one, or with ``PYTENSOR_FLAGS=cxx=`` in the
    environment, it uses NumPy and SciPy. These are also faster for matrices if PyTensor was installed by pip and finds
    no BLAS.
    """
    return Mode(linker=OpWiseCLinker(schedule=sort_schedule_fn(*mpi_cmps)))
