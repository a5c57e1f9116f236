"""Messages of ``synk.torch`` with and without ``like`` and ``out``; one-process autograd is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.harness import same_workers

import synk

torch = pytest.importorskip("torch")

F8 = torch.float64
HOWS = ("bare", "like", "out", "both", "view", "started")


def received(how: str, peer: int, like: Any) -> Any:
    """Return a message of the shape and dtype of ``like``, which is never changed."""
    if how == "bare":
        return synk.torch.recv(peer, 3)
    if how == "like":
        return synk.torch.recv(peer, 3, like=torch.empty_like(like, requires_grad=True))
    if how == "both":
        out = torch.zeros_like(like)
        result = synk.torch.recv(peer, 3, like=torch.empty_like(like), out=out)
        assert result is out
        return result
    base = torch.zeros(2, *like.shape, dtype=like.dtype)
    out = base[1] if how == "view" else torch.zeros_like(like)
    if how == "started":
        handle = synk.torch.irecv(peer, 3, out=out)
        assert not out.any()
        result = synk.torch.wait(handle)
    else:
        result = synk.torch.recv(peer, 3, out=out)
    assert result is out
    assert how != "view" or (torch.equal(base[1].detach(), out.detach()) and not base[0].any())
    return base[1] if how == "view" else result


def weights_of(size: int) -> list[Any]:
    return [torch.linspace(0.5, 1.5 + rank, 6, dtype=F8).reshape(2, 3).requires_grad_() for rank in range(size)]


def in_one_process(size: int) -> list[Any]:
    """Return the gradients of the sum of all losses, of a program in which each has the value of the one before."""
    weights = weights_of(size)
    sum(((w * before.sin()) ** 2).sum() for w, before in zip(weights, weights[-1:] + weights[:-1])).backward()
    return [w.grad for w in weights]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("framework", ["torch", None])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("ranks", [(0, 2), (2,), (0, 1, 2)], ids=str)
def test_gradients_go_back_between_the_ranks_of_the_call(
    shared_runtimes: Any, ranks: tuple[int, ...], how: str, framework: Any
) -> None:
    rt = shared_runtimes[3]
    rows = rt.shared(np.arange(3.0), sharded=True)

    def body(x: Any) -> Any:
        comm = synk.comm
        own = weights_of(comm.world_size)[comm.rank]
        dummy = synk.torch.send(own.sin(), (comm.rank + 1) % comm.world_size, 3)
        before = received(how, (comm.rank - 1) % comm.world_size, own.detach())
        if how == "both":  # the like says that it is no part of the graph
            assert not before.requires_grad
            return own.detach() * 0
        loss = synk.torch.join_dummies(((own * before) ** 2).sum(), [dummy])
        loss.backward()
        return own.grad

    found = rt.function(body, outputs=None, framework=framework)(rows, batch=list(ranks))
    expected = in_one_process(len(ranks))
    for rank in range(3):
        if rank not in ranks:
            assert found[rank] is None
        elif how != "both":
            torch.testing.assert_close(torch.as_tensor(found[rank]), expected[ranks.index(rank)])


def test_serial_gradients_are_those_of_one_process(shared_runtimes: Any) -> None:
    def body(x: Any) -> Any:
        comm = synk.comm
        x = x.clone().requires_grad_()
        dummy = synk.torch.send(x.sum(0), (comm.rank + 1) % comm.world_size)
        loss = (x * synk.torch.recv((comm.rank - 1) % comm.world_size)).sum()
        synk.torch.join_dummies(loss, [dummy]).backward()
        return x.grad

    x = torch.arange(6.0, dtype=F8).reshape(3, 2).requires_grad_()
    (x * x.sum(0)).sum().backward()
    f = shared_runtimes[2].function(body, outputs="gather", framework="torch")
    torch.testing.assert_close(f.serial(x.detach()), x.grad)
    one = x.detach()[:1].clone().requires_grad_()
    (one * one.sum(0)).sum().backward()
    torch.testing.assert_close(f(one.detach()), one.grad)


def test_a_message_without_like_has_its_own_look(shared_runtimes: Any) -> None:
    rt = shared_runtimes["inline"]

    def body(x: Any) -> bool:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.int16, torch.bool):
            for shape in ((), (0,), (2, 3), (1, 2, 1, 2, 1, 2)):
                sent = torch.ones(shape, dtype=dtype)
                synk.torch.send(sent, 0)
                got = synk.torch.recv(0)
                assert torch.equal(got.detach(), sent) and (got.dtype, got.shape) == (dtype, torch.Size(shape))
                assert got.requires_grad == (dtype.is_floating_point or dtype.is_complex)
                synk.torch.send(sent, 0)
                with torch.no_grad():
                    assert not synk.torch.recv(0).requires_grad
        return True

    assert rt.function(body, outputs="first", framework="torch")(torch.zeros(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_what_is_received_without_a_graph_can_be_returned(shared_runtimes: Any, dtype: Any) -> None:
    def body(x: Any) -> Any:
        synk.torch.send(x, (synk.comm.rank + 1) % synk.comm.world_size)
        return synk.torch.recv((synk.comm.rank - 1) % synk.comm.world_size)

    x = torch.arange(4.0).to(dtype)
    f = shared_runtimes[2].function(body, outputs="gather", framework="torch")
    assert torch.equal(f(x), x.roll(2))
    assert torch.equal(f.serial(x), x)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("verb", ["recv", "irecv"])
@pytest.mark.parametrize("peer", [None, -1, 2, 1.0, "tensor", "array"])
def test_a_receive_takes_a_rank_first(shared_runtimes: Any, verb: str, peer: Any) -> None:
    rt = shared_runtimes[2]

    def body(x: Any) -> Any:
        given = {"tensor": torch.zeros(2, requires_grad=True), "array": np.zeros(2)}.get(peer, peer)
        return getattr(synk.torch, verb)(given, 1)

    error = ValueError if peer in (-1, 2) else TypeError
    with same_workers(rt), pytest.raises(error, match=r"cannot recv: got peer=.*int from 0 to 1\. .*out=array"):
        rt.function(body, outputs=None, framework="torch")(torch.zeros(2))


def test_like_and_out_must_agree(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: synk.torch.recv(0, like=x, out=x[:, None].clone()), outputs=None, framework="torch")
    with same_workers(rt), pytest.raises(ValueError, match=r"cannot write to out: .*\(1, 1\).*\(1,\) as of like"):
        f(torch.zeros(2))


def test_seeds_of_replicate_are_those_of_the_ranks_of_the_runtime(shared_runtimes: Any) -> None:
    """A rank draws the same numbers whether or not others take part."""
    rt = shared_runtimes[3]
    rep = synk.torch.replicate(torch.nn.Linear(1, 1), runtime=rt, seed=5)
    rows = rt.shared(np.arange(3.0, dtype="f4"), sharded=True)
    draw = rep.function(lambda model, x: float(torch.rand(())), outputs=None, trains=False)
    whole = draw(rows)
    assert len(set(whole)) == 3
    for ranks in ((2,), (0, 2), (1, 2)):
        assert draw(rows, batch=list(ranks)) == [whole[rank] if rank in ranks else None for rank in range(3)]
