"""The rank's half of ``DataParallel``: a forward pass, and the same pass again with the gradients of its outputs.

Nothing is kept from one call to the next but the module without its tensors, while the program sends the same one.
Parameters and buffers come with each call, so the second pass begins where the first one did. Other attributes stay as
a pass leaves them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from synk._rank.failures import HostPickler
from synk.communicators._comm import comm
from synk.torch._rank import seed_generators
from synk.torch._state import Apart, dump_apart, load_joined, version


@dataclass(frozen=True)
class Pass:
    """What a pass needs besides tensors.

    Attributes
    ----------
    classes : list of type
        Those in the module and in the arguments, which a rank must know before it loads them.
    owner : int
        The number of the ``DataParallel``. Modules that are equal in two of them stay two on the ranks.
    module : bytes
        The module, pickled without its tensors.
    names : tuple of str
        The names of its parameters and then of its buffers, in the order in which they come.
    num_parameters : int
    arguments : bytes
        The arguments, pickled without their tensors.
    wants : tuple of bool
        Which parameters, tensors without axes and tensors with rows need gradients.
    has_grad : bool
        Whether autograd is on in the program.
    autocast : torch.dtype or None
        The dtype if the program is inside of ``torch.autocast``.
    seed : tuple of int
        The program's seed and the number of the call.
    """

    classes: list[type]
    owner: int
    module: bytes
    names: tuple[str, ...]
    num_parameters: int
    arguments: bytes
    wants: tuple[bool, ...]
    has_grad: bool
    autocast: torch.dtype | None
    seed: tuple[int, int]


class _Whole(torch.nn.Module):
    """Runs ``forward`` alone: the program itself runs the hooks of the whole module, on all rows."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


@functools.lru_cache(maxsize=8)
def _loaded(owner: int, pickled: bytes, num_parameters: int) -> _Whole:
    """Return the module of one ``DataParallel``, with stand-ins for the tensors that come with each pass.

    It is kept, or one that is compiled would be compiled in each pass.
    """

    @functools.cache
    def stand_in(number: int) -> torch.Tensor:
        empty = torch.empty(0)
        return torch.nn.Parameter(empty, requires_grad=False) if number < num_parameters else empty

    return _Whole(load_joined(pickled, stand_in))


class _Outputs(Apart, HostPickler):
    """Pickles outputs without tensors."""


class _Run:
    """One run of the module: its ``outputs``, the ``leaves`` that need gradients, the ``buffers`` after it."""

    def __init__(self, order: Pass, rows: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        num_whole = len(order.wants) - len(rows)  # the parameters, and the tensors without axes
        parameters, whole = tensors[: order.num_parameters], tensors[order.num_parameters : num_whole]
        wants = zip((*tensors[:num_whole], *rows), order.wants)
        self.leaves = [tensor.requires_grad_() for tensor, is_wanted in wants if is_wanted]
        module = _loaded(order.owner, order.module, order.num_parameters)
        args, kwargs = load_joined(order.arguments, lambda place: (rows if place[0] else whole)[place[1]])
        named = zip(order.names, (*parameters, *tensors[num_whole:]))
        values = {f"module.{name}": tensor for name, tensor in named}
        seed_generators(*order.seed, comm.ranks[comm.rank])
        cast = torch.autocast(rows[0].device.type, order.autocast, enabled=order.autocast is not None)
        with torch.set_grad_enabled(order.has_grad), cast:
            before = [version(each) for each in parameters]
            result = torch.func.functional_call(module, values, args, kwargs)
        for name, parameter, written in zip(order.names, parameters, before):
            if version(parameter) != written:
                raise ValueError(
                    f"cannot run forward on several workers: it writes into the parameter {name!r} (as an Embedding "
                    "with max_norm does), for this worker's rows only, expected parameters that only the program "
                    "changes. Write into it in the program, between optimizer.step() and the next call."
                )
        changed = {name for name, _ in module.named_buffers()} - {*values} | {k for k, v in values.items() if v is None}
        if changed:
            _loaded.cache_clear()  # the module has it now, and would begin the next pass with it
            raise ValueError(
                f"cannot run forward on several workers: it makes or drops the buffer {min(changed)[7:]!r}, which the "
                "program would not see, expected the same buffers after it. Register it with a tensor, and write into "
                "it."
            )
        self.buffers = tuple(value.detach() for value in list(values.values())[order.num_parameters :])
        self.outputs: list[torch.Tensor] = []

        def place(output: torch.Tensor) -> int:
            self.outputs.append(output)
            return len(self.outputs) - 1

        self.nesting, _ = dump_apart("the outputs of DataParallel", result, place, _Outputs)


def forward(rows: Any, tensors: Any, order: Pass) -> Any:
    """Return the outputs for this rank's rows, the buffers after the pass, and how the outputs are nested."""
    run = _Run(order, rows, tensors)
    for output in run.outputs:
        _check_rows(output, len(rows[0]))
    flags = [output.requires_grad for output in run.outputs]
    return tuple(output.detach() for output in run.outputs), run.buffers, (run.nesting, flags)


def backward(rows: Any, gradients: Any, tensors: Any, order: tuple[Pass, tuple[int, ...]]) -> Any:
    """Return this rank's part of the sums, the gradients of its rows, and which leaves were used.

    The numbers behind the order are those of the outputs that ``gradients`` belong to.
    """
    given, numbers = order
    run = _Run(given, rows, tensors)
    pairs = [(run.outputs[k], gradient) for k, gradient in zip(numbers, gradients) if run.outputs[k].requires_grad]
    found: Sequence[Any] = [None] * len(run.leaves)
    if pairs:
        outputs, own = zip(*pairs)
        found = torch.autograd.grad(outputs, run.leaves, own, allow_unused=True)
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
        raise TypeError(
            "cannot sum the gradients of DataParallel: got a sparse one, expected dense ones. Build the embedding "
            "with sparse=False, or use synk.torch.replicate."
        )
    values = tuple(
        torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(run.leaves, found)
    )
    num_summed = sum(given.wants[: len(given.wants) - len(rows)])
    used = np.array([gradient is not None for gradient in found], np.uint8)
    return values[:num_summed], values[num_summed:], used


def _check_rows(output: torch.Tensor, num_rows: int) -> None:
    if output.ndim == 0:
        raise ValueError(
            "cannot gather an output of DataParallel: got a single number, expected a row for each row of the inputs. "
            "Compute the loss in the program, from outputs with rows (in a Trainer: pass compute_loss_func=, and no "
            "labels to the model), or use synk.torch.replicate."
        )
    if output.shape[0] != num_rows or output.layout is not torch.strided:
        raise ValueError(
            f"cannot gather an output of DataParallel: got a tensor of shape {tuple(output.shape)} for {num_rows} rows "
            f"of inputs, expected {num_rows} rows. Have forward return one row for each row of its inputs and reduce "
            "them after the call (a loss too), or use synk.torch.replicate."
        )
