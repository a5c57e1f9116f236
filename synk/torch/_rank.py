"""The replicated objects of one rank, and what makes their gradients those of all rows.

One backward pass: each parameter's hook notes that its gradient is there; at the end of the pass, before ``backward()``
returns, all ranks add up their gradients, weighted by rows, in flat buffers. A parameter that no rank has used keeps
what it had; one that some have used gets the sum over these, so no flag says which to expect.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from synk._wire.cell import cell
from synk._worker.comm import comm
from synk.torch import _state as states
from synk.torch._batchnorm import synchronize

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Options:
    """Those of :func:`synk.torch.replicate` that ranks need."""

    seed: int
    sync_batchnorm: bool
    bucket_nbytes: int


class RankReplica:
    """The objects of one rank, from one pickle.

    Attributes
    ----------
    objects : tuple
    num_steps : int
        Calls so far that were steps of training.
    """

    def __init__(self, objects: Sequence[Any], options: Options) -> None:
        self.objects = tuple(objects)
        self.options = options
        self.num_steps = 0

    def __getstate__(self) -> dict[str, Any]:
        # Optimizers leave what they have besides groups and state out of their pickles, and LBFGS cannot work then.
        others = {k: states.other_attributes(obj) for k, obj in enumerate(self.objects) if states.is_optimizer(obj)}
        return {"objects": self.objects, "options": self.options, "num_steps": self.num_steps, "others": others}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for index, attributes in state.pop("others").items():
            state["objects"][index].__dict__.update(attributes)
        self.__dict__.update(state)
        _bring_to_device(self.objects)
        self._reduction = Reduction(self.objects, self.options.bucket_nbytes)
        for obj in self.objects:
            if states.is_optimizer(obj):
                _guard_step(obj)
        if self.options.sync_batchnorm:
            for obj in self.objects:
                if states.is_module(obj):
                    synchronize(obj)

    def run(self, fn: Callable[..., Any], trains: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the user's function on the objects and this rank's rows."""
        _seed(self.options.seed, self.num_steps if trains else -1 - self.num_steps, comm.rank)
        if not trains:
            with torch.no_grad():
                return _detached(fn(*self.objects, *args, **kwargs))
        self._reduction.begin()
        try:
            result = fn(*self.objects, *args, **kwargs)
        finally:
            self._reduction.end()
        self.num_steps += 1
        return _detached(result)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients stay this rank's own."""
        return self._reduction.postponed()


def dump(replica: RankReplica) -> dict[str, Any]:
    """Return the state of all objects."""
    return {
        "num_steps": replica.num_steps,
        "share": replica._reduction.share,
        "objects": dict(enumerate(states.dump(obj) for obj in replica.objects)),
    }


def load(replica: RankReplica, state: dict[str, Any]) -> None:
    """Bring the objects into a state, or those of which one is given."""
    replica.num_steps = state.get("num_steps", replica.num_steps)
    replica._reduction.share = state.get("share", replica._reduction.share)
    for index, own in state["objects"].items():
        states.load(replica.objects[index], own)
    _wait_for_device()


def _bring_to_device(objects: Sequence[Any]) -> None:
    """Have modules, and what optimizers know of their parameters, lie on this rank's GPU, if it has one."""
    worker = cell.worker
    if worker is None or not worker.backend.is_device or not torch.cuda.is_available():
        return
    for obj in objects:
        if states.is_module(obj):
            obj.to("cuda")  # parameters stay the objects that optimizers know
    for obj in objects:
        if states.is_optimizer(obj):
            states.load(obj, {"state": states.dump(obj)["state"]})
    _wait_for_device()


def _wait_for_device() -> None:
    """Calls run on a stream of their own, which does not wait for what was copied here."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _seed(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators so that they are the same in each run, and others on each rank and in each step."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    mixed = (mixed * 0xD6E8FEB86659FD93) & _MASK
    mixed = (mixed ^ (mixed >> 32)) >> 1
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_detached(item) for item in value)
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    return value


def _guard_step(optimizer: Any) -> None:
    """Have an optimizer's step run whole, and its closure return the loss over all rows, the same on all ranks."""
    step = optimizer.step

    @functools.wraps(step)
    def guarded(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # what a scheduler looks at
        if closure is not None:
            return step(_over_all_rows(closure), *args, **kwargs)
        with comm.shielded():
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
    if len(comm.ranks) == 1:
        return value
    return torch.as_tensor(comm.all_reduce(value, "avg")).reshape(value.shape)


class Reduction:
    """Gradients of the parameters of some modules, summed over the ranks of a call.

    Attributes
    ----------
    share : float or None
        This rank's share of the rows when gradients were last kept back, until they are reduced.
    """

    def __init__(self, objects: Sequence[Any], bucket_nbytes: int) -> None:
        found = [p for obj in objects if states.is_module(obj) for p in torch.nn.Module.parameters(obj)]
        self._parameters = list({id(parameter): parameter for parameter in found}.values())
        self._bucket_nbytes = bucket_nbytes
        self._hooked: set[int] = set()
        self._fired: set[int] = set()
        self._is_running = False
        self._is_postponed = False
        self._pass = -1  # the backward pass at whose end gradients will be reduced
        self._buckets: list[Bucket] = []
        self.share: float | None = None

    def begin(self) -> None:
        """A call begins: hear of gradients from now on."""
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._hooked:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._note, index))
                self._hooked.add(index)
        self._is_running, self._is_postponed, self._pass = True, False, -1
        self._fired.clear()

    def end(self) -> None:
        self._is_running = False

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Leave gradients as they are while the body runs; the next backward pass outside of it reduces them."""
        before, self._is_postponed = self._is_postponed, True
        try:
            yield
        finally:
            self._is_postponed = before

    def _note(self, index: int, parameter: torch.Tensor) -> None:
        if not self._is_running:
            return
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise ValueError(
                "cannot reduce a gradient: backward() was called with create_graph=True, which would have to go on "
                "through the other ranks. Use torch.autograd.grad(..., create_graph=True) for terms of the loss."
            )
        self._fired.add(index)
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        self._pass = -1
        share = comm.rows / comm.total_rows if comm.total_rows else 1.0 / len(comm.ranks)
        if self.share is not None and self.share != share:
            raise ValueError(
                f"cannot reduce gradients that were kept back by no_sync(): this rank had {self.share:.4g} of the rows "
                f"then and has {share:.4g} now, expected the same share, because the sum would weigh rows differently. "
                "Accumulate over batches of one size."
            )
        if self._is_postponed:
            self.share = share
            return
        self.share = None
        cell.worker.hold_back(False)
        if len(comm.ranks) > 1:
            if not self._buckets:
                self._buckets = list(Bucket.split(self._parameters, self._bucket_nbytes))
            for bucket in self._buckets:
                bucket.reduce(share, self._fired)
        self._fired.clear()
        # From here on this rank can finish the step by itself: a fault elsewhere must not leave it half done.
        cell.worker.hold_back(True)


class Bucket:
    """Some parameters of one dtype whose gradients are reduced in one buffer, and which of them were used."""

    def __init__(self, parameters: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._parameters = parameters
        first = parameters[0][1]
        dtype = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
        sizes = [parameter.numel() for _, parameter in parameters]
        self._flat = torch.empty(sum(sizes) + len(parameters), dtype=dtype, device=first.device)
        self._parts = [
            part.view(parameter.shape)
            for part, (_, parameter) in zip(self._flat.split([*sizes, len(sizes)]), parameters)
        ]
        self._used = self._flat[sum(sizes) :]

    @staticmethod
    def split(parameters: Sequence[torch.Tensor], nbytes: int) -> Iterator[Bucket]:
        """Yield buckets of at most ``nbytes`` bytes, the last parameters first: their gradients are there first."""
        kinds: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        for index, parameter in reversed(list(enumerate(parameters))):
            key = parameter.dtype, parameter.device
            chosen = kinds.setdefault(key, [])
            if chosen and sum(each.nbytes for _, each in chosen) + parameter.nbytes > nbytes:
                yield Bucket(kinds.pop(key))
                chosen = kinds.setdefault(key, [])
            chosen.append((index, parameter))
        for chosen in kinds.values():
            yield Bucket(chosen)

    def reduce(self, share: float, fired: set[int]) -> None:
        """Make each gradient the sum over ranks, weighted; also where only other ranks have one."""
        with torch.no_grad():
            for (_, parameter), part in zip(self._parameters, self._parts):
                if parameter.grad is None:
                    part.zero_()
                else:
                    torch.mul(parameter.grad, share, out=part) if part.dtype == parameter.dtype else part.copy_(
                        parameter.grad
                    ).mul_(share)
            self._used.copy_(torch.tensor([float(index in fired) for index, _ in self._parameters]))
            reduced = comm.all_reduce(self._flat, "sum", out=self._flat)
            assert reduced is self._flat
            used = self._used.tolist()
            for (_, parameter), part, is_used in zip(self._parameters, self._parts, used):
                if not is_used:
                    continue
                if parameter.grad is None:
                    parameter.grad = part.to(parameter.dtype, copy=True)
                else:
                    parameter.grad.copy_(part)


def as_bytes(state: dict[str, Any]) -> bytes:
    """Return a state as ``load`` gets it on the ranks."""
    return pickle.dumps(state, protocol=5)


def mean(total: torch.Tensor, count: Any) -> torch.Tensor:
    """Return this rank's part of a mean over things that are not rows, as tokens, weighted so that the step is exact.

    For a loss in a step that is a sum over ``count`` things of this rank's rows. The gradients are then those of the
    sum over all ranks by the number of all things, and so is the ``"avg"`` of what is returned.

    Parameters
    ----------
    total : tensor, shape ()
        The sum over this rank's rows.
    count : number or tensor, shape ()
        How many things it has summed.

    Returns
    -------
    tensor, shape ()
        ``total * all_rows / (rows * all_counts)``.
    """
    own = torch.as_tensor(count, dtype=torch.float64)
    everything = own if len(comm.ranks) == 1 else comm.all_reduce(own.reshape(1), "sum")[0]
    return total * (comm.total_rows / comm.rows / float(everything))
