"""``DataParallel``: a module whose forward and backward passes run on all CPU workers, and all else in the program.

The module's parameters and buffers lie in one segment that the workers map. So what the program writes into them (a
step of an optimizer, ``load_state_dict``) is there without a message. Autograd sees one function: its forward pass
scatters rows and gathers outputs, its backward pass scatters their gradients and sums those of the parameters.
"""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import operator
import os
import pickle
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from synk._api.current import current
from synk._api.function import Function
from synk._api.runtime import Runtime
from synk._pure.interrupts import is_from_handler
from synk._pure.ranges import LINE_NBYTES, round_up
from synk.errors import ClosedError, SerializationError, UnsupportedError, WorkerDied
from synk.torch import _kept_graphs as ranks
from synk.torch._nesting import put, take

_AGAIN = "Run the forward pass of this batch again; parameters and optimizer are as they were."


class DataParallel(torch.nn.Module):
    """A module whose calls run on all CPU workers; a drop-in for ``torch.nn.DataParallel`` without GPUs.

    The rows of a call's tensors are divided among the workers and the outputs gathered; ``backward()`` brings the
    gradients of all rows. The loss, the optimizer, schedulers and checkpoints stay as they are, and so does the module:
    this object has all of its attributes, methods and names, is an instance of its class, and is pickled and copied as
    one. The module itself is ``.module`` and shares everything, and its calls run in the program.

    Parameters
    ----------
    module : torch.nn.Module
        On the CPU. Its forward pass must treat rows alone and return tensors with a row for each row of its inputs.
    bcast_inputs : str or sequence of str
        Parameters of ``forward`` that every worker gets whole; tensors without axes always are.
    runtime : Runtime, optional
        The current one where not given. Its workers must be CPU workers.

    Raises
    ------
    TypeError
        If ``module`` is no module, or one that is parallel already.
    ValueError
        If it has lazy parameters without a shape.
    UnsupportedError
        If the module or the workers are on GPUs: parameters would cross to the devices in each step.
    SerializationError
        If it cannot be pickled.

    Notes
    -----
    Equal to the serial loop but for rounding, with two exceptions: a batch norm in training mode normalises over the
    rows of each worker, and dropout draws other numbers. Buffers that a forward pass changes come back from rank 0;
    other attributes that it assigns stay on the workers. A call whose tensors have no rows runs in the program, and so
    do all calls after the runtime was closed. The workers draw random numbers seeded by ``torch.initial_seed()``, the
    number of the call and the rank.

    Examples
    --------
    >>> import torch, synk, synk.torch
    >>> with synk.fork(2):
    ...     model = synk.torch.DataParallel(torch.nn.Linear(2, 1))
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    ...     for _ in range(200):
    ...         optimizer.zero_grad()
    ...         loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...     bool(loss < 1e-3), list(model.state_dict())
    (True, ['weight', 'bias'])
    """

    __slots__ = ("_synk_passes",)
    _synk_passes: _Passes

    def __new__(cls, module: Any, *args: Any, **kwargs: Any) -> DataParallel:
        if not isinstance(module, torch.nn.Module) or isinstance(module, DataParallel):
            raise TypeError(
                f"cannot make DataParallel: got {type(module).__name__}, expected a torch.nn.Module that is not "
                "parallel yet."
            )
        own = type(module)
        # It says that it is of its old class, as pickles and copies of it are.
        names = {"__slots__": (), "__class__": property(lambda self: own), "__doc__": own.__doc__}
        made = types.new_class(
            f"DataParallel[{own.__name__}]", (DataParallel, own), {}, lambda each: each.update(names)
        )
        self: DataParallel = object.__new__(made)
        self.__dict__ = module.__dict__  # one object in all but its class
        return self

    def __init__(
        self, module: torch.nn.Module, *, bcast_inputs: str | Sequence[str] = (), runtime: Runtime | None = None
    ) -> None:
        names = (bcast_inputs,) if isinstance(bcast_inputs, str) else tuple(bcast_inputs)
        runtime = current() if runtime is None else runtime
        object.__setattr__(self, "_synk_passes", _Passes(module, names, runtime))

    @property
    def forward(self) -> Callable[..., Any]:
        run = functools.partial(self._synk_passes.run)
        return functools.wraps(self._synk_passes.module.forward)(run)

    @forward.setter
    def forward(self, fn: Callable[..., Any]) -> None:
        self.__dict__["forward"] = fn

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            return self._synk_passes.module
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._synk_passes.module.__reduce_ex__(protocol)


class _Passes:
    """The forward and backward passes of one ``DataParallel``.

    Attributes
    ----------
    module : torch.nn.Module
    """

    def __init__(self, module: torch.nn.Module, bcast_inputs: tuple[str, ...], runtime: Runtime) -> None:
        self.module = module
        self._name = type(module).__name__
        self._runtime = runtime
        self._bcast_inputs = bcast_inputs
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._check_bcast_inputs()
        self._placed = _Placed(module, runtime)

    def _check_bcast_inputs(self) -> None:
        known = inspect.signature(self.module.forward).parameters if self._bcast_inputs else {}
        for name in self._bcast_inputs:
            if name not in known:
                raise ValueError(
                    f"cannot make DataParallel of {self._name!r}: got {name!r} in bcast_inputs, expected one of the "
                    f"parameters of its forward ({', '.join(known)})."
                )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass on the workers, or here where they are gone or there are no rows to divide."""
        session = self._runtime._session
        rows: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        is_here = self._runtime.is_closed or not session.is_own_process or session.workers.is_inline
        if not is_here:
            nesting = self._taken(args, kwargs, rows, whole)
        if is_here or not rows or not len(rows[0]):
            return self.module.forward(*args, **kwargs)
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"cannot scatter the inputs of {self._name!r}: got tensors with {', '.join(map(str, lengths))} rows, "
                "expected equal axis-0 lengths. Name what every worker needs whole in DataParallel(..., bcast_inputs=)."
            )
        with self._lock:
            placed = self._placed = self._placed.renewed()
            with placed.lock:
                return placed.forward(nesting, rows, whole, next(self._numbers))

    def _taken(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: list[torch.Tensor], whole: list[torch.Tensor]
    ) -> Any:
        """Return the nesting of the arguments, with their tensors taken out."""
        names: Sequence[str] = ()
        if self._bcast_inputs:
            try:
                names = list(inspect.signature(self.module.forward).bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise TypeError(f"cannot call {self._name!r}: {error}.") from None
        own = self._bcast_inputs
        positional = [
            take(value, rows, whole, position < len(names) and names[position] in own)
            for position, value in enumerate(args)
        ]
        return positional, {name: take(value, rows, whole, name in own) for name, value in kwargs.items()}


class _Placed:
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
        _check(self._name, self._tensors, runtime)
        places, buffers_at, nbytes = _arranged(self._parameters, self._tensors[len(self._parameters) :])
        pickled = _pickled(self._name, module, self._tensors)
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
        self._parts = list(_parts_of(self._modules))
        self._looks = [_look(tensor) for tensor in self._tensors]
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
            function.row_shapes.is_open = False  # sums are of gradients, whatever their length
            made.append(function)
        return made

    def renewed(self) -> _Placed:
        """Return this, or what takes its place because the module is another one now."""
        parts = self._parts
        now = list(_parts_of(self._modules))
        is_same = len(now) == len(parts) and all(map(operator.is_, now, parts))
        if is_same and self._looks == [_look(tensor) for tensor in self._tensors]:
            return self
        return _Placed(self._module, self._runtime)

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
            torch.get_default_dtype(),
        )
        others = tuple(each.detach() for each in whole) or None
        with call:
            outputs, changed, notes = self._run_forward(
                tuple(row.detach() for row in rows), self._memory, pickle.dumps(order), others
            )
        notes = [note for note in notes if note is not None]
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
                with call:
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
        return [value if flag else None for value, flag in zip([*_unflattened(flats, graph.summed), *own], is_used)]

    def _call(self, number: int) -> _Call:
        return _Call(self.freed, self._parameters, self._versions, number)

    def _dumped(self, nesting: Any) -> bytes:
        try:
            return cloudpickle.dumps(nesting, protocol=5)
        except Exception as error:
            if is_from_handler(error):
                raise
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
                if _look(tensor) == look:
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

    def __init__(self, placed: _Placed, number: int, flags: list[bool], summed: Sequence[torch.Tensor]) -> None:
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


# -- what a module is made of -----------------------------------------------------------------------------------------


def _check(name: str, tensors: Sequence[torch.Tensor], runtime: Runtime) -> None:
    if any(isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)) for tensor in tensors):
        raise ValueError(
            f"cannot make DataParallel of {name!r}: it has lazy parameters without a shape, expected a model that has "
            "run once. Call it with a batch first."
        )
    places = sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"})
    if runtime._session.has_devices:
        places = list(runtime.devices)
    if places:
        raise UnsupportedError(
            f"cannot make DataParallel of {name!r}: got {'workers' if runtime._session.has_devices else 'tensors'} on "
            f"{', '.join(places)}, expected CPU workers and a module on the CPU, because all parameters would cross to "
            "the devices in each step. Use synk.torch.replicate(model, optimizer)."
        )


def _arranged(
    parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> tuple[list[ranks.Place], int, int]:
    """Return where each tensor is to lie, where the buffers begin, and the size of all; one place for one memory."""
    places: list[ranks.Place] = []
    known: dict[Any, ranks.Place] = {}
    end = buffers_at = 0
    for number, tensor in enumerate((*parameters, *buffers)):
        if number == len(parameters):
            buffers_at = end
        key: Any = _look(tensor) if tensor.numel() else number
        place = known.get(key)
        if place is None:
            nbytes = tensor.numel() * tensor.element_size()
            stride = torch.empty_like(tensor, device="meta").stride()  # of a dense tensor its own
            place = known[key] = ranks.Place(end, nbytes, tensor.dtype, tuple(tensor.shape), tuple(stride))
            end += round_up(nbytes, LINE_NBYTES)
        places.append(place)
    return places, buffers_at if buffers else end, end


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what is another one after a tensor's memory was replaced."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _parts_of(modules: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Yield the objects that modules refer to, by themselves and in dicts and lists, but for the training flags."""
    for module in modules:
        for name, value in module.__dict__.items():
            if name == "training":
                continue
            yield value
            if type(value) in (dict, OrderedDict):
                yield from value.values()
            elif type(value) is list:
                yield from value


class _Pickler(cloudpickle.Pickler):
    """Pickles a module without the values of its tensors."""

    def __init__(self, file: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = {
            id(tensor): number
            for number, tensor in enumerate(tensors)
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not vars(tensor)
        }

    def persistent_id(self, obj: Any) -> Any:
        return self._numbers.get(id(obj)) if isinstance(obj, torch.Tensor) else None


def _pickled(name: str, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, tensors).dump(module)
    except Exception as error:
        if is_from_handler(error):
            raise
        raise SerializationError(
            f"cannot send module {name!r} to the workers: {type(error).__name__}: {str(error).rstrip('.')}. Make it of "
            "what can be pickled."
        ) from error
    return file.getvalue()


def _unflattened(flats: Sequence[torch.Tensor], leaves: Sequence[tuple[torch.dtype, torch.Size]]) -> list[torch.Tensor]:
    """Return the gradient of each leaf, a view where its dtype is that of the sum."""
    values: list[Any] = [None] * len(leaves)
    kinds = ranks.by_dtype([dtype for dtype, _ in leaves])
    for flat, numbers in zip(flats, kinds.values()):
        parts = flat.split([leaves[number][1].numel() for number in numbers])
        for number, part in zip(numbers, parts):
            dtype, shape = leaves[number]
            values[number] = part.view(shape).to(dtype)
    return values


# -- forks ------------------------------------------------------------------------------------------------------------

_living: weakref.WeakSet[_Placed] = weakref.WeakSet()


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
