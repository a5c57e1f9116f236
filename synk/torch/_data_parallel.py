"""``DataParallel``: a module whose forward and backward passes run on all workers; all else stays in the program."""

from __future__ import annotations

import functools
import inspect
import itertools
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from synk._api.current import current
from synk._api.runtime import Runtime
from synk._pure.nested import check_no_list, paths, take_apart
from synk._wire.parcels import dumps
from synk.errors import ClosedError, SerializationError
from synk.torch import _passes as ranks
from synk.torch._module_parts import check, pickled_without
from synk.torch._nesting import put, take


class DataParallel(torch.nn.Module):
    """A module whose calls run on all workers: a drop-in for ``torch.nn.DataParallel``, also without GPUs.

    The rows of a call's tensors are divided among the workers, and the outputs are gathered. ``backward()`` computes
    the gradients of all rows. The loss, the optimizer, schedulers and checkpoints stay as they are, and so does the
    module: this object has all attributes, methods and names of the module, is an instance of its class, and is pickled
    and copied as one. The module itself is ``.module``. It shares everything with this object, and its calls run in the
    program.

    Parameters
    ----------
    module : torch.nn.Module
        A module on the CPU. Its forward pass must treat each row by itself, and return tensors with a row for each row
        of its inputs. A loss is computed from them in the program.
    bcast_inputs : str or sequence of str
        Parameters of ``forward`` that every worker gets whole. Tensors without axes are always whole.
    runtime : Runtime, optional
        By default the current one.

    Raises
    ------
    TypeError
        If ``module`` is not a module, or is parallel already.
    ValueError
        If the module has lazy parameters without a shape, or parameters or buffers that overlap in memory, or
        ``bcast_inputs`` names no parameter of ``forward``. A call raises it if the tensors to divide have different
        numbers of rows.
    UnsupportedError
        If the module is on a GPU: it stays on the CPU, and the workers bring its parameters to their devices. Also if
        the runtime's workers are on other nodes.
    SerializationError
        If the module cannot be pickled.
    RuntimeError
        From ``backward(create_graph=True)``.

    Notes
    -----
    A call is one call of the workers, and ``backward()`` is another one, which runs the forward pass again and then its
    gradients. So nothing waits on the workers in between, at the price of a third more computing; ``replicate`` runs
    the pass once, and does not send the parameters with each call either.

    The results equal the serial loop except for rounding, with two exceptions: a batch norm in training mode normalises
    over the rows of each worker, and dropout draws other numbers. Both passes draw the same ones: the workers'
    generators are seeded by ``torch.initial_seed()``, the number of the call and the rank. Buffers that the first pass
    changes come back from rank 0; other attributes that a pass assigns stay on the workers. A call whose tensors have
    no rows runs in the program, and so do all calls after the runtime was closed. As in torch, parameters and inputs
    must not change in place between the passes.

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
    ...     bool(loss < 0.1), list(model.state_dict())
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
        # The object claims to be of the module's class, and its pickles and copies are.
        names = {"__slots__": (), "__class__": property(lambda self: own), "__doc__": own.__doc__}
        made = types.new_class(
            f"DataParallel[{own.__name__}]", (DataParallel, own), {}, lambda each: each.update(names)
        )
        self: DataParallel = object.__new__(made)
        self.__dict__ = module.__dict__  # both are one object in everything except the class
        return self

    def __init__(
        self, module: torch.nn.Module, *, bcast_inputs: str | Sequence[str] = (), runtime: Runtime | None = None
    ) -> None:
        names = (bcast_inputs,) if isinstance(bcast_inputs, str) else tuple(bcast_inputs)
        runtime = current() if runtime is None else runtime
        what = f"wrap a {type(module).__name__} in DataParallel"
        runtime._session.check_here(what, "Train with synk.torch.replicate, which keeps the modules on the ranks.")
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
        self._numbers = itertools.count(1)
        self._check_bcast_inputs()
        check(self._name, [*module.parameters(), *module.buffers()])
        self._forward = self._function(ranks.forward, ("tensors", "whole", "order"), ("gather", "first", None))
        self._backward = self._function(ranks.backward, ("tensors", "whole", "order", "of"), ("sum", "gather", None))

    def _function(self, fn: Any, bcast_inputs: Sequence[str], outputs: tuple[Any, ...]) -> Any:
        return self._runtime.function(fn, bcast_inputs=bcast_inputs, outputs=outputs, framework="torch")

    def _check_bcast_inputs(self) -> None:
        known = inspect.signature(self.module.forward).parameters if self._bcast_inputs else {}
        for name in self._bcast_inputs:
            if name not in known:
                raise ValueError(
                    f"cannot make DataParallel of {self._name!r}: got {name!r} in bcast_inputs, expected one of the "
                    f"parameters of its forward ({', '.join(known)})."
                )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass on the workers. It runs in the program if they are gone or there are no rows to divide."""
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
        parameters = dict(self.module.named_parameters())
        inputs = [*parameters.values(), *whole, *rows]
        call = _Call(self, parameters, whole, rows, self._order(nesting, parameters, whole, rows))
        outputs = _Autograd.apply(call, *inputs)
        return put(call.nesting, outputs, ())

    def _order(self, nesting: Any, parameters: Any, whole: Any, rows: Any) -> ranks.Order:
        """Return what the ranks need to know of a call besides its tensors."""
        buffers = dict(self.module.named_buffers())
        pickled, classes = pickled_without(self._name, self.module, [*parameters.values(), *buffers.values()])
        kind = self._runtime._session.assignment.torch_device
        has_grad = torch.is_grad_enabled()
        wants = [
            tuple(k for k, each in enumerate(part) if has_grad and each.requires_grad)
            for part in (parameters.values(), whole, rows)
        ]
        order = ranks.Pass(
            pickled, (*parameters, *buffers), len(parameters), self._dumped(nesting), wants, has_grad,
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            (torch.initial_seed(), next(self._numbers)),
        )  # fmt: skip
        return ranks.Order(classes, pickle.dumps(order))

    def forward(self, call: _Call) -> tuple[torch.Tensor, ...]:
        """Run the first pass of a call, and take over the buffers that it has changed."""
        parameters, whole, rows = call.parts(call.inputs)
        outputs, buffers, notes = self._forward(rows, (*parameters, *call.buffers.values()), whole, call.order)
        found = [pickle.loads(note) for note in notes if note is not None]
        call.nesting = found[0][0]
        call.flags = [any(flags) for flags in zip(*(flags for _, flags in found))]
        for (name, before), after in zip(call.buffers.items(), buffers):
            self._take_buffer(name, before, after)
        return tuple(outputs)

    def _take_buffer(self, name: str, before: torch.Tensor, after: torch.Tensor) -> None:
        path, _, key = name.rpartition(".")
        own = self.module.get_submodule(path)._buffers
        if before.shape != after.shape:
            own[key] = after.clone()
        elif not torch.equal(before, after):
            with torch.no_grad():
                own[key].copy_(after)  # type: ignore[union-attr]

    def backward(self, call: _Call, inputs: Sequence[torch.Tensor], gradients: Sequence[Any]) -> list[Any]:
        """Run the second pass of a call. Return the gradients of its inputs; None where there is none."""
        of = tuple(k for k, gradient in enumerate(gradients) if gradient is not None and call.flags[k])
        parameters, whole, rows = call.parts([each.detach() for each in inputs])
        tensors = (*parameters, *call.buffers.values())
        try:
            summed, by_rows, used = self._backward(
                rows, tuple(gradients[k] for k in of), tensors, whole, call.order, of
            )
        except ClosedError as error:
            raise ClosedError(
                f"cannot compute the gradients of {self._name!r}: the runtime was closed since the forward pass. Run "
                "the forward pass of this batch again, in the program; parameters and optimizer are as they were."
            ) from error
        is_used = [any(flags) for flags in zip(*(each for each in used if each is not None))]
        found = iter([value if flag else None for value, flag in zip([*summed, *by_rows], is_used)])
        return [next(found) if wants else None for wants in call.wants]

    def _dumped(self, nesting: Any) -> bytes:
        try:
            return dumps(nesting)
        except Exception as error:
            raise SerializationError(
                f"cannot send the inputs of {self._name!r}: {type(error).__name__}: {error}. What is no tensor must be "
                "picklable."
            ) from error

    def _check_lists(self, label: str, value: Any) -> None:
        leaves, structure = take_apart(value)
        for leaf, path in zip(leaves, paths(structure)):
            where = f"{label}{path}"
            check_no_list(leaf, "scatter", f"{where} of {self._name!r}", where, "" if path else "model")

    def _taken(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: list[torch.Tensor], whole: list[torch.Tensor]
    ) -> Any:
        """Return the nesting of the arguments without their tensors."""
        own = self._bcast_inputs
        positional, by_name = self._names(args, kwargs) if own else ([f"args[{k}]" for k in range(len(args))], kwargs)
        for label, name, value in (*zip(positional, positional, args), *zip(kwargs, by_name, kwargs.values())):
            if name not in own:
                self._check_lists(label, value)
        taken = [take(value, rows, whole, name in own) for name, value in zip(positional, args)]
        named = zip(kwargs.items(), by_name)
        return taken, {key: take(value, rows, whole, name in own) for (key, value), name in named}

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Return the names of the parameters of ``forward`` to which the arguments go."""
        signature = inspect.signature(self.module.forward)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"cannot call {self._name!r}: {error}.") from None
        parameters = signature.parameters.values()
        rest = {each.kind: each.name for each in parameters}  # of ``*args`` and of ``**kwargs`` there is one
        ordered = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        ordered += [rest.get(inspect.Parameter.VAR_POSITIONAL, "")] * (len(args) - len(ordered))
        return ordered[: len(args)], [
            key if key in signature.parameters else rest[inspect.Parameter.VAR_KEYWORD] for key in kwargs
        ]


class _Call:
    """One call: its tensors, and what its second pass must begin with.

    Attributes
    ----------
    inputs : list of tensors
        Parameters, whole tensors and tensors with rows.
    wants : list of bool
        Whether each of them needs a gradient.
    buffers : dict
        The module's buffers as they were, by name.
    nesting : object
        How the outputs are nested.
    flags : list of bool
        Whether each output has a gradient.
    """

    nesting: Any
    flags: list[bool]

    def __init__(self, passes: _Passes, parameters: Any, whole: Any, rows: Any, order: ranks.Order) -> None:
        self.passes, self.order = passes, order
        inputs = [*parameters.values(), *whole, *rows]
        self.inputs = [each.detach() for each in inputs]
        self.wants = [torch.is_grad_enabled() and each.requires_grad for each in inputs]
        self.buffers = {name: buffer.detach().clone() for name, buffer in passes.module.named_buffers()}
        self._ends = len(parameters), len(parameters) + len(whole)

    def parts(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Return parameters, whole tensors and tensors with rows."""
        first, second = self._ends
        return tuple(inputs[:first]), tuple(inputs[first:second]), tuple(inputs[second:])


class _Autograd(torch.autograd.Function):
    """Two calls of the workers as one step of autograd."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> Any:
        outputs = call.passes.forward(call)
        ctx.call = call
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each, flag in zip(outputs, call.flags) if not flag))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cannot differentiate the gradients of DataParallel: got create_graph=True, expected False. Use "
                "synk.torch.replicate, whose function computes them itself."
            )
        # Reading them raises if one was changed in place since, or if the graph was freed.
        return None, *ctx.call.passes.backward(ctx.call, ctx.saved_tensors, gradients)
