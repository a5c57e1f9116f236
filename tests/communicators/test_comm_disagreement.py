"""What has no meaning is refused and not started; ranks that disagree, leave or wait for each other are told by name.

Nobody hangs, the workers live on, and the next call is right (F6 and F7 of the fault table).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from support.places import on_each
from support.rank_arrays import assert_same, everywhere

import synk
from synk.errors import CollectiveMismatch, ReentrancyError, UnsupportedError


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


def do(comm: Any, program: str, **others: Any) -> Any:
    """Run a rank's program: calls of ``synk.comm``, with ``x(...)`` and ``d(...)`` for arrays of 4 and of 8 bytes."""
    names = {name: getattr(comm, name) for name in dir(comm) if not name.startswith("_")}
    arrays = {
        "x": lambda *shape: np.ones(shape, "f4"),
        "d": lambda *shape: np.zeros(shape),
        "i": lambda n: np.ones(n, "i8"),
    }
    return eval(program, {**names, **arrays, **others})


TAKE_AN_ARRAY = (
    *("send({}, 0)", "isend({}, 0)", "recv(0, like={})", "irecv(0, out={})", "gather({})", "scatter({})"),
    *("all_to_all({})", "broadcast({})", "all_gather({})", "all_gather({}, 0)", "all_reduce({}, 'max')"),
    *("reduce({}, 'max')", "reduce_scatter({}, 'max')"),
)
UNSUPPORTED = {"str1024": "U32", "datetime64[D]": "M8[D]", "void64": "i4,f4"}
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
    "read-only": lambda shape: np.frombuffer(np.zeros(shape).tobytes()).reshape(shape),
    "with gaps": lambda shape: np.zeros((*shape, 2))[..., 0],
    "a list": lambda shape: [0.0],
}

# All ranks ask for it alike, as in ``do``.
REFUSED: list[tuple[type[Exception], str, str]] = [
    (ValueError, "op 'mean'", "all_reduce(x(2), 'mean')"),
    (ValueError, "op 'mean'", "all_reduce(x(2), 'mean', async_op=True)"),
    (ValueError, "op 'gather'", "reduce_scatter(x(2), 'gather')"),
    (TypeError, "int64", "all_reduce(i(2))"),
    (TypeError, "cannot", "all_reduce(i(2), async_op=True)"),
    (TypeError, "bool", "all_reduce(x(2) > 0, 'sum')"),
    (TypeError, "complex", "all_reduce(x(2) * 1j, 'max')"),
    (TypeError, "object", "all_reduce(x(2).astype(object), 'sum')"),
    (TypeError, r"MaskedArray, which is .*value\.filled", "all_reduce(__import__('numpy').ma.ones(2), 'sum')"),
    (ValueError, "multiple of", "reduce_scatter(x(7), 'sum')"),
    (ValueError, "multiple of", "reduce_scatter(x()[()], 'sum')"),
    (ValueError, "cannot", "reduce_scatter(x(7), async_op=True)"),
    (ValueError, "root=9", "reduce(x(2), root=9)"),
    (ValueError, "root=-1", "broadcast(x(2), root=-1)"),
    (ValueError, "cannot", "broadcast(x(2), 7, async_op=True)"),
    (ValueError, "root=5", "gather(x(2), 5)"),
    (TypeError, "root=NoneType None", "scatter(x(2), None)"),
    (TypeError, "root=bool True", "broadcast(x(2), True)"),
    (ValueError, "without axes", "gather(x()[()])"),
    (ValueError, "number of its rows", "gather(x(3), sizes=[1] * world_size)"),
    (ValueError, "axis", "all_gather(x(2), 1)"),
    (ValueError, "without axes", "all_gather(x()[()], 0)"),
    (ValueError, "each of the", "all_to_all(x(3), sizes=[4] + [-1] * (world_size - 1))"),
    (ValueError, "each of the", "all_to_all(x(3), sizes=[3] * 9)"),
    (ValueError, "9", "send(x(2), 9)"),
    (ValueError, "tag=-1", "isend(x(3), 0, -1)"),
    (ValueError, "tag=9223372036854775808", "send(x(3), 0, 1 << 63)"),
    (TypeError, "integer", "all_to_all(x(3 * world_size), sizes=[3.5] * world_size)"),
    (ValueError, "-1", "recv(-1, like=x(2))"),
    (ValueError, "tag=0.5", "recv(0, 0.5)"),
    (ValueError, "out", "irecv(0, like=x(3), out=x(4))"),
    (ValueError, "out", "all_reduce(x(2), out=x(3), async_op=True)"),
    (TypeError, "positional", "recv(0, 1, x(5))"),
    (TypeError, "positional", "irecv(0, 1, x(5))"),
    *(  # MPI's first argument is a buffer: nothing would fill it
        (error, r"cannot recv: got peer=.*int from 0 to \d\. .*out=array", f"{verb}({peer}, 1)")
        for verb in ("recv", "irecv")
        for error, peers in (
            (TypeError, ("x(3)", "i(1).reshape(())", "[0]", "None", "0.0", "False", "'0'")),
            (ValueError, ("-1", "9", "i(1)[0] - 3")),
        )
        for peer in peers
    ),
]


@pytest.mark.parametrize("place", [3, "1+2"])
def test_what_has_no_meaning_is_refused_and_not_started(at: Any, place: Any, subtests: Any) -> None:
    """The rank may go on, also with what it has started before."""

    def refused(comm: Any) -> Any:
        before, found = comm.all_reduce(np.ones(2), "sum", async_op=True), []
        for _, _, program in REFUSED:
            try:
                do(comm, program)
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
    """On one rank, because only the root looks at what it scatters."""

    def body(comm: Any) -> None:
        for (name, dtype), program in itertools.product(UNSUPPORTED.items(), TAKE_AN_ARRAY):
            with pytest.raises(UnsupportedError, match=re.escape(f"dtype {name!r}")):
                do(comm, program.format(f"x(1).astype({dtype!r})"))

    on_each(at(0), body)


def test_an_out_that_does_not_fit_is_refused(at: Any, subtests: Any) -> None:
    def write(x: np.ndarray, verb: str, wrong: str) -> None:
        shape = OUT_SHAPES[verb](12, synk.comm.world_size)
        getattr(synk.comm, verb)(np.ones(12), out=WRONG_OUTS[wrong](shape))

    runtime = at(3)
    call = runtime.function(write, bcast_inputs=("verb", "wrong"), outputs=None)
    with same_workers(runtime):
        for verb, wrong in itertools.product(OUT_SHAPES, WRONG_OUTS):
            with subtests.test(case=f"{verb}, out is {wrong}"), pytest.raises(ValueError, match="cannot write to out"):
                call(np.zeros(3), verb, wrong)


TAKE_A_TENSOR = [
    each for each in TAKE_AN_ARRAY if each.split("(")[0] not in ("irecv", "scatter") and "}, 0" not in each
]


def test_a_tensor_that_requires_grad_is_refused(shared_runtimes: Any) -> None:
    """Its gradient would end there without a word. The same tensor detached is taken."""
    torch = pytest.importorskip("torch")

    def body(comm: Any) -> int:
        leaf = torch.ones(2, requires_grad=True)
        for program in TAKE_A_TENSOR:
            for tensor in (leaf, leaf * 2):
                verb = program.partition("(")[0]
                with pytest.raises(TypeError, match=rf"cannot {verb} a torch tensor: .*requires grad.*\.detach\(\)"):
                    do(comm, program.format("tensor"), tensor=tensor)
        return int(comm.all_reduce(leaf.detach(), "max").sum())

    assert on_each(shared_runtimes[2], body) == [2, 2]


def test_comm_has_no_meaning_in_the_master() -> None:
    assert repr(synk.comm) == "<synk.comm>"
    uses: list[Callable[[], Any]] = [
        lambda: synk.comm.rank,
        lambda: synk.comm.rows,
        lambda: synk.comm.all_reduce(np.zeros(2)),
        lambda: synk.comm.barrier(),
    ]
    for use in uses:
        with pytest.raises(ReentrancyError, match="only be used inside a function"):
            use()


# ----- collectives on which ranks do not agree


REQUESTS = {
    "all_reduce(sum, float32, 8 elements)": "all_reduce(x(8), 'sum')",
    "all_reduce(max, float32, 8 elements)": "all_reduce(x(8), 'max')",
    "all_reduce(sum, int64, 8 elements)": "all_reduce(i(8), 'sum')",
    "all_reduce(sum, float32, 9 elements)": "all_reduce(x(9), 'sum')",
    "all_reduce(sum, float32, 10000 elements)": "all_reduce(x(10_000), 'sum')",
    "all_reduce(avg, float32, 8 elements, weighted)": "all_reduce(x(8))",
    "reduce(sum, float32, 8 elements, root 0)": "reduce(x(8), 'sum')",
    "reduce(sum, float32, 8 elements, root 1)": "reduce(x(8), 'sum', 1)",
    "reduce_scatter(sum, float32, 4 elements)": "reduce_scatter(x(12))",
    "broadcast(float32, 8 elements, root 0)": "broadcast(x(8))",
    "broadcast(float32, 8 elements, root 1)": "broadcast(x(8), 1)",
    "all_gather(float32, 8 elements)": "all_gather(x(8))",
    "all_gather along an axis(": "all_gather(x(8), 0)",
    "gather(": "gather(x(8))",
    "scatter(": "scatter(x(12))",
    "all_to_all(": "all_to_all(x(12))",
    "barrier()": "barrier()",
}
USUAL = next(iter(REQUESTS))

# What the three ranks do; to whom it is said; what is said, in parts separated by "...".
DISAGREEMENTS: dict[str, tuple[str, str, str]] = {}
for number, other in enumerate(REQUESTS):
    asked = [other if rank == number % 3 else USUAL for rank in range(3)]
    if number:
        said = "...".join(f"rank {rank}: {text}" for rank, text in enumerate(asked))
        DISAGREEMENTS[f"rank {number % 3} wants {other}"] = " | ".join(REQUESTS[each] for each in asked), "012", said
for leaver, joined in enumerate(["", "all_reduce(x(3)),", "all_reduce(x(3)), all_reduce(x(10_000)),"]):
    programs = [f"[{joined} {'' if rank == leaver else 'all_reduce(x(4))'}]" for rank in range(3)]
    told = "012".replace(str(leaver), "")
    DISAGREEMENTS[f"rank {leaver} leaves after {joined}"] = " | ".join(programs), told, f"{leaver} left...all_reduce("
for verb in ("all_reduce", "gather", "scatter"):
    DISAGREEMENTS[f"rank 1 leaves in {verb}"] = f"{verb}(x(3)) | 0 | {verb}(x(3))", "02", "rank 1 left the function"

STUCK = "every rank waits for another one"
SHAPES = "cannot gather: got rows of shape (2, 3) from rank 1, expected (3, 2) as from rank 0."
MANY_SHAPES = "cannot all_to_all: got rows of shape (3, 1) from rank 2, expected (3,) as from rank 0."
LONG = "rank 1 left...send(float64, 2000000 elements, to rank 1, tag 4)"
DISAGREEMENTS |= {
    "wishes": ("barrier() | broadcast(x(8)) | all_gather(x(9_000))", "012", "0: barrier()...1: broadcast(f...9000 el"),
    "a node leaves": ("barrier() | 0 | 0", "0", "left the function without joining...waiting: rank 0: barrier()"),
    "two leave": ("0 | barrier() | 0", "1", "left the function without joining...waiting: rank 1: barrier()"),
    "started": (
        "all_gather(x(2), async_op=True).wait()" + 2 * " | all_reduce(x(2), async_op=True).wait()",
        "012",
        "0: all_gather...1: all_reduce",
    ),
    "shapes": ("gather(x(2, 3, 2)) | gather(x(2, 2, 3)) | gather(x(2, 3, 2))", "012", SHAPES),
    "shapes of many": (2 * "all_to_all(x(60_000, 3)) | " + "all_to_all(x(60_000, 3, 1))", "012", MANY_SHAPES),
    "lengths": ("gather(x(2, 1)) | gather(x(2, 2)) | gather(x(2, 1))", "012", "1 elements...2 elements"),
    "axes": ("all_gather(x(2, 3), 0)" + 2 * " | all_gather(x(2, 3), 1)", "012", "3 elements...2 elements"),
    "no axis": ("all_gather(x(1))" + 2 * " | all_gather(x(1), 0)", "012", "along an axis"),
    "roots": ("gather(x(1), 0) | gather(x(1), 1) | gather(x(1), 2)", "012", "root 0...root 1...root 2"),
    "elements": ("send(d(3), 1) | recv(0, like=d(4)) | 0", "1", "3 elements of dtype float64...4 elements"),
    "dtypes": ("send(d(3), 1) | recv(0, like=i(3)) | 0", "1", "dtype float64...int64"),
    "a shorter one": (
        "isend(d(3), 1) | recv(0, like=d(9_000)) | 0",
        "1",
        "3 elements of dtype float64...9000 elements",
    ),
    "no sender": ("recv(1, like=d(3)) | 0 | 0", "0", "rank 1 left...recv(float64, 3 elements, from rank 1, tag 0)"),
    "no receiver": ("0 | 0 | send(d(2_000_000), 1, 4)", "12", LONG),  # whichever of the two sees it first
    "a ring": ("recv(1) | recv(2) | recv(0, 2)", "012", f"{STUCK}...rank 2: recv(any array, from rank 0, tag 2"),
    "each itself": ("recv(0) | recv(1) | recv(2, 1)", "012", f"{STUCK}...recv(any array, from rank 2, tag 1"),
    "a recv": ("recv(1, like=d(1)) | barrier() | barrier()", "012", f"{STUCK}...0: recv(float64, 1 el...2: barrier()"),
    "a pair": ("recv(1) | recv(0) | 0", "01", f"{STUCK}...rank 1: recv(any array, from rank 0"),
}


AMONG_NODES = "tag -1) of rank "
"""Said of a message by which nodes agree on a collective, if a rank leaves that another has written to before."""


def disagree(comm: Any, name: str) -> str:
    """Do what this rank does. If all ranks are to be told, return what it is told; what follows is refused then."""
    programs, told, _ = DISAGREEMENTS[name]
    comm.barrier()
    try:
        do(comm, programs.split(" | ")[comm.rank])
    except CollectiveMismatch as error:
        if len(told) < 3:
            raise
        with pytest.raises(CollectiveMismatch, match="an earlier operation of this call failed"):
            comm.barrier()
        return str(error)
    return ""


@pytest.mark.parametrize("place", [3, "little memory", "1+2"])
def test_ranks_that_disagree_are_told_what_each_asked_for(at: Any, place: Any, subtests: Any) -> None:
    runtime = at(place)
    call = runtime.function(lambda x, name: disagree(synk.comm, name), bcast_inputs="name", outputs=None)
    with same_workers(runtime):
        for number, (name, (_, told, said)) in enumerate(DISAGREEMENTS.items()):
            with subtests.test(case=name):
                if len(told) == 3:
                    (text,) = set(call(np.zeros(3), name))
                else:
                    with pytest.raises(CollectiveMismatch) as caught:
                        call(np.zeros(3), name)
                    text = str(caught.value)
                    if place == "1+2" and AMONG_NODES in text:
                        continue
                    assert str(caught.value.__cause__.rank) in told  # type: ignore[union-attr]
                assert [words for words in said.split("...") if words not in text] == []
                if number % 8 == 0:
                    assert_works(runtime)
        assert_works(runtime)


# ----- what a function leaves behind


# What ranks 0 and 1 do, and the others. The second: it is taken in while a later one is received; third: in a wait.
UNRECEIVED = (
    "isend({}, 1, 4) | 0 | 0",
    "[isend({}, 1, 4), isend(d(1), 1, 5)] | recv(0, 5) | 0",
    "[send({}, 1, 4), barrier()] | barrier() | barrier()",
)


@pytest.mark.parametrize("place", [2, "1+2"])
def test_a_message_that_nobody_receives_is_an_error_at_any_size(at: Any, place: Any, subtests: Any) -> None:
    """What the ranks have assigned before is not kept."""
    runtime = at(place)
    w = runtime.shared(np.zeros(2))

    def run(x: np.ndarray, programs: str) -> float:
        w.value = w.value + 1
        do(synk.comm, programs.split(" | ")[synk.comm.rank])
        return 0.0

    call = runtime.function(run, bcast_inputs="programs")
    for programs, count in itertools.product(UNRECEIVED, (1, 2_000_000)):
        text, case = rf"send\(float64, {count} elements, to rank 1, tag 4\)", programs.format(f"d({count})")
        with subtests.test(case=case), same_workers(runtime), pytest.raises(CollectiveMismatch, match=text):
            call(np.zeros(runtime.world_size), case)
    assert_same(everywhere(runtime, w), [np.zeros(2)] * runtime.world_size)
    assert_works(runtime)


def poll(comm: Any) -> None:
    request = comm.irecv(1) if comm.rank == 0 else None
    while request is not None and not request.test():
        pass


def forget(comm: Any) -> None:
    comm.irecv(1 - comm.rank)
    if comm.rank == 1:
        comm.isend(np.ones(300_000), 0)


def to_oneself(comm: Any) -> None:
    comm.send(np.arange(4.0), 0, 1)


LEFT: list[tuple[Callable[[Any], None], tuple[Any, ...], str]] = [
    (poll, (2, "1+1"), "left the function without sending"),
    (forget, (2, "1+1"), "left the function without sending"),
    (to_oneself, (0, 1), "rank 0 left the function without receiving"),
]


def test_what_is_asked_for_and_does_not_come(shared_runtimes: Any, subtests: Any) -> None:
    for body, places, text in LEFT:
        for place in places:
            runtime = shared_runtimes[place]
            with (
                subtests.test(case=body.__name__, place=place),
                same_workers(runtime),
                pytest.raises(CollectiveMismatch, match=text),
            ):
                on_each(runtime, body, **({"timeout": 60} if place else {}))


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
