"""A module whose tensors lie in one segment that the workers map, and the passes that the workers run over it.

What the program writes into the tensors (a step of an optimizer, ``load_state_dict``) is there without a message.
Autograd sees one function: its forward pass scatters rows and gathers outputs, its backward pass scatters their
gradients and sums those of the parameters.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from synk._api.function import Function
from synk._api.runtime import Runtime
from synk._pure.interrupts import as_operation, safe_point
from synk.errors import ClosedError, SerializationError, WorkerDied
from synk.torch import _kept_graphs as ranks
from synk.torch import _module_parts as parts
from synk.torch._nesting import put
from synk.torch._state import mark, mutable_attributes

_AGAIN = "Run the forward pass of this batch again; parameters and optimizer are as they were."


class Placed:
    """A module whose tensors lie in memory that the workers share, as it was when they were told of it.

    Another one takes its place when a tensor was moved, or anything of the module but its tensors' values was replaced.
    Graphs of earlier forward passes keep theirs.
    """

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self._module = module
        self._runtime = runtime
        self._name = type(module).__name__
        self._modules = list(module.modules())
        self._parameters = list(module.parameters())
        self._tensors = [*self._parameters, *module.buffers()]
        parts.check(self._name, self._tensors, runtime)
        places, buffers_at, nbytes = parts.arranged(self._parameters, self._tensors[len(self._parameters) :])
        pickled = parts.pickled(self._name, module, self._tensors)
        self._resident = runtime.resident(
            ranks.RankModule(pickled, places, len(self._parameters), buffers_at), name=self._name
        )
        self._memory = runtime.data(shape=(max(nbytes, 1),), dtype=np.uint8, name=self._name)
        array = self._memory.data
        for tensor, place in zip(self._tensors, places):
            # A storage of its own for each: whoever saves one tensor must not save the memory of all.
            own = torch.from_numpy(array[place.offset : place.offset + place.nbytes]) if place.nbytes else None
            moved = torch.empty(place.shape, dtype=place.dtype)
            if own is not None:
                moved = own.view(place.dtype).as_strided(place.shape, place.stride)
                moved.copy_(tensor.detach())
            tensor.data = moved
        self._parts = list(parts.parts_of(self._modules))
        self._looks = self._look()
        self._versions = [parameter._version for parameter in self._parameters]
        self.freed: deque[int] = deque()  # graphs; filled by finalizers
        self.lock = threading.RLock()
        self._graph_numbers = itertools.count(1)
        self._run_forward, self._run_backward = self._functions()
        self.at_fork: list[torch.Tensor] = []
        _living.add(self)

    def _functions(self) -> list[Function[...]]:
        made = []
        for fn, outputs in zip(
            ranks.functions_of(self._resident), (("gather", "first", None), ("sum", "gather", None))
        ):
            function: Function[...] = Function(
                fn,
                bcast_inputs=[name for name in inspect.signature(fn).parameters if name != "rows"],
                outputs=outputs,
                framework="torch",
                name=f"{self._name}.{fn.__name__}",
                session=self._runtime._session,
            )
            made.append(function)
        return made

    def renewed(self) -> Placed:
        """Return this, or what takes its place because the module is another one now."""
        now = list(parts.parts_of(self._modules))
        is_same = len(now) == len(self._parts) and all(map(operator.is_, now, self._parts))
        return self if is_same and self._looks == self._look() else Placed(self._module, self._runtime)

    def _look(self) -> list[Any]:
        """Return what is another one after a tensor was moved, or an attribute was changed in place."""
        return [*(parts.look(tensor) for tensor in self._tensors), mark(mutable_attributes(self._modules))._what]

    # -- passes -------------------------------------------------------------------------------------------------------

    def forward(self, nesting: Any, rows: list[torch.Tensor], whole: list[torch.Tensor], seed: int) -> Any:
        """Run a forward pass on the workers and return the outputs, in autograd's graph where it is one under grad."""
        tensors = [*rows, *whole]
        is_kept = torch.is_grad_enabled() and any(each.requires_grad for each in (*self._parameters, *tensors))
        number = next(self._graph_numbers)
        call = self._call(number)
        order = ranks.Forward(
            call.common,
            self._dumped(nesting),
            bytes(module.training for module in self._modules),
            bytes(parameter.requires_grad for parameter in self._parameters),
            is_kept,
            tuple(k for k, row in enumerate(rows) if is_kept and row.requires_grad),
            tuple(k for k, each in enumerate(whole) if is_kept and each.requires_grad),
            (torch.initial_seed(), seed),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        )
        others = tuple(each.detach() for each in whole) or None
        with call, torch.enable_grad():
            outputs, changed, notes = self._run_forward(
                tuple(row.detach() for row in rows), self._memory, pickle.dumps(order), others
            )
        notes = [pickle.loads(note) for note in notes if note is not None]
        self._take_buffers(changed, notes[0])
        flags = [any(each) for each in zip(*(note.requires_grad for note in notes))]
        if is_kept and any(flags):
            leaves: list[torch.Tensor] = [each for each in self._parameters if each.requires_grad]
            leaves += [each for each in whole if each.requires_grad]
            graph = _Graph(self, number, flags, leaves)
            outputs = _Pass.apply(graph, outputs, *leaves, *(row for row in rows if row.requires_grad))
        elif is_kept:
            self.freed.append(number)
        return put(notes[0].outputs, outputs, ())

    def backward(self, graph: _Graph, gradients: Sequence[torch.Tensor | None], is_kept: bool) -> list[Any]:
        """Return the gradients of a graph's leaves; None for those that no rank has used."""
        given = [k for k, gradient in enumerate(gradients) if gradient is not None and graph.flags[k]]
        with self.lock:
            call = self._call(graph.number)
            order = ranks.Backward(call.common, tuple(given), is_kept)
            rows = tuple(gradients[k] for k in given)
            try:
                with call, torch.enable_grad():
                    flats, own, used = self._run_backward(rows, self._memory, pickle.dumps(order))
            except ranks.GraphLost as error:
                raise WorkerDied(
                    f"cannot compute the gradients of {self._name!r}: rank {error.args[0]} of "
                    f"{self._runtime.world_size} was started anew since the forward pass, whose activations ended with "
                    f"it. {_AGAIN}",
                    ranks=error.args,
                    phase="call",
                ) from error
            except ClosedError as error:
                raise ClosedError(
                    f"cannot compute the gradients of {self._name!r}: the runtime was closed since the forward pass. "
                    f"{_AGAIN}"
                ) from error
        is_used = [any(flags) for flags in zip(*(each for each in used if each is not None))]
        return [
            value if flag else None for value, flag in zip([*parts.unflattened(flats, graph.summed), *own], is_used)
        ]

    def _call(self, number: int) -> _Call:
        return _Call(self.freed, self._parameters, self._versions, number)

    @as_operation
    def _dumped(self, nesting: Any) -> bytes:
        try:
            return safe_point(cloudpickle.dumps, nesting, protocol=5)
        except Exception as error:
            raise SerializationError(
                f"cannot send the inputs of {self._name!r}: {type(error).__name__}: {error}. What is no tensor must be "
                "picklable."
            ) from error

    def _take_buffers(self, changed: torch.Tensor | None, note: ranks.Note) -> None:
        """Take over the buffers that rank 0's forward pass has changed."""
        buffers = self._tensors[len(self._parameters) :]
        start = 0
        with torch.no_grad():
            for number in note.changed:
                buffer = buffers[number]
                assert changed is not None
                nbytes = buffer.numel() * buffer.element_size()
                part = changed[start : start + nbytes].view(buffer.dtype)
                buffer.copy_(part.as_strided(buffer.shape, buffer.stride(), part.storage_offset()))
                start += nbytes
            for number, value in note.replaced.items():
                buffer = buffers[number]
                if value is not None and (value.shape, value.dtype) == (buffer.shape, buffer.dtype):
                    buffer.copy_(value)
                    continue
                for module in self._modules:
                    for key, own in module._buffers.items():
                        if own is buffer:
                            module._buffers[key] = value

    # -- forks --------------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Copy the values for the child: what it did to the memory would reach this program's parameters."""
        self.at_fork = [tensor.detach().clone() for tensor in self._tensors]

    def after_fork(self, *, is_child: bool) -> None:
        if is_child:
            for tensor, look, copied in zip(self._tensors, self._looks, self.at_fork):
                if parts.look(tensor) == look:  # the last one is of attributes
                    tensor.data = copied
        self.at_fork = []


class _Call:
    """One message to the workers: what it reports is taken as reported when they have answered."""

    def __init__(self, freed: deque[int], parameters: Sequence[torch.Tensor], versions: list[int], number: int) -> None:
        self._freed, self._versions, self._number = freed, versions, number
        self._now = [parameter._version for parameter in parameters]
        self._dropped = [freed.popleft() for _ in range(len(freed))]
        written = bytes(map(operator.ne, self._now, versions)) if self._now != versions else b""
        self.common = ranks.Common(number, tuple(self._dropped), written)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self._versions[:] = self._now
        else:  # some ranks may have missed it, and some may have a graph that no other one has
            self._freed.extend((*self._dropped, self._number))


class _Graph:
    """What the master knows of a graph on the workers, for as long as autograd holds it.

    Attributes
    ----------
    number : int
    flags : list of bool
        Which outputs have a gradient.
    summed : list of (dtype, shape)
        Of the leaves whose gradients are summed; those of rows come behind them.
    """

    def __init__(self, placed: Placed, number: int, flags: list[bool], summed: Sequence[torch.Tensor]) -> None:
        self.number, self.flags = number, flags
        self.summed = [(each.dtype, each.shape) for each in summed]
        self.placed = placed
        dropped = weakref.finalize(self, placed.freed.append, number)
        dropped.atexit = False


class _Pass(torch.autograd.Function):
    """A forward pass that the workers have run, in the master's graph."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, outputs: tuple[torch.Tensor, ...], *leaves: torch.Tensor) -> Any:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))  # has torch refuse a second pass over a graph that was freed
        ctx.mark_non_differentiable(*(output for output, flag in zip(outputs, graph.flags) if not flag))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cannot compute gradients of gradients through DataParallel: got create_graph=True, expected False, "
                "because the graph ends with each worker. Use synk.torch.replicate, or DataParallel(...).module."
            )
        assert ctx.saved_tensors
        graph = ctx.graph
        return None, None, *graph.placed.backward(graph, gradients, _is_graph_kept())


def _is_graph_kept() -> bool:
    """Whether the backward pass under way leaves its graph for another one; True where torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


# -- forks ------------------------------------------------------------------------------------------------------------

_living: weakref.WeakSet[Placed] = weakref.WeakSet()


def _before_fork() -> None:
    for placed in list(_living):
        placed.before_fork()


def _after_fork(*, is_child: bool) -> None:
    for placed in list(_living):
        placed.after_fork(is_child=is_child)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, is_child=False),
    after_in_child=functools.partial(_after_fork, is_child=True),
)
