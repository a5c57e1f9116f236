"""The rank's half of ``DataParallel``: its module, whose tensors are the master's, and the graphs of forward passes.

On the CPU the tensors lie in memory that the master shares. A rank on a device has a copy there, which the master sends
again after a change. ``Common.values`` is the number of the copy that a pass is to use, so a rank that has missed a
copy notices and says so.

A forward pass under grad leaves its graph here, under a number, until its backward pass has run or the master says that
none can be asked for any more. The master's messages are idempotent. So a rank that was replaced, or missed a message
that failed, reaches the same state as the others.

In one file because the backward pass takes up what the forward pass has left, on one object.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from synk._wire.cell import cell
from synk._worker.comm.comm import comm
from synk._worker.held.pickling import dumps
from synk.torch._nesting import is_one_slot, put, take
from synk.torch._rank import seed_generators
from synk.torch._without_draws import misfit_of

MIN_ROWS = 4
"""With at least this many rows the first rank checks whether single numbers are means over rows."""


class TensorPlace(NamedTuple):
    """Where a tensor lies in the shared memory. Strides are in elements."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in ``memory``, a flat tensor of uint8."""
        part = memory[self.offset : self.offset + self.nbytes].view(self.dtype)
        return part.as_strided(self.shape, self.stride, part.storage_offset())


class Common(NamedTuple):
    """The part that all messages from the master have.

    Attributes
    ----------
    graph : int
        The graph that a forward pass makes or a backward pass uses: the number of the call of the forward pass.
    values : int
        Number of the copy of the tensors that the pass is to use, on devices.
    freed : tuple of int
        Graphs that no backward pass can ask for any more.
    written : bytes
        A flag for each parameter: whether the master has written into it since its last message. Empty if it has
        written into none.
    """

    graph: int
    values: int
    freed: tuple[int, ...]
    written: bytes


class Forward(NamedTuple):
    """The message for a forward pass.

    Attributes
    ----------
    arguments : bytes
        The pickled nestings of ``(args, kwargs)``, with slots for the tensors.
    training, requires_grad : bytes
        A flag for each module; a flag for each parameter.
    is_kept : bool
        Whether to keep the graph. Without a graph no tensor needs a gradient.
    rows_with_grad, whole_with_grad : tuple of int
        The tensors that need gradients, by their numbers among the tensors with rows and among the whole ones.
    seed : int
        The program's seed. It is mixed with the rank and the number of the call.
    autocast : torch.dtype or None
        The dtype if the program is inside of ``torch.autocast``.
    """

    common: Common
    arguments: bytes
    training: bytes
    requires_grad: bytes
    is_kept: bool
    rows_with_grad: tuple[int, ...]
    whole_with_grad: tuple[int, ...]
    seed: int
    autocast: torch.dtype | None


class Backward(NamedTuple):
    """The message for a backward pass: the outputs whose gradients come with it, and whether to keep the graph."""

    common: Common
    outputs: tuple[int, ...]
    is_kept: bool


@dataclass
class Note:
    """The report of a forward pass, which accompanies its rows.

    Attributes
    ----------
    outputs : object
        The nesting of the outputs with slots; from the first rank only.
    requires_grad, means : bytes
        A flag for each output: whether it has a gradient; whether it is a mean over the rows, as a loss is.
    misfit : str or None
        The ops that fit a single number that is not a mean over rows; from the first pass with enough rows.
    changed : tuple of int
        The buffers that the pass changed in place; from the first rank only.
    replaced : dict
        The buffers that the pass replaced by other tensors, by number.
    """

    outputs: Any
    requires_grad: bytes
    means: bytes
    changed: tuple[int, ...]
    replaced: dict[int, Any]
    misfit: str | None = None


class ValuesMissed(LookupError):
    """The rank lacks the last values of the tensors: it was started again, or had no rows when they were sent."""


class GraphLost(LookupError):
    """The rank was replaced after the forward pass."""


class Graph(NamedTuple):
    """One forward pass of this rank, as autograd recorded it."""

    outputs: list[torch.Tensor]
    summed: list[torch.Tensor]
    rows: list[torch.Tensor]


class FlatGradients(NamedTuple):
    """The memory in which a rank publishes the gradients of one dtype: flat, and as views of the leaves' shapes."""

    flat: torch.Tensor
    shapes: list[torch.Size]
    parts: list[torch.Tensor]


class _Unpickler(pickle.Unpickler):
    """Makes a tensor without memory for each tensor that lies in the shared memory."""

    def __init__(self, data: bytes, places: Sequence[TensorPlace], num_parameters: int) -> None:
        super().__init__(io.BytesIO(data))
        self._places, self._num_parameters = places, num_parameters
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, index: Any) -> Any:
        if index not in self._made:
            tensor = torch.empty(0, dtype=self._places[index].dtype)
            is_parameter = index < self._num_parameters
            self._made[index] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        return self._made[index]


class RankModule:
    """The module of one rank.

    Parameters
    ----------
    classes : sequence of type
        The classes in the module. They come with this object, before the module is made.
    pickled : bytes
        The module without the values of its tensors.
    places : sequence of TensorPlace
        The places of the parameters, then of the buffers.
    num_parameters : int
    buffers_at : int
        The offset in bytes at which the buffers begin in the memory, behind all parameters.
    """

    def __init__(
        self,
        classes: Sequence[type],
        pickled: bytes,
        places: Sequence[TensorPlace],
        num_parameters: int,
        buffers_at: int,
    ) -> None:
        self._state = tuple(classes), pickled, tuple(places), num_parameters, buffers_at

    def __getstate__(self) -> Any:
        return self._state

    def __setstate__(self, state: Any) -> None:
        # A rank that is started again gets the object as it was made, from the log: it has no graphs and no memory yet.
        # The next message brings the memory, or else the rank answers ``ValuesMissed`` or ``GraphLost``.
        self._state = _, pickled, places, num_parameters, self._buffers_at = state  # the classes are there now
        self._places = places
        self._module = _Unpickler(pickled, places, num_parameters).load()
        self._modules = list(self._module.modules())
        self._parameters = list(self._module.parameters())
        self._buffers = list(self._module.buffers())
        numbers = {id(buffer): number for number, buffer in enumerate(self._buffers)}
        self._slots = [
            (module, key, numbers[id(buffer)])
            for module in self._modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._memory: torch.Tensor | None = None
        self._values = -1
        self._flags = b"", b""
        self._is_checked = False
        self._graphs: dict[int, Graph] = {}
        self._flat: dict[torch.dtype, FlatGradients] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, rows: Sequence[torch.Tensor], memory: torch.Tensor | None, message: bytes, whole: Any) -> Any:
        """Return the outputs for this rank's rows, the changed buffers (first rank only), and a note.

        ``memory`` is None if this rank has the values already.

        Raises
        ------
        ValuesMissed
            If it has not.
        """
        order: Forward = pickle.loads(message)
        if memory is None and self._values != order.common.values:
            raise ValuesMissed
        memory = self._prepare(memory, order.common)
        self._set_flags(order.training, order.requires_grad)
        seed_generators(order.seed, order.common.graph, comm.ranks[comm.rank])
        num_rows = len(rows[0])
        # The master writes the rows of its next call to the same place, and a graph keeps its inputs.
        tensors = [row.clone() for row in rows] if order.is_kept else list(rows)
        others = list(whole or ())
        for number in order.rows_with_grad:
            tensors[number].requires_grad_()
        for number in order.whole_with_grad:
            others[number] = others[number].clone().requires_grad_()
        nested_args, nested_kwargs = pickle.loads(order.arguments)

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            args = [put(value, tensors, others) for value in nested_args]
            kwargs = {name: put(value, tensors, others) for name, value in nested_kwargs.items()}
            return self._module.forward(*args, **kwargs)

        is_first, has_copy = comm.rank == 0, bool(cell.worker.backend.is_device)
        before = memory[self._buffers_at :].clone() if (is_first or has_copy) and self._buffers else None
        surroundings = functools.partial(_surroundings, order, memory.device.type)
        with surroundings():
            result = run(tensors)
        outputs: list[torch.Tensor] = []
        nesting = take(result, outputs)
        means = bytes(output.ndim == 0 for output in outputs)
        outputs = [
            _as_rows(output, num_rows) if is_mean else _checked(output, num_rows)
            for output, is_mean in zip(outputs, means)
        ]
        flags = bytes(each.requires_grad for each in outputs)
        note = Note(nesting if is_first else None, flags, means, (), {})
        changed = self._changed_buffers(memory, before if is_first else None, note)
        if is_first and any(means) and not self._is_checked and num_rows >= MIN_ROWS:
            self._is_checked = True
            with surroundings():
                note.misfit = misfit_of(self._modules, run, tensors)
        if has_copy and before is not None:
            memory[self._buffers_at :].copy_(before)
        # The graph is kept before the call has succeeded. If another rank fails, the master puts the number among those
        # that its next message frees.
        if order.is_kept:
            summed = [parameter for parameter in self._parameters if parameter.requires_grad]
            summed += [others[number] for number in order.whole_with_grad]
            self._graphs[order.common.graph] = Graph(
                outputs, summed, [tensors[number] for number in order.rows_with_grad]
            )
        # Only objects that the user's code has put into the note need a pickler that knows classes and devices.
        is_plain = not note.replaced and (note.outputs is None or is_one_slot(note.outputs))
        pickled_note = pickle.dumps(note) if is_plain else dumps(note)
        # The note is an array of bytes, because a call is compiled only if all of its outputs are arrays.
        return tuple(output.detach() for output in outputs), changed, np.frombuffer(pickled_note, np.uint8)

    def _prepare(self, memory: torch.Tensor | None, common: Common) -> torch.Tensor:
        """Place the tensors in the memory, take in the master's news about them, and return the memory."""
        # An interrupt may come at any line. ``_memory`` is assigned last, so a rank that was interrupted before it
        # places all tensors again.
        if memory is not None:
            if self._memory is None or self._memory.data_ptr() != memory.data_ptr():
                for tensor, place in zip([*self._parameters, *self._buffers], self._places):
                    tensor.data = place.view(memory)
            self._memory, self._values = memory, common.values
        for number in common.freed:
            self._graphs.pop(number, None)
        for parameter, is_written in zip(self._parameters, common.written):
            if is_written:  # A graph that saved the old values must raise an error, as in a single process.
                torch.autograd.graph.increment_version(parameter)
        assert self._memory is not None
        return self._memory

    def _set_flags(self, training: bytes, requires_grad: bytes) -> None:
        if (training, requires_grad) != self._flags:
            for module, flag in zip(self._modules, training):
                module.training = bool(flag)
            for parameter, flag in zip(self._parameters, requires_grad):
                parameter.requires_grad_(bool(flag))
            self._flags = training, requires_grad

    def _changed_buffers(self, memory: torch.Tensor, before: torch.Tensor | None, note: Note) -> torch.Tensor | None:
        """Return the bytes of the buffers that the pass changed, and put replaced buffers back.

        On the CPU the pass has written to copies of pages that belong to this process only. The worker drops these
        copies when the call has ended, and the buffers show the master's values again. On a device the caller copies
        the old values back.
        """
        for module, key, number in self._slots:
            now = module._buffers[key]
            if now is self._buffers[number]:
                continue
            module._buffers[key] = self._buffers[number]
            if before is not None:
                note.replaced[number] = None if now is None else now.detach().clone()
        if not self._buffers:
            return None
        parts = []
        if before is not None and not torch.equal(before, memory[self._buffers_at :]):
            changed = []
            for number, place in enumerate(self._places[len(self._parameters) :]):
                part = memory[place.offset : place.offset + place.nbytes]
                start = place.offset - self._buffers_at
                if number not in note.replaced and not torch.equal(part, before[start : start + place.nbytes]):
                    changed.append(number)
                    parts.append(part)
            note.changed = tuple(changed)
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, rows: Sequence[torch.Tensor], memory: torch.Tensor | None, message: bytes) -> Any:
        """Return this rank's part of the sums, flat by dtype, the gradients of its rows, and which leaves were used.

        Raises
        ------
        GraphLost
            If this rank does not have the graph: it was started again since the forward pass.
        """
        order: Backward = pickle.loads(message)
        number = order.common.graph
        if self._memory is None and memory is None:
            raise GraphLost(comm.ranks[comm.rank])
        self._prepare(memory, order.common)
        graph = self._graphs.get(number) if order.is_kept else self._graphs.pop(number, None)
        if graph is None:
            raise GraphLost(comm.ranks[comm.rank])
        frozen = [leaf for leaf in graph.summed if not leaf.requires_grad]  # since then; the graph still reaches them
        if frozen:
            self._flags = b"", b""  # before they change: the next forward pass sets all flags anew
            for leaf in frozen:
                leaf.requires_grad_()
        leaves = [*graph.summed, *graph.rows]
        pairs = [(graph.outputs[k], row) for k, row in zip(order.outputs, rows) if graph.outputs[k].requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if pairs:
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                leaves,
                [row for _, row in pairs],
                retain_graph=order.is_kept,
                allow_unused=True,
            )
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
            raise TypeError(
                "cannot sum the gradients of DataParallel: got a sparse one, expected dense ones. Build the embedding "
                "with sparse=False, or use synk.torch.replicate."
            )
        own = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(graph.rows, found[len(graph.summed) :])
        ]
        used = np.array([gradient is not None for gradient in found], np.uint8)
        return self._flattened(graph.summed, found), tuple(own), used

    def _flattened(
        self, leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        """Return all gradients of each dtype in one tensor, with zeros for leaves that were not used.

        The tensors are reused by the next backward pass. The call has copied them into the rank's slot by then.
        """
        flats = []
        for dtype, numbers in _by_dtype([leaf.dtype for leaf in leaves]).items():
            shapes = [leaves[number].shape for number in numbers]
            kept = self._flat.get(dtype)
            if kept is None or kept.shapes != shapes:
                flat = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=leaves[numbers[0]].device)
                kept = self._flat[dtype] = FlatGradients(flat, shapes, _parts_of(flat, shapes))
            unused = [part for part, number in zip(kept.parts, numbers) if gradients[number] is None]
            if unused:
                torch._foreach_zero_(unused)
            used = [part for part, number in zip(kept.parts, numbers) if gradients[number] is not None]
            if used:
                torch._foreach_copy_(used, [own for number in numbers if (own := gradients[number]) is not None])
            flats.append(kept.flat)
        return tuple(flats)


def _parts_of(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Return views of consecutive parts of a flat tensor."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]


def _by_dtype(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, list[int]]:
    """Return the positions of leaves, grouped by the dtype in which their gradients are summed."""
    kinds: dict[torch.dtype, list[int]] = {}
    for number, dtype in enumerate(dtypes):
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        kinds.setdefault(wide, []).append(number)
    return kinds


def unflattened(flats: Sequence[torch.Tensor], leaves: Sequence[tuple[torch.dtype, torch.Size]]) -> list[torch.Tensor]:
    """Return the gradient of each leaf. It is a view of the sum if both have the same dtype."""
    values: list[Any] = [None] * len(leaves)
    kinds = _by_dtype([dtype for dtype, _ in leaves])
    for flat, numbers in zip(flats, kinds.values()):
        for number, part in zip(numbers, _parts_of(flat, [leaves[number][1] for number in numbers])):
            values[number] = part.to(leaves[number][0])
    return values


def _as_rows(output: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Repeat a mean over this rank's rows once for each row, so that the mean over all ranks is weighted by rows."""
    if not (output.is_floating_point() or output.is_complex()):
        raise TypeError(
            f"cannot average an output of DataParallel: got a single number of dtype {output.dtype}, expected floats, "
            "as a loss is. Have forward return one row for each row of its inputs and reduce them after the call."
        )
    return output.expand(num_rows)


def _checked(output: torch.Tensor, num_rows: int) -> torch.Tensor:
    if output.shape[0] != num_rows or output.layout is not torch.strided:
        raise ValueError(
            f"cannot gather an output of DataParallel: got a tensor of shape {tuple(output.shape)} for {num_rows} rows "
            f"of inputs, expected {num_rows} rows or a single number. Have forward return one row for each row of its "
            "inputs and reduce them after the call (a loss too), or use synk.torch.replicate."
        )
    return output


@contextlib.contextmanager
def _surroundings(order: Forward, device_type: str) -> Iterator[None]:
    """Run the body in the modes of the master's caller."""
    is_cast = order.autocast is not None  # otherwise it is off already; switching it off takes as long as a small layer
    modes = torch.autocast(device_type, order.autocast) if is_cast else contextlib.nullcontext()
    with torch.set_grad_enabled(order.is_kept), modes:
        yield


def functions_of(resident: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that the ranks run for a forward pass and for a backward pass."""

    def forward(rows: Any, memory: Any, message: bytes, whole: Any) -> Any:
        return resident.value.forward(rows, memory, message, whole)

    def backward(rows: Any, memory: Any, message: bytes) -> Any:
        return resident.value.backward(rows, memory, message)

    return forward, backward
