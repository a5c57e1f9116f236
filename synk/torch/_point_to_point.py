"""Messages that torch differentiates through, once: the gradient of a received tensor goes back to its sender.

A message leaves no trace in torch's graph that would make one rank wait for the other. So each side has a *dummy*, a
zero without axes. The loss plus the dummy is the loss, and the backward pass reaches the message through it. The idea
is that of mpi4torch, https://github.com/helmholtz-analytics/mpi4torch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from synk._wire.cell import cell
from synk._worker.comm.collectives import Collectives
from synk._worker.comm.comm import comm
from synk._worker.comm.requests import Request
from synk.torch._adjoints import apply, check_tensor, losses

GRADIENT_TAGS = 1 << 20
"""All tags of messages are smaller. The gradient of message k with a tag has ``tag + k * GRADIENT_TAGS``, k from 1."""

# How many messages of each kind, peer and tag the call has had. Both sides count in the order in which messages are
# posted, so a gradient finds its message in whatever order the ranks wait and run their backward passes. The entry goes
# with the call's ``Collectives``.
_counted: weakref.WeakKeyDictionary[Collectives, Counter[tuple[str, int, int]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Handle:
    """A message in flight. :func:`isend` and :func:`irecv` return it. Wait for it once.

    Attributes
    ----------
    dummy : tensor, shape ()
        Zero. A tensor to which it is added depends on the message.
    """

    dummy: torch.Tensor
    _request: Request
    _back: tuple[int, int] | None
    """The rank to which the gradient of a received message goes, and the tag for it; None if the message is sent."""
    _out: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the message, once.

        Returns
        -------
        tensor
            The received tensor: ``out`` if given, else a new one. For a message that is sent, the dummy of shape ().

        Raises
        ------
        CollectiveMismatch
            If the message cannot come, or, in the backward pass, its gradient cannot: a rank has left the function, or
            all ranks wait for each other.
        """
        if self._back is None:
            self._request.wait()
            return self.dummy
        received: torch.Tensor = _Received.apply(self._out, self.dummy, self._request, *self._back)
        return received


def isend(x: torch.Tensor, peer: int, tag: int = 0) -> Handle:
    """Send ``x`` to rank ``peer`` without waiting for it.

    The backward pass gets the gradient from the receiver if the loss depends on the handle's dummy, which ``wait()``
    also returns: add it to the loss. The receiver must also use ``synk.torch``, and its tensor must require grad
    if ``x`` does: see :func:`irecv`. Messages can be differentiated once.

    Parameters
    ----------
    x : tensor, any shape and dtype
    peer : int
        A rank, which may be this one.
    tag : int
        From 0 to 2**20 - 1. Larger tags are used for gradients.

    Returns
    -------
    Handle

    Raises
    ------
    TypeError, ValueError
        If ``x`` is not a tensor, ``peer`` is not a rank of the call, or the tag is out of range.
    RuntimeError
        If the backward pass is differentiated once more.
    """
    check_tensor("isend", x)
    _check_tag("isend", tag)
    request = comm.isend(x.detach(), peer, tag)
    return Handle(_sent(x, peer, tag), request, None)


def irecv(peer: int, tag: int = 0, *, like: torch.Tensor | None = None, out: torch.Tensor | None = None) -> Handle:
    """Ask for a message from rank ``peer`` and return at once. ``wait()`` of the handle returns the message.

    The received tensor requires grad, and its gradient is sent back. So the sent tensor must require grad as well. For
    a message whose sender expects no gradient, pass a ``like`` that does not require grad.

    Parameters
    ----------
    peer, tag : int
        As for :func:`isend`.
    like : tensor, optional
        A tensor with the dtype and number of elements of the message. The result has the shape of ``like``, and
        requires grad if ``like`` does; the gradient of ``like`` is zero. By default the result has the message's own
        shape and dtype, and requires grad if that is a float dtype.
    out : tensor, optional
        A tensor to fill and return. It must have the dtype and number of elements of the message.

    Returns
    -------
    Handle

    Raises
    ------
    TypeError, ValueError
        If ``peer`` is not a rank of the call (a tensor to fill is passed as ``out=``), the tag is out of range, or
        ``like`` and ``out`` differ.
    """
    for tensor in (like, out):
        if tensor is not None:
            check_tensor("irecv", tensor)
    _check_tag("irecv", tag)
    if like is not None and out is not None and (like.shape, like.dtype) != (out.shape, out.dtype):
        raise ValueError(
            f"cannot write to out: got {out.dtype} of shape {tuple(out.shape)}, expected {like.dtype} of shape "
            f"{tuple(like.shape)} as of like. Pass one of them."
        )
    expected = out if like is None else like
    request = comm.irecv(peer, tag, like=None if expected is None else expected.detach())
    anchor = torch.zeros((), requires_grad=True)  # so that a gradient goes back, whatever the message turns out to be
    dummy = anchor if like is None else _Trace.apply(like)
    return Handle(dummy, request, (peer, _gradient_tag("recv", peer, tag)), out)


def send(x: torch.Tensor, peer: int, tag: int = 0) -> torch.Tensor:
    """Send ``x`` to rank ``peer``, like :func:`isend`. When this returns, ``x`` may be changed.

    Parameters
    ----------
    x, peer, tag
        As for :func:`isend`, which also lists the errors.

    Returns
    -------
    tensor, shape ()
        The dummy: zero, to be added to the loss.
    """
    check_tensor("send", x)
    _check_tag("send", tag)
    comm.send(x.detach(), peer, tag)
    return _sent(x, peer, tag)


def recv(peer: int, tag: int = 0, *, like: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Wait for a message from rank ``peer`` and return it, like ``irecv(...).wait()``.

    Parameters
    ----------
    peer, tag, like, out
        As for :func:`irecv`, which also lists the errors.

    Returns
    -------
    tensor
        ``out`` if given, else a new tensor.

    Examples
    --------
    >>> import torch, synk
    >>> def slope(x):
    ...     comm, weight = synk.comm, x.sum().requires_grad_()
    ...     dummy = synk.torch.send(weight**2, (comm.rank + 1) % comm.world_size)
    ...     loss = weight * synk.torch.recv((comm.rank - 1) % comm.world_size)
    ...     (loss + dummy).backward()
    ...     return weight.grad
    >>> a, b = (torch.tensor(value, requires_grad=True) for value in (3.0, 5.0))
    >>> (a * b**2 + b * a**2).backward()
    >>> with synk.fork(2):
    ...     synk.function(slope, outputs=None, framework="torch")(torch.tensor([3.0, 5.0])), [a.grad, b.grad]
    ([tensor(55.), tensor(39.)], [tensor(55.), tensor(39.)])
    """
    return irecv(peer, tag, like=like, out=out).wait()


class _Trace(torch.autograd.Function):
    """A tensor -> zero, a tensor of shape () that depends on it. The gradient of the tensor is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kind = x.shape, x.dtype, x.device  # not the tensor, which may be large
        return _zero(x)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        shape, dtype, device = ctx.kind
        return torch.zeros(shape, dtype=dtype, device=device)


def _zero(x: torch.Tensor) -> torch.Tensor:
    """Return the value of a dummy: real, and of a dtype that no loss takes over."""
    return x.new_zeros((), dtype=torch.float32)


def _sent(x: torch.Tensor, peer: int, tag: int) -> torch.Tensor:
    """Return the dummy of a message that is sent."""
    return apply(_Sent, x, _Trace.apply(x), peer, _gradient_tag("send", peer, tag))


class _Sent(torch.autograd.Function):
    """A tensor that is sent, and a small tensor that depends on it -> the dummy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trace: torch.Tensor, peer: int, back: int) -> torch.Tensor:
        ctx.save_for_backward(trace)
        ctx.shape, ctx.peer, ctx.back = x.shape, peer, back
        return _zero(x)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradient = torch.as_tensor(comm.recv(ctx.peer, ctx.back)).reshape(ctx.shape)
        return _Last.apply(gradient, *ctx.saved_tensors), None, None, None


class _Received(torch.autograd.Function):
    """A tensor to fill, and the dummy of a message that comes -> the received tensor."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor | None, dummy: torch.Tensor, request: Request, peer: int, back: int
    ) -> torch.Tensor:
        ctx.peer, ctx.back, ctx.zero, ctx.weight = peer, back, dummy.new_zeros(()), losses.weight
        received = torch.as_tensor(request.wait()).detach()  # a new tensor each time
        if out is None:
            return received
        ctx.mark_dirty(out)
        return out.copy_(received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # In a step of ``replicate`` the gradient carries this rank's weight in place of the receiver's: see ``apply``.
        # This rank multiplies by its own weight, and the receiver divides by its own (``apply`` in ``_sent``).
        gradient = gradient.detach() if ctx.weight is None else gradient.detach() * ctx.weight
        comm.isend(gradient, ctx.peer, ctx.back)
        return None, ctx.zero, None, None, None


class _Last(torch.autograd.Function):
    """A gradient that came as a message. It tells torch that the gradient depends on the tensor that was sent."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, trace: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "cannot differentiate a message of synk.torch twice: got a derivative of the gradient that its receiver "
            "sent back, expected first derivatives only. Use a collective, as synk.torch.all_to_all."
        )


def _check_tag(verb: str, tag: int) -> None:
    if not isinstance(tag, (int, np.integer)) or not 0 <= tag < GRADIENT_TAGS:
        raise ValueError(
            f"cannot {verb} a message that is differentiated: got tag={tag!r}, expected an int from 0 to "
            f"{GRADIENT_TAGS - 1}."
        )


def _gradient_tag(kind: str, peer: int, tag: int) -> int:
    """Count a message, and return the tag of its gradient."""
    count = _counted.setdefault(cell.worker.collectives(), Counter())
    count[kind, peer, tag] += 1
    return tag + count[kind, peer, tag] * GRADIENT_TAGS
