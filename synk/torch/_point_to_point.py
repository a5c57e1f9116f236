"""Messages that torch differentiates through, once: the gradient of a received tensor goes back to its sender.

A message leaves no trace in torch's graph that would make one rank wait for the other. So each side has a *dummy*, a
zero without axes. The loss plus the dummy is the loss, and the backward pass reaches the message through it. The idea
is that of mpi4torch, https://github.com/helmholtz-analytics/mpi4torch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from synk._wire.cell import cell
from synk.communicators._collectives import Collectives
from synk.communicators._comm import comm
from synk.torch._collectives import check_tensor, moved

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
    _end: Callable[[torch.Tensor], torch.Tensor]
    """Waits, and returns what ``wait`` does, given the dummy."""

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
        return self._end(self.dummy)


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
    comm.isend(x.detach(), peer, tag)  # which is the whole of it: there is nothing to wait for
    return Handle(_sent(x, peer, tag), lambda dummy: dummy)


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
    # Without a like a gradient goes back, whatever the message turns out to be.
    dummy = torch.zeros((), requires_grad=True) if like is None else _trace(like)
    back, zero = _gradient_tag("recv", peer, tag), dummy.new_zeros(())

    def adjoint(gradient: torch.Tensor) -> torch.Tensor:
        comm.isend(gradient.detach(), peer, back)
        return zero

    def end(dummy: torch.Tensor) -> torch.Tensor:
        received = moved(dummy, lambda _: request.wait(), adjoint)
        return received if out is None else out.copy_(received)

    return Handle(dummy, end)


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
    return isend(x, peer, tag).wait()


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


def _trace(x: torch.Tensor) -> torch.Tensor:
    """Return zero, which depends on ``x``: of no axes, and real, of a dtype that no loss takes over."""
    return torch.real(x.reshape(-1)[:0].sum()).float()


def _sent(x: torch.Tensor, peer: int, tag: int) -> torch.Tensor:
    """Return the dummy of a message that is sent."""
    shape, trace, back = x.shape, _trace(x), _gradient_tag("send", peer, tag)

    def adjoint(_: torch.Tensor) -> torch.Tensor:
        gradient = torch.as_tensor(comm.recv(peer, back)).reshape(shape)
        return moved(trace, lambda _: gradient, _refuse)  # the gradient depends on what was sent

    return moved(x, _trace, adjoint)


def _refuse(_: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "cannot differentiate a message of synk.torch twice: got a derivative of the gradient that its receiver sent "
        "back, expected first derivatives only. Use a collective, as synk.torch.all_to_all."
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
