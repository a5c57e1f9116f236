"""Gives each rank the gradients of all rows.

In a backward pass each parameter's hook notes that its gradient is there. At the end of the pass, before ``backward()``
returns, all ranks add up their gradients, weighted by rows, in flat buffers. A parameter gets the sum over the ranks
that have used it, and keeps its gradient if none has: the last buffer ends with a flag for each parameter. It is the
last to start, so all flags are known by then, and they are read once a pass: on a GPU the program waits only then.

With overlap, the hooks start to reduce a buffer when all of its gradients are there and all buffers before it were
started. So all ranks keep one order. The end of the pass starts the buffers that are left, and waits for all.

The reducer of ``DistributedDataParallel`` was tried in its place. It reduces once what follows its own ``forward``:
gradients of a layer that is called by itself, of a penalty of parameters, and of a second backward pass stay local, in
silence.

An interrupt, or the death of another rank, can end a pass at any line. Then nobody waits for the buffers' requests: the
communicator drops them when the next call begins, and that call expects all gradients anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from synk._wire.cell import cell
from synk.communicators._comm import comm
from synk.torch import _state as states


@dataclass(frozen=True)
class Options:
    """The options of :func:`synk.torch.replicate` that ranks need."""

    seed: int
    sync_batchnorm: bool
    bucket_nbytes: int
    overlap: bool | str


def _weakly(method: Callable[..., None], index: int) -> Callable[..., None]:
    """Return a hook that calls a method as long as its object exists.

    Autograd holds hooks where Python's garbage collector does not look. A hook that held the ``GradientSum``, which
    holds the parameters, would keep all of them alive for ever.
    """
    held = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        if (found := held()) is not None:
            found(index, *arguments)

    return hook


class GradientSum:
    """Sums the gradients of the parameters of some modules over the ranks of a call."""

    def __init__(self, objects: Sequence[Any], options: Options) -> None:
        self._parameters = states.parameters_of(objects)
        self._options = options
        self._fired: set[int] = set()  # positions of those with a gradient that was not reduced yet
        self._is_running = False
        self._pass = -1  # the backward pass at whose end gradients will be reduced
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._num_ranks, self._share = 1, 1.0  # in this call: how many there are, and this one's share of the rows
        self._is_overlapping = False
        self.notice_reduction: Callable[[], None] = lambda: None  # called before the ranks communicate
        # The gradients at the start of the call, as weak references with versions. The user may free one in the call.
        self._found: list[Any] = []
        # By position, copies of the gradients that the call adds to, and whether they were as found until then.
        self._kept: dict[int, tuple[torch.Tensor | None, bool]] = {}
        for index, parameter in enumerate(self._parameters):
            if parameter.is_floating_point() or parameter.is_complex():
                is_trained = parameter.requires_grad
                parameter.requires_grad_()  # a frozen one takes no hooks, and a body may thaw it
                parameter.register_hook(_weakly(self._keep, index))
                parameter.register_post_accumulate_grad_hook(_weakly(self._note, index))
                parameter.requires_grad_(is_trained)

    def keep(self) -> None:
        """Note which gradients exist. A call that fails puts back the gradients that it added to."""
        found = [parameter.grad for parameter in self._parameters]
        self._found = [None if each is None else (weakref.ref(each), each._version) for each in found]
        self._kept.clear()

    def put_back(self) -> bytes:
        """Put back the gradients that the call added to. Gradients that it dropped (``zero_grad``) cannot come back.

        Return a flag for each parameter whether its gradient is as it was; empty if all are.
        """
        for index, (gradient, _) in self._kept.items():
            self._parameters[index].grad = gradient
        as_found = [self._kept[k][1] if k in self._kept else self._is_as_found(k) for k in range(len(self._parameters))]
        return b"" if all(as_found) else bytes(as_found)

    def _keep(self, index: int, *_: Any) -> None:
        """Save a gradient that is about to be added to."""
        if self._is_running and index not in self._kept:
            gradient = self._parameters[index].grad
            self._kept[index] = None if gradient is None else gradient.clone(), self._is_as_found(index)

    def _is_as_found(self, index: int) -> bool:
        gradient, found = self._parameters[index].grad, self._found[index]
        if gradient is None or found is None:
            return gradient is found
        return bool(found[0]() is gradient and found[1] == gradient._version)

    def begin(self) -> None:
        """Begin a call, and forget an earlier one that was broken off."""
        self._is_running, self._pass = True, -1
        self._fired.clear()
        self._num_ranks = comm.world_size
        self._share = comm.rows / comm.total_rows if comm.total_rows else 1 / self._num_ranks
        is_overlapping = self._options.overlap
        if is_overlapping == "auto":
            # Batch norms that communicate meanwhile would mix two kinds of collectives, in other orders on other ranks.
            is_overlapping = cell.worker.backend.is_device and not self._options.sync_batchnorm
        self._is_overlapping = self._num_ranks > 1 and bool(is_overlapping)
        if self._num_ranks > 1 and not self._buckets:
            self._buckets = Bucket.split(self._parameters, self._options.bucket_nbytes)
            self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}

    def end(self) -> None:
        """End the call: the hooks, which stay registered, do nothing until the next one."""
        self._is_running = False

    def _note(self, index: int, parameter: torch.Tensor) -> None:
        """Note that a gradient is there. The first one of a pass makes autograd call ``_reduce`` at the end of it."""
        if not self._is_running:
            return
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise TypeError(
                "cannot reduce a gradient: got a sparse one, expected dense ones. Build the embedding with "
                "sparse=False."
            )
        if gradient is not None and gradient.requires_grad:
            raise ValueError(
                "cannot reduce a gradient: backward() was called with create_graph=True, which would have to go on "
                "through the other ranks. Use torch.autograd.grad(..., create_graph=True) for terms of the loss."
            )
        if not self._fired:
            self._expect_all()
        self._fired.add(index)
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)
        if self._is_overlapping:
            self._start_full(index)

    def _expect_all(self) -> None:
        """Begin a pass, which may bring the gradients of all parameters that are not frozen now."""
        expected = {index for index, parameter in enumerate(self._parameters) if parameter.requires_grad}
        for bucket in self._buckets:
            bucket.expect(expected)

    def _start_full(self, index: int) -> None:
        """Note a gradient, and start the buckets that are full now, which also advances those that were started.

        A bucket starts after all buckets before it, so that all ranks begin the collectives in one order.
        """
        bucket = self._bucket_of[index]
        if bucket.request is not None:
            raise ValueError(
                "cannot overlap the reduction with the backward pass: got the gradient of a parameter twice, expected "
                "once, because its sum over the ranks has been started (a layer used inside and outside of "
                "torch.utils.checkpoint, or a backward pass that was broken off). Use replicate(..., overlap=False)."
            )
        bucket.missing.discard(index)
        full = takewhile(lambda each: not each.missing, [] if bucket.missing else self._buckets)
        for number, bucket in enumerate(full):
            if bucket.request is None:
                for started in self._buckets[:number]:
                    started.request.test()  # the ranks agree on it first, and then it is queued on the device
                bucket.start(self._share, self._fired)

    def _reduce(self) -> None:
        """End a backward pass: reduce the gradients. Called by autograd."""
        self._pass = -1
        # While ranks communicate an interrupt is raised at once, because a rank that waits for a dead one must stop.
        cell.worker.hold_back(False)
        self._sum_up()
        # From here on this rank can finish the step by itself. A fault on another rank must not leave the step half
        # done, so an interrupt is held back until the step ends or the ranks communicate again.
        cell.worker.hold_back(True)

    def _sum_up(self) -> None:
        """Sum the gradients over the ranks."""
        self.notice_reduction()
        for index in range(len(self._parameters)):
            self._keep(index)  # before a sum replaces it: parameters that only other ranks used had no hook called
        buckets = self._buckets if self._num_ranks > 1 else []
        for bucket in buckets if self._is_overlapping else ():
            if bucket.request is None:
                bucket.start(self._share, self._fired)
        for bucket in buckets:
            bucket.finish(self._share, self._fired)
        used = [abs(flag) > 0 for flag in buckets[-1].flags.tolist()] if buckets else []  # by any rank
        for bucket in buckets:
            bucket.give_back(used)
        self._fired.clear()


class Bucket:
    """Some parameters of one dtype whose gradients are reduced in one buffer; the last one also has all flags.

    The buffer is made once and lives as long as the bucket. Gradients are copied in and out, so ``parameter.grad`` is
    never a view of it.

    Attributes
    ----------
    indices : set of int
        The positions of its parameters.
    missing : set of int
        Those whose gradients the pass has not brought yet.
    request : Request or None
        Of the sum that was started in the pass.
    flags : tensor
        Of the last bucket, after the sum: not zero for each parameter that any rank has used.
    """

    missing: set[int]

    def __init__(self, parameters: Sequence[tuple[int, torch.Tensor]], num_flags: int) -> None:
        self.indices = {index for index, _ in parameters}
        self._numbered, self._num_flags = parameters, num_flags
        first = parameters[0][1]
        dtype = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
        sizes = [*(parameter.numel() for _, parameter in parameters), num_flags]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
        *parts, self.flags = flat.split(sizes)
        self._parts = [part.view(parameter.shape) for part, (_, parameter) in zip(parts, parameters)]
        # The whole buffer. On the CPU it is an array, because small operations on arrays cost less.
        self._memory: Any = flat.numpy() if first.device.type == "cpu" else flat
        self.request: Any = None  # of a sum that was started

    @staticmethod
    def split(parameters: Sequence[torch.Tensor], nbytes: int) -> list[Bucket]:
        """Return buckets of at most ``nbytes`` bytes. The last parameters come first, as their gradients do."""
        kinds: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        found = []
        for index, parameter in reversed(list(enumerate(parameters))):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # it has no gradient
            key = parameter.dtype, parameter.device
            chosen = kinds.setdefault(key, [])
            if chosen and sum(each.nbytes for _, each in chosen) + parameter.nbytes > nbytes:
                found.append(kinds.pop(key))
                chosen = kinds.setdefault(key, [])
            chosen.append((index, parameter))
        found += kinds.values()
        return [Bucket(each, len(parameters) if each is found[-1] else 0) for each in found]

    def expect(self, expected: set[int]) -> None:
        """Begin a pass, which may bring the gradients of these parameters."""
        self.request, self.missing = None, self.indices & expected

    def start(self, share: float, fired: set[int]) -> None:
        """Start to sum the gradients over the ranks. Until the end the buffer belongs to the communicator."""
        self._fill(share, fired)
        self.request = comm.all_reduce(self._memory, "sum", out=self._memory, async_op=True)

    def finish(self, share: float, fired: set[int]) -> None:
        """Sum the gradients over the ranks, weighted by their shares of the rows, or wait for what was started."""
        if self.request is not None:
            self.request.wait()
        else:
            self._fill(share, fired)
            comm.all_reduce(self._memory, "sum", out=self._memory)

    def _fill(self, share: float, fired: set[int]) -> None:
        """Copy the gradients into the buffer, multiplied by this rank's share of the rows, and set the flags."""
        there = [(part, each.grad) for part, (_, each) in zip(self._parts, self._numbered) if each.grad is not None]
        if len(there) < len(self._parts):
            self._memory[:] = 0  # the buffer still has the sums of the last pass
        if there:
            torch._foreach_copy_([part for part, _ in there], [gradient for _, gradient in there])
        self._memory *= share
        if self._num_flags:
            used = [float(index in fired) for index in range(self._num_flags)]
            self.flags.copy_(torch.tensor(used, dtype=self.flags.dtype))

    def give_back(self, used: Sequence[bool]) -> None:
        """Copy the sums into the gradients of the parameters that any rank has used."""
        gradients, sums = [], []
        for part, (index, parameter) in zip(self._parts, self._numbered):
            if used[index]:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                gradients.append(parameter.grad)
                sums.append(part)
        if sums:
            torch._foreach_copy_(gradients, sums)
