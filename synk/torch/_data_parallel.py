"""``DataParallel``: a module whose forward and backward passes run on all workers; all else stays in the program."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from synk._api.current import current
from synk._api.runtime import Runtime
from synk._pure.nested import check_no_list, paths, take_apart
from synk.errors import ClosedError, UnsupportedError
from synk.torch import _passes as ranks
from synk.torch._module_parts import check_gradients, numbers_of
from synk.torch._state import dump_apart, load_joined, write


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
        Tensors without axes, parameters and buffers are whole on every worker.
    runtime : Runtime, optional
        By default the current one.

    Raises
    ------
    TypeError
        If ``module`` is not a module, or is parallel already. From a call with a module among its arguments.
    ValueError
        From a call if its tensors have different numbers of rows, an output has no row for each of them, or an output
        that is no tensor differs between the workers; if forward writes into a parameter, or makes or drops a buffer;
        if a hook of the module itself (not of a part of it) has computed a tensor from its parameters, or a tensor that
        is no parameter requires a gradient.
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

    __slots__ = ("_synk_calls",)
    _synk_calls: _Calls

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

    def __init__(self, module: torch.nn.Module, *, runtime: Runtime | None = None) -> None:
        runtime = current() if runtime is None else runtime
        what = f"wrap a {type(module).__name__} in DataParallel"
        runtime._session.check_here(what, "Train with synk.torch.replicate, which keeps the modules on the ranks.")
        object.__setattr__(self, "_synk_calls", _Calls(module, runtime))

    @property
    def forward(self) -> Callable[..., Any]:
        run = functools.partial(self._synk_calls.run)
        return functools.wraps(self._synk_calls.module.forward)(run)

    @forward.setter
    def forward(self, fn: Callable[..., Any]) -> None:
        self.__dict__["forward"] = fn

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            return self._synk_calls.module
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._synk_calls.module.__reduce_ex__(protocol)


_owners = itertools.count()


class _Calls:
    """The two calls of one ``DataParallel``.

    Attributes
    ----------
    module : torch.nn.Module
    name : str
    forward, backward : Function
    """

    def __init__(self, module: torch.nn.Module, runtime: Runtime) -> None:
        self.module, self.name, self._runtime = module, type(module).__name__, runtime
        self._owner, self._numbers = next(_owners), itertools.count(1)
        places = {str(each.device) for each in (*module.parameters(), *module.buffers()) if each.device.type != "cpu"}
        if places:
            raise UnsupportedError(
                f"cannot make DataParallel of {self.name!r}: got tensors on {', '.join(sorted(places))}, expected a "
                "module on the CPU: the workers bring its parameters to their own devices. Make it before "
                ".to(device), or use synk.torch.replicate(model, optimizer)."
            )
        make = functools.partial(runtime.function, bcast_inputs=("tensors", "order"), framework="torch")
        self.forward = make(ranks.forward, outputs=("gather", "first", None))
        self.backward = make(ranks.backward, outputs=("sum", "gather", None))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass on the workers. It runs in the program if they are gone or there are no rows to divide."""
        session = self._runtime._session
        if self._runtime.is_closed or not session.is_own_process or session.is_inline:
            return self.module.forward(*args, **kwargs)
        self._check(args, kwargs)
        whole, rows = list[torch.Tensor](), list[torch.Tensor]()

        def place(tensor: torch.Tensor) -> tuple[bool, int]:
            tensors = rows if tensor.ndim else whole
            tensors.append(tensor)
            return tensors is rows, len(tensors) - 1

        arguments, _ = dump_apart(f"the inputs of {self.name!r}", (args, kwargs), place)
        lengths = [len(row) for row in rows]
        if len({*lengths}) > 1:
            raise ValueError(
                f"cannot scatter the inputs of {self.name!r}: got tensors with {', '.join(map(str, lengths))} rows, "
                "expected equal axis-0 lengths. What every worker needs whole belongs in a buffer of the module."
            )
        if not any(lengths):
            return self.module.forward(*args, **kwargs)
        inputs = *self.module.parameters(), *whole, *rows
        order = self._order(arguments, tuple(each.requires_grad for each in inputs))
        nesting, *outputs = _TwoCalls.apply(self, order, len(rows), *inputs)
        return load_joined(nesting, outputs.__getitem__)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments of which nobody knows which rows a worker needs, and attributes with a gradient."""
        for name, value in inspect.signature(self.module.forward).bind(*args, **kwargs).arguments.items():
            leaves, structure = take_apart(value)
            for leaf, path in zip(leaves, paths(structure)):
                label = f"{name}{path}"
                if isinstance(leaf, torch.nn.Module):
                    raise TypeError(
                        f"cannot scatter {label} of {self.name!r}: got a module, expected tensors with rows. Make it a "
                        "part of the module."
                    )
                check_no_list(leaf, "scatter", f"{label} of {self.name!r}", label, "" if path else "model")
        check_gradients(f"send {self.name!r}", self.module.modules())
        for name, value in vars(self.module).items() if self.module._forward_pre_hooks else ():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                raise ValueError(
                    f"cannot send attribute {name!r} of {self.name!r}: a hook has computed it in the program, and no "
                    "gradient would come back to its parameters (weight_norm, spectral_norm, prune), expected a hook "
                    "of a part of the module, which runs on the workers. Wrap torch.nn.Sequential(module) instead."
                )

    def _order(self, arguments: bytes, wants: tuple[bool, ...]) -> ranks.Pass:
        """Return what the ranks need to know of a call besides its tensors."""
        names, tensors = zip(*self.module.named_parameters(), *self.module.named_buffers(), ("", None))
        pickled, classes = dump_apart(f"module {self.name!r}", self.module, numbers_of(tensors[:-1]))
        kind = self._runtime._session.assignment.torch_device
        return ranks.Pass(
            classes, self._owner, pickled, names[:-1], len([*self.module.parameters()]), arguments, wants,
            torch.is_grad_enabled(),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            (torch.initial_seed(), next(self._numbers)),
        )  # fmt: skip

    def agreed(self, notes: Sequence[Any]) -> tuple[bytes, list[bool]]:
        """Return how the outputs are nested, and which of them have a gradient on some worker."""
        nestings, flags = zip(*(note for note in notes if note is not None))
        if len({*nestings}) > 1:
            raise ValueError(
                f"cannot gather the outputs of {self.name!r}: got numbers, arrays or other objects that differ between "
                "the workers, expected tensors, which are gathered, and what is the same for all rows. Return tensors "
                "with one row for each row of the inputs."
            )
        return nestings[0], [any(each) for each in zip(*flags)]

    def take(self, buffers: dict[str, torch.Tensor], after: Sequence[torch.Tensor]) -> None:
        """Take over the buffers that a pass has changed."""
        for (name, before), now in zip(buffers.items(), after):
            if before.dtype != now.dtype or not torch.equal(before, now):
                write(self.module.get_buffer(name), now)


class _TwoCalls(torch.autograd.Function):
    """Two calls of the workers as one step of autograd. The second one begins with what the first one began with."""

    @staticmethod
    def forward(ctx: Any, calls: _Calls, order: ranks.Pass, num_rows: int, *inputs: torch.Tensor) -> Any:
        ctx.calls, ctx.order, ctx.num_rows = calls, order, num_rows
        ctx.buffers = {name: buffer.detach().clone() for name, buffer in calls.module.named_buffers()}
        outputs, buffers, notes = calls.forward(*_TwoCalls.given(ctx, inputs), order)
        nesting, ctx.flags = calls.agreed(notes)
        calls.take(ctx.buffers, buffers)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each, flag in zip(outputs, ctx.flags) if not flag))
        return nesting, *outputs

    @staticmethod
    def given(ctx: Any, inputs: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Return the tensors with rows; and parameters, tensors without axes and buffers, which all workers get."""
        each = tuple(tensor.detach() for tensor in inputs)
        num_whole = len(each) - ctx.num_rows
        return each[num_whole:], (*each[:num_whole], *ctx.buffers.values())

    @staticmethod
    def backward(ctx: Any, _: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cannot differentiate the gradients of DataParallel: got create_graph=True, expected False. Use "
                "synk.torch.replicate, whose function computes them itself."
            )
        # Reading the saved tensors raises if one was changed in place since, or if the graph was freed.
        rows, tensors = _TwoCalls.given(ctx, ctx.saved_tensors)
        of = tuple(k for k, gradient in enumerate(gradients) if gradient is not None and ctx.flags[k])
        try:
            summed, by_rows, used = ctx.calls.backward(rows, tuple(gradients[k] for k in of), tensors, (ctx.order, of))
        except ClosedError as error:
            raise ClosedError(
                f"cannot compute the gradients of {ctx.calls.name!r}: the runtime was closed since the forward pass. "
                "Run the forward pass of this batch again, in the program; parameters and optimizer are as they were."
            ) from error
        is_used = [any(flags) for flags in zip(*(each for each in used if each is not None))]
        found = iter([value if flag else None for value, flag in zip([*summed, *by_rows], is_used)])
        return None, None, None, *(next(found) if is_wanted else None for is_wanted in ctx.needs_input_grad[3:])
