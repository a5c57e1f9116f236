"""Messages through which torch differentiates, once: the gradient of what was received goes back to its sender.

A message leaves no trace in the graph of torch that would make one rank wait for the other, so each side has a *dummy*:
a tensor without axes whose value is nothing, and through which the backward pass reaches the message.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from synk._wire.cell import cell
from synk._worker.comm import comm
from synk._worker.messages import Messages
from synk._worker.requests import Request
from synk.torch._adjoints import apply, as_tensor, check_tensor

GRADIENT_TAGS = 1 << 20
"""Tags of messages are below; the gradient of the k-th one of a tag has ``tag + k * GRADIENT_TAGS``, from k = 1 on."""

# How many messages of a kind, peer and tag the call under way has had: whatever the order in which they are waited for,
# and in which the backward passes come to them, gradients find theirs.
_counted: weakref.WeakKeyDictionary[Messages, Counter[tuple[str, int, int]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Handle:
    """A message that was started, as :func:`isend` and :func:`irecv` return it, to be waited for once by :func:`wait`.

    Attributes
    ----------
    dummy : tensor, shape ()
        For :func:`join_dummies`: whoever depends on it depends on the message.
    """

    dummy: torch.Tensor
    _request: Request
    _back: tuple[int, int] | None
    """To whom the gradient of what is received goes, and its tag; None for what is sent."""


Joined = TypeVar("Joined", torch.Tensor, Handle)


def isend(x: torch.Tensor, peer: int, tag: int = 0) -> Handle:
    """Send ``x`` to rank ``peer`` without waiting for it.

    The gradient comes in the backward pass, from the receiver, if the loss depends on the handle's dummy or on what
    :func:`wait` returns: see :func:`join_dummies`. The receiver receives by ``synk.torch`` as well, into a tensor that
    requires grad if ``x`` does. Messages can be differentiated once.

    Parameters
    ----------
    x : tensor
    peer : int
        A rank, which may be this one.
    tag : int
        From 0 on, below 2**20: the gradient has a tag from there on.

    Returns
    -------
    Handle

    Raises
    ------
    TypeError, ValueError
        If ``x`` is no tensor, ``peer`` no rank of the call, or the tag another one.
    RuntimeError
        In the second derivative.
    """
    _check("isend", x, tag)
    request = comm.isend(x.detach(), peer, tag)
    return Handle(_sent(x, peer, tag), request, None)


def irecv(like: torch.Tensor, peer: int, tag: int = 0) -> Handle:
    """Ask for a message of rank ``peer``, and return at once; :func:`wait` returns it.

    Parameters
    ----------
    like : tensor
        Of the dtype and shape of the message. If it requires grad, so does what is received, and its gradient is sent
        back; that must be so if it is for the sender. ``like`` itself gets zeros.
    peer, tag : int
        As for :func:`isend`.

    Returns
    -------
    Handle
    """
    _check("irecv", like, tag)
    request = comm.irecv(like.detach(), peer, tag)
    return Handle(join_dummies(like.new_zeros(()), [like]), request, (peer, _gradient_tag("recv", peer, tag)))


def wait(handle: Handle) -> torch.Tensor:
    """Wait for a message, once.

    Returns
    -------
    tensor
        What was received, new, of the shape of ``like``; of what was sent the dummy, of shape ().

    Raises
    ------
    CollectiveMismatch
        If the message cannot come, or its gradient in the backward pass: a rank has left the function, or all wait for
        each other.
    """
    if handle._back is None:
        handle._request.wait()
        return handle.dummy
    return apply(_Received, handle.dummy, handle._request, *handle._back)


def send(x: torch.Tensor, peer: int, tag: int = 0) -> torch.Tensor:
    """Send ``x`` to rank ``peer``; when this returns it may be changed. As :func:`isend`.

    Returns
    -------
    tensor, shape ()
        The dummy.
    """
    _check("send", x, tag)
    comm.send(x.detach(), peer, tag)
    return _sent(x, peer, tag)


def recv(like: torch.Tensor, peer: int, tag: int = 0) -> torch.Tensor:
    """Return what rank ``peer`` has sent. As :func:`irecv`.

    Examples
    --------
    >>> import torch, synk
    >>> def slope(x):
    ...     weight = x.sum().requires_grad_()
    ...     if synk.comm.rank == 0:
    ...         loss = synk.torch.send(weight**2, 1)  # the loss is all on rank 1; here it depends on the message
    ...     else:
    ...         loss = weight * synk.torch.recv(torch.empty((), dtype=x.dtype, requires_grad=True), 0)
    ...     loss.backward()
    ...     return weight.grad
    >>> with synk.fork(2):
    ...     synk.function(slope, outputs=None, framework="torch")(torch.tensor([3.0, 5.0]))
    [tensor(30.), tensor(9.)]
    """
    return wait(irecv(like, peer, tag))


def join_dummies(x: Joined, dummies: Sequence[torch.Tensor]) -> Joined:
    """Return ``x``, which depends on other tensors from now on, as torch sees it: their gradients are zeros.

    A backward pass goes only to what the loss depends on. A message that nothing depends on, as everything that is
    sent, has to be made a part of it by its dummy, and so has a collective whose result only some ranks use.

    Parameters
    ----------
    x : tensor or Handle
    dummies : sequence of tensor

    Returns
    -------
    tensor or Handle
        A view of the tensor; or another handle of the same message, to be used in the place of the first.

    Notes
    -----
    The idea and the name are those of mpi4torch, https://github.com/helmholtz-analytics/mpi4torch.
    """
    if isinstance(x, Handle):
        return replace(x, dummy=join_dummies(x.dummy, dummies))
    joined: torch.Tensor = _Join.apply(x, *dummies)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *dummies: torch.Tensor) -> torch.Tensor:
        ctx.looks = [(each.shape, each.dtype, each.device) for each in dummies]  # not they: they may be large
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.looks)


def _sent(x: torch.Tensor, peer: int, tag: int) -> torch.Tensor:
    """Return the dummy of what was sent."""
    return apply(_Sent, x, join_dummies(x.new_zeros(()), [x]), peer, _gradient_tag("send", peer, tag))


class _Sent(torch.autograd.Function):
    """What is sent, and a small tensor that depends on it -> its dummy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trace: torch.Tensor, peer: int, back: int) -> torch.Tensor:
        ctx.save_for_backward(trace)
        ctx.shape, ctx.peer, ctx.back = x.shape, peer, back
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradient = as_tensor(comm.recv(None, ctx.peer, ctx.back)).reshape(ctx.shape)
        return _Last.apply(gradient, *ctx.saved_tensors), None, None, None


class _Received(torch.autograd.Function):
    """The dummy of what is received -> what was."""

    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor, request: Request, peer: int, back: int) -> torch.Tensor:
        ctx.peer, ctx.back = peer, back
        return as_tensor(request.wait()).detach()  # another one each time

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        comm.isend(gradient.detach(), ctx.peer, ctx.back)
        return gradient.new_zeros(()), None, None, None


class _Last(torch.autograd.Function):
    """A gradient that came as a message, and what tells torch that it depends on what was sent."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, trace: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "cannot differentiate a message of synk.torch twice: got a derivative of the gradient that its receiver "
            "sent back, expected first derivatives only. Use a collective, as synk.torch.all_to_all."
        )


def _check(verb: str, x: Any, tag: int) -> None:
    check_tensor(verb, x)
    if not isinstance(tag, (int, np.integer)) or not 0 <= tag < GRADIENT_TAGS:
        raise ValueError(
            f"cannot {verb} a message that is differentiated: got tag={tag!r}, expected an int from 0 to "
            f"{GRADIENT_TAGS - 1}."
        )


def _gradient_tag(kind: str, peer: int, tag: int) -> int:
    """Count a message, and return the tag of its gradient."""
    count = _counted.setdefault(cell.worker.collectives().messages, Counter())
    count[kind, peer, tag] += 1
    return tag + count[kind, peer, tag] * GRADIENT_TAGS
