"""Collectives through shared memory: the conformance suite, then ranks that disagree, leave, die and come back."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
from support import conformance, disagreement, offers
from support.conformance import (
    KINDS,
    REDUCTIONS,
    CommunicatorConformance,
    Step,
    assert_all_raise,
    broadcast_from,
    check_results,
    exchange_in_order,
    itemsize,
    perform,
    reduce_array,
)
from support.disagreement import (
    MANY,
    Disagreement,
    Messages,
    assert_mismatch,
    assert_works,
    receive,
    send,
)
from support.offers import offering
from support.shm_group import ShmEndpoint, ShmGroup, shm_group
from support.worker_group import Died

from synk._pure.tensors import array_of
from synk._wire.memory import Segment
from synk.communicators import Buffer, _layout, _rendezvous, _shm_collectives
from synk.communicators._buffers import as_array, as_buffer, named_dtype
from synk.communicators._layout import ControlLayout, SegmentLayout, required_nbytes
from synk.communicators._rendezvous import CommRequest, reset, set_abort
from synk.communicators._shm import Aborted, ShmCommunicator
from synk.errors import CollectiveMismatch, SynkError, UnsupportedError

# The workers take the functions themselves, so that they need neither pytest nor this file.
cloudpickle.register_pickle_by_value(conformance)
cloudpickle.register_pickle_by_value(disagreement)
cloudpickle.register_pickle_by_value(offers)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

RANK_NBYTES = 1 << 14


@pytest.fixture(
    scope="module",
    params=((1, ()), (2, ()), (3, ()), (4, ()), (3, (1,))),
    ids=lambda case: f"{case[0]}-ranks" + "-blind" * bool(case[1]),
)
def group(request: pytest.FixtureRequest) -> Iterator[ShmGroup]:
    world_size, blind = request.param
    with shm_group(world_size, RANK_NBYTES, blind) as made:
        yield made


@pytest.fixture(scope="module")
def trio() -> Iterator[ShmGroup]:
    """Three ranks for the tests of faults."""
    with shm_group(3, RANK_NBYTES) as made:
        yield made


def half_nbytes(world_size: int, rank_nbytes: int) -> int:
    """Return how much a rank can show at one meeting."""
    return SegmentLayout(required_nbytes(world_size, rank_nbytes), world_size).half_nbytes


class TestConformance(CommunicatorConformance):
    def counts(self, dtype: str, size: int) -> tuple[int, ...]:
        # Up to the edge in one piece, by every rank for itself.
        edge = half_nbytes(size, RANK_NBYTES) // itemsize(dtype)
        return (*super().counts(dtype, size), edge, edge + 1, 3 * edge + 5)


class TestSizes:
    def test_the_default_memory_of_a_rank(self) -> None:
        small, half = _shm_collectives.SMALL_NBYTES // 2 // 8, half_nbytes(2, _layout.RANK_NBYTES) // 8
        with shm_group(2, _layout.RANK_NBYTES) as pair:
            counts = (small, small + 1, half + 1, 3 * half + 5)
            steps = [
                Step(kind, "float64", count, op)
                for count in counts
                for kind, op in (("all_reduce", "avg"), ("reduce_scatter", "sum"), ("all_gather", ""), ("ring", ""))
            ]
            check_results(steps, pair.run(perform, steps))

    def test_too_little_memory_for_a_rank_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expected at least"):
            required_nbytes(64, 1 << 12)

    @pytest.mark.parametrize("world_size", (1, 2, 5, 64, 300))
    def test_what_belongs_to_different_ranks_does_not_overlap(self, world_size: int) -> None:
        nbytes = required_nbytes(world_size)
        layout = SegmentLayout(nbytes, world_size)
        assert layout.half_nbytes % 64 == layout.ring_nbytes % 64 == 0
        assert layout.halves >= ControlLayout(world_size).nbytes
        assert layout.rings >= layout.halves + world_size * 2 * layout.half_nbytes
        assert layout.rings + world_size**2 * layout.ring_nbytes <= nbytes
        assert layout.half_nbytes >= (world_size + 1) * 64
        assert layout.ring_nbytes >= 64


class TestNumbers:
    def test_float16_is_rounded_once(self, trio: ShmGroup) -> None:
        arrays = [np.array([2048, 60000, 60000], np.float16), np.ones(3, np.float16), np.array([1, 10, 1], np.float16)]
        wide = np.add.reduce(np.stack(arrays), axis=0, dtype=np.float32)
        assert wide.astype(np.float16)[0] == 2050 != arrays[0][0] + arrays[1][0] + arrays[2][0]
        for result in trio.run(reduce_array, arrays, "sum"):
            np.testing.assert_array_equal(result, wide.astype(np.float16))

    def test_overflow_of_float16_happens_at_the_end(self, trio: ShmGroup) -> None:
        arrays = [np.array([60000], np.float16)] * 3
        for result in trio.run(reduce_array, arrays, "avg"):
            np.testing.assert_array_equal(result, arrays[0])
        for result in trio.run(reduce_array, arrays, "sum"):
            np.testing.assert_array_equal(result, np.array([np.inf], np.float16))

    def test_floats_are_folded_in_rank_order(self, trio: ShmGroup) -> None:
        for count in (3, MANY):
            arrays = [np.full(count, value, np.float32) for value in (1e8, -1e8, 1.5)]
            for result in trio.run(reduce_array, arrays, "sum"):
                np.testing.assert_array_equal(result, (arrays[0] + arrays[1]) + arrays[2])

    def test_extended_precision(self, trio: ShmGroup) -> None:
        arrays = [np.full(5, 1, np.longdouble) / 3] * 3
        for result in trio.run(reduce_array, arrays, "sum"):
            np.testing.assert_array_equal(result, arrays[0] + arrays[0] + arrays[0])


def gather_long(endpoint: ShmEndpoint, is_short: bool) -> tuple[np.ndarray, bool]:
    """Gather arrays that do not fit the halves; also return whether this rank still reads the memory of others."""
    comm = endpoint.comm
    array = np.arange(MANY) + comm.rank
    if is_short:
        gathered = comm.short_path.collectives.copy("all_gather", array, -1, None)
    else:
        gathered = np.empty((len(comm.ranks), MANY), array.dtype)
        comm.all_gather(as_buffer(array), as_buffer(gathered))
    return gathered, comm._reads_memory


@pytest.mark.parametrize("is_short", (False, True))
@pytest.mark.parametrize("blind", ((), (1,), (0, 1, 2)))
def test_long_arrays_are_read_where_they_lie_unless_a_rank_may_not(blind: tuple[int, ...], is_short: bool) -> None:
    with shm_group(3, RANK_NBYTES, blind) as group:
        for gathered, reads_memory in group.run(gather_long, is_short):
            np.testing.assert_array_equal(gathered, np.arange(MANY) + np.arange(3)[:, None])
            assert reads_memory is not bool(blind)
        (_, one), (_, other) = group.run(gather_long, is_short, ranks=(0, 2))  # each call finds out for itself
        assert one is other is not bool({0, 2} & {*blind})


class TestSubsets:
    def test_only_those_that_take_part_meet(self, trio: ShmGroup) -> None:
        steps = [
            Step(kind, op="avg" if kind in REDUCTIONS else "", count=count, root_position=1)
            for kind in KINDS
            for count in (5, MANY)
        ]
        for ranks in ((0, 2), (1, 2), (1,), (0, 1, 2)):
            check_results(steps, trio.run(perform, steps, ranks=ranks))

    def test_an_idle_rank_is_no_peer(self, trio: ShmGroup) -> None:
        for function in (
            send(1, np.zeros(1)),
            receive(1, 1, "f8"),
            lambda endpoint: broadcast_from(endpoint, 1),
        ):
            assert_all_raise(trio.outcomes(function, ranks=(0, 2)), ValueError)


class TestDisagreement(Disagreement):
    pass


class TestMessages(Messages):
    pass


def exchange_offers(endpoint: ShmEndpoint, seed: int) -> None:
    """Send long messages around a ring of ranks before any of them is asked for, and receive them in another order."""
    comm = endpoint.comm
    position, size = comm.ranks.index(comm.rank), len(comm.ranks)
    after, before = comm.ranks[(position + 1) % size], comm.ranks[position - 1]
    rng = np.random.default_rng(seed)  # the same on all ranks
    shapes = [(int(count),) for count in rng.choice([0, 1, 3, 700, MANY, MANY + 1, 5 * MANY], 9)]
    shapes += [(2, 3, 700), (1, 2, 1, 3, 700)]  # the second has more axes than a line has room for
    order = rng.permutation(len(shapes))
    own = np.random.default_rng([seed, comm.rank])
    with offering(lambda: bool(own.random() < 0.3)):
        for tag, shape in enumerate(shapes):
            array = np.full(shape, tag + 10.0 * comm.rank)
            (comm.isend_array if rng.random() < 0.3 else comm.send_array)(array, after, tag)
            array[...] = -1
        for index, tag in enumerate(order.tolist()):
            like = np.zeros(shapes[tag]) if index % 2 else None
            got = comm.recv_array(like, before, tag)
            assert like is None or got is like
            assert got.shape == shapes[tag]
            assert set(got.ravel().tolist()) <= {tag + 10.0 * before}


@pytest.mark.parametrize("is_hasty", [False, True])
def test_long_messages_are_read_where_they_lie_unless_a_rank_may_not(group: ShmGroup, is_hasty: bool) -> None:
    for seed in range(5):
        each: Callable[[ShmEndpoint], None] = functools.partial(exchange_offers, seed=seed)
        each = hasty(each, recheck_ms=5) if is_hasty else each
        group.run(each)
        if group.world_size > 2:
            group.run(each, ranks=(0, 2))


def num_written(endpoint: ShmEndpoint, receiver: int) -> int:
    """How many bytes this rank has written to a ring."""
    return int(endpoint.comm.parts()[2]._rendezvous.written[endpoint.comm.rank][receiver])


def offer(endpoint: ShmEndpoint) -> Any:
    """Send a long message from rank 0 to rank 2. Return the bytes in the ring, or what was read by the kernel."""
    comm = endpoint.comm
    with offering() as sizes:
        if comm.rank == 0:
            comm.send_array(np.arange(MANY), 2, 0)
            comm.send_array(np.arange(3), 2, 0)
            return num_written(endpoint, 2)
        if comm.rank == 2:
            np.testing.assert_array_equal(comm.recv_array(None, 0, 0), np.arange(MANY))
            comm.recv_array(None, 0, 0)
    return sizes


def test_an_offer_takes_one_line_of_the_ring_and_the_kernel_is_asked_once() -> None:
    with shm_group(3, RANK_NBYTES) as group:
        assert group.run(offer) == [2 * 64, [], [8 * MANY]]
        for victim in (0, 2):  # the process that takes the place of a dead one has other memory
            outcomes = group.outcomes(
                lambda endpoint, k: os.kill(os.getpid(), 9) if endpoint.comm.rank == k else 0, victim
            )
            assert isinstance(outcomes[victim], Died)
            group.recover()
            assert group.run(offer) == [2 * 64, [], [8 * MANY]]


@pytest.mark.parametrize("is_caught", [False, True])
def test_an_offer_that_nobody_takes_is_an_error(trio: ShmGroup, is_caught: bool) -> None:
    def run(endpoint: ShmEndpoint) -> int:
        if endpoint.comm.rank == 0:
            with offering(), contextlib.suppress(*[CollectiveMismatch] * is_caught):
                try:
                    endpoint.comm.send_array(np.arange(MANY), 1, 5)
                finally:
                    assert num_written(endpoint, 1) == 64
            endpoint.comm.complete()
        return 1

    outcomes = trio.outcomes(run)
    if is_caught:  # nobody can have read it
        assert outcomes == [1, 1, 1]
        return
    assert_mismatch(outcomes[:1], f"cannot finish send(int64, {MANY} elements, to rank 1, tag 5) of rank 0")
    trio.recover()
    assert_works(trio)


def hasty(function: Callable[[ShmEndpoint], Any], recheck_ms: int | None) -> Callable[[ShmEndpoint], Any]:
    """Return ``function`` run without any spinning, looking for a deadlock every ``recheck_ms`` (None: never)."""

    def run(endpoint: ShmEndpoint) -> Any:
        usual = _rendezvous.SPIN_YIELDS, _rendezvous.RECHECK_MS
        _rendezvous.SPIN_YIELDS, _rendezvous.RECHECK_MS = 0, recheck_ms
        try:
            return function(endpoint)
        finally:
            _rendezvous.SPIN_YIELDS, _rendezvous.RECHECK_MS = usual

    return run


class TestWakeUps:
    def test_none_is_lost(self, group: ShmGroup) -> None:
        def meet_often(endpoint: ShmEndpoint) -> int:
            for _ in range(1500):
                endpoint.comm.barrier()
            return exchange_in_order(endpoint, 200, 50)[-1]

        assert group.run(hasty(meet_often, recheck_ms=None)) == [199] * group.world_size

    def test_a_slow_rank_is_no_deadlock(self, trio: ShmGroup) -> None:
        steps = [Step(kind, op="sum", count=count) for kind in KINDS for count in (5, MANY)] * 2

        def perform_at_random_speed(endpoint: ShmEndpoint) -> list[Any]:
            generator = np.random.default_rng(endpoint.comm.rank)
            results = []
            for each in steps:
                for _ in range(generator.integers(0, 3000)):
                    os.sched_yield()
                results += perform(endpoint, [each])
            return results

        check_results(steps, trio.run(hasty(perform_at_random_speed, recheck_ms=1)))

    @pytest.mark.parametrize("is_short", (False, True))
    def test_an_interrupt_in_a_wait(self, trio: ShmGroup, is_short: bool) -> None:
        interrupted = trio.pid(0)

        def interrupt(endpoint: ShmEndpoint) -> None:
            comm = endpoint.comm
            barrier = comm.short_path.collectives.barrier if is_short else comm.barrier
            if comm.rank == 1:
                while not comm._rendezvous._sleeps[0] & 1:
                    os.sched_yield()
                os.kill(interrupted, signal.SIGINT)
            barrier()  # rank 0 has come to this one
            barrier()

        outcomes = trio.outcomes(interrupt)
        assert isinstance(outcomes.pop(0), KeyboardInterrupt)
        assert_mismatch(outcomes, "rank 0 left")
        assert_works(trio)


def die_at(endpoint: ShmEndpoint, moment: str, nth: int) -> None:
    """Arm this rank to be killed in its ``nth`` meeting or wake-up."""
    rendezvous, calls = endpoint.comm._rendezvous, [0]

    def failing(function: Callable[..., Any], is_after: bool) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == nth and not is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args)
            if result is False:  # it has not met the others
                calls[0] -= 1
            elif calls[0] == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    name = {"published": "arrive", "arrived": "arrive", "met": "has_met", "woke": "wake"}[moment]
    setattr(rendezvous, name, failing(getattr(rendezvous, name), is_after=moment != "published"))


# Operation; where the victim is killed; in which meeting or wake-up; who is the victim.
DEATHS = (
    ("all_reduce", "published", 1, 1),
    ("all_reduce", "arrived", 1, 2),
    ("all_reduce", "met", 1, 0),
    ("all_reduce", "met", 3, 1),
    ("reduce", "published", 2, 0),
    ("reduce", "met", 2, 0),
    ("reduce_scatter", "published", 2, 2),
    ("reduce_scatter", "met", 2, 0),
    ("broadcast", "published", 2, 0),
    ("broadcast", "met", 2, 0),
    ("broadcast", "arrived", 2, 1),
    ("all_gather", "met", 1, 0),  # the others read, or try to read, the memory of the dead
    ("all_gather", "arrived", 2, 1),
    ("all_gather", "met", 2, 0),
    ("barrier", "published", 1, 2),
    ("barrier", "arrived", 1, 0),
    ("ring", "woke", 1, 1),
    ("ring", "woke", 4, 0),
)


class TestDeath:
    def test_survivors_leave_and_the_rank_comes_back(self) -> None:
        def run(endpoint: ShmEndpoint, kind: str, moment: str, nth: int, victim: int) -> None:
            if endpoint.comm.rank == victim:
                die_at(endpoint, moment, nth)
            perform(endpoint, [Step(kind, op="sum", count=MANY)])
            endpoint.comm.barrier()

        with shm_group(3, RANK_NBYTES) as trio:
            for case in DEATHS:
                outcomes = trio.outcomes(run, *case)
                assert isinstance(outcomes.pop(case[-1]), Died), case
                assert all(isinstance(outcome, Aborted) for outcome in outcomes), (case, outcomes)
                trio.recover()
                assert_works(trio)

    @pytest.mark.parametrize(("moment", "victim"), (("published", 1), ("arrived", 2), ("met", 0)))
    def test_in_a_short_collective(self, moment: str, victim: int) -> None:
        def run(endpoint: ShmEndpoint) -> None:
            if endpoint.comm.rank == victim:
                die_at(endpoint, moment, 2)
            short = endpoint.comm.short_path.collectives
            for _ in range(2):
                short.reduce("all_reduce", np.ones(3), "sum", -1, None, None)
            short.barrier()

        with shm_group(3, RANK_NBYTES) as trio:
            outcomes = trio.outcomes(run)
            assert isinstance(outcomes.pop(victim), Died)
            assert all(isinstance(outcome, Aborted) for outcome in outcomes), outcomes
            trio.recover()
            assert_works(trio)

    def test_two_die(self) -> None:
        def run(endpoint: ShmEndpoint) -> None:
            if endpoint.comm.rank != 1:
                os.kill(os.getpid(), signal.SIGKILL)
            endpoint.comm.barrier()

        with shm_group(3, RANK_NBYTES) as trio:
            outcomes = trio.outcomes(run)
            assert isinstance(outcomes.pop(1), Aborted)
            assert all(isinstance(outcome, Died) for outcome in outcomes)
            trio.recover()
            assert_works(trio)


@pytest.fixture
def pair() -> Iterator[tuple[Segment, list[int], list[ShmCommunicator]]]:
    """Two ranks in this process, for what needs no processes; they have begun a call."""
    segment = Segment.create(required_nbytes(2, RANK_NBYTES))
    eventfds = [os.eventfd(0), os.eventfd(0)]
    comms = [ShmCommunicator(segment, rank, 2, eventfds) for rank in range(2)]
    for comm in comms:
        comm.begin((0, 1), 1)
    yield segment, eventfds, comms
    comms.clear()  # pytest holds this list until the census of the test, which looks for mapped segments
    for eventfd in eventfds:
        os.close(eventfd)
    segment.close()


def raised_in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Start ``function`` in a thread; return the thread and where its exception will be."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except SynkError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


class TestOneProcess:
    def test_abort_breaks_a_wait(self, pair: Any) -> None:
        segment, eventfds, comms = pair
        thread, errors = raised_in_thread(comms[0].barrier)
        while not comms[1]._rendezvous._sleeps[0] & 1:
            os.sched_yield()
        set_abort(segment, eventfds)
        thread.join()
        assert_all_raise(errors, Aborted)
        with pytest.raises(Aborted):
            comms[0].barrier()

    def test_a_rank_that_takes_a_message_in_is_awake(self, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        comms = pair[2]
        asking = comms[0]._rendezvous
        comms[0].send_array(np.zeros(2), 1, 0)
        asking.post(CommRequest("recv", dtype="float64", num_elements=2, peer=1))
        asking._places[0] = 2  # that of messages
        asking._sleeps[0] += 1
        # Rank 0 sleeps over an answer, and asks whether it will come just when rank 1 has taken the message in.
        monkeypatch.setattr(comms[1]._rendezvous, "wake", lambda rank: asking._check_deadlock())
        monkeypatch.setattr(_rendezvous, "SPIN_YIELDS", 0)
        comms[1].recv_array(np.zeros(2), 0, 0)

    def test_reset_makes_it_as_new(self, pair: Any) -> None:
        segment, eventfds, comms = pair
        set_abort(segment, eventfds)
        for comm in comms:
            comm.end()
        reset(segment, 2, eventfds)
        for comm in comms:
            comm.begin((0, 1), 2)
        thread, errors = raised_in_thread(comms[0].barrier)
        comms[1].barrier()
        thread.join()
        assert not errors

    @pytest.mark.parametrize("is_collective", (True, False))
    def test_a_rank_that_never_begins(self, pair: Any, is_collective: bool) -> None:
        comms = pair[2]
        comms[1].send_array(np.zeros(2), 0, 0)  # nobody receives it, and it is of no concern to the next call
        for comm in comms:
            comm.end()
        comms[0].begin((0, 1), 2)
        thread, errors = raised_in_thread(
            comms[0].barrier if is_collective else lambda: comms[0].recv_array(None, 0, 0)
        )
        left, _ = comms[1].skip_words()
        left[1] = 2
        comms[1].wake_sleepers()
        thread.join()
        assert_mismatch(errors, "rank 1 left" if is_collective else "every rank waits for another one")

    def test_outside_a_call_there_are_no_collectives(self, pair: Any) -> None:
        comm = pair[2][0]
        comm.end()
        comm.end()
        buffer = as_buffer(np.zeros(2))
        for run in (
            comm.barrier,
            lambda: comm.all_reduce(buffer, buffer, "sum"),
            lambda: comm.all_gather(buffer, buffer),
            lambda: comm.reduce_scatter(buffer, buffer, "sum"),
            lambda: comm.send_array(np.zeros(2), 1, 0),
            lambda: comm.broadcast(buffer, 0),
        ):
            with pytest.raises(SynkError, match="no call is running"):
                run()


class TestBuffers:
    def test_an_array_and_its_buffer_are_the_same_memory(self) -> None:
        array = np.arange(6, dtype=np.int16).reshape(2, 3)
        buffer = as_buffer(array)
        assert buffer == Buffer(array.ctypes.data, 6, "int16")
        as_array(buffer)[4] = 40
        assert array[1, 1] == 40

    def test_no_elements(self) -> None:
        assert as_array(Buffer(0, 0, "float32")).shape == (0,)

    def test_gaps_are_refused(self) -> None:
        with pytest.raises(ValueError, match="C-contiguous"):
            as_buffer(np.zeros((4, 4))[:, 1])

    @pytest.mark.parametrize("dtype", ("object", "datetime64[s]", "S3", "nonsense"))
    def test_an_unknown_dtype_is_refused(self, dtype: str) -> None:
        with pytest.raises(UnsupportedError, match="expected one of"):
            named_dtype(dtype)

    def test_bfloat16_is_as_torch_has_it(self) -> None:
        import torch  # here, because the ranks of the other tests import this module

        array = np.array([1.0, -2.5], np.float32)
        tensor = torch.tensor(array).bfloat16()
        assert as_array(as_buffer(array_of(tensor))).tobytes() == tensor.view(torch.int16).numpy().tobytes()
