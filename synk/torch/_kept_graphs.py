"""A rank's half of ``DataParallel``: its module, whose tensors are the master's, and the graphs of forward passes.

A forward pass under grad leaves its graph here, by number, until its backward pass has run or the master says that
nobody can ask for one any more. What the master sends is idempotent, so a rank that was started anew, or missed a
message that failed, comes to the same state as the others.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from synk._worker.comm.comm import comm
from synk._worker.held.pickling import dumps
from synk.torch._nesting import put, take
from synk.torch._rank import _seed as seed_generators


class Place(NamedTuple):
    """Where a tensor lies in the shared memory; strides in elements."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in ``memory``, a flat one of uint8."""
        part = memory[self.offset : self.offset + self.nbytes].view(self.dtype)
        return part.as_strided(self.shape, self.stride, part.storage_offset())


class Common(NamedTuple):
    """What every message of the master says.

    Attributes
    ----------
    graph : int
    freed : tuple of int
        Graphs that nobody can ask for any more.
    written : bytes
        By parameter, whether the master has written into it since its last message; empty: into none.
    """

    graph: int
    freed: tuple[int, ...]
    written: bytes


class Forward(NamedTuple):
    """A forward pass.

    Attributes
    ----------
    arguments : bytes
        The pickled nestings of each of ``(args, kwargs)``, with slots for the tensors.
    training, requires_grad : bytes
        Flags by module and by parameter.
    rows_with_grad, whole_with_grad : tuple of int
        Which tensors want their gradients; with ``is_kept`` False none, and no graph is kept.
    autocast : torch.dtype or None
    """

    common: Common
    arguments: bytes
    training: bytes
    requires_grad: bytes
    is_kept: bool
    rows_with_grad: tuple[int, ...]
    whole_with_grad: tuple[int, ...]
    seed: tuple[int, int]
    autocast: torch.dtype | None


class Backward(NamedTuple):
    """A backward pass: for which outputs gradients come, and whether the graph is to be kept."""

    common: Common
    outputs: tuple[int, ...]
    is_kept: bool


@dataclass
class Note:
    """What a forward pass tells beside rows.

    Attributes
    ----------
    outputs : object
        The nesting with slots; of the first rank only.
    requires_grad : bytes
        By output.
    changed : tuple of int
        The buffers that the pass has changed in place; of the first rank only.
    replaced : dict
        Those for which it has put another tensor, by number.
    """

    outputs: Any
    requires_grad: bytes
    changed: tuple[int, ...]
    replaced: dict[int, Any]


class GraphLost(LookupError):
    """The rank was started anew since the forward pass."""


class Graph(NamedTuple):
    """One forward pass of this rank, as autograd has recorded it."""

    outputs: list[torch.Tensor]
    summed: list[torch.Tensor]
    rows: list[torch.Tensor]


class _Unpickler(pickle.Unpickler):
    """Makes a tensor without memory for each that lies in the shared memory."""

    def __init__(self, data: bytes, places: Sequence[Place], num_parameters: int) -> None:
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
    pickled : bytes
    places : sequence of Place
        Of the parameters, then of the buffers.
    num_parameters : int
    buffers_at : int
        Where the buffers begin in the memory; they lie behind all parameters.
    """

    def __init__(self, pickled: bytes, places: Sequence[Place], num_parameters: int, buffers_at: int) -> None:
        self._state = pickled, tuple(places), num_parameters, buffers_at

    def __getstate__(self) -> Any:
        return self._state

    def __setstate__(self, state: Any) -> None:
        self._state = pickled, places, num_parameters, self._buffers_at = state
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
        self._address = 0
        self._flags = b"", b""
        self._graphs: dict[int, Graph] = {}
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, rows: Sequence[torch.Tensor], memory: torch.Tensor, message: bytes, whole: Any) -> Any:
        """Return the outputs for this rank's rows, the changed buffers of the first rank, and a note."""
        order: Forward = pickle.loads(message)
        self._prepare(memory, order.common)
        self._set_flags(order.training, order.requires_grad)
        seed_generators(*order.seed, comm.ranks[comm.rank])
        num_rows = len(rows[0])
        # The rows lie where the master writes those of its next call; a graph keeps its inputs.
        tensors = [row.clone() for row in rows] if order.is_kept else list(rows)
        others = list(whole or ())
        for number in order.rows_with_grad:
            tensors[number].requires_grad_()
        for number in order.whole_with_grad:
            others[number] = others[number].clone().requires_grad_()
        nested_args, nested_kwargs = pickle.loads(order.arguments)
        args = [put(value, tensors, others) for value in nested_args]
        kwargs = {name: put(value, tensors, others) for name, value in nested_kwargs.items()}
        is_first = comm.rank == 0
        before = memory[self._buffers_at :].clone() if is_first and self._buffers else None
        with _surroundings(order):
            result = self._module.forward(*args, **kwargs)
        outputs: list[torch.Tensor] = []
        nesting = take(result, outputs)
        for output in outputs:
            _check_rows(output, num_rows)
        note = Note(nesting if is_first else None, bytes(each.requires_grad for each in outputs), (), {})
        changed = self._changed_buffers(memory, before, note)
        if order.is_kept:
            summed = [parameter for parameter in self._parameters if parameter.requires_grad]
            summed += [others[number] for number in order.whole_with_grad]
            self._graphs[order.common.graph] = Graph(
                outputs, summed, [tensors[number] for number in order.rows_with_grad]
            )
        # An array of bytes, for calls are quiet where all outputs are arrays.
        return tuple(output.detach() for output in outputs), changed, np.frombuffer(dumps(note), np.uint8)

    def _prepare(self, memory: torch.Tensor, common: Common) -> None:
        """Have the tensors lie in the memory, and take in what the master tells of them."""
        if self._address != memory.data_ptr():
            for tensor, place in zip([*self._parameters, *self._buffers], self._places):
                tensor.data = place.view(memory)
            self._address = memory.data_ptr()
        for number in common.freed:
            self._graphs.pop(number, None)
        for parameter, is_written in zip(self._parameters, common.written):
            if is_written:  # a graph that has saved the old values must say so, as it does in one process
                torch.autograd.graph.increment_version(parameter)

    def _set_flags(self, training: bytes, requires_grad: bytes) -> None:
        if (training, requires_grad) != self._flags:
            for module, flag in zip(self._modules, training):
                module.training = bool(flag)
            for parameter, flag in zip(self._parameters, requires_grad):
                parameter.requires_grad_(bool(flag))
            self._flags = training, requires_grad

    def _changed_buffers(self, memory: torch.Tensor, before: torch.Tensor | None, note: Note) -> torch.Tensor | None:
        """Return the bytes of the buffers that the pass has changed; they hold the master's values again afterwards.

        What was written in place are pages of this process's own, which the runtime drops with the end of the call.
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

    def backward(self, rows: Sequence[torch.Tensor], memory: torch.Tensor, message: bytes) -> Any:
        """Return this rank's part of the sums, flat by dtype, the gradients of its rows, and which of all were used."""
        order: Backward = pickle.loads(message)
        self._prepare(memory, order.common)
        number = order.common.graph
        graph = self._graphs.get(number) if order.is_kept else self._graphs.pop(number, None)
        if graph is None:
            raise GraphLost(comm.ranks[comm.rank])
        for leaf in graph.summed:
            leaf.requires_grad_()  # it may have been frozen since: the graph reaches it all the same
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
        """Return all gradients of each dtype in one tensor; zeros for those that were not used."""
        flats = []
        for dtype, numbers in by_dtype([leaf.dtype for leaf in leaves]).items():
            size = sum(leaves[number].numel() for number in numbers)
            flat = self._flat.get(dtype)
            if flat is None or flat.numel() != size:
                flat = self._flat[dtype] = torch.empty(size, dtype=dtype)
            start = 0
            for number in numbers:
                leaf, gradient = leaves[number], gradients[number]
                part = flat[start : start + leaf.numel()].view(leaf.shape)
                start += leaf.numel()
                part.zero_() if gradient is None else part.copy_(gradient)
            flats.append(flat)
        return tuple(flats)


def by_dtype(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, list[int]]:
    """Return positions by the dtype in which their gradients are summed."""
    kinds: dict[torch.dtype, list[int]] = {}
    for number, dtype in enumerate(dtypes):
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        kinds.setdefault(wide, []).append(number)
    return kinds


def _check_rows(output: torch.Tensor, num_rows: int) -> None:
    if output.ndim == 0 or output.shape[0] != num_rows or output.layout is not torch.strided:
        raise ValueError(
            f"cannot gather an output of DataParallel: got a tensor of shape {tuple(output.shape)} for {num_rows} rows "
            f"of inputs, expected {num_rows} rows. Have forward return one row for each row of its inputs and reduce "
            "them after the call (a loss too), or use synk.torch.replicate."
        )


@contextlib.contextmanager
def _surroundings(order: Forward) -> Iterator[None]:
    """Have the body see the modes that the master's caller is in."""
    with (
        torch.set_grad_enabled(order.is_kept),
        torch.autocast("cpu", order.autocast, enabled=order.autocast is not None),
    ):
        yield


def functions_of(resident: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what the ranks run for a pass forward and for one backward."""

    def forward(rows: Any, memory: Any, message: bytes, whole: Any) -> Any:
        return resident.value.forward(rows, memory, message, whole)

    def backward(rows: Any, memory: Any, message: bytes) -> Any:
        return resident.value.backward(rows, memory, message)

    return forward, backward
