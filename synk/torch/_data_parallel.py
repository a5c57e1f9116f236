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
from synk.errors import ClosedError, UnsupportedError
from synk.torch import _passes as ranks
from synk.torch._apart import load_joined
from synk.torch._module_parts import dump_apart, numbers_of


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
        of its inputs; what else it returns must not depend on the rows. A loss is computed from them in the program.
    bcast_inputs : str or sequence of str
        Parameters of ``forward`` that every worker gets whole. Tensors without axes are always whole.
    runtime : Runtime, optional
        By default the current one.

    Raises
    ------
    TypeError
        If ``module`` is not a module, or is parallel already. From a call with a module among its arguments, unless it
        is in ``bcast_inputs``.
    ValueError
        If the module has lazy parameters without a shape, or ``bcast_inputs`` names no parameter of ``forward``. A call
        raises it if the tensors to divide have different numbers of rows, an output has no row for each of them, or an
        output that is no tensor differs between the workers.
    UnsupportedError
        If the module is on a GPU: it stays on the CPU, and the workers bring its parameters to their devices. Also if
        the runtime's workers are on other nodes.
    SerializationError
        If the module, an argument or an output cannot be pickled.
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
    changes come back from rank 0; other attributes that a pass assigns stay on the workers. Tensors that are plain
    attributes are pickled with each call, so register large ones as buffers. A call whose tensors have no rows runs in
    the program, and so do all calls after the runtime was closed. As in torch, parameters and inputs must not change in
    place between the passes.

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


_owners = itertools.count()


class _Passes:
    """The forward and backward passes of one ``DataParallel``.

    Attributes
    ----------
    module : torch.nn.Module
    name : str
    forward, backward : Function
        The calls of the workers.
    """

    def __init__(self, module: torch.nn.Module, bcast_inputs: tuple[str, ...], runtime: Runtime) -> None:
        self.module, self.name = module, type(module).__name__
        self._runtime, self._bcast_inputs = runtime, bcast_inputs
        self._owner, self._numbers = next(_owners), itertools.count(1)
        self._check()
        of_calls = "tensors", "whole", "order"
        self.forward = self._function(ranks.forward, of_calls, ("gather", "first", None))
        self.backward = self._function(ranks.backward, (*of_calls, "of"), ("sum", "gather", None))

    def _function(self, fn: Any, bcast_inputs: Sequence[str], outputs: tuple[Any, ...]) -> Any:
        return self._runtime.function(fn, bcast_inputs=bcast_inputs, outputs=outputs, framework="torch")

    def _check(self) -> None:
        what, tensors = f"make DataParallel of {self.name!r}", [*self.module.parameters(), *self.module.buffers()]
        known = inspect.signature(self.module.forward).parameters if self._bcast_inputs else {}
        for name in self._bcast_inputs:
            if name not in known:
                raise ValueError(
                    f"cannot {what}: got {name!r} in bcast_inputs, expected one of the parameters of its forward "
                    f"({', '.join(known)})."
                )
        if any(
            isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)) for tensor in tensors
        ):
            raise ValueError(
                f"cannot {what}: it has lazy parameters without a shape, expected a model that has run once. Call it "
                "with a batch first."
            )
        places = sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"})
        if places:
            raise UnsupportedError(
                f"cannot {what}: got tensors on {', '.join(places)}, expected a module on the CPU: the workers bring "
                "its parameters to their own devices. Make it before .to(device), or use "
                "synk.torch.replicate(model, optimizer)."
            )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass on the workers. It runs in the program if they are gone or there are no rows to divide."""
        session = self._runtime._session
        if self._runtime.is_closed or not session.is_own_process or session.is_inline:
            return self.module.forward(*args, **kwargs)
        parameters, whole, rows = list(self.module.parameters()), list[torch.Tensor](), list[torch.Tensor]()
        arguments = self._arguments(args, kwargs, whole, rows)
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"cannot scatter the inputs of {self.name!r}: got tensors with {', '.join(map(str, lengths))} rows, "
                "expected equal axis-0 lengths. Name what every worker needs whole in DataParallel(..., bcast_inputs=)."
            )
        if not any(lengths):
            return self.module.forward(*args, **kwargs)
        call = _Call(self, (parameters, whole, rows), arguments)
        outputs = _Autograd.apply(call, *parameters, *whole, *rows)
        return load_joined(call.nesting, outputs.__getitem__)

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: list[torch.Tensor], rows: list[torch.Tensor]
    ) -> list[bytes]:
        """Return the arguments by the names of ``forward``, pickled without their tensors, which go into the lists."""
        try:
            arguments = inspect.signature(self.module.forward).bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"cannot call {self.name!r}: {error}.") from None
        divided = {name: value for name, value in arguments.items() if name not in self._bcast_inputs}
        for name, value in divided.items():
            leaves, structure = take_apart(value)
            for leaf, path in zip(leaves, paths(structure)):
                label = f"{name}{path}"
                if isinstance(leaf, torch.nn.Module):
                    raise TypeError(
                        f"cannot scatter {label} of {self.name!r}: got a module, expected tensors with rows. Name what "
                        f"every worker needs whole: DataParallel(..., bcast_inputs={name!r})."
                    )
                check_no_list(leaf, "scatter", f"{label} of {self.name!r}", label, "" if path else "model")

        def place(tensors: list[torch.Tensor], tensor: torch.Tensor) -> tuple[bool, int]:
            tensors = whole if tensor.ndim == 0 else tensors
            tensors.append(tensor)
            return tensors is whole, len(tensors) - 1

        others = {name: value for name, value in arguments.items() if name not in divided}
        parts = (rows, divided), (whole, others)
        what = f"the inputs of {self.name!r}"
        return [dump_apart(what, part, functools.partial(place, tensors))[0] for tensors, part in parts if part]

    def order(self, wants: list[tuple[int, ...]], num_parameters: int, arguments: list[bytes]) -> ranks.Order:
        """Return what the ranks need to know of a call besides its tensors."""
        names, tensors = zip(*self.module.named_parameters(), *self.module.named_buffers(), ("", None))
        pickled, classes = dump_apart(f"module {self.name!r}", self.module, numbers_of(tensors[:-1]))
        kind = self._runtime._session.assignment.torch_device
        order = ranks.Pass(
            self._owner, pickled, names[:-1], num_parameters, arguments, wants,
            torch.is_grad_enabled(),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            (torch.initial_seed(), next(self._numbers)),
        )  # fmt: skip
        return ranks.Order(classes, pickle.dumps(order))


class _Call:
    """One call: its first pass, and what the second one must begin with.

    Attributes
    ----------
    nesting : bytes
        How the outputs are nested: a pickle without them.
    flags : list of bool
        Whether each output has a gradient.
    """

    nesting: bytes
    flags: list[bool]

    def __init__(self, passes: _Passes, inputs: Sequence[Sequence[torch.Tensor]], arguments: list[bytes]) -> None:
        self._passes, self._sizes = passes, [len(part) for part in inputs]
        has_grad = torch.is_grad_enabled()
        wants = [tuple(k for k, each in enumerate(part) if has_grad and each.requires_grad) for part in inputs]
        self._wants = [k in wanted for wanted, part in zip(wants, inputs) for k in range(len(part))]
        self._order = passes.order(wants, self._sizes[0], arguments)
        self._buffers = {name: buffer.detach().clone() for name, buffer in passes.module.named_buffers()}

    def _parts(self, inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Return the rows, then parameters and buffers, then whole tensors: as the ranks take them."""
        each = (tensor.detach() for tensor in inputs)
        parameters, whole, rows = (tuple(itertools.islice(each, size)) for size in self._sizes)
        return [rows, (*parameters, *self._buffers.values()), whole]

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the first pass, and take over the buffers that it has changed."""
        rows, tensors, whole = self._parts(inputs)
        outputs, buffers, notes = self._passes.forward(rows, tensors, whole, self._order)
        nestings, flags = zip(*(note for note in notes if note is not None))
        if len({*nestings}) > 1:
            raise ValueError(
                f"cannot gather the outputs of {self._passes.name!r}: got numbers, arrays or other objects that differ "
                "between the workers, expected tensors, which are gathered, and what is the same for all rows. Return "
                "tensors with one row for each row of the inputs."
            )
        self.nesting, self.flags = nestings[0], [any(each) for each in zip(*flags)]
        for (name, before), after in zip(self._buffers.items(), buffers):
            path, _, key = name.rpartition(".")
            own: Any = self._passes.module.get_submodule(path)._buffers
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                own[key] = after.clone()
            elif not torch.equal(before, after):
                with torch.no_grad():
                    own[key].copy_(after)
        return tuple(outputs)

    def backward(self, inputs: Sequence[torch.Tensor], gradients: Sequence[Any]) -> list[Any]:
        """Run the second pass. Return the gradients of the inputs; None where there is none."""
        of = tuple(k for k, gradient in enumerate(gradients) if gradient is not None and self.flags[k])
        rows, *others = self._parts(inputs)
        try:
            summed, by_rows, used = self._passes.backward(
                rows, tuple(gradients[k] for k in of), *others, self._order, of
            )
        except ClosedError as error:
            raise ClosedError(
                f"cannot compute the gradients of {self._passes.name!r}: the runtime was closed since the forward "
                "pass. Run the forward pass of this batch again, in the program; parameters and optimizer are as they "
                "were."
            ) from error
        is_used = [any(flags) for flags in zip(*(each for each in used if each is not None))]
        found = iter([value if flag else None for value, flag in zip([*summed, *by_rows], is_used)])
        return [next(found) if is_wanted else None for is_wanted in self._wants]


class _Autograd(torch.autograd.Function):
    """Two calls of the workers as one step of autograd."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> Any:
        outputs = call.forward(inputs)
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
        return None, *ctx.call.backward(ctx.saved_tensors, gradients)
