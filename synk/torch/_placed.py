"""A module whose tensors lie in one segment that the workers map, and the passes that the workers run over it.

Values that the program writes into the tensors (a step of an optimizer, ``load_state_dict``) reach workers on the CPU
without a message. Workers on devices get them with the first forward pass after a change, and keep them. Autograd sees
one function. Its forward pass scatters rows and gathers outputs. Its backward pass scatters the outputs' gradients and
sums the parameters' gradients.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import pickle
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from synk._api.function import Function
from synk._api.runtime import Runtime
from synk._wire.parcels import dumps
from synk.errors import ClosedError, SerializationError, WorkerDied
from synk.torch import _kept_graphs as ranks
from synk.torch import _module_parts as parts
from synk.torch._nesting import is_one_slot, put
from synk.torch._state import mark, mutable_attributes

_AGAIN = "Run the forward pass of this batch again; parameters and optimizer are as they were."


class Placed:
    """A module whose tensors lie in memory that the workers share, as it was when it was sent to the workers.

    If a tensor is moved, or anything in the module except the values of its tensors is replaced, a new ``Placed`` takes
    the place of this one. Graphs of earlier forward passes keep the old one alive, and with it the ranks' modules and
    the memory.
    """

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self._module = module
        self._runtime = runtime
        self._name = type(module).__name__
        self._modules = list(module.modules())
        self._parameters = list(module.parameters())
        self._tensors = [*self._parameters, *module.buffers()]
        parts.check(self._name, self._tensors)
        named = (*module.named_parameters(), *module.named_buffers())
        alone = {parts.memory_marks(tensor): (name, tensor) for name, tensor in named}  # equal views get one place
        parts.check_memory(f"make DataParallel of {self._name!r}", alone.values())
        places, buffers_at, nbytes = parts.arranged(self._parameters, self._tensors[len(self._parameters) :])
        pickled, classes = parts.pickled(self._name, module, self._tensors)
        self._resident = runtime.resident(
            ranks.RankModule(classes, pickled, places, len(self._parameters), buffers_at), name=self._name
        )
        self._memory = runtime.data(shape=(max(nbytes, 1),), dtype=np.uint8, name=self._name)
        array = self._memory.data
        for tensor, place in zip(self._tensors, places):
            # Each tensor has a storage of its own: saving one tensor must not save the memory of all.
            own = torch.from_numpy(array[place.offset : place.offset + place.nbytes]) if place.nbytes else None
            moved = torch.empty(place.shape, dtype=place.dtype)
            if own is not None:
                moved = own.view(place.dtype).as_strided(place.shape, place.stride)
                moved.copy_(tensor.detach())
            tensor.data = moved
        self._values = torch.from_numpy(array)
        self._sent: torch.Tensor | None = None  # a copy of the values that were last sent to workers on devices
        self._num_sent = 0
        self._parts = parts.ModuleParts(self._modules)
        self._mutable = mutable_attributes(self._modules)
        self._marks = self._read_marks()
        self._versions = [parameter._version for parameter in self._parameters]
        # Numbers of graphs that no backward pass can ask for. Finalizers append to it at any line and in any thread; a
        # deque needs no lock for that. The next message takes them all.
        self.freed: deque[int] = deque()
        self.lock = threading.RLock()
        forward, backward = ranks.functions_of(self._resident)
        self._run_forward = self._function(forward, ("memory", "message", "whole"), ("gather", "first", None))
        self._run_backward = self._function(backward, ("memory", "message"), ("sum", "gather", None))
        self.at_fork: list[torch.Tensor] = []
        _living.add(self)

    def _function(self, fn: Any, bcast_inputs: Sequence[str], outputs: tuple[Any, ...]) -> Function[..., Any]:
        fn.__name__ = f"{self._name}.{fn.__name__}"
        session = self._runtime._session
        return Function(fn, bcast_inputs=bcast_inputs, outputs=outputs, framework="torch", session=session)

    def renewed(self) -> Placed:
        """Return this object, or its replacement if the module has changed."""
        is_same = self._parts.are_same() and self._marks == self._read_marks()
        return self if is_same else Placed(self._module, self._runtime)

    def _read_marks(self) -> list[Any]:
        """Return marks that change when a tensor is moved or an attribute is changed in place.

        There is one mark for each tensor, then one for all attributes.
        """
        return [*map(parts.memory_marks, self._tensors), mark(self._mutable)._what]

    # -- passes -------------------------------------------------------------------------------------------------------

    def forward(self, nesting: Any, rows: list[torch.Tensor], whole: list[torch.Tensor], number: int) -> Any:
        """Run a forward pass on the workers and return the outputs, in autograd's graph if grad is enabled.

        ``number`` is the number of the call. It seeds the pass and names its graph.
        """
        tensors = [*rows, *whole]
        is_kept = torch.is_grad_enabled() and any(each.requires_grad for each in (*self._parameters, *tensors))
        memory = self._memory_to_send()
        args, kwargs = nesting
        has_tensors_only = all(map(is_one_slot, (*args, *kwargs.values())))
        kind = self._runtime._session.assignment.torch_device
        others = tuple(each.detach() for each in whole) or None
        run = functools.partial(self._run_forward, tuple(row.detach() for row in rows))
        with self._message(number) as common:
            order = ranks.Forward(
                common,
                pickle.dumps(nesting) if has_tensors_only else self._dumped(nesting),
                bytes(module.training for module in self._modules),
                bytes(parameter.requires_grad for parameter in self._parameters),
                is_kept,
                tuple(k for k, row in enumerate(rows) if is_kept and row.requires_grad),
                tuple(k for k, each in enumerate(whole) if is_kept and each.requires_grad),
                torch.initial_seed(),
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            )
            message = pickle.dumps(order)
            with torch.enable_grad():
                # A rank without the last values says so before it computes, and the call is repeated with the memory.
                # Other ranks may have run the first call. The second one replaces the graph that it left.
                try:
                    outputs, changed, notes = run(memory, message, others)
                except ranks.ValuesMissed:
                    outputs, changed, notes = run(self._memory, message, others)
        notes = [pickle.loads(note) for note in notes if note is not None]
        if notes[0].changed or notes[0].replaced:
            self._take_buffers(changed, notes[0])
        if notes[0].misfit is not None:
            warnings.warn(
                f"forward of {self._name!r} returns a single number that is no mean over rows, expected one: "
                f"DataParallel averages it over rows. On parts of a worker's rows {notes[0].misfit} fits. Compute it "
                "after the call from outputs with rows, or use synk.torch.replicate.",
                UserWarning,
                stacklevel=5,
            )
        flags = [any(each) for each in zip(*(note.requires_grad for note in notes))]
        if is_kept and any(flags):
            leaves: list[torch.Tensor] = [each for each in self._parameters if each.requires_grad]
            leaves += [each for each in whole if each.requires_grad]
            graph = _Graph(self, number, flags, leaves)
            outputs = _Pass.apply(graph, outputs, *leaves, *(row for row in rows if row.requires_grad))
        elif is_kept:
            self.freed.append(number)
        return put(
            notes[0].outputs,
            [each.mean() if is_mean else each for each, is_mean in zip(outputs, notes[0].means)],
            (),
        )

    def backward(self, graph: _Graph, gradients: Sequence[torch.Tensor | None], is_kept: bool) -> list[Any]:
        """Return the gradients of a graph's leaves; None for leaves that no rank has used.

        Raises
        ------
        WorkerDied
            If a rank does not have the graph any more.
        ClosedError
            If the runtime was closed since the forward pass.
        """
        given = [k for k, gradient in enumerate(gradients) if gradient is not None and graph.flags[k]]
        with self.lock:
            rows = tuple(gradients[k] for k in given)
            memory = None if self._runtime._session.has_devices else self._memory
            try:
                with self._message(graph.number) as common, torch.enable_grad():
                    order = ranks.Backward(common, tuple(given), is_kept)
                    flats, own, used = self._run_backward(rows, memory, pickle.dumps(order))
            except ranks.GraphLost as error:
                raise WorkerDied(
                    f"cannot compute the gradients of {self._name!r}: rank {error.args[0]} of "
                    f"{self._runtime.world_size} no longer has the activations of the forward pass. Its worker was "
                    f"started again since, or an earlier backward() was broken off. {_AGAIN}",
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
            value if flag else None for value, flag in zip([*ranks.unflattened(flats, graph.summed), *own], is_used)
        ]

    @contextlib.contextmanager
    def _message(self, number: int) -> Iterator[ranks.Common]:
        """Yield the part that all messages have, for the message that the body sends.

        If the body fails, some ranks may have missed the message. Then its news goes out again with the next one.
        """
        now = [parameter._version for parameter in self._parameters]
        dropped = tuple(self.freed.popleft() for _ in range(len(self.freed)))
        written = bytes(map(operator.ne, now, self._versions)) if now != self._versions else b""
        try:
            yield ranks.Common(number, self._num_sent, dropped, written)
        except BaseException:
            # Some ranks may have made a graph that others lack, or used one up that others still have. So the graph of
            # this message is freed, too, on all ranks. ``_versions`` stays: what was written is told once more.
            self.freed.extend((*dropped, number))
            raise
        self._versions = now

    def _memory_to_send(self) -> Any:
        """Return the memory for a forward pass; None if the workers are on devices and have its values."""
        if not self._runtime._session.has_devices:
            return self._memory
        if self._sent is not None and torch.equal(self._sent, self._values):  # versions do not tell of tensor.data
            return None
        # Noted before it is sent: if the call fails, a rank that has missed this copy answers ``ValuesMissed``.
        self._sent = self._values.clone()
        self._num_sent += 1
        return self._memory

    def _dumped(self, nesting: Any) -> bytes:
        try:
            return dumps(nesting)
        except Exception as error:
            raise SerializationError(
                f"cannot send the inputs of {self._name!r}: {type(error).__name__}: {error}. What is no tensor must be "
                "picklable."
            ) from error

    def _take_buffers(self, changed: torch.Tensor | None, note: ranks.Note) -> None:
        """Take over the buffers that rank 0's forward pass changed."""
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
        """Copy the values for the child, whose writes into the shared memory would change this program's parameters."""
        self.at_fork = [tensor.detach().clone() for tensor in self._tensors]

    def after_fork(self, *, is_child: bool) -> None:
        if is_child:
            for tensor, marks, copied in zip(self._tensors, self._marks, self.at_fork):
                if parts.memory_marks(tensor) == marks:  # not moved since; zip leaves out the mark of the attributes
                    tensor.data = copied
        self.at_fork = []


class _Graph:
    """The master's handle of a graph on the workers. It lives as long as autograd holds the graph.

    Attributes
    ----------
    number : int
        The number of the call of the forward pass, which names the graph.
    flags : list of bool
        Whether each output has a gradient.
    summed : list of (dtype, shape)
        The leaves whose gradients are summed over the ranks. The leaves with rows come after them.
    """

    def __init__(self, placed: Placed, number: int, flags: list[bool], summed: Sequence[torch.Tensor]) -> None:
        self.number, self.flags = number, flags
        self.summed = [(each.dtype, each.shape) for each in summed]
        self.placed = placed
        # Autograd drops the graph in whatever thread frees the loss. The finalizer only notes it; the next message has
        # the ranks free theirs. At exit the workers end anyhow.
        dropped = weakref.finalize(self, placed.freed.append, number)
        dropped.atexit = False


class _Pass(torch.autograd.Function):
    """A forward pass that the workers have run, as a node of the master's graph."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, outputs: tuple[torch.Tensor, ...], *leaves: torch.Tensor) -> Any:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        # torch refuses to read saved tensors once a backward pass has freed the graph, and so a second pass over it.
        ctx.save_for_backward(torch.empty(0))
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
    """Whether the running backward pass keeps its graph for another one; True if torch does not say."""
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
