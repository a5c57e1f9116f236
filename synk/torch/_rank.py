"""The replicated objects of one rank: made from one pickle, run, and brought into the state of another rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optree
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from synk._wire.cell import cell
from synk.communicators._comm import comm
from synk.torch import _checkpoint as checkpoints
from synk.torch import _state as states
from synk.torch._batchnorm import synchronize
from synk.torch._collectives import losses
from synk.torch._reduction import GradientSum, Options
from synk.torch._undo import Undo


class RankReplica:
    """The replicated objects of one rank, loaded from one pickle.

    Attributes
    ----------
    objects : tuple
    options : Options
    num_steps : int
        How many calls so far were training steps.
    """

    def __init__(self, objects: Sequence[Any], options: Options, num_steps: int = 0) -> None:
        self.objects = tuple(objects)
        self.options = options
        self.num_steps = num_steps

    def __getstate__(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("objects", "options", "num_steps")},
            "others": [(each, left_out_of(each)) for each in states.optimizers_of(self.objects)],
            "gradients": [parameter.grad for parameter in states.parameters_of(self.objects)],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        others, gradients = state.pop("others"), state.pop("gradients")
        self.__dict__.update(state)
        for optimizer, attributes in others:
            vars(optimizer).update(attributes)
        for parameter, gradient in zip(states.parameters_of(self.objects), gradients):
            parameter.grad = gradient
        _bring_to_device(self.objects)
        self._reduction = GradientSum(self.objects, self.options)
        self._undo = Undo(self.objects, self._reduction)
        for obj in self.objects:
            if states.is_optimizer(obj):
                _guard_step(obj, self._undo)
        if self.options.sync_batchnorm:
            for obj in self.objects:
                if states.is_module(obj):
                    synchronize(obj)

    def run(self, fn: Callable[..., Any], trains: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the user's function on the objects and this rank's rows."""
        if trains and self.num_steps and not self.num_steps & (self.num_steps - 1):
            self._check_alike()
        seed_generators(self.options.seed, int(trains), self.num_steps, cell.worker.rank)
        return self.run_as_is(fn, trains, args, kwargs)

    def run_as_is(self, fn: Callable[..., Any], trains: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the same with the process's random numbers as they are."""
        if not trains:
            with self._unchanged(), torch.no_grad():
                return _detached(fn(*self.objects, *args, **kwargs))
        try:
            # An interrupt may have broken off the exit of a no_grad() in an earlier call, and left grad mode off.
            torch.set_grad_enabled(cell.worker.settings.told("grad mode", torch.is_grad_enabled()))
            self._reduction.begin()
            losses.weight = comm.rows
            result = fn(*self.objects, *args, **kwargs)
        finally:
            losses.weight = None
            self._reduction.end()
        self.num_steps += 1
        self._undo.notice_end()
        return _detached(result)

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Put back flags and buffers: batch norms, and others that a forward pass moves while it trains.

        Raises
        ------
        ValueError
            If a parameter was written into, of which no copy is made.
        """
        parts = states.parts_of(self.objects)
        flags = [(part, part.training) for part in parts]
        tables = [(part._buffers, {**part._buffers}) for part in parts if part._buffers]
        buffers = [each for _, table in tables for each in table.values() if each is not None]
        copies = [(each, each.detach().clone()) for each in buffers if each.layout is torch.strided]
        named = [pair for obj in self.objects if states.is_module(obj) for pair in obj.named_parameters()]
        before = [states.version(each) for _, each in named]
        try:
            yield
        finally:
            for part, flag in flags:
                part.training = flag
            for table, entries in tables:
                table.clear()
                table.update(entries)
            for buffer, copied in copies:
                if buffer.shape != copied.shape or not torch.equal(buffer, copied):
                    states.write(buffer, copied)
        for (name, parameter), version in zip(named, before):
            if states.version(parameter) != version:
                raise ValueError(
                    f"cannot end a call with trains=False: it has written into the parameter {name!r} of the workers' "
                    "copies, expected no change. Take a copy in the body, or build the function with trains=True. To "
                    "put the parameter back, call rep.push() or rep.load(path)."
                )

    def run_shown(self, fn: Callable[..., Any], *call: Any) -> Any:
        """Run with the process's random numbers as they are. Return the result and the gradients.

        If the step leaves none: how far it has moved the parameters.
        """
        parameters = states.parameters_of(self.objects)
        before = [each.detach().clone() for each in parameters]
        result = self.run_as_is(fn, *call)
        moves = [each.grad for each in parameters if each.grad is not None]
        moves = moves or [now.detach() - old for now, old in zip(parameters, before)]
        flat = [each.to("cpu", torch.float64).reshape(-1) for each in moves]
        return result, torch.cat([*flat, torch.zeros(0, dtype=torch.float64)]).numpy()

    def run_shown_in_eval(self, fn: Callable[..., Any], *call: Any) -> Any:
        """Do the same with all modules in ``eval()``, now and later, also if the function calls ``train()``.

        Then neither draws nor a batch's statistics decide what they return.
        """
        for part in states.parts_of(self.objects):
            part.training = False
            part.__dict__["train"] = lambda mode=True, part=part: part
        return self.run_shown(fn, *call)

    def __synk_keep__(self) -> Callable[[], bytes | None]:
        """Return a function that undoes the step that is about to begin; see ``synk.torch._undo``."""
        return self._undo.keep(self)

    def _check_alike(self) -> None:
        """Compare the parameters, buffers and other objects of all ranks, which have taken the same steps.

        This happens after steps 1, 2, 4, 8 and so on. If the ranks drift apart, they do so from the first step or from
        the beginning of another phase of the training, and a long training pays almost nothing for the check.

        Raises
        ------
        ValueError
            If something differs.
        """
        named = [*self._compared()]
        own = np.array([_is_apart(tensor, self.num_steps) for _, tensor in named], np.int64)
        for place in np.flatnonzero(comm.all_reduce(own, "max")):
            raise ValueError(
                f"cannot take a step: after {self.num_steps} of them the workers' copies differ in {named[place][0]}, "
                "expected the same values on all, because each worker sees its own rows and only backward() sums "
                "gradients over all of them. Average what else becomes a gradient or changes a parameter, a buffer or "
                "another object: synk.comm.all_reduce(value, 'avg'). What each worker is to have for itself, make an "
                "ordinary attribute of a module."
            )

    def _compared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what must be alike on all ranks, with names. The statistics of a batch norm may be each rank's own."""
        for obj in self.objects:
            kind = type(obj).__name__
            if states.is_module(obj):
                norms = [part for part in obj.modules() if isinstance(part, _BatchNorm)]
                own = {id(each) for norm in norms for each in norm.buffers(recurse=False)}
                for name, tensor in states.tensors_of(obj):
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    is_compared = tensor.requires_grad if is_parameter else id(tensor) not in own
                    if is_compared and tensor.numel() and tensor.layout is torch.strided:
                        yield f"{name!r} of {kind}", tensor.detach()
            elif not states.is_optimizer(obj):
                leaves = optree.tree_leaves(obj.state_dict())
                numbers = [float(each) for each in leaves if isinstance(each, (int, float))]
                tensors = [each.double().cpu().reshape(-1) for each in leaves if isinstance(each, torch.Tensor)]
                yield f"the state of {kind}", torch.cat([torch.tensor(numbers, dtype=torch.float64), *tensors])

    def told(self) -> Any:
        """Return what ``take`` takes: the state of the objects, of rank 0 alone."""
        return dump(self) if comm.rank == 0 else None

    def take(self, state: bytes) -> None:
        """Take over the state of the program's objects."""
        load(self, pickle.loads(state))

    def checkpoint(self) -> Any:
        """Return this rank's part of a checkpoint."""
        generators = checkpoints.plain(checkpoints.rank_generators())
        own = [obj.state_dict() for obj in self.objects] if comm.rank == 0 else []
        numbers = {"num_steps": self.num_steps, "seed": self.options.seed}
        return {**numbers, "objects": own, "generators": generators}

    def take_generators(self, ranks: Sequence[Any]) -> None:
        """Put back the generators that the rank with this number had."""
        checkpoints.load_generators(ranks[comm.rank])

    def tell_steps(self) -> int:
        return self.num_steps


def _is_apart(parameter: torch.Tensor, num_steps: int) -> bool:
    """Whether this rank's values differ from rank 0's by more than rounding, which depends on memory's alignment."""
    wide = parameter.to(torch.promote_types(parameter.dtype, torch.float32))  # NumPy has no bfloat16
    first = torch.as_tensor(comm.broadcast(wide))
    eps = 0 if not (parameter.is_floating_point() or parameter.is_complex()) else torch.finfo(parameter.dtype).eps
    bound = 8 * num_steps * eps * float(first.abs().nan_to_num(0, 0, 0).max())
    return wide.shape != first.shape or not torch.allclose(wide, first, rtol=0, atol=bound, equal_nan=True)


def left_out_of(optimizer: Any) -> dict[str, Any]:
    """Return the attributes that an optimizer's pickle leaves out, with its hooks. LBFGS cannot work without them."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("defaults", "state", "param_groups") and not callable(value)
    }


def _prepare_worker() -> None:
    """Load what optimizers import at their first use, where an interrupt could break the import off.

    All objects that there are then, hundreds of thousands, are taken from the garbage collector, which would look
    through them in the first step. Replicas come later, so those that are dropped are freed.
    """
    with cell.uninterrupted():
        importlib.import_module("torch._dynamo")
    gc.freeze()


def dump(replica: RankReplica) -> dict[str, Any]:
    """Return the state of all objects."""
    numbers = {"num_steps": replica.num_steps, "seed": replica.options.seed}
    return {**numbers, "objects": states.dump(replica.objects)}


def load(replica: RankReplica, state: dict[str, Any]) -> None:
    """Bring the objects into a state that another rank or the program had."""
    replica.num_steps = state["num_steps"]
    replica.options = replace(replica.options, seed=state["seed"])
    states.load(replica.objects, state["objects"])
    _wait_for_device()


def _bring_to_device(objects: Sequence[Any]) -> None:
    """Move modules, and the optimizers' state, to this rank's device if torch computes there."""
    worker = cell.worker
    kind = "cpu" if worker is None else worker.backend.torch_device()
    if kind == "cpu":
        return
    for obj in objects:
        if states.is_module(obj):
            obj.to(kind)  # changes the parameters in place, so the optimizers still refer to them
    states.load(objects, states.dump(objects))
    _wait_for_device()


def _wait_for_device() -> None:
    """Wait until copies made here are done. Calls run on a stream of their own, which does not wait for them."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seed_generators(*numbers: int) -> None:
    """Seed torch's generators: alike in each run, and differently for another step, rank or seed."""
    mixed = hash(numbers)  # that of integers is the same in every process
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)


def _detached(value: Any) -> Any:
    return optree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value, none_is_leaf=True
    )


def _guard_step(optimizer: Any, undo: Undo) -> None:
    """Make an optimizer's step uninterruptible, so that parameters and optimizer state are never half updated.

    A step with a closure can be interrupted, since the closure runs the user's code. Its closure returns the loss over
    all rows, so that all ranks, which decide by it, decide alike.
    """
    step = optimizer.step

    @functools.wraps(step)
    def guarded(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # a scheduler warns if it steps and this is not set
        undo.notice_step()
        if closure is not None:
            return step(_over_all_rows(closure), *args, **kwargs)
        with cell.worker.uninterrupted():
            return step(*args, **kwargs)

    guarded._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = guarded


def _over_all_rows(closure: Callable[[], Any]) -> Callable[[], Any]:
    def averaged() -> Any:
        with torch.enable_grad():
            loss = closure()
        return all_rows_mean(loss.detach()) if isinstance(loss, torch.Tensor) else loss

    return averaged


def all_rows_mean(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of the ranks' means, weighted by their rows."""
    if comm.world_size == 1:
        return value
    return torch.as_tensor(comm.all_reduce(value, "avg")).reshape(value.shape)


def mean(total: torch.Tensor, count: Any) -> torch.Tensor:
    """Return this rank's part of a mean over items other than rows, such as tokens.

    Use it in a step whose loss is a sum over ``count`` items in this rank's rows. The gradients are then those of the
    sum over all ranks, divided by the number of items on all ranks. The ``"avg"`` of the returned value is this mean.

    Parameters
    ----------
    total : tensor, shape ()
        The sum over the items in this rank's rows.
    count : number or tensor, shape ()
        The number of these items.

    Returns
    -------
    tensor, shape ()
        ``total * all_rows / (rows * all_counts)``.

    Notes
    -----
    All ranks must call it: it sums ``count`` over the ranks, as a collective.
    """
    own = torch.as_tensor(count, dtype=torch.float64)
    everything = own if comm.world_size == 1 else comm.all_reduce(own.reshape(1), "sum")[0]
    return total * (comm.total_rows / comm.rows) / float(everything)  # of no items NaN, as in torch


def total(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sum over all rows.

    Use it in a step whose loss is a sum over rows (``reduction="sum"``). The gradients are then those of the sum over
    all rows of the batch, and the ``"avg"`` of the returned value is this sum.

    Parameters
    ----------
    value : tensor, shape ()
        The sum over this rank's rows.

    Returns
    -------
    tensor, shape ()
        ``value * all_rows / rows``.
    """
    return value * (comm.total_rows / comm.rows)


if cell.worker is not None:  # a worker imports this for its first replica, before it loads the objects
    _prepare_worker()
