"""What has no meaning is refused and not started; ranks that disagree, leave or wait for each other are told by name.

Nobody hangs, the workers live on, and the next call is right.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.places import PLACES, SEVERAL_RANKS, on_each
from support.rank_arrays import assert_same, everywhere

import synk
from synk.errors import CollectiveMismatch, ReentrancyError, UnsupportedError

Body = Callable[[Any], Any]

MANY = 10_000
"""Elements: several pieces of what ranks with little memory show, more than one of their rings."""


def assert_works(runtime: Any) -> None:
    """Assert that the ranks reach each other, by short and by long arrays, messages and collectives."""

    def talk(comm: Any) -> Any:
        after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        total = 0.0
        for count in (1, 100_000):
            comm.isend(np.full(count, comm.rank), after)
            total += comm.recv(before)[-1] + comm.all_reduce(np.full(count, comm.rank), "sum")[-1]
        return float(total)

    size = runtime.world_size
    total = size * (size - 1) / 2
    assert on_each(runtime, talk) == [2.0 * ((rank - 1) % size + total) for rank in range(size)]


# ----- what has no meaning


def read_only(shape: Any) -> np.ndarray:
    array = np.zeros(shape)
    array.flags.writeable = False
    return array


STRANGE = {
    "str32": np.array(["a"]),
    "datetime64[D]": np.array(["2020-01-01"], "M8[D]"),
    "timedelta64[s]": np.array([1], "m8[s]"),
    "bytes16": np.array([b"ab"]),
    "void64": np.zeros(1, "i4,f4"),
}
VERBS: dict[str, Any] = {
    "send": lambda comm, x: comm.send(x, 0),
    "isend": lambda comm, x: comm.isend(x, 0),
    "recv": lambda comm, x: comm.recv(0, like=x),
    "irecv": lambda comm, x: comm.irecv(0, out=x.copy()),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_gather along an axis": lambda comm, x: comm.all_gather(x, 0),
    "all_reduce": lambda comm, x: comm.all_reduce(x, "max"),
    "reduce": lambda comm, x: comm.reduce(x, "max"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, "max"),
}
OUT_SHAPES: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda length, size: (length,),
    "broadcast": lambda length, size: (length,),
    "all_to_all": lambda length, size: (length,),
    "all_gather": lambda length, size: (size, length),
    "gather": lambda length, size: (size * length,),
    "scatter": lambda length, size: (length // size,),
    "reduce_scatter": lambda length, size: (length // size,),
}
WRONG_OUTS: dict[str, Callable[[Any], Any]] = {
    "of another shape": lambda shape: np.zeros((2, *shape)),
    "of another dtype": lambda shape: np.zeros(shape, "f4"),
    "read-only": read_only,
    "with gaps": lambda shape: np.zeros((*shape, 2))[..., 0],
    "a list": lambda shape: [0.0],
}

# Everything is asked for by all ranks alike. What is said of it; how it is asked for.
REFUSED: list[tuple[type[Exception], str, Body]] = [
    (ValueError, "op 'mean'", lambda comm: comm.all_reduce(np.ones(2), "mean")),
    (ValueError, "op 'mean'", lambda comm: comm.iall_reduce(np.ones(2), "mean")),
    (ValueError, "op 'gather'", lambda comm: comm.reduce_scatter(np.ones(2), "gather")),
    (TypeError, "int64", lambda comm: comm.all_reduce(np.ones(2, int))),
    (TypeError, "cannot", lambda comm: comm.iall_reduce(np.ones(2, int))),
    (TypeError, "bool", lambda comm: comm.all_reduce(np.ones(2, bool), "sum")),
    (TypeError, "complex", lambda comm: comm.all_reduce(np.ones(2, complex), "max")),
    (TypeError, "object", lambda comm: comm.all_reduce(np.array([None]), "sum")),
    (TypeError, r"MaskedArray, which has .*value\.filled", lambda comm: comm.all_reduce(np.ma.ones(2), "sum")),
    (ValueError, "multiple of", lambda comm: comm.reduce_scatter(np.ones(7), "sum")),
    (ValueError, "multiple of", lambda comm: comm.reduce_scatter(np.float64(3), "sum")),
    (ValueError, "cannot", lambda comm: comm.ireduce_scatter(np.ones(7))),
    (ValueError, "root=9", lambda comm: comm.reduce(np.ones(2), root=9)),
    (ValueError, "root=-1", lambda comm: comm.broadcast(np.ones(2), root=-1)),
    (ValueError, "cannot", lambda comm: comm.ibroadcast(np.ones(2), 7)),
    (ValueError, "root=5", lambda comm: comm.gather(np.ones(2), 5)),
    (TypeError, "root=NoneType None", lambda comm: comm.scatter(np.ones(2), None)),
    (TypeError, "root=bool True", lambda comm: comm.broadcast(np.ones(2), True)),
    (ValueError, "without axes", lambda comm: comm.gather(np.float64(1))),
    (ValueError, "number of its rows", lambda comm: comm.gather(np.ones(3), sizes=[1] * comm.world_size)),
    (ValueError, "axis", lambda comm: comm.all_gather(np.ones(2), 1)),
    (ValueError, "without axes", lambda comm: comm.all_gather(np.float64(1), 0)),
    (ValueError, "each of the", lambda comm: comm.all_to_all(np.ones(3), sizes=[4] + [-1] * (comm.world_size - 1))),
    (ValueError, "each of the", lambda comm: comm.all_to_all(np.ones(3), sizes=[3] * 9)),
    (ValueError, "9", lambda comm: comm.send(np.ones(2), 9)),
    (ValueError, "tag=-1", lambda comm: comm.isend(np.ones(3), 0, -1)),
    (ValueError, "-1", lambda comm: comm.recv(-1, like=np.ones(2))),
    (ValueError, "tag=0.5", lambda comm: comm.recv(0, 0.5)),
    (ValueError, "out", lambda comm: comm.irecv(0, like=np.ones(3), out=np.ones(4))),
    (ValueError, "out", lambda comm: comm.iall_reduce(np.ones(2), out=np.empty(3))),
    (TypeError, "positional", lambda comm: comm.recv(0, 1, np.ones(5))),
    (TypeError, "positional", lambda comm: comm.irecv(0, 1, np.ones(5))),
    *(  # MPI's first argument is a buffer: nothing would fill it
        (error, r"cannot recv: got peer=.*int from 0 to \d\. .*out=array", lambda comm, verb=verb, peer=peer: verb(comm)(peer, 1))
        for verb in (lambda comm: comm.recv, lambda comm: comm.irecv)
        for error, peers in (
            (TypeError, (np.zeros(3), np.array(0), [0], None, 0.0, False, "0")),
            (ValueError, (-1, 9, np.int64(-2))),
        )
        for peer in peers
    ),
]  # fmt: skip


@pytest.mark.parametrize("place", [3, "1+2"])
def test_what_has_no_meaning_is_refused_and_not_started(at: Any, place: Any, subtests: Any) -> None:
    """The rank may go on, also with what it has started before."""

    def refused(comm: Any) -> Any:
        before, found = comm.iall_reduce(np.ones(2), "sum"), []
        for _, _, ask in REFUSED:
            try:
                ask(comm)
                found.append(("", ""))
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        assert before.wait()[0] == comm.all_reduce(np.ones(2), "sum")[0] == comm.world_size
        return repr(found)

    for rank, text in enumerate(on_each(at(place), refused)):
        for number, ((error, words, _), (name, said)) in enumerate(zip(REFUSED, eval(text), strict=True)):
            with subtests.test(case=f"{number}: {words}", rank=rank):
                assert name == error.__name__
                assert re.search(words, said)


def test_errors_of_dtypes_name_the_dtype(at: Any) -> None:
    def body(comm: Any) -> Any:
        for name, array in STRANGE.items():
            for ask in VERBS.values():
                with pytest.raises(UnsupportedError, match=re.escape(f"dtype {name!r}")):
                    ask(comm, array)
        comm.send(np.ones(3), 0)
        return comm.all_reduce(comm.recv(0), "sum").tolist()

    assert on_each(at("inline"), body) == [[1.0, 1.0, 1.0]]


def test_an_out_that_does_not_fit_is_refused(at: Any, subtests: Any) -> None:
    def write(x: np.ndarray, verb: str, wrong: str, length: int) -> None:
        shape = OUT_SHAPES[verb](length, synk.comm.world_size)
        getattr(synk.comm, verb)(np.ones(length), out=WRONG_OUTS[wrong](shape))

    runtime = at(3)
    call = runtime.function(write, bcast_inputs=("verb", "wrong", "length"), outputs=None)
    with same_workers(runtime):
        for verb, wrong, length in itertools.product(OUT_SHAPES, WRONG_OUTS, (12, 120_000)):
            with subtests.test(case=f"{verb}, out is {wrong}"), pytest.raises(ValueError, match="cannot write to out"):
                call(np.zeros(3), verb, wrong, length)


TAKES_TENSORS = [verb for verb in VERBS if verb not in ("irecv", "all_gather along an axis", "scatter")]


@pytest.mark.parametrize("framework", [None, "torch"])
def test_a_tensor_that_requires_grad_is_refused(shared_runtimes: Any, framework: Any) -> None:
    """Its gradient would end there without a word. The same tensor detached is taken."""
    pytest.importorskip("torch")

    def body(x: Any) -> Any:
        import torch

        leaf = torch.ones(2, requires_grad=True)
        for verb in TAKES_TENSORS:
            for tensor in (leaf, leaf * 2):
                with pytest.raises(TypeError, match=rf"cannot {verb} a torch tensor: .*requires grad.*\.detach\(\)"):
                    VERBS[verb](synk.comm, tensor)
        return int(VERBS["all_reduce"](synk.comm, leaf.detach()).sum())

    assert shared_runtimes[2].function(body, outputs=None, framework=framework)(np.arange(2.0)) == [2, 2]


def test_comm_has_no_meaning_in_the_master() -> None:
    assert repr(synk.comm) == "<synk.comm>"
    uses: list[Callable[[], Any]] = [
        lambda: synk.comm.rank,
        lambda: synk.comm.rows,
        lambda: synk.comm.all_reduce(np.zeros(2)),
        lambda: synk.comm.barrier(),
    ]
    for use in uses:
        with pytest.raises(ReentrancyError, match="only inside a function"):
            use()


# ----- collectives on which ranks do not agree


def ask(verb: str, *args: Any, count: Any = 8, dtype: str = "f4", **options: Any) -> Body:
    """Return a body that calls a collective with ones."""
    return lambda comm: getattr(comm, verb)(np.ones(count, dtype), *args, **options)


def barrier(comm: Any) -> None:
    comm.barrier()


def leave(comm: Any) -> None:
    """Join nothing."""


REQUESTS: dict[str, Body] = {
    "all_reduce(sum, float32, 8 elements)": ask("all_reduce", "sum"),
    "all_reduce(max, float32, 8 elements)": ask("all_reduce", "max"),
    "all_reduce(sum, int64, 8 elements)": ask("all_reduce", "sum", dtype="i8"),
    "all_reduce(sum, float32, 9 elements)": ask("all_reduce", "sum", count=9),
    f"all_reduce(sum, float32, {MANY} elements)": ask("all_reduce", "sum", count=MANY),
    "all_reduce(avg, float32, 8 elements, weighted)": ask("all_reduce"),
    "reduce(sum, float32, 8 elements, root 0)": ask("reduce", "sum"),
    "reduce(sum, float32, 8 elements, root 1)": ask("reduce", "sum", 1),
    "reduce_scatter(sum, float32, 4 elements)": ask("reduce_scatter", count=12),
    "broadcast(float32, 8 elements, root 0)": ask("broadcast"),
    "broadcast(float32, 8 elements, root 1)": ask("broadcast", 1),
    "all_gather(float32, 8 elements)": ask("all_gather"),
    "all_gather along an axis(": ask("all_gather", 0),
    "gather(": ask("gather"),
    "scatter(": ask("scatter", count=12),
    "all_to_all(": ask("all_to_all", count=12),
    "barrier()": barrier,
}
USUAL = next(iter(REQUESTS))


def receive(peer: int, count: int = 1, dtype: str = "f8") -> Body:
    return lambda comm: comm.recv(peer, like=np.zeros(count, dtype))


def send(peer: int, count: int, tag: int = 0) -> Body:
    return lambda comm: comm.send(np.zeros(count), peer, tag)


def in_turn(*bodies: Body) -> Body:
    return lambda comm: [body(comm) for body in bodies]


def by_next(comm: Any) -> Any:
    return comm.recv((comm.rank + 1) % 3, comm.rank)


def by_itself(comm: Any) -> Any:
    return comm.recv(comm.rank, comm.rank)


# What the three ranks do; whom it is said to; what is said.
Disagreement = tuple[tuple[Body, Body, Body], tuple[int, ...], tuple[str, ...]]
DISAGREEMENTS: dict[str, Disagreement] = {
    **{
        f"rank {odd} wants {other}": (
            tuple(REQUESTS[other if rank == odd else USUAL] for rank in range(3)),  # type: ignore[dict-item]
            (0, 1, 2),
            tuple(f"rank {rank}: {other if rank == odd else USUAL}" for rank in range(3)),
        )
        for number, other in enumerate(list(REQUESTS)[1:])
        for odd in (number % 3,)
    },
    **{
        f"rank {leaver} leaves after {num_joined}": (
            tuple(  # type: ignore[dict-item]
                in_turn(*joined, *[ask("all_reduce", "min", count=4)] * (rank != leaver)) for rank in range(3)
            ),
            tuple(rank for rank in range(3) if rank != leaver),
            (f"rank {leaver} left", "all_reduce(min, float32, 4 elements)"),
        )
        for leaver, num_joined in ((0, 0), (1, 1), (2, 2))
        for joined in ([ask("all_reduce", "sum", count=3), ask("all_reduce", "sum", count=MANY)][:num_joined],)
    },
    "all want something else": (
        (barrier, ask("broadcast"), ask("all_gather", count=MANY)),
        (0, 1, 2),
        ("rank 0: barrier()", "rank 1: broadcast(float32", f"{MANY} el"),
    ),
    "two ranks leave": (
        (leave, barrier, leave),
        (1,),
        ("left the function without joining", "waiting: rank 1: barrier()"),
    ),
    **{
        f"rank 1 leaves in {verb}": (
            (in_turn(barrier, ask(verb, count=3)), barrier, in_turn(barrier, ask(verb, count=3))),
            (0, 2),
            ("rank 1 left the function",),
        )
        for verb in ("all_reduce", "gather", "scatter")
    },
    "started ones differ": (
        (lambda comm: comm.iall_gather(np.ones(2)).wait(), *[lambda comm: comm.iall_reduce(np.ones(2), "sum").wait()] * 2),
        (0, 1, 2),
        ("rank 0: all_gather", "rank 1: all_reduce", "rank 2: all_reduce"),
    ),
    "rows differ in shape": (
        (ask("gather", count=(2, 3, 2)), ask("gather", count=(2, 2, 3)), ask("gather", count=(2, 3, 2))),
        (0, 1, 2),
        ("cannot gather: got rows of shape (2, 3) from rank 1, expected (3, 2) as from rank 0.",),
    ),
    "many rows differ in shape": (
        (ask("all_to_all", count=(60_000, 3)), ask("all_to_all", count=(60_000, 3)), ask("all_to_all", count=(60_000, 3, 1))),
        (0, 1, 2),
        ("cannot all_to_all: got rows of shape (3, 1) from rank 2, expected (3,) as from rank 0.",),
    ),
    "rows differ in length": (
        (ask("gather", count=(2, 1)), ask("gather", count=(2, 2)), ask("gather", count=(2, 1))),
        (0, 1, 2),
        ("1 elements", "2 elements"),
    ),
    "axes differ": (
        (ask("all_gather", 0, count=(2, 3)), ask("all_gather", 1, count=(2, 3)), ask("all_gather", 0, count=(2, 3))),
        (0, 1, 2),
        ("3 elements", "2 elements"),
    ),
    "one has no axis": (
        (ask("all_gather", count=1), ask("all_gather", 0, count=1), ask("all_gather", count=1)),
        (0, 1, 2),
        ("along an axis",),
    ),
    "roots differ": (
        (ask("gather", 0), ask("gather", 1), ask("gather", 2)),
        (0, 1, 2),
        ("root 0", "root 1", "root 2"),
    ),
    "a message has other elements": ((send(1, 3), receive(0, 4), leave), (1,), ("3 elements of dtype float64", "4 elements")),
    "a message has another dtype": ((send(1, 3), receive(0, 3, "i8"), leave), (1,), ("dtype float64", "int64")),
    "a long message has fewer": (
        (lambda comm: comm.isend(np.zeros(3), 1), receive(0, MANY), leave),
        (1,),
        ("3 elements of dtype float64", f"{MANY} elements"),
    ),
    "the sender leaves": ((receive(1, 3), leave, leave), (0,), ("rank 1 left", "recv(float64, 3 elements, from rank 1, tag 0)")),
    "nobody takes a message": (
        (leave, leave, send(1, 2_000_000, 4)),
        (2,),
        ("rank 1 left", "send(float64, 2000000 elements, to rank 1, tag 4)"),
    ),
    "all wait for the next": ((by_next, by_next, by_next), (0, 1, 2), ("every rank waits for another one", "tag 2")),
    "all wait for themselves": ((by_itself, by_itself, by_itself), (0, 1, 2), ("every rank waits for another one", "tag 2")),
    "a recv and a barrier": (
        (receive(1), barrier, barrier),
        (0, 1, 2),
        ("every rank waits for another one", "rank 0: recv(float64, 1 elements, from rank 1, tag 0)", "rank 2: barrier()"),
    ),
    "a pair and a leaver": (
        (receive(1), receive(0), leave),
        (0, 1),
        ("every rank waits for another one", "rank 1: recv(float64, 1 elements, from rank 0, tag 0)"),
    ),
}  # fmt: skip


def disagree(comm: Any, name: str) -> str:
    """Do what this rank does. If all ranks are to be told, return what it is told; what follows is refused then."""
    bodies, ranks, _ = DISAGREEMENTS[name]
    barrier(comm)
    try:
        bodies[comm.rank](comm)
    except CollectiveMismatch as error:
        if len(ranks) < 3:
            raise
        with pytest.raises(CollectiveMismatch, match="an earlier operation of this call failed"):
            comm.barrier()
        return str(error)
    return ""


@pytest.mark.parametrize("place", [3, "little memory", "blind", "1+2"])
def test_ranks_that_disagree_are_told_what_each_asked_for(at: Any, place: Any, subtests: Any) -> None:
    runtime = at(place)
    call = runtime.function(lambda x, name: disagree(synk.comm, name), bcast_inputs="name", outputs=None)
    with same_workers(runtime):
        for number, (name, (_, ranks, words)) in enumerate(DISAGREEMENTS.items()):
            with subtests.test(case=name):
                if len(ranks) == 3:
                    (text,) = set(call(np.zeros(3), name))
                else:
                    with pytest.raises(CollectiveMismatch) as caught:
                        call(np.zeros(3), name)
                    assert caught.value.__cause__.rank in ranks  # type: ignore[union-attr]
                    text = str(caught.value)
                assert [word for word in words if word not in text] == []
                if number % 4 == 0:
                    assert_works(runtime)
        assert_works(runtime)


def test_a_node_leaves_without_joining(shared_runtimes: Any, subtests: Any) -> None:
    """Also one none of whose ranks has communicated."""
    for place, joins in itertools.product(("1+3", "2+2"), ("0", "3", "01", "123")):
        runtime = shared_runtimes[place]
        text = rf"ranks? [^{joins}]+ left the function without joining it; waiting: rank [{joins}]: barrier"
        with subtests.test(case=f"{joins} of {place}"), same_workers(runtime):
            with pytest.raises(CollectiveMismatch, match=text):
                on_each(runtime, lambda comm, joins=joins: comm.barrier() if str(comm.rank) in joins else None)
            assert_works(runtime)


# ----- what a function leaves behind


def unasked_for(count: int) -> Body:
    return lambda comm: comm.isend(np.ones(count), 1, 4) if comm.rank == 0 else None


def taken_in(count: int) -> Body:
    """Send a message that its receiver takes in while it receives a later one."""

    def body(comm: Any) -> None:
        if comm.rank == 0:
            comm.isend(np.ones(count), 1, 4)
            comm.isend(np.ones(1), 1, 5)
        elif comm.rank == 1:
            comm.recv(0, 5)

    return body


def waited_with(count: int) -> Body:
    """Send a message that its receiver takes in while it waits for all."""
    return lambda comm: [comm.send(np.ones(count), 1, 4) if comm.rank == 0 else None, comm.barrier()]


@pytest.mark.parametrize("place", [2, "blind", "1+2"])
def test_a_message_that_nobody_receives_is_an_error_at_any_size(at: Any, place: Any, subtests: Any) -> None:
    """What the ranks have assigned before is not kept."""
    runtime = at(place)
    w = runtime.shared(np.zeros(2))

    def run(x: np.ndarray, number: int) -> float:
        w.value = w.value + 1
        bodies[number](synk.comm)
        return 0.0

    counts = (1, 500, 2_000_000)
    bodies = [make(count) for make in (unasked_for, taken_in, waited_with) for count in counts]
    call = runtime.function(run, bcast_inputs="number")
    for number, count in enumerate(counts * 3):
        with subtests.test(case=number), same_workers(runtime):
            with pytest.raises(CollectiveMismatch, match=rf"send\(float64, {count} elements, to rank 1, tag 4\)"):
                call(np.zeros(runtime.world_size), number)
    assert_same(everywhere(runtime, w), [np.zeros(2)] * runtime.world_size)
    assert_works(runtime)


def test_what_is_asked_for_and_does_not_come(shared_runtimes: Any) -> None:
    def poll(comm: Any) -> None:
        request = comm.irecv(1) if comm.rank == 0 else None
        while request is not None and not request.test():
            pass

    def forget(comm: Any) -> None:
        comm.irecv(1 - comm.rank)
        if comm.rank == 1:
            comm.isend(np.ones(300_000), 0)

    for place in (2, "1+1"):
        for body in (poll, forget):
            with same_workers(shared_runtimes[place]):
                with pytest.raises(CollectiveMismatch, match="left the function without sending"):
                    on_each(shared_runtimes[place], body, timeout=60)


@pytest.mark.parametrize("place", ["inline", 1])
def test_a_message_to_oneself_that_is_not_received(at: Any, place: Any) -> None:
    with pytest.raises(CollectiveMismatch, match="rank 0 left the function without receiving"):
        on_each(at(place), lambda comm: comm.send(np.arange(4.0), 0, 1))


@pytest.mark.parametrize("place", [3, "1+2"])
def test_an_exception_on_one_rank_is_the_error_and_not_the_wait_of_its_peers(at: Any, place: Any) -> None:
    runtime = at(place)

    def body(comm: Any) -> Any:
        request = comm.ibroadcast(np.ones(1_000_000), 0) if is_started else None
        if comm.rank == victim:
            raise LookupError(f"rank {victim} has no data")
        return comm.all_reduce(np.ones(300_000)) if request is None else request.wait()

    for victim, is_started in itertools.product((0, 2), (False, True)):
        with same_workers(runtime), pytest.raises(LookupError, match=f"rank {victim} has no data"):
            on_each(runtime, body)


@pytest.mark.parametrize("place", [3, "1+2"])
def test_errors_name_the_ranks_of_the_runtime(at: Any, place: Any) -> None:
    """Not those of the call, which are fewer."""
    runtime = at(place)
    x = runtime.shared(np.arange(6.0), sharded=True)
    f = runtime.function(lambda x: synk.comm.recv(1 - synk.comm.rank, 4), outputs=None)
    text = "rank 1: recv(any array, from rank 2, tag 4); rank 2: recv(any array, from rank 1"
    with same_workers(runtime), pytest.raises(CollectiveMismatch, match=re.escape(text)):
        f(x, batch=[2, 4])
    with pytest.raises(ValueError, match=r"got peer=1, expected .* an int from 0 to 0\."):
        f.serial(np.zeros(4))
    with pytest.raises(ValueError, match=r"got root=1, expected a rank of this call, an int from 0 to 0\."):
        runtime.function(lambda x: synk.comm.broadcast(x[:1], 1), outputs=None)(x, batch=[5])
