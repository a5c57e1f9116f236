"""What happens to ranks that ask for different things, leave, or wait for each other: for every CPU communicator.

The test of an implementation subclasses ``Disagreement`` and ``Messages``, and gives them a fixture ``trio``: a group
of three ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.conformance import KINDS, Step, assert_all_raise, check_results, perform
from support.shm_group import ShmEndpoint
from synk.errors import CollectiveMismatch

# Several pieces of a half, and more than a ring.
MANY = 10_000

AnyGroup = Any


def assert_works(group: AnyGroup) -> None:
    """Assert that a call with every kind of operation gives NumPy's results."""
    steps = [Step(kind, op="sum", count=count) for kind in KINDS for count in (5, MANY)]
    check_results(steps, group.run(perform, steps))


def assert_mismatch(outcomes: list[Any], *texts: str) -> None:
    """Assert that all outcomes are a CollectiveMismatch whose message holds all ``texts``."""
    assert_all_raise(outcomes, CollectiveMismatch)
    for outcome in outcomes:
        for text in texts:
            assert text in str(outcome)


def by_rank(endpoint: ShmEndpoint, functions: dict[int, Callable[[ShmEndpoint], Any]]) -> Any:
    """Run the function of this rank; do nothing where it has none."""
    function = functions.get(endpoint.comm.rank)
    return None if function is None else function(endpoint)


def step(*args: Any, **kwargs: Any) -> Callable[[ShmEndpoint], Any]:
    """Return a function that runs one ``Step``."""
    return lambda endpoint: perform(endpoint, [Step(*args, **kwargs)])[0]


def send(peer: int, array: np.ndarray, tag: int = 0) -> Callable[[ShmEndpoint], None]:
    """Return a function that sends ``array``."""
    return lambda endpoint: endpoint.comm.send_array(array, peer, tag)


def receive(peer: int, count: int, dtype: str, tag: int = 0) -> Callable[[ShmEndpoint], np.ndarray]:
    """Return a function that receives and returns an array."""
    return lambda endpoint: endpoint.comm.recv_array(np.zeros(count, dtype), peer, tag)


def in_turn(*functions: Callable[[ShmEndpoint], Any]) -> Callable[[ShmEndpoint], list[Any]]:
    """Return a function that runs all of them and returns their results."""
    return lambda endpoint: [function(endpoint) for function in functions]


REQUESTS = {
    "all_reduce(sum, float32, 8 elements)": step("all_reduce", op="sum", count=8),
    "all_reduce(max, float32, 8 elements)": step("all_reduce", op="max", count=8),
    "all_reduce(sum, int64, 8 elements)": step("all_reduce", "int64", op="sum", count=8),
    "all_reduce(sum, float32, 9 elements)": step("all_reduce", op="sum", count=9),
    f"all_reduce(sum, float32, {MANY} elements)": step("all_reduce", op="sum", count=MANY),
    "all_reduce(avg, float32, 8 elements)": step("all_reduce", op="avg", count=8),
    "all_reduce(avg, float32, 8 elements, weighted)": step("all_reduce", op="avg", count=8, weights=(0.2, 0.3, 0.5)),
    "reduce(sum, float32, 8 elements, root 0)": step("reduce", op="sum", count=8),
    "reduce(sum, float32, 8 elements, root 1)": step("reduce", op="sum", count=8, root_position=1),
    "reduce_scatter(sum, float32, 8 elements)": step("reduce_scatter", op="sum", count=8),
    "broadcast(float32, 8 elements, root 0)": step("broadcast", count=8),
    "broadcast(float32, 8 elements, root 1)": step("broadcast", count=8, root_position=1),
    "all_gather(float32, 8 elements)": step("all_gather", count=8),
    "barrier()": step("barrier"),
}


class Disagreement:
    @pytest.mark.parametrize("other", list(REQUESTS)[1:])
    @pytest.mark.sampled(90)
    def test_all_ranks_are_told_what_each_asked_for(self, trio: AnyGroup, other: str) -> None:
        usual = next(iter(REQUESTS))
        for odd in (0, 2):
            functions = {rank: REQUESTS[other if rank == odd else usual] for rank in range(3)}
            texts = [f"rank {rank}: {other if rank == odd else usual}" for rank in range(3)]
            assert_mismatch(trio.outcomes(by_rank, functions), *texts)
        assert_works(trio)

    def test_everybody_wants_something_else(self, trio: AnyGroup) -> None:
        functions = {0: step("barrier"), 1: step("broadcast"), 2: step("all_gather", count=MANY)}
        assert_mismatch(
            trio.outcomes(by_rank, functions), "rank 0: barrier()", "rank 1: broadcast(float32", f"{MANY} el"
        )
        assert_works(trio)

    @pytest.mark.parametrize("leaver", (0, 1, 2))
    @pytest.mark.parametrize("num_joined", (0, 1, 2))
    @pytest.mark.sampled(90)
    def test_a_rank_leaves(self, trio: AnyGroup, leaver: int, num_joined: int) -> None:
        joined = [step("all_reduce", op="sum", count=count) for count in (3, MANY)][:num_joined]
        functions = dict.fromkeys(range(3), in_turn(*joined, step("all_reduce", op="min", count=4)))
        functions[leaver] = in_turn(*joined)
        outcomes = trio.outcomes(by_rank, functions)
        assert not isinstance(outcomes.pop(leaver), BaseException)
        assert_mismatch(outcomes, f"rank {leaver} left", "all_reduce(min, float32, 4 elements)")
        assert_works(trio)

    def test_two_ranks_leave(self, trio: AnyGroup) -> None:
        outcome = trio.outcomes(by_rank, {1: step("barrier")})[1]
        assert_mismatch([outcome], "left the function without joining", "rank 1: barrier()")

    def test_an_exception_on_one_rank_ends_the_wait_of_the_others(self, trio: AnyGroup) -> None:
        functions = dict.fromkeys(range(3), step("barrier"))
        functions[1] = lambda endpoint: {}["missing"]
        outcomes = trio.outcomes(by_rank, functions)
        assert isinstance(outcomes.pop(1), KeyError)
        assert_mismatch(outcomes, "rank 1 left")

    def test_after_a_failure_the_call_has_no_more_collectives(self, trio: AnyGroup) -> None:
        def carry_on(endpoint: ShmEndpoint) -> tuple[str, str]:
            texts = []
            for _ in range(2):
                try:
                    REQUESTS["barrier()" if endpoint.comm.rank == 1 else "all_gather(float32, 8 elements)"](endpoint)
                except CollectiveMismatch as error:
                    texts.append(str(error))
            return texts[0], texts[1]

        for first, second in trio.run(carry_on):
            assert "asked for different ones" in first
            assert "an earlier operation of this call failed" in second
        assert_works(trio)


class Messages:
    too_many = MANY
    """More than a message that is sent without waiting for its receiver."""

    def test_any_order_of_tags(self, trio: AnyGroup) -> None:
        functions = {
            0: in_turn(*(send(1, np.full(count, tag), tag) for tag, count in ((1, 3), (2, MANY), (3, 0), (1, 5)))),
            1: in_turn(*(receive(0, count, "i8", tag) for tag, count in ((3, 0), (2, MANY), (1, 3), (1, 5)))),
        }
        _, received, _ = trio.run(by_rank, functions)
        assert [(each.size, *np.unique(each)) for each in received] == [(0,), (MANY, 2), (3, 1), (5, 1)]

    def test_everybody_sends_first(self, trio: AnyGroup) -> None:
        def exchange(endpoint: ShmEndpoint) -> list[float]:
            rank = endpoint.comm.rank
            for peer in range(3):
                send(peer, np.full(MANY, 10.0 * rank + peer))(endpoint)
            return [float(np.unique(receive(peer, MANY, "f8")(endpoint))[0]) for peer in (2, 0, 1)]

        assert trio.run(exchange) == [[20.0 + rank, rank, 10.0 + rank] for rank in range(3)]

    def test_what_was_sent_before_leaving_arrives(self, trio: AnyGroup) -> None:
        small = np.arange(100.0)
        _, received, _ = trio.run(by_rank, {0: send(1, small), 1: receive(0, 100, "f8")})
        np.testing.assert_array_equal(received, small)

    def test_what_nobody_received_is_gone_in_the_next_call(self, trio: AnyGroup) -> None:
        trio.run(by_rank, {0: send(1, np.zeros(3)), 2: in_turn(send(1, np.zeros(3)), send(2, np.zeros(3)))})
        _, received, _ = trio.run(by_rank, {0: send(1, np.ones(3)), 1: receive(0, 3, "f8")})
        np.testing.assert_array_equal(received, np.ones(3))

    @pytest.mark.parametrize(("count", "dtype"), ((4, "f8"), (2, "f8"), (3, "i8"), (MANY, "f8")))
    @pytest.mark.sampled(90)
    def test_another_count_or_dtype_is_refused(self, trio: AnyGroup, count: int, dtype: str) -> None:
        outcomes = trio.outcomes(by_rank, {0: send(1, np.zeros(3)), 1: receive(0, count, dtype)})
        assert_mismatch(outcomes[1:2], "3 elements of dtype float64", f"{count} elements")

    def test_a_rank_that_waits_in_a_collective_takes_in_what_it_is_sent(self, trio: AnyGroup) -> None:
        functions = {
            0: in_turn(send(1, np.arange(MANY)), step("barrier")),
            1: in_turn(step("barrier"), receive(0, MANY, "i8")),
            2: step("barrier"),
        }
        np.testing.assert_array_equal(trio.run(by_rank, functions)[1][1], np.arange(MANY))

    def test_the_other_side_leaves(self, trio: AnyGroup) -> None:
        outcomes = trio.outcomes(by_rank, {0: receive(1, 3, "f8"), 2: send(1, np.zeros(self.too_many), tag=4)})
        assert_mismatch(outcomes[:1], "rank 1 left", "recv(float64, 3 elements, from rank 1, tag 0)")
        assert_mismatch(outcomes[2:], "rank 1 left", f"send(float64, {self.too_many} elements, to rank 1, tag 4)")

    @pytest.mark.parametrize(
        "functions",
        (
            {rank: receive((rank + 1) % 3, 1, "f8") for rank in range(3)},
            {0: receive(1, 1, "f8"), 1: step("barrier"), 2: step("barrier")},
            {0: receive(1, 1, "f8"), 1: receive(0, 1, "f8")},
            {rank: receive(rank, 1, "f8") for rank in range(3)},
        ),
        ids=("ring", "recv-and-barrier", "pair-and-leaver", "each-from-itself"),
    )
    @pytest.mark.sampled(90)
    def test_all_wait_for_each_other(self, trio: AnyGroup, functions: dict[int, Any]) -> None:
        outcomes = trio.outcomes(by_rank, functions)
        assert_all_raise([outcomes[rank] for rank in functions], CollectiveMismatch)
        (text,) = {str(outcomes[rank]) for rank in functions}  # whoever has found it first
        assert "every rank waits for another one" in text
        assert all(f"rank {rank}: " in text for rank in functions)
        assert_works(trio)
